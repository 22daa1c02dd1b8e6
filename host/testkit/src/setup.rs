//! What a harness stands on: a compiled policy, and the table it begins with.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use statehouse_core::STANDARD_POLICY;
use statehouse_core::policy::{Engine, LoadError, Policy};
use statehouse_core::store::{State, Transaction};
use statehouse_offline::{self as offline, Past, PastError};
use statehouse_precompiled::read_file;

/// Why a harness cannot be made.
#[derive(Debug, thiserror::Error)]
pub enum KitError {
    /// The file cannot be read.
    #[error("cannot read the policy {0}: {1}")]
    Unreadable(PathBuf, io::Error),
    /// It is no policy.
    #[error(transparent)]
    Load(#[from] LoadError),
    /// A transcript of this name cannot be read.
    #[error("{0}: {1}")]
    Transcript(String, String),
    /// There is no such table.
    #[error(transparent)]
    Past(#[from] PastError),
}

/// The file of a policy, or the built-in one where the path is `builtin`.
pub fn read_policy(path: &Path) -> Result<Vec<u8>, KitError> {
    if path.as_os_str() == "builtin" {
        return Ok(STANDARD_POLICY.to_vec());
    }
    read_file(path).map_err(|error| KitError::Unreadable(path.to_owned(), error))
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

/// A table to begin with, and its time.
#[derive(Clone, Default)]
pub(super) struct Base {
    pub(super) state: State,
    pub(super) now_ms: u64,
}

impl Base {
    /// The table of a backup.
    pub(super) fn of_backup(file: &Path) -> Result<Self, KitError> {
        let image = offline::read_backup(file)?;
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
