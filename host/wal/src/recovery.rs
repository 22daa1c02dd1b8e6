//! Reading a journal: the newest snapshot that is whole, and the log behind it.
//!
//! Enters: the files of a directory. Leaves: blocks and records in order, or the reason why not.
//! It never skips anything: a gap in the numbers of segments or positions is damage, and so is a log
//! that ends before a place that was durable once. What was durable once is told by witnesses: the
//! `synced` field of later frames, the first position of later segments, the names and ends of
//! snapshots, and the marker of a clean close. Only what no witness vouches for may be missing.

use std::io;
use std::thread;
use std::time::Duration;

use crate::disk::{Disk, read_whole};
use crate::error::{Damage, Error};
use crate::files;
use crate::limits;
use crate::segment::{Frames, HEADER_BYTES, Header, Magic, StoreId};
use crate::snapshot::{self, Fault};
use crate::survey::{Chain, Link, SnapshotInfo, Survey, damage};
use statehouse_protocol::LogPosition;

/// Where a journal is read into.
pub trait Sink {
    /// Forget everything so far: another snapshot is tried.
    fn reset(&mut self);
    /// A block of the snapshot, in order.
    ///
    /// # Errors
    /// Any text ends the reading.
    fn block(&mut self, block: &[u8]) -> Result<(), String>;
    /// A record behind the beginning of the snapshot, in order. The blocks may have its effect already.
    ///
    /// # Errors
    /// Any text ends the reading.
    fn record(&mut self, position: LogPosition, record: &[u8]) -> Result<(), String>;
}

/// Where to begin reading.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Base {
    /// As early as there is a state to begin with.
    Oldest,
    /// At the newest snapshot.
    Newest,
    /// At the newest snapshot from which the state just before this record can be reached.
    Before(LogPosition),
}

/// What was read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Range {
    /// The beginning of the snapshot; [`LogPosition::NONE`] where it began with nothing.
    pub base: LogPosition,
    /// When that snapshot was taken, 0 where there was none.
    pub base_ms: u64,
    /// Only from here on is the state what it really was (a snapshot takes a while).
    pub complete: LogPosition,
    /// The last record that was read, or the base where there was none.
    pub end: LogPosition,
}

/// What recovery found.
pub(crate) struct Recovered {
    pub(crate) store: StoreId,
    pub(crate) links: Vec<Link>,
    pub(crate) snapshots: Vec<SnapshotInfo>,
    /// Snapshots that cannot be used, and why.
    pub(crate) damaged: Vec<(u64, String)>,
    pub(crate) range: Range,
    /// Where the frames of the last segment end.
    pub(crate) end_offset: usize,
    /// Up to where a witness vouches for the log.
    pub(crate) witness: u64,
    /// Where the last clean close was, if there was one.
    pub(crate) closed: Option<u64>,
    pub(crate) torn: bool,
    pub(crate) records: u64,
    /// Bytes of frames behind the snapshot.
    pub(crate) bytes: u64,
}

struct Plan {
    survey: Survey,
    chain: Chain,
    store: StoreId,
    snapshots: Vec<SnapshotInfo>,
    damaged: Vec<(u64, String)>,
}

fn usable(disk: &dyn Disk, position: u64, store: StoreId) -> Result<SnapshotInfo, Fault> {
    let name = files::snapshot(position);
    let file = disk.open_read_only(&name).map_err(|error| Fault::Damaged {
        offset: 0,
        reason: format!("it cannot be opened: {error}"),
    })?;
    let (header, footer, bytes) = snapshot::read_ends(&*file)?;
    if header.position != position || header.store != store {
        return Err(Fault::Damaged {
            offset: 0,
            reason: "it is another store's or another time's".to_owned(),
        });
    }
    Ok(SnapshotInfo {
        position,
        complete: footer.complete,
        created_ms: header.created_ms,
        bytes,
    })
}

