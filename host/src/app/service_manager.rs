//! Notifies the service manager (sd_notify(3)) when the store is ready, while it lives, and when it
//! stops.
//!
//! Sends datagrams to the socket that `NOTIFY_SOCKET` names, and does nothing without that
//! variable. A failed notification is logged and must never stop the store. A send blocks if the
//! manager does not read the socket, so a thread of its own sends.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::env;
use std::io;
use std::mem;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread;

use sd_notify::NotifyState::{self, Custom, Ready, Status, Stopping, Watchdog};

use statehouse_config::limits;
use statehouse_server::Server;

/// The thread that sends. Empty without `NOTIFY_SOCKET`.
static NOTIFIER: OnceLock<Notifier> = OnceLock::new();

/// What fails if [`start`] does.
pub(super) const NOTIFICATIONS: &str = "cannot start the thread that notifies the service manager";

/// Starts the thread that sends, if there is a service manager. Must precede all notifications.
/// Fails if the system starts no more threads.
pub(super) fn start() -> io::Result<()> {
    if env::var_os("NOTIFY_SOCKET").is_some() {
        let notifier = NOTIFIER.get_or_init(Notifier::default);
        let run = move || notifier.run();
        thread::Builder::new()
            .name("notify".to_owned())
            .spawn(run)?;
    }
    Ok(())
}

/// The start is complete. A standby is ready while it waits, and so are a store behind a broker
/// before its first connection, and a host of a cluster that waits for etcd or a leader: each may
/// take longer than a manager lets a start take.
pub(super) fn ready(status: &str) {
    notify(&[Ready, Status(status)]);
}

/// The process stops on its own. Waits a short time until this is sent, since the process may end
/// right after it.
pub(super) fn stopping() {
    notify(&[Stopping, Status("stopping")]);
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
        let Some(interval) = sd_notify::watchdog_enabled() else {
            return Ok(None);
        };
        let (open, closed) = mpsc::channel::<Infallible>();
        let ping = move || {
            loop {
                notify(&[Watchdog]);
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
/// threads that serve clients block, or if `status`, the line that it shows, never returns. Returns
/// at once if no watchdog is enabled.
pub(super) async fn watch(status: impl Fn() -> String) {
    let Some(interval) = sd_notify::watchdog_enabled() else {
        return;
    };
    let mut ticks = tokio::time::interval(interval / 2);
    loop {
        ticks.tick().await;
        notify(&[Watchdog, Status(&status())]);
    }
}

/// The line of [`watch`] about one store.
pub(super) fn status_of(server: Arc<Server>) -> impl Fn() -> String {
    move || figures(&server)
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
fn notify(states: &[NotifyState<'_>]) {
    if let Some(notifier) = NOTIFIER.get() {
        notifier.add(states);
    }
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
    /// The newest `NAME=value` of each name. The names are few, so this is bounded.
    states: BTreeMap<String, String>,
    /// Whether the thread sends earlier states.
    is_sending: bool,
    /// Whether the log says that the present send takes long.
    is_logged: bool,
}

impl Notifier {
    fn lock(&self) -> MutexGuard<'_, Waiting> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn add(&self, states: &[NotifyState<'_>]) {
        let mut waiting = self.lock();
        let mut is_late = false;
        for state in states {
            let text = state.to_string();
            let name = text.split('=').next().unwrap_or_default().to_owned();
            let replaced = waiting.states.insert(name, text);
            // The second notification of the watchdog during one send.
            is_late |= replaced.is_some() && waiting.is_sending && matches!(state, Watchdog);
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
    fn run(&self) {
        loop {
            let states = self.take();
            if let Err(error) = sd_notify::notify(&[Custom(&states)]) {
                tracing::warn!(%error, "cannot notify the service manager that NOTIFY_SOCKET names");
            }
        }
    }

    /// Marks the previous states as sent, and waits for the next ones.
    fn take(&self) -> String {
        let mut waiting = self.lock();
        (waiting.is_sending, waiting.is_logged) = (false, false);
        self.sent.notify_all();
        while waiting.states.is_empty() {
            let added = self.added.wait(waiting);
            waiting = added.unwrap_or_else(PoisonError::into_inner);
        }
        waiting.is_sending = true;
        let states: Vec<String> = mem::take(&mut waiting.states).into_values().collect();
        states.join("\n")
    }

    /// Waits until all states are sent, but only for a limited time.
    fn flush(&self) {
        let is_busy = |it: &mut Waiting| it.is_sending || !it.states.is_empty();
        let wait = limits::NOTIFY_FLUSH_WAIT;
        let waited = self.sent.wait_timeout_while(self.lock(), wait, is_busy);
        drop(waited);
    }
}
