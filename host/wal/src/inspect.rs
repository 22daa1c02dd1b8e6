//! Every file of a journal, looked at and judged, for a tool that tells a person.
//!
//! Enters: a directory, also one that another process writes to or one that refuses to open. Leaves:
//! a verdict per file and what opening would say. It changes nothing.

use std::fmt;

use crate::disk::{Disk, read_whole};
use crate::error::Error;
use crate::files::{self, Kind};
use crate::limits;
use crate::newest;
use crate::recovery::{self, Base, Range, Sink};
use crate::segment::{Frames, Header, HeaderFault, Magic};
use crate::snapshot::{self, Fault};
use statehouse_protocol::LogPosition;

/// What a directory holds.
#[derive(Debug)]
pub struct Report {
    /// Every file, by name.
    pub files: Vec<FileReport>,
    /// What opening would read, or why it would refuse.
    pub opening: Result<Range, Error>,
}

/// One file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FileReport {
    /// Its name.
    pub name: String,
    /// What its name says.
    pub kind: Kind,
    /// Its length.
    pub bytes: u64,
    /// Segment: its first record. Snapshot: where it begins.
    pub first: Option<LogPosition>,
    /// Segment: its last readable record. Snapshot: from where on it is complete.
    pub last: Option<LogPosition>,
    /// When it was created.
    pub created_ms: Option<u64>,
    /// What was found.
    pub verdict: Verdict,
}

/// What was found in a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// Every byte is what was written.
    Clean,
    /// The last segment ends in a write that a crash ended. Nobody was told of it.
    TornTail {
        /// Where it begins.
        offset: u64,
    },
    /// Something that was written is not there.
    Damaged {
        /// The first byte that cannot be trusted.
        offset: u64,
        /// What is wrong.
        reason: String,
        /// Records that were durable once and cannot be read, as far as is known.
        lost_records: Option<u64>,
    },
    /// Of a later version.
    UnknownFormat {
        /// Its format.
        format: u16,
    },
    /// Whole, but too old for anything to begin with: what an ended clean-up left.
    Stale,
    /// Ready for use; what it holds has no meaning.
    Spare,
    /// Left over from a write that a crash ended; it goes at the next start.
    Leftover,
    /// None of the journal's.
    Foreign,
}

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Clean => write!(f, "clean"),
            Self::TornTail { offset } => {
                write!(
                    f,
                    "torn tail at byte {offset}: the last write was not finished, and nobody was told of it"
                )
            }
            Self::Damaged {
                offset,
                reason,
                lost_records: Some(lost),
            } => {
                write!(
                    f,
                    "damaged at byte {offset}: {reason}; {lost} durable records or more are lost"
                )
            }
            Self::Damaged {
                offset,
                reason,
                lost_records: None,
            } => write!(f, "damaged at byte {offset}: {reason}"),
            Self::UnknownFormat { format } => {
                write!(f, "format {format}, which this version cannot read")
            }
            Self::Stale => write!(f, "stale: nothing needs it"),
            Self::Spare => write!(f, "spare"),
            Self::Leftover => write!(f, "left over from an unfinished write"),
            Self::Foreign => write!(f, "not part of the journal"),
        }
    }
}

/// Nobody listens: only the reading counts.
struct Nobody;

impl Sink for Nobody {
    fn reset(&mut self) {}

    fn block(&mut self, _: &[u8]) -> Result<(), String> {
        Ok(())
    }

    fn record(&mut self, _: LogPosition, _: &[u8]) -> Result<(), String> {
        Ok(())
    }
}

/// Looks at every file of a journal. Files that another process writes to at this moment may look torn.
///
/// # Errors
/// [`Error::Io`] where the directory cannot be listed; what is wrong with a file stands in the report.
pub fn inspect(disk: &dyn Disk) -> Result<Report, Error> {
    let mut names = disk
        .list()
        .map_err(Error::io("list", "the data directory"))?;
    names.sort();
    let mut files = Vec::new();
    let mut content = Vec::new();
    let is_segment = |name: &&String| matches!(files::kind(name), Kind::Segment(_));
    let last = names.iter().rfind(is_segment).cloned();
    for name in names {
        let is_last = last.as_ref() == Some(&name);
        // A file that is gone by now was recycled or finished meanwhile.
        if let Some(report) = file_report(disk, name, is_last, &mut content) {
            files.push(report);
        }
    }
    judge_together(&mut files);
    Ok(Report {
        files,
        opening: recovery::read(disk, Base::Newest, LogPosition::END, &mut Nobody),
    })
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
) -> Option<FileReport> {
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
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return None,
        Err(error) => {
            report.verdict = damaged(0, format!("it cannot be opened: {error}"));
            return Some(report);
        }
    };
    report.bytes = file.bytes().unwrap_or(0);
    report.verdict = match kind {
        Kind::Lock => Verdict::Clean,
        Kind::Other => Verdict::Foreign,
        Kind::Temporary => Verdict::Leftover,
        Kind::Spare(_) => Verdict::Spare,
        Kind::Closed | Kind::Newest | Kind::Segment(_) => {
            match read_whole(&*file, limits::SEGMENT_FILE_BYTES_MAX, content) {
                Err(error) => damaged(0, format!("it cannot be read: {error}")),
                Ok(()) if kind == Kind::Closed => closed(&mut report, content),
                Ok(()) if kind == Kind::Newest => newest(&mut report, content),
                Ok(()) => segment(&mut report, content, is_last),
            }
        }
        Kind::Snapshot(position) | Kind::DamagedSnapshot(position) => {
            match snapshot::read(&*file, &mut |_| Ok(())) {
                Ok((header, footer)) => {
                    report.first = Some(LogPosition(header.position));
                    report.last = Some(LogPosition(footer.complete));
                    report.created_ms = Some(header.created_ms);
                    if header.position == position {
                        Verdict::Clean
                    } else {
                        damaged(0, "it has another's name")
                    }
                }
                Err(Fault::Format(format)) => Verdict::UnknownFormat { format },
                Err(Fault::Damaged { offset, reason }) => damaged(offset, reason),
                Err(Fault::Refused { message, .. }) => damaged(0, message),
            }
        }
    };
    Some(report)
}

