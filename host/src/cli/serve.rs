//! `statehouse serve`: runs a state store until a signal stops it.

use std::io::{self, IsTerminal, Write};
use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;

use anyhow::Context;
use statehouse_mqtt::{Broker, Options, Persistence};
use statehouse_precompiled::Directory;
use tokio::runtime::{self, Runtime};
use tokio::signal::unix::{SignalKind, signal};
use tracing_subscriber::EnvFilter;

use super::administration::Administration;
use super::clients::{Clients, Open, PreparedTransport};
use super::output::{self, Failure};
use super::service_manager;
use super::signals::Signals;
use crate::admin::Sources;
use crate::config::{
    self, Bounds, Config, Durability, Flags, Followed, LogFormat, Storage, TransportChoice,
};
use crate::control::{Control, Listing};
use crate::opening::Opening;
use crate::server::{EXIT_STATE_LOST, Server};
use crate::ship::{Gate, PolicyOrders, Trust};
use crate::storage::{self, Disk, JournalListener, Recovered};
use crate::transport::embedded::{Embedded, StoreService};
use crate::{STANDARD_POLICY, limits, logging};
use statehouse_access::AccessControl;
use statehouse_access::audit::Audit;
use statehouse_core::clock::{Clock, SystemSource};
use statehouse_core::log::{Image, Journal, Memory, Recorder};
use statehouse_core::policy::{Digest, Engine};
use statehouse_core::store::{Store, Transaction};
use statehouse_core::{Core, Settings};
use statehouse_files::watch::Reloads;
use statehouse_precompiled::Modules;

/// Runs until SIGTERM or SIGINT.
pub(super) fn run(flags: Flags) -> ExitCode {
    let file = flags.config.clone();
    let usage = |error: anyhow::Error| Failure::usage(format!("{error:#}"));
    let transport_failure = |error: anyhow::Error| Failure::transport(format!("{error:#}"));
    let ended = config::load(flags)
        .map_err(|error| usage(error.into()))
        .and_then(|(mut config, followed)| {
            start_logging(&config).map_err(usage)?;
            log_default_limits(file.as_deref().filter(|_| followed.is_none()));
            // Binds the listeners before recovery, so that a store that cannot listen touches no
            // data.
            let mut transport = PreparedTransport::prepare(&config).map_err(transport_failure)?;
            let runtime = runtime(config.threads)
                .context("cannot start the threads that serve connections")
                .map_err(transport_failure)?;
            let started = {
                let _within = runtime.enter();
                start(&config, followed).map_err(usage)?
            };
            let Some(started) = started else {
                return Ok(());
            };
            // A standby may take over after months, so passwords and certificates are read again.
            if let TransportChoice::Foreign(foreign) = &mut config.transport
                && foreign.standby
            {
                let read = foreign.read_password();
                read.map_err(|error| usage(error.into()))?;
                transport = PreparedTransport::prepare(&config).map_err(transport_failure)?;
            }
            let served = runtime.block_on(serve(transport, started));
            // A policy may still be compiling; nothing waits for the result any more.
            runtime.shutdown_timeout(limits::SHUTDOWN_BLOCKING_GRACE);
            served
        });
    // Goes through the log queue, since a direct write would block if stderr is not read.
    if let Err(failure) = &ended {
        logging::last_words(&output::line(failure.message()));
    }
    logging::flush();
    ended.map_or_else(|failure| failure.exit_code(), |()| ExitCode::SUCCESS)
}

/// The runtime that serves clients. With one thread it is single-threaded, which saves the wake-up
/// of another thread.
fn runtime(threads: usize) -> io::Result<Runtime> {
    let mut builder = match threads {
        1 => runtime::Builder::new_current_thread(),
        _ => runtime::Builder::new_multi_thread(),
    };
    builder.worker_threads(threads).enable_all().build()
}

