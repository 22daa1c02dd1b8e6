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

use std::hint::black_box;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::{Bytes, BytesMut};
use statehouse::STANDARD_POLICY;
use statehouse_core::clock::{Clock, SystemSource};
use statehouse_core::log::record::PolicyRecord;
use statehouse_core::log::{Journal, JournalRoom, LogPosition, Memory, Recorder};
use statehouse_core::policy::{self, Assignment, Engine, Instance, Policy, Registry};
use statehouse_core::request::{Delivery, Incoming, REQUEST_TOPIC, ReplyTo, Request, parse};
use statehouse_core::store::{Mode, Peer, Quota, State, Store, Transaction};
use statehouse_core::{Core, Decision, Input, Now, Outcome, Settings};
use statehouse_loadgen::Request as Asked;
use statehouse_loadgen::{Catalogue, Mqtt, Protocol, Received, Role, Verb};
use statehouse_mqtt::simulation::Wire;
use statehouse_mqtt::{
    Broker, Claim, Limits, Message, Options, Origin, Properties, PropertiesBuilder, QoS,
    ReasonCode, Service,
};
use statehouse_server::Server;
use statehouse_transport::embedded::StoreService;

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
    fn room(&self) -> JournalRoom {
        JournalRoom::Growth
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
    let service = StoreService::new(server.clone(), None, None);
    let options = Options {
        limits,
        ..Options::default()
    };
    let broker = Broker::new(options, Arc::new(service));
    server.attach(Arc::new(broker.clone()));
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
    packet_id: u16,
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
            peer: Peer::numbered("bench", 1),
            packet_id: (number % 60_000 + 1) as u16,
        }
    }

    fn incoming(&self) -> Incoming<'_> {
        Incoming {
            delivery: Delivery::new(&self.peer, self.packet_id, false),
            ..Incoming::new(&self.peer, &self.payload, &self.properties)
        }
    }
}

fn parsed<'a>(incoming: &'a Incoming<'a>) -> (Request<'a>, ReplyTo<'a>) {
    match parse(incoming, None) {
        Outcome::Handled(request, reply_to) => (request, reply_to),
        _ => panic!("it is a request"),
    }
}

/// Times of the parts of a request inside the store, in nanoseconds.
struct Parts {
    parse: f64,
    store: f64,
    policy: f64,
    record: f64,
    outputs: f64,
}

/// Requests that are prepared and timed together.
const PREPARED: u64 = 16;

/// A core with the keys of `statehouse bench`.
fn filled(policy: &Loaded, journal: Arc<dyn Journal>) -> Core {
    let recorder = recorder(policy, journal);
    let mut core = Core::new(store(policy), recorder, 1, Settings::default());
    for number in 0..KEYS {
        let arrived = Arrived::new(Verb::Set, number);
        core.handle(Input::Publish(&arrived.incoming()), now(NOW_MS));
    }
    core
}

/// No request here expires, so the instant does not matter.
fn now(ms: u64) -> Now {
    Now {
        ms,
        instant: Instant::now(),
    }
}

fn parts(policy: &Loaded, verb: Verb) -> Parts {
    let mut core = filled(policy, Arc::new(Memory));
    let mut durable = filled(policy, Arc::new(DiscardingJournal));
    let mut instance = Instance::warm(policy.clone()).expect("the standard policy starts");
    let mut samples: [Vec<Duration>; 5] = Default::default();
    for sample in 0..SAMPLES as u64 {
        let first = KEYS + sample * PREPARED;
        let arrived = (first..first + PREPARED).map(|number| Arrived::new(verb, number));
        let arrived: Vec<Arrived> = arrived.collect();
        let incoming: Vec<Incoming<'_>> = arrived.iter().map(Arrived::incoming).collect();
        let now = now(NOW_MS + sample);
        let parse = timed(|| incoming.iter().for_each(|it| _ = black_box(parsed(it))));
        let (store, decisions) = decide(&mut core, &incoming, now);
        let (logged, _) = decide(&mut durable, &incoming, now);
        let outputs = timed(|| {
            for decision in decisions {
                core.outputs(decision, |it| _ = black_box(it));
            }
        });
        let requests: Vec<_> = incoming.iter().map(|it| parsed(it).0).collect();
        let policy = call_policy(
            &mut instance,
            core.store_mut().state_mut(),
            &requests,
            now.ms,
        );
        let taken = [parse, store, logged, outputs, policy];
        samples
            .iter_mut()
            .zip(taken)
            .for_each(|(all, took)| all.push(took));
    }
    let [parse, store, logged, outputs, policy] =
        samples.map(|samples| undisturbed(samples, PREPARED as usize));
    Parts {
        parse,
        store: store - parse,
        policy,
        record: logged - store,
        outputs,
    }
}

