//! MQTT clients with sessions: a session outlives its connections, and a client sends requests
//! again until they are acknowledged.

use std::collections::VecDeque;
use std::sync::Arc;

use bytes::Bytes;
use statehouse_core::clock::Stamp;
use statehouse_core::request::Delivery;
use statehouse_core::store::Mode;
use statehouse_mqtt::Properties;
use statehouse_protocol::{ConnectionId, SessionId};
use statehouse_wal::simulation::Dice;

use crate::workload::{NewRequest, ReadSubject, Workload};

/// The payload and version of an answer.
pub(crate) type Response = (Bytes, Option<Stamp>);

/// A request that is not acknowledged yet, with its delivery state.
pub(crate) struct PendingRequest {
    /// The number among all requests of the run.
    pub(crate) id: u64,
    pub(crate) packet_id: u16,
    pub(crate) topic: &'static str,
    pub(crate) payload: Bytes,
    pub(crate) properties: Properties,
    /// The beginning of the command, for the trace.
    pub(crate) summary: String,
    /// The last connection that the request was sent over.
    pub(crate) last_connection: ConnectionId,
    /// How often the request was sent.
    pub(crate) send_count: u32,
    /// The last record of the step that executed the request, and the response, if a redelivery
    /// must get the same response.
    pub(crate) executed: Option<(u64, Response)>,
    /// The store remembers the request at least until this time.
    pub(crate) until_ms: u64,
    /// `executed` and `until_ms` of an earlier execution, if the request was executed again after
    /// its retention. A crash may lose the later execution and bring back this one.
    pub(crate) earlier_execution: Option<((u64, Response), u64)>,
    /// Whether a redelivery must get the same response, and the response that the client received.
    pub(crate) received: Option<(bool, Response)>,
    pub(crate) subject: ReadSubject,
}

/// A packet that arrives at a client.
pub(crate) enum Arrival {
    Answer {
        id: u64,
        repeatable: bool,
        response: Response,
    },
    Acknowledgement {
        id: u64,
        /// The number of the acknowledged copy.
        copy: u32,
    },
}

impl Arrival {
    /// Marks an answer to this request as not repeatable, because another execution may give
    /// another answer. Returns whether the answer was repeatable.
    pub(crate) fn supersede(&mut self, request: u64) -> bool {
        match self {
            Self::Answer { id, repeatable, .. } if *id == request => std::mem::take(repeatable),
            _ => false,
        }
    }
}

pub(crate) struct Client {
    pub(crate) name: Arc<str>,
    pub(crate) session: SessionId,
    pub(crate) connection: Option<ConnectionId>,
    pub(crate) in_flight: VecDeque<PendingRequest>,
    /// Whether the client sets DUP on redeliveries. Some clients do not.
    pub(crate) sets_dup: bool,
    /// Packets that arrived and were not read yet.
    pub(crate) inbox: VecDeque<Arrival>,
    next_packet_id: u16,
    /// Whether the client takes the lowest free packet identifier instead of the next one.
    reuses_packet_ids: bool,
    /// The last acknowledged request. Scripts send an identical one again.
    last_acknowledged: Option<NewRequest>,
    /// The last requests that were acknowledged to a foreign broker. It may redeliver them, because
    /// the acknowledgement of the broker may not have reached the client.
    pub(crate) acknowledged: VecDeque<PendingRequest>,
}

/// The maximum number of acknowledged requests that may be redelivered.
const ACKNOWLEDGED_MAX: usize = 4;

impl Client {
    pub(crate) fn new(index: usize, session: SessionId, dice: &mut Dice) -> Self {
        Self {
            name: format!("client-{index}").into(),
            session,
            connection: None,
            in_flight: VecDeque::new(),
            sets_dup: !dice.once_in(3),
            inbox: VecDeque::new(),
            next_packet_id: 1,
            reuses_packet_ids: dice.once_in(2),
            last_acknowledged: None,
            acknowledged: VecDeque::new(),
        }
    }

    /// Whether this is a client of a foreign broker.
    pub(crate) fn is_foreign(&self) -> bool {
        Mode::of_session(self.session) == Mode::Foreign
    }

    /// Puts an acknowledged request back in flight. Returns its index.
    pub(crate) fn reopen_acknowledged(&mut self, which: u64) -> Option<usize> {
        let connection = self.connection?;
        let count = self.acknowledged.len() as u64;
        let at = which.checked_rem(count)?;
        let mut pending = self.acknowledged.remove(at as usize)?;
        pending.last_connection = connection;
        self.in_flight.push_back(pending);
        Some(self.in_flight.len() - 1)
    }

    /// The index of the next request that was last sent over an earlier connection.
    pub(crate) fn next_to_resend(&self) -> Option<usize> {
        let connection = self.connection?;
        self.in_flight
            .iter()
            .position(|it| it.last_connection != connection)
    }

