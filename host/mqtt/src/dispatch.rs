//! The packets of one connection, in their order.
//!
//! In comes the read buffer; packets go to the core, and PUBLISHes that the service claims to the service. Runs of claimed
//! PUBLISHes of one read go over together; acknowledgements and pings between them are handled at once; any other packet
//! waits until the requests before it were handed over. Does no I/O.

use std::{
    collections::{HashMap, VecDeque},
    sync::Arc,
    time::{Duration, Instant},
};

use bytes::{Bytes, BytesMut};

use crate::{
    Access, Broker, Claim, Limits, Message, Origin, ReasonCode, Refused, Request, Service, Token,
    allowance::Allowance,
    broker::Guard,
    codec::{self, Auth, Bounds, Packet, Publish, Violation, packet_type as kind},
    core::Begun,
    ledger::{Account, Holding, Kind},
    limits::{ALIAS_OVERHEAD_BYTES, SPARE_ENTRIES_MAX, STATE_BYTES_FLOOR, WORK_PER_TURN_MAX, work},
    router::SessionKey,
    topic,
};

/// What becomes of a PUBLISH of a client that sends too many.
const TOO_MANY: Claim = Claim::Refuse(
    ReasonCode::QUOTA_EXCEEDED,
    "this client publishes more in a second than it may",
);

/// And where all clients together do.
const TOO_MANY_TOGETHER: Claim = Claim::Refuse(
    ReasonCode::QUOTA_EXCEEDED,
    "all clients together publish more in a second than they may",
);

/// What becomes of a PUBLISH that the access control does not allow.
const FORBIDDEN: Claim = Claim::Refuse(
    ReasonCode::NOT_AUTHORIZED,
    "this client may not publish to this topic",
);

/// How one turn ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Turn {
    /// The buffer holds no whole packet any more.
    Drained,
    /// There may be more packets; others are to have their turn.
    More,
    /// The same, and this turn has done as much work as it may.
    Cut,
    /// The client authenticates anew ([`Dispatch::take_auth`]); what follows waits for that.
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
    topic_alias_max: u16,
    aliases: HashMap<u16, Bytes>,
    /// What these take.
    alias_bytes: Holding,
    alias_bytes_max: usize,
    state_bytes_total_max: usize,
    publishes: Allowance,
    /// Packets that were decoded and not handled.
    packets: VecDeque<(Packet, Claim)>,
    /// How the turn ends once these are handled: what the buffer held behind them.
    behind: Result<Turn, Violation>,
    requests: Vec<Request>,
    auth: Option<Auth>,
}

impl Dispatch {
    /// With the bounds that its client was told.
    pub(crate) fn new(
        broker: Broker,
        session: SessionKey,
        origin: Origin,
        account: &Arc<Account>,
        limits: &Limits,
    ) -> Self {
        Self {
            service: broker.service().clone(),
            access: broker.access().clone(),
            session,
            origin,
            bounds: Bounds {
                packet_bytes_max: limits.packet_bytes_max,
                filters_max: limits.filters_per_packet_max,
            },
            packets_max: limits.packets_per_turn_max.max(1),
            topic_levels_max: limits.topic_levels_max,
            topic_alias_max: limits.topic_alias_max,
            aliases: HashMap::new(),
            alias_bytes: Holding::new(account, Kind::State),
            alias_bytes_max: limits.alias_bytes_max,
            state_bytes_total_max: limits.state_bytes_total_max,
            publishes: Allowance::default(),
            packets: VecDeque::new(),
            behind: Ok(Turn::Drained),
            requests: Vec::new(),
            auth: None,
            broker,
        }
    }

    /// Handles packets of the buffer, as many as a turn may have in number and in work.
    pub(crate) fn turn(&mut self, buffer: &mut BytesMut, now: Instant) -> Turn {
        if self.packets.is_empty() {
            self.publishes
                .set_per_second(self.broker.publishes_per_second_max());
            self.behind = self.fill(buffer, now);
        }
        let handled = self.handle(now);
        if self.packets.is_empty() {
            self.packets.shrink_to(SPARE_ENTRIES_MAX);
        }
        match handled.and_then(|turn| turn.map_or(self.behind, Ok)) {
            Ok(turn) => turn,
            Err(violation) => {
                self.broker
                    .lock()
                    .punish(self.session, self.origin.connection, violation);
                Turn::Over
            }
        }
    }

