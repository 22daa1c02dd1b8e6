//! `statehouse slow`: the last slow requests of a running store, with where their time went.

use std::time::Duration;

use hyper::Method;

use super::data;
use super::outage::Outage;
use super::output::{Exit, Failure, emit_either, one_line};
use super::store::{Store, unexpected};
use super::table::{self, cell, cell_or_dash};
use super::time::utc;
use statehouse_server::{SlowRequest, SlowRequests};

/// How often `--follow` asks.
const POLL: Duration = Duration::from_secs(1);

/// Show the last slow requests of a running store, and where their time went
///
/// A request is slow from slow_threshold on. Its parts, in milliseconds: `queue` is the time from
/// the turn of its connection to the policy, `policy` the policy itself, `flush` the wait until the
/// log position of its response was durable, `socket` the handover to the connection. The time of a
/// call with little fuel is estimated. A key is cut after 40 bytes. The store keeps the last 256;
/// --follow asks once a second, also while the store is down, and says how many it has missed. If
/// the store did not answer, or has had fewer than before, --follow begins again with those that
/// the store keeps.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  statehouse slow
  statehouse slow --follow
  statehouse slow --json | jq '.requests[] | select(.flush_us > 50000)'")]
pub(super) struct Args {
    /// Also show further slow requests, until Ctrl-C
    #[arg(long)]
    follow: bool,

    #[command(flatten)]
    store: Store,
}

pub(super) async fn run(args: &Args) -> Result<Exit, Failure> {
    let (mut from, mut is_first) = (0, true);
    let mut outage = Outage::default();
    let interrupted = tokio::signal::ctrl_c();
    tokio::pin!(interrupted);
    loop {
        let path = format!("/v1/slow?from={from}");
        let answer = tokio::select! {
            biased;
            _ = &mut interrupted, if args.follow => return Ok(Exit::Done),
            answer = args.store.ask(Method::GET, &path) => answer,
        };
        if let Some(answer) = outage.note(answer)? {
            let slow: SlowRequests = serde_json::from_value(answer.clone()).map_err(unexpected)?;
            let is_news = is_first || !slow.requests.is_empty();
            let in_words = || text(&slow, is_first);
            let is_read = !is_news || emit_either(args.store.json, || answer, in_words)?;
            if !args.follow || !is_read {
                return Ok(Exit::Done);
            }
            (from, is_first) = (slow.next, false);
        } else {
            // A store that has started again counts its requests from 0 again.
            from = 0;
        }
        tokio::select! {
            biased;
            _ = &mut interrupted => return Ok(Exit::Done),
            () = tokio::time::sleep(POLL) => {}
        }
    }
}

fn text(slow: &SlowRequests, is_first: bool) -> String {
    let threshold = ms(slow.threshold_us);
    if slow.requests.is_empty() {
        return match is_first {
            true => format!("no request took {threshold} ms or longer\n"),
            false => String::new(),
        };
    }
    let header = [
        "time",
        "client",
        "command",
        "key",
        "outcome",
        "answered by",
        "ms",
        "queue",
        "policy",
        "flush",
        "socket",
        "fuel",
    ];
    let mut text = match slow.lost {
        // The first list begins with the oldest request that is kept.
        lost if lost > 0 && !is_first => {
            let lost = data::count(lost, "slow request");
            format!("{lost} before these: not kept any more\n")
        }
        _ => String::new(),
    };
    text.push_str(&table::of(header, slow.requests.iter().map(row), 6));
    if is_first {
        let requests = slow.next;
        text.push_str(&format!(
            "{requests} took {threshold} ms or longer since the start\n"
        ));
    }
    text
}

fn row(it: &SlowRequest) -> [String; 12] {
    [
        utc(it.at_ms),
        cell(&it.client),
        cell_or_dash(it.command.as_deref()),
        key_cell(it),
        it.outcome.clone(),
        cell_or_dash(it.policy.as_deref()),
        ms(it.total_us),
        ms(it.queue_us),
        ms(it.policy_us),
        ms(it.flush_us),
        ms(it.socket_us),
        it.fuel.to_string(),
    ]
}

/// The key of a request in a table. The store has escaped bytes that are no UTF-8.
pub(super) fn key_cell(it: &SlowRequest) -> String {
    let key = it.key.as_deref();
    key.map_or("-".to_owned(), |key| {
        table::shortened(one_line(key), table::CELL_CHARS_MAX)
    })
}

/// Microseconds as milliseconds with one digit.
fn ms(us: u64) -> String {
    format!("{}.{}", us / 1_000, us / 100 % 10)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slow_requests_are_a_table_of_their_parts() {
        let request = SlowRequest {
            at_ms: 1_700_000_000_000,
            client: "press\n4".into(),
            command: Some("SET".into()),
            key: Some("Wärme\n\\xff".into()),
            policy: Some("standard@0123".into()),
            outcome: "ok".into(),
            fuel: 4_000,
            total_us: 250_190,
            queue_us: 40,
            policy_us: 5,
            flush_us: 250_000,
            socket_us: 145,
        };
        let mut slow = SlowRequests {
            threshold_us: 100_000,
            next: 9,
            lost: 8,
            requests: vec![request],
        };
        let shown = text(&slow, true);
        let row = shown.lines().nth(1).unwrap().split_whitespace().skip(1);
        let row: Vec<&str> = row.collect();
        let names = ["press\\n4", "SET", "Wärme\\n\\xff", "ok", "standard@0123"];
        assert_eq!(row[..5], names, "{shown}");
        assert_eq!(row[5..], ["250.1", "0.0", "0.0", "250.0", "0.1", "4000"]);
        assert!(shown.ends_with("9 took 100.0 ms or longer since the start\n"));
        assert!(shown.starts_with("time "), "{shown}");
        let followed = text(&slow, false);
        let lost = "8 slow requests before these: not kept any more\ntime ";
        assert!(followed.starts_with(lost), "{followed}");
        slow.requests.clear();
        assert_eq!(text(&slow, true), "no request took 100.0 ms or longer\n");
        assert_eq!(text(&slow, false), "");
    }
}
