//! The admin API: HTTP/1.1 for operators who can read the data directory or have a token, and over
//! TLS for users with a role.
//!
//! Connections are limited in number, size and time. All changes of policies go through
//! [`Gate`](crate::policies::delivery::Gate), like on the other delivery paths. The admin API must
//! never block requests to the store, so slow work such as compiling runs on a separate thread.

mod access;
mod answer;
mod api;
mod authz;
mod changes;
mod client;
mod clients;
mod cluster;
mod edit;
mod keys;
mod listener;
mod log;
mod metrics;
pub(crate) mod overview;
mod page;
mod past;
mod query;
mod requests;
mod roles;
mod seat;
mod sessions;
mod stall;
mod stream;
mod usage;

use std::io;
use std::net::SocketAddr;
use std::pin::{Pin, pin};
use std::sync::Arc;

use hyper::StatusCode;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use statehouse_mqtt::{AcceptFailures, Broker, Proof};
use tokio::sync::watch;

pub(crate) use access::is_bearer_token;
pub use access::{Endpoint, new_token};
pub use api::Api;
pub(crate) use authz::{ASSIGNED_ID, Ask, Decision, Who, reserved};
pub(crate) use client::{Connection, NoAnswer, Question, ask, is_plain_url, is_tls_url};
pub(crate) use clients::{Client, Clients};
pub(crate) use cluster::NO_LEADER;
pub use cluster::{
    ClusterFigures, ClusterPlace, ClusterRefusal, LeaderFigures, Leadership, Operation, ReadFigures,
};
pub(crate) use listener::has_stale_socket;
pub(crate) use log::{Logged, LoggedLine};
pub(crate) use overview::Overviews;
pub use past::{DataDirectory, Reader};
pub use requests::{ReadImpediment, Subject};
pub(crate) use sessions::PREFIX as SESSION_PREFIX;
pub(crate) use usage::Usage;
#[cfg(test)]
pub(crate) use usage::{DiskRoom, Owner, Taken};

use crate::data_directory::Disk;
use access::Access;
use answer::{Answer, Refusal};
use listener::{Listener, Socket};
use requests::Requests;
use seat::{Seat, Seats};
use stall::StallLimit;
use statehouse_access::AccessControl;
use statehouse_access::audit::{Audit, Refused};
use statehouse_config::{AdminPlace, admin_arriving_max, limits};
use statehouse_files::watch::{Reloads, Watched};
use statehouse_listener::Certificates;
use statehouse_mqtt::handshakes::Handshakes;
use statehouse_server::Server;

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
    /// The data directory; none if the store is in memory.
    pub directory: Option<DataDirectory>,
    /// The log of the data directory, if there is one.
    pub disk: Option<Arc<Disk>>,
    /// The leadership of this host, if it is one of a cluster.
    pub leadership: Option<Arc<dyn Leadership>>,
}

impl Sources {
    /// Why the store cannot serve clients, if it cannot.
    fn impediment(&self) -> Option<&'static str> {
        let of_cluster = || match self.reaches_log() {
            true => None,
            false => Some("this host does not reach the log of its cluster"),
        };
        self.server.impediment().or_else(of_cluster)
    }

    /// False if this host is one of a cluster and does not reach the log.
    fn reaches_log(&self) -> bool {
        let leadership = self.leadership.as_ref();
        leadership.is_none_or(|it| it.figures().reaches_log)
    }

    /// Waits until the state of this host may be shown. A host of a cluster may have been replaced
    /// without knowing it, and its state is old then.
    async fn check_lease(&self) -> Result<(), Refusal> {
        match &self.broker {
            Some(broker) if !broker.may_decide().await => {
                let error = "this host must not answer now: it does not lead its cluster, or it cannot reach its log";
                Err(Refusal::new(StatusCode::SERVICE_UNAVAILABLE, error))
            }
            _ => Ok(()),
        }
    }

    /// The answer to an act, if this host still leads. Otherwise the act may have taken effect: the
    /// host can have stopped leading after it.
    async fn confirm(&self, answered: Result<Answer, Refusal>) -> Result<Answer, Refusal> {
        if answered
            .as_ref()
            .is_err_and(|it| it.status.is_server_error())
        {
            return answered;
        }
        let Err(unproven) = self.check_lease().await else {
            return answered;
        };
        Err(match answered {
            Err(_) => unproven,
            Ok(_) => {
                let error = "this host cannot prove that it still leads its cluster, so it is not known whether this took effect: look before you repeat it";
                Refusal::new(unproven.status, error)
            }
        })
    }
}

