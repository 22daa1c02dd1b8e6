//! Runs transcripts on a harness: conversations in files, compared byte for byte.
//!
//! `statehouse_transcript` defines the format. A run reports every line that differs from the
//! received message, every request that a fresh instance answers differently, and the corrected
//! text. The clock is scripted: it begins at 1700000000000 (or at the time of the snapshot) and
//! `wait` advances it. If a line expects a notification that has not arrived, the clock advances to
//! the next expiry of a key.

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use statehouse_transcript::{
    self as language, DEFAULT_CLIENT, Options, Reading, Said, Script, Step, Variables, Word,
    has_sign, quote, shown,
};

use super::client::{Publish, array};
use super::harness::Harness;
use super::{Came, Notification};
use crate::limits;
use statehouse_core::request::{Dialect, NOTIFICATION_TOPICS};

/// The result of a transcript.
#[derive(Debug, Default)]
pub struct Report {
    /// The number of requests.
    pub requests: u64,
    /// The lines that differ from the received messages.
    pub different: Vec<Difference>,
    /// The requests that a fresh instance answers differently.
    pub hidden: Vec<Hidden>,
    /// The corrected text.
    pub corrected: String,
}

impl Report {
    /// Whether there are no differences and no hidden state.
    pub fn is_well(&self) -> bool {
        self.different.is_empty() && self.hidden.is_empty()
    }
}

/// A line that differs from the received message.
#[derive(Debug, PartialEq, Eq)]
pub struct Difference {
    /// The number of the line, from 1.
    pub line: usize,
    /// The text of the line.
    pub says: String,
    /// The correct line, or why the line cannot hold.
    pub came: String,
}

/// A request that a fresh instance answers differently.
#[derive(Debug, PartialEq, Eq)]
pub struct Hidden {
    /// The number of the line, from 1.
    pub line: usize,
    /// The text of the line.
    pub request: String,
    /// The difference.
    pub what: String,
}

/// The cost of one request of a transcript.
#[derive(Debug, PartialEq, Eq)]
pub struct Cost {
    /// The first word of the request, in upper case.
    pub verb: String,
    /// The fuel of the request.
    pub fuel: u64,
    /// The time of the request, including all work of the store.
    pub time: Duration,
}

/// Runs a transcript with the policy of a harness, on the initial state of the harness. The error
/// is about the transcript itself: a malformed line, or a setting that has no meaning here.
pub fn run(harness: &Harness, text: &str) -> Result<Report, String> {
    run_script(harness.anew(), text).map(|run| run.finish())
}

/// Measures the cost of each request of a transcript.
pub(super) fn costs(harness: &Harness, text: &str) -> Result<Vec<Cost>, String> {
    run_script(harness.anew().once(), text).map(|run| run.costs)
}

fn run_script(mut harness: Harness, text: &str) -> Result<Run, String> {
    let script = language::parse(text)?;
    configure(&mut harness, &script)?;
    let mut run = Run {
        harness,
        lines: text.lines().map(str::to_owned).collect(),
        actors: BTreeMap::new(),
        variables: Variables::default(),
        dialect: language::Dialect::Sdk,
        report: Report::default(),
        changed: BTreeMap::new(),
        costs: Vec::new(),
    };
    for (at, step) in script.steps {
        run.step(at, step);
    }
    run.quiet();
    Ok(run)
}

