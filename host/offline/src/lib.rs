//! Reads a data directory without its server: history, replay, backup, check and salvage.
//!
//! A server may write to the directory at the same time. This crate takes no lock and must never
//! change the directory; only [`restore`] creates one.
//!
//! * `changes`: the changes of one key, its value as of a version or a time, and its last writer.
//! * `replay`: runs recorded requests with the policy that handled them, or with another one.
//! * `backup`: writes a whole store to one file. `restore` creates a data directory from it.
//! * `checkup`: checks every file, block, record and module.
//! * `end`: the last record and its time.
//! * `cluster_mark`: which data directories belong to a cluster, and where its log is copied to.
//! * `salvage`: writes a backup of the readable part of a damaged directory.
//!
//! Reading is streaming: memory holds one segment of the log and the rebuilt state. A read from the
//! oldest snapshot on rebuilds only the keys.

#![forbid(unsafe_code)]

mod backup;
mod changes;
mod checkup;
mod cluster_mark;
mod end;
pub mod limits;
mod replay;
mod restore;
mod salvage;

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use statehouse_wal::{Base, Directory, Disk, LogPosition, Range, Sink};

use statehouse_core::log::Image;
use statehouse_core::store::Retention;
use statehouse_precompiled::Modules;

pub use backup::{Contents, FirstState, Module, ModuleState};
pub use changes::{AsOf, Change, History, Moment, What, Writer};
pub use checkup::{Checkup, Opening, Reach};
pub use cluster_mark::{ClusterMark, CopyMark};
pub use replay::{Bound, Candidate, Counts, Difference, Observer, Other, Replayed, Tally};
pub use restore::{NAME_FILE, check_backup, is_unfinished, read_backup, restore};
pub use salvage::Salvaged;
pub use statehouse_core::words::words;

/// Why a data directory or a backup cannot be used. The text is a sentence for the operator.
#[derive(Debug, thiserror::Error)]
pub enum PastError {
    /// The directory does not exist.
    #[error("there is no directory {0}: name the data directory of a store")]
    Missing(PathBuf),
    /// The directory has no log.
    #[error("{0} holds no log: is it the data directory of a store?")]
    NoLog(PathBuf),
    /// The directory belongs to a host of a cluster and has no copy of its log.
    #[error(
        "{0} belongs to a host of the cluster {1} and holds no history: the host writes one while it runs, unless --history-bytes or --history-retention is 0"
    )]
    NoCopy(PathBuf, String),
    /// The directory was to be made from a backup, which is not finished.
    #[error(
        "{0} is incomplete: a restore into it still runs, or was interrupted. Repeat an interrupted one with `statehouse restore`; without it, remove the file `restore-unfinished` and the log"
    )]
    Unfinished(PathBuf),
    /// The operation is not possible here, with the reason.
    #[error("{0}")]
    Refused(String),
    /// The log cannot be read.
    #[error("{0} cannot be read: {1}")]
    Log(PathBuf, statehouse_wal::Error),
    /// A backup cannot be written or read.
    #[error("the backup {0} {1}")]
    Backup(PathBuf, String),
    /// This account has no right to read a file, which says nothing about its content.
    #[error(
        "{0} is not readable by this account: {1}. Run this command as the account of the store"
    )]
    Unreadable(PathBuf, String),
    /// The system reported an error.
    #[error("{0}: {1}")]
    Io(PathBuf, io::Error),
    /// The policy cannot run here.
    #[error("the policy cannot be used: {0}")]
    Policy(#[from] statehouse_core::policy::LoadError),
}

impl PastError {
    /// The error of a read of the log in this directory.
    fn of_log(path: &Path, error: statehouse_wal::Error) -> Self {
        match &error {
            statehouse_wal::Error::Io { source, .. }
                if source.kind() == io::ErrorKind::PermissionDenied =>
            {
                Self::Unreadable(path.to_owned(), error.to_string())
            }
            _ => Self::Log(path.to_owned(), error),
        }
    }
}

