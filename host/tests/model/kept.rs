//! What a store behind a foreign broker keeps and the embedded one does not, case by case.

use std::sync::Arc;

use bytes::Bytes;
use statehouse::limits;
use statehouse_core::clock::Stamp;
use statehouse_core::log::{Image, Journal, LogPosition, Progress, Recorder, Records, record};
use statehouse_core::policy::Registry;
use statehouse_core::request::{Delivery, Dialect, Incoming, REQUEST_TOPIC};
use statehouse_core::store::{Effects, Key, Mode, Peer, Renotified};
use statehouse_core::{Core, Decision, Input, Settings};
use statehouse_mqtt::simulation::session_began;
use statehouse_mqtt::{Properties, PropertiesBuilder, QoS};

use crate::{START_MS, now, policies, promote, quiet, records, retention};

/// A store whose records are kept, and nothing between it and the test.
pub(crate) struct Kept {
    mode: Mode,
    run: u32,
    pub(crate) core: Core,
    records: Arc<Records>,
    /// What the start found to tell again.
    ends: Vec<(Key, Stamp)>,
    now_ms: u64,
    next_id: u64,
}

impl Kept {
    pub(crate) fn new(mode: Mode) -> Self {
        let records = Arc::new(Records::default());
        // So that no answer rests on nothing by chance.
        records.append(&[&[5, 0]], false);
        Self::begin(mode, 1, records, Image::new(retention(mode)))
    }

    fn begin(mode: Mode, run: u32, journal: Arc<Records>, mut image: Image) -> Self {
        image.begin(mode);
        let registry = Registry::new(policies()[0].clone(), None);
        let named = image.policies.clone();
        let recorder = Recorder::new(journal.clone(), named, image.active);
        let (ends, now_ms) = (image.ends(), image.now_ms.max(START_MS));
        let settings = Settings {
            dialect: Some(Dialect::Sdk),
            ..Settings::default()
        };
        let mut core = Core::new(quiet(registry, image), recorder, run, settings);
        core.begin(mode, records(), START_MS);
        Self {
            mode,
            run,
            ends,
            now_ms,
            core,
            records: journal,
            next_id: u64::from(run) << 32,
        }
    }

    /// Reads all records, or a snapshot, and goes on from there.
    fn restart(self, mode: Mode) -> Self {
        let mut image = Image::new(retention(mode));
        for record in self.records.all() {
            image.record(&record).expect("a record that was written");
        }
        image.finish();
        Self::begin(mode, self.run + 1, self.records, image)
    }

    fn peer(&self, client: u64) -> Peer {
        let number = match self.mode {
            Mode::Embedded => client,
            Mode::Foreign => Mode::foreign_session(client),
        };
        Peer {
            client: format!("client-{client}").into(),
            connection: number,
            session: number,
        }
    }

    /// A new request; what the store makes of it, and the record that its answer rests on.
    pub(crate) fn ask<A: AsRef<[u8]>>(
        &mut self,
        client: u64,
        words: &[A],
    ) -> (Effects, LogPosition) {
        self.next_id += 1;
        self.ask_as(client, self.next_id, words)
    }

    fn ask_as<A: AsRef<[u8]>>(
        &mut self,
        client: u64,
        id: u64,
        words: &[A],
    ) -> (Effects, LogPosition) {
        let peer = self.peer(client);
        let words: Vec<&[u8]> = words.iter().map(AsRef::as_ref).collect();
        let payload = Bytes::from(statehouse_policy::resp::request(&words));
        let timestamp = format!("{START_MS}:0:n");
        let properties = PropertiesBuilder::new()
            .response_topic("answers")
            .correlation_data(&id.to_be_bytes())
            .user("__ts", &timestamp)
            .finish()
            .expect("short properties");
        let properties = Properties::parse(properties).expect("just made");
        let incoming = Incoming {
            topic: REQUEST_TOPIC,
            payload: &payload,
            properties: &properties,
            qos: QoS::AtLeastOnce,
            delivery: Delivery {
                session: peer.session,
                connection: peer.connection,
                packet_id: 0,
                dup: true,
            },
            expires: None,
            peer: &peer,
            grants: None,
        };
        let Decision {
            position, effects, ..
        } = self
            .core
            .handle(Input::Publish(&incoming), now(self.now_ms));
        (effects, position)
    }

