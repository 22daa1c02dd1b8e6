//! A small disk under load. Overwriting must never fill the disk or delay readers. If the live data
//! is too large, the server must refuse growth with a reason, and accept it again without an
//! operator. These tests mount a small file system, so they need root.

use std::{
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::{Duration, Instant},
};

use statehouse_tests::{
    Admin, Client, Connect, Property, Publish, Server, Store, run_in,
    small::{
        FileSystem::{self, Ext4, Tmpfs},
        Small,
    },
    wait::until,
};

use crate::disk_full::{QUOTA, noise, start};

const QUOTA_EXCEEDED: u8 = 0x97;
const SESSION_EXPIRY_S: u32 = 3600;

/// Reads, removes and pings until `stop` is set. Each must be answered. Returns the sorted
/// latencies of the reads.
fn read_until(server: &Server, stop: &AtomicBool) -> Vec<Duration> {
    let mut store = server.store("reader");
    let mut took = Vec::new();
    let value = store.get("read");
    while !stop.load(Ordering::Relaxed) {
        let began = Instant::now();
        assert_eq!(store.get("read"), value);
        took.push(began.elapsed());
        assert_eq!(store.ask(&["DEL", "no such key"]).payload(), b":0\r\n");
        store.client.ping();
        thread::sleep(Duration::from_millis(5));
    }
    took.sort();
    took
}

/// Runs `work` while another client reads. Also returns the latencies of the reads.
fn while_reading<R>(server: &Server, work: impl FnOnce() -> R) -> (R, Vec<Duration>) {
    let stop = AtomicBool::new(false);
    thread::scope(|scope| {
        let reader = scope.spawn(|| read_until(server, &stop));
        let done = work();
        stop.store(true, Ordering::Relaxed);
        (done, reader.join().unwrap())
    })
}

fn readiness(small: &Small) -> (u16, String) {
    Admin::at(small.data().as_ref()).ask("GET", "/readyz", b"")
}

/// The kind of data that a load writes.
#[derive(Clone, Copy, Debug)]
enum Filler {
    /// Values of this many keys.
    Keys(usize),
    /// Retained messages on this many topics.
    Retained(usize),
    /// Messages for one absent client per writer, which fetches them after every so many.
    Queued(usize),
    /// Sessions of this many clients, with wills.
    Wills(usize),
    /// Sessions of this many clients, with subscriptions.
    Sessions(usize),
}

/// The numbers of accepted and refused writes of a load.
#[derive(Debug, Default)]
struct Outcome {
    accepted: usize,
    refused: usize,
}

impl Outcome {
    fn count(&mut self, reason: u8) {
        match reason {
            QUOTA_EXCEEDED => self.refused += 1,
            reason => {
                assert!(reason < 0x80, "{reason:#x}");
                self.accepted += 1;
            }
        }
    }
}

impl Filler {
    /// Writes `count` values of `bytes` each by one client.
    fn run(self, server: &Server, count: usize, bytes: usize) -> Outcome {
        self.run_with(1, server, count, bytes)
    }

    /// Writes by several clients: one sync of the disk then serves several writes. Writers share no
    /// session if their number divides that of the sessions.
    fn run_with(self, writers: usize, server: &Server, count: usize, bytes: usize) -> Outcome {
        let values: Vec<_> = (0..4).map(|seed| noise(seed, bytes)).collect();
        let value = |n: usize| &values[n % values.len()];
        let write = |writer: usize| {
            let id = format!("writer {writer}");
            let numbers = (writer..count).step_by(writers);
            match self {
                Filler::Keys(keys) => Self::keys(&mut server.store(&id), numbers, keys, value),
                Filler::Retained(topics) => {
                    Self::retained(server.connect(&id), numbers, topics, value)
                }
                Filler::Queued(at_once) => Self::queued(server, &id, numbers, at_once, value),
                Filler::Wills(clients) | Filler::Sessions(clients) => {
                    self.sessions(server, numbers, clients, value)
                }
            }
        };
        thread::scope(|scope| {
            let write = &write;
            let running: Vec<_> = (0..writers)
                .map(|writer| scope.spawn(move || write(writer)))
                .collect();
            let outcomes = running.into_iter().map(|it| it.join().unwrap());
            outcomes.fold(Outcome::default(), |sum, it| Outcome {
                accepted: sum.accepted + it.accepted,
                refused: sum.refused + it.refused,
            })
        })
    }

