//! Output and exit codes of the client commands. Results go to stdout and messages to stderr; the
//! two must never mix.

use std::fmt::Write as _;
use std::io::{self, Write};
use std::ops::RangeInclusive;
use std::process::ExitCode;

use serde_json::Value as Json;
use statehouse_client::Error;

pub(super) use crate::past::json_bytes;

/// Exit code: not found, or not applied.
const EXIT_NEGATIVE: u8 = 1;
/// Exit code: the command line cannot be used.
const EXIT_USAGE: u8 = 2;
/// Exit code: the store is unreachable, does not answer, or is not a state store.
const EXIT_TRANSPORT: u8 = 3;
/// Exit code: the store refused.
const EXIT_REFUSED: u8 = 4;

/// The result of a command that worked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Exit {
    Done,
    /// Not found, or not applied.
    Negative,
    /// The exit code of the command that `lock` ran.
    Code(u8),
}

impl Exit {
    /// Done, or negative if that is false.
    pub(super) fn of(is_done: bool) -> Self {
        match is_done {
            true => Self::Done,
            false => Self::Negative,
        }
    }
}

/// The result of a command that failed: an exit code and a message for stderr.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Failure {
    code: u8,
    message: String,
}

impl Failure {
    pub(super) fn negative(message: impl Into<String>) -> Self {
        Self::new(EXIT_NEGATIVE, message)
    }

    pub(super) fn usage(message: impl Into<String>) -> Self {
        Self::new(EXIT_USAGE, message)
    }

    pub(super) fn transport(message: impl Into<String>) -> Self {
        Self::new(EXIT_TRANSPORT, message)
    }

    pub(super) fn refused(message: impl Into<String>) -> Self {
        Self::new(EXIT_REFUSED, message)
    }

    /// The failure of a question. Exit code 1 belongs to its answer, so a refusal ends with 4.
    pub(super) fn of_question(mut self) -> Self {
        if self.code == EXIT_NEGATIVE {
            self.code = EXIT_REFUSED;
        }
        self
    }

    pub(super) fn with(self, advice: &str) -> Self {
        let end = full_stop(&self.message);
        Self::new(self.code, format!("{}{end} {advice}", self.message))
    }

    /// Whether the command line cannot be used, so that the same command fails again.
    pub(super) fn is_usage(&self) -> bool {
        self.code == EXIT_USAGE
    }

    /// Whether there was no connection or no answer, which may pass.
    pub(super) fn is_transport(&self) -> bool {
        self.code == EXIT_TRANSPORT
    }

    pub(super) fn message(&self) -> &str {
        &self.message
    }

    pub(super) fn exit_code(&self) -> ExitCode {
        ExitCode::from(self.code)
    }

    pub(super) fn new(code: u8, message: impl Into<String>) -> Self {
        Self {
            code,
            message: message.into(),
        }
    }
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        let code = match &error {
            _ if error.is_without_store() => EXIT_TRANSPORT,
            Error::Refused(_) | Error::Rejected(_) | Error::QuotaExceeded(_) | Error::Denied(_) => {
                EXIT_REFUSED
            }
            Error::Invalid(_) => EXIT_USAGE,
            _ => EXIT_TRANSPORT,
        };
        let advice = match &error {
            Error::Refused(text) => refusal_advice(text),
            _ if error.is_without_store() => "Is a state store attached to this broker?",
            Error::Timeout(_) => {
                "Is a state store running there? --timeout allows for a slow one. If the broker takes the user name as client id, add --client-id. The request may have taken effect"
            }
            Error::Denied(_) => {
                "Give --user and --password-file, or STATEHOUSE_USER and STATEHOUSE_PASSWORD, as its operator set them"
            }
            Error::Protocol(_) => "Is it a state store that speaks this version of the protocol?",
            _ => "",
        };
        // The store and the broker choose parts of it.
        let mut message = one_line(&error.to_string());
        if !advice.is_empty() {
            message.push_str(". ");
            message.push_str(advice);
        }
        Self::new(code, message)
    }
}

/// Advice for an error text of the protocol, section 4.
fn refusal_advice(text: &str) -> &'static str {
    if text.starts_with("a fencing token is required") {
        "Give one with --fencing-token: the version of the lock that protects the key"
    } else if text.contains("lower version tha") {
        "A later holder of the lock has written since; acquire the lock again"
    } else if text.contains("too far in the future") {
        "Set the clocks of this machine and of the store's by NTP"
    } else if text == "the key length is zero" {
        "Give a key of at least one byte"
    } else if text == "not authorized" {
        "Its operator can ask `statehouse authz explain` which rule is missing"
    } else if text == "the quota has been exceeded" {
        "Delete keys, or raise the quota of the store"
    } else if text == "internal error" {
        "Its policy failed: `statehouse policy list` and the store's log show why"
    } else {
        ""
    }
}

