//! Reloads files while the store runs: certificates, users, rules, settings.
//!
//! Each value keeps its last good version: a bad file is logged and counted, and must never replace
//! a good value. Files are polled every second and on SIGHUP, since file notifications do not cross
//! containers and network file systems. A file that was modified within the last second is left to
//! the next poll, since it may still be written to. After an error the files are read at each poll,
//! since the reason may be a thing that no stamp shows, such as the mode of a directory. Problems
//! that time alone causes, such as the expiry of a certificate, are logged once a day.

use std::fmt::Display;
use std::fs;
use std::io::{self, Read};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, RwLock};
use std::thread;
use std::time::{Duration, SystemTime};

use tokio::signal::unix::Signal;

use crate::blocking::{self, BlockingError};
use crate::limits;

/// Why a file cannot be read. The text is a sentence for the operator.
#[derive(Debug, thiserror::Error)]
pub enum FileError {
    /// The system could not open or read it.
    #[error("cannot read {0}: {1}")]
    Read(PathBuf, #[source] io::Error),
    /// It is a directory, a pipe or a device. Reading it might never end.
    #[error("cannot read {0}: it is not a regular file")]
    Kind(PathBuf),
    /// The file is larger than its limit.
    #[error("{0} is larger than {1} bytes, the limit for this file")]
    Size(PathBuf, u64),
}

/// Reads a file of at most `bytes_max` bytes. Fails if the file cannot be read, is not a regular
/// file, or is larger.
pub fn read_file(path: &Path, bytes_max: u64) -> Result<Vec<u8>, FileError> {
    let failed = |error| FileError::Read(path.to_owned(), error);
    if !fs::metadata(path).map_err(failed)?.is_file() {
        return Err(FileError::Kind(path.to_owned()));
    }
    let file = fs::File::open(path).map_err(failed)?;
    let mut bytes = Vec::new();
    file.take(bytes_max.saturating_add(1))
        .read_to_end(&mut bytes)
        .map_err(failed)?;
    if bytes.len() as u64 > bytes_max {
        return Err(FileError::Size(path.to_owned(), bytes_max));
    }
    Ok(bytes)
}

/// A value that is read from files and reloaded when they change.
pub struct Watched<T> {
    what: &'static str,
    files: Vec<PathBuf>,
    read: Box<dyn Fn() -> Result<T, String> + Send + Sync>,
    value: RwLock<Arc<T>>,
    seen: Mutex<Seen>,
    /// Consecutive polls at which the files had changed but were possibly still being written.
    postponed: AtomicU64,
    taken: AtomicU64,
    refused: AtomicU64,
}

/// The state of the files at the last read.
struct Seen {
    /// Taken just before the read, even if it failed.
    stamps: Vec<Option<Stamp>>,
    /// The error of the read.
    error: Option<String>,
}

/// The stamps of files, taken before they are read, so that the next poll finds later writes.
pub struct Files {
    paths: Vec<PathBuf>,
    seen: Vec<Option<Stamp>>,
}

impl Files {
    /// Takes the stamps. Waits a moment first if a file is possibly being written, so that a start
    /// does not read half a file.
    pub fn look(paths: Vec<PathBuf>) -> Self {
        let mut seen = stamps(&paths);
        let are_stable =
            |seen: &[Option<Stamp>]| are_older(seen, limits::STAMP_SETTLED, SystemTime::now());
        if !are_stable(&seen) {
            thread::sleep(limits::STAMP_SETTLED);
            seen = stamps(&paths);
        }
        if !are_stable(&seen) {
            // Makes the next poll read the files again.
            seen = Vec::new();
        }
        Self { paths, seen }
    }
}

/// The state of a file, by which a change is detected. A file that a rename or a changed link
/// replaces has another inode. `cp -p` and `chmod` may leave all but the time of the last change.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Stamp {
    inode: u64,
    mode: u32,
    bytes: u64,
    /// When the content was modified, in seconds and nanoseconds.
    modified: (i64, i64),
    /// When the content, the mode or the owner was changed (ctime), which no program can set.
    changed: (i64, i64),
}

