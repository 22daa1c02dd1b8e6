//! `statehouse serve`: runs a state store until it is told to stop.

use std::fs;
use std::io::{self, IsTerminal, Write};
use std::process::ExitCode;
use std::sync::Arc;

use anyhow::Context;
use statehouse_mqtt::{Broker, Options};
use tokio::net::TcpListener;
use tokio::signal::unix::{SignalKind, signal};
use tracing_subscriber::EnvFilter;

use super::output::{self, Failure};
use crate::clock::{Clock, SystemSource};
use crate::config::{Config, Flags, LogFormat};
use crate::journal::{Journal, Memory};
use crate::policy::{Engine, Policy, Registry};
use crate::server::Server;
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
            let policies = load_policies(&config).map_err(usage)?;
            let runtime = tokio::runtime::Builder::new_multi_thread()
                .enable_all()
                .build()
                .context("cannot start the threads that serve connections")
                .map_err(transport)?;
            runtime.block_on(serve(config, policies)).map_err(transport)
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

/// The policy that answers, and the one behind it.
type Policies = (Arc<Policy<Transaction>>, Option<Arc<Policy<Transaction>>>);

fn load_policies(config: &Config) -> anyhow::Result<Policies> {
    let engine = Engine::new()?;
    let standard = engine
        .load(STANDARD_POLICY)
        .context("the built-in policy does not load")?;
    let standard = Arc::new(standard);
    let Some(path) = &config.policy else {
        return Ok((standard, None));
    };
    let size = fs::metadata(path)
        .with_context(|| format!("cannot read the policy {}", path.display()))?
        .len();
    anyhow::ensure!(
        size <= limits::POLICY_FILE_BYTES_MAX,
        "the policy {} has {size} bytes, and a policy at most {}",
        path.display(),
        limits::POLICY_FILE_BYTES_MAX
    );
    let file =
        fs::read(path).with_context(|| format!("cannot read the policy {}", path.display()))?;
    let policy = engine
        .load(&file)
        .with_context(|| format!("{} cannot be used", path.display()))?;
    Ok((Arc::new(policy), Some(standard)))
}

async fn serve(config: Config, (active, previous): Policies) -> anyhow::Result<()> {
    let mut terminate = signal(SignalKind::terminate()).context("cannot wait for SIGTERM")?;
    let mut interrupt = signal(SignalKind::interrupt()).context("cannot wait for SIGINT")?;
    let mut listeners = Vec::new();
    for address in &config.listen {
        let listener = TcpListener::bind(address).await.with_context(|| {
            format!("cannot listen on {address}. Another broker may be running there; stop it, or name another address with --listen")
        })?;
        listeners.push(listener);
    }

    let journal = Memory::default();
    let promise = journal.promise();
    let policy = active.clone();
    let store = Store::new(Registry::new(active, previous), config.quota);
    let clock = Clock::new(Arc::new(SystemSource::default()));
    let server = Server::new(store, clock, Box::new(journal), config.node, config.dialect);
    let service = StoreService::new(server.clone());
    let broker = Broker::new(
        Options {
            limits: config.broker,
        },
        Arc::new(service),
    );
    server.attach(Arc::new(Embedded::new(broker.clone())));

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
    let stats = server.stats();
    tracing::info!(
        requests = stats.requests,
        refused = stats.refused,
        kicked = stats.kicked,
        notifications = stats.notifications,
        policy_failures = stats.policy_failures,
        keys = stats.keys,
        "stopped"
    );
    let counters = policy.counters.all();
    if !counters.is_empty() {
        tracing::info!(policy = %policy, ?counters, "what the policy counted");
    }
    Ok(())
}
