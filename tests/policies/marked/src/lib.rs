//! The standard policy with one additional command, whose answers show which build of this policy
//! handled the request.
//!
//! `TALLY key` increments the counter in the key. It answers the mark of the build, the count, and
//! the mark again. The mark is the environment variable `MARK` of the build. `META` fails for keys
//! that begin with `bad-meta`, and has a malformed answer for keys that begin with `odd-meta`.

#![deny(unsafe_code)]

use statehouse_guest::Standard;
use statehouse_policy::{
    Access, Body, Bytes, Change, Dialect, Fault, Frame, Host, Info, Notification, Outcome, Policy,
    Repeat, Request, Span, resp,
};

/// The mark that distinguishes builds.
const MARK: &str = match option_env!("MARK") {
    Some(mark) => mark,
    None => "none",
};

/// The policy.
pub struct Marked(Standard);

impl Policy for Marked {
    fn describe() -> Info {
        let mut info = Standard::describe();
        info.name = format!("marked-{MARK}");
        info.commands.push("TALLY".to_owned());
        info
    }

    fn configure(options: &[(String, String)]) -> Result<Self, String> {
        Standard::configure(options).map(Self)
    }

    fn route(&self, payload: &[u8]) -> Option<Span> {
        self.0.route(payload)
    }

    fn handle(&self, host: &mut impl Host, request: &Request) -> Outcome {
        let key = match resp::parse(&request.payload) {
            Ok(words) if words.count() == 2 && words.get(0) == b"TALLY" => words.bytes(1),
            Ok(words) if words.count() == 2 && words.get(0) == b"META" => {
                let is_bad = words.get(1).starts_with(b"bad-meta");
                assert!(!is_bad, "a panic in META on request");
                if words.get(1).starts_with(b"odd-meta") {
                    return answer("+odd\r\n".to_owned());
                }
                None
            }
            _ => None,
        };
        let Some(key) = key else {
            return self.0.handle(host, request);
        };
        answer(match tally(host, &key) {
            Ok(count) => format!("*3\r\n+{MARK}\r\n:{count}\r\n+{MARK}\r\n"),
            Err(_) => "-ERR refused\r\n".to_owned(),
        })
    }

    fn notify(&self, change: &Change, dialect: Dialect) -> Notification {
        self.0.notify(change, dialect)
    }
}

/// An answer of these bytes to the last command.
fn answer(head: String) -> Outcome {
    let reply = Frame {
        head: head.into_bytes(),
        body: Body::None,
    };
    Outcome {
        reply,
        version: None,
        repeat: Repeat::Same,
        command: u16::try_from(Marked::describe().commands.len() - 1).ok(),
    }
}

fn tally(host: &mut impl Host, key: &Bytes) -> Result<u64, Fault> {
    host.head(key, Access::Write)?;
    host.head(key, Access::Read)?;
    let before = host.load(key, 0, 20)?.unwrap_or_default();
    let count = std::str::from_utf8(&before)
        .ok()
        .and_then(|text| text.parse::<u64>().ok())
        .unwrap_or(0)
        + 1;
    let after = Bytes::Owned(count.to_string().into_bytes());
    host.put(key, &after, None, None, None)?;
    Ok(count)
}

statehouse_policy::export!(Marked);
