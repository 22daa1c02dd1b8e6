//! Notifies the service manager (sd_notify(3)) when the store is ready, while it lives, and when it
//! stops.
//!
//! Sends datagrams to the socket that `NOTIFY_SOCKET` names, and does nothing without that
//! variable. A failed notification is logged and must never stop the store. A send blocks if the
//! manager does not read the socket, so a thread of its own sends.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::env;
use std::ffi::OsStr;
use std::io;
use std::mem;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::process;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::sync::{Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread;
use std::time::Duration;

use statehouse_config::limits;
use statehouse_server::Server;

/// The name and the value of a state.
type State<'a> = (&'static str, &'a str);

const READY: State<'static> = ("READY", "1");
const STOPPING: State<'static> = ("STOPPING", "1");
const WATCHDOG: State<'static> = ("WATCHDOG", "1");

/// A line for operators.
fn status(line: &str) -> State<'_> {
    ("STATUS", line)
}

/// The thread that sends. Empty without `NOTIFY_SOCKET`.
static NOTIFIER: OnceLock<Notifier> = OnceLock::new();

/// What fails if [`start`] does.
pub(super) const NOTIFICATIONS: &str = "cannot start the thread that notifies the service manager";

/// Starts the thread that sends, if there is a service manager. Must precede all notifications.
/// Fails if the system starts no more threads.
pub(super) fn start() -> io::Result<()> {
    if let Some(socket) = env::var_os("NOTIFY_SOCKET") {
        let notifier = NOTIFIER.get_or_init(Notifier::default);
        let run = move || notifier.run(&socket);
        thread::Builder::new()
            .name("notify".to_owned())
            .spawn(run)?;
    }
    Ok(())
}

/// The start is complete. A standby is ready while it waits, and so are a store behind a broker
/// before its first connection, and a host of a cluster that waits for etcd or a leader: each may
/// take longer than a manager lets a start take.
pub(super) fn ready(line: &str) {
    notify(&[READY, status(line)]);
}

/// The process stops on its own. Waits a short time until this is sent, since the process may end
/// right after it.
pub(super) fn stopping() {
    notify(&[STOPPING, status("stopping")]);
    if let Some(notifier) = NOTIFIER.get() {
        notifier.flush();
    }
}

/// What fails if [`Pings::start`] does.
pub(super) const PINGS: &str = "cannot start the thread that notifies the watchdog";

/// Notifies the watchdog from a thread of its own, until it is dropped: for a standby and a host of
/// a cluster, which are ready before they serve. A recovery may take longer than a watchdog waits,
/// so one that hangs is not noticed.
pub(super) struct Pings {
    /// The thread ends when this is dropped.
    _open: mpsc::Sender<Infallible>,
}

impl Pings {
    /// Starts the thread, which notifies twice in each interval of `WATCHDOG_USEC`. None if no
    /// watchdog is enabled. Fails if the system starts no more threads.
    pub(super) fn start() -> io::Result<Option<Self>> {
        let Some(interval) = watchdog_interval() else {
            return Ok(None);
        };
        let (open, closed) = mpsc::channel::<Infallible>();
        let ping = move || {
            loop {
                notify(&[WATCHDOG]);
                if closed.recv_timeout(interval / 2) != Err(RecvTimeoutError::Timeout) {
                    return;
                }
            }
        };
        thread::Builder::new()
            .name("watchdog".to_owned())
            .spawn(ping)?;
        Ok(Some(Self { _open: open }))
    }
}

/// Notifies the watchdog twice in each interval of `WATCHDOG_USEC`. It stops notifying if the
/// threads that serve clients block, or if `line`, which it shows, never returns. Returns at once
/// if no watchdog is enabled.
pub(super) async fn watch(line: impl Fn() -> String) {
    let Some(interval) = watchdog_interval() else {
        return;
    };
    let mut ticks = tokio::time::interval(interval / 2);
    loop {
        ticks.tick().await;
        notify(&[WATCHDOG, status(&line())]);
    }
}

/// The longest time between two notifications of the watchdog. None if no watchdog is enabled for
/// this process.
fn watchdog_interval() -> Option<Duration> {
    let number = |name: &str| -> Option<u64> { env::var(name).ok()?.parse().ok() };
    let interval_us = number("WATCHDOG_USEC").filter(|it| *it > 0)?;
    let is_watched = number("WATCHDOG_PID").is_none_or(|pid| pid == u64::from(process::id()));
    is_watched.then(|| Duration::from_micros(interval_us))
}

