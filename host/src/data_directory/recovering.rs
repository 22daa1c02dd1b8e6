//! Refuses a state that a start may not continue with, before the log changes a file.
//!
//! A service manager repeats such a start until the clock is right. If each one began a segment of
//! the log, it would write megabytes, and wear out flash memory in a plant without a time server.

use statehouse_config::{Storage, limits};
use statehouse_offline::ImageSink;
use statehouse_wal::{LogPosition, Sink};

use super::StorageError;

/// Rebuilds the image of a start.
pub(super) struct Recovering<'a> {
    pub(super) image: ImageSink<'a>,
    pub(super) storage: &'a Storage,
    /// The wall clock in milliseconds since 1970.
    pub(super) wall_ms: u64,
    /// Why the state was refused, if it was.
    pub(super) refused: Option<StorageError>,
}

impl Sink for Recovering<'_> {
    fn reset(&mut self) {
        self.image.reset();
    }

    fn block(&mut self, block: &[u8]) -> Result<(), String> {
        self.image.block(block)
    }

    fn record(&mut self, position: LogPosition, record: &[u8]) -> Result<(), String> {
        self.image.record(position, record)
    }

    fn may_open(&mut self) -> Result<(), String> {
        let checked = check_clock(self.image.0.now_ms, self.storage, self.wall_ms);
        checked.map_err(|error| {
            let text = error.to_string();
            self.refused = Some(error);
            text
        })
    }
}

/// Refuses a state whose time is far ahead of the wall clock, unless the settings accept it.
pub(super) fn check_clock(
    now_ms: u64,
    storage: &Storage,
    wall_ms: u64,
) -> Result<(), StorageError> {
    let behind_ms = now_ms.saturating_sub(wall_ms);
    if behind_ms > limits::CLOCK_BEHIND_MS_MAX && !storage.accept_clock {
        return Err(StorageError::Clock {
            directory: storage.directory.clone(),
            behind_s: behind_ms / 1000,
        });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::ffi::OsString;
    use std::fs;

    use super::super::StorageError;
    use super::super::tests::{recover, settings_of, write_start};
    use statehouse_core::clock::wall_ms;

    /// Regression: each start with a wrong clock began a segment of the log.
    #[test]
    fn start_with_a_wrong_clock_changes_no_file() {
        let directory = tempfile::tempdir().unwrap();
        let storage = settings_of(directory.path());
        write_start(&storage, 1, wall_ms() + 600_000);
        let files = || -> BTreeMap<OsString, Vec<u8>> {
            let entries = fs::read_dir(&storage.directory).unwrap();
            let files = entries.map(|entry| {
                let entry = entry.unwrap();
                (entry.file_name(), fs::read(entry.path()).unwrap())
            });
            files.collect()
        };
        let before = files();
        for _ in 0..2 {
            let refused = recover(&storage).err();
            assert!(matches!(refused, Some(StorageError::Clock { .. })));
        }
        assert!(files() == before);
    }
}
