//! Crashes at every point. Model clients keep their half of a session and continue with a broker
//! that has only a prefix of its records.
//!
//! QoS 2 messages must arrive exactly once and QoS 1 messages at least once. Everything that the
//! broker acknowledged must stay true.

use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    sync::Arc,
    time::{Duration, Instant},
};

use proptest::prelude::*;
use wire::Packet;

use crate::{Broker, Limits, NoService, testing::*};

const MESSAGES: usize = 6;

/// The client's half of a session, which survives crashes of the broker.
struct Model {
    name: &'static str,
    peer: Option<Peer>,
    /// Received packets that the client has not handled yet.
    inbox: VecDeque<Packet>,
    /// Whether the client knows that its session exists.
    has_session: bool,
    connected: bool,
}

impl Model {
    fn new(name: &'static str) -> Self {
        Self {
            name,
            peer: None,
            inbox: VecDeque::new(),
            has_session: false,
            connected: false,
        }
    }

    fn lose(&mut self, now: Instant) {
        if let Some(peer) = self.peer.take() {
            peer.lose(now);
        }
        self.forget();
    }

    fn forget(&mut self) {
        self.peer = None;
        self.inbox.clear();
        self.connected = false;
    }

    fn send(&mut self, packet: Packet, now: Instant) {
        self.peer.as_mut().unwrap().send(&[packet], now);
    }

    /// The next packet. Connects if there is no connection.
    fn next(&mut self, broker: &Broker, now: Instant) -> Option<Packet> {
        let peer = self
            .peer
            .get_or_insert_with(|| Peer::waiting(broker, &Hello::new(self.name).window(2), now));
        self.inbox.extend(peer.receive());
        let packet = self.inbox.pop_front()?;
        if let Packet::ConnAck(connack) = &packet {
            assert!(
                connack.session_present || !self.has_session,
                "the session of {} is lost",
                self.name
            );
            self.has_session = true;
            self.connected = true;
        }
        Some(packet)
    }
}

struct World {
    log: Arc<TestLog>,
    broker: Broker,
    began: Instant,
    now: Instant,
    publisher: Model,
    /// By packet id: the message, and whether its PUBREC arrived.
    unacknowledged: BTreeMap<u16, (usize, bool)>,
    published: usize,
    subscriber: Model,
    subscribed: bool,
    /// QoS 2 messages whose PUBREL has not arrived.
    open: BTreeMap<u16, usize>,
    received: Vec<usize>,
}

/// Messages alternate between QoS 2 and QoS 1.
fn qos(message: usize) -> Q {
    if message.is_multiple_of(2) {
        Q::ExactlyOnce
    } else {
        Q::AtLeastOnce
    }
}

impl World {
    fn new() -> Self {
        let (log, began) = (TestLog::new(false), Instant::now());
        Self {
            broker: restored(&log, Limits::default(), Arc::new(NoService), began, began),
            log,
            began,
            now: began,
            publisher: Model::new("publisher"),
            unacknowledged: BTreeMap::new(),
            published: 0,
            subscriber: Model::new("subscriber"),
            subscribed: false,
            open: BTreeMap::new(),
            received: Vec::new(),
        }
    }

    fn publish(&mut self, packet_id: u16, message: usize, dup: bool) {
        let mut publish = publish("t", qos(message), packet_id, &message.to_string());
        publish.dup = dup;
        self.publisher.send(Packet::Publish(publish), self.now);
    }

    /// The publisher handles one packet, or publishes a message.
    fn publisher_step(&mut self) -> bool {
        let packet = self.publisher.next(&self.broker, self.now);
        match packet {
            Some(Packet::ConnAck(_)) => {
                // In the order in which they were first sent (section 4.6).
                let mut again: Vec<_> = self.unacknowledged.clone().into_iter().collect();
                again.sort_by_key(|(_, (message, _))| *message);
                for (packet_id, (message, released)) in again {
                    if released {
                        self.publisher.send(pubrel(packet_id), self.now);
                    } else {
                        self.publish(packet_id, message, true);
                    }
                }
            }
            Some(Packet::PubAck(ack)) => {
                let (message, _) = self.unacknowledged.remove(&ack.pkid).unwrap();
                assert_eq!(qos(message), Q::AtLeastOnce);
            }
            Some(Packet::PubRec(rec)) => {
                // A second PUBREC may answer a repeated PUBLISH.
                if let Some(entry) = self.unacknowledged.get_mut(&rec.pkid) {
                    entry.1 = true;
                    self.publisher.send(pubrel(rec.pkid), self.now);
                }
            }
            Some(Packet::PubComp(comp)) => _ = self.unacknowledged.remove(&comp.pkid),
            Some(other) => panic!("{other:?} to the publisher"),
            None => {
                let may = self.publisher.connected
                    && self.subscribed
                    && self.unacknowledged.len() < 3
                    && self.published < MESSAGES;
                if may {
                    let packet_id = (1..).find(|id| !self.unacknowledged.contains_key(id));
                    let (packet_id, message) = (packet_id.unwrap(), self.published);
                    self.unacknowledged.insert(packet_id, (message, false));
                    self.published += 1;
                    self.publish(packet_id, message, false);
                }
                return may;
            }
        }
        true
    }