/// One line about a store. Takes the lock that every request takes.
pub(super) fn figures(server: &Server) -> String {
    let stats = server.stats();
    let line = format!("{} keys, {} requests", stats.keys, stats.requests);
    match server.link() {
        Some(link) if !link.connected => format!("no connection to the broker; {line}"),
        _ => line,
    }
}

/// Gives states to the thread that sends. Never waits.
fn notify(states: &[State<'_>]) {
    if let Some(notifier) = NOTIFIER.get() {
        notifier.add(states);
    }
}

/// Sends states as one datagram. Blocks while the socket is full.
fn send(socket: &OsStr, states: &str) -> io::Result<()> {
    let address = address(socket)?;
    let datagram = UnixDatagram::unbound()?;
    datagram.send_to_addr(states.as_bytes(), &address)?;
    Ok(())
}

/// The address of a socket: a path, or on Linux `@` and a name in the abstract namespace.
fn address(socket: &OsStr) -> io::Result<SocketAddr> {
    #[cfg(target_os = "linux")]
    {
        use std::os::linux::net::SocketAddrExt;
        use std::os::unix::ffi::OsStrExt;

        if let Some(name) = socket.as_bytes().strip_prefix(b"@") {
            return SocketAddr::from_abstract_name(name);
        }
    }
    SocketAddr::from_pathname(socket)
}

/// Passes states to the thread that sends them.
#[derive(Default)]
struct Notifier {
    waiting: Mutex<Waiting>,
    /// Notified when states are added.
    added: Condvar,
    /// Notified when states were sent.
    sent: Condvar,
}

/// The states that are not sent yet.
#[derive(Default)]
struct Waiting {
    /// The newest value of each name. The names are few, so this is bounded.
    states: BTreeMap<&'static str, String>,
    /// Whether the thread sends earlier states.
    is_sending: bool,
    /// Whether the log says that the present send takes long.
    is_logged: bool,
}

impl Notifier {
    fn lock(&self) -> MutexGuard<'_, Waiting> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn add(&self, states: &[State<'_>]) {
        let mut waiting = self.lock();
        let mut is_late = false;
        for &(name, value) in states {
            let replaced = waiting.states.insert(name, value.to_owned());
            // The second notification of the watchdog during one send.
            is_late |= replaced.is_some() && waiting.is_sending && name == WATCHDOG.0;
        }
        let logs = is_late && !mem::replace(&mut waiting.is_logged, true);
        drop(waiting);
        self.added.notify_one();
        if logs {
            tracing::warn!(
                "the service manager does not read the socket that NOTIFY_SOCKET names, so it gets only the newest notifications"
            );
        }
    }

    /// Sends states forever, each notification after the one before.
    fn run(&self, socket: &OsStr) {
        // Logged once for as long as it lasts.
        let mut logged: Option<String> = None;
        loop {
            let failed = send(socket, &self.take()).err().map(|it| it.to_string());
            if let Some(error) = &failed
                && failed != logged
            {
                tracing::warn!(%error, "cannot notify the service manager that NOTIFY_SOCKET names");
            }
            logged = failed;
        }
    }

    /// Marks the previous states as sent, and waits for the next ones. Returns a line for each.
    fn take(&self) -> String {
        let mut waiting = self.lock();
        (waiting.is_sending, waiting.is_logged) = (false, false);
        self.sent.notify_all();
        while waiting.states.is_empty() {
            let added = self.added.wait(waiting);
            waiting = added.unwrap_or_else(PoisonError::into_inner);
        }
        waiting.is_sending = true;
        let states = mem::take(&mut waiting.states).into_iter();
        let lines: Vec<String> = states
            .map(|(name, value)| format!("{name}={value}"))
            .collect();
        lines.join("\n")
    }

    /// Waits until all states are sent, but only for a limited time.
    fn flush(&self) {
        let is_busy = |it: &mut Waiting| it.is_sending || !it.states.is_empty();
        let wait = limits::NOTIFY_FLUSH_WAIT;
        let waited = self.sent.wait_timeout_while(self.lock(), wait, is_busy);
        drop(waited);
    }
}