    fn step(&mut self, input: Input<'_>) -> Effects {
        self.core.handle(input, now(self.now_ms)).effects
    }

    /// How many records there are.
    fn last(&self) -> LogPosition {
        LogPosition(self.records.all().len() as u64)
    }

    fn watchers(&self, key: &str) -> usize {
        self.core.store().state().watches.of(key.as_bytes()).count()
    }
}

fn answer(effects: &Effects) -> String {
    let answer = effects.answer.as_ref().expect("every request has one");
    answer.payload.escape_ascii().to_string()
}

#[test]
fn the_answer_to_a_registration_leaves_with_its_record_and_a_second_one_writes_none() {
    let mut kept = Kept::new(Mode::Foreign);
    let before = kept.last();
    let (effects, position) = kept.ask(1, &["KEYNOTIFY", "k"]);
    assert_eq!(answer(&effects), "+OK\\r\\n");
    let registered = kept.last();
    assert_eq!((position, registered.0), (registered, before.0 + 1));
    // The first answer may not have left yet.
    let (_, position) = kept.ask(1, &["KEYNOTIFY", "k"]);
    assert_eq!((position, kept.last()), (registered, registered));
    // Who registers nothing waits for no registration.
    let (_, position) = kept.ask(1, &["GET", "k"]);
    assert_eq!(position, LogPosition(0));
}

#[test]
fn as_the_broker_a_registration_is_no_record() {
    let mut kept = Kept::new(Mode::Embedded);
    let before = kept.last();
    let (_, position) = kept.ask(1, &["KEYNOTIFY", "k"]);
    let gone = kept.peer(1);
    assert_eq!(kept.watchers("k"), 1);
    kept.step(Input::Disconnected(&gone));
    assert_eq!(kept.watchers("k"), 0);
    assert_eq!((position, kept.last()), (LogPosition(0), before));
}

#[test]
fn what_ends_a_watch_is_a_record_and_what_ends_none_is_not() {
    let mut kept = Kept::new(Mode::Foreign);
    for key in ["a", "b", "c", "d"] {
        kept.ask(1, &["KEYNOTIFY", key]);
        kept.ask(2, &["KEYNOTIFY", key]);
    }
    let (first, second, third) = (kept.peer(1), kept.peer(2), kept.peer(3));
    kept.ask(1, &["KEYNOTIFY", "a", "STOP"]);
    kept.step(Input::Undeliverable(&first, b"b"));
    kept.step(Input::Disconnected(&second));
    let before = kept.last();
    kept.step(Input::Undeliverable(&first, b"b"));
    kept.step(Input::Disconnected(&second));
    kept.step(Input::Disconnected(&third));
    assert_eq!(kept.last(), before);
    let kept = kept.restart(Mode::Foreign);
    let watched = ["a", "b", "c", "d"].map(|key| kept.watchers(key));
    assert_eq!(watched, [0, 0, 1, 1]);
    let watching: Vec<Peer> = kept.core.store().state().watches.peers().cloned().collect();
    assert_eq!(watching, [first]);
}

/// A registration would take the room that removals need.
#[test]
fn on_a_full_disk_only_who_watches_already_may_register() {
    let mut kept = Kept::new(Mode::Foreign);
    kept.ask(1, &["KEYNOTIFY", "k"]);
    kept.core.store_mut().quota().journal_full = true;
    let (effects, _) = kept.ask(1, &["KEYNOTIFY", "other"]);
    assert_eq!(answer(&effects), "-ERR the quota has been exceeded\\r\\n");
    let (effects, _) = kept.ask(1, &["KEYNOTIFY", "k"]);
    assert_eq!(answer(&effects), "+OK\\r\\n");
    kept.step(Input::Undeliverable(&kept.peer(1), b"k"));
    let mut kept = Kept::new(Mode::Embedded);
    kept.core.store_mut().quota().journal_full = true;
    let (effects, _) = kept.ask(1, &["KEYNOTIFY", "k"]);
    assert_eq!(answer(&effects), "+OK\\r\\n");
}

