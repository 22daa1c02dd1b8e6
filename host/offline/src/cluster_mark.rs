//! The file that marks the data directory of a host of a cluster.
//!
//! Such a directory holds no store of its own. It may hold a copy of the log of the cluster, in a
//! directory below it that the mark names. So a copy can be replaced by another one at once.

use std::fs;
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::PastError;

/// Marks the data directory of a host of a cluster.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ClusterMark {
    /// The id of the cluster, in hexadecimal digits.
    pub cluster: String,
    /// The name of the cluster.
    pub name: String,
    /// The copy of its log.
    pub copy: Option<CopyMark>,
}

/// A copy of the log of a cluster, and a place up to which it is certainly durable.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CopyMark {
    /// The number of the copy: a copy that starts over gets another one.
    pub number: u64,
    /// The last frame of the cluster's log before the place.
    pub frame: u64,
    /// The chain after that frame, in hexadecimal digits.
    pub chain: String,
    /// The last record before the place.
    pub record: u64,
}

impl ClusterMark {
    /// The mark of a directory, or none if it is not that of a cluster's host. Fails if the file
    /// cannot be read.
    pub fn of(directory: &Path) -> Result<Option<Self>, PastError> {
        let path = Self::path(directory);
        // The open of a pipe would wait for its writer.
        let read = fs::metadata(&path).and_then(|about| match about.is_file() {
            true => fs::read(&path),
            false => Err(io::Error::other("it is not a regular file")),
        });
        let parsed = match read {
            Ok(bytes) => serde_json::from_slice(&bytes).map_err(|error| error.to_string()),
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
            Err(error) if error.kind() == ErrorKind::PermissionDenied => {
                return Err(PastError::Unreadable(path, error.to_string()));
            }
            // ENFILE and EMFILE of Linux: a later try may succeed.
            Err(error) if matches!(error.raw_os_error(), Some(23 | 24)) => {
                return Err(PastError::Io(path, error));
            }
            Err(error) => Err(error.to_string()),
        };
        parsed.map(Some).map_err(|error| {
            PastError::Refused(format!(
                "{}, which names the cluster of this directory, cannot be read: {error}. Name another directory",
                path.display()
            ))
        })
    }

    /// The file with the mark.
    pub fn path(directory: &Path) -> PathBuf {
        directory.join("cluster.json")
    }

    /// The directory of the copy with this number.
    pub fn copy_path(directory: &Path, number: u64) -> PathBuf {
        directory.join(format!("{COPY_PREFIX}{number}"))
    }

    /// The number of the copy that a directory with this name holds.
    pub fn copy_number(name: &str) -> Option<u64> {
        name.strip_prefix(COPY_PREFIX)?.parse().ok()
    }
}

const COPY_PREFIX: &str = "history-";
