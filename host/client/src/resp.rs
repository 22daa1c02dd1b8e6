//! RESP3, the protocol of payloads: encodes commands, and parses responses and notifications.
//!
//! The parser must never panic and must limit the depth, because payloads come from the network.

use bytes::{BufMut, Bytes, BytesMut};

use crate::limits;

/// A payload that is not exactly one RESP value, with the reason.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Malformed(pub(crate) &'static str);

/// A value of RESP3 (the Redis serialization protocol).
#[derive(Debug, Clone, PartialEq)]
pub enum RespValue {
    /// `+text`, with all bytes of the text
    Simple(Bytes),
    /// `-text`, within another value. An error as the whole response is [`Error::Refused`]. The
    /// text is cut after 4096 bytes, and has no control characters.
    Error(String),
    /// `:number`
    Integer(i64),
    /// `,number`
    Double(f64),
    /// `#t` or `#f`
    Boolean(bool),
    /// `(digits`, with all bytes of the line
    BigNumber(Bytes),
    /// `$length` and bytes
    Bulk(Bytes),
    /// `$-1`, `*-1` or `_`
    Null,
    /// `*count` or `>count` and values
    Array(Vec<Self>),
    /// `~count` and values
    Set(Vec<Self>),
    /// `%count` and pairs of values
    Map(Vec<(Self, Self)>),
}

/// An array of bulk strings: the form of every request.
pub(crate) fn command(arguments: &[&[u8]]) -> Bytes {
    // 24 is more than `$`, 20 digits and one CRLF; the second CRLF is counted with the bytes.
    let bytes = arguments.iter().map(|a| a.len() + 26).sum::<usize>() + 24;
    let mut payload = BytesMut::with_capacity(bytes);
    payload.put_slice(format!("*{}\r\n", arguments.len()).as_bytes());
    for argument in arguments {
        payload.put_slice(format!("${}\r\n", argument.len()).as_bytes());
        payload.put_slice(argument);
        payload.put_slice(b"\r\n");
    }
    payload.freeze()
}

/// The strings, if all values are bulk strings.
pub(crate) fn bulks(values: Vec<RespValue>) -> Option<Vec<Bytes>> {
    let bulk = |value| match value {
        RespValue::Bulk(bytes) => Some(bytes),
        _ => None,
    };
    values.into_iter().map(bulk).collect()
}

/// Parses one whole payload. The depth is limited, because this recurses.
pub(crate) fn parse(payload: &[u8]) -> Result<RespValue, Malformed> {
    let mut reader = Reader { rest: payload };
    let value = reader.value(limits::RESP_DEPTH_MAX)?;
    match reader.rest {
        [] => Ok(value),
        _ => Err(Malformed("bytes after the value")),
    }
}

struct Reader<'a> {
    rest: &'a [u8],
}

impl<'a> Reader<'a> {
    fn value(&mut self, depth_max: usize) -> Result<RespValue, Malformed> {
        let kind = *self.take(1)?.first().unwrap_or(&0);
        let line = self.line()?;
        Ok(match kind {
            b'+' => RespValue::Simple(Bytes::copy_from_slice(line)),
            b'-' => RespValue::Error(printable(line)),
            b':' => RespValue::Integer(integer(line)?),
            b',' => RespValue::Double(number(line)?),
            b'(' => RespValue::BigNumber(Bytes::copy_from_slice(line)),
            b'#' => match line {
                b"t" => RespValue::Boolean(true),
                b"f" => RespValue::Boolean(false),
                _ => return Err(Malformed("a boolean that is neither t nor f")),
            },
            b'_' if line.is_empty() => RespValue::Null,
            b'$' | b'*' if line == b"-1" => RespValue::Null,
            b'$' | b'!' | b'=' => {
                // Copied, because a slice would keep the whole read buffer alive.
                let bytes = Bytes::copy_from_slice(self.take(integer(line)?)?);
                match self.take(2)? {
                    b"\r\n" if kind == b'!' => RespValue::Error(printable(&bytes)),
                    b"\r\n" => RespValue::Bulk(bytes),
                    _ => return Err(Malformed("a bulk string without CRLF")),
                }
            }
            b'*' | b'>' => RespValue::Array(self.values(line, 1, depth_max)?),
            b'~' => RespValue::Set(self.values(line, 1, depth_max)?),
            b'%' => {
                let mut values = self.values(line, 2, depth_max)?.into_iter();
                let mut pairs = Vec::with_capacity(values.len() / 2);
                while let (Some(name), Some(value)) = (values.next(), values.next()) {
                    pairs.push((name, value));
                }
                RespValue::Map(pairs)
            }
            _ => return Err(Malformed("an unknown type")),
        })
    }

