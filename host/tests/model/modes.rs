//! The differences between the two modes: behind a foreign broker, watches and dedup entries are
//! durable and notifications are repeated after a start. With the embedded broker they are not.

mod clock_steps;
mod lost_versions;

use std::sync::Arc;

use bytes::Bytes;
use statehouse_config::limits;
use statehouse_core::clock::Stamp;
use statehouse_core::log::{
    Image, Journal, JournalRoom, LogPosition, Progress, Recorder, Records, record,
};
use statehouse_core::policy::Registry;
use statehouse_core::request::{Delivery, Dialect, Incoming};
use statehouse_core::store::{Effects, Key, Mode, Peer, Renotified, Rerun};
use statehouse_core::{Core, Input, Settings};
use statehouse_mqtt::simulation::session_began;
use statehouse_mqtt::{Properties, PropertiesBuilder};
use statehouse_protocol::SessionId;

use crate::{START_MS, now, policies, promote, records, retention, store_from_image};

/// A store whose records a test can read and replay.
pub(crate) struct RecordedStore {
    mode: Mode,
    run: u32,
    pub(crate) core: Core,
    records: Arc<Records>,
    /// The expirations that the start must renotify.
    expirations: Vec<(Key, Stamp)>,
    now_ms: u64,
    /// The clock of the clients, which send it as `__ts`.
    client_ms: u64,
    next_id: u64,
}

impl RecordedStore {
    pub(crate) fn new(mode: Mode) -> Self {
        let records = Arc::new(Records::default());
        // With a first record, position 0 only means that an answer depends on no record.
        records.append(&[&[5, 0]], false);
        Self::begin(mode, 1, records, Image::new(retention(mode)))
    }

    fn begin(mode: Mode, run: u32, journal: Arc<Records>, mut image: Image) -> Self {
        image.begin(mode);
        let registry = Registry::new(policies()[0].clone(), None);
        let named = image.policies.clone();
        let recorder = Recorder::new(journal.clone(), named, image.active);
        let (expirations, now_ms) = (image.ends(), image.now_ms.max(START_MS));
        let settings = Settings {
            dialect: Some(Dialect::Sdk),
            ..Settings::default()
        };
        let mut core = Core::new(store_from_image(registry, image), recorder, run, settings);
        core.begin(mode, records(), START_MS);
        Self {
            mode,
            run,
            expirations,
            now_ms,
            core,
            records: journal,
            client_ms: START_MS,
            next_id: u64::from(run) << 32,
        }
    }

    /// Starts a new run that recovers all records.
    fn restart(self, mode: Mode) -> Self {
        let mut image = Image::new(retention(mode));
        for record in self.records.all() {
            image.record(&record).expect("the store wrote this record");
        }
        image.finish();
        Self::begin(mode, self.run + 1, self.records, image)
    }

    /// Records that the session of client 1 began.
    fn record_session(&self) {
        let mut began = Vec::new();
        record::sessions(&mut began, &session_began(SessionId(1), "client-1"));
        self.records.append(&[&began], false);
    }

    fn peer(&self, client: u64) -> Peer {
        let session = match self.mode {
            Mode::Embedded => SessionId(client),
            Mode::Foreign => Mode::foreign_session(client),
        };
        Peer {
            client: format!("client-{client}").into(),
            connection: session.only_connection(),
            session,
        }
    }

    /// Handles a new request. Returns its effects and the record that its answer depends on.
    pub(crate) fn request<A: AsRef<[u8]>>(
        &mut self,
        client: u64,
        words: &[A],
    ) -> (Effects, LogPosition) {
        self.next_id += 1;
        self.request_with_id(client, self.next_id, words)
    }

    fn request_with_id<A: AsRef<[u8]>>(
        &mut self,
        client: u64,
        id: u64,
        words: &[A],
    ) -> (Effects, LogPosition) {
        let peer = self.peer(client);
        let words: Vec<&[u8]> = words.iter().map(AsRef::as_ref).collect();
        let payload = Bytes::from(statehouse_policy::resp::request(&words));
        let timestamp = format!("{}:0:n", self.client_ms);
        let properties = PropertiesBuilder::new()
            .response_topic("answers")
            .correlation_data(&id.to_be_bytes())
            .user("__ts", &timestamp)
            .finish()
            .and_then(Properties::parse)
            .expect("short properties");
        let incoming = Incoming {
            delivery: Delivery::new(&peer, 0, true),
            ..Incoming::new(&peer, &payload, &properties)
        };
        let now = now(self.now_ms);
        let decision = self.core.handle(Input::Publish(&incoming), now);
        (decision.effects, decision.position)
    }

    /// Handles a new request. Returns its answer.
    fn ask(&mut self, client: u64, words: &[&str]) -> String {
        answer(&self.request(client, words).0)
    }

