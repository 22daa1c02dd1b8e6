//! Keys under `once/` are set once: serial numbers, calibration, what was agreed. Whoever sets one first has
//! decided; nobody changes or deletes it, and it does not expire. Everything else is the standard policy's.
//!
//! What enters: any request. What leaves: the standard answer, or a refusal that changes nothing.

#![deny(unsafe_code)]

use statehouse_guest::{Command, Condition, Refusal, Set, Standard};
use statehouse_policy::{
    Access, Bytes, Change, Dialect, Host, Info, Notification, Outcome, Policy, Request, Span, resp,
};

/// What the keys begin with.
const PREFIX: &[u8] = b"once/";

/// The policy.
#[derive(Debug)]
pub struct WriteOnce(Standard);

impl Policy for WriteOnce {
    fn describe() -> Info {
        Info {
            name: "write-once".to_owned(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            commands: Standard::describe().commands,
        }
    }

    fn configure(options: &[(String, String)]) -> Result<Self, String> {
        Standard::configure(options).map(Self)
    }

    fn route(&self, payload: &[u8]) -> Option<Span> {
        self.0.route(payload)
    }

    fn handle(&self, host: &mut impl Host, request: &Request) -> Outcome {
        if let Some(command) = self.0.command(request)
            && let Err(refusal) = admit(host, request, &command)
        {
            return refusal.outcome(request, Some(command.index()));
        }
        self.0.handle(host, request)
    }

    fn notify(&self, change: &Change, dialect: Dialect) -> Notification {
        self.0.notify(change, dialect)
    }
}

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

fn refusal(text: &str) -> Refusal {
    Refusal::Other(text.to_owned())
}

statehouse_policy::export!(WriteOnce);

#[cfg(test)]
mod tests {
    use statehouse_policy::Policy;
    use statehouse_policy::testing::{Tabled, cases};

    #[test]
    fn cases() {
        let policy = super::WriteOnce::configure(&[]).expect("it takes no options");
        let requests = cases::run(include_str!("../cases.txt"), &mut Tabled::new(&policy));
        assert_eq!(requests, Ok(13));
    }
}
