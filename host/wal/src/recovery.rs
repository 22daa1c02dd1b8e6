//! Recovery: reads the newest intact snapshot and the log after it.
//!
//! Input is the files of a directory; output is blocks and records in order, or an error.
//!
//! Invariant: recovery must never skip a record that was durable, because clients have already seen
//! its effects. A gap in the numbers of segments or positions is damage, and so is a log that ends
//! before a position that was durable.
//!
//! A *witness* is evidence that the log was durable up to a position: the `synced` field of a later
//! frame, the first position of a later segment, the name and footer of a snapshot, the file
//! `newest`, and the marker of a clean close. Only records after the last witness may be missing.

use std::io;

use crate::disk::{Disk, File, Unreadable, read_whole};
use crate::error::{Damage, Error, is_unreadable, unreadable_reason};
use crate::files;
use crate::segment::{Frames, HEADER_BYTES, Header, Magic, Rest, StoreId};
use crate::snapshot::{self, Fault};
use crate::survey::{Chain, Link, SnapshotInfo, Survey, damage};
use statehouse_protocol::LogPosition;

/// Receives the state that is read from a log.
pub trait Sink {
    /// Discards everything received so far, because reading starts again.
    fn reset(&mut self);
    /// Receives a block of the snapshot, in order. An error ends the reading.
    fn block(&mut self, block: &[u8]) -> Result<(), String>;
    /// Receives a record after the position at which the snapshot began, in order. The blocks may
    /// already contain its effect. An error ends the reading.
    fn record(&mut self, position: LogPosition, record: &[u8]) -> Result<(), String>;
    /// Called by [`Log::open`](crate::Log::open) when everything was read, before a file is
    /// changed. An error ends the opening.
    fn may_open(&mut self) -> Result<(), String> {
        Ok(())
    }
    /// Receives the damage before which no history was read, after the last record. Only a read
    /// from [`Base::Oldest`] on reports it, and only if there is such damage.
    fn gap(&mut self, _damage: &Damage) {}
}

/// A sink that discards everything.
pub struct Discard;

impl Sink for Discard {
    fn reset(&mut self) {}

    fn block(&mut self, _: &[u8]) -> Result<(), String> {
        Ok(())
    }

    fn record(&mut self, _: LogPosition, _: &[u8]) -> Result<(), String> {
        Ok(())
    }
}

/// The state at which reading begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Base {
    /// The oldest state that is available. History before damage that a newer snapshot covers is
    /// not; see [`Sink::gap`].
    Oldest,
    /// The newest snapshot.
    Newest,
    /// The newest snapshot that leads to the state just before this record.
    Before(LogPosition),
}

/// The positions that were read.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Range {
    /// The position at which the snapshot began, or [`LogPosition::NONE`] without a snapshot.
    pub base: LogPosition,
    /// The time at which the snapshot was taken, or 0 without a snapshot.
    pub base_ms: u64,
    /// The position from which on the state is consistent. Before it, blocks of the snapshot may
    /// contain effects of later records.
    pub complete: LogPosition,
    /// The last record that was read, or the base if there was none.
    pub end: LogPosition,
}

pub(crate) struct Recovered {
    pub(crate) store: StoreId,
    pub(crate) links: Vec<Link>,
    /// Numbers of the segments before these, from which a break separates them.
    pub(crate) severed: Vec<u64>,
    /// The damage that is this break.
    pub(crate) broken: Option<Damage>,
    pub(crate) snapshots: Vec<SnapshotInfo>,
    /// Snapshots that cannot be used, with the reason.
    pub(crate) damaged: Vec<(u64, Damage)>,
    pub(crate) range: Range,
    /// The offset at which the frames of the last segment end.
    pub(crate) end_offset: usize,
    /// The last position for which a witness exists.
    pub(crate) witness: u64,
    /// Whether the last process that wrote to the log closed it.
    pub(crate) is_closed: bool,
    pub(crate) torn: bool,
    /// Bytes of the frames after the snapshot.
    pub(crate) bytes: u64,
}

pub(crate) struct Plan {
    survey: Survey,
    chain: Chain,
    store: StoreId,
    snapshots: Vec<SnapshotInfo>,
    damaged: Vec<(u64, Damage)>,
}

/// Examines a snapshot without its blocks. A lack of rights or of open files says nothing about the
/// file, so it is an error, and never damage.
fn usable(
    disk: &dyn Disk,
    position: u64,
    store: StoreId,
) -> Result<Result<SnapshotInfo, Fault>, Error> {
    let name = files::snapshot(position);
    match disk.open_read_only(&name) {
        Ok(file) => Ok(snapshot_info(&*file, position, store)),
        Err(error) if error.kind() == io::ErrorKind::NotFound || is_unreadable(&error) => {
            Ok(Err(Fault::Damaged {
                offset: 0,
                reason: format!("it cannot be opened: {error}"),
            }))
        }
        Err(error) => Err(Error::io("open", &name)(error)),
    }
}