impl From<io::Error> for Failure {
    fn from(error: io::Error) -> Self {
        Self::transport(format!("cannot read or write: {error}"))
    }
}

pub(super) fn finish(command: impl Future<Output = Result<Exit, Failure>>) -> ExitCode {
    let runtime = match tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
    {
        Ok(runtime) => runtime,
        Err(error) => return report(&error.into()),
    };
    let done = runtime.block_on(command);
    // Does not wait for the lookup of a name that no server answers.
    runtime.shutdown_background();
    match done {
        Ok(Exit::Done) => ExitCode::SUCCESS,
        Ok(Exit::Negative) => ExitCode::from(EXIT_NEGATIVE),
        Ok(Exit::Code(code)) => ExitCode::from(code),
        Err(failure) => report(&failure),
    }
}

pub(super) fn report(failure: &Failure) -> ExitCode {
    notice(&failure.message);
    failure.exit_code()
}

/// Writes a message for people to stderr.
pub(super) fn notice(sentence: &str) {
    // If stderr fails too, there is no other place to report to.
    let _ = io::stderr().write_all(line(sentence).as_bytes());
}

/// The message as a complete line.
pub(super) fn line(sentence: &str) -> String {
    format!("statehouse: {sentence}{}\n", full_stop(sentence))
}

/// The end that a sentence lacks.
fn full_stop(sentence: &str) -> &'static str {
    match sentence.ends_with(['.', '?']) {
        true => "",
        false => ".",
    }
}

/// Writes to stdout. Returns false if stdout was closed, as by `| head -1`; the command may then
/// stop.
pub(super) fn emit(bytes: &[u8]) -> Result<bool, Failure> {
    let mut out = io::stdout().lock();
    match out.write_all(bytes).and_then(|()| out.flush()) {
        Ok(()) => Ok(true),
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(false),
        Err(error) => Err(Failure::transport(format!(
            "cannot write the output: {error}"
        ))),
    }
}

/// Writes a JSON object as one line.
pub(super) fn emit_json(object: &Json) -> Result<bool, Failure> {
    emit(format!("{object}\n").as_bytes())
}

/// Writes a result as JSON or as text. The result is that of [`emit`].
pub(super) fn emit_either(
    json: bool,
    in_json: impl FnOnce() -> Json,
    in_words: impl FnOnce() -> String,
) -> Result<bool, Failure> {
    match json {
        true => emit_json(&in_json()),
        false => emit(in_words().as_bytes()),
    }
}

/// Bytes on one line for people. Escapes the backslash and all characters that are not printable
/// UTF-8.
pub(super) fn printable(bytes: &[u8]) -> String {
    let mut line = String::with_capacity(bytes.len());
    for chunk in bytes.utf8_chunks() {
        for c in chunk.valid().chars() {
            if c == '\\' || !is_shown(c) {
                line.extend(c.escape_default());
            } else {
                line.push(c);
            }
        }
        for byte in chunk.invalid() {
            // Writing to a String cannot fail.
            let _ = write!(line, "\\x{byte:02x}");
        }
    }
    line
}

/// A message for people on one line. Keeps backslashes, because the message may quote bytes that
/// are escaped already.
pub(super) fn one_line(message: &str) -> String {
    let mut line = String::with_capacity(message.len());
    for c in message.chars() {
        if is_shown(c) {
            line.push(c);
        } else {
            line.extend(c.escape_default());
        }
    }
    line
}

