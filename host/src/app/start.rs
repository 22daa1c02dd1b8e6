//! Recovers the state and connects the parts.

use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use anyhow::Context;
use statehouse_mqtt::{Broker, Lease, Limits, Options, Persistence};
use statehouse_precompiled::Directory;

use super::administration::Administration;
use super::check;
use super::clients::Clients;
use super::serve::print;
use super::service_manager::{self, PINGS, Pings};
use crate::STANDARD_POLICY;
use crate::admin::DataDirectory;
use crate::data_directory::{self, Disk, LogListener, Recovered};
use crate::policies::delivery::{Gate, PolicyOrders, Trust};
use crate::policies::manager::Control;
use crate::policies::startup::{Keeps, Opening};
use statehouse_access::AccessControl;
use statehouse_access::audit::Audit;
use statehouse_config::{
    self, Bounds, Config, Durability, Followed, ForeignConfig, Storage, TransportChoice, limits,
};
use statehouse_core::clock::{Clock, Stamp, SystemSource};
use statehouse_core::log::record::PolicyRecord;
use statehouse_core::log::{Image, Journal, Memory, Recorder};
use statehouse_core::policy::{Engine, Policy, Registry};
use statehouse_core::store::{Key, Store, Transaction};
use statehouse_core::trace::Sampling;
use statehouse_core::{Core, Settings};
use statehouse_files::watch::Reloads;
use statehouse_precompiled::Modules;
use statehouse_protocol::Shown;
use statehouse_server::{EXIT_STATE_LOST, Server, logging, traces::Traces};
use statehouse_transport::embedded::StoreService;

/// A store that is ready to listen.
pub(super) struct Started {
    pub(super) server: Arc<Server>,
    pub(super) clients: Clients,
    pub(super) gate: Arc<Gate>,
    pub(super) orders: Arc<PolicyOrders>,
    pub(super) administration: Administration,
    pub(super) access: Arc<AccessControl>,
    pub(super) audit: Arc<Audit>,
    pub(super) reloads: Reloads,
    /// The data directory, for the admin API.
    pub(super) directory: Option<DataDirectory>,
    /// The durability guarantee, as text.
    pub(super) promise: String,
    /// The log, to close at the end.
    pub(super) disk: Option<Arc<Disk>>,
    /// Of a standby, until [`service_manager::watch`] runs.
    pub(super) pings: Option<Pings>,
    pub(super) traces: Option<Arc<Traces>>,
}

/// Recovers the state and connects the parts. Must run within a runtime. A standby waits for the
/// data directory first.
pub(super) fn start(config: &Config, followed: Followed) -> anyhow::Result<Started> {
    let trust = Trust::new(&config.trusted_keys, config.allow_unsigned)?;
    let audit = Arc::new(Audit::default());
    let access = Arc::new(AccessControl::open(&config.access, audit.clone())?);
    let Prepared {
        administration,
        recovered,
        pings,
    } = Prepared::of(config, &access)?;
    let Data {
        engine,
        modules,
        name,
        state,
        disk,
        listener,
    } = Data::open(config, recovered, &trust)?;
    let log: Arc<dyn Journal> = match &disk {
        Some(disk) => disk.clone(),
        None => Arc::new(Memory),
    };
    let promise = log.promise();
    let modules = disk.is_some().then_some(modules);
    // Before the first record: a service manager repeats a start that fails here without end, and
    // each one that recorded its beginning would add to the log.
    let traces = start_traces(config, &name)?;
    let clock = Clock::resume(Arc::new(SystemSource::default()), state.image.now_ms);
    let serving = Serving::begin(config, &config.bounds, state, log, clock, false);
    let server = serving.server.clone();
    server.set_audit(audit.clone());
    if let Some(traces) = &traces {
        server.set_traces(traces.clone());
    }
    let control = Control::new(server.clone(), engine, modules, None, name.clone());
    let gate = Arc::new(Gate::new(control.clone(), trust));
    let orders = PolicyOrders::new(gate.clone(), audit.clone());

    let mut reloads = Reloads::default();
    check::warn_daily(config, &mut reloads);
    let clients = match &config.transport {
        TransportChoice::Embedded(_) => {
            let limits = config.bounds.broker.clone();
            let log = disk.clone().map(|disk| disk as Arc<dyn Persistence>);
            let broker =
                serving.through_embedded_broker(limits, log, None, orders.clone(), &access);
            recheck_clients(&access, &mut reloads, {
                let store = (server.clone(), broker.clone());
                move || Some(store.clone())
            });
            Clients::Embedded(broker)
        }
        TransportChoice::Foreign(foreign) => {
            serving.through_foreign_broker(foreign, name, &access, &mut reloads)
        }
    };
    listener.attach(server.clone(), clients.broker().cloned());
    if let Some(bounds) = followed {
        let (server, broker) = (server.clone(), clients.broker().cloned());
        reloads.add(&bounds.clone(), move || {
            apply(&bounds.current(), &server, broker.as_ref());
        });
    }
    Ok(Started {
        server,
        clients,
        gate,
        orders,
        administration,
        access,
        audit,
        reloads,
        directory: disk.as_ref().map(|_| data_directory_of(config)),
        promise,
        disk,
        pings,
        traces,
    })
}

