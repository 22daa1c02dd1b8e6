//! Listens, serves until a signal or a failure, and drains.

use std::sync::Arc;

use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::watch;

use super::Failure;
use super::clients::{Open, PreparedTransport};
use super::service_manager;
use super::signals::Signals;
use super::start::Started;
use crate::admin::{Api, Sources, Subject};
use crate::policies::manager::Listing;
use statehouse_core::policy::Digest;
use statehouse_protocol::Shown;
use statehouse_server::Server;
pub(super) use statehouse_server::logging::print;

pub(super) async fn serve(
    transport: PreparedTransport,
    started: Started,
    signals: &Signals,
) -> Result<(), Failure> {
    let Started {
        server,
        clients,
        gate,
        orders,
        mut administration,
        access,
        audit,
        mut reloads,
        directory,
        promise,
        disk,
        pings,
        traces,
    } = started;
    signals.take_over();
    let broker = clients.broker().cloned();
    transport.reload_with(&mut reloads, broker.as_ref());
    administration.reload_with(&mut reloads);
    let open = clients.open(transport, &server, &audit)?;

    // Started before the store reports that it is ready, since commands look for the file `admin`.
    let reloads = Arc::new(reloads);
    let deliveries = administration.deliver(&gate, &orders, broker.clone());
    let sources = Sources {
        server: server.clone(),
        broker,
        access,
        reloads: reloads.clone(),
        audit: audit.clone(),
        directory,
        disk: disk.clone(),
        leadership: None,
    };
    let listing = gate.control().list();
    let subject = watch::Sender::new(Subject::Store(Arc::new(Api::new(gate, sources))));
    let administration = administration.start(&subject, &audit);
    print(&greeting(&listing, promise));
    let sweeper = tokio::spawn({
        let server = server.clone();
        async move { server.sweep(None).await }
    });
    let hangup = signal(SignalKind::hangup())?;
    let reloading = tokio::spawn(reloads.run(hangup));
    let watching = tokio::spawn(service_manager::watch({
        let server = server.clone();
        move || service_manager::figures(&server)
    }));
    drop(pings);
    let serving = async {
        announce(&open, &server).await;
        open.ended().await
    };
    let served = tokio::select! {
        signal = signals.wait() => {
            tracing::info!("{signal}: stopping");
            Ok(())
        }
        failure = serving => Err(failure),
    };
    service_manager::stopping();
    drop(deliveries);
    administration.stop();
    open.shutdown(&server).await;
    sweeper.abort();
    reloading.abort();
    watching.abort();
    server.stop();
    // Acknowledged writes do not depend on this; it makes the next start faster.
    if let Some(Err(error)) = disk.map(|disk| disk.log().close()) {
        tracing::error!(%error, "the write-ahead log could not be closed");
    }
    log_figures(&server);
    if let Some(traces) = traces {
        traces.stop().await;
    }
    served
}

pub(super) fn log_figures(server: &Server) {
    let stats = server.stats();
    tracing::info!(
        requests = stats.requests,
        refused = stats.refused.all(),
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
}

/// Reports that clients can connect, once they can. A service manager must not wait for a broker:
/// it would kill a healthy store, and commands such as `apt` wait for the manager.
async fn announce(open: &Open, server: &Server) {
    if server.link().is_some() {
        service_manager::ready(&service_manager::figures(server));
    }
    if let Some(lines) = open.addresses().await {
        print(lines);
        print(open.presence().await.as_slice());
        print(&["ready".to_owned()]);
        service_manager::ready("clients can connect");
    }
}

/// The first lines: the version, each policy that answers requests, and the durability guarantee.
fn greeting(listing: &Listing, promise: String) -> Vec<String> {
    let name = |digest: &Digest| {
        let found = listing.policies.iter().find(|it| it.digest == *digest);
        found.map_or_else(
            || digest.to_string(),
            |it| format!("{} {} blake3:{digest}", it.name, it.version),
        )
    };
    let assignment = &listing.assignment;
    let mut lines = vec![
        format!("statehouse {}", env!("CARGO_PKG_VERSION")),
        format!("policy {}", name(&assignment.active)),
    ];
    for route in &assignment.routes {
        let prefix = Shown::whole(&route.prefix.0).on_one_line();
        lines.push(format!(
            "keys under {prefix}: policy {}",
            name(&route.policy)
        ));
    }
    if let Some(canary) = &assignment.canary {
        lines.push(format!("canary: policy {}", name(&canary.policy)));
    }
    lines.push(promise);
    lines
}
