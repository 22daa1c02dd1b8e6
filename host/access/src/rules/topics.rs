//! Topic filters of rules, and what they cover (MQTT 5 section 4.7).
//!
//! A subscription is allowed where one rule's filter covers it wholly: every topic that it receives, that filter matches too.
//! A topic name is a filter without wildcards, so the same question tells who may publish.

use std::collections::HashMap;

use crate::limits;

/// One filter.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Filter(Vec<Level>);

#[derive(Clone, Debug, PartialEq, Eq)]
enum Level {
    /// These bytes, whatever they are.
    Literal(Box<[u8]>),
    /// `+`.
    One,
    /// `#`.
    Rest,
}

impl Filter {
    /// The next level as it is written.
    pub(super) fn push(&mut self, level: &[u8]) {
        self.0.push(match level {
            b"+" => Level::One,
            b"#" => Level::Rest,
            _ => Level::Literal(level.into()),
        });
        // Every topic has a first level, so there is no topic that only one of the two matches.
        if self.0 == [Level::One, Level::Rest] {
            self.0.remove(0);
        }
    }

    /// The next level, which means itself. None for what cannot be one level.
    pub(super) fn push_literal(&mut self, level: &[u8]) -> Option<()> {
        if level.contains(&b'/') || level.contains(&0) {
            return None;
        }
        self.0.push(Level::Literal(level.into()));
        Some(())
    }

    /// Whether it matches every topic that `filter` does.
    pub fn covers(&self, filter: &[u8]) -> bool {
        let mut asked = filter.split(|byte| *byte == b'/');
        // A wildcard in front matches no topic that begins with `$` (section 4.7.2).
        if filter.starts_with(b"$") && !matches!(self.0.first(), Some(Level::Literal(_))) {
            return false;
        }
        for level in &self.0 {
            let holds = match (level, asked.next()) {
                (Level::Rest, _) => return true,
                (_, None | Some(b"#")) => false,
                (Level::One, Some(_)) => true,
                // Nobody can call himself `+` and mean all.
                (Level::Literal(_), Some(b"+")) => false,
                (Level::Literal(level), Some(asked)) => **level == *asked,
            };
            if !holds {
                // `a/#` matches `a` too, which is what is left where only `#` is.
                return false;
            }
        }
        asked.next().is_none()
    }
}

/// Many filters.
#[derive(Debug, Default)]
pub(super) struct TopicSet {
    /// Those that go on with these bytes.
    children: HashMap<Box<[u8]>, TopicSet>,
    /// Those that go on with `+`.
    one: Option<Box<TopicSet>>,
    /// Whether one goes on with `#`.
    rest: bool,
    /// Whether one ends here.
    end: bool,
}

impl TopicSet {
    /// Adds one.
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

    /// Whether one of them covers `filter`. It looks at no part of any filter twice, and at no more levels than a rule has.
    pub(super) fn cover(&self, filter: &[u8]) -> bool {
        let mut levels = filter.split(|byte| *byte == b'/');
        if filter.starts_with(b"$") {
            let child = levels.next().and_then(|level| self.children.get(level));
            return child.is_some_and(|it| it.go_on(levels, limits::RULE_TOPIC_LEVELS_MAX));
        }
        self.go_on(levels, limits::RULE_TOPIC_LEVELS_MAX)
    }

    fn go_on<'a>(&self, mut levels: impl Iterator<Item = &'a [u8]> + Clone, deep: usize) -> bool {
        if self.rest {
            return true;
        }
        let (level, deep) = match (levels.next(), deep.checked_sub(1)) {
            (None, _) => return self.end,
            (Some(b"#"), _) | (_, None) => return false,
            (Some(level), Some(deep)) => (level, deep),
        };
        let literal = match level {
            b"+" => None,
            level => self.children.get(level),
        };
        literal.is_some_and(|it| it.go_on(levels.clone(), deep))
            || (self.one.as_ref()).is_some_and(|it| it.go_on(levels, deep))
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
    fn a_filter_covers_what_lies_wholly_within_it() {
        for (rule, asked, covers) in [
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
            let mut set = TopicSet::default();
            set.insert(filter(rule));
            assert_eq!(
                filter(rule).covers(asked.as_bytes()),
                covers,
                "{rule} and {asked}"
            );
            assert_eq!(
                set.cover(asked.as_bytes()),
                covers,
                "a set with {rule}, and {asked}"
            );
        }
    }

    #[test]
    fn what_a_client_is_called_is_no_wildcard() {
        for name in ["+", "#"] {
            let mut filter = Filter::default();
            filter.push(b"clients");
            filter.push_literal(name.as_bytes()).unwrap();
            for asked in ["clients/+", "clients/#", "clients/other"] {
                assert!(!filter.covers(asked.as_bytes()), "{name} and {asked}");
            }
        }
        assert_eq!(Filter::default().push_literal(b"a/b"), None);
    }

    /// Whether a filter matches a topic, by the words of section 4.7.
    fn matches(filter: &[&str], topic: &[&str]) -> bool {
        match (filter, topic) {
            (["#"], _) => true,
            (["+", filter @ ..], [_, topic @ ..]) => matches(filter, topic),
            ([one, filter @ ..], [other, topic @ ..]) => one == other && matches(filter, topic),
            (filter, topic) => filter.is_empty() && topic.is_empty(),
        }
    }

    /// All topics of at most four levels, of two names and one that no filter holds.
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
        fn covering_is_matching_all_that_the_other_matches(rule in any_filter(), asked in any_filter()) {
            let (levels, other): (Vec<_>, Vec<_>) = (rule.split('/').collect(), asked.split('/').collect());
            let wholly = (topics().iter())
                .all(|topic| !matches(&other, topic) || matches(&levels, topic));
            prop_assert_eq!(filter(&rule).covers(asked.as_bytes()), wholly);
        }

        #[test]
        fn a_set_covers_what_one_of_its_filters_does(
            rules in proptest::collection::vec(any_filter(), 0..6),
            asked in "([$ab+](/[ab+]){0,3}(/#)?|#)",
        ) {
            let mut set = TopicSet::default();
            rules.iter().for_each(|rule| set.insert(filter(rule)));
            let one = rules.iter().any(|rule| filter(rule).covers(asked.as_bytes()));
            prop_assert_eq!(set.cover(asked.as_bytes()), one);
        }
    }
}
