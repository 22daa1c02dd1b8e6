//! Keys under `once/` are set once: serial numbers, calibration, what was agreed. Whoever sets one first has
//! decided; nobody changes or deletes it, and it does not expire. Everything else is the standard policy's.
//!
//! What enters: any request. What leaves: the standard answer, or a refusal that changes nothing.

#![deny(unsafe_code)]

use statehouse_guest::{Command, Condition, Refusal, Rule, Ruled, Set};
use statehouse_policy::{Access, Bytes, Host, Request, resp};

/// What the keys begin with.
const PREFIX: &[u8] = b"once/";

/// The rule.
pub struct WriteOnce;

impl Rule for WriteOnce {
    const NAME: &'static str = "write-once";
    const VERSION: &'static str = env!("CARGO_PKG_VERSION");

    /// Whether a command leaves alone what was written once.
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
        // A SET with a condition meets the key that is there by itself: it is answered as not done. NEX with the
        // same value would write that value again, with a new version: that is a change too.
        let waits_its_turn = matches!(
            command,
            Command::Set(Set {
                condition: Condition::Absent,
                ..
            })
        );
        let is_there = host.head(&Bytes::Span(key), Access::Write)?.is_some();
        if is_there && !waits_its_turn {
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
    fn cases() {
        let policy = super::Ruled::<super::WriteOnce>::configure(&[]).expect("it takes no options");
        let requests = cases::run(include_str!("../cases.txt"), &mut Tabled::new(&policy));
        assert_eq!(requests, Ok(13));
    }
}
