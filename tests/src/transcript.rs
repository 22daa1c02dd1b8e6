//! Runs a transcript against its own server and compares it byte for byte. With `UPDATE=1`, it
//! writes the server's output into the file instead.

use std::{
    collections::{HashMap, VecDeque},
    fs,
    path::Path,
    thread,
    time::Duration,
};

use crate::{
    hlc::Hlc,
    mosquitto::Mosquitto,
    packet::{Publish, kind},
    processor::Processor,
    property::{self, Property},
    resp,
    server::Server,
    store::{Dialect, Request, Store, notification_topic},
};
use statehouse_transcript::{
    self as language, DEFAULT_CLIENT, Options, Said, Script, Step, Variables, Word, has_sign,
    quote, shown,
};

/// Runs the transcript at `path`. At a difference, it prints the file, the line, and the expected
/// and actual text, and panics at the end.
pub fn check(path: &Path) {
    check_with(path, &[]);
}

/// Like [`check`], with these arguments of the server.
pub fn check_with(path: &Path, arguments: &[&str]) {
    check_against(path, |config| Server::with(config, arguments));
}

/// Like [`check`], with the program for this processor.
pub fn check_emulated(path: &Path, processor: &Processor) {
    let directory = tempfile::tempdir().unwrap();
    check_against(path, |config| {
        let file = directory.path().join("statehouse.toml");
        fs::write(&file, config).unwrap();
        Server::emulated(processor, &[("config", file.to_str().unwrap())])
    });
}

/// Like [`check`], with a server behind this broker.
pub fn check_behind(path: &Path, broker: &Mosquitto) {
    check_against(path, |config| {
        let file = broker.directory().join("statehouse.toml");
        fs::write(&file, config).unwrap();
        let settings = [("config", file.to_str().unwrap()), ("presence", "off")];
        Server::attached(&broker.url(), broker.address(), &settings)
    });
}

/// Runs the transcript against the server that `start` starts with its configuration lines.
fn check_against(path: &Path, start: impl FnOnce(&str) -> Server) {
    let text = fs::read_to_string(path).unwrap();
    let script = language::parse(&text).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    let update = std::env::var_os("UPDATE").is_some_and(|value| value == "1");
    let mut lines: Vec<String> = text.lines().map(String::from).collect();
    let server = start(&script.config);
    let different = run(server, script, path, &lines);
    let count = different.len();
    for (number, actual) in different {
        lines[number] = actual;
    }
    if update && count > 0 {
        fs::write(path, lines.join("\n") + "\n").unwrap();
        eprintln!("rewritten: {}", path.display());
        return;
    }
    assert_eq!(
        count,
        0,
        "lines of {} differ; UPDATE=1 writes what the server says into it",
        path.display()
    );
}

/// One client of a transcript, with its outstanding requests.
struct Actor {
    store: Store,
    outstanding: VecDeque<(Request, u16, Dialect)>,
}

struct Run {
    server: Server,
    actors: HashMap<String, Actor>,
    variables: Variables,
    dialect: Dialect,
}

/// Returns the numbers of the differing lines, with the correct lines. Prints each difference at
/// once, because it may cause a panic in a later step.
fn run(server: Server, script: Script, path: &Path, lines: &[String]) -> Vec<(usize, String)> {
    let mut run = Run {
        server,
        actors: HashMap::new(),
        variables: Variables::default(),
        dialect: Dialect::Sdk,
    };
    let mut different = Vec::new();
    for (number, step) in script.steps {
        // If the step panics, drop prints the place.
        let place = Place(format!("{}:{}", path.display(), number + 1));
        if let Some(actual) = run.step(step) {
            eprintln!(
                "{}\n  the transcript says {}\n  the server says     {actual}",
                place.0, lines[number]
            );
            different.push((number, actual));
        }
        drop(place);
    }
    let place = Place(format!("{}: at the end", path.display()));
    run.quiet();
    drop(place);
    different
}

/// Prints its text if it is dropped during a panic.
struct Place(String);

impl Drop for Place {
    fn drop(&mut self) {
        if thread::panicking() {
            eprintln!("in {}", self.0);
        }
    }
}