impl<T: Send + Sync + 'static> Watched<T> {
    /// Reads the value for the first time. `what` names it in log lines and metrics, in the plural:
    /// "rules". Fails if `read` fails: a store must not start with a bad file.
    pub fn open<E: Display>(
        what: &'static str,
        files: Vec<PathBuf>,
        read: impl Fn() -> Result<T, E> + Send + Sync + 'static,
    ) -> Result<Arc<Self>, E> {
        let files = Files::look(files);
        let value = read()?;
        Ok(Self::following(what, files, value, read))
    }

    /// Watches files whose value the caller has read after `files` took their stamps.
    pub fn following<E: Display>(
        what: &'static str,
        files: Files,
        value: T,
        read: impl Fn() -> Result<T, E> + Send + Sync + 'static,
    ) -> Arc<Self> {
        Arc::new(Self {
            what,
            files: files.paths,
            read: Box::new(move || read().map_err(|error| error.to_string())),
            value: RwLock::new(Arc::new(value)),
            seen: Mutex::new(Seen {
                stamps: files.seen,
                error: None,
            }),
            postponed: AtomicU64::new(0),
            taken: AtomicU64::new(0),
            refused: AtomicU64::new(0),
        })
    }

    /// The watched files.
    pub fn files(&self) -> &[PathBuf] {
        &self.files
    }

    /// The last good value.
    pub fn current(&self) -> Arc<T> {
        // A panic under this lock leaves the old value, which is valid.
        let value = self.value.read().unwrap_or_else(PoisonError::into_inner);
        value.clone()
    }
}

/// A [`Watched`] of any type.
trait Reload: Send + Sync {
    /// Reads the files again if they changed, or if `forced`. Returns whether the value was
    /// replaced.
    fn look(&self, forced: bool, now: &dyn Fn() -> SystemTime) -> bool;
    fn count(&self) -> Count;
}

impl<T: Send + Sync + 'static> Reload for Watched<T> {
    fn look(&self, forced: bool, now: &dyn Fn() -> SystemTime) -> bool {
        let mut seen = self.seen.lock().unwrap_or_else(PoisonError::into_inner);
        // The stamps are taken before the files are read, so that the next poll finds later writes.
        let stamps = stamps(&self.files);
        let is_retry = seen.stamps == stamps && !forced;
        if is_retry && seen.error.is_none() {
            return false;
        }
        let now = now();
        let settled = are_older(&stamps, limits::RELOAD_SETTLED, now);
        let postponed = || self.postponed.fetch_add(1, Ordering::Relaxed);
        if !settled && !forced && postponed() < limits::RELOAD_PUT_OFF_MAX {
            return false;
        }
        self.postponed.store(0, Ordering::Relaxed);
        // Files whose next write may leave the same stamps are read again at the next poll.
        seen.stamps = match are_older(&stamps, limits::STAMP_SETTLED, now) {
            true => stamps,
            false => Vec::new(),
        };
        let what = self.what;
        match (self.read)() {
            Ok(value) => {
                seen.error = None;
                *self.value.write().unwrap_or_else(PoisonError::into_inner) = Arc::new(value);
                self.taken.fetch_add(1, Ordering::Relaxed);
                tracing::info!("{what}: read again");
                true
            }
            Err(error) => {
                if !is_retry || seen.error.as_ref() != Some(&error) {
                    self.refused.fetch_add(1, Ordering::Relaxed);
                    tracing::error!("{what}: {error}; the previous value stays in force");
                }
                seen.error = Some(error);
                false
            }
        }
    }

    fn count(&self) -> Count {
        Count {
            what: self.what,
            taken: self.taken.load(Ordering::Relaxed),
            refused: self.refused.load(Ordering::Relaxed),
        }
    }
}

fn stamps(files: &[PathBuf]) -> Vec<Option<Stamp>> {
    let stamp = |path: &PathBuf| {
        let data = fs::metadata(path).ok()?;
        Some(Stamp {
            inode: data.ino(),
            mode: data.mode(),
            bytes: data.len(),
            modified: (data.mtime(), data.mtime_nsec()),
            changed: (data.ctime(), data.ctime_nsec()),
        })
    };
    files.iter().map(stamp).collect()
}

