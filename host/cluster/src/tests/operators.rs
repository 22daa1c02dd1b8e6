//! Tests of what operators and hosts do outside the log: creation, secret, modules, members and
//! checks.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use tokio::time::{sleep, timeout};

use super::cluster::{self, Host, access, clock, head};
use crate::access::{always, put};
use crate::keys::Keys;
use crate::simulated::{Faults, World};
use crate::{
    Access, ClusterError, FirstState, Head, Id, LogPosition, Modules, Role, Severity, check,
    create, create_from, identity, limits, members, overview, remove_member,
};

fn world() -> World {
    World::new(1, Faults::default())
}

/// A module whose pieces all differ.
pub(super) fn module(bytes: usize) -> Vec<u8> {
    (0..bytes).map(|it| (it / 1000) as u8).collect()
}

pub(super) fn modules(world: &World) -> Modules {
    Modules::new(access(world), 2 << 30)
}

#[tokio::test(start_paused = true)]
async fn module_is_stored_and_read_with_faults() {
    let faults = Faults {
        lost_request: 5,
        lost_answer: 5,
        duplicated: 3,
        late: Duration::from_millis(900),
        delayed: 4,
        ..Faults::default()
    };
    let modules = modules(&World::new(8, faults));
    let (large, small) = (module(20 << 20), module(1000));
    let digest = modules.put(&large).await.unwrap();
    assert_eq!(digest, *blake3::hash(&large).as_bytes());
    let other = modules.put(&small).await.unwrap();
    assert_eq!(modules.put(&small).await.unwrap(), other);
    assert_eq!(modules.get(&digest).await.unwrap(), Some(large));
    assert_eq!(modules.get(&other).await.unwrap(), Some(small));
    let mut sizes: Vec<_> = modules.list().await.unwrap();
    sizes.sort_by_key(|it| it.bytes);
    assert_eq!((sizes[0].bytes, sizes[1].bytes), (1000, 20 << 20));
    assert!(sizes.iter().all(|it| it.is_complete));
}

/// Removes a module as a leader does, but at any time.
pub(super) async fn remove(world: &World, digest: &[u8; 32]) {
    let keys = Keys::new("c");
    let parts = vec![keys.module_pieces(digest), keys.module_sizes(digest)];
    let removal = always(keys.module_begun(digest), Vec::new(), parts);
    world.engine(0).transact(&removal).await.unwrap();
}

/// The digests of all modules, sorted.
async fn digests(modules: &Modules) -> Vec<[u8; 32]> {
    let listed = modules.list().await.unwrap();
    let mut digests: Vec<_> = listed.iter().map(|it| it.digest).collect();
    digests.sort_unstable();
    digests
}

#[tokio::test(start_paused = true)]
async fn leader_removes_the_modules_that_no_policy_needs() {
    let world = cluster::world(1).await;
    let (_host, log) = Host::lead(&world, "a", |_| {}).await;
    let modules = modules(&world);
    let mut stored = Vec::new();
    let half = limits::MODULES_MAX / 2;
    for number in 0..half - 1 {
        stored.push(modules.put(&number.to_le_bytes()).await.unwrap());
    }
    // Up to half of the limits, modules remain for a replay of requests.
    assert!(
        modules
            .unneeded(b"next", Vec::new)
            .await
            .unwrap()
            .is_empty()
    );
    stored.push(modules.put(b"next").await.unwrap());
    // A module that is stored again remains too.
    let needed = || stored[..4].to_vec();
    let unneeded = modules.unneeded(b"next", needed).await.unwrap();
    assert_eq!(unneeded.len(), half - 5);
    log.remove_modules(&unneeded).await.unwrap();
    let mut expected = [&stored[..4], &stored[half - 1..]].concat();
    expected.sort_unstable();
    assert_eq!(digests(&modules).await, expected);
    assert_eq!(modules.get(&stored[5]).await.unwrap(), None);
    assert!(modules.get(&stored[0]).await.unwrap().is_some());
    // Large modules count by their bytes.
    let unneeded = modules.unneeded(&module(1 << 20), Vec::new).await.unwrap();
    assert!(unneeded.is_empty());
    let mut large = module(limits::MODULE_BYTES_MAX as usize);
    for number in 0..2 {
        large[0] = number;
        modules.put(&large).await.unwrap();
    }
    let unneeded = modules.unneeded(b"other", Vec::new).await.unwrap();
    assert_eq!(unneeded.len(), 7);
}

