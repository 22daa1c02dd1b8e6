//! `statehouse replay`: replays recorded requests and compares the results.

use std::path::PathBuf;

use hyper::Method;
use serde_json::Value as Json;

use super::data::{self, Node};
use super::output::{Exit, Failure, emit_either, notice, one_line, printable};
use super::progress::Progress;
use super::store::{Asked, Found, Reach};
use super::time::utc;
use crate::past::{self, Given};
use statehouse_config::Fuel;
use statehouse_offline::{Bound, Candidate, Difference, Observer, Past, Tally};
use statehouse_testkit::read_policy;

/// Replay recorded requests and print every difference
///
/// Replays every request that changed something or was refused, on its recorded read set, with the
/// policy version that handled it, or with the policy of --policy. Compares responses and writes
/// byte for byte, and stores nothing. A request is not comparable if the policy reads input that
/// was not recorded (watchers, another user property, random bytes), or if the policy that handled
/// it is missing. Exit code 1 if a difference is found, or if no request was comparable with the
/// policy of --policy.
///
/// Reads the data directory, on this machine and without a lock, even while a server runs. With
/// --admin a running store on another machine replays its own records, one replay at a time; with
/// --policy this needs the role `ship`.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  statehouse replay
  statehouse replay --policy new-policy.wasm --from 1h
  statehouse replay --from 2026-11-21T03:00:00Z --to 2026-11-21T04:00:00Z --json")]
pub(super) struct Args {
    /// The first record: its number, a time such as 2026-11-21T03:00:00Z, or how long ago, such as
    /// 10m
    #[arg(long, value_name = "RECORD|TIME", value_parser = past::bound)]
    from: Option<Given<Bound>>,

    /// The last record, in the same form
    #[arg(long, value_name = "RECORD|TIME", value_parser = past::bound)]
    to: Option<Given<Bound>>,

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
    reach: Reach,
}

pub(super) async fn run(args: &Args) -> Result<Exit, Failure> {
    let file = args.policy.as_deref().map(read_policy).transpose();
    let file = file.map_err(|error| Failure::usage(error.to_string()))?;
    let mut printer = Printer {
        args,
        progress: Progress::new(),
        left: args.limit,
        printed: 0,
        failed: None,
    };
    let totals = match args.reach.find()? {
        Found::Data(data) => {
            let fuel_max = args.max_fuel.unwrap_or_default().get();
            let candidate = file.as_deref().map(|file| Candidate { file, fuel_max });
            let past = Past::open(&data)?;
            let within = |it: Option<Given<Bound>>| it.map(|it| it.within(&past)).transpose();
            let (from, to) = (within(args.from)?, within(args.to)?);
            data::notice_end(&past, u64::MAX)?;
            let replayed = past.replay(from, to, candidate, &mut printer)?;
            past::summary(&replayed)
        }
        Found::Admin(asked) => by_store(args, &asked, file, &mut printer).await?,
    };
    printer.progress.clear();
    if let Some(failure) = printer.failed {
        return Err(failure);
    }
    if totals["shortened"] == true {
        notice(&format!(
            "the history does not reach back that far: the replay starts at record {}",
            totals["from"]
        ));
    }
    if let Some(damage) = totals["damage"].as_str() {
        notice(&format!(
            "earlier records cannot be read: {}",
            one_line(damage)
        ));
    }
    let rest = rest(&totals, printer.printed, args.limit);
    // The reader of JSON knows the limit, and not that the answer of a store was full.
    if args.json
        && printer.left > 0
        && let Some(rest) = &rest
    {
        notice(rest);
    }
    let in_words = || summary(&totals, rest.as_deref());
    emit_either(args.json, || totals.clone(), in_words)?;
    let [same, different] = ["same", "different"].map(|it| number(&totals["summary"][it]));
    // A script must not take this for equal results.
    if args.policy.is_some() && same == 0 && different == 0 {
        notice("nothing was compared: no request that is recorded there is comparable");
        return Ok(Exit::Negative);
    }
    Ok(Exit::of(different == 0))
}

/// Lets a store replay its records. Returns the totals.
async fn by_store(
    args: &Args,
    asked: &Asked,
    file: Option<Vec<u8>>,
    printer: &mut Printer<'_>,
) -> Result<Json, Failure> {
    let bound = |name: &str, bound: Option<Given<Bound>>| match bound {
        None => String::new(),
        Some(Given::Exactly(Bound::LogPosition(at))) => format!("&{name}={at}"),
        Some(Given::Exactly(Bound::Time(ms))) => format!("&{name}={}", utc(ms)),
        Some(Given::Ago(ms)) => format!("&{name}={ms}ms"),
    };
    let (from, to) = (bound("from", args.from), bound("to", args.to));
    let fuel = args.max_fuel.map(|it| format!("&max_fuel={}", it.get()));
    let fuel = fuel.unwrap_or_default();
    let path = format!("/v1/replay?limit={}{from}{to}{fuel}", args.limit);
    let method = match file {
        None => Method::GET,
        Some(_) => Method::POST,
    };
    let answer = asked.send(method, &path, file.unwrap_or_default()).await;
    let mut answer = answer.map_err(Failure::of_question)?;
    for difference in answer["differences"].as_array().into_iter().flatten() {
        printer.print(difference);
    }
    Ok(answer["totals"].take())
}

/// Prints differences as they are found.
struct Printer<'a> {
    args: &'a Args,
    progress: Progress,
    /// Differences that may still be printed.
    left: u64,
    printed: u64,
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
        if self.left > 0 && self.failed.is_none() {
            self.print(&past::difference(difference, &self.args.node.name));
        }
    }
}

