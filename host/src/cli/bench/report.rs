//! The output of `bench`: a table for people, JSON for programs.

use std::fmt::Write as _;
use std::net::SocketAddr;

use serde_json::{Value as Json, json};

use super::Args;
use super::sweep::Sweep;
use crate::cli::data::count;
use crate::cli::output::printable;
use statehouse_loadgen::{Latencies, Outcome};

/// The settings of one run.
#[derive(Clone, Debug)]
pub(super) struct Point {
    /// The name of the run within a sweep.
    pub(super) name: String,
    pub(super) connections: usize,
    /// The rate of an open loop.
    pub(super) rate: Option<u64>,
}

pub(super) struct Report<'a> {
    pub(super) args: &'a Args,
    pub(super) address: SocketAddr,
    /// The store's process and its name.
    pub(super) process: Option<(u32, String)>,
    pub(super) measured: Vec<(Point, Outcome)>,
}

impl Report<'_> {
    pub(super) fn errors(&self) -> u64 {
        let each = self.measured.iter().map(|(_, it)| it.tally.errors.count());
        each.sum()
    }

    pub(super) fn text(&self) -> String {
        let mut text = self.heading();
        match &self.measured[..] {
            [(point, outcome)] if self.args.sweep.is_none() => self.one(&mut text, point, outcome),
            all => self.sweep(&mut text, all),
        }
        for (point, outcome) in &self.measured {
            for (kind, count) in outcome.tally.errors.kinds() {
                let of = match self.measured.len() {
                    1 => String::new(),
                    _ => format!("{}: ", point.name),
                };
                // Writing to a String cannot fail; the same holds below.
                let _ = writeln!(
                    text,
                    "error     {of}{count} × {}",
                    printable(kind.as_bytes())
                );
            }
        }
        text
    }

    /// The settings of the command, on two lines.
    pub(super) fn heading(&self) -> String {
        let args = self.args;
        let is_open = self.measured.iter().any(|(point, _)| point.rate.is_some());
        let mut parts = vec![match is_open {
            true => "open loop".to_owned(),
            false => "closed loop".to_owned(),
        }];
        if !matches!(args.sweep, Some(Sweep::Connections(_))) {
            parts.push(count(args.connections, "connection"));
        }
        match (args.in_flight, is_open) {
            (None, true) => {}
            (in_flight, _) => parts.push(format!("{} in flight on each", in_flight.unwrap_or(1))),
        }
        parts.extend(args.rate.map(|rate| format!("{rate} requests/s")));
        format!(
            "{}: {}, {:?} after {:?} of warm-up\n{}, values of {} B, {} % GET, {}, seed {}\n\n",
            self.address,
            parts.join(", "),
            args.duration,
            args.warm_up,
            count(args.keys, "key"),
            args.value_bytes,
            args.reads,
            count(args.watchers, "watcher"),
            args.seed
        )
    }

    fn one(&self, text: &mut String, point: &Point, outcome: &Outcome) {
        let tally = &outcome.tally;
        let _ = writeln!(text, "{:<10}{HEADING}", "");
        for (name, per_second, latencies) in rows(outcome) {
            if latencies.count() == 0 && name != "all" {
                continue;
            }
            let _ = writeln!(text, "{name:<10}{}", columns(per_second, &latencies));
        }
        let _ = writeln!(
            text,
            "\nanswered  {} of {}, {} of them GETs of a missing key",
            tally.answered, tally.requests, tally.misses
        );
        if point.rate.is_some() {
            let _ = writeln!(
                text,
                "late      p50 {} us, p99 {} us from when a request was due until it was sent",
                micros(tally.late.quantile_us(0.5)),
                micros(tally.late.quantile_us(0.99))
            );
        }
        if self.args.watchers > 0 {
            let per_second = tally.notifications as f64
                / (self.args.warm_up + outcome.measured)
                    .as_secs_f64()
                    .max(1e-9);
            let _ = writeln!(
                text,
                "notified  {} times, {per_second:.0}/s, warm-up included",
                tally.notifications
            );
        }
        if let (Some(usage), Some((pid, name))) = (&outcome.server, &self.process) {
            let _ = writeln!(
                text,
                "server    {:.1} us of CPU per request, {:.1} MB resident (process {pid}, {})",
                outcome.cpu_us(usage),
                usage.resident as f64 / 1e6,
                printable(name.as_bytes())
            );
        }
        if let Some(usage) = &outcome.client {
            let _ = writeln!(
                text,
                "client    {:.1} us of CPU per request",
                outcome.cpu_us(usage)
            );
        }
    }

    fn sweep(&self, text: &mut String, all: &[(Point, Outcome)]) {
        let _ = writeln!(
            text,
            "{:<20}{HEADING}{:>10}{:>12}{:>8}",
            "", "errors", "CPU us each", "MB"
        );
        for (point, outcome) in all {
            let (name, errors) = (&point.name, outcome.tally.errors.count());
            let columns = columns(outcome.per_second(), &outcome.tally.latencies());
            let _ = write!(text, "{name:<20}{columns}{errors:>10}");
            let _ = match &outcome.server {
                Some(usage) => writeln!(
                    text,
                    "{:>12.1}{:>8.1}",
                    outcome.cpu_us(usage),
                    usage.resident as f64 / 1e6
                ),
                None => writeln!(text, "{:>12}{:>8}", "-", "-"),
            };
        }
        text.push('\n');
    }

    /// The report for programs. Times are in microseconds unless the name says otherwise.
    pub(super) fn json(&self) -> Json {
        let args = self.args;
        let runs = self.measured.iter().map(|(point, it)| run(point, it));
        json!({
            "statehouse": env!("CARGO_PKG_VERSION"),
            "address": self.address.to_string(),
            "process": self.process.as_ref().map(|(pid, name)| json!({ "pid": pid, "name": name })),
            "in_flight": args.in_flight,
            "keys": args.keys,
            "value_bytes": args.value_bytes,
            "reads_percent": args.reads,
            "watchers": args.watchers,
            "seed": args.seed,
            "warm_up_ms": args.warm_up.as_millis() as u64,
            "duration_ms": args.duration.as_millis() as u64,
            "runs": runs.collect::<Vec<_>>(),
        })
    }
}