/// Applies the lines of the configuration. Only settings of a store without a network are allowed.
fn configure(harness: &mut Harness, script: &Script) -> Result<(), String> {
    let table: toml::Table = script
        .config
        .parse()
        .map_err(|error| format!("the lines with `config`: {error}"))?;
    let mut quota = harness.quota();
    let (mut client_keys, mut client_bytes) = (None, None);
    for (name, value) in &table {
        let number = || {
            let number = value.as_integer().and_then(|it| u64::try_from(it).ok());
            number.ok_or_else(|| format!("config {name} is a number of keys or bytes"))
        };
        match name.as_str() {
            "max_keys" => quota.keys_max = number()?,
            "max_bytes" => quota.bytes_max = number()?,
            "max_client_keys" => client_keys = Some(number()?),
            "max_client_bytes" => client_bytes = Some(number()?),
            "max_key_bytes" => quota.key_bytes_max = number()?,
            "max_value_bytes" => quota.value_bytes_max = number()?,
            "node" => harness.set_node(value.as_str().ok_or("config node is a text")?),
            "dialect" => harness.force_dialect(match value.as_str() {
                Some("auto") => None,
                Some("sdk") => Some(Dialect::Sdk),
                Some("documents") => Some(Dialect::Documents),
                _ => return Err("config dialect is \"auto\", \"sdk\" or \"documents\"".into()),
            }),
            _ => {
                return Err(format!(
                    "config {name} means nothing without a server; the settings of a transcript are max_keys, max_bytes, max_client_keys, max_client_bytes, max_key_bytes, max_value_bytes, dialect and node"
                ));
            }
        }
    }
    harness.set_quota(quota.with_client(client_keys, client_bytes));
    Ok(())
}

/// One client of a transcript.
#[derive(Default)]
struct Actor {
    id: String,
    /// Outcomes that no line has matched yet, each with the line of its request.
    answers: VecDeque<(usize, Came, language::Dialect)>,
    /// Notifications that no line has matched yet, each with the line that caused it.
    notifications: VecDeque<(usize, Notification)>,
    /// The last line about an answer.
    answer_at: usize,
    /// The last line about a notification.
    notification_at: usize,
}

struct Run {
    harness: Harness,
    lines: Vec<String>,
    actors: BTreeMap<String, Actor>,
    variables: Variables,
    dialect: language::Dialect,
    report: Report,
    /// Corrected lines, and the lines to insert after them.
    changed: BTreeMap<usize, (Option<String>, Vec<String>)>,
    costs: Vec<Cost>,
}

