//! `statehouse policy keygen`: generates a key pair.

use std::fs::OpenOptions;
use std::io::Write;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use serde_json::json;

use crate::cli::output::{Exit, Failure, emit_either};
use crate::policies::delivery;

/// Generate a key pair: a secret key to sign policies, and a public key for stores
///
/// Writes the secret key PREFIX.key, readable by you alone, and the public key PREFIX.pub. Both are
/// in the format of wasmsign2 (Ed25519), whose tool can use them too. Existing files are not
/// overwritten.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  statehouse policy keygen gateway
  statehouse serve --trusted-keys gateway.pub")]
pub(super) struct Args {
    /// The path of both files, without the extension
    #[arg(value_name = "PREFIX")]
    prefix: PathBuf,

    /// Print a JSON object
    #[arg(long)]
    json: bool,
}

pub(super) fn run(args: &Args) -> Result<Exit, Failure> {
    let mut levels = args.prefix.as_os_str().as_bytes().rsplit(|it| *it == b'/');
    if let None | Some(b"" | b"." | b"..") = levels.next() {
        // The names of the files would begin with a dot.
        return Err(Failure::usage(format!(
            "{} does not end with a name for the files, as in keys/gateway",
            args.prefix.display()
        )));
    }
    let file = |ending: &str| {
        let mut name = args.prefix.clone().into_os_string();
        name.push(ending);
        PathBuf::from(name)
    };
    let (secret, public) = (file(".key"), file(".pub"));
    if public.exists() {
        return Err(taken(&public));
    }
    let pair = delivery::generate();
    create(&secret, 0o600, &pair.sk.to_bytes())?;
    create(&public, 0o644, &pair.pk.to_bytes())?;
    let digits = delivery::digits(&pair.pk);
    let id = delivery::id(&pair.pk);
    let (secret, public) = (secret.display(), public.display());
    let in_json = || {
        json!({
            "secret": secret.to_string(),
            "public": public.to_string(),
            "trusted_key": digits,
            "id": id,
        })
    };
    let in_words = || {
        format!(
            "{secret} signs policies: keep it secret\n{public} is for the stores: --trusted-keys {public}, or in the configuration\ntrusted_keys = [\"{digits}\"]\nkey id {id}\n"
        )
    };
    emit_either(args.json, in_json, in_words)?;
    Ok(Exit::Done)
}

/// Creates a file. An existing one must not be overwritten, since it may be the only key that
/// stores trust.
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
        "{} already exists and may be a key that stores trust: choose another prefix, or remove it first",
        path.display()
    ))
}
