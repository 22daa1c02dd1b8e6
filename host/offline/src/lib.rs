//! A data directory seen from outside: what the store held, what it did, and whether it can still be read.
//!
//! What enters: a directory, also one that a server writes to at this moment. What leaves: changes of a key,
//! values as of a time, requests that were run again, backups, findings. It takes no lock and changes nothing
//! in the directory; only [`restore`] makes one.
//!
//! * `changes`: what became of one key; its value as of a version or a time.
//! * `replay`: recorded requests, run again by the policy that handled them or by another.
//! * `backup`: a whole store in one file. `restore`: a data directory of it.
//! * `checkup`: every file, block, record and module looked at.
//! * `salvage`: what can still be read of a damaged directory.
//!
//! Reading is streaming: beside one segment of the log only the state that is rebuilt is held, and where the log
//! is read from its oldest place on, of that the keys.

#![forbid(unsafe_code)]

mod backup;
mod changes;
mod checkup;
mod image_sink;
pub mod limits;
mod replay;
mod restore;
mod salvage;

use std::io;
use std::path::{Path, PathBuf};

use statehouse_wal::{Base, Directory, Disk, LogPosition, Range, Sink};

use statehouse_core::log::Image;
use statehouse_core::store::Retention;
use statehouse_precompiled::Modules;

pub use backup::{Contents, Module, ModuleState};
pub use changes::{AsOf, Change, History, Moment, What};
pub use checkup::{Checkup, Opening, Reach};
pub use image_sink::ImageSink;
pub use replay::{Bound, Candidate, Counts, Difference, Observer, Other, Replayed, Tally};
pub use restore::{read_backup, restore};
pub use salvage::Salvaged;
pub use statehouse_core::words::words;

/// Why a data directory or a backup does not give what it was asked for. Its text is a sentence for the operator.
#[derive(Debug, thiserror::Error)]
pub enum PastError {
    /// No such directory.
    #[error("there is no directory {0}: name the data directory of a store")]
    Missing(PathBuf),
    /// A directory without a journal.
    #[error("{0} holds no journal: is it the data directory of a store?")]
    NoJournal(PathBuf),
    /// What was asked for cannot be done here, and why.
    #[error("{0}")]
    Refused(String),
    /// The journal cannot be read.
    #[error("{0} cannot be read: {1}")]
    Journal(PathBuf, statehouse_wal::Error),
    /// A backup cannot be written or read.
    #[error("the backup {0} {1}")]
    Backup(PathBuf, String),
    /// The system said no.
    #[error("{0}: {1}")]
    Io(PathBuf, io::Error),
    /// A policy that cannot be run here.
    #[error("the policy cannot be used: {0}")]
    Policy(#[from] statehouse_core::policy::LoadError),
}

/// A data directory that is looked at.
pub struct Past {
    path: PathBuf,
    disk: Directory,
}

impl Past {
    /// Opens a directory for reading.
    pub fn open(path: &Path) -> Result<Self, PastError> {
        if !path.is_dir() {
            return Err(PastError::Missing(path.to_owned()));
        }
        let disk = Directory::read_only(path)
            .map_err(|error| PastError::Journal(path.to_owned(), error))?;
        Ok(Self {
            path: path.to_owned(),
            disk,
        })
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The policies in it.
    pub fn modules(&self) -> Modules {
        Modules::of(&self.path)
    }

    /// The newest state, with everything that a start would go on from.
    fn newest(&self) -> Result<(Image, Range), PastError> {
        let mut image = Image::new(EVERYTHING);
        let range = self.read(Base::Newest, LogPosition::END, &mut ImageSink(&mut image))?;
        Ok((image, range))
    }

    /// The newest table and its time, and nothing else.
    pub fn keys(&self) -> Result<Image, PastError> {
        let mut image = Image::of_keys();
        self.read(Base::Newest, LogPosition::END, &mut ImageSink(&mut image))?;
        Ok(image)
    }

    fn read(
        &self,
        base: Base,
        until: LogPosition,
        sink: &mut dyn Sink,
    ) -> Result<Range, PastError> {
        let failed = |error| PastError::Journal(self.path.clone(), error);
        let range = statehouse_wal::read(&self.disk, base, until, sink).map_err(failed)?;
        if range.end == LogPosition::NONE && until != LogPosition::NONE {
            return Err(PastError::NoJournal(self.path.clone()));
        }
        Ok(range)
    }

    fn disk(&self) -> &dyn Disk {
        &self.disk
    }
}

/// Whatever the server was set to remember: a reader forgets none of it. Behind a snapshot there is not so much
/// log that this could grow without bound, and only of sessions that live.
const EVERYTHING: Retention = Retention {
    window_ms: u64::MAX,
    count_max: u64::MAX,
    bytes_max: u64::MAX,
    // The largest Receive Maximum that MQTT 5 has (section 3.1.2.11.3).
    per_session: 65_535,
};
