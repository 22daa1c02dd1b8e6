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
use statehouse_files::watch::Watched;
use statehouse_protocol::Peer;

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
    /// Clients that were let in last, by their ids, and have no connection yet: it may never come to that, and nobody would
    /// say so.
    expected: VecDeque<(Box<str>, Known)>,
    /// The same with the number of a connection, of which may come nothing either.
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

impl Held {
    fn find(&mut self, who: &Origin, generation: u64) -> Option<Arc<Grants>> {
        let number = who.connection;
        let holds = |known: &Known| known.by(generation, &who.identity);
        if let Some(grants) = self.connections.get(&number).and_then(holds) {
            return Some(grants);
        }
        let mut arriving = self.arriving.iter();
        if let Some(at) = arriving.position(|(it, known)| *it == number && holds(known).is_some()) {
            if who.session == 0 {
                return Some(self.arriving[at].1.grants.clone());
            }
            let (_, known) = self.arriving.remove(at)?;
            return Some(self.put(who, known));
        }
        // Who this was is known by the very identity that was given out for it.
        let at = self.expected.iter().position(|(client, known)| {
            Arc::ptr_eq(&known.identity, &who.identity)
                && **client == *who.client
                && known.generation == generation
        })?;
        let (_, known) = self.expected.remove(at)?;
        Some(self.put(who, known))
    }

    fn put(&mut self, who: &Origin, known: Known) -> Arc<Grants> {
        let grants = known.grants.clone();
        match self.connections.get_mut(&who.connection) {
            Some(before) => *before = known,
            None if who.session != 0 => _ = self.connections.insert(who.connection, known),
            // Nobody would say that it is gone.
            None => push(&mut self.arriving, who.connection, known),
        }
        grants
    }
}

/// Forgets the oldest where there are too many.
fn push<K>(all: &mut VecDeque<(K, Known)>, key: K, known: Known) {
    if all.len() >= limits::GRANTS_ARRIVING_MAX {
        all.pop_front();
    }
    all.push_back((key, known));
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

    /// A client was let in, and will be connected soon: works out what it may do, which takes a while where rules are many,
    /// before anybody waits for it.
    pub(super) fn expect(&self, client: &str, identity: &Arc<Identity>) {
        let known = self.work_out(self.generation(), client, identity);
        push(&mut self.held().expected, client.into(), known);
    }

    /// What a client of the embedded broker may do. A session number of 0 is that of a connection which may not be there.
    pub fn grants(&self, who: &Origin) -> Arc<Grants> {
        let generation = self.generation();
        if let Some(grants) = self.held().find(who, generation) {
            return grants;
        }
        let known = self.work_out(generation, &who.client, &who.identity);
        self.held().put(who, known)
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
    fn what_was_worked_out_when_a_client_was_let_in_is_that_of_its_arrival() {
        let authorizer = authorizer();
        let mut who = origin("first", 1, 0);
        authorizer.expect("first", &who.identity);
        let expected = authorizer.held().expected[0].1.grants.clone();
        // Of another client with the same identity, and of the same client with another.
        assert!(!Arc::ptr_eq(
            &expected,
            &authorizer.grants(&origin("second", 2, 0))
        ));
        who.identity = Arc::default();
        assert!(!Arc::ptr_eq(&expected, &authorizer.grants(&who)));
        let arriving = authorizer.grants(&origin("first", 3, 0));
        assert!(Arc::ptr_eq(&expected, &arriving));
        assert!(authorizer.held().expected.is_empty());
        // Once the rules have changed, it is as if nobody had been expected.
        authorizer.expect("first", &Identity::anonymous());
        authorizer.changed();
        assert!(!Arc::ptr_eq(
            &arriving,
            &authorizer.grants(&origin("first", 4, 0))
        ));
    }

    /// Rules change while connections end: who is asked about may be gone by now.
    #[test]
    fn asking_about_a_connection_that_has_ended_keeps_nothing_of_it() {
        let authorizer = authorizer();
        let connected = authorizer.grants(&origin("first", 1, 9));
        authorizer.changed();
        let asked = authorizer.grants(&origin("first", 1, 0));
        assert!(!Arc::ptr_eq(&connected, &asked));
        // Found again over the connection, without working it out once more.
        assert!(Arc::ptr_eq(
            &asked,
            &authorizer.grants(&origin("first", 1, 9))
        ));
        authorizer.gone(1);
        _ = authorizer.grants(&origin("first", 1, 0));
        assert!(authorizer.held().connections.is_empty());
    }

    #[test]
    fn arrivals_and_claims_are_held_in_bounded_number() {
        let authorizer = authorizer();
        let most = limits::GRANTS_ARRIVING_MAX.max(limits::GRANTS_CLAIMED_MAX) as u64;
        for number in 0..2 * most {
            authorizer.expect("first", &Arc::default());
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
        assert!(held.expected.len() <= limits::GRANTS_ARRIVING_MAX);
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
