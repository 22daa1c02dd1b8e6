//! Runs this host as a member of a cluster, until a signal or an error that a repetition does not
//! heal.
//!
//! The listeners, the admin API and the followed files live as long as the process. The store, its
//! broker and the deliveries of its policies live as long as one leadership: [`Host`] builds and
//! ends them.

use std::net::TcpListener;
use std::sync::Arc;

use anyhow::Context;
use statehouse_cluster::{Malformed, Member, Stop};
use statehouse_precompiled::Modules;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::watch;
use tokio::task::JoinHandle;

use super::Failure;
use super::administration::{Administration, Running};
use super::check;
use super::clients::PreparedTransport;
use super::host::Host;
use super::join::{Joined, connect, join, too_old};
use super::present::Shared;
use super::serve::print;
use super::service_manager::{self, PINGS, Pings};
use super::signals::Signals;
use super::start::{apply, data_directory_of, engine_with_standard, recheck_clients, start_traces};
use crate::cluster::clock_offset::LeaderClock;
use crate::cluster::history::{self, History};
use crate::cluster::modules::Wanted;
use crate::cluster::replica::Replica;
use crate::policies::delivery::Trust;
use statehouse_access::AccessControl;
use statehouse_access::audit::Audit;
use statehouse_config::{
    ClusterConfig, Config, Followed, Storage, connections_for_open_files, limits,
};
use statehouse_files::watch::Reloads;
use statehouse_listener::{
    Listeners,
    front::{Front, FrontOptions, Role},
};
use statehouse_server::{EXIT_STATE_LOST, logging};

/// Exit code of a host whose cluster has a log that contradicts itself (EX_DATAERR of sysexits.h).
const EXIT_LOG_DAMAGED: u8 = 65;

/// Exit code of a host that is too old for its cluster (EX_CONFIG of sysexits.h).
pub(super) const EXIT_CLUSTER_SETTINGS: u8 = 78;

/// The sockets, which are bound before anything else is done.
pub(super) struct Sockets {
    pub(super) listeners: Listeners,
    /// For the other hosts of the cluster.
    pub(super) port: TcpListener,
}

impl Sockets {
    pub(super) fn bind(
        transport: PreparedTransport,
        config: &Config,
        cluster: &ClusterConfig,
    ) -> Result<Self, Failure> {
        let PreparedTransport::Listening(listeners) = transport else {
            return Err(Failure::Usage(
                "a host of a cluster has no foreign broker: this is a bug".to_owned(),
            ));
        };
        let address = cluster.listen;
        let port = TcpListener::bind(address).map_err(|error| {
            let text = format!(
                "cannot listen on {address} for the other hosts of the cluster: {error}. Name another address with --cluster-listen"
            );
            let error = anyhow::Error::from(error).context(text);
            // Without the causes, which the text contains.
            Failure::Transport(check::cannot_bind(config, error).to_string())
        })?;
        Ok(Self { listeners, port })
    }
}

