//! A data directory in use: recovered at the start, then fed with records and snapshots.
//!
//! What enters: the settings, and at the start everything that was recorded. What leaves: an [`Image`] to go
//! on from, and a [`Journal`]. It runs no policy.

use std::path::PathBuf;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use statehouse_journal::{Callbacks, Directory, Log, Opened, Options, Position, Source};
use statehouse_mqtt::Broker;

use crate::clock::wall_ms;
use crate::config::{Durability, Storage};
use crate::journal::{Disk, Image, Progress, sessions_block};
use crate::limits;
use crate::server::Server;

/// Exit code of a process whose disk failed (EX_IOERR of sysexits.h).
const EXIT_DISK: i32 = 74;

/// Why a data directory cannot be used. Its text is a sentence for the operator.
#[derive(Debug, thiserror::Error)]
pub enum StorageError {
    /// The journal does not open.
    #[error("the data directory {0} cannot be used: {1}")]
    Journal(PathBuf, statehouse_journal::Error),
    /// The system clock is wrong, or was when something was recorded.
    #[error(
        "the system clock is {behind_s} s behind the last time that is recorded in {directory}. Keys would live longer than they should, and versions would run ahead of the clock: set the clock, or accept it with --accept-clock"
    )]
    Clock {
        /// The directory.
        directory: PathBuf,
        /// How far.
        behind_s: u64,
    },
}

/// A data directory that was recovered, before anything is written to it.
pub struct Recovered {
    /// The state to go on from.
    pub image: Image,
    log: Log,
    opened: Opened,
    directory: PathBuf,
    durability: Durability,
    took: Duration,
}

