//! Examines every file of a log, for tools such as `statehouse doctor`.
//!
//! The directory may belong to a running process or to a log that refuses to open. The result is a
//! verdict per file and the outcome of opening. Nothing is changed.

use std::fmt;
use std::io::ErrorKind;

use crate::disk::{Disk, Unreadable, read_whole};
use crate::error::{Error, LaterFormat, unreadable_reason};
use crate::files::{self, Kind};
use crate::limits;
use crate::newest;
use crate::reading::read;
use crate::recovery::{Base, Discard, Range};
use crate::segment::{Frames, Header, HeaderFault, Magic};
use crate::snapshot::{self, Fault};
use statehouse_protocol::LogPosition;

/// The result of [`inspect`].
#[derive(Debug)]
pub struct Report {
    /// Every file, sorted by name.
    pub files: Vec<FileReport>,
    /// The positions that opening would read, or the error with which it would fail.
    pub opening: Result<Range, Error>,
}

/// One file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FileReport {
    /// The name of the file.
    pub name: String,
    /// The kind of file according to its name.
    pub kind: Kind,
    /// The length of the file.
    pub bytes: u64,
    /// Segment: its first record. Snapshot: the position at which it began.
    pub first: Option<LogPosition>,
    /// Segment: its last readable record. Snapshot: the position at which it is consistent.
    pub last: Option<LogPosition>,
    /// When the file was created.
    pub created_ms: Option<u64>,
    /// The condition of the file.
    pub verdict: Verdict,
}

/// The condition of a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// Every byte is as written.
    Clean,
    /// The last segment ends in an interrupted write, which was never acknowledged.
    TornTail {
        /// The offset at which the write begins.
        offset: u64,
    },
    /// Written data is missing or changed.
    Damaged {
        /// The first byte that cannot be trusted.
        offset: u64,
        /// What is wrong.
        reason: String,
        /// The known number of durable records that cannot be read.
        lost_records: Option<u64>,
    },
    /// A later version wrote the file.
    UnknownFormat {
        /// Its format, and the version.
        format: LaterFormat,
    },
    /// Intact but too old: no state leads to it. An interrupted removal of history leaves such
    /// files.
    Stale,
    /// A spare segment. Its content has no meaning.
    Spare,
    /// An incomplete file that a crash left. The next start removes it.
    Leftover,
    /// Not a file of the log.
    Foreign,
}

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Clean => write!(f, "clean"),
            Self::TornTail { offset } => {
                write!(
                    f,
                    "torn tail at byte {offset}: the last write was interrupted and never acknowledged"
                )
            }
            Self::Damaged {
                offset,
                reason,
                lost_records,
            } => {
                write!(f, "damaged at byte {offset}: {reason}")?;
                match lost_records {
                    Some(lost) => write!(f, "; {lost} durable records or more are lost"),
                    None => Ok(()),
                }
            }
            Self::UnknownFormat { format } => write!(f, "{format}"),
            Self::Stale => write!(f, "stale: no snapshot leads to it"),
            Self::Spare => write!(f, "spare"),
            Self::Leftover => write!(
                f,
                "incomplete file of an interrupted write; the next start removes it"
            ),
            Self::Foreign => write!(f, "not a file of the log"),
        }
    }
}

/// Examines every file of a log. Files that another process is writing may look torn. Fails if the
/// directory cannot be listed, or if this account may not read a file of the log: a lack of rights
/// says nothing about the file. Problems with single files are in the report.
pub fn inspect(disk: &dyn Disk) -> Result<Report, Error> {
    let (mut attempts, mut content) = (1, Vec::new());
    let files = loop {
        // First, so that it names no segment that a running process adds after the list was read.
        let newest = file_report(disk, files::NEWEST.to_owned(), false, &mut content)?;
        let names = list(disk)?;
        let files = examine(disk, &names, newest, &mut content)?;
        let is_damaged = |file: &FileReport| matches!(file.verdict, Verdict::Damaged { .. });
        // While files come and go, one that was recycled between two reads looks damaged.
        let is_final = attempts == limits::READ_ATTEMPTS_MAX
            || !files.iter().any(is_damaged)
            || list(disk)? == names;
        if is_final {
            break files;
        }
        attempts += 1;
    };
    Ok(Report {
        files,
        opening: read(disk, Base::Newest, LogPosition::END, &mut Discard),
    })
}

fn list(disk: &dyn Disk) -> Result<Vec<String>, Error> {
    let names = disk.list();
    let mut names = names.map_err(Error::io("list", "the data directory"))?;
    names.sort();
    Ok(names)
}

