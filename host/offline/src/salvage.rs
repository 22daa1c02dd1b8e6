//! Writes a backup of the newest readable state of a damaged directory.
//!
//! A salvage changes nothing in the directory. It must never skip a record in the middle, because
//! the result would be a state that never existed. An older state is better. A log of a later
//! version is not damaged, so it is refused.

use std::io;
use std::path::Path;
use std::sync::Arc;

use statehouse_wal::{
    Base, Disk, Error, File, FileReport, Kind, LogPosition, Range, Verdict, inspect,
    read_snapshot_file,
};

use super::backup::{self, Contents};
use super::checkup::{Decoder, text_without_advice};
use super::{EVERYTHING, Past, PastError};
use crate::ImageSink;
use statehouse_core::log::Image;

/// The result of a salvage.
#[derive(Debug)]
pub struct Salvaged {
    /// The contents of the backup.
    pub contents: Contents,
    /// Whether nothing is lost.
    pub whole: bool,
    /// Set if the log that completes the snapshot is lost. Each key is then as of some moment while
    /// the snapshot was taken, which ended at this record.
    pub blurred_up_to: Option<LogPosition>,
}

impl Past {
    /// Writes a backup of everything that can still be read. Fails with [`PastError::Refused`] if
    /// that is nothing.
    pub fn salvage(&self, file: &Path, now_ms: u64) -> Result<Salvaged, PastError> {
        let (image, range, whole) = self.readable()?;
        // Later records must have higher numbers than all earlier ones.
        let position = range.end.max(range.complete);
        let contents = backup::write(file, image, position, now_ms, &self.modules())?;
        Ok(Salvaged {
            contents,
            whole,
            blurred_up_to: is_blurred(&range).then_some(range.complete),
        })
    }

    /// Whether [`Self::salvage`] may find a state. Reads the directory, and writes nothing.
    pub fn is_salvageable(&self) -> bool {
        let read = self.readable();
        !matches!(read, Err(PastError::Refused(_) | PastError::NoLog(_)))
    }

    /// The newest readable state, and whether nothing is lost.
    fn readable(&self) -> Result<(Image, Range, bool), PastError> {
        let failed = |error| PastError::of_log(self.path(), error);
        let report = inspect(self.disk()).map_err(failed)?;
        let mut first = None;
        let segment = |file: &FileReport| match file.kind {
            Kind::Segment(number) => Some(number),
            _ => None,
        };
        let mut ends: Vec<u64> = report.files.iter().filter_map(segment).collect();
        ends.sort_unstable();
        // The second attempt reads the whole log without the markers of its end.
        ends.extend(ends.last().map(|last| last + 1));
        // The first attempt reads the whole log. Each later one leaves out one more segment at the
        // end, because a segment after a gap prevents that the part before the gap is read.
        let cuts = std::iter::once(u64::MAX).chain(ends.into_iter().rev());
        for end in cuts {
            let view = View {
                disk: self.disk(),
                end,
            };
            match view.newest() {
                // The part without the left-out segments is empty.
                Ok((_, range, _)) if range.end == LogPosition::NONE => {}
                Ok((image, range, damaged)) => {
                    let whole = first.is_none() && !damaged;
                    return Ok((image, range, whole));
                }
                // This version would drop what a later one wrote, and nothing is damaged.
                Err(error) if error.is_of_later_version() => {
                    return Err(PastError::Refused(text_without_advice(&error)));
                }
                Err(error) => first = first.or(Some(error)),
            }
        }
        for (name, range) in snapshots(&report.files) {
            let mut image = Image::new(EVERYTHING);
            let path = self.log.join(name);
            if read_snapshot_file(path, &mut ImageSink(&mut image)).is_ok() {
                return Ok((image, range, false));
            }
        }
        Err(match first {
            Some(error @ Error::Damaged(_)) => PastError::Refused(format!(
                "{}. No consistent state can be read: restore a backup",
                text_without_advice(&error)
            )),
            Some(error) => failed(error),
            None => PastError::NoLog(self.path().to_owned()),
        })
    }
}

/// Whether keys may be as of different moments.
fn is_blurred(range: &Range) -> bool {
    range.complete > range.end
}

