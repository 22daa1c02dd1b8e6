//! Only the current holder of the lock `LOCK` can write a key `bound/LOCK/…`: the fencing token
//! must be the current version of the key `LOCK`. Everything else is the standard policy.
//!
//! The protocol compares a token with the highest one that a key has seen. So any client can write
//! a key that no holder has written yet. A holder with an expired lock can write until the next
//! holder has written. And any client can invent a token from the future. This policy compares the
//! token with the lock itself, in the same step as the write, so nothing can happen between the
//! two.
//!
//! A renewal of the lock sets a new version, so a holder that renews must use the version of its
//! last renewal as token. A refused request must change nothing.

#![deny(unsafe_code)]

use statehouse_guest::{Command, Refusal, Rule, Ruled, fence};
use statehouse_policy::{Access, Bytes, Host, Request, Span, resp};

/// The prefix of protected keys. The name of the lock follows, up to the next slash.
const PREFIX: &[u8] = b"bound/";

/// The rule.
pub struct BoundFence;

impl Rule for BoundFence {
    const NAME: &'static str = "bound-fence";
    const VERSION: &'static str = env!("CARGO_PKG_VERSION");

    /// Accepts a change of a protected key only from the holder of its lock.
    fn admit(host: &mut impl Host, request: &Request, command: &Command) -> Result<(), Refusal> {
        let Some(key) = command.written() else {
            return Ok(());
        };
        let Some(lock) = lock_of(&request.payload, key) else {
            return Ok(());
        };
        // Checked first, so that a client without the right to write learns nothing about the lock.
        host.head(&Bytes::Span(key), Access::Write)?;
        let token = fence::token(request)?.ok_or(Refusal::FenceMissing)?;
        let lock = host.head(&Bytes::Span(lock), Access::Read)?;
        let Some(lock) = lock else {
            return Err(Refusal::Other(
                "nobody holds the lock of this key".to_owned(),
            ));
        };
        // The node of a version is always the store's own, and two versions of a store never have
        // the same time and counter.
        let given = token.stamp();
        if (given.wall, given.counter) != (lock.version.wall, lock.version.counter) {
            return Err(Refusal::Other(
                "the fencing token is not the current version of the lock of this key".to_owned(),
            ));
        }
        Ok(())
    }
}

/// The span of the lock's name, if the key is protected.
fn lock_of(payload: &[u8], key: Span) -> Option<Span> {
    let rest = payload[resp::range(key)].strip_prefix(PREFIX)?;
    let len = rest.iter().position(|&byte| byte == b'/')?;
    Some(Span {
        at: key.at + PREFIX.len() as u32,
        // Cannot overflow, because the length of the key is a `u32`.
        len: len as u32,
    })
    .filter(|lock| lock.len > 0)
}

statehouse_policy::export!(Ruled<BoundFence>);

#[cfg(test)]
mod tests {
    use statehouse_policy::Policy;
    use statehouse_policy::testing::{Tabled, cases};

    #[test]
    fn policy_passes_its_cases() {
        let policy =
            super::Ruled::<super::BoundFence>::configure(&[]).expect("it takes no options");
        let requests = cases::run(include_str!("../cases.txt"), &mut Tabled::new(&policy));
        assert_eq!(requests, Ok(20));
    }
}
