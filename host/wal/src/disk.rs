//! The seam to the disk: one flat directory of files.
//!
//! Enters: reads, writes, syncs, renames. Leaves: what the operating system says to them. It never
//! retries and never caches, so that whoever stands behind the seam, a real directory or a
//! simulated one, decides alone what a crash leaves.

use std::fs::{self, TryLockError};
use std::hash::{BuildHasher, RandomState};
use std::io;
use std::os::unix::fs::{DirBuilderExt, FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::error::Error;
use crate::files;
use crate::limits;

/// The files of one flat directory.
pub trait Disk: Send + Sync {
    /// The names of all files.
    fn list(&self) -> io::Result<Vec<String>>;
    /// Creates a file, or empties the one of that name, for reading and writing.
    fn create(&self, name: &str) -> io::Result<Arc<dyn File>>;
    /// Opens a file for reading and writing.
    fn open(&self, name: &str) -> io::Result<Arc<dyn File>>;
    /// Opens a file for reading.
    fn open_read_only(&self, name: &str) -> io::Result<Arc<dyn File>>;
    /// Renames a file; one of the new name is replaced.
    fn rename(&self, from: &str, to: &str) -> io::Result<()>;
    /// Removes a file.
    fn remove(&self, name: &str) -> io::Result<()>;
    /// Returns once every create, rename and remove is durable.
    fn sync_directory(&self) -> io::Result<()>;
    /// Bytes that can still be allocated.
    fn free_bytes(&self) -> io::Result<u64>;
    /// A number that nobody else can guess.
    fn entropy(&self) -> u64;
    /// Why this process must not go on with the directory, if it was removed, replaced or unlocked behind its back:
    /// another process may use it.
    fn displaced(&self) -> io::Result<Option<String>> {
        Ok(None)
    }
}

/// One file.
pub trait File: Send + Sync {
    /// Reads at an offset; fewer bytes than asked for only at the end.
    fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<usize>;
    /// Writes all bytes at an offset.
    fn write_at(&self, bytes: &[u8], offset: u64) -> io::Result<()>;
    /// Returns once everything written is durable (fdatasync).
    fn sync(&self) -> io::Result<()>;
    /// The length of the file.
    fn bytes(&self) -> io::Result<u64>;
    /// False once the file was removed or replaced: new writes are lost when its handle is closed.
    fn is_linked(&self) -> io::Result<bool> {
        Ok(true)
    }
    /// Takes room for so many bytes from the file system, so that writing them cannot find it full. The length stays.
    /// False where the file system cannot do so.
    fn allocate(&self, _bytes: u64) -> io::Result<bool> {
        Ok(false)
    }
    /// Gives back what was allocated behind the end.
    fn trim(&self) -> io::Result<()> {
        Ok(())
    }
}

/// A directory of the file system, only for its owner (mode 0700).
#[derive(Debug)]
pub struct Directory {
    path: PathBuf,
    /// None if the directory was opened for reading.
    locks: Option<Locks>,
}

/// Both are locked; the locks end with the handles.
#[derive(Debug)]
struct Locks {
    /// The directory itself, which cannot be removed without what is in it.
    directory: fs::File,
    /// The file in it: earlier versions lock nothing else, and some network file systems lock no directories.
    file: fs::File,
}

impl Directory {
    /// Creates the directory where it is missing, and locks it for this process.
    ///
    /// # Errors
    /// [`Error::Locked`] where another process has it.
    pub fn open(path: impl AsRef<Path>) -> Result<Self, Error> {
        let path = path.as_ref().to_path_buf();
        let shown = path.display().to_string();
        // Behind the lock file's creation every parent is durable.
        if !path.join(files::LOCK).exists() {
            create_durably(&path, &mut sync).map_err(Error::io("create", &shown))?;
        }
        let directory = fs::File::open(&path).map_err(Error::io("open", &shown))?;
        match directory.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => return Err(Error::Locked { directory: shown }),
            Err(TryLockError::Error(error)) => {
                tracing::warn!(%error, directory = shown, "this file system locks no directories: only the file `lock` keeps other processes out, so never remove it");
            }
        }
        let file = fs::OpenOptions::new()
            .create(true)
            .truncate(false)
            .write(true)
            .mode(0o600)
            .open(path.join(files::LOCK))
            .map_err(Error::io("open the lock file of", &shown))?;
        match file.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => return Err(Error::Locked { directory: shown }),
            Err(TryLockError::Error(source)) => return Err(Error::io("lock", &shown)(source)),
        }
        let locked = Self {
            path,
            locks: Some(Locks { directory, file }),
        };
        match locked.displaced() {
            Ok(None) => Ok(locked),
            Ok(Some(reason)) => Err(Error::io("lock", &shown)(io::Error::other(reason))),
            Err(error) => Err(Error::io("lock", &shown)(error)),
        }
    }

    /// Opens a directory for reading, also while another process writes to it.
    ///
    /// # Errors
    /// [`Error::Io`] where it is no directory.
    pub fn read_only(path: impl AsRef<Path>) -> Result<Self, Error> {
        let path = path.as_ref().to_path_buf();
        fs::read_dir(&path).map_err(Error::io("read", &path.display().to_string()))?;
        Ok(Self { path, locks: None })
    }

    /// The path that was opened.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    fn writable(&self) -> io::Result<()> {
        match self.locks {
            Some(_) => Ok(()),
            None => Err(io::Error::new(
                io::ErrorKind::PermissionDenied,
                "the directory was opened for reading",
            )),
        }
    }
}

