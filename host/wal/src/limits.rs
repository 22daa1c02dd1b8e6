//! Every bound of the journal, with its unit in the name and its reason.

/// Largest record. A record holds a request, the entries that it read and its answer: four values
/// of 16 MiB and their keys fit, and one record still fits in the memory of a small gateway.
pub const RECORD_BYTES_MAX: usize = 80 << 20;

/// Largest group of records that is appended as one, with 4 bytes per record. A group is one frame
/// and one segment at most, so this also bounds what a reader holds at once.
pub const GROUP_BYTES_MAX: usize = 96 << 20;

/// Records in one frame. Far more than are ever buffered at once; a length field that lies cannot
/// make a reader loop for longer.
pub const FRAME_RECORDS_MAX: u32 = 1 << 24;

/// Unwritten bytes above which the log is behind ([`crate::Log::is_behind`]): clients that write have to wait. At 100 MB/s
/// that is a sixth of a second of writing, more than any group commit needs.
pub const BUFFERED_BYTES_MAX: usize = 16 << 20;

/// What a write buffer keeps allocated from one commit to the next. A burst does not hold memory for ever.
pub(crate) const BUFFER_KEPT_BYTES_MAX: usize = 2 << 20;

/// Smallest segment: one block of most file systems. Only tests want segments this small.
pub const SEGMENT_BYTES_MIN: u64 = 4 << 10;

/// Largest segment that can be asked for: recovery reads a segment in one piece.
pub const SEGMENT_BYTES_MAX: u64 = 64 << 20;

/// A segment takes no more than this part of the disk, so that the spares and the last, half empty one leave room on a
/// small one.
pub(crate) const SEGMENT_DISK_PART: u64 = 32;

/// Segments that the log must have in addition to two snapshots, or state may not grow: with fewer,
/// clients would wait for one snapshot after the other.
pub(crate) const LOG_SEGMENTS_MIN: u64 = 4;

/// The reserve of a small disk is this part of it. Removals, acknowledgements and the end of a
/// snapshot need it when writes are refused.
pub(crate) const RESERVE_DISK_PART: u64 = 16;

/// The reserve of a large disk: a few seconds of removals.
pub(crate) const RESERVE_BYTES_MAX: u64 = 64 << 20;

/// History takes no more than this part of the disk, even if the options allow more.
pub(crate) const HISTORY_DISK_PART: u64 = 4;

/// The first segment of a start on a disk without room for a longer one: enough for what a start
/// records until its first snapshot makes room.
pub(crate) const SEGMENT_BYTES_FULL: u64 = 64 << 10;

/// Largest file that is read as a segment: the largest group with its headers, in whole blocks.
pub(crate) const SEGMENT_FILE_BYTES_MAX: u64 = (GROUP_BYTES_MAX as u64) + (64 << 10);

/// Segments kept ready. One is used next, the other is the reserve for a full disk: with both, a
/// store that refuses writes can still record deletes.
pub(crate) const SPARE_SEGMENTS: usize = 2;

/// Segments that history gave up are kept for use, where there were more in use at one of the last snapshots, up to this:
/// history goes in pieces, at times none and then two. A segment that is removed and made anew is written twice.
pub(crate) const SPARE_BYTES_MAX: u64 = 512 << 20;

/// Snapshots for which that is remembered: under load that is a minute or some.
pub(crate) const PEAKS_KEPT: usize = 16;

/// Without a snapshot for this long nobody writes much, and the disk is given back what would be used again.
pub(crate) const SPARES_KEPT_MS: u64 = 10 * 60_000;

/// How much of a new file is written at once while it is filled.
pub(crate) const FILL_BYTES: usize = 1 << 20;

/// What the last segment may waste at a start before it is copied to a shorter file, so that a
/// host that restarts often does not fill its disk with empty segments.
pub(crate) const TAIL_WASTE_BYTES_MAX: u64 = 64 << 10;

/// Largest block of a snapshot. One entry with its value must fit.
pub const BLOCK_BYTES_MAX: usize = GROUP_BYTES_MAX;

/// Blocks of a snapshot are gathered up to this before they are written.
pub(crate) const SNAPSHOT_WRITE_BYTES: usize = 256 << 10;

/// Up to a quarter of the history that is kept anyway, to an eighth of what is free, and to this, a log may grow before the
/// next snapshot, however small the last one is: who writes the same few keys again and again would write all of them with
/// each snapshot, and all that is remembered of requests. A start reads as much in half a second.
pub const SNAPSHOT_AFTER_BYTES_MAX: u64 = 64 << 20;

/// Slowest writing of a snapshot that can be asked for, per second. Below it one of a large store never ends.
pub(crate) const SNAPSHOT_BYTES_PER_SECOND_MIN: u64 = 64 << 10;

/// A snapshot is synced each time this much was written, so that its last sync, and the disk
/// queue in front of the log's own, stay short.
pub(crate) const SNAPSHOT_SYNC_BYTES: u64 = 4 << 20;

/// How much of a snapshot is read at once.
pub(crate) const SNAPSHOT_READ_BYTES: usize = 1 << 20;

/// Files in a directory that are looked at. A store with a terabyte of history has a quarter of it.
pub(crate) const FILES_MAX: usize = 1 << 20;

/// Longest commit delay (see [`crate::Options::commit_delay`]).
pub const COMMIT_DELAY_MS_MAX: u64 = 5;

/// How long telling of what has become durable should take where the writing thread itself does it, as far as the last
/// calls can say. Telling some two hundred clients takes as long, and what these send again fills many blocks.
pub(crate) const TOLD_BY_WRITER_US_MAX: u64 = 1_000;

/// How often the maintenance thread looks around when nobody wakes it.
pub(crate) const MAINTENANCE_MS: u64 = 1_000;

/// How long a snapshot that failed is not tried again, where the disk has room.
pub(crate) const SNAPSHOT_RETRY_MS: u64 = 30_000;

/// How often the writing thread lets others go first before it writes: bounds the wait of the first of them.
pub(crate) const GATHER_YIELDS_MAX: usize = 16;

/// Between two snapshots that are to make room on a full disk, also where one has failed: removals make the next one
/// smaller.
pub(crate) const SNAPSHOT_SHORT_MS: u64 = 2_000;

/// How long the log waits before it asks a full disk for a segment again.
pub(crate) const FULL_RETRY_MS: u64 = 100;

/// Room in the current segment below which a full disk leaves no room at all: one more record of
/// ordinary size and its frame.
pub(crate) const ROOM_BYTES_MIN: u64 = 64 << 10;

/// How often a reader starts anew where the writer recycled a segment under it, before it gives up.
pub(crate) const READ_ATTEMPTS_MAX: u32 = 5;

/// How long a reader waits before it looks again at a place that the writer may just be writing.
pub(crate) const READ_RETRY_MS: u64 = 20;
