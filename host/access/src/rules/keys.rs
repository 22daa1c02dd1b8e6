//! Many keys and patterns of keys, asked for one key at a time.
//!
//! Keys are found by their hash. Patterns are sorted by what they literally begin with, so that only those are tried whose
//! beginning the key has: ten thousand patterns cost what a binary search does.

use std::cmp::Ordering;

use rustc_hash::FxHashSet;

use statehouse_protocol::pattern;

/// The keys that something allows.
#[derive(Debug, Default)]
pub(super) struct KeySet {
    exact: FxHashSet<Box<[u8]>>,
    /// In order. Whatever begins one of these that begin a key begins the longest of them too.
    beginnings: Vec<Beginning>,
    /// Patterns that one key may be compared with, at most.
    tries: usize,
}

/// Patterns with the same literal beginning.
#[derive(Debug)]
struct Beginning {
    literal: Box<[u8]>,
    /// Whether all keys that begin so are allowed.
    all: bool,
    /// What else is, as patterns of what comes behind the beginning.
    patterns: Vec<Box<[u8]>>,
    /// The next shorter one that this begins with.
    shorter: Option<usize>,
}

/// Collects keys and patterns.
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

    /// Allows what a pattern names.
    pub(super) fn pattern(&mut self, pattern: &[u8]) {
        let (literal, rest) = pattern::literal(pattern);
        match rest {
            [] => self.key(&literal),
            rest => self.patterns.push((literal, rest.into())),
        }
    }

    /// The set.
    pub(super) fn build(mut self) -> KeySet {
        self.patterns.sort_unstable();
        let mut beginnings: Vec<Beginning> = Vec::new();
        // Those that the last one begins with, the longest at the end.
        let mut open: Vec<usize> = Vec::new();
        for (literal, rest) in self.patterns {
            let is_last = beginnings.last().is_some_and(|it| *it.literal == *literal);
            if !is_last {
                while (open.last()).is_some_and(|at| !literal.starts_with(&beginnings[*at].literal))
                {
                    open.pop();
                }
                let shorter = open.last().copied();
                open.push(beginnings.len());
                beginnings.push(Beginning {
                    literal: literal.into(),
                    all: false,
                    patterns: Vec::new(),
                    shorter,
                });
            }
            if let Some(it) = beginnings.last_mut() {
                match rest.iter().all(|byte| *byte == b'*') {
                    true => it.all = true,
                    false => it.patterns.push(rest),
                }
            }
        }
        for it in &mut beginnings {
            it.patterns.dedup();
            if it.all {
                it.patterns.clear();
            }
        }
        let mut tries: Vec<usize> = Vec::with_capacity(beginnings.len());
        for it in &beginnings {
            // A shorter one comes before the longer.
            let shorter = it.shorter.and_then(|at| tries.get(at)).copied();
            tries.push(it.patterns.len() + shorter.unwrap_or_default());
        }
        KeySet {
            exact: self.exact,
            beginnings,
            tries: tries.into_iter().max().unwrap_or_default(),
        }
    }
}

impl KeySet {
    /// Whether a key is among them.
    pub(super) fn holds(&self, key: &[u8]) -> bool {
        (!self.exact.is_empty() && self.exact.contains(key))
            || (!self.beginnings.is_empty() && self.some_pattern_names(key))
    }

    /// Patterns that one key may be compared with, at most; those that only end in a `*` are none.
    pub(super) fn tries(&self) -> usize {
        self.tries
    }

    /// Whether there is no key.
    pub(super) fn is_empty(&self) -> bool {
        self.exact.is_empty() && self.beginnings.is_empty()
    }

    fn some_pattern_names(&self, key: &[u8]) -> bool {
        // The last that does not come behind the key. What begins the key begins that one too, or is it.
        let behind =
            (self.beginnings).partition_point(|it| (*it.literal).cmp(key) != Ordering::Greater);
        let mut next = behind.checked_sub(1);
        while let Some(it) = next.and_then(|at| self.beginnings.get(at)) {
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
    fn a_longer_beginning_does_not_hide_a_shorter_one() {
        let set = set(&["a*", "ab?d", "abc", "b/*/x"]);
        for (key, held) in [
            ("a", true),
            ("abz", true),
            ("abcd", true),
            ("b/7/x", true),
            ("b/7/y", false),
            ("", false),
            ("c", false),
        ] {
            assert_eq!(set.holds(key.as_bytes()), held, "{key}");
        }
    }

    #[test]
    fn only_patterns_that_a_key_may_meet_count_as_tries() {
        assert_eq!(set(&["a", "b*", "bc*"]).tries(), 0);
        assert_eq!(set(&["*/x", "a*/x", "a*/y", "b?", "ab*"]).tries(), 3);
    }

    proptest! {
        #[test]
        fn a_set_holds_what_one_of_its_patterns_names(
            patterns in proptest::collection::vec("[ab]{0,4}[*?\\[\\]]{0,2}[ab]{0,2}", 0..12),
            key in "[ab\\[]{0,7}",
        ) {
            let patterns: Vec<&str> = patterns.iter().map(|it| &**it).collect();
            let named = patterns.iter().any(|it| pattern::matches(it.as_bytes(), key.as_bytes()));
            prop_assert_eq!(set(&patterns).holds(key.as_bytes()), named);
        }
    }
}
