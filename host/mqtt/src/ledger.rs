//! Accounts for the memory that clients use: by kind, by owner and in total.
//!
//! Every structure that a client can make grow belongs to one [`Kind`], and a [`Holding`] next to
//! the structure holds its amount. The total of a kind must always be the sum of all its holdings,
//! so a holding subtracts its amount when it is dropped. An owner is a user, or the network address
//! of anonymous clients. A limit for each client id would limit no client, since clients can invent
//! ids.
//!
//! One owner may hold at most [`SHARE_OF_FREE`] times what is free. The first owner can take three
//! quarters of a kind, two owners three sevenths each, and every further owner still finds room.

use std::{
    collections::HashMap,
    net::{IpAddr, Ipv6Addr},
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering::Relaxed},
    },
};

use crate::{Identity, limits::SHARE_OF_FREE};

/// A resource that is counted and limited on its own.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    Sessions,
    /// Wills, packet ids of unfinished QoS 2 exchanges, and topic aliases, in bytes.
    State,
    /// Subscriptions beyond each client's allowance for its own topics, in bytes.
    Subscriptions,
    /// Messages that wait for a client or for its acknowledgement, in bytes.
    Queues,
    Retained,
    /// Retained messages in bytes.
    RetainedBytes,
}

const KINDS: usize = 6;

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) enum Owner {
    User(Box<str>),
    /// The [`network`].
    Address(IpAddr),
    /// An anonymous client of an earlier run that has not reconnected. Its address was not
    /// recorded.
    Unknown,
}

impl Owner {
    /// The owner of a connection's memory.
    pub(crate) fn of(identity: &Identity, peer: IpAddr) -> Self {
        match &identity.user {
            Some(user) => Self::User(user.clone()),
            None => Self::Address(network(peer)),
        }
    }
}

/// The network that an address counts as: for IPv6 that of 64 bits, since one host can use all
/// addresses of it.
#[must_use]
pub fn network(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V6(address) => Ipv6Addr::from_bits(address.to_bits() >> 64 << 64).into(),
        address => address,
    }
}

/// The most that one owner may hold of a kind. `total` is held by all owners, and `max` is the
/// limit. Every owner may hold `floor` while there is room at all.
pub(crate) fn quota(total: usize, max: usize, floor: usize) -> usize {
    let free = max.saturating_sub(total);
    free.saturating_mul(SHARE_OF_FREE).max(floor)
}

type Sums = [AtomicUsize; KINDS];

/// What one owner holds.
#[derive(Debug)]
pub(crate) struct Account {
    sums: Sums,
    total: Arc<Sums>,
}

impl Account {
    /// Whether this owner may hold `more` of a kind whose total is limited to `max`; see [`quota`].
    pub(crate) fn fits(&self, kind: Kind, more: usize, max: usize, floor: usize) -> bool {
        let total = self.total[kind as usize].load(Relaxed).saturating_add(more);
        let own = self.sums[kind as usize].load(Relaxed).saturating_add(more);
        total <= max && own <= quota(total, max, floor)
    }

    /// Whether this owner may hold one more of a kind after another one has ended: its own, or one
    /// of another owner.
    pub(crate) fn fits_one_instead(
        &self,
        kind: Kind,
        is_own: bool,
        max: usize,
        floor: usize,
    ) -> bool {
        let total = self.total[kind as usize].load(Relaxed);
        let own = self.sums[kind as usize].load(Relaxed) + usize::from(!is_own);
        total <= max && own <= quota(total, max, floor)
    }

    pub(crate) fn add(&self, kind: Kind, more: usize) {
        self.sums[kind as usize].fetch_add(more, Relaxed);
        self.total[kind as usize].fetch_add(more, Relaxed);
    }

    pub(crate) fn subtract(&self, kind: Kind, less: usize) {
        self.sums[kind as usize].fetch_sub(less, Relaxed);
        self.total[kind as usize].fetch_sub(less, Relaxed);
    }
}

#[derive(Debug, Default)]
pub(crate) struct Ledger {
    total: Arc<Sums>,
    accounts: HashMap<Owner, Arc<Account>>,
    /// The number of accounts at which unused accounts are removed.
    sweep_at: usize,
}

impl Ledger {
    /// The account of an owner, created if there is none.
    pub(crate) fn account(&mut self, owner: Owner) -> Arc<Account> {
        if self.accounts.len() >= self.sweep_at {
            self.accounts
                .retain(|_, account| Arc::strong_count(account) > 1);
            self.sweep_at = 2 * self.accounts.len() + 16;
        }
        let account = self.accounts.entry(owner).or_insert_with(|| {
            Arc::new(Account {
                sums: Sums::default(),
                total: self.total.clone(),
            })
        });
        account.clone()
    }

