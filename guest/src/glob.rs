//! Matches keys with patterns: `*`, `?`, `[a-z]`, `[!a-z]`, and `\` before a literal byte.
//!
//! Patterns and keys are bytes, and `?` matches one byte. A range in brackets whose ends are
//! reversed is read in order (as in Redis). `[]` matches no byte and `[!]` matches every byte. A
//! `[` without its `]` and a `\` at the end are literal.
//!
//! A pattern is split at its `*`. The parts before the first and after the last are compared in
//! place. The parts between them run as an automaton of at most 63 states in one machine word
//! (Baeza-Yates and Gonnet 1992, "shift-and"), one step per byte of the key. There is no
//! backtracking, so the time is at most linear in the lengths of pattern and key.

use crate::limits::{FLOATING_ELEMENTS_MAX, PATTERN_BYTES_MAX};

/// A pattern element that matches one byte of a key.
#[derive(Clone, Copy)]
enum Element {
    Byte(u8),
    Any,
    /// Index into the classes of the pattern.
    Class(u32),
}

/// A set of bytes, one bit each.
type Class = [u64; 4];

pub(crate) struct Glob {
    classes: Vec<Class>,
    /// The elements before the first `*`; the whole pattern if there is none.
    front: Vec<Element>,
    /// The elements after the last `*`; none without a `*`.
    back: Option<Vec<Element>>,
    /// The elements between the first and the last `*`; none if there are none.
    middle: Option<Box<Automaton>>,
}

/// The pattern is too long, or has more elements between its `*` than the automaton has states.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct TooLarge;

/// Bit `i` is the state "the first `i` elements are matched".
struct Automaton {
    /// By byte: the states that advance on it.
    advance: [u64; 256],
    /// The states at a `*`, which persist with every byte.
    stay: u64,
    /// The final state, which persists too, since a `*` follows it.
    done: u64,
}

impl Glob {
    pub(crate) fn new(pattern: &[u8]) -> Result<Self, TooLarge> {
        if pattern.len() > PATTERN_BYTES_MAX {
            return Err(TooLarge);
        }
        let mut classes = Vec::new();
        // The elements before the first `*`, between two of them, and after the last.
        let mut segments = vec![Vec::new()];
        let mut reader = Reader {
            rest: pattern,
            closed: true,
        };
        while let Some(token) = reader.next() {
            let element = match token {
                Token::Star => {
                    // A repeated `*` changes nothing.
                    if segments.len() == 1 || segments.last().is_some_and(|last| !last.is_empty()) {
                        segments.push(Vec::new());
                    }
                    continue;
                }
                Token::Byte(byte) => Element::Byte(byte),
                Token::Any => Element::Any,
                Token::Class(class) => {
                    // A class takes at least two bytes, so the index fits.
                    let index = classes.len() as u32;
                    classes.push(class);
                    Element::Class(index)
                }
            };
            if let Some(segment) = segments.last_mut() {
                segment.push(element);
            }
        }
        let back = if segments.len() > 1 {
            segments.pop()
        } else {
            None
        };
        let mut segments = segments.into_iter();
        let front = segments.next().unwrap_or_default();
        let floating: Vec<_> = segments.collect();
        let middle = Automaton::new(&floating, &classes)?;
        Ok(Self {
            classes,
            front,
            back,
            middle,
        })
    }

    pub(crate) fn matches(&self, key: &[u8]) -> bool {
        let Some((front, rest)) = key.split_at_checked(self.front.len()) else {
            return false;
        };
        if !self.fits(&self.front, front) {
            return false;
        }
        let Some(back) = &self.back else {
            return rest.is_empty();
        };
        let Some(at) = rest.len().checked_sub(back.len()) else {
            return false;
        };
        let (rest, end) = rest.split_at(at);
        let middle = self.middle.as_ref();
        self.fits(back, end) && middle.is_none_or(|middle| middle.accepts(rest))
    }

    /// Compares as many bytes as there are elements.
    fn fits(&self, elements: &[Element], bytes: &[u8]) -> bool {
        elements
            .iter()
            .zip(bytes)
            .all(|(&element, &byte)| holds(element, byte, &self.classes))
    }
}

fn holds(element: Element, byte: u8, classes: &[Class]) -> bool {
    match element {
        Element::Byte(expected) => expected == byte,
        Element::Any => true,
        Element::Class(index) => classes
            .get(index as usize)
            .is_some_and(|class| class[usize::from(byte >> 6)] >> (byte & 63) & 1 == 1),
    }
}

impl Automaton {
    fn new(segments: &[Vec<Element>], classes: &[Class]) -> Result<Option<Box<Self>>, TooLarge> {
        let count: usize = segments.iter().map(Vec::len).sum();
        if count > FLOATING_ELEMENTS_MAX {
            return Err(TooLarge);
        }
        if count == 0 {
            return Ok(None);
        }
        let mut automaton = Box::new(Self {
            advance: [0; 256],
            stay: 0,
            done: 1 << count,
        });
        let mut state = 1u64;
        for segment in segments {
            automaton.stay |= state;
            for &element in segment {
                if let Element::Byte(byte) = element {
                    automaton.advance[usize::from(byte)] |= state;
                } else {
                    for byte in 0..=u8::MAX {
                        if holds(element, byte, classes) {
                            automaton.advance[usize::from(byte)] |= state;
                        }
                    }
                }
                state <<= 1;
            }
        }
        automaton.stay |= automaton.done;
        Ok(Some(automaton))
    }

