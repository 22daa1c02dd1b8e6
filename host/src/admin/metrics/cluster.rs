//! Metrics of a host of a cluster.

use super::page::Page;
use crate::admin::cluster::ClusterFigures;

/// The figures of a host.
pub(super) fn figures(page: &mut Page, it: &ClusterFigures) {
    let help = "1 if this host leads its cluster, 0 if it follows";
    page.measure("cluster_leads", help, it.leader.is_some().into());
    let help = "The number of the leadership that this host knows";
    page.measure("cluster_epoch", help, it.epoch);
    let help = "The last record that is durable, at the leader, or that this follower applied";
    page.measure("cluster_position", help, it.position);
    let help = "The last record in the history of this host, or 0 if it keeps none";
    page.measure("cluster_history_position", help, it.history);
    let help = "Records of the log that this host knows of and has not applied";
    page.measure("cluster_lag_records", help, it.lag);
    let help = "1 if the log answered the last call of this host";
    page.measure("cluster_reaches_log", help, it.reaches_log.into());
    let help = "Records in the log since the newest snapshot";
    page.measure("cluster_log_records", help, it.log_records);
    let help = "Size of the log since the newest snapshot";
    page.measure("cluster_log_bytes", help, it.log_bytes);
    if let Some(age) = it.snapshot_age {
        let help = "The age of the newest snapshot in the log";
        page.seconds("cluster_snapshot_age_seconds", help, age);
    }
    if let Some(leader) = &it.leader {
        let help = "Records that are not yet in the log of the cluster";
        page.measure("cluster_unreleased", help, leader.unreleased);
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
