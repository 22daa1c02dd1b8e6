mod clock;

use bytes::Bytes;
use statehouse_mqtt::{Properties, PropertiesBuilder, QoS};

use super::*;
use crate::STANDARD_POLICY;
use statehouse_core::Settings;
use statehouse_core::clock::ManualSource;
use statehouse_core::log::{Memory, Recorder};
use statehouse_core::policy::{Engine, Registry};
use statehouse_core::request::{Delivery, Dialect, REQUEST_TOPIC};
use statehouse_core::store::{Duplicates, Quota, Retention, State, Store, Transaction};

const START_MS: u64 = 1_700_000_000_000;

/// Keeps the payloads it was asked to carry out, in order.
#[derive(Default)]
struct Notebook(Mutex<Vec<Bytes>>);

impl Transport for Notebook {
    fn deliver(&self, ready: &mut dyn FnMut(&mut Vec<Outbound>)) {
        let mut out = Vec::new();
        ready(&mut out);
        let mut notes = self.0.lock().unwrap();
        notes.extend(out.into_iter().map(|out| match out {
            Outbound::Response(message, _) | Outbound::Notification(_, message, _) => {
                message.payload
            }
            _ => panic!("nothing here is settled or kicked"),
        }));
    }
}

/// A server over the standard policy and this journal, at 1700000000000 ms.
fn server_on(journal: Arc<dyn Journal>) -> Arc<Server> {
    let policy = Arc::new(Engine::new().unwrap().load(STANDARD_POLICY).unwrap());
    let recorder = Recorder::new(journal, Vec::new(), None);
    let source = Arc::new(ManualSource::at(START_MS));
    server(Registry::new(policy, None), source, recorder)
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

/// How a request of the first connection arrives.
const FIRST: Delivery = Delivery {
    session: 1,
    connection: 1,
    packet_id: 0,
    dup: false,
};

/// Hands the server a request of the client `client`, as a transport does.
fn publish(
    server: &Server,
    timestamp_ms: u64,
    arguments: &[&[u8]],
    delivery: Delivery,
    expires: Option<Instant>,
) {
    let properties = PropertiesBuilder::new()
        .response_topic("answers")
        .correlation_data(b"1")
        .user("__ts", &format!("{timestamp_ms}:0:client"))
        .finish()
        .unwrap();
    let incoming = Incoming {
        topic: REQUEST_TOPIC,
        payload: &Bytes::from(statehouse_policy::resp::request(arguments)),
        properties: &Properties::parse(properties).unwrap(),
        qos: QoS::AtLeastOnce,
        delivery,
        expires,
        peer: &Peer {
            client: "client".into(),
            connection: delivery.connection,
            session: delivery.session,
        },
        grants: None,
    };
    server.take(&mut std::iter::once(Inbound::Publish(incoming, None)));
}

/// Over sockets the sweeper is nearly always faster than a request, so this order shows only here.
#[test]
fn expired_keys_notify_and_expired_requests_do_not_run() {
    let policy = Arc::new(Engine::new().unwrap().load(STANDARD_POLICY).unwrap());
    let source = Arc::new(ManualSource::at(START_MS));
    let recorder = Recorder::new(Arc::new(Memory), Vec::new(), None);
    let server = server(Registry::new(policy, None), source.clone(), recorder);
    let notebook = Arc::new(Notebook::default());
    server.attach(notebook.clone());
    let ask_until = |expires: Option<Instant>, arguments: &[&[u8]]| {
        publish(&server, START_MS, arguments, FIRST, expires);
        std::mem::take(&mut *notebook.0.lock().unwrap())
    };
    let ask = |arguments: &[&[u8]]| ask_until(None, arguments);
    assert_eq!(ask(&[b"SET", b"k", b"v", b"PX", b"1000"]), ["+OK\r\n"]);
    assert_eq!(ask(&[b"KEYNOTIFY", b"k"]), ["+OK\r\n"]);
    source.advance(1000);
    let told = "*2\r\n$6\r\nNOTIFY\r\n$6\r\nDELETE\r\n";
    assert_eq!(ask(&[b"KEYNOTIFY", b"k", b"STOP"]), [told, "+OK\r\n"]);
    assert_eq!(ask(&[b"GET", b"k"]), ["$-1\r\n"]);

    // One that waited for longer than its client wanted to does not run any more.
    let over = Instant::now().checked_sub(Duration::from_secs(1));
    let later = Instant::now().checked_add(Duration::from_secs(1_000));
    let set: &[&[u8]] = &[b"SET", b"k", b"v"];
    assert!(ask_until(over, set).is_empty());
    assert_eq!(ask(&[b"GET", b"k"]), ["$-1\r\n"]);
    assert_eq!(server.stats().refused, 1);
    assert_eq!(ask_until(later, set), ["+OK\r\n"]);

    // What an earlier run removed is told of in steps, and to its end.
    let keys =
        (0..2 * limits::EXPIRIES_NOTIFIED_PER_STEP_MAX + 1).map(|number| format!("k{number}"));
    let ends: Vec<_> = keys
        .map(|key| (Key::from(key.into_bytes()), Stamp::default()))
        .collect();
    for (key, _) in ends.iter().skip(1) {
        assert_eq!(ask(&[b"KEYNOTIFY", key]), ["+OK\r\n"]);
    }
    server.renotify_expired(&ends);
    let all = std::mem::take(&mut *notebook.0.lock().unwrap());
    assert_eq!(all, vec![told; ends.len() - 1]);
}

/// Its client has given up, but its effect is there, and the run that brought it about may have told nobody.
#[test]
fn what_an_earlier_run_handled_is_told_of_although_it_has_expired() {
    let retention = Retention {
        per_session: 0,
        ..Retention::default()
    };
    let policy = Arc::new(Engine::new().unwrap().load(STANDARD_POLICY).unwrap());
    let serve = |state: Box<State>, duplicates: Duplicates| {
        let registry = Registry::new(policy.clone(), None);
        let store = Store::restore(registry, Quota::default(), state, duplicates);
        let recorder = Recorder::new(Arc::new(Memory), Vec::new(), None);
        let core = Core::new(store, recorder, 1, settings());
        let clock = Clock::new(Arc::new(ManualSource::at(START_MS)));
        let server = Server::new(core, clock, Mode::Foreign);
        let notebook = Arc::new(Notebook::default());
        server.attach(notebook.clone());
        (server, notebook)
    };
    let session = Mode::foreign_session(1);
    let redelivered = Delivery {
        session,
        connection: session,
        dup: true,
        ..FIRST
    };
    let ask = |server: &Server, arguments: &[&[u8]], expires| {
        publish(server, START_MS, arguments, redelivered, expires);
    };
    let over = Instant::now().checked_sub(Duration::from_secs(1));
    let set: &[&[u8]] = &[b"SET", b"k", b"v"];
    let mut state = Box::<State>::default();
    state.watches.set_durable(true);
    let (first, _) = serve(state, Duplicates::new(retention));
    ask(&first, &[b"KEYNOTIFY", b"k"], None);
    ask(&first, set, None);
    // In the run that handled it, it was told of.
    ask(&first, set, over);
    assert_eq!(first.stats().refused, 1);

    let mut locked = first.lock();
    let store = locked.core.store_mut();
    let mut duplicates = Duplicates::new(retention);
    for remembered in store.duplicates().range(0) {
        duplicates.insert(&remembered);
    }
    let state = Box::new(std::mem::take(store.state_mut()));
    let (second, notebook) = serve(state, duplicates);
    ask(&second, set, over);
    let notes = notebook.0.lock().unwrap();
    let told = notes
        .iter()
        .filter(|note| note.starts_with(b"*4\r\n$6\r\nNOTIFY"));
    assert_eq!(told.count(), 1, "{notes:?}");
    assert_eq!(second.stats().told_again, 1);
}

/// A journal on a disk that is full.
struct Full;

impl Journal for Full {
    fn keeps(&self) -> bool {
        true
    }

    fn append(&self, _records: &[&[u8]], _urgent: bool) -> LogPosition {
        LogPosition(0)
    }

    fn released(&self) -> LogPosition {
        LogPosition(0)
    }

    fn persisted(&self, _urgent: bool) -> &'static str {
        "disk"
    }

    fn has_room(&self) -> bool {
        false
    }

    fn promise(&self) -> String {
        String::new()
    }
}

#[test]
fn a_store_says_what_keeps_it_from_answering() {
    let server = server_on(Arc::new(Memory));
    assert_eq!(server.impediment(), None);
    server.stop();
    assert!(server.impediment().unwrap().contains("stopping"));
}

#[test]
fn a_batch_that_takes_longer_than_it_may_is_left() {
    let server = server_on(Arc::new(Memory));
    let peer = |number| Peer {
        client: "client".into(),
        connection: number,
        session: number,
    };
    let peers: Vec<_> = (0..100).map(peer).collect();
    let mut batch = peers.iter().map(Inbound::Disconnected);
    server.take_within(Duration::ZERO, &mut batch);
    let left = batch.len();
    assert!((90..100).contains(&left), "{left}");
    server.take_within(Duration::ZERO, &mut batch);
    assert!(batch.len() < left);
    server.take_within(Duration::MAX, &mut batch);
    assert_eq!(batch.len(), 0);
}

/// Also if no request has arrived since the disk filled up, and while another thread has the
/// store's lock.
#[test]
fn readiness_asks_the_disk_and_takes_no_lock() {
    let server = server_on(Arc::new(Full));
    let _held = server.lock();
    assert!(server.impediment().unwrap().contains("disk is full"));
}
