//! Limits the connections that are not established yet: a TLS or WebSocket handshake is in
//! progress, the CONNECT is incomplete, or the first request to the admin API is.
//!
//! Each such connection holds a place. If all places are taken, the address (IPv6: the /64 network)
//! that holds most of them loses its oldest. So peers that never complete a handshake use bounded
//! memory and keep nobody else out: other addresses can still connect.

use std::cmp::Reverse;
use std::collections::{HashMap, VecDeque};
use std::net::IpAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::Notify;

use crate::network;

/// A bounded number of places.
pub struct Handshakes {
    max: usize,
    waiting: Mutex<Waiting>,
}

#[derive(Default)]
struct Waiting {
    next: u64,
    count: usize,
    /// By network. Places are in ascending order of their numbers: the oldest is first. No queue is
    /// empty.
    networks: HashMap<IpAddr, VecDeque<(u64, Arc<Notify>)>>,
}

/// A place of one connection. Dropping it releases the place.
pub struct Place {
    handshakes: Arc<Handshakes>,
    network: IpAddr,
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
        let network = network(peer);
        let evicted = Arc::new(Notify::new());
        let mut waiting = self.waiting();
        if waiting.count >= self.max {
            waiting.evict();
        }
        let number = waiting.add(network, evicted.clone());
        drop(waiting);
        Place {
            handshakes: self.clone(),
            network,
            number,
            evicted,
        }
    }

    /// Evicts the oldest connection of the address that has most of them. False if there is none.
    pub fn evict(&self) -> bool {
        self.waiting().evict()
    }

    fn waiting(&self) -> MutexGuard<'_, Waiting> {
        // The code under this lock does not panic.
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Waiting {
    /// Adds a place and returns its number.
    fn add(&mut self, network: IpAddr, evicted: Arc<Notify>) -> u64 {
        let number = self.next;
        self.next += 1;
        self.count += 1;
        let places = self.networks.entry(network).or_default();
        places.push_back((number, evicted));
        number
    }

    fn evict(&mut self) -> bool {
        let most = self
            .networks
            .iter()
            .max_by_key(|(_, places)| (places.len(), places.front().map(|it| Reverse(it.0))));
        let Some((&network, places)) = most else {
            return false;
        };
        let Some((number, evicted)) = places.front().cloned() else {
            return false;
        };
        self.remove(network, number);
        evicted.notify_one();
        true
    }

    fn remove(&mut self, network: IpAddr, number: u64) {
        let Some(places) = self.networks.get_mut(&network) else {
            return;
        };
        // Places are sorted by number, because numbers only grow.
        if let Ok(index) = places.binary_search_by_key(&number, |it| it.0) {
            places.remove(index);
            self.count -= 1;
        }
        if places.is_empty() {
            self.networks.remove(&network);
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
        self.handshakes.waiting().remove(self.network, self.number);
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
