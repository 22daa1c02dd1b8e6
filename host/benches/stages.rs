//! Measures the time of each stage of a request, and of the whole path without a socket.
//!
//! ```text
//! cargo bench -p statehouse --bench stages
//! ```
//!
//! The requests are those of `statehouse bench`. The standard policy answers them in memory, on a
//! table of ten thousand keys. Each figure is the tenth percentile of many short samples: the time
//! without interruptions. `statehouse bench` shows more CPU time per request than the whole path
//! here. The difference is the kernel's time for sockets and waking threads.

use std::cell::RefCell;
use std::hint::black_box;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::{Bytes, BytesMut};
use statehouse::STANDARD_POLICY;
use statehouse::server::Server;
use statehouse::transport::embedded::{Embedded, StoreService};
use statehouse_core::clock::{Clock, SystemSource};
use statehouse_core::log::record::PolicyRecord;
use statehouse_core::log::{Journal, LogPosition, Memory, Recorder};
use statehouse_core::policy::{self, Assignment, Engine, Instance, Policy, Registry};
use statehouse_core::request::{
    Delivery, Incoming, Parsed, REQUEST_TOPIC, ReplyTo, Request, parse,
};
use statehouse_core::store::{Event, Mode, Peer, Quota, Store, Transaction};
use statehouse_core::{Core, Settings};
use statehouse_loadgen::Request as Asked;
use statehouse_loadgen::{Catalogue, Mqtt, Protocol, Received, Role, Verb};
use statehouse_mqtt::simulation::Wire;
use statehouse_mqtt::{
    Broker, Claim, Limits, Message, Options, Origin, Properties, PropertiesBuilder, QoS,
    ReasonCode, Service,
};
use statehouse_protocol::{ConnectionId, SessionId};

const KEYS: u64 = 10_000;
const VALUE_BYTES: usize = 64;
const SAMPLES: usize = 4_000;
/// A limit in requests per second.
const RATE_NEVER_REACHED: u32 = 900_000_000;
const NOW_MS: u64 = 1_700_000_000_000;
const TIMESTAMP: &str = "001700000000000:00000:bench";
const RESPONSE_TOPIC: &str = "clients/bench-0000000000000000-0/bench";

type Loaded = Arc<Policy<Transaction>>;

/// Nanoseconds per request, from samples of `requests` requests each.
fn undisturbed(mut samples: Vec<Duration>, requests: usize) -> f64 {
    samples.sort();
    samples[samples.len() / 10].as_secs_f64() * 1e9 / requests as f64
}

fn timed<T>(work: impl FnOnce() -> T) -> Duration {
    let start = Instant::now();
    black_box(work());
    start.elapsed()
}

/// A client of `statehouse bench` and its connection. Only the broker's side is timed.
struct Client {
    mqtt: Mqtt,
    wire: Wire,
    /// Acknowledgements that are sent with the next requests.
    acks: Vec<u8>,
    number: u64,
}

impl Client {
    fn new(broker: &Broker) -> Self {
        let catalogue = Arc::new(Catalogue::new(VALUE_BYTES));
        let mut mqtt = Mqtt::new(catalogue, 0, Role::Asks, 0);
        let mut hello = Vec::new();
        mqtt.hello(&mut hello);
        let Ok(mut wire) = Wire::connect(broker, &hello) else {
            panic!("the broker refuses the client");
        };
        let mut acks = Vec::new();
        let greeting = wire.receive();
        assert!(mqtt.read(&greeting, &mut acks, |_| {}).is_ok());
        Self {
            mqtt,
            wire,
            acks,
            number: 0,
        }
    }

