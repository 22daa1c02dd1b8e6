//! The front of a cluster host: every host accepts clients, and one host leads and serves them.
//!
//! ```text
//! client ─ listener ─┬─ this host leads ──────── acceptor (TLS, WebSocket) ─ broker
//!                    ├─ another host leads ───── mux ─ its cluster port ─ acceptor ─ broker
//!                    └─ no leader is known ───── wait, then one of the two
//! ```
//!
//! A host that does not lead must pass a stream on before TLS: only the leader knows what a
//! client's certificate allows. The leader serves such a stream as if its own listener of the same
//! scheme had accepted it, with the address of the client. So both hosts need listeners of the same
//! schemes, and certificates for the same names.
//!
//! * [`Role`]: whether this host leads, follows a leader, or knows none.
//! * `passing`: a client's socket is served here, passed on, or waits.
//! * `preface`: how two hosts recognize each other. `mux`: the streams of many clients on one
//!   connection. `splice`: passes bytes.
//! * `port`: the cluster port, where other hosts connect to a leader.
//! * `link`: a follower detects that the leader has died, and compares its clock with the leader's.
//!
//! Between hosts, streams are as encrypted as between client and host: a plain one stays plain.

mod link;
mod mux;
mod passing;
mod port;
mod preface;
mod role;
mod splice;
#[cfg(test)]
mod tests;

use std::io;
use std::net;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use tokio::net::TcpListener;
use tokio::sync::{Notify, Semaphore, watch};

use crate::{Listeners, OpenListener, accept};
pub use link::{Links, Times};
use passing::ToLeader;
pub use passing::probe;
use port::Port;
pub use preface::HostName;
use preface::Key;
pub use role::Role;
use statehouse_access::audit::Audit;
use statehouse_config::{handshakes_max, limits};

/// More streams than there can be. The number in use is compared with the limit.
const STREAMS: usize = Semaphore::MAX_PERMITS;

/// The settings of a front.
pub struct FrontOptions {
    /// The name of this host, for the logs of the leader.
    pub host: HostName,
    /// The secret that all hosts of the cluster know.
    pub secret: [u8; 32],
    /// The limit of the broker, which may change. No more streams than that are passed on or wait.
    /// It must return at once.
    pub connections_max: Arc<dyn Fn() -> usize + Send + Sync>,
    /// Called if the leader does not answer: once for each failure. It must return at once.
    pub suspect: Arc<dyn Fn() + Send + Sync>,
    /// Whether this host, while it leads, reaches the log. If not, its followers suspect it.
    pub reaches_log: Arc<dyn Fn() -> bool + Send + Sync>,
    /// The clocks of this host, while it leads. It must return at once.
    pub times: Arc<dyn Fn() -> Option<Times> + Send + Sync>,
    /// Called with the clocks of the leader, as they arrive. It must return at once.
    pub compare: Arc<dyn Fn(Times) + Send + Sync>,
    /// The links of its followers while this host leads, and its own while it follows.
    pub links: Arc<Links>,
}

/// The state that all connections of a front share.
pub struct Front {
    /// What this host does at present. If its sender is dropped, the front ends.
    role: watch::Receiver<Role>,
    key: Key,
    audit: Arc<Audit>,
    options: FrontOptions,
    /// One of [`STREAMS`] permits per stream that is passed on or waits.
    streams: Semaphore,
    /// One permit per connection to the leader that has no answer yet.
    connecting: Semaphore,
    /// The limit of handshakes.
    handshakes_max: usize,
    /// One permit per handshake that has its turn.
    turns: Semaphore,
    /// The address of the leader that accepted no stream, and when. Streams wait before the next
    /// attempt.
    unready: Mutex<Option<(String, Instant)>>,
    /// The connection to the present leader.
    to_leader: tokio::sync::Mutex<Option<ToLeader>>,
    /// Ends all streams that are passed on: the leader was silent for [`Self::hold`].
    lost: Notify,
    /// [`limits::CLUSTER_HOLD`]; shorter in tests.
    hold: Duration,
    /// [`limits::CLUSTER_STREAMS_RETRY`]; shorter in tests.
    streams_retry: Duration,
}

impl Front {
    /// Starts to accept clients and other hosts. Returns the lines for the operator and the futures
    /// to spawn, of which the last one serves the cluster port and keeps the link to the leader.
    /// Fails if the system refuses to use a bound socket.
    pub fn open(
        listeners: Listeners,
        cluster_port: net::TcpListener,
        role: watch::Receiver<Role>,
        audit: Arc<Audit>,
        options: FrontOptions,
    ) -> io::Result<Vec<OpenListener>> {
        let front = Self::new(role, audit, options);
        Arc::new(front).listen(listeners, cluster_port)
    }

    fn new(role: watch::Receiver<Role>, audit: Arc<Audit>, options: FrontOptions) -> Self {
        Self {
            role,
            key: Key::new(&options.secret),
            audit,
            options,
            streams: Semaphore::new(STREAMS),
            connecting: Semaphore::new(limits::CLUSTER_CONNECTING_MAX),
            handshakes_max: handshakes_max(),
            turns: Semaphore::new(handshakes_max().div_ceil(2)),
            unready: Mutex::default(),
            to_leader: tokio::sync::Mutex::default(),
            lost: Notify::new(),
            hold: limits::CLUSTER_HOLD,
            streams_retry: limits::CLUSTER_STREAMS_RETRY,
        }
    }

    fn listen(
        self: Arc<Self>,
        listeners: Listeners,
        cluster_port: net::TcpListener,
    ) -> io::Result<Vec<OpenListener>> {
        let mut opened = Vec::new();
        let mut acceptors = Vec::new();
        for entrance in listeners.entrances(&self.audit, self.handshakes_max)? {
            let (scheme, acceptor) = (entrance.at.scheme, entrance.acceptor);
            acceptors.push((scheme, acceptor.clone()));
            let front = self.clone();
            let accepting = accept(entrance.listener, move |socket, peer| {
                front.clone().serve(acceptor.clone(), scheme, socket, peer)
            });
            opened.push(OpenListener {
                line: format!("listening on {}", entrance.at),
                accepting: Box::pin(accepting),
            });
        }
        cluster_port.set_nonblocking(true)?;
        let cluster_port = TcpListener::from_std(cluster_port)?;
        let line = format!(
            "accepting hosts of the cluster on {}",
            cluster_port.local_addr()?
        );
        let port = Arc::new(Port::new(self.clone(), acceptors));
        let hosts = accept(cluster_port, move |socket, peer| {
            port.clone().serve(socket, peer)
        });
        let accepting = async move {
            tokio::join!(hosts, link::keep(&self), link::end_lost(&self));
        };
        opened.push(OpenListener {
            line,
            accepting: Box::pin(accepting),
        });
        Ok(opened)
    }
}
