//! The lists in the lower part of the screen, as lines of text. The first line is the header.

use std::cmp::Reverse;
use std::time::Duration;

use super::figures::{age, rate, size, time};
use super::screen::{Screen, View};
use crate::admin::overview::document::{ClusterView, HotKeyRate, PolicyRate};
use crate::admin::{Client, Clients};
use crate::cli::data::count;
use crate::cli::output::printable;
use crate::cli::slow::key_cell;
use crate::cli::table::{self, cell, cell_or_dash, shortened};
use crate::past::bytes_of;
use crate::time::utc;
use statehouse_server::{SlowRequest, SlowRequests};

/// The lines of the present list.
pub(super) fn lines(screen: &Screen) -> Vec<String> {
    let order = screen.order;
    let overview = &screen.overview;
    let text = match screen.view {
        View::Keys => keys(&overview.hot_keys, order),
        View::Policies => policies(&overview.policies, order),
        View::Clients => match &screen.clients {
            Some(it) => clients(it, order, overview.time_ms),
            None if overview.foreign_broker.is_some() => {
                "the clients are connected to a foreign broker: ask that one".to_owned()
            }
            None => "no clients are known yet".to_owned(),
        },
        View::Slow => match &screen.slow {
            Some(it) => slow(it, order),
            None => "no slow requests are known yet".to_owned(),
        },
        View::Cluster => match &overview.cluster {
            Some(it) => cluster(it),
            None => "this store is not part of a cluster".to_owned(),
        },
    };
    text.lines().map(str::to_owned).collect()
}

fn keys(keys: &[HotKeyRate], order: usize) -> String {
    if keys.is_empty() {
        return "no key has one percent of the requests or more".to_owned();
    }
    let mut rows: Vec<[String; 3]> = keys.iter().map(key).collect();
    if order == 1 {
        rows.sort_by(|a, b| a[2].cmp(&b[2]));
    }
    rows.insert(0, ["requests/s", "share", "key"].map(str::to_owned));
    aligned(&rows)
}

fn key(it: &HotKeyRate) -> [String; 3] {
    let mut key = printable(&bytes_of(&it.key).unwrap_or_default());
    if it.is_cut {
        key.push('…');
    }
    let share = format!("{:.1} %", it.share * 100.0);
    [rate(it.requests_per_s), share, key]
}

/// A table whose last column is text and may be long.
fn aligned(rows: &[[String; 3]]) -> String {
    let width = |column: usize| rows.iter().map(|row| row[column].chars().count()).max();
    let (first, second) = (width(0).unwrap_or(0), width(1).unwrap_or(0));
    let rows = rows
        .iter()
        .map(|[a, b, c]| format!("{a:>first$}  {b:>second$}  {c}\n"));
    rows.collect()
}

fn policies(policies: &[PolicyRate], order: usize) -> String {
    let mut policies: Vec<&PolicyRate> = policies.iter().collect();
    match order {
        1 => policies.sort_by(|a, b| a.name.cmp(&b.name)),
        2 => policies.sort_by_key(|it| Reverse(it.failures)),
        _ => policies.sort_by(|a, b| b.calls_per_s.total_cmp(&a.calls_per_s)),
    }
    let header = ["policy", "digest", "roles", "calls/s", "failures", "fuel"];
    let rows = policies.iter().map(|it| {
        [
            cell(&format!("{}@{}", it.name, it.version)),
            cell(it.digest.get(..8).unwrap_or(&it.digest)),
            cell(&it.roles.join(" ")),
            rate(it.calls_per_s),
            it.failures.to_string(),
            it.fuel_mean.to_string(),
        ]
    });
    table::of(header, rows, 3)
}

fn clients(clients: &Clients, order: usize, now_ms: u64) -> String {
    let mut known: Vec<&Client> = clients.clients.iter().collect();
    match order {
        1 => known.sort_by_key(|it| Reverse(it.watches)),
        2 => known.sort_by(|a, b| a.client.cmp(&b.client)),
        _ => known.sort_by_key(|it| Reverse(it.queued_bytes)),
    }
    let header = [
        "client",
        "user",
        "connected",
        "subs",
        "watches",
        "queued",
        "in flight",
    ];
    let rows = known.iter().map(|it| {
        let since = it.since_ms.map(|ms| now_ms.saturating_sub(ms));
        [
            short(&it.client),
            it.user.as_deref().map_or("-".to_owned(), short),
            since.map_or("no".to_owned(), |ms| age(Duration::from_millis(ms))),
            it.subscriptions.to_string(),
            it.watches.to_string(),
            size(it.queued_bytes),
            it.in_flight.to_string(),
        ]
    });
    table::of(header, rows, 3)
}

/// A name that leaves room for the other columns.
fn short(name: &str) -> String {
    shortened(printable(name.as_bytes()), 24)
}

fn slow(slow: &SlowRequests, order: usize) -> String {
    let mut requests: Vec<&SlowRequest> = slow.requests.iter().rev().collect();
    if requests.is_empty() {
        let threshold = time(Some(slow.threshold_us));
        return format!("no request took {threshold} or longer");
    }
    if order == 1 {
        requests.sort_by_key(|it| Reverse(it.total_us));
    }
    let header = [
        "time", "client", "command", "total", "queue", "policy", "flush", "send", "key",
    ];
    let rows = requests.iter().map(|it| {
        let at = utc(it.at_ms);
        [
            at.get(11..19).unwrap_or(&at).to_owned(),
            short(&it.client),
            cell_or_dash(it.command.as_deref()),
            time(Some(it.total_us)),
            time(Some(it.queue_us)),
            time(Some(it.policy_us)),
            time(Some(it.flush_us)),
            time(Some(it.socket_us)),
            key_cell(it),
        ]
    });
    table::of(header, rows, 3)
}

fn cluster(it: &ClusterView) -> String {
    let followers = match it.followers.is_empty() {
        true => "none".to_owned(),
        false => cell(&it.followers.join(", ")),
    };
    let leader = it.leader.as_deref().map_or("none".to_owned(), cell);
    let mut rows = vec![
        ["this host is".to_owned(), cell(&it.role)],
        ["leader".to_owned(), leader],
        ["epoch".to_owned(), it.epoch.to_string()],
        ["position".to_owned(), it.position.to_string()],
        ["records behind".to_owned(), it.lag_records.to_string()],
    ];
    if it.role == "leader" {
        rows.push(["linked followers".to_owned(), followers]);
    }
    if let Some(unreleased) = it.unreleased {
        rows.push(["records not durable".to_owned(), unreleased.to_string()]);
    }
    let reaches = if it.reaches_log { "yes" } else { "no" };
    rows.push(["reaches the log".to_owned(), reaches.to_owned()]);
    let log = format!(
        "{}, {}",
        count(it.log_records, "record"),
        size(it.log_bytes)
    );
    rows.push(["log since the snapshot".to_owned(), log]);
    table::of(["cluster", &cell(&it.name)], rows, 2)
}