#[test]
fn starting_in_a_mode_forgets_what_only_the_other_can_use() {
    let mut kept = Kept::new(Mode::Embedded);
    let mut began = Vec::new();
    record::sessions(&mut began, &session_began(1, "client-1"));
    kept.records.append(&[&began], false);
    kept.ask(1, &["SET", "k", "1"]);
    kept.ask(1, &["KEYNOTIFY", "k"]);
    let kept = kept.restart(Mode::Embedded);
    assert_eq!(kept.core.store().duplicates().len(), 1);
    assert_eq!(kept.watchers("k"), 0);

    let mut kept = kept.restart(Mode::Foreign);
    assert_eq!(kept.core.store().duplicates().len(), 0);
    kept.ask(1, &["SET", "k", "2"]);
    kept.ask(1, &["KEYNOTIFY", "k"]);
    let kept = kept.restart(Mode::Foreign);
    assert_eq!(kept.core.store().duplicates().len(), 1);
    assert_eq!(kept.watchers("k"), 1);

    let kept = kept.restart(Mode::Embedded);
    assert_eq!(kept.core.store().duplicates().len(), 0);
    assert_eq!(kept.watchers("k"), 0);
    // Nothing comes back where nothing but records says so.
    let kept = kept.restart(Mode::Foreign);
    assert_eq!(kept.core.store().duplicates().len(), 0);
    assert_eq!(kept.watchers("k"), 0);
    assert_eq!(
        kept.core.store().state().table.keys(),
        1,
        "keys are of no mode"
    );
}

/// More watches than a piece holds, of clients with many and of many clients.
#[test]
fn a_snapshot_holds_all_watches_and_the_embedded_one_none() {
    let mut kept = Kept::new(Mode::Foreign);
    for key in 0..1_500 {
        kept.ask(1, &["KEYNOTIFY", &format!("key {key}")]);
    }
    for client in 2..700 {
        kept.ask(client, &["KEYNOTIFY", "k"]);
    }
    let blocks = |kept: &Kept| {
        let (mut progress, mut blocks) = (Progress::default(), Vec::new());
        let (state, duplicates) = (kept.core.store().state(), kept.core.store().duplicates());
        while let Some(block) = progress.next(state, duplicates, Default::default) {
            blocks.push(block);
        }
        blocks
    };
    let mut image = Image::new(retention(Mode::Foreign));
    for block in blocks(&kept) {
        image.block(&block).expect("a block that was written");
    }
    let (found, watches) = (&image.state.watches, &kept.core.store().state().watches);
    assert_eq!(found.len(), 1_500 + 698);
    assert!(found.peers().eq(watches.peers()));
    for peer in watches.peers() {
        assert!(found.by(peer).eq(watches.by(peer)));
    }

    let mut kept = Kept::new(Mode::Embedded);
    kept.ask(1, &["KEYNOTIFY", "k"]);
    let mut image = Image::new(retention(Mode::Embedded));
    for block in blocks(&kept) {
        image.block(&block).expect("a block that was written");
    }
    assert!(image.state.watches.is_empty());
}

/// The host ended, and nobody knows which of its notifications left.
#[test]
fn a_request_of_an_earlier_run_is_told_of_again_once() {
    let mut kept = Kept::new(Mode::Foreign);
    kept.ask(2, &["KEYNOTIFY", "k"]);
    kept.ask_as(1, 7, &["SET", "k", "new"]);
    let (effects, _) = kept.ask_as(1, 7, &["SET", "k", "new"]);
    assert_eq!((effects.renotified, effects.notifications.len()), (None, 0));
    let first = kept.last();

    let mut kept = kept.restart(Mode::Foreign);
    // Who registered meanwhile hears of it too.
    kept.ask(3, &["KEYNOTIFY", "k"]);
    let (effects, position) = kept.ask_as(1, 7, &["SET", "k", "new"]);
    assert_eq!(answer(&effects), "+OK\\r\\n");
    assert!(effects.handled.is_none() && position > first);
    assert_eq!(effects.renotified, Some(Renotified::Sent));
    let [notice] = &effects.notifications[..] else {
        panic!("one change, one dialect: {:?}", effects.notifications);
    };
    let to: Vec<&str> = notice.to.iter().map(|(peer, _)| &*peer.client).collect();
    assert_eq!(to, ["client-2", "client-3"]);
    let version = effects.answer.and_then(|answer| answer.version);
    assert_eq!(Some(notice.version), version);

    let (effects, _) = kept.ask_as(1, 7, &["SET", "k", "new"]);
    assert_eq!((effects.renotified, effects.notifications.len()), (None, 0));
    // And so for those of this run.
    kept.ask_as(1, 8, &["SET", "k", "newer"]);
    let (effects, _) = kept.ask_as(1, 8, &["SET", "k", "newer"]);
    assert_eq!((effects.renotified, effects.notifications.len()), (None, 0));
}

