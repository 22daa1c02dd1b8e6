//! Tests of the copy of the log that a host keeps.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::Bytes;
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio::time::{sleep, timeout};

use super::cluster::{CLUSTER, Host, clock, head, simulate, world};
use crate::access::always;
use crate::feed::Feed;
use crate::keys::Keys;
use crate::simulated::{Faults, World};
use crate::{
    Chain, CopyError, CopyStore, Id, LeaderLog, LogCopy, LogPoint, LogPosition, Options, Resumed,
    SnapshotInfo, Stop, create, limits,
};

#[derive(Clone, Debug, Default)]
struct Copied {
    /// The positions after which copies began.
    begins: Vec<u64>,
    records: BTreeMap<u64, Vec<u8>>,
    /// The position and the end of each snapshot, and its blocks.
    snapshots: Vec<(u64, u64, usize)>,
    blocks: usize,
    begun_ms: Vec<u64>,
    running: Option<u64>,
    /// The last record at each call that says that all new records were passed.
    flushed: Vec<Option<u64>>,
    point: Option<LogPoint>,
    is_closed: bool,
    is_full: bool,
}

#[derive(Clone, Debug, Default)]
struct Store(Arc<Mutex<Copied>>);

impl CopyStore for Store {
    fn begin(&mut self, after: LogPosition) -> Result<(), CopyError> {
        let mut copied = self.0.lock().unwrap();
        copied.begins.push(after.0);
        copied.records.clear();
        copied.snapshots.clear();
        Ok(())
    }

    fn records(&mut self, first: LogPosition, records: &[&[u8]]) -> Result<(), CopyError> {
        let mut copied = self.0.lock().unwrap();
        if copied.is_full {
            return Err(CopyError::Store("it is full".into()));
        }
        for (record, position) in records.iter().zip(first.0..) {
            let last = copied.records.last_key_value().map(|it| *it.0);
            assert!(last.is_none_or(|it| it + 1 == position), "{last:?}");
            copied.records.insert(position, record.to_vec());
        }
        Ok(())
    }

    fn begin_snapshot(&mut self, snapshot: &SnapshotInfo, now_ms: u64) -> Result<(), CopyError> {
        let mut copied = self.0.lock().unwrap();
        copied.begun_ms.push(now_ms);
        (copied.running, copied.blocks) = (Some(snapshot.begins_after().0), 0);
        Ok(())
    }

    fn block(&mut self, _: &[u8]) -> Result<(), CopyError> {
        self.0.lock().unwrap().blocks += 1;
        Ok(())
    }

    fn end_snapshot(&mut self, complete: LogPosition, _: LogPoint) -> Result<(), CopyError> {
        let mut copied = self.0.lock().unwrap();
        let position = copied.running.take().unwrap();
        let has = |it: u64| copied.records.contains_key(&it);
        assert!((position + 1..=complete.0).all(has), "records are missing");
        let snapshot = (position, complete.0, copied.blocks);
        copied.snapshots.push(snapshot);
        Ok(())
    }

    fn cancel_snapshot(&mut self) {
        self.0.lock().unwrap().running = None;
    }

    fn flush(&mut self, point: Option<LogPoint>) -> Result<Duration, CopyError> {
        let mut copied = self.0.lock().unwrap();
        copied.point = point;
        let last = copied.records.last_key_value().map(|it| *it.0);
        copied.flushed.push(last);
        Ok(Duration::from_secs(60))
    }

    fn close(&mut self, point: Option<LogPoint>) -> Result<(), CopyError> {
        let mut copied = self.0.lock().unwrap();
        (copied.point, copied.is_closed) = (point, true);
        Ok(())
    }
}

/// A running copy of the log of a host.
struct Copying {
    store: Store,
    stops: watch::Sender<bool>,
    task: JoinHandle<Result<(), CopyError>>,
}

