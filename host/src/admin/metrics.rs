//! Renders metrics as OpenMetrics 1.0 text.
//!
//! It uses no metrics crate: all values are counted elsewhere, and a registry would duplicate them.

use std::collections::BTreeMap;
use std::fmt::{Display, Write};
use std::time::Duration;

use hyper::StatusCode;
use statehouse_mqtt::{Broker, RefusalCount};

use super::Sources;
use super::answer::{Answer, with};
use super::cluster::{self, ClusterFigures, Histogram};
use crate::config;
use crate::logging;
use crate::policies::manager::{Listing, PolicyView};
use crate::server::Stats;
use crate::shadow::ShadowReport;
use crate::transport::foreign::Figures;
use statehouse_core::policy::Role;
use statehouse_files::watch::Count;

/// The page of all metrics.
pub(super) fn text(listing: &Listing, shadow: Option<&ShadowReport>, sources: &Sources) -> String {
    let Sources { server, broker, .. } = sources;
    let limits = broker.as_ref().map(Broker::limits);
    let mut page = Page::default();
    let stats = server.stats();
    store(&mut page, &stats);
    duplicates(&mut page, &stats);
    in_force(
        &mut page,
        &config::named(&server.quota(), limits.as_deref()),
    );
    access(&mut page, &sources.audit.counts());
    files(&mut page, sources.reloads.counts());
    log(&mut page, logging::dropped());
    if let Some(broker) = broker {
        clients(&mut page, &broker.stats());
        refusals_by_the_broker(&mut page, &broker.refusals());
    }
    if let Some(link) = server.link() {
        connection(&mut page, &link);
    }
    if let Some(leadership) = &sources.leadership {
        cluster::metrics(&mut page, &leadership.figures());
    }
    policies(&mut page, &listing.policies);
    if let Some(report) = shadow {
        compared(&mut page, report);
    }
    page.0.push_str("# EOF\n");
    page.0
}

/// An answer with a page of metrics.
pub(super) fn answer(page: String) -> Answer {
    let kind = "application/openmetrics-text; version=1.0.0; charset=utf-8";
    with(StatusCode::OK, kind, page.into_bytes())
}

/// The page of a host that does not lead its cluster.
pub(super) fn of_follower(figures: &ClusterFigures) -> String {
    let mut page = Page::default();
    cluster::metrics(&mut page, figures);
    log(&mut page, logging::dropped());
    page.0.push_str("# EOF\n");
    page.0
}

fn store(page: &mut Page, stats: &Stats) {
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
            "Accounted size of the keys and values, in bytes",
            stats.bytes,
        ),
        ("watches", "Watches", stats.watches),
        (
            "clock_behind_ms",
            "How far the system clock is behind the store's time, in milliseconds",
            stats.clock_behind_ms,
        ),
        (
            "disk_full",
            "1 while writes are refused because the disk is full",
            stats.disk_full.into(),
        ),
    ]);
}