/// Whether the last write to each file is at least so old. `now` must be read after the stamps, so
/// that the next poll finds later writes.
fn are_older(stamps: &[Option<Stamp>], least: Duration, now: SystemTime) -> bool {
    let mut stamps = stamps.iter().flatten();
    stamps.all(|stamp| is_older(stamp, least, now))
}

/// Whether the last write is at least so old. A time in the future counts as old: it comes from
/// another clock.
fn is_older(stamp: &Stamp, least: Duration, now: SystemTime) -> bool {
    let (seconds, nanoseconds) = stamp.modified;
    let (Ok(seconds), Ok(nanoseconds)) = (seconds.try_into(), nanoseconds.try_into()) else {
        return true;
    };
    let written = SystemTime::UNIX_EPOCH.checked_add(Duration::new(seconds, nanoseconds));
    let age = written.and_then(|written| now.duration_since(written).ok());
    age.is_none_or(|age| age >= least)
}

/// How often a value was reloaded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Count {
    /// The name of the value.
    pub what: &'static str,
    /// Successful reloads.
    pub taken: u64,
    /// Failed reloads, after which the previous value stayed in force.
    pub refused: u64,
}

/// All values that are reloaded.
#[derive(Default)]
pub struct Reloads {
    entries: Vec<Entry>,
    warnings: Vec<Warnings>,
}

struct Entry {
    watched: Arc<dyn Reload>,
    then: Box<dyn Fn() + Send + Sync>,
}

/// Warnings that are due once a day.
struct Warnings {
    at: Box<dyn Fn(SystemTime) -> Vec<String> + Send + Sync>,
    /// When they were due last.
    last: Mutex<SystemTime>,
}

