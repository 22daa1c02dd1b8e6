//! `statehouse policy promote`: another policy answers.

use hyper::Method;

use super::words;
use crate::admin::encode;
use crate::cli::output::{Exit, Failure, emit, emit_json};
use crate::cli::store::Store;

/// Let a loaded policy answer, from the next request on
///
/// No request is lost, answered twice or answered by two policies. The policy before it is kept ready: `statehouse policy
/// rollback` goes back to it. A canary or a shadow of the promoted policy ends.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  statehouse policy promote rule@2.0.0
  statehouse policy promote 5f3c0a
  statehouse policy promote builtin")]
pub(super) struct Args {
    /// The beginning of its digest (at least 6 digits), NAME, NAME@VERSION, or `builtin`
    #[arg(value_name = "WHICH")]
    which: String,

    #[command(flatten)]
    store: Store,
}

pub(super) async fn run(args: &Args) -> Result<Exit, Failure> {
    let path = format!("/v1/policies/{}/promote", encode(args.which.as_bytes()));
    let view = args.store.ask(Method::POST, &path).await?;
    if args.store.json {
        emit_json(&view)?;
    } else {
        emit(format!("promoted {}\n", words::policy(&view)).as_bytes())?;
    }
    Ok(Exit::Done)
}
