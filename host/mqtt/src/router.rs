//! Which sessions want a topic: a hash map for filters without wildcards, a tree of levels for the others.
//!
//! In come filters with a session's number; out go matches for a topic name: sessions, and groups of shared subscriptions
//! (section 4.8.2), which choose one of theirs. The cost of a match depends on the filters that share levels with the name,
//! not on the number of all filters. Knows nothing of sessions but their numbers.

use std::collections::HashMap;

use bytes::Bytes;

use crate::{
    QoS,
    group::{Group, Readiness},
    limits::{GROUP_BYTES, ROUTER_NODE_BYTES, SUBSCRIPTION_OVERHEAD_BYTES},
    topic,
};

/// Number of a session within the core.
pub(crate) type SessionKey = u32;

/// The options of one subscription that matter for routing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Subscription {
    pub(crate) qos: QoS,
    pub(crate) no_local: bool,
    pub(crate) retain_as_published: bool,
    pub(crate) id: Option<u32>,
}

/// A subscription that matches.
pub(crate) type Match = (SessionKey, Subscription);

/// What matches a topic name.
#[derive(Debug, Default)]
pub(crate) struct Matches {
    pub(crate) sessions: Vec<Match>,
    /// Groups by their filters, which begin with `$share/NAME/`; one message of each is for one of its sessions.
    pub(crate) groups: Vec<Bytes>,
}

impl Matches {
    pub(crate) fn clear(&mut self) {
        self.sessions.clear();
        self.groups.clear();
    }
}

/// All subscriptions of all sessions.
#[derive(Debug, Default)]
pub(crate) struct Router {
    exact: HashMap<Bytes, Subscribers>,
    wild: Node,
    /// By filter, with `$share/NAME/`.
    groups: HashMap<Bytes, Group>,
    count: usize,
    bytes: usize,
}

/// What a subscription to a filter costs at most: the filter in two places, for one with wildcards a node of the tree for
/// each level, for a shared one the group, since nobody else may have a part in them.
pub(crate) fn cost_bytes(filter: &[u8]) -> usize {
    let nodes = if topic::has_wildcard(filter) {
        topic::levels(topic::of_topics(filter)).count()
    } else {
        0
    };
    let group = usize::from(topic::is_shared(filter)) * GROUP_BYTES;
    2 * filter.len() + SUBSCRIPTION_OVERHEAD_BYTES + nodes * ROUTER_NODE_BYTES + group
}

/// Who subscribed to one filter.
#[derive(Debug, Default)]
struct Subscribers {
    sessions: Vec<Match>,
    /// Groups by their filters.
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

/// An entry of a filter.
#[derive(Debug, Clone, Copy)]
enum Subscriber<'a> {
    Session(SessionKey),
    Group(&'a Bytes),
}

#[derive(Debug, Default)]
struct Node {
    children: HashMap<Box<[u8]>, Node>,
    /// `+`
    any: Option<Box<Node>>,
    /// Filters that end here.
    here: Subscribers,
    /// Filters that end here with `#`.
    below: Subscribers,
}

impl Router {
    /// Adds or replaces the subscription of a session to a valid filter.
    pub(crate) fn subscribe(
        &mut self,
        filter: &Bytes,
        session: SessionKey,
        subscription: Subscription,
    ) {
        let new = if !topic::is_shared(filter) {
            let list = &mut self.subscribers(filter).sessions;
            let known = list.iter_mut().find(|(key, _)| *key == session);
            match known {
                Some((_, options)) => {
                    *options = subscription;
                    false
                }
                None => {
                    list.push((session, subscription));
                    true
                }
            }
        } else if let Some(group) = self.groups.get_mut(filter) {
            group.join(session, subscription)
        } else {
            let group = Group::new((session, subscription));
            self.groups.insert(filter.clone(), group);
            let topics = filter.slice_ref(topic::of_topics(filter));
            self.subscribers(&topics).groups.push(filter.clone());
            true
        };
        self.count += usize::from(new);
        self.bytes += if new { cost_bytes(filter) } else { 0 };
    }

