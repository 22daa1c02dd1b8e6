//! Limits the connections that are not established yet: a TLS or WebSocket handshake is in
//! progress, or the first request to the admin API is incomplete.
//!
//! Each such connection holds a place. If all places are taken, the address (IPv6: the /64 network)
//! that holds most of them loses its oldest. So peers that never complete a handshake use bounded memory and none of the
//! broker's connections, and other addresses can still connect.

use std::collections::{HashMap, VecDeque};
use std::net::IpAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::Notify;

/// A bounded number of places.
pub struct Handshakes {
    max: usize,
    waiting: Mutex<Waiting>,
}

#[derive(Default)]
struct Waiting {
    next: u64,
    /// In ascending order of their numbers: the oldest place is first. The address is that of the
    /// network.
    places: VecDeque<(u64, IpAddr, Arc<Notify>)>,
}

/// A place of one connection. Dropping it releases the place.
pub struct Place {
    handshakes: Arc<Handshakes>,
    number: u64,
    evicted: Arc<Notify>,
}

impl Handshakes {
    /// Room for `max` handshakes at once.
    pub fn new(max: usize) -> Self {
        Self {
            max: max.max(1),
            waiting: Mutex::default(),
        }
    }

    /// Takes a place for a connection from `peer`. May evict another connection.
    pub fn begin(self: &Arc<Self>, peer: IpAddr) -> Place {
        let mut waiting = self.waiting();
        if waiting.places.len() >= self.max {
            waiting.evict();
        }
        let (number, evicted) = (waiting.next, Arc::new(Notify::new()));
        waiting.next += 1;
        let network = statehouse_mqtt::network(peer);
        waiting.places.push_back((number, network, evicted.clone()));
        drop(waiting);
        Place {
            handshakes: self.clone(),
            number,
            evicted,
        }
    }

    fn waiting(&self) -> MutexGuard<'_, Waiting> {
        // The code under this lock does not panic.
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Waiting {
    /// Evicts the oldest place of the address that holds most places.
    fn evict(&mut self) {
        let mut held: HashMap<IpAddr, usize> = HashMap::new();
        for (_, peer, _) in &self.places {
            *held.entry(*peer).or_default() += 1;
        }
        let most = held.values().max().copied().unwrap_or_default();
        let oldest = self
            .places
            .iter()
            .position(|(_, peer, _)| held[peer] == most);
        if let Some((_, _, evicted)) = oldest.and_then(|index| self.places.remove(index)) {
            evicted.notify_one();
        }
    }
}

impl Place {
    /// Waits until another connection evicts this one.
    pub async fn evicted(&self) {
        self.evicted.notified().await;
    }

    /// Releases the place. The connection cannot be evicted after that.
    pub fn release(&self) {
        let mut waiting = self.handshakes.waiting();
        // Places are sorted by number, because numbers only grow.
        if let Ok(index) = waiting.places.binary_search_by_key(&self.number, |it| it.0) {
            waiting.places.remove(index);
        }
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.release();
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    async fn is_evicted(place: &Place) -> bool {
        let waited = tokio::time::timeout(Duration::from_millis(1), place.evicted());
        waited.await.is_ok()
    }

    #[tokio::test]
    async fn addresses_of_one_ipv6_network_count_together() {
        let handshakes = Arc::new(Handshakes::new(3));
        let address = |network, last| IpAddr::from([0x2001, 0xdb8, 0, network, 0, 0, 0, last]);
        let of_other = handshakes.begin(address(1, 1));
        let [first, second] = [1, 2].map(|last| handshakes.begin(address(2, last)));
        let third = handshakes.begin(address(2, 3));
        assert!(is_evicted(&first).await);
        for place in [&of_other, &second, &third] {
            assert!(!is_evicted(place).await);
        }
    }

    #[tokio::test]
    async fn only_the_address_with_most_places_loses_its_oldest() {
        let handshakes = Arc::new(Handshakes::new(3));
        let [one, other] = [1, 2].map(|last| IpAddr::from([10, 0, 0, last]));
        let of_other = handshakes.begin(other);
        let [first, second] = [one, one].map(|peer| handshakes.begin(peer));
        let third = handshakes.begin(one);
        assert!(is_evicted(&first).await);
        for place in [&of_other, &second, &third] {
            assert!(!is_evicted(place).await);
        }
        // Dropping an evicted place releases no other place.
        drop(first);
        let fourth = handshakes.begin(other);
        assert!(is_evicted(&second).await);
        assert!(!is_evicted(&of_other).await && !is_evicted(&fourth).await);
        drop((of_other, third));
        let fifth = handshakes.begin(one);
        assert!(!is_evicted(&fourth).await && !is_evicted(&fifth).await);
    }
}
