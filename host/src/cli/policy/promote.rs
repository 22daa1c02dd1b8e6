//! `statehouse policy promote`: makes another policy active.

use hyper::Method;

use super::words;
use crate::cli::output::{Exit, Failure};
use crate::cli::store::Store;

/// Make a loaded policy the active one, from the next request on
///
/// No request is lost, answered twice or handled by two policies. The previous policy stays loaded
/// for `statehouse policy rollback`, unless it is unloaded. If the promoted policy was the canary
/// or the shadow, that ends.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  statehouse policy promote rule@2.0.0
  statehouse policy promote 5f3c0a
  statehouse policy promote builtin")]
pub(super) struct Args {
    /// The beginning of its digest (at least 6 digits), NAME, NAME@VERSION, NAME@DIGEST, or
    /// `builtin`
    #[arg(value_name = "WHICH")]
    which: String,

    #[command(flatten)]
    store: Store,
}

pub(super) async fn run(args: &Args) -> Result<Exit, Failure> {
    let path = format!("/v1/policies/{}/promote", words::selector(&args.which)?);
    let view = args.store.ask(Method::POST, &path).await?;
    (args.store).print(&view, |view| format!("promoted {}\n", words::policy(view)))
}