    fn subscribers(&mut self, topics: &Bytes) -> &mut Subscribers {
        if topic::has_wildcard(topics) {
            self.wild.subscribers(topics)
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
        self.bytes -= if removed { cost_bytes(filter) } else { 0 };
    }

    fn remove(&mut self, topics: &[u8], subscriber: Subscriber<'_>) -> bool {
        if topic::has_wildcard(topics) {
            let levels: Vec<&[u8]> = topic::levels(topics).collect();
            return self.wild.remove(&levels, subscriber);
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

    /// The session of a group that is to have a message, if one is ready for it; see [`Group::choose`].
    pub(crate) fn choose(
        &mut self,
        group: &Bytes,
        readiness: impl FnMut(&Match) -> Option<Readiness>,
    ) -> Option<Match> {
        self.groups.get_mut(group)?.choose(readiness)
    }

    /// Appends every subscription that matches a valid topic name.
    pub(crate) fn matches(&self, name: &[u8], found: &mut Matches) {
        if let Some(subscribers) = self.exact.get(name) {
            subscribers.add_to(found);
        }
        if !self.wild.is_empty() {
            // A leading wildcard does not match a name that begins with `$` (section 4.7.2).
            self.wild
                .matches(&mut topic::levels(name), name.first() == Some(&b'$'), found);
        }
    }

    /// What the subscriptions of all sessions cost.
    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }

    /// Subscriptions of all sessions.
    pub(crate) fn count(&self) -> usize {
        self.count
    }
}

impl Node {
    fn is_empty(&self) -> bool {
        self.children.is_empty()
            && self.any.is_none()
            && self.here.is_empty()
            && self.below.is_empty()
    }

    /// Where a filter's subscriptions are, with the nodes to it.
    fn subscribers(&mut self, filter: &[u8]) -> &mut Subscribers {
        let mut node = self;
        for level in topic::levels(filter) {
            node = match level {
                b"#" => return &mut node.below,
                b"+" => node.any.get_or_insert_default(),
                _ => node.children.entry(level.into()).or_default(),
            };
        }
        &mut node.here
    }

    /// Removes an entry and the nodes that are empty without it.
    fn remove(&mut self, levels: &[&[u8]], subscriber: Subscriber<'_>) -> bool {
        let Some((level, rest)) = levels.split_first() else {
            return self.here.remove(&subscriber);
        };
        match *level {
            b"#" => self.below.remove(&subscriber),
            b"+" => {
                let Some(child) = &mut self.any else {
                    return false;
                };
                let removed = child.remove(rest, subscriber);
                if child.is_empty() {
                    self.any = None;
                }
                removed
            }
            level => {
                let Some(child) = self.children.get_mut(level) else {
                    return false;
                };
                let removed = child.remove(rest, subscriber);
                if child.is_empty() {
                    self.children.remove(level);
                }
                removed
            }
        }
    }

    /// One call per level; names with too many levels do not come here.
    fn matches<'a>(
        &self,
        levels: &mut (impl Iterator<Item = &'a [u8]> + Clone),
        dollar: bool,
        found: &mut Matches,
    ) {
        if !dollar {
            self.below.add_to(found);
        }
        let Some(level) = levels.next() else {
            self.here.add_to(found);
            return;
        };
        if let Some(child) = self.any.as_ref().filter(|_| !dollar) {
            child.matches(&mut levels.clone(), false, found);
        }
        if let Some(child) = self.children.get(level) {
            child.matches(levels, false, found);
        }
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

    /// Filters, some of them of shared subscriptions to groups of these names.
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
        /// The tree and the plain comparison of topic.rs agree, and nothing stays after the last subscription.
        #[test]
        fn agrees_with_plain_matching(filters in subscriptions(), name in "(a|b|\\$s|/){1,6}") {
            let mut router = Router::default();
            for (key, filter) in filters.iter().enumerate() {
                router.subscribe(&Bytes::from(filter.clone()), key as u32, SUBSCRIPTION);
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
            prop_assert_eq!(found.groups, groups, "a group once, however many its members are");
            for (key, filter) in filters.iter().enumerate() {
                router.unsubscribe(&Bytes::from(filter.clone()), key as u32);
            }
            prop_assert!(router.exact.is_empty() && router.wild.is_empty() && router.groups.is_empty());
            prop_assert_eq!((router.count(), router.bytes()), (0, 0));
        }
    }

    #[test]
    fn a_second_subscription_to_a_filter_replaces_the_first() {
        let mut router = Router::default();
        let filter = Bytes::from_static(b"a/+");
        router.subscribe(&filter, 1, SUBSCRIPTION);
        router.subscribe(
            &filter,
            1,
            Subscription {
                qos: QoS::ExactlyOnce,
                ..SUBSCRIPTION
            },
        );
        let mut found = Matches::default();
        router.matches(b"a/b", &mut found);
        assert_eq!(
            found.sessions,
            [(
                1,
                Subscription {
                    qos: QoS::ExactlyOnce,
                    ..SUBSCRIPTION
                }
            )]
        );
        assert_eq!(router.count(), 1);
    }
}
