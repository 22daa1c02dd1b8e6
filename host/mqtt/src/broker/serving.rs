//! Serves connections and timers until the broker shuts down.

use std::{
    future::poll_fn,
    net::SocketAddr,
    sync::{Arc, atomic::Ordering},
    task::Poll,
    time::{Duration, Instant},
};

use statehouse_protocol::{ConnectionId, SessionId};
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::{TcpListener, TcpStream},
};

use super::{Broker, SOCKETS};
use crate::{
    AcceptFailures, Attempt, Door, ReasonCode, Refusal, Verdict,
    clock::Clock,
    connection,
    limits::{LEASE_WAIT_MAX, WALL_CLOCK_LOOK},
    output::Direct,
    shared_writer::SharedWriter,
};

impl Broker {
    /// Accepts connections until [`shutdown`](Self::shutdown) and serves each in its own tasks. May
    /// be called for several listeners. Errors of single connections and a lack of file descriptors
    /// do not end it.
    pub async fn listen(&self, listener: TcpListener) {
        let mut failures = AcceptFailures::default();
        loop {
            let accepted = tokio::select! {
                accepted = listener.accept() => accepted,
                () = self.stopped() => return,
            };
            match accepted {
                Ok((socket, peer)) => {
                    let broker = self.clone();
                    tokio::spawn(async move { broker.serve_socket(socket, peer).await });
                }
                Err(error) => {
                    failures.log(&error, "cannot accept a connection");
                    // Without file descriptors accept fails immediately, so wait before the next
                    // attempt.
                    tokio::time::sleep(Duration::from_millis(50)).await;
                }
            }
        }
    }

    /// Serves one accepted socket until it ends, as [`listen`](Self::listen) does. `peer` is the
    /// address of the client. It differs from that of the socket if another host passes the stream
    /// on.
    pub async fn serve_socket(&self, socket: TcpStream, peer: SocketAddr) {
        // Answers are small and clients wait for them. If this fails, the socket is dead and its
        // reader will see the error.
        _ = socket.set_nodelay(true);
        let (reader, writer) = socket.into_split();
        let writer = SharedWriter::new(writer);
        let direct = writer.direct();
        let door = Door::open(peer);
        self.serve(reader, writer, Some(direct), door).await;
    }

    /// Serves a stream of a client at `peer` that any thread can write to, until it ends.
    pub async fn serve_direct<S>(&self, stream: S, peer: SocketAddr)
    where
        S: AsyncRead + AsyncWrite + Direct + Clone + Unpin + Send + 'static,
    {
        let direct = Arc::new(stream.clone());
        self.serve(stream.clone(), stream, Some(direct), Door::open(peer))
            .await;
    }

    /// Serves one connection over any byte stream until it ends.
    pub async fn serve_connection<S>(&self, stream: S, door: Door)
    where
        S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    {
        let (reader, writer) = tokio::io::split(stream);
        self.serve(reader, writer, None, door).await;
    }

    async fn serve<R, W>(
        &self,
        reader: R,
        mut writer: W,
        direct: Option<Arc<dyn Direct>>,
        door: Door,
    ) where
        R: AsyncRead + Unpin + Send,
        W: AsyncWrite + Unpin + Send + 'static,
    {
        let permit = self.0.sockets.clone().try_acquire_owned();
        let taken = SOCKETS as usize - self.0.sockets.available_permits();
        let address = door.peer.ip();
        // A client that wants to connect takes the place of one that has sent no CONNECT.
        let has_room =
            || taken <= self.limits().connections_max || self.0.arriving.evict_for(address);
        let Some(_permit) = permit.ok().filter(|_| has_room()) else {
            // A shutdown takes all permits.
            if !self.is_stopping() {
                self.turn_away(door.peer);
            }
            return connection::close_at_once(&mut writer).await;
        };
        let place = self.0.arriving.begin(address);
        // Created before the flag is read, so that a shutdown in between is not missed.
        let abort = self.0.abort.notified();
        if self.is_stopping() {
            return connection::close_at_once(&mut writer).await;
        }
        tokio::select! {
            () = connection::run(self, reader, writer, direct, door, place) => {}
            () = abort => {}
        }
    }

