//! One step of the store: an event in, effects out.

use bytes::{BufMut, Bytes, BytesMut};

use super::expiry;
use super::table::Table;
use super::transaction::{State, Transaction};
use super::watch::Peer;
use super::{Change, Quota};
use crate::clock::Stamp;
use crate::limits;
use crate::policy::{self, Body, Call, Failure, Frame, Given, Registry, Repeat};
use crate::request::{Dialect, Request};

/// The text of an answer whose policy failed (the protocol, section 4).
const INTERNAL_ERROR: &[u8] = b"-ERR internal error\r\n";

/// The longest topic that MQTT can carry (MQTT 5, section 1.5.4).
const TOPIC_BYTES_MAX: usize = 65_535;

/// What a step is about.
pub enum Event<'a> {
    /// A client asks.
    Request(&'a Request<'a>),
    /// A connection ended: its watches end too.
    Gone(&'a Peer),
    /// Nothing but time has passed.
    Sweep,
}

/// What a step did, beyond the state itself.
#[derive(Debug, Default)]
pub struct Effects {
    /// For the client that asked.
    pub answer: Option<Answer>,
    /// For the watchers of what had expired before this step began: they come before the answer.
    pub expired: Vec<Notice>,
    /// For the watchers of what changed, in order.
    pub notices: Vec<Notice>,
    /// How many policy calls failed.
    pub failures: u64,
}

/// An answer.
#[derive(Debug)]
pub struct Answer {
    /// Its payload.
    pub payload: Bytes,
    /// The version it is about.
    pub version: Option<Stamp>,
    /// What a redelivery of the request is owed.
    pub repeat: Repeat,
    /// Which of the policy's commands it was.
    pub command: Option<u16>,
}

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

/// The key table with everything that decides about it.
pub struct Store {
    /// Always there between steps; a step lends it to its transaction.
    state: Option<Box<State>>,
    registry: Registry<Transaction>,
    quota: Quota,
}

impl Store {
    /// An empty store under the policies of `registry`.
    pub fn new(registry: Registry<Transaction>, quota: Quota) -> Self {
        Self {
            state: Some(Box::default()),
            registry,
            quota,
        }
    }

    /// The state between steps.
    pub fn state(&self) -> &State {
        self.state
            .as_ref()
            .expect("every step puts the state back before it returns")
    }

    /// The policies.
    pub fn registry(&mut self) -> &mut Registry<Transaction> {
        &mut self.registry
    }

    /// When the next key expires, in the store's milliseconds.
    pub fn next_expiry_ms(&self) -> Option<u64> {
        next_expiry_ms(self.state())
    }

    /// Handles one event at `now_ms`, which must not lie below that of an earlier step.
    pub fn step(&mut self, event: Event<'_>, now_ms: u64) -> Effects {
        let mut effects = Effects::default();
        let mut state = self
            .state
            .take()
            .expect("every step puts the state back before it returns");
        // What has expired goes first, so that no quota counts it and its watchers hear of its end
        // before they hear of what comes after.
        if next_expiry_ms(&state).is_some_and(|expires_ms| expires_ms <= now_ms) {
            state = expiry::sweep(state, &mut self.registry, self.quota, now_ms, &mut effects);
        }
        self.state = Some(match event {
            Event::Request(request) => self.handle(state, request, now_ms, &mut effects),
            Event::Gone(peer) => {
                state.watches.gone(peer);
                state
            }
            Event::Sweep => state,
        });
        effects
    }

    fn handle(
        &mut self,
        state: Box<State>,
        request: &Request<'_>,
        now_ms: u64,
        effects: &mut Effects,
    ) -> Box<State> {
        let transaction = Transaction::begin(state, self.quota, now_ms, request);
        let mut call = self
            .registry
            .active()
            .begin(transaction, request.payload.clone());
        let decided = decide(&mut call, request, now_ms);
        if let Err(failure) = &decided {
            call.discard(failure);
        }
        let transaction = call.end();
        match decided {
            Ok((answer, notices)) => {
                effects.answer = Some(answer);
                effects.notices.extend(notices);
                transaction.commit()
            }
            Err(failure) => {
                let policy = self.registry.active().policy();
                if policy.counters.may_log(now_ms) {
                    let client = request.peer.client.escape_debug();
                    tracing::error!(%policy, digest = %policy.digest, %client, %failure, "a policy failed; the request changed nothing");
                }
                effects.failures += 1;
                let payload = Bytes::from_static(INTERNAL_ERROR);
                effects.answer = Some(Answer {
                    payload,
                    version: None,
                    // It changed nothing, so it may well run again.
                    repeat: Repeat::Free,
                    command: None,
                });
                transaction.roll_back()
            }
        }
    }
}