/// An admin API that has its address but does not answer yet.
pub struct Admin {
    listener: Listener,
    url: String,
    token: Option<String>,
    access: Access,
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
        let access = match place {
            AdminPlace::Tcp(address) => Access::of_tcp(*address, token.as_deref(), None),
            AdminPlace::Unix(_) => Access::of_socket(),
        };
        Self::of(Listener::bind(place)?, token, access)
    }

    /// Binds an address for TLS, within a runtime. Users with a role are admitted, and clients with
    /// the token.
    pub fn bind_tls(
        address: SocketAddr,
        certificates: Arc<Watched<Certificates>>,
        token: Option<String>,
        users: Arc<AccessControl>,
    ) -> io::Result<Self> {
        let access = Access::of_tcp(address, token.as_deref(), Some(users));
        Self::of(Listener::bind_tls(address, certificates)?, token, access)
    }

    fn of(listener: Listener, token: Option<String>, access: Access) -> io::Result<Self> {
        Ok(Self {
            url: listener.url()?,
            listener,
            token,
            access,
            scope: Scope::All,
        })
    }

    /// The same for metrics and probes alone.
    pub fn bind_for_metrics(place: &AdminPlace) -> io::Result<Self> {
        Ok(Self {
            scope: Scope::Metrics,
            access: Access::for_metrics(),
            ..Self::bind(place, None)?
        })
    }

    /// The address and the token.
    pub fn endpoint(&self) -> Endpoint {
        Endpoint {
            url: self.url.clone(),
            token: self.token.clone(),
        }
    }

    /// Serves requests about the present subject until it is dropped.
    pub(crate) async fn run(
        self,
        subject: watch::Receiver<Subject>,
        overviews: Arc<Overviews>,
        audit: Arc<Audit>,
    ) {
        let requests = Requests::new(self.access, self.scope, audit.clone(), subject, overviews);
        let requests = Arc::new(requests);
        let arriving = Arc::new(Handshakes::new(admin_arriving_max()));
        let seats = Arc::new(Seats::default());
        let mut failures = AcceptFailures::default();
        loop {
            let (socket, peer) = match self.listener.accept().await {
                Ok(accepted) => accepted,
                Err(error) => {
                    failures.log(&error, "the admin API cannot accept a connection");
                    tokio::time::sleep(limits::ADMIN_ACCEPT_PAUSE).await;
                    continue;
                }
            };
            let seat = Arc::new(Seat::new(arriving.begin(peer.ip()), seats.clone()));
            let (requests, audit) = (requests.clone(), audit.clone());
            tokio::spawn(async move {
                tokio::select! {
                    () = connection(socket, peer, &requests, &audit, &seat) => {}
                    () = seat.lost() => {}
                }
            });
        }
    }
}

