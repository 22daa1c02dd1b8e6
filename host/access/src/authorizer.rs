//! Caches what each connection may do under the current rules.
//!
//! The [`Grants`] of a connection are evaluated once, and again after a change of the rules. They
//! must never be used after the rules or the identity of the client have changed. This module
//! disconnects no client: the caller of [`Authorizer::changed`] must recheck all connections.

use std::collections::{HashMap, VecDeque};
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use statehouse_mqtt::{Identity, Origin};
use statehouse_protocol::{ConnectionId, SessionId, Shown};

use super::rules::{Grants, Principal, Rules};
use crate::limits;
use statehouse_files::watch::Watched;
use statehouse_protocol::Peer;

/// The current rules, and the grants of clients under them.
pub struct Authorizer {
    rules: Arc<Watched<Rules>>,
    /// Incremented after each change of the rules.
    generation: AtomicU64,
    cache: Mutex<Cache>,
}

#[derive(Default)]
struct Cache {
    /// Connections of the embedded broker, by connection number.
    connections: HashMap<ConnectionId, Evaluated>,
    /// Clients that were admitted most recently and have no connection number yet, by client id.
    /// Bounded, because an attempt to connect may fail without notice.
    admitted: VecDeque<(Box<str>, Evaluated)>,
    /// Clients that have a connection number but no session yet. Bounded for the same reason.
    connecting: VecDeque<(ConnectionId, Evaluated)>,
    /// Clients of a foreign broker, by client id: the connection number of one client may be that
    /// of another. Bounded, because such a client may claim any client id, and because the store
    /// does not see its disconnection.
    foreign: HashMap<Arc<str>, Evaluated>,
}

/// The grants of one connection, and what they depend on.
#[derive(Clone)]
struct Evaluated {
    identity: Arc<Identity>,
    generation: u64,
    grants: Arc<Grants>,
}

impl Cache {
    fn find(&mut self, origin: &Origin, generation: u64) -> Option<Arc<Grants>> {
        let number = origin.connection;
        let current = |entry: &Evaluated| entry.grants_if_current(generation, &origin.identity);
        if let Some(grants) = self.connections.get(&number).and_then(current) {
            return Some(grants);
        }
        let mut connecting = self.connecting.iter();
        if let Some(at) =
            connecting.position(|(it, entry)| *it == number && current(entry).is_some())
        {
            if origin.session == SessionId(0) {
                return Some(self.connecting[at].1.grants.clone());
            }
            let (_, entry) = self.connecting.remove(at)?;
            return Some(self.put(origin, entry));
        }
        // The entry belongs to the same attempt if it has the same identity object: an equal
        // identity may come from another attempt.
        let at = self.admitted.iter().position(|(client, entry)| {
            Arc::ptr_eq(&entry.identity, &origin.identity)
                && **client == *origin.client
                && entry.generation == generation
        })?;
        let (_, entry) = self.admitted.remove(at)?;
        Some(self.put(origin, entry))
    }

    fn put(&mut self, origin: &Origin, entry: Evaluated) -> Arc<Grants> {
        let grants = entry.grants.clone();
        match self.connections.get_mut(&origin.connection) {
            Some(before) => *before = entry,
            None if origin.session != SessionId(0) => {
                _ = self.connections.insert(origin.connection, entry)
            }
            // `remove_connection` may never be called for a connection without a session.
            None => push(&mut self.connecting, origin.connection, entry),
        }
        grants
    }
}

/// Appends an entry, and removes the oldest one if the queue is full.
fn push<K>(all: &mut VecDeque<(K, Evaluated)>, key: K, entry: Evaluated) {
    if all.len() >= limits::GRANTS_CONNECTING_MAX {
        all.pop_front();
    }
    all.push_back((key, entry));
}

impl Evaluated {
    /// The grants, if neither the rules nor the identity have changed.
    fn grants_if_current(&self, generation: u64, identity: &Arc<Identity>) -> Option<Arc<Grants>> {
        let is_current = self.generation == generation && self.identity == *identity;
        is_current.then(|| self.grants.clone())
    }
}

/// The grants for all requests of one read from a connection. Each use costs only a comparison of
/// the generation.
#[derive(Default)]
pub struct CachedGrants(Option<(u64, Arc<Grants>)>);

/// The reason of a refusal: no rule lets the client do this action on this topic or key.
pub struct NoRule<'a>(pub &'static str, pub &'a [u8]);

impl fmt::Display for NoRule<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self(what, on) = self;
        write!(f, "no rule lets it {what}")?;
        match on {
            [] => Ok(()),
            // The log escapes control characters, as in a client id.
            _ => write!(f, " {}", Shown::cut(on, limits::NO_RULE_SHOWN_BYTES)),
        }
    }
}

impl Authorizer {
    /// An authorizer for these rules.
    #[must_use]
    pub fn new(rules: Arc<Watched<Rules>>) -> Arc<Self> {
        Arc::new(Self {
            rules,
            generation: AtomicU64::new(0),
            cache: Mutex::default(),
        })
    }

    /// The rules, with their file.
    #[must_use]
    pub fn rules(&self) -> &Arc<Watched<Rules>> {
        &self.rules
    }

