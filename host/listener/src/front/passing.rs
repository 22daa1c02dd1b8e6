//! A client's socket: served by this host, passed on to the leader, or waiting for one of the two.

use std::io;
use std::net::SocketAddr;
use std::sync::{Arc, PoisonError};
use std::time::Instant;

use statehouse_mqtt::{Broker, SharedWriter};
use tokio::net::TcpStream;
use tokio::time::{sleep, timeout};

use super::mux::{self, Mux};
use super::preface::{self, Answer, PrefaceError, Purpose, Request};
use super::role::Leader;
use super::splice::{detect_dead_peer, is_closed, limit_unacknowledged, splice};
use super::{Front, Role, STREAMS};
use crate::{Acceptor, Socket};
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
    #[error("it accepted no connection a moment ago")]
    Unready,
    #[error("the connection that all clients share failed: {0}")]
    Shared(io::Error),
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
            Self::Unreachable(_) | Self::Timeout | Self::Shared(_) => true,
            Self::Preface(error) => matches!(error, PrefaceError::Io(_)),
            Self::NotLeading | Self::Unready | Self::NoListener(_) | Self::Refused => false,
        }
    }

    /// Whether the same leader may accept the next attempt.
    fn is_temporary(&self) -> bool {
        self.is_suspicious() || matches!(self, Self::NotLeading | Self::Unready)
    }
}

/// The way to a leader, for all clients.
pub(super) struct ToLeader {
    leader: Leader,
    /// None if the leader refused it: its program does not know [`Purpose::Streams`], or it serves
    /// as many as it may.
    mux: Option<Mux>,
    /// When the leader accepted or refused it.
    since: Instant,
}

/// The stream of one client at the leader.
enum Upstream {
    Shared(mux::Stream),
    Alone(TcpStream),
}

enum Place {
    Here(Broker),
    At(Leader, Upstream),
}

