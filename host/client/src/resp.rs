//! RESP3 as the state store uses it: encodes commands and parses responses and notifications.
//!
//! The parser accepts exactly the forms of sections 4 and 8 of the protocol. It must never panic or
//! recurse, because payloads come from the network.

use bytes::{BufMut, Bytes, BytesMut};

use crate::limits;

/// A payload that is not exactly one RESP value, with the reason.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Malformed(pub(crate) &'static str);

/// One whole payload.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Reply<'a> {
    /// `+OK`
    Ok,
    /// `+MORE`
    More,
    /// `-ERR text`
    Error(String),
    /// `:n`
    Integer(i64),
    /// `$-1`
    Nil,
    /// `$n` and n bytes
    Bulk(&'a [u8]),
    /// Bulk strings and arrays of them, at most one level deep.
    Array(Vec<Item<'a>>),
}

/// An element of an array.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Item<'a> {
    /// `$n` and n bytes
    Bulk(&'a [u8]),
    /// An array of bulk strings.
    Bulks(Vec<&'a [u8]>),
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

/// Parses one whole payload.
pub(crate) fn parse(payload: &[u8]) -> Result<Reply<'_>, Malformed> {
    let mut reader = Reader { rest: payload };
    let reply = match reader.kind()? {
        b'+' => match reader.line()? {
            b"OK" => Reply::Ok,
            b"MORE" => Reply::More,
            _ => return Err(Malformed("a simple string other than OK")),
        },
        b'-' => Reply::Error(error_text(reader.line()?)?),
        b':' => Reply::Integer(integer(reader.line()?)?),
        b'$' if reader.rest == b"-1\r\n" => {
            reader.rest = b"";
            Reply::Nil
        }
        b'$' => Reply::Bulk(reader.bulk()?),
        b'*' => Reply::Array(reader.array()?),
        _ => return Err(Malformed("an unknown type")),
    };
    if reader.rest.is_empty() {
        Ok(reply)
    } else {
        Err(Malformed("bytes after the value"))
    }
}

struct Reader<'a> {
    rest: &'a [u8],
}

impl<'a> Reader<'a> {
    fn kind(&mut self) -> Result<u8, Malformed> {
        let (kind, rest) = self
            .rest
            .split_first()
            .ok_or(Malformed("the payload ends early"))?;
        self.rest = rest;
        Ok(*kind)
    }

    fn line(&mut self) -> Result<&'a [u8], Malformed> {
        let end = self
            .rest
            .windows(2)
            .position(|pair| pair == b"\r\n")
            .ok_or(Malformed("a line without CRLF"))?;
        let line = &self.rest[..end];
        self.rest = &self.rest[end + 2..];
        Ok(line)
    }

    /// Parses a bulk string after its `$`.
    fn bulk(&mut self) -> Result<&'a [u8], Malformed> {
        let length = length(self.line()?)?;
        if self.rest.len() < length || self.rest.len() - length < 2 {
            return Err(Malformed("a bulk string shorter than its length"));
        }
        let (bulk, rest) = self.rest.split_at(length);
        self.rest = rest
            .strip_prefix(b"\r\n")
            .ok_or(Malformed("a bulk string without CRLF"))?;
        Ok(bulk)
    }

    /// Parses an array after its `*`.
    fn array(&mut self) -> Result<Vec<Item<'a>>, Malformed> {
        let count = self.count()?;
        let mut items = Vec::with_capacity(count);
        for _ in 0..count {
            items.push(match self.kind()? {
                b'$' => Item::Bulk(self.bulk()?),
                b'*' => Item::Bulks(self.bulks()?),
                _ => return Err(Malformed("an array of something else than strings")),
            });
        }
        Ok(items)
    }

    fn bulks(&mut self) -> Result<Vec<&'a [u8]>, Malformed> {
        let count = self.count()?;
        let mut bulks = Vec::with_capacity(count);
        for _ in 0..count {
            match self.kind()? {
                b'$' => bulks.push(self.bulk()?),
                _ => return Err(Malformed("an inner array of something else than strings")),
            }
        }
        Ok(bulks)
    }

    /// Parses the count of an array. A count that the rest cannot hold is refused before memory is
    /// allocated for it.
    fn count(&mut self) -> Result<usize, Malformed> {
        let count = length(self.line()?)?;
        // The shortest element is `*0\r\n`.
        if count > limits::ARRAY_ELEMENTS_MAX || count > self.rest.len() / 4 {
            return Err(Malformed("an array shorter than its count"));
        }
        Ok(count)
    }
}

