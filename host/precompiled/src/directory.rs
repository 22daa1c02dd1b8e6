//! A directory of machine code that only this account can write to.
//!
//! What enters: code, and what it was made of and by. What leaves: the same code, whole, or nothing. Files are not
//! synced: what a power failure leaves of one has another digest.

use std::ffi::CString;
use std::fs::{DirBuilder, File};
use std::io::{self, Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use rustix::fs::{AtFlags, Dir, FileType, Mode, OFlags};

/// The digest that a file begins with.
const DIGEST_BYTES: usize = blake3::OUT_LEN;

/// How much is kept: of more, what was used last.
#[derive(Clone, Copy, Debug)]
pub struct Bounds {
    /// Files.
    pub files_max: usize,
    /// Bytes of all files.
    pub bytes_max: u64,
}

/// A file, ordered by when it was used last.
#[derive(PartialEq, Eq, PartialOrd, Ord)]
struct Kept {
    used: (i64, u64),
    bytes: u64,
    name: CString,
}

/// An open directory. It stays the one that was looked at, whatever its path leads to later.
#[derive(Debug)]
pub struct Directory {
    handle: OwnedFd,
    bounds: Bounds,
}

/// Why a directory is not used.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// It cannot be made or opened.
    #[error("{0} cannot be opened as a directory: {1}")]
    Open(PathBuf, io::Error),
    /// It is somebody else's.
    #[error("{0} belongs to the user with the number {1}, who could put any program there")]
    Owner(PathBuf, u32),
    /// Others may write there.
    #[error(
        "{0} has the mode {1:o}, and 700 would keep others out: remove it, since others may have put a program there"
    )]
    Mode(PathBuf, u32),
}

impl Directory {
    /// Opens a directory, which is made where there is none.
    ///
    /// # Errors
    /// Where it cannot be opened, or anybody but this account can write there.
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
        Ok(Self { handle, bounds })
    }

    /// The code of a component for an engine, if it is there and whole.
    pub(crate) fn load(&self, engine: &blake3::Hash, component: &blake3::Hash) -> Option<Vec<u8>> {
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
        // It may have grown meanwhile, by a mistake of somebody's.
        (&mut file)
            .take(self.bounds.bytes_max)
            .read_to_end(&mut code)
            .ok()?;
        if digest(engine, component, &code) != seen {
            return None;
        }
        // Used last, so it goes last. Where that cannot be said it goes sooner.
        let _ = file.set_modified(SystemTime::now());
        Some(code)
    }

    /// Keeps the code of a component for an engine, in the room of what was not used for longest.
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
            // On a full disk its beginning would take what little room there is.
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

    /// Removes the files that were not used for longest, until another one has room.
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

    /// All files. What an interrupted write left is one of them.
    fn files(&self) -> io::Result<Vec<Kept>> {
        let mut files = Vec::new();
        for entry in Dir::read_from(&self.handle)? {
            let entry = entry?;
            let name = entry.file_name();
            let about = rustix::fs::statat(&self.handle, name, AtFlags::SYMLINK_NOFOLLOW)?;
            if FileType::from_raw_mode(about.st_mode).is_file() {
                files.push(Kept {
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

/// What a file of machine code begins with.
fn digest(engine: &blake3::Hash, component: &blake3::Hash, code: &[u8]) -> [u8; DIGEST_BYTES] {
    let mut hasher = blake3::Hasher::new();
    hasher.update(engine.as_bytes());
    hasher.update(component.as_bytes());
    hasher.update(code);
    *hasher.finalize().as_bytes()
}
