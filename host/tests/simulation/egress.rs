//! The egress of the store: production's response gate between the store and the clients, and the
//! journal in front of the log.
//!
//! Invariant: no output may leave before the record that it depends on is durable, or a crash could
//! revoke what a client has observed.

use statehouse_protocol::ConnectionId;
use statehouse_protocol::SessionId;
use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex};

use statehouse::server::ResponseGate;
use statehouse::transport::{Outbound, Transport};
use statehouse_core::clock::Stamp;
use statehouse_core::log::{Journal, LogPosition};
use statehouse_core::store::{Effects, Notification};
use statehouse_mqtt::{Message, QoS};
use statehouse_wal::{Log, Room};

use crate::client::{Arrival, Response};

/// The log as the journal of the recorder.
pub(crate) struct LogJournal(pub(crate) Arc<Log>);

impl Journal for LogJournal {
    fn keeps(&self) -> bool {
        true
    }

    fn append(&self, records: &[&[u8]], urgent: bool) -> LogPosition {
        let appended = match urgent {
            true => self.0.append_urgent(records),
            false => self.0.append(records),
        };
        appended.expect("small records")
    }

    fn released(&self) -> LogPosition {
        self.0.released()
    }

    fn persisted(&self, _urgent: bool) -> &'static str {
        "disk"
    }

    fn has_room(&self) -> bool {
        self.0.room() == Room::Plenty
    }

    fn promise(&self) -> String {
        String::new()
    }
}

/// The answer to a request, and the data for its checks when it leaves.
pub(crate) struct PendingAnswer {
    /// The last record that the answer depends on. It must be durable before the answer leaves.
    pub(crate) rests_on: u64,
    /// The store's clock if the answer is repeatable.
    pub(crate) clock: Stamp,
    pub(crate) client: usize,
    pub(crate) session: SessionId,
    /// The connection that the response gate keeps in order.
    pub(crate) destination: ConnectionId,
    /// The connection that the request arrived on. The PUBACK is sent on it.
    pub(crate) connection: ConnectionId,
    pub(crate) id: u64,
    pub(crate) copy: u32,
    /// Whether a redelivery must get the same answer.
    pub(crate) repeatable: bool,
    /// Whether the request must be durable before its answer leaves, even in interval mode.
    pub(crate) urgent: bool,
    pub(crate) response: Response,
}

enum Output {
    Answer(Box<PendingAnswer>),
    Acknowledgement {
        client: usize,
        session: SessionId,
        connection: ConnectionId,
        id: u64,
        copy: u32,
    },
    Notification {
        record: u64,
        notification: NotificationId,
    },
}

/// Identifies the notification of a change to a client. No two changes have the same version.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct NotificationId {
    pub(crate) client: Arc<str>,
    pub(crate) version: Stamp,
}

/// An output that left the store.
pub(crate) struct Released {
    /// No crash may lose this record from now on.
    pub(crate) observed_record: u64,
    /// All later versions must be above this one, even after a crash.
    pub(crate) observed_version: Stamp,
    /// The client, session and connection, and what arrives there.
    pub(crate) arrival: Option<(usize, SessionId, ConnectionId, Arrival)>,
    pub(crate) notification: Option<NotificationId>,
}

/// The response gate and its outputs. The gate gets only the numbers of outputs, and decides in
/// which order they leave.
#[derive(Default)]
pub(crate) struct Egress {
    gate: ResponseGate,
    waiting: BTreeMap<u64, (ConnectionId, Output)>,
    last_number: u64,
    /// The last number that left, by destination.
    last_left: HashMap<ConnectionId, u64>,
}

/// Records the numbers that the gate releases.
#[derive(Default)]
struct RecordingTransport(Mutex<Vec<u64>>);

impl Transport for RecordingTransport {
    fn deliver(&self, ready: &mut dyn FnMut(&mut Vec<Outbound>)) {
        let mut out = Vec::new();
        loop {
            ready(&mut out);
            if out.is_empty() {
                break;
            }
            for out in out.drain(..) {
                let Outbound::Response(message, _) = out else {
                    panic!("only answers are pushed");
                };
                let number = message.payload[..].try_into().expect("a number");
                self.0
                    .lock()
                    .expect("one thread")
                    .push(u64::from_be_bytes(number));
            }
        }
    }
}