/// The next leader may need again what this one did not.
#[tokio::test(start_paused = true)]
async fn replaced_leader_removes_no_module() {
    let world = cluster::world(1).await;
    let (host, log) = Host::lead(&world, "a", |_| {}).await;
    let modules = modules(&world);
    let digest = modules.put(b"module").await.unwrap();
    // Another host has taken over, and this one does not know it yet.
    let mut head = head(&world).await;
    (head.epoch, head.leader) = (head.epoch + 1, "b".into());
    let replaced = put(Keys::new("c").head(), head.encode().into());
    world.engine(0).transact(&replaced).await.unwrap();
    log.remove_modules(&[digest]).await.unwrap_err();
    assert!(modules.get(&digest).await.unwrap().is_some());
    drop(host);
}

#[tokio::test(start_paused = true)]
async fn half_written_module_is_recognised_and_completed() {
    let world = world();
    let modules = modules(&world);
    let module = module(5 << 20);
    let digest = *blake3::hash(&module).as_bytes();
    let writing = timeout(Duration::from_millis(30), modules.put(&module));
    assert!(writing.await.is_err(), "it was complete too early");
    let listed = modules.list().await.unwrap();
    assert_eq!((listed.len(), listed[0].is_complete), (1, false));
    assert_eq!(modules.get(&digest).await.unwrap(), None);
    assert_eq!(modules.put(&module).await.unwrap(), digest);
    assert_eq!(modules.get(&digest).await.unwrap(), Some(module));
    // A second call writes nothing.
    let revision = world.engine(0).get(b"x").await.unwrap().revision;
    modules.put(&self::module(5 << 20)).await.unwrap();
    assert_eq!(world.engine(0).get(b"x").await.unwrap().revision, revision);
}

#[tokio::test(start_paused = true)]
async fn module_removed_while_it_is_stored_is_completed() {
    let world = world();
    let stored = modules(&world);
    let module = module(10 << 20);
    let digest = *blake3::hash(&module).as_bytes();
    let copy = module.clone();
    let writing = tokio::spawn(async move { stored.put(&copy).await });
    let modules = modules(&world);
    sleep(Duration::from_millis(25)).await;
    let listed = modules.list().await.unwrap();
    assert!(!listed[0].is_complete, "it was complete too early");
    remove(&world, &digest).await;
    writing.await.unwrap().unwrap();
    assert_eq!(modules.get(&digest).await.unwrap(), Some(module));
}

#[tokio::test(start_paused = true)]
async fn modules_beyond_the_limits_are_refused() {
    let world = world();
    let modules = modules(&world);
    let too_large = module(limits::MODULE_BYTES_MAX as usize + 1);
    let refused = |error: ClusterError, word: &str| {
        assert!(matches!(error, ClusterError::Limit { .. }), "{error}");
        assert!(error.to_string().contains(word), "{error}");
    };
    refused(modules.put(&too_large).await.unwrap_err(), "the module");
    assert!(modules.put(&[]).await.is_err());
    for number in 0..limits::MODULES_MAX {
        modules.put(&number.to_le_bytes()).await.unwrap();
    }
    refused(modules.put(b"one more").await.unwrap_err(), "number");
    let cramped = Modules::new(access(&world), 1000);
    let first = *blake3::hash(&0_usize.to_le_bytes()).as_bytes();
    remove(&world, &first).await;
    refused(cramped.put(b"one more").await.unwrap_err(), "database");
}

#[tokio::test(start_paused = true)]
async fn cluster_has_a_secret_from_its_creation() {
    let world = world();
    let (engine, access) = (world.engine(0), access(&world));
    let error = identity(&access).await.unwrap_err();
    assert!(matches!(error, ClusterError::NotCreated(_)), "{error}");
    create(&*engine, "c", Id([1; 16]), 0).await.unwrap();
    let first = identity(&access).await.unwrap();
    create(&*engine, "c", Id([1; 16]), 0).await.unwrap();
    assert_eq!(identity(&access).await.unwrap(), first);
    create(&*engine, "d", Id([2; 16]), 0).await.unwrap();
    let other = identity(&Access::new(engine.clone(), clock(), "d"))
        .await
        .unwrap();
    assert_ne!(other.1, first.1);
    assert_eq!((first.0, other.0), (Id([1; 16]), Id([2; 16])));
    assert_eq!(format!("{:?}", first.1), "Secret(..)");
    // A cluster of an earlier version has only a head.
    let head = Head::first(Id([3; 16]), 0).encode();
    let old = put(Keys::new("old").head(), head.into());
    engine.transact(&old).await.unwrap();
    let error = identity(&Access::new(engine.clone(), clock(), "old"))
        .await
        .unwrap_err();
    assert!(matches!(error, ClusterError::NoSecret(_)), "{error}");
}

/// A state of some blocks, of which one is longer than a piece.
fn state(id: u8) -> FirstState<impl FnMut(&mut Vec<u8>) -> Result<bool, String>> {
    let mut blocks = blocks().into_iter();
    FirstState {
        id: Id([id; 16]),
        now_ms: 5_000,
        position: LogPosition(700),
        next_block: move |block: &mut Vec<u8>| {
            let next = blocks.next();
            block.extend(next.iter().flatten());
            Ok(next.is_some())
        },
    }
}