    /// Sends this many requests in one read of the broker, and measures the broker's time.
    fn ask(&mut self, verb: Verb, requests: u16) -> Duration {
        let mut out = std::mem::take(&mut self.acks);
        for slot in 0..requests {
            self.number += 1;
            let key = self.number * 7919 % KEYS;
            self.mqtt
                .ask(slot, self.number, Asked { verb, key }, &mut out);
        }
        let bytes = BytesMut::from(&out[..]);
        let took = timed(|| assert!(self.wire.send(bytes)));
        let (mut answers, mut acknowledged) = (0, 0);
        let heard = |heard: Received<'_>| match heard {
            Received::Answer { .. } => answers += 1,
            Received::Acknowledged { refused: None, .. } => acknowledged += 1,
            _ => panic!("neither an answer nor its acknowledgement"),
        };
        let read = self.mqtt.read(&self.wire.receive(), &mut self.acks, heard);
        assert!(read.is_ok());
        assert_eq!((answers, acknowledged), (requests, requests));
        took
    }

    fn figure(&mut self, verb: Verb, requests: u16) -> f64 {
        let samples = (0..SAMPLES).map(|_| self.ask(verb, requests)).collect();
        undisturbed(samples, requests.into())
    }
}

/// A service instead of the store. It gives every request the same answer, which is as long as a
/// real one.
struct Echo(Message);

impl Echo {
    fn new(value_bytes: usize) -> Self {
        let properties = PropertiesBuilder::new()
            .correlation_data(&[0; 8])
            .user("__stat", "200")
            .user("__ts", TIMESTAMP)
            .user("__protVer", "1.0")
            .finish()
            .expect("short properties");
        Self(Message {
            topic: RESPONSE_TOPIC.into(),
            payload: Bytes::from(format!("${value_bytes}\r\n{}\r\n", "v".repeat(value_bytes))),
            properties,
            qos: QoS::AtLeastOnce,
            retain: false,
            expires: None,
        })
    }
}

impl Service for Echo {
    fn claim(&self, topic: &[u8]) -> Claim {
        match topic == REQUEST_TOPIC.as_bytes() {
            true => Claim::Take,
            false => Claim::Route,
        }
    }

    fn requests(&self, broker: &Broker, _: &Origin, requests: &mut Vec<statehouse_mqtt::Request>) {
        broker.batch(|batch| {
            for request in requests.drain(..) {
                let token = request.token.expect("a QoS 1 request has a token");
                batch.answer(Some(&token), self.0.clone());
                batch.acknowledge(token, ReasonCode::SUCCESS, None);
            }
        });
    }

    fn disconnected(&self, _: &Broker, _: &Origin) {}
}

/// A journal that requests records and discards them.
struct DiscardingJournal;

impl Journal for DiscardingJournal {
    fn keeps(&self) -> bool {
        true
    }
    fn append(&self, records: &[&[u8]], _: bool) -> LogPosition {
        black_box(records);
        LogPosition(0)
    }
    fn released(&self) -> LogPosition {
        LogPosition(u64::MAX)
    }
    fn persisted(&self, _: bool) -> &'static str {
        "memory"
    }
    fn has_room(&self) -> bool {
        true
    }
    fn promise(&self) -> String {
        String::new()
    }
}

fn store(policy: &Loaded) -> Store {
    let mut store = Store::new(Registry::new(policy.clone(), None), Quota::default());
    // No re-execution, which is not a part of the path.
    store.supervision().purity_every = 0;
    store
}

fn recorder(policy: &Loaded, journal: Arc<dyn Journal>) -> Recorder {
    let mut recorder = Recorder::new(journal, Vec::new(), None);
    let named = vec![PolicyRecord::of(policy, true)];
    recorder.assign(named, &Assignment::of(policy.digest.into()));
    recorder
}

/// A store in a broker, connected as in `serve`, with the keys of `statehouse bench`.
fn served(policy: &Loaded, limits: Limits) -> Client {
    let clock = Clock::new(Arc::new(SystemSource::default()));
    let recorder = recorder(policy, Arc::new(Memory));
    let core = Core::new(store(policy), recorder, 1, Settings::default());
    let server = Server::new(core, clock, Mode::Embedded);
    let service = StoreService::new(server.clone());
    let options = Options {
        limits,
        ..Options::default()
    };
    let broker = Broker::new(options, Arc::new(service));
    server.attach(Arc::new(Embedded::new(broker.clone())));
    let mut client = Client::new(&broker);
    (0..KEYS).for_each(|_| _ = client.ask(Verb::Set, 1));
    client
}