impl Run {
    fn actor(&mut self, name: &str) -> &mut Actor {
        if name == DEFAULT_CLIENT && !self.actors.contains_key(name) {
            self.open(name, name);
        }
        self.actors
            .get_mut(name)
            .unwrap_or_else(|| panic!("there is no client {name}"))
    }

    fn open(&mut self, name: &str, id: &str) {
        let actor = Actor {
            store: self.server.store(id),
            outstanding: VecDeque::new(),
        };
        self.actors.insert(name.into(), actor);
    }

    /// Runs one step. Returns the correct line if the step's line differs.
    fn step(&mut self, step: Step) -> Option<String> {
        match step {
            Step::Dialect(dialect) => self.dialect = dialect,
            Step::Client {
                name,
                id,
                subscription,
            } => {
                self.open(&name, &id);
                if let Some((filter, qos)) = subscription {
                    let client = &mut self.actor(&name).store.client;
                    assert_eq!(client.subscribe(&filter, qos), qos & 3);
                }
            }
            Step::Close(name) => {
                let actor = self.actors.remove(&name).expect("a client to close");
                actor.store.client.disconnect();
            }
            Step::Request {
                client,
                words,
                raw,
                options,
            } => self.request(&client, &words, raw, &options),
            Step::Answer {
                client,
                payload,
                properties,
            } => return self.answer(&client, &payload, &properties),
            Step::Refused {
                client,
                reason,
                text,
            } => return self.refused(&client, reason, &text),
            Step::Disconnected {
                client,
                reason,
                text,
            } => {
                let mut actor = self.actors.remove(&client).expect("a client");
                let ack = actor.store.client.expect_disconnect(reason);
                contains(&ack.text(), &text);
            }
            Step::Dropped(client) => {
                let actor = self.actor(&client);
                actor.outstanding.pop_front().expect("a request before");
                actor.store.expect_nothing();
            }
            Step::Notification {
                client,
                key,
                payload,
                properties,
            } => return self.notification(&client, &key, &payload, &properties),
            Step::Quiet => self.quiet(),
            Step::Wait(ms) => thread::sleep(Duration::from_millis(ms)),
            Step::At(_) => panic!("a server's clock cannot be set"),
            Step::Compare { left, sign, right } => {
                let now = |offset_ms| Hlc::now(offset_ms).to_string();
                let compared = self.variables.compare(&left, &sign, &right, now);
                compared.unwrap();
            }
        }
        None
    }

    fn request(&mut self, client: &str, words: &[Word], raw: bool, options: &[Word]) {
        let now = |offset_ms| Hlc::now(offset_ms).to_string();
        let payload = if raw {
            words[0].bytes.clone()
        } else {
            let words = self.variables.words(words, now).unwrap();
            resp::array(&words)
        };
        let dialect = self.dialect;
        let options = Options::read(options, &self.variables, now).unwrap();
        let actor = self.actor(client);
        actor.store.dialect = dialect;
        let mut request = actor.store.request(payload);
        options.shape(&mut request.user);
        request.qos = options.qos.unwrap_or(request.qos);
        request.expiry_s = options.expiry_s;
        request.content_type = options.content_type;
        if options.response_topic.is_some() || options.without_response {
            request.response_topic = options.response_topic;
        }
        if options.without_correlation {
            request.correlation = None;
        }
        if let Some(times) = options.times {
            request.payload = request.payload.repeat(times);
        }
        let packet_id = actor.store.client.start(request.publish());
        actor.outstanding.push_back((request, packet_id, dialect));
    }

    fn answer(&mut self, client: &str, payload: &[u8], properties: &[Word]) -> Option<String> {
        let actor = self.actor(client);
        let (request, packet_id, dialect) =
            actor.outstanding.pop_front().expect("a request before");
        let answer = actor.store.finish(&request, packet_id);
        if let Some(ack) = &answer.ack {
            assert_eq!(ack.reason, 0, "the request was answered, yet {ack:?}");
        }
        let publish = answer.publish;
        assert_eq!(Some(&publish.topic), request.response_topic.as_ref());
        assert_eq!(publish.qos, 1, "QoS of the answer");
        assert!(!publish.retain, "RETAIN of the answer");
        check_other_properties(&publish, &request);
        let bare = has_sign(properties, "@bare");
        let implied = if bare { vec![] } else { dialect.implied() };
        let differs = self.differs(&publish, payload, properties, &implied);
        let sign = if bare { " @bare" } else { "" };
        let head = format!("{}<", shown(client));
        differs.map(|rest| format!("{head} {}{sign}{rest}", quote(&publish.payload)))
    }

