//! SUBSCRIBE, UNSUBSCRIBE, and the retained messages for new subscriptions (sections 3.8 to 3.11).

use std::{borrow::Cow, cell::RefCell, mem, sync::Arc, time::Instant};

use bytes::Bytes;
use statehouse_protocol::ConnectionId;

use super::{Core, requester::Requester, session_at, share::delivery};
use crate::{
    Origin, QoS, ReasonCode, Refused, TopicCheck,
    codec::{self, Delivery, Filter, RetainHandling, Subscribe, Unsubscribe, Violation},
    limits::work,
    link::Link,
    retained::Entry,
    router::{SessionKey, Subscription},
    session::RetainedSearch,
    session_queue::Scope,
    topic,
};

/// The results of the filters of a SUBSCRIBE or UNSUBSCRIBE that were handled, if it has more than
/// one step.
#[derive(Debug, Default)]
pub(crate) struct FilterResults {
    reasons: Vec<ReasonCode>,
    searches: Vec<(Bytes, RetainedSearch)>,
}

impl Core {
    /// Handles a SUBSCRIBE, or one step of it; `results` has those of the steps before, and
    /// `filters_left` filters follow in later steps. The SUBACK is sent first, after the last step;
    /// [`continue_retained_searches`](Self::continue_retained_searches) sends the retained messages
    /// later. Fails if the client cannot take the SUBACK.
    pub(crate) fn subscribe(
        &mut self,
        key: SessionKey,
        connection: ConnectionId,
        subscribe: &Subscribe,
        results: &mut FilterResults,
        filters_left: usize,
    ) -> Result<(), Violation> {
        if !self.is_open(key, connection) {
            return Ok(());
        }
        let Some(origin) = self.session(key).and_then(|session| session.origin()) else {
            return Ok(());
        };
        let FilterResults { reasons, searches } = results;
        let filters = reasons.len() + subscribe.filters.len() + filters_left;
        self.check_answer_bytes(key, filters)?;
        self.work += work::SUBSCRIPTION * subscribe.filters.len() as u64;
        for filter in &subscribe.filters {
            match self.subscribe_one(key, &origin, filter, subscribe.subscription_id) {
                Ok((subscription, wants_retained)) => {
                    reasons.push(ReasonCode(subscription.qos as u8));
                    if wants_retained {
                        let search = RetainedSearch {
                            after: None,
                            newest: self.retained.newest(),
                            connection,
                            recorded: false,
                        };
                        searches.push((filter.filter.clone(), search));
                    }
                }
                Err((reason, limit)) => {
                    match reason {
                        ReasonCode::NOT_AUTHORIZED => {
                            self.count_refused(Refused::Subscribe, reason)
                        }
                        _ => self.report_refusal(key, Refused::Subscribe, reason, limit),
                    }
                    reasons.push(reason);
                }
            }
        }
        if filters_left > 0 {
            return Ok(());
        }
        let FilterResults { reasons, searches } = mem::take(results);
        self.send_when_durable(key, |out, version| {
            codec::suback(out, version, subscribe.packet_id, &reasons);
        });
        if let Some(session) = self.session(key) {
            for (filter, search) in searches {
                // The rules may have suspended the subscription between two steps.
                if session.subscriptions().active(&filter).is_some() {
                    session.begin_retained_search(filter, search);
                }
            }
        }
        Ok(())
    }

    /// Checks that the SUBACK or UNSUBACK for this many filters does not exceed the client's
    /// Maximum Packet Size. Must be called before any filter takes effect: the broker must send
    /// this packet [MQTT-3.8.4-1] [MQTT-3.10.4-4], and may discard only messages [MQTT-3.1.2-25].
    fn check_answer_bytes(&mut self, key: SessionKey, filters: usize) -> Result<(), Violation> {
        let link = self.session(key).and_then(|session| session.link.as_ref());
        let fits =
            |link: &Link| codec::reasons_bytes(link.version, filters) <= link.packet_bytes_max;
        if link.is_none_or(fits) {
            return Ok(());
        }
        Err(Violation {
            reason: ReasonCode::PACKET_TOO_LARGE,
            text: "the answer to so many topic filters exceeds the client's Maximum Packet Size",
        })
    }