fn blocks() -> Vec<Vec<u8>> {
    [10, 500_000, 0, 200_000, 3].map(module).to_vec()
}

#[tokio::test(start_paused = true)]
async fn host_reads_the_state_from_which_its_cluster_began() {
    let world = world();
    let (engine, access) = (world.engine(0), access(&world));
    // Two creations that are given up, one of them by another operator.
    for id in [9, 1] {
        let creation = create_from(&access, state(id));
        let creation = timeout(Duration::from_millis(15), creation);
        assert!(creation.await.is_err(), "it was created too early");
    }
    assert!(create_from(&access, state(1)).await.unwrap());
    assert!(create_from(&access, state(1)).await.unwrap());
    let other = create_from(&access, state(9)).await.unwrap();
    assert!(!other, "another cluster exists");
    assert!(!create(&*engine, "c", Id([9; 16]), 0).await.unwrap());
    identity(&access).await.unwrap();
    // 710 033 bytes, and none of the other creation.
    let pieces = Keys::new("c").all_snapshots();
    let pieces = engine.range(&pieces, None, 16).await.unwrap().values;
    assert_eq!(pieces.len(), 6);

    let first = Host::start(&world, "a", |_| {});
    let log = first.leads().await;
    {
        let seen = first.seen.lock().unwrap();
        assert_eq!(seen.blocks, blocks());
        assert_eq!(seen.records, [(701, b"epoch 1".to_vec())]);
    }
    assert_eq!(Host::append(&log, b"x").await, LogPosition(702));
    let second = Host::start(&world, "b", |_| {});
    second.receives(LogPosition(702)).await;
    assert_eq!(second.seen.lock().unwrap().blocks, blocks());
}

#[tokio::test(start_paused = true)]
async fn snapshot_replaces_the_first_one() {
    let world = world();
    let access = access(&world);
    create_from(&access, state(1)).await.unwrap();
    let host = Host::start(&world, "a", |it| it.sizes.snapshot_after_bytes = 5_000);
    let log = host.leads().await;
    for _ in 0..3_000 {
        Host::append(&log, &[1; 1000]).await;
    }
    let newest = overview(&access, 2_000).await.unwrap();
    let snapshot = newest.head.snapshot.unwrap();
    assert_eq!(
        snapshot.bytes, 10_004,
        "the first snapshot was not replaced"
    );
    assert!(newest.log.frames < 3_000, "{:?}", newest.log);
    let newcomer = Host::start(&world, "b", |_| {});
    newcomer
        .wait(|it| (!it.records.is_empty()).then_some(()))
        .await;
    assert_eq!(newcomer.seen.lock().unwrap().blocks.len(), 1);
}

/// Counts the writes of records of members, and all others.
pub(super) fn count_writes(world: &World) -> Arc<[AtomicU64; 2]> {
    let counts = Arc::<[AtomicU64; 2]>::default();
    let seen = Arc::clone(&counts);
    world.observe(move |it| {
        let key = it.puts.first().map(|it| String::from_utf8_lossy(&it.0));
        let is_member = key.is_some_and(|it| it.contains("/member/"));
        seen[usize::from(!is_member)].fetch_add(1, Ordering::Relaxed);
    });
    counts
}

#[tokio::test(start_paused = true)]
async fn members_write_their_records_at_changes_only() {
    let world = cluster::world(1).await;
    let counts = count_writes(&world);
    let access = access(&world);
    let first = Host::start(&world, "a", |_| {});
    let log = first.leads().await;
    let second = Host::start(&world, "b", |_| {});
    second.follows("a").await;
    sleep(Duration::from_secs(1)).await;
    let roles = async || {
        let listed = members(&access).await.unwrap();
        let role = |it: crate::MemberEntry| {
            let info = it.info.unwrap();
            assert_eq!(info.description.version, "1.2.3");
            (it.host, info.role, info.epoch)
        };
        listed.into_iter().map(role).collect::<Vec<_>>()
    };
    let leading = ("a".to_owned(), Role::Leading, 1);
    let following = ("b".to_owned(), Role::Following, 1);
    assert_eq!(roles().await, [leading, following]);
    // An idle cluster writes no records; followers challenge the leader every 30 s.
    let before = counts.each_ref().map(|it| it.load(Ordering::Relaxed));
    sleep(Duration::from_secs(3600)).await;
    let after = counts.each_ref().map(|it| it.load(Ordering::Relaxed));
    assert_eq!(after[0], before[0], "an idle host wrote its record");
    assert!(
        after[1] - before[1] < 300,
        "an idle cluster wrote {after:?}"
    );

    first.seen.lock().unwrap().description.missing_modules = vec![[7; 32]];
    first.member.describe_again();
    sleep(Duration::from_secs(1)).await;
    assert_eq!(counts[0].load(Ordering::Relaxed), before[0] + 1);
    let listed = members(&access).await.unwrap();
    let info = listed[0].info.as_ref().unwrap();
    assert_eq!(info.description.missing_modules, [[7; 32]]);

    log.hand_over(None);
    second.leads().await;
    sleep(Duration::from_secs(5)).await;
    let following = ("a".to_owned(), Role::Following, 2);
    let leading = ("b".to_owned(), Role::Leading, 2);
    assert_eq!(roles().await, [following, leading]);
    drop(first);
    remove_member(&access, "a").await.unwrap();
    assert_eq!(roles().await.len(), 1);
}

