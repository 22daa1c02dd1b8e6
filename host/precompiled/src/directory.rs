//! A directory of machine code that only this account can write to.
//!
//! Files are not synced. Each begins with a digest, so that a file damaged by a power failure is
//! detected and ignored.

use std::ffi::CString;
use std::fs::{DirBuilder, File};
use std::io::{self, Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use rustix::fs::{AtFlags, Dir, FileType, Mode, OFlags};

/// The length of the digest at the start of a file.
const DIGEST_BYTES: usize = blake3::OUT_LEN;

/// The limits of the directory. Beyond them, the least recently used files are removed.
#[derive(Clone, Copy, Debug)]
pub struct Bounds {
    /// Number of files.
    pub files_max: usize,
    /// Bytes of all files.
    pub bytes_max: u64,
}

/// A file. The order is that of the last use.
#[derive(PartialEq, Eq, PartialOrd, Ord)]
struct CachedFile {
    used: (i64, u64),
    bytes: u64,
    name: CString,
}

/// An open directory. The handle keeps referring to the directory that was checked, even if its
/// path changes.
#[derive(Debug)]
pub struct Directory {
    handle: OwnedFd,
    bounds: Bounds,
    is_write_only: bool,
}

/// Why a directory is not used.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The directory cannot be created or opened.
    #[error("{0} cannot be opened as a directory: {1}")]
    Open(PathBuf, io::Error),
    /// The directory belongs to another account.
    #[error(
        "{0} belongs to the user with the number {1}, which could put any program there: use a directory of this account"
    )]
    Owner(PathBuf, u32),
    /// Other accounts have access to the directory.
    #[error(
        "{0} has the mode {1:o} instead of 700, so other accounts may have put a program there: remove it"
    )]
    Mode(PathBuf, u32),
}

impl Directory {
    /// Opens a directory, and creates it if it is missing. Fails if it cannot be opened, or if
    /// another account can write to it.
    pub fn open(path: &Path, bounds: Bounds) -> Result<Self, Error> {
        let failed = |error| Error::Open(path.to_owned(), error);
        match DirBuilder::new().mode(0o700).create(path) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => {
                return Err(failed(error));
            }
            _ => {}
        }
        let flags = OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::RDONLY | OFlags::CLOEXEC;
        let handle = rustix::fs::open(path, flags, Mode::empty());
        let handle = handle.map_err(|error| failed(error.into()))?;
        let about = rustix::fs::fstat(&handle).map_err(|error| failed(error.into()))?;
        if about.st_uid != rustix::process::geteuid().as_raw() {
            return Err(Error::Owner(path.to_owned(), about.st_uid));
        }
        let mode = Mode::from_raw_mode(about.st_mode);
        if mode.intersects(Mode::RWXG | Mode::RWXO) {
            return Err(Error::Mode(path.to_owned(), mode.bits()));
        }
        Ok(Self {
            handle,
            bounds,
            is_write_only: false,
        })
    }

    /// The same directory, from which nothing is loaded: every component is compiled, and saved for
    /// others.
    #[must_use]
    pub fn write_only(self) -> Self {
        Self {
            is_write_only: true,
            ..self
        }
    }

    /// Loads the code of a component for an engine, if an intact file exists.
    pub(crate) fn load(&self, engine: &blake3::Hash, component: &blake3::Hash) -> Option<Vec<u8>> {
        if self.is_write_only {
            return None;
        }
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let name = name(engine, component);
        let file = rustix::fs::openat(&self.handle, name, flags, Mode::empty()).ok()?;
        let mut file = File::from(file);
        let bytes = file.metadata().ok()?.len();
        if bytes > self.bounds.bytes_max {
            return None;
        }
        let mut seen = [0; DIGEST_BYTES];
        file.read_exact(&mut seen).ok()?;
        let mut code = Vec::with_capacity(usize::try_from(bytes).ok()?);
        // The file may have grown since its length was read.
        (&mut file)
            .take(self.bounds.bytes_max)
            .read_to_end(&mut code)
            .ok()?;
        if digest(engine, component, &code) != seen {
            return None;
        }
        // Marks the file as the most recently used one. If this fails, the file is merely removed
        // sooner.
        let _ = file.set_modified(SystemTime::now());
        Some(code)
    }

    /// Saves the code of a component for an engine, and removes the least recently used files to
    /// make room.
    pub(crate) fn save(
        &self,
        engine: &blake3::Hash,
        component: &blake3::Hash,
        code: &[u8],
    ) -> io::Result<()> {
        let bytes = (DIGEST_BYTES + code.len()) as u64;
        if bytes > self.bounds.bytes_max {
            return Err(io::Error::new(
                io::ErrorKind::FileTooLarge,
                format!(
                    "it has {bytes} bytes, and all files together may have {}",
                    self.bounds.bytes_max
                ),
            ));
        }
        self.make_room(bytes)?;
        let name = name(engine, component);
        let new = format!("{name}.new");
        let written = self.write(&new, engine, component, code).and_then(|()| {
            Ok(rustix::fs::renameat(
                &self.handle,
                &new,
                &self.handle,
                &name,
            )?)
        });
        if written.is_err() {
            // On a full disk the incomplete file would take the remaining space.
            let _ = rustix::fs::unlinkat(&self.handle, &new, AtFlags::empty());
        }
        written
    }

    fn write(
        &self,
        name: &str,
        engine: &blake3::Hash,
        component: &blake3::Hash,
        code: &[u8],
    ) -> io::Result<()> {
        let flags =
            OFlags::WRONLY | OFlags::CREATE | OFlags::TRUNC | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let mode = Mode::RUSR | Mode::WUSR;
        let mut file = File::from(rustix::fs::openat(&self.handle, name, flags, mode)?);
        file.write_all(&digest(engine, component, code))?;
        file.write_all(code)
    }

    /// Removes the least recently used files until another file fits.
    fn make_room(&self, bytes: u64) -> io::Result<()> {
        let mut files = self.files()?;
        files.sort();
        let mut count = files.len();
        let mut sum: u64 = files.iter().map(|it| it.bytes).sum();
        for oldest in files {
            if count < self.bounds.files_max && sum + bytes <= self.bounds.bytes_max {
                break;
            }
            rustix::fs::unlinkat(&self.handle, oldest.name, AtFlags::empty())?;
            count -= 1;
            sum -= oldest.bytes;
        }
        Ok(())
    }

    /// All files, including those of an interrupted write.
    fn files(&self) -> io::Result<Vec<CachedFile>> {
        let mut files = Vec::new();
        for entry in Dir::read_from(&self.handle)? {
            let entry = entry?;
            let name = entry.file_name();
            let about = rustix::fs::statat(&self.handle, name, AtFlags::SYMLINK_NOFOLLOW)?;
            if FileType::from_raw_mode(about.st_mode).is_file() {
                files.push(CachedFile {
                    used: (about.st_mtime as i64, about.st_mtime_nsec as u64),
                    bytes: about.st_size as u64,
                    name: name.to_owned(),
                });
            }
        }
        Ok(files)
    }
}

fn name(engine: &blake3::Hash, component: &blake3::Hash) -> String {
    format!("{}-{}.code", component.to_hex(), &engine.to_hex()[..16])
}

/// The digest at the start of a file of machine code.
fn digest(engine: &blake3::Hash, component: &blake3::Hash, code: &[u8]) -> [u8; DIGEST_BYTES] {
    let mut hasher = blake3::Hasher::new();
    hasher.update(engine.as_bytes());
    hasher.update(component.as_bytes());
    hasher.update(code);
    *hasher.finalize().as_bytes()
}
