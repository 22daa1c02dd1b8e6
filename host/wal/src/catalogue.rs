//! The files of a log that is being written: segments, snapshots and spares.
//!
//! The catalogue is a list in memory, filled by recovery and changed by the log and its upkeep. It
//! touches the disk only to clean up at the start and to activate a segment.

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

/// A segment or snapshot before a break in the chain of segments.
#[derive(Clone, Debug)]
pub(crate) struct Severed {
    pub(crate) name: String,
    pub(crate) bytes: u64,
}

/// The files of a log that is being written.
#[derive(Default)]
pub(crate) struct Catalogue {
    /// Oldest first. The last one is being written.
    pub(crate) segments: VecDeque<Link>,
    /// Oldest first. All are intact as far as known.
    pub(crate) snapshots: VecDeque<SnapshotInfo>,
    /// Names of segments that are filled with bytes and ready for use.
    pub(crate) spares: Vec<String>,
    /// The number of segments when each of the last snapshots was finished, which is when it is
    /// highest.
    pub(crate) peaks: VecDeque<usize>,
    /// Spares whose new name may not be durable yet.
    pub(crate) recycled: Vec<String>,
    /// True if a file was removed or renamed and the directory was not synced since.
    pub(crate) unsynced: bool,
    /// The number of the last spare.
    pub(crate) next_spare: u64,
    /// Damaged snapshots, which were renamed.
    pub(crate) damaged: Vec<u64>,
    /// The oldest history: no state leads to these files, and nothing reads them.
    pub(crate) severed: Vec<Severed>,
    /// The file `newest`. `None` before the first segment, or if the disk has no room for the file.
    pub(crate) newest: Option<Newest>,
    /// The time of the last upkeep.
    pub(crate) now_ms: u64,
}

impl Catalogue {
    /// Takes over the spares and removes what a crash left incomplete.
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
            spares,
            next_spare: survey.spares.last().map_or(0, |last| last + 1),
            damaged: survey.damaged.into_iter().collect(),
            now_ms,
            ..Self::default()
        })
    }

    /// Stores the number of segments at the end of a snapshot, before history is removed.
    pub(crate) fn note_peak(&mut self) {
        if self.peaks.len() == limits::PEAKS_KEPT {
            self.peaks.pop_front();
        }
        self.peaks.push_back(self.segments.len());
    }

    /// How many more segments were in use at recent snapshots than the given number: so many spares
    /// will be needed soon. `None` if there was no recent snapshot.
    pub(crate) fn used_again(&self, segments: usize) -> Option<usize> {
        let last = self.snapshots.back()?;
        let is_recent = self.now_ms.saturating_sub(last.created_ms) <= limits::SPARES_KEPT_MS;
        let peak = self.peaks.iter().copied().max()?;
        is_recent.then(|| peak.saturating_sub(segments))
    }

    /// Activates a file as the segment of `header` with room for at least `bytes`: a spare, or else
    /// a new file. Its header and name must be durable before a frame is written to it, so that a
    /// segment without a header is always damage. Fails with an error that [`Error::is_temporary`]
    /// only if nothing has changed.
    pub(crate) fn activate(
        &mut self,
        disk: &dyn Disk,
        header: Header,
        segment_bytes: u64,
        bytes: u64,
    ) -> Result<(Arc<dyn File>, Header), Error> {
        let name = files::segment(header.number);
        let (from, file, bytes) = match self.spares.pop() {
            Some(spare) if bytes <= segment_bytes => match disk.open(&spare) {
                Ok(file) => (spare, file, segment_bytes),
                Err(error) => {
                    let error = Error::io("open", &spare)(error);
                    self.spares.push(spare);
                    return Err(error);
                }
            },
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
        // The file may be partly activated, so from here on a full disk is a permanent failure.
        activate().map_err(Error::permanent_io("begin", &name))?;
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
                tracing::warn!(%error, file = files::NEWEST, "the disk has no room to record the newest segment; if the segment is removed, this goes unnoticed");
            }
            Err(error) => return Err(error),
        }
        Ok(())
    }
}

/// Creates a file and writes zeros to all of it. Later writes then neither allocate blocks nor
/// change the length, so that a commit takes one flush of the device instead of two.
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
        // Report the first error. A file that remains is removed at the next start.
        let _ = disk.remove(name);
        Error::io("create", name)(error)
    })
}
