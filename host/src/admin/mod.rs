//! The administration: HTTP, for those who may read the data directory or have been given a token.
//!
//! What enters: HTTP/1.1 requests, bounded in number, size and time. What leaves: JSON, or metrics as text. It
//! decides nothing: policies are shipped and steered through [`Gate`], as on every other way. It never waits on the path of a
//! request to the store, and what takes long (compiling) runs on a thread of its own.

mod access;
mod answer;
mod api;
mod authz;
mod client;
mod listener;
mod metrics;
mod path;
mod seat;
mod usage;

use std::io;
use std::sync::Arc;

use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use statehouse_mqtt::Broker;
use tokio::sync::Semaphore;

pub use access::{Door, new_token};
pub(crate) use authz::{Ask, Told, Who};
pub(crate) use client::ask;
pub(crate) use path::encode;
pub(crate) use usage::Usage;
#[cfg(test)]
pub(crate) use usage::{Owner, Taken};

use crate::config::AdminPlace;
use crate::limits;
use crate::listener::handshakes::Handshakes;
use crate::server::Server;
use crate::ship::Gate;
use access::Access;
use api::Api;
use listener::Listener;
use seat::Seat;
use statehouse_access::AccessControl;
use statehouse_access::audit::Audit;
use statehouse_files::watch::Reloads;

/// What the administration tells of, beside policies.
pub struct Sources {
    /// The store.
    pub server: Arc<Server>,
    /// Its own broker, where it has one.
    pub broker: Option<Broker>,
    /// What clients may do.
    pub access: Arc<AccessControl>,
    /// Files that are read again.
    pub reloads: Arc<Reloads>,
    /// Who was refused.
    pub audit: Arc<Audit>,
}

/// An administration that can be reached, but does not answer yet.
pub struct Admin {
    listener: Listener,
    place: AdminPlace,
    token: Option<String>,
}

impl Admin {
    /// Takes the place, within a runtime. Without a token whoever can connect is let in, so that it has to be a socket of the file
    /// system.
    pub fn bind(place: &AdminPlace, token: Option<String>) -> io::Result<Self> {
        let listener = Listener::bind(place)?;
        Ok(Self {
            place: listener.place()?,
            listener,
            token,
        })
    }

    /// How to come in.
    pub fn door(&self) -> Door {
        Door {
            url: self.place.to_string(),
            token: self.token.clone(),
        }
    }

    /// Answers until it is dropped.
    pub async fn run(self, gate: Arc<Gate>, sources: Sources) {
        let listener = self.listener;
        let api = Arc::new(Api::new(
            Access::new(self.token.as_deref(), &self.place),
            gate,
            sources,
        ));
        let arriving = Arc::new(Handshakes::new(limits::ADMIN_ARRIVING_MAX));
        let operators = Arc::new(Semaphore::new(limits::ADMIN_OPERATORS_MAX));
        loop {
            let (socket, client) = match listener.accept().await {
                Ok(accepted) => accepted,
                Err(error) => {
                    tracing::warn!(%error, "the administration cannot accept a connection");
                    tokio::time::sleep(limits::ADMIN_ACCEPT_PAUSE).await;
                    continue;
                }
            };
            let seat = Arc::new(Seat::new(arriving.begin(client), operators.clone()));
            let api = api.clone();
            tokio::spawn(async move {
                let service = service_fn(|request| {
                    let (api, seat) = (api.clone(), seat.clone());
                    async move { api.answer(request, &seat).await }
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
                        tracing::debug!(%error, "a connection of the administration broke");
                    }
                    Err(_) => tracing::debug!("a connection of the administration was too slow"),
                }
            });
        }
    }
}