impl Copying {
    /// The copy reaches the engine as host 9.
    fn start(world: &World, host: &Host, earlier: Option<(Copied, Resumed)>) -> Self {
        let (copied, resumed) = earlier.unzip();
        let store = Store(Arc::new(Mutex::new(copied.unwrap_or_default())));
        let stops = watch::Sender::new(false);
        let mut stopped = stops.subscribe();
        let options = Options::new("c", "copy", "h:1", Id::random().unwrap());
        let of = (&*host.member, CLUSTER);
        let copy = LogCopy::new(
            world.engine(9),
            clock(),
            options,
            of,
            store.clone(),
            resumed,
        );
        let task = tokio::spawn(copy.run(async move {
            let _ = stopped.wait_for(|it| *it).await;
        }));
        Self { store, stops, task }
    }

    fn copied(&self) -> Copied {
        self.store.0.lock().unwrap().clone()
    }

    async fn wait(&self, what: &str, condition: impl Fn(&Copied) -> bool) {
        for _ in 0..10_000 {
            if condition(&self.copied()) {
                return;
            }
            assert!(!self.task.is_finished(), "the copy ended");
            sleep(Duration::from_millis(10)).await;
        }
        let copied = self.copied();
        panic!("{what}: {:?} {:?}", copied.begins, copied.snapshots);
    }

    /// Waits until the copy has this record.
    async fn reaches(&self, position: LogPosition) {
        let has = |it: &Copied| it.records.contains_key(&position.0);
        self.wait("the copy lacks a record", has).await;
    }

    /// Ends the copy, and returns it with the place to resume it.
    async fn stop(self) -> (Copied, Resumed) {
        self.stops.send_replace(true);
        self.task.await.unwrap().unwrap();
        let copied = self.store.0.lock().unwrap().clone();
        assert!(copied.is_closed);
        let resumed = Resumed {
            point: copied.point.unwrap(),
            end: LogPosition(copied.records.last_key_value().map_or(0, |it| *it.0)),
            snapshot: LogPosition(copied.snapshots.last().map_or(0, |it| it.0)),
        };
        (copied, resumed)
    }
}

/// Appends so many records of this size.
async fn write(log: &LeaderLog, records: usize, bytes: usize) -> LogPosition {
    let mut last = LogPosition::NONE;
    for number in 0..records {
        let mut record = vec![7; bytes];
        record[..8].copy_from_slice(&number.to_le_bytes());
        last = Host::append(log, &record).await;
    }
    last
}

/// A leader whose every record of 60 kB is followed by a snapshot.
async fn lead_with_snapshots(world: &World) -> (Host, Arc<LeaderLog>) {
    Host::lead(world, "a", |it| it.sizes.snapshot_after_bytes = 50_000).await
}

/// Waits until a new snapshot has replaced the last one, and the log before it is deleted.
async fn replace_snapshot(world: &World, log: &LeaderLog) {
    let before = head(world).await.snapshot.map(|it| it.id);
    write(log, 1, 60_000).await;
    for _ in 0..1_000 {
        let head = head(world).await;
        let snapshot = head.snapshot.filter(|it| Some(it.id) != before);
        if snapshot.is_some_and(|it| it.first_seq == head.oldest) {
            return;
        }
        sleep(Duration::from_millis(10)).await;
    }
    panic!("no new snapshot within 10 s");
}

#[tokio::test(start_paused = true)]
async fn copies_of_leader_and_follower_have_every_record() {
    let world = world(1).await;
    let (leader, log) = Host::lead(&world, "a", |_| {}).await;
    let follower = Host::start(&world, "b", |_| {});
    let copies = [&leader, &follower].map(|it| Copying::start(&world, it, None));
    let last = write(&log, 300, 100).await;
    for copy in &copies {
        copy.reaches(last).await;
        assert_eq!(copy.copied().begins, [0]);
    }
    follower.receives(last).await;
    let applied = follower.seen.lock().unwrap().records.clone();
    let applied: BTreeMap<_, _> = applied.into_iter().collect();
    for copy in copies {
        assert_eq!(copy.copied().records, applied);
    }
}

/// Large groups travel in parts, and a place within one is none to resume at.
#[tokio::test(start_paused = true)]
async fn copy_holds_whole_groups_only() {
    let world = world(1).await;
    let (host, log) = Host::lead(&world, "a", |it| it.sizes.part_bytes = 1_000).await;
    let copy = Copying::start(&world, &host, None);
    let last = write(&log, 20, 5_500).await;
    copy.reaches(last).await;
    let (copied, resumed) = copy.stop().await;
    assert_eq!(resumed.point.position, last);
    assert!(copied.records.values().skip(1).all(|it| it.len() == 5_500));
}

