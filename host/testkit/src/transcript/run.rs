//! Runs the steps of a transcript on a harness.

use std::collections::{BTreeMap, VecDeque};

use statehouse_transcript::{
    self as language, DEFAULT_CLIENT, Options, Reading, Step, Variables, Word,
};

use super::report::{Cost, Failed, Hidden, LoggedAt, Report};
use crate::client::{Publish, array};
use crate::harness::Harness;
use crate::{Came, Logged, Notification, limits};
use statehouse_core::request::Dialect;
use statehouse_core::store::INTERNAL_ERROR;

/// One client of a transcript.
#[derive(Default)]
pub(super) struct Actor {
    pub(super) id: String,
    /// Outcomes that no line has matched yet, each with the line of its request.
    pub(super) answers: VecDeque<(usize, Came, language::Dialect)>,
    /// Outcomes that have no line, each with the line behind which it belongs.
    pub(super) passed: Vec<(usize, Came, language::Dialect)>,
    /// Notifications that no line has matched yet, each with the line that caused it.
    pub(super) notifications: VecDeque<(usize, Notification)>,
    /// The last line about an answer.
    pub(super) answer_at: usize,
    /// The last line about a notification.
    pub(super) notification_at: usize,
}

impl Actor {
    /// Passes open requests that have no line, so that this line is compared with the outcome that
    /// it is about. `--update` writes no line for a failure, so a transcript may have fewer lines
    /// than requests. `balance` is that of the line, by [`balances`](super::lines::balances).
    fn pass(&mut self, balance: isize, step: &Step) {
        while let Some((from, came, _)) = self.answers.front()
            && self.answers.len() > 1
            && balance.saturating_add_unsigned(self.answers.len()) > 0
            && !is_about(step, came)
        {
            let at = self.answer_at.max(*from);
            let passed = self.answers.pop_front();
            self.passed
                .extend(passed.map(|(_, came, dialect)| (at, came, dialect)));
        }
    }
}

/// Whether a line can be about an outcome. A failure is expected only by its own text.
fn is_about(step: &Step, came: &Came) -> bool {
    match (step, came) {
        (Step::Answer { payload, .. }, Came::Answer(answer)) => match came.is_failure() {
            true => *payload == INTERNAL_ERROR,
            false => *payload == answer.payload,
        },
        (Step::Refused { .. }, Came::Refused { .. })
        | (Step::Disconnected { .. }, Came::Disconnected { .. })
        | (Step::Dropped(_), Came::Dropped) => true,
        _ => false,
    }
}

/// A transcript that runs.
pub(super) struct Run {
    pub(super) harness: Harness,
    pub(super) lines: Vec<String>,
    /// The results of [`balances`](super::lines::balances).
    balances: BTreeMap<usize, isize>,
    pub(super) actors: BTreeMap<String, Actor>,
    pub(super) variables: Variables,
    pub(super) dialect: language::Dialect,
    pub(super) report: Report,
    /// Corrected lines, and the lines to insert after them.
    pub(super) changed: BTreeMap<usize, (Option<String>, Vec<String>)>,
    pub(super) costs: Vec<Cost>,
}

impl Run {
    pub(super) fn new(harness: Harness, text: &str, balances: BTreeMap<usize, isize>) -> Self {
        Self {
            harness,
            lines: text.lines().map(str::to_owned).collect(),
            balances,
            actors: BTreeMap::new(),
            variables: Variables::default(),
            dialect: language::Dialect::Sdk,
            report: Report::default(),
            changed: BTreeMap::new(),
            costs: Vec::new(),
        }
    }

