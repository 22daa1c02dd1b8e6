//! Finds the sessions that subscribed to a topic: a hash map for exact filters, a tree of levels
//! for filters with wildcards.
//!
//! A match returns sessions, and groups of shared subscriptions (section 4.8.2), each of which then
//! chooses one of its sessions. Its cost depends on the filters that share levels with the name,
//! not on the number of all filters.
//!
//! Each distinct level of a filter has a number, and a run of levels without a branch is one node.
//! A filter with many levels therefore costs a match one visit and a comparison of numbers. The
//! router must not know more of a session than its key.

mod levels;

use std::collections::HashMap;

use bytes::Bytes;
use rustc_hash::FxHashMap;

use levels::{Level, Levels, PLUS};

use crate::{
    QoS,
    group::{Group, Readiness},
    limits::{GROUP_BYTES, ROUTER_NODE_BYTES, SUBSCRIPTION_OVERHEAD_BYTES},
    topic,
};

/// The slot of a session within the core.
pub(crate) type SessionKey = u32;

/// The options of one subscription that matter for routing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Subscription {
    pub(crate) qos: QoS,
    pub(crate) no_local: bool,
    pub(crate) retain_as_published: bool,
    pub(crate) id: Option<u32>,
}

/// A matching subscription and its session.
pub(crate) type Match = (SessionKey, Subscription);

/// How to choose a member of a group.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Choice {
    /// The member gets the message, so the turn passes to the one behind it.
    Next,
    /// The turn stays.
    Peek,
}

/// The subscriptions that match a topic name.
#[derive(Debug, Default)]
pub(crate) struct Matches {
    pub(crate) sessions: Vec<Match>,
    /// Filters of the matching groups, including `$share/NAME/`. One session of each group must
    /// receive the message.
    pub(crate) groups: Vec<Bytes>,
    /// How many nodes of the tree the match visited.
    pub(crate) visited: usize,
    /// The levels of the name. Kept between matches to reuse its memory.
    path: Vec<Level>,
}

impl Matches {
    pub(crate) fn clear(&mut self) {
        self.sessions.clear();
        self.groups.clear();
        self.visited = 0;
    }
}

/// How many levels of a run a match compares in about the time of one node visit.
const LEVELS_PER_VISIT: usize = 16;

#[derive(Debug, Default)]
pub(crate) struct Router {
    exact: HashMap<Bytes, Subscribers>,
    wild: Node,
    /// The numbers of the levels of all filters in the tree.
    levels: Levels,
    /// Groups by filter, including `$share/NAME/`.
    groups: HashMap<Bytes, Group>,
    count: usize,
}

/// Upper bound of the memory that a subscription takes: the filter in two places, one tree node for
/// each level if it has a wildcard, and the group if it is shared. Nodes and groups may be shared
/// with other subscriptions, which this ignores.
pub(crate) fn cost_bytes(filter: &[u8]) -> usize {
    let nodes = if topic::has_wildcard(filter) {
        topic::levels(topic::of_topics(filter)).count()
    } else {
        0
    };
    let group = usize::from(topic::is_shared(filter)) * GROUP_BYTES;
    2 * filter.len() + SUBSCRIPTION_OVERHEAD_BYTES + nodes * ROUTER_NODE_BYTES + group
}

/// The subscribers of one filter.
#[derive(Debug, Default)]
struct Subscribers {
    sessions: Vec<Match>,
    /// Filters of the subscribed groups.
    groups: Vec<Bytes>,
}

impl Subscribers {
    fn is_empty(&self) -> bool {
        self.sessions.is_empty() && self.groups.is_empty()
    }

    fn add_to(&self, found: &mut Matches) {
        found.sessions.extend_from_slice(&self.sessions);
        found.groups.extend_from_slice(&self.groups);
    }

    fn remove(&mut self, subscriber: &Subscriber<'_>) -> bool {
        match subscriber {
            Subscriber::Session(session) => take(&mut self.sessions, |(key, _)| key == session),
            Subscriber::Group(filter) => take(&mut self.groups, |group| group == *filter),
        }
    }
}

/// One subscriber of a filter.
#[derive(Debug, Clone, Copy)]
enum Subscriber<'a> {
    Session(SessionKey),
    Group(&'a Bytes),
}

