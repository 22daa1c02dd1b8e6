//! Which files there are and how they hang together, by names and headers alone.
//!
//! Enters: a directory. Leaves: its segments from the last one back as far as they follow on each
//! other, its snapshots and the marker of a clean close. It reads no record.

use std::collections::BTreeSet;
use std::io;

use crate::disk::Disk;
use crate::error::{Damage, Error};
use crate::files::{self, Kind};
use crate::newest;
use crate::segment::{HEADER_BYTES, Header, HeaderFault, Magic};

/// What a directory holds, by name alone.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Survey {
    pub(crate) segments: BTreeSet<u64>,
    pub(crate) snapshots: BTreeSet<u64>,
    pub(crate) spares: BTreeSet<u64>,
    pub(crate) damaged: BTreeSet<u64>,
    pub(crate) temporaries: Vec<String>,
    pub(crate) closed: Option<Header>,
    /// The newest segment that was recorded.
    pub(crate) newest: Option<Header>,
}

impl Survey {
    pub(crate) fn of(disk: &dyn Disk) -> Result<Self, Error> {
        let mut survey = Self {
            // Before the list: another process that writes may record a segment between the two.
            newest: newest::read(disk)?,
            ..Self::default()
        };
        for name in disk
            .list()
            .map_err(Error::io("list", "the data directory"))?
        {
            match files::kind(&name) {
                Kind::Segment(number) => _ = survey.segments.insert(number),
                Kind::Snapshot(position) => _ = survey.snapshots.insert(position),
                Kind::Spare(number) => _ = survey.spares.insert(number),
                Kind::DamagedSnapshot(position) => _ = survey.damaged.insert(position),
                Kind::Temporary => survey.temporaries.push(name),
                Kind::Closed => survey.closed = read_closed(disk)?,
                Kind::Newest | Kind::Lock | Kind::Other => {}
            }
        }
        Ok(survey)
    }

    /// Whether nothing says that there ever was a journal.
    pub(crate) fn is_empty(&self) -> bool {
        self.segments.is_empty()
            && self.snapshots.is_empty()
            && self.damaged.is_empty()
            && self.closed.is_none()
            && self.newest.is_none()
    }

    /// Up to where the log reached once, as far as names and the marker tell.
    pub(crate) fn witness(&self) -> u64 {
        let snapshots = self
            .snapshots
            .last()
            .copied()
            .unwrap_or(0)
            .max(self.damaged.last().copied().unwrap_or(0));
        let marked = |marker: Option<Header>| marker.map_or(0, |marker| marker.position);
        marked(self.closed).max(marked(self.newest)).max(snapshots)
    }
}

/// The marker of a clean close. It is no more than a witness: without it nothing is wrong.
fn read_closed(disk: &dyn Disk) -> Result<Option<Header>, Error> {
    let mut bytes = [0; HEADER_BYTES];
    let file = match disk.open_read_only(files::CLOSED) {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(Error::io("open", files::CLOSED)(error)),
    };
    let read = file
        .read_at(&mut bytes, 0)
        .map_err(Error::io("read", files::CLOSED))?;
    match Header::decode(&bytes[..read], Magic::Closed) {
        Ok(header) => Ok(Some(header)),
        Err(HeaderFault::Damaged) => {
            tracing::warn!(
                "the marker of the last clean close is damaged; the log is read without it"
            );
            Ok(None)
        }
        Err(HeaderFault::Format(format)) => Err(Error::UnknownFormat {
            file: files::CLOSED.to_owned(),
            format,
        }),
    }
}

/// A segment that is there.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Link {
    pub(crate) header: Header,
    pub(crate) bytes: u64,
}

/// A snapshot that is there.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SnapshotInfo {
    pub(crate) position: u64,
    pub(crate) complete: u64,
    pub(crate) created_ms: u64,
    pub(crate) bytes: u64,
}

/// The segments from the last one back, as far as they follow on each other.
pub(crate) struct Chain {
    pub(crate) links: Vec<Link>,
    /// Why there are no more.
    pub(crate) broken: Option<Damage>,
}

pub(crate) fn damage(file: String, offset: u64, reason: &str) -> Damage {
    Damage {
        file,
        offset,
        reason: reason.to_owned(),
        lost_from: None,
        lost_to: None,
    }
}

fn read_link(disk: &dyn Disk, number: u64) -> Result<Result<Link, Damage>, Error> {
    let name = files::segment(number);
    let file = disk
        .open_read_only(&name)
        .map_err(Error::io("open", &name))?;
    let mut bytes = [0; HEADER_BYTES];
    let read = file
        .read_at(&mut bytes, 0)
        .map_err(Error::io("read", &name))?;
    Ok(match Header::decode(&bytes[..read], Magic::Segment) {
        Ok(header) if header.number != number => {
            Err(damage(name, 0, "it is another segment under this name"))
        }
        Ok(header) => Ok(Link {
            header,
            bytes: file.bytes().map_err(Error::io("read", &name))?,
        }),
        Err(HeaderFault::Damaged) => Err(damage(name, 0, "its header is not what was written")),
        Err(HeaderFault::Format(format)) => {
            return Err(Error::UnknownFormat { file: name, format });
        }
    })
}

impl Chain {
    pub(crate) fn of(disk: &dyn Disk, survey: &Survey) -> Result<Self, Error> {
        let mut chain = Self {
            links: Vec::new(),
            broken: None,
        };
        for &number in survey.segments.iter().rev() {
            let link = match read_link(disk, number)? {
                Ok(link) => link,
                Err(damage) => {
                    chain.broken = Some(damage);
                    break;
                }
            };
            if let Some(next) = chain.links.last().map(|next: &Link| next.header) {
                let reason = if next.number != number + 1 {
                    Some((files::segment(next.number - 1), "the file is missing"))
                } else if next.store != link.header.store {
                    Some((files::segment(number), "it belongs to another store"))
                } else if link.header.position > next.position {
                    Some((
                        files::segment(number),
                        "it begins behind the segment that follows it",
                    ))
                } else {
                    None
                };
                if let Some((file, reason)) = reason {
                    chain.broken = Some(damage(file, 0, reason));
                    break;
                }
            }
            chain.links.push(link);
        }
        chain.links.reverse();
        Ok(chain)
    }

    /// The index of the segment in which the record behind `position` is or will be.
    pub(crate) fn reach(&self, position: u64) -> Option<usize> {
        self.links
            .iter()
            .rposition(|link| link.header.position <= position.saturating_add(1))
    }
}
