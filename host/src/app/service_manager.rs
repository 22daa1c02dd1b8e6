//! Notifies the service manager (sd_notify(3)) when the store is ready, while it lives, and when it
//! stops.
//!
//! Sends datagrams to the socket that `NOTIFY_SOCKET` names, and does nothing without that
//! variable. A failed notification is logged and must never stop the store.

use std::sync::Arc;

use sd_notify::NotifyState::{self, Ready, Status, Stopping, Watchdog};

use crate::server::Server;

/// Clients can connect. A standby is ready too, since it may wait for months and a manager limits
/// the time of a start.
pub(super) fn ready(status: &str) {
    notify(&[Ready, Status(status)]);
}

/// The process stops on its own.
pub(super) fn stopping() {
    notify(&[Stopping, Status("stopping")]);
}

/// Notifies the watchdog twice in each interval of `WATCHDOG_USEC`. It stops notifying if the
/// threads that serve clients block, or if the lock that every request takes is never released.
/// Returns at once if no watchdog is enabled.
pub(super) async fn watch(server: Arc<Server>) {
    let Some(interval) = sd_notify::watchdog_enabled() else {
        return;
    };
    let mut ticks = tokio::time::interval(interval / 2);
    loop {
        ticks.tick().await;
        let stats = server.stats();
        let status = format!("{} keys, {} requests", stats.keys, stats.requests);
        notify(&[Watchdog, Status(&status)]);
    }
}

fn notify(states: &[NotifyState<'_>]) {
    if let Err(error) = sd_notify::notify(states) {
        tracing::warn!(%error, "cannot notify the service manager that NOTIFY_SOCKET names");
    }
}