    /// Adds or replaces a subscription, and says whether it is sent retained messages. Fails with
    /// the reason and, if a limit refuses it, that limit.
    fn subscribe_one(
        &mut self,
        key: SessionKey,
        origin: &Origin,
        filter: &Filter,
        id: Option<u32>,
    ) -> Result<(Subscription, bool), (ReasonCode, Option<&'static str>)> {
        let topics = topic::of_topics(&filter.filter);
        let shared = topic::is_shared(&filter.filter);
        let too_deep = topic::level_count(topics) > self.limits.topic_levels_max;
        if too_deep || topic::check_filter(&filter.filter).is_err() {
            return Err((ReasonCode::TOPIC_FILTER_INVALID, None));
        }
        // Must be asked under the lock, so that a recheck sees every subscription that the old
        // rules allowed.
        if !self.access.may_subscribe(origin, topics) {
            return Err((ReasonCode::NOT_AUTHORIZED, None));
        }
        let log_has_room = self.change_log.has_room();
        let Some(session) = session_at(&mut self.sessions, key) else {
            return Err((ReasonCode::UNSPECIFIED_ERROR, None));
        };
        let limit = session.subscription_limit(&filter.filter, &self.limits, log_has_room, true);
        if limit.is_some() {
            return Err((ReasonCode::QUOTA_EXCEEDED, limit));
        }
        let subscription = Subscription {
            qos: filter.qos,
            no_local: filter.no_local,
            retain_as_published: filter.retain_as_published,
            id,
        };
        let new = session.subscribe(&filter.filter, subscription, &mut self.change_log);
        self.router
            .subscribe(&filter.filter, key, subscription, true);
        let wants_retained = match filter.retain_handling {
            // A shared subscription is sent no retained messages (section 3.8.4).
            _ if shared => false,
            RetainHandling::Always => true,
            RetainHandling::IfNew => new,
            RetainHandling::Never => false,
        };
        Ok((subscription, wants_retained))
    }

    /// Sends the next retained messages for new subscriptions until the total work reaches
    /// `work_end`. Returns false if messages are left. Stops early, and returns true, if the client
    /// must first read what was sent.
    pub(crate) fn continue_retained_searches(
        &mut self,
        key: SessionKey,
        connection: ConnectionId,
        work_end: u64,
        now: Instant,
    ) -> bool {
        while self.is_open(key, connection)
            && let Some(session) = self.session(key)
            && let Some((filter, mut search)) = session.retained_searches.pop_first()
        {
            let client = session.client.clone();
            // These options may be newer than the search.
            let Some(subscription) = session.subscriptions().get(&filter) else {
                continue;
            };
            // The clones share their bytes, and queued messages count against the queue's limit.
            let retained = mem::take(&mut self.retained);
            // `None`: waiting for the client to read.
            let ended = loop {
                if self.work >= work_end {
                    break Some(false);
                }
                // A client with overlapping filters is sent each message once for each filter, at
                // the pace at which it reads.
                if !self.has_room_for_answers(key) {
                    break None;
                }
                let examined_max = 1 + (work_end - self.work) / work::RETAINED_EXAMINED;
                let step = retained.find(&filter, search.after.as_deref(), examined_max as usize);
                self.work += work::RETAINED_EXAMINED * step.examined as u64;
                let Some((topic, entry)) = step.at else {
                    break Some(true);
                };
                search.after = Some(topic.clone());
                if let Some(entry) = entry
                    && !was_sent_live(entry, &search, subscription.qos, connection)
                {
                    self.send_retained(key, &client, entry, &subscription, now);
                }
            };
            self.retained = retained;
            let session = session_at(&mut self.sessions, key);
            if ended != Some(true) {
                if let Some(session) = session {
                    session.retained_searches.insert(filter, search);
                    session.record_retained_searches(&mut self.change_log);
                }
                return ended.is_none();
            }
            if let Some(session) = session {
                session.end_retained_search(&filter, &search, &mut self.change_log);
            }
        }
        true
    }

    /// Whether the remaining retained messages wait for the client to read.
    pub(crate) fn has_retained_search(&mut self, key: SessionKey) -> bool {
        let session = self.session(key);
        session.is_some_and(|session| !session.retained_searches.is_empty())
    }

    fn send_retained(
        &mut self,
        key: SessionKey,
        client: &Arc<str>,
        entry: &Entry,
        subscription: &Subscription,
        now: Instant,
    ) {
        let message = &entry.message;
        if message.is_expired(now) || subscription.no_local && entry.is_from(client) {
            return;
        }
        let delivery = Delivery {
            retain: true,
            ..delivery(message, subscription, now)
        };
        // Retained messages own their bytes, so this clone copies nothing.
        let mut message = Cow::Owned(message.clone());
        let queueing = (Scope::Session, None, self.change_log.has_room());
        self.forward(key, &mut message, true, &delivery, queueing, now);
    }

