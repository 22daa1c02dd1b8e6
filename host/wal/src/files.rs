//! The names of the journal's files, and what a name says.

/// The file whose lock says that a process has the directory.
pub(crate) const LOCK: &str = "lock";
/// Written at a clean close: up to where the log reaches.
pub(crate) const CLOSED: &str = "closed";
/// Which segment is the newest (see [`crate::newest`]).
pub(crate) const NEWEST: &str = "newest";
// Files that are being written, of no meaning until they are renamed. Others of such names are not the journal's.

/// The marker file while it is written.
pub(crate) const CLOSED_TEMPORARY: &str = "closed.tmp";
/// A snapshot while it is written.
pub(crate) const SNAPSHOT_TEMPORARY: &str = "snapshot.tmp";
/// A segment while the log prepares it for itself.
pub(crate) const SEGMENT_TEMPORARY: &str = "segment.tmp";
/// A spare segment while it is filled.
pub(crate) const SPARE_TEMPORARY: &str = "spare.tmp";
/// The last segment while it is copied.
pub(crate) const TAIL_TEMPORARY: &str = "tail.tmp";

/// What the name of a file says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A segment of the log and its number.
    Segment(u64),
    /// A snapshot and the position that it was begun at.
    Snapshot(u64),
    /// A segment for later use.
    Spare(u64),
    /// A snapshot that was found damaged and put aside.
    DamagedSnapshot(u64),
    /// The marker of a clean close.
    Closed,
    /// The record of the newest segment.
    Newest,
    /// The lock file.
    Lock,
    /// Left over from a write that a crash ended.
    Temporary,
    /// None of the journal's.
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
    let kind = match extension {
        "log" => Kind::Segment(number),
        "snapshot" => Kind::Snapshot(number),
        "spare" => Kind::Spare(number),
        "damaged" => Kind::DamagedSnapshot(number),
        _ => return Kind::Other,
    };
    // One spelling per number: "7.log" beside "000000000007.log" would be two files of one meaning.
    let spelled = match kind {
        Kind::Segment(number) => segment(number),
        Kind::Snapshot(number) => snapshot(number),
        Kind::Spare(number) => spare(number),
        Kind::DamagedSnapshot(number) => damaged_snapshot(number),
        _ => return kind,
    };
    if spelled == name { kind } else { Kind::Other }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_read_as_they_are_written_and_in_no_other_spelling() {
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