#[tokio::test(start_paused = true)]
async fn copy_that_keeps_up_reads_nothing_from_the_engine() {
    let world = world(1).await;
    let (leader, log) = Host::lead(&world, "a", |_| {}).await;
    let copy = Copying::start(&world, &leader, None);
    copy.reaches(write(&log, 1, 8).await).await;
    world.cut(9, true, true);
    copy.reaches(write(&log, 500, 100).await).await;
}

#[tokio::test(start_paused = true)]
async fn copy_that_is_stopped_has_what_was_released_before() {
    let world = world(1).await;
    let (leader, log) = Host::lead(&world, "a", |_| {}).await;
    let copy = Copying::start(&world, &leader, None);
    copy.reaches(write(&log, 1, 8).await).await;
    let last = write(&log, 20, 8).await;
    let (copied, resumed) = copy.stop().await;
    assert!(copied.records.contains_key(&last.0));
    assert_eq!(resumed.point.position, last);
}

#[tokio::test(start_paused = true)]
async fn copy_reads_what_it_missed() {
    let world = world(1).await;
    let (host, log) = Host::lead(&world, "a", |_| {}).await;
    let copy = Copying::start(&world, &host, None);
    copy.reaches(write(&log, 10, 100).await).await;
    let earlier = copy.stop().await;
    write(&log, 3_000, 8).await;
    let copy = Copying::start(&world, &host, Some(earlier));
    let last = write(&log, 1, 100).await;
    copy.reaches(last).await;
    let copied = copy.copied();
    assert_eq!(copied.begins, [0], "it started over");
    assert_eq!(copied.records.len() as u64, last.0);
}

#[tokio::test(start_paused = true)]
async fn copy_resumed_before_its_member_reads_what_it_missed() {
    let world = world(1).await;
    let (host, log) = Host::lead(&world, "a", |_| {}).await;
    let copy = Copying::start(&world, &host, None);
    copy.reaches(write(&log, 10, 100).await).await;
    let (mut copied, resumed) = copy.stop().await;
    copied.flushed.clear();
    let last = write(&log, 3_000, 8).await;
    world.cut(1, true, true);
    let without_head = Host::start_on(world.engine(1), "b", |_| {});
    let copy = Copying::start(&world, &without_head, Some((copied, resumed)));
    copy.wait("no flush", |it| !it.flushed.is_empty()).await;
    assert_eq!(copy.copied().flushed[0], Some(last.0));
}

#[tokio::test(start_paused = true)]
async fn copied_snapshot_has_the_time_at_which_it_began() {
    let world = world(1).await;
    let (host, log) = lead_with_snapshots(&world).await;
    let set_wall = |ms| host.seen.lock().unwrap().wall_ms = Some(ms);
    set_wall(5_000);
    replace_snapshot(&world, &log).await;
    write(&log, 1, 8).await;
    // A read without a lease changes the head.
    set_wall(900_000);
    sleep(Duration::from_secs(10)).await;
    log.may_decide().await.unwrap();
    assert_eq!(head(&world).await.now_ms, 900_000);
    let copy = Copying::start(&world, &host, None);
    copy.wait("no snapshot", |it| !it.snapshots.is_empty())
        .await;
    assert_eq!(copy.copied().begun_ms, [5_000]);
}

#[tokio::test(start_paused = true)]
async fn later_snapshot_has_the_time_at_which_it_began() {
    let world = world(1).await;
    let (host, log) = Host::lead(&world, "a", |it| {
        it.sizes.snapshot_after_bytes = 50_000;
        it.sizes.piece_bytes = 2_000;
        it.timing.piece = Duration::from_secs(2);
    })
    .await;
    let set_wall = |ms| host.seen.lock().unwrap().wall_ms = Some(ms);
    let copy = Copying::start(&world, &host, None);
    set_wall(5_000);
    // The snapshot begins after this record, and takes 10 s.
    write(&log, 1, 60_000).await;
    sleep(Duration::from_secs(1)).await;
    write(&log, 1, 8).await;
    set_wall(900_000);
    write(&log, 1, 8).await;
    copy.wait("no snapshot", |it| !it.snapshots.is_empty())
        .await;
    assert_eq!(copy.copied().begun_ms, [5_000]);
}