impl Printer<'_> {
    fn print(&mut self, difference: &Json) {
        if self.left == 0 || self.failed.is_some() {
            return;
        }
        self.left -= 1;
        self.progress.clear();
        let printed = emit_either(
            self.args.json,
            || difference.clone(),
            || difference_text(difference),
        );
        match printed {
            Ok(true) => self.printed += 1,
            // Standard output was closed, but the replay continues for its exit code.
            Ok(false) => self.left = 0,
            Err(failure) => self.failed = Some(failure),
        }
    }
}

fn difference_text(it: &Json) -> String {
    let mut text = format!(
        "record {}  {}  client {}\n    request   {}\n",
        it["record"],
        data::text(&it["time"]),
        data::text(&it["client"]),
        request(it),
    );
    let mut run = |name: &str, run: &Json| {
        let answer = match run["answer"]["blake3"].as_str() {
            Some(digest) => format!("blake3:{digest}"),
            None => data::excerpt_of(&run["answer"]),
        };
        let version = match run["version"].is_string() {
            true => format!("version {}", data::text(&run["version"])),
            false => "no version".to_owned(),
        };
        let failure = run["failure"].as_str();
        let failure = failure.map(|why| format!(" (the policy failed: {})", one_line(why)));
        let failure = failure.unwrap_or_default();
        text.push_str(&format!("    {name:<9} {answer}, {version}{failure}\n"));
        for write in run["writes"].as_array().into_iter().flatten() {
            text.push_str(&format!("              {}\n", write_text(write)));
        }
    };
    run("recorded", &it["recorded"]);
    run("now", &it["now"]);
    text
}

/// The request on one line.
fn request(it: &Json) -> String {
    match it["request"].as_array() {
        Some(words) => {
            let words: Vec<String> = words.iter().map(data::excerpt_of).collect();
            words.join(" ")
        }
        None => data::excerpt_of(&it["payload"]),
    }
}

/// A write of [`past::write`] on one line.
pub(super) fn write_text(write: &Json) -> String {
    let hidden = if write["hidden"] == true {
        "hidden "
    } else {
        ""
    };
    let key = data::excerpt_of(&write["key"]);
    match write["event"].as_str() {
        Some("expired") => return format!("expires {hidden}{key}"),
        Some("deleted") => return format!("deletes {hidden}{key}"),
        _ => {}
    }
    let mut text = format!(
        "sets {hidden}{key} to {} ({}), version {}",
        data::excerpt_of(&write["value"]),
        data::count(number(&write["bytes"]), "byte"),
        data::text(&write["version"])
    );
    for (field, name) in [("fencing_token", "fence"), ("expires", "expires")] {
        if write[field].is_string() {
            text.push_str(&format!(", {name} {}", data::text(&write[field])));
        }
    }
    text
}

fn number(json: &Json) -> u64 {
    json.as_u64().unwrap_or_default()
}

/// How many differences were counted and not printed, and why; none if all were printed.
fn rest(totals: &Json, printed: u64, limit: u64) -> Option<String> {
    let count = number(&totals["summary"]["different"]).saturating_sub(printed);
    let why = match printed < limit {
        true => {
            "the answer of the store has no room for them. Name fewer records with --from and --to"
        }
        false => "--limit",
    };
    let text = || {
        format!(
            "{} not printed: {why}",
            data::count(count, "more difference")
        )
    };
    (count > 0).then(text)
}

fn summary(it: &Json, rest: Option<&str>) -> String {
    const COLUMNS: [&str; 3] = ["same", "different", "not_comparable"];
    let total = &it["summary"];
    if COLUMNS.iter().all(|column| number(&total[column]) == 0) {
        return "no request is recorded there\n".to_owned();
    }
    let mut text = rest.map_or(String::new(), |rest| format!("{rest}\n"));
    text.push_str(&format!(
        "records {} to {}, {} to {}\n\n{:<18}{:>10}{:>12}{:>17}\n",
        it["from"],
        it["to"],
        data::text(&it["from_time"]),
        data::text(&it["to_time"]),
        "command",
        "same",
        "different",
        "not comparable"
    ));
    let mut row = |name: &str, counts: &Json| {
        let [same, different, not_comparable] = COLUMNS.map(|column| number(&counts[column]));
        text.push_str(&format!(
            "{name:<18}{same:>10}{different:>12}{not_comparable:>17}\n"
        ));
    };
    for (name, counts) in it["commands"].as_object().into_iter().flatten() {
        row(&printable(name.as_bytes()), counts);
    }
    row("all", total);
    for (reason, number) in it["reasons"].as_object().into_iter().flatten() {
        let reason = one_line(reason);
        text.push_str(&format!("\nnot comparable: {number}, because {reason}\n"));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    /// An answer of a store ends before the limit if its differences are large.
    #[test]
    fn differences_not_printed_are_counted_with_the_reason() {
        let totals = json!({ "summary": { "same": 1, "different": 30, "not_comparable": 0 } });
        assert_eq!(rest(&totals, 30, 1000), None);
        let limited = rest(&totals, 20, 20).unwrap();
        assert_eq!(limited, "10 more differences not printed: --limit");
        let full = rest(&totals, 29, 1000).unwrap();
        assert!(full.starts_with("1 more difference not printed: the answer of the store has"));
        let text = summary(&totals, Some(&full));
        assert!(text.starts_with(&full), "{text}");
    }
}
