//! The log of a leadership, as the store ([`Journal`]) and the broker ([`Persistence`], [`Lease`])
//! use it.
//!
//! After the end of the leadership nothing is released any more, so no response leaves.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;

use statehouse_cluster::LeaderLog;
use statehouse_mqtt::{Lease, Persistence};
use statehouse_protocol::LogPosition;

use crate::data_directory::appended;
use statehouse_core::log::{Journal, JournalRoom, record};
use statehouse_server::{EXIT_STATE_LOST, logging};

/// The format of a log that no host of version 0.1.0 reads. It may hold what that version does not
/// know: records of pending retained messages, and of new deadlines of keys.
const FORMAT_2: u16 = 2;

/// Writes the records of the store and of the broker to the log of a cluster.
#[derive(Clone)]
pub struct ClusterLog(Arc<LeaderLog>);

impl ClusterLog {
    /// Uses the log of a leadership.
    pub fn new(log: Arc<LeaderLog>) -> Self {
        Self(log)
    }

    /// The last record that is durable.
    pub fn position(&self) -> u64 {
        self.0.released().0
    }

    /// The number of records that are not durable yet.
    pub fn unreleased(&self) -> u64 {
        let appended = self.0.appended().0;
        appended.saturating_sub(self.0.released().0)
    }

    /// The log itself.
    pub fn leader(&self) -> &LeaderLog {
        &self.0
    }
}

impl Journal for ClusterLog {
    fn keeps(&self) -> bool {
        true
    }

    fn append(&self, records: &[&[u8]], _urgent: bool) -> LogPosition {
        appended::add(records);
        self.0.append(records).unwrap_or_else(|error| {
            // The limit of a record is far below that of the log, so this is a bug. The state is
            // ahead of the log now.
            tracing::error!(%error, "a record cannot be appended to the log of the cluster; stopping");
            logging::exit(EXIT_STATE_LOST)
        })
    }

    fn released(&self) -> LogPosition {
        self.0.released()
    }

    fn persisted(&self, _urgent: bool) -> &'static str {
        "cluster"
    }

    fn room(&self) -> JournalRoom {
        match self.0.has_room() {
            true => JournalRoom::Growth,
            false => JournalRoom::Removals,
        }
    }

    fn fits(&self, bytes: u64) -> bool {
        self.0.fits(bytes)
    }

    fn knows_deadlines(&self) -> bool {
        self.0.log_format() >= FORMAT_2
    }

    fn shortage(&self) -> &'static str {
        "etcd's quota is used up: writes are refused, reads and removals are not. Remove keys, or raise etcd's --quota-backend-bytes and --cluster-quota of the hosts"
    }

    fn promise(&self) -> String {
        "the store is in the log of a cluster: a write is there before its answer".into()
    }
}

impl Persistence for ClusterLog {
    fn append(&self, changes: &[u8]) -> LogPosition {
        let mut record = Vec::with_capacity(changes.len() + 1);
        record::sessions(&mut record, changes);
        Journal::append(self, &[&record], false)
    }

    fn released(&self) -> LogPosition {
        self.0.released()
    }

    fn has_room(&self) -> bool {
        self.0.has_room()
    }

    fn knows_retained_pending(&self) -> bool {
        self.0.log_format() >= FORMAT_2
    }

    fn is_behind(&self) -> bool {
        self.0.is_behind()
    }

    fn appended_here(&self) -> u64 {
        appended::here()
    }
}

impl Lease for ClusterLog {
    fn is_valid(&self) -> bool {
        self.0.has_lease()
    }

    fn renewed(&self) -> Pin<Box<dyn Future<Output = bool> + Send + '_>> {
        Box::pin(async { self.0.may_decide().await.is_ok() })
    }
}
