//! `statehouse policy unload`: unloads a policy that is not in use.

use hyper::Method;

use super::words;
use crate::cli::output::{Exit, Failure, printable};
use crate::cli::store::Store;

/// Unload a policy
///
/// Refused for a policy that is active, canary or shadow, or has a route. `statehouse policy
/// rollback` skips an unloaded policy, and leads to the one that was active before it, or to the
/// built-in one. Its file is kept as long as a request that it handled may be redelivered.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  statehouse policy unload rule@1.0.0")]
pub(super) struct Args {
    /// The beginning of its digest (at least 6 digits), NAME, NAME@VERSION, or NAME@DIGEST
    #[arg(value_name = "WHICH")]
    which: String,

    #[command(flatten)]
    store: Store,
}

pub(super) async fn run(args: &Args) -> Result<Exit, Failure> {
    let path = format!("/v1/policies/{}", words::selector(&args.which)?);
    let done = args.store.ask(Method::DELETE, &path).await?;
    (args.store).print(&done, |_| {
        format!("unloaded {}\n", printable(args.which.as_bytes()))
    })
}