    /// Decodes packets of the buffer, a bounded number.
    fn fill(&mut self, buffer: &mut BytesMut, now: Instant) -> Result<Turn, Violation> {
        while self.packets.len() < self.packets_max {
            let Some(packet) = self.decode(buffer, now)? else {
                return Ok(Turn::Drained);
            };
            let is_auth = matches!(packet.0, Packet::Auth(_));
            self.packets.push_back(packet);
            if is_auth {
                return Ok(Turn::Authenticate);
            }
        }
        Ok(Turn::More)
    }

    /// What the client shows to authenticate anew.
    pub(crate) fn take_auth(&mut self) -> Option<Auth> {
        self.auth.take()
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
                self.resolve_alias(publish)?;
                if self.publishes.takes(now) {
                    self.within_shared(self.claim(&publish.topic), now)
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

    /// What is refused anyway uses up nothing of what all clients share: or one that may publish nothing could keep the others
    /// from publishing.
    fn within_shared(&self, claim: Claim, now: Instant) -> Claim {
        match claim {
            Claim::Refuse(..) => claim,
            Claim::Take | Claim::Route if self.broker.publishes().takes(now) => claim,
            Claim::Take | Claim::Route => TOO_MANY_TOGETHER,
        }
    }

    /// Topic aliases are the connection's own (section 3.3.2.3.4).
    fn resolve_alias(&mut self, publish: &mut Publish) -> Result<(), Violation> {
        let Some(alias) = publish.properties.topic_alias else {
            return Ok(());
        };
        if alias == 0 || alias > self.topic_alias_max {
            let text = "the topic alias is zero or above the maximum";
            return Err(Violation {
                reason: ReasonCode::TOPIC_ALIAS_INVALID,
                text,
            });
        }
        if publish.topic.is_empty() {
            let text = "the topic alias stands for nothing yet";
            let name = self.aliases.get(&alias).ok_or(Violation {
                reason: ReasonCode::PROTOCOL_ERROR,
                text,
            })?;
            publish.topic = name.clone();
        } else {
            self.set_alias(alias, &publish.topic)?;
        }
        Ok(())
    }

    fn set_alias(&mut self, alias: u16, topic: &[u8]) -> Result<(), Violation> {
        let old = self.aliases.get(&alias);
        if old.is_some_and(|old| **old == *topic) {
            return Ok(());
        }
        let old = old.map_or(0, |old| old.len() + ALIAS_OVERHEAD_BYTES);
        let bytes = self.alias_bytes.amount() - old + topic.len() + ALIAS_OVERHEAD_BYTES;
        let more = bytes.saturating_sub(self.alias_bytes.amount());
        let fits = (self.alias_bytes).fits(more, self.state_bytes_total_max, STATE_BYTES_FLOOR);
        if bytes > self.alias_bytes_max || more > 0 && !fits {
            return Err(Violation {
                reason: ReasonCode::QUOTA_EXCEEDED,
                text: "topic aliases of this client, or of all clients, take more memory than they may",
            });
        }
        self.aliases.insert(alias, Bytes::copy_from_slice(topic));
        self.alias_bytes.set(bytes);
        Ok(())
    }

    /// How the turn ends, unless all packets were handled and it goes on as the buffer says.
    fn handle(&mut self, now: Instant) -> Result<Option<Turn>, Violation> {
        // What the service has left.
        if !self.hand_over() {
            return Ok(Some(Turn::Cut));
        }
        let broker = self.broker.clone();
        let mut core = broker.lock();
        let result = self.handle_locked(now, &mut core);
        drop(core);
        match result {
            Ok(None) if self.behind.is_ok() => Ok((!self.hand_over()).then_some(Turn::Cut)),
            Ok(Some(Turn::Cut)) => result,
            // Behind the last packet of a connection, or a violation: these were sent before it.
            _ => {
                self.hand_over_all();
                result
            }
        }
    }

    fn handle_locked(
        &mut self,
        now: Instant,
        core: &mut Guard<'_>,
    ) -> Result<Option<Turn>, Violation> {
        let (key, connection) = (self.session, self.origin.connection);
        if !core.is_open(key, connection) {
            return Ok(Some(Turn::Over));
        }
        let work_end = core.work() + WORK_PER_TURN_MAX;
        loop {
            if !core.replay(key, connection, work_end, now) || core.work() >= work_end {
                return Ok(Some(Turn::Cut));
            }
            let Some((packet, claim)) = self.packets.pop_front() else {
                return Ok(None);
            };
            core.checkpoint();
            let waits = match &packet {
                Packet::Publish(_) => claim != Claim::Take,
                Packet::Subscribe(_)
                | Packet::Unsubscribe(_)
                | Packet::Disconnect(_)
                | Packet::Auth(_) => true,
                _ => false,
            };
            if waits && !self.requests.is_empty() {
                let mut all = false;
                core.unlocked(|| all = self.hand_over());
                if !core.is_open(key, connection) {
                    return Ok(Some(Turn::Over));
                }
                if !all {
                    self.packets.push_front((packet, claim));
                    return Ok(Some(Turn::Cut));
                }
            }
            core.work_done(work::PACKET);
            if matches!(packet, Packet::Disconnect(_)) {
                self.packets.clear();
            }
            if self.handle_packet(packet, claim, now, core)? {
                return Ok(Some(Turn::Over));
            }
        }
    }

    /// True where the client has disconnected.
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
                Claim::Take => {
                    if let Begun::HandOver(token) =
                        core.begin(key, connection, publish.packet_id, publish.qos)?
                    {
                        self.requests.push(request(publish, token, now));
                    }
                }
                Claim::Refuse(reason, text) => {
                    if claim == TOO_MANY || claim == TOO_MANY_TOGETHER {
                        core.count_throttled();
                    }
                    match claim == FORBIDDEN {
                        true => core.count_refused(Refused::Publish, reason),
                        false => core.refused(key, Refused::Publish, reason, Some(text)),
                    }
                    core.refuse(key, connection, &publish, reason, text)?
                }
                Claim::Route => {
                    let message = message(&publish, now);
                    core.route(key, connection, &publish, &message, now)?;
                }
            },
            Packet::Puback(ack) => core.acknowledged(key, connection, kind::PUBACK, ack, now)?,
            Packet::Pubrec(ack) => core.acknowledged(key, connection, kind::PUBREC, ack, now)?,
            Packet::Pubcomp(ack) => core.acknowledged(key, connection, kind::PUBCOMP, ack, now)?,
            Packet::Pubrel(ack) => core.released(key, connection, ack.packet_id),
            Packet::Subscribe(subscribe) => core.subscribe(key, connection, &subscribe),
            Packet::Unsubscribe(unsubscribe) => core.unsubscribe(key, connection, &unsubscribe),
            Packet::Pingreq => core.ping(key, connection),
            Packet::Disconnect(disconnect) => {
                core.client_disconnects(key, connection, disconnect)?;
                return Ok(true);
            }
            Packet::Auth(auth) => self.auth = Some(auth),
        }
        Ok(false)
    }

    /// Hands requests to the service. False if it leaves some to the next turn.
    fn hand_over(&mut self) -> bool {
        if !self.requests.is_empty() {
            self.service
                .requests(&self.broker, &self.origin, &mut self.requests);
        }
        if self.requests.is_empty() {
            self.requests.shrink_to(SPARE_ENTRIES_MAX);
        }
        self.requests.is_empty()
    }

    fn hand_over_all(&mut self) {
        let mut left = usize::MAX;
        while self.requests.len() < left {
            left = self.requests.len();
            self.hand_over();
        }
    }
}

