//! What each connection may do by the rules that are in force, and that by tomorrow's once they change.
//!
//! What enters: who asks, and rules that may be exchanged at any time. What leaves: the [`Grants`] of a connection, worked out
//! once for each and again after a change. It ends nothing itself: whoever changes rules looks through what is there.

use std::collections::HashMap;
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use statehouse_mqtt::{Identity, Origin};

use super::rules::{Grants, Principal, Rules};
use crate::limits;
use crate::reload::Watched;
use crate::store::Peer;

/// Rules in force, and what came of them.
pub struct Authorizer {
    rules: Arc<Watched<Rules>>,
    /// Rises with each change, behind it.
    generation: AtomicU64,
    /// By the numbers of connections.
    connections: Mutex<HashMap<u64, Connection>>,
}

/// One connection.
struct Connection {
    identity: Arc<Identity>,
    generation: u64,
    grants: Arc<Grants>,
}

/// What was found for the requests of one read, so that each of them costs no more than a look whether it still holds.
#[derive(Default)]
pub struct Found(Option<(u64, Arc<Grants>)>);

/// Why something was refused: no rule lets a client do this, with this topic or key.
pub struct NoRule<'a>(pub &'static str, pub &'a [u8]);

impl fmt::Display for NoRule<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self(what, on) = self;
        let shown = &on[..on.len().min(limits::NO_RULE_SHOWN_BYTES)];
        let more = if shown.len() < on.len() { "…" } else { "" };
        match on {
            [] => write!(f, "no rule lets it {what}"),
            _ => write!(f, "no rule lets it {what} {}{more}", shown.escape_ascii()),
        }
    }
}

impl Authorizer {
    /// One that goes by these rules.
    #[must_use]
    pub fn new(rules: Arc<Watched<Rules>>) -> Arc<Self> {
        Arc::new(Self {
            rules,
            generation: AtomicU64::new(0),
            connections: Mutex::default(),
        })
    }

    /// The rules, to be read again.
    #[must_use]
    pub fn rules(&self) -> &Arc<Watched<Rules>> {
        &self.rules
    }

    /// There are other rules: what was worked out before no longer counts.
    pub fn changed(&self) {
        self.generation.fetch_add(1, Ordering::Release);
    }

    /// Says how many rules are in force, once everybody is under them.
    pub fn tell(&self) {
        let rules = self.rules.current().len();
        tracing::info!("{rules} rules are in force: all is denied that none of them allows");
    }

    /// What a client of the embedded broker may do.
    pub fn grants(&self, who: &Origin) -> Arc<Grants> {
        // Asked before it is let in: it may never come to be a connection.
        if who.session == 0 {
            return self.work_out(&who.client, &who.identity);
        }
        self.of(who.connection, &who.client, &who.identity)
    }

    /// The same where it is asked again and again.
    pub fn grants_again(&self, who: &Origin, found: &mut Found) -> Arc<Grants> {
        let generation = self.generation();
        match &found.0 {
            Some((of, grants)) if *of == generation => grants.clone(),
            _ => {
                let grants = self.grants(who);
                found.0 = Some((generation, grants.clone()));
                grants
            }
        }
    }

    /// What a client may do of which no more is known than who it says it is, or what was found of its connection.
    pub fn grants_of(&self, peer: &Peer) -> Arc<Grants> {
        let identity = {
            let connections = self.connections();
            let known = connections.get(&peer.connection);
            known.map_or_else(Identity::anonymous, |it| it.identity.clone())
        };
        self.of(peer.connection, &peer.client, &identity)
    }

    /// A connection has ended.
    pub fn gone(&self, connection: u64) {
        self.connections().remove(&connection);
    }

    fn of(&self, connection: u64, client: &str, identity: &Arc<Identity>) -> Arc<Grants> {
        // Before the rules are looked at: those that come in between are worked out again.
        let generation = self.generation();
        if let Some(known) = self.connections().get(&connection)
            && known.generation == generation
            && known.identity == *identity
        {
            return known.grants.clone();
        }
        let grants = self.work_out(client, identity);
        let mut connections = self.connections();
        // Clients of a foreign broker can call themselves anything, and nobody sees them go.
        if connections.len() >= limits::GRANTS_HELD_MAX {
            connections.clear();
        }
        let known = Connection {
            identity: identity.clone(),
            generation,
            grants: grants.clone(),
        };
        connections.insert(connection, known);
        grants
    }

    fn work_out(&self, client: &str, identity: &Identity) -> Arc<Grants> {
        self.rules.current().grants(Principal {
            client,
            user: identity.user.as_deref(),
            attributes: &identity.attributes,
        })
    }

    fn generation(&self) -> u64 {
        self.generation.load(Ordering::Acquire)
    }

    fn connections(&self) -> MutexGuard<'_, HashMap<u64, Connection>> {
        // What is in it is whole at any time.
        self.connections
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }
}
