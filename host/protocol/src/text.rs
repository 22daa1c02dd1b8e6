//! Keys, topics and names that clients chose, as text for people.

use core::fmt;

/// Bytes as text: UTF-8 stays, and each other byte becomes `\xNN`.
///
/// Control characters and backslashes stay too, because JSON and the string fields of log lines
/// escape them, and must not do so twice. A text for the message of a log line, a terminal or the
/// middle of a sentence must be [`on_one_line`](Self::on_one_line).
#[derive(Clone, Copy, Debug)]
pub struct Shown<'a> {
    start: &'a [u8],
    is_cut: bool,
    is_on_one_line: bool,
}

impl<'a> Shown<'a> {
    /// All of these bytes.
    #[must_use]
    pub fn whole(bytes: &'a [u8]) -> Self {
        Self::start(bytes, false)
    }

    /// At most `bytes_max` of these bytes. If there are more, no character is divided, and `…`
    /// follows.
    #[must_use]
    pub fn cut(bytes: &'a [u8], bytes_max: usize) -> Self {
        let start = bytes.get(..bytes_max).unwrap_or(bytes);
        Self::start(start, start.len() < bytes.len())
    }

    /// The start of longer bytes if `is_cut`, as [`cut`](Self::cut) shows it, or else all bytes.
    #[must_use]
    pub fn start(start: &'a [u8], is_cut: bool) -> Self {
        Self {
            start,
            is_cut,
            is_on_one_line: false,
        }
    }

    /// Escapes control characters, other characters that are not printable, and backslashes.
    #[must_use]
    pub fn on_one_line(self) -> Self {
        Self {
            is_on_one_line: true,
            ..self
        }
    }
}

impl fmt::Display for Shown<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut chunks = self.start.utf8_chunks().peekable();
        while let Some(chunk) = chunks.next() {
            match self.is_on_one_line {
                true => write_on_one_line(f, chunk.valid())?,
                false => f.write_str(chunk.valid())?,
            }
            let is_last = chunks.peek().is_none();
            if self.is_cut && is_last && is_incomplete(chunk.invalid()) {
                break;
            }
            for byte in chunk.invalid() {
                write!(f, "\\x{byte:02x}")?;
            }
        }
        f.write_str(if self.is_cut { "…" } else { "" })
    }
}

/// Writes a text with escapes. Quotes stay, because the text is not quoted.
fn write_on_one_line(f: &mut fmt::Formatter<'_>, text: &str) -> fmt::Result {
    let mut begin = 0;
    for (at, quote) in text.match_indices(['\'', '"']) {
        write!(f, "{}{quote}", text[begin..at].escape_debug())?;
        begin = at + quote.len();
    }
    write!(f, "{}", text[begin..].escape_debug())
}

/// Whether further bytes could complete these to a character.
fn is_incomplete(bytes: &[u8]) -> bool {
    core::str::from_utf8(bytes).is_err_and(|error| error.error_len().is_none())
}

#[cfg(test)]
mod tests {
    use alloc::format;
    use alloc::string::ToString;

    use super::*;

    #[test]
    fn text_stays_and_other_bytes_are_escaped() {
        for (bytes, text, on_one_line) in [
            (&b""[..], "", ""),
            ("Wärme/Halle 4".as_bytes(), "Wärme/Halle 4", "Wärme/Halle 4"),
            (b"a\xffb\xc3", "a\\xffb\\xc3", "a\\xffb\\xc3"),
            (b"o'brien \"q\"", "o'brien \"q\"", "o'brien \"q\""),
            (b"'\n'\\\x1b[2J", "'\n'\\\u{1b}[2J", "'\\n'\\\\\\u{1b}[2J"),
            (
                "\u{202e}e\u{301}".as_bytes(),
                "\u{202e}e\u{301}",
                "\\u{202e}e\u{301}",
            ),
        ] {
            let shown = Shown::whole(bytes);
            assert_eq!(shown.to_string(), text);
            assert_eq!(shown.on_one_line().to_string(), on_one_line);
        }
    }

    #[test]
    fn long_text_is_cut_between_characters() {
        for character in ["x", "ä", "水", "🔥"] {
            for bytes_max in 0..20 {
                let fitting = bytes_max / character.len();
                let text = character.repeat(fitting + 1);
                let cut = format!("{}…", character.repeat(fitting));
                assert_eq!(Shown::cut(text.as_bytes(), bytes_max).to_string(), cut);
                let all = Shown::cut(text.as_bytes(), text.len());
                assert_eq!(all.to_string(), text);
                let start = &text.as_bytes()[..bytes_max.min(text.len())];
                assert_eq!(Shown::start(start, true).to_string(), cut);
            }
        }
        // Bytes of no character are not taken for the start of one.
        let text = "\\x80".repeat(3) + "…";
        assert_eq!(Shown::cut(&[0x80; 4], 3).to_string(), text);
        assert_eq!(Shown::cut(b"ab\xff\xff", 3).to_string(), "ab\\xff…");
    }
}
