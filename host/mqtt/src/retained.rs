//! Retained messages (section 3.3.1.3): the last message of each topic, for later subscribers.

use std::{collections::BTreeMap, ops::Bound, sync::Arc, time::Instant};

use bytes::Bytes;

use crate::{
    Limits, Message,
    change::{Change, Content},
    ledger::{Account, Kind},
    limits::{EXPIRED_SEARCH_PERIOD, RETAINED_BYTES_FLOOR, RETAINED_FLOOR, work},
    persist::ChangeLog,
    topic,
};

/// All retained messages, limited in number and bytes.
#[derive(Debug, Default)]
pub(crate) struct Retained {
    messages: BTreeMap<Bytes, Entry>,
    bytes: usize,
    /// The number of the newest message.
    newest: u64,
    /// When expired messages were last searched for.
    searched: Option<Instant>,
}

/// A retained message and its publisher, which No Local needs. The broker's own messages have no
/// publisher.
#[derive(Debug)]
pub(crate) struct Entry {
    pub(crate) message: Message,
    pub(crate) from: Option<Publisher>,
    /// Rises with every message.
    pub(crate) number: u64,
}

/// The client that published a retained message, and the account that is charged for it.
#[derive(Debug, Clone)]
pub(crate) struct Publisher {
    pub(crate) client: Arc<str>,
    pub(crate) account: Arc<Account>,
}

impl Entry {
    fn cost_bytes(&self) -> usize {
        cost_bytes(&self.message, self.from.as_ref())
    }

    pub(crate) fn is_from(&self, client: &Arc<str>) -> bool {
        let from = self.from.as_ref();
        from.is_some_and(|from| from.client == *client)
    }

    /// Subtracts a removed entry from its publisher's account.
    fn uncharge(&self) {
        if let Some(from) = &self.from {
            from.account.subtract(Kind::Retained, 1);
            from.account
                .subtract(Kind::RetainedBytes, self.cost_bytes());
        }
    }
}

/// Includes the client id: the publisher's session may end first, and then the entry holds the only
/// copy.
fn cost_bytes(message: &Message, from: Option<&Publisher>) -> usize {
    message.cost_bytes() + from.map_or(0, |from| from.client.len())
}

pub(crate) struct SearchStep<'a> {
    /// The last topic that was examined, with its entry if it matches. `None` if no topics are
    /// left.
    pub(crate) at: Option<(&'a Bytes, Option<&'a Entry>)>,
    pub(crate) examined: usize,
}

/// Where the next topic that may match a filter is, in byte order.
#[derive(Debug, PartialEq, Eq)]
enum Next {
    /// The examined topic matches.
    Here,
    /// After the examined topic.
    Behind,
    /// At or after this bound, which is greater than the examined topic.
    From(Vec<u8>),
    Nowhere,
}

impl Retained {
    /// Sets or, with an empty payload, removes the message of its topic. Returns false if there is
    /// no room; then the old message stays. From time to time, expired messages make room. The
    /// search for them adds to `work_done`.
    pub(crate) fn set(
        &mut self,
        message: &Message,
        from: Option<Publisher>,
        limits: &Limits,
        now: Instant,
        change_log: &mut ChangeLog,
        work_done: &mut u64,
    ) -> bool {
        if message.payload.is_empty() {
            self.discard(&message.topic, change_log);
            return true;
        }
        if !self.has_room(message, from.as_ref(), limits) {
            if (self.searched).is_some_and(|at| now < at + EXPIRED_SEARCH_PERIOD) {
                return false;
            }
            self.searched = Some(now);
            *work_done += work::RETAINED_EXAMINED * self.messages.len() as u64;
            self.remove_expired(now, change_log);
            if !self.has_room(message, from.as_ref(), limits) {
                return false;
            }
        }
        let clock = *change_log.clock();
        change_log.write(&Change::Retained {
            message: Content::new(message, &clock),
            from: from.as_ref().map(|from| &*from.client),
        });
        self.insert(message.detached(), from);
        true
    }