fn start_logging(config: &Config) -> anyhow::Result<()> {
    let filter = EnvFilter::try_new(&config.log_filter).with_context(|| {
        format!(
            "the log filter `{}` is not a level (error, warn, info, debug, trace) or a list of target=level",
            config.log_filter
        )
    })?;
    let writer = logging::start().context("cannot start the thread that writes the log")?;
    let lines = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(writer);
    match config.log {
        LogFormat::Text => lines.with_ansi(io::stderr().is_terminal()).init(),
        LogFormat::Json => lines.json().flatten_event(true).init(),
    }
    Ok(())
}

/// Logs the memory that default limits are fractions of, and a settings file that will not be
/// reloaded.
fn log_default_limits(read_once: Option<&Path>) {
    match config::memory_bytes() {
        Some(bytes) => tracing::info!(
            "default limits are derived from {} MiB of memory",
            bytes >> 20
        ),
        None => tracing::warn!(
            "neither /proc/meminfo nor a control group reports the memory: the default limits are those of a large machine, so set max_bytes and max_total_queue_bytes"
        ),
    }
    if let Some(file) = read_once {
        tracing::info!(
            "{} is not a regular file: it was read once, and changed limits take effect at the next start",
            file.display()
        );
    }
}

/// An engine that caches machine code below a data directory, if there is one. A store in memory
/// caches none.
fn engine(data: Option<&Path>) -> anyhow::Result<Engine<Transaction>> {
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
    Ok(engine)
}

/// A store that is ready to listen.
struct Started {
    server: Arc<Server>,
    clients: Clients,
    control: Arc<Control>,
    administration: Administration,
    access: Arc<AccessControl>,
    audit: Arc<Audit>,
    reloads: Reloads,
    promise: String,
    /// The journal, to close at the end.
    disk: Option<Arc<Disk>>,
    signals: Option<Signals>,
}