    fn keys<'a>(
        store: &mut Store,
        numbers: impl Iterator<Item = usize>,
        keys: usize,
        value: impl Fn(usize) -> &'a Vec<u8>,
    ) -> Outcome {
        let mut outcome = Outcome::default();
        for n in numbers {
            let key = format!("key {}", n % keys);
            let answer = store.ask(&[b"SET", key.as_bytes(), value(n)]);
            match answer.payload() {
                b"+OK\r\n" => outcome.accepted += 1,
                QUOTA => outcome.refused += 1,
                _ => panic!("{}", answer.text()),
            }
        }
        outcome
    }

    fn retained<'a>(
        mut client: Client,
        numbers: impl Iterator<Item = usize>,
        topics: usize,
        value: impl Fn(usize) -> &'a Vec<u8>,
    ) -> Outcome {
        let mut outcome = Outcome::default();
        for n in numbers {
            let topic = format!("state/{}", n % topics);
            let message = Publish::new(&topic, value(n)).qos(1).retained();
            outcome.count(client.publish(message).reason);
        }
        outcome
    }

    fn queued<'a>(
        server: &Server,
        id: &str,
        numbers: impl Iterator<Item = usize>,
        at_once: usize,
        value: impl Fn(usize) -> &'a Vec<u8>,
    ) -> Outcome {
        let topic = format!("jobs of {id}");
        let absent = Connect::resume(&format!("absent client of {id}"), SESSION_EXPIRY_S);
        Client::connect(server.address(), &absent).subscribe(&topic, 1);
        let (mut client, mut outcome) = (server.connect(id), Outcome::default());
        for (sent, n) in (1..).zip(numbers) {
            let message = Publish::new(&topic, value(n)).qos(1);
            outcome.count(client.publish(message).reason);
            if sent % at_once == 0 {
                let mut receiver = Client::connect(server.address(), &absent);
                for _ in 0..outcome.accepted.min(at_once) {
                    receiver.take_publish(&topic);
                }
                receiver.ping();
            }
        }
        outcome
    }

    fn sessions<'a>(
        self,
        server: &Server,
        numbers: impl Iterator<Item = usize>,
        clients: usize,
        value: impl Fn(usize) -> &'a Vec<u8>,
    ) -> Outcome {
        let mut outcome = Outcome::default();
        for n in numbers {
            let id = format!("device {}", n % clients);
            let connect = Connect::resume(&id, SESSION_EXPIRY_S);
            let connect = match self {
                Filler::Wills(_) => {
                    connect.will(Publish::new(&format!("gone/{id}"), value(n)), 3600)
                }
                _ => connect,
            };
            let (mut client, connack) = Client::try_connect(server.address(), &connect);
            outcome.count(connack.reason);
            if matches!(self, Filler::Sessions(_)) {
                let filter = format!("{}/{}", n % 7, "f".repeat(value(n).len()));
                outcome.count(client.subscribe(&filter, 1));
            }
            client.abort();
        }
        outcome
    }
}

/// Overwrites of the same few keys or topics need room only for their current values.
fn overwrite_on_a_small_disk(kind: FileSystem) {
    for (filler, bytes) in [(Filler::Keys(10), 200_000), (Filler::Retained(20), 20_000)] {
        let Some(small) = Small::mount(kind, 16) else {
            return;
        };
        let mut server = start(&small, &[]);
        let count = 2 * (16 << 20) / bytes;
        let (outcome, reads) = while_reading(&server, || filler.run(&server, count, bytes));
        assert_eq!(
            (outcome.accepted, outcome.refused),
            (count, 0),
            "{filler:?}"
        );
        assert!(!reads.is_empty());
        assert_eq!(readiness(&small).0, 200);
        server.kill_and_restart();
        assert_eq!(filler.run(&server, 30, bytes).refused, 0, "{filler:?}");
    }
}

#[test]
fn overwrites_on_a_small_disk_are_never_refused() {
    overwrite_on_a_small_disk(Tmpfs);
}

fn overwrite_a_third_of_the_disk(kind: FileSystem) {
    let Some(small) = Small::mount(kind, 24) else {
        return;
    };
    let mut server = start(&small, &[]);
    let bytes = 100_000;
    let keys = small.free_bytes() / 3 / bytes;
    let write = |server: &Server, rounds: usize| {
        let filler = Filler::Keys(keys);
        let (outcome, _) = while_reading(server, || filler.run(server, rounds * keys, bytes));
        assert_eq!((outcome.accepted, outcome.refused), (rounds * keys, 0));
    };
    write(&server, 4);
    server.kill_and_restart();
    write(&server, 2);
}

