//! Runs concurrent clients on a few keys while a test injects faults, and checks that the history
//! of each key is linearizable (see `linearizable`).

use std::{
    collections::BTreeMap,
    net::SocketAddr,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use crate::{
    client::{Client, Heard, PATIENCE},
    cluster::Cluster,
    connect::Connect,
    dice::Dice,
    linearizable::{self, Answer, Command, Operation, Version},
    packet::{self, Packet, kind},
    resp,
    server::Server,
    store::{Request, Store, version},
};

const KEYS: u64 = 3;

/// State that the test shares with all clients.
struct Shared {
    /// The addresses that each client connects to in turn.
    addresses: Vec<SocketAddr>,
    is_broker: bool,
    /// How long a client waits for an answer before it uses the next address.
    patience: Duration,
    /// The longest pause between two requests of a client in milliseconds. The search takes longer
    /// than linear time, so a long test must not record everything that a store can do.
    pace_ms: u64,
    /// The beginning of all keys and client ids.
    name: String,
    stop: AtomicBool,
    /// A logical clock, which orders requests and answers.
    clock: AtomicU64,
    /// The next value that no client has set yet.
    values: AtomicU64,
    answered: AtomicU64,
    /// The time of the last answer, and the longest time between two answers.
    gap: Mutex<(Instant, Duration)>,
}

impl Shared {
    fn new(name: &str) -> Shared {
        Shared {
            addresses: Vec::new(),
            is_broker: true,
            patience: PATIENCE,
            pace_ms: 0,
            name: name.into(),
            stop: AtomicBool::new(false),
            clock: AtomicU64::new(0),
            values: AtomicU64::new(100),
            answered: AtomicU64::new(0),
            gap: Mutex::new((Instant::now(), Duration::ZERO)),
        }
    }

    fn count_answer(&self) {
        let mut gap = self.gap.lock().unwrap();
        let (last, longest) = *gap;
        *gap = (Instant::now(), longest.max(last.elapsed()));
        drop(gap);
        self.answered.fetch_add(1, Ordering::SeqCst);
    }

    fn tick(&self) -> u64 {
        self.clock.fetch_add(1, Ordering::SeqCst)
    }
}

/// How a client reacts to the end of its connection.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Manner {
    /// It resumes its session and sends the request again, with or without DUP.
    SendsAgain {
        /// Whether the PUBLISH has the DUP flag.
        dup: bool,
    },
    /// It connects with a new client id, so the outcome of its request stays unknown. Only for a
    /// store that is the broker itself: behind another broker, there is no known time after which
    /// the request can have no effect.
    Forgets,
}

impl Manner {
    /// The client breaks its connection on one of this many requests. Forgotten requests are rarer,
    /// because each unknown outcome makes the search longer.
    fn requests_per_break(self) -> u64 {
        match self {
            Manner::SendsAgain { .. } => 5,
            Manner::Forgets => 50,
        }
    }
}

struct Actor {
    shared: Arc<Shared>,
    name: String,
    manner: Manner,
    dice: Dice,
    connections: u32,
    attempts: usize,
    seen: Vec<(u64, Operation)>,
}

impl Actor {
    fn connect(&mut self) -> Option<Store> {
        while !self.shared.stop.load(Ordering::SeqCst) {
            let id = match self.manner {
                Manner::SendsAgain { .. } => self.name.clone(),
                Manner::Forgets => format!("{}-{}", self.name, self.connections),
            };
            let connect = match self.manner {
                Manner::SendsAgain { .. } => Connect::resume(&id, 3600),
                Manner::Forgets => Connect::new(&id),
            };
            let addresses = &self.shared.addresses;
            let address = addresses[self.attempts % addresses.len()];
            self.attempts += 1;
            let patience = self.shared.patience;
            let Some(client) = Client::attempt_within(address, &connect, patience) else {
                thread::sleep(Duration::from_millis(2));
                continue;
            };
            // A CONNACK leaves when its session is durable, so the session exists from then on. A
            // broker other than the store has its own promise.
            let resumes = self.manner != Manner::Forgets && self.connections > 0;
            assert!(
                !self.shared.is_broker || !resumes || client.session_present(),
                "the session of {id} was lost"
            );
            self.connections += 1;
            let mut store = Store::on(client, &id);
            store.is_broker = self.shared.is_broker;
            if subscribe(&mut store, patience) {
                return Some(store);
            }
        }
        None
    }

    fn command(&mut self) -> Command {
        let new = self.shared.values.fetch_add(1, Ordering::SeqCst);
        // An earlier value, which the key may still hold.
        let old = new.saturating_sub(1 + self.dice.below(12));
        match self.dice.below(12) {
            0..=2 => Command::Set(new),
            3 | 4 => Command::SetNew(new),
            5 => Command::SetSame(old),
            6..=8 => Command::Get,
            9 => Command::Del,
            _ => Command::DelSame(old),
        }
    }

    /// Sends one command after the other until the test stops. Returns the operations by key.
    fn run(mut self) -> Vec<(u64, Operation)> {
        let mut store = self.connect();
        while let Some(connected) = store.take() {
            store = self.ask(connected);
        }
        self.seen
    }

