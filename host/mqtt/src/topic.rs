//! Validity and matching of topic names and filters (MQTT 5 section 4.7), on bytes that are known
//! to be UTF-8.

use crate::limits::OWN_TOPICS;

/// Why a topic name or filter is refused.
pub(crate) type Fault = &'static str;

/// Checks a name to publish to: not empty, no wildcard, no U+0000.
pub fn check_name(name: &[u8]) -> Result<(), Fault> {
    if name.is_empty() {
        return Err("the topic name is empty");
    }
    // Branch-free for each byte, so that the compiler can examine many bytes at once.
    let holds = |which: fn(u8) -> bool| name.iter().fold(false, |holds, byte| holds | which(*byte));
    if holds(|byte| byte == b'+' || byte == b'#') {
        return Err("the topic name holds a wildcard");
    }
    if holds(|byte| byte == 0) {
        return Err("the topic name holds U+0000");
    }
    Ok(())
}

/// Checks a filter to subscribe to: `+` must be alone in its level, and `#` alone in the last one.
/// The filter of a shared subscription is `$share/NAME/FILTER` (section 4.8.2), and FILTER must not
/// be a shared one.
pub fn check_filter(filter: &[u8]) -> Result<(), Fault> {
    let Some(shared) = filter.strip_prefix(SHARED) else {
        return check_topics(filter);
    };
    let mut parts = shared.splitn(2, |byte| *byte == b'/');
    match (parts.next().unwrap_or_default(), parts.next()) {
        (b"", _) => Err("the group of a shared subscription has no name"),
        (name, _) if name.iter().any(|byte| matches!(byte, b'+' | b'#' | 0)) => {
            Err("the name of a shared subscription's group holds a wildcard or U+0000")
        }
        (_, None) => Err("a shared subscription has no topic filter after the name of its group"),
        (_, Some(filter)) if is_shared(filter) => Err("a shared subscription contains another one"),
        (_, Some(filter)) => check_topics(filter),
    }
}

/// Checks a filter as if it were not of a shared subscription.
pub(crate) fn check_topics(filter: &[u8]) -> Result<(), Fault> {
    if filter.is_empty() {
        return Err("the topic filter is empty");
    }
    let mut levels = levels(filter).peekable();
    while let Some(level) = levels.next() {
        match level {
            b"+" => {}
            b"#" if levels.peek().is_none() => {}
            b"#" => return Err("'#' is not the last level of the topic filter"),
            _ if level.iter().any(|byte| matches!(byte, b'+' | b'#')) => {
                return Err("a wildcard does not occupy a whole level of the topic filter");
            }
            _ if level.contains(&0) => return Err("the topic filter holds U+0000"),
            _ => {}
        }
    }
    Ok(())
}

/// The levels between the slashes. There is always at least one, which may be empty.
pub(crate) fn levels(topic: &[u8]) -> impl DoubleEndedIterator<Item = &[u8]> + Clone {
    topic.split(|byte| *byte == b'/')
}

pub(crate) fn level_count(topic: &[u8]) -> usize {
    1 + topic.iter().filter(|byte| **byte == b'/').count()
}

pub(crate) fn has_wildcard(filter: &[u8]) -> bool {
    filter.iter().any(|byte| matches!(byte, b'+' | b'#'))
}

/// The prefix of a shared subscription's filter (section 4.8.2).
const SHARED: &[u8] = b"$share/";

/// Whether a filter is for topics of this client only. A client id with a slash or a wildcard has
/// no such topics, because they could also belong to another client.
pub(crate) fn is_own(filter: &[u8], client: &str) -> bool {
    let rest = filter.strip_prefix(OWN_TOPICS);
    let rest = rest.and_then(|rest| rest.strip_prefix(client.as_bytes()));
    rest.is_some_and(|rest| rest.first() == Some(&b'/')) && !client.contains(['/', '+', '#'])
}

pub(crate) fn is_shared(filter: &[u8]) -> bool {
    filter.starts_with(SHARED)
}

