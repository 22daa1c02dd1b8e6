//! The state of a cluster for operators: the head, the hosts, the engine and the log.

use std::fmt;

use crate::access::{Access, ClusterError};
use crate::clock::Clock;
use crate::engine::{Engine, Status};
use crate::frame::Frame;
use crate::head::Head;
use crate::keys::Keys;
use crate::modules::{self, ModuleInfo};
use crate::presence::{self, MemberEntry};

/// The frames in the engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LogWindow {
    /// The number of frames.
    pub frames: u64,
    /// The number of frames after the newest snapshot.
    pub frames_since_snapshot: u64,
    /// The bytes of all frames, estimated from the newest ones.
    pub bytes: u64,
    /// The age in milliseconds of the first frame after the newest snapshot, by the wall clock of
    /// the caller. `None` without a snapshot, or if no frame follows it.
    pub snapshot_age_ms: Option<u64>,
}

/// The state of a cluster. The parts are read one after another, so they can differ by what
/// happened in between.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Overview {
    /// The head of the log, which names the leader.
    pub head: Head,
    /// The records of all hosts.
    pub members: Vec<MemberEntry>,
    /// The policy modules.
    pub modules: Vec<ModuleInfo>,
    /// The engine.
    pub status: Status,
    /// The log.
    pub log: LogWindow,
    /// The wall clock of the caller in milliseconds since 1970.
    pub now_ms: u64,
}

/// Reads the state of a cluster.
///
/// # Errors
/// [`ClusterError::NotCreated`] if it does not exist, [`ClusterError::Engine`] if no server
/// answers, [`ClusterError::Malformed`] if the head cannot be read.
pub async fn overview(
    engine: &dyn Engine,
    clock: &dyn Clock,
    cluster: &str,
    now_ms: u64,
) -> Result<Overview, ClusterError> {
    let keys = Keys::new(cluster);
    let access = Access {
        engine,
        clock,
        keys: &keys,
    };
    let head = access.head().await?;
    Ok(Overview {
        members: presence::list(&access).await?,
        modules: modules::list(&access).await?,
        status: access.status().await?,
        log: window(&access, &head, now_ms).await?,
        head,
        now_ms,
    })
}

async fn window(access: &Access<'_>, head: &Head, now_ms: u64) -> Result<LogWindow, ClusterError> {
    let frames = head.seq + 1 - head.oldest;
    // A page of the newest frames.
    let sample = crate::limits::PAGE_VALUES_MIN as u64;
    let from = head.oldest.max((head.seq + 1).saturating_sub(sample));
    let range = access.keys.frames(from, head.seq + 1);
    let newest = access.range("reading the newest frames", &range).await?;
    let bytes: usize = newest.values.iter().map(|(_, it)| it.len()).sum();
    let average = bytes as u64 / (newest.values.len() as u64).max(1);
    let mut snapshot_age_ms = None;
    if let Some(snapshot) = &head.snapshot {
        let first = access.keys.frame(snapshot.first_seq);
        let frame = access
            .get("reading the frame after the snapshot", &first)
            .await?;
        let frame = frame.as_deref().map(Frame::decode);
        if let Some(Ok(frame)) = frame {
            snapshot_age_ms = Some(now_ms.saturating_sub(frame.now_ms));
        }
    }
    Ok(LogWindow {
        frames,
        frames_since_snapshot: head
            .snapshot
            .map_or(frames, |it| (head.seq + 1).saturating_sub(it.first_seq)),
        bytes: average * frames,
        snapshot_age_ms,
    })
}

impl fmt::Display for Overview {
    /// Some lines for a terminal.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let head = &self.head;
        match (head.leader.as_str(), head.released) {
            ("", _) => writeln!(f, "leader    none yet")?,
            (leader, true) => writeln!(f, "leader    none; {leader} has handed over")?,
            (leader, false) => writeln!(
                f,
                "leader    {leader} at {} since epoch {}",
                head.address, head.epoch
            )?,
        }
        let log = &self.log;
        writeln!(
            f,
            "log       {} records, {} frames kept, about {} kB",
            head.position.0,
            log.frames,
            log.bytes >> 10
        )?;
        match (&head.snapshot, log.snapshot_age_ms) {
            (None, _) => writeln!(f, "snapshot  none yet")?,
            (Some(it), age) => {
                write!(f, "snapshot  {} kB", it.bytes >> 10)?;
                if let Some(age) = age {
                    write!(f, ", {} s old", age / 1000)?;
                }
                writeln!(f, ", {} frames since", log.frames_since_snapshot)?;
            }
        }
        let status = &self.status;
        writeln!(
            f,
            "etcd      {}, {} voters, {} MB in use, {} MB on disk",
            status.version,
            status.voters,
            status.bytes >> 20,
            status.file_bytes >> 20
        )?;
        for alarm in &status.alarms {
            writeln!(f, "alarm     {}", alarm.trim())?;
        }
        let bytes: u64 = self.modules.iter().map(|it| it.bytes).sum();
        let count = self.modules.len();
        writeln!(f, "modules   {count}, {} kB", bytes >> 10)?;
        for entry in &self.members {
            self.fmt_member(f, entry)?;
        }
        Ok(())
    }
}

impl Overview {
    fn fmt_member(&self, f: &mut fmt::Formatter<'_>, entry: &MemberEntry) -> fmt::Result {
        let info = match &entry.info {
            Ok(info) => info,
            Err(error) => return writeln!(f, "host      {}: {error}", entry.host),
        };
        let age = self.now_ms.saturating_sub(info.written_ms) / 1000;
        write!(
            f,
            "host      {} {} in epoch {}, written {age} s ago, version {}",
            info.host, info.role, info.epoch, info.description.version
        )?;
        let missing = info.description.missing_modules.len();
        if missing > 0 {
            write!(f, ", lacks {missing} modules")?;
        }
        writeln!(f)
    }
}
