//! Connections that are not ones yet: TLS or WebSocket is still being agreed on, or no request to the administration has come.
//!
//! What enters: who begins. What leaves: a place for each, and the order to give it up. There are so many places; where they
//! are taken, the address that holds most of them loses its oldest. So neither memory nor the broker's own places go to
//! peers that begin and never end, and somebody else still gets in.

use std::collections::{HashMap, VecDeque};
use std::net::IpAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::Notify;

/// The places.
pub(crate) struct Handshakes {
    max: usize,
    waiting: Mutex<Waiting>,
}

#[derive(Default)]
struct Waiting {
    next: u64,
    /// The oldest first.
    places: VecDeque<(u64, IpAddr, Arc<Notify>)>,
}

/// A place, given back where it is dropped.
pub(crate) struct Place {
    handshakes: Arc<Handshakes>,
    number: u64,
    lost: Arc<Notify>,
}

impl Handshakes {
    pub(crate) fn new(max: usize) -> Self {
        Self {
            max: max.max(1),
            waiting: Mutex::default(),
        }
    }

    /// Takes a place, if need be somebody's.
    pub(crate) fn begin(self: &Arc<Self>, peer: IpAddr) -> Place {
        let mut waiting = self.waiting();
        if waiting.places.len() >= self.max {
            waiting.push_out();
        }
        let (number, lost) = (waiting.next, Arc::new(Notify::new()));
        waiting.next += 1;
        waiting.places.push_back((number, peer, lost.clone()));
        drop(waiting);
        Place {
            handshakes: self.clone(),
            number,
            lost,
        }
    }

    fn waiting(&self) -> MutexGuard<'_, Waiting> {
        // Nothing panics while it is held.
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Waiting {
    fn push_out(&mut self) {
        let mut held: HashMap<IpAddr, usize> = HashMap::new();
        for (_, peer, _) in &self.places {
            *held.entry(*peer).or_default() += 1;
        }
        let most = held.values().max().copied().unwrap_or_default();
        let oldest = self
            .places
            .iter()
            .position(|(_, peer, _)| held[peer] == most);
        if let Some((_, _, lost)) = oldest.and_then(|index| self.places.remove(index)) {
            lost.notify_one();
        }
    }
}

impl Place {
    /// Waits until somebody else has it.
    pub(crate) async fn lost(&self) {
        self.lost.notified().await;
    }

    /// Gives the place back, after which it cannot be taken away.
    pub(crate) fn leave(&self) {
        let mut waiting = self.handshakes.waiting();
        // Numbers only grow.
        if let Ok(index) = waiting.places.binary_search_by_key(&self.number, |it| it.0) {
            waiting.places.remove(index);
        }
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.leave();
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    async fn is_lost(place: &Place) -> bool {
        let waited = tokio::time::timeout(Duration::from_millis(1), place.lost());
        waited.await.is_ok()
    }

    #[tokio::test]
    async fn who_holds_most_loses_its_oldest_and_nobody_else_does() {
        let handshakes = Arc::new(Handshakes::new(3));
        let [one, other] = [1, 2].map(|last| IpAddr::from([10, 0, 0, last]));
        let theirs = handshakes.begin(other);
        let [first, second] = [one, one].map(|peer| handshakes.begin(peer));
        let third = handshakes.begin(one);
        assert!(is_lost(&first).await);
        for kept in [&theirs, &second, &third] {
            assert!(!is_lost(kept).await);
        }
        // Whoever has lost its place gives none back.
        drop(first);
        let fourth = handshakes.begin(other);
        assert!(is_lost(&second).await);
        assert!(!is_lost(&theirs).await && !is_lost(&fourth).await);
        drop((theirs, third));
        let fifth = handshakes.begin(one);
        assert!(!is_lost(&fourth).await && !is_lost(&fifth).await);
    }
}
