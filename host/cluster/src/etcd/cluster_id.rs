//! Which cluster of etcd this host uses.
//!
//! A server that returns with an empty directory can form an etcd cluster of its own at its old
//! address. It lacks the log, so no answer of it may count: a host that believed it would stop
//! because committed data seems to be lost.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use super::connection::Server;
use super::messages::ResponseHeader;
use crate::engine::EngineError;

/// The id of the etcd cluster, or 0 until a server has answered. Clones share it.
#[derive(Clone, Debug, Default)]
pub(super) struct ClusterId(Arc<AtomicU64>);

/// The id of the etcd cluster of the server that sent this header, or 0 if it names none.
pub(super) fn cluster_of(header: Option<&ResponseHeader>) -> u64 {
    header.map_or(0, |it| it.cluster_id)
}

impl ClusterId {
    /// The id that is known. If none is, that is `found` from now on.
    pub(super) fn known_or(&self, found: u64) -> u64 {
        match self.0.compare_exchange(0, found, Relaxed, Relaxed) {
            Ok(_) => found,
            Err(known) => known,
        }
    }

    /// Accepts an answer of a server of the same etcd cluster as that of the first answer. Fails
    /// for another one as if the server was not reached, because the request had no effect on the
    /// log. Warns once when a server belongs to another etcd cluster.
    pub(super) fn accept(&self, server: &Server, found: u64) -> Result<(), EngineError> {
        // Such an answer does not tell which etcd cluster sent it.
        if found == 0 {
            return Ok(());
        }
        let known = self.known_or(found);
        let is_foreign = found != known;
        let is_new = server.set_foreign(is_foreign);
        if !is_foreign {
            return Ok(());
        }
        let why = format!(
            "the server {} belongs to another etcd cluster ({found:x}) than this host uses ({known:x})",
            server.url()
        );
        if is_new {
            tracing::warn!(
                "{why}: its answers are ignored. Remove that server from etcd and add it again, with an empty directory and --initial-cluster-state existing. If all of etcd was replaced, restart this host"
            );
        }
        Err(EngineError::NotApplied(why))
    }
}
