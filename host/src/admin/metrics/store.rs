//! Metrics of the store: requests, the table, limits, files that are reloaded.

use std::time::Duration;

use super::page::Page;
use statehouse_files::watch::Count;
use statehouse_server::{Stats, Times, traces::Counts};

pub(super) fn state(page: &mut Page, stats: &Stats) {
    let help = "Requests that a policy answered";
    page.count("requests", help, stats.requests);
    let help = "Clients disconnected for a forbidden response topic";
    page.count("kicked", help, stats.kicked);
    let help = "Notifications handed to watchers";
    page.count("notifications", help, stats.notifications);
    let help = "Policy calls that failed";
    page.count("policy_failures", help, stats.policy_failures);
    page.count("swaps", "Changes of the active policy", stats.swaps);
    let help = "Requests that took longer than slow_threshold";
    page.count("slow_requests", help, stats.slow);
    page.measure("keys", "Keys", stats.keys);
    let help = "Accounted size of the keys and values";
    page.measure("key_bytes", help, stats.bytes);
    page.measure("watches", "Watches", stats.watches);
    let help = "1 while writes are refused because the disk is full";
    page.measure("disk_full", help, stats.disk_full.into());
    let help = "Messages on a request topic that no policy handled, by cause";
    page.counter("refused", help)
        .each("cause", stats.refused.causes());
    let behind = Duration::from_millis(stats.clock_behind_ms);
    let help = "How far the system clock is behind the store's time";
    page.seconds("clock_behind_seconds", help, behind);
}

/// How long requests, policy calls and notifications took.
pub(super) fn times(page: &mut Page, times: Times) {
    let help = "Time from the turn of a client to its response, by command and outcome";
    let requests = page.histogram("request_seconds", help);
    for it in times.requests {
        let labels = [("command", it.command), ("outcome", it.outcome.to_owned())];
        requests.times(labels, it.times);
    }
    let help = "Time to decide a request: the policy, and the commit of its writes";
    let calls = page.histogram("policy_call_seconds", help);
    calls.times(Vec::new(), times.calls);
    let help = "Time from a change to the departure of its notifications, which wait for the log";
    let notifications = page.histogram("notification_delay_seconds", help);
    notifications.times(Vec::new(), times.notifications);
}

pub(super) fn traces(page: &mut Page, counts: Counts) {
    let help = "Spans of traced requests, by what became of them";
    let results = [
        ("sent", counts.sent),
        ("dropped", counts.dropped),
        ("refused", counts.refused),
    ];
    page.counter("trace_spans", help).each("result", results);
}

/// Memory by its owner, and the queues. Without an embedded broker the clients have none.
pub(super) fn memory(
    page: &mut Page,
    stats: &Stats,
    broker: Option<&statehouse_mqtt::Stats>,
    log: u64,
) {
    let help = "Memory by owner, as the limits account it";
    page.gauge("memory_bytes", help)
        .each("owner", owners(stats, broker));
    let help = "Size of what waits: for the log, for clients, for the disk, for re-execution";
    page.gauge("queue_bytes", help)
        .each("queue", queues(stats, broker, log));
}

/// Bytes of memory by owner.
pub(in crate::admin) fn owners(
    stats: &Stats,
    broker: Option<&statehouse_mqtt::Stats>,
) -> Vec<(&'static str, u64)> {
    let mut owners = vec![
        ("table", stats.bytes),
        ("watches", stats.watch_bytes),
        ("remembered", stats.remembered_bytes),
        ("policies", stats.policy_bytes),
    ];
    if let Some(broker) = broker {
        let sessions = broker.queued_bytes + broker.state_bytes;
        owners.push(("sessions", sessions as u64));
        owners.push(("retained", broker.retained_bytes as u64));
    }
    owners
}

/// Bytes that wait, by queue.
pub(in crate::admin) fn queues(
    stats: &Stats,
    broker: Option<&statehouse_mqtt::Stats>,
    log: u64,
) -> Vec<(&'static str, u64)> {
    let mut queues = vec![
        ("unreleased", stats.unreleased_bytes),
        ("unwritten", log),
        ("sampled", stats.sampled_bytes),
    ];
    queues.extend(broker.map(|it| ("sessions", it.queued_bytes as u64)));
    queues
}

pub(super) fn duplicates(page: &mut Page, stats: &Stats) {
    let help = "Duplicate requests that were answered as before";
    page.count("duplicates", help, stats.duplicates);
    let help = "Duplicate requests for which re-execution gave another answer";
    page.count("duplicates_different", help, stats.duplicates_different);
    let help = "Duplicate requests of an earlier run whose notifications were sent again";
    page.count("renotified", help, stats.renotified);
    let help = "Duplicate requests of an earlier run whose notifications could not be sent again";
    page.count("not_renotified", help, stats.not_renotified);
    let help = "Remembered requests removed although a redelivery was possible";
    page.count("forgotten", help, stats.forgotten);
    page.measure("remembered", "Remembered requests", stats.remembered);
}

pub(super) fn limits(page: &mut Page, limits: &[(&str, u64)]) {
    page.gauge("limit", "Limits in force, by their settings")
        .each("setting", limits.iter().copied());
}

/// Refusals of access and by limits.
pub(super) fn refusals(page: &mut Page, refused: &[(&str, u64)]) {
    let help = "Refusals, by the attempted action or the limit that was reached";
    page.counter("access_refused", help)
        .each("what", refused.iter().copied());
}

pub(super) fn reloads(page: &mut Page, reloads: impl Iterator<Item = Count>) {
    let family = page.counter("reloads", "Reloads of changed files, by result");
    for it in reloads {
        for (result, count) in [("taken", it.taken), ("refused", it.refused)] {
            let labels = [("what", it.what.to_owned()), ("result", result.to_owned())];
            family.sample(labels, count);
        }
    }
}
