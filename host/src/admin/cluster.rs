//! A host of a cluster, as the admin API sees it: its figures, and what operators ask of a leader.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use hyper::{StatusCode, Uri};
use serde_json::Value as Json;
use statehouse_protocol::Histogram;

use super::answer::{Answer, Refusal, json};
use super::query::text;

/// The answer of a host whose cluster has no leader.
pub(crate) const NO_LEADER: &str = "the cluster has no leader";

/// The figures of a host of a cluster.
pub struct ClusterFigures {
    /// The number of the leadership that it knows.
    pub epoch: u64,
    /// The last record that it applied, or that is durable while it leads.
    pub position: u64,
    /// The last record of its copy of the log, or 0 if it keeps none.
    pub history: u64,
    /// Records of the log that it knows of and has not applied.
    pub lag: u64,
    /// Whether the log answered its last call.
    pub reaches_log: bool,
    /// The leaderships that it took over since its start, by how the one before ended.
    pub takeovers: [(&'static str, u64); 3],
    /// The time from the append of records to their commit.
    pub appends: Histogram,
    /// Records since the newest snapshot.
    pub log_records: u64,
    /// Bytes of frames since the newest snapshot.
    pub log_bytes: u64,
    /// The age of the newest snapshot, if there is one.
    pub snapshot_age: Option<Duration>,
    /// The figures of its leadership, if it leads.
    pub leader: Option<LeaderFigures>,
}

/// The figures of a leadership.
pub struct LeaderFigures {
    /// Records that are not durable yet.
    pub unreleased: u64,
    /// How long the lease still lasts.
    pub lease: Duration,
}

/// The names around a host of a cluster.
#[derive(Clone, Debug, Default)]
pub struct ClusterPlace {
    /// The cluster.
    pub cluster: String,
    /// This host.
    pub host: String,
    /// The host that leads, if one does.
    pub leader: Option<String>,
    /// The hosts that have a link to this one, if it leads.
    pub followers: Vec<String>,
}

/// What the figures of a host are read with.
pub type ReadFigures = Arc<dyn Fn() -> ClusterFigures + Send + Sync>;

/// Why an operation was not done.
pub enum ClusterRefusal {
    /// The state of the cluster does not allow it. The text says what to do.
    Refused(String),
    /// The log could not be reached.
    Failed(String),
}

/// An operation under way. Yields the answer to the operator.
pub type Operation<'a> = Pin<Box<dyn Future<Output = Result<Json, ClusterRefusal>> + Send + 'a>>;

/// The leadership of this host.
pub trait Leadership: Send + Sync {
    /// The figures of this host.
    fn figures(&self) -> ClusterFigures;

    /// The names of the cluster, this host and its followers.
    fn place(&self) -> ClusterPlace;

    /// Begins to end the leadership. If a host is named and can lead, it is to lead next.
    fn hand_over(&self, to: Option<String>) -> Operation<'_>;

    /// Raises the format of the log to the newest that all hosts read.
    fn upgrade(&self) -> Operation<'_>;
}

/// Answers `/v1/cluster/upgrade` or `/v1/cluster/handover`.
pub(super) async fn answer(
    leadership: Option<&dyn Leadership>,
    what: &str,
    uri: &Uri,
) -> Result<Answer, Refusal> {
    let leadership = leadership.ok_or_else(|| {
        let error = "this store is not part of a cluster";
        Refusal::new(StatusCode::CONFLICT, error)
    })?;
    let operation = match what {
        "upgrade" => leadership.upgrade(),
        _ => leadership.hand_over(text(uri, "to")?),
    };
    let done = operation.await.map_err(|refusal| match refusal {
        ClusterRefusal::Refused(error) => Refusal::new(StatusCode::CONFLICT, error),
        ClusterRefusal::Failed(error) => Refusal::new(StatusCode::SERVICE_UNAVAILABLE, error),
    });
    done.map(|answer| json(StatusCode::OK, &answer))
}
