//! `statehouse serve`: runs a state store until it is told to stop.

use std::fs;
use std::io::{self, IsTerminal, Write};
use std::net;
use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;
use std::thread;

use anyhow::Context;
use statehouse_mqtt::{Broker, Options, Persistence};
use tokio::net::TcpListener;
use tokio::signal::unix::{SignalKind, signal};
use tracing_subscriber::EnvFilter;

use super::output::{self, Failure};
use crate::clock::{Clock, SystemSource};
use crate::config::{Config, Durability, Flags, LogFormat, PolicyChoice};
use crate::journal::record::PolicyRecord;
use crate::journal::{Disk, Image, Journal, Memory, Recorder};
use crate::policy::{Engine, Modules, Policy, Registry};
use crate::server::Server;
use crate::storage::{self, Listener};
use crate::store::{Store, Transaction};
use crate::transport::embedded::{Embedded, StoreService};
use crate::{STANDARD_POLICY, limits};

/// Runs until SIGTERM or SIGINT.
pub(super) fn run(flags: Flags) -> ExitCode {
    let usage = |error: anyhow::Error| Failure::usage(format!("{error:#}"));
    let transport = |error: anyhow::Error| Failure::transport(format!("{error:#}"));
    let ended = Config::load(flags)
        .map_err(|error| usage(error.into()))
        .and_then(|config| {
            start_logging(&config).map_err(usage)?;
            // First what fails soonest: a store that cannot listen touches no data.
            let listeners = listen(&config).map_err(transport)?;
            let started = start(&config).map_err(usage)?;
            let runtime = tokio::runtime::Builder::new_multi_thread()
                .enable_all()
                .build()
                .context("cannot start the threads that serve connections")
                .map_err(transport)?;
            runtime
                .block_on(serve(listeners, started))
                .map_err(transport)
        });
    match ended {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => output::report(&failure),
    }
}

fn start_logging(config: &Config) -> anyhow::Result<()> {
    let filter = EnvFilter::try_new(&config.log_filter).with_context(|| {
        format!(
            "the log filter `{}` is not a level (error, warn, info, debug, trace) or a list of target=level",
            config.log_filter
        )
    })?;
    let lines = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(io::stderr);
    match config.log {
        LogFormat::Text => lines.with_ansi(io::stderr().is_terminal()).init(),
        LogFormat::Json => lines.json().flatten_event(true).init(),
    }
    Ok(())
}

/// Policies that were loaded for a start.
struct Policies {
    active: Arc<Policy<Transaction>>,
    /// Its file.
    file: Vec<u8>,
    built_in: bool,
    /// The one behind it.
    previous: Option<Arc<Policy<Transaction>>>,
    /// Those that handled requests which may come again.
    retired: Vec<Arc<Policy<Transaction>>>,
}

/// An engine, and the policy that every store has.
type Standard = (Engine<Transaction>, Arc<Policy<Transaction>>);

fn load_standard() -> anyhow::Result<Standard> {
    let engine = Engine::new()?;
    let standard = engine
        .load(STANDARD_POLICY)
        .context("the built-in policy does not load")?;
    Ok((engine, Arc::new(standard)))
}

fn load_policies(
    config: &Config,
    image: &Image,
    modules: &Modules,
    (engine, standard): Standard,
) -> anyhow::Result<Policies> {
    let last = image.active.and_then(|it| image.policies.get(it as usize));
    let file = match &config.policy {
        PolicyChoice::File(path) => Some(read_policy(path)?),
        PolicyChoice::Last => last.filter(|last| !last.built_in).map(|last| {
            modules.load(&last.digest).with_context(|| {
                format!(
                    "{} {} answered last, but its module {} cannot be read: name it with --policy FILE, or take the built-in one with --policy builtin",
                    last.name, last.version, modules.path(&last.digest).display()
                )
            })
        }).transpose()?,
        PolicyChoice::BuiltIn => None,
    };
    let mut policies = match file {
        None => Policies {
            active: standard,
            file: STANDARD_POLICY.to_vec(),
            built_in: true,
            previous: None,
            retired: Vec::new(),
        },
        Some(file) => {
            let active = engine.load(&file).with_context(|| match &config.policy {
                PolicyChoice::File(path) => format!("{} cannot be used", path.display()),
                _ => "the policy that answered last cannot be used".to_owned(),
            })?;
            Policies {
                active: Arc::new(active),
                file,
                built_in: false,
                previous: Some(standard),
                retired: Vec::new(),
            }
        }
    };
    let mut needed: Vec<blake3::Hash> = image
        .duplicates
        .range(0)
        .map(|it| it.context.policy)
        .collect();
    needed.sort_unstable_by_key(|digest| *digest.as_bytes());
    needed.dedup();
    let previous = policies.previous.iter().map(|policy| policy.digest);
    let present: Vec<_> = previous.chain([policies.active.digest]).collect();
    for digest in needed.iter().filter(|digest| !present.contains(digest)) {
        let loaded = modules
            .load(digest)
            .map_err(anyhow::Error::from)
            .and_then(|file| Ok(engine.load(&file)?));
        match loaded {
            Ok(policy) => policies.retired.push(Arc::new(policy)),
            Err(error) => {
                tracing::warn!(%digest, %error, "an older policy cannot be loaded: requests that it handled are answered from the record where they come again");
            }
        }
    }
    Ok(policies)
}

