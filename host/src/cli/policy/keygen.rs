//! `statehouse policy keygen`: a new pair of keys.

use std::fs::OpenOptions;
use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use serde_json::json;

use crate::cli::output::{Exit, Failure, emit, emit_json};
use crate::ship;

/// Make a pair of keys: one that signs policies, one that stores know them by
///
/// Writes PREFIX.key, which signs, readable by you alone, and PREFIX.pub. Both are in wasmsign2's own format (Ed25519),
/// so that its tool signs and checks with them too. Files that are there already are left alone.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  statehouse policy keygen gateway
  statehouse serve --trusted-keys gateway.pub")]
pub(super) struct Args {
    /// Where the two files go, without the ending
    #[arg(value_name = "PREFIX")]
    prefix: PathBuf,

    /// Print a JSON object
    #[arg(long)]
    json: bool,
}

pub(super) fn run(args: &Args) -> Result<Exit, Failure> {
    let file = |ending: &str| {
        let mut name = args.prefix.clone().into_os_string();
        name.push(ending);
        PathBuf::from(name)
    };
    let (secret, public) = (file(".key"), file(".pub"));
    if public.exists() {
        return Err(taken(&public));
    }
    let pair = ship::generate();
    create(&secret, 0o600, &pair.sk.to_bytes())?;
    create(&public, 0o644, &pair.pk.to_bytes())?;
    let digits = ship::digits(&pair.pk);
    let id = ship::id(&pair.pk);
    if args.json {
        emit_json(&json!({
            "secret": secret.display().to_string(),
            "public": public.display().to_string(),
            "trusted_key": digits,
            "id": id,
        }))?;
    } else {
        emit(
            format!(
                "{} signs: keep it where policies are made\n{} is for the stores: --trusted-keys {}, or in the configuration\ntrusted_keys = [\"{digits}\"]\nkey id {id}\n",
                secret.display(),
                public.display(),
                public.display(),
            )
            .as_bytes(),
        )?;
    }
    Ok(Exit::Done)
}

/// A new file. One that is there is not written over: it may be the only key that stores know.
fn create(path: &Path, mode: u32, bytes: &[u8]) -> Result<(), Failure> {
    let mut file = OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(mode)
        .open(path)
        .map_err(|error| match error.kind() {
            std::io::ErrorKind::AlreadyExists => taken(path),
            _ => Failure::usage(format!("cannot write {}: {error}", path.display())),
        })?;
    file.write_all(bytes).and_then(|()| file.sync_all())?;
    Ok(())
}

fn taken(path: &Path) -> Failure {
    Failure::usage(format!(
        "{} is there already, and may be a key that stores know: name another prefix, or remove it first",
        path.display()
    ))
}
