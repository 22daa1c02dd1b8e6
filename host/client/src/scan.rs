//! SCAN, page by page. A page is requested only when the caller asks for it.

use bytes::Bytes;

use crate::client::{Client, unexpected};
use crate::error::Error;
use crate::resp::{RespValue, bulks};

/// The keys that match a pattern, from [`Client::scan`].
#[derive(Debug)]
pub struct Scan {
    client: Client,
    pattern: Bytes,
    next: Next,
}

#[derive(Debug)]
enum Next {
    First,
    /// The page after this token, which is opaque to the client.
    Page(Bytes),
    End,
}

impl Scan {
    pub(crate) fn new(client: Client, pattern: Bytes) -> Self {
        Self {
            client,
            pattern,
            next: Next::First,
        }
    }

    /// Returns the next page of keys, which may be empty, or `None` after the last one. After an
    /// error the call may be repeated.
    ///
    /// # Errors
    /// See [`Error`].
    pub async fn next_page(&mut self) -> Result<Option<Vec<Bytes>>, Error> {
        let mut arguments: Vec<&[u8]> = vec![b"SCAN", &self.pattern];
        match &self.next {
            Next::First => {}
            Next::Page(token) => arguments.push(token),
            Next::End => return Ok(None),
        }
        let answer = self.client.request(&arguments, None).await?;
        let (keys, token) = page(answer.reply()?)?;
        self.next = match token {
            // A store that returns the same token again would cause an endless loop.
            Some(token) if matches!(&self.next, Next::Page(before) if *before == token) => {
                return Err(Error::Protocol("the same page follows itself".into()));
            }
            Some(token) => Next::Page(token),
            None => Next::End,
        };
        Ok(Some(keys))
    }
}

fn page(reply: RespValue) -> Result<(Vec<Bytes>, Option<Bytes>), Error> {
    let RespValue::Array(mut items) = reply else {
        return Err(unexpected("SCAN"));
    };
    let (keys, token) = match &mut items[..] {
        [RespValue::Array(keys)] => (keys, None),
        [RespValue::Array(keys), RespValue::Bulk(token)] => (keys, Some(token.clone())),
        _ => return Err(unexpected("SCAN")),
    };
    let keys = bulks(std::mem::take(keys)).ok_or_else(|| unexpected("SCAN"))?;
    Ok((keys, token))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::resp::parse;

    #[test]
    fn pages() {
        let last = page(parse(b"*1\r\n*2\r\n$4\r\nkey1\r\n$4\r\nkey2\r\n").unwrap()).unwrap();
        assert_eq!(last, (vec!["key1".into(), "key2".into()], None));
        let empty = page(parse(b"*2\r\n*0\r\n$1\r\n\xff\r\n").unwrap()).unwrap();
        assert_eq!(empty, (vec![], Some(Bytes::from_static(b"\xff"))));
    }

    #[test]
    fn invalid_pages_are_rejected() {
        for payload in [
            &b"*0\r\n"[..],
            b"*1\r\n$1\r\nk\r\n",
            b"*1\r\n$-1\r\n",
            b"*1\r\n:1\r\n",
            b"*1\r\n*1\r\n*0\r\n",
            b"*-1\r\n",
            b"*2\r\n*0\r\n*0\r\n",
            b"*3\r\n*0\r\n$1\r\na\r\n$1\r\nb\r\n",
            b"+OK\r\n",
        ] {
            assert!(page(parse(payload).unwrap()).is_err());
        }
    }
}