    pub(crate) fn discard(&mut self, topic: &[u8], change_log: &mut ChangeLog) {
        if self.remove(topic) {
            change_log.write(&Change::RetainedRemoved(topic));
        }
    }

    /// Restores a recovered message. Returns false if there is no room.
    pub(crate) fn restore(
        &mut self,
        message: Message,
        from: Option<Publisher>,
        limits: &Limits,
    ) -> bool {
        let has_room = self.has_room_in_total(&message, from.as_ref(), limits);
        if has_room {
            self.insert(message, from);
        }
        has_room
    }

    fn insert(&mut self, message: Message, from: Option<Publisher>) {
        self.remove(&message.topic);
        self.newest += 1;
        let entry = Entry {
            message,
            from,
            number: self.newest,
        };
        let bytes = entry.cost_bytes();
        self.bytes += bytes;
        if let Some(from) = &entry.from {
            from.account.add(Kind::Retained, 1);
            from.account.add(Kind::RetainedBytes, bytes);
        }
        self.messages.insert(entry.message.topic.clone(), entry);
    }

    /// Entries after this topic, in the order of topics.
    pub(crate) fn after(&self, topic: Option<&[u8]>) -> impl Iterator<Item = &Entry> {
        let from = topic.map_or(Bound::Unbounded, Bound::Excluded);
        self.messages
            .range::<[u8], _>((from, Bound::Unbounded))
            .map(|(_, entry)| entry)
    }

    /// Finds the next entry after a topic that matches a valid filter, including expired ones.
    /// Examines at most `examined_max` topics and skips ranges in which no topic can match.
    pub(crate) fn find(
        &self,
        filter: &[u8],
        after: Option<&[u8]>,
        examined_max: usize,
    ) -> SearchStep<'_> {
        let start = first_match(filter);
        let from = match after {
            Some(after) if after >= start => Bound::Excluded(after),
            _ => Bound::Included(start),
        };
        let mut topics = self.messages.range::<[u8], _>((from, Bound::Unbounded));
        let mut examined = 0;
        while let Some((topic, entry)) = topics.next() {
            examined += 1;
            let next = next_match(filter, topic);
            if matches!(next, Next::Here) {
                return SearchStep {
                    at: Some((topic, Some(entry))),
                    examined,
                };
            }
            if matches!(next, Next::Nowhere) {
                break;
            }
            if examined >= examined_max {
                return SearchStep {
                    at: Some((topic, None)),
                    examined,
                };
            }
            if let Next::From(bound) = next {
                topics = self
                    .messages
                    .range::<[u8], _>((Bound::Included(&bound[..]), Bound::Unbounded));
            }
        }
        SearchStep { at: None, examined }
    }

    pub(crate) fn newest(&self) -> u64 {
        self.newest
    }

    pub(crate) fn count(&self) -> usize {
        self.messages.len()
    }

    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }

    /// Whether the message fits the total limits and its owner's share. A replacement needs only
    /// the difference to the old message, even if another client published that.
    fn has_room(&self, message: &Message, from: Option<&Publisher>, limits: &Limits) -> bool {
        if !self.has_room_in_total(message, from, limits) {
            return false;
        }
        let Some(Publisher { account, .. }) = from else {
            return true;
        };
        let old = self.messages.get(&message.topic).map(Entry::cost_bytes);
        let more = cost_bytes(message, from).saturating_sub(old.unwrap_or(0));
        let (max, bytes_max) = (limits.retained_max, limits.retained_bytes_max);
        (old.is_some() || account.fits(Kind::Retained, 1, max, RETAINED_FLOOR))
            && (more == 0
                || account.fits(Kind::RetainedBytes, more, bytes_max, RETAINED_BYTES_FLOOR))
    }

    fn has_room_in_total(
        &self,
        message: &Message,
        from: Option<&Publisher>,
        limits: &Limits,
    ) -> bool {
        let old = self.messages.get(&message.topic).map(Entry::cost_bytes);
        self.messages.len() + usize::from(old.is_none()) <= limits.retained_max
            && self.bytes - old.unwrap_or(0) + cost_bytes(message, from)
                <= limits.retained_bytes_max
    }

    fn remove(&mut self, name: &[u8]) -> bool {
        let old = self.messages.remove(name);
        if let Some(old) = &old {
            self.bytes -= old.cost_bytes();
            old.uncharge();
        }
        old.is_some()
    }

    fn remove_expired(&mut self, now: Instant, change_log: &mut ChangeLog) {
        let bytes = &mut self.bytes;
        self.messages.retain(|topic, entry| {
            let keep = !entry.message.is_expired(now);
            if !keep {
                *bytes -= entry.cost_bytes();
                entry.uncharge();
                change_log.write(&Change::RetainedRemoved(topic));
            }
            keep
        });
    }
}