/// When the next key expires, visible or hidden.
fn next_expiry_ms(state: &State) -> Option<u64> {
    let tables = [&state.table, &state.hidden];
    tables.into_iter().filter_map(Table::next_expiry_ms).min()
}

/// Lets the policy decide and tell, in one budget.
fn decide(
    call: &mut Call<'_, Transaction>,
    request: &Request<'_>,
    now_ms: u64,
) -> Result<(Answer, Vec<Notice>), Failure> {
    let outcome = call.handle(policy::Request {
        payload: request.payload,
        dialect: request.dialect.into(),
        timestamp: request.timestamp,
        fencing_token: request.fencing_token,
        client: request.peer.known(),
        now: now_ms,
    })?;
    let transaction = call.host();
    let payload = splice(outcome.reply, request.payload, transaction)?;
    let answer = Answer {
        payload,
        version: outcome.version.map(Stamp::from),
        repeat: outcome.repeat,
        command: outcome.command,
    };
    if transaction.changes().is_empty() || transaction.state().watches.is_empty() {
        return Ok((answer, Vec::new()));
    }
    let changes = transaction.changes().to_vec();
    Ok((answer, notices_of(call, &changes)?))
}

/// Lets the policy put changes into words for everyone who watches them.
pub(super) fn notices_of(
    call: &mut Call<'_, Transaction>,
    changes: &[Change],
) -> Result<Vec<Notice>, Failure> {
    let mut notices = Vec::new();
    for change in changes {
        for dialect in [Dialect::Sdk, Dialect::Documents, Dialect::Preview] {
            let watches = &call.host().state().watches;
            let peers: Vec<Peer> = watches
                .of(&change.key)
                .filter(|(_, spoken)| *spoken == dialect)
                .map(|(peer, _)| peer.clone())
                .collect();
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
    let told = call.notify(
        &change.key,
        policy::Change {
            event: change.event,
            key: &change.key,
            version: change.version.into(),
            // Values are bounded far below 4 GiB.
            len: u32::try_from(change.value.len()).unwrap_or(u32::MAX),
        },
        dialect.into(),
    )?;
    // The value of this change, and not what a later one of the same request made of the key.
    let Frame { head, body } = told.payload;
    let body = match body {
        Body::None => None,
        Body::Given(span) => Some(policy::slice(&change.key, span)?),
        Body::Stored(given) => {
            if *resolve(given, &change.key)? != *change.key {
                return Err(Failure::Malformed(
                    "a notification with another key's value".into(),
                ));
            }
            Some(change.value.clone())
        }
    };
    let payload = join(head, body)?;
    let mut to = Vec::with_capacity(peers.len());
    for peer in peers {
        let topic = topic(&told.topic_prefix, &peer.client, &told.topic_suffix)?;
        to.push((peer, topic));
    }
    Ok(Notice {
        dialect,
        payload,
        version: change.version,
        to,
    })
}

/// `prefix`, the client id in upper-case hex (RFC 4648, section 8), `suffix`.
fn topic(prefix: &str, client: &str, suffix: &str) -> Result<Bytes, Failure> {
    const DIGITS: &[u8; 16] = b"0123456789ABCDEF";
    let length = prefix.len() + 2 * client.len() + suffix.len();
    let valid = |part: &str| !part.contains(['+', '#', '\0']);
    if length > TOPIC_BYTES_MAX || !valid(prefix) || !valid(suffix) {
        return Err(Failure::Malformed("a topic that MQTT cannot carry".into()));
    }
    let mut topic = BytesMut::with_capacity(length);
    topic.put_slice(prefix.as_bytes());
    for byte in client.bytes() {
        topic.put_u8(DIGITS[usize::from(byte >> 4)]);
        topic.put_u8(DIGITS[usize::from(byte & 15)]);
    }
    topic.put_slice(suffix.as_bytes());
    Ok(topic.freeze())
}

/// The bytes of a reply: values go from the table to the answer without passing through the guest.
fn splice(frame: Frame, payload: &Bytes, transaction: &Transaction) -> Result<Bytes, Failure> {
    let body = match frame.body {
        Body::None => None,
        Body::Given(span) => Some(policy::slice(payload, span)?),
        Body::Stored(given) => {
            let key = resolve(given, payload)?;
            let value = transaction.value(&key);
            Some(value.ok_or_else(|| Failure::Malformed("the value of an absent key".into()))?)
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
fn join(head: Vec<u8>, body: Option<Bytes>) -> Result<Bytes, Failure> {
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
    whole.extend_from_slice(&body);
    whole.extend_from_slice(b"\r\n");
    Ok(Bytes::from(whole))
}

impl From<Dialect> for policy::Dialect {
    fn from(dialect: Dialect) -> Self {
        match dialect {
            Dialect::Sdk => Self::Sdk,
            Dialect::Documents => Self::Documents,
            Dialect::Preview => Self::Preview,
        }
    }
}
