//! `statehouse policy diff`: shows how the shadow compares with the active policy.

use hyper::Method;
use serde_json::Value as Json;

use super::words::{message, number, policy, text};
use crate::cli::output::{Exit, Failure, notice};
use crate::cli::store::Store;
use crate::cli::time::utc;

/// Show how the shadow compares with the active policy
///
/// Counts equal and different results, and shows examples of different ones. If no comparison is
/// running, it shows the last one. The counts begin with the comparison, and again when the store
/// restarts or another policy becomes active. Exit code 1 if an answer or an effect differs, if the
/// candidate failed, or if nothing was compared yet.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  statehouse policy shadow rule@2.0.0
  statehouse policy diff
  statehouse policy diff --json")]
pub(super) struct Args {
    #[command(flatten)]
    store: Store,
}

pub(super) async fn run(args: &Args) -> Result<Exit, Failure> {
    let report = args.store.ask(Method::GET, "/v1/shadow").await?;
    args.store.print(&report, words)?;
    let differs = ["different_answer", "different_effect", "failed"];
    let count = |name: &str| report[name].as_u64().unwrap_or_default();
    // A script must not take this for equal results.
    if count("compared") == 0 {
        notice(
            "nothing was compared yet; counts begin with the comparison, and again when the store restarts or another policy becomes active",
        );
        return Ok(Exit::Negative);
    }
    Ok(Exit::of(differs.into_iter().all(|name| count(name) == 0)))
}

fn words(report: &Json) -> String {
    let mut out = String::new();
    let examples = report["examples"].as_array();
    for example in examples.into_iter().flatten() {
        out.push_str(&self::example(example));
    }
    out.push_str(&format!(
        "candidate {}\nbeside    {}\n\n",
        policy(&report["policy"]),
        policy(&report["against"])
    ));
    for (name, label) in [
        ("compared", "compared"),
        ("same", "same"),
        ("different_answer", "different answers"),
        ("different_effect", "different effects"),
        ("failed", "failed"),
        ("not_comparable", "not comparable"),
        ("skipped", "skipped"),
    ] {
        out.push_str(&format!("{label:<18}{:>10}\n", number(&report[name])));
    }
    for (reason, count) in report["reasons"].as_object().into_iter().flatten() {
        out.push_str(&format!(
            "not comparable: {}, because {reason}\n",
            number(count)
        ));
    }
    out
}

fn example(it: &Json) -> String {
    let arguments = it["request"].as_array().into_iter().flatten();
    let arguments: Vec<String> = arguments.map(message).collect();
    let mut out = format!(
        "{}  {}  client {}\n    request   {}\n",
        text(&it["kind"]),
        utc(it["now_ms"].as_u64().unwrap_or_default()),
        message(&it["client"]),
        arguments.join(" ")
    );
    for (name, label) in [("active", "active"), ("candidate", "candidate")] {
        let ran = &it[name];
        let mut line = match ran["failure"].as_str() {
            Some(_) => format!("fails: {}", message(&ran["failure"])),
            None => message(&ran["answer"]),
        };
        if ran["version"].is_string() {
            line.push_str(&format!(", version {}", text(&ran["version"])));
        }
        out.push_str(&format!("    {label:<9} {line}\n"));
        for write in ran["writes"].as_array().into_iter().flatten() {
            out.push_str(&format!("              {}\n", message(write)));
        }
    }
    out
}