/// Handles requests. Returns the time and the decisions.
fn decide<'a>(
    core: &mut Core,
    incoming: &'a [Incoming<'a>],
    now: Now,
) -> (Duration, Vec<Decision<'a>>) {
    let mut decisions = Vec::with_capacity(incoming.len());
    let took = timed(|| {
        let handled = incoming
            .iter()
            .map(|it| core.handle(Input::Publish(it), now));
        decisions.extend(handled);
    });
    assert!(decisions.iter().all(|it| it.effects.failures == 0));
    (took, decisions)
}

/// Repeats the policy calls on the state, and rolls each one back.
fn call_policy(
    instance: &mut Instance<Transaction>,
    state: &mut State,
    requests: &[Request<'_>],
    now_ms: u64,
) -> Duration {
    let mut lent = Some(Box::new(std::mem::take(state)));
    let took = timed(|| {
        for request in requests {
            let given = lent.take().expect("it was given back");
            let transaction = Transaction::begin(given, Quota::default(), now_ms, request);
            let mut call = instance.begin(transaction, request.payload.clone());
            let outcome = call.handle(policy::Request {
                payload: request.payload,
                dialect: policy::Dialect::Sdk,
                timestamp: request.timestamp,
                fencing_token: None,
                client: request.peer.known(),
                now: now_ms,
            });
            assert!(black_box(outcome).is_ok());
            lent = Some(call.end().roll_back());
        }
    });
    *state = *lent.take().expect("it was given back");
    took
}

/// Times of the whole path and of its packets, for one request and for sixteen in a read.
struct Paths {
    whole: [[f64; 2]; 2],
    packets: [[f64; 2]; 2],
}

const VERBS: [Verb; 2] = [Verb::Get, Verb::Set];

fn paths(policy: &Loaded) -> Paths {
    let mut client = served(policy, Limits::default());
    // A GET has a value in its response, a SET has none.
    let echo = |value_bytes: usize, requests: u16| {
        let broker = Broker::new(Options::default(), Arc::new(Echo::new(value_bytes)));
        Client::new(&broker).figure(Verb::Get, requests)
    };
    Paths {
        whole: [1, 16].map(|requests| VERBS.map(|verb| client.figure(verb, requests))),
        packets: [1, 16].map(|requests| [VALUE_BYTES, 0].map(|bytes| echo(bytes, requests))),
    }
}

fn main() {
    let engine = Engine::new().expect("an engine");
    let policy = Arc::new(engine.load(STANDARD_POLICY).expect("the standard policy"));
    let Paths { whole, packets } = paths(&policy);
    let parts = VERBS.map(|verb| parts(&policy, verb));
    let rates = VERBS.map(|verb| counting_rates(&policy, verb));
    let of = |figure: fn(&Parts) -> f64| [figure(&parts[0]), figure(&parts[1])];
    let inside = of(|it| it.parse + it.store + it.outputs);
    let rest = [0, 1].map(|verb| whole[1][verb] - packets[1][verb] - inside[verb]);

    println!(
        "{:<58}{:>8}{:>8}   ns of a request",
        "values of 64 B, table of 10 000 keys, in memory", "GET", "SET"
    );
    for (name, [get, set]) in [
        (
            "the whole path without a socket, one request a read",
            whole[0],
        ),
        (
            "  packets: PUBLISH and PUBACK in, answer and PUBACK out",
            packets[0],
        ),
        ("the whole path without a socket, sixteen a read", whole[1]),
        ("  packets", packets[1]),
        ("  request: properties to request", of(|it| it.parse)),
        (
            "  store: duplicates, transaction, policy, commit",
            of(|it| it.store),
        ),
        ("    of it transaction and policy call", of(|it| it.policy)),
        (
            "  outputs: the response and its properties",
            of(|it| it.outputs),
        ),
        ("  response gate and wiring: the rest", rest),
        (
            "log: encoding the record, in durable modes",
            of(|it| it.record),
        ),
        ("max_rate and max_client_rate, if they are set", rates),
    ] {
        println!("{name:<58}{get:>8.0}{set:>8.0}");
    }
}
