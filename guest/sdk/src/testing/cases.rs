//! Transcripts: requests with their expected responses.
//!
//! The same files run in a policy's own tests, over a [`Table`](super::Table), and in a host, over
//! a component; both implement [`Subject`]. A transcript is read line by line:
//!
//! ```text
//! # A comment.
//! == a title              a new case: an empty store at 1700000000000 ms, dialect sdk,
//!                         client `client`, `ts 1700000000000:0:client`, no `ft`
//! quota 2                 at most two keys; before the first request of a case
//! dialect documents       applies to later requests, like the next three
//! client other            `-` for none
//! ts 1:2:node             the request's timestamp; `-` for none, `\e` for an empty one
//! ft 1:2:node             the fencing token, likewise
//! now 1700000005000       advances the time and removes expired keys
//! disconnect other        a client's connection ends
//! > SET key value         a request: an array of bulk strings
//! >> *1\r\n$4\r\nPING     a request: these bytes
//! < same 1:2 +OK\r\n      the response: how a duplicate is answered (same, free), the version
//!                         (wall:counter, `-` for none, `*` for any), the bytes
//! ! TOPIC 1:2 *2\r\n…     a notification since the last request; all must be listed, those of
//!                         one change in any order
//! ```
//!
//! In words and bytes, `\r`, `\n`, `\0`, `\\` and `\xNN` have the same meaning as in Rust, `\s` is
//! a space and `\e` is empty. In the last part of a line a space is a space.

use crate::testing::{Answer, Delivery};
use crate::{Dialect, Repeat, Request, Stamp, resp};

/// The time at which every case begins.
pub const NOW_MS: u64 = 1_700_000_000_000;

/// A store that a transcript runs against.
pub trait Subject {
    /// Begins a case: an empty store at a time, without watches.
    fn begin(&mut self, now_ms: u64, keys_max: Option<usize>);
    /// Advances the time and removes expired keys.
    fn advance(&mut self, now_ms: u64);
    /// Executes one request.
    fn call(&mut self, request: &Request) -> Answer;
    /// Ends a client's connection.
    fn disconnect(&mut self, client: &str);
    /// The notifications since the last call.
    fn deliveries(&mut self) -> Vec<Delivery>;
}

/// Runs a transcript; returns the number of its requests.
///
/// # Errors
///
/// The number of the first line that fails, its content, and the actual result.
pub fn run(text: &str, subject: &mut impl Subject) -> Result<usize, String> {
    let mut script = Script::new(subject);
    for (index, line) in text.lines().enumerate() {
        script.line(line).map_err(|error| {
            format!(
                "line {} (case `{}`): {line}\n{error}",
                index + 1,
                script.title
            )
        })?;
    }
    script
        .check_consumed()
        .map_err(|error| format!("at the end (case `{}`): {error}", script.title))?;
    Ok(script.requests)
}

struct Script<'a, S> {
    subject: &'a mut S,
    title: String,
    keys_max: Option<usize>,
    /// Whether the case has begun. The first step that needs a store begins it.
    begun: bool,
    request: Request,
    answer: Option<Answer>,
    deliveries: std::collections::VecDeque<Delivery>,
    requests: usize,
}

impl<'a, S: Subject> Script<'a, S> {
    fn new(subject: &'a mut S) -> Self {
        Self {
            subject,
            title: String::new(),
            keys_max: None,
            begun: false,
            request: request(&[]),
            answer: None,
            deliveries: std::collections::VecDeque::new(),
            requests: 0,
        }
    }

    fn line(&mut self, line: &str) -> Result<(), String> {
        let (word, rest) = line.split_once(' ').unwrap_or((line, ""));
        match word {
            "" | "#" => return Ok(()),
            "<" => return self.expect_answer(rest),
            "!" => return self.expect_delivery(rest),
            _ => self.check_consumed()?,
        }
        match word {
            "==" => {
                rest.clone_into(&mut self.title);
                self.keys_max = None;
                self.begun = false;
                self.request = request(&[]);
            }
            "quota" => self.keys_max = Some(number(rest)?),
            "dialect" => self.request.dialect = dialect(rest)?,
            "client" => self.request.client = property(rest)?,
            "ts" => self.request.timestamp = property(rest)?,
            "ft" => self.request.fencing_token = property(rest)?,
            "now" => {
                self.begin();
                self.request.now = number(rest)?;
                self.subject.advance(self.request.now);
                self.deliveries.extend(self.subject.deliveries());
            }
            "disconnect" => {
                self.begin();
                self.subject.disconnect(rest);
            }
            ">" => {
                let words: Result<Vec<_>, _> = rest.split(' ').map(unescape).collect();
                let words = words?;
                let words: Vec<&[u8]> = words.iter().map(Vec::as_slice).collect();
                self.call(resp::request(&words));
            }
            ">>" => self.call(unescape(rest)?),
            _ => return Err(format!("`{word}` begins no line of a transcript")),
        }
        Ok(())
    }

    fn begin(&mut self) {
        if !self.begun {
            self.begun = true;
            self.subject.begin(self.request.now, self.keys_max);
        }
    }

