//! Metrics of the data directory: its space, flushes and snapshots.

use statehouse_wal::LogFigures;

use super::page::Page;

/// The write-ahead log of the store.
pub(super) fn log(page: &mut Page, it: LogFigures) {
    let help = "Free space of the file system of the data directory";
    page.measure("disk_free_bytes", help, it.free);
    let help =
        "Records that can be appended until writes are refused, unless a snapshot makes room";
    page.measure("disk_room_bytes", help, it.room);
    let help = "Disk space of the data directory, by what takes it";
    page.gauge("disk_used_bytes", help).each("part", parts(&it));
    let help = "Time of a flush of the log to the disk";
    page.histogram("flush_seconds", help)
        .times(Vec::new(), it.times.flushes);
    let help = "Time of a snapshot, from its beginning until it is complete";
    page.histogram("snapshot_seconds", help)
        .times(Vec::new(), it.times.snapshots);
}

/// The disk space in bytes, by what takes it.
pub(in crate::admin) fn parts(it: &LogFigures) -> [(&'static str, u64); 5] {
    [
        ("log", it.log),
        ("snapshot", it.snapshot),
        ("history", it.history),
        ("spares", it.spares),
        ("temporary", it.temporary),
    ]
}