/// Why a client is served nowhere. The text is for the log.
#[derive(Debug, thiserror::Error)]
enum PassError {
    #[error(
        "this host passes on or holds as many connections as --max-connections and half of its open files allow"
    )]
    Full,
    #[error(
        "no leader accepted the connection within {0} s: the log of this host says whether it knows one and reaches it"
    )]
    NoLeader(u64),
    #[error("the leader {0} at {1} did not accept the connection: {2}")]
    Leader(String, String, ConnectError),
    #[error("the client disconnected before the leader accepted it, so its bytes were dropped")]
    Dropped,
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
            Ok(None) | Err(PassError::Ended) => {}
            Ok(Some((broker, socket))) => self.serve_in_turn(acceptor, broker, socket, peer).await,
            Err(error) => self
                .audit
                .refused(&Refused::of_peer("cluster", peer, &error)),
        }
    }

    /// Serves a client that waited, here or at another host, until its stream ends. Such clients
    /// come all at once, and their handshakes must not evict each other.
    pub(super) async fn serve_in_turn(
        &self,
        acceptor: Arc<Acceptor>,
        broker: Broker,
        socket: impl Socket,
        client: SocketAddr,
    ) {
        if acceptor.is_plain() {
            return acceptor.serve(broker, socket, client).await;
        }
        let Ok(turn) = self.turns.acquire().await else {
            return;
        };
        let mut handshake = Box::pin(acceptor.begin(socket, client));
        let done = timeout(limits::CLUSTER_HANDSHAKE_TURN, &mut handshake).await;
        drop(turn);
        let done = match done {
            Ok(done) => done,
            // It is slow or silent, and continues without a turn.
            Err(_) => handshake.await,
        };
        if let Some((stream, door)) = done {
            broker.serve_connection(stream, door).await;
        }
    }

    /// Passes a client's socket on until it ends, or returns the broker of this host for it.
    async fn pass(
        &self,
        scheme: Scheme,
        mut socket: TcpStream,
        peer: SocketAddr,
    ) -> Result<Option<(Broker, TcpStream)>, PassError> {
        let _permit = self.streams.try_acquire().map_err(|_| PassError::Full)?;
        if STREAMS - self.streams.available_permits() > (self.options.connections_max)() {
            return Err(PassError::Full);
        }
        let placed = timeout(self.hold, self.place(&socket, scheme, peer)).await;
        match placed.map_err(|_| PassError::NoLeader(self.hold.as_secs()))?? {
            Place::Here(broker) => Ok(Some((broker, socket))),
            Place::At(leader, upstream) => {
                let mut role = self.role.clone();
                let passing = async {
                    match upstream {
                        Upstream::Shared(stream) => {
                            let (from_client, to_client) = socket.into_split();
                            let to_client = SharedWriter::new(to_client);
                            stream.write_to(to_client.direct());
                            splice((from_client, to_client), (stream.clone(), stream)).await;
                        }
                        Upstream::Alone(mut leader) => splice(socket.split(), leader.split()).await,
                    }
                };
                tokio::select! {
                    biased;
                    () = passing => {}
                    () = leader.replaced(&mut role) => {}
                    // The client can be served through another host.
                    () = self.lost.notified() => {}
                }
                Ok(None)
            }
        }
    }

    /// Waits until this host leads or a leader accepts the client.
    ///
    /// A client that gave up and disconnected must never be passed on: its CONNECT would take the
    /// session over from the client's next connection, and some clients do not reconnect after
    /// that. Its bytes may have waited before this host accepted the socket. So a closed client is
    /// passed on only if it shows that it awaited no answer ([`is_burst`]), and at once.
    async fn place(
        &self,
        socket: &TcpStream,
        scheme: Scheme,
        client: SocketAddr,
    ) -> Result<Place, PassError> {
        let mut role = self.role.clone();
        let (began, mut is_first) = (Instant::now(), true);
        loop {
            if !is_first {
                refuse_closed(socket, false).await?;
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
                let offered = self.offer(&leader, scheme, client).await?;
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
            if let Some(place) = attempted {
                // The client may have disconnected before or during the attempt.
                let is_prompt = is_first && began.elapsed() < limits::CLUSTER_HOLD_CHECK;
                refuse_closed(socket, is_prompt).await?;
                return Ok(place);
            }
            is_first = false;
        }
    }

    /// Offers a client to the leader. None if another attempt may succeed later.
    async fn offer(
        &self,
        leader: &Leader,
        scheme: Scheme,
        client: SocketAddr,
    ) -> Result<Option<Upstream>, PassError> {
        let permit = self.connecting.acquire().await;
        let _permit = permit.map_err(|_| PassError::Ended)?;
        if self.is_unready(leader) {
            return Ok(None);
        }
        match self.upstream(leader, scheme, client).await {
            Ok(upstream) => Ok(Some(upstream)),
            Err(error) if error.is_temporary() => {
                // Of all streams that fail at once, one reports it.
                if self.mark_unready(leader) && error.is_suspicious() {
                    (self.options.suspect)();
                }
                Ok(None)
            }
            Err(error) => {
                let Leader { name, address } = leader.clone();
                Err(PassError::Leader(name, address, error))
            }
        }
    }

    /// A stream for a client at the leader.
    async fn upstream(
        &self,
        leader: &Leader,
        scheme: Scheme,
        client: SocketAddr,
    ) -> Result<Upstream, ConnectError> {
        let Some(stream) = self.open_shared(leader, scheme, client).await? else {
            let purpose = Purpose::Stream { scheme, client };
            let socket = self.connect(leader, purpose).await?;
            limit_unacknowledged(&socket);
            return Ok(Upstream::Alone(socket));
        };
        let answer = match timeout(limits::CLUSTER_CONNECT_TIMEOUT, stream.answered()).await {
            Ok(answer) => answer.map_err(ConnectError::Shared)?,
            Err(_) => {
                // The connection may be dead, or slow to recover. The next stream opens another;
                // the streams on this one may continue.
                self.forget(&stream).await;
                return Err(ConnectError::Timeout);
            }
        };
        accepted(answer, scheme.name())?;
        Ok(Upstream::Shared(stream))
    }

    /// Opens a stream on the connection to the leader, which it opens first if there is none.
    /// `None` if the leader refuses such a connection, or did so less than
    /// [`Front::streams_retry`] ago.
    async fn open_shared(
        &self,
        leader: &Leader,
        scheme: Scheme,
        client: SocketAddr,
    ) -> Result<Option<mux::Stream>, ConnectError> {
        let mut to_leader = self.to_leader.lock().await;
        if let Some(present) = &*to_leader
            && present.leader == *leader
        {
            match &present.mux {
                None if present.since.elapsed() < self.streams_retry => return Ok(None),
                None => {}
                Some(mux) => {
                    if let Some(stream) = mux.open(scheme, client) {
                        return Ok(Some(stream));
                    }
                }
            }
        }
        // Another stream may have failed to connect in the meantime.
        if self.is_unready(leader) {
            return Err(ConnectError::Unready);
        }
        let mux = match self.connect(leader, Purpose::Streams).await {
            Ok(socket) => {
                limit_unacknowledged(&socket);
                let (reader, writer) = socket.into_split();
                Some(Mux::start(reader, writer))
            }
            Err(ConnectError::Refused) => None,
            Err(error) => return Err(error),
        };
        let present = to_leader.insert(ToLeader {
            leader: leader.clone(),
            mux,
            since: Instant::now(),
        });
        match &present.mux {
            None => Ok(None),
            Some(mux) => mux
                .open(scheme, client)
                .map(Some)
                .ok_or_else(|| ConnectError::Shared(io::ErrorKind::ConnectionReset.into())),
        }
    }

    /// Opens no more streams on the connection of this stream.
    async fn forget(&self, stream: &mux::Stream) {
        let mut to_leader = self.to_leader.lock().await;
        let mux = to_leader.as_ref().and_then(|it| it.mux.as_ref());
        if mux.is_some_and(|it| it.has(stream)) {
            *to_leader = None;
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
            host: self.options.host.clone(),
            purpose,
        };
        let scheme = match purpose {
            Purpose::Stream { scheme, .. } => scheme.name(),
            Purpose::Link | Purpose::TwoWayLink | Purpose::Streams => "",
        };
        let connecting = async {
            let stream = TcpStream::connect(&leader.address).await;
            let mut stream = stream.map_err(ConnectError::Unreachable)?;
            // Clients wait for small packets. If this fails the socket is dead.
            _ = stream.set_nodelay(true);
            detect_dead_peer(&stream);
            let answer = preface::send(&mut stream, &self.key, &request).await?;
            accepted(answer, scheme)?;
            Ok(stream)
        };
        let connected = timeout(limits::CLUSTER_CONNECT_TIMEOUT, connecting).await;
        connected.map_err(|_| ConnectError::Timeout)?
    }
}