fn read_policy(path: &Path) -> anyhow::Result<Vec<u8>> {
    let unreadable = || format!("cannot read the policy {}", path.display());
    let size = fs::metadata(path).with_context(unreadable)?.len();
    anyhow::ensure!(
        size <= limits::POLICY_FILE_BYTES_MAX,
        "the policy {} has {size} bytes, and a policy at most {}",
        path.display(),
        limits::POLICY_FILE_BYTES_MAX
    );
    fs::read(path).with_context(unreadable)
}

/// A store that is ready to listen.
struct Started {
    server: Arc<Server>,
    broker: Broker,
    policy: Arc<Policy<Transaction>>,
    promise: String,
    /// The journal, to be closed at the end.
    disk: Option<Arc<Disk>>,
}

/// Recovers what was recorded, and puts the parts together.
fn start(config: &Config) -> anyhow::Result<Started> {
    let source = Arc::new(SystemSource::default());
    let listener = Listener::default();
    // Compiling takes as long as reading some hundred thousand keys, so it is done meanwhile.
    let compiling = thread::spawn(load_standard);
    let recovered = match config.storage.durability {
        Durability::Memory => None,
        _ => Some(storage::recover(&config.storage)?),
    };
    let standard = compiling
        .join()
        .map_err(|_| anyhow::anyhow!("the thread that compiles the built-in policy panicked"))??;
    if let Some(recovered) = &recovered {
        tracing::info!("{}", recovered.report());
    }
    let modules = Modules::of(&config.storage.directory);
    let empty = Image::new(config.storage.duplicates);
    let image = recovered.as_ref().map_or(&empty, |it| &it.image);
    let policies = load_policies(config, image, &modules, standard)?;

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
    let mut recorder = Recorder::new(journal, image.policies, image.active);
    recorder.started(run, clock.read().now_ms);
    let policy = policies.active.clone();
    if disk.is_some() {
        // Before any record that needs it.
        modules
            .save(&policy.digest, &policies.file)
            .context("cannot keep the policy's module in the data directory")?;
        recorder.policy(PolicyRecord {
            digest: policy.digest,
            name: policy.name.clone(),
            version: policy.version.clone(),
            built_in: policies.built_in,
        });
    }
    let mut registry = Registry::new(policies.active, policies.previous);
    for retired in policies.retired {
        registry.retire(retired);
    }
    let store = Store::restore(registry, config.quota, image.state, image.duplicates);
    let server = Server::new(
        store,
        clock,
        recorder,
        run,
        config.node.clone(),
        config.dialect,
    );
    let options = Options {
        limits: config.broker.clone(),
        persistence: disk.clone().map(|disk| disk as Arc<dyn Persistence>),
        run,
    };
    let service = Arc::new(StoreService::new(server.clone()));
    let broker = Broker::restore(options, service, image.sessions);
    server.attach(Arc::new(Embedded::new(broker.clone())));
    server.retain_sessions(&broker.sessions());
    listener.attach(server.clone(), broker.clone());
    Ok(Started {
        server,
        broker,
        policy,
        promise,
        disk,
    })
}

/// Takes the addresses. Who connects from now on waits until the store is ready.
fn listen(config: &Config) -> anyhow::Result<Vec<net::TcpListener>> {
    let mut listeners = Vec::new();
    for address in &config.listen {
        let listener = net::TcpListener::bind(address).with_context(|| {
            format!("cannot listen on {address}. Another broker may be running there; stop it, or name another address with --listen")
        })?;
        listener.set_nonblocking(true)?;
        listeners.push(listener);
    }
    Ok(listeners)
}

async fn serve(listeners: Vec<net::TcpListener>, started: Started) -> anyhow::Result<()> {
    let Started {
        server,
        broker,
        policy,
        promise,
        disk,
    } = started;
    let mut terminate = signal(SignalKind::terminate()).context("cannot wait for SIGTERM")?;
    let mut interrupt = signal(SignalKind::interrupt()).context("cannot wait for SIGINT")?;
    let listeners = listeners
        .into_iter()
        .map(TcpListener::from_std)
        .collect::<io::Result<Vec<_>>>()?;

    let mut out = io::stdout().lock();
    writeln!(out, "statehouse {}", env!("CARGO_PKG_VERSION"))?;
    writeln!(
        out,
        "policy {} {} blake3:{}",
        policy.name, policy.version, policy.digest
    )?;
    writeln!(out, "{promise}")?;
    for listener in &listeners {
        writeln!(out, "listening on mqtt://{}", listener.local_addr()?)?;
    }
    writeln!(out, "ready")?;
    out.flush()?;
    drop(out);

    let timers = tokio::spawn({
        let broker = broker.clone();
        async move { broker.run_timers().await }
    });
    let sweeper = tokio::spawn({
        let server = server.clone();
        async move { server.sweep().await }
    });
    let accepting: Vec<_> = listeners
        .into_iter()
        .map(|listener| {
            let broker = broker.clone();
            tokio::spawn(async move { broker.listen(listener).await })
        })
        .collect();

    tokio::select! {
        _ = terminate.recv() => tracing::info!("SIGTERM: stopping"),
        _ = interrupt.recv() => tracing::info!("SIGINT: stopping"),
    }
    broker.shutdown(limits::SHUTDOWN_GRACE).await;
    for task in accepting {
        task.abort();
    }
    sweeper.abort();
    timers.abort();
    server.stop();
    if let Some(disk) = disk {
        // Nothing that was acknowledged depends on it, but the next start is quicker for it.
        if let Err(error) = disk.journal().close() {
            tracing::error!(%error, "the journal did not close");
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
    let counters = policy.counters.all();
    if !counters.is_empty() {
        tracing::info!(policy = %policy, ?counters, "what the policy counted");
    }
    Ok(())
}
