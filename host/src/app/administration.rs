//! The ways to deliver policies to a store that `serve` runs: the admin API, the watched directory,
//! signed orders over MQTT.
//!
//! A store must still serve its clients if the admin API fails to write its file.

use std::path::PathBuf;
use std::sync::Arc;

use anyhow::Context;
use tokio::task::JoinHandle;

use crate::admin::{Admin, Endpoint, Sources, new_token};
use crate::config::{ADMIN_TOKEN, AdminPlace, Config, Durability};
use crate::limits;
use crate::policies::delivery::{DropDirectory, Gate, PolicyOrders};

/// The parts before they run.
pub(super) struct Administration {
    admin: Option<Admin>,
    /// The data directory, for the file `admin`.
    data: Option<PathBuf>,
    drop: Option<DropDirectory>,
    gate: Arc<Gate>,
    orders: Arc<PolicyOrders>,
}

/// The running parts.
pub(super) struct Running {
    tasks: Vec<JoinHandle<()>>,
    /// The data directory with the file `admin` of this run.
    published_in: Option<PathBuf>,
}

impl Administration {
    /// Binds the address and checks the watched directory. Runs within a runtime.
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
                "the drop directory {} does not exist or is not a directory: create it, or name another with --policy-drop",
                directory.display()
            );
            Ok(DropDirectory::new(directory.clone(), *action, gate.clone()))
        });
        Ok(Self {
            admin: open(config, data.is_some())?,
            data,
            drop: drop.transpose()?,
            gate,
            orders,
        })
    }

    /// Starts all parts. Orders over MQTT arrive only through the embedded broker.
    pub(super) fn start(self, sources: Sources) -> Running {
        let broker = sources.broker.clone();
        let mut tasks = Vec::new();
        let mut published_in = None;
        if let Some(admin) = self.admin {
            let endpoint = admin.endpoint();
            if let Some(data) = self.data {
                match endpoint.write(&data) {
                    Ok(()) => published_in = Some(data),
                    Err(error) => {
                        tracing::error!(%error, "the file `admin` cannot be written, so commands cannot find this store");
                    }
                }
            }
            tracing::info!("the administration listens on {}", endpoint.url);
            tasks.push(tokio::spawn(admin.run(self.gate, sources)));
        }
        if let Some(drop) = self.drop {
            tasks.push(tokio::spawn(drop.run()));
        }
        if let Some(broker) = broker {
            tasks.push(tokio::spawn(self.orders.run(broker)));
        }
        Running {
            tasks,
            published_in,
        }
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
                    "{ADMIN_TOKEN} is set but not used: every account that may open the socket {place} is admitted without it"
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
            "the admin API cannot listen on {place}: choose another address with --admin, or `off`"
        )
    })?;
    Ok(Some(admin))
}

/// The token for TCP; none if no client could learn it.
fn token(keeps: bool) -> anyhow::Result<Option<String>> {
    match std::env::var(ADMIN_TOKEN) {
        Ok(token) => {
            anyhow::ensure!(
                token.len() >= limits::ADMIN_TOKEN_BYTES_MIN,
                "{ADMIN_TOKEN} has {} bytes, but a token needs at least {}, since a shorter one can be guessed",
                token.len(),
                limits::ADMIN_TOKEN_BYTES_MIN
            );
            Ok(Some(token))
        }
        Err(_) if keeps => Ok(Some(new_token()?)),
        Err(_) => {
            tracing::info!(
                "the administration is off: a store in memory has no data directory for a token. Set one in {ADMIN_TOKEN}, or use a socket (--admin unix:PATH), which needs none"
            );
            Ok(None)
        }
    }
}

impl Running {
    /// Stops all parts and removes the file `admin`, so that commands report at once that no store
    /// runs.
    pub(super) fn stop(self) {
        for task in self.tasks {
            task.abort();
        }
        if let Some(data) = self.published_in
            && let Err(error) = Endpoint::remove(&data)
        {
            tracing::warn!(%error, "the file `admin` cannot be removed");
        }
    }
}
