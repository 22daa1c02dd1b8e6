//! `statehouse policy logs`: prints the log lines of a running store's policies as they are
//! written.

use std::time::Duration;

use hyper::Method;

use super::words;
use crate::admin::{Logged, LoggedLine};
use crate::cli::outage::Outage;
use crate::cli::output::{Exit, Failure, emit_either, one_line, printable};
use crate::cli::store::{Store, unexpected};
use crate::cli::time::utc;
use serde_json::json;

/// The pause before it asks a store again that does not answer.
const PAUSE: Duration = Duration::from_secs(1);

/// Print the log lines of policies as they are written
///
/// Begins with the recent lines that the store still has. One line per line of a policy, separated
/// by tabs: time, level, policy, text. Control characters are escaped. The store keeps the last 512
/// lines of all policies together, of at most 1 KiB each. A line `lost` with a number means that as
/// many lines were replaced before this command could read them. After a restart of the store, or
/// if it did not answer, begins again with its recent lines. Ends on Ctrl-C.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  statehouse policy logs
  statehouse policy logs set-point --json
  statehouse policy logs --recent          # the lines so far")]
pub(super) struct Args {
    /// Only the lines of this policy: its name (of all its versions), NAME@VERSION, NAME@DIGEST, the
    /// beginning of its digest, or `builtin`
    ///
    /// The policy must be loaded or have recent lines. Versions that are loaded later are followed,
    /// too.
    #[arg(value_name = "NAME")]
    policy: Option<String>,

    /// Print the recent lines, and exit
    #[arg(long)]
    recent: bool,

    #[command(flatten)]
    store: Store,
}

pub(super) async fn run(args: &Args) -> Result<Exit, Failure> {
    let of = args.policy.as_deref().map(words::selector).transpose()?;
    let of = of.map(|it| format!("policy={it}"));
    let mut from = None;
    let mut outage = Outage::default();
    let interrupted = tokio::signal::ctrl_c();
    tokio::pin!(interrupted);
    loop {
        let from_now = from.map(|from: u64| format!("from={from}"));
        let query: Vec<String> = from_now.into_iter().chain(of.clone()).collect();
        let path = format!("/v1/log?{}", query.join("&"));
        let answer = tokio::select! {
            biased;
            _ = &mut interrupted, if !args.recent => return Ok(Exit::Done),
            answer = args.store.ask(Method::GET, &path) => answer,
        };
        let Some(answer) = outage.note(answer)? else {
            // A store that has started again counts its lines from 0 again.
            from = None;
            tokio::select! {
                biased;
                _ = &mut interrupted => return Ok(Exit::Done),
                () = tokio::time::sleep(PAUSE) => {}
            }
            continue;
        };
        let logged: Logged = serde_json::from_value(answer).map_err(unexpected)?;
        if !print(&logged, args.store.json)? || args.recent {
            return Ok(Exit::Done);
        }
        from = Some(logged.next);
    }
}

/// Prints a response. Returns false if stdout was closed.
fn print(logged: &Logged, as_json: bool) -> Result<bool, Failure> {
    let lost = logged.lost;
    if lost > 0
        && !emit_either(
            as_json,
            || json!({ "lost": lost }),
            || format!("lost\t{lost}\n"),
        )?
    {
        return Ok(false);
    }
    for it in &logged.lines {
        let in_json = || json!({ "time": utc(it.at_ms), "level": it.level, "policy": it.policy, "digest": it.digest, "text": it.text });
        if !emit_either(as_json, in_json, || line(it))? {
            return Ok(false);
        }
    }
    Ok(true)
}

fn line(it: &LoggedLine) -> String {
    let name = |text: &str| printable(text.as_bytes());
    let (level, policy) = (name(&it.level), name(&it.policy));
    format!(
        "{}\t{level}\t{policy}\t{}\n",
        utc(it.at_ms),
        one_line(&it.text)
    )
}
