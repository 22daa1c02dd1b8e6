//! The admin API: HTTP/1.1 for operators who can read the data directory or have a token.
//!
//! Connections are limited in number, size and time. All changes of policies go through [`Gate`],
//! like on the other delivery paths. The admin API must never block requests to the store, so slow
//! work such as compiling runs on a separate thread.

mod access;
mod answer;
mod api;
mod authz;
mod client;
mod clients;
mod cluster;
mod listener;
mod log;
mod metrics;
mod requests;
mod seat;
mod usage;

use std::io;
use std::sync::Arc;

use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use statehouse_mqtt::Broker;
use tokio::sync::{Semaphore, watch};

pub use access::{Endpoint, new_token};
pub use api::Api;
pub(crate) use authz::{Ask, Decision, Who};
pub(crate) use client::ask;
pub(crate) use clients::Clients;
pub use cluster::{
    ClusterFigures, ClusterRefusal, LeaderFigures, Leadership, Operation, ReadFigures,
};
pub(crate) use log::{Logged, LoggedLine};
pub use requests::Subject;
pub(crate) use usage::Usage;
#[cfg(test)]
pub(crate) use usage::{Owner, Taken};

use crate::config::AdminPlace;
use crate::data_directory::Disk;
use crate::limits;
use crate::listener::handshakes::Handshakes;
use crate::server::Server;
use access::Access;
use listener::Listener;
use requests::Requests;
use seat::Seat;
use statehouse_access::AccessControl;
use statehouse_access::audit::Audit;
use statehouse_files::watch::Reloads;

/// The parts that the admin API reports on, apart from policies.
pub struct Sources {
    /// The store.
    pub server: Arc<Server>,
    /// The embedded broker, if that is the one in use.
    pub broker: Option<Broker>,
    /// Authentication and authorization.
    pub access: Arc<AccessControl>,
    /// The files that are reloaded.
    pub reloads: Arc<Reloads>,
    /// The refusals.
    pub audit: Arc<Audit>,
    /// The log of the data directory, if there is one.
    pub disk: Option<Arc<Disk>>,
    /// The leadership of this host, if it is one of a cluster.
    pub leadership: Option<Arc<dyn Leadership>>,
}

/// An admin API that has its address but does not answer yet.
pub struct Admin {
    listener: Listener,
    place: AdminPlace,
    token: Option<String>,
    scope: Scope,
}

/// What a listener answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Scope {
    /// All requests of operators.
    All,
    /// Metrics and probes, without a token.
    Metrics,
}

impl Admin {
    /// Binds the address, within a runtime. Without a token every client that can connect is
    /// admitted, so the place must then be a Unix socket.
    pub fn bind(place: &AdminPlace, token: Option<String>) -> io::Result<Self> {
        let listener = Listener::bind(place)?;
        Ok(Self {
            place: listener.place()?,
            listener,
            token,
            scope: Scope::All,
        })
    }

    /// The same for metrics and probes alone.
    pub fn bind_for_metrics(place: &AdminPlace) -> io::Result<Self> {
        Ok(Self {
            scope: Scope::Metrics,
            ..Self::bind(place, None)?
        })
    }

    /// The address and the token.
    pub fn endpoint(&self) -> Endpoint {
        Endpoint {
            url: self.place.to_string(),
            token: self.token.clone(),
        }
    }

    /// Serves requests about the present subject until it is dropped.
    pub async fn run(self, subject: watch::Receiver<Subject>, audit: Arc<Audit>) {
        let listener = self.listener;
        let access = Access::new(self.token.as_deref(), &self.place);
        let requests = Requests::new(access, self.scope, audit, subject);
        let requests = Arc::new(requests);
        let arriving = Arc::new(Handshakes::new(limits::ADMIN_ARRIVING_MAX));
        let operators = Arc::new(Semaphore::new(limits::ADMIN_OPERATORS_MAX));
        loop {
            let (socket, client) = match listener.accept().await {
                Ok(accepted) => accepted,
                Err(error) => {
                    tracing::warn!(%error, "the admin API cannot accept a connection");
                    tokio::time::sleep(limits::ADMIN_ACCEPT_PAUSE).await;
                    continue;
                }
            };
            let seat = Arc::new(Seat::new(arriving.begin(client), operators.clone()));
            let requests = requests.clone();
            tokio::spawn(async move {
                let service = service_fn(|request| {
                    let (requests, seat) = (requests.clone(), seat.clone());
                    async move { requests.answer(request, &seat).await }
                });
                let connection = http1::Builder::new()
                    .timer(TokioTimer::new())
                    .header_read_timeout(limits::ADMIN_HEADER_TIMEOUT)
                    .max_headers(limits::ADMIN_HEADERS_MAX)
                    .max_header_size(limits::ADMIN_HEADER_BYTES_MAX)
                    .serve_connection(TokioIo::new(socket), service);
                let connection = tokio::time::timeout(limits::ADMIN_CONNECTION_TIMEOUT, connection);
                let ended = tokio::select! {
                    ended = connection => ended,
                    () = seat.lost() => return,
                };
                match ended {
                    Ok(Ok(())) => {}
                    Ok(Err(error)) => {
                        tracing::debug!(%error, "a connection to the admin API failed");
                    }
                    Err(_) => tracing::debug!("a connection to the admin API was too slow"),
                }
            });
        }
    }
}
