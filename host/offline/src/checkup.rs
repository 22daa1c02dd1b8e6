//! Checks every file, block, record and module of a data directory.
//!
//! A checkup also works on a directory that a start refuses, and while a server writes to it. It
//! must never repair anything.

use std::time::Duration;

use statehouse_wal::{
    Base, Damage, DiskUse, Error, FileReport, Kind, LogPosition, Range, Sink, Verdict, inspect,
    read_snapshot_file,
};

use super::backup::{Contents, ModuleState, RecoveredState};
use super::{EVERYTHING, Past, PastError};
use crate::limits;
use statehouse_core::log::{Image, Meta, Progress};
use statehouse_core::store::{Duplicates, Retention, State};

/// The findings of a checkup.
#[derive(Debug)]
pub struct Checkup {
    /// Every file of the log.
    pub files: Vec<FileReport>,
    /// The disk space that the files take.
    pub disk: DiskUse,
    /// The result of a start, or the reason why a start refuses the directory.
    pub opening: Result<Opening, String>,
    /// Blocks of snapshots that were decoded.
    pub blocks: u64,
    /// Records that were decoded.
    pub records: u64,
    /// Problems, one sentence each.
    pub problems: Vec<String>,
    /// Findings that are no problems.
    pub notes: Vec<String>,
    /// Whether a start refuses the directory because a later version of the program wrote it.
    pub of_later_version: bool,
}

/// The result of a start.
#[derive(Debug)]
pub struct Opening {
    /// The contents of the newest state.
    pub contents: Contents,
    /// How far back the history reaches; `None` if only the newest state is readable.
    pub reach: Option<Reach>,
}

/// How far back the history reaches.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Reach {
    /// The oldest record is the one after this position.
    pub base: LogPosition,
    /// The time of the snapshot at this position, or 0 if the store began there.
    pub base_ms: u64,
    /// The position from which on every state is known exactly.
    pub exact: LogPosition,
    /// The last record.
    pub end: LogPosition,
}

impl From<Range> for Reach {
    fn from(range: Range) -> Self {
        Self {
            base: range.base,
            base_ms: range.base_ms,
            exact: range.complete,
            end: range.end,
        }
    }
}

impl Past {
    /// Checks the whole directory.
    pub fn checkup(&self) -> Result<Checkup, PastError> {
        let files = self.files()?;
        let disk = DiskUse::of(self.disk(), &files)
            .map_err(|error| PastError::of_log(self.path(), error))?;
        let mut checkup = Checkup {
            files,
            disk,
            opening: Err(String::new()),
            blocks: 0,
            records: 0,
            problems: Vec::new(),
            notes: Vec::new(),
            of_later_version: false,
        };
        if checkup.holds_nothing() {
            let nothing = "there is no log: a start would begin a new, empty store here";
            checkup.opening = Err(nothing.to_owned());
            checkup.problems.push(nothing.to_owned());
            return Ok(checkup);
        }
        checkup.check_files();
        checkup.decode_snapshots(self);
        checkup.check_opening(self)?;
        Ok(checkup)
    }

    /// Examines the files. A file that a server is writing may look damaged, but then the finding
    /// changes. So damage counts only if it is the same twice.
    fn files(&self) -> Result<Vec<FileReport>, PastError> {
        let look = || match inspect(self.disk()) {
            Ok(report) => Ok(report.files),
            Err(error) => Err(PastError::of_log(self.path(), error)),
        };
        let damaged = |files: &[FileReport]| -> Vec<FileReport> {
            let is_damaged = |it: &&FileReport| matches!(it.verdict, Verdict::Damaged { .. });
            files.iter().filter(is_damaged).cloned().collect()
        };
        let mut files = look()?;
        for _ in 0..limits::CHECKUP_ATTEMPTS_MAX {
            let before = damaged(&files);
            if before.is_empty() {
                break;
            }
            std::thread::sleep(Duration::from_millis(limits::CHECKUP_RETRY_MS));
            files = look()?;
            if damaged(&files) == before {
                break;
            }
        }
        Ok(files)
    }
}

impl Checkup {
    /// Whether there are no problems.
    pub fn is_well(&self) -> bool {
        self.problems.is_empty()
    }

    /// Whether there is no log at all.
    pub fn holds_nothing(&self) -> bool {
        let nothing = |file: &FileReport| {
            matches!(
                file.kind,
                Kind::Lock | Kind::Other | Kind::Spare(_) | Kind::Temporary
            )
        };
        self.files.iter().all(nothing)
    }

