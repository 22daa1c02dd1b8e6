//! What each connection may do by the rules that are in force, and that by tomorrow's once they change.
//!
//! What enters: who asks, and rules that may be exchanged at any time. What leaves: the [`Grants`] of a connection, worked out
//! once for each and again after a change. It ends nothing itself: whoever changes rules looks through what is there.

use std::collections::{HashMap, VecDeque};
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
    held: Mutex<Held>,
}

/// What was worked out, by the numbers of connections.
#[derive(Default)]
struct Held {
    /// As many as the embedded broker has.
    connections: HashMap<u64, Known>,
    /// Those that asked to be let in last: it may never come to that, and nobody would say so.
    arriving: VecDeque<(u64, Known)>,
    /// Clients of a foreign broker, which can call themselves anything, and whom nobody sees go.
    claimed: HashMap<u64, Known>,
}

/// What one connection may do.
#[derive(Clone)]
struct Known {
    identity: Arc<Identity>,
    generation: u64,
    grants: Arc<Grants>,
}

impl Known {
    /// Its grants, where nothing has changed since.
    fn by(&self, generation: u64, identity: &Arc<Identity>) -> Option<Arc<Grants>> {
        let holds = self.generation == generation && self.identity == *identity;
        holds.then(|| self.grants.clone())
    }
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
            held: Mutex::default(),
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
        let generation = self.generation();
        let number = who.connection;
        {
            let mut held = self.held();
            let known = held.connections.get(&number);
            if let Some(grants) = known.and_then(|it| it.by(generation, &who.identity)) {
                return grants;
            }
            let came = held.arriving.iter().position(|(it, _)| *it == number);
            let came = came.filter(|_| who.session != 0);
            if let Some((_, known)) = came.and_then(|at| held.arriving.remove(at))
                && let Some(grants) = known.by(generation, &who.identity)
            {
                held.connections.insert(number, known);
                return grants;
            }
        }
        let known = self.work_out(generation, &who.client, &who.identity);
        let grants = known.grants.clone();
        let mut held = self.held();
        if who.session != 0 {
            held.connections.insert(number, known);
            return grants;
        }
        if held.arriving.len() >= limits::GRANTS_ARRIVING_MAX {
            held.arriving.pop_front();
        }
        held.arriving.push_back((number, known));
        grants
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

    /// What the client of a request or a watch may do: by what was found of its connection, and behind a foreign broker by who it
    /// says it is.
    pub fn grants_of(&self, peer: &Peer) -> Arc<Grants> {
        let identity = {
            let held = self.held();
            let known = held.connections.get(&peer.connection);
            known.map(|it| it.identity.clone())
        };
        match identity {
            Some(identity) => self.grants(&Origin {
                client: peer.client.clone(),
                connection: peer.connection,
                session: peer.session,
                identity,
            }),
            None => self.claimed(peer),
        }
    }

    fn claimed(&self, peer: &Peer) -> Arc<Grants> {
        let (generation, identity) = (self.generation(), Identity::anonymous());
        let known = self.held().claimed.get(&peer.connection).cloned();
        if let Some(grants) = known.and_then(|it| it.by(generation, &identity)) {
            return grants;
        }
        let known = self.work_out(generation, &peer.client, &identity);
        let grants = known.grants.clone();
        if peer.client.len() <= limits::GRANTS_CLAIMED_CLIENT_BYTES_MAX {
            let mut held = self.held();
            if held.claimed.len() >= limits::GRANTS_CLAIMED_MAX {
                held.claimed.clear();
            }
            held.claimed.insert(peer.connection, known);
        }
        grants
    }

    /// A connection has ended.
    pub fn gone(&self, connection: u64) {
        self.held().connections.remove(&connection);
    }

    /// `generation` was looked at before the rules: those that come in between are worked out again.
    fn work_out(&self, generation: u64, client: &str, identity: &Arc<Identity>) -> Known {
        let grants = self.rules.current().grants(Principal {
            client,
            user: identity.user.as_deref(),
            attributes: &identity.attributes,
        });
        Known {
            identity: identity.clone(),
            generation,
            grants,
        }
    }

    fn generation(&self) -> u64 {
        self.generation.load(Ordering::Acquire)
    }

    fn held(&self) -> MutexGuard<'_, Held> {
        // What is in it is whole at any time.
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;

    use super::*;

    /// Rules by which the first client may connect.
    fn authorizer() -> Arc<Authorizer> {
        let text = "[[rules]]\nprincipals.clientIds = [\"first\"]\nbrokerResources = [{ method = \"Connect\" }]\n";
        let Ok(watched) = Watched::open("rules", Vec::new(), || {
            Ok::<_, Infallible>(Rules::parse(text).unwrap())
        });
        Authorizer::new(watched)
    }

    fn origin(client: &str, connection: u64, session: u64) -> Origin {
        Origin {
            client: client.into(),
            connection,
            session,
            identity: Identity::anonymous(),
        }
    }

    #[test]
    fn what_was_found_of_an_arrival_is_that_of_its_connection() {
        let authorizer = authorizer();
        let arriving = authorizer.grants(&origin("first", 1, 0));
        assert!(arriving.may_connect());
        let connected = authorizer.grants(&origin("first", 1, 9));
        assert!(Arc::ptr_eq(&arriving, &connected));
        authorizer.gone(1);
        assert!(!Arc::ptr_eq(
            &connected,
            &authorizer.grants(&origin("first", 1, 9))
        ));
    }

    #[test]
    fn arrivals_and_claims_are_held_in_bounded_number() {
        let authorizer = authorizer();
        let most = limits::GRANTS_ARRIVING_MAX.max(limits::GRANTS_CLAIMED_MAX) as u64;
        for number in 0..2 * most {
            _ = authorizer.grants(&origin("first", number, 0));
            let peer = Peer {
                client: "c".into(),
                connection: number,
                session: number,
            };
            _ = authorizer.grants_of(&peer);
        }
        let held = authorizer.held();
        assert!(held.connections.is_empty());
        assert!(held.arriving.len() <= limits::GRANTS_ARRIVING_MAX);
        assert!(held.claimed.len() <= limits::GRANTS_CLAIMED_MAX);
    }

    #[test]
    fn another_identity_over_the_same_connection_is_looked_at_anew() {
        let authorizer = authorizer();
        let mut who = origin("first", 1, 9);
        let before = authorizer.grants(&who);
        who.identity = Arc::new(Identity {
            user: Some("other".into()),
            ..Identity::default()
        });
        let after = authorizer.grants(&who);
        assert_eq!((before.user(), after.user()), (None, Some("other")));
    }
}