    /// Sends one command, over as many connections as necessary.
    fn ask(&mut self, mut store: Store) -> Option<Store> {
        if self.shared.stop.load(Ordering::SeqCst) {
            return None;
        }
        if self.shared.pace_ms > 0 {
            thread::sleep(self.dice.below_ms(self.shared.pace_ms));
        }
        let key = self.dice.below(KEYS);
        let command = self.command();
        let request = store.request(encode(command, &format!("{} {key}", self.shared.name)));
        let mut publish = request.publish();
        publish.packet_id = store.client.packet_id();
        let mut operation = Operation {
            client: self.name.clone(),
            command,
            asked: self.shared.tick(),
            answered: None,
            over: u64::MAX,
        };
        let answer = loop {
            let sent = store.client.try_send(&publish.bytes());
            let answer = if self.dice.below(self.manner.requests_per_break()) == 0 {
                // The request may have been executed. Its answer may be on the way or be lost.
                thread::sleep(self.dice.below_ms(4));
                // An error means that the connection has already ended.
                let _ = store.client.try_finish();
                None
            } else {
                let patience = self.shared.patience;
                sent.ok()
                    .and_then(|()| wait(&mut store, &request, publish.packet_id, patience))
            };
            if answer.is_some() {
                break answer;
            }
            let Manner::SendsAgain { dup } = self.manner else {
                break None;
            };
            publish.dup = dup;
            // A leader that hands over waits a moment for clients that keep their connection open.
            store.client.close();
            // Retry until the test stops. The test restarts every killed server.
            match self.connect() {
                Some(next) => store = next,
                None => break None,
            }
        };
        let gave_up = answer.is_none();
        if let Some(answer) = answer {
            operation.answered = Some((self.shared.tick(), answer));
            self.shared.count_answer();
        }
        self.seen.push((key, operation));
        if gave_up {
            store.client.close();
            self.connect()
        } else {
            Some(store)
        }
    }
}

/// Subscribes to the responses. Needed on every connection, because an earlier one may have ended
/// before its subscription. Packets that arrive before the SUBACK are dropped: the client sends
/// their requests again.
fn subscribe(store: &mut Store, patience: Duration) -> bool {
    let id = store.client.packet_id();
    let filter = format!("clients/{}/#", store.id);
    let subscribe = packet::subscribe(id, &[], &[(&filter, 1)]);
    if store.client.try_send(&subscribe).is_err() {
        return false;
    }
    loop {
        match store.client.poll(patience) {
            Heard::Packet(packet) if packet.kind() == kind::SUBACK => return true,
            Heard::Packet(_) => {}
            _ => return false,
        }
    }
}

fn encode(command: Command, key: &str) -> Vec<u8> {
    match command {
        Command::Set(value) => resp::array(&["SET", key, &value.to_string()]),
        Command::SetNew(value) => resp::array(&["SET", key, &value.to_string(), "NX"]),
        Command::SetSame(value) => resp::array(&["SET", key, &value.to_string(), "NEX"]),
        Command::Get => resp::array(&["GET", key]),
        Command::Del => resp::array(&["DEL", key]),
        Command::DelSame(value) => resp::array(&["VDEL", key, &value.to_string()]),
    }
}

/// Waits for the answer to a request. If the store is the broker, also waits for the PUBACK, which
/// follows the answer. Returns `None` if the connection breaks or is silent.
fn wait(
    store: &mut Store,
    request: &Request,
    packet_id: u16,
    patience: Duration,
) -> Option<Answer> {
    let mut answer: Option<Answer> = None;
    loop {
        if answer.is_some() && !store.is_broker {
            return answer;
        }
        let Heard::Packet(packet) = store.client.poll(patience) else {
            return None;
        };
        match packet.kind() {
            // The host shuts down. Other reasons are final for some clients.
            kind::DISCONNECT if packet.ack().reason == 0x8B => return None,
            kind::PUBLISH => {
                // The answer to an earlier request may be delivered twice.
                if let Some(read) = read(&packet, request) {
                    assert!(answer.is_none_or(|first| first == read), "two answers");
                    answer = Some(read);
                }
            }
            kind::PUBACK if store.is_broker => {
                let ack = packet.ack();
                assert_eq!((ack.packet_id, ack.reason), (packet_id, 0));
                assert!(answer.is_some(), "acknowledged, not answered");
                return answer;
            }
            kind::PUBACK => assert_eq!(packet.ack().reason, 0),
            _ => panic!("{packet:?}"),
        }
    }
}

fn read(packet: &Packet, request: &Request) -> Option<Answer> {
    let publish = packet.publish();
    if publish.correlation() != request.correlation.as_deref() {
        return None;
    }
    let version: Option<Version> = version(&publish).map(|hlc| (hlc.wall_ms, hlc.counter));
    Some(match (&publish.payload[..], version) {
        (b"+OK\r\n", Some(version)) => Answer::Set(version),
        (b":-1\r\n", Some(version)) => Answer::Refused(version),
        (b":1\r\n", Some(version)) => Answer::Removed(version),
        (b":0\r\n" | b"$-1\r\n", None) => Answer::Missing,
        (value, Some(version)) if value.starts_with(b"$") => {
            let text = str::from_utf8(value).unwrap();
            let value = text.split("\r\n").nth(1).unwrap();
            Answer::Value(value.parse().unwrap(), version)
        }
        (payload, version) => panic!("{} {version:?}", payload.escape_ascii()),
    })
}

