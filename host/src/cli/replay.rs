//! `statehouse replay`: replays recorded requests and compares the results.

use std::path::PathBuf;

use serde_json::{Value as Json, json};

use super::data::{self, Data, Node, Place};
use super::output::{Exit, Failure, emit_either, json_bytes, notice, printable};
use super::progress::Progress;
use super::time::utc;
use crate::config::Fuel;
use crate::limits;
use statehouse_core::clock::Stamp;
use statehouse_core::store::{Entry, StoredPayload, Write};
use statehouse_offline::{
    Bound, Candidate, Counts, Difference, Observer, Past, Replayed, Tally, words,
};
use statehouse_testkit::read_policy;
use statehouse_wal::LogPosition;

/// Replay recorded requests and print every difference
///
/// Replays every request that changed something or was refused, on its recorded read set, with the
/// policy version that handled it, or with the policy of --policy. Compares responses and writes
/// byte for byte, and stores nothing. A request is not comparable if the policy reads input that
/// was not recorded (watchers, another user property, random bytes), or if the policy that handled
/// it is missing. Exit code 1 if a difference is found.
///
/// Reads the data directory, on this machine and without a lock, even while a server runs.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  statehouse replay
  statehouse replay --policy new-policy.wasm --from 1h
  statehouse replay --policy new-policy.wasm --from 2026-11-21T03:00:00Z --to 2026-11-21T04:00:00Z --json")]
pub(super) struct Args {
    /// The first record: its number, a time such as 2026-11-21T03:00:00Z, or how long ago, such as
    /// 10m
    #[arg(long, value_name = "RECORD|TIME")]
    from: Option<Place>,

    /// The last record, in the same form
    #[arg(long, value_name = "RECORD|TIME")]
    to: Option<Place>,

    /// The policy to run (.wasm component or core module), or `builtin` for the standard one
    #[arg(long, value_name = "FILE")]
    policy: Option<PathBuf>,

    /// Maximum fuel of one request with the policy of --policy, like that of `serve`. Requests that
    /// the recorded policies handled are not limited by it [default: 4000000; range 50000 to
    /// 40000000]
    #[arg(
        long,
        value_name = "FUEL",
        env = "STATEHOUSE_MAX_FUEL",
        hide_env_values = true
    )]
    max_fuel: Option<Fuel>,

    /// Print at most this many differences; all are counted
    #[arg(long, value_name = "N", default_value_t = 20)]
    limit: u64,

    /// Print a JSON object for each difference and one for the summary, one per line
    #[arg(long)]
    json: bool,

    #[command(flatten)]
    node: Node,

    #[command(flatten)]
    data: Data,
}

pub(super) fn run(args: &Args) -> Result<Exit, Failure> {
    let file = args.policy.as_deref().map(read_policy).transpose();
    let file = file.map_err(|error| Failure::usage(error.to_string()))?;
    let fuel_max = args.max_fuel.unwrap_or_default().get();
    let candidate = file.as_deref().map(|file| Candidate { file, fuel_max });
    let past = Past::open(&args.data.path)?;
    let mut printer = Printer {
        args,
        progress: Progress::new(),
        left: args.limit,
        failed: None,
    };
    let bound = |place: Option<Place>| {
        place.map(|place| match place {
            Place::LogPosition(position) => Bound::LogPosition(LogPosition(position)),
            Place::Time(ms) => Bound::Time(ms),
        })
    };
    let replayed = past.replay(bound(args.from), bound(args.to), candidate, &mut printer)?;
    printer.progress.clear();
    if let Some(failure) = printer.failed {
        return Err(failure);
    }
    if replayed.shortened {
        notice(&format!(
            "the history does not reach back that far: the replay starts at record {}",
            replayed.from
        ));
    }
    emit_either(
        args.json,
        || summary_json(&replayed),
        || summary(&replayed, args.limit),
    )?;
    Ok(match replayed.tally.total.different {
        0 => Exit::Done,
        _ => Exit::Negative,
    })
}

