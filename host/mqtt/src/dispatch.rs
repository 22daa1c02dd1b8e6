//! The packets of one connection, in their order.
//!
//! In comes the read buffer; packets go to the core, and PUBLISHes that the service claims to the service. Runs of claimed
//! PUBLISHes of one read go over together; acknowledgements and pings between them are handled at once; any other packet
//! waits until the requests before it were handed over. Does no I/O.

use std::{
    collections::HashMap,
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
    publishes: Allowance,
    packets: Vec<(Packet, Claim)>,
    requests: Vec<Request>,
    auth: Option<Auth>,
}

impl Dispatch {
    /// With the bounds that its client was told.
    pub(crate) fn new(
        broker: Broker,
        session: SessionKey,
        origin: Origin,
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
            publishes: Allowance::default(),
            packets: Vec::new(),
            requests: Vec::new(),
            auth: None,
            broker,
        }
    }

    /// Handles packets of the buffer, a bounded number.
    pub(crate) fn turn(&mut self, buffer: &mut BytesMut, now: Instant) -> Turn {
        self.publishes
            .set_per_second(self.broker.publishes_per_second_max());
        let mut violation = None;
        let mut turn = Turn::More;
        while self.packets.len() < self.packets_max {
            match self.decode(buffer, now) {
                Ok(Some(packet)) => {
                    // A SUBSCRIBE may have to look at every retained message, so nothing else is done under the same lock.
                    let is_last = matches!(packet.0, Packet::Subscribe(_) | Packet::Auth(_));
                    self.packets.push(packet);
                    if is_last {
                        if buffer.is_empty() {
                            turn = Turn::Drained;
                        }
                        break;
                    }
                }
                Ok(None) => {
                    turn = Turn::Drained;
                    break;
                }
                Err(fault) => {
                    violation = Some(fault);
                    break;
                }
            }
        }
        let mut packets = std::mem::take(&mut self.packets);
        let handled = self.handle(&mut packets, now);
        packets.clear();
        self.packets = packets;
        match handled.and_then(|over| violation.map_or(Ok(over), Err)) {
            Ok(false) if self.auth.is_some() => Turn::Authenticate,
            Ok(false) => turn,
            Ok(true) => Turn::Over,
            Err(violation) => {
                self.broker
                    .lock()
                    .punish(self.session, self.origin.connection, violation);
                Turn::Over
            }
        }
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
            self.aliases
                .insert(alias, Bytes::copy_from_slice(&publish.topic));
        }
        Ok(())
    }

    /// True where the client has disconnected or the connection is over for another reason.
    fn handle(
        &mut self,
        packets: &mut Vec<(Packet, Claim)>,
        now: Instant,
    ) -> Result<bool, Violation> {
        let broker = self.broker.clone();
        let mut core = broker.lock();
        let result = self.handle_locked(packets, now, &mut core);
        drop(core);
        // Also in front of a violation: these were sent before it.
        self.hand_over();
        result
    }

    fn handle_locked(
        &mut self,
        packets: &mut Vec<(Packet, Claim)>,
        now: Instant,
        core: &mut Guard<'_>,
    ) -> Result<bool, Violation> {
        let (key, connection) = (self.session, self.origin.connection);
        if !core.is_open(key, connection) {
            return Ok(true);
        }
        for (packet, claim) in packets.drain(..) {
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
                core.unlocked(|| self.hand_over());
                if !core.is_open(key, connection) {
                    return Ok(true);
                }
            }
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
                Packet::Puback(ack) => {
                    core.acknowledged(key, connection, kind::PUBACK, ack, now)?
                }
                Packet::Pubrec(ack) => {
                    core.acknowledged(key, connection, kind::PUBREC, ack, now)?
                }
                Packet::Pubcomp(ack) => {
                    core.acknowledged(key, connection, kind::PUBCOMP, ack, now)?
                }
                Packet::Pubrel(ack) => core.released(key, connection, ack.packet_id),
                Packet::Subscribe(subscribe) => core.subscribe(key, connection, &subscribe, now),
                Packet::Unsubscribe(unsubscribe) => core.unsubscribe(key, connection, &unsubscribe),
                Packet::Pingreq => core.ping(key, connection),
                Packet::Disconnect(disconnect) => {
                    core.client_disconnects(key, connection, disconnect)?;
                    return Ok(true);
                }
                Packet::Auth(auth) => self.auth = Some(auth),
            }
        }
        Ok(false)
    }

    fn hand_over(&mut self) {
        if !self.requests.is_empty() {
            self.service
                .requests(&self.broker, &self.origin, &mut self.requests);
            self.requests.clear();
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
