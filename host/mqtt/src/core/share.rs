//! Delivers messages of shared subscriptions to one session of a group (section 4.8.2).
//!
//! The members of a group take turns. Members that can be sent the message at once are preferred,
//! then connected members, then disconnected ones. If no member has room for the message, no member
//! is disconnected. A publisher with MQTT 5 gets 0x97, unless another subscriber has the message;
//! otherwise the message is dropped. A message stays with its session until that session ends; see
//! [`SessionQueue::into_orphans`](crate::session_queue::SessionQueue::into_orphans).

use std::{borrow::Cow, time::Instant};

use bytes::Bytes;

use super::{
    Core,
    publish::Source,
    requester::Requester,
    session_at,
    window::{make_room, remaining_s},
};
use crate::{
    Message, QoS,
    codec::{self, Delivery},
    group::Readiness,
    limits::work,
    router::{Choice, Match, Subscription},
    session::Session,
    session_queue::{Orphan, Scope},
};

impl Core {
    /// Sends a message to one session of each group. Returns the numbers of groups that got it, and
    /// of those without room.
    pub(super) fn share_among(
        &mut self,
        groups: &[Bytes],
        message: &mut Cow<'_, Message>,
        source: Source,
        has_room: bool,
        now: Instant,
    ) -> (usize, usize) {
        let needs_record = message.qos > QoS::AtMostOnce;
        let (mut served, mut full) = (0, 0);
        let mut groups = groups.iter().peekable();
        while let Some(group) = groups.next() {
            let last = groups.peek().is_none();
            match self.share(group, message, last, source.requester, has_room, now) {
                Err(Unshared::QueuesFull | Unshared::LogFull) if needs_record => full += 1,
                Err(Unshared::Memberless) => {
                    served += 1;
                    self.counts.dropped += u64::from(needs_record);
                }
                _ => served += 1,
            }
        }
        (served, full)
    }

    /// Sends a routed message to one session of a group. The last receiver takes the message itself
    /// instead of a copy.
    fn share(
        &mut self,
        group: &Bytes,
        message: &mut Cow<'_, Message>,
        last: bool,
        requester: Requester,
        has_room: bool,
        now: Instant,
    ) -> Result<(), Unshared> {
        let (key, subscription) =
            self.choose(group, Choice::Next, message, requester, has_room, now)?;
        let delivery = delivery(message, &subscription, now);
        let queueing = (Scope::Session, Some(group), has_room);
        self.forward(key, message, last, &delivery, queueing, now);
        Ok(())
    }

    /// Sends undelivered messages of shared subscriptions to other sessions of their groups.
    ///
    /// The queue does not record which request a message answers, so access is checked as for a
    /// requester that has ended.
    pub(super) fn redistribute(
        &mut self,
        orphans: Vec<Orphan>,
        requester: Requester,
        now: Instant,
    ) {
        for Orphan { filter, message } in orphans {
            let has_room = self.change_log.has_room();
            let is_lost = message.is_expired(now) || {
                let message = &mut Cow::Owned(message);
                self.share(&filter, message, true, requester, has_room, now)
                    .is_err()
            };
            self.counts.dropped += u64::from(is_lost);
        }
    }

    /// Whether a group gets no message while the log has no room.
    pub(super) fn needs_log(
        &mut self,
        group: &Bytes,
        message: &Message,
        requester: Requester,
        now: Instant,
    ) -> bool {
        let chosen = self.choose(group, Choice::Peek, message, requester, false, now);
        chosen == Err(Unshared::LogFull)
    }

    /// Chooses the next member in turn among those with the best readiness for the message.
    /// `log_has_room` is the answer of the log.
    fn choose(
        &mut self,
        group: &Bytes,
        choice: Choice,
        message: &Message,
        requester: Requester,
        log_has_room: bool,
        now: Instant,
    ) -> Result<Match, Unshared> {
        let Self {
            router,
            sessions,
            limits,
            change_log,
            counts,
            access,
            ..
        } = self;
        let mut unshared = Unshared::Memberless;
        let (chosen, asked) = router.choose(group, choice, |(key, subscription)| {
            if !requester.may_reach(*key, &message.topic, sessions, &**access) {
                return None;
            }
            let session = session_at(sessions, *key)?;
            let delivery = delivery(message, subscription, now);
            let ids = size_of_val(delivery.subscription_ids);
            let cost_bytes = message.cost_bytes() + ids + group.len();
            let ready = readiness(session, message, &delivery)?;
            let is_free = ready == Readiness::Now && delivery.qos == QoS::AtMostOnce;
            // A full log may exclude a durable member, but another member may need no record.
            let kept = session.is_durable() && delivery.qos > QoS::AtMostOnce;
            if kept && !log_has_room {
                unshared = Unshared::LogFull;
                return None;
            }
            let has_room = is_free
                || make_room(
                    session,
                    Scope::Session,
                    cost_bytes,
                    limits,
                    change_log,
                    counts,
                    now,
                );
            if !has_room && unshared == Unshared::Memberless {
                unshared = Unshared::QueuesFull;
            }
            has_room.then_some(ready)
        });
        self.work += work::GROUP_MEMBER * asked as u64;
        chosen.ok_or(unshared)
    }
}

/// Why a group gets no message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Unshared {
    /// It has no member that may ever get it: QoS 0 messages are not kept for disconnected clients
    /// (section 4.3.1).
    Memberless,
    /// No member has room in its queue.
    QueuesFull,
    /// The log has no room for a member that would have it.
    LogFull,
}

/// The options with which a message is sent for one subscription.
pub(super) fn delivery<'a>(
    message: &Message,
    subscription: &'a Subscription,
    now: Instant,
) -> Delivery<'a> {
    Delivery {
        qos: message.qos.min(subscription.qos),
        dup: false,
        retain: message.retain && subscription.retain_as_published,
        packet_id: 0,
        subscription_ids: subscription.id.as_slice(),
        expiry_s: remaining_s(message, now),
    }
}

/// How well a session can take a message, if it has room for it. Returns `None` if it cannot take
/// it at all.
fn readiness(session: &Session, message: &Message, delivery: &Delivery<'_>) -> Option<Readiness> {
    let at_most_once = delivery.qos == QoS::AtMostOnce;
    let link = session.link.as_ref().filter(|_| session.is_present());
    let Some(link) = link else {
        // A closing session without expiry ends with its connection, so it cannot keep the message.
        let is_kept = session.expiry_s() > 0 && !at_most_once;
        return is_kept.then_some(Readiness::Absent);
    };
    // Section 4.8.2 allows another member to receive a message that is too large for one member.
    let packet_bytes = codec::publish_bytes(link.version, message, delivery);
    if packet_bytes > link.packet_bytes_max {
        return None;
    }
    let at_once = session.queue.is_queue_empty()
        && link.resend.is_empty()
        && (at_most_once || link.unacknowledged < link.window)
        && link.output.has_room(packet_bytes);
    Some(if at_once {
        Readiness::Now
    } else {
        Readiness::Later
    })
}
