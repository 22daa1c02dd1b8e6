//! Runs concurrent clients on a few keys while a test injects faults, and checks that the history
//! of each key is linearizable (see `linearizable`).

use std::{
    collections::BTreeMap,
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use crate::{
    client::{Client, Heard, PATIENCE},
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
    address: SocketAddr,
    is_broker: bool,
    stop: AtomicBool,
    /// A logical clock, which orders requests and answers.
    clock: AtomicU64,
    /// The next value that no client has set yet.
    values: AtomicU64,
    answered: AtomicU64,
}

impl Shared {
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
            let Some(client) = Client::attempt(self.shared.address, &connect) else {
                thread::sleep(Duration::from_millis(2));
                continue;
            };
            self.connections += 1;
            let mut store = Store::on(client, &id);
            store.is_broker = self.shared.is_broker;
            if subscribe(&mut store) {
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
        let key = self.dice.below(KEYS);
        let command = self.command();
        let request = store.request(encode(command, key));
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
                sent.ok()
                    .and_then(|()| wait(&mut store, &request, publish.packet_id))
            };
            if answer.is_some() {
                break answer;
            }
            let Manner::SendsAgain { dup } = self.manner else {
                break None;
            };
            publish.dup = dup;
            // Retry until the test stops. The test restarts every killed server.
            match self.connect() {
                Some(next) => store = next,
                None => break None,
            }
        };
        let gave_up = answer.is_none();
        if let Some(answer) = answer {
            operation.answered = Some((self.shared.tick(), answer));
            self.shared.answered.fetch_add(1, Ordering::SeqCst);
        }
        self.seen.push((key, operation));
        if gave_up { self.connect() } else { Some(store) }
    }
}

/// Subscribes to the responses. Needed on every connection, because an earlier one may have ended
/// before its subscription. Packets that arrive before the SUBACK are dropped: the client sends
/// their requests again.
fn subscribe(store: &mut Store) -> bool {
    let id = store.client.packet_id();
    let filter = format!("clients/{}/#", store.id);
    let subscribe = packet::subscribe(id, &[], &[(&filter, 1)]);
    if store.client.try_send(&subscribe).is_err() {
        return false;
    }
    loop {
        match store.client.poll(PATIENCE) {
            Heard::Packet(packet) if packet.kind() == kind::SUBACK => return true,
            Heard::Packet(_) => {}
            _ => return false,
        }
    }
}

fn encode(command: Command, key: u64) -> Vec<u8> {
    let key = format!("key {key}");
    let key = key.as_str();
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
/// follows the answer. Returns `None` if the connection breaks.
fn wait(store: &mut Store, request: &Request, packet_id: u16) -> Option<Answer> {
    let mut answer: Option<Answer> = None;
    loop {
        if answer.is_some() && !store.is_broker {
            return answer;
        }
        let Heard::Packet(packet) = store.client.poll(PATIENCE) else {
            return None;
        };
        match packet.kind() {
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
    dice: Dice,
}

impl Play {
    /// Starts one client for each of these manners.
    pub fn begin(server: &Server, manners: &[Manner]) -> Play {
        let mut dice = Dice::thrown();
        let shared = Arc::new(Shared {
            address: server.address(),
            is_broker: server.is_broker(),
            stop: AtomicBool::new(false),
            clock: AtomicU64::new(0),
            values: AtomicU64::new(100),
            answered: AtomicU64::new(0),
        });
        let actors = manners.iter().enumerate().map(|(n, manner)| {
            let actor = Actor {
                shared: shared.clone(),
                name: format!("actor{n}"),
                manner: *manner,
                dice: dice.split(),
                connections: 0,
                seen: Vec::new(),
            };
            thread::spawn(move || actor.run())
        });
        Play {
            actors: actors.collect(),
            manners: manners.to_vec(),
            shared,
            deaths: Vec::new(),
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
    pub fn died(&mut self) {
        self.deaths.push(self.shared.tick());
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
                    operation.over = later.next().copied().unwrap_or(u64::MAX);
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
