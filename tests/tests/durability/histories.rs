//! Concurrent clients on a few keys while the process is killed again and again: for each key there is an order of
//! commands that explains every answer (see `linearizable`).

use std::{
    collections::BTreeMap,
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread,
    time::Duration,
};

use statehouse_tests::{
    Client, Connect, Dice, Heard, Property, Request, Server, Store,
    client::PATIENCE,
    linearizable::{self, Answer, Command, Operation, Version},
    packet::{self, Packet, kind},
    resp,
    store::{Dialect, version},
};

const KEYS: u64 = 3;

/// What all know of each other.
struct Shared {
    address: SocketAddr,
    stop: AtomicBool,
    /// Moments in their order.
    clock: AtomicU64,
    /// Values that were never set before.
    values: AtomicU64,
    answered: AtomicU64,
}

impl Shared {
    fn tick(&self) -> u64 {
        self.clock.fetch_add(1, Ordering::SeqCst)
    }
}

/// How a client takes the end of its connection.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Manner {
    /// It resumes its session and sends again, with DUP or without.
    SendsAgain { dup: bool },
    /// It begins anew as another client, and never learns what became of its request.
    Forgets,
}

impl Manner {
    /// One in so many of its requests breaks the connection by itself. What is not known makes the search long.
    fn breaks(self) -> u64 {
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
                Manner::SendsAgain { .. } => crate::resumed::connect(&id),
                Manner::Forgets => Connect::new(&id),
            };
            let Some(client) = Client::attempt(self.shared.address, &connect) else {
                thread::sleep(Duration::from_millis(2));
                continue;
            };
            self.connections += 1;
            let mut store = Store {
                client,
                id,
                dialect: Dialect::Sdk,
            };
            if subscribes(&mut store) {
                return Some(store);
            }
        }
        None
    }

    fn command(&mut self) -> Command {
        let new = self.shared.values.fetch_add(1, Ordering::SeqCst);
        // A value of before, which may still be there.
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

    /// Asks one thing after the other until the end. Returns what it saw, by key.
    fn run(mut self) -> Vec<(u64, Operation)> {
        let mut store = self.connect();
        while let Some(connected) = store.take() {
            store = self.ask(connected);
        }
        self.seen
    }

    /// One command, over as many connections as it takes.
    fn ask(&mut self, mut store: Store) -> Option<Store> {
        if self.shared.stop.load(Ordering::SeqCst) {
            return None;
        }
        let key = self.dice.below(KEYS);
        let command = self.command();
        let request = store.request(written(command, key));
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
            let answer = if self.dice.below(self.manner.breaks()) == 0 {
                // It may have run, and its answer be on the way or be lost with the connection.
                thread::sleep(self.dice.below_ms(4));
                // Too late is as good.
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
            // To the end: a server that was stopped has been started again.
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

/// Each time, since the connection before may have broken before it had. What comes again meanwhile is asked for again.
fn subscribes(store: &mut Store) -> bool {
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

fn written(command: Command, key: u64) -> Vec<u8> {
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

/// The answer to a request, once its PUBACK has come; none where the connection breaks.
fn wait(store: &mut Store, request: &Request, packet_id: u16) -> Option<Answer> {
    let mut answer: Option<Answer> = None;
    loop {
        let Heard::Packet(packet) = store.client.poll(PATIENCE) else {
            return None;
        };
        match packet.kind() {
            kind::PUBLISH => {
                // The answer to an earlier request may come once more.
                if let Some(read) = read(&packet, request) {
                    assert!(answer.is_none_or(|first| first == read), "two answers");
                    answer = Some(read);
                }
            }
            kind::PUBACK => {
                let ack = packet.ack();
                assert_eq!((ack.packet_id, ack.reason), (packet_id, 0));
                assert!(answer.is_some(), "acknowledged, not answered");
                return answer;
            }
            _ => panic!("{packet:?}"),
        }
    }
}

fn read(packet: &Packet, request: &Request) -> Option<Answer> {
    let publish = packet.publish();
    let correlation = publish
        .properties
        .iter()
        .find_map(|property| match property {
            Property::CorrelationData(data) => Some(data),
            _ => None,
        });
    if correlation != request.correlation.as_ref() {
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

/// What everybody saw of each key while the server was killed this often.
fn histories(kills: u32) -> BTreeMap<u64, Vec<Operation>> {
    let mut dice = Dice::thrown();
    let mut server = Server::restartable(&[]);
    let shared = Arc::new(Shared {
        address: server.address(),
        stop: AtomicBool::new(false),
        clock: AtomicU64::new(0),
        values: AtomicU64::new(100),
        answered: AtomicU64::new(0),
    });
    let manners = [
        Manner::SendsAgain { dup: true },
        Manner::SendsAgain { dup: true },
        Manner::SendsAgain { dup: false },
        Manner::Forgets,
        Manner::Forgets,
    ];
    let name = |n: usize| format!("actor{n}");
    let forgetful: Vec<String> = (0..manners.len())
        .filter(|n| manners[*n] == Manner::Forgets)
        .map(name)
        .collect();
    let actors: Vec<_> = manners
        .into_iter()
        .enumerate()
        .map(|(n, manner)| {
            let actor = Actor {
                shared: shared.clone(),
                name: name(n),
                manner,
                dice: dice.split(),
                connections: 0,
                seen: Vec::new(),
            };
            thread::spawn(move || actor.run())
        })
        .collect();
    let go_on = |dice: &mut Dice| {
        let before = shared.answered.load(Ordering::SeqCst);
        while shared.answered.load(Ordering::SeqCst) < before + 40 {
            assert!(
                !actors.iter().any(thread::JoinHandle::is_finished),
                "an actor ended"
            );
            thread::sleep(Duration::from_millis(1));
        }
        thread::sleep(dice.below_ms(10));
    };
    let mut deaths = Vec::new();
    for _ in 0..kills {
        go_on(&mut dice);
        server.kill();
        deaths.push(shared.tick());
        server.restart();
    }
    go_on(&mut dice);
    shared.stop.store(true, Ordering::SeqCst);
    let mut by_key: BTreeMap<u64, Vec<Operation>> = BTreeMap::new();
    for actor in actors {
        for (key, mut operation) in actor.join().unwrap() {
            // Who forgets has asked one process, and what that did not do nobody does.
            let mut later = deaths.iter().filter(|death| **death > operation.asked);
            if forgetful.contains(&operation.client) {
                operation.over = later.next().copied().unwrap_or(u64::MAX);
            }
            by_key.entry(key).or_default().push(operation);
        }
    }
    by_key
}

fn every_key_is_linearizable(kills: u32) {
    let histories = histories(kills);
    assert_eq!(histories.len() as u64, KEYS);
    for (key, history) in histories {
        let lost = history.iter().filter(|it| it.answered.is_none()).count();
        eprintln!(
            "key {key}: {} requests, {lost} without an answer",
            history.len()
        );
        if let Err(violation) = linearizable::check(&history) {
            let last = violation.explained.len().saturating_sub(12);
            panic!(
                "key {key}: nothing explains this. After {last} others came {:#?}, and then none of {:#?}",
                &violation.explained[last..],
                violation.stuck_at
            );
        }
    }
}

#[test]
fn answers_over_10_kills_can_be_explained() {
    every_key_is_linearizable(10);
}

#[test]
#[ignore = "takes minutes"]
fn answers_over_100_kills_can_be_explained() {
    every_key_is_linearizable(100);
}
