//! Which sessions want a topic: a hash map for filters without wildcards, a tree of levels for the others.
//!
//! In come filters with a session's number; out go matches for a topic name. The cost of a match depends on the filters
//! that share levels with the name, not on the number of all filters. Knows nothing of sessions but their numbers.

use std::collections::HashMap;

use bytes::Bytes;

use crate::{
    QoS,
    limits::{ROUTER_NODE_BYTES, SUBSCRIPTION_OVERHEAD_BYTES},
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

/// All subscriptions of all sessions.
#[derive(Debug, Default)]
pub(crate) struct Router {
    exact: HashMap<Bytes, Vec<Match>>,
    wild: Node,
    count: usize,
    bytes: usize,
}

/// What a subscription to a filter costs at most: the filter in two places, and for one with wildcards a node of the
/// tree for each level, since nobody else may share them.
pub(crate) fn cost_bytes(filter: &[u8]) -> usize {
    let nodes = if topic::has_wildcard(filter) {
        topic::levels(filter).count()
    } else {
        0
    };
    2 * filter.len() + SUBSCRIPTION_OVERHEAD_BYTES + nodes * ROUTER_NODE_BYTES
}

#[derive(Debug, Default)]
struct Node {
    children: HashMap<Box<[u8]>, Node>,
    /// `+`
    any: Option<Box<Node>>,
    /// Filters that end here.
    here: Vec<Match>,
    /// Filters that end here with `#`.
    below: Vec<Match>,
}

impl Router {
    /// Adds or replaces the subscription of a session to a valid filter.
    pub(crate) fn subscribe(
        &mut self,
        filter: &Bytes,
        session: SessionKey,
        subscription: Subscription,
    ) {
        let list = if topic::has_wildcard(filter) {
            self.wild.list(filter)
        } else {
            self.exact.entry(filter.clone()).or_default()
        };
        match list.iter_mut().find(|(key, _)| *key == session) {
            Some(entry) => entry.1 = subscription,
            None => {
                list.push((session, subscription));
                self.count += 1;
                self.bytes += cost_bytes(filter);
            }
        }
    }

    /// Removes the subscription of a session to a filter.
    pub(crate) fn unsubscribe(&mut self, filter: &Bytes, session: SessionKey) {
        let removed = if topic::has_wildcard(filter) {
            let levels: Vec<&[u8]> = topic::levels(filter).collect();
            self.wild.remove(&levels, session)
        } else if let Some(list) = self.exact.get_mut(filter) {
            let removed = take(list, session);
            if list.is_empty() {
                self.exact.remove(filter);
            }
            removed
        } else {
            false
        };
        self.count -= usize::from(removed);
        self.bytes -= if removed { cost_bytes(filter) } else { 0 };
    }

    /// Appends every subscription that matches a valid topic name.
    pub(crate) fn matches(&self, name: &[u8], found: &mut Vec<Match>) {
        if let Some(list) = self.exact.get(name) {
            found.extend_from_slice(list);
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

    /// The list where a filter's subscriptions are, with the nodes to it.
    fn list(&mut self, filter: &[u8]) -> &mut Vec<Match> {
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
    fn remove(&mut self, levels: &[&[u8]], session: SessionKey) -> bool {
        let Some((level, rest)) = levels.split_first() else {
            return take(&mut self.here, session);
        };
        match *level {
            b"#" => take(&mut self.below, session),
            b"+" => {
                let Some(child) = &mut self.any else {
                    return false;
                };
                let removed = child.remove(rest, session);
                if child.is_empty() {
                    self.any = None;
                }
                removed
            }
            level => {
                let Some(child) = self.children.get_mut(level) else {
                    return false;
                };
                let removed = child.remove(rest, session);
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
        found: &mut Vec<Match>,
    ) {
        if !dollar {
            found.extend_from_slice(&self.below);
        }
        let Some(level) = levels.next() else {
            found.extend_from_slice(&self.here);
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

fn take(list: &mut Vec<Match>, session: SessionKey) -> bool {
    let position = list.iter().position(|(key, _)| *key == session);
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

    proptest! {
        /// The tree and the plain comparison of topic.rs agree, and nothing stays after the last subscription.
        #[test]
        fn agrees_with_plain_matching(filters in filters(), name in "(a|b|\\$s|/){1,6}") {
            let mut router = Router::default();
            for (key, filter) in filters.iter().enumerate() {
                router.subscribe(&Bytes::from(filter.clone()), key as u32, SUBSCRIPTION);
            }
            let mut found = Vec::new();
            router.matches(name.as_bytes(), &mut found);
            let mut found: Vec<_> = found.into_iter().map(|(key, _)| key as usize).collect();
            found.sort_unstable();
            let expected: Vec<_> =
                (0..filters.len()).filter(|key| topic::matches(filters[*key].as_bytes(), name.as_bytes())).collect();
            prop_assert_eq!(found, expected);
            for (key, filter) in filters.iter().enumerate() {
                router.unsubscribe(&Bytes::from(filter.clone()), key as u32);
            }
            prop_assert!(router.exact.is_empty() && router.wild.is_empty() && router.count() == 0 && router.bytes() == 0);
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
        let mut found = Vec::new();
        router.matches(b"a/b", &mut found);
        assert_eq!(
            found,
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
