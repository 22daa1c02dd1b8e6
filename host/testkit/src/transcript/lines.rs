//! The lines that differ from the received messages, and their corrections.

use std::collections::BTreeMap;

use data_encoding::HEXUPPER;
use statehouse_transcript::{self as language, Said, Step, Word, has_sign, quote, shown};

use super::report::{Difference, Report};
use super::run::Run;
use crate::{Came, Notification};
use statehouse_core::request::notification_topic;

impl Run {
    pub(super) fn differs(&mut self, at: usize, came: String) {
        self.report.different.push(Difference {
            line: at + 1,
            says: self.lines[at].trim().to_owned(),
            came,
        });
    }

    /// Reports a line that differs, and corrects it.
    pub(super) fn correct(&mut self, at: usize, line: String) {
        self.differs(at, line.clone());
        self.changed.entry(at).or_default().0 = Some(line);
    }

    /// The correct line for an outcome. `None` if the given payload and words are correct.
    pub(super) fn answer_line(
        &mut self,
        client: &str,
        came: &Came,
        dialect: language::Dialect,
        payload: Option<&[u8]>,
        words: &[Word],
    ) -> Result<Option<String>, String> {
        let head = shown(client);
        let reasoned = |kind: &str, reason: u8, text: &str| {
            let text = quote(text.as_bytes());
            Ok(Some(format!("{head}<{kind} {reason:#04x} {text}")))
        };
        let answer = match came {
            Came::Dropped => return Ok(Some(format!("{head}<nothing"))),
            Came::Refused { reason, text } => return reasoned("puback", *reason, text),
            Came::Disconnected { reason, text } => return reasoned("disconnect", *reason, text),
            Came::Answer(answer) => answer,
        };
        let mut implied = dialect.implied();
        // If an implied property is missing, the line must say so.
        let missing = implied.iter().any(|pair| !answer.user.contains(pair));
        let bare =
            has_sign(words, "@bare") || (payload.is_none_or(|it| it != answer.payload) && missing);
        if bare {
            implied.clear();
        }
        let said = Said {
            payload: &answer.payload,
            user: &answer.user,
            implied: &implied,
        };
        // Without a line, the outcome must differ: no payload is equal to this text.
        let differs = self
            .variables
            .differs(said, payload.unwrap_or(b"\0no line\0"), words)?;
        let sign = if bare { " @bare" } else { "" };
        let payload = quote(&answer.payload);
        Ok(differs.map(|rest| format!("{head}< {payload}{sign}{rest}")))
    }

    /// The correct line for a notification. `None` if the expected key, payload and words are
    /// correct.
    pub(super) fn notification_line(
        &mut self,
        client: &str,
        notification: &Notification,
        expected: Option<(&[u8], &[u8], &[Word])>,
    ) -> Result<Option<String>, String> {
        let (key, payload, words) = expected.unwrap_or((b"", b"\0no line\0", &[]));
        let given = words
            .iter()
            .find_map(|word| word.bare()?.strip_prefix("@topic="));
        let usual = notification_topic(&notification.client, key);
        let right_topic = notification.topic == given.unwrap_or(&usual);
        let about = Said {
            payload: &notification.payload,
            user: &notification.user,
            implied: &[],
        };
        let differs = self.variables.differs(about, payload, words)?;
        if right_topic && differs.is_none() {
            return Ok(None);
        }
        // If only the topic differs, this returns the properties for the line.
        let rest = match differs {
            Some(rest) => rest,
            None => self
                .variables
                .differs(about, b"\0no line\0", words)?
                .unwrap_or_default(),
        };
        let (key, topic) = match key_of(&notification.topic, &notification.client) {
            Some(key) => (key, String::new()),
            None => (key.to_vec(), format!(" @topic={}", notification.topic)),
        };
        let sign = if has_sign(words, "@qos=0") {
            " @qos=0"
        } else {
            ""
        };
        Ok(Some(format!(
            "{}! {} {}{topic}{sign}{rest}",
            shown(client),
            quote(&key),
            quote(&notification.payload)
        )))
    }

    /// Reports all messages to these clients that no line has matched, except failures, which no
    /// line can expect. Their lines belong after the lines that caused them.
    pub(super) fn report_unmatched(&mut self, names: Vec<String>) {
        let mut unmatched = Vec::new();
        for name in names {
            let Some(actor) = self.actors.get_mut(&name) else {
                continue;
            };
            let (answer_at, notification_at) = (actor.answer_at, actor.notification_at);
            let mut answers = std::mem::take(&mut actor.passed);
            let open = actor.answers.drain(..);
            answers.extend(open.map(|(from, came, dialect)| (from.max(answer_at), came, dialect)));
            let notifications: Vec<_> = actor.notifications.drain(..).collect();
            for (at, came, dialect) in answers {
                if came.is_failure() {
                    continue;
                }
                let line = self.answer_line(&name, &came, dialect, None, &[]);
                if let Ok(Some(line)) = line {
                    unmatched.push((at, 0, line));
                }
            }
            for (from, notification) in notifications {
                if let Ok(Some(line)) = self.notification_line(&name, &notification, None) {
                    unmatched.push((from.max(notification_at), 1, line));
                }
            }
        }
        // An answer comes before the notifications of its request.
        unmatched.sort_by_key(|(at, kind, _)| (*at, *kind));
        for (at, _, line) in unmatched {
            self.differs(at, format!("and then {line}, which no line says"));
            self.changed.entry(at).or_default().1.push(line);
        }
    }

    pub(super) fn finish(mut self) -> Report {
        let mut corrected = String::new();
        for (at, line) in self.lines.iter().enumerate() {
            let (instead, behind) = self.changed.remove(&at).unwrap_or_default();
            self.report.written += instead.iter().chain(&behind).count() as u64;
            for line in [instead.as_deref().unwrap_or(line)]
                .into_iter()
                .chain(behind.iter().map(String::as_str))
            {
                corrected.push_str(line);
                corrected.push('\n');
            }
        }
        self.report.corrected = corrected;
        self.report
    }
}

/// Of each line about an outcome: the number of later requests of its client, without the number of
/// such lines from this one on, counted up to the line at which this difference is lowest. The
/// lines up to there need as many open requests, which a sum over all steps would hide: a request
/// that fails later has no line. Requests before `quiet`, or before the connection ends, have their
/// lines before it.
pub(super) fn balances(steps: &[(usize, Step)]) -> BTreeMap<usize, isize> {
    let mut balances = BTreeMap::new();
    let mut of_clients: BTreeMap<&str, isize> = BTreeMap::new();
    for (at, step) in steps.iter().rev() {
        match step {
            Step::Client { name, .. } | Step::Close(name) => {
                of_clients.remove(name.as_str());
            }
            Step::Quiet => of_clients.clear(),
            Step::Request { client, .. } => {
                let balance = of_clients.entry(client).or_default();
                *balance = (*balance).min(0) + 1;
            }
            Step::Answer { client, .. }
            | Step::Refused { client, .. }
            | Step::Disconnected { client, .. }
            | Step::Dropped(client) => {
                let balance = of_clients.entry(client).or_default();
                *balance = (*balance).min(0) - 1;
                balances.insert(*at, *balance);
            }
            _ => {}
        }
    }
    balances
}

/// The key in a notification topic of the client; `None` for any other topic.
fn key_of(name: &str, client: &str) -> Option<Vec<u8>> {
    let hex = name.strip_prefix(&notification_topic(client, b""))?;
    HEXUPPER.decode(hex.as_bytes()).ok()
}
