//! Retained messages (section 3.3.1.3): the last message of a topic, for who subscribes later.

use std::{collections::BTreeMap, ops::Bound, sync::Arc, time::Instant};

use bytes::Bytes;

use crate::{
    Limits, Message,
    change::{Change, Content},
    persist::Recorder,
    topic,
};

/// All retained messages, bounded in number and bytes.
#[derive(Debug, Default)]
pub(crate) struct Retained {
    messages: BTreeMap<Bytes, Entry>,
    bytes: usize,
}

/// A retained message and who published it (none: the broker), for No Local.
#[derive(Debug)]
pub(crate) struct Entry {
    pub(crate) message: Message,
    pub(crate) from: Option<Arc<str>>,
}

impl Retained {
    /// Sets the message of its topic; an empty payload removes it. False: there is no room, and the topic keeps what it
    /// had.
    pub(crate) fn set(
        &mut self,
        message: &Message,
        from: Option<Arc<str>>,
        limits: &Limits,
        now: Instant,
        recorder: &mut Recorder,
    ) -> bool {
        if message.payload.is_empty() {
            if self.remove(&message.topic) {
                recorder.write(&Change::Forgotten {
                    topic: &message.topic,
                });
            }
            return true;
        }
        if !self.has_room(message, limits) {
            self.remove_expired(now, recorder);
            if !self.has_room(message, limits) {
                return false;
            }
        }
        let clock = *recorder.clock();
        recorder.write(&Change::Retained {
            message: Content::new(message, &clock),
            from: from.as_deref(),
        });
        self.insert(message.detached(), from);
        true
    }

    /// Puts back a message that recovery found. False: there is no room.
    pub(crate) fn restore(
        &mut self,
        message: Message,
        from: Option<Arc<str>>,
        limits: &Limits,
    ) -> bool {
        let has_room = self.has_room(&message, limits);
        if has_room {
            self.insert(message, from);
        }
        has_room
    }

    fn insert(&mut self, message: Message, from: Option<Arc<str>>) {
        self.remove(&message.topic);
        self.bytes += message.cost_bytes();
        self.messages
            .insert(message.topic.clone(), Entry { message, from });
    }

    /// Messages in the order of their topics, behind this one.
    pub(crate) fn after(&self, topic: Option<&[u8]>) -> impl Iterator<Item = &Entry> {
        let from = topic.map_or(Bound::Unbounded, Bound::Excluded);
        self.messages
            .range::<[u8], _>((from, Bound::Unbounded))
            .map(|(_, entry)| entry)
    }

    /// The messages whose topic matches a valid filter, expired ones left out.
    pub(crate) fn matching<'a>(
        &'a self,
        filter: &'a [u8],
        now: Instant,
    ) -> impl Iterator<Item = &'a Entry> {
        // What stands before the first wildcard bounds the search. `a/#` matches `a` too, so the slash before a
        // wildcard is not part of it.
        let wildcard = filter.iter().position(|byte| matches!(byte, b'+' | b'#'));
        let prefix = &filter[..wildcard.map_or(filter.len(), |at| at.saturating_sub(1))];
        self.messages
            .range::<[u8], _>((Bound::Included(prefix), Bound::Unbounded))
            .take_while(move |(name, _)| name.starts_with(prefix))
            .filter(move |(name, entry)| {
                topic::matches(filter, name) && !entry.message.is_expired(now)
            })
            .map(|(_, entry)| entry)
    }

    pub(crate) fn count(&self) -> usize {
        self.messages.len()
    }

    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }

    fn has_room(&self, message: &Message, limits: &Limits) -> bool {
        let old = self
            .messages
            .get(&message.topic)
            .map(|entry| entry.message.cost_bytes());
        self.messages.len() + usize::from(old.is_none()) <= limits.retained_max
            && self.bytes - old.unwrap_or(0) + message.cost_bytes() <= limits.retained_bytes_max
    }

    fn remove(&mut self, name: &[u8]) -> bool {
        let old = self.messages.remove(name);
        if let Some(old) = &old {
            self.bytes -= old.message.cost_bytes();
        }
        old.is_some()
    }

    fn remove_expired(&mut self, now: Instant, recorder: &mut Recorder) {
        let bytes = &mut self.bytes;
        self.messages.retain(|topic, entry| {
            let keep = !entry.message.is_expired(now);
            if !keep {
                *bytes -= entry.message.cost_bytes();
                recorder.write(&Change::Forgotten { topic });
            }
            keep
        });
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::{QoS, clock::Clock};

    fn unrecorded() -> Recorder {
        Recorder::new(None, Arc::default(), Clock::now())
    }

    fn message(topic: &'static str, payload: &'static str) -> Message {
        Message::new(topic, payload, QoS::AtMostOnce)
    }

    #[test]
    fn finds_by_filter() {
        let (mut retained, now) = (Retained::default(), Instant::now());
        for topic in ["a", "a/b", "a/b/c", "ab", "b", "$SYS/a"] {
            assert!(retained.set(
                &message(topic, "x"),
                None,
                &Limits::default(),
                now,
                &mut unrecorded()
            ));
        }
        let found = |filter: &str| -> Vec<String> {
            let entries = retained.matching(filter.as_bytes(), now);
            entries
                .map(|entry| String::from_utf8_lossy(&entry.message.topic).into_owned())
                .collect()
        };
        assert_eq!(found("a"), ["a"]);
        assert_eq!(found("a/#"), ["a", "a/b", "a/b/c"]);
        assert_eq!(found("a/+"), ["a/b"]);
        assert_eq!(found("+"), ["a", "ab", "b"]);
        assert_eq!(found("#").len(), 5);
        assert_eq!(found("$SYS/#"), ["$SYS/a"]);
    }

    #[test]
    fn bounded_in_count_and_bytes() {
        let now = Instant::now();
        let mut retained = Retained::default();
        let limits = Limits {
            retained_max: 2,
            retained_bytes_max: 1000,
            ..Limits::default()
        };
        let mut soon = message("a", "1");
        soon.expires = Some(now + Duration::from_secs(1));
        assert!(retained.set(&soon, None, &limits, now, &mut unrecorded()));
        assert!(retained.set(&message("b", "2"), None, &limits, now, &mut unrecorded()));
        assert!(
            !retained.set(&message("c", "3"), None, &limits, now, &mut unrecorded()),
            "a third one has no room"
        );
        assert!(
            retained.set(&message("b", "22"), None, &limits, now, &mut unrecorded()),
            "a replacement has"
        );
        let later = now + Duration::from_secs(2);
        assert!(
            retained.set(&message("c", "3"), None, &limits, later, &mut unrecorded()),
            "an expired one makes room"
        );
        assert!(retained.set(&message("b", ""), None, &limits, later, &mut unrecorded()));
        assert!(retained.set(&message("c", ""), None, &limits, later, &mut unrecorded()));
        assert_eq!((retained.count(), retained.bytes()), (0, 0));
        let large = Message::new("d", vec![0; 1000], QoS::AtMostOnce);
        assert!(!retained.set(&large, None, &limits, later, &mut unrecorded()));
    }
}
