//! META: describes a key without its value. An extension of this store.

use std::time::Duration;

use crate::client::{Client, unexpected};
use crate::error::Error;
use crate::resp::RespValue;
use crate::version::Version;

/// What the store knows of a key apart from its value.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Meta {
    /// The length of the value.
    pub bytes: u64,
    /// The version of the value.
    pub version: Version,
    /// When the key expires, in milliseconds since 1970 of the store's time.
    pub expires_ms: Option<u64>,
    /// How long the key still lives, by the store's time.
    pub ttl: Option<Duration>,
    /// The fencing token that protects the key.
    pub fence: Option<Version>,
}

impl Client {
    /// META: describes a key, if it exists.
    ///
    /// # Errors
    /// [`Error::Refused`] if the store does not know the command; otherwise see [`Error`].
    pub async fn meta(&self, key: impl AsRef<[u8]>) -> Result<Option<Meta>, Error> {
        let answer = self.request(&[b"META", key.as_ref()], None).await?;
        match answer.reply()? {
            RespValue::Null => Ok(None),
            RespValue::Array(items) => read(&items, answer.version()?).map(Some),
            _ => Err(unexpected("META")),
        }
    }
}

/// Reads pairs of names and values. Names that this client does not know are ignored.
fn read(items: &[RespValue], version: Version) -> Result<Meta, Error> {
    let malformed = || unexpected("META");
    let (mut bytes, mut expires_ms, mut ttl, mut fence) = (None, None, None, None);
    for pair in items.chunks(2) {
        let [RespValue::Bulk(name), RespValue::Bulk(value)] = pair else {
            return Err(malformed());
        };
        let text = std::str::from_utf8(value).map_err(|_| malformed())?;
        let number = || text.parse::<u64>().map_err(|_| malformed());
        match &name[..] {
            b"bytes" => bytes = Some(number()?),
            b"expires" => expires_ms = Some(number()?),
            b"ttl" => ttl = Some(Duration::from_millis(number()?)),
            b"fence" => fence = Some(text.parse::<Version>().map_err(|_| malformed())?),
            _ => {}
        }
    }
    Ok(Meta {
        bytes: bytes.ok_or_else(malformed)?,
        version,
        expires_ms,
        ttl,
        fence,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::resp::parse;

    fn described(payload: &[u8]) -> Result<Meta, Error> {
        let version = "1:2:StateStore".parse().unwrap();
        match parse(payload).unwrap() {
            RespValue::Array(items) => read(&items, version),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn unknown_names_are_ignored() {
        let payload =
            b"*6\r\n$3\r\nnew\r\n$1\r\nx\r\n$5\r\nbytes\r\n$1\r\n7\r\n$3\r\nttl\r\n$2\r\n50\r\n";
        let meta = described(payload).unwrap();
        assert_eq!((meta.bytes, meta.expires_ms), (7, None));
        assert_eq!(meta.ttl, Some(Duration::from_millis(50)));
    }

    /// The store pads the token, so it is longer than any that a client can send padded.
    #[test]
    fn longest_fencing_token_is_read() {
        let fence = format!(
            "000000000000001:00001:{}",
            "n".repeat(65_535 - "1:1:".len())
        );
        let payload = format!(
            "*4\r\n$5\r\nbytes\r\n$1\r\n7\r\n$5\r\nfence\r\n${}\r\n{fence}\r\n",
            fence.len()
        );
        let meta = described(payload.as_bytes()).unwrap();
        assert_eq!(meta.fence.unwrap().to_string(), fence);
    }

    #[test]
    fn malformed_descriptions_are_refused() {
        for payload in [
            &b"*1\r\n$5\r\nbytes\r\n"[..],
            b"*0\r\n",
            b"*2\r\n$5\r\nbytes\r\n$1\r\nx\r\n",
            b"*2\r\n$5\r\nbytes\r\n*0\r\n",
            b"*4\r\n$5\r\nbytes\r\n$1\r\n1\r\n$5\r\nfence\r\n$1\r\nx\r\n",
        ] {
            assert!(described(payload).is_err(), "{}", payload.escape_ascii());
        }
    }
}