/// A data directory, open for reading.
pub struct Past {
    path: PathBuf,
    /// The directory with the log: `path`, or a directory below it at a host of a cluster.
    log: PathBuf,
    mark: Option<ClusterMark>,
    disk: Directory,
}

impl Past {
    /// Opens a directory for reading.
    pub fn open(path: &Path) -> Result<Self, PastError> {
        match fs::metadata(path) {
            Ok(about) if about.is_dir() => {}
            Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {
                return Err(PastError::Unreadable(path.to_owned(), error.to_string()));
            }
            _ => return Err(PastError::Missing(path.to_owned())),
        }
        if restore::is_unfinished(path) {
            return Err(PastError::Unfinished(path.to_owned()));
        }
        let mark = ClusterMark::of(path)?;
        let log = match &mark {
            None => path.to_owned(),
            Some(ClusterMark { name, copy, .. }) => match copy {
                Some(copy) => ClusterMark::copy_path(path, copy.number),
                None => return Err(PastError::NoCopy(path.to_owned(), name.clone())),
            },
        };
        let disk = Directory::read_only(&log).map_err(|error| PastError::of_log(path, error))?;
        Ok(Self {
            path: path.to_owned(),
            log,
            mark,
            disk,
        })
    }

    /// The cluster of which the directory holds a copy, if it is not the store of a single host.
    pub fn mark(&self) -> Option<&ClusterMark> {
        self.mark.as_ref()
    }

    /// The path of the directory.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The modules of its policies.
    pub fn modules(&self) -> Modules {
        Modules::of(&self.path)
    }

    /// The newest state, with everything that a start recovers.
    fn newest(&self) -> Result<(Image, Range), PastError> {
        let mut image = Image::new(EVERYTHING);
        let range = self.read(Base::Newest, LogPosition::END, &mut ImageSink(&mut image))?;
        Ok((image, range))
    }

    /// Only the keys of the newest state, and its time.
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
        let failed = |error| PastError::of_log(&self.path, error);
        let range = statehouse_wal::read(&self.disk, base, until, sink).map_err(failed)?;
        if range.end == LogPosition::NONE && until != LogPosition::NONE {
            return Err(PastError::NoLog(self.path.clone()));
        }
        Ok(range)
    }

    fn disk(&self) -> &dyn Disk {
        &self.disk
    }
}

/// Applies the blocks and records that the log delivers to an image.
pub struct ImageSink<'a>(pub &'a mut Image);

impl Sink for ImageSink<'_> {
    fn reset(&mut self) {
        self.0.reset();
    }

    fn block(&mut self, block: &[u8]) -> Result<(), String> {
        self.0.block(block).map_err(|error| error.to_string())
    }

    fn record(&mut self, _: LogPosition, record: &[u8]) -> Result<(), String> {
        self.0.record(record).map_err(|error| error.to_string())
    }
}

/// The beginning of a value, to be shown: at most [`limits::VALUE_SHOWN_BYTES_MAX`] bytes. Text is
/// cut between characters, so that it stays text.
pub fn shown(value: &[u8]) -> &[u8] {
    if value.len() <= limits::VALUE_SHOWN_BYTES_MAX {
        return value;
    }
    let shown = &value[..limits::VALUE_SHOWN_BYTES_MAX];
    match str::from_utf8(shown) {
        // Only the end of the last character is missing.
        Err(error) if error.error_len().is_none() => &shown[..error.valid_up_to()],
        _ => shown,
    }
}

/// Keeps every remembered request, because the settings of the server are not known here. The log
/// after a snapshot is limited, and only live sessions have remembered requests. So this cannot
/// grow without bound.
const EVERYTHING: Retention = Retention {
    window_ms: u64::MAX,
    count_max: u64::MAX,
    bytes_max: u64::MAX,
    // The largest Receive Maximum that MQTT 5 has (section 3.1.2.11.3).
    per_session: 65_535,
};
