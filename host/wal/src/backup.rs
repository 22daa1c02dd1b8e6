//! A backup: one file in the format of a snapshot that holds the state exactly at its position, so
//! that it needs no records of a log.
//!
//! Invariant: the name of a backup must always belong to a complete and durable file. The file is
//! written under a temporary name, whose lock keeps a second backup to the same path out.

use std::fs::{self, TryLockError};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;

use crate::disk::{PlainFile, entropy, sync};
use crate::error::Error;
use crate::recovery::Sink;
use crate::segment::StoreId;
use crate::snapshot::{self, Source, Writer};
use statehouse_protocol::LogPosition;

/// The end of the name of an unfinished backup. It must be one that operators do not choose, since a
/// file of that name is removed.
const UNFINISHED: &str = ".statehouse-unfinished";

/// Writes a backup of the state exactly at `position`. The file gets its name only when it is
/// complete and durable. Fails with [`Error::GivenUp`] if the source fails, and with
/// [`Error::BackupInProgress`] if another process writes to the same path.
pub fn write_snapshot_file(
    path: impl AsRef<Path>,
    position: LogPosition,
    created_ms: u64,
    source: &mut dyn Source,
) -> Result<(), Error> {
    let path = path.as_ref();
    let shown = path.display().to_string();
    let temporary = Temporary::create(path)?;
    let store = StoreId(entropy(), entropy());
    let mut writer = Writer::new(temporary.file.clone(), store, position.0, created_ms);
    snapshot::write_blocks(source, &mut writer, &shown, &mut |_, _| Ok(()))?;
    writer
        .finish(position.0)
        .map_err(Error::io("write", &shown))?;
    temporary.rename(path)?;
    sync(path.parent().unwrap_or(Path::new(""))).map_err(Error::io("sync the directory of", &shown))
}

/// The file that a backup is written to before it gets its name. It is locked until it is dropped,
/// and then removed unless it was renamed.
struct Temporary {
    path: PathBuf,
    /// False once the file has its final name.
    is_temporary: bool,
    /// Holds the lock.
    file: Arc<PlainFile>,
}

impl Temporary {
    /// Creates the file for a backup at `path`, and removes one that a crash left.
    fn create(path: &Path) -> Result<Self, Error> {
        let shown = path.display().to_string();
        let mut temporary = path.as_os_str().to_owned();
        temporary.push(UNFINISHED);
        let path = PathBuf::from(temporary);
        let left = path.display().to_string();
        if !is_removed(&path).map_err(Error::io("replace", &left))? {
            return Err(Error::BackupInProgress);
        }
        let file = match PlainFile::create_new(&path) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
                return Err(Error::BackupInProgress);
            }
            file => file.map_err(Error::io("create", &shown))?,
        };
        // Before the lock, another process may take the file for one that a crash left.
        if is_locked(&file.0) || !is_at(&file.0, &path).map_err(Error::io("look at", &left))? {
            return Err(Error::BackupInProgress);
        }
        Ok(Self {
            path,
            is_temporary: true,
            file: Arc::new(file),
        })
    }

    fn rename(mut self, path: &Path) -> Result<(), Error> {
        let shown = path.display().to_string();
        // Another process removes the file if the file system has no locks.
        if !is_at(&self.file.0, &self.path).map_err(Error::io("rename", &shown))? {
            return Err(Error::BackupInProgress);
        }
        fs::rename(&self.path, path).map_err(Error::io("rename", &shown))?;
        self.is_temporary = false;
        Ok(())
    }
}

impl Drop for Temporary {
    fn drop(&mut self) {
        if self.is_temporary && is_at(&self.file.0, &self.path).unwrap_or(false) {
            // The next backup replaces a file that remains.
            let _ = fs::remove_file(&self.path);
        }
    }
}

/// Removes a file that a crash left at the path of a temporary file, or a link that another account
/// has put there. Returns false if another process writes to the file.
fn is_removed(path: &Path) -> io::Result<bool> {
    let flags = OFlags::RDWR | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    // Locked until the file is removed.
    let _left = match rustix::fs::open(path, flags, Mode::empty()) {
        Ok(left) => {
            let left = fs::File::from(left);
            if is_locked(&left) || !is_at(&left, path)? {
                return Ok(false);
            }
            Some(left)
        }
        Err(Errno::NOENT) => return Ok(true),
        // A link, a socket, or a file of another account.
        Err(Errno::LOOP | Errno::NXIO | Errno::ACCESS) => None,
        Err(error) => return Err(error.into()),
    };
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(true),
    }
}

/// Locks a file until it is closed. Returns true if another process holds the lock. Some network
/// file systems have no locks.
fn is_locked(file: &fs::File) -> bool {
    matches!(file.try_lock(), Err(TryLockError::WouldBlock))
}

/// Whether a path still names this open file, and is not a link to it.
fn is_at(file: &fs::File, path: &Path) -> io::Result<bool> {
    let held = file.metadata()?;
    match fs::symlink_metadata(path) {
        Ok(found) => Ok((found.dev(), found.ino()) == (held.dev(), held.ino())),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
        Err(error) => Err(error),
    }
}

/// A backup that is open for reading. All reads are of the same file, also if another one gets its
/// name meanwhile.
#[derive(Debug)]
pub struct Backup {
    file: PlainFile,
    shown: String,
}

impl Backup {
    /// Opens a backup.
    pub fn open(path: impl AsRef<Path>) -> Result<Self, Error> {
        let path = path.as_ref();
        let shown = path.display().to_string();
        let file = fs::File::open(path).map_err(Error::io("open", &shown))?;
        Ok(Self {
            file: PlainFile(file),
            shown,
        })
    }

    /// Reads the whole backup, passes its blocks to `sink` and returns its position. Fails with
    /// [`Error::NotConsistent`] if it is a snapshot from a data directory, and with
    /// [`Error::Damaged`] if a byte differs from what was written. The caller must then discard
    /// what the sink received.
    pub fn read(&self, sink: &mut dyn Sink) -> Result<LogPosition, Error> {
        let failed = |fault: snapshot::Fault| fault.into_error(&self.shown);
        let (header, footer, _) = snapshot::read_ends(&self.file).map_err(failed)?;
        if footer.complete > header.position {
            return Err(Error::NotConsistent {
                complete: LogPosition(footer.complete),
            });
        }
        self.read_any(sink)
    }

    fn read_any(&self, sink: &mut dyn Sink) -> Result<LogPosition, Error> {
        match snapshot::read(&self.file, &mut |block| sink.block(block)) {
            Ok((header, _)) => Ok(LogPosition(header.position)),
            Err(fault) => Err(fault.into_error(&self.shown)),
        }
    }
}

/// Reads a snapshot or a backup like [`Backup::read`], also if its state is not consistent without
/// the log.
pub fn read_snapshot_file(
    path: impl AsRef<Path>,
    sink: &mut dyn Sink,
) -> Result<LogPosition, Error> {
    Backup::open(path)?.read_any(sink)
}
