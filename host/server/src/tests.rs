//! The server without sockets: order of outputs, expired requests, batches and readiness.

mod clock;
mod room;

use std::sync::atomic::{AtomicBool, AtomicU64};
use std::time::Instant;

use bytes::Bytes;
use statehouse_mqtt::{Properties, PropertiesBuilder};
use statehouse_protocol::{ConnectionId, SessionId};

use super::intake::Room;
use super::*;
use statehouse_access::rules::{Principal, Rules};
use statehouse_core::STANDARD_POLICY;
use statehouse_core::Settings;
use statehouse_core::clock::ManualSource;
use statehouse_core::log::{JournalRoom, Memory, Recorder};
use statehouse_core::policy::{Engine, Policy, Registry};
use statehouse_core::request::{Delivery, Dialect};
use statehouse_core::store::{Duplicates, Exceeded, Quota, Retention, State, Store, Transaction};
use statehouse_core::trace::Sampling;
use statehouse_transport::Intake;

const START_MS: u64 = 1_700_000_000_000;

/// Records the payloads of delivered messages, in order.
#[derive(Default)]
struct RecordingTransport(Mutex<Vec<Bytes>>);

impl Transport for RecordingTransport {
    fn deliver(&self, ready: &mut dyn FnMut(&mut Vec<Outbound>)) {
        let mut out = Vec::new();
        ready(&mut out);
        let mut payloads = self.0.lock().unwrap();
        payloads.extend(out.into_iter().map(|out| match out {
            Outbound::Response(message, _) | Outbound::Notification(_, message, _) => {
                message.payload
            }
            _ => panic!("these tests cause no acknowledgement and no disconnection"),
        }));
    }
}

/// A server with the standard policy and this journal, at 1700000000000 ms.
fn server_on(journal: Arc<dyn Journal>) -> Arc<Server> {
    let recorder = Recorder::new(journal, Vec::new(), None);
    let source = Arc::new(ManualSource::at(START_MS));
    server(Registry::new(standard(), None), source, recorder)
}

fn standard() -> Arc<Policy<Transaction>> {
    Arc::new(Engine::new().unwrap().load(STANDARD_POLICY).unwrap())
}

fn server(
    registry: Registry<Transaction>,
    source: Arc<ManualSource>,
    recorder: Recorder,
) -> Arc<Server> {
    let store = Store::new(registry, Quota::default());
    let core = Core::new(store, recorder, 1, settings());
    Server::new(core, Clock::new(source), Mode::Embedded)
}

fn settings() -> Settings {
    Settings {
        node: "StateStore".into(),
        dialect: Some(Dialect::Sdk),
        ..Settings::default()
    }
}

/// The delivery of a request on the first connection.
const FIRST: Delivery = Delivery {
    session: SessionId(1),
    connection: ConnectionId(1),
    packet_id: 0,
    dup: false,
};

/// The properties of a request of the client `client`.
fn properties(timestamp_ms: u64) -> Properties {
    PropertiesBuilder::new()
        .response_topic("answers")
        .correlation_data(b"1")
        .user("__ts", &format!("{timestamp_ms}:0:client"))
        .finish()
        .and_then(Properties::parse)
        .unwrap()
}

/// Hands the server a request of the client `client`, as a transport does.
fn publish(
    server: &Server,
    timestamp_ms: u64,
    arguments: &[&[u8]],
    delivery: Delivery,
    expires: Option<Instant>,
) {
    let properties = properties(timestamp_ms);
    let payload = Bytes::from(statehouse_policy::resp::request(arguments));
    let peer = Peer {
        client: "client".into(),
        connection: delivery.connection,
        session: delivery.session,
    };
    let incoming = Incoming {
        delivery,
        expires,
        ..Incoming::new(&peer, &payload, &properties)
    };
    server.take(&mut std::iter::once(Inbound::Publish(incoming, None)));
}