    /// Suspends subscriptions that the client is not allowed at present, and resumes those that it
    /// is allowed again. They stay in the session, because a client that finds its session present
    /// does not subscribe again (section 3.2.2.1.1).
    ///
    /// Drops queued messages of forbidden subscriptions and those of the service that the client
    /// may no longer receive. Dropped messages of a shared subscription are sent to another session
    /// of the group.
    pub(super) fn apply_rules_to_subscriptions(
        &mut self,
        key: SessionKey,
        origin: &Origin,
        now: Instant,
    ) {
        let Some(session) = session_at(&mut self.sessions, key) else {
            return;
        };
        self.work += work::SUBSCRIPTION * session.subscriptions().len() as u64;
        let access = &*self.access;
        let own = session.subscriptions();
        let changed = own.filters().filter(|filter| {
            let topics = topic::of_topics(filter);
            match own.is_suspended(filter) {
                true => access.may_resume(origin, topics),
                false => !access.may_subscribe(origin, topics),
            }
        });
        let changed: Vec<_> = changed.cloned().collect();
        // The subscription that queued a message may have ended before, and others may have queued
        // it too. So it stays if the client may subscribe to its exact topic.
        let mut orphans = Vec::new();
        let queued = session.queue.counts().0;
        if queued > 0
            && let Some(check) = access.topics_to_keep(origin)
        {
            self.work += work::QUEUED_EXAMINED * queued as u64;
            let mut log = session.log(&mut self.change_log);
            let dropped;
            (dropped, orphans) = (session.queue).drop_forbidden(once_per_run(check), &mut log);
            self.counts.dropped += dropped as u64;
        }
        for filter in changed {
            let client = &*origin.client;
            let filter_text = &*String::from_utf8_lossy(&filter);
            let message = if let Some(subscription) = session.resume(&filter) {
                self.router.subscribe(&filter, key, subscription, true);
                "resumed a subscription that is allowed again"
            } else {
                session.suspend(&filter, &mut self.change_log);
                self.router.unsubscribe(&filter, key);
                "suspended a subscription that is not allowed"
            };
            tracing::info!(client, filter = filter_text, "{message}");
        }
        self.redistribute(orphans, Requester::UnderNewRules, now);
    }

    /// Handles an UNSUBSCRIBE, or one step of it, as [`subscribe`](Self::subscribe) does.
    pub(crate) fn unsubscribe(
        &mut self,
        key: SessionKey,
        connection: ConnectionId,
        unsubscribe: &Unsubscribe,
        results: &mut FilterResults,
        filters_left: usize,
    ) -> Result<(), Violation> {
        if !self.is_open(key, connection) {
            return Ok(());
        }
        let filters = results.reasons.len() + unsubscribe.filters.len() + filters_left;
        self.check_answer_bytes(key, filters)?;
        self.work += work::SUBSCRIPTION * unsubscribe.filters.len() as u64;
        for filter in &unsubscribe.filters {
            let existed = session_at(&mut self.sessions, key)
                .is_some_and(|session| session.unsubscribe(filter, &mut self.change_log));
            if existed {
                self.router.unsubscribe(filter, key);
            }
            results.reasons.push(if existed {
                ReasonCode::SUCCESS
            } else {
                ReasonCode::NO_SUBSCRIPTION_EXISTED
            });
        }
        if filters_left > 0 {
            return Ok(());
        }
        let reasons = mem::take(results).reasons;
        self.send_when_durable(key, |out, version| {
            codec::unsuback(out, version, unsubscribe.packet_id, &reasons);
        });
        Ok(())
    }
}

/// `check` that is asked once for equal topics in a row, as a queue often holds them.
fn once_per_run(check: TopicCheck<'_>) -> impl Fn(&[u8]) -> bool {
    let last = RefCell::new(None::<(Vec<u8>, bool)>);
    move |topic: &[u8]| {
        let mut last = last.borrow_mut();
        if let Some((of, answer)) = &*last
            && of[..] == *topic
        {
            return *answer;
        }
        let answer = check(topic);
        *last = Some((topic.to_vec(), answer));
        answer
    }
}

/// Whether the client got this retained message already, when it was published after the SUBSCRIBE.
/// A message that was published while the client was absent may have been dropped. So it is sent
/// again, unless it must not arrive twice (section 4.3.3).
fn was_sent_live(
    entry: &Entry,
    search: &RetainedSearch,
    subscribed: QoS,
    connection: ConnectionId,
) -> bool {
    let qos = entry.message.qos.min(subscribed);
    entry.number > search.newest && (search.connection == connection || qos == QoS::ExactlyOnce)
}
