//! A set of keys and key patterns with a fast lookup of single keys.
//!
//! Exact keys are in a hash set. Patterns are sorted by their literal prefix, and a key is compared
//! only with patterns whose prefix it has. So ten thousand patterns cost one binary search.

use std::cmp::Ordering;

use rustc_hash::FxHashSet;

use statehouse_protocol::pattern;

/// The keys that rules allow for one kind of access.
#[derive(Debug, Default)]
pub(super) struct KeySet {
    exact: FxHashSet<Box<[u8]>>,
    /// Sorted by literal. The prefixes of a key are a chain: each one is a prefix of the next
    /// longer one, so following `shorter` from the longest one visits them all.
    prefixes: Vec<Prefix>,
    /// Upper bound of the patterns that one key is compared with.
    comparisons_max: usize,
}

/// Patterns with the same literal prefix.
#[derive(Debug)]
struct Prefix {
    literal: Box<[u8]>,
    /// Whether all keys with this prefix are allowed.
    all: bool,
    /// Patterns for the rest of the key after the prefix.
    patterns: Vec<Box<[u8]>>,
    /// The longest other entry that is a prefix of this one.
    shorter: Option<usize>,
}

#[derive(Debug, Default)]
pub(super) struct KeySetBuilder {
    exact: FxHashSet<Box<[u8]>>,
    patterns: Vec<(Vec<u8>, Box<[u8]>)>,
}

impl KeySetBuilder {
    /// Allows one key.
    pub(super) fn key(&mut self, key: &[u8]) {
        self.exact.insert(key.into());
    }

    /// Allows all keys that match a pattern.
    pub(super) fn pattern(&mut self, pattern: &[u8]) {
        let (literal, rest) = pattern::literal(pattern);
        match rest {
            [] => self.key(&literal),
            rest => self.patterns.push((literal, rest.into())),
        }
    }

    pub(super) fn build(mut self) -> KeySet {
        self.patterns.sort_unstable();
        let mut prefixes: Vec<Prefix> = Vec::new();
        // The last entry and all entries that are a prefix of it, the longest at the end.
        let mut open: Vec<usize> = Vec::new();
        for (literal, rest) in self.patterns {
            let is_last = prefixes.last().is_some_and(|it| *it.literal == *literal);
            if !is_last {
                while (open.last()).is_some_and(|at| !literal.starts_with(&prefixes[*at].literal)) {
                    open.pop();
                }
                let shorter = open.last().copied();
                open.push(prefixes.len());
                prefixes.push(Prefix {
                    literal: literal.into(),
                    all: false,
                    patterns: Vec::new(),
                    shorter,
                });
            }
            if let Some(it) = prefixes.last_mut() {
                match rest.iter().all(|byte| *byte == b'*') {
                    true => it.all = true,
                    false => it.patterns.push(rest),
                }
            }
        }
        for it in &mut prefixes {
            it.patterns.dedup();
            if it.all {
                it.patterns.clear();
            }
        }
        let mut comparisons: Vec<usize> = Vec::with_capacity(prefixes.len());
        for it in &prefixes {
            // A shorter prefix is sorted before the longer ones, so its sum is known.
            let shorter = it.shorter.and_then(|at| comparisons.get(at)).copied();
            comparisons.push(it.patterns.len() + shorter.unwrap_or_default());
        }
        KeySet {
            exact: self.exact,
            prefixes,
            comparisons_max: comparisons.into_iter().max().unwrap_or_default(),
        }
    }
}

impl KeySet {
    pub(super) fn contains(&self, key: &[u8]) -> bool {
        (!self.exact.is_empty() && self.exact.contains(key))
            || (!self.prefixes.is_empty() && self.matches_pattern(key))
    }

    /// Upper bound of the patterns that one key is compared with. A pattern whose only wildcard is
    /// a `*` at its end does not count.
    pub(super) fn comparisons_max(&self) -> usize {
        self.comparisons_max
    }

    pub(super) fn is_empty(&self) -> bool {
        self.exact.is_empty() && self.prefixes.is_empty()
    }

    fn matches_pattern(&self, key: &[u8]) -> bool {
        // The last entry that is not sorted after the key. Every prefix of the key is this entry or
        // a prefix of it.
        let behind =
            (self.prefixes).partition_point(|it| (*it.literal).cmp(key) != Ordering::Greater);
        let mut next = behind.checked_sub(1);
        while let Some(it) = next.and_then(|at| self.prefixes.get(at)) {
            if let Some(rest) = key.strip_prefix(&*it.literal)
                && (it.all
                    || it
                        .patterns
                        .iter()
                        .any(|pattern| pattern::matches(pattern, rest)))
            {
                return true;
            }
            next = it.shorter;
        }
        false
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn set(patterns: &[&str]) -> KeySet {
        let mut builder = KeySetBuilder::default();
        patterns
            .iter()
            .for_each(|it| builder.pattern(it.as_bytes()));
        builder.build()
    }

    #[test]
    fn longer_prefix_does_not_hide_a_shorter_one() {
        let set = set(&["a*", "ab?d", "abc", "b/*/x"]);
        for (key, contained) in [
            ("a", true),
            ("abz", true),
            ("abcd", true),
            ("b/7/x", true),
            ("b/7/y", false),
            ("", false),
            ("c", false),
        ] {
            assert_eq!(set.contains(key.as_bytes()), contained, "{key}");
        }
    }

    #[test]
    fn only_patterns_on_one_chain_count_as_comparisons() {
        assert_eq!(set(&["a", "b*", "bc*"]).comparisons_max(), 0);
        let set = set(&["*/x", "a*/x", "a*/y", "b?", "ab*"]);
        assert_eq!(set.comparisons_max(), 3);
    }

    proptest! {
        #[test]
        fn set_contains_the_keys_that_match_any_pattern(
            patterns in proptest::collection::vec("[ab]{0,4}[*?\\[\\]]{0,2}[ab]{0,2}", 0..12),
            key in "[ab\\[]{0,7}",
        ) {
            let patterns: Vec<&str> = patterns.iter().map(|it| &**it).collect();
            let matches = patterns.iter().any(|it| pattern::matches(it.as_bytes(), key.as_bytes()));
            prop_assert_eq!(set(&patterns).contains(key.as_bytes()), matches);
        }
    }
}
