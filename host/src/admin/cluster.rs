//! A host of a cluster, as the admin API sees it: its figures, and what operators ask of a leader.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use hyper::{Method, StatusCode, Uri};
use serde_json::Value as Json;

use super::answer::{Answer, Refusal, json};
use super::metrics::Page;
use crate::percent;

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

/// Times, counted in buckets.
pub struct Histogram {
    /// The largest time of each bucket but the last, which has no bound.
    pub bounds: &'static [Duration],
    /// How many times are in each bucket.
    pub buckets: Vec<u64>,
    /// The sum of all times.
    pub sum: Duration,
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

    /// Begins to end the leadership. If a host is named and can lead, it is to lead next.
    fn hand_over(&self, to: Option<String>) -> Operation<'_>;

    /// Raises the format of the log to the newest that all hosts read.
    fn upgrade(&self) -> Operation<'_>;
}

/// Answers a request to `/v1/cluster/..`. `None` if there is no such resource.
pub(super) async fn answer(
    leadership: Option<&dyn Leadership>,
    what: &str,
    method: &Method,
    uri: &Uri,
) -> Option<Result<Answer, Refusal>> {
    if method != Method::POST || !["handover", "upgrade"].contains(&what) {
        return None;
    }
    let Some(leadership) = leadership else {
        let error = "this store is not part of a cluster";
        return Some(Err(Refusal::new(StatusCode::CONFLICT, error)));
    };
    let operation = match what {
        "upgrade" => leadership.upgrade(),
        _ => match successor(uri) {
            Ok(to) => leadership.hand_over(to),
            Err(refusal) => return Some(Err(refusal)),
        },
    };
    let done = operation.await.map_err(|refusal| match refusal {
        ClusterRefusal::Refused(error) => Refusal::new(StatusCode::CONFLICT, error),
        ClusterRefusal::Failed(error) => Refusal::new(StatusCode::SERVICE_UNAVAILABLE, error),
    });
    Some(done.map(|answer| json(StatusCode::OK, &answer)))
}

/// The host that an operator names to lead next.
fn successor(uri: &Uri) -> Result<Option<String>, Refusal> {
    let to = percent::value(uri.query(), "to").map(String::from_utf8);
    to.transpose().map_err(|_| {
        let error = "the name of the host is not UTF-8";
        Refusal::new(StatusCode::BAD_REQUEST, error)
    })
}

/// Adds the figures to a page of metrics.
pub(super) fn metrics(page: &mut Page, it: &ClusterFigures) {
    page.gauges(&[
        (
            "cluster_leads",
            "1 if this host leads its cluster, 0 if it follows",
            it.leader.is_some().into(),
        ),
        (
            "cluster_epoch",
            "The number of the leadership that this host knows",
            it.epoch,
        ),
        (
            "cluster_position",
            "The last record that is durable, at the leader, or that this follower applied",
            it.position,
        ),
        (
            "cluster_history_position",
            "The last record in the history of this host, or 0 if it keeps none",
            it.history,
        ),
        (
            "cluster_lag_records",
            "Records of the log that this host knows of and has not applied",
            it.lag,
        ),
        (
            "cluster_reaches_log",
            "1 if the log answered the last call of this host",
            it.reaches_log.into(),
        ),
        (
            "cluster_log_records",
            "Records in the log since the newest snapshot",
            it.log_records,
        ),
        (
            "cluster_log_bytes",
            "Bytes in the log since the newest snapshot",
            it.log_bytes,
        ),
    ]);
    if let Some(age) = it.snapshot_age {
        let what = "The age of the newest snapshot in the log";
        page.seconds("cluster_snapshot_age_seconds", what, age);
    }
    if let Some(leader) = &it.leader {
        let what = "Records that are not yet in the log of the cluster";
        page.gauges(&[("cluster_unreleased", what, leader.unreleased)]);
        let what = "How long this leader may still answer reads without a write to the log";
        page.seconds("cluster_lease_seconds", what, leader.lease);
    }
    let what = "Leaderships that this process took over, by how the one before ended";
    page.family("cluster_takeovers", "counter", what);
    for (after, count) in it.takeovers {
        page.sample("cluster_takeovers_total", &[("after", after)], count);
    }
    let what = "Time from the append of records to their commit, while this process led";
    page.histogram("cluster_append_seconds", what, &it.appends);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_cumulative_and_in_seconds() {
        const BOUNDS: [Duration; 2] = [Duration::from_micros(500), Duration::from_secs(1)];
        let appends = Histogram {
            bounds: &BOUNDS,
            buckets: vec![3, 0, 2],
            sum: Duration::from_millis(3_250),
        };
        let mut page = Page::default();
        page.histogram("x_seconds", "Times", &appends);
        page.seconds("age_seconds", "Age", Duration::from_millis(1_500));
        assert_eq!(
            page.text(),
            "# TYPE statehouse_x_seconds histogram\n\
             # UNIT statehouse_x_seconds seconds\n\
             # HELP statehouse_x_seconds Times.\n\
             statehouse_x_seconds_bucket{le=\"0.0005\"} 3\n\
             statehouse_x_seconds_bucket{le=\"1.0\"} 3\n\
             statehouse_x_seconds_bucket{le=\"+Inf\"} 5\n\
             statehouse_x_seconds_count 5\n\
             statehouse_x_seconds_sum 3.25\n\
             # TYPE statehouse_age_seconds gauge\n\
             # UNIT statehouse_age_seconds seconds\n\
             # HELP statehouse_age_seconds Age.\n\
             statehouse_age_seconds 1.5\n"
        );
    }
}