/// Prints differences as they are found.
struct Printer<'a> {
    args: &'a Args,
    progress: Progress,
    /// Differences that may still be printed.
    left: u64,
    /// The error of standard output, if any.
    failed: Option<Failure>,
}

impl Observer for Printer<'_> {
    fn progress(&mut self, done: u64, total: u64, tally: &Tally) {
        let different = tally.total.different;
        self.progress
            .show(done, total, || data::count(different, "difference"));
    }

    fn different(&mut self, difference: &Difference<'_>) {
        if self.left == 0 || self.failed.is_some() {
            return;
        }
        self.left -= 1;
        self.progress.clear();
        let node = &self.args.node.name;
        let printed = emit_either(
            self.args.json,
            || difference_json(difference, node),
            || difference_text(difference, node),
        );
        match printed {
            Ok(true) => {}
            // Standard output was closed, but the replay continues for its exit code.
            Ok(false) => self.left = 0,
            Err(failure) => self.failed = Some(failure),
        }
    }
}

fn difference_text(it: &Difference<'_>, node: &str) -> String {
    let mut text = format!(
        "record {}  {}  client {}\n    request   {}\n",
        it.position,
        utc(it.now_ms),
        printable(it.client.as_bytes()),
        request(it.payload),
    );
    let mut run = |name: &str, answer: String, writes: &[Write]| {
        text.push_str(&format!("    {name:<9} {answer}\n"));
        for write in writes {
            text.push_str(&format!("              {}\n", write_text(write, node)));
        }
    };
    let versioned = |answer: String, version: Option<Stamp>| match version {
        Some(version) => {
            let version = version.display(node).to_string();
            format!("{answer}, version {}", printable(version.as_bytes()))
        }
        None => format!("{answer}, no version"),
    };
    let recorded = match it.answer {
        StoredPayload::Whole(bytes) => data::excerpt(bytes),
        StoredPayload::Digest(digest) => format!("blake3:{digest}"),
    };
    run("recorded", versioned(recorded, it.version), it.writes);
    let mut other = versioned(data::excerpt(&it.other.answer), it.other.version);
    if let Some(failure) = &it.other.failure {
        other.push_str(&format!(
            " (the policy failed: {})",
            printable(failure.as_bytes())
        ));
    }
    run("now", other, &it.other.writes);
    text
}

/// The request on one line.
fn request(payload: &[u8]) -> String {
    match words(payload) {
        Some(words) if !words.is_empty() => {
            let words: Vec<String> = words.into_iter().map(data::excerpt).collect();
            words.join(" ")
        }
        _ => data::excerpt(payload),
    }
}

pub(super) fn write_text(write: &Write, node: &str) -> String {
    let hidden = if write.hidden { "hidden " } else { "" };
    let key = data::excerpt(write.key());
    let Some(entry) = write.entry() else {
        let how = if write.expired() {
            "expires"
        } else {
            "deletes"
        };
        return format!("{how} {hidden}{key}");
    };
    let version = entry.version().display(node).to_string();
    let mut text = format!(
        "sets {hidden}{key} to {} ({}), version {}",
        data::excerpt(entry.value()),
        data::count(entry.value().len() as u64, "byte"),
        printable(version.as_bytes())
    );
    if let Some(fence) = entry.fence() {
        text.push_str(&format!(", fence {}", data::fence(&fence)));
    }
    if let Some(expires_ms) = entry.expires_ms() {
        text.push_str(&format!(", expires {}", utc(expires_ms)));
    }
    text
}

