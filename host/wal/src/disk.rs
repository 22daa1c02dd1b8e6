//! The interface to the disk: one flat directory of files.
//!
//! Implementations, a real directory or a simulated one, must neither retry nor cache. Then they
//! alone determine what a crash leaves.

use std::fs::{self, TryLockError};
use std::hash::{BuildHasher, RandomState};
use std::io;
use std::os::unix::fs::{DirBuilderExt, FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustix::fs::{OFlags, StatVfsMountFlags};

use crate::error::{Error, is_unreadable};
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
    /// Renames a file and replaces an existing file of the new name.
    fn rename(&self, from: &str, to: &str) -> io::Result<()>;
    /// Removes a file.
    fn remove(&self, name: &str) -> io::Result<()>;
    /// Returns once every create, rename and remove is durable.
    fn sync_directory(&self) -> io::Result<()>;
    /// Bytes that can still be allocated.
    fn free_bytes(&self) -> io::Result<u64>;
    /// Whether another file can be created, as far as the number of files limits it.
    fn has_free_inodes(&self) -> io::Result<bool> {
        Ok(true)
    }
    /// Whether the file system is mounted read-only, so that a start fails.
    fn is_read_only(&self) -> io::Result<bool> {
        Ok(false)
    }
    /// A random number that other parties cannot guess.
    fn entropy(&self) -> u64;
    /// Why this process must stop using the directory: it was removed, replaced or unlocked, so
    /// another process may use it.
    fn displaced(&self) -> io::Result<Option<String>> {
        Ok(None)
    }
}

/// One file.
pub trait File: Send + Sync {
    /// Reads at an offset. Returns fewer bytes than requested only at the end of the file.
    fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<usize>;
    /// Writes all bytes at an offset.
    fn write_at(&self, bytes: &[u8], offset: u64) -> io::Result<()>;
    /// Returns once everything that was written is durable (fdatasync).
    fn sync(&self) -> io::Result<()>;
    /// The length of the file.
    fn bytes(&self) -> io::Result<u64>;
    /// False if the file was removed or replaced. New writes are then lost when its handle is
    /// closed.
    fn is_linked(&self) -> io::Result<bool> {
        Ok(true)
    }
    /// Reserves this many bytes in the file system, so that writing them cannot fail for lack of
    /// space. The length is unchanged. Returns false if the file system does not support it.
    fn allocate(&self, _bytes: u64) -> io::Result<bool> {
        Ok(false)
    }
    /// Frees what was allocated after the end of the file.
    fn trim(&self) -> io::Result<()> {
        Ok(())
    }
}

/// A directory of the file system, accessible only to its owner (mode 0700).
#[derive(Debug)]
pub struct Directory {
    path: PathBuf,
    /// `None` if the directory was opened read-only.
    locks: Option<Locks>,
}

/// Two locks, which are held as long as the handles are open.
#[derive(Debug)]
struct Locks {
    /// The directory itself. It cannot be removed without its content.
    directory: fs::File,
    /// The lock file. Earlier versions lock only this file, and some network file systems cannot
    /// lock directories.
    file: fs::File,
}

/// The open of a pipe waits for its other end without this flag. Regular files ignore it.
const NO_WAIT: i32 = OFlags::NONBLOCK.bits() as i32;

impl Directory {
    /// Creates the directory if it is missing, and locks it for this process. Fails with
    /// [`Error::Locked`] if another process holds the lock.
    pub fn open(path: impl AsRef<Path>) -> Result<Self, Error> {
        let path = path.as_ref().to_path_buf();
        let shown = path.display().to_string();
        // If the lock file exists, an earlier start has made every parent durable.
        if !path.join(files::LOCK).exists() {
            create_durably(&path, &mut sync).map_err(Error::io("create", &shown))?;
        }
        let directory = fs::File::open(&path).map_err(Error::io("open", &shown))?;
        let unlockable = match directory.try_lock() {
            Ok(()) => None,
            Err(TryLockError::WouldBlock) => return Err(Error::Locked { directory: shown }),
            Err(TryLockError::Error(error)) => Some(error),
        };
        let file = fs::OpenOptions::new()
            .create(true)
            .truncate(false)
            .write(true)
            .mode(0o600)
            .custom_flags(NO_WAIT)
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
            Ok(None) => {}
            Ok(Some(reason)) => return Err(Error::io("lock", &shown)(io::Error::other(reason))),
            Err(error) => return Err(Error::io("lock", &shown)(error)),
        }
        // Only now, because a standby tries many times per second until the file is free.
        if let Some(error) = unlockable {
            tracing::warn!(%error, directory = shown, "this file system cannot lock directories: only the file `lock` keeps other processes out, so never remove it");
        }
        Ok(locked)
    }

    /// Opens a directory read-only, also while another process writes to it. Fails if it is not a
    /// readable directory.
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
                "the directory was opened read-only",
            )),
        }
    }
}