    pub(super) fn step(&mut self, at: usize, step: Step) {
        let done = match step {
            Step::Dialect(dialect) => {
                self.dialect = dialect;
                Ok(())
            }
            Step::Client { name, id, .. } => {
                // A connection with the same client id ends the earlier connection.
                let others = self.actors.iter();
                let others = others.filter(|(other, actor)| **other == name || actor.id == id);
                for other in others.map(|(other, _)| other.clone()).collect::<Vec<_>>() {
                    self.end(&other);
                }
                let actor = Actor {
                    id,
                    answer_at: at,
                    notification_at: at,
                    ..Actor::default()
                };
                self.actors.insert(name, actor);
                Ok(())
            }
            Step::Close(name) => self.close(&name),
            Step::Request {
                client,
                words,
                raw,
                options,
            } => self.request(at, &client, &words, raw, &options),
            Step::Answer { .. }
            | Step::Refused { .. }
            | Step::Disconnected { .. }
            | Step::Dropped(_) => self.answer(at, &step),
            Step::Notification {
                client,
                key,
                payload,
                properties,
            } => self.notification(at, &client, &key, &payload, &properties),
            Step::Quiet => {
                self.quiet();
                Ok(())
            }
            Step::Wait(ms) => {
                self.advance(at, self.harness.now_ms().saturating_add(ms));
                Ok(())
            }
            Step::At(now_ms) if now_ms < self.harness.now_ms() => Err(format!(
                "the time is {} by then, and never goes back",
                self.harness.now_ms()
            )),
            Step::At(now_ms) => {
                self.advance(at, now_ms);
                Ok(())
            }
            Step::Compare { left, sign, right } => {
                let now = self.now();
                self.variables.compare(&left, &sign, &right, now)
            }
        };
        if let Err(why) = done {
            self.differs(at, why);
        }
    }

    /// The present time as a clock reading, with an offset in milliseconds.
    fn now(&self) -> impl Fn(i64) -> String + use<> {
        let now = Reading::at(self.harness.now_ms(), "client");
        move |offset_ms| now.moved(offset_ms).to_string()
    }

    fn actor(&mut self, name: &str) -> Result<&mut Actor, String> {
        if name == DEFAULT_CLIENT && !self.actors.contains_key(name) {
            let actor = Actor {
                id: name.into(),
                ..Actor::default()
            };
            self.actors.insert(name.into(), actor);
        }
        let actor = self.actors.get_mut(name);
        actor.ok_or_else(|| format!("there is no client {name}: `client {name}` connects one"))
    }

    fn close(&mut self, name: &str) -> Result<(), String> {
        self.actor(name)?;
        self.end(name);
        Ok(())
    }

    /// Ends a connection. Messages that it received before count; later ones are not sent.
    fn end(&mut self, name: &str) {
        self.report_unmatched(vec![name.to_owned()]);
        if let Some(actor) = self.actors.remove(name) {
            self.harness.disconnect(&actor.id);
        }
    }

    /// Advances the clock. The effects of expiries on the way belong to line `at`.
    fn advance(&mut self, at: usize, until_ms: u64) {
        let passed = self.harness.at(until_ms);
        self.note_calls(at, passed.failures, passed.hidden_state, passed.log);
        for notification in passed.notifications {
            self.queue_notification(at, notification);
        }
    }

    /// Reports the failures, hidden state and log lines of the calls at line `at`.
    fn note_calls(
        &mut self,
        at: usize,
        failures: impl IntoIterator<Item = String>,
        hidden: impl IntoIterator<Item = String>,
        log: Vec<Logged>,
    ) {
        let line = at + 1;
        let request = self.lines[at].trim().to_owned();
        for logged in log {
            if self.report.logged.len() < limits::TRANSCRIPT_LOG_LINES_MAX {
                self.report.logged.push(LoggedAt { line, logged });
            }
        }
        for why in failures {
            let request = request.clone();
            self.report.failed.push(Failed { line, request, why });
        }
        for what in hidden {
            let request = request.clone();
            self.report.hidden.push(Hidden {
                line,
                request,
                what,
            });
        }
    }

    fn queue_notification(&mut self, at: usize, notification: Notification) {
        let mut actors = self.actors.values_mut();
        if let Some(actor) = actors.find(|actor| actor.id == notification.client) {
            actor.notifications.push_back((at, notification));
        }
    }

