//! Opens or creates a log. What recovery read is made durable before the first append.

use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, OnceLock};

use super::Log;
use super::tail::Tail;
use crate::budget::disk_bytes;
use crate::catalogue::Catalogue;
use crate::disk::{Disk, File};
use crate::error::Error;
use crate::figures::Space;
use crate::limits;
use crate::options::Options;
use crate::pending::Pending;
use crate::recovery::{self, Recovered, Sink};
use crate::reopen;
use crate::segment::{HEADER_BYTES, Header, StoreId};
use statehouse_protocol::LogPosition;

/// What [`Log::open`] found.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Opened {
    /// True if the directory held no log, so that a new one was created.
    pub fresh: bool,
    /// The position of the last record.
    pub position: LogPosition,
    /// The position of the snapshot that was read, or [`LogPosition::NONE`] if there was none.
    pub base: LogPosition,
    /// True if the previous process closed the log with [`Log::close`].
    pub clean: bool,
    /// True if the log ended in an incomplete write. It was never acknowledged and was dropped.
    pub torn: bool,
    /// Damaged snapshots, which were renamed, with the reason for each.
    pub damaged_snapshots: Vec<(LogPosition, String)>,
}

impl Opened {
    fn of(recovered: &Recovered) -> Self {
        Self {
            fresh: false,
            position: recovered.range.end,
            base: recovered.range.base,
            clean: recovered.is_closed,
            torn: recovered.torn,
            damaged_snapshots: recovered
                .damaged
                .iter()
                .map(|(at, damage)| (LogPosition(*at), damage.reason.clone()))
                .collect(),
        }
    }
}

impl Log {
    /// Opens the log, or creates it if the directory holds none, and passes its state to `sink`.
    /// Fails with [`Error::Damaged`] if data is missing that was durable before, and with
    /// [`Error::Refused`] if the sink refuses the state; nothing is changed in these cases.
    pub fn open(
        disk: Arc<dyn Disk>,
        options: Options,
        now_ms: u64,
        sink: &mut dyn Sink,
    ) -> Result<(Self, Opened), Error> {
        let options = options.fitted(disk_bytes(&*disk)?);
        let recovered = recovery::recover(&*disk, sink)?;
        sink.may_open().map_err(|message| Error::Refused {
            place: "the state".to_owned(),
            message,
            written_by: None,
        })?;
        // The previous process may have renamed files without a sync of the directory.
        disk.sync_directory()
            .map_err(Error::io("sync", "the data directory"))?;
        let Some(recovered) = recovered else {
            let store = StoreId(disk.entropy(), disk.entropy());
            let log = Self::begin(disk, options, store, 0, now_ms)?;
            let opened = Opened {
                fresh: true,
                clean: true,
                ..Opened::default()
            };
            return Ok((log, opened));
        };
        let opened = Opened::of(&recovered);
        let mut catalogue = reopen::prepare(&*disk, options.segment_bytes, now_ms, &recovered)?;
        // A last segment without records is replaced, so that repeated starts do not add files.
        let empty = recovered.end_offset == HEADER_BYTES;
        if empty {
            catalogue.segments.pop_back();
        }
        let last = recovered.links.last().map_or(0, |link| link.header.number);
        let number = if empty { last } else { last + 1 };
        let end = recovered.range.end.0;
        let log = Self::assemble(
            disk,
            options,
            recovered.store,
            catalogue,
            number,
            end,
            now_ms,
        )?;
        log.written_bytes.store(recovered.bytes, Ordering::Release);
        Ok((log, opened))
    }

    /// Creates a log whose first record is the one after `position`.
    pub(crate) fn begin(
        disk: Arc<dyn Disk>,
        options: Options,
        store: StoreId,
        position: u64,
        now_ms: u64,
    ) -> Result<Self, Error> {
        // A crash during an earlier creation can leave only spares and temporary files.
        let catalogue = Catalogue::cleared(&*disk, options.segment_bytes, now_ms)?;
        Self::assemble(disk, options, store, catalogue, 1, position, now_ms)
    }

    fn assemble(
        disk: Arc<dyn Disk>,
        options: Options,
        store: StoreId,
        mut catalogue: Catalogue,
        number: u64,
        position: u64,
        now_ms: u64,
    ) -> Result<Self, Error> {
        let header = Header::new(store, number, position + 1, now_ms);
        catalogue
            .make_room(&*disk, options.segment_bytes)
            .map_err(Error::io("make room in", "the data directory"))?;
        let first = first_segment(&mut catalogue, &*disk, header, options.segment_bytes);
        // Another start may succeed once the disk has room.
        let (file, header) = first.map_err(Error::revealed)?;
        let bytes = header.bytes;
        let spare_bytes = catalogue.spares.len() as u64 * options.segment_bytes;
        let snapshot_bytes = catalogue.snapshots.back().map_or(0, |last| last.bytes);
        let log = Self {
            disk,
            options,
            store,
            tail: Mutex::new(Tail {
                file,
                header,
                bytes,
                offset: HEADER_BYTES as u64,
                written: position,
                dirty: false,
                spare: Vec::new(),
            }),
            space: Mutex::new(Space::of(&catalogue)),
            catalogue: Mutex::new(catalogue),
            pending: Mutex::new(Pending::new(position)),
            work: Condvar::new(),
            unwritten_bytes: AtomicUsize::new(0),
            appended: AtomicU64::new(position),
            appended_bytes: AtomicU64::new(0),
            wait_at_bytes: AtomicU64::new(u64::MAX),
            refuse_at_bytes: AtomicU64::new(u64::MAX),
            is_short: AtomicBool::new(false),
            waits_for_room: AtomicBool::new(false),
            snapshot_after_max: AtomicU64::new(u64::MAX),
            temporary_bytes: Arc::default(),
            state_bytes: Mutex::default(),
            durable: AtomicU64::new(position),
            released: AtomicU64::new(position),
            tail_bytes: AtomicU64::new(bytes - HEADER_BYTES as u64),
            free_bytes: AtomicU64::new(0),
            disk_free_bytes: AtomicU64::new(0),
            no_free_inodes: AtomicBool::new(false),
            spare_bytes: AtomicU64::new(spare_bytes),
            snapshot_bytes: AtomicU64::new(snapshot_bytes),
            written_bytes: AtomicU64::new(0),
            snapshot_at_bytes: AtomicU64::new(0),
            snapshotting: Arc::default(),
            segments: AtomicU64::new(0),
            times: Mutex::default(),
            failure: OnceLock::new(),
            on_failure: OnceLock::new(),
        };
        log.divide(false)?;
        Ok(log)
    }
}

/// Activates the segment with which a start continues: a short one if the disk has no room for
/// more.
fn first_segment(
    catalogue: &mut Catalogue,
    disk: &dyn Disk,
    header: Header,
    segment_bytes: u64,
) -> Result<(Arc<dyn File>, Header), Error> {
    let mut activate = |bytes| catalogue.activate(disk, header, bytes, bytes);
    match activate(segment_bytes) {
        Err(error) if error.is_full() => activate(segment_bytes.min(limits::SEGMENT_BYTES_FULL)),
        activated => activated,
    }
}
