//! Decodes packets of the read buffer, and decides what to do with each PUBLISH.

use std::time::{Duration, Instant};

use bytes::BytesMut;

use super::{
    Dispatch, FORBIDDEN, TOO_MANY, TOO_MANY_TOGETHER, Turn,
    held_packet::{detach, is_immediate},
};
use crate::{
    Claim, ReasonCode,
    codec::{self, Packet, Publish, Violation},
    topic,
};

impl Dispatch {
    /// Decodes a bounded number of packets from the buffer.
    pub(super) fn fill(&mut self, buffer: &mut BytesMut, now: Instant) -> Result<Turn, Violation> {
        self.needs_no_answer = true;
        self.detached &= self.paused;
        for _ in 0..self.packets_max {
            let Some((mut packet, claim)) = self.decode(buffer, now)? else {
                return Ok(Turn::Drained);
            };
            self.needs_no_answer &= matches!(packet, Packet::Puback(_) | Packet::Pubcomp(_));
            if self.paused && is_immediate(&packet) {
                self.immediate.push_back((packet, claim));
            } else {
                if self.detached {
                    detach(&mut packet);
                }
                self.packets.push_back(packet, claim);
            }
        }
        Ok(Turn::More)
    }

    fn decode(
        &mut self,
        buffer: &mut BytesMut,
        now: Instant,
    ) -> Result<Option<(Packet, Claim)>, Violation> {
        let Some(mut packet) = codec::decode(buffer, self.bounds)? else {
            return Ok(None);
        };
        let claim = match &mut packet {
            Packet::Publish(publish) => {
                self.aliases.resolve(publish)?;
                publish.expires = expires(publish, now);
                let is_repeated = publish.dup && self.repetitions_left > 0;
                self.repetitions_left -= u16::from(is_repeated);
                let is_allowed = (self.publishes.as_ref()).is_none_or(|it| match is_repeated {
                    true => it.allows_repeated(now),
                    false => it.allows(now),
                });
                if is_allowed {
                    let claim = self.claim(&publish.topic);
                    self.limit_total_rate(claim, now, is_repeated)
                } else {
                    TOO_MANY
                }
            }
            _ => Claim::Route,
        };
        Ok(Some((packet, claim)))
    }

    fn claim(&self, name: &[u8]) -> Claim {
        if topic::level_count(name) > self.topic_levels_max {
            return Claim::Refuse(
                ReasonCode::TOPIC_NAME_INVALID,
                "the topic name has too many levels",
            );
        }
        match self.service.claim(name) {
            Claim::Route if !self.access.may_publish(&self.origin, name) => FORBIDDEN,
            claim => claim,
        }
    }

    /// Applies the rate limit of all clients to a PUBLISH that is not refused anyway. Otherwise a
    /// client that may publish nothing could use up the limit. Repeated messages count, but are not
    /// refused, and do not use the limit ahead of time: other clients share it.
    fn limit_total_rate(&self, claim: Claim, now: Instant, is_repeated: bool) -> Claim {
        match claim {
            Claim::Refuse(..) => claim,
            Claim::Take | Claim::Route => {
                match self.broker.publishes().allows(now) || is_repeated {
                    true => claim,
                    false => TOO_MANY_TOGETHER,
                }
            }
        }
    }
}

fn expires(publish: &Publish, now: Instant) -> Option<Instant> {
    now.checked_add(Duration::from_secs(
        publish.properties.message_expiry_s?.into(),
    ))
}
