//! The listeners for clients: plain TCP, TLS, WebSocket, and WebSocket over TLS.
//!
//! Accepts sockets and hands the broker streams of MQTT, each with what is known of its remote end.
//! The certificates may change while clients are connected. This crate must never read MQTT or
//! admit a client. It rejects peers that fail the handshake of TLS or WebSocket before the broker
//! sees them. Handshakes are bounded in number and time. In a cluster the [`front`] passes clients on
//! to the host that leads.
#![forbid(unsafe_code)]

pub mod dates;
mod frames;
pub mod front;
pub mod headers;
mod revocation;
mod tls;
mod websocket;

use std::future::Future;
use std::io;
use std::net::{self, SocketAddr};
use std::os::fd::AsFd;
use std::pin::Pin;
use std::sync::Arc;

use socket2::{SockRef, TcpKeepalive};
use statehouse_mqtt::{AcceptFailures, Broker, Door, Proof};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::time::timeout;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;

use statehouse_access::audit::{Audit, Refused};
use statehouse_config::{Listen, ListenConfig, Origin, Scheme, handshakes_max, limits};
use statehouse_files::watch::{Reloads, Watched};
use statehouse_mqtt::handshakes::Handshakes;
use tls::ClientChain;
pub use tls::{Certificates, TlsError};
use websocket::{UpgradeError, upgrade};

/// Why no client can connect. The text is a sentence for the operator.
#[derive(Debug, thiserror::Error)]
pub enum ListenerError {
    /// The address cannot be bound.
    #[error("cannot listen on {0}: {1}. {advice}", advice = address_advice(.1))]
    Address(SocketAddr, io::Error),
    /// The certificates cannot be used.
    #[error(transparent)]
    Tls(#[from] TlsError),
}

/// Bound addresses. Clients that connect wait in the backlog until [`Listeners::open`].
pub struct Listeners {
    listeners: Vec<(Listen, net::TcpListener)>,
    certificates: Option<Arc<Watched<Certificates>>>,
    origins: Arc<[Origin]>,
}

/// An open listener.
pub struct OpenListener {
    /// The line for the operator: `listening on mqtts://127.0.0.1:8883`
    pub line: String,
    /// Accepts clients until it is dropped or the broker stops.
    pub accepting: Pin<Box<dyn Future<Output = ()> + Send>>,
}

impl Listeners {
    /// Binds the addresses, and reads the certificates if a listener needs them. Fails if an
    /// address is in use, or a file of certificates is invalid.
    pub fn bind(config: &ListenConfig) -> Result<Self, ListenerError> {
        let certificates = match &config.tls {
            None => None,
            Some(files) => {
                let read = files.clone();
                let load = move || {
                    let certificates = Certificates::load(&read)?;
                    dates::warn_of_files(&read);
                    Ok::<_, TlsError>(certificates)
                };
                Some(Watched::open("certificates", files.all(), load)?)
            }
        };
        let mut listeners = Vec::new();
        for listen in &config.listeners {
            let failed = |error| ListenerError::Address(listen.address, error);
            let listener = net::TcpListener::bind(listen.address).map_err(failed)?;
            listener.set_nonblocking(true).map_err(failed)?;
            listeners.push((*listen, listener));
        }
        Ok(Self {
            listeners,
            certificates,
            origins: config.ws_origins.clone().into(),
        })
    }

    /// Reloads the certificates when their files change. New handshakes use the new certificates.
    /// `then` is called so that the certificates of connected clients are verified again.
    pub fn reload_with(&self, reloads: &mut Reloads, then: impl Fn() + Send + Sync + 'static) {
        if let Some(certificates) = &self.certificates {
            reloads.add(certificates, then);
        }
    }