/// The intact snapshots, and the states that they are without a log: first the exact ones, of each
/// kind the newest one first.
fn snapshots(files: &[FileReport]) -> Vec<(&str, Range)> {
    let clean = files.iter().rev().filter(|it| it.verdict == Verdict::Clean);
    let snapshots = clean.filter_map(|it| {
        let Kind::Snapshot(position) = it.kind else {
            return None;
        };
        let base = LogPosition(position);
        let range = Range {
            base,
            base_ms: 0,
            complete: it.last.unwrap_or(base),
            end: base,
        };
        Some((it.name.as_str(), range))
    });
    let mut snapshots: Vec<_> = snapshots.collect();
    snapshots.sort_by_key(|(_, range)| is_blurred(range));
    snapshots
}

/// The files that record the end of the log.
const MARKERS: [&str; 2] = ["closed", "newest"];

/// A directory without the segments from `end` on and without the markers. `u64::MAX` hides
/// nothing.
struct View<'a> {
    disk: &'a dyn Disk,
    end: u64,
}

impl View<'_> {
    /// The newest readable state, and whether it ends at damage.
    fn newest(&self) -> Result<(Image, Range, bool), Error> {
        let mut reader = Decoder::of(Image::new(EVERYTHING));
        let error = match statehouse_wal::read(self, Base::Newest, LogPosition::END, &mut reader) {
            Ok(range) => return Ok((reader.image, range, false)),
            Err(error) => error,
        };
        let until = match &error {
            _ if error.is_of_later_version() => None,
            Error::Damaged(damage) => damage.lost_from.map(|lost| LogPosition(lost.0 - 1)),
            Error::Refused { .. } => reader.last,
            _ => None,
        };
        let Some(until) = until else {
            return Err(error);
        };
        // Only one image is in memory at a time.
        drop(reader);
        // A snapshot that needs records after the damage leads to a state that never existed. An
        // older one that needs none leads to one that did.
        let mut base = Base::Newest;
        while let Ok((image, range)) = self.up_to(until, base) {
            if !is_blurred(&range) {
                return Ok((image, range, true));
            }
            base = Base::Before(LogPosition(range.end.0 + 1));
        }
        match self.up_to(until, Base::Newest) {
            Ok((image, range)) => Ok((image, range, true)),
            Err(_) => Err(error),
        }
    }

    /// The state at this record, from this base on.
    fn up_to(&self, until: LogPosition, base: Base) -> Result<(Image, Range), Error> {
        let mut reader = Decoder::of(Image::new(EVERYTHING));
        let range = statehouse_wal::read(self, base, until, &mut reader)?;
        Ok((reader.image, range))
    }
}

impl Disk for View<'_> {
    fn list(&self) -> io::Result<Vec<String>> {
        let mut names = self.disk.list()?;
        if self.end < u64::MAX {
            names.retain(|name| {
                let number = name.strip_suffix(".log").and_then(|it| it.parse().ok());
                number.is_none_or(|number: u64| number < self.end)
            });
            names.retain(|name| !MARKERS.contains(&name.as_str()));
        }
        Ok(names)
    }

    fn open_read_only(&self, name: &str) -> io::Result<Arc<dyn File>> {
        if self.end < u64::MAX && MARKERS.contains(&name) {
            return Err(io::ErrorKind::NotFound.into());
        }
        self.disk.open_read_only(name)
    }

    fn create(&self, _: &str) -> io::Result<Arc<dyn File>> {
        Err(io::ErrorKind::ReadOnlyFilesystem.into())
    }

    fn open(&self, _: &str) -> io::Result<Arc<dyn File>> {
        Err(io::ErrorKind::ReadOnlyFilesystem.into())
    }

    fn rename(&self, _: &str, _: &str) -> io::Result<()> {
        Err(io::ErrorKind::ReadOnlyFilesystem.into())
    }

    fn remove(&self, _: &str) -> io::Result<()> {
        Err(io::ErrorKind::ReadOnlyFilesystem.into())
    }

    fn sync_directory(&self) -> io::Result<()> {
        Err(io::ErrorKind::ReadOnlyFilesystem.into())
    }

    fn free_bytes(&self) -> io::Result<u64> {
        self.disk.free_bytes()
    }

    fn entropy(&self) -> u64 {
        self.disk.entropy()
    }
}

#[cfg(test)]
mod tests {
    use std::ops::RangeInclusive;

    use super::*;
    use statehouse_core::log::{Meta, Progress, record};
    use statehouse_core::store::{Duplicates, Mode, Retention, State};
    use statehouse_wal::simulation::{BLOCK_BYTES, Simulation};
    use statehouse_wal::{Discard, Log, Options, Snapshot};