impl Reloads {
    /// Adds a value. `then` is called after each replacement, on a thread that may block.
    pub fn add<T: Send + Sync + 'static>(
        &mut self,
        watched: &Arc<Watched<T>>,
        then: impl Fn() + Send + Sync + 'static,
    ) {
        self.entries.push(Entry {
            watched: watched.clone(),
            then: Box::new(then),
        });
    }

    /// Logs warnings once a day, the first ones a day from now. `at` returns those at a time. It is
    /// called on a thread that may block.
    pub fn warn_daily(&mut self, at: impl Fn(SystemTime) -> Vec<String> + Send + Sync + 'static) {
        self.warnings.push(Warnings {
            at: Box::new(at),
            last: Mutex::new(SystemTime::now()),
        });
    }

    /// The warnings that are due at the time `now`: at least a day after the previous ones, or
    /// after the clock was set back. They are due again a day later.
    #[must_use]
    pub fn due_warnings(&self, now: SystemTime) -> Vec<String> {
        let mut due = Vec::new();
        for Warnings { at, last } in &self.warnings {
            let mut last = last.lock().unwrap_or_else(PoisonError::into_inner);
            let age = now.duration_since(*last);
            if age.is_ok_and(|age| age < limits::WARNING_INTERVAL) {
                continue;
            }
            *last = now;
            due.extend(at(now));
        }
        due
    }

    /// The counts of each value.
    pub fn counts(&self) -> impl Iterator<Item = Count> {
        self.entries.iter().map(|entry| entry.watched.count())
    }

    /// Polls every second and at each SIGHUP, until it is dropped. Logs the warnings that are due.
    pub async fn run(self: Arc<Self>, mut hangup: Signal) {
        // A SIGHUP whose reload could not begin.
        let mut pending = false;
        let mut is_starved = false;
        loop {
            let hung_up = tokio::select! {
                signal = hangup.recv() => signal.is_some(),
                () = tokio::time::sleep(limits::RELOAD_POLL_INTERVAL) => false,
            };
            if hung_up {
                tracing::info!("SIGHUP: reloading files");
            }
            pending |= hung_up;
            let (all, forced) = (self.clone(), pending);
            // Reading blocks, and the callbacks may block too.
            let looked = blocking::run("reload", move || all.poll(forced)).await;
            match &looked {
                Err(BlockingError::Thread(error)) if !is_starved => {
                    tracing::error!(%error, "files are not reloaded until the system allows another thread");
                }
                Err(BlockingError::Panicked) => {
                    tracing::error!("reloading files failed: this is a bug");
                }
                Ok(()) if is_starved => tracing::info!("files are reloaded again"),
                _ => {}
            }
            is_starved = matches!(looked, Err(BlockingError::Thread(_)));
            pending &= is_starved;
        }
    }

    fn poll(&self, forced: bool) {
        self.look(forced);
        for warning in self.due_warnings(SystemTime::now()) {
            tracing::warn!("{warning}");
        }
    }

    /// Reads the files again that changed, or all if `forced`. Blocks.
    pub fn look(&self, forced: bool) {
        for entry in &self.entries {
            if entry.watched.look(forced, &SystemTime::now) {
                (entry.then)();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    /// A number in a file.
    fn number(path: &Path) -> Result<Arc<Watched<u32>>, String> {
        let read = {
            let path = path.to_owned();
            move || {
                let bytes = read_file(&path, 8).map_err(|error| error.to_string())?;
                let text = String::from_utf8(bytes).map_err(|error| error.to_string())?;
                text.parse::<u32>().map_err(|error| error.to_string())
            }
        };
        Watched::open("numbers", vec![path.to_owned()], read)
    }

    /// Writes a file with `turn` seconds after 1970 as its time of modification.
    fn write(path: &Path, text: &str, turn: u64) {
        fs::write(path, text).unwrap();
        let file = fs::File::options().write(true).open(path).unwrap();
        let time = SystemTime::UNIX_EPOCH + Duration::from_secs(turn);
        file.set_modified(time).unwrap();
    }

    #[test]
    fn changed_file_is_read_once_and_bad_file_is_ignored() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("number");
        write(&path, "1", 1);
        let watched = number(&path).unwrap();
        let notified = Arc::new(AtomicU64::new(0));
        let mut reloads = Reloads::default();
        reloads.add(&watched, {
            let notified = notified.clone();
            move || {
                notified.fetch_add(1, Ordering::Relaxed);
            }
        });
        let look = |forced| {
            reloads.look(forced);
            let count = reloads.counts().next().unwrap();
            let notified = notified.load(Ordering::Relaxed);
            assert_eq!(notified, count.taken);
            (*watched.current(), count.taken, count.refused)
        };
        assert_eq!(look(false), (1, 0, 0));
        write(&path, "22", 2);
        assert_eq!(look(false), (22, 1, 0));
        assert_eq!(look(false), (22, 1, 0));
        write(&path, "three", 3);
        assert_eq!(look(false), (22, 1, 1));
        // The error is logged once, not every second.
        assert_eq!(look(false), (22, 1, 1));
        fs::remove_file(&path).unwrap();
        assert_eq!(look(false), (22, 1, 2));
        write(&path, "4", 4);
        assert_eq!(look(false), (4, 2, 2));
        assert_eq!(look(true), (4, 3, 2));
    }

    #[test]
    fn warnings_are_due_once_a_day_and_after_a_clock_step() {
        let mut reloads = Reloads::default();
        let before = SystemTime::now();
        reloads.warn_daily(|_| vec!["a".to_owned(), "b".to_owned()]);
        let start = SystemTime::now();
        let hour = Duration::from_secs(3_600);
        for (now, is_due) in [
            (start, false),
            (before + 23 * hour, false),
            (start + 24 * hour, true),
            (start + 47 * hour, false),
            (start + 50 * hour, true),
            // The clock is set back.
            (start + hour, true),
            (start + 24 * hour, false),
            (start + 25 * hour, true),
        ] {
            let expected: &[&str] = if is_due { &["a", "b"] } else { &[] };
            assert_eq!(reloads.due_warnings(now), expected);
        }
    }

    #[test]
    fn replaced_file_of_equal_length_and_time_is_detected() {
        let directory = tempfile::tempdir().unwrap();
        let (path, other) = (directory.path().join("it"), directory.path().join("other"));
        for (path, text) in [(&path, "1"), (&other, "2")] {
            write(path, text, 0);
        }
        let watched = number(&path).unwrap();
        fs::rename(&other, &path).unwrap();
        assert!(watched.look(false, &SystemTime::now));
        assert_eq!(*watched.current(), 2);
    }

    /// Regression: `cp -p` of a file that was built with a fixed time.
    #[test]
    fn file_rewritten_with_equal_length_and_time_is_detected() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("number");
        write(&path, "1", 1);
        let watched = number(&path).unwrap();
        let inode = fs::metadata(&path).unwrap().ino();
        // Two changes within one tick of the clock have the same time.
        thread::sleep(limits::STAMP_SETTLED);
        write(&path, "2", 1);
        assert_eq!(fs::metadata(&path).unwrap().ino(), inode);
        assert!(watched.look(false, &SystemTime::now));
        assert_eq!(*watched.current(), 2);
        assert!(!watched.look(false, &SystemTime::now));
    }

    /// Regression: an operator who ran the `chmod` that the error advised changed nothing.
    #[test]
    fn file_repaired_by_chmod_is_read() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("number");
        let mode = |mode| fs::set_permissions(&path, fs::Permissions::from_mode(mode)).unwrap();
        write(&path, "1", 1);
        mode(0o600);
        let read = {
            let path = path.clone();
            move || match fs::metadata(&path).unwrap().mode() & 0o022 {
                0 => Ok(fs::read_to_string(&path).unwrap()),
                _ => Err("others can write it"),
            }
        };
        let watched = Watched::open("numbers", vec![path.clone()], read).unwrap();
        write(&path, "2", 2);
        mode(0o664);
        assert!(!watched.look(false, &SystemTime::now));
        assert_eq!(watched.count().refused, 1);
        thread::sleep(limits::STAMP_SETTLED);
        mode(0o600);
        assert!(watched.look(false, &SystemTime::now));
        assert_eq!(*watched.current(), "2");
    }

    #[test]
    fn refused_file_is_retried_and_logged_once() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("number");
        write(&path, "1", 1);
        let error = Arc::new(Mutex::new(None));
        let read = {
            let error = error.clone();
            move || error.lock().unwrap().map_or(Ok(()), Err)
        };
        let watched = Watched::open("numbers", vec![path.clone()], read).unwrap();
        let look = |next: Option<&'static str>| {
            *error.lock().unwrap() = next;
            let taken = watched.look(false, &SystemTime::now);
            (taken, watched.count().refused)
        };
        write(&path, "2", 2);
        assert_eq!(look(Some("no right")), (false, 1));
        assert_eq!(look(Some("no right")), (false, 1));
        assert_eq!(look(Some("no memory")), (false, 2));
        assert_eq!(look(None), (true, 2));
        assert_eq!(look(Some("not asked")), (false, 2));
    }

    #[test]
    fn file_that_was_just_written_waits_for_the_next_poll() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("number");
        write(&path, "1", 1);
        let watched = number(&path).unwrap();
        let look = |forced, milliseconds| {
            let now = SystemTime::UNIX_EPOCH + Duration::from_millis(milliseconds);
            (watched.look(forced, &|| now), *watched.current())
        };
        write(&path, "2", 10);
        assert_eq!(look(false, 10_010), (false, 1));
        // A program that writes the file line by line may pause.
        assert_eq!(look(false, 10_900), (false, 1));
        assert_eq!(look(false, 11_000), (true, 2));
        assert_eq!(look(false, 11_000), (false, 2));
        // A forced reload reads the file at once. If it was just written, a poll reads it again.
        write(&path, "3", 20);
        assert_eq!(look(true, 20_010), (true, 3));
        assert_eq!(look(false, 21_000), (true, 3));
        assert_eq!(look(false, 21_000), (false, 3));
        write(&path, "4", 25);
        assert_eq!(look(true, 25_100), (true, 4));
        assert_eq!(look(false, 26_000), (false, 4));
        // A file that is written continually is read after some polls.
        let mut waits = 0;
        while !look(false, 30_000 + waits * 1_000).0 {
            waits += 1;
            write(&path, "5", 30 + waits);
        }
        assert_eq!(waits, limits::RELOAD_PUT_OFF_MAX + 1);
    }

    #[test]
    fn first_read_of_a_bad_file_fails_with_the_reason() {
        let directory = tempfile::tempdir().unwrap();
        let error_of = |path: &Path| number(path).err().unwrap();
        let path = directory.path().join("number");
        assert!(error_of(&path).starts_with("cannot read /"));
        assert!(error_of(directory.path()).ends_with("it is not a regular file"));
        fs::write(&path, "123456789").unwrap();
        assert!(error_of(&path).contains("is larger than 8 bytes"));
    }
}
