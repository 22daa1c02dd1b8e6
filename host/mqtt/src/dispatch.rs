//! Dispatches the packets of one connection in their order. Does no I/O.
//!
//! The read buffer comes in. Packets go to the core, and PUBLISHes that the service claims go to
//! the service as requests. Requests of one read are handed over together. Acknowledgements and
//! pings between them are handled at once. Any other packet must wait until the requests before it
//! were handed over.
//!
//! Dispatch pauses while too much output waits for the client, or the service takes no requests.
//! Then these packets and all behind them wait here, and only acknowledgements and pings are
//! handled. If these may be behind more packets than are kept, the first packets do not wait any
//! longer.

mod decoding;
mod held_packet;
mod relief;
mod topic_aliases;
mod waiting;

use std::{collections::VecDeque, sync::Arc, time::Instant};

use bytes::BytesMut;
use held_packet::{copy, is_immediate, request_bytes};
use topic_aliases::TopicAliases;
use waiting::WaitingPackets;

use crate::{
    Access, Broker, Claim, Message, Origin, ProtocolVersion, ReasonCode, Refused, Request, Service,
    Token,
    broker::Guard,
    codec::{self, Auth, Bounds, Packet, Publish, Violation, packet_type as kind},
    core::{Accepted, Begun, FilterResults},
    limits::{FILTERS_PER_STEP, REASON_TEXT_BYTES_MAX, SPARE_ENTRIES_MAX, WORK_PER_TURN_MAX, work},
    nagle::Nagle,
    rate_limit::RateLimit,
    router::SessionKey,
};

/// The answer to a PUBLISH above the client's rate limit.
const TOO_MANY: Claim = Claim::Refuse(
    ReasonCode::QUOTA_EXCEEDED,
    "this client exceeds its limit of PUBLISHes per second",
);

/// The answer to a PUBLISH above the rate limit of all clients together.
const TOO_MANY_TOGETHER: Claim = Claim::Refuse(
    ReasonCode::QUOTA_EXCEEDED,
    "all clients together exceed the limit of PUBLISHes per second",
);

/// The answer to a PUBLISH that the access control does not allow.
const FORBIDDEN: Claim = Claim::Refuse(
    ReasonCode::NOT_AUTHORIZED,
    "this client may not publish to this topic",
);

/// How one turn ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Turn {
    /// The buffer holds no complete packet.
    Drained,
    /// There may be more packets; other connections must have their turns first.
    More,
    /// Like `More`, and this turn used up its work limit.
    Cut,
    /// Requests wait until the client or the service can take more ([`Dispatch::held_bytes`]).
    Paused,
    /// The client re-authenticates ([`Dispatch::take_auth`]); later packets wait for the result.
    Authenticate,
    /// The connection is over: by DISCONNECT of either side.
    Over,
}

/// Reads the packets of one connection.
pub(crate) struct Dispatch {
    broker: Broker,
    service: Arc<dyn Service>,
    access: Arc<dyn Access>,
    session: SessionKey,
    origin: Origin,
    bounds: Bounds,
    packets_max: usize,
    topic_levels_max: usize,
    aliases: TopicAliases,
    /// None while no rate limit for clients was in force.
    publishes: Option<Arc<RateLimit>>,
    /// How many PUBLISHes the client of a resumed session may repeat beyond the rate limits.
    repetitions_left: u16,
    /// Packets that were decoded but not handled.
    packets: WaitingPackets,
    /// What the buffer held behind `packets`: how the turn ends once these are handled.
    behind: Result<Turn, Violation>,
    requests: Vec<Request>,
    /// The memory of `requests`.
    requests_bytes: usize,
    /// Whether a DISCONNECT or a violation was handled: packets behind it do not count.
    is_over: bool,
    /// Whether the last turn ended with [`Turn::Paused`].
    paused: bool,
    /// Bytes of packets that may wait while paused.
    held_bytes_max: usize,
    /// Whether the connection may keep more, while packets of all connections use up their limit.
    may_hold_more: bool,
    /// Whether waiting packets own their memory. A slice would pin a whole read buffer.
    detached: bool,
    /// Acknowledgements and pings that came behind waiting packets. Nothing more is decoded until
    /// all are handled.
    immediate: VecDeque<(Packet, Claim)>,
    /// The results of the filters of the SUBSCRIBE or UNSUBSCRIBE whose rest is the next packet.
    filter_results: FilterResults,
    auth: Option<Auth>,
    nagle: Nagle,
    /// Whether the last read contains nothing that needs an answer.
    needs_no_answer: bool,
}