    /// Marks a request as sent. Returns how the store receives it.
    pub(crate) fn send(&mut self, at: usize) -> Delivery {
        let connection = self.connection.expect("connected");
        let dup = self.sets_dup && self.in_flight[at].send_count > 0;
        let foreign = self.is_foreign();
        let pending = &mut self.in_flight[at];
        // A second copy on the same connection always has DUP.
        let dup = dup || pending.last_connection == connection;
        pending.last_connection = connection;
        pending.send_count += 1;
        if foreign {
            // Only the identity of the request distinguishes redeliveries.
            return Delivery {
                session: self.session,
                connection: self.session.only_connection(),
                packet_id: 0,
                dup: true,
            };
        }
        Delivery {
            session: self.session,
            connection,
            packet_id: pending.packet_id,
            dup,
        }
    }

    /// Appends a new random request to those in flight.
    pub(crate) fn create_request(
        &mut self,
        id: u64,
        now_ms: u64,
        workload: Workload,
        dice: &mut Dice,
    ) {
        let packet_id = self.packet_id();
        // The store must be able to distinguish an identical new request from a redelivery. Without
        // DUP it needs a new packet identifier for that.
        let reuse = workload.identical_requests
            && !self.sets_dup
            && !self.reuses_packet_ids
            && dice.once_in(8);
        let request = match self.last_acknowledged.take().filter(|_| reuse) {
            Some(last) => last,
            None => NewRequest::random(&self.name, id, now_ms, workload, dice),
        };
        let NewRequest {
            topic,
            payload,
            properties,
            summary,
            subject,
        } = request;
        self.in_flight.push_back(PendingRequest {
            id,
            packet_id,
            topic,
            payload,
            properties,
            summary,
            subject,
            last_connection: ConnectionId(0),
            send_count: 0,
            executed: None,
            until_ms: 0,
            earlier_execution: None,
            received: None,
        });
    }

    fn packet_id(&mut self) -> u16 {
        if self.reuses_packet_ids {
            let used = |id: &u16| self.in_flight.iter().any(|it| it.packet_id == *id);
            return (1..).find(|id| !used(id)).expect("few are in flight");
        }
        self.next_packet_id += 1;
        self.next_packet_id - 1
    }

    /// Reads one packet from the inbox. Returns the request that it acknowledges to the client.
    pub(crate) fn read(&mut self) -> Option<PendingRequest> {
        match self.inbox.pop_front()? {
            Arrival::Answer {
                id,
                repeatable,
                response,
            } => {
                let pending = self.in_flight.iter_mut().find(|it| it.id == id)?;
                if repeatable && let Some((true, received)) = &pending.received {
                    assert_eq!(
                        *received, response,
                        "request {id} had another answer before"
                    );
                }
                pending.received = Some((repeatable, response));
                None
            }
            Arrival::Acknowledgement { id, copy } => {
                // A foreign broker distinguishes copies. A client only knows packet identifiers.
                let foreign = self.is_foreign();
                let matches =
                    |it: &PendingRequest| it.id == id && (!foreign || it.send_count == copy);
                let at = self.in_flight.iter().position(matches)?;
                let pending = self.in_flight.remove(at)?;
                // The PUBACK is written after the answer, on the same connection.
                assert!(
                    pending.received.is_some(),
                    "request {} was acknowledged before its answer",
                    pending.id
                );
                self.last_acknowledged = Some(NewRequest {
                    topic: pending.topic,
                    payload: pending.payload.clone(),
                    properties: pending.properties.clone(),
                    summary: pending.summary.clone(),
                    subject: pending.subject.clone(),
                });
                if self.is_foreign() {
                    self.acknowledged.truncate(ACKNOWLEDGED_MAX - 1);
                    self.acknowledged.push_front(pending);
                    return None;
                }
                Some(pending)
            }
        }
    }

    /// Marks all answers to a request as not repeatable, because another execution may give another
    /// answer. Returns whether one of them was repeatable.
    pub(crate) fn supersede(&mut self, request: u64) -> bool {
        let pending = self.in_flight.iter_mut().chain(&mut self.acknowledged);
        let received = pending
            .filter(|it| it.id == request)
            .filter_map(|it| it.received.as_mut())
            .fold(false, |promised, (repeatable, _)| {
                std::mem::take(repeatable) || promised
            });
        let arrivals = self.inbox.iter_mut();
        arrivals.fold(received, |promised, it| it.supersede(request) || promised)
    }

    /// Ends the connection. An embedded client loses its unread packets. Behind a foreign broker
    /// the connection is the store's own, so the packets that the broker holds for the client
    /// remain.
    pub(crate) fn disconnect(&mut self) -> Option<ConnectionId> {
        if !self.is_foreign() {
            self.inbox.clear();
        }
        self.connection.take()
    }

    /// Replaces the session with a new one. The requests of the old session are never sent again.
    pub(crate) fn begin_session(&mut self, session: SessionId) {
        self.disconnect();
        self.in_flight.clear();
        self.last_acknowledged = None;
        self.session = session;
    }
}
