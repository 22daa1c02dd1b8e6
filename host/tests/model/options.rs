//! The options of commands, parsed from the protocol text independently of the standard policy.

use statehouse_core::clock::Stamp;
use statehouse_core::store::Scope;

pub(crate) enum Condition<'a> {
    Always,
    Absent,
    AbsentOrEqual(Option<&'a [u8]>),
    Version(Stamp),
}

pub(crate) struct Options<'a> {
    pub(crate) condition: Condition<'a>,
    pub(crate) px_ms: Option<u64>,
}

/// `wall:counter:node`, of which the node does not matter.
pub(crate) fn version(word: &[u8]) -> Option<Stamp> {
    let parts: Vec<&str> = std::str::from_utf8(word).ok()?.split(':').collect();
    let [wall, counter, node] = parts[..] else {
        return None;
    };
    let (wall, counter) = (wall.parse().ok()?, counter.parse().ok()?);
    (!node.is_empty()).then_some(Stamp { wall, counter })
}

/// `[NX | NEX [expected] | IFVERSION version] [PX ms]` in any order. None for any other words.
pub(crate) fn set_options<'a>(words: &[&'a [u8]]) -> Option<Options<'a>> {
    let is = |word: &[u8], option: &[u8]| word.eq_ignore_ascii_case(option);
    let option = |word: &[u8]| [&b"NX"[..], b"NEX", b"PX"].iter().any(|it| is(word, it));
    let (mut condition, mut px_ms) = (Condition::Always, None);
    let mut rest = words;
    while let [word, following @ ..] = rest {
        let first = matches!(condition, Condition::Always);
        rest = if is(word, b"PX") && px_ms.is_none() {
            let digits = std::str::from_utf8(following.first()?).ok()?;
            let plain = digits.bytes().all(|digit| digit.is_ascii_digit());
            let ms: i64 = digits.parse().ok().filter(|ms| plain && *ms > 0)?;
            px_ms = Some(ms.unsigned_abs());
            &following[1..]
        } else if is(word, b"NX") && first {
            condition = Condition::Absent;
            following
        } else if is(word, b"NEX") && first {
            let (expected, remaining) = match following {
                [] => (None, following),
                [px, _] if is(px, b"PX") => (None, following),
                [expected] if !option(expected) => (Some(*expected), &following[1..]),
                [expected, px, _] if is(px, b"PX") => (Some(*expected), &following[1..]),
                _ => return None,
            };
            condition = Condition::AbsentOrEqual(expected);
            remaining
        } else if is(word, b"IFVERSION") && first {
            condition = Condition::Version(version(following.first()?)?);
            &following[1..]
        } else {
            return None;
        };
    }
    Some(Options { condition, px_ms })
}

/// Whether the options of KEYNOTIFY hold STOP, and what it covers. None if they are invalid.
pub(crate) fn keynotify_options(words: &[&[u8]]) -> Option<(bool, Scope)> {
    let count = |option: &[u8]| {
        let same = words
            .iter()
            .filter(|word| word.eq_ignore_ascii_case(option));
        same.count()
    };
    let counts = [b"STOP" as &[u8], b"PREFIX", b"GET"].map(count);
    let known = counts.iter().all(|it| *it <= 1) && counts.iter().sum::<usize>() == words.len();
    let scope = match counts[1] {
        0 => Scope::Key,
        _ => Scope::Prefix,
    };
    known.then_some((counts[0] == 1, scope))
}