    /// Handles a request of client 1, possibly again.
    fn repeat(&mut self, id: u64, words: &[&str]) -> Effects {
        self.request_with_id(1, id, words).0
    }

    fn step(&mut self, input: Input<'_>) -> Effects {
        self.core.handle(input, now(self.now_ms)).effects
    }

    fn last_record(&self) -> LogPosition {
        LogPosition(self.records.all().len() as u64)
    }

    fn watchers(&self, key: &str) -> usize {
        self.core.store().state().watches.of(key.as_bytes()).len()
    }
}

fn answer(effects: &Effects) -> String {
    let answer = effects.answer.as_ref();
    let answer = answer.expect("every request has an answer");
    answer.payload.escape_ascii().to_string()
}

#[test]
fn repeated_watch_waits_for_the_record_of_the_first_one() {
    let mut store = RecordedStore::new(Mode::Foreign);
    let before = store.last_record();
    let (effects, position) = store.request(1, &["KEYNOTIFY", "k"]);
    assert_eq!(answer(&effects), "+OK\\r\\n");
    let registered = store.last_record();
    assert_eq!((position, registered.0), (registered, before.0 + 1));
    // The first answer may not have left yet, so the second one waits for the same record.
    let (_, position) = store.request(1, &["KEYNOTIFY", "k"]);
    assert_eq!((position, store.last_record()), (registered, registered));
    // A request without a watch does not wait for that record.
    let (_, position) = store.request(1, &["GET", "k"]);
    assert_eq!(position, LogPosition(0));
}

#[test]
fn embedded_watch_writes_no_record() {
    let mut store = RecordedStore::new(Mode::Embedded);
    let before = store.last_record();
    let (_, position) = store.request(1, &["KEYNOTIFY", "k"]);
    let peer = store.peer(1);
    assert_eq!(store.watchers("k"), 1);
    store.step(Input::Disconnected(&peer));
    assert_eq!(store.watchers("k"), 0);
    assert_eq!((position, store.last_record()), (LogPosition(0), before));
}

#[test]
fn only_events_that_end_a_watch_write_a_record() {
    let mut store = RecordedStore::new(Mode::Foreign);
    for key in ["a", "b", "c", "d"] {
        store.request(1, &["KEYNOTIFY", key]);
        store.request(2, &["KEYNOTIFY", key]);
    }
    let (first, second, third) = (store.peer(1), store.peer(2), store.peer(3));
    store.request(1, &["KEYNOTIFY", "a", "STOP"]);
    store.step(Input::Undeliverable(&first, b"b"));
    store.step(Input::Disconnected(&second));
    let before = store.last_record();
    store.step(Input::Undeliverable(&first, b"b"));
    store.step(Input::Disconnected(&second));
    store.step(Input::Disconnected(&third));
    assert_eq!(store.last_record(), before);
    let store = store.restart(Mode::Foreign);
    let watched = ["a", "b", "c", "d"].map(|key| store.watchers(key));
    assert_eq!(watched, [0, 0, 1, 1]);
    let watching: Vec<_> = store.core.store().state().watches.peers().collect();
    assert_eq!(watching, [&first]);
}

#[test]
fn redelivered_stop_ends_the_watch_that_a_redelivered_keynotify_began() {
    for mode in [Mode::Embedded, Mode::Foreign] {
        for scope in [&["k"] as &[_], &["k", "PREFIX"]] {
            let begin = [&["KEYNOTIFY"], scope].concat();
            let stop = [&begin[..], &["STOP"]].concat();
            let mut store = RecordedStore::new(mode);
            if mode == Mode::Embedded {
                store.record_session();
            }
            store.repeat(1, &begin);
            store.repeat(2, &stop);
            for _ in 0..2 {
                store.repeat(1, &begin);
                let effects = store.repeat(2, &stop);
                assert_eq!(effects.repeated, Some(Rerun::Same), "{mode:?}");
                assert_eq!(answer(&effects), "+OK\\r\\n");
                assert_eq!(store.watchers("k"), 0, "{mode:?} {scope:?}");
                store = store.restart(mode);
                assert_eq!(store.watchers("k"), 0, "{mode:?} {scope:?}");
            }
        }
    }
}

/// The record of a new watch would take the space that removals need.
#[test]
fn full_disk_allows_only_existing_durable_watches() {
    let mut store = RecordedStore::new(Mode::Foreign);
    store.request(1, &["KEYNOTIFY", "k"]);
    store.core.store_mut().quota().journal = JournalRoom::Removals;
    let refused = "-ERR the quota has been exceeded\\r\\n";
    assert_eq!(store.ask(1, &["KEYNOTIFY", "other"]), refused);
    assert_eq!(store.ask(1, &["KEYNOTIFY", "k"]), "+OK\\r\\n");
    store.step(Input::Undeliverable(&store.peer(1), b"k"));
    let mut store = RecordedStore::new(Mode::Embedded);
    store.core.store_mut().quota().journal = JournalRoom::Removals;
    assert_eq!(store.ask(1, &["KEYNOTIFY", "k"]), "+OK\\r\\n");
}

