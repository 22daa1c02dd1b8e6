//! A client's socket: served by this host, passed on to the leader, or waiting for one of the two.

use std::net::SocketAddr;
use std::sync::{Arc, PoisonError};
use std::time::Instant;

use statehouse_mqtt::Broker;
use tokio::net::TcpStream;
use tokio::time::{sleep, timeout};

use super::preface::{self, Answer, PrefaceError, Purpose, Request};
use super::role::Leader;
use super::splice::{detect_dead_peer, is_closed, limit_unacknowledged, splice};
use super::{Front, Role, STREAMS};
use crate::Acceptor;
use statehouse_access::audit::Refused;
use statehouse_config::{Scheme, limits};

/// Why the leader did not accept a connection. The text is for the log.
#[derive(Debug, thiserror::Error)]
pub(super) enum ConnectError {
    #[error("it cannot be reached: {0}")]
    Unreachable(std::io::Error),
    #[error("it did not answer within {} s", limits::CLUSTER_CONNECT_TIMEOUT.as_secs())]
    Timeout,
    #[error(transparent)]
    Preface(#[from] PrefaceError),
    #[error("it does not lead")]
    NotLeading,
    #[error(
        "it has no listener {0}://: give all hosts of a cluster listeners of the same schemes with --listen"
    )]
    NoListener(&'static str),
    #[error("it refused the connection: its log says why")]
    Refused,
}

impl ConnectError {
    /// Whether the leader may be dead.
    fn is_suspicious(&self) -> bool {
        match self {
            Self::Unreachable(_) | Self::Timeout => true,
            Self::Preface(error) => matches!(error, PrefaceError::Io(_)),
            Self::NotLeading | Self::NoListener(_) | Self::Refused => false,
        }
    }

    /// Whether the same leader may accept the next attempt.
    fn is_temporary(&self) -> bool {
        self.is_suspicious() || matches!(self, Self::NotLeading)
    }
}

/// Where a client is served.
enum Place {
    Here(Broker),
    At(Leader, TcpStream),
}

/// Why a client is served nowhere. The text is for the log.
#[derive(Debug, thiserror::Error)]
enum PassError {
    #[error("this host passes on or holds as many connections as --max-connections allows")]
    Full,
    #[error("there was no leader for {0} s")]
    NoLeader(u64),
    #[error("the leader {0} at {1} did not accept the connection: {2}")]
    Leader(String, String, ConnectError),
    #[error("the client disconnected, or this host stops")]
    Ended,
}

impl Front {
    /// Serves a client's socket until it ends.
    pub(super) async fn serve(
        self: Arc<Self>,
        acceptor: Arc<Acceptor>,
        scheme: Scheme,
        socket: TcpStream,
        peer: SocketAddr,
    ) {
        // The broker limits its connections itself.
        let broker = self.role.borrow().broker().cloned();
        if let Some(broker) = broker {
            return acceptor.serve(broker, socket, peer).await;
        }
        match Box::pin(self.pass(scheme, socket, peer)).await {
            Ok(None) => {}
            Ok(Some((broker, socket))) => acceptor.serve(broker, socket, peer).await,
            Err(PassError::Ended) => {}
            Err(error) => self
                .audit
                .refused(&Refused::of_peer("cluster", peer, &error)),
        }
    }

    /// Passes a client's socket on until it ends, or returns the broker of this host for it.
    async fn pass(
        &self,
        scheme: Scheme,
        socket: TcpStream,
        peer: SocketAddr,
    ) -> Result<Option<(Broker, TcpStream)>, PassError> {
        let _permit = self.streams.try_acquire().map_err(|_| PassError::Full)?;
        if STREAMS - self.streams.available_permits() > (self.connections_max)() {
            return Err(PassError::Full);
        }
        let purpose = Purpose::Stream {
            scheme,
            client: peer,
        };
        let placed = timeout(self.hold, self.place(&socket, purpose)).await;
        match placed.map_err(|_| PassError::NoLeader(self.hold.as_secs()))?? {
            Place::Here(broker) => Ok(Some((broker, socket))),
            Place::At(leader, upstream) => {
                limit_unacknowledged(&upstream);
                let mut role = self.role.clone();
                tokio::select! {
                    biased;
                    () = splice(socket, upstream) => {}
                    () = leader.replaced(&mut role) => {}
                }
                Ok(None)
            }
        }
    }

