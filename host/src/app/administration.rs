//! The ways to deliver policies to a store that `serve` runs: the admin API, the watched directory,
//! signed orders over MQTT.
//!
//! A store must still serve its clients if the admin API fails to write its file.

use std::path::PathBuf;
use std::sync::Arc;

use anyhow::Context;
use tokio::sync::watch;
use tokio::task::JoinHandle;

use crate::admin::{Admin, Endpoint, Subject, new_token};
use crate::config::{ADMIN_TOKEN, AdminPlace, Config, DropAction, Durability};
use crate::limits;
use crate::policies::delivery::{DropDirectory, Gate, PolicyOrders};
use statehouse_access::audit::Audit;
use statehouse_mqtt::Broker;

/// The admin API before it runs, and the watched directory.
pub(super) struct Administration {
    admin: Option<Admin>,
    /// The listener for metrics alone.
    metrics: Option<Admin>,
    /// The data directory, for the file `admin`.
    data: Option<PathBuf>,
    drop: Option<(PathBuf, DropAction)>,
}

/// The running listeners.
pub(super) struct Running {
    tasks: Vec<JoinHandle<()>>,
    /// The data directory with the file `admin` of this run.
    published_in: Option<PathBuf>,
}

/// The ways to deliver policies to one store, until this is dropped.
pub(super) struct Deliveries {
    tasks: Vec<JoinHandle<()>>,
}

impl Administration {
    /// Binds the address and checks the watched directory. Runs within a runtime.
    pub(super) fn open(config: &Config) -> anyhow::Result<Self> {
        let keeps = config.storage.durability != Durability::Memory;
        let data = keeps.then(|| config.storage.directory.clone());
        if let Some((directory, _)) = &config.policy_drop {
            anyhow::ensure!(
                directory.is_dir(),
                "the drop directory {} does not exist or is not a directory: create it, or name another with --policy-drop",
                directory.display()
            );
        }
        Ok(Self {
            admin: open(config, data.is_some())?,
            metrics: open_for_metrics(config)?,
            data,
            drop: config.policy_drop.clone(),
        })
    }

    /// Starts the deliveries to one store. Orders over MQTT arrive only through the embedded
    /// broker.
    pub(super) fn deliver(
        &self,
        gate: &Arc<Gate>,
        orders: &Arc<PolicyOrders>,
        broker: Option<Broker>,
    ) -> Deliveries {
        let mut tasks = Vec::new();
        if let Some((directory, action)) = self.drop.clone() {
            let drop = DropDirectory::new(directory, action, gate.clone());
            tasks.push(tokio::spawn(drop.run()));
        }
        if let Some(broker) = broker {
            tasks.push(tokio::spawn(orders.clone().run(broker)));
        }
        Deliveries { tasks }
    }

    /// Starts the admin API, which reports on the present subject.
    pub(super) fn start(
        &mut self,
        subject: watch::Receiver<Subject>,
        audit: Arc<Audit>,
    ) -> Running {
        let mut tasks = Vec::new();
        if let Some(metrics) = self.metrics.take() {
            tracing::info!("metrics are at {}/metrics", metrics.endpoint().url);
            tasks.push(tokio::spawn(metrics.run(subject.clone(), audit.clone())));
        }
        let Some(admin) = self.admin.take() else {
            return Running {
                tasks,
                published_in: None,
            };
        };
        let endpoint = admin.endpoint();
        let published_in = self.data.take().filter(|data| match endpoint.write(data) {
            Ok(()) => true,
            Err(error) => {
                tracing::error!(%error, "the file `admin` cannot be written, so commands cannot find this store");
                false
            }
        });
        tracing::info!("the administration listens on {}", endpoint.url);
        tasks.push(tokio::spawn(admin.run(subject, audit)));
        Running {
            tasks,
            published_in,
        }
    }
}

impl Drop for Deliveries {
    fn drop(&mut self) {
        for task in &self.tasks {
            task.abort();
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

fn open_for_metrics(config: &Config) -> anyhow::Result<Option<Admin>> {
    let Some(place) = &config.metrics else {
        return Ok(None);
    };
    let bound = Admin::bind_for_metrics(place).with_context(|| {
        format!("metrics cannot be served at {place}: choose another address with --metrics")
    })?;
    Ok(Some(bound))
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
    /// Stops the admin API and removes the file `admin`, so that commands report at once that no
    /// store runs.
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
