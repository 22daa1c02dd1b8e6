//! The standard policy that asks a rule before it executes a command. The rule is another
//! component, in any language; `statehouse policy build` composes the two.

#![deny(unsafe_code)]

use statehouse_guest::{Command, Condition, Follow, Refusal, Set, Standard};
use statehouse_policy::{
    Change, Dialect, Host, Info, Notification, Outcome, Policy, Request, Span, resp,
};

mod bindings;

use bindings::statehouse::policy::admission;

/// The standard policy that asks the rule.
pub struct Ruled(Standard);

impl Policy for Ruled {
    fn describe() -> Info {
        let admission::Identity { name, version } = admission::describe();
        Info {
            name,
            version,
            ..Standard::describe()
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
            && let Err(fault) = admission::admit(&asked(request, &command))
        {
            return Refusal::from(fault).outcome(request, Some(command.index()));
        }
        self.0.handle(host, request)
    }

    fn notify(&self, change: &Change, dialect: Dialect) -> Notification {
        self.0.notify(change, dialect)
    }
}

/// The command as the rule sees it.
fn asked(request: &Request, command: &Command) -> admission::Command {
    let bytes = |span| request.payload[resp::range(span)].to_vec();
    let (key, value) = match *command {
        Command::Set(Set { key, value, .. }) | Command::Vdel { key, value } => (key, Some(value)),
        Command::Get { key }
        | Command::Del { key }
        | Command::KeyNotify { key, .. }
        | Command::Follow(Follow { key, .. })
        | Command::Meta { key } => (key, None),
        Command::Scan { pattern, .. } => (pattern, None),
    };
    let (condition, expiry) = match command {
        Command::Set(set) => (condition(request, set), set.expiry_ms),
        _ => (admission::Condition::Always, None),
    };
    admission::Command {
        name: command.name().to_owned(),
        key: bytes(key),
        value: value.map(bytes).unwrap_or_default(),
        changes: command.written().is_some(),
        condition,
        expiry,
        timestamp: request.timestamp.clone(),
        fencing_token: request.fencing_token.clone(),
        client: request.client.clone(),
        now: request.now,
    }
}

/// The condition of a SET as the rule sees it.
fn condition(request: &Request, set: &Set) -> admission::Condition {
    let bytes = |span| &request.payload[resp::range(span)];
    match set.condition {
        Condition::Always => admission::Condition::Always,
        Condition::Absent => admission::Condition::Absent,
        Condition::AbsentOrEqual(expected) if bytes(expected) == bytes(set.value) => {
            admission::Condition::AbsentOrEqual
        }
        // Each client that knows the present value can change it so.
        Condition::AbsentOrEqual(_) => admission::Condition::Always,
        Condition::Version(_) => admission::Condition::Version,
    }
}

statehouse_policy::export!(Ruled);