/// The byte after the slash: `a` followed by it sorts right after every topic below `a`.
const BEHIND_SLASH: u8 = b'/' + 1;

/// A lower bound of all topics that match a filter.
fn first_match(filter: &[u8]) -> &[u8] {
    // `a/#` matches `a` too, so the slash before a wildcard is not part of the bound.
    let wildcard = filter.iter().position(|byte| matches!(byte, b'+' | b'#'));
    &filter[..wildcard.map_or(filter.len(), |at| at.saturating_sub(1))]
}

/// Compares level by level. In byte order the topics below `a`, which begin with `a/`, are
/// adjacent, but topics such as `a-b` may stand between `a` and them.
fn next_match(filter: &[u8], name: &[u8]) -> Next {
    if name.first() == Some(&b'$') && matches!(filter.first(), Some(b'+' | b'#')) {
        return Next::From(vec![b'$' + 1]);
    }
    let behind_all_below = |end: usize| {
        let mut bound = name[..end].to_vec();
        bound.push(BEHIND_SLASH);
        Next::From(bound)
    };
    let mut names = topic::levels(name);
    // Where the current level of the name begins, and where the level ends that matched the last
    // `+`.
    let (mut at, mut plus_end) = (0, None);
    for level in topic::levels(filter) {
        if level == b"#" {
            return Next::Here;
        }
        let Some(own) = names.next() else {
            return Next::Behind;
        };
        let end = at + own.len();
        if level == b"+" {
            plus_end = Some(end);
        } else if level != own {
            let mut bound = [&name[..at], level].concat();
            if bound.as_slice() > name {
                return Next::From(bound);
            }
            bound.push(b'/');
            if bound.as_slice() > name {
                return Next::From(bound);
            }
            // All topics with this level were passed, so only another value of the last `+` can
            // match.
            return plus_end.map_or(Next::Nowhere, behind_all_below);
        }
        at = end + 1;
    }
    match names.next() {
        None => Next::Here,
        Some(_) => behind_all_below(at - 1),
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use proptest::prelude::*;

    use super::*;
    use crate::{QoS, clock::Clock};

    fn unlogged() -> ChangeLog {
        ChangeLog::new(None, Arc::default(), Clock::now())
    }

    fn message(topic: &'static str, payload: &'static str) -> Message {
        Message::new(topic, payload, QoS::AtMostOnce)
    }

    /// All topics that match, with `examined_max` per step, and how many topics were examined.
    fn found(retained: &Retained, filter: &str, examined_max: usize) -> (Vec<String>, usize) {
        let (mut topics, mut examined) = (Vec::new(), 0);
        let mut after: Option<Bytes> = None;
        loop {
            let step = retained.find(filter.as_bytes(), after.as_deref(), examined_max);
            examined += step.examined;
            let Some((topic, entry)) = step.at else {
                return (topics, examined);
            };
            if entry.is_some() {
                topics.push(String::from_utf8_lossy(topic).into_owned());
            }
            after = Some(topic.clone());
        }
    }

    fn with_topics(topics: impl IntoIterator<Item = String>) -> Retained {
        let mut retained = Retained::default();
        for topic in topics {
            let message = Message::new(topic, "x", QoS::AtMostOnce);
            retained.insert(message, None);
        }
        retained
    }

    proptest! {
        #[test]
        fn search_agrees_with_comparing_every_topic(
            topics in prop::collection::btree_set("[a!/0-]{1,6}|\\$a(/a)?", 0..30),
            filter in prop::collection::vec("a|a!|-|\\+|\\+|", 1..5),
            hash in any::<bool>(),
            examined_max in 1..5_usize,
        ) {
            let mut filter = filter.join("/");
            if hash { filter.push_str(if filter.is_empty() { "#" } else { "/#" }) }
            prop_assume!(!filter.is_empty());
            let retained = with_topics(topics.clone());
            let expected: Vec<_> = topics
                .into_iter()
                .filter(|topic| topic::matches(filter.as_bytes(), topic.as_bytes()))
                .collect();
            prop_assert_eq!(found(&retained, &filter, examined_max).0, expected, "{}", filter);
        }
    }

    #[test]
    fn search_skips_topics_that_cannot_match() {
        let devices = (0..50).flat_map(|device| {
            (0..100).map(move |sensor| format!("site/{device:02}/sensors/{sensor:02}/value"))
        });
        let retained = with_topics(devices.chain(["site/07/state".to_owned()]));
        assert_eq!(
            found(&retained, "site/+/state", usize::MAX),
            (vec!["site/07/state".to_owned()], 51)
        );
        let (topics, examined) = found(&retained, "site/+/sensors/42/#", usize::MAX);
        assert_eq!(topics.len(), 50);
        assert!(examined <= 3 * 50 + 2, "{examined}");
    }

    #[test]
    fn search_examines_at_most_the_allowed_topics() {
        let retained = with_topics((0..1000).map(|number| format!("{number}/b/c")));
        let step = retained.find(b"+/+/x", None, 10);
        assert_eq!(step.examined, 10);
        assert!(step.at.is_some_and(|(_, entry)| entry.is_none()));
    }

    #[test]
    fn finds_by_filter() {
        let topics = ["a", "a/b", "a/b/c", "ab", "b", "$SYS/a"];
        let retained = with_topics(topics.map(String::from));
        let found = |filter: &str| found(&retained, filter, usize::MAX).0;
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
        let mut fits = |message: &Message, now| {
            let log = &mut unlogged();
            retained.set(message, None, &limits, now, log, &mut 0)
        };
        assert!(fits(&soon, now));
        assert!(fits(&message("b", "2"), now));
        assert!(
            !fits(&message("c", "3"), now),
            "a third message has no room"
        );
        assert!(fits(&message("b", "22"), now), "a replacement has room");
        let later = now + Duration::from_secs(2);
        assert!(
            fits(&message("c", "3"), later),
            "an expired message makes room"
        );
        assert!(fits(&message("b", ""), later));
        assert!(fits(&message("c", ""), later));
        let large = Message::new("d", vec![0; 1000], QoS::AtMostOnce);
        assert!(!fits(&large, later));
        assert_eq!((retained.count(), retained.bytes()), (0, 0));
    }

    #[test]
    fn refused_messages_seldom_search_for_expired_ones() {
        let now = Instant::now();
        let mut retained = with_topics((0..100).map(|number| number.to_string()));
        let limits = Limits {
            retained_max: 100,
            ..Limits::default()
        };
        let mut refused = |now| {
            let (message, mut work_done) = (message("new", "x"), 0);
            let log = &mut unlogged();
            assert!(!retained.set(&message, None, &limits, now, log, &mut work_done));
            work_done
        };
        let search = 100 * work::RETAINED_EXAMINED;
        assert_eq!([refused(now), refused(now)], [search, 0]);
        assert_eq!(refused(now + EXPIRED_SEARCH_PERIOD), search);
    }
}
