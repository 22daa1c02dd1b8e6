//! The names of the files of a log.

/// The file whose lock reserves the directory for one process.
pub const LOCK: &str = "lock";
/// The marker of a clean close, with the last position.
pub(crate) const CLOSED: &str = "closed";
/// The record of the newest segment (see [`crate::newest`]).
pub(crate) const NEWEST: &str = "newest";
// Temporary files have no meaning until they are renamed. Other names that end in `.tmp` do not
// belong to the log.

/// The marker of a clean close while it is written.
pub(crate) const CLOSED_TEMPORARY: &str = "closed.tmp";
/// A snapshot while it is written.
pub(crate) const SNAPSHOT_TEMPORARY: &str = "snapshot.tmp";
/// A new segment that the log creates because there is no spare.
pub(crate) const SEGMENT_TEMPORARY: &str = "segment.tmp";
/// A spare segment while it is filled.
pub(crate) const SPARE_TEMPORARY: &str = "spare.tmp";
/// The copy of the last segment while it is written.
pub(crate) const TAIL_TEMPORARY: &str = "tail.tmp";

/// The kind of a file according to its name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A segment with its number.
    Segment(u64),
    /// A snapshot with the position at which it began.
    Snapshot(u64),
    /// A spare segment with its number.
    Spare(u64),
    /// A damaged snapshot, which was renamed.
    DamagedSnapshot(u64),
    /// The marker of a clean close.
    Closed,
    /// The record of the newest segment.
    Newest,
    /// The lock file.
    Lock,
    /// An incomplete file that a crash left.
    Temporary,
    /// Not a file of the log.
    Other,
}

pub(crate) fn segment(number: u64) -> String {
    format!("{number:012}.log")
}

pub(crate) fn snapshot(position: u64) -> String {
    format!("{position:020}.snapshot")
}

pub(crate) fn spare(number: u64) -> String {
    format!("{number:012}.spare")
}

pub(crate) fn damaged_snapshot(position: u64) -> String {
    format!("{position:020}.damaged")
}

pub(crate) fn kind(name: &str) -> Kind {
    match name {
        LOCK => return Kind::Lock,
        CLOSED => return Kind::Closed,
        NEWEST => return Kind::Newest,
        CLOSED_TEMPORARY | SNAPSHOT_TEMPORARY | SEGMENT_TEMPORARY | SPARE_TEMPORARY
        | TAIL_TEMPORARY => return Kind::Temporary,
        _ => {}
    }
    let Some((stem, extension)) = name.split_once('.') else {
        return Kind::Other;
    };
    let Ok(number) = stem.parse::<u64>() else {
        return Kind::Other;
    };
    // Each number has exactly one spelling: "7.log" and "000000000007.log" would be two files with
    // one meaning.
    let (kind, spelled) = match extension {
        "log" => (Kind::Segment(number), segment(number)),
        "snapshot" => (Kind::Snapshot(number), snapshot(number)),
        "spare" => (Kind::Spare(number), spare(number)),
        "damaged" => (Kind::DamagedSnapshot(number), damaged_snapshot(number)),
        _ => return Kind::Other,
    };
    if spelled == name { kind } else { Kind::Other }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_have_exactly_one_spelling() {
        assert_eq!(kind(&segment(7)), Kind::Segment(7));
        assert_eq!(kind(&snapshot(u64::MAX)), Kind::Snapshot(u64::MAX));
        assert_eq!(kind(&spare(0)), Kind::Spare(0));
        assert_eq!(kind(&damaged_snapshot(3)), Kind::DamagedSnapshot(3));
        assert_eq!(kind("spare.tmp"), Kind::Temporary);
        for other in [
            "7.log",
            "+00000000007.log",
            "000000000007.log.gz",
            "x.log",
            "log",
            "",
            ".log",
            "backup.tmp",
            "00000000000000000007.snapshot.tmp",
        ] {
            assert_eq!(kind(other), Kind::Other, "{other}");
        }
    }
}
