//! A policy with one command, which adds a stroke to a key and counts them.

use statehouse_policy::{
    Access, Body, Bytes, Change, Dialect, Event, Fault, Frame, Host, Info, Notification, Outcome,
    Policy, Repeat, Request, Span, Stamp, resp,
};

/// `TALLY key`: adds a stroke to the value of a key; returns the number of strokes.
pub(crate) struct Tally;

/// Adds a stroke; returns their number and the version of the key.
fn stroke(host: &mut impl Host, key: &Bytes) -> Result<(u64, Stamp), Fault> {
    let mut strokes = Vec::new();
    let mut expires = None;
    if let Some(entry) = host.head(key, Access::Write)? {
        // Only the holder of a lock may change such a key, and this command takes no token.
        if entry.fence.is_some() {
            let text = "a fencing token is required for this request";
            return Err(Fault::Other(text.to_owned()));
        }
        strokes = host.load(key, 0, entry.len)?.unwrap_or_default();
        // A write without the earlier expiry would remove it.
        expires = entry.expires;
    }
    strokes.push(b'|');
    let count = strokes.len() as u64;
    let version = host.put(key, &Bytes::Owned(strokes), None, None, expires)?;
    Ok((count, version))
}

impl Policy for Tally {
    fn describe() -> Info {
        Info {
            name: "tally".into(),
            version: "1.0.0".into(),
            commands: vec!["TALLY".into()],
        }
    }

    fn configure(_options: &[(String, String)]) -> Result<Self, String> {
        Ok(Self)
    }

    fn route(&self, payload: &[u8]) -> Option<Span> {
        resp::parse(payload).ok()?.span(1)
    }

    fn handle(&self, host: &mut impl Host, request: &Request) -> Outcome {
        let key = match resp::parse(&request.payload) {
            Ok(words) if words.get(0) == b"TALLY" && words.count() == 2 => words.bytes(1),
            _ => None,
        };
        let stroke = key.map(|key| stroke(host, &key));
        let mut head = Vec::new();
        let (mut version, mut command) = (None, Some(0));
        match stroke {
            Some(Ok((count, written))) => {
                resp::push_head(&mut head, b':', count);
                version = Some(written);
            }
            Some(Err(Fault::Denied)) => resp::push_error(&mut head, "not authorized"),
            Some(Err(Fault::Quota)) => resp::push_error(&mut head, "the quota has been exceeded"),
            Some(Err(Fault::Other(text))) => resp::push_error(&mut head, &text),
            None => {
                resp::push_error(&mut head, "syntax error");
                command = None;
            }
        }
        Outcome {
            reply: Frame {
                head,
                body: Body::None,
            },
            version,
            repeat: Repeat::Same,
            command,
        }
    }

    /// In the form of the standard policy, whose clients may watch a key of this one.
    fn notify(&self, change: &Change, dialect: Dialect) -> Notification {
        let name: String = change.key.iter().map(|it| format!("{it:02X}")).collect();
        let payload = match (change.event, dialect) {
            (Event::Set, _) => {
                let mut head = b"*4\r\n$6\r\nNOTIFY\r\n$3\r\nSET\r\n$5\r\nVALUE\r\n".to_vec();
                resp::push_head(&mut head, b'$', change.len.into());
                Frame {
                    head,
                    body: Body::Stored(Bytes::Owned(change.key.clone())),
                }
            }
            (_, Dialect::Sdk) => Frame {
                head: resp::request(&[b"NOTIFY", b"DELETE"]),
                body: Body::None,
            },
            _ => Frame {
                head: resp::request(&[b"NOTIFY", b"DEL"]),
                body: Body::None,
            },
        };
        Notification {
            topic_prefix: "clients/statestore/v1/FA9AE35F-2F64-47CD-9BFF-08E2B32A0FE8/".into(),
            topic_suffix: format!("/command/notify/{name}"),
            payload,
        }
    }
}

statehouse_policy::export!(Tally);

#[cfg(test)]
mod tests {
    use super::*;
    use statehouse_policy::testing::Table;

    #[test]
    fn tally_counts_strokes() {
        let mut table = Table::new(1_700_000_000_000);
        let request = Request {
            payload: resp::request(&[b"TALLY", b"beers"]),
            dialect: Dialect::Sdk,
            timestamp: None,
            fencing_token: None,
            client: None,
            now: 1_700_000_000_000,
        };
        assert_eq!(table.call(&Tally, &request).bytes, b":1\r\n");
        assert_eq!(table.call(&Tally, &request).bytes, b":2\r\n");
    }
}