    /// The values of an array, a set, or (`each` = 2) a map.
    fn values(
        &mut self,
        count: &[u8],
        each: usize,
        depth_max: usize,
    ) -> Result<Vec<RespValue>, Malformed> {
        let count = integer::<usize>(count)?.saturating_mul(each);
        // The shortest value is `_\r\n`. Memory is allocated only for values that are there.
        if count > self.rest.len() / 3 {
            return Err(Malformed("an array shorter than its count"));
        }
        let depth_max = depth_max
            .checked_sub(1)
            .ok_or(Malformed("arrays within arrays, too deep"))?;
        (0..count).map(|_| self.value(depth_max)).collect()
    }

    fn line(&mut self) -> Result<&'a [u8], Malformed> {
        let end = self.rest.windows(2).position(|pair| pair == b"\r\n");
        let (line, rest) = self
            .rest
            .split_at(end.ok_or(Malformed("a line without CRLF"))?);
        self.rest = rest.get(2..).unwrap_or_default();
        Ok(line)
    }

    fn take(&mut self, count: usize) -> Result<&'a [u8], Malformed> {
        let (taken, rest) = self
            .rest
            .split_at_checked(count)
            .ok_or(Malformed("the payload ends early"))?;
        self.rest = rest;
        Ok(taken)
    }
}

/// The store writes no leading zeros.
fn integer<T: std::str::FromStr>(line: &[u8]) -> Result<T, Malformed> {
    match line.strip_prefix(b"-").unwrap_or(line) {
        [b'0', _, ..] => Err(Malformed("an invalid number")),
        _ => number(line),
    }
}

fn number<T: std::str::FromStr>(line: &[u8]) -> Result<T, Malformed> {
    let text = std::str::from_utf8(line).ok();
    let number = text.filter(|it| !it.starts_with('+'));
    number
        .and_then(|it| it.parse().ok())
        .ok_or(Malformed("an invalid number"))
}