fn header_verdict(fault: HeaderFault) -> Verdict {
    match fault {
        HeaderFault::Damaged => damaged(0, "its header is not what was written"),
        HeaderFault::Format(format) => Verdict::UnknownFormat { format },
    }
}

fn closed(report: &mut FileReport, content: &[u8]) -> Verdict {
    match Header::decode(content, Magic::Closed) {
        Ok(header) => {
            report.last = Some(LogPosition(header.position));
            report.created_ms = Some(header.created_ms);
            Verdict::Clean
        }
        Err(fault) => header_verdict(fault),
    }
}

fn newest(report: &mut FileReport, content: &[u8]) -> Verdict {
    match newest::decode(content) {
        Ok(Some(header)) => {
            report.last = Some(LogPosition(header.position));
            report.created_ms = Some(header.created_ms);
            Verdict::Clean
        }
        // A crash while it was created.
        Ok(None) if content.iter().all(|&byte| byte == 0) => Verdict::Leftover,
        Ok(None) => damaged(0, "it is not what was written"),
        Err(format) => Verdict::UnknownFormat { format },
    }
}

/// `is_last`: nothing but its length says where its records ended.
fn segment(report: &mut FileReport, content: &[u8], is_last: bool) -> Verdict {
    let header = match Header::decode(content, Magic::Segment) {
        Ok(header) => header,
        Err(fault) => return header_verdict(fault),
    };
    if report.kind != Kind::Segment(header.number) {
        return damaged(0, "it has another's name");
    }
    report.first = Some(LogPosition(header.position));
    report.created_ms = Some(header.created_ms);
    let mut next = header.position;
    let mut frames = Frames::new(header, content);
    loop {
        let offset = frames.offset as u64;
        let Some(frame) = frames.next() else { break };
        if frame.first != next {
            return damaged(offset, "its records have the wrong numbers");
        }
        next = frame.last() + 1;
        report.last = Some(LogPosition(next - 1));
    }
    let (rest, offset) = (frames.rest(), frames.offset as u64);
    if let Some(reason) = header.wrong_length(report.bytes).filter(|_| is_last) {
        return damaged(offset, reason);
    }
    if let Some(at) = rest.moved {
        return damaged(
            offset,
            format!("a frame that stands at byte {at} was written elsewhere"),
        );
    }
    if rest.synced >= next {
        return Verdict::Damaged {
            offset,
            reason: "a frame is not what was written, and a later one says that it was durable"
                .to_owned(),
            lost_records: Some(rest.synced - next + 1),
        };
    }
    if rest.torn {
        Verdict::TornTail { offset }
    } else {
        Verdict::Clean
    }
}

/// What one file says of another: where a segment ends, the next begins.
fn judge_together(files: &mut [FileReport]) {
    let reach = |file: &FileReport| {
        file.last
            .or(file.first.map(|first| LogPosition(first.0 - 1)))
    };
    // The oldest state to begin with: the beginning itself, or the oldest snapshot that is whole.
    let begins = files
        .iter()
        .any(|file| matches!(file.kind, Kind::Segment(_)) && file.first == Some(LogPosition(1)));
    let whole = |file: &&FileReport| {
        matches!(file.kind, Kind::Snapshot(_)) && file.verdict == Verdict::Clean
    };
    let oldest = if begins {
        Some(0)
    } else {
        files
            .iter()
            .filter(whole)
            .filter_map(|file| file.first)
            .map(|p| p.0)
            .min()
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
        let end = reach(&files[at]).map_or(0, |last| last.0);
        if matches!(files[at].verdict, Verdict::Clean | Verdict::TornTail { .. }) && end + 1 < known
        {
            files[at].verdict = Verdict::Damaged {
                offset: match files[at].verdict {
                    Verdict::TornTail { offset } => offset,
                    _ => files[at].bytes,
                },
                reason: format!("its records end at {end}, and went on once"),
                lost_records: Some(known - 1 - end),
            };
        } else if files[at].verdict == Verdict::Clean
            && oldest.is_some_and(|oldest| follows.is_some_and(|follows| follows <= oldest + 1))
        {
            files[at].verdict = Verdict::Stale;
        }
    }
}