impl Dispatch {
    /// Uses the limits that were sent to the client.
    pub(crate) fn new(broker: Broker, accepted: &Accepted) -> Self {
        let limits = &*accepted.limits;
        Self {
            service: broker.service().clone(),
            access: broker.access().clone(),
            session: accepted.session,
            origin: accepted.origin.clone(),
            bounds: Bounds {
                version: accepted.version,
                packet_bytes_max: limits.packet_bytes_max,
                filters_max: limits.filters_per_packet_max,
            },
            packets_max: limits.packets_per_turn_max.max(1),
            topic_levels_max: limits.topic_levels_max,
            aliases: TopicAliases::new(&accepted.account, limits),
            publishes: None,
            repetitions_left: match accepted.is_resumed {
                true => limits.receive_max,
                false => 0,
            },
            packets: WaitingPackets::default(),
            behind: Ok(Turn::Drained),
            requests: Vec::new(),
            requests_bytes: 0,
            is_over: false,
            paused: false,
            held_bytes_max: limits.paused_bytes_max(),
            may_hold_more: true,
            detached: false,
            immediate: VecDeque::new(),
            filter_results: FilterResults::default(),
            auth: None,
            nagle: Nagle::default(),
            needs_no_answer: false,
            broker,
        }
    }

    /// Handles packets of the buffer, up to the number and the work allowed in one turn.
    pub(crate) fn turn(&mut self, buffer: &mut BytesMut, now: Instant) -> Turn {
        if self.must_fill() {
            if self.publishes.is_none() {
                self.publishes = self.broker.publishes_of(&self.origin.client, now);
            }
            if let Some(publishes) = &self.publishes {
                publishes.set_per_second(self.broker.publishes_per_second_max());
            }
            self.behind = self.fill(buffer, now);
        }
        let mut handled = self.handle(now);
        self.paused = handled == Ok(Some(Turn::Paused));
        if self.paused && !self.accepts_input() && !self.has_more_to_decode() {
            handled = self.relieve(now).map(Some);
        }
        debug_assert!(self.are_counts_right());
        self.packets.trim(self.paused);
        if self.immediate.is_empty() {
            self.immediate.shrink_to(SPARE_ENTRIES_MAX);
        }
        match handled.and_then(|turn| turn.map_or(self.behind, Ok)) {
            // Acknowledgements may be among the packets that are still in the buffer.
            Ok(Turn::Paused) if self.has_more_to_decode() => Turn::More,
            Ok(turn) => turn,
            Err(violation) => {
                self.is_over = true;
                self.broker.lock().close_after_violation(
                    self.session,
                    self.origin.connection,
                    violation,
                );
                Turn::Over
            }
        }
    }

    /// Ends the connection. A DISCONNECT that was received counts even if it waits behind other
    /// packets, or the broker would publish a will that the client has withdrawn (section 3.14.4).
    /// The other packets are discarded: without acknowledgements there may never be room for them.
    pub(crate) fn end(mut self, buffer: &mut BytesMut) {
        if self.is_over {
            return;
        }
        let waiting = std::mem::take(&mut self.packets).into_packets();
        let behind = std::iter::from_fn(|| match self.behind {
            Ok(_) => codec::decode(buffer, self.bounds).ok().flatten(),
            Err(_) => None,
        });
        let disconnect = waiting.chain(behind).find_map(|packet| match packet {
            Packet::Disconnect(disconnect) => Some(disconnect),
            _ => None,
        });
        if let Some(disconnect) = disconnect {
            let (key, connection) = (self.session, self.origin.connection);
            // A violation changes nothing, since the connection ends anyway.
            _ = (self.broker.lock()).client_disconnects(key, connection, disconnect);
        }
    }

    /// The memory of waiting packets while paused, in bytes.
    pub(crate) fn held_bytes(&self) -> usize {
        match self.paused {
            true => self.packets.bytes() + self.requests_bytes,
            false => 0,
        }
    }

    /// Whether the counts are those of all waiting packets.
    fn are_counts_right(&self) -> bool {
        let requests = self.requests.iter().map(request_bytes);
        self.packets.are_counts_right() && self.requests_bytes == requests.sum::<usize>()
    }

