//! A foreign broker as a transport: the store connects to it as a client, over `statehouse_link`.
//!
//! Passes requests and disconnections of clients to the store, and publishes its responses and
//! notifications. The PUBACK of a request must not leave before its effect is durable and the
//! broker has acknowledged its output. This module must never execute a request or interpret a
//! payload.
//!
//! If the broker is slow, requests are not acknowledged, so they wait at the broker. If the broker
//! is absent, the output waits here. The broker redelivers unacknowledged requests over the next
//! connection, and the store recognizes them by their identity.

mod arrivals;
mod backlog;
mod claim;
pub mod identity;
mod incoming;
mod outgoing;
pub mod presence;
mod state;
#[cfg(test)]
mod tests;

use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use statehouse_link::tls::{self, TlsError};
use statehouse_link::{End, Options, Place};
use statehouse_mqtt::{Message, QoS};
use tokio::sync::{Notify, watch};

use self::backlog::Backlog;
use self::claim::Claim;
use self::presence::ttl::Ttl;
use self::presence::{Presence, PresenceStatus};
pub use self::state::Figures;
use self::state::{State, may_log};
use super::{Inbound, Intake, Outbound, Transport};
use statehouse_access::Authorizer;
use statehouse_config::{BrokerUrl, ForeignConfig, limits};
use statehouse_core::store::Peer;

/// A store's session with a foreign broker.
pub struct Foreign {
    intake: Arc<dyn Intake>,
    /// The output. Under this lock no other one is taken, except that of the store's outbox. It may
    /// be taken under the lock of `held`, and under that of the store.
    state: Mutex<State>,
    /// Arrivals that wait while there is too much output, or until the mark of a later run would
    /// have arrived. Only the link's task adds and takes them.
    held: Mutex<Backlog>,
    presence: Mutex<Presence>,
    /// None if no other run can have the client id.
    claim: Option<Mutex<Claim>>,
    ttl: Option<Mutex<Ttl>>,
    /// The access rules for clients, by the ids that they claim.
    rules: Option<Arc<Authorizer>>,
    config: ForeignConfig,
    /// Why the files of the configuration could not be read again, as it was logged.
    unreadable: Mutex<Option<String>>,
    /// The URL of the broker, for log lines.
    place: String,
    phase: watch::Sender<Phase>,
    /// Whether no further request may start.
    closed: AtomicBool,
    /// Notified when the link must end.
    stopping: Notify,
}

/// The progress of the store's session.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Phase {
    /// The store was never attached.
    Waiting,
    /// The store was attached; there may be no connection at the moment.
    Attached,
    /// The link has ended and makes no further connection.
    Ended(End),
}

impl Foreign {
    /// Passes requests to `intake`, with this configuration and client id. Does nothing until
    /// [`statehouse_link::run`] is called. Without rules every client may do everything.
    pub fn new(
        intake: Arc<dyn Intake>,
        config: &ForeignConfig,
        client_id: &str,
        rules: Option<Arc<Authorizer>>,
    ) -> Arc<Self> {
        Arc::new(Self {
            intake,
            state: Mutex::new(State::new(config.outbox)),
            held: Mutex::default(),
            presence: Mutex::new(Presence::new(
                config.presence,
                config.broker.scheme.websocket,
            )),
            claim: (config.keeps_client_id).then(|| Mutex::new(Claim::new(client_id))),
            ttl: config.watch_ttl.map(|ttl| Mutex::new(Ttl::new(ttl))),
            rules,
            config: config.clone(),
            unreadable: Mutex::default(),
            place: config.broker.to_string(),
            phase: watch::Sender::new(Phase::Waiting),
            closed: AtomicBool::new(false),
            stopping: Notify::new(),
        })
    }

    /// The phase and its changes.
    pub fn phase(&self) -> watch::Receiver<Phase> {
        self.phase.subscribe()
    }

