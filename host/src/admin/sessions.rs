//! Logins of operators whose client is the page: a secret for each browser tab, in memory.
//!
//! The page sends the secret in a header with each request. Unlike a cookie, a browser adds it to
//! no request of another page, so that page cannot act with the login of an operator.
//!
//! A session must never outlive the login that began it. It ends when the user loses the role, gets
//! another one, or has another password.

use std::collections::HashMap;
use std::io;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use serde::Serialize;
use statehouse_access::roles::Role;
use statehouse_mqtt::Identity;

use super::access::new_token;
use statehouse_config::limits;

/// Distinguishes secrets of sessions from tokens of stores, for the text of a refusal.
pub(crate) const PREFIX: &str = "session-";

/// The sessions of one address.
#[derive(Default)]
pub(super) struct Sessions(Mutex<Vec<Session>>);

struct Session {
    /// The hash of the secret. Comparisons of hashes take constant time.
    secret: blake3::Hash,
    /// The identity at the login; none for an operator with the token or at the socket.
    login: Option<Identity>,
    role: Role,
    began: Instant,
    used: Instant,
}

/// What a login gets.
#[derive(Serialize)]
pub(super) struct Begun {
    /// The secret, which only the client knows from now on.
    pub(super) session: String,
    #[serde(flatten)]
    pub(super) about: About,
}

/// An operator, as the page shows it.
#[derive(Serialize)]
pub(super) struct About {
    pub(super) user: Option<String>,
    pub(super) role: &'static str,
    /// When the session ends if it is not used; none without a session.
    pub(super) expires_s: Option<u64>,
}

/// The operator of a session.
pub(super) struct Found {
    /// Names the session.
    pub(super) key: blake3::Hash,
    pub(super) login: Option<Identity>,
    pub(super) role: Role,
    /// When the session ends if it is not used.
    pub(super) expires: Duration,
}

impl Session {
    /// How long the session lasts without another request.
    fn left(&self, now: Instant) -> Duration {
        let idle = limits::ADMIN_SESSION_IDLE_MAX.saturating_sub(now.duration_since(self.used));
        idle.min(limits::ADMIN_SESSION_MAX.saturating_sub(now.duration_since(self.began)))
    }

    fn user(&self) -> Option<&str> {
        self.login.as_ref()?.user.as_deref()
    }

    /// Whether the login still counts. `role` is the present role of a user.
    fn is_good(&self, now: Instant, role: impl Fn(&str) -> Option<Role>) -> bool {
        let is_login_good = match &self.login {
            None => true,
            Some(login) => login.is_proven() && self.user().and_then(role) == Some(self.role),
        };
        is_login_good && !self.left(now).is_zero()
    }
}

impl Sessions {
    /// Begins a session and returns its secret. If there are too many, one ends: the one that was
    /// not used for the longest time, of the user that has most.
    pub(super) fn begin(
        &self,
        login: Option<Identity>,
        role: Role,
        now: Instant,
    ) -> io::Result<String> {
        let secret = format!("{PREFIX}{}", new_token()?);
        let mut sessions = self.lock();
        sessions.retain(|it| !it.left(now).is_zero());
        if sessions.len() >= limits::ADMIN_SESSIONS_MAX {
            evict(&mut sessions);
        }
        sessions.push(Session {
            secret: blake3::hash(secret.as_bytes()),
            login,
            role,
            began: now,
            used: now,
        });
        Ok(secret)
    }

    /// Finds the session of a secret, and ends it if its login does not count any more. `role` is
    /// the present role of a user.
    pub(super) fn find(
        &self,
        secret: &[u8],
        now: Instant,
        role: impl Fn(&str) -> Option<Role>,
    ) -> Option<Found> {
        let key = blake3::hash(secret);
        let mut sessions = self.lock();
        let at = sessions.iter().position(|it| it.secret == key)?;
        if !sessions[at].is_good(now, role) {
            sessions.swap_remove(at);
            return None;
        }
        let session = &mut sessions[at];
        session.used = now;
        Some(Found {
            key,
            login: session.login.clone(),
            role: session.role,
            expires: session.left(now),
        })
    }

    /// Whether a session is still there, without using it.
    pub(super) fn lasts(
        &self,
        key: blake3::Hash,
        now: Instant,
        role: impl Fn(&str) -> Option<Role>,
    ) -> bool {
        let sessions = self.lock();
        let session = sessions.iter().find(|it| it.secret == key);
        session.is_some_and(|it| it.is_good(now, role))
    }

