//! `INCR key`, `DECR key` and `INCRBY key n`: counters that many clients share without a lock. All
//! other commands are the standard policy's.
//!
//! The answer is the new number. A missing key counts as 0, and the value of an existing key must
//! be a 64-bit integer. A counter keeps its expiry. As with SET, a fenced counter needs its token.
//!
//! A redelivered request must count only once. The store returns the number of its first answer.

#![deny(unsafe_code)]

use statehouse_guest::{Refusal, Standard, fence};
use statehouse_policy::{
    Access, Body, Bytes, Change, Dialect, Frame, Host, Info, Notification, Outcome, Policy, Repeat,
    Request, Span, Stamp, resp,
};

/// The added commands, in the order of `describe`.
const ADDED: [&str; 3] = ["INCR", "DECR", "INCRBY"];

/// The longest integer: a sign and the nineteen digits of 64 bits.
const INTEGER_BYTES_MAX: u32 = 20;

/// The policy.
#[derive(Debug)]
pub struct Incr {
    standard: Standard,
    /// The number of standard commands. The added commands follow them.
    standard_commands: u16,
}

/// An added command: increments `key` by `by`.
struct Step {
    key: Span,
    by: i64,
}

impl Policy for Incr {
    fn describe() -> Info {
        let mut commands = Standard::describe().commands;
        commands.extend(ADDED.map(str::to_owned));
        Info {
            name: "incr".to_owned(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            commands,
        }
    }

    fn configure(options: &[(String, String)]) -> Result<Self, String> {
        let commands = Standard::describe().commands.len();
        Ok(Self {
            standard: Standard::configure(options)?,
            standard_commands: u16::try_from(commands).map_err(|_| "too many commands")?,
        })
    }

    fn route(&self, payload: &[u8]) -> Option<Span> {
        match read(payload) {
            Some((_, step)) => Some(step.ok()?.key),
            None => self.standard.route(payload),
        }
    }

    fn handle(&self, host: &mut impl Host, request: &Request) -> Outcome {
        let Some((verb, step)) = read(&request.payload) else {
            return self.standard.handle(host, request);
        };
        let command = Some(self.standard_commands + verb);
        match step.and_then(|step| count(host, request, &step)) {
            Ok((number, version)) => Outcome {
                reply: Frame {
                    head: format!(":{number}\r\n").into_bytes(),
                    body: Body::None,
                },
                version: Some(version),
                repeat: Repeat::Same,
                command,
            },
            Err(refusal) => refusal.outcome(request, command),
        }
    }

    fn notify(&self, change: &Change, dialect: Dialect) -> Notification {
        self.standard.notify(change, dialect)
    }
}

/// Parses an added command: its index in [`ADDED`], and its step. Returns `None` for other
/// commands.
fn read(payload: &[u8]) -> Option<(u16, Result<Step, Refusal>)> {
    let words = resp::parse(payload).ok()?;
    let verb = (0..).zip(ADDED);
    let (index, verb) = verb
        .into_iter()
        .find(|(_, name)| words.get(0).eq_ignore_ascii_case(name.as_bytes()))?;
    let by = match (verb, words.count()) {
        ("INCR", 2) => Ok(1),
        ("DECR", 2) => Ok(-1),
        ("INCRBY", 3) => integer(words.get(2)),
        _ => Err(Refusal::WrongCount),
    };
    let step = by.and_then(|by| match words.span(1) {
        Some(key) if key.len > 0 => Ok(Step { key, by }),
        _ => Err(Refusal::EmptyKey),
    });
    Some((index, step))
}

/// Executes a step. The checks and their order are those of SET.
fn count(host: &mut impl Host, request: &Request, step: &Step) -> Result<(i64, Stamp), Refusal> {
    let key = Bytes::Span(step.key);
    host.head(&key, Access::Write)?;
    // The answer reveals the value, so the client needs the right to read it.
    let entry = host.head(&key, Access::Read)?;
    let observed = fence::timestamp(request)?;
    let token = fence::token(request)?;
    let mut expires = None;
    let mut before = 0;
    if let Some(entry) = entry {
        fence::admit(entry.fence.as_ref(), token.as_ref())?;
        expires = entry.expires;
        let value = match entry.len {
            0..=INTEGER_BYTES_MAX => host.load(&key, 0, entry.len)?.unwrap_or_default(),
            _ => Vec::new(),
        };
        before = integer(&value)?;
    }
    let after = before.checked_add(step.by).ok_or_else(not_an_integer)?;
    let value = Bytes::Owned(after.to_string().into_bytes());
    let fence = token.map(|token| token.to_hlc());
    let version = host.put(&key, &value, Some(observed), fence.as_ref(), expires)?;
    Ok((after, version))
}

fn integer(text: &[u8]) -> Result<i64, Refusal> {
    // `parse` alone would accept `+5`.
    let text = str::from_utf8(text)
        .ok()
        .filter(|text| !text.starts_with('+'));
    text.and_then(|text| text.parse().ok())
        .ok_or_else(not_an_integer)
}

fn not_an_integer() -> Refusal {
    Refusal::Other("value is not an integer or out of range".to_owned())
}

statehouse_policy::export!(Incr);

#[cfg(test)]
mod tests {
    use statehouse_policy::Policy;
    use statehouse_policy::testing::{Tabled, cases};

    #[test]
    fn policy_passes_its_cases() {
        let policy = super::Incr::configure(&[]).expect("it takes no options");
        let requests = cases::run(include_str!("../cases.txt"), &mut Tabled::new(&policy));
        assert_eq!(requests, Ok(28));
    }
}
