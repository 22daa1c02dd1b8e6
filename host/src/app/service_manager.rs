//! Notifies the service manager (sd_notify(3)) when the store is ready, while it lives, and when it
//! stops.
//!
//! Sends datagrams to the socket that `NOTIFY_SOCKET` names, and does nothing without that
//! variable. A failed notification is logged and must never stop the store.

use std::sync::Arc;

use sd_notify::NotifyState::{self, Ready, Status, Stopping, Watchdog};

use statehouse_server::Server;

/// Clients can connect. A standby is ready too, since it may wait for months and a manager limits
/// the time of a start.
pub(super) fn ready(status: &str) {
    notify(&[Ready, Status(status)]);
}

/// The process stops on its own.
pub(super) fn stopping() {
    notify(&[Stopping, Status("stopping")]);
}

/// Notifies the watchdog once, for a standby that waits. Does nothing if no watchdog is enabled.
pub(super) fn waits() {
    if sd_notify::watchdog_enabled().is_some() {
        notify(&[Watchdog]);
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
    format!("{} keys, {} requests", stats.keys, stats.requests)
}

fn notify(states: &[NotifyState<'_>]) {
    if let Err(error) = sd_notify::notify(states) {
        tracing::warn!(%error, "cannot notify the service manager that NOTIFY_SOCKET names");
    }
}
