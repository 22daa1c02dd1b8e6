//! The topic aliases of one connection (section 3.3.2.3.4).

use std::{collections::HashMap, sync::Arc};

use bytes::Bytes;

use crate::{
    Limits, ReasonCode,
    codec::{Publish, Violation},
    ledger::{Account, Holding, Kind},
    limits::{ALIAS_OVERHEAD_BYTES, STATE_BYTES_FLOOR},
};

pub(super) struct TopicAliases {
    topics: HashMap<u16, Bytes>,
    count_max: u16,
    /// The memory of the aliases.
    bytes: Holding,
    bytes_max: usize,
    state_bytes_total_max: usize,
}

impl TopicAliases {
    pub(super) fn new(account: &Arc<Account>, limits: &Limits) -> Self {
        Self {
            topics: HashMap::new(),
            count_max: limits.topic_alias_max,
            bytes: Holding::new(account, Kind::State),
            bytes_max: limits.alias_bytes_max,
            state_bytes_total_max: limits.state_bytes_total_max,
        }
    }

    /// Sets the topic of a PUBLISH with a known alias, or remembers the topic of a new alias.
    #[inline]
    pub(super) fn resolve(&mut self, publish: &mut Publish) -> Result<(), Violation> {
        let Some(alias) = publish.properties.topic_alias else {
            return Ok(());
        };
        if alias == 0 || alias > self.count_max {
            let text = "the topic alias is zero or above the maximum";
            return Err(Violation {
                reason: ReasonCode::TOPIC_ALIAS_INVALID,
                text,
            });
        }
        if publish.topic.is_empty() {
            let unset = Violation::protocol("the topic alias has not been set");
            publish.topic = self.topics.get(&alias).ok_or(unset)?.clone();
        } else {
            self.set(alias, &publish.topic)?;
        }
        Ok(())
    }

    fn set(&mut self, alias: u16, topic: &[u8]) -> Result<(), Violation> {
        let old = self.topics.get(&alias);
        if old.is_some_and(|old| **old == *topic) {
            return Ok(());
        }
        let old = old.map_or(0, |old| old.len() + ALIAS_OVERHEAD_BYTES);
        let bytes = self.bytes.amount() - old + topic.len() + ALIAS_OVERHEAD_BYTES;
        let more = bytes.saturating_sub(self.bytes.amount());
        let fits = (self.bytes).fits(more, self.state_bytes_total_max, STATE_BYTES_FLOOR);
        if bytes > self.bytes_max || more > 0 && !fits {
            return Err(Violation {
                reason: ReasonCode::QUOTA_EXCEEDED,
                text: "topic aliases of this client or of all clients exceed the memory limit",
            });
        }
        self.topics.insert(alias, Bytes::copy_from_slice(topic));
        self.bytes.set(bytes);
        Ok(())
    }
}