    /// Sets whether the total of all connections has room for more waiting packets.
    pub(crate) fn set_may_hold_more(&mut self, may: bool) {
        self.may_hold_more = may;
    }

    /// Whether dispatch is paused but still decodes packets: acknowledgements behind waiting
    /// requests make room for answers.
    pub(crate) fn accepts_input(&self) -> bool {
        self.decodes_while_paused() && self.may_hold_more
    }

    fn decodes_while_paused(&self) -> bool {
        self.paused && self.behind.is_ok() && self.held_bytes() < self.held_bytes_max
    }

    /// Whether the buffer may hold further packets that a paused connection decodes.
    fn has_more_to_decode(&self) -> bool {
        self.decodes_while_paused() && self.behind == Ok(Turn::More)
    }

    /// Whether the turn begins with packets of the buffer. A violation stays until the packets
    /// before it are handled: the buffer does not hold it any more, so it would be lost.
    fn must_fill(&self) -> bool {
        let is_empty = self.packets.is_empty() && self.behind.is_ok();
        self.immediate.is_empty() && (is_empty && !self.paused || self.decodes_while_paused())
    }

    /// Whether to send a TCP acknowledgement for the last read at once, since no answer carries it.
    /// Call once for each read.
    pub(crate) fn needs_quick_ack(&mut self, now: Instant) -> bool {
        self.nagle.read(now, self.needs_no_answer)
    }

    /// The AUTH packet of a re-authentication.
    pub(crate) fn take_auth(&mut self) -> Option<Auth> {
        self.auth.take()
    }

    /// How the turn ends; `None` if all packets were handled and `behind` decides.
    fn handle(&mut self, now: Instant) -> Result<Option<Turn>, Violation> {
        let broker = self.broker.clone();
        let mut core = broker.lock();
        let work_end = core.work() + WORK_PER_TURN_MAX;
        let mut result = self.handle_locked(now, work_end, &mut core);
        drop(core);
        if result == Ok(None) && self.behind.is_ok() {
            let took = self.hand_over();
            if !self.requests.is_empty() {
                let mut core = broker.lock();
                result = self.wait(took, now, work_end, &mut core).map(Some);
            }
        }
        if !matches!(result, Ok(None | Some(Turn::Cut | Turn::Paused))) || self.is_at_violation() {
            // These requests came before the end of the connection or the violation.
            self.hand_over_all();
        }
        result
    }

    /// Whether the violation is next.
    fn is_at_violation(&self) -> bool {
        self.behind.is_err() && self.packets.is_empty()
    }

    fn handle_locked(
        &mut self,
        now: Instant,
        work_end: u64,
        core: &mut Guard<'_>,
    ) -> Result<Option<Turn>, Violation> {
        let (key, connection) = (self.session, self.origin.connection);
        if !core.is_open(key, connection) {
            return Ok(Some(Turn::Over));
        }
        if !self.handle_immediate(now, work_end, core)? {
            return Ok(Some(Turn::Cut));
        }
        // Requests that the last turn left.
        let mut must_hand_over = !self.requests.is_empty();
        loop {
            if must_hand_over {
                let took = core.has_room_for_answers(key) && core.unlocked(|| self.hand_over());
                if !core.is_open(key, connection) {
                    return Ok(Some(Turn::Over));
                }
                if !self.requests.is_empty() {
                    return self.wait(took, now, work_end, core).map(Some);
                }
            }
            if !core.continue_retained_searches(key, connection, work_end, now)
                || core.work() >= work_end
            {
                return Ok(Some(Turn::Cut));
            }
            let Some((packet, mut claim)) = self.packets.pop_front() else {
                // A violation does not wait until the client has read its retained messages.
                let waits = self.behind.is_ok() && core.has_retained_search(key);
                return Ok(waits.then_some(Turn::Paused));
            };
            self.check_again(&packet, &mut claim);
            core.checkpoint();
            let is_publish = matches!(packet, Packet::Publish(_));
            let is_request = is_publish && claim == Claim::Take;
            must_hand_over = !is_request && !is_immediate(&packet) && !self.requests.is_empty();
            if must_hand_over {
                self.packets.push_front(packet, claim);
                continue;
            }
            if is_publish && !core.has_room_for_publish(key) {
                self.packets.push_front(packet, claim);
                return self.wait(false, now, work_end, core).map(Some);
            }
            core.work_done(work::PACKET);
            if matches!(packet, Packet::Disconnect(_)) {
                self.packets = WaitingPackets::default();
            }
            let is_auth = matches!(packet, Packet::Auth(_));
            if self.handle_packet(packet, claim, now, core)? {
                self.is_over = true;
                return Ok(Some(Turn::Over));
            }
            if is_auth {
                self.detach_waiting();
                return Ok(Some(Turn::Authenticate));
            }
        }
    }