/// Protocol, section 9: a duplicate gets the first response, although the log has no room for it.
#[test]
fn refusal_on_a_full_disk_is_remembered_until_a_restart() {
    let refused = "-ERR the quota has been exceeded\\r\\n";
    let set = ["SET", "k", "1"];
    for mode in [Mode::Embedded, Mode::Foreign] {
        let mut store = RecordedStore::new(mode);
        store.record_session();
        store.request(1, &["SET", "other", "1"]);
        let recorded = store.records.all().len();
        store.core.store_mut().quota().journal = JournalRoom::Removals;
        let repeated = |store: &mut RecordedStore| {
            let effects = store.repeat(100, &set);
            (answer(&effects), effects.repeated)
        };
        assert_eq!(repeated(&mut store), (refused.to_owned(), None), "{mode:?}");
        assert_eq!(store.records.all().len(), recorded, "{mode:?}");
        store.core.store_mut().quota().journal = JournalRoom::Growth;
        let again = (refused.to_owned(), Some(Rerun::Same));
        assert_eq!(repeated(&mut store), again, "{mode:?}");
        assert_eq!(store.ask(1, &set), "+OK\\r\\n", "{mode:?}");
        let mut store = store.restart(mode);
        let executed = ("+OK\\r\\n".to_owned(), None);
        assert_eq!(repeated(&mut store), executed, "{mode:?}");
    }
}

#[test]
fn start_in_another_mode_drops_dedup_entries_and_watches() {
    let mut store = RecordedStore::new(Mode::Embedded);
    store.record_session();
    store.request(1, &["SET", "k", "1"]);
    store.request(1, &["KEYNOTIFY", "k"]);
    // The remembered requests, and the watchers of the key.
    let known = |store: &RecordedStore| {
        let duplicates = store.core.store().duplicates().len();
        (duplicates, store.watchers("k"))
    };
    let store = store.restart(Mode::Embedded);
    assert_eq!(known(&store), (1, 0));

    let mut store = store.restart(Mode::Foreign);
    assert_eq!(known(&store), (0, 0));
    store.request(1, &["SET", "k", "2"]);
    store.request(1, &["KEYNOTIFY", "k"]);
    let store = store.restart(Mode::Foreign);
    assert_eq!(known(&store), (1, 1));

    let store = store.restart(Mode::Embedded);
    assert_eq!(known(&store), (0, 0));
    // The start in embedded mode wrote a record, so a later start does not bring them back.
    let store = store.restart(Mode::Foreign);
    assert_eq!(known(&store), (0, 0));
    let keys = store.core.store().state().table.keys();
    assert_eq!(keys, 1, "keys do not depend on the mode");
}

/// There are more watches than a block holds: many of one client, and one of each of many clients.
#[test]
fn snapshot_holds_watches_only_behind_a_foreign_broker() {
    let mut store = RecordedStore::new(Mode::Foreign);
    for key in 0..1_500 {
        store.request(1, &["KEYNOTIFY", &format!("key {key}")]);
    }
    for client in 2..700 {
        store.request(client, &["KEYNOTIFY", "k"]);
    }
    let image = |store: &RecordedStore| {
        let mut image = Image::new(retention(store.mode));
        let mut progress = Progress::default();
        let (state, duplicates) = (store.core.store().state(), store.core.store().duplicates());
        while let Some(block) = progress.next(state, duplicates, Default::default) {
            image.block(&block).expect("the store wrote this block");
        }
        image
    };
    let read = image(&store);
    let (found, watches) = (&read.state.watches, &store.core.store().state().watches);
    assert_eq!(found.len(), 1_500 + 698);
    assert!(found.peers().eq(watches.peers()));
    for peer in watches.peers() {
        assert!(found.by(peer).eq(watches.by(peer)));
    }

    let mut store = RecordedStore::new(Mode::Embedded);
    store.request(1, &["KEYNOTIFY", "k"]);
    assert!(image(&store).state.watches.is_empty());
}

