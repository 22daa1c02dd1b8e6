//! Options and output shared by the commands that read a data directory.

use std::path::{Path, PathBuf};

use serde_json::Value as Json;

use super::context;
use super::output::{Failure, notice, printable};
use super::time::utc;
use crate::past::bytes_of;
pub(super) use crate::past::{fence_json, policy_json};
use statehouse_core::clock::Fence;
use statehouse_core::log::record::PolicyRecord;
use statehouse_offline::{Past, PastError};
use statehouse_wal::LogPosition;

/// The option --data.
#[derive(Debug, clap::Args)]
pub(super) struct Data {
    /// The data directory of the store. It is read directly, on this machine and without a lock,
    /// even while a server runs [default: that of the context, or statehouse-data]
    #[arg(long, value_name = "DIR", env = "STATEHOUSE_DATA")]
    data: Option<PathBuf>,

    #[command(flatten)]
    context: ByContext,
}

impl Data {
    pub(super) fn find(&self) -> Result<PathBuf, Failure> {
        self.context.directory(self.data.as_deref())
    }
}

/// The option --context of commands that read a data directory. A directory that is given takes
/// precedence.
#[derive(Debug, clap::Args)]
pub(super) struct ByContext {
    /// The context that names the data directory (see `statehouse context`) [default: the selected
    /// one]
    #[arg(long, value_name = "NAME", env = "STATEHOUSE_CONTEXT")]
    context: Option<String>,
}

impl ByContext {
    /// The data directory that was given, or that of the context.
    pub(super) fn directory(&self, given: Option<&Path>) -> Result<PathBuf, Failure> {
        if let Some(path) = given {
            return Ok(path.to_owned());
        }
        let Some((name, found)) = context::find(self.context.as_deref())? else {
            return Ok("statehouse-data".into());
        };
        found.data.ok_or_else(|| {
            context::lacks(
                &name,
                "no --data, and this command reads a data directory on this machine",
            )
        })
    }
}

/// The option --node.
#[derive(Debug, clap::Args)]
pub(super) struct Node {
    /// The node name of the store in versions
    #[arg(
        id = "node",
        long = "node",
        value_name = "NAME",
        env = "STATEHOUSE_NODE",
        default_value = "StateStore"
    )]
    pub(super) name: String,
}

/// Names the end of a copy of the log of a cluster, if it is before `until_ms`, in milliseconds
/// since 1970. An answer about that time may lack later writes: the copy ends with its host, and
/// when its disk is full. A directory of a single host has all writes, so there is no notice.
pub(super) fn notice_end(past: &Past, until_ms: u64) -> Result<(), Failure> {
    if past.mark().is_some() {
        let (position, end_ms) = past.end()?;
        if end_ms < until_ms {
            notice_copy(past, position, end_ms, "");
        }
    }
    Ok(())
}

/// Names the end of a copy of the log of a cluster, which was just read up to this record. The
/// advice follows directly, so it begins with the full stop, or is empty.
pub(super) fn notice_copy(past: &Past, position: LogPosition, now_ms: u64, advice: &str) {
    if let Some(mark) = past.mark() {
        notice(&format!(
            "{} holds a copy of the log of the cluster {}, which ends at record {position} of {}: later writes are not in it{advice}",
            past.path().display(),
            printable(mark.name.as_bytes()),
            utc(now_ms)
        ));
    }
}

impl From<PastError> for Failure {
    fn from(error: PastError) -> Self {
        let text = error.to_string();
        match error {
            PastError::Missing(_)
            | PastError::NoLog(_)
            | PastError::NoCopy(..)
            | PastError::Unfinished(_)
            | PastError::Refused(_)
            | PastError::Policy(_) => Self::usage(text),
            PastError::Log(..)
            | PastError::Backup(..)
            | PastError::Unreadable(..)
            | PastError::Io(..) => Self::transport(text),
        }
    }
}

/// A fencing token for people, with escapes.
pub(super) fn fence(fence: &Fence) -> String {
    printable(fence_json(fence).as_bytes())
}

/// The text of a JSON string for people, with escapes; empty if it is none.
pub(super) fn text(json: &Json) -> String {
    printable(json.as_str().unwrap_or_default().as_bytes())
}

/// The start of bytes in JSON, on one line.
pub(super) fn excerpt_of(json: &Json) -> String {
    excerpt(&bytes_of(json).unwrap_or_default())
}

/// The name of a policy in JSON, for people.
pub(super) fn policy_of(json: &Json) -> String {
    let digest = text(&json["digest"]);
    let digest = digest.trim_start_matches("blake3:");
    let digest = digest.get(..8).unwrap_or(digest);
    format!(
        "{} {}@{digest}",
        text(&json["name"]),
        text(&json["version"])
    )
}

/// The start of a byte string, on one line.
pub(super) fn excerpt(bytes: &[u8]) -> String {
    match bytes.get(..EXCERPT_BYTES) {
        Some(beginning) if bytes.len() > EXCERPT_BYTES => format!("{}…", printable(beginning)),
        _ => printable(bytes),
    }
}

/// Maximum bytes of an excerpt.
const EXCERPT_BYTES: usize = 64;

pub(super) fn count(number: u64, noun: &str) -> String {
    match number {
        1 => format!("1 {noun}"),
        _ => format!("{number} {noun}s"),
    }
}

/// The name of a policy for people; a policy chooses its own name, so it is escaped.
pub(super) fn policy(policy: &PolicyRecord) -> String {
    policy_of(&policy_json(policy))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fencing_token_in_json_is_unchanged() {
        let token = Fence {
            wall: 7,
            counter: 1,
            node: "a\\b\n".into(),
        };
        assert_eq!(fence_json(&token), "000000000000007:00001:a\\b\n");
        let shown = fence(&token);
        assert!(!shown.contains('\n') && shown.starts_with("000000000000007:00001:a"));
    }
}
