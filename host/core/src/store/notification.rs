//! Builds the payloads and topics of responses and notifications from what the policy returns.
//!
//! Stored values are copied from the table into the payload without passing through the guest.

use bytes::Bytes;

use super::transaction::Transaction;
use super::watch::Watches;
use super::write::Change;
use crate::clock::Stamp;
use crate::limits;
use crate::policy::{self, Body, Call, Failure, Frame, Given, Instance};
use crate::request::Dialect;
use statehouse_protocol::Peer;
use statehouse_protocol::topics::notification_topic;

/// The longest topic that MQTT can carry (MQTT 5, section 1.5.4).
const TOPIC_BYTES_MAX: usize = 65_535;

/// One change, rendered for the watchers of one dialect.
#[derive(Debug, PartialEq, Eq)]
pub struct Notification {
    /// The dialect of the payload and the topics.
    pub dialect: Dialect,
    /// The payload.
    pub payload: Bytes,
    /// The version of the change.
    pub version: Stamp,
    /// The watchers, each with its own topic.
    pub to: Vec<(Peer, Bytes)>,
}

/// The watchers of one change, by dialect.
#[derive(Clone, Debug)]
pub(super) struct Recipients(Vec<(Dialect, Vec<Peer>)>);

impl Recipients {
    /// One client.
    pub(super) fn one(peer: &Peer, dialect: Dialect) -> Self {
        Self(vec![(dialect, vec![peer.clone()])])
    }

    /// The watchers of a key; `None` if it has none.
    fn of(watches: &Watches, key: &[u8]) -> Option<Self> {
        let watchers = watches.of(key);
        if watchers.is_empty() {
            return None;
        }
        let dialects = [Dialect::Sdk, Dialect::Documents, Dialect::Preview];
        let all = dialects.into_iter().filter_map(|dialect| {
            let peers = watchers.iter().filter(|(_, it)| *it == dialect);
            let peers: Vec<Peer> = peers.map(|(peer, _)| (*peer).clone()).collect();
            (!peers.is_empty()).then_some((dialect, peers))
        });
        Some(Self(all.collect()))
    }

    /// The changes that have watchers, each with these.
    pub(super) fn of_all<'a>(
        watches: &Watches,
        changes: impl Iterator<Item = &'a Change>,
    ) -> Vec<(Change, Self)> {
        if watches.is_empty() {
            return Vec::new();
        }
        let watched = |it: &Change| Some((it.clone(), Self::of(watches, it.key())?));
        changes.filter_map(watched).collect()
    }
}

/// Renders the notifications of one change with `policy`, under a fuel budget of its own. Returns
/// the fuel used as well.
pub(super) fn notify_as(
    policy: &mut Instance<Transaction>,
    transaction: Box<Transaction>,
    change: &Change,
    to: Recipients,
) -> (Box<Transaction>, Result<Vec<Notification>, Failure>, u64) {
    let mut call = policy.begin(transaction, Bytes::copy_from_slice(change.key()));
    let mut notifications = Vec::new();
    let rendered = notify(&mut call, change, to, &mut notifications);
    let notifications = rendered.map(|()| notifications);
    if let Err(failure) = &notifications {
        call.discard(failure);
    }
    let fuel_used = call.fuel_used();
    (call.end(), notifications, fuel_used)
}

/// Renders the notifications of a change, one for each dialect of its watchers.
pub(super) fn notify(
    call: &mut Call<'_, Transaction>,
    change: &Change,
    to: Recipients,
    notifications: &mut Vec<Notification>,
) -> Result<(), Failure> {
    for (dialect, peers) in to.0 {
        notifications.push(render(call, change, dialect, peers)?);
    }
    Ok(())
}

fn render(
    call: &mut Call<'_, Transaction>,
    change: &Change,
    dialect: Dialect,
    peers: Vec<Peer>,
) -> Result<Notification, Failure> {
    let key = Bytes::copy_from_slice(change.key());
    let rendered = call.notify(
        &key,
        policy::Change {
            event: change.event(),
            key: &key,
            version: change.version().into(),
            // Values are bounded far below 4 GiB.
            len: u32::try_from(change.value().len()).unwrap_or(u32::MAX),
        },
        dialect.into(),
    )?;
    // The value of this change: a later write of the same request may already have replaced it in
    // the table.
    let Frame { head, body } = rendered.payload;
    let given;
    let body = match body {
        Body::None => None,
        Body::Given(span) => {
            given = policy::slice(&key, span)?;
            Some(&given[..])
        }
        Body::Stored(given) => {
            if resolve(given, &key)? != key {
                return Err(Failure::Malformed(
                    "a notification with the value of another key".into(),
                ));
            }
            Some(change.value())
        }
    };
    let payload = join(head, body)?;
    let (prefix, suffix) = (&rendered.topic_prefix, &rendered.topic_suffix);
    if [prefix, suffix]
        .iter()
        .any(|it| it.contains(['+', '#', '\0']))
    {
        return Err(Failure::Malformed(
            "a topic that is not valid in MQTT".into(),
        ));
    }
    Ok(Notification {
        dialect,
        payload,
        version: change.version(),
        to: address(peers, prefix, suffix, &key)?,
    })
}