/// Looks at headers and names; `None` where there is nothing yet.
fn plan(disk: &dyn Disk) -> Result<Option<Plan>, Error> {
    let mut survey = Survey::of(disk)?;
    let chain = Chain::of(disk, &survey)?;
    let Some(last) = chain.links.last() else {
        if let Some(damage) = chain.broken {
            return Err(Error::Damaged(damage));
        }
        if survey.is_empty() {
            return Ok(None);
        }
        let mut damage = damage(files::segment(1), 0, "the whole log is missing");
        damage.lost_to = Some(LogPosition(survey.witness()));
        damage.lost_from = Some(LogPosition(
            survey.snapshots.last().map_or(1, |last| last + 1),
        ));
        return Err(Error::Damaged(damage));
    };
    let store = last.header.store;
    if survey.closed.is_some_and(|closed| closed.store != store) {
        tracing::warn!(
            "the marker of a clean close is another store's; the log is read without it"
        );
        survey.closed = None;
    }
    if survey.newest.is_some_and(|newest| newest.store != store) {
        tracing::warn!(
            "the record of the newest segment belongs to another store; the log is read without it"
        );
        survey.newest = None;
    }
    let (mut snapshots, mut damaged) = (Vec::new(), Vec::new());
    for &position in &survey.snapshots {
        match usable(disk, position, store) {
            Ok(info) => snapshots.push(info),
            Err(Fault::Format(format)) => {
                return Err(Error::UnknownFormat {
                    file: files::snapshot(position),
                    format,
                });
            }
            Err(
                Fault::Damaged { reason, .. }
                | Fault::Refused {
                    message: reason, ..
                },
            ) => {
                damaged.push((position, reason));
            }
        }
    }
    Ok(Some(Plan {
        survey,
        chain,
        store,
        snapshots,
        damaged,
    }))
}

/// Reads what is needed to go on writing; `None` where there is nothing yet.
pub(crate) fn recover(disk: &dyn Disk, sink: &mut dyn Sink) -> Result<Option<Recovered>, Error> {
    match plan(disk)? {
        Some(plan) => plan
            .read(disk, Base::Newest, LogPosition::END, sink)
            .map(Some),
        None => Ok(None),
    }
}

impl Plan {
    /// The snapshots to begin with, best first; the last choice is nothing, where the log goes back that far.
    fn candidates(&self, base: Base) -> Vec<Option<SnapshotInfo>> {
        let reached = self
            .snapshots
            .iter()
            .filter(|info| self.chain.reach(info.position).is_some());
        let mut candidates: Vec<_> = reached.copied().map(Some).collect();
        if self
            .chain
            .links
            .first()
            .is_some_and(|link| link.header.position == 1)
        {
            candidates.insert(0, None);
        }
        match base {
            Base::Oldest => {}
            Base::Newest => candidates.reverse(),
            Base::Before(position) => {
                candidates.retain(|info| info.is_none_or(|info| info.complete < position.0));
                candidates.reverse();
            }
        }
        candidates
    }

    fn read(
        mut self,
        disk: &dyn Disk,
        base: Base,
        until: LogPosition,
        sink: &mut dyn Sink,
    ) -> Result<Recovered, Error> {
        let mut candidates = self.candidates(base).into_iter();
        let start = loop {
            match candidates.next() {
                None => return Err(self.no_base(base)),
                Some(None) => break None,
                Some(Some(info)) => {
                    let name = files::snapshot(info.position);
                    let file = disk
                        .open_read_only(&name)
                        .map_err(Error::io("open", &name))?;
                    match snapshot::read(&*file, &mut |block| sink.block(block)) {
                        Ok(_) => break Some(info),
                        Err(Fault::Damaged { offset, reason }) => {
                            tracing::warn!(file = %name, offset, reason, "a snapshot is damaged, an older one is read");
                            self.snapshots
                                .retain(|other| other.position != info.position);
                            self.damaged.push((info.position, reason));
                            sink.reset();
                        }
                        Err(fault) => return Err(fault.into_error(&name)),
                    }
                }
            }
        };
        self.replay(disk, start, until, sink)
    }

    /// Why there is nothing to begin with.
    fn no_base(self, base: Base) -> Error {
        match base {
            Base::Before(position) => self.no_base_before(position),
            Base::Oldest | Base::Newest => self.no_base_at_all(),
        }
    }

