//! `statehouse policy shadow`: compares a candidate with the active policy on live requests.

use hyper::Method;
use serde_json::json;

use crate::cli::output::{Exit, Failure, printable};
use crate::cli::store::Store;

/// Compare a loaded policy with the active one, on live requests
///
/// The candidate re-executes requests on their recorded read sets, on a separate thread. The host
/// compares its responses and writes, and discards them. `statehouse policy diff` shows the
/// differences.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  statehouse policy shadow rule@2.0.0
  statehouse policy shadow rule@2.0.0 --sample 10%
  statehouse policy diff
  statehouse policy shadow --off")]
pub(super) struct Args {
    /// The beginning of its digest (at least 6 digits), NAME, NAME@VERSION, NAME@DIGEST, or
    /// `builtin`
    #[arg(
        value_name = "WHICH",
        required_unless_present = "off",
        conflicts_with = "off"
    )]
    which: Option<String>,

    /// The percentage of requests to compare
    #[arg(long, value_name = "PERCENT", default_value = "100%", value_parser = per_mille)]
    sample: u16,

    /// End the comparison
    #[arg(long)]
    off: bool,

    #[command(flatten)]
    store: Store,
}

pub(super) async fn run(args: &Args) -> Result<Exit, Failure> {
    let Some(which) = &args.which else {
        let done = args.store.ask(Method::DELETE, "/v1/shadow").await?;
        return (args.store).print(&done, |_| "the comparison has ended\n".to_owned());
    };
    let body = json!({ "policy": which, "per_mille": args.sample });
    let done = args.store.put("/v1/shadow", &body).await?;
    (args.store).print(&done, |_| {
        format!(
            "{} is compared on {} of 1000 requests: `statehouse policy diff` shows how\n",
            printable(which.as_bytes()),
            args.sample
        )
    })
}

/// Parses a percentage with at most one decimal into thousandths.
fn per_mille(text: &str) -> Result<u16, String> {
    let number = text.strip_suffix('%').unwrap_or(text);
    let (whole, tenths) = number.split_once('.').unwrap_or((number, "0"));
    let digits = |text: &str| -> Option<u16> {
        let all = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
        all.then(|| text.parse().ok()).flatten()
    };
    let thousandths = digits(whole)
        .filter(|whole| *whole <= 100)
        .zip(digits(tenths).filter(|_| tenths.len() == 1))
        .map(|(whole, tenths)| whole * 10 + tenths);
    match thousandths {
        Some(it @ 1..=1000) => Ok(it),
        _ => Err("write a share from 0.1% to 100%; to end the comparison, use --off".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_are_thousandths() {
        for (text, share) in [
            ("10%", 100),
            ("10", 100),
            ("0.1%", 1),
            ("100%", 1000),
            ("99.9", 999),
        ] {
            assert_eq!(per_mille(text), Ok(share), "{text}");
        }
        for text in [
            "0", "0%", "", "%", "101%", "100.1", "1.23%", "-1", "1.", ".5", "9999999", "+1",
        ] {
            assert!(per_mille(text).is_err(), "{text}");
        }
    }
}
