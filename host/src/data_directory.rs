//! Opens a data directory: recovers an [`Image`] of the state at the start, then runs the log
//! that writes records and snapshots.
//!
//! Recovery must never run a policy.

pub(crate) mod appended;
mod client_id;
mod disk;
mod recovering;
#[cfg(test)]
mod restore_tests;

use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};
use std::thread;
use std::time::{Duration, Instant};

use statehouse_mqtt::Broker;
use statehouse_wal::{
    Base, Callbacks, Directory, Log, LogPosition, Opened, Options, Probed, Source, probe,
    probe_leftovers, probe_lock, probe_room,
};

use statehouse_config::{Durability, Storage, limits};
use statehouse_core::clock::wall_ms;
use statehouse_core::log::{Forgotten, Image, Progress, sessions_block};
use statehouse_core::store::Mode;
use statehouse_offline::{ClusterMark, ImageSink, PastError, is_unfinished};
use statehouse_protocol::Shown;
use statehouse_server::{Server, logging};

use recovering::{Recovering, check_clock};

pub use disk::Disk;

pub use client_id::{ClientIdError, new as new_client_id};

/// Exit code of a process whose disk failed (EX_IOERR of sysexits.h).
const EXIT_DISK: i32 = 74;

/// Why a data directory cannot be used. The text is a sentence for the operator.
#[derive(Debug, thiserror::Error)]
pub enum StorageError {
    /// The log cannot be opened.
    #[error("the data directory {0} cannot be used: {1}")]
    Log(PathBuf, statehouse_wal::Error),
    /// The mark of a host of a cluster cannot be read.
    #[error("the data directory {0} cannot be used: {1}")]
    Mark(PathBuf, Box<PastError>),
    /// The directory belongs to a host of the cluster with this name, which has escapes.
    #[error(
        "the data directory {0} belongs to a host of the cluster {1} and may hold a copy of its log: start the host with --cluster, name another directory with --data, or create a new cluster from the copy with `statehouse cluster init --from {0}`"
    )]
    Cluster(PathBuf, String),
    /// A restore into the directory is not finished.
    #[error("the data directory {}", PastError::Unfinished(.0.clone()))]
    Unfinished(PathBuf),
    /// The MQTT client id cannot be read or created.
    #[error("{0} {1}")]
    ClientId(PathBuf, #[source] ClientIdError),
    /// The system clock is wrong, or was wrong when the last record was written.
    #[error(
        "the system clock is {behind_s} s behind the last time that is recorded in {directory}. Keys would live longer than they should, and versions would run ahead of the clock: set the clock, or accept it with --accept-clock"
    )]
    Clock {
        /// The directory.
        directory: PathBuf,
        /// How far the clock is behind, in seconds.
        behind_s: u64,
    },
}

impl StorageError {
    /// Whether the disk had no room for the file with the client id.
    pub fn is_disk_full(&self) -> bool {
        matches!(self, Self::ClientId(_, ClientIdError::Io(error))
            if matches!(error.kind(), ErrorKind::StorageFull | ErrorKind::QuotaExceeded))
    }
}

/// A recovered data directory. No record is written to it yet.
pub struct Recovered {
    /// The recovered state.
    pub image: Image,
    log: Log,
    opened: Opened,
    directory: PathBuf,
    durability: Durability,
    took: Duration,
}

/// Creates the directory if it is missing, and locks it.
pub fn lock(storage: &Storage) -> Result<Directory, StorageError> {
    Directory::open(&storage.directory).map_err(|error| failure(storage, error))
}

/// The failure of a start. If rights are missing, or the file system is read-only, it has the words
/// of `serve --check`: the operation that failed first depends on the log, and may name a file that
/// does not exist.
fn failure(storage: &Storage, error: statehouse_wal::Error) -> StorageError {
    let is_denied = matches!(&error, statehouse_wal::Error::Io { source, .. }
        if matches!(source.kind(), ErrorKind::PermissionDenied | ErrorKind::ReadOnlyFilesystem));
    let denied = is_denied.then(|| probe(&storage.directory).err()).flatten();
    StorageError::Log(storage.directory.clone(), denied.unwrap_or(error))
}