    /// Whether the broker reports disconnected clients.
    pub fn presence(&self) -> PresenceStatus {
        lock(&self.presence).status()
    }

    /// Ends the watches of clients that were silent for too long, until the future is dropped.
    /// `watching` returns the clients with watches.
    pub async fn expire_watches(&self, watching: impl Fn() -> Vec<Peer>) {
        let Some(ttl) = &self.ttl else {
            return;
        };
        loop {
            let interval = lock(ttl).interval();
            let due = Instant::now() + interval;
            tokio::time::sleep(interval).await;
            self.check_watches(&watching, due, Instant::now());
        }
    }

    /// Ends the watches of silent clients, at a check that was due at `due`. After a pause of the
    /// process (SIGSTOP, `docker pause`) the timer may fire before the link has read the requests
    /// that arrived meanwhile, so a late check ends none.
    fn check_watches(&self, watching: &impl Fn() -> Vec<Peer>, due: Instant, now: Instant) {
        let is_late = now.saturating_duration_since(due) > limits::WATCH_TTL_CHECK_LATE;
        match &self.ttl {
            Some(ttl) if is_late => lock(ttl).restart(now),
            _ => self.end_silent_watches(watching, now),
        }
    }

    fn end_silent_watches(&self, watching: &impl Fn() -> Vec<Peer>, now: Instant) {
        let Some(ttl) = &self.ttl else {
            return;
        };
        let watching = watching();
        let silent = lock(ttl).check(watching, now);
        // The store calls this under its lock, so no request of the client is executed meanwhile.
        let expires = |peer: &&Peer| lock(ttl).expire(&peer.client, now);
        let mut expired = silent.iter().filter(expires).map(Inbound::Disconnected);
        self.intake.take(&mut expired);
    }

    /// Starts no further request, waits at most `grace` until the broker has acknowledged all
    /// output, and sends a DISCONNECT that keeps the session.
    pub async fn shutdown(&self, grace: Duration) {
        self.closed.store(true, Relaxed);
        let drained = async {
            while !self.is_drained() {
                tokio::time::sleep(limits::BROKER_DRAIN_POLL).await;
            }
        };
        if tokio::time::timeout(grace, drained).await.is_err() {
            tracing::warn!(
                "the broker did not take everything in time: it redelivers unacknowledged requests at the next start"
            );
        }
        self.stopping.notify_one();
    }

    /// Whether the broker has acknowledged all output, or there is no connection.
    fn is_drained(&self) -> bool {
        // A link that ends leaves the outlet as it is, so that it looks connected.
        let has_ended = matches!(*self.phase.borrow(), Phase::Ended(_));
        has_ended || self.state().is_drained()
    }

    fn state(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }

    /// Publishes this run's mark at the broker, and returns the number of the message; none if no
    /// other run can have the client id. A mark that is not retained replaces none. No mark is
    /// retained if the broker takes no retained messages (MQTT 5 [MQTT-3.2.2-14]).
    fn publish_mark(&self, retain: bool) -> Option<u64> {
        let (topic, mark) = {
            let claim = lock(self.claim.as_ref()?);
            (claim.topic().to_owned(), claim.mark())
        };
        let mut state = self.state();
        let message = Message {
            retain: retain && !state.lacks_retain(),
            ..Message::new(topic, mark, QoS::AtLeastOnce)
        };
        Some(state.publish_mark(message))
    }

    /// Whether the broker has sent the mark of this run back.
    fn is_confirmed(&self) -> bool {
        (self.claim.as_ref()).is_some_and(|claim| lock(claim).is_confirmed())
    }