/// Concurrent clients of a store, or of its broker, while a test injects faults.
pub struct Play {
    shared: Arc<Shared>,
    manners: Vec<Manner>,
    actors: Vec<thread::JoinHandle<Vec<(u64, Operation)>>>,
    deaths: Vec<u64>,
    /// How many deaths after its sending end a forgotten request.
    deaths_to_end: usize,
    dice: Dice,
}

impl Play {
    /// Starts one client of a server for each of these manners.
    pub fn begin(server: &Server, manners: &[Manner]) -> Play {
        let shared = Shared {
            addresses: vec![server.address()],
            is_broker: server.is_broker(),
            ..Shared::new("key")
        };
        Play::start(shared, manners, 1)
    }

    /// Starts one client of a cluster for each of these manners. Each client connects to the hosts
    /// in turn. The name distinguishes plays on one cluster.
    pub fn over(cluster: &Cluster, name: &str, manners: &[Manner]) -> Play {
        let shared = Shared {
            addresses: cluster.addresses(),
            // A paused host answers nothing, and the other ones must.
            patience: Duration::from_secs(2),
            pace_ms: 12,
            ..Shared::new(name)
        };
        Play::start(shared, manners, 2)
    }

    fn start(shared: Shared, manners: &[Manner], deaths_to_end: usize) -> Play {
        let mut dice = Dice::thrown();
        let shared = Arc::new(shared);
        let actors = manners.iter().enumerate().map(|(n, manner)| {
            let actor = Actor {
                name: format!("{}-actor{n}", shared.name),
                shared: shared.clone(),
                manner: *manner,
                dice: dice.split(),
                connections: 0,
                attempts: n,
                seen: Vec::new(),
            };
            thread::spawn(move || actor.run())
        });
        Play {
            actors: actors.collect(),
            manners: manners.to_vec(),
            shared,
            deaths: Vec::new(),
            deaths_to_end,
            dice,
        }
    }

    /// Waits until the clients have received 40 more answers, and then for a random time.
    pub fn go_on(&mut self) {
        let before = self.shared.answered.load(Ordering::SeqCst);
        let begun = Instant::now();
        while self.shared.answered.load(Ordering::SeqCst) < before + 40 {
            assert!(
                !self.actors.iter().any(thread::JoinHandle::is_finished),
                "an actor ended"
            );
            assert!(
                begun.elapsed() < 3 * PATIENCE,
                "no client is answered any more"
            );
            thread::sleep(Duration::from_millis(1));
        }
        thread::sleep(self.dice.below_ms(10));
    }

    /// Records that the store was just killed and is not restarted yet.
    ///
    /// In a cluster: records that another leadership has begun. A request that was sent before this
    /// call, but after the change, can take effect until the next change. So it is over only then.
    pub fn died(&mut self) {
        self.deaths.push(self.shared.tick());
    }

    /// The longest time without an answer to any client since the last call.
    pub fn longest_gap(&self) -> Duration {
        let mut gap = self.shared.gap.lock().unwrap();
        std::mem::take(&mut gap.1)
    }

    /// Random numbers for the faults of the test.
    pub fn dice(&mut self) -> &mut Dice {
        &mut self.dice
    }

    /// Stops the clients. Asserts that the history of each key is linearizable.
    pub fn end(mut self) {
        self.go_on();
        self.shared.stop.store(true, Ordering::SeqCst);
        let mut histories: BTreeMap<u64, Vec<Operation>> = BTreeMap::new();
        for (actor, manner) in self.actors.into_iter().zip(self.manners) {
            for (key, mut operation) in actor.join().unwrap() {
                // A forgotten request can only take effect in the process that received it.
                let mut later = self.deaths.iter().filter(|death| **death > operation.asked);
                if manner == Manner::Forgets {
                    let end = later.nth(self.deaths_to_end - 1);
                    operation.over = end.copied().unwrap_or(u64::MAX);
                }
                histories.entry(key).or_default().push(operation);
            }
        }
        assert_eq!(histories.len() as u64, KEYS);
        for (key, history) in histories {
            assert_linearizable(key, &history);
        }
    }
}

fn assert_linearizable(key: u64, history: &[Operation]) {
    let lost = history.iter().filter(|it| it.answered.is_none()).count();
    eprintln!(
        "key {key}: {} requests, {lost} without an answer",
        history.len()
    );
    if let Err(violation) = linearizable::check(history) {
        let last = violation.explained.len().saturating_sub(12);
        panic!(
            "key {key}: the history is not linearizable. After {last} operations and {:#?}, none of {:#?} can follow",
            &violation.explained[last..],
            violation.stuck_at
        );
    }
}