/// A run of levels and the subtree below it. Only the root has an empty run. Every other node must
/// be the end of a filter or have at least two children, so there are at most twice as many nodes
/// as filters.
#[derive(Debug, Default)]
struct Node {
    run: Box<[Level]>,
    /// Keyed by the first level of the child's run.
    children: FxHashMap<Level, Node>,
    /// Subscribers of the filter that ends here.
    here: Subscribers,
    /// Subscribers of the filter that ends here with `#`.
    below: Subscribers,
}

impl Router {
    /// Adds or replaces the subscription of a connected or disconnected session to a valid filter.
    pub(crate) fn subscribe(
        &mut self,
        filter: &Bytes,
        session: SessionKey,
        subscription: Subscription,
        is_connected: bool,
    ) {
        let new = if !topic::is_shared(filter) {
            let list = &mut self.subscribers(filter).sessions;
            let own = list.iter_mut().find(|(key, _)| *key == session);
            match own {
                Some((_, options)) => {
                    *options = subscription;
                    if topic::has_wildcard(filter) {
                        // The first subscription acquired the levels.
                        self.levels.release(filter);
                    }
                    false
                }
                None => {
                    list.push((session, subscription));
                    true
                }
            }
        } else if let Some(group) = self.groups.get_mut(filter) {
            group.join((session, subscription), is_connected)
        } else {
            let group = Group::new((session, subscription), is_connected);
            self.groups.insert(filter.clone(), group);
            let topics = filter.slice_ref(topic::of_topics(filter));
            self.subscribers(&topics).groups.push(filter.clone());
            true
        };
        self.count += usize::from(new);
    }

    /// The subscribers of a filter, created if there are none. Acquires the levels of the filter.
    fn subscribers(&mut self, topics: &Bytes) -> &mut Subscribers {
        if topic::has_wildcard(topics) {
            let (path, hash) = self.levels.acquire(topics);
            self.wild.insert(&path).subscribers(hash)
        } else {
            self.exact.entry(topics.clone()).or_default()
        }
    }

    /// Removes the subscription of a session to a filter.
    pub(crate) fn unsubscribe(&mut self, filter: &Bytes, session: SessionKey) {
        let removed = if !topic::is_shared(filter) {
            self.remove(filter, Subscriber::Session(session))
        } else if let Some(group) = self.groups.get_mut(filter) {
            let removed = group.leave(session);
            if group.is_empty() {
                self.groups.remove(filter);
                self.remove(topic::of_topics(filter), Subscriber::Group(filter));
            }
            removed
        } else {
            false
        };
        self.count -= usize::from(removed);
    }

    fn remove(&mut self, topics: &[u8], subscriber: Subscriber<'_>) -> bool {
        if topic::has_wildcard(topics) {
            let Some((path, hash)) = self.levels.find(topics) else {
                return false;
            };
            let removed = self.wild.remove(&path, hash, &subscriber);
            if removed {
                self.levels.release(topics);
            }
            return removed;
        }
        let Some(subscribers) = self.exact.get_mut(topics) else {
            return false;
        };
        let removed = subscribers.remove(&subscriber);
        if subscribers.is_empty() {
            self.exact.remove(topics);
        }
        removed
    }

    /// Updates whether a member of a group is connected.
    pub(crate) fn set_connected(&mut self, group: &[u8], session: SessionKey, is_connected: bool) {
        if let Some(group) = self.groups.get_mut(group) {
            group.set_connected(session, is_connected);
        }
    }

    /// Chooses the member of a group that receives a message, if one is ready for it. Also returns
    /// how many members were asked; see [`Group::choose`].
    pub(crate) fn choose(
        &mut self,
        group: &Bytes,
        choice: Choice,
        readiness: impl FnMut(&Match) -> Option<Readiness>,
    ) -> (Option<Match>, usize) {
        match (self.groups.get_mut(group), choice) {
            (Some(group), Choice::Next) => group.choose(readiness),
            (Some(group), Choice::Peek) => group.peek(readiness),
            (None, _) => (None, 0),
        }
    }