/// False for characters that are invisible, or that change how others are shown: control
/// characters, marks of direction, joiners, tags, fillers, variation selectors.
pub(super) fn is_shown(c: char) -> bool {
    /// Letters, marks and symbols without a glyph: the grapheme joiner, fillers, Khmer vowels,
    /// variation selectors, the blank Braille pattern.
    const BLANKS: [RangeInclusive<char>; 9] = [
        '\u{34f}'..='\u{34f}',
        '\u{115f}'..='\u{1160}',
        '\u{17b4}'..='\u{17b5}',
        '\u{180b}'..='\u{180f}',
        '\u{2800}'..='\u{2800}',
        '\u{3164}'..='\u{3164}',
        '\u{fe00}'..='\u{fe0f}',
        '\u{ffa0}'..='\u{ffa0}',
        '\u{e0100}'..='\u{e01ef}',
    ];
    /// They end a line in some terminals.
    const SEPARATORS: [char; 2] = ['\u{2028}', '\u{2029}'];
    let is_blank = BLANKS.iter().any(|it| it.contains(&c));
    if c.is_ascii() || is_blank || SEPARATORS.contains(&c) {
        return c == ' ' || c.is_ascii_graphic();
    }
    // Only behind another character, an accent that combines with it is not escaped.
    let mut pair = [b'a'; 5];
    let end = 1 + c.encode_utf8(&mut pair[1..]).len();
    let text = str::from_utf8(&pair[..end]).unwrap_or_default();
    (c.is_whitespace() && !c.is_control()) || text.escape_debug().eq(text.chars())
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;
    use std::time::Duration;

    use super::*;

    /// Regression: with a dead name server, a command ended long after its timeout.
    #[test]
    fn command_ends_while_a_name_is_looked_up() {
        let (end, ended) = mpsc::channel::<()>();
        let _ = finish(async {
            let (begin, begun) = tokio::sync::oneshot::channel();
            tokio::task::spawn_blocking(move || {
                begin.send(()).unwrap();
                ended.recv_timeout(Duration::from_secs(10))
            });
            begun.await.unwrap();
            Ok(Exit::Done)
        });
        assert!(end.send(()).is_ok(), "it waited");
    }

    #[test]
    fn printable_bytes_stay_on_one_line() {
        assert_eq!(printable("21°".as_bytes()), "21°");
        assert_eq!(printable(b"a\nb\\\x1b[2J\xff"), "a\\nb\\\\\\u{1b}[2J\\xff");
    }

    #[test]
    fn invisible_characters_and_marks_of_direction_are_escaped() {
        let marks = "\u{202e}\u{2066}\u{200b}\u{200f}\u{ad}\u{feff}\u{180e}\u{e0041}\u{2028}";
        let blanks = "\u{34f}\u{115f}\u{1160}\u{17b4}\u{17b5}\u{180b}\u{180f}\u{2800}\u{3164}";
        let selectors = "\u{fe00}\u{fe0f}\u{ffa0}\u{e0100}\u{e01ef}";
        for c in [marks, blanks, selectors].concat().chars() {
            let escaped = format!("\\u{{{:x}}}", u32::from(c));
            assert_eq!(printable(c.to_string().as_bytes()), escaped);
            assert_eq!(one_line(&c.to_string()), escaped);
        }
        for text in ["o'brien \"q\"", "e\u{301}", "日本語 ü 21\u{a0}°C", "👍🏽"] {
            assert_eq!(printable(text.as_bytes()), text);
            assert_eq!(one_line(text), text);
        }
    }

    #[test]
    fn quoted_bytes_in_a_message_are_not_escaped_twice() {
        assert_eq!(
            one_line("it answers +OK\\r\\n\n\x1b"),
            "it answers +OK\\r\\n\\n\\u{1b}"
        );
    }

    #[test]
    fn texts_of_a_broker_are_escaped() {
        let rejected = Error::Rejected("no\n\x1b[31m\u{202e}".into());
        let message = Failure::from(rejected).message;
        assert!(message.ends_with("no\\n\\u{1b}[31m\\u{202e}"), "{message}");
    }

    #[test]
    fn failed_policies_are_named_as_the_cause() {
        let failure = Failure::from(Error::Refused("internal error".into()));
        assert!(failure.message.contains("statehouse policy list"));
    }

    #[test]
    fn errors_have_exit_codes() {
        let code = |error: Error| Failure::from(error).code;
        assert_eq!(code(Error::Refused("syntax error".into())), 4);
        assert_eq!(code(Error::Rejected("not authorized".into())), 4);
        assert_eq!(code(Error::QuotaExceeded("too fast".into())), 4);
        let without_store = "no state store is subscribed to requests";
        assert_eq!(code(Error::Rejected(without_store.into())), 3);
        assert_eq!(code(Error::Transport("gone".into())), 3);
        assert_eq!(code(Error::Closed("taken over".into())), 3);
        assert_eq!(code(Error::Timeout(std::time::Duration::ZERO)), 3);
        assert_eq!(code(Error::Protocol("odd".into())), 3);
        assert_eq!(code(Error::Invalid("too long".into())), 2);
    }
}