    /// The subscriber handles one packet.
    fn subscriber_step(&mut self) -> bool {
        let Some(packet) = self.subscriber.next(&self.broker, self.now) else {
            return false;
        };
        let answer = match packet {
            Packet::ConnAck(_) => {
                if self.subscribed {
                    return true;
                }
                subscribe("t", Q::ExactlyOnce)
            }
            Packet::SubAck(_) => {
                self.subscribed = true;
                return true;
            }
            Packet::Publish(publish) => {
                let message = std::str::from_utf8(&publish.payload)
                    .unwrap()
                    .parse()
                    .unwrap();
                assert_eq!(publish.qos, qos(message));
                if publish.qos == Q::AtLeastOnce {
                    self.received.push(message);
                    puback(publish.pkid)
                } else {
                    match self.open.get(&publish.pkid) {
                        // The packet id is open, so this must be a redelivery of the same message.
                        Some(first) => assert!(publish.dup && *first == message),
                        None => {
                            self.received.push(message);
                            self.open.insert(publish.pkid, message);
                        }
                    }
                    pubrec(publish.pkid)
                }
            }
            Packet::PubRel(rel) => {
                self.open.remove(&rel.pkid);
                pubcomp(rel.pkid)
            }
            other => panic!("{other:?} to the subscriber"),
        };
        self.subscriber.send(answer, self.now);
        true
    }

    /// Like `kill -9`: only some of the unreleased records survive.
    fn crash(&mut self, survivors: usize) {
        self.publisher.forget();
        self.subscriber.forget();
        self.log.crash(survivors);
        let (limits, service) = (Limits::default(), Arc::new(NoService));
        self.broker = restored(&self.log, limits, service, self.began, self.now);
    }

    fn tick(&mut self) {
        self.now += Duration::from_millis(1);
    }

    /// Runs to the end without further failures.
    fn finish(mut self) {
        let mut quiet = 0;
        for _ in 0..500 {
            self.tick();
            self.log.release_all(&self.broker);
            let stepped = [self.publisher_step(), self.subscriber_step()];
            self.log.release_all(&self.broker);
            let done = self.published == MESSAGES && self.unacknowledged.is_empty();
            let silent = done && stepped == [false, false] && self.open.is_empty();
            quiet = if silent { quiet + 1 } else { 0 };
            // A new connection is silent before its CONNACK.
            if quiet == 3 {
                break;
            }
        }
        assert!(self.unacknowledged.is_empty(), "{:?}", self.unacknowledged);
        assert!(self.open.is_empty(), "{:?}", self.open);
        let sent = 0..MESSAGES;
        let of = |wanted: Q| -> Vec<usize> {
            let received = self.received.iter().copied();
            received.filter(|message| qos(*message) == wanted).collect()
        };
        let exactly_once: Vec<_> = sent
            .clone()
            .filter(|message| qos(*message) == Q::ExactlyOnce)
            .collect();
        assert_eq!(
            of(Q::ExactlyOnce),
            exactly_once,
            "QoS 2: once, and in order"
        );
        let at_least_once: BTreeSet<_> = of(Q::AtLeastOnce).into_iter().collect();
        assert_eq!(at_least_once.len(), MESSAGES - exactly_once.len());
        // No message or packet id is left over in the log.
        let recovery = self.log.recovery();
        assert!(
            recovery
                .sessions
                .values()
                .all(|session| session.messages.is_empty() && session.received.is_empty())
        );
    }
}

/// Crashes after `steps` steps, with a log that releases every `lag` steps (0: never). The first
/// `survives` unreleased records survive. Returns how many records were unreleased, and whether
/// the run was complete before the crash.
fn crash_after(steps: usize, lag: usize, survives: usize) -> (usize, bool) {
    let mut world = World::new();
    let mut over = false;
    for step in 0..steps {
        world.tick();
        if lag > 0 && step % lag == 0 {
            world.log.release_all(&world.broker);
        }
        let stepped = if step % 2 == 0 {
            world.publisher_step()
        } else {
            world.subscriber_step()
        };
        over = !stepped && world.published == MESSAGES && world.unacknowledged.is_empty();
    }
    let (released, appended) = (world.log.released_len(), world.log.len());
    world.crash((released + survives).min(appended));
    world.finish();
    (appended - released, over)
}

#[test]
fn exactly_once_over_a_crash_at_every_point() {
    let mut crashes = 0;
    for lag in [1, 3, 7, 0] {
        for steps in 0.. {
            let (unreleased, over) = crash_after(steps, lag, 0);
            for survives in 1..=unreleased {
                crash_after(steps, lag, survives);
            }
            crashes += 1 + unreleased;
            if over || lag == 0 && steps > 20 {
                break;
            }
        }
    }
    assert!(crashes > 300, "{crashes}");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1000))]

    /// Any order of steps, lost connections, late releases and crashes.
    #[test]
    fn exactly_once_over_any_crashes(script in prop::collection::vec((0_u8..24, any::<u8>()), 0..200)) {
        let mut world = World::new();
        for (action, choice) in script {
            world.tick();
            let (released, appended) = (world.log.released_len(), world.log.len());
            let unreleased = appended - released;
            let some = released + usize::from(choice) % (unreleased + 1);
            match action {
                0..8 => _ = world.publisher_step(),
                8..16 => _ = world.subscriber_step(),
                16..18 => world.log.release(&world.broker, some),
                18..20 => world.log.release_all(&world.broker),
                20 => world.publisher.lose(world.now),
                21 => world.subscriber.lose(world.now),
                _ => world.crash(some),
            }
        }
        world.finish();
    }
}
