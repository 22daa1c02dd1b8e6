//! The store of the present leadership, as the parts that live longer see it.

use std::sync::atomic::AtomicU64;
use std::sync::{Arc, OnceLock, Weak};

use statehouse_mqtt::Broker;
use tokio::sync::{Notify, watch};
use tokio::task::{AbortHandle, JoinSet};

use statehouse_cluster::Figures;

use super::clients::drain;
use super::operations;
use super::service_manager;
use crate::admin::{ClusterPlace, DataDirectory, NO_LEADER, ReadImpediment, Reader, Subject};
use crate::cluster::log::ClusterLog;
use statehouse_config::{ClusterConfig, limits};
use statehouse_core::clock::wall_ms;
use statehouse_files::watch::Reloads;
use statehouse_listener::front::{Links, Role, Times};
use statehouse_server::Server;

/// What all parts may ask and change.
pub(super) struct Shared {
    /// The names of the cluster and of this host.
    place: ClusterPlace,
    /// The last record of this host's copy of the log, or 0 while none follows the log.
    pub(super) history: Arc<AtomicU64>,
    /// Answers operators about the past of keys, from this copy.
    past: Arc<Reader>,
    /// The files that this host reloads. Set once, when the host starts. Weak, because they hold
    /// this.
    pub(super) reloads: Arc<OnceLock<Weak<Reloads>>>,
    /// What the member counts.
    pub(super) figures: Arc<Figures>,
    /// The links of its followers while it leads, and its own while it follows.
    pub(super) links: Arc<Links>,
    /// Notified when a policy has arrived that this host lacked.
    pub(super) arrived: Arc<Notify>,
    pub(super) present: watch::Sender<Option<Present>>,
    pub(super) role: watch::Sender<Role>,
    pub(super) subject: watch::Sender<Subject>,
}

#[derive(Clone)]
pub(super) struct Present {
    pub(super) server: Arc<Server>,
    pub(super) broker: Broker,
    pub(super) log: ClusterLog,
    pub(super) tasks: Arc<Tasks>,
}

/// The tasks of a leadership. They end when this is dropped.
pub(super) struct Tasks {
    pub(super) serving: Vec<AbortHandle>,
    pub(super) _deliveries: JoinSet<()>,
}

impl Shared {
    pub(super) fn new(
        figures: Arc<Figures>,
        cluster: &ClusterConfig,
        directory: DataDirectory,
    ) -> Self {
        let history = Arc::<AtomicU64>::default();
        let past = Arc::new(Reader::new(Some(DataDirectory {
            copied: Some(history.clone()),
            ..directory
        })));
        let why = "this host is joining the cluster";
        let place = ClusterPlace {
            cluster: cluster.etcd.name.clone(),
            host: cluster.host.clone(),
            ..ClusterPlace::default()
        };
        let reloads = Arc::<OnceLock<_>>::default();
        let subject = Subject::Follower {
            impediment: Arc::new(move || Some(why)),
            leader: why.into(),
            place: place.clone(),
            figures: operations::of_follower(&figures, &history),
            past: past.clone(),
            reloads: reloads.clone(),
        };
        Self {
            past,
            reloads,
            place,
            history,
            figures,
            links: Arc::default(),
            arrived: Arc::default(),
            present: watch::Sender::new(None),
            role: watch::Sender::new(Role::Waiting),
            subject: watch::Sender::new(subject),
        }
    }

    /// This host follows `leader`. `answer` is what the admin API answers operators.
    pub(super) fn follows(&self, leader: &str, answer: &str) {
        self.links.begin_silence();
        let links = self.links.clone();
        let impediment: ReadImpediment = Arc::new(move || {
            // Clients that connected when the silence began were closed without an answer.
            let is_lost = links.silence() >= limits::CLUSTER_HOLD;
            is_lost.then_some("this host has no link to the leader of the cluster")
        });
        self.does_not_lead(impediment, Some(leader), answer);
    }

    fn does_not_lead(&self, impediment: ReadImpediment, leader: Option<&str>, answer: &str) {
        self.subject.send_replace(Subject::Follower {
            impediment,
            leader: answer.into(),
            place: ClusterPlace {
                leader: leader.map(str::to_owned),
                ..self.place.clone()
            },
            figures: operations::of_follower(&self.figures, &self.history),
            past: self.past.clone(),
            reloads: self.reloads.clone(),
        });
    }

    /// No host leads.
    pub(super) fn waits(&self) {
        self.does_not_lead(Arc::new(|| Some(NO_LEADER)), None, NO_LEADER);
    }

    pub(super) fn broker(&self) -> Option<Broker> {
        self.role.borrow().broker().cloned()
    }

    /// Whether this host, while it leads, reaches the log.
    pub(super) fn reaches_log(&self) -> bool {
        let present = self.present.borrow();
        let undecided = (present.as_ref()).map(|it| it.log.leader().undecided_for());
        undecided.is_some_and(|it| it < limits::CLUSTER_UNDECIDED_MAX)
    }

    /// The clocks of this host, while it leads.
    pub(super) fn times(&self) -> Option<Times> {
        let present = self.present.borrow();
        let store_ms = present.as_ref()?.server.now_ms();
        Some(Times {
            store_ms,
            wall_ms: wall_ms(),
        })
    }

    /// One line for the service manager.
    pub(super) fn status(&self) -> String {
        match &*self.present.borrow() {
            Some(present) => service_manager::figures(&present.server),
            None => "following".to_owned(),
        }
    }

    /// Ends a leadership, so that this host or any other takes over without waiting for a lease.
    pub(super) async fn hand_over(&self, to: Option<&str>) {
        let Some(present) = self.present.borrow().clone() else {
            return;
        };
        lead_no_more(&self.role);
        drain(&present.server, &present.broker).await;
        present.broker.shutdown(limits::CLUSTER_LEAVING_GRACE).await;
        present.tasks.abort();
        present.server.stop();
        present.log.leader().hand_over(to);
        let mut ended = self.present.subscribe();
        let ended = ended.wait_for(Option::is_none);
        if (tokio::time::timeout(limits::CLUSTER_HANDOVER_WAIT, ended).await).is_err() {
            tracing::warn!(
                "the log could not be handed over in time: other hosts wait for the lease of this one"
            );
        }
    }
}

/// Lets new connections wait if this host leads. If another host has taken over since, their way
/// to it stays: nothing would say again which host that is.
fn lead_no_more(role: &watch::Sender<Role>) {
    role.send_if_modified(|role| {
        let leads = role.broker().is_some();
        if leads {
            *role = Role::Waiting;
        }
        leads
    });
}

impl Tasks {
    fn abort(&self) {
        for task in &self.serving {
            task.abort();
        }
    }
}

impl Drop for Tasks {
    fn drop(&mut self) {
        self.abort();
    }
}

#[cfg(test)]
mod tests {
    use statehouse_mqtt::{NoService, Options};

    use super::*;

    /// Regression: clients of a host that was replaced during its handover waited for ever.
    #[test]
    fn handover_after_a_takeover_keeps_the_way_to_the_leader() {
        let broker = Broker::new(Options::default(), Arc::new(NoService));
        let role = watch::Sender::new(Role::Leading(broker));
        lead_no_more(&role);
        assert!(matches!(*role.borrow(), Role::Waiting));
        role.send_replace(Role::Following {
            leader: "gw2".to_owned(),
            address: "gw2:7000".to_owned(),
        });
        lead_no_more(&role);
        assert!(matches!(*role.borrow(), Role::Following { .. }));
    }
}
