//! Files that are read again while the store runs: certificates, users, rules, settings.
//!
//! What enters: paths, how to read them, a look every second and SIGHUP. What leaves: the last value that was good. A file
//! that turns bad is logged and counted, and never takes the good value's place. Files are looked at rather than watched by
//! notifications of the system, which do not cross containers and network file systems. One that was written to this very
//! moment waits for the next look.

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

use crate::limits;

/// Why a file cannot be read. Its text is a sentence for the operator.
#[derive(Debug, thiserror::Error)]
pub enum FileError {
    /// The system says no.
    #[error("cannot read {0}: {1}")]
    Read(PathBuf, io::Error),
    /// A directory, a pipe or a device: reading might never end.
    #[error("cannot read {0}: it is not a regular file")]
    Kind(PathBuf),
    /// More than anybody needs.
    #[error("{0} is larger than {1} bytes, so it is not what belongs there")]
    Size(PathBuf, u64),
}

/// The bytes of a file, at most `bytes_max` of them.
///
/// # Errors
/// Where it cannot be read, is no regular file, or is larger.
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

/// A value made of files.
pub struct Watched<T> {
    what: &'static str,
    files: Vec<PathBuf>,
    read: Box<dyn Fn() -> Result<T, String> + Send + Sync>,
    value: RwLock<Arc<T>>,
    /// The files as they were before they were last read, whatever became of that.
    seen: Mutex<Vec<Option<Stamp>>>,
    /// Looks in a row at which they had changed and were written to.
    put_off: AtomicU64,
    taken: AtomicU64,
    refused: AtomicU64,
}

/// Files as they are before they are read: what is written meanwhile is found at the next look.
pub struct Files {
    paths: Vec<PathBuf>,
    seen: Vec<Option<Stamp>>,
}

impl Files {
    /// Looks at them, and waits a moment where somebody is writing: what is read at a start should be what was meant.
    pub fn look(paths: Vec<PathBuf>) -> Self {
        let mut seen = stamps(&paths);
        if !are_settled(&seen, SystemTime::now()) {
            thread::sleep(limits::RELOAD_SETTLED);
            seen = stamps(&paths);
        }
        if !are_settled(&seen, SystemTime::now()) {
            // Read again at the next look.
            seen = Vec::new();
        }
        Self { paths, seen }
    }
}

/// What changes when a file does. A file that is exchanged by a link to another one has another number.
type Stamp = (u64, u64, i64, i64);

impl<T: Send + Sync + 'static> Watched<T> {
    /// Reads the value for the first time. `what` names it in log lines and metrics, in the plural: "rules".
    ///
    /// # Errors
    /// Those of `read`: a store does not start with a bad file.
    pub fn open<E: Display>(
        what: &'static str,
        files: Vec<PathBuf>,
        read: impl Fn() -> Result<T, E> + Send + Sync + 'static,
    ) -> Result<Arc<Self>, E> {
        let files = Files::look(files);
        let value = read()?;
        Ok(Self::following(what, files, value, read))
    }

    /// Follows files whose value has been read already, after they were looked at.
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
            seen: Mutex::new(files.seen),
            put_off: AtomicU64::new(0),
            taken: AtomicU64::new(0),
            refused: AtomicU64::new(0),
        })
    }

    /// The files.
    pub fn files(&self) -> &[PathBuf] {
        &self.files
    }

    /// The last good value.
    pub fn current(&self) -> Arc<T> {
        // Nothing panics while it is written; the old value would be as good as any.
        let value = self.value.read().unwrap_or_else(PoisonError::into_inner);
        value.clone()
    }
}

/// A [`Watched`] of any type.
trait Reload: Send + Sync {
    /// Reads the files again where they changed, or in any case. True: there is another value.
    fn look(&self, in_any_case: bool, now: &dyn Fn() -> SystemTime) -> bool;
    fn count(&self) -> Count;
}

impl<T: Send + Sync + 'static> Reload for Watched<T> {
    fn look(&self, in_any_case: bool, now: &dyn Fn() -> SystemTime) -> bool {
        let mut seen = self.seen.lock().unwrap_or_else(PoisonError::into_inner);
        // Before they are read: what is written meanwhile is found at the next look.
        let stamps = stamps(&self.files);
        if *seen == stamps && !in_any_case {
            return false;
        }
        let settled = are_settled(&stamps, now());
        let put_off = || self.put_off.fetch_add(1, Ordering::Relaxed);
        if !settled && !in_any_case && put_off() < limits::RELOAD_PUT_OFF_MAX {
            return false;
        }
        self.put_off.store(0, Ordering::Relaxed);
        // What is read before it has settled is read again.
        *seen = if settled { stamps } else { Vec::new() };
        let what = self.what;
        match (self.read)() {
            Ok(value) => {
                *self.value.write().unwrap_or_else(PoisonError::into_inner) = Arc::new(value);
                self.taken.fetch_add(1, Ordering::Relaxed);
                tracing::info!("{what}: read again");
                true
            }
            Err(error) => {
                self.refused.fetch_add(1, Ordering::Relaxed);
                tracing::error!("{what}: {error}; what was read before stays in force");
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
        Some((data.ino(), data.len(), data.mtime(), data.mtime_nsec()))
    };
    files.iter().map(stamp).collect()
}

/// Whether their last writes are a while ago. `now` is behind the look at them: a write after that is found at the next look.
fn are_settled(stamps: &[Option<Stamp>], now: SystemTime) -> bool {
    stamps.iter().flatten().all(|stamp| is_settled(stamp, now))
}

/// Whether its last write is a while ago, or was made by a clock that is not ours.
fn is_settled(&(_, _, seconds, nanoseconds): &Stamp, now: SystemTime) -> bool {
    let (Ok(seconds), Ok(nanoseconds)) = (seconds.try_into(), nanoseconds.try_into()) else {
        return true;
    };
    let written = SystemTime::UNIX_EPOCH.checked_add(Duration::new(seconds, nanoseconds));
    let age = written.and_then(|written| now.duration_since(written).ok());
    age.is_none_or(|age| age >= limits::RELOAD_SETTLED)
}

/// How often a value was read again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Count {
    /// Which value.
    pub what: &'static str,
    /// Times that it was taken.
    pub taken: u64,
    /// Times that the files were bad, and the value stayed.
    pub refused: u64,
}

