//! `statehouse history`: prints the recorded changes of a key.

use std::ffi::OsString;
use std::os::unix::ffi::OsStrExt;

use hyper::Method;
use serde_json::Value as Json;

use super::data::{self, Node};
use super::output::{Exit, Failure, emit_either, one_line, printable};
use super::store::{Found, Reach};
use crate::past;
use statehouse_config::percent;
use statehouse_offline::Past;

/// Print the recorded changes of a key, the newest first
///
/// Reads the data directory, on this machine and without a lock, even while a server runs. With
/// --admin it asks a running store on another machine. The server's --history-retention and
/// --history-bytes decide how far back the history reaches; the last line reports it. Exit code 1
/// if nothing is known of the key.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  statehouse history room/temperature
  statehouse history room/temperature --limit 3 --data /var/lib/statehouse
  statehouse history room/temperature --admin https://plant7:8443 --user anna \\
    --password-file anna.pw --ca plant7.crt
  statehouse history room/temperature --json | jq -r 'select(.event == \"set\") | .value'")]
pub(super) struct Args {
    /// The key: any bytes but NUL
    key: OsString,

    /// Print at most this many changes, the latest ones
    #[arg(long, value_name = "N", default_value_t = 100, value_parser = clap::value_parser!(u32).range(1..))]
    limit: u32,

    /// Print a JSON object for each change, one per line; bytes that are not UTF-8 as {"base64":
    /// ...}
    #[arg(long)]
    json: bool,

    #[command(flatten)]
    node: Node,

    #[command(flatten)]
    reach: Reach,
}

pub(super) async fn run(args: &Args) -> Result<Exit, Failure> {
    let key = args.key.as_bytes();
    let answer = match args.reach.find()? {
        Found::Data(data) => {
            let past = Past::open(&data)?;
            data::notice_end(&past, u64::MAX)?;
            let history = past.history(key, args.limit as usize, usize::MAX)?;
            past::history(key, &history, &args.node.name, usize::MAX)
        }
        Found::Admin(asked) => {
            let key = percent::encode(key);
            let path = format!("/v1/history?key={key}&limit={}", args.limit);
            let answer = asked.send(Method::GET, &path, Vec::new()).await;
            answer.map_err(Failure::of_question)?
        }
    };
    let changes = answer["changes"].as_array().map_or(&[][..], Vec::as_slice);
    let beginning = &answer["beginning"];
    for change in changes {
        if !emit_either(args.json, || change.clone(), || in_words(change))? {
            return Ok(Exit::Done);
        }
    }
    emit_either(
        args.json,
        || beginning.clone(),
        || reach(beginning, key, changes.len() as u64, args.limit.into()),
    )?;
    let is_known = count(beginning) > 0 || !beginning["before"].is_null();
    Ok(Exit::of(is_known))
}

fn in_words(change: &Json) -> String {
    let text = |name: &str| data::text(&change[name]);
    let mut words = format!("{} {}  {}\n", text("event"), text("version"), text("time"));
    let mut line = |name: &str, value: &str| words.push_str(&format!("    {name:<8} {value}\n"));
    if let Some(bytes) = change["bytes"].as_u64() {
        let size = data::count(bytes, "byte");
        let value = data::excerpt_of(&change["value"]);
        line("value", &format!("{size}: {value}"));
    }
    for name in ["client", "user"] {
        if change[name].is_string() {
            line(name, &text(name));
        }
    }
    if change["policy"].is_object() {
        line("policy", &data::policy_of(&change["policy"]));
    }
    for (field, name) in [("fencing_token", "fence"), ("expires", "expires")] {
        if change[field].is_string() {
            line(name, &text(field));
        }
    }
    words
}

/// The number of all recorded changes.
fn count(beginning: &Json) -> u64 {
    beginning["changes"].as_u64().unwrap_or_default()
}

/// How far back the history reaches.
fn reach(beginning: &Json, key: &[u8], shown: u64, limit: u64) -> String {
    let number = count(beginning);
    let changes = data::count(number, "change");
    let since = match beginning["since"].is_null() {
        true => "since the store began".to_owned(),
        false => format!("since {}", data::text(&beginning["since"])),
    };
    let why = match shown < limit {
        true => "the answer of the store has no room for more",
        false => "--limit",
    };
    let older = match number.saturating_sub(shown) {
        0 => String::new(),
        left => format!(" ({} not shown: {why})", data::count(left, "older one")),
    };
    let damage = beginning["damage"].as_str();
    let damage = damage.map(|it| format!("; earlier changes cannot be read: {}", one_line(it)));
    let before = &beginning["before"];
    let before = match (before["bytes"].as_u64(), beginning["since"].is_null()) {
        (Some(bytes), _) => format!(
            "; before that it held {} of version {}",
            data::count(bytes, "byte"),
            data::text(&before["version"])
        ),
        (None, false) if damage.is_some() => String::new(),
        (None, false) => "; earlier changes are not kept".to_owned(),
        (None, true) => String::new(),
    };
    let damage = damage.unwrap_or_default();
    format!(
        "{changes} of {} {since}{older}{before}{damage}\n",
        printable(key)
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn reach_names_what_is_not_shown_and_not_kept() {
        let mut beginning = json!({ "changes": 9, "since": null, "before": null });
        let text = |beginning: &Json, shown| reach(beginning, b"k", shown, 4);
        let limited = "9 changes of k since the store began (5 older ones not shown: --limit)\n";
        assert_eq!(text(&beginning, 4), limited);
        let full = text(&beginning, 3);
        assert!(
            full.contains("6 older ones not shown: the answer of the store"),
            "{full}"
        );
        beginning["since"] = json!("2026-11-21T03:00:00Z");
        // A key that was absent when the history began may have been removed shortly before.
        for is_absent in [false, true] {
            beginning["absent_before"] = json!(is_absent);
            let removed = text(&beginning, 9);
            assert!(
                removed.ends_with("; earlier changes are not kept\n"),
                "{removed}"
            );
        }
        beginning["damage"] = json!("000000000003.log is damaged at byte 64: a frame is damaged");
        let damaged = text(&beginning, 9);
        let end = "; earlier changes cannot be read: 000000000003.log is damaged at byte 64: a frame is damaged\n";
        assert!(
            damaged.ends_with(end) && !damaged.contains("not kept"),
            "{damaged}"
        );
    }
}