    const SEGMENT: &str = "000000000001.log";

    fn opened() -> (Simulation, Log) {
        let simulation = Simulation::new(1);
        let disk: Arc<dyn Disk> = Arc::new(simulation.clone());
        let (log, _) = Log::open(disk, Options::default(), 1, &mut Discard).unwrap();
        (simulation, log)
    }

    /// Adds a record for each of these runs, whose positions have the same numbers.
    fn append(log: &Log, runs: RangeInclusive<u32>) {
        for run in runs {
            let mut started = Vec::new();
            record::started(&mut started, run, 1_000, Mode::Embedded);
            log.append(&[&started]).unwrap();
            log.commit().unwrap();
        }
    }

    /// A snapshot that begins now, and whose blocks have the effects of the records up to `run`.
    fn snapshot(log: &Log, run: u32) -> Snapshot {
        let mut snapshot = log.begin_snapshot(1).unwrap().unwrap();
        let (state, duplicates) = (State::default(), Duplicates::new(Retention::default()));
        let meta = || Meta {
            run,
            ..Meta::default()
        };
        let mut progress = Progress::default();
        while let Some(block) = progress.next(&state, &duplicates, meta) {
            snapshot.block(&block).unwrap();
        }
        snapshot
    }

    /// Adds a record for this run. Returns the offset of its frame.
    fn append_one(disk: &Simulation, log: &Log, run: u32) -> usize {
        let before = disk.content(SEGMENT).unwrap();
        append(log, run..=run);
        let after = disk.content(SEGMENT).unwrap();
        let frame = before.iter().zip(&after).position(|(a, b)| a != b);
        frame.unwrap()
    }

    fn damage(disk: &Simulation, offset: usize) {
        let mut content = disk.content(SEGMENT).unwrap();
        content[offset] ^= 1;
        disk.put(SEGMENT, &content);
    }

    /// The run of a damaged log, and the positions at which it is complete and ends.
    fn salvaged(disk: &Simulation) -> (u32, u64, u64) {
        let end = u64::MAX;
        let (image, range, is_damaged) = View { disk, end }.newest().unwrap();
        assert!(is_damaged);
        (image.run, range.complete.0, range.end.0)
    }

    /// The newest snapshot has effects of a record behind the damage, so it alone would lead to a
    /// state that never existed.
    #[test]
    fn exact_state_is_salvaged_from_the_snapshot_before() {
        let (disk, log) = opened();
        append(&log, 1..=2);
        let first = snapshot(&log, 2);
        log.finish_snapshot(first).unwrap();
        append(&log, 3..=4);
        let second = snapshot(&log, 7);
        append(&log, 5..=5);
        let frame = append_one(&disk, &log, 6);
        append(&log, 7..=7);
        log.finish_snapshot(second).unwrap();
        damage(&disk, frame);
        assert_eq!(salvaged(&disk), (5, 2, 5));
        let report = inspect(&disk).unwrap();
        let alone = snapshots(&report.files);
        let alone = alone.iter().map(|(_, it)| (it.complete.0, it.end.0));
        assert_eq!(alone.collect::<Vec<_>>(), [(2, 2), (7, 4)]);
    }

    /// A snapshot behind the damage is exact if it needs no record, and is newer than the records
    /// in front of the damage.
    #[test]
    fn exact_snapshot_behind_the_damage_is_salvaged() {
        for has_blurred in [false, true] {
            let (disk, log) = opened();
            append(&log, 1..=4);
            let frame = append_one(&disk, &log, 5);
            append(&log, 6..=8);
            let exact = snapshot(&log, 8);
            log.finish_snapshot(exact).unwrap();
            append(&log, 9..=10);
            if has_blurred {
                let blurred = snapshot(&log, 12);
                append(&log, 11..=12);
                log.finish_snapshot(blurred).unwrap();
            }
            damage(&disk, frame);
            assert_eq!(salvaged(&disk), (8, 8, 8), "{has_blurred}");
        }
    }

    #[test]
    fn everything_before_an_unreadable_block_is_salvaged() {
        const RUNS: u32 = 200;
        let (disk, log) = opened();
        append(&log, 1..=RUNS);
        disk.break_block(SEGMENT, BLOCK_BYTES);
        let (run, _, end) = salvaged(&disk);
        assert!(run > 10 && run < RUNS, "{run}");
        assert_eq!(end, u64::from(run));
    }
}
