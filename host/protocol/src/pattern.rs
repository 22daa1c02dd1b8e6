//! Patterns for client ids and keys, in the syntax of SCAN. `*` matches any bytes, `?` one byte,
//! `[a-z]` one of these bytes and `[!a-z]` any other byte; `\` before a byte matches that byte.
//!
//! In brackets, a range with reversed ends is reversed again, `[]` matches no byte, and `[!]`
//! matches every byte. A `[` without `]` and a `\` at the end match themselves.

use alloc::vec::Vec;

/// Whether `pattern` matches `text`. Without brackets, this takes at most as many steps as the
/// product of their lengths.
pub fn matches(pattern: &[u8], text: &[u8]) -> bool {
    let (mut at, mut place) = (0, 0);
    // The position after the last `*`, and the position in the text where its match ended.
    let mut star: Option<(usize, usize)> = None;
    while place < text.len() {
        let rest = &pattern[at..];
        if rest.first() == Some(&b'*') {
            at += 1;
            if at == pattern.len() {
                return true;
            }
            star = Some((at, place));
            continue;
        }
        if let Some((true, width)) = element(rest, text[place]) {
            (at, place) = (at + width, place + 1);
            continue;
        }
        // A mismatch: extend the match of the last `*` by one byte.
        let Some((behind, ended)) = star else {
            return false;
        };
        star = Some((behind, ended + 1));
        (at, place) = (behind, ended + 1);
    }
    pattern[at..].iter().all(|byte| *byte == b'*')
}

/// Whether the first element of a pattern, which is not `*`, matches `byte`; and the width of that
/// element.
fn element(pattern: &[u8], byte: u8) -> Option<(bool, usize)> {
    Some(match pattern {
        [] => return None,
        [b'?', ..] => (true, 1),
        [b'\\', escaped, ..] => (*escaped == byte, 2),
        [b'[', members @ ..] => match class(members, byte) {
            Some((holds, width)) => (holds, 1 + width),
            None => (byte == b'[', 1),
        },
        [literal, ..] => (*literal == byte, 1),
    })
}

/// Whether the set after a `[` contains `byte`, and its width including the `]`. `None` if there is
/// no `]`.
fn class(members: &[u8], byte: u8) -> Option<(bool, usize)> {
    let negated = members.first() == Some(&b'!');
    let mut at = usize::from(negated);
    let mut holds = false;
    while *members.get(at)? != b']' {
        let (first, width) = member(&members[at..])?;
        at += width;
        let mut last = first;
        // A `-` before the closing `]` matches itself.
        if let [b'-', behind @ ..] = &members[at..]
            && !behind.starts_with(b"]")
        {
            let width;
            (last, width) = member(behind)?;
            at += 1 + width;
        }
        holds |= (first.min(last)..=first.max(last)).contains(&byte);
    }
    Some((holds != negated, at + 1))
}

/// One byte in brackets, after an optional `\`; and its width.
fn member(bytes: &[u8]) -> Option<(u8, usize)> {
    match bytes {
        [b'\\', byte, ..] => Some((*byte, 2)),
        [byte, ..] => Some((*byte, 1)),
        [] => None,
    }
}

/// The literal prefix of every text that `pattern` matches, and the rest of the pattern.
pub fn literal(pattern: &[u8]) -> (Vec<u8>, &[u8]) {
    let mut begins = Vec::new();
    let mut rest = pattern;
    loop {
        rest = match rest {
            [b'\\', byte, behind @ ..] => {
                begins.push(*byte);
                behind
            }
            [] | [b'*' | b'?' | b'[', ..] => return (begins, rest),
            [byte, behind @ ..] => {
                begins.push(*byte);
                behind
            }
        };
    }
}

/// Appends `text` so that the pattern matches exactly `text`.
pub fn escape(pattern: &mut Vec<u8>, text: &[u8]) {
    for byte in text {
        if matches!(byte, b'*' | b'?' | b'[' | b']' | b'\\') {
            pattern.push(b'\\');
        }
        pattern.push(*byte);
    }
}

/// The length of the pattern between its first `*` and its last: the part that may be tried at
/// every position of a text.
pub fn floating(pattern: &[u8]) -> usize {
    let (_, rest) = literal(pattern);
    let (mut first, mut last, mut at) = (None, 0, 0);
    while let Some(byte) = rest.get(at) {
        if *byte == b'*' {
            first.get_or_insert(at);
            last = at;
            at += 1;
            continue;
        }
        let Some((_, width)) = element(&rest[at..], 0) else {
            break;
        };
        at += width;
    }
    first.map_or(0, |first| last - first)
}