    /// The past is not there, mostly because it was let go. Only damage to what may have led there is its cause.
    fn no_base_before(self, position: LogPosition) -> Error {
        let would_serve = |at: u64| at < position.0 && self.chain.reach(at).is_some();
        let in_the_way = self.damaged.iter().rfind(|(at, _)| would_serve(*at));
        match (in_the_way, self.chain.broken) {
            (Some((at, reason)), _) => Error::Damaged(damage(files::snapshot(*at), 0, reason)),
            // Nobody can say how far the log went back behind it.
            (None, Some(broken)) => Error::Damaged(broken),
            (None, None) => Error::NotRetained { position },
        }
    }

    fn no_base_at_all(self) -> Error {
        let first = self
            .chain
            .links
            .first()
            .map_or(1, |link| link.header.position);
        let mut lost = match (self.chain.broken, self.damaged.last()) {
            (Some(damage), _) => damage,
            (None, Some((position, reason))) => damage(files::snapshot(*position), 0, reason),
            (None, None) => damage(files::snapshot(first - 1), 0, "the file is missing"),
        };
        lost.lost_from = Some(LogPosition(
            self.snapshots.last().map_or(1, |info| info.position + 1),
        ));
        lost.lost_to = Some(LogPosition(first - 1));
        Error::Damaged(lost)
    }

    fn replay(
        self,
        disk: &dyn Disk,
        start: Option<SnapshotInfo>,
        until: LogPosition,
        sink: &mut dyn Sink,
    ) -> Result<Recovered, Error> {
        let base = start.map_or(0, |info| info.position);
        let complete = start.map_or(0, |info| info.complete);
        let from = self.chain.reach(base).unwrap_or(0);
        let links = &self.chain.links;
        let mut replay = Replay {
            base,
            until: until.0,
            next: links.get(from).map_or(1, |link| link.header.position),
            witness: self.survey.witness().max(complete),
            end_offset: HEADER_BYTES,
            torn: false,
            records: 0,
            bytes: 0,
        };
        for info in &self.snapshots {
            replay.witness = replay.witness.max(info.complete);
        }
        let mut content = Vec::new();
        for (index, link) in links.iter().enumerate().skip(from) {
            replay.witness = replay.witness.max(link.header.position - 1);
            if link.header.position > until.0 {
                break;
            }
            let name = files::segment(link.header.number);
            let file = disk
                .open_read_only(&name)
                .map_err(Error::io("open", &name))?;
            read_whole(&*file, limits::SEGMENT_FILE_BYTES_MAX, &mut content)
                .map_err(Error::io("read", &name))?;
            if Header::decode(&content, Magic::Segment) != Ok(link.header) {
                return Err(Error::Moved);
            }
            let next = links.get(index + 1).map(|next| next.header.position);
            replay.segment(&name, link.header, &content, next, sink)?;
        }
        let end = replay.next - 1;
        if until == LogPosition::END
            && let Some(damage) = self.missing_end(&replay)
        {
            return Err(Error::Damaged(damage));
        }
        let end = end.min(until.0).max(base);
        let range = Range {
            base: LogPosition(base),
            base_ms: start.map_or(0, |info| info.created_ms),
            complete: LogPosition(complete),
            end: LogPosition(end),
        };
        Ok(Recovered {
            store: self.store,
            links: self.chain.links,
            snapshots: self.snapshots,
            damaged: self.damaged,
            range,
            end_offset: replay.end_offset,
            witness: replay.witness,
            closed: self.survey.closed.map(|closed| closed.position),
            torn: replay.torn,
            records: replay.records,
            bytes: replay.bytes,
        })
    }
}

impl Plan {
    /// What is missing behind the last record, if a witness says that the log went on.
    fn missing_end(&self, replay: &Replay) -> Option<Damage> {
        let end = replay.next - 1;
        let last = self.chain.links.last()?.header.number;
        let mut damage = if self
            .survey
            .newest
            .is_some_and(|newest| newest.number > last)
        {
            damage(files::segment(last + 1), 0, "the file is missing")
        } else if end < replay.witness {
            let offset = replay.end_offset as u64;
            let reason = "the log ends here, and went on once";
            damage(files::segment(last), offset, reason)
        } else {
            return None;
        };
        damage.lost_from = Some(LogPosition(end + 1));
        damage.lost_to = (end < replay.witness).then_some(LogPosition(replay.witness));
        Some(damage)
    }
}