    /// Invalidates all grants. Must be called after each change of the rules.
    pub fn changed(&self) {
        self.generation.fetch_add(1, Ordering::Release);
    }

    /// Logs the number of rules in force. Must be called after the recheck of all clients.
    pub fn log_count(&self) {
        let rules = self.rules.current().count();
        let s = if rules == 1 { "" } else { "s" };
        tracing::info!("{rules} rule{s} in force: every action that no rule allows is denied");
    }

    /// Evaluates the rules for a client that was admitted and connects next. With many rules this
    /// takes some time, and here no lock of the broker is held yet.
    pub(super) fn prepare(&self, client: &str, identity: &Arc<Identity>) {
        let entry = self.evaluate(self.generation(), client, identity);
        push(&mut self.cache().admitted, client.into(), entry);
    }

    /// What a client of the embedded broker may do. With the session number 0, the connection may
    /// not exist yet or may have ended.
    pub fn grants(&self, origin: &Origin) -> Arc<Grants> {
        let generation = self.generation();
        if let Some(grants) = self.cache().find(origin, generation) {
            return grants;
        }
        let entry = self.evaluate(generation, &origin.client, &origin.identity);
        self.cache().put(origin, entry)
    }

    /// Like [`grants`](Self::grants), for repeated calls with the same `origin`.
    pub fn cached_grants(&self, origin: &Origin, cached: &mut CachedGrants) -> Arc<Grants> {
        let generation = self.generation();
        match &cached.0 {
            Some((of, grants)) if *of == generation => grants.clone(),
            _ => {
                let grants = self.grants(origin);
                cached.0 = Some((generation, grants.clone()));
                grants
            }
        }
    }

    /// What the client of a request or a watch may do: by the identity of its connection, or,
    /// behind a foreign broker, by the client id that it claims.
    pub fn grants_of(&self, peer: &Peer) -> Arc<Grants> {
        let identity = {
            let cache = self.cache();
            let entry = cache.connections.get(&peer.connection);
            entry.map(|it| it.identity.clone())
        };
        match identity {
            Some(identity) => self.grants(&Origin {
                client: peer.client.clone(),
                connection: peer.connection,
                // The connection may end now, and must not get another entry.
                session: SessionId::NONE,
                identity,
            }),
            None => self.foreign(peer),
        }
    }

    fn foreign(&self, peer: &Peer) -> Arc<Grants> {
        let (generation, identity) = (self.generation(), Identity::anonymous());
        let entry = self.cache().foreign.get(&*peer.client).cloned();
        if let Some(grants) = entry.and_then(|it| it.grants_if_current(generation, &identity)) {
            return grants;
        }
        let entry = self.evaluate(generation, &peer.client, &identity);
        let grants = entry.grants.clone();
        if peer.client.len() <= limits::GRANTS_FOREIGN_CLIENT_BYTES_MAX {
            let mut cache = self.cache();
            // Costs each other client one evaluation. A client that claims many ids causes it once
            // per `GRANTS_FOREIGN_MAX` evaluations for its own requests.
            if cache.foreign.len() >= limits::GRANTS_FOREIGN_MAX {
                cache.foreign.clear();
            }
            cache.foreign.insert(peer.client.clone(), entry);
        }
        grants
    }

    /// Removes the grants of a connection that has ended.
    pub fn remove_connection(&self, connection: ConnectionId) {
        self.cache().connections.remove(&connection);
    }

    /// `generation` must be read before the rules. If the rules change in between, the result has
    /// the old generation and is evaluated again.
    fn evaluate(&self, generation: u64, client: &str, identity: &Arc<Identity>) -> Evaluated {
        let grants = self.rules.current().grants(Principal {
            client,
            user: identity.user.as_deref(),
            attributes: &identity.attributes,
        });
        Evaluated {
            identity: identity.clone(),
            generation,
            grants,
        }
    }

    fn generation(&self) -> u64 {
        self.generation.load(Ordering::Acquire)
    }

    fn cache(&self) -> MutexGuard<'_, Cache> {
        // A panic under this lock leaves a valid cache.
        self.cache.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;

    use statehouse_protocol::rights::ClientRights as _;

    use super::*;

    /// Rules by which the first client may connect.
    fn authorizer() -> Arc<Authorizer> {
        let text = "[[rules]]\nprincipals.clientIds = [\"first\"]\nbrokerResources = [{ method = \"Connect\" }]\n";
        let Ok(watched) = Watched::open("rules", Vec::new(), || {
            Ok::<_, Infallible>(Rules::parse(text).unwrap())
        });
        Authorizer::new(watched)
    }