/// Waits as a standby until no other process has the directory, then locks it.
///
/// If another process has it, this calls `waits` once. A takeover takes [`limits::STANDBY_POLL`]
/// and the time of the recovery.
///
/// What the lock guarantees depends on the file system: see `host/docs/foreign-brokers.md`. If a
/// host may be cut off and keep running, its machine must be fenced before the standby gets the
/// directory. The MQTT client id is only a second guard: a host stops if its session is taken over,
/// but only the broker can report that.
pub fn stand_by(storage: &Storage, waits: impl FnOnce()) -> Result<Directory, StorageError> {
    let mut waits = Some(waits);
    loop {
        match Directory::open(&storage.directory) {
            Err(statehouse_wal::Error::Locked { .. }) => {
                if let Some(waits) = waits.take() {
                    waits();
                }
                thread::sleep(limits::STANDBY_POLL);
            }
            opened => return opened.map_err(|error| failure(storage, error)),
        }
    }
}

/// What a start would recover.
pub struct Found {
    /// The state; empty in a new directory.
    pub image: Image,
    /// Whether another process uses the directory.
    pub in_use: bool,
}

/// Reads what a start would recover, without a lock and without a change.
pub fn look(storage: &Storage) -> Result<Found, StorageError> {
    let failed = |error| StorageError::Log(storage.directory.clone(), error);
    let Probed::Present { locked } = probe(&storage.directory).map_err(failed)? else {
        probe_room(&storage.directory, 0).map_err(failed)?;
        return Ok(Found {
            image: Image::new(storage.duplicates),
            in_use: false,
        });
    };
    probe_lock(&storage.directory).map_err(failed)?;
    refuse_no_store(storage)?;
    let disk = Directory::read_only(&storage.directory).map_err(failed)?;
    let mut image = empty_image(storage, &disk)?;
    let mut sink = ImageSink(&mut image);
    statehouse_wal::read(&disk, Base::Newest, LogPosition::END, &mut sink).map_err(failed)?;
    image.finish();
    check_clock(image.now_ms, storage, wall_ms())?;
    probe_leftovers(&storage.directory).map_err(failed)?;
    probe_room(&storage.directory, 0).map_err(failed)?;
    check_client_id(&storage.directory)?;
    Ok(Found {
        image,
        in_use: locked,
    })
}

/// Refuses a directory whose file with the name of the store is wrong, as a start does.
pub(crate) fn check_client_id(directory: &Path) -> Result<(), StorageError> {
    let failed = |error| StorageError::ClientId(directory.join(client_id::FILE), error);
    client_id::existing(directory).map(drop).map_err(failed)
}

/// Refuses the directory of a host of a cluster, and one of an interrupted restore.
fn refuse_no_store(storage: &Storage) -> Result<(), StorageError> {
    if is_unfinished(&storage.directory) {
        return Err(StorageError::Unfinished(storage.directory.clone()));
    }
    let mark = ClusterMark::of(&storage.directory)
        .map_err(|error| StorageError::Mark(storage.directory.clone(), Box::new(error)))?;
    let Some(mark) = mark else { return Ok(()) };
    let name = Shown::whole(mark.name.as_bytes()).on_one_line().to_string();
    Err(StorageError::Cluster(storage.directory.clone(), name))
}

/// An image with the limits of the settings and of the disk.
fn empty_image(storage: &Storage, disk: &Directory) -> Result<Image, StorageError> {
    let failed = |error| StorageError::Log(storage.directory.clone(), error);
    // Remembered requests are in the log and in two snapshots, so a small disk holds fewer of them.
    let disk_bytes = statehouse_wal::disk_bytes(disk).map_err(failed)?;
    let mut retention = storage.duplicates;
    retention.bytes_max = retention
        .bytes_max
        .min(disk_bytes / limits::DUPLICATE_DISK_PART);
    let mut image = Image::new(retention);
    image.sessions = statehouse_mqtt::Recovery::within(&storage.sessions);
    Ok(image)
}

