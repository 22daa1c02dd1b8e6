//! A time to live for watches, renewed by every sign of life of their client.
//!
//! Returns the clients that were silent for too long. Must store nothing about clients without
//! watches, so that the limits of watches bound its memory. After a restart, and after each time
//! that the store took no requests, the time to live of every client starts again.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use statehouse_config::limits;
use statehouse_core::store::Peer;

/// The last sign of life of each client with watches.
pub struct Ttl {
    ttl: Duration,
    last_seen: HashMap<Arc<str>, Instant>,
    /// Whether the store takes no requests, so that no watch may expire.
    paused: bool,
}

impl Ttl {
    /// Watches end after `ttl` without a sign of life.
    pub fn new(ttl: Duration) -> Self {
        Self {
            ttl,
            last_seen: HashMap::new(),
            paused: true,
        }
    }

    /// The interval between calls of [`Self::check`]. A watch lives at most this much longer.
    pub fn interval(&self) -> Duration {
        (self.ttl / limits::WATCH_TTL_CHECKS).min(limits::WATCH_TTL_CHECK_MAX)
    }

    /// Records a sign of life: a client has sent a request, or a notification for it found a
    /// subscriber.
    pub fn renew(&mut self, client: &str, now: Instant) {
        if let Some(last_seen) = self.last_seen.get_mut(client) {
            *last_seen = now;
        }
    }

    /// The store takes no requests from now on, so no watch expires until [`Self::resume`].
    pub fn pause(&mut self) {
        self.paused = true;
    }

    /// The store takes requests. After a pause, this counts as a sign of life of every client.
    pub fn resume(&mut self, now: Instant) {
        if std::mem::take(&mut self.paused) {
            self.restart(now);
        }
    }

    /// Starts the time to live of every client again, after a time in which the process was paused.
    pub fn restart(&mut self, now: Instant) {
        self.last_seen.values_mut().for_each(|it| *it = now);
    }

    /// Returns the clients in `watching` that were silent for too long. The caller must end their
    /// watches only if [`Self::expire`] says so at that moment. For a new client, its first check
    /// counts as a sign of life.
    pub fn check(&mut self, watching: impl IntoIterator<Item = Peer>, now: Instant) -> Vec<Peer> {
        if self.paused {
            return Vec::new();
        }
        let mut before = std::mem::take(&mut self.last_seen);
        let mut silent = Vec::new();
        for peer in watching {
            let last_seen = before.remove(&peer.client).unwrap_or(now);
            self.last_seen.insert(peer.client.clone(), last_seen);
            if now.saturating_duration_since(last_seen) >= self.ttl {
                silent.push(peer);
            }
        }
        silent
    }

    /// Whether the watches of a client end now, because it was silent until `now`, the time of the
    /// check. It may have sent a request since. Its next watch gets the full time to live.
    pub fn expire(&mut self, client: &str, now: Instant) -> bool {
        let last_seen = self.last_seen.get(client).copied();
        let is_silent = !self.paused
            && last_seen.is_some_and(|it| now.saturating_duration_since(it) >= self.ttl);
        if is_silent {
            self.last_seen.remove(client);
        }
        is_silent
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TTL: Duration = Duration::from_secs(60);

    fn watching(clients: &[&str]) -> Vec<Peer> {
        let peer = |client: &&str| Peer::numbered(client, 1);
        clients.iter().map(peer).collect()
    }

    fn names(peers: &[Peer]) -> Vec<&str> {
        peers.iter().map(|peer| &*peer.client).collect()
    }

    /// Ends the watches of clients that are silent.
    fn expired(ttl: &mut Ttl, clients: &[&str], now: Instant) -> Vec<String> {
        let silent = ttl.check(watching(clients), now);
        let names = silent.iter().map(|peer| peer.client.to_string());
        names.filter(|client| ttl.expire(client, now)).collect()
    }

    /// A time to live that runs, and the time after so many seconds.
    fn running() -> (Ttl, impl Fn(u64) -> Instant) {
        let start = Instant::now();
        let mut ttl = Ttl::new(TTL);
        ttl.resume(start);
        (ttl, move |seconds| start + Duration::from_secs(seconds))
    }

    #[test]
    fn watches_of_a_client_silent_for_too_long_expire() {
        let (mut ttl, at) = running();
        assert!(ttl.check(watching(&["a", "b"]), at(0)).is_empty());
        ttl.renew("b", at(30));
        assert!(ttl.check(watching(&["a", "b"]), at(59)).is_empty());
        assert_eq!(names(&ttl.check(watching(&["a", "b"]), at(60))), ["a"]);
        assert!(ttl.check(watching(&["b"]), at(89)).is_empty());
        assert_eq!(names(&ttl.check(watching(&["b"]), at(90))), ["b"]);
    }

    #[test]
    fn a_client_that_watches_again_gets_the_full_time_to_live() {
        let (mut ttl, at) = running();
        assert!(expired(&mut ttl, &["a"], at(0)).is_empty());
        assert_eq!(expired(&mut ttl, &["a"], at(60)), ["a"]);
        assert!(expired(&mut ttl, &["a"], at(61)).is_empty());
        assert!(expired(&mut ttl, &["a"], at(120)).is_empty());
        assert_eq!(expired(&mut ttl, &["a"], at(121)), ["a"]);
    }

    #[test]
    fn a_request_or_a_pause_after_the_check_keeps_the_watches() {
        let (mut ttl, at) = running();
        assert!(ttl.check(watching(&["a", "b"]), at(0)).is_empty());
        let silent = ttl.check(watching(&["a", "b"]), at(60));
        assert_eq!(names(&silent), ["a", "b"]);
        ttl.renew("a", at(61));
        assert!(!ttl.expire("a", at(60)));
        ttl.pause();
        assert!(!ttl.expire("b", at(60)));
        ttl.resume(at(62));
        assert!(ttl.check(watching(&["a", "b"]), at(120)).is_empty());
    }

    #[test]
    fn no_watch_expires_because_of_a_pause_of_the_store() {
        let (mut ttl, at) = running();
        assert!(ttl.check(watching(&["a"]), at(0)).is_empty());
        ttl.pause();
        assert!(ttl.check(watching(&["a"]), at(1000)).is_empty());
        ttl.resume(at(1000));
        assert!(ttl.check(watching(&["a"]), at(1059)).is_empty());
        // There was no pause since, so this call has no effect.
        ttl.resume(at(1059));
        assert_eq!(names(&ttl.check(watching(&["a"]), at(1060))), ["a"]);
    }

    #[test]
    fn nothing_is_stored_about_clients_without_watches() {
        let (mut ttl, at) = running();
        for n in 0..1000 {
            ttl.renew(&n.to_string(), at(0));
        }
        assert!(ttl.last_seen.is_empty());
        assert!(ttl.check(watching(&["a", "b"]), at(0)).is_empty());
        assert!(ttl.check(watching(&["b"]), at(0)).is_empty());
        assert_eq!(ttl.last_seen.len(), 1);
    }

    #[test]
    fn the_check_interval_is_a_fraction_of_the_ttl_up_to_a_limit() {
        assert_eq!(Ttl::new(TTL).interval(), Duration::from_millis(7500));
        let day = Duration::from_secs(86_400);
        assert_eq!(Ttl::new(day).interval(), limits::WATCH_TTL_CHECK_MAX);
    }
}
