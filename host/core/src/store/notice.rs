//! What a policy says, put together from the bytes of the table: answers and notifications.
//!
//! What enters: frames of a guest, and the changes of a request. What leaves: payloads and topics. Values go
//! from the table into them without passing through the guest.

use bytes::Bytes;

use super::transaction::Transaction;
use super::write::Change;
use crate::clock::Stamp;
use crate::limits;
use crate::policy::{self, Body, Call, Failure, Frame, Given, Instance};
use crate::request::Dialect;
use statehouse_protocol::Peer;

/// The longest topic that MQTT can carry (MQTT 5, section 1.5.4).
const TOPIC_BYTES_MAX: usize = 65_535;

/// One change, told to the watchers of one dialect.
#[derive(Debug, PartialEq, Eq)]
pub struct Notice {
    /// How it is told.
    pub dialect: Dialect,
    /// Its payload.
    pub payload: Bytes,
    /// The version of the change.
    pub version: Stamp,
    /// The watchers, each with the topic that is its own.
    pub to: Vec<(Peer, Bytes)>,
}

/// Lets one policy tell all watchers of a change, in a budget of its own; and what that burnt.
pub(super) fn told_by(
    policy: &mut Instance<Transaction>,
    transaction: Transaction,
    change: &Change,
) -> (Transaction, Result<Vec<Notice>, Failure>, u64) {
    let mut call = policy.begin(transaction, Bytes::copy_from_slice(change.key()));
    let notices = notices_of(&mut call, std::slice::from_ref(change));
    if let Err(failure) = &notices {
        call.discard(failure);
    }
    let burnt = call.burnt();
    (call.end(), notices, burnt)
}

/// Lets the policy put changes into words for everyone who watches them.
pub(super) fn notices_of(
    call: &mut Call<'_, Transaction>,
    changes: &[Change],
) -> Result<Vec<Notice>, Failure> {
    let mut notices = Vec::new();
    for change in changes {
        let mut speakers = [Dialect::Sdk, Dialect::Documents, Dialect::Preview]
            .map(|dialect| (dialect, Vec::new()));
        for (peer, spoken) in call.host().state().watches.of(change.key()) {
            if let Some((_, peers)) = speakers.iter_mut().find(|(it, _)| *it == spoken) {
                peers.push(peer.clone());
            }
        }
        for (dialect, peers) in speakers {
            if !peers.is_empty() {
                notices.push(notice(call, change, dialect, peers)?);
            }
        }
    }
    Ok(notices)
}

fn notice(
    call: &mut Call<'_, Transaction>,
    change: &Change,
    dialect: Dialect,
    peers: Vec<Peer>,
) -> Result<Notice, Failure> {
    let key = Bytes::copy_from_slice(change.key());
    let told = call.notify(
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
    // The value of this change, and not what a later one of the same request made of the key.
    let Frame { head, body } = told.payload;
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
                    "a notification with another key's value".into(),
                ));
            }
            Some(change.value())
        }
    };
    let payload = join(head, body)?;
    let (prefix, suffix) = (&told.topic_prefix, &told.topic_suffix);
    if [prefix, suffix]
        .iter()
        .any(|it| it.contains(['+', '#', '\0']))
    {
        return Err(no_topic());
    }
    let to = peers.into_iter().map(|peer| {
        let topic = topic(prefix, &peer.client, suffix)?;
        Ok((peer, topic))
    });
    let to = to.collect::<Result<_, Failure>>()?;
    Ok(Notice {
        dialect,
        payload,
        version: change.version(),
        to,
    })
}

/// `prefix`, the client id in upper-case hex (RFC 4648, section 8), `suffix`.
fn topic(prefix: &str, client: &str, suffix: &str) -> Result<Bytes, Failure> {
    const DIGITS: &[u8; 16] = b"0123456789ABCDEF";
    let length = prefix.len() + 2 * client.len() + suffix.len();
    if length > TOPIC_BYTES_MAX {
        return Err(no_topic());
    }
    let mut topic = Vec::with_capacity(length);
    topic.extend_from_slice(prefix.as_bytes());
    for byte in client.bytes() {
        let digits = [byte >> 4, byte & 15].map(|it| DIGITS[usize::from(it)]);
        topic.extend_from_slice(&digits);
    }
    topic.extend_from_slice(suffix.as_bytes());
    Ok(topic.into())
}

fn no_topic() -> Failure {
    Failure::Malformed("a topic that MQTT cannot carry".into())
}

/// The bytes of a reply: values go from the table to the answer without passing through the guest.
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

/// Head, then body, then CRLF where there is a body.
fn join(head: Vec<u8>, body: Option<&[u8]>) -> Result<Bytes, Failure> {
    if head.len() > limits::REPLY_HEAD_BYTES_MAX {
        return Err(Failure::Malformed(
            "a longer head than a reply may have".into(),
        ));
    }
    let Some(body) = body else {
        return Ok(Bytes::from(head));
    };
    let mut whole = Vec::with_capacity(head.len() + body.len() + 2);
    whole.extend_from_slice(&head);
    whole.extend_from_slice(body);
    whole.extend_from_slice(b"\r\n");
    Ok(Bytes::from(whole))
}
