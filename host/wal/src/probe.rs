//! What a start would find at the path of a data directory. Nothing is created, changed or locked.

use std::fs;
use std::io::{self, ErrorKind};
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use rustix::fs::{
    Access, AtFlags, CWD, FallocateFlags, Mode, OFlags, accessat, fallocate, open, statvfs,
};
use rustix::io::Errno;

use crate::disk::{Directory, Disk, dangling, is_dangling};
use crate::error::{Error, is_full};
use crate::files::{self, Kind};
use crate::limits;
use crate::survey::Survey;

/// What is at the path of a data directory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Probed {
    /// Nothing. A start can create the directory.
    Missing,
    /// A directory that this process can use.
    Present {
        /// Whether a process has locked it, as far as the kernel of this machine knows.
        locked: bool,
    },
}

/// The locks of the kernel: proc_locks(5).
const LOCKS: &str = "/proc/locks";

/// Checks the rights of this process to a data directory and its files. Fails if a start could not
/// create the directory, or could not read or write a file. Logs a warning for a file that only the
/// running store writes to.
pub fn probe(path: &Path) -> Result<Probed, Error> {
    let shown = path.display().to_string();
    match fs::metadata(path) {
        Ok(about) if about.is_dir() => {}
        // The error of a start, which creates the directory.
        Ok(_) => return Err(Error::io("create", &shown)(Errno::EXIST.into())),
        Err(_) if is_dangling(path) => return Err(Error::io("create", &shown)(dangling(path))),
        Err(error) if is_missing(&error) => {
            creatable(path).map_err(Error::io("create", &shown))?;
            return Ok(Probed::Missing);
        }
        Err(error) => return Err(Error::io("open", &shown)(error)),
    }
    let all = Access::READ_OK | Access::WRITE_OK | Access::EXEC_OK;
    allowed(path, all).map_err(Error::io("write to", &shown))?;
    let failed = |error| Error::io("list", &shown)(error);
    let mut locked = is_locked(path);
    for entry in fs::read_dir(path).map_err(failed)?.take(limits::FILES_MAX) {
        let entry = entry.map_err(failed)?;
        let name = entry.file_name();
        let file = entry.path();
        let kind = name.to_str().map_or(Kind::Other, files::kind);
        locked |= kind == Kind::Lock && is_locked(&file);
        check_file(kind, &file)?;
    }
    Ok(Probed::Present { locked })
}

/// Checks that a start can open the lock file of a data directory, as far as its kind decides that.
/// Rights are not checked.
///
/// # Errors
/// [`Error::Io`] like that of a start, if the lock is not a regular file or a link to one.
pub fn probe_lock(directory: &Path) -> Result<(), Error> {
    let shown = directory.display().to_string();
    lock_kind(&directory.join(files::LOCK)).map_err(Error::io("open the lock file of", &shown))
}

fn lock_kind(lock: &Path) -> io::Result<()> {
    match fs::metadata(lock) {
        Ok(about) if about.is_file() => Ok(()),
        Ok(about) if about.is_dir() => Err(Errno::ISDIR.into()),
        Ok(_) => Err(io::Error::other("it is not a regular file")),
        Err(error) if error.kind() == ErrorKind::NotFound => match fs::read_link(lock) {
            // A start creates the target of a link in an existing directory.
            Ok(target) => {
                let target = lock.with_file_name(target);
                fs::metadata(target.parent().unwrap_or(&target)).map(drop)
            }
            // A start creates the file.
            Err(_) => Ok(()),
        },
        // Rights are missing.
        Err(error) if error.kind() == ErrorKind::PermissionDenied => Ok(()),
        Err(error) => Err(error),
    }
}

/// Checks that a start can remove or use again the spares and incomplete files of a data directory,
/// as far as their kind decides that. Rights are not checked.
///
/// # Errors
/// [`Error::Io`] like that of a start, if a directory has the name of such a file.
pub fn probe_leftovers(directory: &Path) -> Result<(), Error> {
    let listed = Directory::read_only(directory)?.list();
    for name in listed.map_err(Error::io("list", "the data directory"))? {
        let is_leftover = matches!(files::kind(&name), Kind::Temporary | Kind::Spare(_));
        let about = fs::symlink_metadata(directory.join(&name));
        if is_leftover && about.is_ok_and(|it| it.is_dir()) {
            return Err(Error::io("remove", &name)(Errno::ISDIR.into()));
        }
    }
    Ok(())
}