/// Examines these files, which are sorted by name, and takes over the report on the file `newest`.
fn examine(
    disk: &dyn Disk,
    names: &[String],
    newest: Option<FileReport>,
    content: &mut Vec<u8>,
) -> Result<Vec<FileReport>, Error> {
    let mut files = Vec::new();
    let is_segment = |name: &&String| matches!(files::kind(name), Kind::Segment(_));
    let last = names.iter().rfind(is_segment);
    for name in names.iter().filter(|name| *name != files::NEWEST) {
        let is_last = last == Some(name);
        // A file that does not exist any more was recycled or renamed since the list was read.
        files.extend(file_report(disk, name.clone(), is_last, content)?);
    }
    files.extend(newest);
    files.sort_by(|one, other| one.name.cmp(&other.name));
    judge_together(&mut files);
    Ok(files)
}

fn damaged(offset: u64, reason: impl Into<String>) -> Verdict {
    Verdict::Damaged {
        offset,
        reason: reason.into(),
        lost_records: None,
    }
}

fn file_report(
    disk: &dyn Disk,
    name: String,
    is_last: bool,
    content: &mut Vec<u8>,
) -> Result<Option<FileReport>, Error> {
    let kind = files::kind(&name);
    let mut report = FileReport {
        name,
        kind,
        bytes: 0,
        first: None,
        last: None,
        created_ms: None,
        verdict: Verdict::Clean,
    };
    let file = match disk.open_read_only(&report.name) {
        Ok(file) => file,
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
        // Only its name counts: `lost+found` of a file system, for example.
        Err(_) if kind == Kind::Other => {
            report.verdict = Verdict::Foreign;
            return Ok(Some(report));
        }
        Err(error) if error.kind() == ErrorKind::PermissionDenied => {
            return Err(Error::io("open", &report.name)(error));
        }
        Err(error) => {
            report.verdict = damaged(0, format!("it cannot be opened: {error}"));
            return Ok(Some(report));
        }
    };
    report.bytes = file.bytes().unwrap_or(0);
    report.verdict = match kind {
        Kind::Lock => Verdict::Clean,
        Kind::Other => Verdict::Foreign,
        Kind::Temporary => Verdict::Leftover,
        Kind::Spare(_) => Verdict::Spare,
        Kind::Closed | Kind::Newest | Kind::Segment(_) => match read_whole(&*file, content) {
            Err(error) => damaged(0, unreadable_reason(&error)),
            Ok(unreadable) => {
                let verdict = match kind {
                    Kind::Closed => closed(&mut report, content),
                    Kind::Newest => newest(&mut report, content),
                    _ => segment(&mut report, content, is_last),
                };
                with_unreadable(verdict, unreadable)
            }
        },
        Kind::Snapshot(position) | Kind::DamagedSnapshot(position) => {
            match snapshot::read(&*file, &mut |_| Ok(())) {
                Ok((header, footer)) => {
                    report.first = Some(LogPosition(header.position));
                    report.last = Some(LogPosition(footer.complete));
                    report.created_ms = Some(header.created_ms);
                    if header.position == position {
                        Verdict::Clean
                    } else {
                        damaged(0, "its header belongs to a file of another name")
                    }
                }
                Err(Fault::Format(format)) => Verdict::UnknownFormat { format },
                Err(Fault::Damaged { offset, reason }) => damaged(offset, reason),
                Err(Fault::Refused { message, .. }) => damaged(0, message),
            }
        }
    };
    Ok(Some(report))
}

fn header_verdict(fault: HeaderFault) -> Verdict {
    match fault {
        HeaderFault::Damaged => damaged(0, "its header is damaged"),
        HeaderFault::Format(format) => Verdict::UnknownFormat { format },
    }
}

/// The verdict on a file of which a part cannot be read, if there is such a part.
fn with_unreadable(verdict: Verdict, unreadable: Option<Unreadable>) -> Verdict {
    match (verdict, unreadable) {
        // Damage in front of the part says which records are lost, so it takes precedence.
        (Verdict::Damaged { offset, .. }, Some(part)) if offset >= part.offset => {
            damaged(part.offset, unreadable_reason(&part.error))
        }
        (verdict @ (Verdict::Damaged { .. } | Verdict::UnknownFormat { .. }), _) => verdict,
        (_, Some(part)) => damaged(part.offset, unreadable_reason(&part.error)),
        (verdict, None) => verdict,
    }
}

fn marker(report: &mut FileReport, header: Header) -> Verdict {
    report.last = Some(LogPosition(header.position));
    report.created_ms = Some(header.created_ms);
    Verdict::Clean
}