/// The filter that topics are compared with: without `$share/NAME/` if it is of a shared
/// subscription.
pub(crate) fn of_topics(filter: &[u8]) -> &[u8] {
    let shared = filter.strip_prefix(SHARED);
    let inner = shared.and_then(|it| it.splitn(2, |byte| *byte == b'/').nth(1));
    inner.unwrap_or(filter)
}

/// Whether a valid filter, not of a shared subscription, matches a valid name. A leading wildcard
/// does not match a name that begins with `$` (section 4.7.2). Tests compare the router and the
/// search for retained messages with this function.
#[cfg(test)]
pub(crate) fn matches(filter: &[u8], name: &[u8]) -> bool {
    if name.first() == Some(&b'$') && matches!(filter.first(), Some(b'+' | b'#')) {
        return false;
    }
    let (mut filters, mut names) = (levels(filter), levels(name));
    loop {
        match (filters.next(), names.next()) {
            (Some(b"#"), _) | (None, None) => return true,
            (Some(b"+"), Some(_)) => {}
            (Some(a), Some(b)) if a == b => {}
            _ => return false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names() {
        for good in ["a", "/", "a//b", "$SYS/x", "é/ü", " "] {
            assert_eq!(check_name(good.as_bytes()), Ok(()), "{good}");
        }
        for bad in ["", "a/+", "#", "a+b", "a\0b"] {
            assert!(check_name(bad.as_bytes()).is_err(), "{bad:?}");
        }
    }

    #[test]
    fn filters() {
        for good in [
            "#",
            "+",
            "a/#",
            "+/+",
            "/",
            "a/+/b/#",
            "$share",
            "$shared/+",
        ] {
            assert_eq!(check_filter(good.as_bytes()), Ok(()), "{good}");
            assert_eq!(of_topics(good.as_bytes()), good.as_bytes());
        }
        for bad in ["", "a#", "#/a", "a/#/b", "a+", "a/b+/c", "a\0"] {
            assert!(check_filter(bad.as_bytes()).is_err(), "{bad:?}");
        }
    }

    #[test]
    fn filters_of_shared_subscriptions() {
        for (good, topics) in [
            ("$share/g/a", "a"),
            ("$share/g//finance", "/finance"),
            ("$share/$g/a/+/#", "a/+/#"),
            ("$share/g/$SYS/x", "$SYS/x"),
            ("$share/g/$share", "$share"),
        ] {
            assert_eq!(check_filter(good.as_bytes()), Ok(()), "{good}");
            assert_eq!(of_topics(good.as_bytes()), topics.as_bytes(), "{good}");
        }
        for bad in [
            "$share/",
            "$share/g",
            "$share/g/",
            "$share//a",
            "$share/+/a",
            "$share/g#/a",
            "$share/g\0/a",
            "$share/g/a#",
            "$share/g/$share/h/a",
        ] {
            assert!(check_filter(bad.as_bytes()).is_err(), "{bad:?}");
        }
    }

    #[test]
    fn matching_agrees_with_the_examples_of_the_standard() {
        for (filter, name, expected) in [
            ("sport/tennis/player1/#", "sport/tennis/player1", true),
            (
                "sport/tennis/player1/#",
                "sport/tennis/player1/score/wimbledon",
                true,
            ),
            ("sport/#", "sport", true),
            ("sport/tennis/+", "sport/tennis/player1", true),
            ("sport/tennis/+", "sport/tennis/player1/ranking", false),
            ("sport/+", "sport", false),
            ("sport/+", "sport/", true),
            ("+/+", "/finance", true),
            ("/+", "/finance", true),
            ("+", "/finance", false),
            ("#", "$SYS/monitor", false),
            ("+/monitor/Clients", "$SYS/monitor/Clients", false),
            ("$SYS/#", "$SYS/monitor", true),
            ("$SYS/monitor/+", "$SYS/monitor/Clients", true),
            ("a/b", "a/b", true),
            ("a/b", "A/b", false),
        ] {
            assert_eq!(
                matches(filter.as_bytes(), name.as_bytes()),
                expected,
                "{filter} on {name}"
            );
        }
    }
}