/// Checks the rights to a file that a start needs.
fn check_file(kind: Kind, file: &Path) -> Result<(), Error> {
    let shown = file.display().to_string();
    let (access, operation) = match kind {
        // A start removes or renames the file, which is a right to the directory.
        Kind::Other | Kind::DamagedSnapshot(_) | Kind::Temporary => return Ok(()),
        Kind::Segment(_) | Kind::Snapshot(_) | Kind::Closed => (Access::READ_OK, "read"),
        Kind::Spare(_) | Kind::Newest | Kind::Lock => {
            (Access::READ_OK | Access::WRITE_OK, "read and write")
        }
    };
    match allowed(file, access) {
        // A running store removes files.
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(()),
        checked => checked.map_err(Error::io(operation, &shown))?,
    }
    if matches!(kind, Kind::Segment(_))
        && let Err(error) = allowed(file, Access::WRITE_OK)
        && error.kind() != ErrorKind::NotFound
    {
        tracing::warn!(file = shown, %error, "this account may not write to a segment: a start only reads it, but the store fails later, when it uses the file again");
    }
    Ok(())
}

/// Checks that the disk has room for what a start must write to a data directory: a short segment,
/// unless spares or removable history yield their room, and `more_bytes`.
///
/// # Errors
/// [`Error::Io`] of a full disk, which is [`Error::is_temporary`], or if the files cannot be read.
pub fn probe_room(path: &Path, more_bytes: u64) -> Result<(), Error> {
    let yielded = match path.is_dir() {
        true => yielded(&Directory::read_only(path)?)?,
        false => 0,
    };
    let bytes = (limits::SEGMENT_BYTES_FULL + more_bytes).saturating_sub(yielded);
    let there = path.ancestors().find(|it| it.is_dir());
    let there = there.unwrap_or(Path::new("."));
    match allocate(there, bytes) {
        Err(error) if is_full(&error) => Err(Error::io("create", files::SEGMENT_TEMPORARY)(error)),
        // Other errors: the file system has no unnamed files, or other rights are missing.
        _ => Ok(()),
    }
}

/// Allocates space in a file without a name, which ends at once. Asks for the free space if the
/// file system cannot do so.
fn allocate(directory: &Path, bytes: u64) -> io::Result<()> {
    if bytes == 0 {
        return Ok(());
    }
    let owner = Mode::RUSR | Mode::WUSR;
    let file = open(
        directory,
        OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC,
        owner,
    );
    match file.and_then(|file| fallocate(&file, FallocateFlags::empty(), 0, bytes)) {
        Ok(()) => Ok(()),
        Err(error) if is_full(&error.into()) => Err(error.into()),
        Err(_) => {
            let stat = statvfs(directory)?;
            match stat.f_bavail.saturating_mul(stat.f_frsize) < bytes {
                true => Err(Errno::NOSPC.into()),
                false => Ok(()),
            }
        }
    }
}

/// The bytes of files that a start uses again or removes to make room: incomplete files, spares,
/// damaged snapshots, and history before the newest snapshot.
fn yielded(disk: &Directory) -> Result<u64, Error> {
    let survey = Survey::of(disk)?;
    let newest = survey.snapshots.last().copied();
    let mut names = survey.temporaries.clone();
    names.extend(survey.spares.iter().map(|it| files::spare(*it)));
    if let Some(newest) = newest {
        names.extend(survey.damaged.iter().map(|it| files::damaged_snapshot(*it)));
        let older = survey.snapshots.iter().filter(|it| **it < newest);
        names.extend(older.map(|it| files::snapshot(*it)));
        names.extend(survey.segments_before(disk, newest)?.map(files::segment));
    }
    let mut bytes = 0_u64;
    for name in names {
        // A running store may remove files after they were listed.
        if let Ok(file) = disk.open_read_only(&name) {
            bytes = bytes.saturating_add(file.bytes().map_err(Error::io("read", &name))?);
        }
    }
    Ok(bytes)
}