fn closed(report: &mut FileReport, content: &[u8]) -> Verdict {
    match Header::decode(content, Magic::Closed) {
        Ok(header) => marker(report, header),
        Err(fault) => header_verdict(fault),
    }
}

fn newest(report: &mut FileReport, content: &[u8]) -> Verdict {
    match newest::decode(content) {
        Ok(Some(header)) => marker(report, header),
        // A crash interrupted the creation of the file.
        Ok(None) if content.iter().all(|&byte| byte == 0) => Verdict::Leftover,
        Ok(None) => damaged(0, "no record in it is intact"),
        Err(format) => Verdict::UnknownFormat { format },
    }
}

/// Examines a segment. The length in the header is compared only for the last segment (`is_last`);
/// the next segment shows where the records of any other one end.
fn segment(report: &mut FileReport, content: &[u8], is_last: bool) -> Verdict {
    let header = match Header::decode(content, Magic::Segment) {
        Ok(header) => header,
        Err(fault) => return header_verdict(fault),
    };
    if report.kind != Kind::Segment(header.number) {
        return damaged(0, "its header belongs to a file of another name");
    }
    report.first = Some(LogPosition(header.position));
    report.created_ms = Some(header.created_ms);
    let mut next = header.position;
    let mut frames = Frames::new(header, content);
    loop {
        let offset = frames.offset as u64;
        let Some(frame) = frames.next() else { break };
        if frame.first != next {
            return damaged(offset, "the positions of its records are not consecutive");
        }
        next = frame.last() + 1;
        report.last = Some(LogPosition(next - 1));
    }
    let (rest, offset) = (frames.rest(), frames.offset as u64);
    let wrong_length = header.wrong_length(report.bytes).filter(|_| is_last);
    if let Some(reason) = wrong_length.or_else(|| rest.misplaced()) {
        return damaged(offset, reason);
    }
    if rest.synced >= next {
        return Verdict::Damaged {
            offset,
            reason: "a frame is damaged, and a later frame declares it durable".to_owned(),
            lost_records: Some(rest.synced - next + 1),
        };
    }
    if rest.torn {
        Verdict::TornTail { offset }
    } else {
        Verdict::Clean
    }
}

/// Checks files against each other: a segment must reach the beginning of the next one.
fn judge_together(files: &mut [FileReport]) {
    // A file of a later version may hold what the others lack.
    let is_later = |file: &FileReport| matches!(file.verdict, Verdict::UnknownFormat { .. });
    if files.iter().any(is_later) {
        return;
    }
    // The oldest available state: the empty beginning, or the oldest intact snapshot.
    let begins = files
        .iter()
        .any(|file| matches!(file.kind, Kind::Segment(_)) && file.first == Some(LogPosition(1)));
    let whole = |file: &&FileReport| {
        matches!(file.kind, Kind::Snapshot(_)) && file.verdict == Verdict::Clean
    };
    let snapshots = files.iter().filter(whole).filter_map(|file| file.first);
    let oldest = match begins {
        true => Some(0),
        false => snapshots.map(|first| first.0).min(),
    };
    let markers = files
        .iter()
        .filter(|file| matches!(file.kind, Kind::Closed | Kind::Newest));
    let closed = markers.filter_map(|file| file.last).max();
    let segments: Vec<usize> = (0..files.len())
        .filter(|&at| matches!(files[at].kind, Kind::Segment(_)) && files[at].first.is_some())
        .collect();
    for (index, &at) in segments.iter().enumerate() {
        let follows = segments
            .get(index + 1)
            .and_then(|&next| files[next].first)
            .map(|first| first.0);
        let known = match (follows, closed) {
            (Some(follows), _) => follows,
            (None, Some(closed)) => closed.0 + 1,
            (None, None) => 0,
        };
        let before = files[at].first.map_or(0, |first| first.0 - 1);
        let end = files[at].last.map_or(before, |last| last.0);
        if matches!(files[at].verdict, Verdict::Clean | Verdict::TornTail { .. }) && end + 1 < known
        {
            files[at].verdict = Verdict::Damaged {
                offset: match files[at].verdict {
                    Verdict::TornTail { offset } => offset,
                    _ => files[at].bytes,
                },
                reason: format!("its records end at {end}, but later records were durable"),
                lost_records: Some(known - 1 - end),
            };
        } else if files[at].verdict == Verdict::Clean
            && oldest.is_some_and(|oldest| follows.is_some_and(|follows| follows <= oldest + 1))
        {
            files[at].verdict = Verdict::Stale;
        }
    }
}
