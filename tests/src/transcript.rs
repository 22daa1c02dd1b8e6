//! Runs a transcript against a server of its own and compares byte for byte. With `UPDATE=1` it writes what
//! came into the file instead.

use std::{
    collections::{HashMap, VecDeque},
    fs,
    path::Path,
    thread,
    time::Duration,
};

use crate::{
    client::Client,
    connect::Connect,
    hlc::Hlc,
    packet::{Publish, kind},
    property::{self, Property},
    quote::{Word, quote},
    resp,
    script::{self, DEFAULT_CLIENT, Script, Step},
    server::Server,
    store::{Dialect, Request, Store, notification_topic},
};

type Properties = Vec<(String, String)>;

/// Runs the transcript at `path`. Panics with the name of the file, the line, what it says and what came.
pub fn check(path: &Path) {
    let text = fs::read_to_string(path).unwrap();
    let script = script::parse(&text).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    let update = std::env::var_os("UPDATE").is_some_and(|value| value == "1");
    let mut lines: Vec<String> = text.lines().map(String::from).collect();
    let different = run(script, path, &lines);
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

/// One client of a transcript with the requests that it waits for.
struct Actor {
    store: Store,
    outstanding: VecDeque<(Request, u16, Dialect)>,
}

struct Run {
    server: Server,
    actors: HashMap<String, Actor>,
    variables: HashMap<String, String>,
    dialect: Dialect,
}

/// The lines that differ and what should stand there. Each is shown at once, since a later step may panic for it.
fn run(script: Script, path: &Path, lines: &[String]) -> Vec<(usize, String)> {
    let mut run = Run {
        server: Server::with_config(&script.config),
        actors: HashMap::new(),
        variables: HashMap::new(),
        dialect: Dialect::Sdk,
    };
    let mut different = Vec::new();
    for (number, step) in script.steps {
        // What the step does may panic deep below; this says where.
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

/// Names the place of a panic.
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
        let client = Client::connect(self.server.address(), &Connect::new(id));
        let actor = Actor {
            store: Store::new(client, id),
            outstanding: VecDeque::new(),
        };
        self.actors.insert(name.into(), actor);
    }

    /// What should stand on the line where it is something else.
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
            Step::Compare { left, sign, right } => {
                let (left, right) = (self.hlc(&left), self.hlc(&right));
                let holds = match sign.as_str() {
                    "<" => left < right,
                    "=" => left == right,
                    ">" => left > right,
                    _ => panic!("versions are compared with <, = and >"),
                };
                assert!(holds, "{left} {sign} {right} does not hold");
            }
        }
        None
    }

    fn hlc(&self, variable: &str) -> Hlc {
        Hlc::parse_padded(&self.value(variable)).unwrap()
    }

    /// What a word means: itself, `$now` or a variable, both with `+ms` or `-ms`.
    fn value(&self, word: &str) -> String {
        let Some(name) = word.strip_prefix('$') else {
            return word.into();
        };
        let (name, offset_ms) = match name.find(['+', '-']) {
            Some(at) => (&name[..at], name[at..].parse().unwrap()),
            None => (name, 0),
        };
        if name == "now" {
            return Hlc::now(offset_ms).to_string();
        }
        let value = self.variables.get(name);
        let value = value.unwrap_or_else(|| panic!("${name} has no value yet"));
        if offset_ms == 0 {
            return value.clone();
        }
        Hlc::parse_padded(value)
            .unwrap()
            .moved(offset_ms)
            .to_string()
    }

    fn request(&mut self, client: &str, words: &[Word], raw: bool, options: &[Word]) {
        let payload = if raw {
            words[0].bytes.clone()
        } else {
            let arguments: Vec<&[u8]> = words.iter().map(|word| &word.bytes[..]).collect();
            resp::array(&arguments)
        };
        let dialect = self.dialect;
        let mut request = {
            let store = &mut self.actor(client).store;
            store.dialect = dialect;
            store.request(payload)
        };
        let given: Vec<(String, String)> = options
            .iter()
            .filter_map(|word| {
                let (name, value) = word.text().unwrap().split_once('=')?;
                let value = if word.quoted {
                    value.into()
                } else {
                    self.value(value)
                };
                Some((name.to_string(), value))
            })
            .collect();
        for (name, _) in &given {
            request.user.retain(|(had, _)| had != name);
        }
        for option in options {
            match option.text().unwrap() {
                "-@response" => request.response_topic = None,
                "-@correlation" => request.correlation = None,
                other => {
                    if let Some(name) = other.strip_prefix('-') {
                        request.user.retain(|(had, _)| had != name);
                    }
                }
            }
        }
        for (name, value) in given {
            match name.as_str() {
                "@qos" => request.qos = value.parse().unwrap(),
                "@expiry" => request.expiry_s = Some(value.parse().unwrap()),
                "@type" => request.content_type = Some(value),
                "@response" => request.response_topic = Some(value),
                "@times" => request.payload = request.payload.repeat(value.parse().unwrap()),
                _ => request.user.push((name, value)),
            }
        }
        let actor = self.actor(client);
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
        let implied = if bare {
            vec![]
        } else {
            dialect.answer_properties()
        };
        let same = self.same(&publish, payload, properties, &implied);
        let sign = if bare { " @bare" } else { "" };
        let head = format!("{}<", shown(client));
        same.err()
            .map(|rest| format!("{head} {}{sign}{rest}", quote(&publish.payload)))
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
        // Refused, so no answer either.
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
        let same = self.same(&publish, payload, properties, &[]);
        let sign = if qos == 0 { " @qos=0" } else { "" };
        let head = format!("{}! {}", shown(client), quote(key));
        same.err()
            .map(|rest| format!("{head} {}{sign}{rest}", quote(&publish.payload)))
    }

    /// Compares payload and user properties (in any order); binds variables. The error is the user properties
    /// as they should stand on the line, without the implied ones.
    fn same(
        &mut self,
        publish: &Publish,
        payload: &[u8],
        words: &[Word],
        implied: &[(String, String)],
    ) -> Result<(), String> {
        let came = property::users(&publish.properties);
        for (name, value) in &came {
            if name == "__ts" || name == "Timestamp" {
                let version = Hlc::parse_padded(value).unwrap();
                assert_eq!(version.node, "StateStore", "the node of {value}");
            }
        }
        let mut expected: Properties = implied.to_vec();
        let mut names: HashMap<String, String> = HashMap::new();
        for word in words {
            let text = word.text().unwrap();
            if word.bare().is_some_and(|word| word.starts_with('@')) {
                continue;
            }
            let (name, value) = text.split_once('=').expect("a property is name=value");
            let bound = match value.strip_prefix('$') {
                Some(variable) if !word.quoted => {
                    names.insert(name.into(), value.into());
                    let of_name = came.iter().find(|(had, _)| had == name);
                    match (self.variables.get(variable), of_name) {
                        (Some(known), _) => known.clone(),
                        (None, Some((_, new))) => {
                            self.variables.insert(variable.into(), new.clone());
                            new.clone()
                        }
                        (None, None) => value.into(),
                    }
                }
                _ => value.into(),
            };
            expected.push((name.into(), bound));
        }
        let sorted = |properties: &Properties| {
            let mut properties = properties.clone();
            properties.sort();
            properties
        };
        if publish.payload == payload && sorted(&came) == sorted(&expected) {
            return Ok(());
        }
        let missing: Vec<_> = implied.iter().filter(|pair| !came.contains(pair)).collect();
        assert!(missing.is_empty(), "{came:?} lacks {missing:?}");
        let mut rest = String::new();
        for (name, value) in came.iter().filter(|pair| !implied.contains(pair)) {
            // A variable stays where its value fits; a version that is no variable yet becomes one.
            let shown = match names.get(name) {
                Some(variable) if self.value(variable) == *value => variable.clone(),
                _ if Hlc::parse_padded(value).is_ok() => self.name_for(value),
                _ => quote(value.as_bytes()),
            };
            rest.push_str(&format!(" {name}={shown}"));
        }
        Err(rest)
    }

    fn name_for(&mut self, value: &str) -> String {
        let known = self.variables.iter().find(|(_, had)| *had == value);
        if let Some((name, _)) = known {
            return format!("${name}");
        }
        let name = format!("new{}", self.variables.len());
        self.variables.insert(name.clone(), value.into());
        format!("${name}")
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

/// What an answer may carry besides user properties, and what it must.
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

fn has_sign(words: &[Word], sign: &str) -> bool {
    words.iter().any(|word| word.bare() == Some(sign))
}

fn shown(client: &str) -> &str {
    if client == DEFAULT_CLIENT { "" } else { client }
}

fn contains(text: &str, what: &str) {
    assert!(
        text.to_lowercase().contains(&what.to_lowercase()),
        "the reason {text:?} does not say {what:?}"
    );
}
