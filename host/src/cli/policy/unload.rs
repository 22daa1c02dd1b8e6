//! `statehouse policy unload`: a policy that nobody needs goes.

use hyper::Method;

use crate::admin::encode;
use crate::cli::output::{Exit, Failure, emit, emit_json, printable};
use crate::cli::store::Store;

/// Hold a policy ready no more
///
/// Refused for one that answers, is compared, or owns a route. Its file is kept for as long as a request that it handled
/// may come again.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  statehouse policy unload rule@1.0.0")]
pub(super) struct Args {
    /// The beginning of its digest (at least 6 digits), NAME, or NAME@VERSION
    #[arg(value_name = "WHICH")]
    which: String,

    #[command(flatten)]
    store: Store,
}

pub(super) async fn run(args: &Args) -> Result<Exit, Failure> {
    let path = format!("/v1/policies/{}", encode(args.which.as_bytes()));
    let done = args.store.ask(Method::DELETE, &path).await?;
    if args.store.json {
        emit_json(&done)?;
    } else {
        emit(format!("unloaded {}\n", printable(args.which.as_bytes())).as_bytes())?;
    }
    Ok(Exit::Done)
}
