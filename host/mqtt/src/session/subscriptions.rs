//! The subscriptions of one session and the memory that they take in the router.
//!
//! Subscriptions to the client's own topics are charged to its owner only above
//! [`OWN_SUBSCRIPTION_BYTES`].

use std::{
    collections::{HashMap, HashSet},
    sync::Arc,
};

use bytes::Bytes;

use crate::{
    ledger::{Account, Holding, Kind},
    limits::{OWN_SUBSCRIPTION_BYTES, SUBSCRIPTION_BYTES_FLOOR},
    router::{Subscription, cost_bytes},
    topic,
};

#[derive(Debug)]
pub(crate) struct Subscriptions {
    by_filter: HashMap<Bytes, Subscription>,
    /// Those of `by_filter` that the access rules forbid at present. The router does not have them.
    suspended: HashSet<Bytes>,
    /// Memory of all subscriptions.
    bytes: usize,
    /// The part of `bytes` for the client's own topics.
    own_bytes: usize,
    /// The part of `bytes` that is charged to the owner.
    charged: Holding,
    /// Number of subscriptions with a wildcard.
    wildcards: usize,
    /// Number of shared subscriptions.
    shared: usize,
}

impl Subscriptions {
    pub(super) fn new(account: &Arc<Account>) -> Self {
        Self {
            by_filter: HashMap::new(),
            suspended: HashSet::new(),
            bytes: 0,
            own_bytes: 0,
            charged: Holding::new(account, Kind::Subscriptions),
            wildcards: 0,
            shared: 0,
        }
    }

    pub(super) fn transfer(&mut self, account: &Arc<Account>) {
        self.charged.transfer(account);
    }

    /// Adds or replaces a subscription of this client. Returns the replaced one.
    pub(super) fn insert(
        &mut self,
        filter: &Bytes,
        subscription: Subscription,
        client: &str,
    ) -> Option<Subscription> {
        self.suspended.remove(filter);
        let old = self.by_filter.insert(filter.clone(), subscription);
        if old.is_none() {
            self.wildcards += usize::from(topic::has_wildcard(filter));
            self.shared += usize::from(topic::is_shared(filter));
            self.bytes += cost_bytes(filter);
            self.own_bytes += own_bytes(filter, client);
            self.charged.set(self.to_charge());
        }
        old
    }

    /// Removes a subscription of this client. Returns false if there was none.
    pub(super) fn remove(&mut self, filter: &Bytes, client: &str) -> bool {
        self.suspended.remove(filter);
        let existed = self.by_filter.remove(filter).is_some();
        if existed {
            self.wildcards -= usize::from(topic::has_wildcard(filter));
            self.shared -= usize::from(topic::is_shared(filter));
            self.bytes -= cost_bytes(filter);
            self.own_bytes -= own_bytes(filter, client);
            self.charged.set(self.to_charge());
        }
        existed
    }

    pub(super) fn suspend(&mut self, filter: &Bytes) {
        self.suspended.insert(filter.clone());
    }

    /// Ends the suspension of a subscription. `None` if it is not suspended.
    pub(super) fn resume(&mut self, filter: &Bytes) -> Option<Subscription> {
        let was_suspended = self.suspended.remove(filter);
        was_suspended.then(|| self.get(filter)).flatten()
    }

    fn to_charge(&self) -> usize {
        self.bytes - self.own_bytes.min(OWN_SUBSCRIPTION_BYTES)
    }

    /// Whether there is room for one more subscription of this client in the owner's share or, if
    /// not `shares`, in the total.
    pub(super) fn has_room(&self, filter: &[u8], client: &str, max: usize, shares: bool) -> bool {
        let own = self.own_bytes + own_bytes(filter, client);
        let bytes = self.bytes + cost_bytes(filter);
        let charge = bytes - own.min(OWN_SUBSCRIPTION_BYTES);
        let more = charge.saturating_sub(self.charged.amount());
        let floor = if shares {
            SUBSCRIPTION_BYTES_FLOOR
        } else {
            usize::MAX
        };
        more == 0 || self.charged.fits(more, max, floor)
    }

    pub(crate) fn get(&self, filter: &[u8]) -> Option<Subscription> {
        self.by_filter.get(filter).copied()
    }

    /// A subscription that is not suspended.
    pub(crate) fn active(&self, filter: &[u8]) -> Option<Subscription> {
        self.get(filter).filter(|_| !self.is_suspended(filter))
    }

    /// The number of subscriptions that are not suspended.
    pub(crate) fn active_len(&self) -> usize {
        self.len() - self.suspended.len()
    }

    pub(crate) fn is_suspended(&self, filter: &[u8]) -> bool {
        self.suspended.contains(filter)
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = (&Bytes, Subscription)> {
        self.by_filter.iter().map(|(filter, own)| (filter, *own))
    }

    pub(crate) fn filters(&self) -> impl Iterator<Item = &Bytes> {
        self.by_filter.keys()
    }

    pub(crate) fn shared_filters(&self) -> impl Iterator<Item = &Bytes> {
        let shared = (self.shared > 0).then(|| self.filters());
        shared
            .into_iter()
            .flatten()
            .filter(|filter| topic::is_shared(filter))
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.by_filter.is_empty()
    }

    pub(crate) fn len(&self) -> usize {
        self.by_filter.len()
    }

    pub(crate) fn shared_len(&self) -> usize {
        self.shared
    }

    /// Memory that all subscriptions take.
    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }

    pub(crate) fn has_wildcards(&self) -> bool {
        self.wildcards > 0
    }
}

/// The cost of a subscription if it is for the client's own topics, otherwise 0.
fn own_bytes(filter: &[u8], client: &str) -> usize {
    match topic::is_own(filter, client) {
        true => cost_bytes(filter),
        false => 0,
    }
}
