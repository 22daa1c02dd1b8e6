//! Topic filters of rules, and whether they cover other filters (MQTT 5 section 4.7).
//!
//! A filter covers another one if it matches every topic that the other one matches. A subscription
//! is allowed only if a filter of a single rule covers it. A topic name is a filter without
//! wildcards, so the same check decides about publishing.

use std::collections::HashMap;

use crate::limits;

/// A topic filter of a rule.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Filter(Vec<Level>);

#[derive(Clone, Debug, PartialEq, Eq)]
enum Level {
    /// These bytes. They may be `+` or `#`.
    Literal(Box<[u8]>),
    /// `+`.
    One,
    /// `#`.
    Rest,
}

impl Filter {
    /// Appends a level, which may be a wildcard.
    pub(super) fn push(&mut self, level: &[u8]) {
        self.0.push(match level {
            b"+" => Level::One,
            b"#" => Level::Rest,
            _ => Level::Literal(level.into()),
        });
        // Every topic has a first level, so `+/#` and `#` match the same topics.
        if self.0 == [Level::One, Level::Rest] {
            self.0.remove(0);
        }
    }

    /// Appends a literal level. `None` if the bytes cannot be one level.
    pub(super) fn push_literal(&mut self, level: &[u8]) -> Option<()> {
        if level.contains(&b'/') || level.contains(&0) {
            return None;
        }
        self.0.push(Level::Literal(level.into()));
        Some(())
    }

    /// Whether this filter matches every topic that `filter` matches.
    pub(crate) fn covers(self, filter: &[u8]) -> bool {
        let mut only = TopicSet::default();
        only.insert(self);
        only.covers(filter)
    }
}

/// A set of filters: a tree by level. Each node stands for the filters with the same first levels.
#[derive(Debug, Default)]
pub(super) struct TopicSet {
    /// The filters whose next level is literal, by that level.
    children: HashMap<Box<[u8]>, TopicSet>,
    /// The filters whose next level is `+`.
    one: Option<Box<TopicSet>>,
    /// Whether a filter has `#` as its next level.
    rest: bool,
    /// Whether a filter ends here.
    end: bool,
}

impl TopicSet {
    pub(super) fn insert(&mut self, filter: Filter) {
        let mut node = self;
        for level in filter.0 {
            node = match level {
                Level::Literal(level) => node.children.entry(level).or_default(),
                Level::One => node.one.get_or_insert_default(),
                Level::Rest => {
                    node.rest = true;
                    return;
                }
            };
        }
        node.end = true;
    }

    /// Whether any filter of the set covers `filter`. Visits each node at most once, and no more
    /// levels than a rule may have.
    pub(super) fn covers(&self, filter: &[u8]) -> bool {
        let mut levels = filter.split(|byte| *byte == b'/');
        // A wildcard in the first level matches no topic that begins with `$` (section 4.7.2).
        if filter.starts_with(b"$") {
            let child = levels.next().and_then(|level| self.children.get(level));
            return child.is_some_and(|it| it.covers_levels(levels, limits::RULE_TOPIC_LEVELS_MAX));
        }
        self.covers_levels(levels, limits::RULE_TOPIC_LEVELS_MAX)
    }

