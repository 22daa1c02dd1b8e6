//! Why a host stops taking part in a cluster.

use statehouse_protocol::LogPosition;

use crate::codec::Malformed;

/// Why [`crate::Member::run`] ended. A repetition without a change does not help.
#[derive(Debug, thiserror::Error)]
pub enum Stop {
    /// The head does not exist.
    #[error(
        "the cluster {0:?} does not exist in this etcd: create it with `statehouse cluster init`"
    )]
    NotCreated(String),
    /// The head cannot be read.
    #[error("the head of the log cannot be read: {0}")]
    Head(Malformed),
    /// The data in the engine contradicts itself.
    #[error("the log is damaged: {0}. Compare the members of etcd before any host restarts")]
    Damaged(String),
    /// The engine has an older head than it had before.
    #[error(
        "etcd lost committed data: its head has epoch and change {found:?}, but {known:?} was committed before"
    )]
    Lost {
        /// The epoch and change of the head.
        found: Option<(u64, u64)>,
        /// The epoch and change that this host knows to be committed.
        known: (u64, u64),
    },
    /// A newer head does not continue the log: another host leads from an older state.
    #[error(
        "etcd lost committed data: its log now ends with frame {found}, which does not continue frame {known} that was committed before, as after a restore of an older state. Compare the members of etcd before any host restarts"
    )]
    Branched {
        /// The last frame of the newer head.
        found: u64,
        /// The last frame that this host knows to be committed.
        known: u64,
    },
    /// The log does not continue what this host has copied of it.
    #[error(
        "etcd lost committed data: the log does not continue the copy that this host has of it, up to record {0}. The copy was not changed. Compare the members of etcd before any host restarts; `statehouse cluster init --from` makes a new cluster from the copy"
    )]
    CopyIsAhead(LogPosition),
    /// The member ran before.
    #[error("this member has run before: create another one with a new process id")]
    HasRun,
    /// The store could not apply a block or a record.
    #[error("the store cannot apply the log: {0}")]
    Embedder(String),
}