/// Measures the check of `max_rate` and `max_client_rate` in nanoseconds per request. The two
/// stores alternate, because the speed of a machine varies. All other limits are always checked.
fn counting_rates(policy: &Loaded, verb: Verb) -> f64 {
    let rates = Limits {
        publishes_per_second_max: RATE_NEVER_REACHED,
        publishes_per_second_total_max: RATE_NEVER_REACHED,
        ..Limits::default()
    };
    let mut clients = [Limits::default(), rates].map(|limits| served(policy, limits));
    let mut samples: [Vec<Duration>; 2] = Default::default();
    for _ in 0..2 * SAMPLES {
        for (client, samples) in clients.iter_mut().zip(&mut samples) {
            samples.push(client.ask(verb, 16));
        }
    }
    let [without, with] = samples.map(|samples| undisturbed(samples, 16));
    with - without
}

/// A request as received from its connection.
struct Arrived {
    payload: Bytes,
    properties: Properties,
    peer: Peer,
    delivery: Delivery,
}

impl Arrived {
    fn new(verb: Verb, number: u64) -> Self {
        let catalogue = Catalogue::new(VALUE_BYTES);
        let mut key = Vec::new();
        let number_of_key = number * 7919 % KEYS;
        catalogue.push_key(number_of_key, &mut key);
        let value = catalogue.value(number_of_key);
        let payload = match verb {
            Verb::Set => statehouse_policy::resp::request(&[b"SET", &key, value]),
            _ => statehouse_policy::resp::request(&[b"GET", &key]),
        };
        let properties = PropertiesBuilder::new()
            .correlation_data(&number.to_be_bytes())
            .response_topic(RESPONSE_TOPIC)
            .user("__protVer", "1.0")
            .user("__ts", TIMESTAMP)
            .finish()
            .and_then(Properties::parse)
            .expect("short properties");
        Self {
            payload: payload.into(),
            properties,
            peer: Peer {
                client: "bench".into(),
                connection: ConnectionId(1),
                session: SessionId(1),
            },
            delivery: Delivery {
                session: SessionId(1),
                connection: ConnectionId(1),
                packet_id: (number % 60_000 + 1) as u16,
                dup: false,
            },
        }
    }

    fn incoming(&self) -> Incoming<'_> {
        Incoming {
            topic: REQUEST_TOPIC,
            payload: &self.payload,
            properties: &self.properties,
            qos: QoS::AtLeastOnce,
            delivery: self.delivery,
            expires: None,
            peer: &self.peer,
            grants: None,
        }
    }
}

fn parsed<'a>(incoming: &'a Incoming<'a>) -> (Request<'a>, ReplyTo<'a>) {
    match parse(incoming, None) {
        Parsed::Run(request, reply_to) => (request, reply_to),
        _ => panic!("it is a request"),
    }
}

/// Times of the parts of a request inside the store, in nanoseconds.
#[derive(Default)]
struct Parts {
    parse: f64,
    step: f64,
    policy: f64,
    record: f64,
    properties: f64,
}

/// Requests that are prepared and timed together.
const PREPARED: u64 = 16;