    fn covers_levels<'a>(
        &self,
        mut levels: impl Iterator<Item = &'a [u8]> + Clone,
        levels_left: usize,
    ) -> bool {
        if self.rest {
            return true;
        }
        let (level, levels_left) = match (levels.next(), levels_left.checked_sub(1)) {
            (None, _) => return self.end,
            // Only `#` covers `#`: `a/#` also matches `a`.
            (Some(b"#"), _) | (_, None) => return false,
            (Some(level), Some(levels_left)) => (level, levels_left),
        };
        let literal = match level {
            // A literal level `+`, such as a client id, is not a wildcard.
            b"+" => None,
            level => self.children.get(level),
        };
        literal.is_some_and(|it| it.covers_levels(levels.clone(), levels_left))
            || (self.one.as_ref()).is_some_and(|it| it.covers_levels(levels, levels_left))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn filter(text: &str) -> Filter {
        let mut filter = Filter::default();
        text.split('/')
            .for_each(|level| filter.push(level.as_bytes()));
        filter
    }

    #[test]
    fn filter_covers_every_filter_within_it() {
        for (rule, other, covers) in [
            ("a/#", "a/+/c", true),
            ("a/#", "a", true),
            ("a/#", "a/#", true),
            ("a/#", "+/c", false),
            ("a/#", "#", false),
            ("a/+", "a/b", true),
            ("a/+", "a/+", true),
            ("a/+", "a/#", false),
            ("a/+", "a", false),
            ("a/+", "a/b/c", false),
            ("a/b", "a/+", false),
            ("+/b", "a/b", true),
            ("+/b", "$SYS/b", false),
            ("#", "a/b/#", true),
            ("#", "$SYS/#", false),
            ("$SYS/#", "$SYS/a", true),
            ("+/#", "#", true),
            ("a/+/#", "a/#", false),
            ("a//b", "a//b", true),
            ("a", "a/", false),
        ] {
            assert_eq!(
                filter(rule).covers(other.as_bytes()),
                covers,
                "{rule} and {other}"
            );
        }
    }

    #[test]
    fn literal_level_is_not_a_wildcard() {
        for name in ["+", "#"] {
            let mut filter = Filter::default();
            filter.push(b"clients");
            filter.push_literal(name.as_bytes()).unwrap();
            for other in ["clients/+", "clients/#", "clients/other"] {
                let covers = filter.clone().covers(other.as_bytes());
                assert!(!covers, "{name} and {other}");
            }
        }
        assert_eq!(Filter::default().push_literal(b"a/b"), None);
    }

    /// Whether a filter matches a topic: the definition of section 4.7.
    fn matches(filter: &[&str], topic: &[&str]) -> bool {
        match (filter, topic) {
            (["#"], _) => true,
            (["+", filter @ ..], [_, topic @ ..]) => matches(filter, topic),
            ([one, filter @ ..], [other, topic @ ..]) => one == other && matches(filter, topic),
            (filter, topic) => filter.is_empty() && topic.is_empty(),
        }
    }

    /// All topics of at most four levels, of two names and one name that no filter contains.
    fn topics() -> Vec<Vec<&'static str>> {
        let mut all = vec![vec![]];
        let mut longest = all.clone();
        for _ in 0..4 {
            longest = (longest.iter())
                .flat_map(|it: &Vec<_>| ["a", "b", "z"].map(|level| [&it[..], &[level]].concat()))
                .collect();
            all.extend(longest.iter().cloned());
        }
        all.retain(|it| !it.is_empty());
        all
    }

    fn any_filter() -> impl Strategy<Value = String> {
        "([ab+](/[ab+]){0,2}(/#)?|#)".prop_map(|it| it)
    }

    proptest! {
        #[test]
        fn covering_filter_matches_all_topics_of_the_other(rule in any_filter(), other in any_filter()) {
            let (levels, others): (Vec<_>, Vec<_>) = (rule.split('/').collect(), other.split('/').collect());
            let covers = (topics().iter())
                .all(|topic| !matches(&others, topic) || matches(&levels, topic));
            prop_assert_eq!(filter(&rule).covers(other.as_bytes()), covers);
        }

        #[test]
        fn set_covers_if_any_of_its_filters_covers(
            rules in proptest::collection::vec(any_filter(), 0..6),
            other in "([$ab+](/[ab+]){0,3}(/#)?|#)",
        ) {
            let mut set = TopicSet::default();
            rules.iter().for_each(|rule| set.insert(filter(rule)));
            let expected = rules.iter().any(|rule| filter(rule).covers(other.as_bytes()));
            prop_assert_eq!(set.covers(other.as_bytes()), expected);
        }
    }
}