    /// Starts to accept clients. Fails if the system refuses to use a bound socket.
    pub fn open(self, broker: &Broker, audit: &Arc<Audit>) -> io::Result<Vec<OpenListener>> {
        let mut opened = Vec::new();
        for entrance in self.entrances(audit, handshakes_max())? {
            let (at, listener, acceptor) = (entrance.at, entrance.listener, entrance.acceptor);
            let broker = broker.clone();
            let accepting: Pin<Box<dyn Future<Output = ()> + Send>> = match acceptor.is_plain() {
                true => Box::pin(async move { broker.listen(listener).await }),
                false => Box::pin(accept(listener, move |socket, peer| {
                    acceptor.clone().serve(broker.clone(), socket, peer)
                })),
            };
            opened.push(OpenListener {
                line: format!("listening on {at}"),
                accepting,
            });
        }
        Ok(opened)
    }

    /// The bound listeners, each with the acceptor of its protocol. Fails if the system refuses to
    /// use a bound socket. All listeners share one limit of handshakes, because it bounds the
    /// memory of all.
    pub(crate) fn entrances(
        self,
        audit: &Arc<Audit>,
        handshakes_max: usize,
    ) -> io::Result<Vec<Entrance>> {
        let handshakes = Arc::new(Handshakes::new(handshakes_max));
        let mut entrances = Vec::new();
        for (listen, listener) in self.listeners {
            let listener = TcpListener::from_std(listener)?;
            // The sockets that it accepts inherit this.
            probe_if_silent(&listener);
            let address = listener.local_addr()?;
            let Scheme { tls, websocket } = listen.scheme;
            entrances.push(Entrance {
                at: Listen { address, ..listen },
                listener,
                acceptor: Arc::new(Acceptor {
                    audit: audit.clone(),
                    handshakes: handshakes.clone(),
                    tls: self.certificates.clone().filter(|_| tls),
                    origins: websocket.then(|| self.origins.clone()),
                }),
            });
        }
        Ok(entrances)
    }
}

/// A bound listener and the acceptor of its protocol.
pub(crate) struct Entrance {
    /// The protocol and the bound address.
    pub(crate) at: Listen,
    pub(crate) listener: TcpListener,
    pub(crate) acceptor: Arc<Acceptor>,
}

/// Converts accepted sockets of one protocol to streams of MQTT, which a broker serves.
pub(crate) struct Acceptor {
    audit: Arc<Audit>,
    handshakes: Arc<Handshakes>,
    /// None if the connection is not encrypted.
    tls: Option<Arc<Watched<Certificates>>>,
    /// None if the listener does not use WebSocket.
    origins: Option<Arc<[Origin]>>,
}

/// A stream of bytes over any transport.
trait Stream: AsyncRead + AsyncWrite + Send + Unpin {}

impl<S: AsyncRead + AsyncWrite + Send + Unpin> Stream for S {}

/// The stream of a client, as a listener or another host passes it on.
pub(crate) trait Socket: AsyncRead + AsyncWrite + Send + Unpin + 'static {
    /// Serves it as MQTT, without a handshake, until it ends.
    fn serve(self, broker: &Broker, peer: SocketAddr) -> impl Future<Output = ()> + Send;
}

impl Socket for TcpStream {
    async fn serve(self, broker: &Broker, peer: SocketAddr) {
        broker.serve_socket(self, peer).await;
    }
}

/// Why a handshake failed. The text is for the log.
#[derive(Debug, thiserror::Error)]
enum HandshakeError {
    #[error("{why}", why = tls::describe_failure(.0))]
    Tls(io::Error),
    #[error(transparent)]
    Upgrade(UpgradeError),
    #[error("the handshake took longer than {} s", limits::HANDSHAKE_TIMEOUT.as_secs())]
    Timeout,
    #[error(
        "too many handshakes are in progress, and this was the oldest of the address with the most"
    )]
    Evicted,
}

/// Accepts sockets until it is dropped, and serves each in its own task.
pub(crate) async fn accept<F>(listener: TcpListener, serve: impl Fn(TcpStream, SocketAddr) -> F)
where
    F: Future<Output = ()> + Send + 'static,
{
    let mut failures = AcceptFailures::default();
    loop {
        match listener.accept().await {
            Ok((socket, peer)) => {
                // Clients wait for small responses. If this fails the socket is dead, and its
                // reader will see the error.
                _ = socket.set_nodelay(true);
                probe_if_silent(&socket);
                tokio::spawn(serve(socket, peer));
            }
            Err(error) => {
                failures.log(&error, "cannot accept a connection");
                // Without file descriptors each accept fails at once.
                tokio::time::sleep(limits::ACCEPT_PAUSE).await;
            }
        }
    }
}

