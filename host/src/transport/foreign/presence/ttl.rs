//! A time to live for watches, renewed by every sign of life of their client.
//!
//! What enters: signs of life, and now and then who holds watches. What leaves: who was silent for too long. It holds
//! nothing of clients without watches, so it is bounded as these are. After a restart every client starts afresh, and
//! so after each time that the store itself heard nobody.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::limits;
use statehouse_core::store::Peer;

/// When each client that holds watches was heard last.
pub struct Ttl {
    ttl: Duration,
    heard: HashMap<Arc<str>, Instant>,
    /// The store hears nobody: silence says nothing of clients.
    deaf: bool,
}

impl Ttl {
    /// Watches live this long without a sign of life.
    pub fn new(ttl: Duration) -> Self {
        Self {
            ttl,
            heard: HashMap::new(),
            deaf: true,
        }
    }

    /// How often [`Self::check`] is to be called: a watch lives that much longer at most.
    pub fn interval(&self) -> Duration {
        (self.ttl / limits::WATCH_TTL_CHECKS).min(limits::WATCH_TTL_CHECK_MAX)
    }

    /// A client has sent a request, or a notification for it found a subscriber.
    pub fn renew(&mut self, client: &str, now: Instant) {
        if let Some(heard) = self.heard.get_mut(client) {
            *heard = now;
        }
    }

    /// The store takes nothing from the broker from now on: no watch ends until [`Self::hears`].
    pub fn deafen(&mut self) {
        self.deaf = true;
    }

    /// The store takes what comes. Where it did not, everybody counts as heard at this moment.
    pub fn hears(&mut self, now: Instant) {
        if std::mem::take(&mut self.deaf) {
            self.heard.values_mut().for_each(|heard| *heard = now);
        }
    }

    /// Of the clients that hold watches now, those whose watches have ended. Who is new counts as heard at this moment.
    pub fn check(&mut self, watching: impl IntoIterator<Item = Peer>, now: Instant) -> Vec<Peer> {
        if self.deaf {
            return Vec::new();
        }
        let mut before = std::mem::take(&mut self.heard);
        let mut silent = Vec::new();
        for peer in watching {
            let heard = before.remove(&peer.client).unwrap_or(now);
            if now.saturating_duration_since(heard) < self.ttl {
                self.heard.insert(peer.client, heard);
            } else {
                silent.push(peer);
            }
        }
        silent
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TTL: Duration = Duration::from_secs(60);

    fn watching(clients: &[&str]) -> Vec<Peer> {
        let peer = |client: &&str| Peer {
            client: (*client).into(),
            connection: 1,
            session: 1,
        };
        clients.iter().map(peer).collect()
    }

    fn names(peers: &[Peer]) -> Vec<&str> {
        peers.iter().map(|peer| &*peer.client).collect()
    }

    fn hearing() -> Ttl {
        let mut ttl = Ttl::new(TTL);
        ttl.hears(Instant::now());
        ttl
    }

    #[test]
    fn who_is_silent_for_too_long_loses_its_watches() {
        let start = Instant::now();
        let at = |seconds| start + Duration::from_secs(seconds);
        let mut ttl = hearing();
        assert!(ttl.check(watching(&["a", "b"]), at(0)).is_empty());
        ttl.renew("b", at(30));
        assert!(ttl.check(watching(&["a", "b"]), at(59)).is_empty());
        assert_eq!(names(&ttl.check(watching(&["a", "b"]), at(60))), ["a"]);
        assert!(ttl.check(watching(&["b"]), at(89)).is_empty());
        assert_eq!(names(&ttl.check(watching(&["b"]), at(90))), ["b"]);
    }

    #[test]
    fn who_watches_anew_starts_afresh() {
        let start = Instant::now();
        let at = |seconds| start + Duration::from_secs(seconds);
        let mut ttl = hearing();
        assert!(ttl.check(watching(&["a"]), at(0)).is_empty());
        assert_eq!(names(&ttl.check(watching(&["a"]), at(60))), ["a"]);
        assert!(ttl.check(watching(&["a"]), at(61)).is_empty());
        assert!(ttl.check(watching(&["a"]), at(120)).is_empty());
        assert_eq!(names(&ttl.check(watching(&["a"]), at(121))), ["a"]);
    }

    #[test]
    fn silence_that_is_the_store_s_own_ends_no_watch() {
        let start = Instant::now();
        let at = |seconds| start + Duration::from_secs(seconds);
        let mut ttl = hearing();
        assert!(ttl.check(watching(&["a"]), at(0)).is_empty());
        ttl.deafen();
        assert!(ttl.check(watching(&["a"]), at(1000)).is_empty());
        ttl.hears(at(1000));
        assert!(ttl.check(watching(&["a"]), at(1059)).is_empty());
        // It has heard all the time since.
        ttl.hears(at(1059));
        assert_eq!(names(&ttl.check(watching(&["a"]), at(1060))), ["a"]);
    }

    #[test]
    fn nothing_is_held_of_who_holds_no_watches() {
        let start = Instant::now();
        let mut ttl = hearing();
        for n in 0..1000 {
            ttl.renew(&n.to_string(), start);
        }
        assert!(ttl.heard.is_empty());
        assert!(ttl.check(watching(&["a", "b"]), start).is_empty());
        assert!(ttl.check(watching(&["b"]), start).is_empty());
        assert_eq!(ttl.heard.len(), 1);
    }

    #[test]
    fn it_is_looked_at_often_enough() {
        assert_eq!(Ttl::new(TTL).interval(), Duration::from_millis(7500));
        let day = Duration::from_secs(86_400);
        assert_eq!(Ttl::new(day).interval(), limits::WATCH_TTL_CHECK_MAX);
    }
}