    /// Waits until this host leads or a leader accepts the client.
    ///
    /// A client that has disconnected must never be passed on: its CONNECT would take the session
    /// over from the client's next connection, and some clients do not reconnect after that.
    async fn place(&self, socket: &TcpStream, purpose: Purpose) -> Result<Place, PassError> {
        let mut role = self.role.clone();
        loop {
            if is_closed(socket).await {
                return Err(PassError::Ended);
            }
            let present = role.borrow_and_update().clone();
            if let Role::Leading(broker) = present {
                return Ok(Place::Here(broker));
            }
            let leader = Leader::of(&present);
            let attempt = async {
                let Some(leader) = leader else {
                    sleep(limits::CLUSTER_HOLD_CHECK).await;
                    return Ok(None);
                };
                let offered = self.offer(&leader, purpose).await?;
                if offered.is_none() {
                    sleep(limits::CLUSTER_RETRY).await;
                }
                Ok(offered.map(|upstream| Place::At(leader, upstream)))
            };
            let attempted = tokio::select! {
                attempted = attempt => attempted?,
                changed = role.changed() => {
                    changed.map_err(|_| PassError::Ended)?;
                    None
                }
            };
            // The client may have disconnected during the attempt.
            if let Some(place) = attempted
                && !is_closed(socket).await
            {
                return Ok(place);
            }
        }
    }

    /// Offers a client to the leader. None if another attempt may succeed later.
    async fn offer(
        &self,
        leader: &Leader,
        purpose: Purpose,
    ) -> Result<Option<TcpStream>, PassError> {
        let permit = self.connecting.acquire().await;
        let _permit = permit.map_err(|_| PassError::Ended)?;
        if self.is_unready(leader) {
            return Ok(None);
        }
        match self.connect(leader, purpose).await {
            Ok(upstream) => Ok(Some(upstream)),
            Err(error) if error.is_temporary() => {
                // Of all streams that fail at once, one reports it.
                if self.mark_unready(leader) && error.is_suspicious() {
                    (self.suspect)();
                }
                Ok(None)
            }
            Err(error) => {
                let Leader { name, address } = leader.clone();
                Err(PassError::Leader(name, address, error))
            }
        }
    }

    /// Whether this leader accepted no stream a moment ago.
    fn is_unready(&self, leader: &Leader) -> bool {
        let unready = self.unready.lock().unwrap_or_else(PoisonError::into_inner);
        unready.as_ref().is_some_and(|(address, at)| {
            *address == leader.address && at.elapsed() < limits::CLUSTER_RETRY
        })
    }

    /// Lets all streams wait before the next attempt. False if they wait already.
    fn mark_unready(&self, leader: &Leader) -> bool {
        if self.is_unready(leader) {
            return false;
        }
        let mut unready = self.unready.lock().unwrap_or_else(PoisonError::into_inner);
        *unready = Some((leader.address.clone(), Instant::now()));
        true
    }

    /// Connects to the cluster port of the leader.
    pub(super) async fn connect(
        &self,
        leader: &Leader,
        purpose: Purpose,
    ) -> Result<TcpStream, ConnectError> {
        let request = Request {
            host: self.host.clone(),
            purpose,
        };
        let scheme = match purpose {
            Purpose::Stream { scheme, .. } => scheme.name(),
            Purpose::Link => "",
        };
        let connecting = async {
            let stream = TcpStream::connect(&leader.address).await;
            let mut stream = stream.map_err(ConnectError::Unreachable)?;
            // Clients wait for small packets. If this fails the socket is dead.
            _ = stream.set_nodelay(true);
            detect_dead_peer(&stream);
            match preface::send(&mut stream, &self.key, &request).await? {
                Answer::Accepted => Ok(stream),
                Answer::NotLeading => Err(ConnectError::NotLeading),
                Answer::NoListener => Err(ConnectError::NoListener(scheme)),
                Answer::Refused => Err(ConnectError::Refused),
            }
        };
        let connected = timeout(limits::CLUSTER_CONNECT_TIMEOUT, connecting).await;
        connected.map_err(|_| ConnectError::Timeout)?
    }
}