#[tokio::test(start_paused = true)]
async fn copy_takes_each_snapshot_of_the_cluster() {
    let world = world(1).await;
    let (host, log) = lead_with_snapshots(&world).await;
    let copy = Copying::start(&world, &host, None);
    for _ in 0..3 {
        let before = copy.copied().snapshots.len();
        let mut last = LogPosition::NONE;
        while copy.copied().snapshots.len() == before {
            last = write(&log, 50, 100).await;
            sleep(Duration::from_millis(500)).await;
            assert!(last.0 < 50_000, "no snapshot is copied");
        }
        copy.reaches(last).await;
    }
    let copied = copy.copied();
    assert_eq!(copied.begins, [0], "it started over");
    for (position, complete, blocks) in copied.snapshots {
        assert!(position > 0 && complete >= position);
        assert_eq!(blocks, 1);
    }
}

#[tokio::test(start_paused = true)]
async fn copy_starts_over_after_the_log_was_truncated() {
    let world = world(1).await;
    let (host, log) = Host::lead(&world, "a", |it| it.sizes.snapshot_after_bytes = 20_000).await;
    let copy = Copying::start(&world, &host, None);
    copy.reaches(write(&log, 10, 100).await).await;
    let earlier = copy.stop().await;
    for _ in 0..20 {
        write(&log, 100, 100).await;
        sleep(Duration::from_millis(200)).await;
    }
    let copy = Copying::start(&world, &host, Some(earlier));
    let last = write(&log, 1, 100).await;
    copy.wait("no snapshot", |it| !it.snapshots.is_empty())
        .await;
    copy.reaches(last).await;
    let copied = copy.copied();
    let [0, begin] = copied.begins[..] else {
        panic!("{:?}", copied.begins)
    };
    assert!(begin > 100, "{begin}");
    assert_eq!(copied.records.keys().next(), Some(&(begin + 1)));
    assert_eq!(copied.snapshots[0].0, begin);
}

/// An active cluster replaces each snapshot before a slow host has read it.
#[tokio::test(start_paused = true)]
async fn slow_copy_starts_over_as_often_as_necessary() {
    let world = world(1).await;
    let (host, log) = lead_with_snapshots(&world).await;
    replace_snapshot(&world, &log).await;
    let copy = Copying::start(&world, &host, None);
    let rounds = 3 * limits::MISMATCHES_MAX as usize;
    for round in 1..=rounds {
        let begins = |it: &Copied| it.begins.len() == round && it.running.is_some();
        copy.wait("it does not start over", begins).await;
        world.cut(9, true, true);
        replace_snapshot(&world, &log).await;
        // Every second copy must read this record from the engine, which removes it before. The
        // others lose their snapshot only.
        write(&log, 1, 8).await;
        sleep(Duration::from_secs(15)).await;
        world.cut(9, false, false);
    }
    copy.wait("no snapshot", |it| !it.snapshots.is_empty())
        .await;
    copy.reaches(write(&log, 1, 8).await).await;
    assert!(copy.copied().begins.len() > rounds);
}

#[tokio::test(start_paused = true)]
async fn copy_ends_if_the_snapshot_of_the_head_is_damaged() {
    let world = world(1).await;
    let (host, log) = lead_with_snapshots(&world).await;
    replace_snapshot(&world, &log).await;
    let keys = Keys::new("c");
    let deletion = always(keys.head(), Vec::new(), vec![keys.all_snapshots()]);
    world.engine(0).transact(&deletion).await.unwrap();
    let mut copy = Copying::start(&world, &host, None);
    let ended = timeout(Duration::from_secs(60), &mut copy.task).await;
    let ended = ended.expect("it goes on").unwrap().unwrap_err();
    let is_damaged = matches!(ended, CopyError::Log(Stop::Damaged(_)));
    assert!(is_damaged, "{ended}");
}