    pub(super) fn end(&self, key: blake3::Hash) {
        self.lock().retain(|it| it.secret != key);
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Session>> {
        // The code under this lock does not panic.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Ends the session that was not used for the longest time, of the user with most sessions. So a
/// user who logs in again and again ends only sessions of its own.
fn evict(sessions: &mut Vec<Session>) {
    let mut counts: HashMap<Option<&str>, usize> = HashMap::new();
    for session in sessions.iter() {
        *counts.entry(session.user()).or_default() += 1;
    }
    let most = counts.values().copied().max();
    let all = sessions.iter().enumerate();
    let of_most = all.filter(|(_, it)| counts.get(&it.user()).copied() == most);
    if let Some((at, _)) = of_most.min_by_key(|(_, it)| it.used) {
        sessions.swap_remove(at);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

    use statehouse_mqtt::Proof;

    use super::*;

    struct Password(Arc<AtomicBool>);

    impl Proof for Password {
        fn is_good(&self) -> bool {
            self.0.load(Relaxed)
        }
    }

    fn anna(proof: &Arc<AtomicBool>) -> Option<Identity> {
        Some(Identity {
            user: Some("anna".into()),
            attributes: Vec::new(),
            proofs: vec![Arc::new(Password(proof.clone()))],
        })
    }

    const OPERATE: fn(&str) -> Option<Role> = |_| Some(Role::Operate);

    #[test]
    fn a_session_ends_when_it_is_not_used_or_old() {
        let (sessions, began) = (Sessions::default(), Instant::now());
        let begin = || sessions.begin(None, Role::Ship, began).unwrap();
        let lasts = |secret: &str, now| sessions.find(secret.as_bytes(), now, OPERATE).is_some();
        let second = Duration::from_secs(1);

        let unused = begin();
        assert!(!lasts(&unused, began + limits::ADMIN_SESSION_IDLE_MAX));
        assert!(!lasts(&unused, began), "it has ended");

        let used = begin();
        let mut now = began;
        while now + limits::ADMIN_SESSION_IDLE_MAX < began + limits::ADMIN_SESSION_MAX {
            now += limits::ADMIN_SESSION_IDLE_MAX - second;
            assert!(lasts(&used, now));
        }
        let found = sessions.find(used.as_bytes(), now, OPERATE).unwrap();
        assert!(found.expires <= limits::ADMIN_SESSION_MAX - (now - began));
        assert!(!lasts(&used, began + limits::ADMIN_SESSION_MAX));
        assert!(!lasts("session-", began) && !lasts("", began));
    }

    #[test]
    fn a_session_ends_with_the_password_and_the_role_of_its_user() {
        let (sessions, now) = (Sessions::default(), Instant::now());
        let proof = Arc::new(AtomicBool::new(true));
        let begin = || sessions.begin(anna(&proof), Role::Operate, now).unwrap();
        let find = |secret: &str, role: fn(&str) -> Option<Role>| {
            let found = sessions.find(secret.as_bytes(), now, role);
            found.map(|it| it.login.and_then(|it| it.user))
        };
        let secret = begin();
        assert_eq!(find(&secret, OPERATE), Some(Some("anna".into())));
        for other in [(|_: &str| None) as fn(&str) -> _, |_| Some(Role::Read)] {
            let secret = begin();
            assert_eq!(find(&secret, other), None);
            assert_eq!(find(&secret, OPERATE), None, "it has ended");
        }
        let key = blake3::hash(secret.as_bytes());
        assert!(sessions.lasts(key, now, OPERATE));
        proof.store(false, Relaxed);
        assert!(!sessions.lasts(key, now, OPERATE));
        assert_eq!(find(&secret, OPERATE), None);
    }

    #[test]
    fn a_flood_of_logins_ends_only_sessions_of_its_user() {
        let (sessions, now) = (Sessions::default(), Instant::now());
        let proof = Arc::new(AtomicBool::new(true));
        let local = sessions.begin(None, Role::Ship, now).unwrap();
        let begin = |tick| {
            let now = now + Duration::from_millis(tick);
            sessions.begin(anna(&proof), Role::Operate, now).unwrap()
        };
        let first = begin(0);
        let count = 3 * limits::ADMIN_SESSIONS_MAX as u64;
        let secrets: Vec<String> = (1..=count).map(begin).collect();
        let last = secrets.last().unwrap();
        let now = now + Duration::from_millis(count);
        let lasts = |secret: &str| sessions.find(secret.as_bytes(), now, OPERATE).is_some();
        assert!(lasts(&local) && lasts(last) && !lasts(&first));
        assert_eq!(sessions.lock().len(), limits::ADMIN_SESSIONS_MAX);
    }

    #[test]
    fn a_session_that_ended_is_not_found() {
        let (sessions, now) = (Sessions::default(), Instant::now());
        let secret = sessions.begin(None, Role::Ship, now).unwrap();
        let other = sessions.begin(None, Role::Ship, now).unwrap();
        assert_ne!(secret, other);
        let found = sessions.find(secret.as_bytes(), now, OPERATE).unwrap();
        sessions.end(found.key);
        assert!(sessions.find(secret.as_bytes(), now, OPERATE).is_none());
        assert!(sessions.find(other.as_bytes(), now, OPERATE).is_some());
    }
}
