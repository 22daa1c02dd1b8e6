//! The ways to deliver policies to a store that `serve` runs: the admin API, the watched directory,
//! signed orders over MQTT.
//!
//! A store must still serve its clients if the admin API fails to write its file.

use std::path::PathBuf;
use std::sync::Arc;

use anyhow::Context;
use tokio::sync::watch;
use tokio::task::{JoinHandle, JoinSet};

use super::check;
use crate::admin::{
    Admin, Endpoint, Overviews, SESSION_PREFIX, Subject, is_bearer_token, new_token,
};
use crate::policies::delivery::{DropDirectory, Gate, PolicyOrders};
use statehouse_access::AccessControl;
use statehouse_access::audit::Audit;
use statehouse_config::{
    ADMIN_TOKEN, AdminPlace, AdminTls, Config, DropAction, Durability, TlsFiles, TransportChoice,
    limits,
};
use statehouse_files::watch::{Reloads, Watched};
use statehouse_listener::{Certificates, dates};
use statehouse_mqtt::Broker;

/// Why addresses cannot be used: an error of its own, or the context of an error of the system.
#[derive(Debug, thiserror::Error)]
pub(super) enum CannotListen {
    /// Two of them overlap.
    #[error("{0} and {1} are the same address: choose another port for one of them")]
    Overlap(String, String),
    /// The admin API at this place.
    #[error("the admin API cannot listen on {0}: choose another address with --admin, or `off`")]
    Admin(String),
    /// The metrics at this place.
    #[error("metrics cannot be served at {0}: choose another address with --metrics")]
    Metrics(String),
}

/// The admin API before it runs, and the watched directory.
pub(super) struct Administration {
    local: Option<Admin>,
    tls: Option<Remote>,
    /// The listener for metrics alone.
    metrics: Option<Admin>,
    /// The data directory, for the file `admin`.
    data: Option<PathBuf>,
    drop: Option<(PathBuf, DropAction)>,
}

/// The admin API for other machines.
struct Remote {
    admin: Admin,
    certificates: Arc<Watched<Certificates>>,
    /// The files, if no listeners of clients warn of their problems at each change.
    warns_of: Option<TlsFiles>,
}

pub(super) struct Running {
    tasks: Vec<JoinHandle<()>>,
    /// The data directory with the file `admin` of this run.
    published_in: Option<PathBuf>,
}

impl Administration {
    /// Binds the addresses and checks the watched directory. Runs within a runtime. Fails with
    /// [`CannotListen`], also as context, if an address cannot be bound.
    pub(super) fn open(config: &Config, access: &Arc<AccessControl>) -> anyhow::Result<Self> {
        check_drop_directory(config)?;
        let token = token_of(config)?;
        Self::bind(config, access, token).map_err(|error| check::cannot_bind(config, error))
    }

    fn bind(
        config: &Config,
        access: &Arc<AccessControl>,
        token: Option<String>,
    ) -> anyhow::Result<Self> {
        Ok(Self {
            local: open(config, token.clone())?,
            tls: (config.admin_tls.as_ref())
                .map(|tls| Remote::open(config, tls, token, access))
                .transpose()?,
            metrics: open_for_metrics(config)?,
            data: keeps(config).then(|| config.storage.directory.clone()),
            drop: config.policy_drop.clone(),
        })
    }

    /// Everything but the addresses that makes [`Administration::open`] fail.
    pub(super) fn check(config: &Config) -> Vec<anyhow::Error> {
        let checks = [check_drop_directory(config), token_of(config).map(drop)];
        checks.into_iter().filter_map(Result::err).collect()
    }

    /// Starts the deliveries to one store, until the result is dropped. Orders over MQTT arrive only
    /// through the embedded broker.
    pub(super) fn deliver(
        &self,
        gate: &Arc<Gate>,
        orders: &Arc<PolicyOrders>,
        broker: Option<Broker>,
    ) -> JoinSet<()> {
        let mut tasks = JoinSet::new();
        if let Some((directory, action)) = self.drop.clone() {
            let drop = DropDirectory::new(directory, action, gate.clone());
            tasks.spawn(drop.run());
        }
        if let Some(broker) = broker {
            tasks.spawn(orders.clone().run(broker));
        }
        tasks
    }

    /// Reloads the certificates of the admin API. Must be called before it starts.
    pub(super) fn reload_with(&self, reloads: &mut Reloads) {
        if let Some(remote) = &self.tls {
            let warns_of = remote.warns_of.clone();
            reloads.add(&remote.certificates, move || {
                warns_of.iter().for_each(dates::warn_of_files);
            });
        }
    }