fn parts(policy: &Loaded, verb: Verb) -> Parts {
    let store = RefCell::new(store(policy));
    for number in 0..KEYS {
        let arrived = Arrived::new(Verb::Set, number);
        store
            .borrow_mut()
            .step(Event::Request(&parsed(&arrived.incoming()).0), NOW_MS);
    }
    let mut recorder = recorder(policy, Arc::new(DiscardingJournal));
    let mut instance = Instance::warm(policy.clone()).expect("the standard policy starts");
    let mut samples: [Vec<Duration>; 5] = Default::default();
    for sample in 0..SAMPLES as u64 {
        let arrived: Vec<Arrived> = (0..PREPARED)
            .map(|it| Arrived::new(verb, KEYS + sample * PREPARED + it))
            .collect();
        let mut note = |stage: usize, took| samples[stage].push(took);
        note(
            0,
            timed(|| {
                arrived
                    .iter()
                    .for_each(|it| _ = black_box(parsed(&it.incoming())))
            }),
        );
        let mut store = store.borrow_mut();
        let mut effects = Vec::with_capacity(arrived.len());
        let incoming: Vec<_> = arrived.iter().map(Arrived::incoming).collect();
        let parsed: Vec<_> = incoming.iter().map(parsed).collect();
        let took = timed(|| {
            let steps = parsed
                .iter()
                .map(|(request, _)| store.step(Event::Request(request), NOW_MS + sample));
            effects.extend(steps);
        });
        assert!(effects.iter().all(|it| it.failures == 0));
        note(1, took);
        let took = timed(|| {
            for ((request, _), effects) in parsed.iter().zip(&effects) {
                recorder.step(Some(request), effects, false);
            }
        });
        note(3, took);
        let took = timed(|| {
            for ((_, to), effects) in parsed.iter().zip(&effects) {
                let version = effects.answer.as_ref().and_then(|it| it.version);
                black_box(to.properties(version, "StateStore", None, None));
            }
        });
        note(4, took);
        // Repeat the policy calls on the same state, and roll each one back.
        let mut state = Some(Box::new(std::mem::take(store.state_mut())));
        let took = timed(|| {
            for (request, _) in &parsed {
                let given = state.take().expect("it was given back");
                let transaction =
                    Transaction::begin(given, Quota::default(), NOW_MS + sample, request);
                let mut call = instance.begin(transaction, request.payload.clone());
                let outcome = call.handle(policy::Request {
                    payload: request.payload,
                    dialect: policy::Dialect::Sdk,
                    timestamp: request.timestamp,
                    fencing_token: None,
                    client: request.peer.known(),
                    now: NOW_MS + sample,
                });
                assert!(black_box(outcome).is_ok());
                state = Some(call.end().roll_back());
            }
        });
        note(2, took);
        *store.state_mut() = *state.take().expect("it was given back");
    }
    let [parse, step, policy, record, properties] =
        samples.map(|samples| undisturbed(samples, PREPARED as usize));
    Parts {
        parse,
        step,
        policy,
        record,
        properties,
    }
}

fn main() {
    let engine = Engine::new().expect("an engine");
    let policy = Arc::new(engine.load(STANDARD_POLICY).expect("the standard policy"));
    let mut client = served(&policy, Limits::default());
    let whole = [
        (Verb::Get, 1),
        (Verb::Set, 1),
        (Verb::Get, 16),
        (Verb::Set, 16),
    ]
    .map(|(verb, requests)| client.figure(verb, requests));
    let echo = |value_bytes: usize, requests: u16| {
        let broker = Broker::new(Options::default(), Arc::new(Echo::new(value_bytes)));
        Client::new(&broker).figure(Verb::Get, requests)
    };
    let packets = [echo(64, 1), echo(0, 1), echo(64, 16), echo(0, 16)];
    let (get, set) = (parts(&policy, Verb::Get), parts(&policy, Verb::Set));
    let rates = [Verb::Get, Verb::Set].map(|verb| counting_rates(&policy, verb));

    println!(
        "{:<58}{:>8}{:>8}   ns of a request",
        "values of 64 B, table of 10 000 keys, in memory", "GET", "SET"
    );
    let row = |name: &str, get: f64, set: f64| println!("{name:<58}{get:>8.0}{set:>8.0}");
    row(
        "the whole path without a socket, one request a read",
        whole[0],
        whole[1],
    );
    row(
        "  packets: PUBLISH and PUBACK in, answer and PUBACK out",
        packets[0],
        packets[1],
    );
    row(
        "the whole path without a socket, sixteen a read",
        whole[2],
        whole[3],
    );
    row("  packets", packets[2], packets[3]);
    row("  request: properties to request", get.parse, set.parse);
    row(
        "  store: duplicates, transaction, policy, commit",
        get.step,
        set.step,
    );
    row(
        "    of it transaction and policy call",
        get.policy,
        set.policy,
    );
    row(
        "  outbox: properties of the answer",
        get.properties,
        set.properties,
    );
    let rest = |at: usize, parts: &Parts| {
        whole[at] - packets[at] - parts.parse - parts.step - parts.properties
    };
    row(
        "  outbox and wiring: the rest",
        rest(2, &get),
        rest(3, &set),
    );
    row(
        "journal: encoding the record, in durable modes",
        get.record,
        set.record,
    );
    row(
        "max_rate and max_client_rate, if they are set",
        rates[0],
        rates[1],
    );
}