/// Lets the system end the connection of a client that vanished, even if the client sends no pings.
fn probe_if_silent(socket: &impl AsFd) {
    let keepalive = TcpKeepalive::new().with_time(limits::CLIENT_PROBE_AFTER);
    if let Err(error) = SockRef::from(socket).set_tcp_keepalive(&keepalive) {
        tracing::debug!(%error, "cannot probe a silent client");
    }
}

/// Reads and discards bytes until the peer closes. A socket that is closed with unread bytes is
/// reset, and the reset can overtake the alert that names the error.
async fn drain(mut socket: impl AsyncRead + AsyncWrite + Unpin) {
    // The peer may have disconnected already.
    _ = socket.shutdown().await;
    let mut discarded = [0; 512];
    while matches!(socket.read(&mut discarded).await, Ok(1..)) {}
}

/// A stream of TLS after its handshake.
pub struct Encrypted<S> {
    /// The stream.
    pub stream: TlsStream<S>,
    /// The certificates of the client, as in [`Door::certificates`].
    pub certificates: Arc<[Vec<u8>]>,
    /// Whether the store would still accept these certificates. None if there are none.
    pub proof: Option<Arc<dyn Proof>>,
}

/// Does the handshake of TLS with the certificates that are in force. A peer that fails it gets an
/// alert, if it waits for one.
pub async fn accept_tls<S: AsyncRead + AsyncWrite + Unpin>(
    watched: &Arc<Watched<Certificates>>,
    socket: S,
) -> io::Result<Encrypted<S>> {
    let current = watched.current();
    let acceptor = TlsAcceptor::from(current.config.clone());
    let stream = match acceptor.accept(socket).into_fallible().await {
        Ok(stream) => stream,
        Err((error, socket)) => {
            _ = timeout(limits::HANDSHAKE_LINGER, drain(socket)).await;
            return Err(error);
        }
    };
    let sent = stream.get_ref().1.peer_certificates().unwrap_or_default();
    let certificates = current.chain(sent).ok_or_else(|| {
        let max = limits::CLIENT_CERTIFICATES_MAX;
        io::Error::other(format!("the client sent more than {max} certificates"))
    })?;
    let proof = (!certificates.is_empty()).then(|| -> Arc<dyn Proof> {
        let chain = certificates.clone();
        Arc::new(ClientChain::new(watched.clone(), &current, chain))
    });
    Ok(Encrypted {
        stream,
        certificates,
        proof,
    })
}

impl Acceptor {
    /// Whether the streams are MQTT over TCP, without a handshake.
    pub(crate) fn is_plain(&self) -> bool {
        self.tls.is_none() && self.origins.is_none()
    }