/// Recovers the state of a locked directory.
pub fn recover(storage: &Storage, disk: Directory) -> Result<Recovered, StorageError> {
    let start = Instant::now();
    let wall_ms = wall_ms();
    let failed = |error| failure(storage, error);
    refuse_no_store(storage)?;
    let options = Options {
        durability: match storage.durability {
            Durability::Interval => statehouse_wal::Durability::Interval(Duration::from_millis(
                storage.sync_interval_ms,
            )),
            _ => statehouse_wal::Durability::Always,
        },
        commit_delay: Duration::from_millis(storage.commit_delay_ms),
        history_bytes: storage.history_bytes,
        history_ms: storage.history_ms,
        ..Options::default()
    };
    let mut image = empty_image(storage, &disk)?;
    let mut sink = Recovering {
        image: ImageSink(&mut image),
        storage,
        wall_ms,
        refused: None,
    };
    let opened = Log::open(Arc::new(disk), options, wall_ms, &mut sink);
    if let Some(refused) = sink.refused {
        return Err(refused);
    }
    let (log, opened) = opened.map_err(failed)?;
    image.finish();
    if storage.durability == Durability::Interval && !opened.clean && !opened.fresh {
        image.skip_unrecorded_versions(wall_ms);
    }
    Ok(Recovered {
        image,
        log,
        opened,
        directory: storage.directory.clone(),
        durability: storage.durability,
        took: start.elapsed(),
    })
}

/// The receivers of the log's callbacks. They are attached after the log has started,
/// because they need it.
#[derive(Clone, Default)]
pub struct LogListener(Arc<OnceLock<(Arc<Server>, Option<Broker>)>>);

impl LogListener {
    /// Attaches the store, and the broker if it is embedded. Only the first call has an effect.
    pub fn attach(&self, server: Arc<Server>, broker: Option<Broker>) {
        // The start calls this once.
        let _ = self.0.set((server, broker));
    }

    fn released(&self, position: LogPosition) {
        if let Some((server, broker)) = self.0.get() {
            server.release();
            if let Some(broker) = broker {
                broker.released(position);
            }
        }
    }
}

impl Recovered {
    /// Continues in a mode. If the last run had the other mode, logs how much state is dropped.
    pub fn begin(&mut self, mode: Mode) {
        let Forgotten {
            sessions,
            retained,
            requests,
            watches,
        } = self.image.begin(mode);
        if sessions + retained + watches + requests > 0 {
            tracing::warn!(
                sessions,
                retained,
                watches,
                requests,
                "the store ran in another mode before: state that only that mode can use is dropped (sessions and retained messages of the embedded broker, or watches of a foreign broker's clients; remembered requests)"
            );
        }
    }

    /// The name of the store in this directory, which is its MQTT client id at a foreign broker.
    pub fn client_id(&self) -> Result<String, StorageError> {
        let failed = |error| StorageError::ClientId(self.directory.join(client_id::FILE), error);
        client_id::of(&self.directory).map_err(failed)
    }

    /// Describes the result of the recovery in one line.
    pub fn report(&self) -> String {
        let Opened { fresh, torn, .. } = self.opened;
        if fresh {
            return format!("{} is new", self.directory.display());
        }
        let torn = if torn {
            ", and dropped a write that was never acknowledged"
        } else {
            ""
        };
        format!(
            "recovered {} keys in {} ms{torn}",
            self.image.state.table.keys(),
            self.took.as_millis()
        )
    }

    /// Starts the log's threads, and returns the state.
    pub fn start(
        self,
        listener: &LogListener,
    ) -> Result<(Arc<Disk>, Image), statehouse_wal::Error> {
        for (position, what) in &self.opened.damaged_snapshots {
            tracing::error!(
                position = position.0,
                what,
                "a snapshot is damaged: recovered from an older one and the log after it"
            );
        }
        let released = listener.clone();
        let source = SnapshotSource {
            listener: listener.clone(),
            cursor: SnapshotCursor::default(),
        };
        let callbacks = Callbacks {
            released: Box::new(move |position| released.released(position)),
            failed: Box::new(|failure| {
                if failure.panicked {
                    tracing::error!(%failure, "a thread of the write-ahead log panicked: stopping, because no further write would be durable");
                    logging::exit(statehouse_server::EXIT_STATE_LOST)
                }
                tracing::error!(%failure, "the disk failed: stopping, so that no write is acknowledged that may be lost. Repair the disk, then start again");
                logging::exit(EXIT_DISK)
            }),
            source: Box::new(source),
            now_ms: Box::new(wall_ms),
        };
        let log = statehouse_wal::WriteAheadLog::start(self.log, callbacks)?;
        let place = self.directory.display().to_string();
        Ok((Disk::new(log, self.durability, place), self.image))
    }
}

/// The blocks of a snapshot of a running store: sessions first, then the store.
/// `host/core/src/log/image.rs` explains why remembered requests must be the last piece.
#[derive(Default)]
pub(crate) struct SnapshotCursor {
    sessions: statehouse_mqtt::ImageCursor,
    has_sessions: bool,
    store: Progress,
}