    fn request(
        &mut self,
        at: usize,
        client: &str,
        words: &[Word],
        raw: bool,
        options: &[Word],
    ) -> Result<(), String> {
        let now_ms = self.harness.now_ms();
        let now = self.now();
        let options = Options::read(options, &self.variables, &now)?;
        let dialect = self.dialect;
        let id = self.actor(client)?.id.clone();
        let mut payload = match raw {
            true => words.first().map_or(Vec::new(), |it| it.bytes.clone()),
            false => array(&self.variables.words(words, now)?),
        };
        if let Some(times) = options.times {
            let max = statehouse_core::limits::PACKET_BYTES_MAX_MAX;
            if payload.len().saturating_mul(times) > max {
                return Err(format!("no packet has more than {max} bytes"));
            }
            payload = payload.repeat(times);
        }
        let spoken = match dialect {
            language::Dialect::Sdk => Dialect::Sdk,
            language::Dialect::Documents => Dialect::Documents,
            language::Dialect::Preview => Dialect::Preview,
        };
        let mut publish = Publish::new(spoken, &id, payload, now_ms);
        options.shape(&mut publish.user);
        publish.qos = options.qos.unwrap_or(publish.qos);
        if options.response_topic.is_some() || options.without_response {
            publish.response_topic = options.response_topic;
        }
        if options.without_correlation {
            publish.correlation = None;
        }
        self.report.requests += 1;
        let mut came = self.harness.publish(&id, publish);
        if let Came::Answer(answer) = &mut came {
            self.costs.push(Cost {
                verb: verb(words, raw),
                fuel: answer.fuel,
                time: answer.time,
                failure: answer.failure.clone(),
            });
            let (failure, hidden) = (answer.failure.clone(), answer.hidden_state.take());
            let log = std::mem::take(&mut answer.log);
            self.note_calls(at, failure, hidden, log);
            for notification in std::mem::take(&mut answer.notifications) {
                self.queue_notification(at, notification);
            }
        }
        let actor = self.actor(client)?;
        actor.answers.push_back((at, came, dialect));
        Ok(())
    }

    /// Compares a line about the outcome of a request.
    fn answer(&mut self, at: usize, step: &Step) -> Result<(), String> {
        let (client, words) = match step {
            Step::Answer {
                client, properties, ..
            } => (client, &properties[..]),
            Step::Refused { client, .. }
            | Step::Disconnected { client, .. }
            | Step::Dropped(client) => (client, &[][..]),
            _ => return Ok(()),
        };
        let balance = self.balances.get(&at).copied().unwrap_or_default();
        let actor = self.actor(client)?;
        actor.pass(balance, step);
        actor.answer_at = at;
        let next = actor.answers.pop_front();
        let (_, came, dialect) = next.ok_or("the client has no open request")?;
        let contains = |text: &str, what: &str| text.to_lowercase().contains(&what.to_lowercase());
        let same = match (step, &came) {
            (Step::Dropped(_), Came::Dropped) => true,
            (
                Step::Refused { reason, text, .. },
                Came::Refused {
                    reason: came,
                    text: said,
                },
            )
            | (
                Step::Disconnected { reason, text, .. },
                Came::Disconnected {
                    reason: came,
                    text: said,
                },
            ) => reason == came && contains(said, text),
            // The words and the payload of an answer are compared below.
            _ => false,
        };
        if !same {
            let payload = match step {
                Step::Answer { payload, .. } => Some(&payload[..]),
                _ => None,
            };
            if let Some(line) = self.answer_line(client, &came, dialect, payload, words)? {
                match came.is_failure() {
                    true => self.differs(at, line),
                    false => self.correct(at, line),
                }
            }
        }
        if matches!(came, Came::Disconnected { .. }) {
            self.end(client);
        }
        Ok(())
    }

    fn notification(
        &mut self,
        at: usize,
        client: &str,
        key: &[u8],
        payload: &[u8],
        words: &[Word],
    ) -> Result<(), String> {
        self.actor(client)?.notification_at = at;
        let notification = loop {
            if let Some((_, notification)) = self.actor(client)?.notifications.pop_front() {
                break notification;
            }
            // A test over sockets would wait here. This one advances the clock.
            let now_ms = self.harness.now_ms();
            let soon_ms = now_ms.saturating_add(limits::TRANSCRIPT_WAIT_MS_MAX);
            match self.harness.next_expiry_ms() {
                Some(due_ms) if due_ms <= soon_ms => self.advance(at, due_ms),
                _ => return Err(format!("{client} receives no notification")),
            }
        };
        let expected = Some((key, payload, words));
        if let Some(line) = self.notification_line(client, &notification, expected)? {
            self.correct(at, line);
        }
        Ok(())
    }

    pub(super) fn quiet(&mut self) {
        self.report_unmatched(self.actors.keys().cloned().collect());
    }
}

/// The first word of a request, in upper case.
fn verb(words: &[Word], raw: bool) -> String {
    let word = words.first().filter(|_| !raw);
    let word = word.and_then(|word| word.text().ok());
    word.map_or("(bytes)".into(), str::to_uppercase)
}