    fn refused(&mut self, client: &str, reason: u8, text: &str) -> Option<String> {
        let actor = self.actor(client);
        let (request, packet_id, _) = actor.outstanding.pop_front().expect("a request before");
        let ack_kind = if request.qos == 2 {
            kind::PUBREC
        } else {
            kind::PUBACK
        };
        let ack = actor.store.client.take_ack(ack_kind, packet_id);
        contains(&ack.text(), text);
        // A refused request has no answer.
        actor.store.client.expect_nothing();
        let line = format!(
            "{}<puback {:#04x} {}",
            shown(client),
            ack.reason,
            quote(text.as_bytes())
        );
        (ack.reason != reason).then_some(line)
    }

    fn notification(
        &mut self,
        client: &str,
        key: &[u8],
        payload: &[u8],
        properties: &[Word],
    ) -> Option<String> {
        let store = &mut self.actor(client).store;
        let publish = store.notification();
        assert_eq!(publish.topic, notification_topic(&store.id, key));
        assert!(!publish.retain && !publish.dup, "flags of {publish:?}");
        let qos = if has_sign(properties, "@qos=0") { 0 } else { 1 };
        assert_eq!(publish.qos, qos, "QoS of the notification");
        assert!(
            publish
                .properties
                .iter()
                .all(|p| matches!(p, Property::User(..))),
            "more than user properties: {publish:?}"
        );
        let differs = self.differs(&publish, payload, properties, &[]);
        let sign = if qos == 0 { " @qos=0" } else { "" };
        let head = format!("{}! {}", shown(client), quote(key));
        differs.map(|rest| format!("{head} {}{sign}{rest}", quote(&publish.payload)))
    }

    /// Compares payload and user properties. At a difference, returns the user properties for the
    /// correct line.
    fn differs(
        &mut self,
        publish: &Publish,
        payload: &[u8],
        words: &[Word],
        implied: &[(String, String)],
    ) -> Option<String> {
        let received = property::users(&publish.properties);
        for (name, value) in &received {
            if name == "__ts" || name == "Timestamp" {
                let version = Hlc::parse_padded(value).unwrap();
                assert_eq!(version.node, "StateStore", "the node of {value}");
            }
        }
        let said = Said {
            payload: &publish.payload,
            user: &received,
            implied,
        };
        self.variables.differs(said, payload, words).unwrap()
    }

    fn quiet(&mut self) {
        for (name, actor) in &mut self.actors {
            assert!(
                actor.outstanding.is_empty(),
                "{name} still waits for {} answers",
                actor.outstanding.len()
            );
            actor.store.dialect = Dialect::Sdk;
            actor.store.expect_nothing();
        }
    }
}

/// Checks all properties of an answer except user properties.
fn check_other_properties(publish: &Publish, request: &Request) {
    let mut expiry_s = None;
    for property in &publish.properties {
        match property {
            Property::User(..) => {}
            Property::CorrelationData(data) => assert_eq!(Some(data), request.correlation.as_ref()),
            Property::ContentType(what) => assert_eq!(what, "application/octet-stream"),
            Property::MessageExpiry(s) => expiry_s = Some(*s),
            other => panic!("an answer with {other:?}"),
        }
    }
    match (expiry_s, request.expiry_s) {
        (None, None) => {}
        (Some(left), Some(of)) => assert!(left <= of && of - left <= 30, "{left} of {of}"),
        (left, of) => panic!("expiry {left:?} of {of:?}"),
    }
}

fn contains(text: &str, what: &str) {
    assert!(
        text.to_lowercase().contains(&what.to_lowercase()),
        "the reason {text:?} does not say {what:?}"
    );
}
