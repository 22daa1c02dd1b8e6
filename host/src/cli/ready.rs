//! `statehouse ready`: whether a running store can answer requests.

use std::time::{Duration, Instant};

use hyper::Method;
use serde_json::json;

use super::output::{Exit, Failure};
use super::store::Store;
use statehouse_config::Span;

/// The pause between two questions.
const PAUSE: Duration = Duration::from_millis(100);

/// Say whether a running store can answer requests, for health checks and scripts
///
/// Asks /readyz of the admin API. Exit code 0 if the store is ready; 3 with the reason if it is
/// not, or if no store answers. A store that is up but not ready refuses writes because its disk
/// is full, or waits for its broker or its cluster.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  statehouse ready
  statehouse ready --wait 30s && statehouse set greeting hello")]
pub(super) struct Args {
    /// Ask again for this long until the store is ready
    #[arg(long, value_name = "TIME", default_value = "0ms")]
    wait: Span,

    #[command(flatten)]
    store: Store,
}

pub(super) async fn run(args: &Args) -> Result<Exit, Failure> {
    let wait = Duration::from_millis(args.wait.ms());
    let start = Instant::now();
    loop {
        let asked = args.store.ask(Method::GET, "/readyz").await;
        match asked {
            Ok(_) => break,
            Err(_) if start.elapsed() < wait => tokio::time::sleep(PAUSE).await,
            Err(failure) => return Err(failure),
        }
    }
    let ready = json!({ "ready": true });
    args.store.print(&ready, |_| "ready\n".to_owned())
}