impl Disk for Directory {
    fn list(&self) -> io::Result<Vec<String>> {
        let mut names = Vec::new();
        for entry in fs::read_dir(&self.path)? {
            // A name that is no text is none of ours.
            if let Ok(name) = entry?.file_name().into_string() {
                names.push(name);
            }
            if names.len() > limits::FILES_MAX {
                return Err(io::Error::other("the directory holds too many files"));
            }
        }
        Ok(names)
    }

    fn create(&self, name: &str) -> io::Result<Arc<dyn File>> {
        self.writable()?;
        Ok(Arc::new(PlainFile::create(&self.path.join(name))?))
    }

    fn open(&self, name: &str) -> io::Result<Arc<dyn File>> {
        self.writable()?;
        Ok(Arc::new(PlainFile(
            fs::OpenOptions::new()
                .read(true)
                .write(true)
                .open(self.path.join(name))?,
        )))
    }

    fn open_read_only(&self, name: &str) -> io::Result<Arc<dyn File>> {
        Ok(Arc::new(PlainFile(fs::File::open(self.path.join(name))?)))
    }

    fn rename(&self, from: &str, to: &str) -> io::Result<()> {
        self.writable()?;
        fs::rename(self.path.join(from), self.path.join(to))
    }

    fn remove(&self, name: &str) -> io::Result<()> {
        self.writable()?;
        fs::remove_file(self.path.join(name))
    }

    fn sync_directory(&self) -> io::Result<()> {
        fs::File::open(&self.path)?.sync_all()
    }

    fn free_bytes(&self) -> io::Result<u64> {
        let stat = rustix::fs::statvfs(&self.path)?;
        Ok(stat.f_bavail.saturating_mul(stat.f_frsize))
    }

    fn entropy(&self) -> u64 {
        entropy()
    }

    fn displaced(&self) -> io::Result<Option<String>> {
        let Some(locks) = &self.locks else {
            return Ok(None);
        };
        if let Some(change) = changed(&locks.directory, &self.path)? {
            return Ok(Some(format!("the directory was {change}")));
        }
        let change = changed(&locks.file, &self.path.join(files::LOCK))?;
        Ok(change.map(|change| format!("the file `lock` in it was {change}")))
    }
}

/// What happened to an open file, if another one or none is found under its path.
fn changed(file: &fs::File, path: &Path) -> io::Result<Option<&'static str>> {
    let held = file.metadata()?;
    match fs::metadata(path) {
        Ok(found) if (found.dev(), found.ino()) == (held.dev(), held.ino()) => Ok(None),
        Ok(_) => Ok(Some("replaced")),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Some("removed")),
        Err(error) => Err(error),
    }
}

fn sync(directory: &Path) -> io::Result<()> {
    let directory = match directory.as_os_str().is_empty() {
        true => Path::new("."),
        false => directory,
    };
    fs::File::open(directory)?.sync_all()
}

