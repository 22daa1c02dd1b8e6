//! Compares the metrics that the code knows with the documented ones.

use std::collections::BTreeSet;
use std::time::Duration;

use statehouse_protocol::Histogram;

use super::*;
use crate::admin::LeaderFigures;
use statehouse_core::policy::Digest;
use statehouse_server::{Stats, Times, shadow::PolicyName};

static BOUNDS: [Duration; 1] = [Duration::from_secs(1)];

fn histogram() -> Histogram {
    Histogram::new(&BOUNDS)
}

/// The figures of a host of a cluster.
pub(in crate::admin) fn figures(leader: Option<LeaderFigures>) -> ClusterFigures {
    ClusterFigures {
        epoch: 1,
        position: 2,
        history: 2,
        lag: 0,
        reaches_log: true,
        takeovers: [("handover", 0), ("restart", 0), ("silence", 0)],
        appends: histogram(),
        log_records: 1,
        log_bytes: 100,
        snapshot_age: Some(Duration::from_secs(1)),
        leader,
    }
}

fn log_figures() -> statehouse_wal::LogFigures {
    statehouse_wal::LogFigures {
        free: 1,
        no_free_inodes: false,
        log: 1,
        history: 1,
        snapshot: 1,
        spares: 1,
        temporary: 0,
        unwritten: 0,
        room: 1,
        times: statehouse_wal::LogTimes::default(),
    }
}

/// A page with every metric. No store has all of them: a host has either kind of broker.
fn whole() -> Page {
    let mut page = Page::default();
    let stats = Stats::default();
    store::state(&mut page, &stats);
    store::duplicates(&mut page, &stats);
    let times = Times {
        requests: Vec::new(),
        notifications: histogram(),
        calls: histogram(),
    };
    store::times(&mut page, times);
    store::traces(&mut page, Default::default());
    let of_broker = statehouse_mqtt::Stats::default();
    store::memory(&mut page, &stats, Some(&of_broker), 0);
    store::limits(&mut page, &[("max_keys", 1)]);
    store::refusals(&mut page, &[]);
    store::reloads(&mut page, std::iter::empty());
    disk::log(&mut page, log_figures());
    broker::embedded(&mut page, &of_broker);
    broker::refusals(&mut page, &[]);
    broker::foreign(&mut page, &Default::default());
    let leader = LeaderFigures {
        unreleased: 0,
        lease: Duration::ZERO,
    };
    cluster::figures(&mut page, &figures(Some(leader)));
    policies::policies(&mut page, &[]);
    let name = PolicyName {
        name: "policy".into(),
        version: "1".into(),
        digest: Digest::of(b""),
    };
    policies::shadow(&mut page, &ShadowReport::new(name.clone(), name));
    of_process(&mut page);
    page
}

#[test]
fn every_metric_is_documented_and_every_documented_one_exists() {
    let documented: BTreeSet<String> = include_str!("../../../docs/metrics.md")
        .lines()
        .filter_map(|line| line.strip_prefix("| `")?.split(['`', '{']).next())
        .filter(|name| name.starts_with("statehouse_") || name.starts_with("process_"))
        .map(str::to_owned)
        .collect();
    let known = whole().names();
    assert!(known.len() > 80, "{}", known.len());
    let undocumented: Vec<_> = known.difference(&documented).collect();
    let unknown: Vec<_> = documented.difference(&known).collect();
    assert!(undocumented.is_empty(), "undocumented: {undocumented:?}");
    assert!(unknown.is_empty(), "documented only: {unknown:?}");
}

#[test]
fn a_follower_has_no_metrics_of_a_leader() {
    let names = of_follower(&figures(None), &Audit::default(), None).names();
    for name in [
        "statehouse_cluster_epoch",
        "statehouse_access_refused_total",
        "statehouse_reloads_total",
        "process_cpu_seconds_total",
    ] {
        assert!(names.contains(name), "{name}");
    }
    assert!(!names.contains("statehouse_cluster_lease_seconds"));
    assert!(!names.contains("statehouse_keys"));
}
