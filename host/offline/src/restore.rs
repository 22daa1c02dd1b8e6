//! Creates a data directory from a backup.
//!
//! A restore checks every byte and block of the backup before it writes, and reads all of them from
//! the file that it opened first. It must never change a directory that has a log or other files,
//! unless they are of a restore that was interrupted. A marker distinguishes the two: no store may
//! start while it is there.

use std::collections::HashSet;
use std::fs::{self, File};
use std::io::ErrorKind;
use std::path::Path;
use std::sync::Arc;

use statehouse_wal::{
    Backup, Directory, Disk, Error, FileReport, Kind, LOCK, Log, LogPosition, Options, Sink,
    has_log, inspect,
};

use super::backup::{Contents, ModuleState, RecoveredState};
use super::{ClusterMark, EVERYTHING, PastError};
use statehouse_core::log::{Block, Image, read_block};
use statehouse_precompiled::Modules;

/// Creates a data directory from a backup and returns its contents.
pub fn restore(file: &Path, directory: &Path, now_ms: u64) -> Result<Contents, PastError> {
    let backup = open(file)?;
    let contents = contents(file, &backup)?;
    let position = contents.position;
    let failed = |error| PastError::Log(directory.to_owned(), error);
    if directory.exists() && !directory.is_dir() {
        return Err(PastError::Refused(format!(
            "{} is not a directory and was not changed: restore into an empty or a new directory",
            directory.display()
        )));
    }
    // The lock would add a file to a directory that is refused.
    if directory.is_dir() && !directory.join(LOCK).exists() {
        let disk = Directory::read_only(directory).map_err(failed)?;
        refuse_content(directory, &disk)?;
    }
    // The lock is held until the marker is removed.
    let disk = Arc::new(Directory::open(directory).map_err(failed)?);
    refuse_content(directory, &*disk)?;
    let failed_io = |error| PastError::Io(directory.to_owned(), error);
    begin(&disk, directory, is_unfinished(directory))?;
    write(file, &backup, directory, disk.clone(), position, now_ms)?;
    fs::remove_file(directory.join(MARKER)).map_err(failed_io)?;
    disk.sync_directory().map_err(failed_io)?;
    Ok(contents)
}

/// The names that a directory may hold before a restore: those of an interrupted restore whose log
/// was removed, that of an earlier store, and the directory of a file system for lost files.
const EXPECTED: [&str; 4] = [LOCK, "policies", NAME_FILE, "lost+found"];

/// Refuses a directory that is in use for anything else, such as another store or a home.
fn refuse_content(directory: &Path, disk: &dyn Disk) -> Result<(), PastError> {
    let failed = |error| PastError::Io(directory.to_owned(), error);
    let refused = |why: &str| {
        PastError::Refused(format!(
            "{} {why} and was not changed: restore into an empty or a new directory",
            directory.display()
        ))
    };
    let is_repeated = is_unfinished(directory);
    if !is_repeated && has_log(disk).map_err(failed)? {
        return Err(refused("holds a store already"));
    }
    if let Some(ClusterMark { name, .. }) = ClusterMark::of(directory)? {
        let why = format!("belongs to a host of the cluster {name}");
        return Err(refused(&why));
    }
    if is_repeated {
        return Ok(());
    }
    for entry in fs::read_dir(directory).map_err(failed)? {
        let name = entry.map_err(failed)?.file_name();
        if !EXPECTED.iter().any(|it| name == *it) {
            let why = format!("holds other files, such as {},", name.display());
            return Err(refused(&why));
        }
    }
    Ok(())
}

/// The name of the file that a directory has while a restore into it is unfinished.
const MARKER: &str = "restore-unfinished";

/// The file of a data directory that contains the name of its store, which is the MQTT client id of
/// the store at a foreign broker.
pub const NAME_FILE: &str = "mqtt-client-id";

/// Marks the restore as unfinished. Then removes the log of an interrupted restore, and the name of
/// an earlier store: under that name, orders of the earlier store could be replayed.
fn begin(disk: &Directory, directory: &Path, is_repeated: bool) -> Result<(), PastError> {
    let failed = |error| PastError::Io(directory.to_owned(), error);
    match is_repeated {
        true => remove_log(disk, directory)?,
        false => File::create(directory.join(MARKER))
            .and_then(|it| it.sync_all())
            .map_err(failed)?,
    }
    match fs::remove_file(directory.join(NAME_FILE)) {
        Err(error) if error.kind() != ErrorKind::NotFound => return Err(failed(error)),
        _ => {}
    }
    disk.sync_directory().map_err(failed)
}

/// Whether a restore into this directory was interrupted, or is not finished yet.
pub fn is_unfinished(directory: &Path) -> bool {
    directory.join(MARKER).exists()
}

/// Removes what an interrupted restore has written of the log.
fn remove_log(disk: &Directory, directory: &Path) -> Result<(), PastError> {
    let report = inspect(disk).map_err(|error| PastError::Log(directory.to_owned(), error))?;
    let is_of_log = |it: &FileReport| !matches!(it.kind, Kind::Lock | Kind::Other);
    for file in report.files.into_iter().filter(is_of_log) {
        let path = directory.join(file.name);
        fs::remove_file(&path).map_err(|error| PastError::Io(path, error))?;
    }
    Ok(())
}