/// A connection may end between two turns. The session remembers a QoS 2 request that has begun: one that nobody handed over
/// would never be.
impl Drop for Dispatch {
    fn drop(&mut self) {
        // The service may be what panics.
        if !std::thread::panicking() {
            self.hand_over_all();
        }
    }
}

fn expires(publish: &Publish, now: Instant) -> Option<Instant> {
    now.checked_add(Duration::from_secs(
        publish.properties.message_expiry_s?.into(),
    ))
}

fn request(publish: Publish, token: Option<Token>, now: Instant) -> Request {
    Request {
        expires: expires(&publish, now),
        topic: publish.topic,
        payload: publish.payload,
        properties: publish.properties,
        qos: publish.qos,
        dup: publish.dup,
        packet_id: publish.packet_id,
        token,
    }
}

fn message(publish: &Publish, now: Instant) -> Message {
    Message {
        topic: publish.topic.clone(),
        payload: publish.payload.clone(),
        properties: publish.properties.forwarded(),
        qos: publish.qos,
        retain: publish.retain,
        expires: expires(publish, now),
    }
}

/// Whether a will may be published by this broker: it cannot be a request, since nobody could be answered.
pub(crate) fn check_will(
    service: &dyn Service,
    topic: &[u8],
    topic_levels_max: usize,
) -> Result<(), &'static str> {
    if topic::level_count(topic) > topic_levels_max {
        return Err("the topic of the will has too many levels");
    }
    match service.claim(topic) {
        Claim::Route => Ok(()),
        Claim::Take => Err("a will may not be a request"),
        Claim::Refuse(_, text) => Err(text),
    }
}
