//! The failure of a start that lacks rights to its data directory.

use std::io::ErrorKind;

use statehouse_config::Storage;
use statehouse_wal::{Error, probe};

use super::StorageError;

/// The failure of a start. If rights are missing, it has the words of `serve --check`: the
/// operation that failed first depends on the log, and may name a file that does not exist.
pub(super) fn failure(storage: &Storage, error: Error) -> StorageError {
    let is_denied = matches!(&error, Error::Io { source, .. }
        if source.kind() == ErrorKind::PermissionDenied);
    let denied = is_denied.then(|| probe(&storage.directory).err()).flatten();
    StorageError::Log(storage.directory.clone(), denied.unwrap_or(error))
}
