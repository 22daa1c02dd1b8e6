//! The current connection of a session, and the state that ends with it.
//!
//! Acknowledgements to the client must leave in the order of its PUBLISHes (section 4.6), although
//! requests are acknowledged later than ordinary messages.

use std::{collections::VecDeque, net::IpAddr, sync::Arc, time::Instant};

use statehouse_protocol::ConnectionId;

use crate::{
    Identity, ProtocolVersion, ReasonCode,
    barrier::Barrier,
    codec::{self, Violation, packet_type as kind},
    exchanges::Exchanges,
    limits::SPARE_ENTRIES_MAX,
    output::Output,
    persist::SessionLog,
};

#[derive(Debug)]
pub(crate) struct Link {
    pub(crate) connection: ConnectionId,
    pub(crate) version: ProtocolVersion,
    pub(crate) identity: Arc<Identity>,
    pub(crate) output: Arc<Output>,
    pub(crate) address: IpAddr,
    pub(crate) since: Instant,
    /// How many QoS 1 and 2 messages may be unacknowledged.
    pub(crate) window: usize,
    /// How many messages sent on this connection are unacknowledged.
    pub(crate) unacknowledged: usize,
    pub(crate) packet_bytes_max: usize,
    /// Whether acknowledgements may carry a Reason String.
    pub(crate) problem_info: bool,
    /// Packet ids that a resumed session must redeliver before any new message.
    pub(crate) resend: VecDeque<u16>,
    pub(crate) receive_max: usize,
    /// Whether CONNECT asked for a session that outlives the connection.
    pub(crate) asked_for_expiry: bool,
    /// QoS 2 messages whose PUBREC left on this connection and whose PUBREL has not arrived.
    pub(crate) unreleased: usize,
    pub(crate) acks: Acks,
}

/// The acknowledgements that have not left, in the order of the PUBLISHes.
#[derive(Debug, Default)]
pub(crate) struct Acks {
    pending: VecDeque<PendingAck>,
    /// The sequence of the first of these.
    from: u64,
}

/// The place of an acknowledgement among those of a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct AckPosition {
    pub(crate) connection: ConnectionId,
    pub(crate) sequence: u64,
}

#[derive(Debug)]
struct PendingAck {
    packet_id: u16,
    exactly_once: bool,
    answer: Option<Answer>,
    /// The acknowledgement must not leave before this batch is durable.
    barrier: Barrier,
}

#[derive(Debug)]
struct Answer {
    reason: ReasonCode,
    text: Option<Box<str>>,
    /// The number of the last message queued before the answer. It must leave before the
    /// acknowledgement, and so must all earlier ones.
    last_queued: u64,
}

impl Link {
    /// Reserves the place of an acknowledgement for a QoS 1 or 2 PUBLISH. Exceeding the Receive
    /// Maximum is a violation (section 3.3.4).
    pub(crate) fn expect_ack(
        &mut self,
        packet_id: u16,
        exactly_once: bool,
    ) -> Result<u64, Violation> {
        if self.is_receive_max_reached() {
            let text = "the unacknowledged messages exceed the Receive Maximum";
            return Err(Violation {
                reason: ReasonCode::RECEIVE_MAXIMUM_EXCEEDED,
                text,
            });
        }
        self.acks.pending.push_back(PendingAck {
            packet_id,
            exactly_once,
            answer: None,
            barrier: Barrier::NONE,
        });
        Ok(self.acks.from + self.acks.pending.len() as u64 - 1)
    }

    /// Whether the client has as many unacknowledged messages as the Receive Maximum allows. A
    /// client of MQTT 3.1.1 does not know it, and may send its PUBRELs behind any number of
    /// messages.
    pub(crate) fn is_receive_max_reached(&self) -> bool {
        let unreleased = match self.version {
            ProtocolVersion::V311 => 0,
            ProtocolVersion::V5 => self.unreleased,
        };
        self.acks.pending.len() + unreleased >= self.receive_max
    }

    /// Sets the answer of a pending acknowledgement, unless it has one.
    pub(crate) fn answer(
        &mut self,
        sequence: u64,
        reason: ReasonCode,
        text: Option<&str>,
        last_queued: u64,
        barrier: Barrier,
    ) {
        self.delay_ack(sequence, barrier);
        let problem_info = self.problem_info;
        if let Some(ack) = self.pending_ack(sequence) {
            ack.answer.get_or_insert_with(|| {
                let text = text.filter(|_| problem_info).map(Into::into);
                Answer {
                    reason,
                    text,
                    last_queued,
                }
            });
        }
    }

    /// Makes a pending acknowledgement wait for a batch.
    pub(crate) fn delay_ack(&mut self, sequence: u64, barrier: Barrier) {
        if let Some(ack) = self.pending_ack(sequence) {
            ack.barrier = ack.barrier.join(barrier);
        }
    }

    fn pending_ack(&mut self, sequence: u64) -> Option<&mut PendingAck> {
        let index = usize::try_from(sequence.checked_sub(self.acks.from)?).ok()?;
        self.acks.pending.get_mut(index)
    }

    /// Sends the answered acknowledgements at the front, stopping at the first that must still
    /// wait. `first_waiting` is the number of the first queued message that the acknowledgements
    /// behind it must not overtake. Returns true if the writer must be woken.
    pub(crate) fn send_acks(
        &mut self,
        first_waiting: Option<u64>,
        received: &mut Exchanges,
        log: &mut SessionLog<'_>,
    ) -> bool {
        let mut wake = false;
        while let Some(ack) = self.acks.pending.front() {
            let Some(answer) = ack
                .answer
                .as_ref()
                .filter(|answer| first_waiting.is_none_or(|first| answer.last_queued < first))
            else {
                break;
            };
            let (packet_id, reason) = (ack.packet_id, answer.reason);
            let packet_type = if ack.exactly_once {
                kind::PUBREC
            } else {
                kind::PUBACK
            };
            wake |= log.change_log.put(&self.output, ack.barrier, |out| {
                codec::ack(
                    out,
                    self.version,
                    packet_type,
                    packet_id,
                    reason,
                    answer.text.as_deref(),
                    self.packet_bytes_max,
                );
            });
            if ack.exactly_once && received.pubrec_sent(packet_id) {
                self.unreleased += 1;
            }
            self.acks.pending.pop_front();
            self.acks.from += 1;
        }
        if self.acks.pending.is_empty() {
            self.acks.pending.shrink_to(SPARE_ENTRIES_MAX);
        }
        wake
    }
}
