//! What a service manager is told (sd_notify(3)): that the store is ready, that it lives, that it ends.
//!
//! In comes what happens to the process; out go datagrams to the socket that `NOTIFY_SOCKET` names. Without that variable
//! nothing happens. A manager that cannot be told is logged, and stops nothing.

use std::sync::Arc;

use sd_notify::NotifyState::{self, Ready, Status, Stopping, Watchdog};

use crate::server::Server;

/// Clients can come. A standby is ready too: what it waits for may take months, and no start does.
pub(super) fn ready(status: &str) {
    notify(&[Ready, Status(status)]);
}

/// The process ends by itself.
pub(super) fn stopping() {
    notify(&[Stopping, Status("stopping")]);
}

/// Says that the store lives, twice in each interval of `WATCHDOG_USEC`, for as long as it does: threads that serve clients run
/// this, and the lock that every request passes is to be had. Ends at once where no manager asks.
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
        tracing::warn!(%error, "the service manager that NOTIFY_SOCKET names cannot be told");
    }
}
