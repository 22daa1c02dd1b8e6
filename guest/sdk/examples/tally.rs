//! A policy with one command, which adds a stroke to a key and counts them.

use statehouse_policy::{
    Access, Body, Bytes, Change, Dialect, Fault, Frame, Host, Info, Notification, Outcome, Policy,
    Repeat, Request, Span, resp,
};

/// `TALLY key`: adds a stroke to the value of a key; returns the number of strokes.
struct Tally;

impl Tally {
    fn stroke(host: &mut impl Host, key: &Bytes) -> Result<u64, Fault> {
        host.head(key, Access::Write)?;
        let mut strokes = host.load(key, 0, 1000)?.unwrap_or_default();
        strokes.push(b'|');
        let count = strokes.len() as u64;
        host.put(key, &Bytes::Owned(strokes), None, None, None)?;
        Ok(count)
    }
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
            Ok(arguments) if arguments.count() == 2 => arguments.bytes(1),
            _ => None,
        };
        let mut head = Vec::new();
        match key.map(|key| Self::stroke(host, &key)) {
            Some(Ok(count)) => resp::push_head(&mut head, b':', count),
            Some(Err(_)) => resp::push_error(&mut head, "no"),
            None => resp::push_error(&mut head, "syntax error"),
        }
        let reply = Frame {
            head,
            body: Body::None,
        };
        Outcome {
            reply,
            version: None,
            repeat: Repeat::Same,
            command: Some(0),
        }
    }

    fn notify(&self, _change: &Change, _dialect: Dialect) -> Notification {
        unreachable!("no command of this policy watches anything")
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