/// Whether every `[` has a `]`. Each unclosed one is scanned to the end of the pattern on every
/// comparison.
pub fn is_closed(pattern: &[u8]) -> bool {
    let mut rest = pattern;
    loop {
        rest = match rest {
            [] => return true,
            [b'[', members @ ..] => match class(members, 0) {
                Some((_, width)) => &members[width..],
                None => return false,
            },
            [b'\\', _, behind @ ..] | [_, behind @ ..] => behind,
        };
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use statehouse_guest::Standard;
    use statehouse_policy::Policy;
    use statehouse_policy::testing::{Table, cases};

    use super::*;

    #[test]
    fn patterns_match_as_documented() {
        let yes = [
            ("", ""),
            ("*", ""),
            ("*", "abc"),
            ("a*c", "abbbc"),
            ("a*b*c", "axxbyybzc"),
            ("?b?", "abc"),
            ("press-*", "press-7"),
            ("*-7", "press-7-7"),
            ("a\\*", "a*"),
            ("a\\", "a\\"),
            ("[a-c]", "b"),
            ("[c-a]", "b"),
            ("[!a-c]", "d"),
            ("[-a]", "-"),
            ("[a-]", "-"),
            ("[a\\-c]", "-"),
            ("[\\]]", "]"),
            ("[!!]", "a"),
            ("[!]", "a"),
            ("[a-\\]]", "]"),
            ("*[0-9]*", "abc5d"),
            ("[", "["),
            ("[abc", "[abc"),
            ("[[", "[["),
            ("press-[0-9]/*", "press-7/x"),
        ];
        let no = [
            ("", "a"),
            ("a", ""),
            ("?", ""),
            ("a*c", "abbbd"),
            ("press-*", "pres-7"),
            ("a\\*", "ab"),
            ("ab", "abc"),
            ("[a-c]", "d"),
            ("[a-c]", ""),
            ("[!a-c]", "b"),
            ("[a\\-c]", "b"),
            ("[]", "a"),
            ("[]a]", "a"),
            ("press-[0-9]/*", "press-x/x"),
        ];
        for (cases, expected) in [(&yes[..], true), (&no[..], false)] {
            for (pattern, text) in cases {
                let found = matches(pattern.as_bytes(), text.as_bytes());
                assert_eq!(found, expected, "{pattern} {text}");
            }
        }
    }

    #[test]
    fn literal_prefix_is_unescaped() {
        for (pattern, begins, rest) in [
            ("a/b", "a/b", ""),
            ("a\\*b*", "a*b", "*"),
            ("?", "", "?"),
            ("a[b]c", "a", "[b]c"),
            ("a\\", "a\\", ""),
        ] {
            let found = literal(pattern.as_bytes());
            assert_eq!(found, (begins.into(), rest.as_bytes()), "{pattern}");
        }
    }

    #[test]
    fn floating_part_is_between_stars() {
        for (pattern, bytes) in [("abc", 0), ("a*b", 0), ("a*bc*d", 3), ("*[*]*", 4)] {
            assert_eq!(floating(pattern.as_bytes()), bytes, "{pattern}");
        }
    }

    #[test]
    fn unclosed_brackets_are_detected() {
        for (pattern, closed) in [
            ("a[b]", true),
            ("\\[", true),
            ("[", false),
            ("[a]b[c", false),
        ] {
            assert_eq!(is_closed(pattern.as_bytes()), closed, "{pattern}");
        }
    }

    /// Whether a SCAN with this pattern lists the only key of a store.
    fn scan_lists(pattern: &[u8], key: &[u8]) -> bool {
        let policy = Standard::configure(&[]).unwrap();
        let mut table = Table::new(cases::NOW_MS);
        let mut call = |words: &[&[u8]]| table.call(&policy, &cases::request(words)).bytes;
        assert_eq!(call(&[b"SET", key, b"v"]), b"+OK\r\n");
        let answer = call(&[b"SCAN", pattern]);
        assert!(answer.starts_with(b"*1\r\n*"), "{}", answer.escape_ascii());
        answer != b"*1\r\n*0\r\n"
    }

    proptest! {
        /// Operators may test a pattern of the rules with SCAN.
        #[test]
        fn scan_and_rules_agree_on_patterns(
            pattern in proptest::collection::vec(prop::sample::select(&b"ab*?[]!\\-\x00\x80\xff"[..]), 1..11),
            text in proptest::collection::vec(prop::sample::select(&b"ab*[]!\\-\x7f\x80\xff"[..]), 1..11),
        ) {
            prop_assert_eq!(matches(&pattern, &text), scan_lists(&pattern, &text));
        }

        #[test]
        fn escaped_text_matches_only_itself(
            text in proptest::collection::vec(any::<u8>(), 0..40),
            other in proptest::collection::vec(any::<u8>(), 0..40),
        ) {
            let mut pattern = Vec::new();
            escape(&mut pattern, &text);
            prop_assert!(matches(&pattern, &text) && is_closed(&pattern));
            prop_assert_eq!(matches(&pattern, &other), text == other);
        }

        #[test]
        fn matching_texts_start_with_the_literal_prefix(
            pattern in "[ab*?\\[\\]!\\\\-]{0,10}",
            text in "[ab*!\\[-]{0,10}",
        ) {
            let (pattern, text) = (pattern.as_bytes(), text.as_bytes());
            let (begins, rest) = literal(pattern);
            let behind = text.strip_prefix(&begins[..]);
            prop_assert_eq!(matches(pattern, text), behind.is_some_and(|it| matches(rest, it)));
        }
    }
}