/// Redelivered requests.
fn duplicates(page: &mut Page, stats: &Stats) {
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
fn in_force(page: &mut Page, limits: &[(&str, u64)]) {
    page.family("limit", "gauge", "Limits in force, by their settings");
    for (setting, value) in limits {
        page.sample("limit", &[("setting", *setting)], value);
    }
}

/// Log lines that could not be written.
fn log(page: &mut Page, dropped: u64) {
    let what = "Log lines dropped because stderr was not read in time";
    page.counters(&[("log_dropped", what, dropped)]);
}

/// Refusals of access.
fn access(page: &mut Page, refused: &[(&str, u64)]) {
    if refused.is_empty() {
        return;
    }
    page.family(
        "access_refused",
        "counter",
        "Refusals, by the attempted action or the limit that was reached",
    );
    for (what, count) in refused {
        page.sample("access_refused_total", &[("what", *what)], count);
    }
}

/// Reloaded files.
fn files(page: &mut Page, reloads: impl Iterator<Item = Count>) {
    let mut reloads = reloads.peekable();
    if reloads.peek().is_none() {
        return;
    }
    page.family("reloads", "counter", "Reloads of changed files, by result");
    for Count {
        what,
        taken,
        refused,
    } in reloads
    {
        for (result, count) in [("taken", taken), ("refused", refused)] {
            let labels = [("what", what), ("result", result)];
            page.sample("reloads_total", &labels, count);
        }
    }
}

/// The embedded broker. All counts fit into 64 bits.
fn clients(page: &mut Page, broker: &statehouse_mqtt::Stats) {
    page.gauges(&[
        (
            "connections",
            "Clients that are connected",
            broker.connections as u64,
        ),
        (
            "sessions",
            "Sessions, connected or not",
            broker.sessions as u64,
        ),
        (
            "subscriptions",
            "Subscriptions of all sessions",
            broker.subscriptions as u64,
        ),
        (
            "queued_bytes",
            "Messages queued for clients or awaiting their acknowledgement, in bytes",
            broker.queued_bytes as u64,
        ),
        (
            "client_state_bytes",
            "Wills, packet ids of unfinished QoS 2 exchanges and topic aliases, in bytes",
            broker.state_bytes as u64,
        ),
        ("retained", "Retained messages", broker.retained as u64),
        (
            "retained_bytes",
            "Retained messages, in bytes",
            broker.retained_bytes as u64,
        ),
    ]);
    page.counters(&[
        ("messages_in", "PUBLISHes of clients", broker.messages_in),
        (
            "messages_out",
            "PUBLISHes sent to clients, repetitions included",
            broker.messages_out,
        ),
        (
            "dropped",
            "Messages dropped: expired, over the limit of a queue, too large for their client, refused at QoS 0",
            broker.dropped,
        ),
        (
            "throttled",
            "PUBLISHes refused by the rate limit of one client or of all clients",
            broker.throttled,
        ),
        (
            "disconnected",
            "Connections ended for a violation of the protocol or a limit",
            broker.disconnected,
        ),
        (
            "turned_away",
            "Sockets closed at once because too many were open",
            broker.turned_away,
        ),
    ]);
}

/// Refusals by the broker, by reason code of MQTT 5.
fn refusals_by_the_broker(page: &mut Page, refusals: &[RefusalCount]) {
    if refusals.is_empty() {
        return;
    }
    page.family(
        "mqtt_refused",
        "counter",
        "Refusals by the broker, by the attempted action and the MQTT 5 reason code that was sent",
    );
    for RefusalCount {
        what,
        reason,
        count,
    } in refusals
    {
        let code = format!("{:#04x}", reason.0);
        let labels = [
            ("what", what.name()),
            ("code", &code),
            ("reason", reason.name()),
        ];
        page.sample("mqtt_refused_total", &labels, count);
    }
}

/// The connection to a foreign broker.
fn connection(page: &mut Page, link: &Figures) {
    page.counters(&[
        (
            "broker_connections",
            "Connections made to the broker",
            link.connections,
        ),
        (
            "broker_malformed",
            "Malformed messages on a request topic",
            link.malformed,
        ),
        (
            "broker_refused",
            "Responses and notifications that the broker refused",
            link.refused,
        ),
        (
            "broker_unheard",
            "Notifications without a subscriber",
            link.unheard,
        ),
        (
            "broker_lost",
            "Notifications lost because the broker was unreachable for too long",
            link.lost,
        ),
        (
            "broker_dropped",
            "Messages at QoS 0 dropped because too many messages were being sent",
            link.dropped,
        ),
    ]);
    page.gauges(&[
        (
            "broker_connected",
            "Whether there is a connection to the broker",
            link.connected.into(),
        ),
        (
            "broker_outstanding",
            "Responses and notifications that the broker has not acknowledged yet",
            link.outstanding,
        ),
        (
            "broker_outstanding_bytes",
            "Responses and notifications that the broker has not acknowledged yet, in bytes",
            link.outstanding_bytes,
        ),
        (
            "broker_unacknowledged",
            "Messages from the broker that the store has not acknowledged yet",
            link.unacknowledged,
        ),
    ]);
}

/// The values of a metric for one policy, each with an extra label or none.
type Values<'a> = &'a dyn Fn(&PolicyView) -> Vec<(Option<(&'static str, String)>, u64)>;

fn policies(page: &mut Page, policies: &[PolicyView]) {
    let mut each = |name: &str, kind: &str, help: &str, values: Values<'_>| {
        page.each_policy(policies, name, kind, help, values);
    };
    each("policy_role", "gauge", "The roles of a policy", &|policy| {
        let roles = policy.roles.iter();
        roles.map(|role| (Some(("role", word(role))), 1)).collect()
    });
    each(
        "policy_requests",
        "counter",
        "Requests handled by a policy",
        &|policy| vec![(None, policy.done.requests)],
    );
    each(
        "policy_command_requests",
        "counter",
        "Requests by the command that the policy reports",
        &|policy| {
            // A policy may use one name for two commands, and a page must not repeat a sample.
            let mut commands = BTreeMap::<_, u64>::new();
            for it in &policy.commands {
                *commands.entry(&it.name).or_default() += it.requests;
            }
            let commands = commands.into_iter();
            commands
                .map(|(name, requests)| (Some(("command", name.clone())), requests))
                .collect()
        },
    );
    each(
        "policy_call_failures",
        "counter",
        "Failed policy calls, by kind of failure",
        &|policy| {
            let it = &policy.done.failures;
            let kinds = [
                ("fuel", it.fuel),
                ("watchdog", it.watchdog),
                ("trap", it.trap),
                ("malformed", it.malformed),
            ];
            kinds
                .map(|(kind, count)| (Some(("kind", kind.to_owned())), count))
                .to_vec()
        },
    );
    each(
        "policy_fuel_mean",
        "gauge",
        "Mean fuel of a request",
        &|policy| vec![(None, policy.done.fuel_mean)],
    );
    each(
        "policy_fuel_max",
        "gauge",
        "Maximum fuel of a request",
        &|policy| vec![(None, policy.done.fuel_max)],
    );
    each(
        "policy_impure",
        "counter",
        "Sampled requests that a fresh instance answered differently",
        &|policy| vec![(None, policy.done.impure)],
    );
}

fn compared(page: &mut Page, report: &ShadowReport) {
    page.family(
        "shadow_requests",
        "gauge",
        "Requests of the current or last comparison in shadow, by result",
    );
    let digest = report.policy.digest.short();
    for (result, count) in [
        ("same", report.same),
        ("different_answer", report.different_answer),
        ("different_effect", report.different_effect),
        ("failed", report.failed),
        ("not_comparable", report.not_comparable),
        ("skipped", report.skipped),
    ] {
        let labels = [
            ("policy", report.policy.name.as_str()),
            ("version", &report.policy.version),
            ("digest", &digest),
            ("result", result),
        ];
        page.sample("shadow_requests", &labels, count);
    }
}

/// The name of a role in JSON.
fn word(role: &Role) -> String {
    let value = serde_json::to_value(role).unwrap_or_default();
    value.as_str().unwrap_or_default().to_owned()
}

/// A page under construction.
#[derive(Default)]
pub(super) struct Page(String);

impl Page {
    #[cfg(test)]
    pub(super) fn text(&self) -> &str {
        &self.0
    }

    /// Adds counters, each with its name, help text and value.
    fn counters(&mut self, counters: &[(&str, &str, u64)]) {
        for (name, help, value) in counters {
            self.family(name, "counter", help);
            self.sample(&format!("{name}_total"), &[], value);
        }
    }

    /// Adds gauges in the same form.
    pub(super) fn gauges(&mut self, gauges: &[(&str, &str, u64)]) {
        for (name, help, value) in gauges {
            self.family(name, "gauge", help);
            self.sample(name, &[], value);
        }
    }

    /// Adds a gauge of a time.
    pub(super) fn seconds(&mut self, name: &str, help: &str, value: Duration) {
        self.unit(name, "gauge", "seconds", help);
        self.sample(name, &[], value.as_secs_f64());
    }

    /// Adds times in buckets.
    pub(super) fn histogram(&mut self, name: &str, help: &str, times: &Histogram) {
        self.unit(name, "histogram", "seconds", help);
        let mut count = 0;
        for (index, bucket) in times.buckets.iter().enumerate() {
            count += bucket;
            // OpenMetrics wants a point in each bound.
            let bound = times.bounds.get(index);
            let bound = bound.map_or("+Inf".to_owned(), |it| format!("{:?}", it.as_secs_f64()));
            self.sample(&format!("{name}_bucket"), &[("le", &bound)], count);
        }
        self.sample(&format!("{name}_count"), &[], count);
        self.sample(&format!("{name}_sum"), &[], times.sum.as_secs_f64());
    }

    /// Adds a family with the values of each policy.
    fn each_policy(
        &mut self,
        policies: &[PolicyView],
        name: &str,
        kind: &str,
        help: &str,
        values: Values<'_>,
    ) {
        self.family(name, kind, help);
        let sample = match kind {
            "counter" => format!("{name}_total"),
            _ => name.to_owned(),
        };
        for policy in policies {
            let digest = policy.digest.short();
            for (further, value) in values(policy) {
                let mut labels = vec![
                    ("policy", policy.name.as_str()),
                    ("version", &policy.version),
                    ("digest", &digest),
                ];
                labels.extend(further.iter().map(|(name, value)| (*name, value.as_str())));
                self.sample(&sample, &labels, value);
            }
        }
    }

    /// Writes the header of a metric family.
    pub(super) fn family(&mut self, name: &str, kind: &str, help: &str) {
        // Writing to a string cannot fail.
        let _ = writeln!(self.0, "# TYPE statehouse_{name} {kind}");
        let _ = writeln!(self.0, "# HELP statehouse_{name} {help}.");
    }

    /// Writes the header of a metric family whose name ends with its unit.
    fn unit(&mut self, name: &str, kind: &str, unit: &str, help: &str) {
        // Writing to a string cannot fail.
        let _ = writeln!(self.0, "# TYPE statehouse_{name} {kind}");
        let _ = writeln!(self.0, "# UNIT statehouse_{name} {unit}");
        let _ = writeln!(self.0, "# HELP statehouse_{name} {help}.");
    }

    pub(super) fn sample(&mut self, name: &str, labels: &[(&str, &str)], value: impl Display) {
        self.0.push_str("statehouse_");
        self.0.push_str(name);
        for (index, (label, value)) in labels.iter().enumerate() {
            self.0.push(if index == 0 { '{' } else { ',' });
            self.0.push_str(label);
            self.0.push_str("=\"");
            // A policy chooses its own name, which must not be able to inject a line.
            for c in value.chars() {
                match c {
                    '\\' => self.0.push_str("\\\\"),
                    '"' => self.0.push_str("\\\""),
                    '\n' => self.0.push_str("\\n"),
                    c => self.0.push(c),
                }
            }
            self.0.push('"');
        }
        if !labels.is_empty() {
            self.0.push('}');
        }
        // Writing to a string cannot fail.
        let _ = writeln!(self.0, " {value}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policies::manager::CommandView;
    use statehouse_core::policy::{Digest, Done};

    /// Scrapers reject a page that repeats a sample.
    #[test]
    fn two_commands_of_one_name_are_one_sample() {
        let commands = [1, 2].map(|requests| CommandView {
            name: "SET".into(),
            requests,
        });
        let view = PolicyView {
            name: "rule".into(),
            version: "1".into(),
            digest: Digest::of(b""),
            bytes: 1,
            built_in: false,
            roles: Vec::new(),
            done: Done::default(),
            commands: commands.into(),
        };
        let mut page = Page::default();
        policies(&mut page, &[view]);
        let samples = page.0.lines().filter(|line| line.contains("\"SET\""));
        let samples: Vec<&str> = samples.collect();
        assert!(
            matches!(samples[..], [one] if one.ends_with("} 3")),
            "{samples:?}"
        );
    }

    #[test]
    fn names_do_not_end_a_line() {
        let mut page = Page::default();
        page.sample("x_total", &[("policy", "a\"b\\c\nd"), ("kind", "trap")], 7);
        assert_eq!(
            page.0,
            "statehouse_x_total{policy=\"a\\\"b\\\\c\\nd\",kind=\"trap\"} 7\n"
        );
    }
}
