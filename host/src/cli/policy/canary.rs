//! `statehouse policy canary`: lets a candidate answer some requests.

use hyper::Method;
use serde_json::{Value as Json, json};

use crate::cli::output::{Exit, Failure, printable};
use crate::cli::store::Store;

/// Let a loaded policy answer some clients, or requests for some keys
///
/// With --percent the same clients are always chosen, regardless of their requests. Writes of a
/// canary are ordinary writes. A route outranks the canary. Patterns support `*`, `?` and `[a-z]`;
/// `\[` stands for a bracket.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  statehouse policy canary rule@2.0.0 --percent 5
  statehouse policy canary rule@2.0.0 --clients 'test-*'
  statehouse policy canary rule@2.0.0 --keys 'lab/*'
  statehouse policy canary --off")]
pub(super) struct Args {
    /// The beginning of its digest (at least 6 digits), NAME, NAME@VERSION, NAME@DIGEST, or
    /// `builtin`
    #[arg(
        value_name = "WHICH",
        required_unless_present = "off",
        conflicts_with = "off",
        requires = "rule"
    )]
    which: Option<String>,

    /// Clients whose id matches this pattern
    #[arg(long, value_name = "GLOB", group = "rule")]
    clients: Option<String>,

    /// Requests for keys that match this pattern
    #[arg(long, value_name = "GLOB", group = "rule")]
    keys: Option<String>,

    /// The percentage of clients
    #[arg(long, value_name = "N", group = "rule", value_parser = percentage)]
    percent: Option<u8>,

    /// End the canary
    #[arg(long, conflicts_with = "rule")]
    off: bool,

    #[command(flatten)]
    store: Store,
}

impl Args {
    fn rule(&self) -> Json {
        match (&self.clients, &self.keys, self.percent) {
            (Some(clients), ..) => json!({ "clients": clients }),
            (_, Some(keys), _) => json!({ "keys": keys }),
            (.., percent) => json!({ "percent": percent }),
        }
    }
}

fn percentage(text: &str) -> Result<u8, String> {
    match text.parse() {
        Ok(it @ 1..=100) => Ok(it),
        _ => Err("write a number from 1 to 100; to end the canary, use --off".to_owned()),
    }
}

pub(super) async fn run(args: &Args) -> Result<Exit, Failure> {
    let Some(which) = &args.which else {
        let done = args.store.ask(Method::DELETE, "/v1/canary").await?;
        return (args.store).print(&done, |_| "the canary has ended\n".to_owned());
    };
    let body = json!({ "policy": which, "rule": args.rule() });
    let done = args.store.put("/v1/canary", &body).await?;
    (args.store).print(&done, |_| {
        format!("{} answers as a canary\n", printable(which.as_bytes()))
    })
}