impl Disk for Directory {
    fn list(&self) -> io::Result<Vec<String>> {
        let mut names = Vec::new();
        for entry in fs::read_dir(&self.path)? {
            // All files of the log have UTF-8 names, so other names are skipped.
            if let Ok(name) = entry?.file_name().into_string() {
                names.push(name);
            }
            if names.len() > limits::FILES_MAX {
                return Err(io::Error::other("the directory contains too many files"));
            }
        }
        Ok(names)
    }

    fn create(&self, name: &str) -> io::Result<Arc<dyn File>> {
        self.writable()?;
        let mut options = PlainFile::options();
        options.create(true).truncate(true);
        Ok(Arc::new(PlainFile(options.open(self.path.join(name))?)))
    }

    fn open(&self, name: &str) -> io::Result<Arc<dyn File>> {
        self.writable()?;
        let file = PlainFile::options().open(self.path.join(name))?;
        Ok(Arc::new(PlainFile(file)))
    }

    fn open_read_only(&self, name: &str) -> io::Result<Arc<dyn File>> {
        let mut options = fs::OpenOptions::new();
        options.read(true).custom_flags(NO_WAIT);
        let file = options.open(self.path.join(name))?;
        let kind = file.metadata()?.file_type();
        // A read of a directory reports what it is.
        match kind.is_file() || kind.is_dir() {
            true => Ok(Arc::new(PlainFile(file))),
            false => Err(io::Error::other("it is not a regular file")),
        }
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
        match &self.locks {
            // Works also if the process can open no more files.
            Some(locks) => locks.directory.sync_all(),
            None => fs::File::open(&self.path)?.sync_all(),
        }
    }

    fn free_bytes(&self) -> io::Result<u64> {
        let stat = rustix::fs::statvfs(&self.path)?;
        Ok(stat.f_bavail.saturating_mul(stat.f_frsize))
    }

    fn has_free_inodes(&self) -> io::Result<bool> {
        let stat = rustix::fs::statvfs(&self.path)?;
        // Without a limit, such as on btrfs, the total is zero.
        Ok(stat.f_files == 0 || stat.f_favail > 0)
    }

    fn is_read_only(&self) -> io::Result<bool> {
        let stat = rustix::fs::statvfs(&self.path)?;
        Ok(stat.f_flag.contains(StatVfsMountFlags::RDONLY))
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

/// Whether an open file was removed or replaced under its path.
fn changed(file: &fs::File, path: &Path) -> io::Result<Option<&'static str>> {
    let held = file.metadata()?;
    match fs::metadata(path) {
        Ok(found) if (found.dev(), found.ino()) == (held.dev(), held.ino()) => Ok(None),
        Ok(_) => Ok(Some("replaced")),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Some("removed")),
        Err(error) => Err(error),
    }
}

/// Makes the names in a directory durable.
pub(crate) fn sync(directory: &Path) -> io::Result<()> {
    let directory = match directory.as_os_str().is_empty() {
        true => Path::new("."),
        false => directory,
    };
    fs::File::open(directory)?.sync_all()
}

/// Creates a directory and its missing parents, accessible only to the owner. Each name must be
/// durable on return: a power failure that loses one name loses everything below it.
fn create_durably(path: &Path, sync: &mut dyn FnMut(&Path) -> io::Result<()>) -> io::Result<()> {
    let missing = |directory: &&Path| !directory.as_os_str().is_empty() && !directory.is_dir();
    let missing: Vec<&Path> = path.ancestors().take_while(missing).collect();
    for directory in missing.iter().rev() {
        let created = fs::DirBuilder::new().mode(0o700).create(directory);
        created.or_else(|error| match error.kind() {
            // Another process created it at the same time.
            io::ErrorKind::AlreadyExists if directory.is_dir() => Ok(()),
            io::ErrorKind::AlreadyExists if is_dangling(directory) => Err(dangling(directory)),
            _ => Err(error),
        })?;
    }
    for (parent, child) in path.ancestors().skip(1).zip(path.ancestors()) {
        match sync(parent) {
            Err(error) if missing.contains(&child) => return Err(error),
            // An earlier start may have created the child and crashed before the sync. If the child
            // is older, the sync is unnecessary and this account may not be allowed to open the
            // parent.
            _ => {}
        }
    }
    Ok(())
}