impl SnapshotCursor {
    /// The next block; `None` after the last one.
    pub(crate) fn next(&mut self, server: &Server, broker: Option<&Broker>) -> Option<Vec<u8>> {
        if let Some(broker) = broker.filter(|_| !self.has_sessions) {
            if let Some(changes) = broker.image(&mut self.sessions, limits::SNAPSHOT_PIECE_BYTES) {
                return Some(sessions_block(&changes));
            }
            self.has_sessions = true;
        }
        server.snapshot(&mut self.store)
    }
}

/// The snapshots of the store that a log belongs to.
struct SnapshotSource {
    listener: LogListener,
    cursor: SnapshotCursor,
}

impl Source for SnapshotSource {
    fn ready(&self) -> bool {
        self.listener.0.get().is_some()
    }

    fn bytes(&self) -> Option<u64> {
        let (server, broker) = self.listener.0.get()?;
        let sessions = broker.as_ref().map_or(0, Broker::image_bytes);
        Some(server.snapshot_bytes() + sessions)
    }

    fn begin(&mut self) {
        self.cursor = SnapshotCursor::default();
    }

    fn next(&mut self, block: &mut Vec<u8>) -> Result<bool, String> {
        let Some((server, broker)) = self.listener.0.get() else {
            return Err("the store has not started yet".into());
        };
        let next = self.cursor.next(server, broker.as_ref());
        let is_block = next.is_some();
        *block = next.unwrap_or_default();
        Ok(is_block)
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use std::sync::atomic::{AtomicU32, Ordering::Relaxed};

    use super::*;
    use statehouse_config::{Config, Flags, StorageFlags};
    use statehouse_core::log::Recorder;
    use statehouse_core::request::Dialect;
    use statehouse_core::store::{Effects, Key, Peer, Scope, WatchChange, WatchChanges};
    use statehouse_offline::{Past, restore};

    pub(crate) fn recover(storage: &Storage) -> Result<Recovered, StorageError> {
        super::recover(storage, lock(storage)?)
    }

    pub(crate) fn settings_of(data: &Path) -> Storage {
        let flags = Flags {
            storage: StorageFlags {
                data: Some(data.to_owned()),
                ..StorageFlags::default()
            },
            ..Flags::default()
        };
        Config::load(flags).unwrap().storage
    }

    /// Starts the log of a directory, with the record of a start.
    fn begun(settings: &Storage, run: u32, now_ms: u64, mode: Mode) -> (Arc<Disk>, Recorder) {
        let recovered = recover(settings).unwrap();
        let (disk, _) = recovered.start(&LogListener::default()).unwrap();
        let mut recorder = Recorder::new(disk.clone(), Vec::new(), None);
        recorder.started(run, now_ms, mode);
        (disk, recorder)
    }

    /// Writes a log that ends with the record of a start at this time.
    pub(crate) fn write_start(settings: &Storage, run: u32, now_ms: u64) {
        let (disk, _) = begun(settings, run, now_ms, Mode::Embedded);
        disk.log().close().unwrap();
    }

    #[test]
    fn a_clock_behind_the_records_needs_accept_clock() {
        let directory = tempfile::tempdir().unwrap();
        let settings = |accept_clock| Storage {
            accept_clock,
            ..settings_of(&directory.path().join("data"))
        };
        let ahead_ms = wall_ms() + 600_000;
        let new = recover(&settings(false)).unwrap();
        assert!(new.report().ends_with("is new"));
        drop(new);
        write_start(&settings(false), 7, ahead_ms);
        let refused = recover(&settings(false))
            .err()
            .map(|error| error.to_string());
        let refused = refused.expect("ten minutes are too much");
        assert!(refused.contains("--accept-clock"), "{refused}");
        let image = recover(&settings(true)).unwrap().image;
        // Time continues from the last record, not from the clock.
        assert_eq!((image.now_ms, image.run), (ahead_ms, 7));
    }

    /// Behind a foreign broker the clients stay connected while the store restarts, so watches must
    /// survive.
    #[test]
    fn watches_survive_a_restart_a_backup_and_a_restore() {
        let place = tempfile::tempdir().unwrap();
        let settings = |name: &str| settings_of(&place.path().join(name));
        let peer = Peer {
            client: "c".into(),
            connection: Mode::foreign_session(7).only_connection(),
            session: Mode::foreign_session(7),
        };
        let (disk, mut recorder) = begun(&settings("first"), 1, wall_ms(), Mode::Foreign);
        let watches = WatchChanges {
            peer: peer.clone(),
            changes: vec![WatchChange::Began(
                Scope::Key,
                Key::from_static(b"k"),
                Dialect::Sdk,
            )],
        };
        let effects = Effects {
            watches: Some(Box::new(watches)),
            ..Effects::default()
        };
        recorder.step(None, &effects, false);
        disk.log().close().unwrap();
        drop((recorder, disk));

        let backup = place.path().join("backup");
        let past = Past::open(&settings("first").directory).unwrap();
        let opening = past.checkup().unwrap().opening.unwrap();
        assert_eq!(opening.contents.watches, 1);
        assert_eq!(past.snapshot(&backup, 0).unwrap().watches, 1);
        let restored = restore(&backup, &settings("second").directory, wall_ms());
        assert_eq!(restored.unwrap().watches, 1);
        for name in ["first", "second"] {
            let mut found = recover(&settings(name)).unwrap();
            found.begin(Mode::Foreign);
            let watching: Vec<&Peer> = found.image.state.watches.peers().collect();
            assert_eq!(watching, [&peer], "{name}");
            found.begin(Mode::Embedded);
            assert!(found.image.state.watches.is_empty(), "{name}");
        }
    }

    /// The highest Receive Maximum survives in the log, in a snapshot, and after a later lower
    /// value: the clients of resumed sessions may still use the highest one.
    #[test]
    fn the_highest_receive_maximum_survives_every_restart() {
        let place = tempfile::tempdir().unwrap();
        let settings = |name: &str| settings_of(&place.path().join(name));
        let recovered = |name: &str, per_session| {
            let mut storage = settings(name);
            storage.duplicates.per_session = per_session;
            recover(&storage).unwrap().image.duplicates.receive_max()
        };
        let (disk, mut recorder) = begun(&settings("first"), 1, wall_ms(), Mode::Embedded);
        for receive_max in [5000, 3000] {
            recorder.record_receive_max(receive_max);
        }
        disk.log().close().unwrap();
        drop((recorder, disk));

        let backup = place.path().join("backup");
        let past = Past::open(&settings("first").directory).unwrap();
        past.snapshot(&backup, 0).unwrap();
        restore(&backup, &settings("second").directory, wall_ms()).unwrap();
        for name in ["first", "second"] {
            assert_eq!(recovered(name, 1024), 5000, "{name}");
            assert_eq!(recovered(name, 6000), 6000, "{name}");
            // Behind a foreign broker only the limits of time and space apply.
            assert_eq!(recovered(name, 0), 0, "{name}");
        }
    }

    #[test]
    fn only_a_lack_of_space_or_quota_is_a_full_disk() {
        let failed = |kind: ErrorKind| {
            StorageError::ClientId(PathBuf::new(), ClientIdError::Io(kind.into())).is_disk_full()
        };
        assert!(failed(ErrorKind::StorageFull) && failed(ErrorKind::QuotaExceeded));
        assert!(!failed(ErrorKind::PermissionDenied));
        let other = ClientIdError::Invalid("empty".to_owned());
        assert!(!StorageError::ClientId(PathBuf::new(), other).is_disk_full());
    }

    #[test]
    fn a_standby_reports_once_that_it_waits_and_takes_over() {
        let directory = tempfile::tempdir().unwrap();
        let settings = settings_of(directory.path());
        let first = recover(&settings).unwrap();
        let id = first.client_id().unwrap();
        let reports = AtomicU32::new(0);
        let report = || _ = reports.fetch_add(1, Relaxed);

        thread::scope(|scope| {
            let standby = scope.spawn(|| stand_by(&settings, report));
            while reports.load(Relaxed) < 1 {
                thread::yield_now();
            }
            thread::sleep(3 * limits::STANDBY_POLL);
            assert!(!standby.is_finished());
            drop(first);
            let locked = standby.join().unwrap().unwrap();
            let second = super::recover(&settings, locked).unwrap();
            assert_eq!(second.client_id().unwrap(), id);
        });
        // A free directory is locked without a wait.
        assert!(stand_by(&settings, report).is_ok());
        assert_eq!(reports.into_inner(), 1);
    }
}
