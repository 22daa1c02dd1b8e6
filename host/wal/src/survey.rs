//! Lists the files of a log and checks that they belong together, by names and headers only.
//!
//! Input is a directory. Output is the chain of segments that ends with the newest one, the
//! snapshots, the marker of a clean close and the record of the newest segment. No record is read.

use std::collections::BTreeSet;
use std::io;

use crate::disk::Disk;
use crate::error::{Damage, Error, is_unreadable, unreadable_reason};
use crate::files::{self, Kind};
use crate::newest;
use crate::segment::{HEADER_BYTES, Header, HeaderFault, Magic};

/// The files of a directory, by name.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Survey {
    pub(crate) segments: BTreeSet<u64>,
    pub(crate) snapshots: BTreeSet<u64>,
    pub(crate) spares: BTreeSet<u64>,
    pub(crate) damaged: BTreeSet<u64>,
    pub(crate) temporaries: Vec<String>,
    pub(crate) closed: Option<Header>,
    /// The segment that the file `newest` records.
    pub(crate) newest: Option<Header>,
}

impl Survey {
    pub(crate) fn of(disk: &dyn Disk) -> Result<Self, Error> {
        let mut survey = Self {
            // Read before the list: another process may record a new segment in between.
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

    /// True if no file indicates that a log ever existed.
    pub(crate) fn is_empty(&self) -> bool {
        self.segments.is_empty()
            && self.snapshots.is_empty()
            && self.damaged.is_empty()
            && self.closed.is_none()
            && self.newest.is_none()
    }

    /// The numbers of the segments whose records are all in a snapshot that began at this position.
    pub(crate) fn segments_before(
        &self,
        disk: &dyn Disk,
        position: u64,
    ) -> Result<impl Iterator<Item = u64>, Error> {
        let mut before = Vec::new();
        for (number, next) in self.segments.iter().zip(self.segments.iter().skip(1)) {
            match read_link(disk, *next)? {
                Ok(next) if next.header.position <= position + 1 => before.push(*number),
                _ => break,
            }
        }
        Ok(before.into_iter())
    }

    /// The last position for which the names of snapshots or the markers are evidence.
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

/// Reads the start of a file that is only a witness. Returns `None` if it is missing or unreadable:
/// the log is then read without it.
pub(crate) fn read_witness<'a>(
    disk: &dyn Disk,
    name: &str,
    buffer: &'a mut [u8],
) -> Result<Option<&'a [u8]>, Error> {
    let file = match disk.open_read_only(name) {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(Error::io("open", name)(error)),
    };
    match file.read_at(buffer, 0) {
        Err(error) if is_unreadable(&error) => {
            tracing::warn!(%error, "the file `{name}` cannot be read; the log is read without it");
            Ok(None)
        }
        read => Ok(Some(&buffer[..read.map_err(Error::io("read", name))?])),
    }
}

fn read_closed(disk: &dyn Disk) -> Result<Option<Header>, Error> {
    let mut bytes = [0; HEADER_BYTES];
    let Some(bytes) = read_witness(disk, files::CLOSED, &mut bytes)? else {
        return Ok(None);
    };
    match Header::decode(bytes, Magic::Closed) {
        Ok(header) => Ok(Some(header)),
        Err(HeaderFault::Damaged) => {
            tracing::warn!("the file `closed` is damaged; the log is read without it");
            Ok(None)
        }
        Err(HeaderFault::Format(format)) => Err(Error::UnknownFormat {
            file: files::CLOSED.to_owned(),
            format,
        }),
    }
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct Link {
    pub(crate) header: Header,
    pub(crate) bytes: u64,
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct SnapshotInfo {
    pub(crate) position: u64,
    pub(crate) complete: u64,
    pub(crate) created_ms: u64,
    pub(crate) bytes: u64,
}

/// The segments from the newest one back, as long as their numbers are consecutive.
pub(crate) struct Chain {
    pub(crate) links: Vec<Link>,
    /// Why the chain does not reach further back.
    pub(crate) broken: Option<Damage>,
}

pub(crate) fn damage(file: String, offset: u64, reason: &str) -> Damage {
    Damage {
        file,
        offset: Some(offset),
        reason: reason.to_owned(),
        lost_from: None,
        lost_to: None,
    }
}

/// Reads the header of a segment. A missing file is an error, and never damage.
pub(crate) fn read_link(disk: &dyn Disk, number: u64) -> Result<Result<Link, Damage>, Error> {
    let name = files::segment(number);
    let file = disk
        .open_read_only(&name)
        .map_err(Error::io("open", &name))?;
    let mut bytes = [0; HEADER_BYTES];
    let read = match file.read_at(&mut bytes, 0) {
        Err(error) if is_unreadable(&error) => {
            return Ok(Err(damage(name, 0, &unreadable_reason(&error))));
        }
        read => read.map_err(Error::io("read", &name))?,
    };
    Ok(match Header::decode(&bytes[..read], Magic::Segment) {
        Ok(header) if header.number != number => Err(damage(
            name,
            0,
            "its header has the number of another segment",
        )),
        Ok(header) => Ok(Link {
            header,
            bytes: file.bytes().map_err(Error::io("read", &name))?,
        }),
        Err(HeaderFault::Damaged) => Err(damage(name, 0, "its header is damaged")),
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
                        "its first position is after that of the next segment",
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

    /// The index of the segment that contains, or will contain, the record after `position`.
    pub(crate) fn reach(&self, position: u64) -> Option<usize> {
        self.links
            .iter()
            .rposition(|link| link.header.position <= position.saturating_add(1))
    }
}