/// Recovers the state and connects the parts. Runs within a runtime. None if a standby is stopped
/// before it takes over.
fn start(config: &Config, followed: Followed) -> anyhow::Result<Option<Started>> {
    let trust = Trust::new(&config.trusted_keys, config.allow_unsigned)?;
    let audit = Arc::new(Audit::default());
    let access = Arc::new(AccessControl::open(&config.access, audit.clone())?);
    let mut reloads = Reloads::default();
    let source = Arc::new(SystemSource::default());
    let listener = JournalListener::default();
    let mode = config.transport.mode();
    let mut signals = None;
    let mut recovered = match (&config.transport, config.storage.durability) {
        (_, Durability::Memory) => None,
        (TransportChoice::Foreign(foreign), _) if foreign.standby => {
            let signals = signals.insert(Signals::start()?);
            match stand_by(&config.storage, signals)? {
                Some(recovered) => Some(recovered),
                None => return Ok(None),
            }
        }
        _ => Some(storage::recover(&config.storage)?),
    };
    let data = recovered.is_some().then_some(&*config.storage.directory);
    let engine = Arc::new(engine(data)?);
    let standard = engine
        .load(STANDARD_POLICY)
        .context("the built-in policy does not load")?;
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
        modules: &modules,
        trust: &trust,
        keeps: recovered.is_some(),
    };
    let (registry, named) = opening.registry(&config.policy, image)?;

    let (disk, image) = match recovered {
        Some(recovered) => {
            let (disk, image) = recovered
                .start(&listener)
                .context("cannot start the journal's threads")?;
            (Some(disk), image)
        }
        None => (None, empty),
    };
    let journal: Arc<dyn Journal> = match &disk {
        Some(disk) => disk.clone(),
        None => Arc::new(Memory),
    };
    let promise = journal.promise();
    let mut clock = Clock::resume(source, image.now_ms);
    let run = image.run + 1;
    let ends = image.ends();
    let recorder = Recorder::new(journal, image.policies, image.active);
    let mut store = Store::restore(registry, config.bounds.quota, image.state, image.duplicates);
    *store.supervision() = config.bounds.supervision;
    let settings = Settings {
        node: config.node.clone(),
        dialect: config.dialect,
        policy_property: config.policy_property,
    };
    let mut core = Core::new(store, recorder, run, settings);
    core.begin(mode, named, clock.read().now_ms);
    let server = Server::new(core, clock, mode);
    server.set_audit(audit.clone());
    let modules = disk.is_some().then_some(modules);
    let control = Control::new(server.clone(), engine, modules, name.clone());
    let gate = Arc::new(Gate::new(control.clone(), trust));
    let orders = PolicyOrders::new(gate.clone(), audit.clone());
    let administration = Administration::open(config, gate, orders.clone())?;
    let clients = match &config.transport {
        TransportChoice::Embedded(_) => {
            let options = Options {
                limits: config.bounds.broker.clone(),
                persistence: disk.clone().map(|disk| disk as Arc<dyn Persistence>),
                run,
                access: access.clone(),
                state_lost: || logging::exit(EXIT_STATE_LOST),
            };
            let service = StoreService::new(server.clone())
                .with_orders(orders)
                .under(access.rules().cloned());
            let broker = Broker::restore(options, Arc::new(service), image.sessions);
            server.attach(Arc::new(Embedded::new(broker.clone())));
            server.retain_sessions(&broker.sessions());
            access.watch(&mut reloads, {
                let (broker, recheck_watches) = (broker.clone(), recheck(&access, &server));
                move || {
                    broker.recheck();
                    recheck_watches();
                }
            });
            Clients::Embedded(broker)
        }
        TransportChoice::Foreign(foreign) => {
            let rules = access.rules().cloned();
            let clients = Clients::foreign(&server, foreign, name, rules);
            let recheck_watches = recheck(&access, &server);
            // Watches survive a restart, and the rules may have changed since.
            recheck_watches();
            access.watch(&mut reloads, recheck_watches);
            server.renotify_expired(&ends);
            clients
        }
    };
    listener.attach(server.clone(), clients.broker().cloned());
    if let Some(bounds) = followed {
        let (server, broker) = (server.clone(), clients.broker().cloned());
        reloads.add(&bounds.clone(), move || {
            apply(&bounds.current(), &server, broker.as_ref());
        });
    }
    Ok(Some(Started {
        server,
        clients,
        control,
        administration,
        access,
        audit,
        reloads,
        promise,
        disk,
        signals,
    }))
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
                storage::new_client_id()?
            }
            (name, _) => name?,
        },
        (None, None) => storage::new_client_id()?,
    };
    tracing::info!("the name of this store is {}", name.escape_debug());
    Ok(name)
}

/// Applies changed limits and logs them.
fn apply(bounds: &Bounds, server: &Server, broker: Option<&Broker>) {
    let in_force = || config::named(&server.quota(), broker.map(Broker::limits).as_deref());
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

/// Ends the watches that the current rules forbid.
fn recheck(
    access: &AccessControl,
    server: &Arc<Server>,
) -> impl Fn() + Clone + Send + Sync + 'static {
    let (rules, server) = (access.rules().cloned(), server.clone());
    move || {
        if let Some(rules) = &rules {
            server.recheck(|peer| rules.grants_of(peer));
        }
    }
}

/// Waits for the data directory. None if a signal stops the process before.
fn stand_by(storage: &Storage, signals: &Signals) -> anyhow::Result<Option<Recovered>> {
    let directory = storage.directory.display();
    let waits = || {
        let line = format!("standby: {directory} is in use by another process; waiting");
        service_manager::ready(&line);
        if let Err(error) = print(&[line]) {
            tracing::warn!(%error, "cannot print that this standby waits");
        }
    };
    Ok(storage::stand_by(storage, waits, || {
        signals.received_any()
    })?)
}