/// The text of an error. Terminals and logs print it, so it is cut, and control characters are
/// replaced.
pub(crate) fn printable(line: &[u8]) -> String {
    let line = &line[..line.len().min(limits::ERROR_TEXT_BYTES_MAX)];
    String::from_utf8_lossy(line).replace(char::is_control, "\u{fffd}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn command_is_an_array_of_bulk_strings() {
        assert_eq!(
            command(&[b"SET", b"k", b"\r\n\0\xff", b""]).as_ref(),
            b"*4\r\n$3\r\nSET\r\n$1\r\nk\r\n$4\r\n\r\n\0\xff\r\n$0\r\n\r\n"
        );
    }

    fn bulk(text: &'static str) -> RespValue {
        RespValue::Bulk(Bytes::from_static(text.as_bytes()))
    }

    #[test]
    fn every_type_is_parsed() {
        use RespValue::*;
        for (payload, value) in [
            (&b"+OK\r\n"[..], Simple("OK".into())),
            (b"-ERR no\r\n", Error("ERR no".into())),
            (b"!6\r\nERR no\r\n", Error("ERR no".into())),
            (b":-42\r\n", Integer(-42)),
            (b":0\r\n", Integer(0)),
            (b",1.5\r\n", Double(1.5)),
            (b"#t\r\n", Boolean(true)),
            (b"#f\r\n", Boolean(false)),
            (
                b"(123456789012345678901\r\n",
                BigNumber("123456789012345678901".into()),
            ),
            (b"$-1\r\n", Null),
            (b"*-1\r\n", Null),
            (b"_\r\n", Null),
            (b"$4\r\na\r\nb\r\n", bulk("a\r\nb")),
            (b"=5\r\ntxt:a\r\n", bulk("txt:a")),
            (
                b"*2\r\n:1\r\n*1\r\n$0\r\n\r\n",
                Array(vec![Integer(1), Array(vec![bulk("")])]),
            ),
            (b"~1\r\n_\r\n", Set(vec![Null])),
            (
                b"%1\r\n+a\r\n:1\r\n",
                Map(vec![(Simple("a".into()), Integer(1))]),
            ),
            (b">0\r\n", Array(vec![])),
            (
                b"*2\r\n*2\r\n$1\r\na\r\n$0\r\n\r\n$2\r\n\0\xff\r\n",
                Array(vec![
                    Array(vec![bulk("a"), bulk("")]),
                    Bulk(b"\0\xff"[..].into()),
                ]),
            ),
        ] {
            assert_eq!(parse(payload), Ok(value), "{}", payload.escape_ascii());
            for end in 0..payload.len() {
                assert!(
                    parse(&payload[..end]).is_err(),
                    "{}",
                    payload[..end].escape_ascii()
                );
            }
        }
    }

    #[test]
    fn malformed_payloads_are_refused() {
        for payload in [
            &b""[..],
            b"?1\r\n",
            b"\xff",
            b"+",
            b"+OK",
            b"+OK\n",
            b"+OK\r\n\r\n",
            b":\r\n",
            b":-\r\n",
            b":+1\r\n",
            b":01\r\n",
            b":-01\r\n",
            b":--1\r\n",
            b":1.5\r\n",
            b":99999999999999999999\r\n",
            b"#x\r\n",
            b"$-2\r\n",
            b"$+1\r\na\r\n",
            b"$01\r\na\r\n",
            b"$1\r\n",
            b"$1\r\nab\r\n",
            b"$2\r\na\r\n",
            b"$9999999999\r\na\r\n",
            b"$99999999999999999999\r\n",
            b"*2\r\n*0\r\n",
            b"*9999999999\r\n",
            b"%9223372036854775808\r\n",
            b"*1\r\n",
        ] {
            assert!(parse(payload).is_err(), "{}", payload.escape_ascii());
        }
    }

    #[test]
    fn depth_is_limited() {
        let nested = |depth: usize| [b"*1\r\n".repeat(depth), b"_\r\n".to_vec()].concat();
        assert!(parse(&nested(limits::RESP_DEPTH_MAX)).is_ok());
        assert!(parse(&nested(limits::RESP_DEPTH_MAX + 1)).is_err());
        assert!(parse(&nested(1_000_000)).is_err());
    }

    #[test]
    fn error_texts_contain_no_control_characters() {
        let shown = RespValue::Error("a\u{fffd}[2Jb".into());
        assert_eq!(parse(b"-a\x1b[2Jb\r\n"), Ok(shown.clone()));
        assert_eq!(parse(b"!6\r\na\x1b[2Jb\r\n"), Ok(shown));
    }

    /// Regression: these were cut and changed as the texts of errors are.
    #[test]
    fn simple_strings_and_big_numbers_keep_their_bytes() {
        let long = vec![b'7'; limits::ERROR_TEXT_BYTES_MAX + 1];
        for text in [&b"a\x1b[2J\t\xff\n"[..], &long] {
            let line = |kind: &[u8]| [kind, text, b"\r\n"].concat();
            let bytes = || Bytes::copy_from_slice(text);
            assert_eq!(parse(&line(b"+")), Ok(RespValue::Simple(bytes())));
            assert_eq!(parse(&line(b"(")), Ok(RespValue::BigNumber(bytes())));
        }
    }
}
