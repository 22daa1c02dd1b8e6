//! Steps of the system clock, as an operator or NTP makes them.

use super::*;
use crate::journal::record::PolicyRecord;
use crate::journal::{Image, Journal, Position};
use crate::policy::Assignment;

const START_MS: u64 = 1_700_000_000_000;

/// Keeps records in memory.
#[derive(Default)]
struct Records(Mutex<Vec<Vec<u8>>>);

impl Journal for Records {
    fn keeps(&self) -> bool {
        true
    }

    fn append(&self, records: &[&[u8]], _: bool) -> Position {
        let mut all = self.0.lock().unwrap();
        all.extend(records.iter().map(|record| record.to_vec()));
        Position(all.len() as u64)
    }

    fn released(&self) -> Position {
        Position(u64::MAX)
    }

    fn persisted(&self, _: bool) -> &'static str {
        "disk"
    }

    fn has_room(&self) -> bool {
        true
    }

    fn promise(&self) -> String {
        String::new()
    }
}

/// A store under a clock that a test sets.
struct Stepped {
    source: Arc<ManualSource>,
    journal: Arc<Records>,
    server: Arc<Server>,
    notebook: Arc<Notebook>,
}

impl Stepped {
    fn new() -> Self {
        let policy = Arc::new(Engine::new().unwrap().load(STANDARD_POLICY).unwrap());
        let source = Arc::new(ManualSource::at(START_MS));
        let journal = Arc::new(Records::default());
        let mut recorder = Recorder::new(journal.clone(), Vec::new(), None);
        recorder.started(1, START_MS, Mode::Embedded);
        let assignment = Assignment::of(policy.digest.into());
        recorder.assign(vec![PolicyRecord::of(&policy, true)], &assignment);
        let server = Server::new(
            Store::new(Registry::new(policy.clone(), None), Quota::default()),
            Clock::new(source.clone()),
            recorder,
            1,
            Settings {
                node: "StateStore".into(),
                ..Settings::default()
            },
        );
        let notebook = Arc::new(Notebook::default());
        server.attach(notebook.clone());
        Self {
            source,
            journal,
            server,
            notebook,
        }
    }

    fn ask(&self, client: &str, timestamp_ms: u64, arguments: &[&[u8]]) -> Bytes {
        let properties = PropertiesBuilder::new()
            .response_topic("answers")
            .correlation_data(b"1")
            .user("__ts", &format!("{timestamp_ms}:0:{client}"))
            .finish()
            .unwrap();
        let properties = Properties::parse(properties).unwrap();
        let peer = Peer {
            client: client.into(),
            connection: 1,
            session: 1,
        };
        let payload = Bytes::from(statehouse_policy::resp::request(arguments));
        let incoming = Incoming {
            topic: REQUEST_TOPIC,
            payload: &payload,
            properties: &properties,
            qos: QoS::AtLeastOnce,
            delivery: Delivery::default(),
            expires: None,
            peer: &peer,
            grants: None,
        };
        (self.server).take(&mut std::iter::once(Inbound::Publish(incoming, None)));
        self.notebook.0.lock().unwrap().pop().unwrap()
    }

    fn set(&self, key: &[u8], timestamp_ms: u64) -> Bytes {
        let set: &[&[u8]] = &[b"SET", key, b"holder", b"NX", b"PX", b"600000"];
        self.ask("holder", timestamp_ms, set)
    }
}

const STEP_MS: u64 = 2 * 3_600_000;
const OK: &[u8] = b"+OK\r\n";
const TAKEN: &[u8] = b"-1\r\n";

#[test]
fn a_clock_stepped_ahead_ends_no_lock_early() {
    let store = Stepped::new();
    assert_eq!(store.set(b"lock", START_MS), OK);
    store.source.advance(1_000);
    store.source.set_wall(START_MS + 1_000 + STEP_MS);
    // Clients whose clocks were stepped too are not refused.
    let now_ms = START_MS + STEP_MS + 1_000;
    assert_eq!(store.set(b"lock", now_ms), TAKEN);
    assert_eq!(store.set(b"other", now_ms), OK);
    store.source.advance(598_999);
    assert_eq!(store.set(b"lock", now_ms), TAKEN, "999 ms are left");
    store.source.advance(1);
    assert_eq!(store.set(b"lock", now_ms), OK, "ten minutes are over");
    assert_eq!(store.set(b"other", now_ms), TAKEN, "it came a second later");
}

#[test]
fn a_recovered_lock_keeps_the_time_it_had_after_a_step() {
    let store = Stepped::new();
    assert_eq!(store.set(b"lock", START_MS), OK);
    store.source.set_wall(START_MS + STEP_MS);
    // No request comes: only the sweeper looks at the clock.
    store.server.sweep_once();
    let mut image = Image::new(Retention::default());
    for record in store.journal.0.lock().unwrap().iter() {
        // A snapshot may have seen the records already, so applying one again changes nothing.
        image.record(record).unwrap();
        image.record(record).unwrap();
    }
    image.finish();
    let entry = image.state.table.get(b"lock").unwrap();
    let core = store.server.lock();
    assert_eq!(Some(entry), core.store.state().table.get(b"lock"));
    assert_eq!(entry.expires_ms(), Some(START_MS + STEP_MS + 600_000));
    assert_eq!(image.state.owner(b"lock", false), Some("holder"));
    assert_eq!(core.store.state().owner(b"lock", false), Some("holder"));
}

#[test]
fn a_clock_stepped_back_is_an_impediment_until_it_catches_up() {
    let store = Stepped::new();
    assert_eq!(store.server.impediment(), None);
    store.source.set_wall(START_MS - 10_000);
    let why = store.server.impediment().unwrap();
    assert!(why.contains("system clock"), "{why}");
    assert_eq!(store.server.stats().clock_behind_ms, 10_000);
    // The store's time goes on meanwhile, and keys expire as they should.
    assert_eq!(store.set(b"lock", START_MS), OK);
    store.source.advance(600_000);
    assert_eq!(store.set(b"lock", START_MS), OK);
    assert!(store.server.impediment().is_some());
    store.source.set_wall(START_MS + 600_000);
    assert_eq!(store.server.impediment(), None);
    assert_eq!(store.server.stats().clock_behind_ms, 0);
}
