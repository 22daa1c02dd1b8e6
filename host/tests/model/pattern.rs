//! The patterns of SCAN, matched by their definition.

/// Matches a glob by its definition: tries every way to split the key.
pub(crate) fn matches(pattern: &[u8], key: &[u8]) -> bool {
    match (pattern, key) {
        ([], _) => key.is_empty(),
        ([b'*', rest @ ..], _) => (0..=key.len()).any(|at| matches(rest, &key[at..])),
        (_, []) => false,
        (_, [byte, following @ ..]) => {
            let (matched, width) = first_element(pattern, *byte);
            matched && matches(&pattern[width..], following)
        }
    }
}

/// Whether the first element of a pattern matches a byte, and the length of that element.
fn first_element(pattern: &[u8], byte: u8) -> (bool, usize) {
    match pattern {
        [b'?', ..] => (true, 1),
        [b'[', members @ ..] => class(members, byte).unwrap_or((byte == b'[', 1)),
        [b'\\', escaped, ..] => (*escaped == byte, 2),
        _ => (pattern.first() == Some(&byte), 1),
    }
}

/// The same for a class. `members` are the bytes after its `[`. None if no unescaped `]` follows.
fn class(members: &[u8], byte: u8) -> Option<(bool, usize)> {
    // Each member, and whether it is escaped.
    let mut found = Vec::new();
    let mut at = 0;
    while !members[at..].starts_with(b"]") {
        let escape = usize::from(matches!(members[at..], [b'\\', _, ..]));
        found.push((*members.get(at + escape)?, escape == 1));
        at += escape + 1;
    }
    let is_negated = found.first() == Some(&(b'!', false));
    let mut left = &found[usize::from(is_negated)..];
    let mut matched = false;
    while let [(first, _), rest @ ..] = left {
        let (last, rest) = match rest {
            [(b'-', false), (last, _), rest @ ..] => (last, rest),
            rest => (first, rest),
        };
        matched |= (first.min(last)..=first.max(last)).contains(&&byte);
        left = rest;
    }
    Some((matched != is_negated, at + 2))
}