#[test]
fn requests_are_timed_by_command_and_outcome() {
    let server = server_on(Arc::new(Memory));
    let policy = server.policies().1.pop().unwrap();
    server.attach(Arc::new(RecordingTransport::default()));
    let long = "k".repeat(limits::SLOW_KEY_BYTES_MAX + 1);
    server.set_slow_threshold(Duration::from_secs(3_600));
    publish(&server, START_MS, &[b"SET", b"k", b"v"], FIRST, None);
    assert!(server.slow_requests(0).requests.is_empty());
    server.set_slow_threshold(Duration::ZERO);
    for request in [
        &[b"GET", long.as_bytes()][..],
        &[b"SET", b"", b"v"],
        &[b"GET", b"\n"],
    ] {
        publish(&server, START_MS, request, FIRST, None);
    }

    let times = server.times();
    let requests = times.requests.iter();
    let counts: Vec<_> = requests
        .map(|it| (it.command.as_str(), it.outcome, it.times.count()))
        .collect();
    let expected = [("SET", "ok", 1), ("SET", "error", 1), ("GET", "ok", 2)];
    assert_eq!(counts, expected);
    assert_eq!((times.calls.count(), times.notifications.count()), (4, 0));
    let errors = [("the key length is zero".to_owned(), 1)];
    assert_eq!(policy.counters.errors(), errors.into());

    let slow = server.slow_requests(0);
    assert_eq!((slow.next, slow.threshold_us), (3, 0));
    let keys: Vec<_> = slow.requests.iter().map(|it| it.key.as_deref()).collect();
    let cut = format!("{}…", "k".repeat(limits::SLOW_KEY_BYTES_MAX));
    assert_eq!(keys, [Some(&*cut), None, Some("\n")]);
    for it in &slow.requests {
        assert_eq!(
            (&*it.client, it.policy.as_deref()),
            ("client", Some(&*policy.tag))
        );
        // Each part is rounded down.
        let parts = it.queue_us + it.policy_us + it.flush_us + it.socket_us;
        assert!((parts..=parts + 4).contains(&it.total_us), "{it:?}");
        assert!(it.fuel > 0);
    }
    assert_eq!(server.slow_requests(2).requests, slow.requests[2..]);
    assert!(server.slow_requests(3).requests.is_empty());
}

/// Regression: the metrics, and the alert of a nearly full store, left out owners.
#[test]
fn figures_count_what_the_limits_count() {
    let server = server_on(Arc::new(Memory));
    server.attach(Arc::new(RecordingTransport::default()));
    publish(&server, START_MS, &[b"SET", b"k", b"v"], FIRST, None);
    let (stats, usage) = (server.stats(), server.usage(1));
    assert_eq!((stats.keys, stats.bytes), (usage.keys, usage.bytes));
    assert_eq!((usage.keys, usage.owners), (1, 1));
    let entries: u64 = usage.heaviest.iter().map(|it| it.bytes).sum();
    assert!(stats.bytes > entries, "the owner counts too: {stats:?}");
}

/// Over sockets the sweeper is nearly always faster than a request, so only this test covers the
/// order.
#[test]
fn expired_keys_notify_and_expired_requests_do_not_run() {
    let policy = standard();
    let source = Arc::new(ManualSource::at(START_MS));
    let recorder = Recorder::new(Arc::new(Memory), Vec::new(), None);
    let server = server(Registry::new(policy, None), source.clone(), recorder);
    let transport = Arc::new(RecordingTransport::default());
    server.attach(transport.clone());
    let request_until = |expires: Option<Instant>, arguments: &[&[u8]]| {
        publish(&server, START_MS, arguments, FIRST, expires);
        std::mem::take(&mut *transport.0.lock().unwrap())
    };
    let request = |arguments: &[&[u8]]| request_until(None, arguments);
    assert_eq!(request(&[b"SET", b"k", b"v", b"PX", b"1000"]), ["+OK\r\n"]);
    assert_eq!(request(&[b"KEYNOTIFY", b"k"]), ["+OK\r\n"]);
    source.advance(1000);
    let notification = "*2\r\n$6\r\nNOTIFY\r\n$6\r\nDELETE\r\n";
    assert_eq!(
        request(&[b"KEYNOTIFY", b"k", b"STOP"]),
        [notification, "+OK\r\n"]
    );
    assert_eq!(request(&[b"GET", b"k"]), ["$-1\r\n"]);

    // A request that waited beyond its expiry is not executed.
    let expired = Instant::now().checked_sub(Duration::from_secs(1));
    let later = Instant::now().checked_add(Duration::from_secs(1_000));
    let set: &[&[u8]] = &[b"SET", b"k", b"v"];
    assert!(request_until(expired, set).is_empty());
    assert_eq!(request(&[b"GET", b"k"]), ["$-1\r\n"]);
    assert_eq!(server.stats().refused.all(), 1);
    assert_eq!(request_until(later, set), ["+OK\r\n"]);

    // The expirations of an earlier run are renotified in steps until all are sent.
    let keys =
        (0..2 * limits::EXPIRIES_NOTIFIED_PER_STEP_MAX + 1).map(|number| format!("k{number}"));
    let expirations: Vec<_> = keys
        .map(|key| (Key::from(key.into_bytes()), Stamp::default()))
        .collect();
    for (key, _) in expirations.iter().skip(1) {
        assert_eq!(request(&[b"KEYNOTIFY", key]), ["+OK\r\n"]);
    }
    server.renotify_expired(&expirations);
    let all = std::mem::take(&mut *transport.0.lock().unwrap());
    assert_eq!(all, vec![notification; expirations.len() - 1]);
}

