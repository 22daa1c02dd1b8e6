//! Errors, with texts that name the file and what to do.

use std::fmt;
use std::io;

use rustix::io::Errno;
use statehouse_protocol::{LogPosition, ProgramVersion, WrittenBy};

use crate::segment::FORMAT;

/// Why a log could not be opened, read or appended to.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Another process uses the directory.
    #[error("{directory} is in use by another process: two stores cannot share a data directory")]
    Locked {
        /// The path of the directory.
        directory: String,
    },
    /// An operation of the operating system failed.
    #[error("cannot {operation} {file}: {source}")]
    Io {
        /// The operation.
        operation: &'static str,
        /// The file.
        file: String,
        /// The error of the operating system.
        source: io::Error,
    },
    /// Data that was durable cannot be read any more.
    #[error("{0}")]
    Damaged(Damage),
    /// A later version of this program wrote the file.
    #[error("{file} has {format}. Nothing was changed")]
    UnknownFormat {
        /// The file.
        file: String,
        /// The format of the file.
        format: LaterFormat,
    },
    /// The sink rejected a record, a block, or the whole state.
    #[error("{place}: {message}{}", advice(*.written_by))]
    Refused {
        /// What it rejected.
        place: String,
        /// The message of the sink.
        message: String,
        /// The program that created the file.
        written_by: Option<ProgramVersion>,
    },
    /// The requested position is older than the history.
    #[error("the history before position {position} was removed: ask for a later position")]
    NotRetained {
        /// The requested position.
        position: LogPosition,
    },
    /// The writer of the log repeatedly recycled files while they were read.
    #[error("the log changed too fast while it was read: try again")]
    Moved,
    /// A log was to be created in a directory that already holds one.
    #[error("the directory already contains a log ({file}): use an empty directory")]
    NotEmpty {
        /// A file of the existing log.
        file: String,
    },
    /// A group of records or a block is larger than the limits allow.
    #[error("{bytes} bytes exceed the limit of the log ({bytes_max} bytes)")]
    TooLarge {
        /// The size.
        bytes: usize,
        /// The limit.
        bytes_max: usize,
    },
    /// A group has more records than a frame can hold.
    #[error("{records} records exceed the limit of one group ({records_max})")]
    TooMany {
        /// The number of records.
        records: usize,
        /// The limit.
        records_max: u32,
    },
    /// Another snapshot is in progress.
    #[error("another snapshot is in progress")]
    Busy,
    /// Another process writes a backup to the same file.
    #[error("another backup is being written to this file: wait until it ends")]
    BackupInProgress,
    /// A snapshot was to be read as a backup, but needs records of the log that it belongs to.
    #[error(
        "it is a snapshot from a data directory, and consistent only with the records up to {complete} of the log there. Use a file of `statehouse snapshot`, or write one with `statehouse doctor DIR --salvage FILE`"
    )]
    NotConsistent {
        /// The position from which on the state is consistent.
        complete: LogPosition,
    },
    /// The source of a snapshot failed.
    #[error("the snapshot was cancelled: {0}")]
    GivenUp(String),
    /// The log failed before. Nothing becomes durable any more.
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

    /// Fails with [`Self::TooLarge`] if a size exceeds its limit.
    pub(crate) fn check_size(bytes: usize, bytes_max: usize) -> Result<(), Self> {
        match bytes > bytes_max {
            true => Err(Self::TooLarge { bytes, bytes_max }),
            false => Ok(()),
        }
    }

    /// Like [`Self::io`], but never [`Self::is_temporary`], whatever the cause is.
    pub(crate) fn permanent_io(
        operation: &'static str,
        file: &str,
    ) -> impl FnOnce(io::Error) -> Self {
        let permanent = Self::io(operation, file);
        move |source| permanent(io::Error::other(source))
    }

    /// Shows the cause that [`Self::permanent_io`] hides.
    pub(crate) fn revealed(self) -> Self {
        match self {
            Self::Io {
                operation,
                file,
                source,
            } => Self::Io {
                operation,
                file,
                source: source.downcast().unwrap_or_else(|source| source),
            },
            other => other,
        }
    }

    /// Whether a later version of the program wrote the data. Nothing is damaged in this case, and
    /// no part of it may be dropped.
    #[must_use]
    pub fn is_of_later_version(&self) -> bool {
        match self {
            Self::UnknownFormat { .. } => true,
            Self::Refused { written_by, .. } => written_by.is_some_and(ProgramVersion::is_later),
            _ => false,
        }
    }

    /// Whether the disk is full. Nothing is damaged in this case.
    #[must_use]
    pub fn is_full(&self) -> bool {
        matches!(self, Self::Io { source, .. } if is_full(source))
    }

    /// Whether the disk is full, or no more files can be opened, so that the operation can be tried
    /// again.
    #[must_use]
    pub fn is_temporary(&self) -> bool {
        let no_file = [Errno::MFILE, Errno::NFILE].map(|it| Some(it.raw_os_error()));
        self.is_full()
            || matches!(self, Self::Io { source, .. } if no_file.contains(&source.raw_os_error()))
    }
}

