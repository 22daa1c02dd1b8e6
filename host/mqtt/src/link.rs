//! The connection that a session has at the moment: what dies with it.
//!
//! Above all the acknowledgements that it owes: they leave in the order in which the PUBLISHes came (section 4.6), though
//! requests are settled later than ordinary messages.

use std::{collections::VecDeque, sync::Arc};

use crate::{
    Identity, ReasonCode,
    codec::{self, Violation, packet_type as kind},
    exchanges::Exchanges,
    gate::BatchNumber,
    limits::SPARE_ENTRIES_MAX,
    output::Output,
    persist::Tape,
};

/// One connection, as the core sees it.
#[derive(Debug)]
pub(crate) struct Link {
    pub(crate) connection: u64,
    pub(crate) identity: Arc<Identity>,
    pub(crate) output: Arc<Output>,
    /// QoS 1 and 2 messages that may be unacknowledged.
    pub(crate) window: usize,
    /// Those sent over this connection that are.
    pub(crate) unacknowledged: usize,
    pub(crate) packet_bytes_max: usize,
    /// Whether acknowledgements may carry a Reason String.
    pub(crate) problem_info: bool,
    /// What a resumed session has to send again before anything new.
    pub(crate) resend: VecDeque<u16>,
    pub(crate) receive_max: usize,
    /// QoS 2 messages whose PUBREC left over this connection and whose PUBREL has not come.
    pub(crate) unreleased: usize,
    acks: VecDeque<OwedAck>,
    /// The sequence of the first of `acks`.
    acks_from: u64,
}

#[derive(Debug)]
struct OwedAck {
    packet_id: u16,
    exactly_once: bool,
    answer: Option<Answer>,
    /// It leaves after this batch was released.
    told: BatchNumber,
}

#[derive(Debug)]
struct Answer {
    reason: ReasonCode,
    text: Option<Box<str>>,
    /// Messages queued before it; it leaves after them.
    after: u64,
}

/// What a link is made of.
#[derive(Debug)]
pub(crate) struct LinkOptions {
    pub(crate) window: u16,
    pub(crate) packet_bytes_max: u32,
    pub(crate) problem_info: bool,
    pub(crate) receive_max: u16,
    pub(crate) resend: VecDeque<u16>,
}

impl Link {
    pub(crate) fn new(
        connection: u64,
        identity: Arc<Identity>,
        output: Arc<Output>,
        options: LinkOptions,
    ) -> Self {
        Self {
            connection,
            identity,
            output,
            window: options.window.into(),
            unacknowledged: 0,
            packet_bytes_max: options.packet_bytes_max as usize,
            problem_info: options.problem_info,
            resend: options.resend,
            receive_max: options.receive_max.into(),
            unreleased: 0,
            acks: VecDeque::new(),
            acks_from: 0,
        }
    }

    /// A PUBLISH with QoS 1 or 2 came: its acknowledgement takes its place in the order. More than the Receive Maximum
    /// is a violation (section 3.3.4).
    pub(crate) fn owe(&mut self, packet_id: u16, exactly_once: bool) -> Result<u64, Violation> {
        if self.acks.len() + self.unreleased >= self.receive_max {
            let text = "more messages are unacknowledged than the Receive Maximum allows";
            return Err(Violation {
                reason: ReasonCode::RECEIVE_MAXIMUM_EXCEEDED,
                text,
            });
        }
        self.acks.push_back(OwedAck {
            packet_id,
            exactly_once,
            answer: None,
            told: 0,
        });
        Ok(self.acks_from + self.acks.len() as u64 - 1)
    }

    /// Fills in an acknowledgement that is owed; the first answer counts.
    pub(crate) fn answer(
        &mut self,
        sequence: u64,
        reason: ReasonCode,
        text: Option<&str>,
        after: u64,
        told: BatchNumber,
    ) {
        self.hold_back(sequence, told);
        let problem_info = self.problem_info;
        if let Some(ack) = self.owed(sequence) {
            ack.answer.get_or_insert_with(|| {
                let text = text.filter(|_| problem_info).map(Into::into);
                Answer {
                    reason,
                    text,
                    after,
                }
            });
        }
    }

    /// An acknowledgement that is owed depends on a batch.
    pub(crate) fn hold_back(&mut self, sequence: u64, told: BatchNumber) {
        if let Some(ack) = self.owed(sequence) {
            ack.told = ack.told.max(told);
        }
    }

    fn owed(&mut self, sequence: u64) -> Option<&mut OwedAck> {
        let index = usize::try_from(sequence.checked_sub(self.acks_from)?).ok()?;
        self.acks.get_mut(index)
    }

    /// Sends every acknowledgement that is next in order, settled, and not before messages that were queued earlier
    /// (`popped` of them have left the queue) unless these wait for the client itself. True: the writer has to be woken.
    pub(crate) fn send_acks(
        &mut self,
        popped: u64,
        blocked: bool,
        received: &mut Exchanges,
        tape: &mut Tape<'_>,
    ) -> bool {
        let mut wake = false;
        while let Some(ack) = self.acks.front() {
            let Some(answer) = ack
                .answer
                .as_ref()
                .filter(|answer| blocked || popped >= answer.after)
            else {
                break;
            };
            let (packet_id, reason) = (ack.packet_id, answer.reason);
            let packet_type = if ack.exactly_once {
                kind::PUBREC
            } else {
                kind::PUBACK
            };
            wake |= tape.put(&self.output, ack.told, |out| {
                codec::ack(
                    out,
                    packet_type,
                    packet_id,
                    reason,
                    answer.text.as_deref(),
                    self.packet_bytes_max,
                );
            });
            if ack.exactly_once && received.leaves(packet_id) {
                self.unreleased += 1;
            }
            self.acks.pop_front();
            self.acks_from += 1;
        }
        if self.acks.is_empty() {
            self.acks.shrink_to(SPARE_ENTRIES_MAX);
        }
        wake
    }
}
