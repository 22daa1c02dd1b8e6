//! A foreign broker as a transport: the store is one client among others, over `statehouse_link`.
//!
//! What enters: PUBLISHes on the request topics, and signs of who has gone. What leaves: answers and notifications, and
//! the PUBACK of a request once its effect is durable and the broker has taken what it led to. It never executes, and
//! never decides what a message means.
//!
//! Where the broker is slow, requests are not acknowledged and so wait at the broker; where it is away, what is on its
//! way out waits here. A request that was not acknowledged comes again over the next connection, and the store knows it
//! by its identity.

mod arrivals;
mod claim;
mod figures;
pub mod identity;
mod incoming;
mod outgoing;
pub mod presence;
mod quiet;
mod state;
#[cfg(test)]
mod tests;

use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use statehouse_link::tls::{self, TlsError};
use statehouse_link::{End, Options, Place};
use statehouse_mqtt::{Message, QoS};
use tokio::sync::{Notify, watch};

use self::arrivals::Backlog;
use self::claim::Claim;
pub use self::figures::Figures;
use self::outgoing::To;
use self::presence::ttl::Ttl;
use self::presence::{Presence, Shown};
use self::state::State;
use super::{Inbound, Intake, Outbound, Transport};
use crate::config::{BrokerUrl, ForeignConfig};
use crate::limits;
use statehouse_access::Authorizer;
use statehouse_core::store::Peer;

/// A store's session with a foreign broker.
pub struct Foreign {
    intake: Arc<dyn Intake>,
    /// What goes out. Its lock is the only one that is held while another one, of the store's outbox, is taken.
    state: Mutex<State>,
    /// What came and waits, because too much is on its way out. Only the link's task adds and takes.
    held: Mutex<Backlog>,
    presence: Mutex<Presence>,
    /// None where no other run can have the client id.
    claim: Option<Mutex<Claim>>,
    ttl: Option<Mutex<Ttl>>,
    rules: OnceLock<Arc<Authorizer>>,
    /// Where the broker is, for log lines.
    place: String,
    phase: watch::Sender<Phase>,
    /// No request is begun any more.
    closed: AtomicBool,
    /// Notified when the link is to end.
    stopping: Notify,
}

/// How far it has come.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Phase {
    /// It has not been attached yet.
    Waiting,
    /// It has been attached; there may be no connection at this moment.
    Attached,
    /// There will be no other connection.
    Ended(End),
}

impl Foreign {
    /// Gives requests to `intake`, as `config` says, with this client id. Nothing happens before
    /// [`statehouse_link::run`].
    pub fn new(intake: Arc<dyn Intake>, config: &ForeignConfig, client_id: &str) -> Arc<Self> {
        Arc::new(Self {
            intake,
            state: Mutex::default(),
            held: Mutex::default(),
            presence: Mutex::new(Presence::new(config.presence)),
            claim: (config.keeps_client_id).then(|| Mutex::new(Claim::new(client_id))),
            ttl: config.watch_ttl.map(|ttl| Mutex::new(Ttl::new(ttl))),
            rules: OnceLock::new(),
            place: config.broker.to_string(),
            phase: watch::Sender::new(Phase::Waiting),
            closed: AtomicBool::new(false),
            stopping: Notify::new(),
        })
    }

    /// Names the rules that clients are under, by the ids that they claim. The first call counts; without one everybody may do
    /// everything.
    pub fn under(&self, rules: Arc<Authorizer>) {
        // A second one would be a mistake of the wiring, which has one call.
        let _ = self.rules.set(rules);
    }

    /// How far it has come, from now on.
    pub fn phase(&self) -> watch::Receiver<Phase> {
        self.phase.subscribe()
    }

    /// Which source of presence works.
    pub fn presence(&self) -> Shown {
        lock(&self.presence).shown()
    }

    /// Ends the watches of clients that were silent for too long, until it is dropped. `watching` are those that hold
    /// watches.
    pub async fn age_watches(&self, watching: impl Fn() -> Vec<Peer>) {
        let Some(ttl) = &self.ttl else {
            return;
        };
        loop {
            let interval = lock(ttl).interval();
            tokio::time::sleep(interval).await;
            self.end_watches_of_silent(&watching, Instant::now());
        }
    }

    fn end_watches_of_silent(&self, watching: &impl Fn() -> Vec<Peer>, now: Instant) {
        let Some(ttl) = &self.ttl else {
            return;
        };
        let watching = watching();
        let silent = lock(ttl).check(watching, now);
        self.intake.take(&mut silent.iter().map(Inbound::Gone));
    }

    /// Begins no request any more, waits until the broker has taken what is decided, `grace` at most, and leaves with a
    /// DISCONNECT, which keeps the session.
    pub async fn shutdown(&self, grace: Duration) {
        self.closed.store(true, Relaxed);
        let drained = async {
            while !self.has_left() {
                tokio::time::sleep(limits::BROKER_DRAIN_POLL).await;
            }
        };
        if tokio::time::timeout(grace, drained).await.is_err() {
            tracing::warn!(
                "the broker did not take everything in time: requests that were not acknowledged come again at the next start"
            );
        }
        self.stopping.notify_one();
    }

    /// Whether nothing is on its way any more that the broker is to have.
    fn has_left(&self) -> bool {
        let state = self.state();
        !state.outlet.is_up() || state.is_drained()
    }

    fn state(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }

    /// Leaves this run's mark at the broker.
    fn claim(&self) {
        let Some(claim) = &self.claim else {
            return;
        };
        let (topic, mark) = {
            let claim = lock(claim);
            (claim.topic().to_owned(), claim.mark())
        };
        let message = Message {
            retain: true,
            ..Message::new(topic, mark, QoS::AtLeastOnce)
        };
        self.state().publish(message, To::Heir);
    }

    /// Somebody else has the client id: going on would only throw that one out.
    fn taken_over(&self) {
        let why = "another store attached with it later".to_owned();
        self.phase.send_replace(Phase::Ended(End::TakenOver(why)));
        self.closed.store(true, Relaxed);
        self.stopping.notify_one();
    }

    /// A client broke the rule on response topics (the protocol, section 1): its request is dropped.
    fn broke_a_rule(&self, peer: &Peer, text: &str) {
        if let Some(more) = self.state().rule_log.may_say(Instant::now()) {
            let client = peer.client.escape_debug();
            tracing::warn!(%client, text, more, "a client broke a rule: its request is dropped");
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
                    Outbound::Kick(peer, _, text) => broken.push((peer, text)),
                    out => state.take(out),
                }
            }
        }
        state.outlet.flush();
        drop(state);
        for (peer, text) in broken {
            self.broke_a_rule(&peer, text);
        }
    }

    fn figures(&self) -> Option<Figures> {
        Some(self.state().figures())
    }
}

/// What the link needs to know, but for the client id. Reads the certificates.
///
/// # Errors
/// Where a file of certificates cannot be used.
pub fn options(config: &ForeignConfig, packet_bytes_max: usize) -> Result<Options, TlsError> {
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
    Ok(Options {
        place: Place {
            host: config.broker.host.clone(),
            port: config.broker.port,
            tls,
            websocket: scheme.websocket.then(|| path.clone()),
            login,
        },
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
        packet_bytes_max: u32::try_from(packet_bytes_max).unwrap_or(u32::MAX),
        // An answer holds a value and what the client wrote into its request: only the broker knows what is too much.
        sent_bytes_max: u32::MAX,
        by_hand: true,
        pauses: limits::BROKER_PAUSES,
    })
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Nothing panics while it holds one of these locks; should that ever be wrong, what is whole goes on.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
