//! Transcripts over a harness: conversations in files, compared byte for byte.
//!
//! What enters: a text in the language of `statehouse_transcript`, and a harness. What leaves: every line that says
//! something else than what came, every request that a fresh instance answers otherwise, and the text as it should
//! be. The clock is the script's: it begins at 1700000000000 (or at the time of the snapshot), `wait` moves it, and a
//! notification that has not come yet is waited for until the next key has expired.

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

/// What a transcript came to.
#[derive(Debug, Default)]
pub struct Report {
    /// Requests in it.
    pub requests: u64,
    /// Lines that say something else than what came.
    pub different: Vec<Difference>,
    /// Requests that a fresh instance answers otherwise.
    pub hidden: Vec<Hidden>,
    /// The text as it should be.
    pub corrected: String,
}

impl Report {
    /// Whether everything is as it should be.
    pub fn is_well(&self) -> bool {
        self.different.is_empty() && self.hidden.is_empty()
    }
}

/// A line that says something else than what came.
#[derive(Debug, PartialEq, Eq)]
pub struct Difference {
    /// Its number, from 1.
    pub line: usize,
    /// What it says.
    pub says: String,
    /// What it should say, or why it cannot hold.
    pub came: String,
}

/// A request that a fresh instance answers otherwise.
#[derive(Debug, PartialEq, Eq)]
pub struct Hidden {
    /// The number of its line, from 1.
    pub line: usize,
    /// The line.
    pub request: String,
    /// What is different.
    pub what: String,
}

/// What one request of a transcript cost.
#[derive(Debug, PartialEq, Eq)]
pub struct Cost {
    /// Its first word, in upper case.
    pub verb: String,
    /// Fuel.
    pub fuel: u64,
    /// Time, with all that the store does about it.
    pub time: Duration,
}

/// Runs a transcript over the policy of a harness, from the table that the harness began with. The error is about
/// the transcript itself: a line that cannot be read, or a setting that means nothing here.
pub fn run(harness: &Harness, text: &str) -> Result<Report, String> {
    converse(harness.anew(), text).map(|run| run.finish())
}

/// What each request of a transcript cost.
pub(super) fn costs(harness: &Harness, text: &str) -> Result<Vec<Cost>, String> {
    converse(harness.anew().once(), text).map(|run| run.costs)
}

fn converse(mut harness: Harness, text: &str) -> Result<Run, String> {
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

/// Lines of the configuration that mean something to a store without a network.
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
                    "config {name} means nothing without a server: here are max_keys, max_bytes, max_client_keys, max_client_bytes, max_key_bytes, max_value_bytes, dialect and node"
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
    /// What came and no line has said yet, with the line of what it came from.
    answers: VecDeque<(usize, Came, language::Dialect)>,
    told: VecDeque<(usize, Notification)>,
    /// The last lines that said something of either.
    answer_at: usize,
    told_at: usize,
}

struct Run {
    harness: Harness,
    lines: Vec<String>,
    actors: BTreeMap<String, Actor>,
    variables: Variables,
    dialect: language::Dialect,
    report: Report,
    /// Lines as they should be, and what should stand behind them.
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
                // Who connects under an id that is connected ends the connection before.
                let others = self.actors.iter();
                let others = others.filter(|(other, actor)| **other == name || actor.id == id);
                for other in others.map(|(other, _)| other.clone()).collect::<Vec<_>>() {
                    self.end(&other);
                }
                let actor = Actor {
                    id,
                    answer_at: at,
                    told_at: at,
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
                self.pass(at, self.harness.now_ms().saturating_add(ms));
                Ok(())
            }
            Step::At(now_ms) if now_ms < self.harness.now_ms() => Err(format!(
                "the time is {} by then, and never goes back",
                self.harness.now_ms()
            )),
            Step::At(now_ms) => {
                self.pass(at, now_ms);
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

    /// A line that should be another.
    fn should_be(&mut self, at: usize, line: String, why: &str) {
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

    /// A connection is over: what it was sent before counts, what it would be sent after does not.
    fn end(&mut self, name: &str) {
        self.unsaid(vec![name.to_owned()]);
        if let Some(actor) = self.actors.remove(name) {
            self.harness.disconnect(&actor.id);
        }
    }

    /// Lets time pass; what is told on the way is noted as of line `at`.
    fn pass(&mut self, at: usize, until_ms: u64) {
        for told in self.harness.at(until_ms) {
            self.note(at, told);
        }
    }

    fn note(&mut self, at: usize, told: Notification) {
        let mut actors = self.actors.values_mut();
        if let Some(actor) = actors.find(|actor| actor.id == told.client) {
            actor.told.push_back((at, told));
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
            for told in std::mem::take(&mut answer.notifications) {
                self.note(at, told);
            }
        }
        let actor = self.actor(client)?;
        actor.answers.push_back((at, came, dialect));
        Ok(())
    }

    /// A line about what became of a request.
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
        let (_, came, dialect) = next.ok_or("no request is open that this could be about")?;
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
            if let Some((line, why)) = self.line(client, &came, dialect, payload, words)? {
                self.should_be(at, line, &why);
            }
        }
        if matches!(came, Came::Disconnected { .. }) {
            self.actors.remove(client);
        }
        Ok(())
    }