#[tokio::test(start_paused = true)]
async fn unreadable_record_does_not_hide_the_other_members() {
    let world = cluster::world(1).await;
    let (engine, access) = (world.engine(0), access(&world));
    let later = put(Keys::new("c").member("later"), vec![9, 0, 1].into());
    engine.transact(&later).await.unwrap();
    let host = Host::start(&world, "a", |_| {});
    host.leads().await;
    sleep(Duration::from_secs(1)).await;
    let listed = members(&access).await.unwrap();
    assert_eq!((listed.len(), listed[1].host.as_str()), (2, "later"));
    assert!(listed[0].info.is_ok() && listed[1].info.is_err());
    let shown = overview(&access, 2_000).await.unwrap();
    let shown = shown.to_string();
    assert!(shown.contains("leader    a at h:1, epoch 1"), "{shown}");
    assert!(
        shown.contains("a     leads  1      1.2.3    1 s ago  h:1      -"),
        "{shown}"
    );
    // The reason why a record cannot be read may be longer.
    let mut lines = shown.lines().filter(|it| !it.starts_with("host later: "));
    assert!(lines.all(|it| it.len() <= 80), "{shown}");
    assert!(shown.contains("update this host"), "{shown}");
}

#[tokio::test(start_paused = true)]
async fn check_reports_what_is_wrong() {
    let world = world();
    let (engine, access) = (world.engine(0), access(&world));
    let report = check(&access, 1_000, 1 << 30).await;
    assert_eq!(report.worst(), Severity::Failure, "{report}");
    assert!(report.to_string().contains("does not exist"), "{report}");
    create(&*engine, "c", Id([1; 16]), 0).await.unwrap();
    let report = check(&access, 1_000, 1 << 30).await;
    assert!(report.to_string().contains("no leader yet"), "{report}");
    let leader = Host::start(&world, "a", |_| {});
    leader.leads().await;
    let follower = Host::start(&world, "b", |_| {});
    sleep(Duration::from_secs(2)).await;
    let report = check(&access, 1_000, 1 << 30).await;
    assert_eq!(report.worst(), Severity::Good, "{report}");
    let key = Keys::new("c").check();
    assert_eq!(engine.get(&key).await.unwrap().value, None);

    // This host's clock is behind the leader's, and the hosts have different settings.
    follower.seen.lock().unwrap().description.settings = [1; 32];
    follower.member.describe_again();
    sleep(Duration::from_secs(1)).await;
    world.limit(100);
    let report = check(&access, 0, 1 << 30).await;
    let named = ["different settings", "--node, --dialect"];
    let found = report.to_string();
    assert!(named.iter().all(|it| found.contains(it)), "{report}");
    assert!(report.to_string().contains("FAILURE"), "{report}");
    world.cut(0, true, true);
    let report = check(&access, 0, 1 << 30).await;
    assert_eq!(report.worst(), Severity::Failure, "{report}");
}

#[tokio::test(start_paused = true)]
async fn clock_that_is_behind_or_ahead_is_reported() {
    let world = cluster::world(1).await;
    let (engine, access) = (world.engine(0), access(&world));
    let host = Host::start(&world, "a", |_| {});
    let log = host.leads().await;
    // The leader's clock shows 1000 ms.
    for (now_ms, word) in [(0, "agree"), (90_000, "ahead of")] {
        let appends = async {
            loop {
                Host::append(&log, b"x").await;
            }
        };
        let report = tokio::select! {
            () = appends => panic!("appends ended"),
            report = check(&access, now_ms + 990, 1 << 30) => report,
        };
        assert!(report.to_string().contains(word), "{report}");
    }
    let mut future = head(&world).await;
    drop(host);
    future.now_ms = 100_000;
    let future = put(Keys::new("c").head(), future.encode().into());
    engine.transact(&future).await.unwrap();
    let report = check(&access, 1_000, 1 << 30).await;
    assert!(
        report.to_string().contains("behind the leader's"),
        "{report}"
    );
}