impl Egress {
    /// Queues the outputs of a step in the order of production: the notifications of expired keys,
    /// the answer, the notifications of the request, the PUBACK. Returns their number without the
    /// PUBACK.
    pub(crate) fn push(
        &mut self,
        position: LogPosition,
        effects: &Effects,
        record: u64,
        answer: Option<PendingAnswer>,
    ) -> u64 {
        let mut all = Vec::new();
        all.extend(outputs_of(&effects.expired, record));
        let acknowledgement = answer.as_ref().map(|answer| {
            let acknowledgement = Output::Acknowledgement {
                client: answer.client,
                session: answer.session,
                connection: answer.connection,
                id: answer.id,
                copy: answer.copy,
            };
            (answer.destination, acknowledgement)
        });
        let answer = answer.map(|answer| (answer.destination, Output::Answer(Box::new(answer))));
        all.extend(answer);
        all.extend(outputs_of(&effects.notifications, record));
        let count = all.len() as u64;
        all.extend(acknowledgement);
        let mut outputs = self.gate.begin(position, ConnectionId(0));
        for (destination, output) in all {
            self.last_number += 1;
            self.waiting.insert(self.last_number, (destination, output));
            let number = self.last_number.to_be_bytes().to_vec();
            let message = Message::new("out", number, QoS::AtLeastOnce);
            outputs.push(destination, Outbound::Response(message, None));
        }
        outputs.end();
        count
    }

    /// Marks the waiting answers to a request as not repeatable, because the request will be
    /// handled as a new one.
    pub(crate) fn supersede(&mut self, request: u64) {
        for (_, output) in self.waiting.values_mut() {
            if let Output::Answer(answer) = output
                && answer.id == request
            {
                answer.repeatable = false;
            }
        }
    }

    /// Releases the outputs that may leave up to a log position, and checks that they may.
    pub(crate) fn release(
        &mut self,
        position: LogPosition,
        durable: u64,
        always: bool,
    ) -> Vec<Released> {
        let transport = RecordingTransport::default();
        self.gate.release(position, &transport);
        let mut released = Vec::new();
        for number in transport.0.into_inner().expect("one thread") {
            let (destination, output) = self.waiting.remove(&number).expect("it leaves once");
            let before = self.last_left.insert(destination, number).unwrap_or(0);
            assert!(before < number, "out of order for connection {destination}");
            released.push(release(output, durable, always));
        }
        released
    }
}

/// The outputs of notifications, each with its destination.
fn outputs_of(
    notifications: &[Notification],
    record: u64,
) -> impl Iterator<Item = (ConnectionId, Output)> {
    notifications.iter().flat_map(move |notification| {
        notification.to.iter().map(move |(peer, _)| {
            let notification = NotificationId {
                client: peer.client.clone(),
                version: notification.version,
            };
            let output = Output::Notification {
                record,
                notification,
            };
            (peer.connection, output)
        })
    })
}

fn release(output: Output, durable: u64, always: bool) -> Released {
    let nothing = Released {
        observed_record: 0,
        observed_version: Stamp::default(),
        arrival: None,
        notification: None,
    };
    match output {
        Output::Notification {
            record,
            notification,
        } if always => {
            assert!(
                record <= durable,
                "a notification of record {record} left, durable is {durable}"
            );
            Released {
                observed_record: record,
                observed_version: notification.version,
                notification: Some(notification),
                ..nothing
            }
        }
        Output::Notification { notification, .. } => Released {
            notification: Some(notification),
            ..nothing
        },
        Output::Acknowledgement {
            client,
            session,
            connection,
            id,
            copy,
        } => Released {
            arrival: Some((
                client,
                session,
                connection,
                Arrival::Acknowledgement { id, copy },
            )),
            ..nothing
        },
        Output::Answer(answer) => release_answer(*answer, durable, always),
    }
}

fn release_answer(answer: PendingAnswer, durable: u64, always: bool) -> Released {
    let PendingAnswer {
        id,
        repeatable,
        response,
        rests_on,
        clock,
        client,
        session,
        connection,
        urgent,
        ..
    } = answer;
    let promised = always || urgent;
    if promised {
        assert!(
            rests_on <= durable,
            "the answer to {id} depends on record {rests_on}, durable is {durable}"
        );
    }
    let version = response.1.unwrap_or_default();
    let arrival = Arrival::Answer {
        id,
        repeatable,
        response,
    };
    Released {
        observed_record: if promised { rests_on } else { 0 },
        observed_version: match (always, promised) {
            (true, _) => clock.max(version),
            (false, true) => version,
            _ => Stamp::default(),
        },
        arrival: Some((client, session, connection, arrival)),
        notification: None,
    }
}