/// The end of the text of a refusal.
fn advice(written_by: Option<ProgramVersion>) -> String {
    match written_by.filter(|it| it.is_later()) {
        Some(it) => format!(". {}", WrittenBy(Some(it))),
        None => String::new(),
    }
}

/// A format of a file that this version cannot read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("format {format}, and this version reads format {FORMAT}. {}", WrittenBy(*.written_by))]
pub struct LaterFormat {
    /// The format of the file.
    pub format: u16,
    /// The program that wrote the file.
    pub written_by: Option<ProgramVersion>,
}

pub(crate) fn is_full(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded
    )
}

/// Whether the device cannot return the bytes, as for a broken sector. Like a wrong checksum, this
/// is damage at the place that was read. Other errors, such as a lack of open files, are not.
pub(crate) fn is_unreadable(error: &io::Error) -> bool {
    error.raw_os_error() == Some(Errno::IO.raw_os_error())
}

/// The reason of damage at a place that cannot be read.
pub(crate) fn unreadable_reason(error: &io::Error) -> String {
    format!("it cannot be read: {error}")
}

/// The damage to a log and the records that it affects.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Damage {
    /// The damaged file.
    pub file: String,
    /// The first byte that cannot be trusted. None if the file itself is intact.
    pub offset: Option<u64>,
    /// What is wrong.
    pub reason: String,
    /// The first record that cannot be read, if known.
    pub lost_from: Option<LogPosition>,
    /// The last record that is known to have been durable and cannot be read, if known.
    pub lost_to: Option<LogPosition>,
}

impl Damage {
    /// The file, the place in it, and what is wrong.
    #[must_use]
    pub fn place(&self) -> String {
        match self.offset {
            Some(offset) => format!("{} is damaged at byte {offset}: {}", self.file, self.reason),
            None => format!("{}: {}", self.file, self.reason),
        }
    }
}

impl fmt::Display for Damage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}. ", self.place())?;
        match (self.lost_from, self.lost_to) {
            (Some(from), Some(to)) => {
                write!(
                    f,
                    "Records {from} to {to} were durable and cannot be read; later ones may be lost too. "
                )?;
            }
            (Some(from), None) => write!(f, "Records from {from} on cannot be read. ")?,
            _ => write!(f, "The number of lost records is unknown. ")?,
        }
        write!(
            f,
            "Nothing was changed. `statehouse doctor DIR` examines every file; `statehouse doctor DIR --salvage FILE` saves the newest consistent state that can still be read, if there is one. Otherwise restore a backup or a copy of the directory"
        )
    }
}

/// Why the log failed. The failure is permanent: after a failed write or sync it is unknown what is
/// on the disk. A retry may succeed wrongly, because the kernel drops what it could not write.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("cannot {operation} {file}: {message}; nothing becomes durable any more")]
pub struct Failure {
    /// The operation.
    pub operation: &'static str,
    /// The file, or the thread that panicked.
    pub file: String,
    /// The error of the operating system.
    pub message: String,
    /// True if a thread of the log panicked, which is a bug and not a fault of the disk.
    pub panicked: bool,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sentences_of_damage_are_one_space_apart() {
        let lost = [None, Some(LogPosition(3))];
        for (lost_from, lost_to) in lost.iter().flat_map(|from| lost.map(|to| (*from, to))) {
            let damage = Damage {
                file: "000000000001.log".to_owned(),
                offset: Some(64),
                reason: "a frame is damaged".to_owned(),
                lost_from,
                lost_to,
            };
            let text = damage.to_string();
            assert!(!text.contains("  "), "{text}");
        }
    }
}