fn snapshot_info(file: &dyn File, position: u64, store: StoreId) -> Result<SnapshotInfo, Fault> {
    let (header, footer, bytes) = snapshot::read_ends(file)?;
    if header.position != position || header.store != store {
        return Err(Fault::Damaged {
            offset: 0,
            reason: "its header belongs to another store or position".to_owned(),
        });
    }
    Ok(SnapshotInfo {
        position,
        complete: footer.complete,
        created_ms: header.created_ms,
        bytes,
    })
}

/// Reads names and headers. Returns `None` if the directory holds no log.
pub(crate) fn plan(disk: &dyn Disk) -> Result<Option<Plan>, Error> {
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
        let lost_from = survey.snapshots.last().map_or(1, |last| last + 1);
        damage.lost_from = Some(LogPosition(lost_from));
        // The names of the remaining files may be no evidence of a record.
        let lost_to = Some(survey.witness()).filter(|witness| *witness >= lost_from);
        damage.lost_to = lost_to.map(LogPosition);
        return Err(Error::Damaged(damage));
    };
    let store = last.header.store;
    if survey.closed.is_some_and(|closed| closed.store != store) {
        tracing::warn!("the file `closed` belongs to another store; the log is read without it");
        survey.closed = None;
    }
    if survey.newest.is_some_and(|newest| newest.store != store) {
        tracing::warn!("the file `newest` belongs to another store; the log is read without it");
        survey.newest = None;
    }
    let (mut snapshots, mut damaged) = (Vec::new(), Vec::new());
    for &position in &survey.snapshots {
        match usable(disk, position, store)? {
            Ok(info) => snapshots.push(info),
            Err(fault) => match fault.into_error(&files::snapshot(position)) {
                Error::Damaged(damage) => damaged.push((position, damage)),
                error => return Err(error),
            },
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

/// Reads everything that is needed to continue the log. Returns `None` if the directory holds no
/// log.
pub(crate) fn recover(disk: &dyn Disk, sink: &mut dyn Sink) -> Result<Option<Recovered>, Error> {
    plan(disk)?
        .map(|plan| plan.read(disk, Base::Newest, 0, LogPosition::END, sink))
        .transpose()
}

impl Plan {
    /// The snapshots to begin with, best first. `None` in the list stands for the empty state,
    /// which is possible only if the log still holds record 1. Each candidate needs no segment up
    /// to the number `after`.
    fn candidates(&self, base: Base, after: u64) -> Vec<Option<SnapshotInfo>> {
        let links = &self.chain.links;
        let is_later = |at: usize| links.get(at).is_some_and(|it| it.header.number > after);
        let reached = self
            .snapshots
            .iter()
            .filter(|info| self.chain.reach(info.position).is_some_and(is_later));
        let mut candidates: Vec<_> = reached.copied().map(Some).collect();
        if links.first().is_some_and(|link| link.header.position == 1) && is_later(0) {
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

    /// Reads the log up to a record, without the segments up to the number `after`.
    pub(crate) fn read(
        mut self,
        disk: &dyn Disk,
        base: Base,
        after: u64,
        until: LogPosition,
        sink: &mut dyn Sink,
    ) -> Result<Recovered, Error> {
        let mut candidates = self.candidates(base, after).into_iter();
        let start = loop {
            match candidates.next() {
                None => {
                    return Err(match base {
                        Base::Before(position) => self.no_base_before(position),
                        Base::Oldest | Base::Newest => self.no_base_at_all(disk),
                    });
                }
                Some(None) => break None,
                Some(Some(info)) => {
                    let name = files::snapshot(info.position);
                    let file = disk
                        .open_read_only(&name)
                        .map_err(Error::io("open", &name))?;
                    match snapshot::read(&*file, &mut |block| sink.block(block)) {
                        Ok(_) => break Some(info),
                        Err(Fault::Damaged { offset, reason }) => {
                            tracing::warn!(file = %name, offset, reason, "the snapshot is damaged; another one is read instead");
                            self.snapshots
                                .retain(|other| other.position != info.position);
                            self.damaged
                                .push((info.position, damage(name, offset, &reason)));
                            sink.reset();
                        }
                        Err(fault) => return Err(fault.into_error(&name)),
                    }
                }
            }
        };
        self.replay(disk, start, until, sink)
    }

    /// The history before a position is missing, usually because it was removed. It is an error of
    /// the disk only if a damaged file would have led there.
    fn no_base_before(self, position: LogPosition) -> Error {
        let would_serve = |at: u64| at < position.0 && self.chain.reach(at).is_some();
        let in_the_way = self.damaged.iter().rfind(|(at, _)| would_serve(*at));
        match (in_the_way, self.chain.broken) {
            (Some((_, damage)), _) => Error::Damaged(damage.clone()),
            // It is unknown how far back the log reached beyond the damage.
            (None, Some(broken)) => Error::Damaged(broken),
            (None, None) => Error::NotRetained { position },
        }
    }

    fn no_base_at_all(self, disk: &dyn Disk) -> Error {
        let readable = self.end_before_break(disk);
        let first = self.chain.links.first().map(|link| link.header);
        let (number, first) = first.map_or((1, 1), |header| (header.number, header.position));
        let mut lost = match (self.chain.broken, self.damaged.last()) {
            (Some(damage), _) => damage,
            (None, Some((_, damage))) => damage.clone(),
            (None, None) => {
                let reason = format!("no snapshot leads to its first record, {first}");
                Damage {
                    offset: None,
                    ..damage(files::segment(number), 0, &reason)
                }
            }
        };
        lost.lost_from = Some(LogPosition(readable.min(first - 1) + 1));
        // The missing segment may have had no records.
        lost.lost_to = (readable < first - 1).then_some(LogPosition(first - 1));
        Error::Damaged(lost)
    }

    /// The last record that can be read without the newest part of the chain: that of the newest
    /// snapshot, or of the intact segments that lead on from it.
    fn end_before_break(&self, disk: &dyn Disk) -> u64 {
        let start = self.snapshots.last().copied();
        let base = start.map_or(0, |info| info.position);
        let mut survey = Survey {
            segments: self.survey.segments.clone(),
            ..Survey::default()
        };
        let chain = loop {
            let Ok(chain) = Chain::of(disk, &survey) else {
                return base;
            };
            let last = chain.links.last();
            let is_own = last.is_some_and(|link| link.header.store == self.store);
            if is_own && chain.reach(base).is_some() {
                break chain;
            }
            let Some(broken) = chain.broken else {
                return base;
            };
            let first = (chain.links.first()).map_or(u64::MAX, |link| link.header.number);
            let is_before = |it: &u64| *it < first && files::segment(*it) != broken.file;
            survey.segments.retain(is_before);
        };
        let before = Self {
            survey,
            chain,
            store: self.store,
            snapshots: start.into_iter().collect(),
            damaged: Vec::new(),
        };
        match before.replay(disk, start, LogPosition::END, &mut Discard) {
            Ok(recovered) => recovered.range.end.0,
            Err(Error::Damaged(Damage {
                lost_from: Some(lost),
                ..
            })) => base.max(lost.0 - 1),
            Err(_) => base,
        }
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
            unreadable: None,
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
            replay.unreadable = read_segment(disk, &name, link.header, &mut content)?;
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
        let first = (self.chain.links.first()).map_or(0, |link| link.header.number);
        // If the last segment is younger than the marker, a later process began it, and all of its
        // records are lost.
        let begun_ms = (self.chain.links.last()).map_or(0, |link| link.header.created_ms);
        let is_closed = (self.survey.closed)
            .is_some_and(|closed| closed.position == end && closed.created_ms >= begun_ms);
        Ok(Recovered {
            store: self.store,
            links: self.chain.links,
            severed: self.survey.segments.range(..first).copied().collect(),
            broken: self.chain.broken,
            snapshots: self.snapshots,
            damaged: self.damaged,
            range,
            end_offset: replay.end_offset,
            witness: replay.witness,
            is_closed,
            torn: replay.torn,
            bytes: replay.bytes,
        })
    }

    /// The records missing at the end of the log, according to a witness.
    fn missing_end(&self, replay: &Replay) -> Option<Damage> {
        let end = replay.next - 1;
        let last = self.chain.links.last()?.header.number;
        let newest = self.survey.newest;
        let mut damage = if newest.is_some_and(|newest| newest.number > last) {
            damage(files::segment(last + 1), 0, "the file is missing")
        } else if end < replay.witness {
            let offset = replay.end_offset as u64;
            let reason = "the log ends here, but later records were durable";
            damage(files::segment(last), offset, reason)
        } else {
            return None;
        };
        damage.lost_from = Some(LogPosition(end + 1));
        damage.lost_to = (end < replay.witness).then_some(LogPosition(replay.witness));
        Some(damage)
    }
}

/// Reads the file of a segment, and returns the first block that cannot be read. Fails with
/// [`Error::Moved`] if the file was recycled since its header was read.
fn read_segment(
    disk: &dyn Disk,
    name: &str,
    header: Header,
    content: &mut Vec<u8>,
) -> Result<Option<Unreadable>, Error> {
    let file = disk.open_read_only(name).map_err(Error::io("open", name))?;
    let unreadable = read_whole(&*file, content).map_err(Error::io("read", name))?;
    let has_header = unreadable.as_ref().is_none_or(|it| it.offset > 0);
    if has_header && Header::decode(content, Magic::Segment) != Ok(header) {
        return Err(Error::Moved);
    }
    Ok(unreadable)
}

struct Replay {
    base: u64,
    until: u64,
    /// The position of the next record.
    next: u64,
    witness: u64,
    end_offset: usize,
    torn: bool,
    /// The first block of the segment that cannot be read.
    unreadable: Option<Unreadable>,
    bytes: u64,
}

/// The error for damage at `offset` that makes the records `from` to `to` unreadable.
fn lost_records(name: &str, offset: usize, reason: &str, from: u64, to: Option<u64>) -> Error {
    Error::Damaged(Damage {
        lost_from: Some(LogPosition(from)),
        lost_to: to.map(LogPosition),
        ..damage(name.to_owned(), offset as u64, reason)
    })
}

impl Replay {
    /// Reads one segment. `follows` is the first position of the next segment, if there is one.
    fn segment(
        &mut self,
        name: &str,
        header: Header,
        content: &[u8],
        follows: Option<u64>,
        sink: &mut dyn Sink,
    ) -> Result<(), Error> {
        let lost = |offset, reason, from, to| lost_records(name, offset, reason, from, to);
        if header.position != self.next {
            let reason = "its first position does not follow the previous segment";
            return Err(lost(0, reason, self.next, None));
        }
        let mut frames = Frames::new(header, content);
        loop {
            let offset = frames.offset;
            let Some(frame) = frames.next() else { break };
            if frame.first != self.next || follows.is_some_and(|follows| frame.last() >= follows) {
                let reason = "the positions of its records are not consecutive";
                return Err(lost(offset, reason, self.next, None));
            }
            if frame.last() > self.base {
                self.bytes += frame.bytes as u64;
                for (record, position) in frame.records().zip(frame.first..) {
                    if position > self.base && position <= self.until {
                        sink.record(LogPosition(position), record)
                            .map_err(|message| Error::Refused {
                                place: format!("record {position} in {name}"),
                                message,
                                written_by: header.program,
                            })?;
                    }
                }
            }
            self.next = frame.last() + 1;
        }
        self.end_offset = frames.offset;
        let (offset, reason) = match self.unreadable_end(name, &frames) {
            Some((offset, reason)) => (Some(offset), reason),
            None => (None, "a frame is damaged".to_owned()),
        };
        match (follows, offset) {
            (Some(follows), _) if follows != self.next => Err(lost(
                offset.unwrap_or(self.end_offset),
                reason.as_str(),
                self.next,
                Some(follows - 1),
            )),
            (Some(_), _) => Ok(()),
            // All requested records were read.
            (None, _) if self.next > self.until => Ok(()),
            (None, Some(offset)) => {
                let to = (self.witness >= self.next).then_some(self.witness);
                Err(lost(offset, reason.as_str(), self.next, to))
            }
            (None, None) => self.check_rest(name, header, content.len() as u64, &frames.rest()),
        }
    }

    /// The offset and the reason of the damage if the frames of a segment may continue in a block
    /// that cannot be read. A block behind their end has no record that was durable.
    fn unreadable_end(&mut self, name: &str, frames: &Frames<'_>) -> Option<(usize, String)> {
        let Unreadable { offset, error } = self.unreadable.take()?;
        if frames.may_reach(offset) {
            // Cannot truncate: the block is in the content of the segment.
            return Some((offset as usize, unreadable_reason(&error)));
        }
        tracing::warn!(file = name, offset, %error, "a part of a segment that holds no record cannot be read: the disk may be failing");
        None
    }

    /// Checks what follows the frames of the last segment.
    fn check_rest(
        &mut self,
        name: &str,
        header: Header,
        bytes: u64,
        rest: &Rest,
    ) -> Result<(), Error> {
        let to = (self.witness >= self.next).then_some(self.witness);
        // A segment is created with its full length, so a crash never shortens one.
        let reason = header.wrong_length(bytes).or_else(|| rest.misplaced());
        if let Some(reason) = reason {
            return Err(lost_records(name, self.end_offset, &reason, self.next, to));
        }
        self.torn = rest.torn;
        self.witness = self.witness.max(rest.synced);
        Ok(())
    }
}
