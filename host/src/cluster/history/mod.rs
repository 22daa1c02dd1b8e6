//! The history of a host of a cluster: a copy of the cluster's log in the data directory, for the
//! commands that read one.
//!
//! The copy must never delay the host. If it cannot be kept, it ends with one warning. It stops the
//! host only if the log has lost records that the copy has.

mod store;
#[cfg(test)]
mod tests;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use statehouse_cluster::{Clock, CopyError, Engine, Id, LogCopy, Member, Options, Stop};
use statehouse_wal::Durability;
use tokio::sync::watch;

use statehouse_config::{Storage, limits};
use statehouse_files::blocking;
use store::CopyDirectory;
pub use store::{copied, write_mark};

/// The source of a copy, and its place.
pub struct History {
    /// The data directory, which has a mark of the cluster.
    pub directory: PathBuf,
    /// How much is kept.
    pub options: statehouse_wal::Options,
    /// A connection of its own to the engine.
    pub engine: Arc<dyn Engine>,
    /// The clock of the member.
    pub clock: Arc<dyn Clock>,
    /// The settings of the member.
    pub member_options: Options,
    /// The cluster.
    pub cluster: Id,
    /// Shows the last record of the copy, or 0 if none has caught up with the log and follows it.
    pub position: Arc<AtomicU64>,
}

/// The settings of a copy.
pub fn options(storage: &Storage) -> statehouse_wal::Options {
    statehouse_wal::Options {
        durability: Durability::Interval(limits::CLUSTER_HISTORY_SYNC),
        history_bytes: storage.history_bytes,
        history_ms: storage.history_ms,
        ..statehouse_wal::Options::default()
    }
}

/// What an operator can do about an error that ended the copy.
fn remedy(error: &CopyError, directory: &Path) -> String {
    let place = directory.display();
    match error {
        CopyError::LaterVersion(_) => "Run this host with that version".to_owned(),
        CopyError::Log(_) => "Restart this host".to_owned(),
        CopyError::Store(_) | CopyError::Differs(_) => {
            format!("Make room or repair the disk of {place}, then restart this host")
        }
    }
}

impl History {
    /// Keeps the copy until `stopped` changes. Returns why the host must stop, if it must.
    pub async fn keep(
        self,
        member: Arc<Member>,
        mut stopped: watch::Receiver<bool>,
    ) -> Option<Stop> {
        let (directory, position) = (self.directory.clone(), self.position.clone());
        let stopped = async move {
            // An error means that the process ends.
            let _ = stopped.wait_for(|it| *it).await;
        };
        match self.copy(&member, stopped).await {
            Ok(()) => None,
            Err(CopyError::Log(stop @ Stop::CopyIsAhead(_))) => Some(stop),
            Err(error) => {
                let remedy = remedy(&error, &directory);
                tracing::warn!(
                    "this host keeps no history from now on, the store goes on: {error}. {remedy}"
                );
                position.store(0, Relaxed);
                None
            }
        }
    }

    async fn copy(
        self,
        member: &Member,
        stopped: impl Future<Output = ()>,
    ) -> Result<(), CopyError> {
        let (directory, options, position) = (self.directory, self.options, self.position);
        let is_off = options.history_bytes == 0 || options.history_ms == 0;
        let open = move || -> Result<_, CopyError> {
            let mut store = CopyDirectory::open(&directory, options, position)?;
            if is_off {
                store.remove()?;
                return Ok(None);
            }
            let resumed = store.resume()?;
            Ok(Some((store, resumed)))
        };
        let opened = blocking::run("history", open).await;
        let failed = |error| CopyError::Store(format!("it could not be opened: {error}"));
        let Some((store, resumed)) = opened.map_err(failed)?? else {
            return Ok(());
        };
        let (engine, clock, of) = (self.engine, self.clock, (member, self.cluster));
        let copy = LogCopy::new(engine, clock, self.member_options, of, store, resumed);
        copy.run(stopped).await
    }
}
