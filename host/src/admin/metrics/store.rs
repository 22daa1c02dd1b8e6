//! Metrics of the store: requests, the table, limits, files that are reloaded.

use std::time::Duration;

use super::page::Page;
use crate::server::Stats;
use statehouse_files::watch::Count;

/// What the store did and holds.
pub(super) fn state(page: &mut Page, stats: &Stats) {
    page.counters(&[
        (
            "requests",
            "Requests that a policy answered",
            stats.requests,
        ),
        (
            "refused",
            "Messages on a request topic that were malformed or refused",
            stats.refused,
        ),
        (
            "kicked",
            "Clients disconnected for a forbidden response topic",
            stats.kicked,
        ),
        (
            "notifications",
            "Notifications handed to watchers",
            stats.notifications,
        ),
        (
            "policy_failures",
            "Policy calls that failed",
            stats.policy_failures,
        ),
        ("swaps", "Changes of the active policy", stats.swaps),
    ]);
    page.gauges(&[
        ("keys", "Keys", stats.keys),
        (
            "key_bytes",
            "Accounted size of the keys and values",
            stats.bytes,
        ),
        ("watches", "Watches", stats.watches),
        (
            "disk_full",
            "1 while writes are refused because the disk is full",
            stats.disk_full.into(),
        ),
    ]);
    let behind = Duration::from_millis(stats.clock_behind_ms);
    let help = "How far the system clock is behind the store's time";
    page.seconds("clock_behind_seconds", help, behind);
}

/// Redelivered requests.
pub(super) fn duplicates(page: &mut Page, stats: &Stats) {
    page.counters(&[
        (
            "duplicates",
            "Duplicate requests that were answered as before",
            stats.duplicates,
        ),
        (
            "duplicates_different",
            "Duplicate requests for which re-execution gave another answer",
            stats.duplicates_different,
        ),
        (
            "renotified",
            "Duplicate requests of an earlier run whose notifications were sent again",
            stats.renotified,
        ),
        (
            "not_renotified",
            "Duplicate requests of an earlier run whose notifications could not be sent again",
            stats.not_renotified,
        ),
        (
            "forgotten",
            "Remembered requests removed although a redelivery was possible",
            stats.forgotten,
        ),
    ]);
    page.gauges(&[("remembered", "Remembered requests", stats.remembered)]);
}

/// Limits in force.
pub(super) fn limits(page: &mut Page, limits: &[(&str, u64)]) {
    let family = page.gauge("limit", "Limits in force, by their settings");
    for (setting, value) in limits {
        family.sample([("setting", (*setting).to_owned())], *value);
    }
}

/// Refusals of access and by limits.
pub(super) fn refusals(page: &mut Page, refused: &[(&str, u64)]) {
    let help = "Refusals, by the attempted action or the limit that was reached";
    let family = page.counter("access_refused", help);
    for (what, count) in refused {
        family.sample([("what", (*what).to_owned())], *count);
    }
}

/// Reloaded files.
pub(super) fn reloads(page: &mut Page, reloads: impl Iterator<Item = Count>) {
    let family = page.counter("reloads", "Reloads of changed files, by result");
    for Count {
        what,
        taken,
        refused,
    } in reloads
    {
        for (result, count) in [("taken", taken), ("refused", refused)] {
            let labels = [("what", what.to_owned()), ("result", result.to_owned())];
            family.sample(labels, count);
        }
    }
}
