//! Options and output shared by the commands that read a data directory.

use std::path::PathBuf;

use super::output::{Failure, printable};
use super::time;
use statehouse_core::clock::{Fence, wall_ms};
use statehouse_core::log::record::PolicyRecord;
use statehouse_offline::PastError;

/// The option --data.
#[derive(Debug, clap::Args)]
pub(super) struct Data {
    /// The data directory of the store. It is read directly, on this machine and without a lock,
    /// even while a server runs
    #[arg(
        id = "data",
        long = "data",
        value_name = "DIR",
        env = "STATEHOUSE_DATA",
        default_value = "statehouse-data"
    )]
    pub(super) path: PathBuf,
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

impl From<PastError> for Failure {
    fn from(error: PastError) -> Self {
        let text = error.to_string();
        match error {
            PastError::Missing(_)
            | PastError::NoLog(_)
            | PastError::NoCopy(..)
            | PastError::Refused(_)
            | PastError::Policy(_) => Self::usage(text),
            PastError::Log(..) | PastError::Backup(..) | PastError::Io(..) => Self::transport(text),
        }
    }
}

/// A log position or a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Place {
    LogPosition(u64),
    Time(u64),
}

impl std::str::FromStr for Place {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if let Ok(position) = text.parse() {
            return Ok(Self::LogPosition(position));
        }
        time::parse(text, wall_ms()).map(Self::Time).ok_or_else(|| {
            "write a record's number, a time such as 2026-11-21T03:00:00Z, or how long ago, such as 10m".to_owned()
        })
    }
}

/// A fencing token as the client sent it, for JSON. Its node may hold any characters.
pub(super) fn fence_json(fence: &Fence) -> String {
    format!("{:015}:{:05}:{}", fence.wall, fence.counter, fence.node)
}

/// A fencing token for people, with escapes.
pub(super) fn fence(fence: &Fence) -> String {
    printable(fence_json(fence).as_bytes())
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

/// A count and its noun.
pub(super) fn count(number: u64, noun: &str) -> String {
    match number {
        1 => format!("1 {noun}"),
        _ => format!("{number} {noun}s"),
    }
}

/// The name of a policy for people; a policy chooses its own name, so it is escaped.
pub(super) fn policy(policy: &PolicyRecord) -> String {
    let digest = &policy.digest.to_hex()[..8];
    let (name, version) = (policy.name.as_bytes(), policy.version.as_bytes());
    format!("{} {}@{digest}", printable(name), printable(version))
}

/// A policy in JSON.
pub(super) fn policy_json(policy: &PolicyRecord) -> serde_json::Value {
    serde_json::json!({
        "name": policy.name,
        "version": policy.version,
        "digest": format!("blake3:{}", policy.digest),
    })
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
