//! Every limit of the log, with its unit in the name and its reason.

/// Largest record. A record holds a request, the entries that it read and its response. Four values
/// of 16 MiB and their keys fit, and a record still fits in the memory of a small gateway.
pub const RECORD_BYTES_MAX: usize = 80 << 20;

/// Largest group of records, with 4 bytes per record. A group fits one frame and one segment, so
/// this also bounds what a reader holds at once.
pub const GROUP_BYTES_MAX: usize = 96 << 20;

/// Records in one frame. This is far more than are ever buffered, and it bounds the loop of a
/// reader if a length field is wrong.
pub const FRAME_RECORDS_MAX: u32 = 1 << 24;

/// Unwritten bytes above which the log is behind ([`crate::Log::is_behind`]) and clients that write
/// must wait. At 100 MB/s this is a sixth of a second, more than any group commit needs.
pub const BUFFERED_BYTES_MAX: usize = 16 << 20;

/// Capacity that a write buffer keeps between commits, so that a burst does not hold memory for
/// ever.
pub(crate) const BUFFER_KEPT_BYTES_MAX: usize = 2 << 20;

/// Smallest segment: one block of most file systems. Only tests use segments this small.
pub const SEGMENT_BYTES_MIN: u64 = 4 << 10;

/// Largest configurable segment. Recovery reads a segment in one piece.
pub const SEGMENT_BYTES_MAX: u64 = 64 << 20;

/// A segment takes at most this fraction of the disk, so that the spares and the last, half empty
/// segment leave room on a small disk.
pub(crate) const SEGMENT_DISK_PART: u64 = 32;

/// Segments that must fit in addition to two snapshots, or else state may not grow. With fewer,
/// clients would wait for one snapshot after another.
pub(crate) const LOG_SEGMENTS_MIN: u64 = 4;

/// The reserve of a small disk is this fraction of it. Removals, acknowledgements and the end of a
/// snapshot need it while writes are refused.
pub(crate) const RESERVE_DISK_PART: u64 = 16;

/// Largest reserve: a few seconds of removals.
pub(crate) const RESERVE_BYTES_MAX: u64 = 64 << 20;

/// History takes at most this fraction of the disk, even if the options allow more.
pub(crate) const HISTORY_DISK_PART: u64 = 4;

/// Length of the first segment after a start if the disk has no room for a longer one. It suffices
/// for what a start records until its first snapshot frees space.
pub(crate) const SEGMENT_BYTES_FULL: u64 = 64 << 10;

/// Largest file that is read as a segment: the largest group with its headers, in whole blocks.
pub(crate) const SEGMENT_FILE_BYTES_MAX: u64 = (GROUP_BYTES_MAX as u64) + (64 << 10);

/// Spare segments that are kept ready. One is used next, the other is the reserve for a full disk:
/// with both, a store that refuses writes can still record deletes.
pub(crate) const SPARE_SEGMENTS: usize = 2;

/// Largest total of spare segments. Segments freed by history are kept as spares if more were in
/// use at a recent snapshot, because a segment that is removed and created again is written twice.
/// History frees segments in batches: none at some snapshots, two at others.
pub(crate) const SPARE_BYTES_MAX: u64 = 512 << 20;

/// Number of recent snapshots whose segment counts are kept. Under load they span about a minute.
pub(crate) const PEAKS_KEPT: usize = 16;

/// If no snapshot was taken for this long, little is written, and the spare segments are removed.
pub(crate) const SPARES_KEPT_MS: u64 = 10 * 60_000;

/// Bytes per write while a new file is filled with zeros.
pub(crate) const FILL_BYTES: usize = 1 << 20;

/// Unused bytes in the last segment above which a start copies it to a shorter file, so that
/// frequent restarts do not fill the disk with empty segments.
pub(crate) const TAIL_WASTE_BYTES_MAX: u64 = 64 << 10;

/// Largest block of a snapshot. One entry with its value must fit.
pub const BLOCK_BYTES_MAX: usize = GROUP_BYTES_MAX;

/// Blocks of a snapshot are collected up to this size before they are written.
pub(crate) const SNAPSHOT_WRITE_BYTES: usize = 256 << 10;

/// Upper limit of the log length that is allowed before a snapshot, regardless of the size of the
/// last one. The other limits are a quarter of the history and an eighth of the free bytes. Without
/// this allowance, a client that overwrites the same few keys would cause frequent snapshots, each
/// with all of these keys and the dedup table. A start reads this much in half a second.
pub const SNAPSHOT_AFTER_BYTES_MAX: u64 = 64 << 20;

/// Slowest configurable writing of a snapshot, per second. Below it the snapshot of a large store
/// would never end.
pub(crate) const SNAPSHOT_BYTES_PER_SECOND_MIN: u64 = 64 << 10;

/// A snapshot is synced each time this much was written, so that its last sync, and the disk queue
/// in front of the syncs of the log, stay short.
pub(crate) const SNAPSHOT_SYNC_BYTES: u64 = 4 << 20;

/// Bytes per read of a snapshot.
pub(crate) const SNAPSHOT_READ_BYTES: usize = 1 << 20;

/// Bytes per read of a segment that the disk cannot return in one piece. File systems read at least
/// this much at once, so smaller reads would find no more.
pub(crate) const READ_BLOCK_BYTES: usize = 4 << 10;

/// Highest position. As many positions remain above it as below, so none overflows. A file with a
/// higher one is damaged, or was made up.
pub(crate) const POSITION_MAX: u64 = u64::MAX / 2;

/// Largest number of files in a directory. A store with a terabyte of history has a quarter of
/// this.
pub(crate) const FILES_MAX: usize = 1 << 20;

/// Longest commit delay (see [`crate::Options::commit_delay`]).
pub const COMMIT_DELAY_MS_MAX: u64 = 5;

/// Expected duration up to which the writer thread calls the listener itself. Notifying about two
/// hundred clients takes this long, and their next requests fill many blocks.
pub(crate) const NOTIFY_BY_WRITER_US_MAX: u64 = 1_000;

/// Interval of the upkeep thread if it is not woken.
pub(crate) const MAINTENANCE_MS: u64 = 1_000;

/// Pause after a failed snapshot if the disk has room.
pub(crate) const SNAPSHOT_RETRY_MS: u64 = 30_000;

/// How often the writer thread yields to other threads before it writes. This bounds the wait of
/// the first appender.
pub(crate) const GATHER_YIELDS_MAX: usize = 16;

/// Pause between two snapshots on a full disk, even if one has failed: removals make the next one
/// smaller.
pub(crate) const SNAPSHOT_SHORT_MS: u64 = 2_000;

/// Pause before the log asks a full disk for a segment again.
pub(crate) const FULL_RETRY_MS: u64 = 100;

/// Free bytes in the current segment below which a full disk has no room at all: one more record of
/// ordinary size with its frame.
pub(crate) const ROOM_BYTES_MIN: u64 = 64 << 10;

/// How often a reader starts again because the writer recycled a segment, before it gives up.
pub(crate) const READ_ATTEMPTS_MAX: u32 = 5;

/// Pause of a reader before it reads a place again that the writer may be writing.
pub(crate) const READ_RETRY_MS: u64 = 20;
