//! Where clients connect: plain TCP, TLS, WebSocket, and WebSocket over TLS.
//!
//! What enters: settings, sockets, certificates that may change while clients are connected. What leaves: streams of MQTT for
//! the broker, each with what is known of its other end. It reads no MQTT and lets nobody in: it keeps out who cannot agree on
//! an encryption or a framing, in bounded number and time, before the broker hears of him.

mod frames;
pub(crate) mod handshakes;
mod tls;
mod websocket;

use std::fmt::Display;
use std::future::Future;
use std::io;
use std::net::{self, SocketAddr};
use std::pin::Pin;
use std::sync::Arc;

use statehouse_mqtt::{Broker, Door};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::time::timeout;
use tokio_rustls::TlsAcceptor;

use crate::config::{Listen, ListenConfig, Origin};
use crate::limits;
use handshakes::Handshakes;
use statehouse_access::audit::{Audit, Refused};
use statehouse_files::watch::{Reloads, Watched};
use tls::Shown;
pub use tls::{Certificates, TlsError};
use websocket::{UpgradeError, upgrade};

/// Why nobody can connect. Its text is a sentence for the operator.
#[derive(Debug, thiserror::Error)]
pub enum ListenerError {
    /// An address that cannot be had.
    #[error(
        "cannot listen on {0}: {1}. Another broker may be running there; stop it, or name another address with --listen"
    )]
    Address(SocketAddr, io::Error),
    /// Certificates that cannot be used.
    #[error(transparent)]
    Tls(#[from] TlsError),
}

/// Addresses that were taken. Who connects waits until they are opened.
pub struct Listeners {
    listeners: Vec<(Listen, net::TcpListener)>,
    certificates: Option<Arc<Watched<Certificates>>>,
    origins: Arc<[Origin]>,
}

/// A listener that is open: what to tell the operator, and what lets clients in until it is dropped.
pub struct Opened {
    /// `listening on mqtts://127.0.0.1:8883`
    pub line: String,
    /// Runs until the broker stops.
    pub accepting: Pin<Box<dyn Future<Output = ()> + Send>>,
}

