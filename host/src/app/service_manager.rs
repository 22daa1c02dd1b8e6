//! Notifies the service manager (sd_notify(3)) when the store is ready, while it lives, and when it
//! stops.
//!
//! Sends datagrams to the socket that `NOTIFY_SOCKET` names, and does nothing without that
//! variable. A failed notification is logged and must never stop the store.

use std::convert::Infallible;
use std::io;
use std::sync::Arc;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;

use sd_notify::NotifyState::{self, Ready, Status, Stopping, Watchdog};

use statehouse_server::Server;

/// The start is complete. A standby is ready while it waits, and so are a store behind a broker
/// before its first connection, and a host of a cluster that waits for etcd or a leader: each may
/// take longer than a manager lets a start take.
pub(super) fn ready(status: &str) {
    notify(&[Ready, Status(status)]);
}

/// The process stops on its own.
pub(super) fn stopping() {
    notify(&[Stopping, Status("stopping")]);
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

fn notify(states: &[NotifyState<'_>]) {
    if let Err(error) = sd_notify::notify(states) {
        tracing::warn!(%error, "cannot notify the service manager that NOTIFY_SOCKET names");
    }
}
