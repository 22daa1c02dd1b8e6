//! A set point is a number within bounds. SET of any other value is refused.
//!
//! `../js` and `../python` contain the same rule, and all three answer with the same bytes. So the
//! policy has few commands and does not use the standard policy. In Rust, a policy that only adds a
//! rule to the standard one is shorter (`../../write-once`).
//!
//! A policy must not keep state between two requests: the store re-executes redelivered requests,
//! and the answer must have the same bytes.

#![deny(unsafe_code)]

use statehouse_policy::{
    Access, Body, Bytes, Change, Dialect, Event, Fault, Frame, Host, Info, Notification, Outcome,
    Policy, Repeat, Request, Span, Stamp, resp,
};

const LOWEST: f64 = 5.0;
const HIGHEST: f64 = 30.0;

/// The notification topic has the key and the client id in hex, which must fit into an MQTT topic.
const KEY_BYTES_MAX: u32 = 1000;

/// More words than any command has. The limit keeps an interpreter from parsing millions of words,
/// and the rule is the same in three languages.
const WORDS_MAX: usize = 8;

const COMMANDS: [&str; 4] = ["SET", "GET", "DEL", "KEYNOTIFY"];

/// The policy.
#[derive(Debug)]
pub struct SetPoint;

/// The reason of an `-ERR` answer.
enum Refusal {
    /// The request is malformed. The store may execute a duplicate again.
    Form(&'static str),
    /// The rule or the state of the table refuses the request. A duplicate must get the same
    /// answer.
    Rule(String),
}

impl From<Fault> for Refusal {
    fn from(fault: Fault) -> Self {
        Self::Rule(match fault {
            Fault::Denied => "not authorized".to_owned(),
            Fault::Quota => "the quota has been exceeded".to_owned(),
            Fault::Other(text) => text,
        })
    }
}

impl Policy for SetPoint {
    fn describe() -> Info {
        Info {
            name: "set-point-rust".to_owned(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            commands: COMMANDS.map(str::to_owned).to_vec(),
        }
    }

    fn configure(options: &[(String, String)]) -> Result<Self, String> {
        if !options.is_empty() {
            return Err("this policy has no options".to_owned());
        }
        Ok(Self)
    }

    fn route(&self, payload: &[u8]) -> Option<Span> {
        resp::parse(payload).ok()?.span(1)
    }

    fn handle(&self, host: &mut impl Host, request: &Request) -> Outcome {
        let words = resp::parse(&request.payload).ok();
        let (command, done) = match words.filter(|words| words.count() <= WORDS_MAX) {
            None => (None, Err(Refusal::Form("syntax error"))),
            Some(words) => {
                let verb = (0..).zip(COMMANDS);
                match verb
                    .into_iter()
                    .find(|(_, name)| words.get(0).eq_ignore_ascii_case(name.as_bytes()))
                {
                    None => (None, Err(Refusal::Form("unknown command"))),
                    Some((index, verb)) => (Some(index), run(host, verb, &words)),
                }
            }
        };
        let outcome = done.unwrap_or_else(|refusal| match refusal {
            Refusal::Form(text) => Outcome {
                repeat: Repeat::Free,
                ..error(text)
            },
            Refusal::Rule(text) => error(&text),
        });
        Outcome { command, ..outcome }
    }

    fn notify(&self, change: &Change, dialect: Dialect) -> Notification {
        let payload = match change.event {
            Event::Set => Frame {
                head: format!(
                    "*4\r\n$6\r\nNOTIFY\r\n$3\r\nSET\r\n$5\r\nVALUE\r\n${}\r\n",
                    change.len
                )
                .into_bytes(),
                // In `notify`, a span refers to the key, whose length is bounded.
                body: Body::Stored(Bytes::Span(Span {
                    at: 0,
                    len: change.key.len() as u32,
                })),
            },
            Event::Deleted | Event::Expired => Frame {
                head: match dialect {
                    Dialect::Sdk => b"*2\r\n$6\r\nNOTIFY\r\n$6\r\nDELETE\r\n".to_vec(),
                    _ => b"*2\r\n$6\r\nNOTIFY\r\n$3\r\nDEL\r\n".to_vec(),
                },
                body: Body::None,
            },
        };
        let hex: String = change
            .key
            .iter()
            .map(|byte| format!("{byte:02X}"))
            .collect();
        Notification {
            topic_prefix: "clients/statestore/v1/FA9AE35F-2F64-47CD-9BFF-08E2B32A0FE8/".to_owned(),
            topic_suffix: format!("/command/notify/{hex}"),
            payload,
        }
    }
}

fn run(host: &mut impl Host, verb: &str, words: &resp::Arguments<'_>) -> Result<Outcome, Refusal> {
    let fits = match verb {
        "SET" => words.count() == 3,
        "KEYNOTIFY" => matches!(words.count(), 2 | 3),
        _ => words.count() == 2,
    };
    let Some(span) = words.span(1).filter(|_| fits) else {
        return Err(Refusal::Form("wrong number of arguments"));
    };
    if span.len == 0 || span.len > KEY_BYTES_MAX {
        return Err(Refusal::Form("a key has 1 to 1000 bytes"));
    }
    let key = Bytes::Span(span);
    match verb {
        "SET" => {
            let entry = host.head(&key, Access::Write)?;
            if entry.is_some_and(|entry| entry.fence.is_some()) {
                return Err(Refusal::Rule(
                    "a fenced key is not for this policy".to_owned(),
                ));
            }
            let Some(value) = words.bytes(2).filter(|_| is_set_point(words.get(2))) else {
                return Err(Refusal::Rule(format!(
                    "a set point is a number from {LOWEST} to {HIGHEST}"
                )));
            };
            let version = host.put(&key, &value, None, None, None)?;
            Ok(answer("+OK\r\n", Some(version)))
        }
        "GET" => Ok(Outcome {
            repeat: Repeat::Free,
            ..match host.head(&key, Access::Read)? {
                None => answer("$-1\r\n", None),
                Some(entry) => {
                    let mut found = answer(&format!("${}\r\n", entry.len), Some(entry.version));
                    found.reply.body = Body::Stored(key);
                    found
                }
            }
        }),
        "DEL" => {
            let entry = host.head(&key, Access::Write)?;
            if entry.as_ref().is_some_and(|entry| entry.fence.is_some()) {
                return Err(Refusal::Rule(
                    "a fenced key is not for this policy".to_owned(),
                ));
            }
            Ok(match entry {
                None => answer(":0\r\n", None),
                Some(entry) => {
                    host.delete(&key)?;
                    answer(":1\r\n", Some(entry.version))
                }
            })
        }
        _ if words.count() == 2 => {
            host.watch(&key)?;
            Ok(Outcome {
                repeat: Repeat::Free,
                ..answer("+OK\r\n", None)
            })
        }
        _ if words.get(2).eq_ignore_ascii_case(b"STOP") => Ok(answer(
            if host.unwatch(&key)? {
                "+OK\r\n"
            } else {
                ":0\r\n"
            },
            None,
        )),
        _ => Err(Refusal::Form("syntax error")),
    }
}

/// Whether a value is a number within bounds. The format is defined byte by byte, so that it is the
/// same in every language: `-12`, `21.5`, but not `2e1` or `+3`.
fn is_set_point(value: &[u8]) -> bool {
    // The longest number is `-123456.123456`, but a value may have a megabyte.
    if value.len() > 14 {
        return false;
    }
    let digits = value.strip_prefix(b"-").unwrap_or(value);
    let mut parts = digits.split(|&byte| byte == b'.');
    let is_number = parts.clone().count() <= 2
        && parts.all(|part| matches!(part.len(), 1..=6) && part.iter().all(u8::is_ascii_digit));
    let number = str::from_utf8(value).ok().filter(|_| is_number);
    number
        .and_then(|text| text.parse().ok())
        .is_some_and(|number: f64| (LOWEST..=HIGHEST).contains(&number))
}

fn answer(head: &str, version: Option<Stamp>) -> Outcome {
    Outcome {
        reply: Frame {
            head: head.as_bytes().to_vec(),
            body: Body::None,
        },
        version,
        repeat: Repeat::Same,
        command: None,
    }
}

fn error(text: &str) -> Outcome {
    let mut outcome = answer("", None);
    resp::push_error(&mut outcome.reply.head, text);
    outcome
}

statehouse_policy::export!(SetPoint);

#[cfg(test)]
mod tests {
    use super::is_set_point;

    #[test]
    fn set_point_is_a_number_within_bounds() {
        for good in ["5", "30", "21.5", "005", "30.000000", "5.000001"] {
            assert!(is_set_point(good.as_bytes()), "{good}");
        }
        for bad in [
            "",
            "-",
            ".",
            "5.",
            ".5",
            "4.999999",
            "30.000001",
            "-5",
            "--5",
            "+7",
            "1e1",
            " 7",
            "7 ",
            "1.2.3",
            "0000007",
            "7.0000000",
            "NaN",
            "inf",
            "7\r",
            "\u{0667}",
        ] {
            assert!(!is_set_point(bad.as_bytes()), "{bad}");
        }
    }
}