pub(super) async fn serve(
    config: Config,
    cluster: ClusterConfig,
    followed: Followed,
    sockets: Sockets,
    signals: &Signals,
) -> Result<(), Failure> {
    signals.take_over();
    let pings = Pings::start().context(PINGS).map_err(Failure::transport)?;
    let joined = tokio::select! {
        joined = join(&config, &cluster, &sockets.port) => joined?,
        signal = signals.wait() => {
            tracing::info!("{signal}: stopping");
            return Ok(());
        }
    };
    let options = joined.options.clone();
    let member = Member::new(joined.engine.clone(), joined.clock.clone(), options);
    let member = Arc::new(member.map_err(Failure::Usage)?);
    let shared = Arc::new(Shared::new(
        member.figures(),
        &cluster,
        data_directory_of(&config),
    ));
    let (host, mut tasks, running) = open(
        config,
        cluster.clone(),
        followed,
        &joined,
        &sockets,
        &shared,
    )
    .map_err(Failure::usage)?;
    drop(pings);

    let accepts_clock = host.config.storage.accept_clock;
    // A client of another host's store takes two sockets here.
    let half = connections_for_open_files().map_or(usize::MAX, |most| most.div_ceil(2));
    let bounds = (
        host.followed.clone(),
        host.config.bounds.broker.connections_max,
    );
    let connections_max = move || match &bounds {
        (Some(followed), _) => followed.current().broker.connections_max.min(half),
        (None, at_start) => half.min(*at_start),
    };
    let (audit, traces) = (host.audit.clone(), host.traces.clone());
    let mut history = Keeper::start(&host.config.storage, &cluster, &joined, &member, &shared)
        .map_err(Failure::usage)?;
    let offset = Arc::<LeaderClock>::default();
    let options = FrontOptions {
        host: cluster.host.parse().map_err(Failure::Usage)?,
        secret: joined.secret,
        connections_max: Arc::new(connections_max),
        suspect: {
            let member = member.clone();
            Arc::new(move || member.suspect())
        },
        reaches_log: {
            let shared = shared.clone();
            Arc::new(move || shared.reaches_log())
        },
        times: {
            let shared = shared.clone();
            Arc::new(move || shared.times())
        },
        compare: {
            let offset = offset.clone();
            Arc::new(move |times| offset.compare(times))
        },
        links: shared.links.clone(),
    };
    let Sockets { listeners, port } = sockets;
    print(&[format!("statehouse {}", env!("CARGO_PKG_VERSION"))]);
    let role = shared.role.subscribe();
    for opened in Front::open(listeners, port, role, audit, options)? {
        print(&[opened.line]);
        tasks.push(tokio::spawn(opened.accepting));
    }
    tasks.push(tokio::spawn(announce(shared.role.subscribe())));
    tasks.push(tokio::spawn({
        let (member, arrived) = (member.clone(), shared.arrived.clone());
        async move {
            loop {
                arrived.notified().await;
                member.describe_again();
            }
        }
    }));
    let mut replica = Replica::new(host, accepts_clock, offset);
    let mut running_member = tokio::spawn(async move { member.run(&mut replica).await });
    let served = tokio::select! {
        signal = signals.wait() => {
            tracing::info!("{signal}: stopping");
            Ok(())
        }
        ended = &mut running_member => Err(stopped(ended, &joined).await),
        stop = history.ended() => Err(failure(&stop)),
    };
    service_manager::stopping();
    running.stop();
    // A member that has stopped leads no more.
    if !running_member.is_finished() {
        shared.hand_over(None).await;
    }
    running_member.abort();
    history.stop().await;
    for task in tasks {
        task.abort();
    }
    if let Some(traces) = traces {
        traces.stop().await;
    }
    served
}

/// The task that keeps the history of this host.
struct Keeper {
    stops: watch::Sender<bool>,
    task: JoinHandle<Option<Stop>>,
}

impl Keeper {
    fn start(
        storage: &Storage,
        cluster: &ClusterConfig,
        joined: &Joined,
        member: &Arc<Member>,
        shared: &Shared,
    ) -> anyhow::Result<Self> {
        let history = History {
            directory: storage.directory.clone(),
            options: history::options(storage),
            engine: Arc::new(connect(&cluster.etcd)?.of_same_cluster(&joined.engine)),
            clock: joined.clock.clone(),
            member_options: joined.options.clone(),
            cluster: joined.cluster,
            position: shared.history.clone(),
        };
        let stops = watch::Sender::new(false);
        let task = tokio::spawn(history.keep(member.clone(), stops.subscribe()));
        Ok(Self { stops, task })
    }

    /// Waits until the host must stop because of its history.
    async fn ended(&mut self) -> Stop {
        match (&mut self.task).await {
            Ok(Some(stop)) => stop,
            Ok(None) => std::future::pending().await,
            Err(error) => {
                tracing::error!(%error, "the history of this host ended: this is a bug");
                std::future::pending().await
            }
        }
    }

    async fn stop(self) {
        if self.task.is_finished() {
            return;
        }
        self.stops.send_replace(true);
        let ended = tokio::time::timeout(limits::CLUSTER_HISTORY_CLOSE, self.task).await;
        if ended.is_err() {
            tracing::warn!("the disk of the history is slow: its last records may be missing");
        }
    }
}