    /// Appends every subscription that matches a valid topic name.
    pub(crate) fn matches(&self, name: &[u8], found: &mut Matches) {
        if let Some(subscribers) = self.exact.get(name) {
            subscribers.add_to(found);
        }
        if self.wild.is_empty() {
            return;
        }
        // A leading wildcard does not match a name that begins with `$` (section 4.7.2).
        let dollar = name.first() == Some(&b'$');
        let mut levels = topic::levels(name);
        let first = levels.next().map_or(Level::NONE, |it| self.levels.get(it));
        let is_deeper = self.wild.children.contains_key(&first)
            || !dollar && self.wild.children.contains_key(&PLUS);
        let mut path = std::mem::take(&mut found.path);
        path.clear();
        path.push(first);
        if is_deeper {
            path.extend(levels.map(|level| self.levels.get(level)));
        }
        self.wild.matches(&path, dollar, found);
        found.path = path;
    }

    /// The number of subscriptions of all sessions.
    pub(crate) fn count(&self) -> usize {
        self.count
    }
}

impl Node {
    fn is_empty(&self) -> bool {
        self.children.is_empty() && self.here.is_empty() && self.below.is_empty()
    }

    /// The subscribers of the filter that ends here, with `#` or without.
    fn subscribers(&mut self, hash: bool) -> &mut Subscribers {
        match hash {
            true => &mut self.below,
            false => &mut self.here,
        }
    }

    /// The node at the end of a path, created if there is none.
    fn insert(&mut self, path: &[Level]) -> &mut Self {
        let Some(first) = path.first() else {
            return self;
        };
        let child = self.children.entry(*first).or_insert_with(|| Self {
            run: path.into(),
            ..Self::default()
        });
        let common = child.common(path);
        if common < child.run.len() {
            child.split(common);
        }
        child.insert(&path[common..])
    }

    /// The length of the common prefix of the run and a path.
    fn common(&self, path: &[Level]) -> usize {
        let pairs = self.run.iter().zip(path);
        pairs.take_while(|(own, other)| own == other).count()
    }

    /// Splits the run here. Its rest becomes the only child.
    fn split(&mut self, at: usize) {
        let mut behind = std::mem::take(self);
        let (run, rest) = behind.run.split_at(at);
        self.run = run.into();
        behind.run = rest.into();
        if let Some(first) = behind.run.first() {
            self.children.insert(*first, behind);
        }
    }

    /// Removes a subscriber, and the nodes that this leaves empty.
    fn remove(&mut self, path: &[Level], hash: bool, subscriber: &Subscriber<'_>) -> bool {
        let Some(first) = path.first() else {
            return self.subscribers(hash).remove(subscriber);
        };
        let Some(child) = self.children.get_mut(first) else {
            return false;
        };
        let Some(rest) = path.strip_prefix(&*child.run) else {
            return false;
        };
        let removed = child.remove(rest, hash, subscriber);
        if child.is_empty() {
            self.children.remove(first);
        } else {
            child.join();
        }
        removed
    }

    /// Merges a node with its only child if no filter ends between them.
    fn join(&mut self) {
        if !(self.here.is_empty() && self.below.is_empty() && self.children.len() == 1) {
            return;
        }
        let only = self.children.drain().next();
        if let Some((_, child)) = only {
            let run = [&*self.run, &*child.run].concat().into();
            *self = Self { run, ..child };
        }
    }

    /// Appends the subscribers that match the levels below this node. Recurses once for each
    /// branch; the caller limits the levels of a name.
    fn matches(&self, name: &[Level], dollar: bool, found: &mut Matches) {
        found.visited += 1 + self.run.len() / LEVELS_PER_VISIT;
        if !dollar {
            self.below.add_to(found);
        }
        let Some(level) = name.first() else {
            self.here.add_to(found);
            return;
        };
        let wild = self.children.get(&PLUS).filter(|_| !dollar);
        for child in wild.into_iter().chain(self.children.get(level)) {
            if let Some((own, rest)) = name.split_at_checked(child.run.len())
                && child.agrees(own)
            {
                child.matches(rest, false, found);
            }
        }
    }

    fn agrees(&self, name: &[Level]) -> bool {
        let mut pairs = self.run.iter().zip(name);
        pairs.all(|(own, level)| own == level || *own == PLUS)
    }
}

