//! Converts bytes to readable text and back: words with quotes and escapes, similar to a shell.

/// One word of a line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Word {
    /// The bytes without quotes and escapes.
    pub bytes: Vec<u8>,
    /// Whether any part of it was in quotes.
    pub quoted: bool,
}

impl Word {
    /// The text of an unquoted word, which may be a sign or a variable.
    pub fn bare(&self) -> Option<&str> {
        if self.quoted {
            None
        } else {
            std::str::from_utf8(&self.bytes).ok()
        }
    }

    /// The text of a word, in quotes or not.
    pub fn text(&self) -> Result<&str, String> {
        std::str::from_utf8(&self.bytes).map_err(|_| "a word is not valid UTF-8".into())
    }
}

impl AsRef<[u8]> for Word {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}

/// Splits a line into words. Escapes are `\r \n \t \0 \\ \" \xHH` and a backslash before a space,
/// inside double quotes and outside.
pub fn words(line: &str) -> Result<Vec<Word>, String> {
    let mut out = Vec::new();
    let mut bytes = line.bytes().peekable();
    let mut word: Option<Word> = None;
    let mut inside = false;
    while let Some(byte) = bytes.next() {
        if byte == b' ' && !inside {
            out.extend(word.take());
            continue;
        }
        let word = word.get_or_insert(Word {
            bytes: Vec::new(),
            quoted: false,
        });
        match byte {
            b'"' => {
                inside = !inside;
                word.quoted = true;
            }
            b'\\' => word.bytes.push(match bytes.next() {
                Some(b'r') => b'\r',
                Some(b'n') => b'\n',
                Some(b't') => b'\t',
                Some(b'0') => 0,
                Some(b'x') => {
                    let mut digit = || {
                        let digit = char::from(bytes.next()?).to_digit(16)?;
                        u8::try_from(digit).ok()
                    };
                    match (digit(), digit()) {
                        (Some(high), Some(low)) => high << 4 | low,
                        _ => return Err("\\x needs two hexadecimal digits".into()),
                    }
                }
                Some(plain @ (b'\\' | b'"' | b' ')) => plain,
                other => return Err(format!("unknown escape \\{:?}", other.map(char::from))),
            }),
            plain => word.bytes.push(plain),
        }
    }
    if inside {
        return Err("a closing quote is missing".into());
    }
    out.extend(word);
    Ok(out)
}

/// Writes bytes as one word, from which [`words`] returns the same bytes.
pub fn quote(bytes: &[u8]) -> String {
    let mut out = String::new();
    let mut quotes = bytes.is_empty() || bytes == b"--" || matches!(bytes[0], b'@' | b'#')
        // Only a variable needs quotes. A RESP string begins with `$` and a number.
        || bytes[0] == b'$' && bytes.get(1).is_some_and(u8::is_ascii_alphabetic);
    for &byte in bytes {
        match byte {
            b'\r' => out.push_str("\\r"),
            b'\n' => out.push_str("\\n"),
            b'\t' => out.push_str("\\t"),
            0 => out.push_str("\\0"),
            b'\\' => out.push_str("\\\\"),
            b'"' => out.push_str("\\\""),
            0x20..=0x7E => {
                quotes |= byte == b' ';
                out.push(byte.into());
            }
            other => out.push_str(&format!("\\x{other:02X}")),
        }
    }
    if quotes { format!("\"{out}\"") } else { out }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_byte_survives_quoting() {
        let all: Vec<u8> = (0..=255).collect();
        for bytes in [&all[..], b"", b"a b", b"$-1\r\n", b"\"", b"@x", b"--"] {
            let line = format!("< {} x", quote(bytes));
            let words = words(&line).unwrap();
            assert_eq!(words.len(), 3, "{line}");
            assert_eq!(words[1].bytes, bytes, "{line}");
        }
    }

    #[test]
    fn malformed_lines_are_refused() {
        for bad in ["\"open", "\\q", "\\x1", "\\"] {
            assert!(words(bad).is_err(), "{bad}");
        }
    }
}
