//! Room for one more session: its limit and its owner's quota, and which session is evicted for it.

use std::{net::Ipv4Addr, sync::Arc, time::Instant};

use super::Core;
use crate::{
    ledger::{Account, Kind, Owner},
    limits::{EVICTION_CANDIDATES_MAX, SESSIONS_FLOOR},
    router::SessionKey,
};

/// The refusal of a CONNECT without room for its session.
pub(super) const NO_ROOM_FOR_SESSION: &str =
    "the session limit is reached, for this user or address or for all clients";

impl Core {
    /// Whether there is room for one more session, if necessary after evicting an empty one. Evicts
    /// none if that gives no room: an owner beyond its quota must not end sessions of others.
    pub(super) fn has_room_for_session(&mut self, account: &Arc<Account>, now: Instant) -> bool {
        if self.fits_session(account) {
            return true;
        }
        let Some(key) = self.evicted_for(account) else {
            return false;
        };
        self.counts.evicted += 1;
        self.end_session(key, now);
        true
    }

    /// See [`Broker::session_limit`](crate::Broker::session_limit). Evicts nothing.
    pub(crate) fn session_limit(
        &mut self,
        client: &str,
        user: Option<&str>,
    ) -> Option<&'static str> {
        if self.by_client.contains_key(client) {
            return None;
        }
        let account = self.ledger.account(match user {
            Some(user) => Owner::User(user.into()),
            // No client connects from this address.
            None => Owner::Address(Ipv4Addr::UNSPECIFIED.into()),
        });
        let has_room = self.fits_session(&account) || self.evicted_for(&account).is_some();
        (!has_room).then_some(NO_ROOM_FOR_SESSION)
    }

    fn fits_session(&self, account: &Account) -> bool {
        account.fits(Kind::Sessions, 1, self.limits.sessions_max, SESSIONS_FLOOR)
    }

    /// The session to evict for one more of this owner, if that one fits then. None while more
    /// sessions exist than a lowered limit allows.
    fn evicted_for(&self, account: &Arc<Account>) -> Option<SessionKey> {
        let fits_instead_of = |key: &SessionKey| {
            let is_own = self.is_owned_by(*key, account);
            let max = self.limits.sessions_max;
            account.fits_one_instead(Kind::Sessions, is_own, max, SESSIONS_FLOOR)
        };
        self.next_evicted(account).filter(fits_instead_of)
    }

    fn is_owned_by(&self, key: SessionKey, account: &Arc<Account>) -> bool {
        self.peek(key).is_some_and(|it| it.is_owned_by(account))
    }

    /// The oldest disconnected, empty session, preferring one of this owner if it is among the
    /// first [`EVICTION_CANDIDATES_MAX`].
    fn next_evicted(&self, account: &Arc<Account>) -> Option<SessionKey> {
        let mut oldest = self.evictable.iter().take(EVICTION_CANDIDATES_MAX);
        let own = oldest.find(|(_, key)| self.is_owned_by(*key, account));
        own.or(self.evictable.first()).map(|(_, key)| *key)
    }
}