/// What a start has before it loads policies.
struct Prepared {
    administration: Administration,
    /// `None` if the store is in memory.
    recovered: Option<Recovered>,
    pings: Option<Pings>,
}

impl Prepared {
    /// Locks the data directory, binds the addresses for operators, and recovers the state.
    fn of(config: &Config, access: &Arc<AccessControl>) -> anyhow::Result<Self> {
        let mut pings = None;
        let locked = match (&config.transport, config.storage.durability) {
            (_, Durability::Memory) => None,
            (TransportChoice::Foreign(foreign), _) if foreign.standby => {
                pings = Pings::start().context(PINGS)?;
                let locked = stand_by(&config.storage)?;
                // A standby may wait for months, and old rules must decide no request.
                let mut files = Reloads::default();
                access.watch(&mut files, || {});
                files.look(false);
                Some(locked)
            }
            _ => Some(data_directory::lock(&config.storage)?),
        };
        // After the lock, since the store for which a standby waits may have the same addresses.
        // Before the log is opened: a service manager repeats a start that fails here without end,
        // and each one would write a segment.
        let administration = Administration::open(config, access)?;
        let recovered = locked.map(|locked| data_directory::recover(&config.storage, locked));
        Ok(Self {
            administration,
            recovered: recovered.transpose()?,
            pings,
        })
    }
}

/// Starts to send traces, if they are on. `instance` is the name of this store among others.
pub(super) fn start_traces(config: &Config, instance: &str) -> anyhow::Result<Option<Arc<Traces>>> {
    let traces = config.traces.as_ref();
    traces.map(|it| Traces::start(it, instance)).transpose()
}

pub(super) fn data_directory_of(config: &Config) -> DataDirectory {
    DataDirectory {
        path: config.storage.directory.clone(),
        node: config.node.clone(),
        copied: None,
    }
}

/// The recovered state, the policies, and the log in use.
struct Data {
    engine: Arc<Engine<Transaction>>,
    modules: Modules,
    name: String,
    state: State,
    disk: Option<Arc<Disk>>,
    listener: LogListener,
}

pub(super) struct State {
    pub(super) registry: Registry<Transaction>,
    /// The policies of the registry, for the log.
    pub(super) named: Vec<PolicyRecord>,
    pub(super) image: Image,
}

