//! What a leader does for operators: it checks the log and a successor before a handover, and
//! raises the format of the log.
//!
//! The check of a successor and the upgrade look at the records of members, which can be late. A
//! wrong record must do no harm: a successor that does not take over is a delay, and a host that
//! cannot read the log stops.

use crate::access::{Access, ClusterError};
use crate::leader::{LeaderLog, NotLeading};
use crate::presence::{MemberEntry, Role, members};

/// Why an operation was refused or failed. The text says what to do.
#[derive(Debug, thiserror::Error)]
pub enum OperationError {
    /// The records of members could not be read.
    #[error(transparent)]
    Cluster(#[from] ClusterError),
    /// The state of a member does not allow the operation.
    #[error("{0}")]
    Refused(String),
    /// Another host leads by now.
    #[error(transparent)]
    NotLeading(#[from] NotLeading),
}

/// What an upgrade did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Upgraded {
    /// The log had the newest format already.
    Unchanged(u16),
    /// The log may contain this format from now on.
    Raised(u16),
}

/// Checks that the log can be reached: reads the head, which needs the majority of the engine.
/// Fails with a [`ClusterError`] after some seconds if not, or if the head cannot be read.
pub async fn check_reach(access: &Access) -> Result<(), ClusterError> {
    access.head().await.map(drop)
}

/// Checks that a member can lead after the leadership `epoch`: it follows and lacks no module.
/// Fails with [`OperationError::Refused`] if not.
pub async fn check_successor(
    access: &Access,
    epoch: u64,
    host: &str,
) -> Result<(), OperationError> {
    let members = members(access).await?;
    let Some(entry) = members.iter().find(|it| it.host == host) else {
        let cluster = access.keys.cluster();
        return refuse(format!(
            "the cluster {cluster} has no host {host}: `statehouse cluster status` lists its hosts"
        ));
    };
    let info = match &entry.info {
        Ok(info) => info,
        Err(error) => {
            return refuse(format!("the record of host {host} cannot be read: {error}"));
        }
    };
    if info.epoch != epoch || info.role != Role::Following {
        return refuse(format!(
            "host {host} does not follow this leader (epoch {epoch}): its last record says that it {} in epoch {}. Start it, or name another host",
            info.role, info.epoch
        ));
    }
    match info.description.missing_modules.len() {
        0 => Ok(()),
        missing => refuse(format!(
            "host {host} cannot lead, because it lacks {missing} policies: wait until it has fetched them, or name another host"
        )),
    }
}

/// Raises the latest format that the log may contain to `newest`, which the leader reads, if all
/// members read it. Fails with [`OperationError::Refused`] if a member may not read it; then
/// nothing has changed.
pub async fn upgrade(
    access: &Access,
    log: &LeaderLog,
    newest: u16,
) -> Result<Upgraded, OperationError> {
    let present = log.log_format();
    if present >= newest {
        return Ok(Upgraded::Unchanged(present));
    }
    for entry in members(access).await? {
        if let Err(why) = check_reader(&entry, log.epoch(), newest) {
            return refuse(format!(
                "the log keeps format {present}: {why}, or remove the host with `statehouse cluster remove {}` if it will not return",
                entry.host
            ));
        }
    }
    log.raise_log_format(newest).await?;
    Ok(Upgraded::Raised(newest))
}

/// Whether a member reads this format. Its record must be of the present leadership, because an
/// earlier one can be of a program that was replaced since.
fn check_reader(entry: &MemberEntry, epoch: u64, format: u16) -> Result<(), String> {
    let host = &entry.host;
    let info = match &entry.info {
        Ok(info) => info,
        Err(error) => {
            return Err(format!(
                "the record of host {host} cannot be read ({error}). Update the host"
            ));
        }
    };
    if info.log_format < format {
        return Err(format!(
            "host {host} (version {}) reads logs up to format {}, and not {format}. Update the host",
            info.description.version, info.log_format
        ));
    }
    if info.epoch != epoch || info.role == Role::Joining {
        return Err(format!(
            "host {host} was last seen in epoch {}, and the present one is {epoch}. Start the host",
            info.epoch
        ));
    }
    Ok(())
}

fn refuse<T>(why: String) -> Result<T, OperationError> {
    Err(OperationError::Refused(why))
}
