//! Targets for the data that recovery reads: log records, snapshot blocks, and files.

use std::sync::Arc;
use std::time::Instant;

use bytes::Bytes;
use statehouse_core::log::{Image, Progress, Recorder, Records, read_block, record};
use statehouse_core::policy::Registry;
use statehouse_core::request::{Delivery, Incoming};
use statehouse_core::store::{Mode, Peer, Quota, Retention, SessionId, Store};
use statehouse_core::{Core, Input, Now, Settings};
use statehouse_mqtt::{Properties, PropertiesBuilder};
use statehouse_wal::simulation::Simulation;
use statehouse_wal::{Discard, Disk, Log, Options, inspect};

/// Decodes a log record or a snapshot block; the first byte selects which. A decoded one must be
/// applied or refused without a panic.
pub(crate) fn records(data: &[u8]) {
    let Some((kind, data)) = data.split_first() else {
        return;
    };
    let mut image = Image::new(Retention::default());
    if kind % 2 == 0 {
        if record::read(data).is_ok() {
            _ = image.record(data);
        }
    } else if read_block(data).is_ok() {
        _ = image.block(data);
    }
    image.finish();
}

/// The log records of a short run, and a snapshot at its end.
fn recorded() -> [Vec<Vec<u8>>; 2] {
    let kept = Arc::new(Records::default());
    let policy = crate::store::policy();
    let store = Store::new(Registry::new(policy.clone(), None), Quota::default());
    let recorder = Recorder::new(kept.clone(), Vec::new(), None);
    let mut core = Core::new(store, recorder, 1, Settings::default());
    let start_ms = 1_700_000_000_000;
    let policies = vec![record::PolicyRecord::of(&policy, true)];
    core.begin(Mode::Embedded, policies, start_ms);
    let commands: [&[&[u8]]; 5] = [
        &[b"SET", b"kept", b"value"],
        &[b"SET", b"key", b"value"],
        &[b"SET", b"soon", b"gone", b"PX", b"1"],
        &[b"VDEL", b"key", b"other"],
        &[b"DEL", b"key"],
    ];
    let properties = PropertiesBuilder::new()
        .response_topic("clients/fuzz/answers")
        .correlation_data(b"1")
        .user("__ts", "001700000000000:00000:fuzz")
        .finish()
        .and_then(Properties::parse)
        .expect("short properties");
    let peer = Peer::numbered("fuzz", 1);
    for (at, command) in commands.iter().enumerate() {
        let payload = Bytes::from(statehouse_policy::resp::request(command));
        let incoming = Incoming {
            delivery: Delivery::new(&peer, at as u16 + 1, false),
            ..Incoming::new(&peer, &payload, &properties)
        };
        let now = Now {
            ms: start_ms + at as u64,
            instant: Instant::now(),
        };
        core.handle(Input::Publish(&incoming), now);
    }
    core.stop(start_ms + 9);
    let mut progress = Progress::default();
    let blocks = std::iter::from_fn(|| core.snapshot(&mut progress, start_ms + 9)).collect();
    [kept.all(), blocks]
}

pub(crate) fn record_seeds() -> Vec<Vec<u8>> {
    let [records, snapshot] = recorded();
    let sessions = statehouse_mqtt::simulation::session_began(SessionId(7), "client");
    let mut record = Vec::new();
    record::sessions(&mut record, &sessions);
    let blocks = [
        statehouse_core::log::sessions_block(&sessions),
        statehouse_core::log::module_block(&blake3::hash(b"module"), b"module"),
    ];
    let tagged = |kind: u8, bytes: &[u8]| [&[kind], bytes].concat();
    let records = records.iter().chain([&record]).map(|it| tagged(0, it));
    records
        .chain(blocks.iter().chain(&snapshot).map(|it| tagged(1, it)))
        .collect()
}

fn options() -> Options {
    Options {
        segment_bytes: 4 << 10,
        ..Options::default()
    }
}

/// A directory with a short log, and the name of its first segment.
fn directory() -> (Simulation, String) {
    let disk = Simulation::new(1);
    let opened = Log::open(Arc::new(disk.clone()), options(), 1, &mut Discard);
    let (log, _) = opened.expect("a log can be created in an empty directory");
    for group in [&[&b"first"[..], b"second"][..], &[&[7; 300][..]]] {
        log.append(group).expect("there is room");
        log.commit().expect("the disk is well");
    }
    drop(log);
    let mut names = disk.list().expect("the disk is well");
    names.sort();
    let is_log = |name: &String| disk.content(name).is_some_and(|it| it.len() >= 4 << 10);
    let name = names.into_iter().find(is_log).expect("a log has a segment");
    (disk, name)
}

/// Inspects and opens the bytes of a segment. An opened log must accept appends.
pub(crate) fn journal(data: &[u8]) {
    thread_local! {
        static CREATED: (Simulation, String) = directory();
    }
    let disk = CREATED.with(|(disk, name)| {
        let disk = disk.fork();
        disk.put(name, data);
        disk
    });
    _ = inspect(&disk);
    if let Ok((log, _)) = Log::open(Arc::new(disk), options(), 2, &mut Discard) {
        log.append(&[b"next"])
            .expect("an opened log accepts a record");
        log.commit().expect("the disk is well");
    }
}

pub(crate) fn journal_seeds() -> Vec<Vec<u8>> {
    let (disk, name) = directory();
    let whole = disk.content(&name).unwrap_or_default();
    let last = whole.iter().rposition(|byte| *byte != 0);
    let used = last.map_or(0, |at| at + 1);
    vec![whole[..used].to_vec(), whole]
}
