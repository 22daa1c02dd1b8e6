//! An engine that is full: how a host notices it, and how it makes room.
//!
//! etcd compares the size of its database file with `--quota-backend-bytes`. When a write would
//! exceed the quota, etcd arms the alarm NOSPACE. From then on it refuses every transaction that
//! contains a put, and so every change of the head: no frame, no truncation and no campaign. It
//! still accepts deletions, compaction, defragmentation and the end of the alarm. Compaction frees
//! pages within the file, but only defragmentation makes the file smaller. While etcd writes
//! nothing it does not even count freed pages as free, so its size in use says nothing then.
//!
//! Two rules follow:
//!
//! * [`crate::LeaderLog::has_room`] is false before the next snapshot would not fit beside the last
//!   one, the log and a reserve of an eighth of the quota. A little earlier a snapshot is due, and
//!   the engine is compacted sooner. A snapshot that does not fit never begins. So hosts alone do
//!   not reach the alarm.
//! * If another client does, any host whose transaction is refused deletes what no reader needs,
//!   without a change of the head: frames before the newest named snapshot, and older snapshots.
//!   Then it compacts, defragments, and disarms the alarm. [`crate::Options::compacts`] permits
//!   all of this.
//!
//! These deletions compare the head but do not change it. They need no order among each other: the
//! snapshot that the head names replaces all frames and all snapshots before it.

use std::convert::Infallible;
use std::sync::atomic::{AtomicBool, Ordering};

use bytes::Bytes;
use tokio::sync::Notify;

use crate::engine::{Condition, EngineError, Revision, Status, Transaction, attempt};
use crate::host::Host;
use crate::limits;

/// The bytes that the engine has in use after it took so many further ones, with what it needs for
/// them besides.
pub(crate) fn filled(used_bytes: u64, further_bytes: u64) -> u64 {
    used_bytes
        .saturating_add(further_bytes)
        .saturating_add(further_bytes / limits::OVERHEAD_PART)
}

/// The bytes of a quota that growth must leave.
pub(crate) fn reserve(quota_bytes: u64) -> u64 {
    quota_bytes / limits::RESERVE_QUOTA_PART
}

/// Whether state may grow in an engine that must still take so many bytes, of the log and of the
/// next snapshot. A leader decides by this, and so must all that foresee its decision.
pub(crate) fn has_room(quota_bytes: u64, used_bytes: u64, further_bytes: u64) -> bool {
    filled(used_bytes, further_bytes).saturating_add(reserve(quota_bytes)) <= quota_bytes
}

#[derive(Debug, Default)]
pub(crate) struct Fullness {
    is_full: AtomicBool,
    found: Notify,
}

impl Fullness {
    pub(crate) fn is_full(&self) -> bool {
        self.is_full.load(Ordering::Acquire)
    }

    /// A transaction was refused.
    pub(crate) fn found(&self) {
        if !self.is_full.swap(true, Ordering::AcqRel) {
            tracing::error!(
                "etcd's quota is used up and it accepts no writes: deleting what is not needed"
            );
        }
        self.found.notify_one();
    }

    /// A transaction was accepted, or the alarm is over. If the engine is still full, the next
    /// transaction finds it again.
    pub(crate) fn clear(&self) {
        if self.is_full.swap(false, Ordering::AcqRel) {
            tracing::info!("etcd accepts writes again");
        }
    }

    /// The engine reports its state.
    pub(crate) fn observe(&self, status: &Status) {
        if status.is_full() {
            self.found();
        } else {
            self.clear();
        }
    }
}

pub(crate) async fn run(host: &Host) -> Infallible {
    loop {
        host.fullness.found.notified().await;
        let mut shrinking = Shrinking::default();
        while host.fullness.is_full() {
            match make_room(host, &mut shrinking).await {
                Ok(true) => host.fullness.clear(),
                Ok(false) if shrinking.rounds.is_power_of_two() => tracing::error!(
                    "etcd is full and a host cannot make room: delete other keys, or raise etcd's --quota-backend-bytes and run `etcdctl defrag` and `etcdctl alarm disarm`"
                ),
                Ok(false) => {}
                Err(error) => {
                    tracing::warn!("making room in etcd again: {error}");
                    // The attempt proved nothing, so the next one is due at once.
                    shrinking = Shrinking::default();
                }
            }
            host.clock.sleep(host.options.timing.status).await;
        }
    }
}

/// When the engine was shrunk, so that a fruitless attempt is not repeated too often.
#[derive(Debug, Default)]
struct Shrinking {
    /// The revision of the last attempt. While the engine is full, only deletions change it.
    at: Revision,
    rounds: u64,
}

impl Shrinking {
    /// Whether an attempt is due: after a deletion, and in the rounds 1, 2, 4, 8 and so on.
    fn is_due(&mut self, revision: Revision) -> bool {
        if revision > self.at {
            *self = Self {
                at: revision,
                rounds: 0,
            };
        }
        self.rounds += 1;
        self.rounds.is_power_of_two()
    }
}

/// Makes room once. Returns false if the engine is still full.
async fn make_room(host: &Host, shrinking: &mut Shrinking) -> Result<bool, EngineError> {
    let engine = &*host.engine;
    if !host.ask_server(engine.status()).await?.is_full() {
        return Ok(true);
    }
    let value = host.get_head().await?;
    if let Some(bytes) = value.value
        && host.options.compacts
    {
        delete_replaced(host, bytes).await?;
    }
    let newest = host.get_head().await?.revision;
    if !shrinking.is_due(newest) || !host.options.compacts {
        return Ok(false);
    }
    let limit = host.options.timing.shrink;
    attempt(engine, &*host.clock, limit, engine.shrink(newest)).await?;
    let status = host.ask_server(engine.status()).await?;
    let quota = status.quota_bytes.unwrap_or(host.options.sizes.quota_bytes);
    if status.file_bytes >= quota / 16 * limits::DISARMED_SIXTEENTHS_MAX {
        return Ok(false);
    }
    host.attempt(engine.disarm()).await?;
    Ok(true)
}

/// Deletes the frames and the snapshots that the snapshot of a head replaced, if the head still has
/// this value.
async fn delete_replaced(host: &Host, bytes: Bytes) -> Result<(), EngineError> {
    // The roles report a head that cannot be read.
    let Ok(head) = host.head(&bytes) else {
        return Ok(());
    };
    let Some(snapshot) = head.snapshot else {
        return Ok(());
    };
    let mut from = head.oldest;
    loop {
        let to = snapshot.first_seq.min(from + limits::TRUNCATED_FRAMES_MAX);
        let deletes = vec![
            host.keys.frames(from.min(to), to),
            host.keys.snapshots(0, snapshot.id),
        ];
        let deletion = Transaction {
            key: host.keys.head(),
            condition: Condition::Value(bytes.clone()),
            puts: Vec::new(),
            deletes,
        };
        host.read(host.engine.transact(&deletion)).await?;
        if to == snapshot.first_seq {
            return Ok(());
        }
        from = to;
    }
}