    fn call(&mut self, payload: Vec<u8>) {
        self.begin();
        self.request.payload = payload;
        self.answer = Some(self.subject.call(&self.request));
        self.deliveries.extend(self.subject.deliveries());
        self.requests += 1;
    }

    fn expect_answer(&mut self, expected: &str) -> Result<(), String> {
        let answer = self
            .answer
            .take()
            .ok_or("there is no request before this answer")?;
        let repeat = match answer.repeat {
            Repeat::Free => "free",
            Repeat::Same => "same",
        };
        // `*` accepts any version: a deletion without watchers may or may not consume one.
        let any = expected.split(' ').nth(1) == Some("*") && answer.version.is_some();
        let version = if any {
            "*".to_owned()
        } else {
            version(answer.version)
        };
        compare(
            expected,
            &format!("{repeat} {version} {}", escape(&answer.bytes)),
        )
    }

    /// The watchers of one change are notified in any order; changes keep their order.
    fn expect_delivery(&mut self, expected: &str) -> Result<(), String> {
        let first = self.deliveries.front().ok_or("there was no notification")?;
        let mut change = self
            .deliveries
            .iter()
            .take_while(|delivery| delivery.version == first.version);
        match change.position(|delivery| shown(delivery) == expected) {
            Some(index) => {
                self.deliveries.remove(index);
                Ok(())
            }
            None => compare(expected, &shown(first)),
        }
    }

    /// Checks that the transcript mentions every answer and notification.
    fn check_consumed(&mut self) -> Result<(), String> {
        if let Some(answer) = self.answer.take() {
            return Err(format!(
                "the request before has no `<`: {}",
                escape(&answer.bytes)
            ));
        }
        match self.deliveries.pop_front() {
            Some(delivery) => Err(format!("a notification has no `!`: {}", shown(&delivery))),
            None => Ok(()),
        }
    }
}

/// A request with these words by the client `client`, like the first one of a case.
#[must_use]
pub fn request(words: &[&[u8]]) -> Request {
    Request {
        payload: resp::request(words),
        dialect: Dialect::Sdk,
        timestamp: Some(format!("{NOW_MS}:0:client")),
        fencing_token: None,
        client: Some("client".to_owned()),
        now: NOW_MS,
    }
}

fn shown(delivery: &Delivery) -> String {
    let version = version(Some(delivery.version));
    format!("{} {version} {}", delivery.topic, escape(&delivery.payload))
}

fn compare(expected: &str, got: &str) -> Result<(), String> {
    if expected == got {
        return Ok(());
    }
    Err(format!("expected: {expected}\n     got: {got}"))
}

fn number<T: std::str::FromStr>(text: &str) -> Result<T, String> {
    text.parse().map_err(|_| format!("`{text}` is no number"))
}

fn dialect(text: &str) -> Result<Dialect, String> {
    match text {
        "sdk" => Ok(Dialect::Sdk),
        "documents" => Ok(Dialect::Documents),
        "preview" => Ok(Dialect::Preview),
        _ => Err(format!("`{text}` is no dialect")),
    }
}

fn property(text: &str) -> Result<Option<String>, String> {
    if text == "-" {
        return Ok(None);
    }
    String::from_utf8(unescape(text)?)
        .map(Some)
        .map_err(|_| "not UTF-8".to_owned())
}

fn version(stamp: Option<Stamp>) -> String {
    match stamp {
        Some(Stamp { wall, counter }) => format!("{wall}:{counter}"),
        None => "-".to_owned(),
    }
}

fn unescape(text: &str) -> Result<Vec<u8>, String> {
    let mut out = Vec::new();
    let mut rest = text.as_bytes();
    while let Some((&byte, behind)) = rest.split_first() {
        rest = behind;
        if byte != b'\\' {
            out.push(byte);
            continue;
        }
        let (&letter, behind) = rest.split_first().ok_or("a `\\` at the end")?;
        rest = behind;
        match letter {
            b'r' => out.push(b'\r'),
            b'n' => out.push(b'\n'),
            b's' => out.push(b' '),
            b'0' => out.push(0),
            b'\\' => out.push(b'\\'),
            b'e' => {}
            b'x' => {
                let (digits, behind) = rest.split_at_checked(2).ok_or("`\\x` takes two digits")?;
                rest = behind;
                let digits = str::from_utf8(digits).map_err(|_| "`\\x` takes two digits")?;
                let byte = u8::from_str_radix(digits, 16);
                out.push(byte.map_err(|_| format!("`\\x{digits}` is no byte"))?);
            }
            _ => return Err(format!("`\\{}` means nothing", char::from(letter))),
        }
    }
    Ok(out)
}

fn escape(bytes: &[u8]) -> String {
    let mut out = String::new();
    for &byte in bytes {
        match byte {
            b'\r' => out.push_str("\\r"),
            b'\n' => out.push_str("\\n"),
            b'\\' => out.push_str("\\\\"),
            b' '..=b'~' => out.push(char::from(byte)),
            _ => out.push_str(&format!("\\x{byte:02X}")),
        }
    }
    out
}