    /// Counts and reports a connection that is closed because there are too many.
    pub(crate) fn turn_away(&self, peer: SocketAddr) {
        self.0.turned_away.fetch_add(1, Ordering::Relaxed);
        let text = "the broker has reached its limit of connections";
        let refusal = Refusal::of_connect(ReasonCode::SERVER_BUSY, text, peer);
        self.0.refusals.report(&refusal);
    }

    /// Ends sessions, sends wills and drops expired messages of disconnected clients when they are
    /// due, and reads the wall clock periodically. Runs until [`shutdown`](Self::shutdown).
    pub async fn run_timers(&self) {
        while !self.is_stopping() {
            let earlier = self.0.earlier.notified();
            let now = Instant::now();
            let is_due = self.lock().next_deadline().is_some_and(|at| at <= now);
            // Looking at the time alone must not renew a lease, because a renewal is a write.
            if is_due && !self.may_decide().await {
                tokio::time::sleep(WALL_CLOCK_LOOK).await;
                continue;
            }
            let next = {
                let mut core = self.lock();
                core.set_clock(Clock::now());
                match is_due {
                    true => core.run_deadlines(now),
                    false => core.next_deadline(),
                }
            };
            let look = now + WALL_CLOCK_LOOK;
            let next = next.map_or(look, |at| at.min(look));
            if next <= now {
                // The work limit of one turn is used up: let connections run.
                tokio::task::yield_now().await;
                continue;
            }
            tokio::select! {
                () = tokio::time::sleep_until(next.into()) => {}
                () = earlier => {}
                () = self.stopped() => return,
            }
        }
    }

    /// Sends DISCONNECT 0x8B to every client, waits at most `grace` for delivery, then closes.
    /// Listeners and timers end, and no client can connect any more.
    ///
    /// Wills of durable sessions are stored for the restart: section 3.1.2.5 lets a server that
    /// shuts down defer them. Other sessions end with their connection, so their wills are
    /// published. They become retained messages, or wait for durable sessions.
    pub async fn shutdown(&self, grace: Duration) {
        self.0.stopping.store(true, Ordering::Release);
        self.lock().shut_down();
        self.0.stop.notify_waiters();
        let all_ended = || self.0.sockets.acquire_many(SOCKETS);
        if tokio::time::timeout(grace, all_ended()).await.is_err() {
            self.0.abort.notify_waiters();
            // These connections end at once, without waiting for their clients.
            _ = all_ended().await;
        }
    }

    fn is_stopping(&self) -> bool {
        self.0.stopping.load(Ordering::Acquire)
    }

    async fn stopped(&self) {
        let stop = self.0.stop.notified();
        if !self.is_stopping() {
            stop.await;
        }
    }

    /// Authenticates a client; none if too many attempts are pending.
    ///
    /// An attempt that is decided at once needs no permit, so a flood of pending attempts cannot
    /// refuse a client whose password is cached.
    pub(crate) async fn admit(&self, attempt: Attempt) -> Option<Verdict> {
        let mut deciding = self.0.access.admit(attempt);
        let immediate = poll_fn(|context| match deciding.as_mut().poll(context) {
            Poll::Ready(verdict) => Poll::Ready(Some(verdict)),
            Poll::Pending => Poll::Ready(None),
        });
        if let Some(verdict) = immediate.await {
            return Some(verdict);
        }
        let _permit = self.0.admissions.try_acquire().ok()?;
        Some(deciding.await)
    }

    /// Begins a session for a request of this process itself. It has no connection and gets no
    /// messages. Its user is recorded, so that a reader of the log can name the user of the
    /// request.
    ///
    /// `None` if this host must not decide anything now: it does not lead, or it stops.
    pub async fn begin_own_session(&self, user: Option<&str>) -> Option<(SessionId, ConnectionId)> {
        if !self.may_decide().await || self.is_draining() {
            return None;
        }
        Some(self.lock().begin_own_session(user))
    }

    /// Waits a limited time until input that was read before this call may be decided. False if it
    /// must not be: the connection must end.
    pub async fn may_decide(&self) -> bool {
        match &self.0.lease {
            Some(lease) if !lease.is_valid() => {
                let renewed = tokio::time::timeout(LEASE_WAIT_MAX, lease.renewed());
                renewed.await.unwrap_or(false)
            }
            _ => true,
        }
    }
}
