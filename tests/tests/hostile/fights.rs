//! One client id, and many who claim it at once (NanoMQ's CVE-2026-22040 and CVE-2025-59946: freed subscriptions were
//! used). Each takes the session from the one before it, in the middle of whatever that one did.

use std::{
    net::SocketAddr,
    sync::{
        Mutex,
        atomic::{AtomicU64, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use statehouse_tests::{
    Admin, Client, Connect, Heard, Hlc, Property, Publish, Request, Store,
    client::PATIENCE,
    packet::{self, kind},
    store,
};

use crate::witness::Witness;

const FIGHTERS: u64 = 64;
const CONTESTED: &str = "contested";
const TAKEN_OVER: u8 = 0x8E;
/// A session is bounded in what it queues, and 64 sockets are not much.
const GROWTH_KIB_MAX: u64 = 48 * 1024;

/// Sixty-four connections claim one client id at once: one is left, and it works.
#[test]
fn one_of_many_who_claim_one_client_id_is_left() {
    let mut witness = Witness::new();
    let address = witness.server.address();
    let fights: Vec<_> = (0..FIGHTERS)
        .map(|_| {
            thread::spawn(move || {
                let mut client = Client::open(address);
                // Taken over in the middle of it is what this is about.
                let _ = client.try_send(&Connect::new(CONTESTED).bytes());
                // It has had its turn when something is heard.
                match client.poll(PATIENCE) {
                    Heard::Packet(packet) => assert_eq!(packet.kind(), kind::CONNACK),
                    other => panic!("instead of a CONNACK: {other:?}"),
                }
                client
            })
        })
        .collect();
    let clients: Vec<_> = fights
        .into_iter()
        .map(|fight| fight.join().unwrap())
        .collect();
    let mut last = witness.server.store(CONTESTED);
    for mut client in clients {
        if let Some(disconnect) = client.expect_closed() {
            assert_eq!(disconnect.reason, TAKEN_OVER, "{disconnect:?}");
        }
    }
    assert_eq!(last.get("data"), Some(b"still there".to_vec()));
    last.client.disconnect();
    witness.unharmed();
}

/// What was ever acknowledged to any of the fighters.
struct Ring {
    address: SocketAddr,
    /// Fencing tokens handed out so far: each write has a higher one than all before it.
    tokens: AtomicU64,
    began: Hlc,
    acknowledged: Mutex<Acknowledged>,
}

#[derive(Clone, Default)]
struct Acknowledged {
    /// The highest fencing token, as its number.
    token: u64,
    version: Option<Hlc>,
    writes: u64,
}

impl Ring {
    fn token(&self, number: u64) -> Hlc {
        self.began.moved(i64::try_from(number).unwrap())
    }

    fn seen(&self) -> Acknowledged {
        self.acknowledged.lock().unwrap().clone()
    }

    /// Connects, does everything at once, and looks at what is answered until another takes over.
    fn turn(&self, fighter: u64, turn: u64) {
        let mut fighting = Store::on(Client::open(self.address), CONTESTED);
        let connect = match turn % 3 {
            0 => Connect::new(CONTESTED).with(Property::SessionExpiry(600)),
            _ => Connect::resume(CONTESTED, 600),
        };
        let filters = [("clients/contested/#", 1), ("noise/#", 2)];
        let hello = [connect.bytes(), packet::subscribe(1, &[], &filters)].concat();
        let noise = Publish::new("noise/a", vec![b'x'; 100]).qos(2);
        let before = self.seen();
        let number = self.tokens.fetch_add(1, Ordering::Relaxed) + 1;
        let value = format!("{fighter} {turn}");
        let fence = |request: Request, number| request.with("__ft", self.token(number));
        let write = fighting.command(&["SET", CONTESTED, &value]);
        let write = fence(write, number);
        // Lower than what was acknowledged before this was sent, so it must not take effect.
        let stale = fighting.command(&["SET", CONTESTED, "stale"]);
        let stale = (before.token > 0).then(|| fence(stale, before.token - 1));
        let read = fighting.command(&["GET", CONTESTED]);
        let watch = fighting.command(&["KEYNOTIFY", CONTESTED]);
        let requests = [Some(&write), stale.as_ref(), Some(&read), Some(&watch)];
        let mut bytes = hello;
        let publishes = requests.into_iter().flatten().map(Request::publish);
        for (packet_id, mut publish) in (2..).zip(publishes.chain([noise])) {
            publish.packet_id = packet_id;
            bytes.extend(publish.bytes());
        }
        let client = &mut fighting.client;
        // Taken over in the middle of it is what this is about.
        let _ = client.try_send(&bytes);
        loop {
            let packet = match client.poll(PATIENCE) {
                Heard::Packet(packet) => packet,
                Heard::Closed => return,
                Heard::Silence => panic!("neither answered nor taken over"),
            };
            match packet.kind() {
                kind::PUBLISH => {
                    let answer = packet.publish();
                    let correlation = correlation(&answer);
                    let is_ok = answer.payload == b"+OK\r\n";
                    if correlation == write.correlation && is_ok {
                        self.written(number, store::version(&answer).unwrap());
                    } else if stale
                        .as_ref()
                        .is_some_and(|it| it.correlation == correlation)
                    {
                        assert!(
                            !is_ok,
                            "a fence was lost: {} was acknowledged",
                            before.token
                        );
                    } else if correlation == read.correlation {
                        let version = store::version(&answer);
                        assert!(
                            version >= before.version,
                            "{version:?} is before {:?}",
                            before.version
                        );
                    }
                }
                kind::PUBREC => return,
                kind::DISCONNECT => {
                    assert_eq!(packet.ack().reason, TAKEN_OVER, "{packet:?}");
                    return;
                }
                _ => {}
            }
        }
    }

    fn written(&self, number: u64, version: Hlc) {
        let mut acknowledged = self.acknowledged.lock().unwrap();
        acknowledged.token = acknowledged.token.max(number);
        acknowledged.version = acknowledged.version.take().max(Some(version));
        acknowledged.writes += 1;
    }
}

/// Which request a message answers.
fn correlation(answer: &Publish) -> Option<Vec<u8>> {
    answer
        .properties
        .iter()
        .find_map(|property| match property {
            Property::CorrelationData(data) => Some(data.clone()),
            _ => None,
        })
}

/// They connect, subscribe, publish, set, get and watch, all as one client, for so long. Whoever looks on is served all the
/// while, and sees no version go back; at the end there is one session, and the fence is where it was raised to.
fn fight_for(time: Duration) {
    let mut witness = Witness::new();
    let before_kib = witness.server.memory_kib();
    let ring = Ring {
        address: witness.server.address(),
        tokens: AtomicU64::new(0),
        // Long ago, so that no token comes to be ahead of the clock.
        began: Hlc::now(-3_600_000),
        acknowledged: Mutex::default(),
    };
    let end = Instant::now() + time;
    thread::scope(|scope| {
        for fighter in 0..FIGHTERS {
            let ring = &ring;
            scope.spawn(move || {
                for turn in fighter.. {
                    ring.turn(fighter, turn);
                    if Instant::now() >= end {
                        return;
                    }
                }
            });
        }
        let mut last = None;
        while Instant::now() < end {
            witness.still_served();
            let version = witness.store.ask(&["GET", CONTESTED]).version();
            assert!(version >= last, "{version:?} after {last:?}");
            last = version;
            witness.assert_grown_less_than(before_kib, GROWTH_KIB_MAX);
        }
    });
    let seen = ring.seen();
    assert!(
        seen.writes > 20,
        "only {} writes were answered",
        seen.writes
    );

    let (_, page) = Admin::of(&witness.server).ask("GET", "/metrics", b"");
    let sessions = page
        .lines()
        .find_map(|line| line.strip_prefix("statehouse_sessions "));
    // The witness's, and the one that was fought over.
    assert_eq!(sessions, Some("2"));

    let mut last = witness.server.store(CONTESTED);
    let version = last.ask(&["GET", CONTESTED]).version();
    assert!(
        version >= seen.version,
        "{version:?} is before {:?}",
        seen.version
    );
    let with = |last: &mut Store, number| {
        let token = ring.token(number);
        let request = last
            .command(&["SET", CONTESTED, "after"])
            .with("__ft", token);
        last.call(&request).text()
    };
    assert!(with(&mut last, seen.token - 1).contains("lower version"));
    let highest = ring.tokens.load(Ordering::Relaxed);
    assert_eq!(with(&mut last, highest + 1), "+OK\\r\\n");
    assert!(last.ask(&["GET", CONTESTED]).version() > seen.version);
    last.client.disconnect();
    witness.unharmed();
}

#[test]
fn sixty_four_fight_over_one_session() {
    fight_for(Duration::from_secs(3));
}

#[test]
#[ignore = "it takes a minute"]
fn sixty_four_fight_over_one_session_for_a_minute() {
    fight_for(Duration::from_secs(60));
}