    /// Serves a socket of a client at `peer` until it ends. A handshake takes its place before the
    /// future is polled, so that the number of sockets in handshakes is always bounded.
    pub(crate) fn serve(
        self: Arc<Self>,
        broker: Broker,
        socket: impl Socket,
        peer: SocketAddr,
    ) -> impl Future<Output = ()> + Send + 'static {
        let begun = match self.is_plain() {
            true => Err(socket),
            false => Ok(self.begin(socket, peer)),
        };
        async move {
            match begun {
                Err(socket) => socket.serve(&broker, peer).await,
                Ok(handshake) => {
                    if let Some((stream, door)) = handshake.await {
                        broker.serve_connection(stream, door).await;
                    }
                }
            }
        }
    }

    /// Takes the place of a handshake, and returns the handshake. It returns `None` if it failed,
    /// which it has reported.
    pub(crate) fn begin(
        self: Arc<Self>,
        socket: impl Socket,
        peer: SocketAddr,
    ) -> impl Future<Output = Option<(Box<dyn Stream>, Door)>> + Send + 'static {
        let place = self.handshakes.begin(peer.ip());
        async move {
            let done = tokio::select! {
                done = Box::pin(self.handshake(socket, peer)) => done,
                () = place.evicted() => Err(HandshakeError::Evicted),
                () = tokio::time::sleep(limits::HANDSHAKE_TIMEOUT) => Err(HandshakeError::Timeout),
            };
            drop(place);
            done.map_err(|error| self.report_refusal(peer, &error)).ok()
        }
    }

    async fn handshake(
        &self,
        socket: impl Socket,
        peer: SocketAddr,
    ) -> Result<(Box<dyn Stream>, Door), HandshakeError> {
        let mut door = Door::open(peer);
        let mut stream: Box<dyn Stream> = match &self.tls {
            None => Box::new(socket),
            Some(watched) => {
                let accepted = accept_tls(watched, socket).await;
                let accepted = accepted.map_err(HandshakeError::Tls)?;
                (door.certificates, door.proof) = (accepted.certificates, accepted.proof);
                Box::new(accepted.stream)
            }
        };
        if let Some(origins) = &self.origins {
            let upgraded = upgrade(stream, origins.clone()).await;
            stream = Box::new(upgraded.map_err(HandshakeError::Upgrade)?);
        }
        Ok((stream, door))
    }

    fn report_refusal(&self, peer: SocketAddr, error: &HandshakeError) {
        let what = match error {
            HandshakeError::Tls(_) => "tls",
            HandshakeError::Upgrade(_) => "websocket",
            HandshakeError::Timeout | HandshakeError::Evicted => "handshake",
        };
        self.audit.refused(&Refused::of_peer(what, peer, error));
    }
}

/// What an operator can do about an address that cannot be bound.
fn address_advice(error: &io::Error) -> &'static str {
    // ENFILE and EMFILE of Linux.
    let lacks_files = matches!(error.raw_os_error(), Some(23 | 24));
    match error.kind() {
        _ if lacks_files => {
            "Raise the limit of open files (LimitNOFILE= of a unit, or `ulimit -n`), or close files"
        }
        io::ErrorKind::AddrInUse => {
            "Another broker may be running there; stop it, or name another address with --listen"
        }
        io::ErrorKind::AddrNotAvailable => {
            "This machine has no such address: name another one with --listen"
        }
        io::ErrorKind::PermissionDenied => {
            "A port below 1024 needs the capability CAP_NET_BIND_SERVICE: give it, or name another port with --listen"
        }
        _ => "Name another address with --listen",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn address_errors_have_advice_by_their_cause() {
        let address = "10.9.9.9:1883".parse().unwrap();
        let text = |kind: io::ErrorKind| ListenerError::Address(address, kind.into()).to_string();
        assert!(text(io::ErrorKind::AddrInUse).contains("Another broker"));
        let absent = text(io::ErrorKind::AddrNotAvailable);
        assert!(absent.contains("no such address"), "{absent}");
        assert!(!absent.contains("Another broker"), "{absent}");
        assert!(text(io::ErrorKind::PermissionDenied).contains("CAP_NET_BIND_SERVICE"));
        let lack = ListenerError::Address(address, io::Error::from_raw_os_error(24)).to_string();
        assert!(lack.contains("Raise the limit of open files"), "{lack}");
    }

    #[tokio::test]
    async fn silent_clients_are_probed() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let (sender, mut sockets) = tokio::sync::mpsc::unbounded_channel();
        tokio::spawn(accept(listener, move |socket, _| {
            let sender = sender.clone();
            async move { sender.send(socket).unwrap() }
        }));
        let _client = TcpStream::connect(address).await.unwrap();
        let socket = sockets.recv().await.unwrap();
        let socket = SockRef::from(&socket);
        assert!(socket.keepalive().unwrap());
        let after = socket.tcp_keepalive_time().unwrap();
        assert_eq!(after, limits::CLIENT_PROBE_AFTER);
    }
}