    fn accepts(&self, bytes: &[u8]) -> bool {
        let mut states = 1u64;
        // The final state is checked only once per chunk, since the automaton never leaves it. The
        // check costs a fifth of a step.
        for chunk in bytes.chunks(32) {
            for &byte in chunk {
                states = ((states & self.advance[usize::from(byte)]) << 1) | (states & self.stay);
            }
            if states & self.done != 0 {
                return true;
            }
        }
        false
    }
}

enum Token {
    Star,
    Any,
    Byte(u8),
    Class(Class),
}

struct Reader<'a> {
    rest: &'a [u8],
    /// Whether a `]` may follow. It is false after an unclosed `[`, so that a row of `[` is not
    /// searched repeatedly.
    closed: bool,
}

impl Reader<'_> {
    fn next(&mut self) -> Option<Token> {
        let (&byte, rest) = self.rest.split_first()?;
        self.rest = rest;
        Some(match byte {
            b'*' => Token::Star,
            b'?' => Token::Any,
            b'\\' => Token::Byte(self.escaped()),
            b'[' if self.closed => match class(self.rest) {
                Some((class, rest)) => {
                    self.rest = rest;
                    Token::Class(class)
                }
                None => {
                    self.closed = false;
                    Token::Byte(byte)
                }
            },
            _ => Token::Byte(byte),
        })
    }

    /// The byte after a `\`; the `\` itself at the end.
    fn escaped(&mut self) -> u8 {
        let Some((&byte, rest)) = self.rest.split_first() else {
            return b'\\';
        };
        self.rest = rest;
        byte
    }
}

/// Parses the text after a `[` up to its `]`; returns the set and the rest.
fn class(bytes: &[u8]) -> Option<(Class, &[u8])> {
    let (negated, mut rest) = match bytes.strip_prefix(b"!") {
        Some(rest) => (true, rest),
        None => (false, bytes),
    };
    let mut class = [0u64; 4];
    loop {
        if let Some(behind) = rest.strip_prefix(b"]") {
            if negated {
                class = class.map(|word| !word);
            }
            return Some((class, behind));
        }
        let (first, behind) = member(rest)?;
        rest = behind;
        let mut last = first;
        // A `-` before the closing `]` is literal.
        if let Some(behind) = rest.strip_prefix(b"-")
            && !behind.starts_with(b"]")
        {
            (last, rest) = member(behind)?;
        }
        add_range(&mut class, first.min(last), first.max(last));
    }
}

/// Adds a range by words, not byte by byte, since a pattern may consist of wide ranges.
fn add_range(class: &mut Class, first: u8, last: u8) {
    for (word, start) in class.iter_mut().zip([0u8, 64, 128, 192]) {
        let (low, high) = (first.max(start), last.min(start | 63));
        if low <= high {
            *word |= (u64::MAX >> (63 - (high - low))) << (low - start);
        }
    }
}

