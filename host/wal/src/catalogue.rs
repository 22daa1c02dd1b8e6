//! Which files there are: segments, snapshots and spares.
//!
//! Enters: what recovery found, and what the log and its upkeep change. Leaves: the next segment to
//! write to. It is a list: the disk is touched only to begin it and to take a segment into use.

use std::collections::VecDeque;
use std::io;
use std::sync::Arc;

use crate::disk::{Disk, File};
use crate::error::Error;
use crate::files;
use crate::limits;
use crate::newest::Newest;
use crate::segment::{Header, Magic};
use crate::survey::{Link, SnapshotInfo, Survey};

/// The files of a journal that is being written.
pub(crate) struct Catalogue {
    /// Oldest first; the last is the one that is written to.
    pub(crate) segments: VecDeque<Link>,
    /// Oldest first, whole as far as is known.
    pub(crate) snapshots: VecDeque<SnapshotInfo>,
    /// Names of segments that are filled and ready.
    pub(crate) spares: Vec<String>,
    /// Segments that were in use when each of the last snapshots was finished, which is when there are most.
    pub(crate) peaks: VecDeque<usize>,
    /// Spares of which the new name may not be on the disk yet.
    pub(crate) recycled: Vec<String>,
    /// A file went, and the directory was not synced since.
    pub(crate) unsynced: bool,
    /// The number of the next spare.
    pub(crate) next_spare: u64,
    /// Snapshots that were put aside.
    pub(crate) damaged: Vec<u64>,
    /// The record of the newest segment; none before the first, or if there is no room for it.
    pub(crate) newest: Option<Newest>,
    /// The time, as of the last call that told it.
    pub(crate) now_ms: u64,
}

impl Catalogue {
    /// Takes over spares, and removes what a crash left half done.
    pub(crate) fn cleared(disk: &dyn Disk, segment_bytes: u64, now_ms: u64) -> Result<Self, Error> {
        let survey = Survey::of(disk)?;
        for name in &survey.temporaries {
            disk.remove(name).map_err(Error::io("remove", name))?;
        }
        let mut spares = Vec::new();
        for &number in &survey.spares {
            let name = files::spare(number);
            let bytes = disk
                .open_read_only(&name)
                .and_then(|file| file.bytes())
                .map_err(Error::io("open", &name))?;
            if bytes == segment_bytes
                && (spares.len() as u64) < limits::SPARE_BYTES_MAX / segment_bytes
            {
                spares.push(name);
            } else {
                disk.remove(&name).map_err(Error::io("remove", &name))?;
            }
        }
        Ok(Self {
            segments: VecDeque::new(),
            snapshots: VecDeque::new(),
            spares,
            peaks: VecDeque::new(),
            recycled: Vec::new(),
            unsynced: false,
            next_spare: survey.spares.last().map_or(0, |last| last + 1),
            damaged: survey.damaged.into_iter().collect(),
            newest: None,
            now_ms,
        })
    }

    /// A snapshot is finished, and history may go.
    pub(crate) fn note_peak(&mut self) {
        if self.peaks.len() == limits::PEAKS_KEPT {
            self.peaks.pop_front();
        }
        self.peaks.push_back(self.segments.len());
    }

    /// How many of so many segments fewer than at the last snapshots are about to be used again; none where nothing was
    /// written for long enough that nobody knows.
    pub(crate) fn used_again(&self, segments: usize) -> Option<usize> {
        let last = self.snapshots.back()?;
        let is_recent = self.now_ms.saturating_sub(last.created_ms) <= limits::SPARES_KEPT_MS;
        let peak = self.peaks.iter().copied().max()?;
        is_recent.then(|| peak.saturating_sub(segments))
    }

    /// Takes a file into use as the segment of `header`, with room for `bytes` or more: a spare, else a
    /// new one. Its header and its name are durable before a frame is written to it, so a segment
    /// without a header is always damage.
    ///
    /// # Errors
    /// A full disk is [`Error::is_full`] only where nothing has changed.
    pub(crate) fn activate(
        &mut self,
        disk: &dyn Disk,
        header: Header,
        segment_bytes: u64,
        bytes: u64,
    ) -> Result<(Arc<dyn File>, Header), Error> {
        let name = files::segment(header.number);
        let (from, file, bytes) = match self.spares.pop() {
            Some(spare) if bytes <= segment_bytes => {
                let file = disk.open(&spare).map_err(Error::io("open", &spare))?;
                (spare, file, segment_bytes)
            }
            unused => {
                self.spares.extend(unused);
                let bytes = bytes.max(segment_bytes);
                let file = create_filled(disk, files::SEGMENT_TEMPORARY, bytes)?;
                (files::SEGMENT_TEMPORARY.to_owned(), file, bytes)
            }
        };
        let header = Header { bytes, ..header };
        let mut activate = || {
            file.write_at(&header.encode(Magic::Segment), 0)?;
            file.sync()?;
            disk.rename(&from, &name)?;
            disk.sync_directory()?;
            self.record_newest(disk, header)
        };
        // From here on a full disk would leave things half done: that is a failure like any other.
        activate().map_err(|error| Error::io("begin", &name)(io::Error::other(error)))?;
        self.segments.push_back(Link { header, bytes });
        Ok((file, header))
    }

    /// Records a segment durably before a frame is written to it.
    fn record_newest(&mut self, disk: &dyn Disk, header: Header) -> io::Result<()> {
        if let Some(newest) = &mut self.newest {
            return newest.record(header);
        }
        match Newest::begin(disk, header) {
            Ok(newest) => self.newest = Some(newest),
            Err(error) if crate::error::is_full(&error) => {
                tracing::warn!(%error, file = files::NEWEST, "no room to record the newest segment: its removal would not be noticed");
            }
            Err(error) => return Err(error),
        }
        Ok(())
    }
}

/// Creates a file and writes zeros to all of it, so that later writes neither allocate nor change
/// its length: then a commit is one flush of the device, not two.
pub(crate) fn create_filled(
    disk: &dyn Disk,
    name: &str,
    bytes: u64,
) -> Result<Arc<dyn File>, Error> {
    let fill = || {
        let file = disk.create(name)?;
        let zeros = vec![0; limits::FILL_BYTES.min(bytes as usize)];
        let mut offset = 0;
        while offset < bytes {
            let part = (bytes - offset).min(zeros.len() as u64);
            file.write_at(&zeros[..part as usize], offset)?;
            offset += part;
        }
        Ok(file)
    };
    fill().map_err(|error| {
        // The first error is the one to tell; what is left is removed at the next start.
        let _ = disk.remove(name);
        Error::io("create", name)(error)
    })
}
