//! `statehouse policy load`: loads a policy file into a running store.

use std::path::PathBuf;

use hyper::Method;

use super::words;
use crate::cli::output::{Exit, Failure};
use crate::cli::store::Store;
use statehouse_testkit::read_policy;

/// Load a policy into a running store
///
/// The store compiles and tests the policy and keeps its file. The policy answers requests only
/// after it is promoted, or named as a canary or for a route. Requests continue during the load.
/// Loading a loaded policy again is no error.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  statehouse policy load rule.wasm
  statehouse policy load rule.wasm --promote")]
pub(super) struct Args {
    /// A WebAssembly component, or a core module built with the bindings of wit/policy.wit
    #[arg(value_name = "FILE")]
    module: PathBuf,

    /// Make it the active policy at once
    #[arg(long)]
    promote: bool,

    #[command(flatten)]
    store: Store,
}

pub(super) async fn run(args: &Args) -> Result<Exit, Failure> {
    let module = read_policy(&args.module)?;
    // Access is checked by a small request first: a client that is still sending megabytes may miss
    // the refusal.
    args.store.ask(Method::GET, "/v1/policies").await?;
    let mut view = (args.store)
        .send(Method::POST, "/v1/policies", module)
        .await?;
    if args.promote {
        let path = format!("/v1/policies/{}/promote", words::text(&view["digest"]));
        view = args.store.ask(Method::POST, &path).await?;
    }
    let what = if args.promote { "promoted" } else { "loaded" };
    (args.store).print(&view, |view| format!("{what} {}\n", words::policy(view)))
}