    /// What all owners hold of a kind.
    pub(crate) fn total(&self, kind: Kind) -> usize {
        self.total[kind as usize].load(Relaxed)
    }
}

/// What one structure uses of one kind.
#[derive(Debug)]
pub(crate) struct Holding {
    account: Arc<Account>,
    kind: Kind,
    amount: usize,
}

impl Holding {
    pub(crate) fn new(account: &Arc<Account>, kind: Kind) -> Self {
        Self {
            account: account.clone(),
            kind,
            amount: 0,
        }
    }

    pub(crate) fn account(&self) -> &Arc<Account> {
        &self.account
    }

    /// The amount of all holdings of this kind.
    pub(crate) fn total(&self) -> usize {
        self.account.total[self.kind as usize].load(Relaxed)
    }

    pub(crate) fn amount(&self) -> usize {
        self.amount
    }

    /// See [`Account::fits`].
    pub(crate) fn fits(&self, more: usize, max: usize, floor: usize) -> bool {
        self.account.fits(self.kind, more, max, floor)
    }

    pub(crate) fn add(&mut self, more: usize) {
        self.amount += more;
        self.account.add(self.kind, more);
    }

    pub(crate) fn subtract(&mut self, less: usize) {
        self.amount -= less;
        self.account.subtract(self.kind, less);
    }

    pub(crate) fn set(&mut self, amount: usize) {
        if amount > self.amount {
            self.add(amount - self.amount);
        } else if amount < self.amount {
            self.subtract(self.amount - amount);
        }
    }

    /// Charges the amount to another account, even beyond that owner's share.
    pub(crate) fn transfer(&mut self, account: &Arc<Account>) {
        if !Arc::ptr_eq(&self.account, account) {
            self.account.subtract(self.kind, self.amount);
            account.add(self.kind, self.amount);
            self.account = account.clone();
        }
    }
}

impl Drop for Holding {
    fn drop(&mut self) {
        self.account.subtract(self.kind, self.amount);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn user(name: &str) -> Owner {
        Owner::User(name.into())
    }

    #[test]
    fn one_owner_leaves_room_for_others() {
        let mut ledger = Ledger::default();
        let mut all = Vec::new();
        for n in 0..64 {
            let account = ledger.account(user(&n.to_string()));
            let mut holding = Holding::new(&account, Kind::State);
            while holding.fits(1, 10_000, 0) {
                holding.add(1);
            }
            all.push(holding);
        }
        assert_eq!(all[0].amount(), 7500, "three quarters");
        assert!(all.iter().all(|it| it.amount() > 0) || ledger.total(Kind::State) < 10_000);
        let newcomer = ledger.account(user("newcomer"));
        assert!(newcomer.fits(Kind::State, 1, 10_001, 1));
    }

    #[test]
    fn a_floor_is_granted_while_there_is_room() {
        let mut ledger = Ledger::default();
        let account = ledger.account(user("a"));
        let mut holding = Holding::new(&account, Kind::Queues);
        assert!(holding.fits(10, 10, 10));
        assert!(!holding.fits(10, 10, 9));
        assert!(!holding.fits(11, 10, 11));
        holding.add(10);
        assert!(!holding.fits(1, 10, 11));
    }

    #[test]
    fn holdings_move_between_owners_and_end() {
        let mut ledger = Ledger::default();
        let (a, b) = (ledger.account(user("a")), ledger.account(user("b")));
        let mut holding = Holding::new(&a, Kind::Queues);
        holding.set(70);
        holding.set(50);
        assert!(!a.fits(Kind::Queues, 50, 125, 0));
        holding.transfer(&b);
        assert!(a.fits(Kind::Queues, 50, 125, 0));
        assert!(!b.fits(Kind::Queues, 50, 125, 0));
        drop(holding);
        assert_eq!(ledger.total(Kind::Queues), 0);
    }

    #[test]
    fn accounts_that_hold_nothing_are_removed() {
        let mut ledger = Ledger::default();
        let kept = Holding::new(&ledger.account(user("kept")), Kind::State);
        for n in 0..10_000 {
            ledger.account(user(&n.to_string()));
        }
        assert!(ledger.accounts.len() < 100);
        assert!(ledger.accounts.contains_key(&user("kept")));
        drop(kept);
    }

    #[test]
    fn anonymous_clients_are_known_by_their_network() {
        let anonymous = Identity::anonymous();
        let owner = |address: &str| Owner::of(&anonymous, address.parse().unwrap());
        assert_eq!(owner("2001:db8::1"), owner("2001:db8::ffff:2"));
        assert_ne!(owner("2001:db8::1"), owner("2001:db8:0:1::1"));
        assert_eq!(owner("::ffff:10.0.0.7"), owner("10.0.0.7"));
        assert_ne!(owner("10.0.0.7"), owner("10.0.0.8"));
    }
}
