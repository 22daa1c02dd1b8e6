//! What a harness stands on: a compiled policy, and the table it begins with.

use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::past::{self, Past, PastError};
use crate::policy::{Engine, LoadError, Policy};
use crate::store::{Quota, State, Transaction};
use crate::{STANDARD_POLICY, limits};

/// Why a harness cannot be made.
#[derive(Debug, thiserror::Error)]
pub enum KitError {
    /// The file cannot be read.
    #[error("cannot read the policy {0}: {1}")]
    Unreadable(PathBuf, io::Error),
    /// It is no policy.
    #[error(transparent)]
    Load(#[from] LoadError),
    /// There is no such table.
    #[error(transparent)]
    Past(#[from] PastError),
}

/// The file of a policy, or the built-in one where the path is `builtin`. No more of it is read than a policy may have.
pub fn read_policy(path: &Path) -> Result<Vec<u8>, KitError> {
    if path.as_os_str() == "builtin" {
        return Ok(STANDARD_POLICY.to_vec());
    }
    let unreadable = |error| KitError::Unreadable(path.to_owned(), error);
    let file = File::open(path).map_err(unreadable)?;
    let mut bytes = Vec::new();
    file.take(limits::POLICY_FILE_BYTES_MAX + 1)
        .read_to_end(&mut bytes)
        .map_err(unreadable)?;
    if bytes.len() as u64 > limits::POLICY_FILE_BYTES_MAX {
        return Err(LoadError::Size(bytes.len() as u64).into());
    }
    Ok(bytes)
}

/// An engine whose calls only fuel ends, so that a test ends the same way on every machine.
pub(super) fn engine() -> Result<Engine<Transaction>, KitError> {
    Ok(Engine::without_watchdog()?)
}

/// A policy, compiled.
pub(super) fn compile(
    engine: &Engine<Transaction>,
    file: &[u8],
) -> Result<Arc<Policy<Transaction>>, KitError> {
    Ok(Arc::new(engine.load(file)?))
}

/// The bounds that `serve` has where nobody sets others.
pub(super) fn default_quota() -> Quota {
    Quota {
        keys_max: limits::KEYS_MAX_DEFAULT,
        bytes_max: limits::BYTES_MAX_DEFAULT,
        key_bytes_max: limits::KEY_BYTES_MAX_DEFAULT,
        value_bytes_max: limits::VALUE_BYTES_MAX_DEFAULT,
        journal_full: false,
    }
}

/// A table to begin with, and its time.
#[derive(Clone, Default)]
pub(super) struct Base {
    pub(super) state: State,
    pub(super) now_ms: u64,
}

impl Base {
    /// The table of a backup.
    pub(super) fn of_backup(file: &Path) -> Result<Self, KitError> {
        let image = past::read_backup(file)?;
        Ok(Self {
            state: *image.state,
            now_ms: image.now_ms,
        })
    }

    /// The table of a data directory, also of one that a server uses at this moment.
    pub(super) fn of_data(directory: &Path) -> Result<Self, KitError> {
        let image = Past::open(directory)?.keys()?;
        Ok(Self {
            state: *image.state,
            now_ms: image.now_ms,
        })
    }
}