    /// Starts the admin API, which reports on the present subject.
    pub(super) fn start(
        &mut self,
        subject: &watch::Sender<Subject>,
        audit: &Arc<Audit>,
    ) -> Running {
        let endpoint = self.local.as_ref().map(Admin::endpoint);
        let published_in = endpoint.and_then(|endpoint| {
            self.data.take().filter(|data| match endpoint.write(data) {
                Ok(()) => true,
                Err(error) => {
                    tracing::error!(%error, "the file `admin` cannot be written, so commands cannot find this store");
                    false
                }
            })
        });
        let mut tasks = Vec::new();
        // All listeners share the overviews, so that they are computed once.
        let overviews = Overviews::new(subject.subscribe());
        let mut run = |admin: Admin| {
            let running = admin.run(subject.subscribe(), overviews.clone(), audit.clone());
            tasks.push(tokio::spawn(running));
        };
        if let Some(metrics) = self.metrics.take() {
            tracing::info!("metrics are at {}/metrics", metrics.endpoint().url);
            run(metrics);
        }
        let remote = self.tls.take().map(|it| it.admin);
        for admin in self.local.take().into_iter().chain(remote) {
            tracing::info!("the admin API listens on {}", admin.endpoint().url);
            run(admin);
        }
        Running {
            tasks,
            published_in,
        }
    }
}

impl Remote {
    fn open(
        config: &Config,
        tls: &AdminTls,
        token: Option<String>,
        access: &Arc<AccessControl>,
    ) -> anyhow::Result<Self> {
        let AdminTls { address, files } = tls.clone();
        let is_alone = matches!(config.transport, TransportChoice::Foreign(_));
        let warns_of = is_alone.then(|| files.clone());
        let all = files.all();
        let load = move || Certificates::load(&files);
        let certificates = Watched::open("certificates of the admin API", all, load)?;
        let admin = Admin::bind_tls(address, certificates.clone(), token, access.clone());
        let admin = admin.with_context(|| CannotListen::Admin(format!("https://{address}")))?;
        Ok(Self {
            admin,
            certificates,
            warns_of,
        })
    }
}

fn open(config: &Config, token: Option<String>) -> anyhow::Result<Option<Admin>> {
    let Some(place) = &config.admin else {
        return Ok(None);
    };
    let token = match place {
        AdminPlace::Unix(_) => {
            if std::env::var_os(ADMIN_TOKEN).is_some() && config.admin_tls.is_none() {
                tracing::warn!(
                    "{ADMIN_TOKEN} is set but not used: every account that may open the socket {place} is admitted without it"
                );
            }
            None
        }
        AdminPlace::Tcp(_) if token.is_none() => {
            tracing::info!(
                "the admin API is off on this machine: a store in memory has no data directory for a token. Set one in {ADMIN_TOKEN}, or use a socket (--admin unix:PATH), which needs none"
            );
            return Ok(None);
        }
        AdminPlace::Tcp(_) => token,
    };
    let admin = Admin::bind(place, token);
    let admin = admin.with_context(|| CannotListen::Admin(place.to_string()))?;
    Ok(Some(admin))
}

fn open_for_metrics(config: &Config) -> anyhow::Result<Option<Admin>> {
    let bind = |place: &AdminPlace| {
        let bound = Admin::bind_for_metrics(place);
        bound.with_context(|| CannotListen::Metrics(place.to_string()))
    };
    config.metrics.as_ref().map(bind).transpose()
}

/// Whether there is a data directory.
fn keeps(config: &Config) -> bool {
    config.storage.durability != Durability::Memory
}

fn check_drop_directory(config: &Config) -> anyhow::Result<()> {
    if let Some((directory, _)) = &config.policy_drop {
        anyhow::ensure!(
            directory.is_dir(),
            "the drop directory {} does not exist or is not a directory: create it, or name another with --policy-drop",
            directory.display()
        );
    }
    Ok(())
}

/// The token of the settings, if a listener uses one.
fn token_of(config: &Config) -> anyhow::Result<Option<String>> {
    match (&config.admin, &config.admin_tls) {
        (Some(AdminPlace::Tcp(_)), _) | (_, Some(_)) => token(keeps(config)),
        _ => Ok(None),
    }
}

/// The token for TCP; none if no client could learn it.
fn token(keeps: bool) -> anyhow::Result<Option<String>> {
    let Some(token) = std::env::var_os(ADMIN_TOKEN) else {
        return keeps.then(new_token).transpose().map_err(Into::into);
    };
    anyhow::ensure!(
        token.len() >= limits::ADMIN_TOKEN_BYTES_MIN,
        "{ADMIN_TOKEN} has {} bytes, but a token needs at least {}, since a shorter one can be guessed",
        token.len(),
        limits::ADMIN_TOKEN_BYTES_MIN
    );
    let token = token.into_string().ok();
    // Otherwise it would be taken for the token of a session.
    let token = token.filter(|it| is_bearer_token(it) && !it.starts_with(SESSION_PREFIX));
    token.map(Some).with_context(|| {
        format!("{ADMIN_TOKEN} must be printable ASCII without a space at either end, since clients send it in an HTTP header, and must not begin with `{SESSION_PREFIX}`, as the tokens of sessions do")
    })
}

impl Running {
    /// Removes the file `admin`, so that commands report at once that no store runs, and then stops
    /// the admin API. In the other order, commands would find an address that nothing listens on.
    pub(super) fn stop(self) {
        if let Some(data) = self.published_in
            && let Err(error) = Endpoint::remove(&data)
        {
            tracing::warn!(%error, "the file `admin` cannot be removed");
        }
        for task in self.tasks {
            task.abort();
        }
    }
}
