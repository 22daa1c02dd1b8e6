//! `statehouse policy bench`: measures the cost of requests, compared with the built-in policy.

use std::path::{Path, PathBuf};

use serde_json::{Value as Json, json};

use super::test;
use crate::cli::output::{Exit, Failure, emit_either, printable};
use statehouse_testkit::bench::{Cost, Measured, bench};
use statehouse_testkit::{KitError, read_policy};

/// Measure the cost of requests, compared with the built-in policy
///
/// Times are medians of 101 samples of the policy's call, including table accesses. Times of
/// requests from a transcript include all work of the store. Only the ratios apply to other
/// machines; fuel is the same on every machine. Exit code 1 if the file is no policy.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  statehouse policy bench setpoint.wasm
  statehouse policy bench new.wasm --against old.wasm
  statehouse policy bench setpoint.wasm --transcript tests/setpoint.txt --json")]
pub(in crate::cli) struct Args {
    /// The policy (.wasm component or core module)
    policy: PathBuf,

    /// Another policy to compare with
    #[arg(long, value_name = "FILE")]
    against: Option<PathBuf>,

    /// Also measure the requests of this transcript; may be given more than once
    #[arg(long, value_name = "FILE")]
    transcript: Vec<PathBuf>,

    /// Print a JSON object
    #[arg(long)]
    json: bool,
}

pub(super) fn run(args: &Args) -> Result<Exit, Failure> {
    let files: Vec<&Path> = [Some(&*args.policy), args.against.as_deref()]
        .into_iter()
        .flatten()
        .collect();
    let modules: Vec<Vec<u8>> = files
        .iter()
        .map(|path| read_policy(path))
        .collect::<Result<_, KitError>>()
        .map_err(super::no_policy)?;
    let transcripts: Vec<(String, String)> = args
        .transcript
        .iter()
        .map(|path| Ok((path.display().to_string(), test::read(path)?)))
        .collect::<Result<_, Failure>>()?;
    let measured = bench(&modules, &transcripts)?;
    emit_either(args.json, || json(&measured), || text(&measured, &files))?;
    Ok(Exit::Done)
}

/// A column for each policy, and a ratio for each but the built-in one, which is the last.
fn text(it: &Measured, files: &[&Path]) -> String {
    let mut text = String::new();
    for (path, policy) in files.iter().zip(&it.policies) {
        text.push_str(&format!(
            "{}: {}\n",
            path.display(),
            printable(policy.as_bytes())
        ));
    }
    let mut names: Vec<String> = files
        .iter()
        .map(|path| {
            path.file_stem()
                .unwrap_or_default()
                .to_string_lossy()
                .into_owned()
        })
        .collect();
    names.push("builtin".into());
    // Rows of transcripts are longer than the others: they name their file.
    let labels: Vec<String> = (it.rows.iter())
        .map(|row| printable(row.what.as_bytes()))
        .collect();
    let longest = labels.iter().map(|it| it.chars().count()).max();
    let width = longest.unwrap_or(0).max(24) + 2;
    text.push_str(&format!("\n{:<width$}", ""));
    for (at, name) in names.iter().enumerate() {
        let name: String = name.chars().take(20).collect();
        text.push_str(&format!("{name:>24}"));
        if at + 1 < names.len() {
            text.push_str(&format!("{:>8}", ""));
        }
    }
    text.push('\n');
    for (row, label) in it.rows.iter().zip(&labels) {
        text.push_str(&format!("{label:<width$}"));
        let built_in = row.costs.last().map_or(0, |cost| cost.ns);
        for (at, cost) in row.costs.iter().enumerate() {
            text.push_str(&format!("{:>24}", figure(cost)));
            if at + 1 < row.costs.len() {
                let ratio = match (cost.ns, built_in) {
                    (0, _) | (_, 0) => String::new(),
                    (ns, built_in) => format!("{:.1}x", ns as f64 / built_in as f64),
                };
                text.push_str(&format!("{ratio:>8}"));
            }
        }
        text.push('\n');
    }
    let failed = it.rows.iter().flat_map(|row| {
        let failures = row.costs.iter().zip(&names);
        failures.filter_map(|(cost, name)| {
            let why = cost.failure.as_ref()?;
            Some(format!("{name} failed at {}: {why}", row.what))
        })
    });
    for line in failed {
        text.push_str(&format!("\n{}\n", printable(line.as_bytes())));
    }
    text
}

fn figure(cost: &Cost) -> String {
    let time = match cost.ns {
        0 => return "-".into(),
        ns if ns < 10_000 => format!("{ns} ns"),
        ns => format!("{:.1} us", ns as f64 / 1000.0),
    };
    match cost.fuel {
        0 => time,
        fuel => format!("{time}, {fuel} fuel"),
    }
}

fn json(it: &Measured) -> Json {
    let rows = it.rows.iter().map(|row| {
        let costs = row.costs.iter().zip(&it.policies);
        let costs: Vec<Json> = costs
            .map(|(cost, policy)| {
                json!({ "policy": policy, "fuel": cost.fuel, "ns": cost.ns, "failure": cost.failure })
            })
            .collect();
        json!({ "what": row.what, "costs": costs })
    });
    json!({ "rows": rows.collect::<Vec<_>>() })
}