/// Reports once that clients can connect. A service manager must not wait for a leader.
async fn announce(mut role: watch::Receiver<Role>) {
    service_manager::ready("no leader of the cluster is known yet");
    let known = role.wait_for(|role| !matches!(role, Role::Waiting)).await;
    if known.is_ok() {
        drop(known);
        print(&["ready".to_owned()]);
        service_manager::ready("clients can connect");
    }
}

/// Why a member does not take part any more.
async fn stopped(
    ended: Result<Result<std::convert::Infallible, Stop>, tokio::task::JoinError>,
    joined: &Joined,
) -> Failure {
    match ended {
        Ok(Err(stop @ Stop::Head(Malformed::LaterFormat { .. }))) => {
            too_old(&stop, &joined.access).await
        }
        Ok(Err(stop)) => failure(&stop),
        Ok(Ok(never)) => match never {},
        Err(error) => {
            tracing::error!(%error, "the member of the cluster panicked; stopping, since its state is lost");
            logging::exit(EXIT_STATE_LOST)
        }
    }
}

/// Why a host stops, for the operator.
pub(super) fn failure(stop: &Stop) -> Failure {
    Failure::Cluster {
        code: match stop {
            Stop::NotCreated(_) => EXIT_CLUSTER_SETTINGS,
            _ => EXIT_LOG_DAMAGED,
        },
        message: stop.to_string(),
    }
}

/// Opens the parts that live as long as the process.
fn open(
    config: Config,
    cluster: ClusterConfig,
    followed: Followed,
    joined: &Joined,
    sockets: &Sockets,
    shared: &Arc<Shared>,
) -> anyhow::Result<(Host, Vec<JoinHandle<()>>, Running)> {
    let trust = Trust::new(&config.trusted_keys, config.allow_unsigned)?;
    let audit = Arc::new(Audit::default());
    let access = Arc::new(AccessControl::open(&config.access, audit.clone())?);
    let (engine, standard) = engine_with_standard(Some(&config.storage.directory))?;
    let traces = start_traces(&config, &cluster.host)?;
    let modules = Modules::of(&config.storage.directory);
    let shared_modules = joined.modules.clone();
    let (wanted, fetching) = Wanted::begin(
        modules.clone(),
        shared_modules.clone(),
        engine.clone(),
        standard.digest,
        shared.arrived.clone(),
    );
    let mut tasks = vec![tokio::spawn(fetching)];
    let mut administration = Administration::open(&config, &access)?;
    let mut reloads = reloads(sockets, &access, &followed, shared);
    check::warn_daily(&config, &mut reloads);
    administration.reload_with(&mut reloads);
    let reloads = Arc::new(reloads);
    _ = shared.reloads.set(Arc::downgrade(&reloads));
    let running = administration.start(&shared.subject, &audit);
    tasks.push(tokio::spawn(
        reloads.clone().run(signal(SignalKind::hangup())?),
    ));
    tasks.push(tokio::spawn(service_manager::watch({
        let shared = shared.clone();
        move || shared.status()
    })));
    let host = Host {
        config: Arc::new(config),
        cluster,
        store: joined.store.clone(),
        followed,
        trust,
        audit,
        access,
        engine,
        standard: Arc::new(standard),
        modules,
        shared_modules,
        cluster_access: joined.access.clone(),
        wanted,
        administration,
        reloads,
        shared: shared.clone(),
        traces,
    };
    Ok((host, tasks, running))
}

/// What happens when files change.
fn reloads(
    sockets: &Sockets,
    access: &Arc<AccessControl>,
    followed: &Followed,
    shared: &Arc<Shared>,
) -> Reloads {
    let mut reloads = Reloads::default();
    sockets.listeners.reload_with(&mut reloads, {
        let shared = shared.clone();
        move || {
            if let Some(broker) = shared.broker() {
                broker.recheck();
            }
        }
    });
    recheck_clients(access, &mut reloads, {
        let shared = shared.clone();
        move || {
            let present = shared.present.borrow();
            present
                .as_ref()
                .map(|it| (it.server.clone(), it.broker.clone()))
        }
    });
    if let Some(bounds) = followed {
        let (shared, current) = (shared.clone(), bounds.clone());
        reloads.add(bounds, move || {
            if let Some(present) = &*shared.present.borrow() {
                apply(&current.current(), &present.server, Some(&present.broker));
            }
        });
    }
    reloads
}
