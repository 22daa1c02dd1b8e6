//! Parses the text of a transcript into steps.

use std::iter::repeat_n;

use crate::options::Options;
use crate::quote::{Word, quote, words};

/// The client of lines that name none.
pub const DEFAULT_CLIENT: &str = "me";

/// The dialect of requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Dialect {
    /// The dialect of the official client libraries.
    Sdk,
    /// The dialect of the published article.
    Documents,
    /// The dialect of the preview of 2023.
    Preview,
}

impl Dialect {
    /// The dialect of this name.
    pub fn parse(name: &str) -> Option<Self> {
        match name {
            "sdk" => Some(Self::Sdk),
            "documents" => Some(Self::Documents),
            "preview" => Some(Self::Preview),
            _ => None,
        }
    }

    /// The user properties of every answer except its version, which lines need not contain.
    pub fn implied(self) -> Vec<(String, String)> {
        let mut implied = vec![("__stat".into(), "200".into())];
        if self == Self::Sdk {
            implied.push(("__protVer".into(), "1.0".into()));
        }
        implied
    }
}

/// The step of one line.
#[derive(Clone, Debug)]
pub enum Step {
    /// `dialect NAME`: the dialect of later requests.
    Dialect(Dialect),
    /// `client NAME [id] [filter qos]`.
    Client {
        /// Its name in the transcript.
        name: String,
        /// Its client id; by default the name.
        id: String,
        /// An additional subscription.
        subscription: Option<(String, u8)>,
    },
    /// `close NAME`: DISCONNECT and close.
    Close(String),
    /// `NAME> …` and `NAME>> …`.
    Request {
        /// The client that sends the request.
        client: String,
        /// The RESP arguments, or one word that is the payload.
        words: Vec<Word>,
        /// Whether the word is the payload.
        raw: bool,
        /// The words after `--`.
        options: Vec<Word>,
    },
    /// `NAME< …`.
    Answer {
        /// The client that receives it.
        client: String,
        /// The payload.
        payload: Vec<u8>,
        /// User properties and `@` signs.
        properties: Vec<Word>,
    },
    /// `NAME<puback REASON [text]`: the acknowledgement refuses the request.
    Refused {
        /// The client that receives it.
        client: String,
        /// The reason code of the PUBACK or PUBREC.
        reason: u8,
        /// The text that the Reason String must contain.
        text: String,
    },
    /// `NAME<disconnect REASON [text]`.
    Disconnected {
        /// The client that receives it.
        client: String,
        /// The reason code of the DISCONNECT.
        reason: u8,
        /// The text that the Reason String must contain.
        text: String,
    },
    /// `NAME<nothing`: the request was dropped.
    Dropped(String),
    /// `NAME! KEY payload …`.
    Notification {
        /// The client that receives it.
        client: String,
        /// The key that changed.
        key: Vec<u8>,
        /// The payload.
        payload: Vec<u8>,
        /// User properties and `@` signs.
        properties: Vec<Word>,
    },
    /// `quiet`: no client has received any other message.
    Quiet,
    /// `wait 50ms`.
    Wait(u64),
    /// `at 1700000000000`: sets the clock, if it is scripted.
    At(u64),
    /// `? $a > $b`.
    Compare {
        /// The variable before the sign.
        left: String,
        /// `<`, `=` or `>`.
        sign: String,
        /// The variable after the sign.
        right: String,
    },
}

/// A parsed transcript.
#[derive(Clone, Debug)]
pub struct Script {
    /// The lines of the server's configuration, as TOML. The line numbers are those of the
    /// transcript.
    pub config: String,
    /// The steps with their line numbers, from 0.
    pub steps: Vec<(usize, Step)>,
}

/// Parses a whole transcript; the error names the line.
pub fn parse(text: &str) -> Result<Script, String> {
    let mut script = Script {
        config: String::new(),
        steps: Vec::new(),
    };
    for (number, line) in text.lines().enumerate() {
        let line = line.trim();
        if line.is_empty() || line.starts_with('#') {
            continue;
        }
        if let Some(config) = line.strip_prefix("config ") {
            let missing = number - script.config.lines().count();
            script.config.extend(repeat_n('\n', missing));
            script.config.push_str(config);
            script.config.push('\n');
            continue;
        }
        let step = step(line).map_err(|error| format!("line {}: {error}", number + 1))?;
        script.steps.push((number, step));
    }
    Ok(script)
}