    fn check_files(&mut self) {
        let is_later_segment = |file: &FileReport| matches!(file.kind, Kind::Segment(2..));
        let has_witness =
            |file: &FileReport| file.kind == Kind::Newest && file.verdict != Verdict::Leftover;
        let lacks_witness =
            self.files.iter().any(is_later_segment) && !self.files.iter().any(has_witness);
        if lacks_witness {
            let missing = "newest: the file is missing or empty; without it, a removed last segment goes unnoticed. The next start writes it";
            self.notes.push(missing.to_owned());
        }
        for file in &self.files {
            let finding = format!("{}: {}", file.name, file.verdict);
            match (&file.verdict, file.kind) {
                (_, Kind::DamagedSnapshot(_)) => self.notes.push(format!(
                    "{}: a start found this snapshot damaged and put it aside",
                    file.name
                )),
                (Verdict::Damaged { .. } | Verdict::UnknownFormat { .. }, _) => {
                    self.problems.push(finding);
                }
                (Verdict::Leftover, Kind::Newest) if lacks_witness => {}
                (Verdict::TornTail { .. } | Verdict::Leftover, _) => self.notes.push(finding),
                (Verdict::Clean | Verdict::Stale | Verdict::Spare | Verdict::Foreign, _) => {}
            }
        }
    }

    fn decode_snapshots(&mut self, past: &Past) {
        for file in &self.files {
            if !matches!(file.kind, Kind::Snapshot(_)) || file.verdict != Verdict::Clean {
                continue;
            }
            let mut decoder = Decoder::of(Image::new(EVERYTHING));
            let read = read_snapshot_file(past.log.join(&file.name), &mut decoder);
            self.blocks += decoder.blocks;
            match read {
                Ok(_) => {}
                // A server may have removed the snapshot since the files were listed.
                Err(Error::Io { source, .. }) if source.kind() == std::io::ErrorKind::NotFound => {}
                Err(error) => self.problems.push(text_without_advice(&error)),
            }
        }
    }

    /// Recovers the state as a start does, and then again from the oldest snapshot on. A server may
    /// meanwhile remove the snapshots from before the first state. Then both are of different
    /// moments, so they are read again.
    fn check_opening(&mut self, past: &Past) -> Result<(), PastError> {
        let mut attempt = 1;
        let (newest, range, oldest) = loop {
            let newest = match Newest::read(past) {
                Ok(newest) => newest,
                // Nothing is wrong, and another call or another account may succeed.
                Err((_, error @ (PastError::Log(_, Error::Moved) | PastError::Unreadable(..)))) => {
                    return Err(error);
                }
                Err((records, error)) => {
                    if let PastError::Log(_, error) = &error {
                        self.of_later_version = error.is_of_later_version();
                    }
                    let why = why(&error);
                    self.records += records;
                    self.problems.push(format!("a start refuses this: {why}"));
                    self.opening = Err(why);
                    return Ok(());
                }
            };
            // Only keys, because the requests since then may not fit into memory.
            let mut oldest = Decoder::of(Image::of_keys());
            let range = past.read(Base::Oldest, newest.end, &mut oldest);
            if attempt == limits::CHECKUP_ATTEMPTS_MAX || !is_later(&range, newest.end) {
                self.records += oldest.records;
                break (newest, range, oldest);
            }
            attempt += 1;
            std::thread::sleep(Duration::from_millis(limits::CHECKUP_RETRY_MS));
        };
        self.check_modules(&newest.contents);
        let reach = self.compare(&newest, range, &oldest);
        let contents = newest.contents;
        self.opening = Ok(Opening { contents, reach });
        Ok(())
    }

    /// Compares the newest state with the one from the oldest snapshot on.
    fn compare(
        &mut self,
        newest: &Newest,
        range: Result<Range, PastError>,
        oldest: &Decoder,
    ) -> Option<Reach> {
        if is_later(&range, newest.end) {
            let note =
                "the server writes too fast for a comparison of the log with the newest snapshot";
            self.notes.push(note.to_owned());
            return None;
        }
        match range {
            Ok(range) => {
                if let Some(damage) = &oldest.damage {
                    self.problems.push(format!(
                        "the history before record {} cannot be read: {}",
                        range.base.0 + 1,
                        damage.place()
                    ));
                }
                if fingerprint(&oldest.image.state) != newest.fingerprint {
                    self.problems.push(format!(
                        "the log from record {} on gives a different state than the newest snapshot: one of the two is not what the store wrote",
                        range.base.0 + 1
                    ));
                }
                Some(range.into())
            }
            Err(error) => {
                let why = why(&error);
                self.problems
                    .push(format!("the history cannot be read: {why}"));
                None
            }
        }
    }

    fn check_modules(&mut self, contents: &Contents) {
        for module in &contents.policies {
            let policy = format!(
                "the policy {} {}",
                module.policy.name, module.policy.version
            );
            let found = match &module.state {
                ModuleState::Whole | ModuleState::BuiltIn => continue,
                ModuleState::Missing => format!("{policy} has no module any more"),
                ModuleState::Damaged(why) => {
                    format!("{policy} has a module that cannot be used: {why}")
                }
            };
            if module.active && !module.policy.built_in {
                self.problems.push(format!(
                    "{found}; it is the active policy, so a start needs --policy with its file or with another policy"
                ));
            } else if module.routed && !module.policy.built_in {
                self.problems.push(format!(
                    "{found}; a route names it, so a start needs the module back, or --policy, which removes the route"
                ));
            } else if module.held && !module.policy.built_in {
                self.problems.push(format!(
                    "{found}; it is held ready, so the next start removes it and its role: see `statehouse policy list`"
                ));
            } else if module.remembered > 0 {
                self.problems.push(format!(
                    "{found}; {} may be redelivered, and long answers cannot be computed again",
                    match module.remembered {
                        1 => "1 request that it answered".to_owned(),
                        number => format!("{number} requests that it answered"),
                    }
                ));
            } else if matches!(module.state, ModuleState::Damaged(_)) {
                self.problems.push(found);
            } else {
                self.notes
                    .push(format!("{found}; only a replay would need it"));
            }
        }
    }
}