impl Run {
    fn step(&mut self, at: usize, step: Step) {
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
            Step::Compare { left, sign, right } => self.variables.compare(&left, &sign, &right),
        };
        if let Err(why) = done {
            self.differs(at, why);
        }
    }

    fn differs(&mut self, at: usize, came: String) {
        self.report.different.push(Difference {
            line: at + 1,
            says: self.lines[at].trim().to_owned(),
            came,
        });
    }

    /// Reports a line that differs, and corrects it.
    fn correct(&mut self, at: usize, line: String, why: &str) {
        self.differs(at, format!("{line}{why}"));
        self.changed.entry(at).or_default().0 = Some(line);
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

    /// Advances the clock. Notifications on the way belong to line `at`.
    fn advance(&mut self, at: usize, until_ms: u64) {
        for notification in self.harness.at(until_ms) {
            self.queue_notification(at, notification);
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
        let now = |offset_ms| Reading::at(now_ms, "client").moved(offset_ms).to_string();
        let options = Options::read(options, &self.variables, now)?;
        let dialect = self.dialect;
        let id = self.actor(client)?.id.clone();
        let mut payload = if raw {
            words
                .first()
                .map(|word| word.bytes.clone())
                .unwrap_or_default()
        } else {
            array(words)
        };
        if let Some(times) = options.times {
            if payload.len().saturating_mul(times) > statehouse_core::limits::PACKET_BYTES_MAX_MAX {
                return Err(format!(
                    "no packet has more than {} bytes",
                    statehouse_core::limits::PACKET_BYTES_MAX_MAX
                ));
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
            });
            if let Some(what) = answer.hidden_state.take() {
                self.report.hidden.push(Hidden {
                    line: at + 1,
                    request: self.lines[at].trim().to_owned(),
                    what,
                });
            }
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
        let actor = self.actor(client)?;
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
            (Step::Answer { .. }, Came::Answer(_)) => false,
            _ => false,
        };
        if !same {
            let payload = match step {
                Step::Answer { payload, .. } => Some(&payload[..]),
                _ => None,
            };
            if let Some((line, why)) = self.answer_line(client, &came, dialect, payload, words)? {
                self.correct(at, line, &why);
            }
        }
        if matches!(came, Came::Disconnected { .. }) {
            self.actors.remove(client);
        }
        Ok(())
    }

    /// The correct line for an outcome, with the failure of the policy as a note. `None` if the
    /// given payload and words are correct.
    fn answer_line(
        &mut self,
        client: &str,
        came: &Came,
        dialect: language::Dialect,
        payload: Option<&[u8]>,
        words: &[Word],
    ) -> Result<Option<(String, String)>, String> {
        let head = shown(client);
        let reasoned = |kind: &str, reason: u8, text: &str| {
            let line = format!("{head}<{kind} {reason:#04x} {}", quote(text.as_bytes()));
            Ok(Some((line, String::new())))
        };
        let answer = match came {
            Came::Dropped => return Ok(Some((format!("{head}<nothing"), String::new()))),
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
        let why = answer.failure.as_ref();
        let why = why.map_or(String::new(), |why| {
            format!("   (the policy failed: {why})")
        });
        Ok(differs.map(|rest| {
            let line = format!("{head}< {}{sign}{rest}", quote(&answer.payload));
            (line, why)
        }))
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
            self.correct(at, line, "");
        }
        Ok(())
    }

    /// The correct line for a notification. `None` if the expected key, payload and words are
    /// correct.
    fn notification_line(
        &mut self,
        client: &str,
        notification: &Notification,
        expected: Option<(&[u8], &[u8], &[Word])>,
    ) -> Result<Option<String>, String> {
        let (key, payload, words) = expected.unwrap_or((b"", b"\0no line\0", &[]));
        let given = words
            .iter()
            .find_map(|word| word.bare()?.strip_prefix("@topic="));
        let usual = topic(&notification.client, key);
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

    fn quiet(&mut self) {
        self.report_unmatched(self.actors.keys().cloned().collect());
    }

    /// Reports all messages to these clients that no line has matched. Their lines belong after the
    /// lines that caused them.
    fn report_unmatched(&mut self, names: Vec<String>) {
        let mut unmatched = Vec::new();
        for name in names {
            let Some(actor) = self.actors.get_mut(&name) else {
                continue;
            };
            let (answer_at, notification_at) = (actor.answer_at, actor.notification_at);
            let answers: Vec<_> = actor.answers.drain(..).collect();
            let notifications: Vec<_> = actor.notifications.drain(..).collect();
            for (from, came, dialect) in answers {
                let line = self.answer_line(&name, &came, dialect, None, &[]);
                if let Ok(Some((line, why))) = line {
                    unmatched.push((from.max(answer_at), 0, line, why));
                }
            }
            for (from, notification) in notifications {
                if let Ok(Some(line)) = self.notification_line(&name, &notification, None) {
                    unmatched.push((from.max(notification_at), 1, line, String::new()));
                }
            }
        }
        // An answer comes before the notifications of its request.
        unmatched.sort_by_key(|(at, kind, ..)| (*at, *kind));
        for (at, _, line, why) in unmatched {
            self.differs(at, format!("and then {line}{why}, which no line says"));
            self.changed.entry(at).or_default().1.push(line);
        }
    }

    fn finish(mut self) -> Report {
        let mut corrected = String::new();
        for (at, line) in self.lines.iter().enumerate() {
            let (instead, behind) = self.changed.remove(&at).unwrap_or_default();
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

/// The first word of a request, in upper case.
fn verb(words: &[Word], raw: bool) -> String {
    let word = words.first().filter(|_| !raw);
    let word = word.and_then(|word| word.text().ok());
    word.map_or("(bytes)".into(), str::to_uppercase)
}

/// The topic of a client's notifications about a key (the protocol, section 8).
fn topic(client: &str, key: &[u8]) -> String {
    let hex = |bytes: &[u8]| -> String { bytes.iter().map(|byte| format!("{byte:02X}")).collect() };
    format!(
        "{NOTIFICATION_TOPICS}/{}/command/notify/{}",
        hex(client.as_bytes()),
        hex(key)
    )
}

/// The key in a notification topic of the client; `None` for any other topic.
fn key_of(name: &str, client: &str) -> Option<Vec<u8>> {
    let hex = name.strip_prefix(&topic(client, b""))?;
    let digits = hex.as_bytes().chunks(2);
    digits
        .map(|pair| u8::from_str_radix(std::str::from_utf8(pair).ok()?, 16).ok())
        .collect()
}