/// The topic of each watcher. Fails if the policy made a topic too long.
fn address(
    peers: Vec<Peer>,
    prefix: &str,
    suffix: &str,
    key: &[u8],
) -> Result<Vec<(Peer, Bytes)>, Failure> {
    let mut to = Vec::with_capacity(peers.len());
    for peer in peers {
        if let Some(topic) = topic(prefix, &peer.client, suffix) {
            to.push((peer, topic));
        } else if standard_topic_bytes(&peer.client, key) <= TOPIC_BYTES_MAX {
            return Err(Failure::Malformed(format!(
                "a topic longer than {TOPIC_BYTES_MAX} bytes"
            )));
        }
        // Otherwise a watched prefix covers a key that is too long for any topic. No client can
        // watch this key.
    }
    Ok(to)
}

/// The length of the topic on which the standard policy notifies a client about a key.
fn standard_topic_bytes(client: &str, key: &[u8]) -> usize {
    notification_topic("", b"").len() + 2 * (client.len() + key.len())
}

/// `prefix`, the client id in upper-case hex (RFC 4648, section 8), `suffix`; `None` if that is too
/// long.
fn topic(prefix: &str, client: &str, suffix: &str) -> Option<Bytes> {
    const DIGITS: &[u8; 16] = b"0123456789ABCDEF";
    let length = prefix.len() + 2 * client.len() + suffix.len();
    if length > TOPIC_BYTES_MAX {
        return None;
    }
    let mut topic = Vec::with_capacity(length);
    topic.extend_from_slice(prefix.as_bytes());
    for byte in client.bytes() {
        let digits = [byte >> 4, byte & 15].map(|it| DIGITS[usize::from(it)]);
        topic.extend_from_slice(&digits);
    }
    topic.extend_from_slice(suffix.as_bytes());
    Some(topic.into())
}

/// Builds the payload of a response. Stored values are copied from the table without passing
/// through the guest.
pub(super) fn splice(
    frame: Frame,
    payload: &Bytes,
    transaction: &mut Transaction,
) -> Result<Bytes, Failure> {
    let given;
    let body = match frame.body {
        Body::None => None,
        Body::Given(span) => {
            given = policy::slice(payload, span)?;
            Some(&given[..])
        }
        Body::Stored(given) => {
            let key = resolve(given, payload)?;
            let entry = transaction.entry(&key);
            let entry =
                entry.ok_or_else(|| Failure::Malformed("the value of an absent key".into()))?;
            Some(entry.value())
        }
    };
    join(frame.head, body)
}

fn resolve(given: Given, bytes: &Bytes) -> Result<Bytes, Failure> {
    match given {
        Given::Span(span) => policy::slice(bytes, span),
        Given::Owned(bytes) => Ok(Bytes::from(bytes)),
    }
}

/// The answer to nearly every write. It waits until the client acknowledges it, so it should take
/// no memory of its own.
const OK: &[u8] = b"+OK\r\n";

/// Concatenates the head and the body. A body is followed by CRLF.
fn join(head: Vec<u8>, body: Option<&[u8]>) -> Result<Bytes, Failure> {
    if head.len() > limits::REPLY_HEAD_BYTES_MAX {
        return Err(Failure::Malformed(format!(
            "a response or notification whose head has {} bytes; the maximum is {}",
            head.len(),
            limits::REPLY_HEAD_BYTES_MAX
        )));
    }
    let Some(body) = body else {
        return Ok(match &head[..] {
            OK => Bytes::from_static(OK),
            _ => Bytes::from(head),
        });
    };
    let mut whole = Vec::with_capacity(head.len() + body.len() + 2);
    whole.extend_from_slice(&head);
    whole.extend_from_slice(body);
    whole.extend_from_slice(b"\r\n");
    Ok(Bytes::from(whole))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn topic_that_the_policy_made_too_long_is_a_failure() {
        let client = "client";
        let addressed = |key: &[u8], suffix_bytes: usize| {
            let peers = vec![Peer::numbered(client, 1)];
            address(peers, "told/", &"x".repeat(suffix_bytes), key)
        };
        let longest = TOPIC_BYTES_MAX - "told/".len() - 2 * client.len();
        let to = addressed(b"key", longest).unwrap();
        assert_eq!((to.len(), to[0].1.len()), (1, TOPIC_BYTES_MAX));
        let refused = addressed(b"key", longest + 1).unwrap_err();
        assert!(refused.to_string().contains("65535 bytes"), "{refused}");
        // No policy could notify about this key.
        let room = TOPIC_BYTES_MAX - standard_topic_bytes(client, b"");
        assert!(addressed(&vec![b'k'; room / 2], longest + 1).is_err());
        let unnamed = addressed(&vec![b'k'; room / 2 + 1], longest + 1);
        assert_eq!(unnamed, Ok(vec![]));
    }
}
