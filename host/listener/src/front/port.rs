//! The cluster port: other hosts pass clients on to this host, and keep links, while it leads.
//!
//! A peer that does not know the secret of the cluster must never reach the broker. Handshakes are
//! bounded in number and time.

use std::future::Future;
use std::net::SocketAddr;
use std::sync::Arc;

use statehouse_mqtt::{Broker, handshakes::Handshakes};
use tokio::net::TcpStream;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::sleep;

use super::preface::{self, Answer, HostName, PrefaceError, Purpose};
use super::splice::{detect_dead_peer, limit_unacknowledged};
use super::{Front, link, mux};
use crate::Acceptor;
use statehouse_access::audit::Refused;
use statehouse_config::{Scheme, handshakes_max, limits};

/// What the cluster port needs to serve other hosts.
pub(super) struct Port {
    front: Arc<Front>,
    /// The acceptors of this host's listeners.
    acceptors: Vec<(Scheme, Arc<Acceptor>)>,
    handshakes: Arc<Handshakes>,
    /// One permit per link.
    links: Arc<Semaphore>,
    /// One permit per connection that carries streams.
    muxes: Arc<Semaphore>,
}

/// A connection of another host that was accepted.
enum Accepted {
    Link {
        host: HostName,
        two_way: bool,
        permit: OwnedSemaphorePermit,
    },
    Stream(Served),
    Streams(HostName, OwnedSemaphorePermit),
}

/// A client that this host serves.
struct Served {
    broker: Broker,
    acceptor: Arc<Acceptor>,
    client: SocketAddr,
}

/// Why a connection to the cluster port was refused. The text is for the log.
#[derive(Debug, thiserror::Error)]
enum PortError {
    #[error(transparent)]
    Preface(#[from] PrefaceError),
    #[error(
        "host {host} passed on a client of a listener {scheme}://, and this host has none: add --listen {scheme}://ADDR:PORT{files}, as on {host}"
    )]
    NoListener {
        host: HostName,
        scheme: &'static str,
        files: &'static str,
    },
    #[error(
        "host {0} opened a connection, and this host already serves {max}: check that no foreign program knows the secret of the cluster",
        max = limits::CLUSTER_LINKS_MAX
    )]
    Connections(HostName),
    #[error("the handshake took longer than {} s", limits::CLUSTER_PREFACE_TIMEOUT.as_secs())]
    Timeout,
    #[error(
        "too many handshakes are in progress, and this was the oldest of the address with the most"
    )]
    Evicted,
}

/// The most unfinished handshakes of other hosts.
fn prefaces_max() -> usize {
    limits::CLUSTER_PREFACES_MAX.min(handshakes_max())
}

impl PortError {
    fn answer(&self) -> Answer {
        match self {
            Self::NoListener { .. } => Answer::NoListener,
            _ => Answer::Refused,
        }
    }
}

impl Port {
    pub(super) fn new(front: Arc<Front>, acceptors: Vec<(Scheme, Arc<Acceptor>)>) -> Self {
        Self {
            front,
            acceptors,
            handshakes: Arc::new(Handshakes::new(prefaces_max())),
            links: Arc::new(Semaphore::new(limits::CLUSTER_LINKS_MAX)),
            muxes: Arc::new(Semaphore::new(limits::CLUSTER_LINKS_MAX)),
        }
    }

