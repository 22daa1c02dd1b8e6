//! Metrics of a host of a cluster.

use super::page::Page;
use crate::admin::cluster::ClusterFigures;

/// The figures of a host.
pub(super) fn figures(page: &mut Page, it: &ClusterFigures) {
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
            "Size of the log since the newest snapshot",
            it.log_bytes,
        ),
    ]);
    if let Some(age) = it.snapshot_age {
        let help = "The age of the newest snapshot in the log";
        page.seconds("cluster_snapshot_age_seconds", help, age);
    }
    if let Some(leader) = &it.leader {
        let help = "Records that are not yet in the log of the cluster";
        page.gauges(&[("cluster_unreleased", help, leader.unreleased)]);
        let help = "How long this leader may still answer reads without a write to the log";
        page.seconds("cluster_lease_seconds", help, leader.lease);
    }
    let help = "Leaderships that this process took over, by how the one before ended";
    page.counter("cluster_takeovers", help)
        .each("after", it.takeovers);
    let help = "Time from the append of records to their commit, while this process led";
    page.histogram("cluster_append_seconds", help)
        .times(Vec::new(), it.appends.clone());
}
