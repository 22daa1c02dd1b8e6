//! The composition root: the only place that knows all parts of a running store.
//!
//! * [`start`]: recovers the state and connects the parts.
//! * [`serve`]: listens, serves until a signal, and drains.
//! * [`clients`]: the embedded broker with its listeners, or the connection to a foreign broker.
//! * [`member`]: the same as a member of a cluster. [`join`]: what a member does before. [`host`]:
//!   builds the store of each leadership. [`present`]: that store, as other parts see it.
//!   [`operations`]: figures of a member, and what operators ask of a leader.
//! * [`administration`]: the admin API, signed orders and the policy directory.
//! * [`check`]: finds what would make a start fail, without a start.
//! * [`service_manager`]: readiness and watchdog of systemd. [`signals`]: what signals do.

use std::io::{self, IsTerminal};
use std::panic;
use std::path::Path;
use std::sync::Arc;
use std::thread;

use anyhow::Context;
use rustix::io::Errno;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use tokio::runtime::{self, Runtime};
use tracing_subscriber::filter::{LevelFilter, Targets};
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;
use tracing_subscriber::{Layer, fmt};

use self::administration::CannotListen;
use self::clients::PreparedTransport;
use self::service_manager::NOTIFICATIONS;
use self::signals::Signals;
use crate::audit_log;
use crate::data_directory::StorageError;
use crate::policies::startup::{NotNow, may_be_temporary};
use statehouse_config::{Config, Flags, LogFormat, TransportChoice, limits};
use statehouse_core::policy::LoadError;
use statehouse_listener::{ListenerError, TlsError};
use statehouse_offline::PastError;
use statehouse_server::logging;

mod administration;
mod check;
mod clients;
#[cfg(feature = "cluster")]
mod host;
#[cfg(feature = "cluster")]
mod join;
#[cfg(feature = "cluster")]
mod member;
#[cfg(feature = "cluster")]
mod operations;
#[cfg(feature = "cluster")]
mod present;
mod serve;
mod service_manager;
mod signals;
mod start;

pub use check::{Findings, check};
#[cfg(feature = "cluster")]
pub(crate) use join::connect;
pub use signals::ignore_file_size;

/// Exit code of a store that may start later (EX_TEMPFAIL of sysexits.h). A service manager must
/// start it again, because a time server sets most clocks soon, and disk space may come back.
pub const EXIT_TEMPORARY: u8 = 75;

/// Why a store did not start, or stopped.
#[derive(Debug)]
pub enum Failure {
    /// The settings or the data directory cannot be used.
    Usage(String),
    /// The start may succeed later: the system clock is behind the data directory, or the machine
    /// lacks disk space, memory, threads or files.
    Temporary(String),
    /// The store cannot listen, lost its broker, or failed while it served.
    Transport(String),
    /// Another store uses the same MQTT client id at the foreign broker.
    TakenOver(String),
    /// This host cannot take part in its cluster any more.
    Cluster {
        /// The exit code.
        code: u8,
        /// Why, and what to do.
        message: String,
    },
}

impl Failure {
    /// A failure that the operator must repair, or that may pass. Addresses and certificates of the
    /// admin API count as those of the listeners of clients: another program may free the address.
    fn usage(error: impl Into<anyhow::Error>) -> Self {
        let error = error.into();
        let text = with_causes(&error);
        match error.downcast_ref() {
            Some(StorageError::Clock { .. }) => Self::Temporary(text),
            _ if error.chain().any(is_temporary) => Self::Temporary(text),
            _ if error.is::<CannotListen>() || error.is::<TlsError>() => Self::Transport(text),
            _ => Self::Usage(text),
        }
    }

    fn transport(error: impl Into<anyhow::Error>) -> Self {
        let error = error.into();
        let text = with_causes(&error);
        match error.chain().any(is_temporary) {
            true => Self::Temporary(text),
            false => Self::Transport(text),
        }
    }
}