fn length(line: &[u8]) -> Result<usize, Malformed> {
    let bad = Malformed("a length that is not a number");
    if line.is_empty() || line.len() > 10 || (line[0] == b'0' && line.len() > 1) {
        return Err(bad);
    }
    let mut length = 0_usize;
    for byte in line {
        if !byte.is_ascii_digit() {
            return Err(bad);
        }
        length = length * 10 + usize::from(byte - b'0');
    }
    Ok(length)
}

fn integer(line: &[u8]) -> Result<i64, Malformed> {
    let bad = Malformed("an invalid number");
    let (negative, digits) = match line.split_first() {
        Some((b'-', digits)) => (true, digits),
        _ => (false, line),
    };
    let number = length(digits).map_err(|_| bad.clone())?;
    let number = i64::try_from(number).map_err(|_| bad)?;
    Ok(if negative { -number } else { number })
}

fn error_text(line: &[u8]) -> Result<String, Malformed> {
    let text = line
        .strip_prefix(b"ERR ")
        .ok_or(Malformed("an error without ERR"))?;
    let text = &text[..text.len().min(limits::ERROR_TEXT_BYTES_MAX)];
    // Terminals print these texts, so control characters are replaced.
    Ok(String::from_utf8_lossy(text)
        .chars()
        .map(|c| if c.is_control() { '\u{fffd}' } else { c })
        .collect())
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

    #[test]
    fn every_answer_of_the_protocol() {
        for (payload, reply) in [
            (&b"+OK\r\n"[..], Reply::Ok),
            (b"+MORE\r\n", Reply::More),
            (b":-1\r\n", Reply::Integer(-1)),
            (b":0\r\n", Reply::Integer(0)),
            (b":1\r\n", Reply::Integer(1)),
            (b"$-1\r\n", Reply::Nil),
            (b"$0\r\n\r\n", Reply::Bulk(b"")),
            (b"$4\r\na\r\nb\r\n", Reply::Bulk(b"a\r\nb")),
            (
                b"-ERR syntax error\r\n",
                Reply::Error("syntax error".into()),
            ),
            (b"*1\r\n*0\r\n", Reply::Array(vec![Item::Bulks(vec![])])),
            (
                b"*2\r\n*2\r\n$1\r\na\r\n$0\r\n\r\n$2\r\n\0\xff\r\n",
                Reply::Array(vec![Item::Bulks(vec![b"a", b""]), Item::Bulk(b"\0\xff")]),
            ),
            (
                b"*2\r\n$6\r\nNOTIFY\r\n$6\r\nDELETE\r\n",
                Reply::Array(vec![Item::Bulk(b"NOTIFY"), Item::Bulk(b"DELETE")]),
            ),
        ] {
            assert_eq!(parse(payload), Ok(reply), "{}", payload.escape_ascii());
        }
    }

    #[test]
    fn malformed_payloads() {
        for payload in [
            &b""[..],
            b"+",
            b"+OK",
            b"+OK\n",
            b"+ok\r\n",
            b"+OK\r\n\r\n",
            b"-1\r\n",
            b"-ERR\r\n",
            b"-ERR: text\r\n",
            b":\r\n",
            b":-\r\n",
            b":+1\r\n",
            b":01\r\n",
            b":--1\r\n",
            b":99999999999999999999\r\n",
            b"$1\r\n",
            b"$1\r\nab\r\n",
            b"$2\r\na\r\n",
            b"$-2\r\n",
            b"$01\r\na\r\n",
            b"$+1\r\na\r\n",
            b"$100000000000000000000000\r\n",
            b"$9999999999\r\na\r\n",
            b"*-1\r\n",
            b"*1\r\n",
            b"*9999999999\r\n",
            b"*2\r\n*0\r\n",
            b"*1\r\n$-1\r\n",
            b"*1\r\n:1\r\n",
            b"*1\r\n*1\r\n*0\r\n",
            b"?1\r\n",
            b"\xff",
        ] {
            assert!(parse(payload).is_err(), "{}", payload.escape_ascii());
        }
    }

    #[test]
    fn prefix_of_a_response_is_malformed() {
        let payload = b"*2\r\n*2\r\n$1\r\na\r\n$0\r\n\r\n$2\r\n\0\xff\r\n";
        for end in 0..payload.len() {
            assert!(parse(&payload[..end]).is_err(), "{end}");
        }
    }

    #[test]
    fn error_text_contains_no_control_characters() {
        assert_eq!(
            parse(b"-ERR a\x1b[2Jb\r\n"),
            Ok(Reply::Error("a\u{fffd}[2Jb".into()))
        );
    }
}