/// Creates a directory and its missing parents, for the owner alone. Each name is durable when this returns: a power cut
/// that took one would take everything below it.
fn create_durably(path: &Path, sync: &mut dyn FnMut(&Path) -> io::Result<()>) -> io::Result<()> {
    let missing = |directory: &&Path| !directory.as_os_str().is_empty() && !directory.is_dir();
    let missing: Vec<&Path> = path.ancestors().take_while(missing).collect();
    for directory in missing.iter().rev() {
        let created = fs::DirBuilder::new().mode(0o700).create(directory);
        created.or_else(|error| match error.kind() {
            // Another process was faster.
            io::ErrorKind::AlreadyExists if directory.is_dir() => Ok(()),
            _ => Err(error),
        })?;
    }
    for (parent, child) in path.ancestors().skip(1).zip(path.ancestors()) {
        match sync(parent) {
            Err(error) if missing.contains(&child) => return Err(error),
            // An earlier start may have created the child and ended here. One that is older needs no sync, and this
            // account may have no right to read its parent.
            _ => {}
        }
    }
    Ok(())
}

/// The standard library's only random number: the keys of its hash tables come from the system.
pub(crate) fn entropy() -> u64 {
    RandomState::new().hash_one(std::process::id())
}

/// A file of the file system.
#[derive(Debug)]
pub(crate) struct PlainFile(pub(crate) fs::File);

impl PlainFile {
    pub(crate) fn create(path: &Path) -> io::Result<Self> {
        fs::OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(true)
            .mode(0o600)
            .open(path)
            .map(Self)
    }
}

impl File for PlainFile {
    fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<usize> {
        let mut filled = 0;
        while filled < buffer.len() {
            match self
                .0
                .read_at(&mut buffer[filled..], offset + filled as u64)
            {
                Ok(0) => break,
                Ok(read) => filled += read,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(filled)
    }

    fn write_at(&self, bytes: &[u8], offset: u64) -> io::Result<()> {
        self.0.write_all_at(bytes, offset)
    }

    fn sync(&self) -> io::Result<()> {
        self.0.sync_data()
    }

    fn bytes(&self) -> io::Result<u64> {
        Ok(self.0.metadata()?.len())
    }

    fn is_linked(&self) -> io::Result<bool> {
        Ok(self.0.metadata()?.nlink() > 0)
    }

    fn allocate(&self, bytes: u64) -> io::Result<bool> {
        use rustix::{fs::FallocateFlags, io::Errno};
        match rustix::fs::fallocate(&self.0, FallocateFlags::KEEP_SIZE, 0, bytes.max(1)) {
            Ok(()) => Ok(true),
            Err(Errno::OPNOTSUPP | Errno::NOSYS) => Ok(false),
            Err(error) => Err(error.into()),
        }
    }

    fn trim(&self) -> io::Result<()> {
        self.0.set_len(self.bytes()?)
    }
}

/// Reads a whole file into `buffer`, which is reused from file to file.
pub(crate) fn read_whole(file: &dyn File, bytes_max: u64, buffer: &mut Vec<u8>) -> io::Result<()> {
    let bytes = file.bytes()?;
    if bytes > bytes_max {
        return Err(io::Error::new(
            io::ErrorKind::InvalidData,
            "the file is too large to be one of the journal",
        ));
    }
    // Cannot truncate: bounded by the line above. Only growth is zeroed, the rest is overwritten.
    buffer.resize(bytes as usize, 0);
    let read = file.read_at(buffer, 0)?;
    buffer.truncate(read);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_parent_of_a_created_directory_is_synced_after_its_creation() {
        let place = tempfile::tempdir().expect("a directory");
        let path = place.path().join("a/b/c");
        for attempt in ["new", "after a start that ended early"] {
            let mut synced = Vec::new();
            create_durably(&path, &mut |parent| {
                assert!(path.is_dir(), "{attempt}");
                synced.push(parent.to_owned());
                sync(parent)
            })
            .expect("created");
            for parent in ["a/b", "a", ""] {
                let parent = place.path().join(parent);
                assert!(synced.contains(&parent), "{attempt}: {synced:?}");
            }
        }
    }

    #[test]
    fn a_parent_that_cannot_be_synced_fails_only_below_a_new_directory() {
        let place = tempfile::tempdir().expect("a directory");
        let path = place.path().join("a/b");
        let mut fail = |_: &Path| Err(io::Error::other("no"));
        create_durably(&path, &mut fail).expect_err("its name may be lost");
        create_durably(&path, &mut fail).expect("it is older");
    }
}
