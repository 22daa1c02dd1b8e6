//! The administration of a store that `serve` runs: the HTTP listener, the watched directory, orders over MQTT.
//!
//! What enters: settings, and the way to load policies. What leaves: tasks, until the store stops. A store whose
//! administration does not come up for want of a file still serves its clients.

use std::path::PathBuf;
use std::sync::Arc;

use anyhow::Context;
use tokio::task::JoinHandle;

use crate::admin::{Admin, Door, Sources, new_token};
use crate::config::{ADMIN_TOKEN, AdminPlace, Config, Durability};
use crate::limits;
use crate::ship::{Drop, Gate, PolicyOrders};

/// What is ready to run.
pub(super) struct Administration {
    admin: Option<Admin>,
    /// Where the file goes that lets commands in.
    data: Option<PathBuf>,
    drop: Option<Drop>,
    gate: Arc<Gate>,
    orders: Arc<PolicyOrders>,
}

/// What runs.
pub(super) struct Running {
    tasks: Vec<JoinHandle<()>>,
    door: Option<PathBuf>,
}

impl Administration {
    /// Takes the address and looks at the directory. Within a runtime.
    pub(super) fn open(
        config: &Config,
        gate: Arc<Gate>,
        orders: Arc<PolicyOrders>,
    ) -> anyhow::Result<Self> {
        let keeps = config.storage.durability != Durability::Memory;
        let data = keeps.then(|| config.storage.directory.clone());
        let drop = config.policy_drop.as_ref().map(|(directory, action)| {
            anyhow::ensure!(
                directory.is_dir(),
                "the drop directory {} is no directory: make it, or name another with --policy-drop",
                directory.display()
            );
            Ok(Drop::new(directory.clone(), *action, gate.clone()))
        });
        Ok(Self {
            admin: open(config, data.is_some())?,
            data,
            drop: drop.transpose()?,
            gate,
            orders,
        })
    }

    /// Runs everything. Orders over MQTT come through the embedded broker only.
    pub(super) fn start(self, sources: Sources) -> Running {
        let broker = sources.broker.clone();
        let mut tasks = Vec::new();
        let mut door = None;
        if let Some(admin) = self.admin {
            let way_in = admin.door();
            if let Some(data) = self.data {
                match way_in.write(&data) {
                    Ok(()) => door = Some(data),
                    Err(error) => {
                        tracing::error!(%error, "the file `admin` cannot be written: commands do not find this store");
                    }
                }
            }
            tracing::info!("the administration listens on {}", way_in.url);
            tasks.push(tokio::spawn(admin.run(self.gate, sources)));
        }
        if let Some(drop) = self.drop {
            tasks.push(tokio::spawn(drop.run()));
        }
        if let Some(broker) = broker {
            tasks.push(tokio::spawn(self.orders.run(broker)));
        }
        Running { tasks, door }
    }
}

fn open(config: &Config, keeps: bool) -> anyhow::Result<Option<Admin>> {
    let Some(place) = &config.admin else {
        return Ok(None);
    };
    let token = match place {
        AdminPlace::Unix(_) => {
            if std::env::var_os(ADMIN_TOKEN).is_some() {
                tracing::warn!(
                    "{ADMIN_TOKEN} is set and not asked for: who may open the socket {place} is let in without it"
                );
            }
            None
        }
        AdminPlace::Tcp(_) => match token(keeps)? {
            Some(token) => Some(token),
            None => return Ok(None),
        },
    };
    let admin = Admin::bind(place, token).with_context(|| {
        format!(
            "the administration cannot listen on {place}: name another place with --admin, or `off`"
        )
    })?;
    Ok(Some(admin))
}

/// What has to be shown over TCP; none where nobody could learn it.
fn token(keeps: bool) -> anyhow::Result<Option<String>> {
    match std::env::var(ADMIN_TOKEN) {
        Ok(token) => {
            anyhow::ensure!(
                token.len() >= limits::ADMIN_TOKEN_BYTES_MIN,
                "{ADMIN_TOKEN} has {} bytes, and a token at least {}: it can be guessed",
                token.len(),
                limits::ADMIN_TOKEN_BYTES_MIN
            );
            Ok(Some(token))
        }
        Err(_) if keeps => Ok(Some(new_token()?)),
        Err(_) => {
            tracing::info!(
                "the administration is off: nothing is kept on disk, so that nobody could read a token there. {ADMIN_TOKEN} gives it one, and a socket (--admin unix:PATH) needs none"
            );
            Ok(None)
        }
    }
}

impl Running {
    /// Ends everything. The file goes, so that commands say at once that no store runs.
    pub(super) fn stop(self) {
        for task in self.tasks {
            task.abort();
        }
        if let Some(data) = self.door
            && let Err(error) = Door::remove(&data)
        {
            tracing::warn!(%error, "the file `admin` cannot be removed");
        }
    }
}
