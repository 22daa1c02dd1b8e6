//! Messages of shared subscriptions: to one session of a group (section 4.8.2).
//!
//! The members of a group take turns: those first to whom a message can be sent at once, then those who are connected, then
//! those whose sessions keep it. Where nobody of the group can take it the message is lost, and nobody is disconnected for
//! that. A message stays with its session for as long as that lasts; see [`Outbox::into_orphans`](crate::outbox::Outbox) for
//! what becomes of it then.

use std::{borrow::Cow, time::Instant};

use bytes::Bytes;

use super::{
    Core,
    answers::Answers,
    publish::kept,
    session_at,
    window::{make_room, remaining_s},
};
use crate::{
    Message, QoS,
    codec::{self, Delivery},
    group::Readiness,
    limits::work,
    outbox::{Orphan, Queued, Scope, Shared},
    router::{Match, Subscription},
    session::Session,
};

impl Core {
    /// A routed message to one session of a group. Where it is the last to get it, it gets the message itself.
    pub(super) fn share(
        &mut self,
        group: &Bytes,
        message: &mut Cow<'_, Message>,
        last: bool,
        answers: Answers,
        now: Instant,
    ) {
        let Some((key, subscription)) = self.choose(group, message, answers, now) else {
            // Nobody waits for a QoS 0 message to absent clients (section 4.3.1).
            self.counts.dropped += u64::from(message.qos > QoS::AtMostOnce);
            return;
        };
        let delivery = delivery(message, &subscription, now);
        self.work += work::delivery(message.payload.len());
        if delivery.qos == QoS::AtMostOnce && self.send_at_once(key, message, &delivery, now) {
            return;
        }
        let shared = Shared {
            filter: group.clone(),
            qos: message.qos,
            retain: message.retain,
        };
        self.enqueue(
            key,
            Queued {
                message: kept(message, last, &delivery),
                subscription_ids: delivery.subscription_ids.into(),
                scope: Scope::Session,
                shared: Some(Box::new(shared)),
            },
            now,
        );
    }

    /// What sessions will not get goes to others of their groups.
    pub(super) fn hand_over(&mut self, orphans: Vec<Orphan>, now: Instant) {
        for Orphan { filter, message } in orphans {
            if message.is_expired(now) {
                self.counts.dropped += 1;
            } else {
                // Whether it is an answer, and to whom, is no longer known.
                let message = &mut Cow::Owned(message);
                self.share(&filter, message, true, Answers::Ended, now);
            }
        }
    }

    /// The member of a group whose turn it is, among those that can take the message best.
    fn choose(
        &mut self,
        group: &Bytes,
        message: &Message,
        answers: Answers,
        now: Instant,
    ) -> Option<Match> {
        let Self {
            router,
            sessions,
            limits,
            recorder,
            counts,
            access,
            ..
        } = self;
        let (chosen, asked) = router.choose(group, |(key, subscription)| {
            if !answers.may_reach(*key, &message.topic, sessions, &**access) {
                return None;
            }
            let session = session_at(sessions, *key)?;
            let delivery = delivery(message, subscription, now);
            let ids = size_of_val(delivery.subscription_ids);
            let cost_bytes = message.cost_bytes() + ids + group.len();
            let ready = readiness(session, message, &delivery)?;
            let is_free = ready == Readiness::Now && delivery.qos == QoS::AtMostOnce;
            // No room in the log for one member may be no matter for another.
            let kept = session.is_durable() && delivery.qos > QoS::AtMostOnce;
            let has_room = is_free
                || (!kept || recorder.has_room())
                    && make_room(
                        session,
                        Scope::Session,
                        cost_bytes,
                        limits,
                        recorder,
                        counts,
                        now,
                    );
            has_room.then_some(ready)
        });
        self.work += work::GROUP_MEMBER * asked as u64;
        chosen
    }
}

/// How a message goes to a member of a group.
fn delivery<'a>(message: &Message, subscription: &'a Subscription, now: Instant) -> Delivery<'a> {
    Delivery {
        qos: message.qos.min(subscription.qos),
        dup: false,
        retain: message.retain && subscription.retain_as_published,
        packet_id: 0,
        subscription_ids: subscription.id.as_slice(),
        expiry_s: remaining_s(message, now),
    }
}

/// How well a session can take a message, if it has room for it. None: not at all.
fn readiness(session: &Session, message: &Message, delivery: &Delivery<'_>) -> Option<Readiness> {
    let at_most_once = delivery.qos == QoS::AtMostOnce;
    let link = session.link.as_ref().filter(|_| session.is_present());
    let Some(link) = link else {
        // One that ends with its connection is only waiting for that.
        let is_kept = session.expiry_s() > 0 && !at_most_once;
        return is_kept.then_some(Readiness::Absent);
    };
    // The section lets the others have what is too large for one of them.
    let packet_bytes = codec::publish_bytes(message, delivery);
    if packet_bytes > link.packet_bytes_max {
        return None;
    }
    let at_once = session.outbox.is_queue_empty()
        && link.resend.is_empty()
        && (at_most_once || link.unacknowledged < link.window)
        && link.output.has_room(packet_bytes);
    Some(if at_once {
        Readiness::Now
    } else {
        Readiness::Later
    })
}
