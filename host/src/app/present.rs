//! The store of the present leadership, as the parts that live longer see it.

use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use statehouse_mqtt::Broker;
use tokio::sync::{Notify, watch};
use tokio::task::AbortHandle;

use super::administration::Deliveries;
use super::clients::drain;
use super::service_manager;
use crate::admin::Subject;
use crate::cluster::log::ClusterLog;
use crate::front::Role;
use crate::limits;
use crate::server::Server;

/// What all parts may ask and change.
pub(super) struct Shared {
    /// The last record that this host applied, or that is durable while it leads.
    pub(super) position: Arc<AtomicU64>,
    /// The last record of this host's copy of the log, or 0 if it keeps none.
    pub(super) history: Arc<AtomicU64>,
    /// Notified when a policy has arrived that this host lacked.
    pub(super) arrived: Arc<Notify>,
    pub(super) present: watch::Sender<Option<Present>>,
    pub(super) role: watch::Sender<Role>,
    pub(super) subject: watch::Sender<Subject>,
}

/// The store of the present leadership.
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
    pub(super) _deliveries: Deliveries,
}

impl Default for Shared {
    fn default() -> Self {
        Self {
            position: Arc::default(),
            history: Arc::default(),
            arrived: Arc::default(),
            present: watch::Sender::new(None),
            role: watch::Sender::new(Role::Waiting),
            subject: watch::Sender::new(no_leader("this host is joining the cluster")),
        }
    }
}

/// What the admin API says while there is no leader.
pub(super) fn no_leader(why: &'static str) -> Subject {
    Subject::Follower {
        impediment: Some(why),
        leader: why.into(),
        epoch: 0,
        position: Arc::default(),
        history: Arc::default(),
    }
}

impl Shared {
    pub(super) fn broker(&self) -> Option<Broker> {
        self.role.borrow().broker().cloned()
    }

    /// Whether this host, while it leads, reaches the log.
    pub(super) fn reaches_log(&self) -> bool {
        let present = self.present.borrow();
        let undecided = (present.as_ref()).map(|it| it.log.undecided_for());
        undecided.is_some_and(|it| it < limits::CLUSTER_UNDECIDED_MAX)
    }

    /// One line for the service manager.
    pub(super) fn status(&self) -> String {
        match &*self.present.borrow() {
            Some(present) => service_manager::figures(&present.server),
            None => "following".to_owned(),
        }
    }

    /// Ends a leadership, so that another host takes over without waiting for a lease.
    pub(super) async fn hand_over(&self) {
        let Some(present) = self.present.borrow().clone() else {
            return;
        };
        self.role.send_replace(Role::Waiting);
        drain(&present.server, &present.broker).await;
        present.broker.shutdown(limits::CLUSTER_LEAVING_GRACE).await;
        present.tasks.abort();
        present.server.stop();
        present.log.hand_over();
        let mut ended = self.present.subscribe();
        let ended = ended.wait_for(Option::is_none);
        if (tokio::time::timeout(limits::CLUSTER_HANDOVER_WAIT, ended).await).is_err() {
            tracing::warn!(
                "the log could not be handed over in time: other hosts wait for the lease of this one"
            );
        }
    }
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