/// The rights of `client` by rules that allow it to read this key only.
fn reader_of(key: &str) -> Arc<Grants> {
    let rules = format!(
        "[[rules]]\nprincipals.clientIds = [\"client\"]\nstateStoreResources = [{{ method = \"Read\", keyType = \"String\", keys = [\"{key}\"] }}]\n"
    );
    Rules::parse(&rules).unwrap().grants(Principal {
        client: "client",
        user: None,
        attributes: &[],
    })
}

/// Regression: other clients waited until the rules were evaluated for all watchers.
#[test]
fn recheck_evaluates_rules_without_the_lock() {
    let server = server_on(Arc::new(Memory));
    server.attach(Arc::new(RecordingTransport::default()));
    let second = Delivery {
        session: SessionId(2),
        connection: ConnectionId(2),
        ..FIRST
    };
    publish(&server, START_MS, &[b"KEYNOTIFY", b"k"], FIRST, None);
    publish(&server, START_MS, &[b"KEYNOTIFY", b"other"], second, None);
    let (allowed, forbidden) = (reader_of("k"), reader_of("none"));
    let is_free = Mutex::new(Vec::new());
    server.recheck(|peer| {
        let mut is_free = is_free.lock().unwrap();
        is_free.push(server.locked.try_lock().is_ok());
        // The rules change again after the first evaluation: the newer ones count.
        match is_free.len() % 2 == 0 && peer.connection == ConnectionId(1) {
            true => allowed.clone(),
            false => forbidden.clone(),
        }
    });
    assert_eq!(*is_free.lock().unwrap(), [true, false, true, false]);
    let notified = |key: &[u8]| server.inspect(|store| store.state().watches.of(key).len());
    assert_eq!((notified(b"k"), notified(b"other")), (1, 0));
}

/// The request has expired for its client, but an earlier run executed it and may have ended before
/// it notified the watchers.
#[test]
fn expired_redelivery_of_an_earlier_run_renotifies_watchers() {
    let retention = Retention {
        per_session: 0,
        ..Retention::default()
    };
    let policy = standard();
    let serve = |state: Box<State>, duplicates: Duplicates| {
        let registry = Registry::new(policy.clone(), None);
        let store = Store::restore(registry, Quota::default(), state, duplicates);
        let recorder = Recorder::new(Arc::new(Memory), Vec::new(), None);
        let core = Core::new(store, recorder, 1, settings());
        let clock = Clock::new(Arc::new(ManualSource::at(START_MS)));
        let server = Server::new(core, clock, Mode::Foreign);
        let transport = Arc::new(RecordingTransport::default());
        server.attach(transport.clone());
        (server, transport)
    };
    let session = Mode::foreign_session(1);
    let redelivered = Delivery {
        session,
        connection: session.only_connection(),
        dup: true,
        ..FIRST
    };
    let request = |server: &Server, arguments: &[&[u8]], expires| {
        publish(server, START_MS, arguments, redelivered, expires);
    };
    let expired = Instant::now().checked_sub(Duration::from_secs(1));
    let set: &[&[u8]] = &[b"SET", b"k", b"v"];
    let mut state = Box::<State>::default();
    state.watches.set_durable(true);
    let (first, _) = serve(state, Duplicates::new(retention));
    request(&first, &[b"KEYNOTIFY", b"k"], None);
    request(&first, set, None);
    // The run that executed the request has already notified the watchers.
    request(&first, set, expired);
    assert_eq!(first.stats().refused.all(), 1);

    let mut locked = first.lock();
    let store = locked.core.store_mut();
    let mut duplicates = Duplicates::new(retention);
    for remembered in store.duplicates().range(0) {
        duplicates.insert(&remembered, true);
    }
    let state = Box::new(std::mem::take(store.state_mut()));
    let (second, transport) = serve(state, duplicates);
    request(&second, set, expired);
    let payloads = transport.0.lock().unwrap();
    let notifications = payloads
        .iter()
        .filter(|payload| payload.starts_with(b"*4\r\n$6\r\nNOTIFY"));
    assert_eq!(notifications.count(), 1, "{payloads:?}");
    assert_eq!(second.stats().renotified, 1);
}