    /// Refuses a message that waited for its client if the rules have changed meanwhile.
    fn check_again(&self, packet: &Packet, claim: &mut Claim) {
        if self.detached
            && *claim == Claim::Route
            && let Packet::Publish(publish) = packet
            && !self.access.may_publish(&self.origin, &publish.topic)
        {
            *claim = FORBIDDEN;
        }
    }

    /// How the turn ends if packets must wait: continue in the next turn if the service took some
    /// requests or the work of this turn is used up, else pause until the client or the service can
    /// take more.
    fn wait(
        &mut self,
        took: bool,
        now: Instant,
        work_end: u64,
        core: &mut Guard<'_>,
    ) -> Result<Turn, Violation> {
        if took {
            return Ok(Turn::Cut);
        }
        if !self.paused {
            self.packets.count();
            self.packets.move_immediate(&mut self.immediate);
            if !self.handle_immediate(now, work_end, core)? {
                return Ok(Turn::Cut);
            }
        }
        self.detach_waiting();
        Ok(Turn::Paused)
    }

    /// Copies what waits for long into memory of its own.
    fn detach_waiting(&mut self) {
        if !std::mem::replace(&mut self.detached, true) {
            self.packets.detach();
            for it in &mut self.requests {
                copy(&mut it.topic, &mut it.payload, &mut it.properties);
            }
        }
    }

    /// Handles acknowledgements and pings. Returns false if some are left when the work of this
    /// turn is used up.
    fn handle_immediate(
        &mut self,
        now: Instant,
        work_end: u64,
        core: &mut Guard<'_>,
    ) -> Result<bool, Violation> {
        while core.work() < work_end {
            let Some((packet, claim)) = self.immediate.pop_front() else {
                return Ok(true);
            };
            core.checkpoint();
            core.work_done(work::PACKET);
            if let Packet::Pubrel(ack) = &packet {
                self.answer_repetitions(ack.packet_id, core);
            }
            self.handle_packet(packet, claim, now, core)?;
        }
        Ok(self.immediate.is_empty())
    }

    /// Returns true if the client has disconnected.
    fn handle_packet(
        &mut self,
        packet: Packet,
        claim: Claim,
        now: Instant,
        core: &mut Guard<'_>,
    ) -> Result<bool, Violation> {
        let (key, connection) = (self.session, self.origin.connection);
        match packet {
            Packet::Publish(publish) => match claim {
                Claim::Take if self.bounds.version == ProtocolVersion::V311 => {
                    let (reason, text) = without_properties(&publish.topic);
                    core.refuse(key, connection, &publish, (reason, &*text), |core| {
                        core.report_refusal(key, Refused::Publish, reason, Some(&*text));
                    })?;
                }
                Claim::Take => {
                    if let Begun::HandOver(token) =
                        core.begin_request(key, connection, publish.packet_id, publish.qos)?
                    {
                        let request = request(publish, token);
                        self.requests_bytes += request_bytes(&request);
                        self.requests.push(request);
                    }
                }
                Claim::Refuse(reason, text) => {
                    core.refuse(key, connection, &publish, (reason, text), |core| {
                        if claim == TOO_MANY || claim == TOO_MANY_TOGETHER {
                            core.count_throttled();
                        }
                        match claim == FORBIDDEN {
                            true => core.count_refused(Refused::Publish, reason),
                            false => core.report_refusal(key, Refused::Publish, reason, Some(text)),
                        }
                    })?;
                }
                Claim::Route => {
                    let message = message(&publish);
                    core.route(key, connection, &publish, &message, now)?;
                }
            },
            Packet::Puback(ack) => core.acknowledged(key, connection, kind::PUBACK, ack, now)?,
            Packet::Pubrec(ack) => core.acknowledged(key, connection, kind::PUBREC, ack, now)?,
            Packet::Pubcomp(ack) => core.acknowledged(key, connection, kind::PUBCOMP, ack, now)?,
            Packet::Pubrel(ack) => core.released(key, connection, ack.packet_id),
            Packet::Subscribe(mut subscribe) => {
                let rest = behind_step(&mut subscribe.filters);
                let results = &mut self.filter_results;
                core.subscribe(key, connection, &subscribe, results, rest.len())?;
                if !rest.is_empty() {
                    subscribe.filters = rest;
                    self.packets.push_front(Packet::Subscribe(subscribe), claim);
                }
            }
            Packet::Unsubscribe(mut unsubscribe) => {
                let rest = behind_step(&mut unsubscribe.filters);
                let results = &mut self.filter_results;
                core.unsubscribe(key, connection, &unsubscribe, results, rest.len())?;
                if !rest.is_empty() {
                    unsubscribe.filters = rest;
                    let rest = Packet::Unsubscribe(unsubscribe);
                    self.packets.push_front(rest, claim);
                }
            }
            Packet::Pingreq => core.ping(key, connection),
            Packet::Disconnect(disconnect) => {
                core.client_disconnects(key, connection, disconnect)?;
                return Ok(true);
            }
            Packet::Auth(auth) => self.auth = Some(auth),
        }
        Ok(false)
    }

