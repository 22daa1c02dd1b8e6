//! Makes the recovered files durable and ready to be continued.
//!
//! A frame that recovery read may exist only in the page cache. After a kill it was never synced.
//! After a failed sync the kernel treats the page as clean although it never reached the disk, and
//! another sync succeeds without writing it. So the last segment must be written again, to another
//! file, if no witness proves that all of its frames are durable.

use std::io;

use crate::catalogue::{Catalogue, Severed};
use crate::disk::{Disk, File};
use crate::error::Error;
use crate::files;
use crate::limits;
use crate::recovery::Recovered;
use crate::segment::{HEADER_BYTES, Header, Magic};
use crate::survey::{SnapshotInfo, read_link};

pub(crate) fn prepare(
    disk: &dyn Disk,
    segment_bytes: u64,
    now_ms: u64,
    recovered: &Recovered,
) -> Result<Catalogue, Error> {
    for (position, _) in &recovered.damaged {
        let (from, to) = (
            files::snapshot(*position),
            files::damaged_snapshot(*position),
        );
        disk.rename(&from, &to)
            .map_err(Error::io("rename", &from))?;
    }
    let mut catalogue = Catalogue::cleared(disk, segment_bytes, now_ms)?;
    catalogue.segments.extend(&recovered.links);
    let first = recovered
        .links
        .first()
        .map_or(1, |link| link.header.position);
    catalogue.snapshots.extend(
        recovered
            .snapshots
            .iter()
            .filter(|info| info.position + 1 >= first),
    );
    catalogue.severed = severed(disk, recovered, first);
    if let Some(damage) = &recovered.broken {
        let unread = catalogue.severed.len();
        tracing::warn!(file = %damage.file, reason = damage.reason, unread, "the history before this file cannot be read, and its files count as the oldest history; the state of the store is complete");
    }

    // The copy below needs room as well.
    catalogue
        .make_room(disk, segment_bytes)
        .map_err(Error::io("make room in", "the data directory"))?;
    if let Some(last) = catalogue.segments.back_mut() {
        let used = recovered.end_offset;
        let unproven = recovered.range.end.0 > recovered.witness;
        let wasteful = last.bytes.saturating_sub(used as u64) > limits::TAIL_WASTE_BYTES_MAX;
        if used > HEADER_BYTES && (unproven || wasteful) {
            let name = files::segment(last.header.number);
            match copy(disk, last.header, used, &mut catalogue.spares) {
                Ok(header) => {
                    last.header = header;
                    // If an old segment was rewritten in place, its header may contain no length.
                    if header.bytes != 0 {
                        last.bytes = header.bytes;
                    }
                }
                Err(error) if crate::error::is_full(&error) && !unproven => {}
                Err(error) => return Err(Error::io("copy", &name)(error)),
            }
        }
    }
    disk.sync_directory()
        .map_err(Error::io("sync", "the data directory"))?;
    // Spares beyond the reserve were in use before the restart.
    let again = catalogue
        .spares
        .len()
        .saturating_sub(limits::SPARE_SEGMENTS);
    catalogue.peaks.push_back(catalogue.segments.len() + again);
    Ok(catalogue)
}

/// The files before a break in the chain of segments, whose first position is `first`.
fn severed(disk: &dyn Disk, recovered: &Recovered, first: u64) -> Vec<Severed> {
    // Files of another store were copied here by hand.
    let is_foreign = |number: u64| {
        let link = read_link(disk, number);
        matches!(link, Ok(Ok(link)) if link.header.store != recovered.store)
    };
    let segments = recovered.severed.iter().filter(|it| !is_foreign(**it));
    let segments = segments.map(|number| {
        let name = files::segment(*number);
        // The length only counts as history, and the file may be unreadable.
        let bytes = disk.open_read_only(&name).and_then(|file| file.bytes());
        let bytes = bytes.unwrap_or(0);
        Severed { name, bytes }
    });
    let before = |info: &&SnapshotInfo| info.position + 1 < first;
    let snapshots = recovered.snapshots.iter().filter(before);
    let snapshots = snapshots.map(|info| Severed {
        name: files::snapshot(info.position),
        bytes: info.bytes,
    });
    snapshots.chain(segments).collect()
}

/// Replaces a segment by a file that holds the same frames and nothing after them. Returns its
/// header.
fn copy(
    disk: &dyn Disk,
    header: Header,
    used: usize,
    spares: &mut Vec<String>,
) -> io::Result<Header> {
    let name = files::segment(header.number);
    // The device may be unable to return what follows the frames.
    let mut content = vec![0; used];
    let read = disk.open_read_only(&name)?.read_at(&mut content, 0)?;
    content.truncate(read);
    let mut write = |file: &dyn File, bytes: u64| {
        let header = Header { bytes, ..header };
        content[..HEADER_BYTES].copy_from_slice(&header.encode(Magic::Segment));
        file.write_at(&content, 0)?;
        file.sync()?;
        Ok(header)
    };
    let fresh = disk
        .create(files::TAIL_TEMPORARY)
        .and_then(|file| write(&*file, used as u64));
    let (from, header) = match fresh {
        Ok(header) => (files::TAIL_TEMPORARY.to_owned(), header),
        Err(error) => {
            // The file may not exist. Report the first error.
            let _ = disk.remove(files::TAIL_TEMPORARY);
            // A spare has room on a full disk. Its old content belongs to other segments, so it is
            // ignored.
            if !crate::error::is_full(&error) {
                return Err(error);
            }
            let Some(spare) = spares.last() else {
                // There is no other place. Writing the same bytes again makes the kernel flush
                // pages that may not have been written.
                let file = disk.open(&name)?;
                return write(&*file, header.bytes);
            };
            let file = disk.open(spare)?;
            let bytes = file.bytes()?;
            if bytes < used as u64 {
                return Err(error);
            }
            let spare = spare.clone();
            spares.pop();
            (spare, write(&*file, bytes)?)
        }
    };
    disk.rename(&from, &name)?;
    disk.sync_directory()?;
    Ok(header)
}