/// The rows of the table: the verb, the answers per second that arrived in the window, and the
/// latencies.
fn rows(outcome: &Outcome) -> [(&'static str, f64, Latencies); 3] {
    let tally = &outcome.tally;
    let seconds = outcome.measured.as_secs_f64().max(1e-9);
    let (gets, sets) = (tally.arrived_reads, tally.arrived - tally.arrived_reads);
    [
        ("GET", gets as f64 / seconds, tally.reads.clone()),
        ("SET", sets as f64 / seconds, tally.writes.clone()),
        ("all", outcome.per_second(), tally.latencies()),
    ]
}

fn run(point: &Point, outcome: &Outcome) -> Json {
    let tally = &outcome.tally;
    let errors: serde_json::Map<String, Json> = tally
        .errors
        .kinds()
        .map(|(kind, count)| (kind.to_owned(), json!(count)))
        .collect();
    json!({
        "connections": point.connections,
        "rate": point.rate,
        "measured_ms": outcome.measured.as_millis() as u64,
        "requests_per_second": outcome.per_second(),
        "requests": tally.requests,
        "answered": tally.answered,
        "failed": tally.failed,
        "misses": tally.misses,
        "notifications": tally.notifications,
        "errors": errors,
        "latency_us": {
            "all": latencies(&tally.latencies()),
            "get": latencies(&tally.reads),
            "set": latencies(&tally.writes),
        },
        "late_us": point.rate.map(|_| latencies(&tally.late)),
        "with_warm_up": { "sent": tally.sent, "replied": tally.replied },
        "server": outcome.server.as_ref().map(|usage| json!({
            "cpu_us_per_request": outcome.cpu_us(usage),
            "resident_bytes": usage.resident,
        })),
        "client_cpu_us_per_request": outcome.client.as_ref().map(|usage| outcome.cpu_us(usage)),
    })
}

fn latencies(it: &Latencies) -> Json {
    let [p50, p99, p999, max] = quantiles(it);
    json!({ "count": it.count(), "p50": p50, "p99": p99, "p99.9": p999, "max": max })
}

/// p50, p99, p99.9 and the maximum, in microseconds.
pub(super) fn quantiles(it: &Latencies) -> [f64; 4] {
    [
        it.quantile_us(0.5),
        it.quantile_us(0.99),
        it.quantile_us(0.999),
        it.max_us(),
    ]
}

/// The heading of [`columns`].
const HEADING: &str = "  requests/s      p50 us      p99 us    p99.9 us      max us";

fn columns(per_second: f64, latencies: &Latencies) -> String {
    let figures = quantiles(latencies).map(|it| format!("{:>12}", micros(it)));
    format!("{per_second:>12.0}{}", figures.concat())
}

/// Rounds to the digits that are meaningful.
fn micros(us: f64) -> String {
    match us < 100.0 {
        true => format!("{us:.1}"),
        false => format!("{us:.0}"),
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use statehouse_loadgen::Tally;

    use super::*;

    #[test]
    fn rows_count_the_answers_that_arrived_in_the_window() {
        let tally = Tally {
            arrived: 30,
            arrived_reads: 10,
            ..Tally::default()
        };
        let outcome = Outcome {
            tally,
            measured: Duration::from_secs(10),
            server: None,
            client: None,
        };
        let rates = rows(&outcome).map(|(name, per_second, _)| (name, per_second));
        assert_eq!(rates, [("GET", 1.0), ("SET", 2.0), ("all", 3.0)]);
    }

    #[test]
    fn figures_have_meaningful_digits() {
        assert_eq!(
            (micros(7.04), micros(99.9), micros(1234.6)),
            ("7.0".into(), "99.9".into(), "1235".into())
        );
    }
}