/// Locks the directory and reads what is in it.
pub fn recover(storage: &Storage) -> Result<Recovered, StorageError> {
    let start = Instant::now();
    let wall_ms = wall_ms();
    let failed = |error| StorageError::Journal(storage.directory.clone(), error);
    let disk = Directory::open(&storage.directory).map_err(failed)?;
    let options = Options {
        durability: match storage.durability {
            Durability::Interval => statehouse_journal::Durability::Interval(
                Duration::from_millis(storage.sync_interval_ms),
            ),
            _ => statehouse_journal::Durability::Always,
        },
        commit_delay: Duration::from_millis(storage.commit_delay_ms),
        history_bytes: storage.history_bytes,
        history_ms: storage.history_ms,
        ..Options::default()
    };
    let mut image = Image::new(storage.duplicates);
    let (log, opened) = Log::open(Arc::new(disk), options, wall_ms, &mut image).map_err(failed)?;
    image.finish();
    let behind_ms = image.now_ms.saturating_sub(wall_ms);
    if behind_ms > limits::CLOCK_BEHIND_MS_MAX && !storage.accept_clock {
        return Err(StorageError::Clock {
            directory: storage.directory.clone(),
            behind_s: behind_ms / 1000,
        });
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

/// What the threads of a journal call: known only once the journal runs.
#[derive(Clone, Default)]
pub struct Listener(Arc<OnceLock<(Arc<Server>, Option<Broker>)>>);

impl Listener {
    /// Names who waits for the journal: the store, and the embedded broker where there is one. The first call counts.
    pub fn attach(&self, server: Arc<Server>, broker: Option<Broker>) {
        // A second one would be a mistake of the wiring, which has one call.
        let _ = self.0.set((server, broker));
    }

    fn released(&self, position: Position) {
        if let Some((server, broker)) = self.0.get() {
            server.release();
            if let Some(broker) = broker {
                broker.released(position.0);
            }
        }
    }
}

impl Recovered {
    /// What was found, in words.
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

    /// Starts the journal's threads, and hands over the state.
    pub fn start(
        self,
        listener: &Listener,
    ) -> Result<(Arc<Disk>, Image), statehouse_journal::Error> {
        for (position, what) in &self.opened.damaged_snapshots {
            tracing::error!(%position, what, "a snapshot is damaged: recovered from an older one and the log behind it");
        }
        let released = listener.clone();
        let source = Pieces {
            listener: listener.clone(),
            progress: None,
        };
        let callbacks = Callbacks {
            released: Box::new(move |position| released.released(position)),
            failed: Box::new(|failure| {
                if failure.panicked {
                    tracing::error!(%failure, "a thread of the journal panicked; stopping, since nothing would be kept any more");
                    std::process::exit(crate::server::EXIT_STATE_LOST)
                }
                tracing::error!(%failure, "the disk failed: stopping, so that nothing is acknowledged that may be lost. Start again once the disk is well");
                std::process::exit(EXIT_DISK)
            }),
            source: Box::new(source),
            now_ms: Box::new(wall_ms),
        };
        let journal = statehouse_journal::Journal::start(self.log, callbacks)?;
        let place = self.directory.display().to_string();
        Ok((Disk::new(journal, self.durability, place), self.image))
    }
}

/// The blocks of a running store: sessions first, then the store (why is said in `journal/image.rs`).
struct Pieces {
    listener: Listener,
    progress: Option<(Option<statehouse_mqtt::ImageCursor>, Progress)>,
}

impl Source for Pieces {
    fn ready(&self) -> bool {
        self.listener.0.get().is_some()
    }

    fn begin(&mut self) {
        self.progress = Some((
            Some(statehouse_mqtt::ImageCursor::default()),
            Progress::default(),
        ));
    }

    fn next(&mut self, block: &mut Vec<u8>) -> Result<bool, String> {
        let (Some((server, broker)), Some((sessions, progress))) =
            (self.listener.0.get(), &mut self.progress)
        else {
            return Err("the store has not started yet".into());
        };
        if let (Some(cursor), Some(broker)) = (&mut *sessions, broker) {
            if let Some(changes) = broker.image(cursor, limits::SNAPSHOT_PIECE_BYTES) {
                *block = sessions_block(&changes);
                return Ok(true);
            }
            *sessions = None;
        }
        match server.snapshot(progress) {
            Some(piece) => {
                *block = piece;
                Ok(true)
            }
            None => Ok(false),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{Config, Flags};
    use crate::journal::Recorder;

    #[test]
    fn a_clock_that_went_back_is_asked_about() {
        let directory = tempfile::tempdir().unwrap();
        let settings = |accept_clock| {
            let flags = Flags {
                data: Some(directory.path().join("data")),
                accept_clock,
                ..Flags::default()
            };
            Config::load(flags).unwrap().storage
        };
        let ahead_ms = wall_ms() + 600_000;
        {
            let recovered = recover(&settings(false)).unwrap();
            assert!(recovered.report().ends_with("is new"));
            let (disk, _) = recovered.start(&Listener::default()).unwrap();
            Recorder::new(disk.clone(), Vec::new(), None).started(7, ahead_ms);
            disk.journal().close().unwrap();
        }
        let refused = recover(&settings(false))
            .err()
            .map(|error| error.to_string());
        let refused = refused.expect("ten minutes are too much");
        assert!(refused.contains("--accept-clock"), "{refused}");
        let image = recover(&settings(true)).unwrap().image;
        // Time goes on from what is recorded, not from the clock.
        assert_eq!((image.now_ms, image.run), (ahead_ms, 7));
    }

    #[test]
    fn a_directory_is_one_process_at_a_time() {
        let directory = tempfile::tempdir().unwrap();
        let flags = Flags {
            data: Some(directory.path().to_owned()),
            ..Flags::default()
        };
        let settings = Config::load(flags).unwrap().storage;
        let first = recover(&settings).unwrap();
        let refused = recover(&settings).err().map(|error| error.to_string());
        assert!(refused.is_some_and(|text| text.contains("in use by another process")));
        drop(first);
        assert!(recover(&settings).is_ok());
    }
}
