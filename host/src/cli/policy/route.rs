//! `statehouse policy route`: assigns a policy to some keys.

use std::ffi::OsString;
use std::os::unix::ffi::OsStrExt;

use hyper::Method;
use serde_json::json;

use crate::cli::output::{Exit, Failure, notice, printable};
use crate::cli::store::Store;
use statehouse_config::percent;
use statehouse_core::limits;
use statehouse_core::policy::AssignmentError;

/// Let a policy answer requests for keys that begin with PREFIX
///
/// The policy can write only keys under its prefixes, and it formats the notifications of these
/// keys when they expire. The longest matching prefix applies. If there are routes, the store asks
/// the built-in policy for the key of every request.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  statehouse policy route limits/ rate-limit
  statehouse policy route limits/ --off")]
pub(super) struct Args {
    /// The prefix of the keys, without a `*`: any bytes but NUL
    #[arg(value_name = "PREFIX")]
    prefix: OsString,

    /// The beginning of its digest (at least 6 digits), NAME, NAME@VERSION, NAME@DIGEST, or
    /// `builtin`
    #[arg(
        value_name = "WHICH",
        required_unless_present = "off",
        conflicts_with = "off"
    )]
    which: Option<String>,

    /// End the route
    #[arg(long)]
    off: bool,

    #[command(flatten)]
    store: Store,
}

pub(super) async fn run(args: &Args) -> Result<Exit, Failure> {
    let prefix = args.prefix.as_bytes();
    if !(1..=limits::ROUTE_PREFIX_BYTES_MAX).contains(&prefix.len()) {
        // With a long one, the URL would be too long for the admin API.
        return Err(Failure::refused(AssignmentError::Prefix.to_string()));
    }
    let path = format!("/v1/routes?prefix={}", percent::encode(prefix));
    let prefix = printable(prefix);
    if prefix.ends_with('*') {
        notice("PREFIX is no glob: only keys that contain its `*` begin with it");
    }
    let Some(which) = &args.which else {
        let done = args.store.ask(Method::DELETE, &path).await?;
        return (args.store).print(&done, |_| format!("keys under {prefix} are as any other\n"));
    };
    let done = args.store.put(&path, &json!({ "policy": which })).await?;
    (args.store).print(&done, |_| {
        let which = printable(which.as_bytes());
        format!("{which} answers for keys under {prefix}\n")
    })
}
