//! Splits a request payload into its arguments, for logs and reports.
//!
//! A payload may be anything. The requests of all published commands are arrays of bulk strings
//! (RESP3). The store must never decide by these arguments: only the policy interprets a request.

use std::collections::BTreeMap;

use crate::limits;

/// The first arguments of a request, at most [`limits::REQUEST_WORDS_SHOWN_MAX`]. `None` if the
/// payload is not an array of bulk strings.
pub fn words(payload: &[u8]) -> Option<Vec<&[u8]>> {
    let mut rest = payload;
    let count = length(&mut rest, b'*')?;
    let mut words = Vec::new();
    for _ in 0..count.min(limits::REQUEST_WORDS_SHOWN_MAX) {
        let len = length(&mut rest, b'$')?;
        let (word, behind) = rest.split_at_checked(len)?;
        rest = behind.strip_prefix(b"\r\n")?;
        words.push(word);
    }
    Some(words)
}

fn length(rest: &mut &[u8], mark: u8) -> Option<usize> {
    let behind = rest.strip_prefix(&[mark])?;
    let end = behind.iter().position(|byte| *byte == b'\r')?;
    let (digits, behind) = behind.split_at(end);
    *rest = behind.strip_prefix(b"\r\n")?;
    if !digits.iter().all(u8::is_ascii_digit) {
        return None;
    }
    std::str::from_utf8(digits).ok()?.parse().ok()
}

/// The entry of a request's command in a table by command. Clients choose the names, so the table
/// has at most [`limits::REPLAY_COMMANDS_MAX`] entries.
pub fn command_of<'a, T: Default>(
    commands: &'a mut BTreeMap<String, T>,
    payload: &[u8],
) -> &'a mut T {
    let first = words(payload).and_then(|words| words.first().copied());
    let mut name = match first {
        Some(word) if word.len() <= 16 && word.iter().all(u8::is_ascii_graphic) => {
            String::from_utf8_lossy(word).to_ascii_uppercase()
        }
        _ => OTHERS.to_owned(),
    };
    // One entry is reserved for `OTHERS`.
    let full = commands.len() + 1 >= limits::REPLAY_COMMANDS_MAX;
    if full && !commands.contains_key(&name) {
        name = OTHERS.to_owned();
    }
    commands.entry(name).or_default()
}

/// The name for requests without a readable first word, and for commands beyond the limit.
pub const OTHERS: &str = "(others)";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn array_of_bulk_strings_is_split_and_anything_else_is_none() {
        let set = b"*3\r\n$3\r\nSET\r\n$0\r\n\r\n$2\r\n\r\n\r\n";
        assert_eq!(words(set), Some(vec![&b"SET"[..], b"", b"\r\n"]));
        assert_eq!(words(b"*0\r\n"), Some(vec![]));
        for other in [
            &b""[..],
            b"PING",
            b"*1\r\n",
            b"*1\r\n$3\r\nab\r\n",
            b"*1\r\n$-1\r\n",
            b"*1\r\n$+1\r\na\r\n",
            b"*99999999999999999999999\r\n",
            b"*1\n$1\na\n",
        ] {
            assert_eq!(words(other), None, "{}", other.escape_ascii());
        }
        let many = [&b"*1000\r\n"[..], &b"$1\r\na\r\n".repeat(1000)].concat();
        let shown = words(&many).map(|words| words.len());
        assert_eq!(shown, Some(limits::REQUEST_WORDS_SHOWN_MAX));
    }
}
