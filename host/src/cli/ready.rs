//! `statehouse ready`: whether a running store can answer requests.

use std::time::{Duration, Instant};

use serde_json::json;

use super::output::{Exit, Failure};
use super::store::Store;
use statehouse_config::Span;

/// How long to wait for the answer of a host. A store that answers later is not ready, and health
/// checks of containers give up after five seconds.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(3);

/// The pause between two questions.
const PAUSE: Duration = Duration::from_millis(100);

/// Say whether a running store can answer requests, for health checks and scripts
///
/// Asks /readyz of the admin API, which needs no login. Exit code 0 if the store is ready; 3 with
/// the reason if it is not, or if none answers within three seconds for each address. A store that
/// is up but not ready refuses writes because its disk is full, has a system clock that is more
/// than a second behind the store's time, or waits for its broker or its cluster. Of the hosts of a
/// cluster, one that is ready is enough.
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
        match args.store.probe("/readyz", ANSWER_TIMEOUT).await {
            Ok(()) => break,
            Err(failure) if failure.is_usage() || start.elapsed() >= wait => return Err(failure),
            Err(_) => tokio::time::sleep(PAUSE).await,
        }
    }
    let ready = json!({ "ready": true });
    args.store.print(&ready, |_| "ready\n".to_owned())
}