#[test]
fn stopping_server_reports_an_impediment() {
    let server = server_on(Arc::new(Memory));
    assert_eq!(server.impediment(), None);
    server.stop();
    assert!(server.impediment().unwrap().contains("stopping"));
}

#[test]
fn batch_beyond_its_time_limit_is_interrupted() {
    let server = server_on(Arc::new(Memory));
    let peers: Vec<_> = (0..100).map(|it| Peer::numbered("client", it)).collect();
    let mut batch = peers.iter().map(Inbound::Disconnected);
    let begun = Instant::now();
    let time = (begun, Some(begun));
    server.take_part(Room::Unlimited, time, &mut batch, &mut false);
    let left = batch.len();
    assert!((90..100).contains(&left), "{left}");
    server.take_part(Room::Unlimited, time, &mut batch, &mut false);
    assert!(batch.len() < left);
    server.take(&mut batch);
    assert_eq!(batch.len(), 0);
}

/// This must also hold if no request has arrived since the disk filled up, and while another thread
/// holds the lock of the store.
#[test]
fn readiness_checks_the_disk_without_the_lock() {
    let journal = Held::default();
    journal.is_full.store(true, Relaxed);
    let server = server_on(Arc::new(journal));
    let _locked = server.lock();
    assert!(server.impediment().unwrap().contains("disk is full"));
}

/// Regression: the answer was that at the last request, which may be long ago.
#[test]
fn check_of_a_write_reads_the_present_room() {
    let journal = Arc::new(Held::default());
    let server = server_on(journal.clone());
    let check = || server.check_write("client", b"k");
    assert_eq!(check(), Ok(()));
    journal.is_full.store(true, Relaxed);
    assert_eq!(check(), Err(Exceeded::Disk));
    journal.is_full.store(false, Relaxed);
    assert_eq!(check(), Ok(()));
}

/// Regression: the check of a watch that is recorded left out the disk.
#[test]
fn check_of_a_durable_watch_reads_the_present_room() {
    let journal = Arc::new(Held::default());
    let server = server_on(journal.clone());
    let peer = Peer::numbered("client", 1);
    let check = || server.check_watch(&peer, b"k");
    journal.is_full.store(true, Relaxed);
    assert_eq!(check(), Ok(()), "a watch in memory needs no room");
    let mut locked = server.lock();
    let state = locked.core.store_mut().state_mut();
    state.watches.set_durable(true);
    drop(locked);
    assert_eq!(check(), Err(Exceeded::Disk));
    journal.is_full.store(false, Relaxed);
    assert_eq!(check(), Ok(()));
}

/// Regression: the sweeper, and the steps of a start, knew the room of the log at the last request
/// only. Until the next request the sweeper removed no key, notified no watcher, and never slept.
#[test]
fn keys_expire_when_there_is_room_without_a_request() {
    let journal = Arc::new(Held::default());
    let source = Arc::new(ManualSource::at(START_MS));
    let recorder = Recorder::new(journal.clone(), Vec::new(), None);
    let server = server(Registry::new(standard(), None), source.clone(), recorder);
    server.attach(Arc::new(RecordingTransport::default()));
    let set: &[&[u8]] = &[b"SET", b"k", b"v", b"PX", b"1000"];
    publish(&server, START_MS, set, FIRST, None);
    source.advance(1_000);
    journal.has_no_reserve.store(true, Relaxed);
    // A step of the start, before any request.
    server.renotify_expired(&[(Key::from_static(b"gone"), Stamp::default())]);
    let (next_ms, now_ms) = server.sweep_once();
    assert!(next_ms > Some(now_ms), "it waits for room: {next_ms:?}");
    assert_eq!(server.stats().keys, 1);
    journal.has_no_reserve.store(false, Relaxed);
    assert_eq!(server.sweep_once(), (None, now_ms));
    assert_eq!(server.stats().keys, 0);
}