    /// The line that says what came, and why it came so; none where the line says just that.
    fn line(
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
        // Where something implied is missing, the line has to say so.
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
        // No line at all says nothing that could be the same.
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
        self.actor(client)?.told_at = at;
        let told = loop {
            if let Some((_, told)) = self.actor(client)?.told.pop_front() {
                break told;
            }
            // Over sockets this is waited for; here time comes when it is asked for.
            let now_ms = self.harness.now_ms();
            let soon_ms = now_ms.saturating_add(limits::TRANSCRIPT_WAIT_MS_MAX);
            match self.harness.next_expiry_ms() {
                Some(due_ms) if due_ms <= soon_ms => self.pass(at, due_ms),
                _ => return Err(format!("{client} is told nothing")),
            }
        };
        if let Some(line) = self.told(client, &told, Some((key, payload, words)))? {
            self.should_be(at, line, "");
        }
        Ok(())
    }

    /// The line that says what a watcher was told; none where `said` says just that.
    fn told(
        &mut self,
        client: &str,
        told: &Notification,
        said: Option<(&[u8], &[u8], &[Word])>,
    ) -> Result<Option<String>, String> {
        let (key, payload, words) = said.unwrap_or((b"", b"\0no line\0", &[]));
        let given = words
            .iter()
            .find_map(|word| word.bare()?.strip_prefix("@topic="));
        let usual = topic(&told.client, key);
        let right_topic = told.topic == given.unwrap_or(&usual);
        let about = Said {
            payload: &told.payload,
            user: &told.user,
            implied: &[],
        };
        let differs = self.variables.differs(about, payload, words)?;
        if right_topic && differs.is_none() {
            return Ok(None);
        }
        // The properties as they were said, where only the topic differs.
        let rest = match differs {
            Some(rest) => rest,
            None => self
                .variables
                .differs(about, b"\0no line\0", words)?
                .unwrap_or_default(),
        };
        let (key, topic) = match key_of(&told.topic, &told.client) {
            Some(key) => (key, String::new()),
            None => (key.to_vec(), format!(" @topic={}", told.topic)),
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
            quote(&told.payload)
        )))
    }

    fn quiet(&mut self) {
        self.unsaid(self.actors.keys().cloned().collect());
    }

    /// Whatever these were sent and no line has said: it should stand behind what it came from.
    fn unsaid(&mut self, names: Vec<String>) {
        let mut unsaid = Vec::new();
        for name in names {
            let Some(actor) = self.actors.get_mut(&name) else {
                continue;
            };
            let (answer_at, told_at) = (actor.answer_at, actor.told_at);
            let answers: Vec<_> = actor.answers.drain(..).collect();
            let told: Vec<_> = actor.told.drain(..).collect();
            for (from, came, dialect) in answers {
                let line = self.line(&name, &came, dialect, None, &[]);
                if let Ok(Some((line, why))) = line {
                    unsaid.push((from.max(answer_at), 0, line, why));
                }
            }
            for (from, told) in told {
                if let Ok(Some(line)) = self.told(&name, &told, None) {
                    unsaid.push((from.max(told_at), 1, line, String::new()));
                }
            }
        }
        // An answer stands before what it leads to.
        unsaid.sort_by_key(|(at, kind, ..)| (*at, *kind));
        for (at, _, line, why) in unsaid {
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

/// What a request is called.
fn verb(words: &[Word], raw: bool) -> String {
    let word = words.first().filter(|_| !raw);
    let word = word.and_then(|word| word.text().ok());
    word.map_or("(bytes)".into(), str::to_uppercase)
}

/// The topic on which a client hears of a key (the protocol, section 8).
fn topic(client: &str, key: &[u8]) -> String {
    let hex = |bytes: &[u8]| -> String { bytes.iter().map(|byte| format!("{byte:02X}")).collect() };
    format!(
        "{NOTIFICATION_TOPICS}/{}/command/notify/{}",
        hex(client.as_bytes()),
        hex(key)
    )
}

/// The key of such a topic, where it is one.
fn key_of(name: &str, client: &str) -> Option<Vec<u8>> {
    let hex = name.strip_prefix(&topic(client, b""))?;
    let digits = hex.as_bytes().chunks(2);
    digits
        .map(|pair| u8::from_str_radix(std::str::from_utf8(pair).ok()?, 16).ok())
        .collect()
}