/// Whether one of the causes is a full disk, or a lack of memory, files or threads.
fn is_temporary(error: &(dyn std::error::Error + 'static)) -> bool {
    let temporary = [
        io::ErrorKind::StorageFull,
        io::ErrorKind::QuotaExceeded,
        io::ErrorKind::OutOfMemory,
        // EAGAIN of clone(2).
        io::ErrorKind::WouldBlock,
    ];
    let no_file = [Errno::MFILE, Errno::NFILE].map(|it| Some(it.raw_os_error()));
    let of_system = |error: &io::Error| {
        temporary.contains(&error.kind()) || no_file.contains(&error.raw_os_error())
    };
    let storage = error.downcast_ref::<StorageError>();
    let of_log = match storage {
        Some(StorageError::Log(_, error)) => Some(error),
        _ => error.downcast_ref::<statehouse_wal::Error>(),
    };
    let of_mark = match storage {
        Some(StorageError::Mark(_, error)) => Some(&**error),
        _ => error.downcast_ref::<PastError>(),
    };
    // The texts of these errors contain their cause, so it is not their source.
    let cause = match (of_mark, error.downcast_ref::<ListenerError>()) {
        (Some(PastError::Io(_, cause)), _) | (_, Some(ListenerError::Address(_, cause))) => {
            Some(cause)
        }
        _ => error.downcast_ref::<io::Error>(),
    };
    of_log.is_some_and(statehouse_wal::Error::is_temporary)
        || cause.is_some_and(of_system)
        || (error.downcast_ref::<LoadError>())
            .is_some_and(|it| !matches!(it, LoadError::Engine(_)) && may_be_temporary(it))
        || error.is::<NotNow>()
}

/// The text of an error and of its causes. Many errors end with the text of their cause themselves.
fn with_causes(error: &anyhow::Error) -> String {
    let mut text = error.to_string();
    for cause in error.chain().skip(1).map(ToString::to_string) {
        let cause = cause.trim_end();
        if !text.ends_with(cause) {
            text = format!("{text}: {cause}");
        }
    }
    text
}

impl From<io::Error> for Failure {
    fn from(error: io::Error) -> Self {
        Self::Transport(format!("cannot read or write: {error}"))
    }
}

/// Runs a store until SIGTERM or SIGINT.
pub fn run(flags: Flags, warnings: &[String]) -> Result<(), Failure> {
    let raised = raise_open_files();
    let file = flags.config.clone();
    let (mut config, followed) = statehouse_config::load(flags).map_err(Failure::usage)?;
    start_logging(&config).map_err(Failure::usage)?;
    let signals = Signals::start().map_err(Failure::transport)?;
    service_manager::start()
        .context(NOTIFICATIONS)
        .map_err(Failure::transport)?;
    for warning in warnings {
        tracing::warn!("{warning}");
    }
    log_default_limits(file.as_deref().filter(|_| followed.is_none()));
    if let Err(error) = raised {
        tracing::warn!(%error, "cannot raise the number of open files to the hard limit");
    }
    log_open_files(config.bounds.broker.connections_max);
    check::warn_of_certificates(&config);
    check::warn_of_low_fuel(&config);
    // Binds the listeners before recovery, so that a store that cannot listen touches no data.
    let mut transport = PreparedTransport::prepare(&config)
        .map_err(|error| Failure::transport(check::cannot_bind(&config, error)))?;
    let runtime = runtime(config.threads)
        .context(THREADS)
        .map_err(Failure::transport)?;
    {
        let _within = runtime.enter();
        signals::ignore_hangup().map_err(Failure::transport)?;
    }
    #[cfg(feature = "cluster")]
    if let Some(cluster) = config.cluster.clone() {
        let sockets = member::Sockets::bind(transport, &config, &cluster)?;
        let served = runtime.block_on(member::serve(config, cluster, followed, sockets, &signals));
        runtime.shutdown_timeout(limits::SHUTDOWN_BLOCKING_GRACE);
        return served;
    }
    let started = {
        let _within = runtime.enter();
        start::start(&config, followed).map_err(Failure::usage)?
    };
    // A standby may take over after months, so passwords and certificates are read again.
    if let TransportChoice::Foreign(foreign) = &mut config.transport
        && foreign.standby
    {
        foreign.read_password().map_err(Failure::usage)?;
        transport = PreparedTransport::prepare(&config).map_err(Failure::transport)?;
    }
    let served = runtime.block_on(serve::serve(transport, started, &signals));
    // A name may still be looked up; nothing waits for the result any more.
    runtime.shutdown_timeout(limits::SHUTDOWN_BLOCKING_GRACE);
    served
}

/// What fails if [`runtime`] does.
const THREADS: &str = "cannot start the threads that serve connections";

/// The runtime that serves clients. With one thread it is single-threaded, which saves the wake-up
/// of another thread.
fn runtime(threads: usize) -> io::Result<Runtime> {
    match threads {
        1 => runtime::Builder::new_current_thread().enable_all().build(),
        _ => multi_threaded(threads),
    }
}

/// A runtime with several threads. If the system refuses one of them, the process ends.
fn multi_threaded(threads: usize) -> io::Result<Runtime> {
    let starting = thread::current().id();
    let before = Arc::new(panic::take_hook());
    // Without a thread, tokio panics, and the unwinding then waits for the threads before it, which
    // never end. So the process must end before the unwinding.
    panic::set_hook({
        let before = before.clone();
        Box::new(move |panicked| {
            if thread::current().id() != starting {
                return before(panicked);
            }
            let why = panicked.payload_as_str().unwrap_or_default();
            logging::last_words(&format!("statehouse: {THREADS}: {why}.\n"));
            logging::exit(EXIT_TEMPORARY.into())
        })
    });
    let built = runtime::Builder::new_multi_thread()
        .worker_threads(threads)
        .enable_all()
        .build();
    panic::set_hook(Box::new(move |panicked| before(panicked)));
    built
}

/// Parses a level, or a list of `target=level` with spaces and a trailing comma where users write
/// them.
fn log_filter(text: &str) -> anyhow::Result<Targets> {
    let directives = text.split(',').map(str::trim).filter(|it| !it.is_empty());
    let directives: Vec<&str> = directives.collect();
    // `Targets` takes a word that is no level as a target, and then logs nothing else. It takes an
    // empty level as `error`, and an empty list as `off`.
    let is_known = |it: &&str| match it.split_once('=') {
        Some((_, level)) => !level.is_empty(),
        None => it.parse::<LevelFilter>().is_ok(),
    };
    let are_known = !directives.is_empty() && directives.iter().all(is_known);
    let filter = directives.join(",").parse().ok();
    filter.filter(|_| are_known).with_context(|| {
        format!(
            "the log filter `{text}` is not a level (off, error, warn, info, debug, trace) or a list of target=level"
        )
    })
}

fn start_logging(config: &Config) -> anyhow::Result<()> {
    let filter = log_filter(&config.log_filter)?;
    let writer = logging::start().context("cannot start the thread that writes the log")?;
    let lines = fmt::layer().with_writer(writer);
    let lines = match config.log {
        LogFormat::Text => lines.with_ansi(io::stderr().is_terminal()).boxed(),
        LogFormat::Json => lines.json().flatten_event(true).boxed(),
    };
    tracing_subscriber::registry()
        .with(lines.with_filter(filter))
        .with(audit_log::layer())
        .init();
    Ok(())
}

/// Logs the memory that default limits are fractions of, and a settings file that will not be
/// reloaded.
fn log_default_limits(read_once: Option<&Path>) {
    match statehouse_config::memory_bytes() {
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

/// Raises the number of files that this process may open as far as the system allows.
fn raise_open_files() -> io::Result<()> {
    let limit = getrlimit(Resource::Nofile);
    let raised = Rlimit {
        current: limit.maximum,
        ..limit
    };
    match limit.current == limit.maximum {
        true => Ok(()),
        false => Ok(setrlimit(Resource::Nofile, raised)?),
    }
}

/// Warns if the number of open files limits that of connections.
fn log_open_files(connections_max: usize) {
    if statehouse_config::connections_for_open_files() == Some(connections_max)
        && let Some(files) = statehouse_config::open_files_max()
    {
        tracing::warn!(
            files,
            connections_max,
            "max_connections is what the number of open files allows: raise the hard limit (LimitNOFILE of systemd, `ulimit -Hn`) for more"
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use statehouse_access::AccessError;
    use statehouse_access::rules::RulesError;
    use statehouse_precompiled::CompileError;
    use tracing::Level;

    #[test]
    fn failure_names_each_cause_once() {
        let error = AccessError::Rules(RulesError::Empty);
        let text = error.to_string();
        assert_eq!(with_causes(&error.into()), text);
        let error = io::Error::other("the disk is broken");
        let error = anyhow::Error::from(error).context("cannot open the log");
        assert_eq!(
            with_causes(&error),
            "cannot open the log: the disk is broken"
        );
    }

    #[test]
    fn lack_of_threads_memory_or_files_is_temporary() {
        let lacks = [Errno::AGAIN, Errno::NOMEM, Errno::MFILE, Errno::NFILE];
        let lacks = lacks.map(|it| anyhow::Error::from(io::Error::from(it)));
        let mut errors: Vec<anyhow::Error> = lacks.into();
        let compiler = CompileError::Machine("it has no thread".to_owned());
        errors.push(LoadError::from(compiler).into());
        let lack = statehouse_core::policy::Failure::Machine("no memory".to_owned());
        errors.push(LoadError::Trial("its start", lack).into());
        errors.push(NotNow("start again".to_owned()).into());
        let lack = || io::Error::from(Errno::MFILE);
        let address = "127.0.0.1:1883".parse().unwrap();
        errors.push(ListenerError::Address(address, lack()).into());
        errors.push(PastError::Io("cluster.json".into(), lack()).into());
        let mark = Box::new(PastError::Io("cluster.json".into(), lack()));
        errors.push(StorageError::Mark("data".into(), mark).into());
        for error in errors {
            let failure = Failure::usage(error.context("the start failed"));
            assert!(matches!(failure, Failure::Temporary(_)), "{failure:?}");
        }
        for permanent in [Errno::ACCESS, Errno::FBIG] {
            let failure = Failure::usage(io::Error::from(permanent));
            assert!(matches!(failure, Failure::Usage(_)), "{failure:?}");
        }
    }

    #[test]
    fn log_filter_ignores_spaces_and_empty_directives() {
        for text in [
            "info,statehouse::request=debug",
            " info, statehouse::request=debug,",
        ] {
            let filter = log_filter(text).unwrap();
            assert!(
                filter.would_enable("statehouse::request", &Level::DEBUG),
                "{text}"
            );
            assert!(filter.would_enable("statehouse", &Level::INFO), "{text}");
            assert!(!filter.would_enable("statehouse", &Level::DEBUG), "{text}");
        }
        for text in ["==", "warning", "info,verbose", "statehouse"] {
            assert!(log_filter(text).is_err(), "{text}");
        }
    }

    /// Regression: each of these turned the log off, or all of it except errors.
    #[test]
    fn log_filter_without_a_level_is_refused() {
        for text in ["", " ", ",", "statehouse=", "info,statehouse= "] {
            assert!(log_filter(text).is_err(), "{text}");
        }
        let off = log_filter("off").unwrap();
        assert!(!off.would_enable("statehouse", &Level::ERROR));
    }
}