struct Replay {
    base: u64,
    until: u64,
    /// The position of the next record.
    next: u64,
    witness: u64,
    end_offset: usize,
    torn: bool,
    records: u64,
    bytes: u64,
}

impl Replay {
    /// Reads one segment; `follows` is the first position of the one behind it.
    fn segment(
        &mut self,
        name: &str,
        header: Header,
        content: &[u8],
        follows: Option<u64>,
        sink: &mut dyn Sink,
    ) -> Result<(), Error> {
        let lost = |offset: usize, reason: &str, from: u64, to: Option<u64>| {
            Error::Damaged(Damage {
                file: name.to_owned(),
                offset: offset as u64,
                reason: reason.to_owned(),
                lost_from: Some(LogPosition(from)),
                lost_to: to.map(LogPosition),
            })
        };
        if header.position != self.next {
            return Err(lost(
                0,
                "it does not begin where the one before it ends",
                self.next,
                None,
            ));
        }
        let mut frames = Frames::new(header, content);
        loop {
            let offset = frames.offset;
            let Some(frame) = frames.next() else { break };
            if frame.first != self.next || follows.is_some_and(|follows| frame.last() >= follows) {
                return Err(lost(
                    offset,
                    "its records have the wrong numbers",
                    self.next,
                    None,
                ));
            }
            if frame.last() > self.base {
                self.bytes += frame.bytes as u64;
                for (record, position) in frame.records().zip(frame.first..) {
                    if position > self.base && position <= self.until {
                        self.records += 1;
                        sink.record(LogPosition(position), record)
                            .map_err(|message| Error::Refused {
                                place: format!("record {position}"),
                                message,
                            })?;
                    }
                }
            }
            self.next = frame.last() + 1;
        }
        self.end_offset = frames.offset;
        match follows {
            Some(follows) if follows != self.next => Err(lost(
                self.end_offset,
                "a frame is not what was written",
                self.next,
                Some(follows - 1),
            )),
            Some(_) => Ok(()),
            // Until here all was there that was asked for.
            None if self.next > self.until => Ok(()),
            None => {
                let to = (self.witness >= self.next).then_some(self.witness);
                // A segment is created with its whole length, so a crash never shortens one.
                if let Some(reason) = header.wrong_length(content.len() as u64) {
                    return Err(lost(self.end_offset, &reason, self.next, to));
                }
                let rest = frames.rest();
                if let Some(at) = rest.moved {
                    let reason = format!("a frame that stands at byte {at} was written elsewhere");
                    return Err(lost(self.end_offset, &reason, self.next, to));
                }
                self.torn = rest.torn;
                self.witness = self.witness.max(rest.synced);
                Ok(())
            }
        }
    }
}

/// Reads a journal from a base up to a record, also while another process writes to it. Where that
/// recycles what is being read, [`Sink::reset`] is called and the reading begins anew.
///
/// # Errors
/// [`Error::NotRetained`] where the log does not go back that far; [`Error::Damaged`]; and
/// [`Error::Moved`] where it is recycled faster than it is read.
pub fn read(
    disk: &dyn Disk,
    base: Base,
    until: LogPosition,
    sink: &mut dyn Sink,
) -> Result<Range, Error> {
    let mut before = None;
    for _ in 0..limits::READ_ATTEMPTS_MAX {
        let outcome = match plan(disk) {
            Ok(Some(plan)) => plan
                .read(disk, base, until, sink)
                .map(|recovered| recovered.range),
            Ok(None) => Ok(Range {
                base: LogPosition::NONE,
                base_ms: 0,
                complete: LogPosition::NONE,
                end: LogPosition::NONE,
            }),
            Err(error) => Err(error),
        };
        match outcome {
            Err(Error::Moved) => before = None,
            Err(Error::Io { source, .. }) if source.kind() == io::ErrorKind::NotFound => {
                before = None
            }
            // A frame that is just being written looks like damage too, but not twice.
            Err(Error::Damaged(damage)) if before.as_ref() != Some(&damage) => {
                before = Some(damage)
            }
            outcome => return outcome,
        }
        sink.reset();
        thread::sleep(Duration::from_millis(limits::READ_RETRY_MS));
    }
    Err(Error::Moved)
}
