//! Reads policies, and creates the engine that compiles them.

use std::env;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use statehouse_core::STANDARD_POLICY;
use statehouse_core::limits;
use statehouse_core::policy::{Engine, LoadError};
use statehouse_core::store::Transaction;
use statehouse_offline::PastError;
use statehouse_precompiled::{Bounds, Directory, POLICY_FILE_BYTES_MAX, read_file};

/// Why a harness cannot be created.
#[derive(Debug, thiserror::Error)]
pub enum KitError {
    /// The file of the policy cannot be read.
    #[error("cannot read the policy {0}: {1}")]
    Unreadable(PathBuf, io::Error),
    /// The file is not a policy.
    #[error(transparent)]
    Load(#[from] LoadError),
    /// The transcript of this name cannot be parsed.
    #[error("{0}: {1}")]
    Transcript(String, String),
    /// The backup or data directory cannot be read.
    #[error(transparent)]
    Past(#[from] PastError),
}

/// Reads the file of a policy. The path `builtin` means the built-in policy.
pub fn read_policy(path: &Path) -> Result<Vec<u8>, KitError> {
    if path.as_os_str() == "builtin" {
        return Ok(STANDARD_POLICY.to_vec());
    }
    let file = read_file(path, POLICY_FILE_BYTES_MAX);
    file.map_err(|error| KitError::Unreadable(path.to_owned(), error))
}

/// An engine that limits calls only by fuel, so that a test has the same result on every machine.
pub(super) fn engine() -> Result<Engine<Transaction>, LoadError> {
    engine_with(cache())
}

/// An engine like [`engine`] that compiles every policy, to measure it.
pub(super) fn compiling_engine() -> Result<Engine<Transaction>, LoadError> {
    engine_with(cache().map(Directory::write_only))
}

fn engine_with(cache: Option<Directory>) -> Result<Engine<Transaction>, LoadError> {
    let mut engine = Engine::without_watchdog()?;
    if let Some(directory) = cache {
        engine.keep_in(directory);
    }
    Ok(engine)
}

/// The directory of this user for the machine code of policies: `statehouse/code` in
/// `XDG_CACHE_HOME`, or in `.cache` of the home directory. Without it, policies are compiled.
fn cache() -> Option<Directory> {
    let set = |name| env::var_os(name).filter(|it| !it.is_empty());
    let caches = set("XDG_CACHE_HOME").map(PathBuf::from);
    let caches = caches.or_else(|| Some(Path::new(&set("HOME")?).join(".cache")))?;
    let ours = caches.join("statehouse");
    fs::create_dir_all(&ours).ok()?;
    let bounds = Bounds {
        files_max: limits::CODE_FILES_MAX,
        bytes_max: limits::CODE_BYTES_MAX,
    };
    Directory::open(&ours.join("code"), bounds).ok()
}
