//! The role of this host, which the front follows.

use statehouse_mqtt::Broker;
use tokio::sync::watch;

/// What this host does for clients at present.
///
/// The log of the cluster decides it. The sender must set another role before it shuts the broker
/// of a leadership down, or else clients that connect in between are closed instead of waiting.
#[derive(Clone)]
pub enum Role {
    /// This host leads, and this broker serves.
    Leading(Broker),
    /// Another host leads.
    Following {
        /// The name of the leader.
        leader: String,
        /// The cluster port of the leader: HOST:PORT.
        address: String,
    },
    /// No leader is known. New connections wait.
    Waiting,
}

impl Role {
    /// The broker, if this host leads.
    #[must_use]
    pub fn broker(&self) -> Option<&Broker> {
        match self {
            Self::Leading(broker) => Some(broker),
            Self::Following { .. } | Self::Waiting => None,
        }
    }
}

/// Another host that leads.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Leader {
    pub(super) name: String,
    pub(super) address: String,
}

impl Leader {
    /// The leader that a role names.
    pub(super) fn of(role: &Role) -> Option<Self> {
        match role {
            Role::Following { leader, address } => Some(Self {
                name: leader.clone(),
                address: address.clone(),
            }),
            Role::Leading(_) | Role::Waiting => None,
        }
    }

    /// Waits for a leader. None if the role has ended: its sender is dropped.
    pub(super) async fn wait(role: &mut watch::Receiver<Role>) -> Option<Self> {
        let named = role.wait_for(|role| matches!(role, Role::Following { .. }));
        named.await.ok().and_then(|role| Self::of(&role))
    }

    /// Waits until another host leads, or the role has ended. If no leader is known, this one may
    /// still serve its clients.
    pub(super) async fn replaced(&self, role: &mut watch::Receiver<Role>) {
        let replaced = role.wait_for(|role| match role {
            Role::Leading(_) => true,
            Role::Following { leader, address } => (leader, address) != (&self.name, &self.address),
            Role::Waiting => false,
        });
        _ = replaced.await;
    }
}