    /// Serves a socket of a host at `peer` until it ends. The handshake takes its place before the
    /// future is polled, so that their number is always bounded.
    pub(super) fn serve(
        self: Arc<Self>,
        mut socket: TcpStream,
        peer: SocketAddr,
    ) -> impl Future<Output = ()> + Send + 'static {
        let place = self.handshakes.begin(peer.ip());
        async move {
            detect_dead_peer(&socket);
            // The system probes no connection on which bytes are unacknowledged.
            limit_unacknowledged(&socket);
            let done = tokio::select! {
                done = Box::pin(self.handshake(&mut socket)) => done,
                () = place.evicted() => Err(PortError::Evicted),
                () = sleep(limits::CLUSTER_PREFACE_TIMEOUT) => Err(PortError::Timeout),
            };
            drop(place);
            match done {
                Ok(None) => {}
                Ok(Some(Accepted::Link {
                    host,
                    two_way,
                    permit,
                })) => {
                    link::serve(&self.front, &host, two_way, socket).await;
                    drop(permit);
                }
                Ok(Some(Accepted::Stream(it))) => {
                    let front = &self.front;
                    front
                        .serve_in_turn(it.acceptor, it.broker, socket, it.client)
                        .await;
                }
                Ok(Some(Accepted::Streams(host, permit))) => {
                    self.serve_streams(socket, peer, &host).await;
                    drop(permit);
                }
                // A probe, such as that of `statehouse cluster check`.
                Err(PortError::Preface(PrefaceError::Left)) => {}
                Err(error) => self.report(peer, &error),
            }
        }
    }

    /// Receives the request of a host and answers it. None if this host does not lead.
    async fn handshake(&self, socket: &mut TcpStream) -> Result<Option<Accepted>, PortError> {
        let key = &self.front.key;
        let received = preface::receive(socket, key).await?;
        let decided = self.decide(&received.request);
        let answer = match &decided {
            Ok(Some(_)) => Answer::Accepted,
            Ok(None) => Answer::NotLeading,
            Err(error) => error.answer(),
        };
        let answered = received.answer(socket, key, answer).await;
        let accepted = decided?;
        answered.map_err(PrefaceError::Io)?;
        Ok(accepted)
    }

    fn decide(&self, request: &preface::Request) -> Result<Option<Accepted>, PortError> {
        let host = &request.host;
        if let Purpose::Stream { scheme, client } = request.purpose {
            let served = self.decide_client(host, scheme, client)?;
            return Ok(served.map(Accepted::Stream));
        }
        if self.front.role.borrow().broker().is_none() {
            return Ok(None);
        }
        let has_streams = request.purpose == Purpose::Streams;
        let permits = if has_streams {
            &self.muxes
        } else {
            &self.links
        };
        let permit = permits.clone().try_acquire_owned();
        let permit = permit.map_err(|_| PortError::Connections(host.clone()))?;
        Ok(Some(match has_streams {
            true => Accepted::Streams(host.clone(), permit),
            false => Accepted::Link {
                host: host.clone(),
                two_way: request.purpose == Purpose::TwoWayLink,
                permit,
            },
        }))
    }

    /// Serves the clients that another host passes on over one connection, until it ends.
    async fn serve_streams(&self, socket: TcpStream, peer: SocketAddr, host: &HostName) {
        let (reader, writer) = socket.into_split();
        let decide = |scheme, client| match self.decide_client(host, scheme, client) {
            Ok(Some(it)) => Ok(move |stream| {
                let front = self.front.clone();
                tokio::spawn(async move {
                    front
                        .serve_in_turn(it.acceptor, it.broker, stream, it.client)
                        .await;
                });
            }),
            Ok(None) => Err(Answer::NotLeading),
            Err(error) => {
                self.report(peer, &error);
                Err(error.answer())
            }
        };
        if let Err(error) = mux::accept(reader, writer, decide).await {
            tracing::debug!("the connection of host {host} ended: {error}");
        }
    }

    /// How this host serves a client that another host passes on. None if it does not lead.
    fn decide_client(
        &self,
        host: &HostName,
        scheme: Scheme,
        client: SocketAddr,
    ) -> Result<Option<Served>, PortError> {
        let Some(broker) = self.front.role.borrow().broker().cloned() else {
            return Ok(None);
        };
        let mut acceptors = self.acceptors.iter();
        let Some((_, acceptor)) = acceptors.find(|(own, _)| *own == scheme) else {
            return Err(PortError::NoListener {
                host: host.clone(),
                scheme: scheme.name(),
                files: match scheme.tls {
                    true => " --tls-cert FILE --tls-key FILE",
                    false => "",
                },
            });
        };
        Ok(Some(Served {
            broker,
            acceptor: acceptor.clone(),
            client,
        }))
    }

    fn report(&self, peer: SocketAddr, error: &PortError) {
        let refused = Refused::of_peer("cluster", peer, error);
        self.front.audit.refused(&refused);
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use tokio::io::AsyncReadExt;
    use tokio::net::TcpListener;
    use tokio::sync::watch;

    use super::*;
    use crate::front::Role;
    use crate::front::tests::{knock, options};

    #[tokio::test]
    async fn peers_that_stall_are_evicted_for_a_host_that_does_not() {
        let (_role, role) = watch::channel(Role::Waiting);
        let front = Arc::new(Front::new(role, Arc::default(), options("gw1")));
        let port = Port {
            handshakes: Arc::new(Handshakes::new(4)),
            ..Port::new(front, Vec::new())
        };
        let port = Arc::new(port);
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let hosts = crate::accept(listener, move |socket, peer| {
            port.clone().serve(socket, peer)
        });
        let accepting = tokio::spawn(hosts);
        let mut stalled = Vec::new();
        for _ in 0..4 {
            let mut socket = TcpStream::connect(address).await.unwrap();
            socket.read_exact(&mut [0; 21]).await.unwrap();
            stalled.push(socket);
        }
        let (_socket, answer) = knock(address, Purpose::Link).await;
        assert_eq!(answer, Answer::NotLeading);
        // The first one was evicted. The others may still continue.
        let [first, second, ..] = &mut stalled[..] else {
            panic!("four are stalled");
        };
        assert!(matches!(first.read(&mut [0]).await, Ok(0) | Err(_)));
        let mut byte = [0];
        let waited = tokio::time::timeout(Duration::from_millis(50), second.read(&mut byte));
        assert!(waited.await.is_err());
        accepting.abort();
    }
}