impl Data {
    /// Loads the policies of the recovered assignment, and starts the log.
    fn open(
        config: &Config,
        mut recovered: Option<Recovered>,
        trust: &Trust,
    ) -> anyhow::Result<Self> {
        let mode = config.transport.mode();
        let data = recovered.is_some().then_some(&*config.storage.directory);
        let (engine, standard) = engine_with_standard(data)?;
        let standard = Arc::new(standard);
        if let Some(recovered) = &mut recovered {
            tracing::info!("{}", recovered.report());
            recovered.begin(mode);
        }
        let name = store_name(&config.transport, recovered.as_ref())?;
        let modules = Modules::of(&config.storage.directory);
        let mut empty = Image::new(config.storage.duplicates);
        empty.begin(mode);
        let image = recovered.as_ref().map_or(&empty, |it| &it.image);
        let opening = Opening {
            engine: &engine,
            standard: &standard,
            standard_file: STANDARD_POLICY,
            modules: &modules,
            trust,
            keeps: match recovered {
                Some(_) => Keeps::Files,
                None => Keeps::Nothing,
            },
        };
        let (registry, named) = opening.registry(&config.policy, image)?;
        let listener = LogListener::default();
        let (disk, image) = match recovered {
            Some(recovered) => {
                let (disk, image) = recovered
                    .start(&listener)
                    .context("cannot start the write-ahead log's threads")?;
                (Some(disk), image)
            }
            None => (None, empty),
        };
        Ok(Self {
            engine,
            modules,
            name,
            state: State {
                registry,
                named,
                image,
            },
            disk,
            listener,
        })
    }
}

/// The server, and what the transport needs of the recovered state.
pub(super) struct Serving {
    pub(super) server: Arc<Server>,
    run: u32,
    sessions: statehouse_mqtt::Recovery,
    expired: Vec<(Key, Stamp)>,
}

impl Serving {
    /// Begins a run with these limits. Its start is the next record, or the last one of the state
    /// if it `is_recorded`.
    pub(super) fn begin(
        config: &Config,
        bounds: &Bounds,
        state: State,
        log: Arc<dyn Journal>,
        mut clock: Clock,
        is_recorded: bool,
    ) -> Self {
        let mode = config.transport.mode();
        let State {
            registry,
            named,
            image,
        } = state;
        let expired = image.ends();
        let recorder = Recorder::new(log, image.policies, image.active);
        let quota = bounds.quota;
        let mut store = Store::restore(registry, quota, image.state, image.duplicates);
        *store.supervision() = bounds.supervision;
        let settings = Settings {
            node: config.node.clone(),
            dialect: config.dialect,
            policy_property: config.policy_property,
            traces: (config.traces.as_ref())
                .map(|it| Sampling::new(it.sample, || fastrand::u64(..), Instant::now)),
        };
        let run = image.run + u32::from(!is_recorded);
        let mut core = Core::new(store, recorder, run, settings);
        let now_ms = clock.read().now_ms;
        match is_recorded {
            true => core.begin_recorded(named),
            false => core.begin(mode, named, now_ms),
        }
        let server = Server::new(core, clock, mode);
        server.set_slow_threshold(config.slow_threshold);
        Self {
            server,
            run,
            sessions: image.sessions,
            expired,
        }
    }

    /// Serves as the broker of its clients.
    pub(super) fn through_embedded_broker(
        self,
        limits: Limits,
        log: Option<Arc<dyn Persistence>>,
        lease: Option<Arc<dyn Lease>>,
        orders: Arc<PolicyOrders>,
        access: &Arc<AccessControl>,
    ) -> Broker {
        let server = self.server;
        let options = Options {
            limits,
            keeps_all: lease.is_some(),
            persistence: log,
            lease,
            access: access.clone(),
            state_lost: || logging::exit(EXIT_STATE_LOST),
            run: self.run,
        };
        let rules = access.rules().cloned();
        let service = StoreService::new(server.clone(), Some(orders), rules);
        let broker = Broker::restore(options, Arc::new(service), self.sessions);
        server.attach(Arc::new(broker.clone()));
        server.retain_sessions(&broker.sessions());
        broker
    }

    /// Serves as a client of a foreign broker.
    fn through_foreign_broker(
        self,
        foreign: &ForeignConfig,
        name: String,
        access: &Arc<AccessControl>,
        reloads: &mut Reloads,
    ) -> Clients {
        // Watches survive a restart, and the rules may have changed since. Must precede the first
        // notification, because the rights of recovered watches are not recorded.
        recheck_watches(access, &self.server);
        let clients = Clients::foreign(&self.server, foreign, name, access.rules().cloned());
        access.watch(reloads, {
            let (access, server) = (access.clone(), self.server.clone());
            move || recheck_watches(&access, &server)
        });
        self.server.renotify_expired(&self.expired);
        clients
    }
}