/// Opens a backup. Only a regular file can be read at any offset; the open of a pipe could wait.
fn open(file: &Path) -> Result<Backup, PastError> {
    let what = match fs::metadata(file) {
        Ok(about) if about.is_dir() => Some("a directory: name a file in it"),
        Ok(about) if !about.is_file() => Some("a device, a pipe or a socket: name a file"),
        // If it cannot be examined, the open reports why.
        _ => None,
    };
    if let Some(what) = what {
        let why = format!(
            "{} cannot be used as a backup: it is {what}",
            file.display()
        );
        return Err(PastError::Refused(why));
    }
    Backup::open(file).map_err(|error| unreadable(file, error))
}

/// Reads every byte and block of a backup, and returns its contents.
pub fn check_backup(file: &Path) -> Result<Contents, PastError> {
    contents(file, &open(file)?)
}

fn contents(file: &Path, backup: &Backup) -> Result<Contents, PastError> {
    let mut image = Image::new(EVERYTHING);
    let mut found = HashSet::new();
    let read = backup.read(&mut EachBlock(|block: &[u8]| {
        if let Some((digest, _)) = module_of(block)? {
            found.insert(digest);
        }
        image.block(block).map_err(|error| error.to_string())
    }));
    let position = read.map_err(|error| unreadable(file, error))?;
    let module = |digest: &blake3::Hash| match found.contains(digest) {
        true => Ok(ModuleState::Whole),
        false => Ok(ModuleState::absent(digest)),
    };
    // Those of the file, since messages may have expired after the backup was written.
    let (_, retained) = image.sessions.counts();
    Ok(Contents {
        retained: retained as u64,
        ..RecoveredState::of(image).contents(position, module)?
    })
}

fn not_restored(directory: &Path, error: Error) -> PastError {
    let why =
        format!("was not restored: {error}. The directory does not hold a store: restore again");
    match error {
        Error::Io { source, .. } => {
            let why = std::io::Error::new(source.kind(), why);
            PastError::Io(directory.to_owned(), why)
        }
        _ => PastError::Refused(format!("{} {why}", directory.display())),
    }
}

/// Reads only the keys of a backup, and its time.
pub fn read_backup(file: &Path) -> Result<Image, PastError> {
    let mut image = Image::of_keys();
    let read = open(file)?.read(&mut EachBlock(|block: &[u8]| {
        module_of(block)?;
        image.block(block).map_err(|error| error.to_string())
    }));
    read.map_err(|error| unreadable(file, error))?;
    Ok(image)
}

fn unreadable(file: &Path, error: Error) -> PastError {
    let why = match error {
        Error::Io { source, .. } => format!("cannot be read: {source}"),
        Error::Damaged(damage) => format!(
            "is damaged at byte {}: {}. Use another backup",
            damage.offset.unwrap_or_default(),
            damage.reason
        ),
        other => format!("cannot be used: {other}"),
    };
    PastError::Backup(file.to_owned(), why)
}

/// Calls a function with each block of a backup. A backup has no records, and is read once.
struct EachBlock<F: FnMut(&[u8]) -> Result<(), String>>(F);

impl<F: FnMut(&[u8]) -> Result<(), String>> Sink for EachBlock<F> {
    fn reset(&mut self) {}

    fn block(&mut self, block: &[u8]) -> Result<(), String> {
        (self.0)(block)
    }

    fn record(&mut self, _: LogPosition, _: &[u8]) -> Result<(), String> {
        Ok(())
    }
}

/// The module in a block, if it is the block of one.
fn module_of(block: &[u8]) -> Result<Option<(blake3::Hash, &[u8])>, String> {
    match read_block(block).map_err(|error| error.to_string())? {
        Block::Module { digest, file } if blake3::hash(file) == digest => Ok(Some((digest, file))),
        Block::Module { .. } => Err("a module does not match its digest".into()),
        _ => Ok(None),
    }
}

/// Writes the contents of a backup to a data directory: a log that begins with its blocks, and its
/// modules. An error of one of the two says nothing about the other.
fn write(
    file: &Path,
    backup: &Backup,
    directory: &Path,
    disk: Arc<Directory>,
    position: LogPosition,
    now_ms: u64,
) -> Result<(), PastError> {
    let failed = |error| not_restored(directory, error);
    let modules = Modules::of(directory);
    let log = Log::create(disk, Options::default(), position, now_ms).map_err(failed)?;
    if let Some(mut snapshot) = log.begin_snapshot(now_ms).map_err(failed)? {
        // The error of the data directory, if that ended the read.
        let mut unwritten = None;
        let read = backup.read(&mut EachBlock(|block: &[u8]| {
            let written = match module_of(block)? {
                Some((digest, module)) => {
                    let saved = modules.save(&digest, module);
                    saved.map_err(|source| Error::Io {
                        operation: "write",
                        file: modules.path(&digest).display().to_string(),
                        source,
                    })
                }
                None => snapshot.block(block),
            };
            written.map_err(|error| {
                let text = error.to_string();
                unwritten = Some(error);
                text
            })
        }));
        if let Some(error) = unwritten {
            return Err(failed(error));
        }
        read.map_err(|error| unreadable(file, error))?;
        log.finish_snapshot(snapshot).map_err(failed)?;
    }
    log.close().map_err(failed)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn failed_disk_is_an_io_error_not_a_refusal() {
        let source = std::io::Error::from(std::io::ErrorKind::StorageFull);
        let full = Error::Io {
            operation: "write",
            file: "snapshot.tmp".into(),
            source,
        };
        let error = not_restored(Path::new("data"), full);
        assert!(matches!(error, PastError::Io(..)), "{error:?}");
        let text = error.to_string();
        assert!(
            text.starts_with("data") && text.contains("restore again"),
            "{text}"
        );
        let busy = not_restored(Path::new("data"), Error::Busy);
        assert!(matches!(busy, PastError::Refused(_)), "{busy:?}");
    }
}
