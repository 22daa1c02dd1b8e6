//! Keys under `once/` are set once: serial numbers, calibration values, agreed parameters. The
//! first SET decides. After it no client can change or delete the key, or let it expire. Everything
//! else is the standard policy.
//!
//! A refused request must change nothing.

#![deny(unsafe_code)]

use statehouse_guest::{Command, Condition, Refusal, Rule, Ruled, Set};
use statehouse_policy::{Access, Bytes, Host, Request, resp};

/// The prefix of keys that are set once.
const PREFIX: &[u8] = b"once/";

/// The rule.
pub struct WriteOnce;

impl Rule for WriteOnce {
    const NAME: &'static str = "write-once";
    const VERSION: &'static str = env!("CARGO_PKG_VERSION");

    /// Refuses a change of a key that was written once.
    fn admit(host: &mut impl Host, request: &Request, command: &Command) -> Result<(), Refusal> {
        let Some(key) = command.written() else {
            return Ok(());
        };
        if !request.payload[resp::range(key)].starts_with(PREFIX) {
            return Ok(());
        }
        if let Command::Set(Set {
            expiry_ms: Some(_), ..
        }) = command
        {
            return Err(refusal("a key that is written once does not expire"));
        }
        // SET NX never changes an existing key, so the standard policy answers it. SET NEX with the
        // same value would write the value again with a new version, which is a change.
        let only_if_absent = matches!(
            command,
            Command::Set(Set {
                condition: Condition::Absent,
                ..
            })
        );
        let exists = host.head(&Bytes::Span(key), Access::Write)?.is_some();
        if exists && !only_if_absent {
            return Err(refusal("the key is written once and is there already"));
        }
        Ok(())
    }
}

fn refusal(text: &str) -> Refusal {
    Refusal::Other(text.to_owned())
}

statehouse_policy::export!(Ruled<WriteOnce>);

#[cfg(test)]
mod tests {
    use statehouse_policy::Policy;
    use statehouse_policy::testing::{Tabled, cases};

    #[test]
    fn policy_passes_its_cases() {
        let policy = super::Ruled::<super::WriteOnce>::configure(&[]).expect("it takes no options");
        let requests = cases::run(include_str!("../cases.txt"), &mut Tabled::new(&policy));
        assert_eq!(requests, Ok(13));
    }
}
