//! What operators ask of a host of a cluster: its figures, a handover, and an upgrade of the log.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use serde_json::json;
use statehouse_cluster::{
    Access, After, Figures, LOG_FORMAT, OperationError, Upgraded, check_reach, check_successor,
    upgrade,
};

use tokio::time::{sleep, timeout};

use super::present::Shared;
use crate::admin::{
    ClusterFigures, ClusterPlace, ClusterRefusal, LeaderFigures, Leadership, Operation, ReadFigures,
};
use crate::cluster::log::ClusterLog;
use statehouse_config::limits;
use statehouse_core::clock::wall_ms;

/// The leadership of this host, for operators.
pub(super) struct Operations {
    pub(super) log: ClusterLog,
    pub(super) shared: Arc<Shared>,
    pub(super) access: Access,
    /// The names of the cluster and of this host.
    pub(super) cluster: String,
    pub(super) host: String,
}

impl Leadership for Operations {
    fn figures(&self) -> ClusterFigures {
        let reaches_log = self.shared.figures.reaches_log() && self.shared.reaches_log();
        ClusterFigures {
            epoch: self.log.leader().epoch(),
            reaches_log,
            leader: Some(LeaderFigures {
                unreleased: self.log.unreleased(),
                lease: self.log.leader().lease_left(),
            }),
            ..figures(
                &self.shared.figures,
                self.log.position(),
                self.shared.history.load(Relaxed),
            )
        }
    }

    fn place(&self) -> ClusterPlace {
        ClusterPlace {
            cluster: self.cluster.clone(),
            host: self.host.clone(),
            leader: Some(self.host.clone()),
            followers: self.shared.links.names(),
        }
    }

    fn hand_over(&self, to: Option<String>) -> Operation<'_> {
        Box::pin(async move {
            let changes = to.as_ref() != Some(&self.host);
            // Also for a host that leads already: it may have been replaced without knowing it.
            self.check_log().await?;
            match &to {
                None => self.check_followers().await?,
                Some(to) if changes => self.check(to).await?,
                Some(_) => {}
            }
            if changes {
                let (shared, to) = (self.shared.clone(), to.clone());
                tokio::spawn(async move { shared.hand_over(to.as_deref()).await });
            }
            Ok(json!({"leader": self.host, "to": to, "changes": changes}))
        })
    }

    fn upgrade(&self) -> Operation<'_> {
        Box::pin(async move {
            let done = upgrade(&self.access, self.log.leader(), LOG_FORMAT).await;
            Ok(match done.map_err(refusal)? {
                Upgraded::Unchanged(format) => json!({"log_format": format, "raised": false}),
                Upgraded::Raised(format) => json!({"log_format": format, "raised": true}),
            })
        })
    }
}

impl Operations {
    /// Whether the end of the leadership can be written. Otherwise the host would serve no client
    /// until etcd has a majority, and no other host would lead.
    async fn check_log(&self) -> Result<(), ClusterRefusal> {
        let reached = check_reach(&self.access).await;
        reached.map_err(|error| {
            ClusterRefusal::Failed(format!(
                "this host does not reach the log of its cluster, so it still leads ({error}): try again when etcd answers"
            ))
        })
    }

    /// Whether another host can lead next. Waits for one: a new leader has no links yet, and the
    /// records of members can be late.
    async fn check_followers(&self) -> Result<(), ClusterRefusal> {
        let mut reasons = Vec::new();
        let able = async {
            loop {
                let mut found = Vec::new();
                for host in self.shared.links.names() {
                    match self.check(&host).await {
                        Err(ClusterRefusal::Refused(why)) => found.push(why),
                        checked => return checked,
                    }
                }
                reasons = found;
                sleep(limits::CLUSTER_LINK_RETRY).await;
            }
        };
        if let Ok(checked) = timeout(limits::CLUSTER_LINK_WAIT, able).await {
            return checked;
        }
        if reasons.is_empty() && !self.shared.links.names().is_empty() {
            let error = "the records of the other hosts could not be read in time, so this host still leads: try again when etcd answers";
            return Err(ClusterRefusal::Failed(error.to_owned()));
        }
        Err(ClusterRefusal::Refused(match reasons.is_empty() {
            true => format!(
                "no other host has a link to {}, so none can lead next: look into the logs of the other hosts, or stop this one",
                self.host
            ),
            false => format!("no other host can lead next: {}", reasons.join("; ")),
        }))
    }

    /// Whether a host can lead next.
    async fn check(&self, to: &str) -> Result<(), ClusterRefusal> {
        let epoch = self.log.leader().epoch();
        let checked = check_successor(&self.access, epoch, to).await;
        checked.map_err(refusal)?;
        if self.shared.links.contains(to) {
            return Ok(());
        }
        Err(ClusterRefusal::Refused(format!(
            "host {to} has no link to {}: it does not run, or does not reach the cluster port of {}. Look into its log, or name another host",
            self.host, self.host
        )))
    }
}

fn refusal(error: OperationError) -> ClusterRefusal {
    match error {
        OperationError::Cluster(error) => ClusterRefusal::Failed(error.to_string()),
        error => ClusterRefusal::Refused(error.to_string()),
    }
}

/// Reads the figures of a host that does not lead.
pub(super) fn of_follower(known: &Arc<Figures>, history: &Arc<AtomicU64>) -> ReadFigures {
    let (known, history) = (known.clone(), history.clone());
    Arc::new(move || figures(&known, known.position().0, history.load(Relaxed)))
}

fn figures(known: &Figures, position: u64, history: u64) -> ClusterFigures {
    let age_ms = known.snapshot_ms().map(|it| wall_ms().saturating_sub(it));
    ClusterFigures {
        epoch: known.epoch(),
        position,
        history,
        lag: known.lag(),
        reaches_log: known.reaches_log(),
        takeovers: [
            ("handover", known.takeovers(After::Handover)),
            ("restart", known.takeovers(After::Restart)),
            ("silence", known.takeovers(After::Silence)),
        ],
        appends: known.appends(),
        log_records: known.log_records(),
        log_bytes: known.log_bytes(),
        snapshot_age: age_ms.map(Duration::from_millis),
        leader: None,
    }
}