/// All values that are read again.
#[derive(Default)]
pub struct Reloads {
    entries: Vec<Entry>,
}

struct Entry {
    watched: Arc<dyn Reload>,
    then: Box<dyn Fn() + Send + Sync>,
}

impl Reloads {
    /// Adds one. `then` is called after each time that there is another value, on a thread that may block.
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

    /// How often each was read again.
    pub fn counts(&self) -> impl Iterator<Item = Count> {
        self.entries.iter().map(|entry| entry.watched.count())
    }

    /// Looks every second, and at each SIGHUP, until it is dropped.
    pub async fn run(self: Arc<Self>, mut hangup: Signal) {
        loop {
            let told = tokio::select! {
                told = hangup.recv() => told.is_some(),
                () = tokio::time::sleep(limits::RELOAD_POLL_INTERVAL) => false,
            };
            if told {
                tracing::info!("SIGHUP: reading files again");
            }
            let all = self.clone();
            // Reading blocks, and so may what follows.
            let looked = tokio::task::spawn_blocking(move || all.look(told));
            if let Err(error) = looked.await {
                tracing::error!(%error, "reading files again failed: that is a bug");
            }
        }
    }

    fn look(&self, in_any_case: bool) {
        for entry in &self.entries {
            if entry.watched.look(in_any_case, &SystemTime::now) {
                (entry.then)();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A number in a file, and how often it was read again.
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

    /// Writes a file, `turn` seconds after 1970.
    fn write(path: &Path, text: &str, turn: u64) {
        fs::write(path, text).unwrap();
        let file = fs::File::options().write(true).open(path).unwrap();
        let time = SystemTime::UNIX_EPOCH + Duration::from_secs(turn);
        file.set_modified(time).unwrap();
    }

    #[test]
    fn a_changed_file_is_read_once_and_a_bad_one_leaves_the_value() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("number");
        write(&path, "1", 1);
        let watched = number(&path).unwrap();
        let told = Arc::new(AtomicU64::new(0));
        let mut reloads = Reloads::default();
        reloads.add(&watched, {
            let told = told.clone();
            move || {
                told.fetch_add(1, Ordering::Relaxed);
            }
        });
        let look = |in_any_case| {
            reloads.look(in_any_case);
            let count = reloads.counts().next().unwrap();
            let told = told.load(Ordering::Relaxed);
            assert_eq!(told, count.taken);
            (*watched.current(), count.taken, count.refused)
        };
        assert_eq!(look(false), (1, 0, 0));
        write(&path, "22", 2);
        assert_eq!(look(false), (22, 1, 0));
        assert_eq!(look(false), (22, 1, 0));
        write(&path, "three", 3);
        assert_eq!(look(false), (22, 1, 1));
        // Said once, not every second.
        assert_eq!(look(false), (22, 1, 1));
        fs::remove_file(&path).unwrap();
        assert_eq!(look(false), (22, 1, 2));
        write(&path, "4", 4);
        assert_eq!(look(false), (4, 2, 2));
        assert_eq!(look(true), (4, 3, 2));
    }

    #[test]
    fn a_file_that_another_takes_the_place_of_is_seen_although_length_and_time_are_the_same() {
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

    #[test]
    fn a_file_that_may_still_be_written_to_waits_for_the_next_look() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("number");
        write(&path, "1", 1);
        let watched = number(&path).unwrap();
        let look = |in_any_case, milliseconds| {
            let now = SystemTime::UNIX_EPOCH + Duration::from_millis(milliseconds);
            (watched.look(in_any_case, &|| now), *watched.current())
        };
        write(&path, "2", 10);
        assert_eq!(look(false, 10_010), (false, 1));
        assert_eq!(look(false, 10_100), (true, 2));
        assert_eq!(look(false, 10_100), (false, 2));
        // Who asks for it gets it at once, and again at the next look.
        write(&path, "3", 20);
        assert_eq!(look(true, 20_010), (true, 3));
        assert_eq!(look(false, 20_100), (true, 3));
        assert_eq!(look(false, 20_100), (false, 3));
        // Where somebody writes again and again it is read at last.
        let mut waits = 0;
        while !look(false, 30_000 + waits * 1_000).0 {
            waits += 1;
            write(&path, "4", 30 + waits);
        }
        assert_eq!(waits, limits::RELOAD_PUT_OFF_MAX + 1);
    }

    #[test]
    fn the_first_reading_fails_with_what_is_wrong() {
        let directory = tempfile::tempdir().unwrap();
        let says = |path: &Path| number(path).err().unwrap();
        let path = directory.path().join("number");
        assert!(says(&path).starts_with("cannot read /"));
        assert!(says(directory.path()).ends_with("it is not a regular file"));
        fs::write(&path, "123456789").unwrap();
        assert!(says(&path).contains("is larger than 8 bytes"));
    }
}
