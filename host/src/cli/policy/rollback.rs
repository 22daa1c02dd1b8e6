//! `statehouse policy rollback`: reactivates the previous policy.

use hyper::Method;

use super::words;
use crate::cli::output::{Exit, Failure};
use crate::cli::store::Store;

/// Reactivate the previously active policy, from the next request on
///
/// Repeating it goes further back, in the end to the built-in policy. A policy that was rolled back
/// stays loaded, and can be promoted again.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  statehouse policy rollback
  statehouse policy rollback --json")]
pub(super) struct Args {
    #[command(flatten)]
    store: Store,
}

pub(super) async fn run(args: &Args) -> Result<Exit, Failure> {
    let view = args.store.ask(Method::POST, "/v1/rollback").await?;
    (args.store).print(&view, |view| {
        format!("rolled back to {}\n", words::policy(view))
    })
}