fn take<T>(list: &mut Vec<T>, is_it: impl Fn(&T) -> bool) -> bool {
    let position = list.iter().position(is_it);
    position.map(|at| list.swap_remove(at)).is_some()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const SUBSCRIPTION: Subscription = Subscription {
        qos: QoS::AtLeastOnce,
        no_local: false,
        retain_as_published: false,
        id: None,
    };

    fn filters() -> impl Strategy<Value = Vec<String>> {
        let level = prop_oneof!["a", "b", "", Just("+".to_owned()), Just("$s".to_owned())];
        let filter =
            (prop::collection::vec(level, 1..4), any::<bool>()).prop_map(|(mut levels, hash)| {
                if hash {
                    levels.push("#".to_owned());
                }
                levels.join("/")
            });
        prop::collection::vec(
            filter.prop_filter("a filter is not empty", |filter| !filter.is_empty()),
            1..12,
        )
    }

    /// Filters, some of them with the prefix of a shared subscription.
    fn subscriptions() -> impl Strategy<Value = Vec<String>> {
        let groups = prop::collection::vec(prop::option::of("[gh]"), 12);
        (filters(), groups).prop_map(|(filters, groups)| {
            let both = filters.into_iter().zip(groups);
            both.map(|(filter, group)| match group {
                Some(group) => format!("$share/{group}/{filter}"),
                None => filter,
            })
            .collect()
        })
    }

    proptest! {
        /// The tree agrees with the plain comparison in `topic.rs`, and is empty after the last
        /// subscription is removed.
        #[test]
        fn tree_agrees_with_plain_matching(filters in subscriptions(), name in "(a|b|\\$s|/){1,6}") {
            let mut router = Router::default();
            for (key, filter) in filters.iter().enumerate() {
                router.subscribe(&Bytes::from(filter.clone()), key as u32, SUBSCRIPTION, true);
            }
            let mut found = Matches::default();
            router.matches(name.as_bytes(), &mut found);
            let mut sessions: Vec<_> = found.sessions.into_iter().map(|(key, _)| key as usize).collect();
            sessions.sort_unstable();
            let matching = (0..filters.len())
                .filter(|key| topic::matches(topic::of_topics(filters[*key].as_bytes()), name.as_bytes()));
            let (shared, plain): (Vec<_>, Vec<_>) = matching.partition(|key| topic::is_shared(filters[*key].as_bytes()));
            prop_assert_eq!(sessions, plain);
            found.groups.sort_unstable();
            let mut groups: Vec<_> = shared.into_iter().map(|key| Bytes::from(filters[key].clone())).collect();
            groups.sort_unstable();
            groups.dedup();
            prop_assert_eq!(found.groups, groups, "each group once, regardless of its members");
            for (key, filter) in filters.iter().enumerate() {
                router.unsubscribe(&Bytes::from(filter.clone()), key as u32);
            }
            prop_assert!(router.exact.is_empty() && router.wild.is_empty() && router.groups.is_empty());
            prop_assert!(router.levels.is_empty());
            prop_assert_eq!(router.count(), 0);
        }
    }

    #[test]
    fn deep_filters_cost_a_match_one_visit_each() {
        let mut router = Router::default();
        // Every filter matches every name with these levels.
        let filters: Vec<_> = (0..256_u32)
            .map(|number| {
                let branches = (0..8).map(|bit| if number >> bit & 1 == 0 { "+" } else { "a" });
                let levels = branches.chain(std::iter::repeat_n("a/+/b", 16));
                Bytes::from(levels.collect::<Vec<_>>().join("/"))
            })
            .collect();
        for filter in &filters {
            router.subscribe(filter, 1, SUBSCRIPTION, true);
        }
        let name = ["a"; 8].iter().chain(&["a/b/b"; 16]).copied();
        let mut found = Matches::default();
        router.matches(name.collect::<Vec<_>>().join("/").as_bytes(), &mut found);
        assert_eq!(found.sessions.len(), filters.len());
        let levels = filters.len() * (8 + 3 * 16);
        assert!(
            found.visited <= 6 * filters.len(),
            "{} of {levels}",
            found.visited
        );
    }

    #[test]
    fn a_second_subscription_to_a_filter_replaces_the_first() {
        let mut router = Router::default();
        let filter = Bytes::from_static(b"a/+");
        let second = Subscription {
            qos: QoS::ExactlyOnce,
            ..SUBSCRIPTION
        };
        router.subscribe(&filter, 1, SUBSCRIPTION, true);
        router.subscribe(&filter, 1, second, true);
        let mut found = Matches::default();
        router.matches(b"a/b", &mut found);
        assert_eq!(found.sessions, [(1, second)]);
        assert_eq!(router.count(), 1);
        router.unsubscribe(&filter, 1);
        assert_eq!(router.count(), 0);
        assert!(router.wild.is_empty() && router.levels.is_empty());
    }
}
