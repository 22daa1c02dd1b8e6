//! What one client may do: the rules that are for it, worked out.

use std::sync::Arc;

use super::keys::{KeySet, KeySetBuilder};
use statehouse_protocol::rights::{ClientRights, Right};

use super::principal::Principal;
use super::seal::Seal;
use super::topics::TopicSet;
use super::{Kind, Resource};
use crate::own_topics;

/// What one client may do. Rules that change do not change it: a new one is worked out.
#[derive(Debug)]
pub struct Grants {
    user: Option<Box<str>>,
    may_connect: bool,
    /// What holds for others in the same way.
    shared: Arc<Index>,
    /// What holds for what this client is called.
    own: Index,
    /// What its own topics begin with.
    own_topics: Box<[Box<[u8]>]>,
    /// What the topics of its notifications begin with, as clients subscribe to them.
    notifications: Box<[Box<[u8]>]>,
    seal: Arc<Seal>,
}

/// Keys and topics, for quick answers.
#[derive(Debug)]
pub(super) struct Index {
    read: KeySet,
    write: KeySet,
    publish: TopicSet,
    subscribe: TopicSet,
}

impl Index {
    /// What these resources allow whoever it is, or, of a client, what they allow it because of what it is called.
    pub(super) fn new<'a>(
        resources: impl Iterator<Item = &'a Resource>,
        who: Option<&Principal<'_>>,
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
                        .filter(|it| it.template.is_static() == who.is_none());
                    let filters = meant.filter_map(|it| it.template.filter(who));
                    filters.for_each(|filter| set.insert(filter));
                }
                Kind::Keys { read, write, keys } => {
                    for key in keys
                        .iter()
                        .filter(|it| it.template.is_static() == who.is_none())
                    {
                        let named = match key.is_pattern {
                            true => key.template.pattern(who),
                            false => key.template.exact(who),
                        };
                        let Some(named) = named else { continue };
                        let sets = [(*read, &mut reads), (*write, &mut writes)];
                        for (_, set) in sets.into_iter().filter(|(is_meant, _)| *is_meant) {
                            match key.is_pattern {
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
}

impl Grants {
    pub(super) fn new(
        who: Principal<'_>,
        may_connect: bool,
        shared: Arc<Index>,
        own: Index,
        seal: Arc<Seal>,
    ) -> Self {
        let bytes = |text: String| text.into_bytes().into_boxed_slice();
        Self {
            user: who.user.map(Into::into),
            may_connect,
            shared,
            own,
            own_topics: own_topics::response_prefixes(who.client)
                .map(bytes)
                .collect(),
            notifications: own_topics::notification_prefixes(who.client)
                .map(bytes)
                .collect(),
            seal,
        }
    }

    /// The user that the client has proven to be.
    pub fn user(&self) -> Option<&str> {
        self.user.as_deref()
    }

    /// Whether the client may connect.
    pub fn may_connect(&self) -> bool {
        self.may_connect
    }

    /// Whether it may publish to a topic, which is checked to be one.
    pub fn may_publish(&self, topic: &[u8]) -> bool {
        self.shared.publish.cover(topic) || self.own.publish.cover(topic)
    }

    /// Whether it may subscribe to a topic filter, which is checked to be one; of a shared subscription (MQTT 5 section 4.8.2)
    /// that is the filter behind the group's name.
    ///
    /// Who may touch any key may hear the answers: on its own topics, and on those of its notifications.
    pub fn may_subscribe(&self, filter: &[u8]) -> bool {
        let is_own = self.owns(filter) || begins_with_one_of(filter, &self.notifications);
        (is_own && self.may_touch_keys())
            || self.shared.subscribe.cover(filter)
            || self.own.subscribe.cover(filter)
    }

    /// Whether it may read a key.
    pub fn may_read(&self, key: &[u8]) -> bool {
        self.shared.read.holds(key) || self.own.read.holds(key)
    }

    /// Whether it may change a key.
    pub fn may_write(&self, key: &[u8]) -> bool {
        self.shared.write.holds(key) || self.own.write.holds(key)
    }

    /// Whether any rule lets it touch any key.
    pub(crate) fn may_touch_keys(&self) -> bool {
        let sets = [&self.shared, &self.own].map(|it: &Index| [&it.read, &it.write]);
        sets.iter().flatten().any(|it| !it.is_empty())
    }

    fn owns(&self, topic: &[u8]) -> bool {
        begins_with_one_of(topic, &self.own_topics)
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

    fn patterns(&self, right: Right) -> usize {
        match right {
            Right::Read => self.shared.read.tries() + self.own.read.tries(),
            Right::Write => self.shared.write.tries() + self.own.write.tries(),
        }
    }

    fn seal(&self, key: &[u8]) -> Vec<u8> {
        self.seal.close(key)
    }

    fn unseal(&self, sealed: &[u8]) -> Option<Vec<u8>> {
        self.seal.open(sealed)
    }
}

fn begins_with_one_of(topic: &[u8], prefixes: &[Box<[u8]>]) -> bool {
    prefixes.iter().any(|prefix| topic.starts_with(prefix))
}