    /// The place of the next connection, with the present content of the files: the password, the
    /// certificates and the key may have been renewed. None if a file is wrong.
    fn read_place(&self) -> Option<Place> {
        let mut config = self.config.clone();
        let read = config.read_password().map_err(|error| error.to_string());
        let read = read.and_then(|()| place(&config).map_err(|error| error.to_string()));
        let error = read.as_ref().err().cloned();
        let mut unreadable = lock(&self.unreadable);
        if let Some(error) = error.as_ref().filter(|it| unreadable.as_ref() != Some(*it)) {
            tracing::error!("{error}; the store continues with the previous content of its files");
        }
        *unreadable = error;
        read.ok()
    }

    /// Ends the link because a later store has the client id. A reconnection would only disconnect
    /// that store.
    fn taken_over(&self) {
        let why = "another store attached with it later".to_owned();
        self.phase.send_replace(Phase::Ended(End::TakenOver(why)));
        self.closed.store(true, Relaxed);
        self.stopping.notify_one();
    }

    /// Logs that a client broke the rule on response topics (section 1 of the protocol), so that
    /// its request is dropped.
    fn log_violation(&self, peer: &Peer, text: &str) {
        if let Some(more) = may_log(&mut self.state().rule_log) {
            let client = peer.shown();
            tracing::warn!(
                client,
                text,
                more,
                "a client broke a rule: its request is dropped"
            );
        }
    }
}

impl Transport for Foreign {
    fn deliver(&self, ready: &mut dyn FnMut(&mut Vec<Outbound>)) {
        let (mut broken, mut out) = (Vec::new(), Vec::new());
        let mut state = self.state();
        loop {
            ready(&mut out);
            if out.is_empty() {
                break;
            }
            for out in out.drain(..) {
                match out {
                    Outbound::Disconnect(peer, _, text) => broken.push((peer, text)),
                    out => state.take(out),
                }
            }
        }
        state.outlet.flush();
        drop(state);
        for (peer, text) in broken {
            self.log_violation(&peer, text);
        }
    }

    fn figures(&self) -> Option<Figures> {
        Some(self.state().figures())
    }
}

/// The options of the link, without the client id. Reads the certificates. Fails if a file of
/// certificates cannot be used.
pub fn options(config: &ForeignConfig, packet_bytes_max: usize) -> Result<Options, TlsError> {
    Ok(Options {
        place: place(config)?,
        client_id: String::new(),
        keep_alive: config.keep_alive,
        connect_timeout: limits::BROKER_CONNECT_TIMEOUT,
        session_expiry: match config.keeps_client_id {
            true => limits::BROKER_SESSION_EXPIRY,
            false => limits::BROKER_SESSION_EXPIRY_UNKEPT,
        },
        resume: true,
        receive_max: config.window,
        in_flight_max: limits::BROKER_IN_FLIGHT_MAX,
        // Announced to the broker: a longer request would end each connection that delivers it.
        packet_bytes_max: u32::try_from(packet_bytes_max).unwrap_or(u32::MAX),
        // A response contains a value and parts of the client's request. Only the broker knows its
        // own limit.
        sent_bytes_max: u32::MAX,
        by_hand: true,
        pauses: limits::BROKER_PAUSES,
    })
}

/// The address of the broker and the credentials there. Reads the certificates.
fn place(config: &ForeignConfig) -> Result<Place, TlsError> {
    let own = config.certificate.as_ref();
    let own = own.map(|(certificate, key)| (Path::new(certificate), Path::new(key)));
    let BrokerUrl { scheme, path, .. } = &config.broker;
    let tls = match scheme.tls {
        true => Some(tls::config(config.ca.as_deref(), own)?),
        false => None,
    };
    let password = config.password.as_ref().map(|it| it.0.clone());
    let login = match (config.user.clone(), password) {
        (None, None) => None,
        (user, password) => Some((user.unwrap_or_default(), password.unwrap_or_default())),
    };
    Ok(Place {
        host: config.broker.host.clone(),
        port: config.broker.port,
        tls,
        websocket: scheme.websocket.then(|| path.clone()),
        login,
    })
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // The code under these locks does not panic. If it does, the store continues with what is
    // there.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