    /// Regression: the log escaped the escapes of each byte that is not ASCII once more.
    #[test]
    fn refused_topic_is_text_and_other_bytes_are_escaped() {
        let shown = |on: &[u8]| NoRule("read", on).to_string();
        assert_eq!(shown(b""), "no rule lets it read");
        for (on, text) in [
            ("Wärme/Halle 4".as_bytes(), "Wärme/Halle 4"),
            (b"a\xffb\xc3", "a\\xffb\\xc3"),
            ("o'brien\n\\".as_bytes(), "o'brien\n\\"),
        ] {
            assert_eq!(shown(on), format!("no rule lets it read {text}"));
        }
        let long = "ä".repeat(limits::NO_RULE_SHOWN_BYTES);
        let cut = "ä".repeat(limits::NO_RULE_SHOWN_BYTES / 2);
        assert_eq!(
            shown(long.as_bytes()),
            format!("no rule lets it read {cut}…")
        );
    }

    fn origin(client: &str, connection: ConnectionId, session: SessionId) -> Origin {
        Origin {
            client: client.into(),
            connection,
            session,
            identity: Identity::anonymous(),
        }
    }

    /// A client without an id has a number by its response topic, which it chooses.
    #[test]
    fn foreign_clients_with_one_number_have_their_own_grants() {
        let authorizer = authorizer();
        let grants = ["first", "", "first"].map(|it| authorizer.grants_of(&Peer::numbered(it, 1)));
        let [first, unknown, again] = grants.map(|it| it.may_connect());
        assert_eq!((first, unknown, again), (true, false, true));
    }

    #[test]
    fn connecting_client_passes_its_grants_to_its_connection() {
        let authorizer = authorizer();
        let connecting = authorizer.grants(&origin("first", ConnectionId(1), SessionId(0)));
        assert!(connecting.may_connect());
        let connected = authorizer.grants(&origin("first", ConnectionId(1), SessionId(9)));
        assert!(Arc::ptr_eq(&connecting, &connected));
        authorizer.remove_connection(ConnectionId(1));
        assert!(!Arc::ptr_eq(
            &connected,
            &authorizer.grants(&origin("first", ConnectionId(1), SessionId(9)))
        ));
    }

    #[test]
    fn prepared_grants_are_used_by_the_same_attempt_only() {
        let authorizer = authorizer();
        let mut first = origin("first", ConnectionId(1), SessionId(0));
        authorizer.prepare("first", &first.identity);
        let prepared = authorizer.cache().admitted[0].1.grants.clone();
        // Another client with the same identity, and the same client with another identity.
        assert!(!Arc::ptr_eq(
            &prepared,
            &authorizer.grants(&origin("second", ConnectionId(2), SessionId(0)))
        ));
        first.identity = Arc::default();
        assert!(!Arc::ptr_eq(&prepared, &authorizer.grants(&first)));
        let connecting = authorizer.grants(&origin("first", ConnectionId(3), SessionId(0)));
        assert!(Arc::ptr_eq(&prepared, &connecting));
        assert!(authorizer.cache().admitted.is_empty());
        // A change of the rules invalidates prepared grants.
        authorizer.prepare("first", &Identity::anonymous());
        authorizer.changed();
        assert!(!Arc::ptr_eq(
            &connecting,
            &authorizer.grants(&origin("first", ConnectionId(4), SessionId(0)))
        ));
    }

    /// Rules may change while connections end, so a recheck may concern an ended connection.
    #[test]
    fn recheck_of_an_ended_connection_caches_no_connection() {
        let authorizer = authorizer();
        let connected = authorizer.grants(&origin("first", ConnectionId(1), SessionId(9)));
        authorizer.changed();
        let rechecked = authorizer.grants(&origin("first", ConnectionId(1), SessionId(0)));
        assert!(!Arc::ptr_eq(&connected, &rechecked));
        // The connection uses the result of the recheck, without another evaluation.
        assert!(Arc::ptr_eq(
            &rechecked,
            &authorizer.grants(&origin("first", ConnectionId(1), SessionId(9)))
        ));
        authorizer.remove_connection(ConnectionId(1));
        _ = authorizer.grants(&origin("first", ConnectionId(1), SessionId(0)));
        assert!(authorizer.cache().connections.is_empty());
    }

    #[test]
    fn cached_clients_without_a_connection_are_bounded() {
        let authorizer = authorizer();
        let most = limits::GRANTS_CONNECTING_MAX.max(limits::GRANTS_FOREIGN_MAX) as u64;
        for number in 0..2 * most {
            authorizer.prepare("first", &Arc::default());
            _ = authorizer.grants(&origin("first", ConnectionId(number), SessionId(0)));
            _ = authorizer.grants_of(&Peer::numbered(&number.to_string(), number));
        }
        let cache = authorizer.cache();
        assert!(cache.connections.is_empty());
        assert!(cache.admitted.len() <= limits::GRANTS_CONNECTING_MAX);
        assert!(cache.connecting.len() <= limits::GRANTS_CONNECTING_MAX);
        assert!(cache.foreign.len() <= limits::GRANTS_FOREIGN_MAX);
    }

    #[test]
    fn changed_identity_of_a_connection_is_evaluated_again() {
        let authorizer = authorizer();
        let mut first = origin("first", ConnectionId(1), SessionId(9));
        let before = authorizer.grants(&first);
        first.identity = Arc::new(Identity {
            user: Some("other".into()),
            ..Identity::default()
        });
        let after = authorizer.grants(&first);
        assert_eq!((before.user(), after.user()), (None, Some("other")));
    }
}
