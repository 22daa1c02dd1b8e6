//! The standard policy with an additional rule: keys under `setpoint/` hold a number from 5 to 30.
//! The rule changes nothing else.
//!
//! A policy must be deterministic: its inputs are the request and the answers of the host. It must
//! not keep state between two requests. The store re-executes redelivered requests on a fresh
//! instance, and the response must have the same bytes. `statehouse policy test` finds violations.

use statehouse_guest::{Command, Refusal, Rule, Ruled, Set};
use statehouse_policy::{Host, Request, resp};

/// The prefix of the keys.
const PREFIX: &[u8] = b"setpoint/";

const LOWEST: f64 = 5.0;
const HIGHEST: f64 = 30.0;

/// The rule.
pub struct Setpoint;

impl Rule for Setpoint {
    /// The name in the log and the metrics of the host.
    const NAME: &'static str = env!("CARGO_PKG_NAME");
    const VERSION: &'static str = env!("CARGO_PKG_VERSION");

    /// Decides whether the standard policy executes this command. `host` gives access to the table,
    /// which this rule does not need.
    fn admit(_host: &mut impl Host, request: &Request, command: &Command) -> Result<(), Refusal> {
        let Command::Set(Set { key, value, .. }) = *command else {
            return Ok(());
        };
        let text = |span| &request.payload[resp::range(span)];
        if text(key).starts_with(PREFIX) && !is_set_point(text(value)) {
            return Err(Refusal::Other("a set point is a number from 5 to 30".to_owned()));
        }
        Ok(())
    }
}

fn is_set_point(value: &[u8]) -> bool {
    let number = std::str::from_utf8(value).ok().and_then(|it| it.parse::<f64>().ok());
    number.is_some_and(|it| (LOWEST..=HIGHEST).contains(&it))
}

// A policy that adds commands or changes replies implements `Policy` itself and holds a `Standard`.
statehouse_policy::export!(Ruled<Setpoint>);

#[cfg(test)]
mod tests {
    use statehouse_policy::testing::Table;
    use statehouse_policy::{Dialect, Policy};

    use super::*;

    /// A native test takes microseconds, which suits many cases. tests/setpoint.txt runs on the
    /// real store.
    #[test]
    fn only_numbers_within_the_bounds_are_set() {
        const NOW_MS: u64 = 1_700_000_000_000;
        let policy = Ruled::<Setpoint>::configure(&[]).expect("there are no options");
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
