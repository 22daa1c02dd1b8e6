//! `statehouse policy sign`: adds a signature to a module.

use std::fs;
use std::path::PathBuf;

use serde_json::json;

use crate::cli::output::{Exit, Failure, emit_either};
use crate::policies::delivery;
use statehouse_testkit::read_policy;

/// Sign a policy, so that stores can verify its origin
///
/// The signature is a section of the module, in the format of wasmsign2; an existing one is
/// replaced. A policy is identified by the digest of its file, so signing changes the digest.
/// Signing the same module with the same key always gives the same file.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  statehouse policy sign --key gateway.key rule.wasm -o rule.signed.wasm
  statehouse policy load rule.signed.wasm")]
pub(super) struct Args {
    /// The secret key, as `policy keygen` writes it; wasmsign2's format, DER or PEM
    #[arg(long, value_name = "FILE", env = "STATEHOUSE_POLICY_KEY")]
    key: PathBuf,

    /// The module or component
    #[arg(value_name = "FILE")]
    module: PathBuf,

    /// The output file
    #[arg(short, long, value_name = "FILE")]
    output: PathBuf,

    /// Print a JSON object
    #[arg(long)]
    json: bool,
}

pub(super) fn run(args: &Args) -> Result<Exit, Failure> {
    let key = delivery::secret_key(&args.key).map_err(|error| Failure::usage(error.to_string()))?;
    let module = read_policy(&args.module)?;
    let signed = delivery::sign(&module, &key).map_err(|error| {
        Failure::usage(format!(
            "{} cannot be signed: {error}",
            args.module.display()
        ))
    })?;
    fs::write(&args.output, &signed).map_err(|error| {
        Failure::usage(format!("cannot write {}: {error}", args.output.display()))
    })?;
    let (file, digest) = (args.output.display(), blake3::hash(&signed));
    let id = delivery::id(&delivery::public(&key));
    emit_either(
        args.json,
        || json!({ "file": file.to_string(), "digest": format!("blake3:{digest}"), "key": id }),
        || format!("signed {file} with the key {id}\nblake3:{digest}\n"),
    )?;
    Ok(Exit::Done)
}
