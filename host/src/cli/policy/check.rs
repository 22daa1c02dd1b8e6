//! `statehouse policy check`: checks whether a file is a policy, and measures its commands.

use std::path::PathBuf;

use serde_json::{Value as Json, json};

use crate::cli::output::{Exit, Failure, emit_either, one_line, printable};
use crate::policies::delivery;
use statehouse_testkit::check::{Checked, Kind, check};
use statehouse_testkit::read_policy;

/// Check whether a file is a policy that this store can run, and measure its commands
///
/// Shows its imports and exports, the signing key that it names, the time to compile and to start
/// it, and the fuel of a request for each of its commands. Fuel is the same on every machine; times
/// are those of this one. The signature is not verified here: `serve` verifies it with its trusted
/// keys.
///
/// Exit code 1 if it is not a policy, or if no store would load it, for example because it fails at
/// every request: the output says why and what to do.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  statehouse policy check setpoint.wasm
  statehouse policy check builtin --json")]
pub(in crate::cli) struct Args {
    /// The policy (.wasm component or core module), or `builtin` for the standard one
    policy: PathBuf,

    /// Print a JSON object
    #[arg(long)]
    json: bool,
}

pub(super) fn run(args: &Args) -> Result<Exit, Failure> {
    let file = read_policy(&args.policy).map_err(super::no_policy)?;
    let signers = delivery::signers(&file);
    let checked = check(&file);
    emit_either(
        args.json,
        || json(&checked, signers.as_deref()),
        || text(&checked, signers.as_deref()),
    )?;
    Ok(Exit::of(checked.policy.is_ok()))
}

pub(super) fn text(it: &Checked, signers: Option<&[String]>) -> String {
    let mut text = String::new();
    let mut row = |name: &str, value: String| {
        text.push_str(&format!("{name:<10} {}\n", one_line(&value)));
    };
    let own = "statehouse:policy/";
    let interfaces = |names: &[String]| match names {
        [] => "nothing".to_owned(),
        _ => names.join(", ").replace(own, ""),
    };
    match &it.policy {
        Ok(fit) => row("policy", format!("{} {}", fit.name, fit.version)),
        Err(wrong) => {
            row("refused", wrong.what.clone());
            for advice in &wrong.advice {
                row("", advice.clone());
            }
        }
    }
    let kind = match it.kind {
        Kind::Component => "component",
        Kind::Module => "core module, which the host turns into a component",
        Kind::Other => "not WebAssembly",
    };
    row("file", format!("{} bytes, {kind}", it.bytes));
    row("digest", format!("blake3:{}", it.digest));
    row(
        "signed",
        match signers {
            None => "no".into(),
            Some([]) => "but the key is unknown".into(),
            Some(keys) => format!("by key {}, it says", keys.join(", ")),
        },
    );
    if it.kind != Kind::Other {
        row("imports", interfaces(&it.imports));
        row("exports", interfaces(&it.exports));
    }
    if let Ok(fit) = &it.policy {
        row("compiles", format!("in {:.1?}", fit.compile));
        row(
            "starts",
            format!(
                "in {:.1?}, with {} KiB of memory",
                fit.start,
                fit.memory_bytes >> 10
            ),
        );
        text.push_str(&format!(
            "\n{:<14}{:>10}{:>12}  answer\n",
            "command", "fuel", "time"
        ));
        for cost in &fit.commands {
            let answer = match &cost.failure {
                None => cost.answer.clone(),
                Some(why) => format!("the policy failed: {}", one_line(why)),
            };
            text.push_str(&format!(
                "{:<14}{:>10}{:>12}  {answer}\n",
                printable(cost.command.as_bytes()),
                cost.fuel,
                format!("{:.1?}", cost.time),
            ));
        }
    }
    text
}

fn json(it: &Checked, signers: Option<&[String]>) -> Json {
    let micros = |time: std::time::Duration| time.as_nanos() as f64 / 1000.0;
    let mut json = json!({
        "fit": it.policy.is_ok(),
        "kind": match it.kind {
            Kind::Component => "component",
            Kind::Module => "module",
            Kind::Other => "other",
        },
        "bytes": it.bytes,
        "digest": format!("blake3:{}", it.digest),
        "signed_by": signers,
        "imports": it.imports,
        "exports": it.exports,
    });
    match &it.policy {
        Err(wrong) => {
            json["error"] = json!(wrong.what);
            json["advice"] = json!(wrong.advice);
        }
        Ok(fit) => {
            json["name"] = json!(fit.name);
            json["version"] = json!(fit.version);
            json["compile_us"] = json!(micros(fit.compile));
            json["start_us"] = json!(micros(fit.start));
            json["memory_bytes"] = json!(fit.memory_bytes);
            let commands = fit.commands.iter().map(|cost| {
                json!({
                    "command": cost.command,
                    "request": cost.request,
                    "answer": cost.answer,
                    "failure": cost.failure,
                    "fuel": cost.fuel,
                    "time_us": micros(cost.time),
                })
            });
            json["commands"] = commands.collect();
        }
    }
    json
}