/// As after the engine was restored from a backup. Then only the copy has some acknowledged
/// records.
#[tokio::test(start_paused = true)]
async fn copy_of_another_history_stops_the_host() {
    for is_ahead in [false, true] {
        let world = world(1).await;
        let (host, log) = Host::lead(&world, "a", |_| {}).await;
        let copy = Copying::start(&world, &host, None);
        copy.reaches(write(&log, 10, 100).await).await;
        let (copied, mut resumed) = copy.stop().await;
        match is_ahead {
            true => resumed.point.seq += 100,
            false => resumed.point.chain = Chain([9; 32]),
        }
        let before = copied.records.len();
        let mut copy = Copying::start(&world, &host, Some((copied, resumed)));
        write(&log, 10, 100).await;
        let ended = (&mut copy.task).await.unwrap().unwrap_err();
        let is_ahead = matches!(ended, CopyError::Log(Stop::CopyIsAhead(_)));
        assert!(is_ahead, "{ended}");
        let after = copy.copied();
        assert_eq!((after.begins.len(), after.records.len()), (1, before));
    }
}

#[tokio::test(start_paused = true)]
async fn store_that_is_full_ends_the_copy_and_not_the_host() {
    let world = world(1).await;
    let (host, log) = Host::lead(&world, "a", |_| {}).await;
    let copy = Copying::start(&world, &host, None);
    copy.reaches(write(&log, 10, 100).await).await;
    copy.store.0.lock().unwrap().is_full = true;
    write(&log, 10, 100).await;
    let error = copy.task.await.unwrap().unwrap_err();
    assert_eq!(error.to_string(), "it is full");
    write(&log, 10, 100).await;
    let news = host.member.feed().take();
    assert!(news.frames.is_empty(), "frames are kept for no copy");
}

/// Reads are lost and stale, watches lose changes, and the log is truncated meanwhile.
#[test]
fn copies_over_an_engine_with_faults_are_parts_of_the_log() {
    for seed in 1..20 {
        simulate(async move {
            let faults = Faults {
                lost_request: 20,
                lost_answer: 20,
                stale_read: 3,
                lost_change: 10,
                repeated_change: 10,
                late: Duration::from_millis(500),
                ..Faults::default()
            };
            let world = World::new(seed, faults);
            while create(&*world.engine(0), "c", CLUSTER, 0).await.is_err() {}
            let truncates = seed % 2 == 0;
            let leader = Host::start(&world, "a", |it| {
                it.sizes.snapshot_after_bytes = if truncates { 50_000 } else { 1 << 30 };
            });
            let log = leader.leads().await;
            let follower = Host::start(&world, "b", |_| {});
            let copies = [&leader, &follower].map(|it| Copying::start(&world, it, None));
            let (mut last, mut written) = (LogPosition::NONE, BTreeMap::new());
            for number in 0..900_u64 {
                let record = [&number.to_le_bytes()[..], &[7; 100]].concat();
                last = Host::append(&log, &record).await;
                written.insert(last.0, record);
                sleep(Duration::from_millis(10)).await;
            }
            for copy in copies {
                copy.reaches(last).await;
                let (copied, _) = copy.stop().await;
                assert!(truncates || copied.begins == [0], "seed {seed}");
                for (position, record) in &copied.records {
                    let holds = written.get(position).is_none_or(|it| it == record);
                    assert!(holds, "seed {seed}: record {position} differs");
                }
            }
        });
    }
}

#[test]
fn feed_drops_frames_rather_than_to_grow() {
    let feed = Feed::default();
    let frame = Bytes::from(vec![0; 1 << 20]);
    feed.frame(&frame);
    assert!(feed.take().frames.is_empty(), "no copy wants frames");
    feed.set_wanted(true);
    let mut most = 0;
    for _ in 0..100 {
        feed.frame(&frame);
    }
    for frame in feed.take().frames {
        most += frame.len();
    }
    assert!(most > 0 && most <= limits::FEED_BYTES_MAX, "{most}");
}