/// An error if the client has disconnected, unless it sent a burst that may be passed on.
async fn refuse_closed(socket: &TcpStream, may_be_burst: bool) -> Result<(), PassError> {
    if !is_closed(socket).await {
        return Ok(());
    }
    let mut unread = vec![0; limits::CLUSTER_BURST_BYTES_MAX];
    // Returns at once, since the socket is closed.
    match socket.peek(&mut unread).await {
        Ok(count @ 1..) if may_be_burst && is_burst(&unread[..count]) => Ok(()),
        Ok(1..) => Err(PassError::Dropped),
        _ => Err(PassError::Ended),
    }
}

/// Whether these are all packets of a client that awaited no answer, as MQTT 5 allows in section
/// 3.1.4: from CONNECT to DISCONNECT, with others between. A client that gave up sent only CONNECT.
/// Never with TLS or WebSocket, since those handshakes need answers.
fn is_burst(bytes: &[u8]) -> bool {
    const CONNECT: u8 = 1;
    const DISCONNECT: u8 = 14;
    let (mut types, mut rest) = (Vec::new(), bytes);
    while let Some((packet_type, after)) = split_packet(rest) {
        types.push(packet_type);
        rest = after;
    }
    rest.is_empty() && matches!(types[..], [CONNECT, _, .., DISCONNECT])
}

/// The type of the first packet of MQTT, and the bytes after the packet. `None` if it is not whole.
fn split_packet(bytes: &[u8]) -> Option<(u8, &[u8])> {
    let (&first, mut rest) = bytes.split_first()?;
    let mut length = 0;
    for shift in [0, 7, 14, 21] {
        let (&byte, after) = rest.split_first()?;
        rest = after;
        length |= usize::from(byte & 0x7f) << shift;
        if byte & 0x80 == 0 {
            return Some((first >> 4, rest.get(length..)?));
        }
    }
    None
}

/// Checks that a host of a cluster accepts connections at this address, HOST:PORT. Proves no
/// secret, and takes at most [`limits::CLUSTER_CONNECT_TIMEOUT`]. Fails with the reason, for the
/// operator.
pub async fn probe(address: &str) -> Result<(), String> {
    let probing = async {
        let stream = TcpStream::connect(address).await;
        let mut stream = stream.map_err(ConnectError::Unreachable)?;
        preface::read_hello(&mut stream).await?;
        Ok::<_, ConnectError>(())
    };
    let probed = timeout(limits::CLUSTER_CONNECT_TIMEOUT, probing).await;
    let probed = probed.unwrap_or(Err(ConnectError::Timeout));
    probed.map_err(|error| error.to_string())
}

/// An error, unless the leader accepted a connection, or the client of a listener of this scheme.
fn accepted(answer: Answer, scheme: &'static str) -> Result<(), ConnectError> {
    match answer {
        Answer::Accepted => Ok(()),
        Answer::NotLeading => Err(ConnectError::NotLeading),
        Answer::NoListener => Err(ConnectError::NoListener(scheme)),
        Answer::Refused => Err(ConnectError::Refused),
    }
}