async fn connection(
    socket: Socket,
    peer: SocketAddr,
    requests: &Arc<Requests>,
    audit: &Audit,
    seat: &Arc<Seat>,
) {
    let opened = tokio::time::timeout(limits::ADMIN_HEADER_TIMEOUT, socket.open()).await;
    let (stream, proof) = match opened {
        Ok(Ok(opened)) => opened,
        Ok(Err(error)) => {
            return audit.refused(&Refused::of_peer("tls", peer, &error));
        }
        Err(_) => return tracing::debug!("a TLS handshake with the admin API was too slow"),
    };
    let stream = StallLimit::new(stream, limits::ADMIN_ANSWER_STALL);
    let service = service_fn(|request| {
        let (requests, seat) = (requests.clone(), seat.clone());
        async move { requests.answer(request, &seat, peer).await }
    });
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(limits::ADMIN_HEADER_TIMEOUT)
        .max_headers(limits::ADMIN_HEADERS_MAX)
        .max_header_size(limits::ADMIN_HEADER_BYTES_MAX)
        .serve_connection(TokioIo::new(stream), service);
    let aged = tokio::time::sleep(limits::ADMIN_CONNECTION_TIMEOUT);
    tokio::select! {
        ended = serve(connection, aged, |it| it.graceful_shutdown()) => {
            if let Err(error) = ended {
                tracing::debug!(%error, "a connection to the admin API failed");
            }
        }
        () = seat.expired() => tracing::debug!("a connection to the admin API lasted too long"),
        () = refuted(proof.as_deref()) => {
            let why = "the certificate of this client is no longer valid";
            audit.refused(&Refused::of_peer("administer", peer, &why));
        }
    }
}

/// Serves a connection until it has `aged`. Then `finish` must let it answer the request that it
/// has begun, and no other one.
async fn serve<C: Future>(
    connection: C,
    aged: impl Future<Output = ()>,
    finish: impl FnOnce(Pin<&mut C>),
) -> C::Output {
    let mut connection = pin!(connection);
    tokio::select! {
        biased;
        ended = connection.as_mut() => return ended,
        () = aged => {}
    }
    finish(connection.as_mut());
    connection.await
}

/// Waits until a certificate is not accepted any more.
async fn refuted(certificate: Option<&dyn Proof>) {
    let Some(certificate) = certificate else {
        return std::future::pending().await;
    };
    while certificate.is_good() {
        tokio::time::sleep(limits::ADMIN_CHECK_INTERVAL).await;
    }
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;

    use bytes::Bytes;
    use http_body_util::Full;
    use hyper::Response;
    use tokio::io::{AsyncReadExt, AsyncWriteExt, duplex};
    use tokio::sync::Notify;

    use super::*;

    /// Regression: the connection ended in the middle of a request.
    #[tokio::test]
    async fn aged_connection_answers_its_request_and_closes() {
        let (mut client, server) = duplex(1 << 10);
        let (arrived, may_answer) = (Notify::new(), Notify::new());
        let service = service_fn(|_| async {
            arrived.notify_one();
            may_answer.notified().await;
            Ok::<_, Infallible>(Response::new(Full::new(Bytes::from_static(b"done"))))
        });
        let connection = http1::Builder::new().serve_connection(TokioIo::new(server), service);
        let serving = serve(connection, arrived.notified(), |it| {
            it.graceful_shutdown();
            may_answer.notify_one();
        });
        let asking = async {
            let request = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n";
            client.write_all(request).await.unwrap();
            let mut answer = String::new();
            client.read_to_string(&mut answer).await.unwrap();
            answer
        };
        let (served, answer) = tokio::join!(serving, asking);
        served.unwrap();
        assert!(answer.starts_with("HTTP/1.1 200 OK\r\n"), "{answer}");
        assert!(answer.contains("connection: close"), "{answer}");
        assert!(answer.ends_with("\r\n\r\ndone"), "{answer}");
    }

    #[tokio::test]
    async fn aged_connection_without_a_request_closes() {
        let (mut client, server) = duplex(1 << 10);
        let service =
            service_fn(|_| async { Ok::<_, Infallible>(Response::new(Full::new(Bytes::new()))) });
        let connection = http1::Builder::new().serve_connection(TokioIo::new(server), service);
        let serving = serve(connection, std::future::ready(()), |it| {
            it.graceful_shutdown()
        });
        serving.await.unwrap();
        assert_eq!(client.read(&mut [0]).await.unwrap(), 0);
    }
}