/// Whether a path is a link, and its target cannot be found.
pub(crate) fn is_dangling(path: &Path) -> bool {
    path.is_symlink() && !path.exists()
}

/// The error of a start that cannot create a directory because a link without a target has its
/// path.
pub(crate) fn dangling(link: &Path) -> io::Error {
    let why = format!(
        "{} is a symbolic link whose target is missing or not accessible, such as a directory on a disk that is not mounted",
        link.display()
    );
    io::Error::new(io::ErrorKind::AlreadyExists, why)
}

/// The only random number of the standard library: the operating system seeds the keys of its hash
/// tables.
pub(crate) fn entropy() -> u64 {
    RandomState::new().hash_one(std::process::id())
}

#[derive(Debug)]
pub(crate) struct PlainFile(pub(crate) fs::File);

impl PlainFile {
    /// Creates a file that does not exist yet. Follows no link.
    pub(crate) fn create_new(path: &Path) -> io::Result<Self> {
        Self::options().create_new(true).open(path).map(Self)
    }

    fn options() -> fs::OpenOptions {
        let mut options = fs::OpenOptions::new();
        options.read(true).write(true).mode(0o600);
        options
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

/// A block of a file that the device cannot return.
#[derive(Debug)]
pub(crate) struct Unreadable {
    pub(crate) offset: u64,
    pub(crate) error: io::Error,
}

/// Reads a whole file into `buffer`, which callers reuse for the next file. Returns the first block
/// that the device cannot return, if there is one; all such blocks are zero in `buffer`.
pub(crate) fn read_whole(file: &dyn File, buffer: &mut Vec<u8>) -> io::Result<Option<Unreadable>> {
    let bytes = file.bytes()?;
    if bytes > limits::SEGMENT_FILE_BYTES_MAX {
        return Err(io::Error::new(
            io::ErrorKind::InvalidData,
            "the file is too large for a file of the log",
        ));
    }
    // Cannot truncate: bounded by the check above. Only growth is zeroed, the rest is overwritten.
    buffer.resize(bytes as usize, 0);
    match file.read_at(buffer, 0) {
        Ok(read) => {
            buffer.truncate(read);
            Ok(None)
        }
        Err(error) if is_unreadable(&error) => read_blocks(file, buffer),
        Err(error) => Err(error),
    }
}

/// Fills `buffer` from the start of a file, block by block.
fn read_blocks(file: &dyn File, buffer: &mut [u8]) -> io::Result<Option<Unreadable>> {
    let mut first = None;
    let mut offset = 0;
    for block in buffer.chunks_mut(limits::READ_BLOCK_BYTES) {
        let read = match file.read_at(block, offset) {
            Err(error) if is_unreadable(&error) => {
                first.get_or_insert(Unreadable { offset, error });
                0
            }
            read => read?,
        };
        block[read..].fill(0);
        offset += block.len() as u64;
    }
    Ok(first)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parents_of_a_new_directory_are_synced() {
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

    /// Regression: the open waited for ever.
    #[test]
    fn pipe_in_the_place_of_a_file_is_refused() {
        use rustix::fs::{CWD, FileType, Mode, mknodat};

        let place = tempfile::tempdir().expect("a directory");
        for name in [files::SEGMENT_TEMPORARY, files::LOCK] {
            let pipe = place.path().join(name);
            mknodat(CWD, &pipe, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).expect("a pipe");
        }
        let disk = Directory::read_only(place.path()).expect("a directory");
        let error = disk.open_read_only(files::SEGMENT_TEMPORARY).err();
        let error = error.expect("refused").to_string();
        assert_eq!(error, "it is not a regular file");
        Directory::open(place.path()).expect_err("the lock is a pipe");
    }

    #[test]
    fn unsyncable_parent_fails_only_for_a_new_directory() {
        let place = tempfile::tempdir().expect("a directory");
        let path = place.path().join("a/b");
        let mut fail = |_: &Path| Err(io::Error::other("no"));
        create_durably(&path, &mut fail).expect_err("its name may be lost");
        create_durably(&path, &mut fail).expect("it is older");
    }
}