/// Whether this process may create a directory and its missing parents.
fn creatable(path: &Path) -> io::Result<()> {
    let parents = path.ancestors().skip(1);
    for parent in parents {
        let parent = match parent.as_os_str().is_empty() {
            true => Path::new("."),
            false => parent,
        };
        match fs::metadata(parent) {
            Ok(about) if about.is_dir() => {
                return allowed(parent, Access::WRITE_OK | Access::EXEC_OK);
            }
            Ok(_) => return Err(Errno::EXIST.into()),
            Err(_) if is_dangling(parent) => return Err(dangling(parent)),
            Err(error) if is_missing(&error) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

fn is_missing(error: &io::Error) -> bool {
    matches!(error.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory)
}

/// Fails unless the account of this process has these rights.
fn allowed(path: &Path, access: Access) -> io::Result<()> {
    Ok(accessat(CWD, path, access, AtFlags::EACCESS)?)
}

/// Whether a process holds a lock of this file. A try to lock it could make a store fail that
/// starts at the same time.
fn is_locked(path: &Path) -> bool {
    let (Ok(about), Ok(locks)) = (fs::metadata(path), fs::read_to_string(LOCKS)) else {
        return false;
    };
    is_listed(&locks, about.ino())
}

/// Whether the list of locks has one of this inode. The devices are not compared, because some file
/// systems have another number in the list.
fn is_listed(locks: &str, inode: u64) -> bool {
    let inode_of = |line: &str| {
        let words: Vec<&str> = line.split_ascii_whitespace().collect();
        let is_flock = words.get(1) == Some(&"FLOCK");
        let file = words.get(5).filter(|_| is_flock)?;
        file.rsplit(':').next()?.parse::<u64>().ok()
    };
    locks.lines().any(|line| inode_of(line) == Some(inode))
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::{Discard, Log, Options};

    #[test]
    fn a_probe_changes_nothing_and_finds_the_lock() {
        let place = tempfile::tempdir().unwrap();
        let path = place.path().join("a/b");
        assert_eq!(probe(&path).unwrap(), Probed::Missing);
        assert!(!place.path().join("a").exists());
        let directory = Directory::open(&path).unwrap();
        assert_eq!(probe(&path).unwrap(), Probed::Present { locked: true });
        drop(directory);
        assert_eq!(probe(&path).unwrap(), Probed::Present { locked: false });
    }

    /// Regression: `serve --check` found no problem with such a lock.
    #[test]
    fn lock_that_a_start_cannot_open_is_refused_with_its_error() {
        let place = tempfile::tempdir().unwrap();
        let path = place.path();
        let lock = path.join(files::LOCK);
        let open = || Directory::open(path).map(drop);
        probe_lock(path).unwrap();
        fs::create_dir(&lock).unwrap();
        let found = [probe_lock(path), open()].map(|it| it.unwrap_err().to_string());
        assert_eq!(found[0], found[1]);
        fs::remove_dir(&lock).unwrap();
        let link = |target: &str| std::os::unix::fs::symlink(target, &lock).unwrap();
        link("missing/lock");
        let found = [probe_lock(path), open()].map(|it| it.unwrap_err().to_string());
        assert_eq!(found[0], found[1]);
        fs::remove_file(&lock).unwrap();
        link("other");
        // The first start creates the target.
        for _ in 0..2 {
            probe_lock(path).unwrap();
            open().unwrap();
        }
    }

    /// Regression: only a start found it.
    #[test]
    fn directory_in_the_place_of_a_leftover_is_refused() {
        for name in [files::spare(1).as_str(), files::SEGMENT_TEMPORARY] {
            let place = tempfile::tempdir().unwrap();
            let path = place.path();
            probe_leftovers(path).unwrap();
            fs::create_dir(path.join(name)).unwrap();
            let found = probe_leftovers(path).unwrap_err().to_string();
            let disk = Arc::new(Directory::open(path).unwrap());
            let started = Log::open(disk, Options::default(), 1, &mut Discard);
            assert_eq!(started.map(drop).unwrap_err().to_string(), found);
            assert!(found.contains(name), "{found}");
        }
    }

    #[test]
    fn room_is_found_without_a_change() {
        let place = tempfile::tempdir().unwrap();
        probe_room(&place.path().join("a/b"), 0).unwrap();
        let error = probe_room(place.path(), 1 << 60).unwrap_err();
        assert!(error.is_temporary(), "{error}");
        assert_eq!(fs::read_dir(place.path()).unwrap().count(), 0);
    }

    #[test]
    fn spares_yield_their_room_to_a_start() {
        let place = tempfile::tempdir().unwrap();
        let spare = fs::File::create(place.path().join(files::spare(1))).unwrap();
        spare.set_len(1 << 40).unwrap();
        probe_room(place.path(), 1 << 39).unwrap();
    }

    #[test]
    fn a_file_at_the_path_or_above_it_is_an_error() {
        let place = tempfile::tempdir().unwrap();
        let file = place.path().join("file");
        fs::write(&file, "").unwrap();
        let dangling = place.path().join("link");
        std::os::unix::fs::symlink(place.path().join("missing"), &dangling).unwrap();
        for path in [file.clone(), file.join("data"), dangling] {
            let error = probe(&path).unwrap_err().to_string();
            assert!(error.contains(&path.display().to_string()), "{error}");
        }
    }

    /// Regression: a start said "File exists", and a check of a directory below the link found no
    /// problem.
    #[test]
    fn link_without_a_target_is_named_by_a_check_and_a_start() {
        let place = tempfile::tempdir().unwrap();
        let link = place.path().join("link");
        std::os::unix::fs::symlink(place.path().join("unmounted"), &link).unwrap();
        for path in [link.clone(), link.join("data")] {
            let started = Directory::open(&path).unwrap_err().to_string();
            assert_eq!(probe(&path).unwrap_err().to_string(), started);
            let named = format!("{} is a symbolic link", link.display());
            assert!(started.contains(&named), "{started}");
        }
    }

    #[test]
    fn locks_of_other_files_and_kinds_do_not_count() {
        let locks = "1: FLOCK  ADVISORY  WRITE 1 fd:10:4711 0 EOF\n\
                     1: -> FLOCK  ADVISORY  WRITE 2 fd:10:5 0 EOF\n\
                     2: POSIX  ADVISORY  WRITE 2 fd:10:4712 0 EOF\n";
        assert!(is_listed(locks, 4711));
        assert!(!is_listed(locks, 4712) && !is_listed(locks, 47) && !is_listed("", 0));
    }
}
