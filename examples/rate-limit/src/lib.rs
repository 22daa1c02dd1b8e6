//! A client may change fifty keys per second, and a hundred at once after a pause. Further changes
//! are refused, and other clients are not affected. Reading is free. Everything else is the
//! standard policy.
//!
//! Each client has a token bucket, stored as one reading of the clock: the time at which the bucket
//! is full again. This time is the expiry of a hidden key per client. When the bucket is full, the
//! key expires, so disconnected clients leave nothing behind. The bucket must be in the table, not
//! in memory, so that a restart, a redelivered request, a new instance and a re-execution read the
//! same bucket.
//!
//! A refused request must change nothing.

#![deny(unsafe_code)]

use statehouse_guest::{Command, Refusal, Rule, Ruled};
use statehouse_policy::{Access, Bytes, Host, Request};

/// The time in which the bucket gains one change.
const MS_PER_CHANGE: u64 = 20;

/// The capacity of the bucket.
const BURST_CHANGES: u64 = 100;

/// The rule.
pub struct RateLimit;

impl Rule for RateLimit {
    const NAME: &'static str = "rate-limit";
    const VERSION: &'static str = env!("CARGO_PKG_VERSION");

    fn admit(host: &mut impl Host, request: &Request, command: &Command) -> Result<(), Refusal> {
        match (command.written(), &request.client) {
            (Some(_), Some(client)) => match take(host, client, request.now) {
                // Without room for the bucket, removals must still be possible.
                Err(Refusal::Quota)
                    if matches!(command, Command::Del { .. } | Command::Vdel { .. }) =>
                {
                    Ok(())
                }
                taken => taken,
            },
            _ => Ok(()),
        }
    }
}

/// Takes one change from the client's bucket. A refused change takes none, so that a client that
/// keeps sending is served at its rate.
fn take(host: &mut impl Host, client: &str, now_ms: u64) -> Result<(), Refusal> {
    let bucket = Bytes::Owned([b"rate/", client.as_bytes()].concat());
    let entry = host.head(&bucket, Access::Hidden)?;
    let full_ms = entry.and_then(|entry| entry.expires).unwrap_or(now_ms);
    let full_ms = full_ms.saturating_add(MS_PER_CHANGE);
    if full_ms.saturating_sub(now_ms) > BURST_CHANGES * MS_PER_CHANGE {
        host.count("rate_limited", 1);
        return Err(Refusal::Other(
            "too many changes by this client: at most 50 per second".to_owned(),
        ));
    }
    host.put(
        &bucket,
        &Bytes::Owned(Vec::new()),
        None,
        None,
        Some(full_ms),
    )?;
    Ok(())
}

statehouse_policy::export!(Ruled<RateLimit>);

#[cfg(test)]
mod tests {
    use statehouse_policy::testing::{Table, cases};
    use statehouse_policy::{Policy, Request};

    use super::{BURST_CHANGES, MS_PER_CHANGE, RateLimit, Ruled};
    use cases::NOW_MS;

    fn set(table: &mut Table, policy: &impl Policy, client: &str, now_ms: u64) -> Vec<u8> {
        let request = Request {
            timestamp: Some(format!("{now_ms}:0:{client}")),
            client: Some(client.to_owned()),
            now: now_ms,
            ..cases::request(&[b"SET", b"key", b"value"])
        };
        table.advance(policy, now_ms);
        table.call(policy, &request).bytes
    }

    /// Regression: on a full disk, and at a quota, no client could remove a key.
    #[test]
    fn removals_pass_without_room_for_the_bucket() {
        let policy = Ruled::<RateLimit>::configure(&[]).expect("it takes no options");
        let mut table = Table::new(NOW_MS);
        let ask = |table: &mut Table, words: &[&[u8]], client: &str| {
            let request = Request {
                timestamp: Some(format!("{NOW_MS}:0:{client}")),
                client: Some(client.to_owned()),
                ..cases::request(words)
            };
            table.call(&policy, &request).bytes
        };
        assert_eq!(
            ask(&mut table, &[b"SET", b"key", b"value"], "a"),
            b"+OK\r\n"
        );
        // The key and the bucket of its client.
        table.limit_keys(2);
        let full = b"-ERR the quota has been exceeded\r\n";
        assert_eq!(ask(&mut table, &[b"SET", b"key", b"other"], "b"), full);
        assert_eq!(ask(&mut table, &[b"DEL", b"key"], "b"), b":1\r\n");
    }

    #[test]
    fn burst_is_allowed_then_the_rate_for_each_client() {
        let policy = Ruled::<RateLimit>::configure(&[]).expect("it takes no options");
        let mut table = Table::new(NOW_MS);
        for _ in 0..BURST_CHANGES {
            assert_eq!(set(&mut table, &policy, "loop", NOW_MS), b"+OK\r\n");
        }
        let refused = b"-ERR too many changes by this client: at most 50 per second\r\n";
        for ahead_ms in [0, 0, MS_PER_CHANGE - 1] {
            assert_eq!(set(&mut table, &policy, "loop", NOW_MS + ahead_ms), refused);
        }
        assert_eq!(set(&mut table, &policy, "other", NOW_MS + 19), b"+OK\r\n");
        let later_ms = NOW_MS + MS_PER_CHANGE;
        assert_eq!(set(&mut table, &policy, "loop", later_ms), b"+OK\r\n");
        assert_eq!(set(&mut table, &policy, "loop", later_ms), refused);
        // A full bucket expires. It holds no more than its capacity.
        let rested_ms = later_ms + BURST_CHANGES * MS_PER_CHANGE;
        for _ in 0..BURST_CHANGES {
            assert_eq!(set(&mut table, &policy, "loop", rested_ms), b"+OK\r\n");
        }
        assert_eq!(set(&mut table, &policy, "loop", rested_ms), refused);
    }
}