/// What a start would recover.
struct Newest {
    contents: Contents,
    fingerprint: blake3::Hash,
    /// The last record.
    end: LogPosition,
}

impl Newest {
    /// Fails with the number of records before the error.
    #[expect(
        clippy::result_large_err,
        reason = "one caller, which handles it at once"
    )]
    fn read(past: &Past) -> Result<Self, (u64, PastError)> {
        let mut newest = Decoder::of(Image::new(EVERYTHING));
        let range = match past.read(Base::Newest, LogPosition::END, &mut newest) {
            Ok(range) => range,
            Err(error) => return Err((newest.records, error)),
        };
        let (modules, records) = (past.modules(), newest.records);
        let newest = RecoveredState::of(newest.image);
        let contents = newest.contents(range.end, |digest| ModuleState::of(&modules, digest));
        Ok(Self {
            contents: contents.map_err(|error| (records, error))?,
            fingerprint: fingerprint(newest.state()),
            end: range.end,
        })
    }
}

/// Whether the history that was read begins after this position.
fn is_later(oldest: &Result<Range, PastError>, end: LogPosition) -> bool {
    match oldest {
        Ok(range) => range.complete > end,
        Err(PastError::Log(_, Error::NotRetained { .. } | Error::Moved)) => true,
        Err(_) => false,
    }
}

/// The text of an error, for the findings.
fn why(error: &PastError) -> String {
    match error {
        PastError::Log(_, error) => text_without_advice(error),
        other => other.to_string(),
    }
}

/// The text of a log error without the advice to run `statehouse doctor`.
pub(super) fn text_without_advice(error: &Error) -> String {
    let Error::Damaged(damage) = error else {
        return error.to_string();
    };
    let place = damage.place();
    match (damage.lost_from, damage.lost_to) {
        (Some(from), Some(to)) if from <= to => format!(
            "{place}. Records {from} to {to} were on disk and cannot be read; later records may be unreadable too"
        ),
        (Some(from), _) => format!("{place}. Records from {from} on cannot be read"),
        (None, _) => place,
    }
}

/// Decodes and counts blocks and records, and rebuilds the state.
pub(super) struct Decoder {
    pub(super) image: Image,
    blocks: u64,
    records: u64,
    /// The last record that was applied.
    pub(super) last: Option<LogPosition>,
    /// The damage because of which earlier history was not read.
    damage: Option<Damage>,
}

impl Decoder {
    pub(super) fn of(image: Image) -> Self {
        Self {
            image,
            blocks: 0,
            records: 0,
            last: None,
            damage: None,
        }
    }
}

impl Sink for Decoder {
    fn reset(&mut self) {
        self.image.reset();
        (self.blocks, self.records, self.last) = (0, 0, None);
    }

    fn block(&mut self, block: &[u8]) -> Result<(), String> {
        self.blocks += 1;
        self.image.block(block).map_err(|error| error.to_string())
    }

    fn record(&mut self, position: LogPosition, record: &[u8]) -> Result<(), String> {
        self.records += 1;
        let applied = self.image.record(record);
        applied.map_err(|error| error.to_string())?;
        self.last = Some(position);
        Ok(())
    }

    fn gap(&mut self, damage: &Damage) {
        self.damage = Some(damage.clone());
    }
}

/// A digest of the keys and entries of a state.
fn fingerprint(state: &State) -> blake3::Hash {
    let (mut hasher, mut progress) = (blake3::Hasher::new(), Progress::default());
    let nothing = Duplicates::new(Retention::default());
    while let Some(block) = progress.next(state, &nothing, Meta::default) {
        hasher.update(&block);
    }
    hasher.finalize()
}

#[cfg(test)]
mod tests {
    use super::*;
    use statehouse_core::clock::Stamp;
    use statehouse_core::store::Entry;

    fn state(key: &'static str, value: &'static str, hidden: bool, wall: u64) -> State {
        let mut state = State::default();
        let version = Stamp { wall, counter: 0 };
        let table = if hidden {
            &mut state.hidden
        } else {
            &mut state.table
        };
        table.insert(Entry::new(
            key.as_bytes(),
            value.as_bytes(),
            version,
            None,
            None,
        ));
        state
    }

    #[test]
    fn fingerprint_is_equal_only_for_equal_tables() {
        let one = fingerprint(&state("k", "v", false, 1));
        assert_eq!(one, fingerprint(&state("k", "v", false, 1)));
        for other in [
            State::default(),
            state("k2", "v", false, 1),
            state("k", "w", false, 1),
            state("k", "v", true, 1),
            state("k", "v", false, 2),
        ] {
            assert_ne!(one, fingerprint(&other));
        }
    }
}