async fn serve(transport: PreparedTransport, started: Started) -> Result<(), Failure> {
    let failed = |error: anyhow::Error| Failure::transport(format!("{error:#}"));
    let Started {
        server,
        clients,
        control,
        administration,
        access,
        audit,
        mut reloads,
        promise,
        disk,
        signals,
    } = started;
    // Only now: until here a signal ends the process at once, even during a long recovery.
    let signals = match signals {
        Some(signals) => signals,
        None => Signals::start().map_err(failed)?,
    };
    let broker = clients.broker().cloned();
    transport.reload_with(&mut reloads, broker.as_ref());
    let open = clients.open(transport, &server, &audit)?;

    // Started before the store reports that it is ready, since commands look for the file `admin`.
    let reloads = Arc::new(reloads);
    let administration = administration.start(Sources {
        server: server.clone(),
        broker,
        access,
        reloads: reloads.clone(),
        audit,
    });
    let mut lines = vec![format!("statehouse {}", env!("CARGO_PKG_VERSION"))];
    lines.extend(answering(&control.list()));
    lines.push(promise);
    print(&lines)?;
    let sweeper = tokio::spawn({
        let server = server.clone();
        async move { server.sweep().await }
    });
    let hangup = signal(SignalKind::hangup())?;
    let reloading = tokio::spawn(reloads.run(hangup));
    let watching = tokio::spawn(service_manager::watch(server.clone()));
    let serving = async {
        match announce(&open).await {
            Ok(()) => open.ended().await,
            Err(error) => error.into(),
        }
    };
    let served = tokio::select! {
        signal = signals.wait() => {
            tracing::info!("{signal}: stopping");
            Ok(())
        }
        failure = serving => Err(failure),
    };
    service_manager::stopping();
    administration.stop();
    open.shutdown().await;
    sweeper.abort();
    reloading.abort();
    watching.abort();
    server.stop();
    if let Some(disk) = disk {
        // Acknowledged writes do not depend on this; it makes the next start faster.
        if let Err(error) = disk.journal().close() {
            tracing::error!(%error, "the journal could not be closed");
        }
    }
    let stats = server.stats();
    tracing::info!(
        requests = stats.requests,
        refused = stats.refused,
        kicked = stats.kicked,
        notifications = stats.notifications,
        policy_failures = stats.policy_failures,
        duplicates = stats.duplicates,
        duplicates_different = stats.duplicates_different,
        forgotten = stats.forgotten,
        keys = stats.keys,
        "stopped"
    );
    for policy in server.policies().1 {
        let counters = policy.counters.all();
        if !counters.is_empty() {
            tracing::info!(%policy, ?counters, "counters of the policy");
        }
    }
    served
}

/// Reports that clients can connect, once they can.
async fn announce(open: &Open) -> io::Result<()> {
    if let Some(lines) = open.addresses().await {
        print(lines)?;
        print(open.presence().await.as_slice())?;
        print(&["ready".to_owned()])?;
        service_manager::ready("clients can connect");
    }
    Ok(())
}

/// Prints lines on standard output.
fn print(lines: &[String]) -> io::Result<()> {
    let mut out = io::stdout().lock();
    for line in lines {
        writeln!(out, "{line}")?;
    }
    out.flush()
}

/// One line for each policy that answers requests.
fn answering(listing: &Listing) -> Vec<String> {
    let name = |digest: &Digest| {
        let found = listing.policies.iter().find(|it| it.digest == *digest);
        found.map_or_else(
            || digest.to_string(),
            |it| format!("{} {} blake3:{digest}", it.name, it.version),
        )
    };
    let assignment = &listing.assignment;
    let mut lines = vec![format!("policy {}", name(&assignment.active))];
    for route in &assignment.routes {
        let prefix = route.prefix.0.escape_ascii();
        lines.push(format!(
            "keys under {prefix}: policy {}",
            name(&route.policy)
        ));
    }
    if let Some(canary) = &assignment.canary {
        lines.push(format!("canary: policy {}", name(&canary.policy)));
    }
    lines
}