#[test]
fn what_nobody_can_say_again_is_counted_and_answered() {
    let mut kept = Kept::new(Mode::Foreign);
    kept.ask(2, &["KEYNOTIFY", "k"]);
    // Another policy answers, and is not there after the restart.
    let twin = policies()[1].clone();
    promote(&mut kept.core, twin.clone());
    kept.ask_as(1, 7, &["SET", "k", "new"]);
    let mut kept = kept.restart(Mode::Foreign);
    let (effects, _) = kept.ask_as(1, 7, &["SET", "k", "new"]);
    assert_eq!(answer(&effects), "+OK\\r\\n");
    assert_eq!(effects.renotified, Some(Renotified::Incomplete));
    assert!(effects.notifications.is_empty());
    let (effects, _) = kept.ask_as(1, 7, &["SET", "k", "new"]);
    assert_eq!(effects.renotified, None, "counted once");
}

/// Who waits for a lock hears of nothing but the end of its key.
#[test]
fn an_end_of_an_earlier_run_is_told_again_where_the_key_is_still_gone() {
    let mut kept = Kept::new(Mode::Foreign);
    for key in ["gone", "there again", "unwatched"] {
        kept.ask(1, &["SET", key, "v", "PX", "500"]);
    }
    for key in ["gone", "there again"] {
        kept.ask(2, &["KEYNOTIFY", key]);
    }
    kept.now_ms += 500;
    let effects = kept.step(Input::Sweep);
    assert_eq!(effects.expired.len(), 2);
    kept.ask(1, &["SET", "there again", "v"]);
    let told = |kept: &mut Kept| {
        let ends = kept.ends.clone();
        let effects = kept.step(Input::Expired(&ends));
        assert!(effects.swept.is_none() && effects.notifications.is_empty());
        effects.expired
    };
    let mut kept = kept.restart(Mode::Foreign);
    let first = told(&mut kept);
    let [notice] = &first[..] else {
        panic!("one key: {first:?}");
    };
    let [(peer, topic)] = &notice.to[..] else {
        panic!("one watcher: {notice:?}");
    };
    assert_eq!(&*peer.client, "client-2");
    assert!(topic.ends_with(b"/676F6E65"), "{topic:?}");
    assert!(effects.expired.contains(notice), "the very same");
    // Nobody knows whether that run told it, either; but some time later it is no news.
    let mut kept = kept.restart(Mode::Foreign);
    assert_eq!(told(&mut kept), first);
    kept.now_ms += limits::EXPIRIES_RENOTIFIED_MS_MAX + 1;
    kept.ask(1, &["SET", "other", "v"]);
    let kept = kept.restart(Mode::Foreign);
    assert!(kept.ends.is_empty());
}

#[test]
fn as_the_broker_nobody_is_told_again_of_an_end() {
    let mut kept = Kept::new(Mode::Embedded);
    kept.ask(1, &["SET", "k", "v", "PX", "500"]);
    kept.ask(2, &["KEYNOTIFY", "k"]);
    kept.now_ms += 500;
    assert_eq!(kept.step(Input::Sweep).expired.len(), 1);
    let kept = kept.restart(Mode::Embedded);
    assert!(kept.ends.is_empty());
    // And what they were is nothing to who comes later.
    assert!(kept.restart(Mode::Foreign).ends.is_empty());
}

#[test]
fn as_the_broker_nobody_is_told_again() {
    let mut kept = Kept::new(Mode::Embedded);
    let mut began = Vec::new();
    record::sessions(&mut began, &session_began(1, "client-1"));
    kept.records.append(&[&began], false);
    kept.ask_as(1, 7, &["SET", "k", "new"]);
    let mut kept = kept.restart(Mode::Embedded);
    kept.ask(2, &["KEYNOTIFY", "k"]);
    let (effects, _) = kept.ask_as(1, 7, &["SET", "k", "new"]);
    assert!(effects.repeated.is_some());
    assert_eq!((effects.renotified, effects.notifications.len()), (None, 0));
}