/// A log that makes records durable when a test says so, on a disk that is full if a test says so.
#[derive(Default)]
struct Held {
    appended: AtomicU64,
    released: AtomicU64,
    is_full: AtomicBool,
    /// Whether there is no room for removals either.
    has_no_reserve: AtomicBool,
}

impl Journal for Held {
    fn keeps(&self) -> bool {
        true
    }

    fn append(&self, _records: &[&[u8]], _urgent: bool) -> LogPosition {
        LogPosition(self.appended.fetch_add(1, Relaxed) + 1)
    }

    fn released(&self) -> LogPosition {
        LogPosition(self.released.load(Relaxed))
    }

    fn persisted(&self, _urgent: bool) -> &'static str {
        "disk"
    }

    fn room(&self) -> JournalRoom {
        match (
            self.has_no_reserve.load(Relaxed),
            self.is_full.load(Relaxed),
        ) {
            (true, _) => JournalRoom::Nothing,
            (false, true) => JournalRoom::Removals,
            (false, false) => JournalRoom::Growth,
        }
    }

    fn promise(&self) -> String {
        String::new()
    }
}

/// Such reads cost more than the answer, so they are not remembered.
#[test]
fn read_of_a_large_value_waits_for_its_key_alone() {
    let journal = Arc::new(Held::default());
    let server = server_on(journal.clone());
    let transport = Arc::new(RecordingTransport::default());
    server.attach(transport.clone());
    server.watch(true);
    server.set_slow_threshold(Duration::ZERO);
    let reader = Delivery {
        session: SessionId(2),
        connection: ConnectionId(2),
        ..FIRST
    };
    let large = vec![b'v'; 50_000];
    let set = |key: &[u8]| publish(&server, START_MS, &[b"SET", key, &large], FIRST, None);
    let get = || publish(&server, START_MS, &[b"GET", b"large"], reader, None);
    let sent = || std::mem::take(&mut *transport.0.lock().unwrap()).len();
    let release = || {
        let appended = journal.appended.load(Relaxed);
        journal.released.store(appended, Relaxed);
        server.release();
    };
    set(b"large");
    release();
    assert_eq!(sent(), 1);
    set(b"other");
    get();
    assert_eq!(sent(), 1, "only the SET waits");
    set(b"large");
    get();
    // A condition that does not hold, with large reads and with small ones.
    for key in [&b"large"[..], b"small", b"small"] {
        publish(&server, START_MS, &[b"SET", key, b"v", b"NX"], FIRST, None);
    }
    assert_eq!(sent(), 0);
    release();
    assert_eq!(sent(), 6);
    let slow = server.slow_requests(0).requests;
    let keys: Vec<_> = slow.iter().filter_map(|it| it.key.as_deref()).collect();
    let expected = [
        "large", "large", "other", "large", "large", "large", "small", "small",
    ];
    assert_eq!(keys, expected);
    let hot = server.observed(0.0).unwrap().hot_keys;
    let hottest = (&hot[0].key[..], (hot[0].share * 8.0) as u32);
    assert_eq!(hottest, (&b"large"[..], 5));
}

#[test]
fn traces_of_waiting_responses_count_as_their_bytes() {
    let journal = Arc::new(Held::default());
    let server = server_on(journal.clone());
    server.attach(Arc::new(RecordingTransport::default()));
    let set = || {
        let before = server.stats().unreleased_bytes;
        publish(&server, START_MS, &[b"SET", b"k", b"v"], FIRST, None);
        server.stats().unreleased_bytes - before
    };
    let untraced = set();
    let traces = Arc::<Traces>::default();
    server.set_traces(traces.clone());
    assert_eq!(set(), untraced, "without sampling there is no trace");
    let sampling = |ratio| Some(Sampling::new(ratio, || 7, Instant::now));
    server.lock().core.settings_mut().traces = sampling(0.0);
    assert_eq!(set(), untraced, "chance decided against it");
    server.lock().core.settings_mut().traces = sampling(1.0);
    assert_eq!(set(), untraced + size_of::<Trace>() as u64);
    server.release();
    assert_eq!(traces.queued(), 0, "nothing is durable");
    journal.released.store(4, Relaxed);
    server.release();
    assert_eq!((traces.queued(), server.stats().unreleased_bytes), (1, 0));
}
