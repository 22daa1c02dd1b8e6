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
use std::time::Instant;

use tokio::sync::Notify;

use crate::{limits::ARRIVAL_TIME_MIN, network};

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
    networks: HashMap<IpAddr, VecDeque<Waiter>>,
}

#[derive(Clone)]
struct Waiter {
    number: u64,
    began: Instant,
    evicted: Arc<Notify>,
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
        if waiting.count >= self.max
            && let Some((network, oldest)) = waiting.oldest_of_most()
        {
            waiting.evict(network, &oldest);
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

    /// Evicts the oldest connection of the address that has most of them, to make room for one of
    /// `peer`. Returns false if there is none, or it must be given more time: its address has no
    /// more than that of `peer`, and it began less than [`ARRIVAL_TIME_MIN`] ago. Otherwise clients
    /// that come at the same time would evict each other.
    pub(crate) fn evict_for(&self, peer: IpAddr) -> bool {
        let mut waiting = self.waiting();
        let Some((network, oldest)) = waiting.oldest_of_most() else {
            return false;
        };
        let may_evict = waiting.count_of(network) > waiting.count_of(crate::network(peer)) + 1
            || oldest.began.elapsed() >= ARRIVAL_TIME_MIN;
        if may_evict {
            waiting.evict(network, &oldest);
        }
        may_evict
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
        self.networks.entry(network).or_default().push_back(Waiter {
            number,
            began: Instant::now(),
            evicted,
        });
        number
    }

    fn count_of(&self, network: IpAddr) -> usize {
        self.networks.get(&network).map_or(0, VecDeque::len)
    }

    /// The oldest place of the network that holds most.
    fn oldest_of_most(&self) -> Option<(IpAddr, Waiter)> {
        let networks = self.networks.iter();
        let (network, places) = networks.max_by_key(|(_, places)| {
            let oldest = places.front().map(|it| Reverse(it.number));
            (places.len(), oldest)
        })?;
        Some((*network, places.front()?.clone()))
    }

    fn evict(&mut self, network: IpAddr, waiter: &Waiter) {
        self.remove(network, waiter.number);
        waiter.evicted.notify_one();
    }

    fn remove(&mut self, network: IpAddr, number: u64) {
        let Some(places) = self.networks.get_mut(&network) else {
            return;
        };
        // Places are sorted by number, because numbers only grow.
        if let Ok(index) = places.binary_search_by_key(&number, |it| it.number) {
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
    async fn connections_of_different_addresses_are_given_time() {
        let handshakes = Arc::new(Handshakes::new(100));
        let [one, other, third] = [1, 2, 3].map(|last| IpAddr::from([10, 0, 0, last]));
        assert!(!handshakes.evict_for(one), "there is none");
        let of_one = handshakes.begin(one);
        let _of_other = handshakes.begin(other);
        assert!(!handshakes.evict_for(third) && !handshakes.evict_for(one));
        let of_one_too = handshakes.begin(one);
        assert!(!handshakes.evict_for(other), "it has one less");
        assert!(handshakes.evict_for(third) && is_evicted(&of_one).await);
        assert!(!handshakes.evict_for(third) && !is_evicted(&of_one_too).await);
        std::thread::sleep(ARRIVAL_TIME_MIN);
        assert!(handshakes.evict_for(one));
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