fn difference_json(it: &Difference<'_>, node: &str) -> Json {
    let version = |version: Option<Stamp>| version.map(|it| it.display(node).to_string());
    let writes = |writes: &[Write]| -> Vec<Json> {
        writes.iter().map(|write| write_json(write, node)).collect()
    };
    let arguments = words(it.payload).map(|words| -> Vec<Json> {
        words
            .into_iter()
            .map(|word| json_bytes(&word[..word.len().min(limits::VALUE_SHOWN_BYTES_MAX)]))
            .collect()
    });
    json!({
        "record": it.position.0,
        "time": utc(it.now_ms),
        "client": it.client,
        "request": arguments,
        "recorded": {
            "answer": match it.answer {
                StoredPayload::Whole(bytes) => json_bytes(bytes),
                StoredPayload::Digest(digest) => json!({ "blake3": digest.to_hex().as_str() }),
            },
            "version": version(it.version),
            "writes": writes(it.writes),
        },
        "now": {
            "answer": json_bytes(&it.other.answer),
            "version": version(it.other.version),
            "writes": writes(&it.other.writes),
            "failure": it.other.failure,
        },
    })
}

pub(super) fn write_json(write: &Write, node: &str) -> Json {
    let entry = write.entry();
    let shown = |value: &[u8]| json_bytes(&value[..value.len().min(limits::VALUE_SHOWN_BYTES_MAX)]);
    json!({
        "key": json_bytes(write.key()),
        "hidden": write.hidden,
        "event": match (entry, write.expired()) {
            (Some(_), _) => "set",
            (None, true) => "expired",
            (None, false) => "deleted",
        },
        "version": write.version().display(node).to_string(),
        "bytes": entry.map(|entry| entry.value().len()),
        "value": entry.map(|entry| shown(entry.value())),
        "fencing_token": entry.and_then(Entry::fence).map(|it| data::fence_json(&it)),
        "expires": entry.and_then(Entry::expires_ms).map(utc),
    })
}

fn summary(it: &Replayed, printed_max: u64) -> String {
    let Tally {
        total,
        commands,
        reasons,
    } = &it.tally;
    if *total == Counts::default() {
        return "no request is recorded there\n".to_owned();
    }
    let not_printed = total.different.saturating_sub(printed_max);
    let mut text = String::new();
    if not_printed > 0 {
        text.push_str(&format!(
            "{} not printed: --limit\n",
            data::count(not_printed, "more difference")
        ));
    }
    let (from, to) = it.times_ms;
    text.push_str(&format!(
        "records {} to {}, {} to {}\n\n{:<18}{:>10}{:>12}{:>17}\n",
        it.from,
        it.to,
        utc(from),
        utc(to),
        "command",
        "same",
        "different",
        "not comparable"
    ));
    let mut row = |name: &str, counts: &Counts| {
        text.push_str(&format!(
            "{name:<18}{:>10}{:>12}{:>17}\n",
            counts.same, counts.different, counts.not_comparable
        ));
    };
    for (name, counts) in commands {
        row(name, counts);
    }
    row("all", total);
    for (reason, number) in reasons {
        text.push_str(&format!("\nnot comparable: {number}, because {reason}\n"));
    }
    text
}

fn summary_json(it: &Replayed) -> Json {
    let counts = |counts: &Counts| {
        json!({
            "same": counts.same,
            "different": counts.different,
            "not_comparable": counts.not_comparable,
        })
    };
    let commands = it.tally.commands.iter();
    let commands: serde_json::Map<String, Json> = commands
        .map(|(name, it)| (name.clone(), counts(it)))
        .collect();
    json!({
        "summary": counts(&it.tally.total),
        "commands": commands,
        "reasons": it.tally.reasons,
        "from": it.from.0,
        "to": it.to.0,
        "shortened": it.shortened,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use statehouse_core::clock::Fence;
    use statehouse_core::store::Change;

    #[test]
    fn a_write_in_json_has_its_token_unchanged() {
        let fence = Fence {
            wall: 7,
            counter: 1,
            node: "a\\b".into(),
        };
        let entry = Entry::new(b"k", b"v", Stamp::default(), Some(&fence), None);
        let write = Write::of(Change::Set(entry));
        let object = write_json(&write, "StateStore");
        assert_eq!(object["fencing_token"], "000000000000007:00001:a\\b");
    }
}