/// Waits for the data directory.
fn stand_by(storage: &Storage) -> anyhow::Result<statehouse_wal::Directory> {
    let directory = storage.directory.display();
    let waits = || {
        let line = format!("standby: {directory} is in use by another process; waiting");
        service_manager::ready(&line);
        print(&[line]);
    };
    Ok(data_directory::stand_by(storage, waits)?)
}

/// An engine that caches machine code below a data directory, if there is one, and the built-in
/// policy. A store in memory caches none.
pub(super) fn engine_with_standard(
    data: Option<&Path>,
) -> anyhow::Result<(Arc<Engine<Transaction>>, Policy<Transaction>)> {
    let mut engine = Engine::new()?;
    if let Some(data) = data {
        let bounds = statehouse_precompiled::Bounds {
            files_max: limits::CODE_FILES_MAX,
            bytes_max: limits::CODE_BYTES_MAX,
        };
        match Directory::open(&data.join("code"), bounds) {
            Ok(directory) => engine.keep_in(directory),
            Err(error) => {
                tracing::warn!(%error, "the machine code of policies is not kept: each start compiles them");
            }
        }
    }
    let standard = engine.load(STANDARD_POLICY);
    let standard = standard.context("the built-in policy does not load")?;
    Ok((Arc::new(engine), standard))
}

/// The name of this store: the target of signed orders, and its MQTT client id at a foreign broker.
fn store_name(
    transport: &TransportChoice,
    recovered: Option<&Recovered>,
) -> anyhow::Result<String> {
    let configured = match transport {
        TransportChoice::Embedded(_) => None,
        TransportChoice::Foreign(foreign) => foreign.client_id.clone(),
    };
    let name = match (configured, recovered) {
        (Some(name), _) => name,
        (None, Some(recovered)) => match (recovered.client_id(), transport) {
            // Only a foreign broker needs the same name after a restart.
            (Err(error), TransportChoice::Embedded(_)) if error.is_disk_full() => {
                tracing::warn!(
                    %error,
                    "this run has a name of its own, so signed orders must name this one"
                );
                data_directory::new_client_id()?
            }
            (name, _) => name?,
        },
        (None, None) => data_directory::new_client_id()?,
    };
    let shown = Shown::whole(name.as_bytes()).on_one_line();
    tracing::info!("the name of this store is {shown}");
    Ok(name)
}

/// Applies changed limits and logs them.
pub(super) fn apply(bounds: &Bounds, server: &Server, broker: Option<&Broker>) {
    let in_force =
        || statehouse_config::named(&server.quota(), broker.map(Broker::limits).as_deref());
    let before = in_force();
    server.set_bounds(bounds.quota, bounds.supervision);
    if let Some(broker) = broker {
        server.raise_receive_max(bounds.broker.receive_max);
        broker.set_limits(bounds.broker.clone());
    }
    let after = in_force();
    for (name, value) in after.iter().filter(|it| !before.contains(it)) {
        tracing::info!("{name} is {value} from now on");
    }
    for (name, _) in before
        .iter()
        .filter(|(name, _)| !after.iter().any(|it| it.0 == *name))
    {
        tracing::info!("{name} is unlimited from now on");
    }
}

/// Applies changed rules to the clients of the present store, if there is one.
pub(super) fn recheck_clients(
    access: &Arc<AccessControl>,
    reloads: &mut Reloads,
    present: impl Fn() -> Option<(Arc<Server>, Broker)> + Clone + Send + Sync + 'static,
) {
    let rules = access.clone();
    access.watch(reloads, move || {
        if let Some((server, broker)) = present() {
            broker.recheck();
            recheck_watches(&rules, &server);
        }
    });
}

fn recheck_watches(access: &AccessControl, server: &Server) {
    if let Some(rules) = access.rules() {
        server.recheck(|peer| rules.grants_of(peer));
    }
}
