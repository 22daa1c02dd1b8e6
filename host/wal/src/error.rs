//! What can go wrong, in words that name the file and say what to do.

use std::fmt;
use std::io;

use statehouse_protocol::LogPosition;

/// Why a journal could not be opened, read or added to.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Another process has the directory.
    #[error("{directory} is in use by another process: two stores cannot share a data directory")]
    Locked {
        /// The directory.
        directory: String,
    },
    /// The operating system said no.
    #[error("cannot {operation} {file}: {source}")]
    Io {
        /// What was tried.
        operation: &'static str,
        /// On which file.
        file: String,
        /// What the system said.
        source: io::Error,
    },
    /// Data that was on disk once cannot be read any more.
    #[error("{0}")]
    Damaged(Damage),
    /// A file of a later version of this program.
    #[error(
        "{file} has format {format}, which this version cannot read (it reads format 1): use the version that wrote it"
    )]
    UnknownFormat {
        /// The file.
        file: String,
        /// Its format.
        format: u16,
    },
    /// The reader of records or blocks did not take one.
    #[error("{place}: {message}")]
    Refused {
        /// Which record or block.
        place: String,
        /// What the reader said.
        message: String,
    },
    /// What was asked for is older than what is kept.
    #[error("nothing before position {position} is kept any more")]
    NotRetained {
        /// What was asked for.
        position: LogPosition,
    },
    /// The writer of this journal recycled what was being read, again and again.
    #[error("the journal moved on while it was read: try again")]
    Moved,
    /// A directory that should be new is not.
    #[error("there is a journal already: {file} exists")]
    NotEmpty {
        /// One of its files.
        file: String,
    },
    /// A group of records or a block is larger than the limits allow.
    #[error("{bytes} bytes are more than the journal takes at once ({bytes_max})")]
    TooLarge {
        /// Its size.
        bytes: usize,
        /// The bound.
        bytes_max: usize,
    },
    /// A group has more records than a frame can hold.
    #[error("{records} records are more than the journal takes at once ({records_max})")]
    TooMany {
        /// How many.
        records: usize,
        /// The bound.
        records_max: u32,
    },
    /// A snapshot is being taken already.
    #[error("a snapshot is being taken already")]
    Busy,
    /// The source of a snapshot gave up.
    #[error("the snapshot was given up: {0}")]
    GivenUp(String),
    /// The log failed before: nothing becomes durable any more.
    #[error("{0}")]
    Failed(Failure),
}

impl Error {
    pub(crate) fn io(operation: &'static str, file: &str) -> impl FnOnce(io::Error) -> Self {
        let file = file.to_owned();
        move |source| Self::Io {
            operation,
            file,
            source,
        }
    }

    /// Whether the disk is full: nothing is broken, there is only no room.
    #[must_use]
    pub fn is_full(&self) -> bool {
        matches!(self, Self::Io { source, .. } if is_full(source))
    }
}

pub(crate) fn is_full(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded
    )
}

/// Where a journal is damaged, and what is lost.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Damage {
    /// The file.
    pub file: String,
    /// The first byte that cannot be trusted.
    pub offset: u64,
    /// What is wrong there.
    pub reason: String,
    /// The first record that cannot be read, where known.
    pub lost_from: Option<LogPosition>,
    /// The last record that is known to have been durable and cannot be read, where known.
    pub lost_to: Option<LogPosition>,
}

impl fmt::Display for Damage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} is damaged at byte {}: {}. ",
            self.file, self.offset, self.reason
        )?;
        match (self.lost_from, self.lost_to) {
            (Some(from), Some(to)) => {
                write!(
                    f,
                    "Records {from} to {to} were on disk and cannot be read; there may be more behind them. "
                )?;
            }
            (Some(from), None) => write!(f, "Records from {from} on cannot be read. ")?,
            _ => write!(f, "How many records are lost is not known. ")?,
        }
        write!(
            f,
            "Nothing was changed. `statehouse doctor DIR` looks at every file, `statehouse doctor DIR --salvage FILE` saves what can still be read; a copy of the directory or a backup can take its place"
        )
    }
}

/// Why the log failed. It stays failed: after a failed write or sync nobody can say what is on
/// disk, and asking again may be answered with a lie (the kernel drops what it could not write).
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("cannot {operation} {file}: {message}; nothing becomes durable any more")]
pub struct Failure {
    /// What was tried.
    pub operation: &'static str,
    /// On which file.
    pub file: String,
    /// What the system said.
    pub message: String,
    /// A thread of the journal panicked: a bug, and no fault of the disk.
    pub panicked: bool,
}
