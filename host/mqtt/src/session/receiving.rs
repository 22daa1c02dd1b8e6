//! QoS 2 messages that a client sends to the broker (section 4.3.3).

use super::{Arrival, Session};
use crate::{
    Limits, ReasonCode, barrier::Barrier, change::Part, codec::Violation, exchanges::Known,
    limits::STATE_BYTES_FLOOR, link::AckPosition, persist::ChangeLog,
};

impl Session {
    /// Answered QoS 2 messages from the client, by packet id.
    pub(crate) fn answered(&self) -> impl Iterator<Item = (u16, ReasonCode)> {
        self.exchanges.answered()
    }

    /// Restores recovered QoS 2 exchanges.
    pub(crate) fn restore_received(&mut self, found: impl IntoIterator<Item = (u16, ReasonCode)>) {
        self.exchanges.restore(found);
        self.count_state();
    }

    /// The QoS 2 PUBLISH with this packet id that has no PUBREL yet.
    pub(crate) fn exchange(&mut self, packet_id: u16) -> Known<'_> {
        self.exchanges.get(packet_id)
    }

    /// Handles a QoS 2 PUBLISH on the current connection.
    pub(crate) fn receive(
        &mut self,
        packet_id: u16,
        limits: &Limits,
        change_log: &mut ChangeLog,
    ) -> Result<Arrival, Violation> {
        // The answer that an earlier connection got may not be durable yet.
        let barrier = self.log(change_log).barrier_for_all_changes();
        let Some(link) = &mut self.link else {
            return Ok(Arrival::Repeated);
        };
        let last_queued = self.queue.last_number();
        let full = self.exchanges.is_full();
        match self.exchanges.get(packet_id) {
            Known::Nothing if full => {
                let text = "too many QoS 2 messages are waiting for their PUBREL";
                Err(Violation {
                    reason: ReasonCode::RECEIVE_MAXIMUM_EXCEEDED,
                    text,
                })
            }
            Known::Nothing => {
                let sequence = link.expect_ack(packet_id, true)?;
                let more = self.exchanges.growth_bytes();
                let max = limits.state_bytes_total_max;
                if more > 0 && !self.state.fits(more, max, STATE_BYTES_FLOOR) {
                    return Ok(Arrival::Refused(sequence));
                }
                let connection = link.connection;
                let position = AckPosition {
                    connection,
                    sequence,
                };
                self.exchanges.begin(packet_id, position);
                self.count_state();
                Ok(Arrival::New(sequence))
            }
            Known::Answered(reason) => {
                let sequence = link.expect_ack(packet_id, true)?;
                link.answer(sequence, reason, None, last_queued, barrier);
                Ok(Arrival::Repeated)
            }
            Known::Pending(entry) => {
                // One pending PUBREC answers both messages of this connection.
                if entry.pubrec.connection != link.connection {
                    entry.pubrec = AckPosition {
                        connection: link.connection,
                        sequence: link.expect_ack(packet_id, true)?,
                    };
                }
                Ok(Arrival::Repeated)
            }
        }
    }

    /// Answers a QoS 2 PUBLISH after `barrier` is durable. An error frees the packet id (section
    /// 4.3.3).
    pub(crate) fn acknowledge_received(
        &mut self,
        packet_id: u16,
        publish: AckPosition,
        reason: ReasonCode,
        text: Option<&str>,
        barrier: Barrier,
        change_log: &mut ChangeLog,
    ) {
        let mut log = self.log(change_log);
        let Some(pubrec) = self.exchanges.answer(packet_id, publish, reason) else {
            return;
        };
        let mut barrier = barrier;
        if !reason.is_error() {
            log.write(Part::Received { packet_id, reason });
            barrier = barrier.join(log.barrier_for_this_batch());
        }
        self.count_state();
        self.answer(pubrec, reason, text, barrier);
    }

    /// Handles a PUBREL. Returns false if no answered message has this packet id.
    pub(crate) fn release_received(&mut self, packet_id: u16, change_log: &mut ChangeLog) -> bool {
        let Some(counted) = self.exchanges.release(packet_id) else {
            return false;
        };
        self.log(change_log).write(Part::Completed(packet_id));
        if let Some(link) = self.link.as_mut().filter(|_| counted) {
            link.unreleased -= 1;
        }
        self.count_state();
        true
    }
}