impl Listeners {
    /// Takes the addresses, and reads the certificates where one needs them.
    ///
    /// # Errors
    /// Where an address is in use, or a file is not what it should be.
    pub fn bind(config: &ListenConfig) -> Result<Self, ListenerError> {
        let certificates = match &config.tls {
            None => None,
            Some(files) => {
                let read = files.clone();
                let load = move || Certificates::load(&read);
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

    /// Lets the certificates be read again. New handshakes use the new ones; `then` is called to look at whether those of
    /// clients that are connected are still good.
    pub fn reload_with(&self, reloads: &mut Reloads, then: impl Fn() + Send + Sync + 'static) {
        if let Some(certificates) = &self.certificates {
            reloads.add(certificates, then);
        }
    }

    /// Lets clients in.
    ///
    /// # Errors
    /// Those of the system, which has lent the sockets before.
    pub fn open(self, broker: &Broker, audit: &Arc<Audit>) -> io::Result<Vec<Opened>> {
        // One number for all: it bounds memory.
        let handshakes = Arc::new(Handshakes::new(limits::HANDSHAKES_MAX));
        let mut opened = Vec::new();
        for (listen, listener) in self.listeners {
            let listener = TcpListener::from_std(listener)?;
            let address = listener.local_addr()?;
            let at = Listen { address, ..listen };
            let broker = broker.clone();
            let tls = self.certificates.clone().filter(|_| listen.scheme.tls);
            let accepting: Pin<Box<dyn Future<Output = ()> + Send>> =
                match (tls, listen.scheme.websocket) {
                    (None, false) => Box::pin(async move {
                        if let Err(error) = broker.listen(listener).await {
                            tracing::error!(%error, "nobody is let in on {at} any more");
                        }
                    }),
                    (tls, is_websocket) => {
                        let entry = Arc::new(Entry {
                            broker,
                            audit: audit.clone(),
                            handshakes: handshakes.clone(),
                            tls,
                            origins: is_websocket.then(|| self.origins.clone()),
                        });
                        Box::pin(accept(listener, entry))
                    }
                };
            opened.push(Opened {
                line: format!("listening on {at}"),
                accepting,
            });
        }
        Ok(opened)
    }
}

/// The way in over something else than plain TCP.
struct Entry {
    broker: Broker,
    audit: Arc<Audit>,
    handshakes: Arc<Handshakes>,
    /// None: not encrypted.
    tls: Option<Arc<Watched<Certificates>>>,
    /// None: no WebSocket.
    origins: Option<Arc<[Origin]>>,
}

/// A stream of bytes, whatever is below.
trait Stream: AsyncRead + AsyncWrite + Send + Unpin {}

impl<S: AsyncRead + AsyncWrite + Send + Unpin> Stream for S {}

/// Why two did not agree. Its text is for the log.
#[derive(Debug, thiserror::Error)]
enum Disagreement {
    #[error("{0}")]
    Tls(io::Error),
    #[error("it showed more than {max} certificates", max = limits::CLIENT_CERTIFICATES_MAX)]
    Certificates,
    #[error(transparent)]
    Upgrade(UpgradeError),
    #[error("it took longer than {} s", limits::HANDSHAKE_TIMEOUT.as_secs())]
    Slow,
    #[error("more began than there are places for, and this was the oldest of who has most")]
    PushedOut,
}

async fn accept(listener: TcpListener, entry: Arc<Entry>) {
    loop {
        match listener.accept().await {
            Ok((socket, peer)) => {
                // Answers are small and waited for. Where it fails the socket is dead, which is seen soon.
                _ = socket.set_nodelay(true);
                let place = entry.handshakes.begin(peer.ip());
                let entry = entry.clone();
                tokio::spawn(async move {
                    let agreed = tokio::select! {
                        agreed = Box::pin(entry.agree(socket, peer)) => agreed,
                        () = place.lost() => Err(Disagreement::PushedOut),
                        () = tokio::time::sleep(limits::HANDSHAKE_TIMEOUT) => Err(Disagreement::Slow),
                    };
                    drop(place);
                    match agreed {
                        Ok((stream, door)) => entry.broker.serve_connection(stream, door).await,
                        Err(why) => entry.refused(peer, &why),
                    }
                });
            }
            Err(error) => {
                tracing::warn!(%error, "cannot accept a connection");
                // Without file descriptors it fails at once, again and again.
                tokio::time::sleep(limits::ACCEPT_PAUSE).await;
            }
        }
    }
}

/// Reads and forgets until the peer closes: a socket that is closed with unread bytes is
/// reset, and the reset can overtake the alert that says what was wrong.
async fn drain(mut socket: TcpStream) {
    // The peer may be gone already.
    _ = socket.shutdown().await;
    let mut forgotten = [0; 512];
    while matches!(socket.read(&mut forgotten).await, Ok(1..)) {}
}

impl Entry {
    async fn agree(
        &self,
        socket: TcpStream,
        peer: SocketAddr,
    ) -> Result<(Box<dyn Stream>, Door), Disagreement> {
        let mut door = Door::open(peer);
        let mut stream: Box<dyn Stream> = match &self.tls {
            None => Box::new(socket),
            Some(watched) => {
                let certificates = watched.current();
                let acceptor = TlsAcceptor::from(certificates.config.clone());
                let accepted = acceptor.accept(socket).into_fallible().await;
                let stream = match accepted {
                    Ok(stream) => stream,
                    Err((error, socket)) => {
                        _ = timeout(limits::HANDSHAKE_LINGER, drain(socket)).await;
                        return Err(Disagreement::Tls(error));
                    }
                };
                let shown = stream.get_ref().1.peer_certificates().unwrap_or_default();
                let chain = certificates.chain(shown);
                door.certificates = chain.ok_or(Disagreement::Certificates)?;
                if !door.certificates.is_empty() {
                    let chain = door.certificates.clone();
                    door.proof = Some(Arc::new(Shown::new(watched.clone(), &certificates, chain)));
                }
                Box::new(stream)
            }
        };
        if let Some(origins) = &self.origins {
            let upgraded = upgrade(stream, origins.clone()).await;
            stream = Box::new(upgraded.map_err(Disagreement::Upgrade)?);
        }
        Ok((stream, door))
    }

    fn refused(&self, peer: SocketAddr, why: &Disagreement) {
        let what = match why {
            Disagreement::Tls(_) | Disagreement::Certificates => "tls",
            Disagreement::Upgrade(_) => "websocket",
            Disagreement::Slow | Disagreement::PushedOut => "handshake",
        };
        self.audit.refused(&Refused {
            what,
            peer: Some(peer),
            client: "",
            user: None,
            why: why as &dyn Display,
        });
    }
}