    /// Hands requests to the service. Returns false if it takes none.
    fn hand_over(&mut self) -> bool {
        let before = self.requests.len();
        if before > 0 {
            self.service
                .requests(&self.broker, &self.origin, &mut self.requests);
        }
        if self.requests.is_empty() {
            self.requests.shrink_to(SPARE_ENTRIES_MAX);
        }
        let took = self.requests.len() < before;
        if took {
            self.requests_bytes = self.requests.iter().map(request_bytes).sum();
        }
        took
    }

    fn hand_over_all(&mut self) {
        while self.hand_over() {}
    }
}

/// Answers requests that were not handed over when the connection ends between two turns.
///
/// The session remembers each QoS 2 request that has begun, so its repetition would not be handed
/// over either. Therefore such a request must be refused.
impl Drop for Dispatch {
    fn drop(&mut self) {
        // The panic may come from the service.
        if std::thread::panicking() {
            return;
        }
        if self.broker.is_draining() {
            // Their responses could not leave. A client sends an unacknowledged request again.
            let begun = |it: &Request| it.token.as_ref().is_some_and(|token| token.exactly_once);
            self.requests.retain(begun);
        }
        self.hand_over_all();
        let tokens = self.requests.drain(..).filter_map(|it| it.token);
        let refused: Vec<_> = tokens.filter(|token| token.exactly_once).collect();
        if !refused.is_empty() {
            let text = "the connection ended before the service took the request";
            self.broker.batch(|batch| {
                for token in refused {
                    batch.acknowledge(token, ReasonCode::QUOTA_EXCEEDED, Some(text));
                }
            });
        }
    }
}

/// Cuts a list of filters after one step, and returns the rest.
fn behind_step<T>(filters: &mut Vec<T>) -> Vec<T> {
    filters.split_off(filters.len().min(FILTERS_PER_STEP))
}

/// Why the service gets no requests of MQTT 3.1.1. The text is for the log, because the client can
/// only be sent an acknowledgement.
fn without_properties(topic: &[u8]) -> (ReasonCode, String) {
    let shown = &topic[..topic.len().min(REASON_TEXT_BYTES_MAX)];
    let text = format!(
        "a request needs properties, which MQTT 3.1.1 does not have: connect with MQTT 5 (topic {})",
        String::from_utf8_lossy(shown)
    );
    (ReasonCode::IMPLEMENTATION_SPECIFIC_ERROR, text)
}

fn request(publish: Publish, token: Option<Token>) -> Request {
    Request {
        expires: publish.expires,
        topic: publish.topic,
        payload: publish.payload,
        properties: publish.properties,
        qos: publish.qos,
        dup: publish.dup,
        packet_id: publish.packet_id,
        token,
    }
}

fn message(publish: &Publish) -> Message {
    Message {
        topic: publish.topic.clone(),
        payload: publish.payload.clone(),
        properties: publish.properties.forwarded(),
        qos: publish.qos,
        retain: publish.retain,
        expires: publish.expires,
    }
}
