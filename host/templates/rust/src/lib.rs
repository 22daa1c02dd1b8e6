//! The standard policy and one rule more: a key under `setpoint/` holds a number from 5 to 30, whoever sets it.
//! Everything else is answered as usual.
//!
//! A policy is a function of what it is given: the request, and what it asks the host for. It keeps nothing between
//! two requests, since a request that comes again runs on a fresh instance and is owed the same bytes.
//! `statehouse policy test` finds what does not hold to that.

use statehouse_guest::Standard;
use statehouse_policy::{
    Body, Change, Dialect, Frame, Host, Info, Notification, Outcome, Policy, Repeat, Request, Span,
    resp,
};

/// What the keys begin with.
const PREFIX: &[u8] = b"setpoint/";

const LOWEST: f64 = 5.0;
const HIGHEST: f64 = 30.0;

/// The policy: nothing but the standard one lies in it, for there is nothing to keep.
#[derive(Debug)]
pub struct Setpoint(Standard);

impl Policy for Setpoint {
    /// For the log and the metrics of the host.
    fn describe() -> Info {
        Info {
            name: env!("CARGO_PKG_NAME").to_owned(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            commands: Standard::describe().commands,
        }
    }

    /// Once per instance; an error refuses the policy.
    fn configure(options: &[(String, String)]) -> Result<Self, String> {
        Standard::configure(options).map(Self)
    }

    /// The key a request is about, where requests are routed by key.
    fn route(&self, payload: &[u8]) -> Option<Span> {
        self.0.route(payload)
    }

    /// One request. What is staged through `host` becomes real when this returns, all of it or nothing.
    fn handle(&self, host: &mut impl Host, request: &Request) -> Outcome {
        match refused(&request.payload) {
            true => error("a set point is a number from 5 to 30"),
            false => self.0.handle(host, request),
        }
    }

    /// What the watchers of a key are told.
    fn notify(&self, change: &Change, dialect: Dialect) -> Notification {
        self.0.notify(change, dialect)
    }
}

/// Whether a request sets a set point to what is none.
fn refused(payload: &[u8]) -> bool {
    // What is no array of strings is for the standard policy to refuse, in its own words.
    let Ok(words) = resp::parse(payload) else {
        return false;
    };
    let sets = words.count() >= 3 && words.get(0).eq_ignore_ascii_case(b"SET");
    sets && words.get(1).starts_with(PREFIX) && !is_set_point(words.get(2))
}

fn is_set_point(value: &[u8]) -> bool {
    let number = std::str::from_utf8(value).ok().and_then(|it| it.parse::<f64>().ok());
    number.is_some_and(|it| (LOWEST..=HIGHEST).contains(&it))
}

/// An answer that changes nothing.
fn error(text: &str) -> Outcome {
    let mut head = Vec::new();
    resp::push_error(&mut head, text);
    Outcome {
        reply: Frame {
            head,
            body: Body::None,
        },
        version: None,
        // It depends on nothing but the request, so a redelivery may simply run again.
        repeat: Repeat::Free,
        command: None,
    }
}

statehouse_policy::export!(Setpoint);

#[cfg(test)]
mod tests {
    use statehouse_policy::testing::Table;

    use super::*;

    /// Natively, in microseconds: for what has many cases. tests/setpoint.txt runs on the real store.
    #[test]
    fn only_numbers_within_the_bounds_are_set() {
        const NOW_MS: u64 = 1_700_000_000_000;
        let policy = Setpoint::configure(&[]).expect("there are no options");
        let mut table = Table::new(NOW_MS);
        let mut set = |key: &[u8], value: &[u8]| {
            let request = Request {
                payload: resp::request(&[b"SET", key, value]),
                dialect: Dialect::Sdk,
                timestamp: Some(format!("{NOW_MS}:0:test")),
                fencing_token: None,
                client: Some("test".to_owned()),
                now: NOW_MS,
            };
            table.call(&policy, &request).bytes
        };
        for good in ["5", "21.5", "30"] {
            assert_eq!(set(b"setpoint/kitchen", good.as_bytes()), b"+OK\r\n", "{good}");
        }
        for bad in ["", "4.9", "30.1", "hot", "NaN", "inf"] {
            let answer = set(b"setpoint/kitchen", bad.as_bytes());
            assert!(answer.starts_with(b"-ERR a set point"), "{bad}");
        }
        assert_eq!(set(b"other", b"hot"), b"+OK\r\n");
    }
}
