//! The rights of one client: the evaluated rules that apply to it.
//!
//! [`Grants`] must never change. After a change of the rules, a client gets new ones.

use std::sync::Arc;

use super::keys::{KeySet, KeySetBuilder};
use statehouse_protocol::rights::{ClientRights, Right, SharedAnswers};

use super::principal::Principal;
use super::seal::Seal;
use super::topics::TopicSet;
use super::{Kind, Resource, Text};
use crate::own_topics;

/// The rights of one client.
#[derive(Debug)]
pub struct Grants {
    user: Option<Box<str>>,
    may_connect: bool,
    /// Rights without placeholders, shared with other clients under the same rules.
    shared: Arc<Index>,
    /// Rights whose placeholders have values of this client.
    own: Index,
    /// The prefixes of the client's own topics.
    own_topics: Box<[Box<[u8]>]>,
    /// The prefixes of filters for the client's notifications.
    notifications: Box<[Box<[u8]>]>,
    seal: Arc<Seal>,
}

/// Allowed keys and topics, for fast lookups.
#[derive(Debug)]
pub(super) struct Index {
    read: KeySet,
    write: KeySet,
    publish: TopicSet,
    subscribe: TopicSet,
}

impl Index {
    /// Without a principal, the index of all texts of the resources without placeholders. With a
    /// principal, the index of all texts with placeholders.
    pub(super) fn new<'a>(
        resources: impl Iterator<Item = &'a Resource>,
        principal: Option<&Principal<'_>>,
    ) -> Self {
        let (mut reads, mut writes) = (KeySetBuilder::default(), KeySetBuilder::default());
        let (mut publish, mut subscribe) = (TopicSet::default(), TopicSet::default());
        for resource in resources {
            match &resource.kind {
                Kind::Connect => {}
                Kind::Publish(topics) | Kind::Subscribe(topics) => {
                    let set = match resource.kind {
                        Kind::Publish(_) => &mut publish,
                        _ => &mut subscribe,
                    };
                    let meant = topics
                        .iter()
                        .filter(|it| it.template.is_static() == principal.is_none());
                    let filters = meant.filter_map(|it| it.template.filter(principal));
                    filters.for_each(|filter| set.insert(filter));
                }
                Kind::Keys {
                    read,
                    write,
                    are_patterns,
                    keys,
                } => {
                    for Text { template, .. } in keys {
                        if template.is_static() != principal.is_none() {
                            continue;
                        }
                        let Some(named) = template.bytes(*are_patterns, principal) else {
                            continue;
                        };
                        let sets = [(*read, &mut reads), (*write, &mut writes)];
                        for (_, set) in sets.into_iter().filter(|(is_meant, _)| *is_meant) {
                            match are_patterns {
                                true => set.pattern(&named),
                                false => set.key(&named),
                            }
                        }
                    }
                }
            }
        }
        Self {
            read: reads.build(),
            write: writes.build(),
            publish,
            subscribe,
        }
    }

    fn keys(&self, right: Right) -> &KeySet {
        match right {
            Right::Read => &self.read,
            Right::Write => &self.write,
        }
    }
}

impl Grants {
    pub(super) fn new(
        principal: Principal<'_>,
        may_connect: bool,
        shared: Arc<Index>,
        own: Index,
        seal: Arc<Seal>,
    ) -> Self {
        let bytes = |text: String| text.into_bytes().into_boxed_slice();
        Self {
            user: principal.user.map(Into::into),
            may_connect,
            shared,
            own,
            own_topics: own_topics::response_prefixes(principal.client)
                .map(bytes)
                .collect(),
            notifications: own_topics::notification_prefixes(principal.client)
                .map(bytes)
                .collect(),
            seal,
        }
    }

    /// Whether the client may connect.
    pub fn may_connect(&self) -> bool {
        self.may_connect
    }

    /// Whether the client may publish to a topic. The topic must be valid.
    pub fn may_publish(&self, topic: &[u8]) -> bool {
        self.shared.publish.covers(topic) || self.own.publish.covers(topic)
    }

    /// Whether the client may subscribe to a topic filter. The filter must be valid, and for a
    /// shared subscription (MQTT 5 section 4.8.2) it must be the filter after the group name.
    ///
    /// A client that may access any key may subscribe to its own topics, for responses, and to its
    /// notification topics.
    pub fn may_subscribe(&self, filter: &[u8]) -> bool {
        let is_own = self.owns(filter) || has_prefix(filter, &self.notifications);
        (is_own && self.may_access_keys())
            || self.shared.subscribe.covers(filter)
            || self.own.subscribe.covers(filter)
    }

    /// Whether the client may read a key.
    pub fn may_read(&self, key: &[u8]) -> bool {
        self.shared.read.contains(key) || self.own.read.contains(key)
    }

    /// Whether the client may change a key.
    pub fn may_write(&self, key: &[u8]) -> bool {
        self.shared.write.contains(key) || self.own.write.contains(key)
    }

    /// Whether any rule allows any key.
    pub(crate) fn may_access_keys(&self) -> bool {
        let sets = [&self.shared, &self.own].map(|it: &Index| [&it.read, &it.write]);
        sets.iter().flatten().any(|it| !it.is_empty())
    }

    fn owns(&self, topic: &[u8]) -> bool {
        has_prefix(topic, &self.own_topics)
    }

    #[cfg(test)]
    pub(super) fn shares_with(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.shared, &other.shared)
    }
}

impl ClientRights for Grants {
    fn user(&self) -> Option<&str> {
        self.user.as_deref()
    }

    fn may_be_answered_at(&self, topic: &[u8]) -> bool {
        self.owns(topic) || self.may_publish(topic)
    }

    fn allow(&self, key: &[u8], right: Right) -> bool {
        match right {
            Right::Read => self.may_read(key),
            Right::Write => self.may_write(key),
        }
    }

    fn allow_once<'a>(&'a self, key: &[u8], right: Right, answers: &mut SharedAnswers<'a>) -> bool {
        answers.of(&self.shared, |shared| shared.keys(right).contains(key))
            || self.own.keys(right).contains(key)
    }

    fn patterns(&self, right: Right) -> usize {
        let sets = [self.shared.keys(right), self.own.keys(right)];
        sets.map(KeySet::comparisons_max).iter().sum()
    }

    fn seal(&self, key: &[u8]) -> Vec<u8> {
        self.seal.seal(key)
    }

    fn unseal(&self, sealed: &[u8]) -> Option<Vec<u8>> {
        self.seal.unseal(sealed)
    }
}

fn has_prefix(topic: &[u8], prefixes: &[Box<[u8]>]) -> bool {
    prefixes.iter().any(|prefix| topic.starts_with(prefix))
}