fn step(line: &str) -> Result<Step, String> {
    let mut words = words(line)?;
    let first = words.remove(0);
    let sign = first.text()?.to_string();
    let words_max = match sign.as_str() {
        "quiet" => 0,
        "dialect" | "close" | "wait" | "at" => 1,
        "?" => 3,
        "client" => 4,
        _ => return exchange(&sign, words),
    };
    check_count(&sign, &words, words_max)?;
    let text = |at: usize| words.get(at).map(Word::text).transpose();
    let need = |at: usize| text(at)?.ok_or_else(|| format!("`{sign}` needs more words"));
    match sign.as_str() {
        "dialect" => Dialect::parse(need(0)?)
            .map(Step::Dialect)
            .ok_or_else(|| "the dialects are sdk, documents and preview".into()),
        "client" => {
            let name = need(0)?.to_string();
            let usage = "`client` takes a name and an id; an id with spaces is in quotes";
            let subscription = match (text(2)?, text(3)?) {
                (Some(filter), Some(qos)) => {
                    Some((filter.to_string(), qos.parse().map_err(|_| usage)?))
                }
                (Some(_), None) => return Err(usage.into()),
                _ => None,
            };
            Ok(Step::Client {
                id: text(1)?.unwrap_or(&name).to_string(),
                name,
                subscription,
            })
        }
        "close" => Ok(Step::Close(need(0)?.into())),
        "quiet" => Ok(Step::Quiet),
        "wait" => need(0)?
            .strip_suffix('s')
            .and_then(milliseconds)
            .map(Step::Wait)
            .ok_or_else(|| "wait takes a time such as 50ms or 5s".into()),
        "at" => need(0)?
            .parse()
            .map(Step::At)
            .map_err(|_| "at takes milliseconds since 1970".into()),
        _ => Ok(Step::Compare {
            left: need(0)?.into(),
            sign: need(1)?.into(),
            right: need(2)?.into(),
        }),
    }
}

/// Refuses words that the step would ignore.
fn check_count(sign: &str, words: &[Word], words_max: usize) -> Result<(), String> {
    match words.get(words_max) {
        Some(word) => Err(format!(
            "`{sign}` has a word too many: {}",
            quote(&word.bytes)
        )),
        None => Ok(()),
    }
}

/// Parses a line that begins with a client and a sign.
fn exchange(head: &str, mut words: Vec<Word>) -> Result<Step, String> {
    let at = head
        .find(['<', '>', '!'])
        .ok_or_else(|| format!("unknown step {head:?}"))?;
    let (client, sign) = head.split_at(at);
    let client = if client.is_empty() {
        DEFAULT_CLIENT
    } else {
        client
    }
    .to_string();
    match sign {
        ">" => request(client, words, false),
        ">>" => request(client, words, true),
        "<" => {
            if words.is_empty() {
                return Err("`<` needs the payload; an empty one is \"\"".into());
            }
            let payload = words.remove(0).bytes;
            check_signs(&words, |sign| sign == "@bare")?;
            Ok(Step::Answer {
                client,
                payload,
                properties: words,
            })
        }
        "<puback" => {
            let (reason, text) = reason(&words)?;
            Ok(Step::Refused {
                client,
                reason,
                text,
            })
        }
        "<disconnect" => {
            let (reason, text) = reason(&words)?;
            Ok(Step::Disconnected {
                client,
                reason,
                text,
            })
        }
        "<nothing" => {
            check_count(head, &words, 0)?;
            Ok(Step::Dropped(client))
        }
        "!" => {
            if words.len() < 2 {
                return Err("`!` needs a key and the payload".into());
            }
            let (key, payload) = (words.remove(0).bytes, words.remove(0).bytes);
            check_signs(&words, |sign| {
                sign == "@qos=0" || sign.starts_with("@topic=")
            })?;
            Ok(Step::Notification {
                client,
                key,
                payload,
                properties: words,
            })
        }
        other => Err(format!("unknown sign {other:?}")),
    }
}

/// Refuses words such as `@bare` that mean nothing on this line.
fn check_signs(words: &[Word], is_known: impl Fn(&str) -> bool) -> Result<(), String> {
    let mut signs = words.iter().filter_map(Word::bare);
    match signs.find(|it| it.starts_with('@') && !is_known(it)) {
        Some(sign) => Err(format!("unknown sign {sign:?}")),
        None => Ok(()),
    }
}