#[test]
fn overwrites_of_a_third_of_the_disk_are_never_refused() {
    overwrite_a_third_of_the_disk(Tmpfs);
}

/// Fills the disk with live data. The server refuses growth and serves everything else, until
/// removals free room.
fn grow_beyond_the_disk(kind: FileSystem) {
    let Some(small) = Small::mount(kind, 12) else {
        return;
    };
    let server = start(&small, &[]);
    let mut publisher = server.connect("publisher");
    let value = noise(1, 50_000);
    let topic = |n: usize| format!("state/{n}");
    let mut publish = |n: usize, value: &[u8]| {
        let message = Publish::new(&topic(n), value).qos(1).retained();
        publisher.publish(message).reason
    };
    let refused = (0..400).find(|n| publish(*n, &value) == QUOTA_EXCEEDED);
    let refused = refused.expect("the disk has no room for 20 MB");
    assert!(refused > 40, "only {refused} messages of 50 KB");
    let (status, why) = readiness(&small);
    assert_eq!(status, 503);
    assert!(why.contains("disk is full"), "{why}");
    let data = small.data();
    let output = run_in(data.as_ref(), &["doctor", "."]).code(0).text();
    assert!(output.contains("the store refuses writes"), "{output}");

    let ((), _) = while_reading(&server, || {
        let mut store = server.store("writer");
        assert_eq!(store.ask(&["SET", "key", "value"]).payload(), QUOTA);
        // A durable session ends with its connection, and its CONNACK says so.
        let durable = Connect::resume("new", SESSION_EXPIRY_S);
        let (mut client, connack) = Client::try_connect(server.address(), &durable);
        assert_eq!(connack.reason, 0);
        assert!(connack.properties.contains(&Property::SessionExpiry(0)));
        assert_eq!(client.subscribe("any", 1), 1);
        assert_eq!(
            client.publish(Publish::new("any", "message").qos(1)).reason,
            0
        );
        assert_eq!(client.take_publish("any").payload, b"message");
    });

    for n in 0..refused {
        assert!(publish(n, b"") < 0x80);
    }
    until("messages are accepted, since there is room", || {
        publish(0, &value) != QUOTA_EXCEEDED
    });
    assert_eq!(readiness(&small).0, 200);
}

#[test]
fn growth_beyond_the_disk_is_refused_until_removals() {
    grow_beyond_the_disk(Tmpfs);
}

/// The cases of this module that the quick tests run only on tmpfs.
#[test]
#[ignore = "takes minutes"]
fn small_ext4_disk_behaves_as_tmpfs() {
    overwrite_on_a_small_disk(Ext4);
    overwrite_a_third_of_the_disk(Ext4);
    grow_beyond_the_disk(Ext4);
}

#[test]
#[ignore = "takes minutes"]
fn fillers_on_small_tmpfs_disks_delay_no_readers() {
    run_fillers(Tmpfs);
}

#[test]
#[ignore = "takes minutes"]
fn fillers_on_small_ext4_disks_delay_no_readers() {
    run_fillers(Ext4);
}

/// Runs every filler on every size of disk, for several times that size, while another client
/// reads.
fn run_fillers(kind: FileSystem) {
    for megabytes in [48, 64, 256] {
        let Some(empty) = Small::mount(kind, megabytes as u32) else {
            return;
        };
        let a_third = empty.free_bytes() / 3;
        drop(empty);
        for (filler, bytes) in [
            (Filler::Keys(10), 1_000),
            (Filler::Keys(10), 300_000),
            (Filler::Keys(a_third / 100_000), 100_000),
            (Filler::Retained(100), 20_000),
            (Filler::Queued(5), 20_000),
            (Filler::Wills(100), 30_000),
            (Filler::Sessions(100), 500),
        ] {
            let Some(small) = Small::mount(kind, megabytes as u32) else {
                return;
            };
            let server = start(&small, &[]);
            let count = (3 * megabytes * (1 << 20) / bytes).min(20_000);
            let work = || filler.run_with(10, &server, count, bytes);
            let (outcome, reads) = while_reading(&server, work);
            let p99 = reads[reads.len() * 99 / 100];
            println!("{kind:?} {megabytes} MB {filler:?} × {bytes}: {outcome:?}, p99 {p99:?}");
            assert_eq!(outcome.refused, 0, "{megabytes} MB {filler:?}");
            assert!(p99 < Duration::from_millis(500), "{p99:?}");
            assert_eq!(readiness(&small).0, 200);
        }
    }
}
