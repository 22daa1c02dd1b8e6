//! Many connections that claim one client id at once. Each takes over the session while the
//! previous connection is still working, and every acknowledged write must remain.
//!
//! In CVE-2026-22040 and CVE-2025-59946, NanoMQ used freed subscriptions in this situation.

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
    Client, Connect, Heard, Hlc, Property, Publish, Request, Store,
    client::PATIENCE,
    packet::{self, kind},
    store,
};

use crate::witness::Witness;

const CLAIMANTS: u64 = 64;
const CONTESTED: &str = "contested";
const TAKEN_OVER: u8 = 0x8E;
/// The queue of a session is limited, and 64 sockets need little memory.
const GROWTH_KIB_MAX: u64 = 48 * 1024;
/// The claimants pause for the last part of each round. Without that, on idle cores, nearly all are
/// taken over before their write is answered.
const ROUND: Duration = Duration::from_millis(500);
const PAUSE: Duration = Duration::from_millis(150);
const WRITES_MIN: u64 = 3;

/// 64 connections claim one client id at once. One remains, and works.
#[test]
fn connections_claiming_one_client_id_leave_one() {
    let mut witness = Witness::new();
    let address = witness.server.address();
    let threads: Vec<_> = (0..CLAIMANTS)
        .map(|_| {
            thread::spawn(move || {
                let mut client = Client::open(address);
                // Another connection may take over before everything is sent.
                let _ = client.try_send(&Connect::new(CONTESTED).bytes());
                match client.poll(PATIENCE) {
                    Heard::Packet(packet) => assert_eq!(packet.kind(), kind::CONNACK),
                    other => panic!("instead of a CONNACK: {other:?}"),
                }
                client
            })
        })
        .collect();
    let clients: Vec<_> = threads
        .into_iter()
        .map(|thread| thread.join().unwrap())
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

/// The shared state of the claimants, which all use the contested client id.
struct Contest {
    address: SocketAddr,
    /// The number of fencing tokens assigned so far. Each write has a higher token than all earlier
    /// ones.
    tokens: AtomicU64,
    /// The token with number zero.
    began: Hlc,
    acknowledged: Mutex<Acknowledged>,
}

/// The writes that were acknowledged to any claimant.
#[derive(Clone, Default)]
struct Acknowledged {
    /// The highest fencing token, as its number.
    token: u64,
    version: Option<Hlc>,
    writes: u64,
}

impl Contest {
    fn token(&self, number: u64) -> Hlc {
        self.began.moved(i64::try_from(number).unwrap())
    }

    fn seen(&self) -> Acknowledged {
        self.acknowledged.lock().unwrap().clone()
    }

    /// Connects, sends everything at once, and checks the answers until another claimant takes
    /// over.
    fn turn(&self, claimant: u64, turn: u64) {
        let mut store_client = Store::on(Client::open(self.address), CONTESTED);
        let connect = match turn % 3 {
            0 => Connect::new(CONTESTED).with(Property::SessionExpiry(600)),
            _ => Connect::resume(CONTESTED, 600),
        };
        let filters = [("clients/contested/#", 1), ("noise/#", 2)];
        let hello = [connect.bytes(), packet::subscribe(1, &[], &filters)].concat();
        let noise = Publish::new("noise/a", vec![b'x'; 100]).qos(2);
        let before = self.seen();
        let number = self.tokens.fetch_add(1, Ordering::Relaxed) + 1;
        let value = format!("{claimant} {turn}");
        let fence = |request: Request, number| request.with("__ft", self.token(number));
        let write = store_client.command(&["SET", CONTESTED, &value]);
        let write = fence(write, number);
        // Its token is lower than one that was acknowledged before, so it must not take effect.
        let stale = store_client.command(&["SET", CONTESTED, "stale"]);
        let stale = (before.token > 0).then(|| fence(stale, before.token - 1));
        let read = store_client.command(&["GET", CONTESTED]);
        let watch = store_client.command(&["KEYNOTIFY", CONTESTED]);
        let requests = [Some(&write), stale.as_ref(), Some(&read), Some(&watch)];
        let mut bytes = hello;
        let publishes = requests.into_iter().flatten().map(Request::publish);
        for (packet_id, mut publish) in (2..).zip(publishes.chain([noise])) {
            publish.packet_id = packet_id;
            bytes.extend(publish.bytes());
        }
        let client = &mut store_client.client;
        // Another claimant may take over before everything is sent.
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
                    let answers = |request: &Request| {
                        store::is_answer(&packet, request.correlation.as_deref())
                    };
                    let is_ok = answer.payload == b"+OK\r\n";
                    if answers(&write) && is_ok {
                        self.written(number, store::version(&answer).unwrap());
                    } else if stale.as_ref().is_some_and(answers) {
                        assert!(
                            !is_ok,
                            "a fence was lost: {} was acknowledged",
                            before.token
                        );
                    } else if answers(&read) {
                        let version = store::version(&answer);
                        assert!(
                            version >= before.version,
                            "{version:?} is older than {:?}",
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

/// How long a claimant must wait at this time of the contest.
fn pause(elapsed: Duration) -> Duration {
    let in_round = elapsed.as_millis() % ROUND.as_millis();
    let left = ROUND.as_millis() - in_round;
    match left <= PAUSE.as_millis() {
        true => Duration::from_millis(u64::try_from(left).unwrap()),
        false => Duration::ZERO,
    }
}

/// Lets all claimants connect, subscribe, publish, set, get and watch as one client, for this time,
/// and longer until some writes are answered.
/// The witness is served throughout and never reads an older version. At the end, one contested
/// session remains, and the fence has its highest value.
fn contend_for(time: Duration) {
    let mut witness = Witness::new();
    let before_kib = witness.server.memory_kib();
    let contest = Contest {
        address: witness.server.address(),
        tokens: AtomicU64::new(0),
        // Long ago, so that no token is ahead of the clock.
        began: Hlc::now(-3_600_000),
        acknowledged: Mutex::default(),
    };
    let began = Instant::now();
    let end = began + time;
    let is_over = || {
        let late = Instant::now().checked_duration_since(end);
        late.is_some_and(|late| late >= PATIENCE || contest.seen().writes >= WRITES_MIN)
    };
    thread::scope(|scope| {
        for claimant in 0..CLAIMANTS {
            let (contest, is_over) = (&contest, &is_over);
            scope.spawn(move || {
                for turn in claimant.. {
                    thread::sleep(pause(began.elapsed()));
                    contest.turn(claimant, turn);
                    if is_over() {
                        return;
                    }
                }
            });
        }
        let mut last = None;
        while !is_over() {
            witness.still_served();
            let version = witness.store.ask(&["GET", CONTESTED]).version();
            assert!(version >= last, "{version:?} after {last:?}");
            last = version;
            witness.assert_grown_less_than(before_kib, GROWTH_KIB_MAX);
        }
    });
    let seen = contest.seen();
    assert!(
        seen.writes >= WRITES_MIN,
        "only {} writes were answered",
        seen.writes
    );

    // The session of the witness, and the contested one.
    assert_eq!(witness.server.metric("sessions"), 2);

    let mut last = witness.server.store(CONTESTED);
    let version = last.ask(&["GET", CONTESTED]).version();
    assert!(
        version >= seen.version,
        "{version:?} is older than {:?}",
        seen.version
    );
    let with = |last: &mut Store, number| {
        let token = contest.token(number);
        let request = last
            .command(&["SET", CONTESTED, "after"])
            .with("__ft", token);
        last.call(&request).text()
    };
    assert!(with(&mut last, seen.token - 1).contains("lower version"));
    let highest = contest.tokens.load(Ordering::Relaxed);
    assert_eq!(with(&mut last, highest + 1), "+OK\\r\\n");
    assert!(last.ask(&["GET", CONTESTED]).version() > seen.version);
    last.client.disconnect();
    witness.unharmed();
}

#[test]
fn session_contested_by_64_keeps_its_fence() {
    contend_for(Duration::from_secs(3));
}

#[test]
#[ignore = "it takes a minute"]
fn session_contested_for_a_minute_keeps_its_fence() {
    contend_for(Duration::from_secs(60));
}