fn request(client: String, mut words: Vec<Word>, raw: bool) -> Result<Step, String> {
    let options = match words.iter().position(|word| word.bare() == Some("--")) {
        Some(at) => words.split_off(at).split_off(1),
        None => Vec::new(),
    };
    Options::check(&options)?;
    if raw && words.len() != 1 {
        return Err("`>>` takes one word, the payload".into());
    }
    Ok(Step::Request {
        client,
        words,
        raw,
        options,
    })
}

/// The time in `50ms` or `5s`, without its last letter.
fn milliseconds(time: &str) -> Option<u64> {
    match time.strip_suffix('m') {
        Some(ms) => ms.parse().ok(),
        None => time.parse::<u64>().ok()?.checked_mul(1000),
    }
}

/// A reason code, and the rest of the line as its text.
fn reason(words: &[Word]) -> Result<(u8, String), String> {
    let word = words.first().ok_or("a reason code is missing")?.text()?;
    let reason = u8::from_str_radix(word.trim_start_matches("0x"), 16)
        .map_err(|_| format!("{word:?} is not a reason code such as 0x83"))?;
    let text: Result<Vec<_>, _> = words.iter().skip(1).map(Word::text).collect();
    Ok((reason, text?.join(" ")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_transcript_of_the_repository_parses() {
        let root = concat!(env!("CARGO_MANIFEST_DIR"), "/../..");
        let files = |directory: &str| {
            let directory = std::fs::read_dir(format!("{root}/{directory}")).unwrap();
            directory.map(|entry| entry.unwrap().path())
        };
        let templates = files("host/templates").filter(|it| it.is_file());
        let examples = files("examples").map(|it| it.join("transcript.txt"));
        let all = files("tests/transcripts").chain(templates);
        for path in all.chain(examples.filter(|it| it.exists())) {
            let text = std::fs::read_to_string(&path).unwrap();
            let script = parse(&text).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
            assert!(!script.steps.is_empty(), "{}", path.display());
        }
    }

    #[test]
    fn options_are_checked_without_their_variables() {
        let known = "> GET k -- @qos=$n @times=$n @expiry=10 @response=$t x=$now-5 -__srcId";
        parse(&format!("{known}\n< x @bare a=$v\n! k x @qos=0 @topic=a/b")).unwrap();
        // Quotes make it a property.
        parse("< x \"@bar=1\"").unwrap();
    }

    #[test]
    fn config_keeps_its_line_numbers() {
        let config = parse("# one\nconfig max_keys = 2\n> GET k").unwrap().config;
        assert_eq!(config.lines().nth(1), Some("max_keys = 2"));
    }

    #[test]
    fn wait_takes_seconds_and_milliseconds() {
        let steps = parse("wait 5s\nwait 50ms").unwrap().steps;
        let times = steps.into_iter().map(|(_, step)| match step {
            Step::Wait(ms) => ms,
            _ => panic!("another step"),
        });
        assert_eq!(times.collect::<Vec<_>>(), [5000, 50]);
    }

    /// Regression: only its first word counted.
    #[test]
    fn text_of_a_reason_is_the_rest_of_the_line() {
        let lines = "<puback 0x83 no such topic\n<puback 0x83 \"no  such\" topic\n<puback 0x83";
        let steps = parse(lines).unwrap().steps;
        let texts = steps.into_iter().map(|(_, step)| match step {
            Step::Refused { text, .. } => text,
            _ => panic!("another step"),
        });
        assert_eq!(
            texts.collect::<Vec<_>>(),
            ["no such topic", "no  such topic", ""]
        );
    }

    #[test]
    fn malformed_line_is_named_in_the_error() {
        for bad in [
            "a<puback",
            "a< ",
            "k SET",
            ">> a b",
            "wait 5",
            "wait 5m",
            "wait 99999999999999999s",
            "dialect x",
            "at noon",
            "client a my id",
            "client a my long id",
            "client a id filter 1 more",
            "?",
            "? $a < $b more",
            "quiet more",
            "dialect sdk more",
            "close a more",
            "wait 5s more",
            "at 1700000000000 # more",
            "a<nothing more",
            "> GET k -- @qso=1",
            "> GET k -- -@qos",
            "> GET k -- @qos=3",
            "> GET k -- @qos=no",
            "> GET k -- @times=-1",
            "> GET k -- nonsense",
            "< x @bar",
            "< x @qos=0",
            "! k x @qos=1",
            "! k x @bare",
        ] {
            let error = parse(&format!("# one\n{bad}")).err();
            assert!(error.is_some_and(|e| e.starts_with("line 2")), "{bad}");
        }
    }
}
