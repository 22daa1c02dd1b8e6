//! The state of a cluster for operators: the head, the hosts, the engine and the log.

use std::fmt;

use crate::access::{Access, ClusterError};
use crate::engine::Status;
use crate::frame::Frame;
use crate::head::{Head, store_name};
use crate::modules::{self, ModuleInfo};
use crate::presence::{MemberEntry, MemberInfo, Role, members};

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

/// The state of a cluster as the engine holds it: no host is asked. The parts are read one after
/// another, so they can differ by what happened in between.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Overview {
    /// The name of the store that the cluster forms, see [`store_name`].
    pub store: String,
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

/// Reads the state of a cluster. Fails with [`ClusterError::NotCreated`] if it does not exist, and
/// with [`ClusterError::Malformed`] if the head cannot be read.
pub async fn overview(access: &Access, now_ms: u64) -> Result<Overview, ClusterError> {
    let head = access.head().await?;
    Ok(Overview {
        store: store_name(access.keys.cluster(), head.cluster),
        members: members(access).await?,
        modules: modules::list(access).await?,
        status: access.status().await?,
        log: window(access, &head, now_ms).await?,
        head,
        now_ms,
    })
}

async fn window(access: &Access, head: &Head, now_ms: u64) -> Result<LogWindow, ClusterError> {
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
    /// Some lines for a terminal, and a table of the hosts.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let head = &self.head;
        match (head.leader.as_str(), head.successor()) {
            ("", _) => writeln!(f, "leader    none yet")?,
            (_, Some(host)) => writeln!(f, "leader    none; {host} is to lead next")?,
            (leader, None) if head.released => {
                writeln!(f, "leader    none; {leader} has handed over")?;
            }
            (leader, None) => writeln!(
                f,
                "leader    {leader} at {}, epoch {}, by the log",
                head.address, head.epoch
            )?,
        }
        let since = Age(self.now_ms.saturating_sub(head.now_ms));
        write!(f, "changed   {since} ago")?;
        match head.released {
            true => writeln!(f)?,
            false => writeln!(f, "; `cluster check` asks the leader for a sign of life")?,
        }
        writeln!(f, "store     {}", self.store)?;
        let log = &self.log;
        writeln!(
            f,
            "log       position {}, format {}, {} frames kept, about {} kB",
            head.position.0,
            head.log_format,
            log.frames,
            log.bytes >> 10
        )?;
        match (&head.snapshot, log.snapshot_age_ms) {
            (None, _) => writeln!(f, "snapshot  none yet")?,
            (Some(it), age) => {
                write!(f, "snapshot  {} kB", it.bytes >> 10)?;
                if let Some(age) = age {
                    write!(f, ", {} old", Age(age))?;
                }
                writeln!(f, ", {} frames since", log.frames_since_snapshot)?;
            }
        }
        let status = &self.status;
        writeln!(
            f,
            "etcd      {}, {} voter{}, {} MB in use, {} MB on disk",
            status.version,
            status.voters,
            if status.voters == 1 { "" } else { "s" },
            status.bytes >> 20,
            status.file_bytes >> 20
        )?;
        for alarm in &status.alarms {
            writeln!(f, "alarm     {}", alarm.trim())?;
        }
        let bytes: u64 = self.modules.iter().map(|it| it.bytes).sum();
        let count = self.modules.len();
        writeln!(f, "modules   {count}, {} kB", bytes >> 10)?;
        self.fmt_members(f)
    }
}

impl Overview {
    /// How many leaderships a member has not seen.
    #[must_use]
    pub fn epochs_behind(&self, member: &MemberInfo) -> u64 {
        self.head.epoch.saturating_sub(member.epoch)
    }

    /// The role in the record of a host, or `led`: a host that led and ended wrote no other one.
    #[must_use]
    pub fn role(&self, member: &MemberInfo) -> String {
        let head = &self.head;
        let leads = !head.released && head.leader == member.host;
        match member.role {
            // A later epoch is of a host that began to lead after the head was read.
            Role::Leading if !leads && member.epoch <= head.epoch => "led".to_owned(),
            role => role.to_string(),
        }
    }

    /// A table of the hosts, and a line for each record that cannot be read.
    fn fmt_members(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let readable = self.members.iter().filter_map(|it| it.info.as_ref().ok());
        let header = [
            "HOST", "ROLE", "EPOCH", "VERSION", "WRITTEN", "ADDRESS", "STATE",
        ];
        let mut rows = vec![header.map(str::to_owned)];
        rows.extend(readable.map(|it| {
            [
                it.host.clone(),
                self.role(it),
                it.epoch.to_string(),
                it.description.version.clone(),
                format!("{} ago", Age(self.now_ms.saturating_sub(it.written_ms))),
                it.address.clone(),
                self.state(it),
            ]
        }));
        if rows.len() > 1 {
            writeln!(f)?;
            let widths: [usize; 6] = std::array::from_fn(|column| {
                let cells = rows.iter().map(|row| row[column].chars().count());
                cells.max().unwrap_or(0)
            });
            for row in &rows {
                for (cell, width) in row.iter().zip(widths) {
                    write!(f, "{cell:<width$}  ")?;
                }
                writeln!(f, "{}", row[widths.len()])?;
            }
        }
        for entry in &self.members {
            if let Err(error) = &entry.info {
                writeln!(f, "host {}: {error}", entry.host)?;
            }
        }
        Ok(())
    }

    /// What an operator should know of a member beyond its role, by its record. Whether the member
    /// runs is unknown.
    fn state(&self, member: &MemberInfo) -> String {
        let behind = self.epochs_behind(member);
        let missing = member.description.missing_modules.len();
        match (behind, missing) {
            (0, 0) => "-".to_owned(),
            (0, 1) => "lacks 1 policy".to_owned(),
            (0, _) => format!("lacks {missing} policies"),
            (1, _) => "1 epoch behind".to_owned(),
            _ => format!("{behind} epochs behind"),
        }
    }
}

/// An age in milliseconds, in the largest unit that gives two digits.
struct Age(u64);

impl fmt::Display for Age {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let seconds = self.0 / 1000;
        match seconds {
            0..120 => write!(f, "{seconds} s"),
            120..7_200 => write!(f, "{} min", seconds / 60),
            7_200..172_800 => write!(f, "{} h", seconds / 3_600),
            _ => write!(f, "{} d", seconds / 86_400),
        }
    }
}