/// A new run cannot know which notifications of an earlier run were sent.
#[test]
fn redelivery_in_a_later_run_renotifies_watchers_once() {
    let mut store = RecordedStore::new(Mode::Foreign);
    store.request(2, &["KEYNOTIFY", "k"]);
    let is_silent = |it: &Effects| it.renotified.is_none() && it.notifications.is_empty();
    let set = ["SET", "k", "new"];
    store.repeat(7, &set);
    assert!(is_silent(&store.repeat(7, &set)));
    let first = store.last_record();

    let mut store = store.restart(Mode::Foreign);
    // Clients that began to watch after the change are notified too.
    store.request(3, &["KEYNOTIFY", "k"]);
    let (effects, position) = store.request_with_id(1, 7, &set);
    assert_eq!(answer(&effects), "+OK\\r\\n");
    assert!(effects.handled.is_none() && position > first);
    assert_eq!(effects.renotified, Some(Renotified::Sent));
    let [notification] = &effects.notifications[..] else {
        panic!("one change, one dialect: {:?}", effects.notifications);
    };
    let to = notification.to.iter().map(|(peer, _)| &*peer.client);
    assert!(to.eq(["client-2", "client-3"]), "{notification:?}");
    let version = effects.answer.and_then(|answer| answer.version);
    assert_eq!(Some(notification.version), version);

    assert!(is_silent(&store.repeat(7, &set)));
    // A request of this run is not renotified.
    store.repeat(8, &["SET", "k", "newer"]);
    assert!(is_silent(&store.repeat(8, &["SET", "k", "newer"])));
}

#[test]
fn renotification_without_the_policy_is_incomplete() {
    let mut store = RecordedStore::new(Mode::Foreign);
    store.request(2, &["KEYNOTIFY", "k"]);
    // Another policy handles the request, and is missing after the restart.
    let twin = policies()[1].clone();
    promote(&mut store.core, twin.clone());
    store.repeat(7, &["SET", "k", "new"]);
    let mut store = store.restart(Mode::Foreign);
    let effects = store.repeat(7, &["SET", "k", "new"]);
    assert_eq!(answer(&effects), "+OK\\r\\n");
    assert_eq!(effects.renotified, Some(Renotified::Incomplete));
    assert!(effects.notifications.is_empty());
    let effects = store.repeat(7, &["SET", "k", "new"]);
    assert_eq!(effects.renotified, None, "counted once");
}

/// The expiration of a key may be the only notification that a client waiting for a lock gets.
#[test]
fn start_renotifies_recent_expirations_of_absent_keys() {
    let mut store = RecordedStore::new(Mode::Foreign);
    for key in ["gone", "set again", "unwatched"] {
        store.request(1, &["SET", key, "v", "PX", "500"]);
    }
    for key in ["gone", "set again"] {
        store.request(2, &["KEYNOTIFY", key]);
    }
    store.now_ms += 500;
    let effects = store.step(Input::Sweep);
    assert_eq!(effects.expired.len(), 2);
    store.request(1, &["SET", "set again", "v"]);
    let renotified = |store: &mut RecordedStore| {
        let expirations = store.expirations.clone();
        let effects = store.step(Input::Expired(&expirations));
        assert!(effects.swept.is_none() && effects.notifications.is_empty());
        effects.expired
    };
    let mut store = store.restart(Mode::Foreign);
    let first = renotified(&mut store);
    let [notification] = &first[..] else {
        panic!("one key: {first:?}");
    };
    let [(peer, topic)] = &notification.to[..] else {
        panic!("one watcher: {notification:?}");
    };
    assert_eq!(&*peer.client, "client-2");
    assert!(topic.ends_with(b"/676F6E65"), "{topic:?}");
    assert!(effects.expired.contains(notification), "{notification:?}");
    // That run may not have sent it either, so the next start repeats it, until the expiration is
    // too old.
    let mut store = store.restart(Mode::Foreign);
    assert_eq!(renotified(&mut store), first);
    store.now_ms += limits::EXPIRIES_RENOTIFIED_MS_MAX + 1;
    store.request(1, &["SET", "other", "v"]);
    let store = store.restart(Mode::Foreign);
    assert!(store.expirations.is_empty());
}

#[test]
fn embedded_start_renotifies_no_expirations() {
    let mut store = RecordedStore::new(Mode::Embedded);
    store.request(1, &["SET", "k", "v", "PX", "500"]);
    store.request(2, &["KEYNOTIFY", "k"]);
    store.now_ms += 500;
    assert_eq!(store.step(Input::Sweep).expired.len(), 1);
    let store = store.restart(Mode::Embedded);
    assert!(store.expirations.is_empty());
    // A later start in foreign mode does not renotify them either.
    assert!(store.restart(Mode::Foreign).expirations.is_empty());
}

#[test]
fn embedded_redelivery_renotifies_no_watchers() {
    let mut store = RecordedStore::new(Mode::Embedded);
    store.record_session();
    store.repeat(7, &["SET", "k", "new"]);
    let mut store = store.restart(Mode::Embedded);
    store.request(2, &["KEYNOTIFY", "k"]);
    let effects = store.repeat(7, &["SET", "k", "new"]);
    assert!(effects.repeated.is_some());
    assert_eq!((effects.renotified, effects.notifications.len()), (None, 0));
}