/// One byte inside brackets, optionally after a `\`.
fn member(bytes: &[u8]) -> Option<(u8, &[u8])> {
    match bytes {
        [b'\\', byte, rest @ ..] | [byte, rest @ ..] => Some((*byte, rest)),
        [] => None,
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn matches(pattern: &str, key: &str) -> bool {
        Glob::new(pattern.as_bytes())
            .expect("small")
            .matches(key.as_bytes())
    }

    #[test]
    fn patterns_match_keys() {
        for (pattern, key) in [
            ("", ""),
            ("a", "a"),
            ("*", ""),
            ("*", "abc"),
            ("**", "abc"),
            ("a*", "a"),
            ("a*", "abc"),
            ("*c", "abc"),
            ("a*c", "ac"),
            ("a*c", "abcbc"),
            ("*b*", "abc"),
            ("*b*b*", "abcb"),
            ("*ab*ba*", "abba"),
            ("a?c", "abc"),
            ("?", "\0"),
            ("*?", "a"),
            ("*??*", "ab"),
            ("[a-c]", "b"),
            ("[c-a]", "b"),
            ("[abc]", "c"),
            ("[!a-c]", "d"),
            ("[-a]", "-"),
            ("[a-]", "-"),
            ("[a\\-c]", "-"),
            ("[\\]]", "]"),
            ("[\\!a]", "!"),
            ("[a!]", "!"),
            ("[!!]", "a"),
            ("[!]", "a"),
            ("[a-\\]]", "]"),
            ("[*]", "*"),
            ("[[]", "["),
            ("*[0-9]*", "abc5d"),
            ("\\*", "*"),
            ("\\?", "?"),
            ("\\[a]", "[a]"),
            ("\\a", "a"),
            ("\\\\", "\\"),
            ("a\\", "a\\"),
            ("[", "["),
            ("[abc", "[abc"),
            ("a]", "a]"),
            ("[[", "[["),
            ("[\\]", "[]"),
        ] {
            assert!(matches(pattern, key), "{pattern:?} names {key:?}");
        }
    }

    #[test]
    fn patterns_do_not_match_other_keys() {
        for (pattern, key) in [
            ("", "a"),
            ("a", ""),
            ("a", "A"),
            ("a", "ab"),
            ("a", "ba"),
            ("a*", "ba"),
            ("*c", "cb"),
            ("a*c", "a"),
            ("aa*aa", "aaa"),
            ("*ab*ba*", "aba"),
            ("*b*b*", "abc"),
            ("?", ""),
            ("?", "ab"),
            ("*??*", "a"),
            ("[a-c]", "d"),
            ("[a-c]", ""),
            ("[a-c]", "ab"),
            ("[!a-c]", "b"),
            ("[!a-c]", ""),
            ("[a-]", "b"),
            ("[a\\-c]", "b"),
            ("[]", "a"),
            ("[]", ""),
            ("[]a]", "a"),
            ("[!!]", "!"),
            ("\\*", "a"),
            ("\\?", "a"),
            ("[a", "a"),
            ("*[0-9]*", "abcd"),
        ] {
            assert!(!matches(pattern, key), "{pattern:?} does not name {key:?}");
        }
    }

    #[test]
    fn ranges_of_every_size() {
        for first in 0..=u8::MAX {
            for last in first..=u8::MAX {
                let pattern = [b'[', b'\\', first, b'-', b'\\', last, b']'];
                let glob = Glob::new(&pattern).expect("small");
                for byte in [
                    first.wrapping_sub(1),
                    first,
                    first.midpoint(last),
                    last,
                    last.wrapping_add(1),
                ] {
                    let is_within = (first..=last).contains(&byte);
                    assert_eq!(glob.matches(&[byte]), is_within, "{pattern:?} {byte}");
                }
            }
        }
    }

    #[test]
    fn bytes_beyond_ascii() {
        let glob = Glob::new(b"[\x80-\xff]?*\x00").expect("small");
        assert!(glob.matches(b"\xc3\xa4\x00"));
        assert!(!glob.matches(b"\x7f\xa4\x00"));
        // A `?` is one byte, not one character.
        assert!(!Glob::new(b"?").expect("small").matches("ä".as_bytes()));
    }

    /// This would take quadratic time if every `[` searched for its `]`.
    #[test]
    fn a_row_of_brackets_is_read_once() {
        let pattern = vec![b'['; PATTERN_BYTES_MAX];
        assert!(Glob::new(&pattern).expect("not too long").matches(&pattern));
        assert!(matches!(
            Glob::new(&vec![b'a'; PATTERN_BYTES_MAX + 1]),
            Err(TooLarge)
        ));
    }

    /// The definition of a glob; it takes exponential time.
    fn naive(pattern: &[Token], key: &[u8]) -> bool {
        match (pattern.split_first(), key.split_first()) {
            (None, _) => key.is_empty(),
            (Some((Token::Star, rest)), None) => naive(rest, key),
            (Some((Token::Star, rest)), Some((_, behind))) => {
                naive(rest, key) || naive(pattern, behind)
            }
            (Some(_), None) => false,
            (Some((Token::Any, rest)), Some((_, behind))) => naive(rest, behind),
            (Some((Token::Byte(expected), rest)), Some((byte, behind))) => {
                expected == byte && naive(rest, behind)
            }
            (Some((Token::Class(class), rest)), Some((&byte, behind))) => {
                class[usize::from(byte >> 6)] >> (byte & 63) & 1 == 1 && naive(rest, behind)
            }
        }
    }

    fn tokens(pattern: &[u8]) -> Vec<Token> {
        let mut reader = Reader {
            rest: pattern,
            closed: true,
        };
        std::iter::from_fn(|| reader.next()).collect()
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(2000))]

        #[test]
        fn the_automaton_agrees_with_the_definition(
            pattern in "[ab*?\\[\\]!\\\\-]{0,10}",
            key in "[ab*!\\[-]{0,10}",
        ) {
            let expected = naive(&tokens(pattern.as_bytes()), key.as_bytes());
            prop_assert_eq!(matches(&pattern, &key), expected);
        }

        #[test]
        fn stars_agree_with_the_definition(pattern in "[ab*?]{0,12}", key in "[ab]{0,14}") {
            let expected = naive(&tokens(pattern.as_bytes()), key.as_bytes());
            prop_assert_eq!(matches(&pattern, &key), expected);
        }

        #[test]
        fn an_escaped_key_matches_itself(key in proptest::collection::vec(any::<u8>(), 0..60)) {
            let pattern: Vec<u8> = key.iter().flat_map(|&byte| [b'\\', byte]).collect();
            let glob = Glob::new(&pattern).expect("small");
            prop_assert!(glob.matches(&key));
        }

        #[test]
        fn no_pattern_panics(
            pattern in proptest::collection::vec(any::<u8>(), 0..200),
            key in proptest::collection::vec(any::<u8>(), 0..200),
        ) {
            if let Ok(glob) = Glob::new(&pattern) {
                glob.matches(&key);
            }
        }
    }
}
