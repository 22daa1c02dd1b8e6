//! Shared subscriptions (section 4.8.2): which member of a group receives a message, and which
//! member receives it if that session ends.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Instant,
};

use proptest::prelude::*;
use wire::{DisconnectReasonCode, Filter, Packet, PubAckReason, SubscribeReasonCode};

use crate::{
    Access, Anyone, Attempt, Broker, Deciding, Limits, Message, NoService, Options, Origin, QoS,
    clock::Clock, testing::*,
};

const JOBS: &str = "$share/g/jobs";

fn member(broker: &Broker, client: &str, qos: Q, now: Instant) -> Peer {
    joined(broker, &Hello::new(client), qos, now)
}

fn joined(broker: &Broker, hello: &Hello, qos: Q, now: Instant) -> Peer {
    let mut peer = Peer::new(broker, hello, now);
    let granted = peer.subscribe(JOBS, qos, now);
    assert_eq!(granted, SubscribeReasonCode::Success(qos));
    peer
}

/// Publishes from the broker itself.
fn jobs<const N: usize>(broker: &Broker, qos: QoS, payloads: [&'static str; N]) {
    broker.batch(|batch| {
        for payload in payloads {
            batch.publish(Message::new("jobs", payload, qos));
        }
    });
}

/// Reconnects a client to its session.
fn back(broker: &Broker, client: &str, now: Instant) -> Peer {
    let peer = Peer::new(broker, &Hello::new(client), now);
    assert!(peer.connack.session_present);
    peer
}

#[test]
fn members_take_turns_and_plain_subscribers_get_everything() {
    let (broker, now) = start(Limits::default());
    let mut members = ["a", "b", "c"].map(|name| member(&broker, name, Q::AtLeastOnce, now));
    let mut plain = Peer::new(&broker, &Hello::new("plain"), now);
    plain.subscribe("jobs", Q::AtLeastOnce, now);
    for qos in [QoS::AtMostOnce, QoS::AtLeastOnce] {
        jobs(&broker, qos, ["1", "2", "3", "4", "5", "6"]);
        assert_eq!(members[0].payloads(), ["1", "4"]);
        assert_eq!(members[1].payloads(), ["2", "5"]);
        assert_eq!(members[2].payloads(), ["3", "6"]);
        assert_eq!(plain.payloads(), ["1", "2", "3", "4", "5", "6"]);
    }
    members[1].send(&[unsubscribe(&[JOBS])], now);
    jobs(&broker, QoS::AtLeastOnce, ["1", "2", "3", "4"]);
    assert_eq!(members[0].payloads(), ["1", "3"]);
    assert_eq!(members[1].payloads(), [""; 0]);
    assert_eq!(members[2].payloads(), ["2", "4"]);
}

/// Groups that differ in filter or name, and plain subscriptions, are independent.
#[test]
fn each_shared_subscription_gets_its_own_copy() {
    let (broker, now) = start(Limits::default());
    let mut peer = Peer::new(&broker, &Hello::new("a"), now);
    for (id, filter) in [(1, JOBS), (2, "$share/h/jobs"), (3, "$share/g/+"), (4, "#")] {
        peer.subscribe_with(Filter::new(filter, Q::AtLeastOnce), Some(id), now);
    }
    jobs(&broker, QoS::AtLeastOnce, ["x"]);
    let mut ids: Vec<Vec<usize>> = peer
        .messages()
        .into_iter()
        .map(|message| message.properties.unwrap().subscription_identifiers)
        .collect();
    ids.sort_unstable();
    assert_eq!(ids, [[1], [2], [3], [4]]);
}

#[test]
fn member_options_apply_to_its_messages() {
    let (broker, now) = start(Limits::default());
    let mut a = Peer::new(&broker, &Hello::new("a"), now);
    let keeps_retain = Filter {
        preserve_retain: true,
        ..Filter::new(JOBS, Q::AtMostOnce)
    };
    a.subscribe_with(keeps_retain, Some(7), now);
    let mut b = member(&broker, "b", Q::ExactlyOnce, now);
    let mut retained = Message::new("jobs", "x", QoS::ExactlyOnce);
    retained.retain = true;
    broker.batch(|batch| {
        batch.publish(retained.clone());
        batch.publish(retained);
    });
    let [to_a, to_b] = [&mut a, &mut b].map(|peer| peer.messages().remove(0));
    assert_eq!((to_a.qos, to_a.retain), (Q::AtMostOnce, true));
    assert_eq!(to_a.properties.unwrap().subscription_identifiers, [7]);
    assert_eq!((to_b.qos, to_b.retain), (Q::ExactlyOnce, false));
    // A shared subscription is never sent retained messages (section 3.8.4).
    let mut late = member(&broker, "late", Q::AtLeastOnce, now);
    assert_eq!(late.payloads(), [""; 0]);
    late.subscribe("jobs", Q::AtLeastOnce, now);
    assert_eq!(late.payloads(), ["x"]);
}

#[test]
fn invalid_shared_subscriptions_are_refused() {
    let limits = Limits {
        shared_subscriptions_per_session_max: 1,
        topic_levels_max: 3,
        ..Limits::default()
    };
    let (broker, now) = start(limits);
    let mut peer = Peer::new(&broker, &Hello::new("a"), now);
    for filter in [
        "$share/",
        "$share/g",
        "$share/g/",
        "$share//t",
        "$share/+/t",
        "$share/#",
        "$share/g/a#",
        "$share/g/a/b/c/d",
    ] {
        let granted = peer.subscribe(filter, Q::AtMostOnce, now);
        assert_eq!(granted, SubscribeReasonCode::TopicFilterInvalid, "{filter}");
    }
    let granted = SubscribeReasonCode::Success(Q::AtMostOnce);
    for (filter, expected) in [
        ("$share/g/a/b/c", granted),
        ("$share/g/a/b/c", granted),
        ("$share/h/a", SubscribeReasonCode::QuotaExceeded),
        ("a", granted),
    ] {
        assert_eq!(peer.subscribe(filter, Q::AtMostOnce, now), expected);
    }
    let limit = broker.subscription_limit("a", b"$share/h/a");
    let text = "the session has as many shared subscriptions as it may have";
    assert_eq!(limit, Some(text));
    assert_eq!(broker.stats().subscriptions, 2);
    let mut no_local = Filter::new(JOBS, Q::AtMostOnce);
    no_local.nolocal = true;
    peer.send(&[subscribe_to([no_local], None)], now);
    peer.assert_disconnected(DisconnectReasonCode::ProtocolError);
}

#[test]
fn member_that_cannot_take_a_message_now_is_skipped() {
    let (broker, now) = start(limited(|it| it.output_bytes_high = 1));
    let narrow = Hello::new("narrow").window(1);
    let mut narrow = joined(&broker, &narrow, Q::AtLeastOnce, now);
    let small = Hello::new("small").set(|hello| hello.max_packet_size = Some(20));
    let mut small = joined(&broker, &small, Q::AtLeastOnce, now);
    let mut slow = member(&broker, "slow", Q::AtLeastOnce, now);
    // The message is too large for `small`, and the window of `narrow` holds only one.
    const LARGE: &str = "a payload of many more bytes";
    jobs(&broker, QoS::AtLeastOnce, [LARGE, LARGE]);
    assert_eq!(narrow.messages().len(), 1);
    // `slow` has not read yet. The first of these goes to `small`; the others wait for the next
    // members in turn.
    jobs(&broker, QoS::AtLeastOnce, ["1", "2", "3"]);
    assert_eq!(small.payloads(), ["1"]);
    assert_eq!(slow.payloads(), [LARGE, "2"]);
    assert_eq!(narrow.payloads(), [""; 0], "no acknowledgement yet");
    narrow.send(&[puback(1)], now);
    assert_eq!(narrow.payloads(), ["3"]);
}

/// A broker with a connected member that has no room for another message of 1000 bytes.
fn full_group(now: Instant) -> (Broker, Peer, usize) {
    let broker = broker(Limits {
        queue_bytes_max: 4000,
        queue_bytes_reserve: 0,
        ..Limits::default()
    });
    let slow = member(&broker, "slow", Q::AtLeastOnce, now);
    let mut publisher = Peer::new(&broker, &Hello::new("publisher"), now);
    let accepted = (0..10).filter(|_| send_large(&mut publisher, "jobs", false, now) == 0);
    let accepted = accepted.count();
    assert!((1..5).contains(&accepted), "{accepted} were accepted");
    (broker, slow, accepted)
}

/// Publishes a large message at QoS 1. Returns the reason code.
fn send_large(publisher: &mut Peer, topic: &str, retain: bool, now: Instant) -> u8 {
    let mut message = publish(topic, Q::AtLeastOnce, 1, &"x".repeat(1000));
    message.retain = retain;
    publisher.send(&[Packet::Publish(message)], now);
    match &publisher.receive()[..] {
        [Packet::PubAck(ack)] => ack.reason as u8,
        other => panic!("{other:?} instead of a PUBACK"),
    }
}

/// A publisher at QoS 1 must not take a dropped message for a delivered one.
#[test]
fn publisher_is_refused_if_no_member_has_room() {
    let now = Instant::now();
    let (broker, mut slow, accepted) = full_group(now);
    assert_eq!(broker.stats().dropped, 0);
    assert_eq!(slow.read_all(now).len(), accepted);
    let mut publisher = Peer::new(&broker, &Hello::new("publisher"), now);
    assert_eq!(send_large(&mut publisher, "jobs", false, now), 0);
}

/// If another subscriber has the message, or it is retained, it cannot be refused any more.
#[test]
fn message_for_a_full_group_is_dropped_if_another_receiver_has_it() {
    let now = Instant::now();
    let (broker, mut slow, accepted) = full_group(now);
    let mut publisher = Peer::new(&broker, &Hello::new("publisher"), now);
    assert_eq!(send_large(&mut publisher, "jobs", true, now), 0);
    assert_eq!((broker.stats().retained, broker.stats().dropped), (1, 1));
    let mut plain = Peer::new(&broker, &Hello::new("plain").expiry(0), now);
    plain.subscribe("jobs", Q::AtMostOnce, now);
    plain.receive();
    assert_eq!(send_large(&mut publisher, "jobs", false, now), 0);
    assert_eq!((plain.payloads().len(), broker.stats().dropped), (1, 2));
    assert_eq!(slow.read_all(now).len(), accepted);
}

#[test]
fn absent_members_get_messages_connected_ones_cannot_take() {
    let cost_bytes = Message::new("jobs", "1", QoS::AtLeastOnce).cost_bytes() + JOBS.len();
    let (broker, now) = start(limited(|it| it.queue_bytes_max = 2 * cost_bytes));
    member(&broker, "absent", Q::AtLeastOnce, now).lose(now);
    let mut present = member(&broker, "present", Q::AtLeastOnce, now);
    jobs(&broker, QoS::AtLeastOnce, ["1", "2", "3", "4", "5"]);
    assert_eq!(
        present.payloads(),
        ["1", "2"],
        "unacknowledged messages fill its queue"
    );
    assert_eq!(
        broker.stats().dropped,
        1,
        "all queues are full, and no member is disconnected"
    );
    present.disconnect(DisconnectReasonCode::NormalDisconnection, now);
    jobs(&broker, QoS::AtMostOnce, ["to no member"]);
    assert_eq!(broker.stats().dropped, 1);
    assert_eq!(back(&broker, "absent", now).payloads(), ["3", "4"]);
}

#[test]
fn ended_session_leaves_its_messages_to_the_group() {
    for by_clean_start in [false, true] {
        let (broker, now) = start(Limits::default());
        let hello = Hello::new("a")
            .expiry(if by_clean_start { 1000 } else { 0 })
            .window(3);
        let mut a = joined(&broker, &hello, Q::AtLeastOnce, now);
        jobs(&broker, QoS::ExactlyOnce, ["done", "sent"]);
        jobs(&broker, QoS::AtLeastOnce, ["refused", "unsent", "last"]);
        let sent = a.messages();
        assert_eq!(sent.len(), 3);
        a.send(&[puback(sent[0].pkid)], now);
        let mut refusal = wire::PubAck::new(sent[2].pkid, None);
        refusal.reason = PubAckReason::UnspecifiedError;
        a.send(&[Packet::PubAck(refusal)], now);
        let mut b = member(&broker, "b", Q::ExactlyOnce, now);
        a.lose(now);
        if by_clean_start {
            assert_eq!(b.payloads(), [""; 0], "the session still exists");
            Peer::new(&broker, &Hello::new("a").clean(), now);
        }
        let messages = b.messages();
        let payloads: Vec<_> = messages.iter().map(|it| &it.payload[..]).collect();
        assert_eq!(payloads, [&b"sent"[..], b"unsent", b"last"]);
        assert!(
            messages.iter().all(|it| !it.dup),
            "not a duplicate for this client"
        );
        assert_eq!(messages[0].qos, Q::ExactlyOnce, "as published, not as sent");
    }
}

/// [MQTT-4.8.2-5]
#[test]
fn messages_sent_at_qos_2_are_not_redistributed() {
    let (broker, now) = start(Limits::default());
    let hello = Hello::new("a").expiry(0).window(2);
    let mut a = joined(&broker, &hello, Q::ExactlyOnce, now);
    jobs(&broker, QoS::ExactlyOnce, ["sent", "received", "unsent"]);
    let sent = a.messages();
    a.send(&[pubrec(sent[1].pkid)], now);
    let mut b = member(&broker, "b", Q::ExactlyOnce, now);
    a.lose(now);
    assert_eq!(b.payloads(), ["unsent"]);
    b.disconnect(DisconnectReasonCode::NormalDisconnection, now);
    let mut again = Peer::waiting(&broker, &Hello::new("b"), now);
    let packets = again.receive();
    assert!(
        matches!(packets.last(), Some(Packet::Publish(publish)) if publish.dup),
        "{packets:?}: the message belongs to the session of b now"
    );
}

#[test]
fn groups_and_their_messages_survive_a_restart() {
    for by_image in [false, true] {
        let (log, now) = (TestLog::new(true), Instant::now());
        let service = || Arc::new(NoService);
        let first = restored(&log, Limits::default(), service(), now, now);
        let mut a = member(&first, "a", Q::AtLeastOnce, now);
        jobs(&first, QoS::ExactlyOnce, ["sent"]);
        assert_eq!(a.payloads(), ["sent"]);
        a.lose(now);
        jobs(&first, QoS::ExactlyOnce, ["unsent"]);
        member(&first, "b", Q::ExactlyOnce, now).lose(now);
        let second = if by_image {
            let (recovery, clock) = (recovered(&image(&first, 1)), Clock::at(now, WALL_MS));
            Broker::restore_at(Options::default(), service(), recovery, clock)
        } else {
            restored(&log, Limits::default(), service(), now, now)
        };
        // Ends the session of `a`.
        Peer::new(&second, &Hello::new("a").clean(), now);
        let mut b = back(&second, "b", now);
        let messages = b.messages();
        let payloads: Vec<_> = messages.iter().map(|it| &it.payload[..]).collect();
        assert_eq!(payloads, [&b"sent"[..], b"unsent"]);
        assert!(messages.iter().all(|it| it.qos == Q::ExactlyOnce));
        let mut c = member(&second, "c", Q::AtLeastOnce, now);
        jobs(&second, QoS::AtLeastOnce, ["1", "2"]);
        assert_eq!((b.payloads().len(), c.payloads().len()), (1, 1));
    }
}

/// Once the flag is set, client `a` may no longer subscribe to anything.
struct Closing(AtomicBool);

impl Access for Closing {
    fn admit(&self, attempt: Attempt) -> Deciding {
        Anyone.admit(attempt)
    }

    fn may_publish(&self, _: &Origin, _: &[u8]) -> bool {
        true
    }

    fn may_subscribe(&self, who: &Origin, filter: &[u8]) -> bool {
        assert!(!filter.starts_with(b"$share"));
        filter != b"secret" && !(&*who.client == "a" && self.0.load(Ordering::Relaxed))
    }
}

#[test]
fn messages_forbidden_to_a_member_go_to_another() {
    let access = Arc::new(Closing(AtomicBool::new(false)));
    let options = Options {
        access: access.clone(),
        ..Options::default()
    };
    let (broker, now) = (Broker::new(options, Arc::new(NoService)), Instant::now());
    let hello = Hello::new("a").window(1);
    let mut a = joined(&broker, &hello, Q::AtLeastOnce, now);
    let refused = a.subscribe("$share/g/secret", Q::AtLeastOnce, now);
    assert_eq!(refused, SubscribeReasonCode::NotAuthorized);
    jobs(&broker, QoS::AtLeastOnce, ["sent", "unsent"]);
    assert_eq!(a.payloads(), ["sent"]);
    let mut b = member(&broker, "b", Q::AtLeastOnce, now);
    access.0.store(true, Ordering::Relaxed);
    broker.recheck();
    assert_eq!(b.payloads(), ["unsent"]);
    jobs(&broker, QoS::AtLeastOnce, ["1", "2"]);
    assert_eq!(b.payloads(), ["1", "2"]);
    assert_eq!(broker.stats().dropped, 0);
}

/// Two groups and a plain subscriber. The subscription identifier shows which of them a message
/// came by.
const GROUPS: [(usize, &str); 2] = [(1, "$share/g/jobs"), (2, "$share/h/+")];
const PLAIN: usize = 3;

/// The subscription that a message came by, and the number of the message.
fn which(publish: &wire::Publish) -> (usize, usize) {
    let ids = &properties(publish).subscription_identifiers;
    assert_eq!(ids.len(), 1);
    let payload = std::str::from_utf8(&publish.payload).unwrap();
    (ids[0], payload.parse().unwrap())
}

struct World {
    log: Arc<TestLog>,
    broker: Broker,
    now: Instant,
    clients: [Option<Peer>; 4],
    published: Vec<QoS>,
    /// How often each message was acknowledged at QoS 1, by subscription identifier and message.
    acknowledged: BTreeMap<(usize, usize), usize>,
    /// The sessions that received each QoS 2 message.
    received: BTreeMap<(usize, usize), BTreeSet<(usize, usize)>>,
    /// How many sessions of each client have ended.
    ended: [usize; 4],
}

impl World {
    fn new() -> Self {
        let (log, now) = (TestLog::new(true), Instant::now());
        let mut world = Self {
            broker: Self::start(&log, now),
            log,
            now,
            clients: Default::default(),
            published: Vec::new(),
            acknowledged: BTreeMap::new(),
            received: BTreeMap::new(),
            ended: [0; 4],
        };
        for client in 0..4 {
            world.connect(client, false);
        }
        // One member stays in both groups, so that it can take over the messages of ended sessions.
        world.subscribe(0);
        world.send_subscribe(3, "jobs", PLAIN);
        world
    }

    fn start(log: &Arc<TestLog>, now: Instant) -> Broker {
        let limits = limited(|it| it.output_bytes_high = 100);
        restored(log, limits, Arc::new(NoService), now, now)
    }

    fn connect(&mut self, client: usize, clean: bool) {
        let hello = Hello::new(["a", "b", "c", "d"][client]).window(2);
        let hello = if clean { hello.clean() } else { hello };
        self.clients[client] = Some(Peer::new(&self.broker, &hello, self.now));
    }

    fn subscribe(&mut self, client: usize) {
        for (id, filter) in GROUPS {
            self.send_subscribe(client, filter, id);
        }
    }

    fn send_subscribe(&mut self, client: usize, filter: &str, id: usize) {
        let filter = Filter::new(filter, Q::ExactlyOnce);
        self.send(client, subscribe_to([filter], Some(id)));
    }

    fn unsubscribe(&mut self, client: usize) {
        for (_, filter) in GROUPS {
            self.send(client, unsubscribe(&[filter]));
        }
    }

    fn send(&mut self, client: usize, packet: Packet) {
        if let Some(peer) = &mut self.clients[client] {
            peer.send(&[packet], self.now);
        }
    }

    fn publish(&mut self, qos: QoS) {
        let message = Message::new("jobs", self.published.len().to_string(), qos);
        self.published.push(qos);
        let reached = self.broker.batch(|batch| batch.publish(message));
        assert_eq!(reached, GROUPS.len() + 1);
    }

    /// A client receives all waiting packets.
    fn receive_all(&mut self, client: usize) -> Vec<Packet> {
        let packets = self.clients[client].as_mut().map(Peer::receive);
        let packets = packets.unwrap_or_default();
        for packet in &packets {
            if let Packet::Publish(publish) = packet
                && publish.qos == Q::ExactlyOnce
            {
                let session = (client, self.ended[client]);
                self.received
                    .entry(which(publish))
                    .or_default()
                    .insert(session);
            }
        }
        packets
    }

    /// A client receives all waiting packets and answers them. Returns false if there were none.
    fn read(&mut self, client: usize) -> bool {
        let packets = self.receive_all(client);
        for packet in &packets {
            let answer = match packet {
                Packet::Publish(publish) if publish.qos == Q::AtLeastOnce => {
                    *self.acknowledged.entry(which(publish)).or_default() += 1;
                    puback(publish.pkid)
                }
                Packet::Publish(publish) => pubrec(publish.pkid),
                Packet::PubRel(rel) => pubcomp(rel.pkid),
                Packet::SubAck(_) | Packet::UnsubAck(_) => continue,
                other => panic!("{other:?}"),
            };
            self.send(client, answer);
        }
        !packets.is_empty()
    }

    fn act(&mut self, action: u8, client: usize) {
        let is_guest = client == 1 || client == 2;
        match action {
            0..4 => self.publish(QoS::AtLeastOnce),
            4..6 => self.publish(QoS::ExactlyOnce),
            6..9 => _ = self.read(client),
            9 if is_guest => self.subscribe(client),
            10 if is_guest => self.unsubscribe(client),
            11 => {
                self.receive_all(client);
                if let Some(peer) = self.clients[client].take() {
                    peer.lose(self.now);
                }
            }
            12 if self.clients[client].is_none() => self.connect(client, false),
            13 if is_guest => {
                self.receive_all(client);
                self.ended[client] += 1;
                self.connect(client, true);
            }
            14 => {
                self.clients = Default::default();
                self.broker = Self::start(&self.log, self.now);
            }
            _ => {}
        }
    }

    /// All clients read everything.
    fn finish(mut self) {
        for client in 0..4 {
            self.connect(client, false);
        }
        // `count` calls `read` for every client in every pass.
        while (0..4).filter(|client| self.read(*client)).count() > 0 {}
        for (n, qos) in self.published.iter().enumerate() {
            for id in [GROUPS[0].0, GROUPS[1].0, PLAIN] {
                if *qos == QoS::AtLeastOnce {
                    let times = self.acknowledged.get(&(id, n)).copied();
                    assert_eq!(times, Some(1), "message {n} by subscription {id}");
                } else {
                    let sessions = self.received.get(&(id, n)).map_or(0, BTreeSet::len);
                    let may_be_lost = self.ended != [0; 4];
                    assert!(
                        sessions == 1 || sessions == 0 && may_be_lost,
                        "message {n} by subscription {id} came to {sessions} sessions"
                    );
                }
            }
        }
        let stats = self.broker.stats();
        assert_eq!((stats.dropped, stats.queued_bytes), (0, 0));
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(500))]

    /// Members join, leave, stop reading and end their sessions, and the process is killed in
    /// between.
    #[test]
    fn one_member_of_each_group_gets_each_message(script in prop::collection::vec((0_u8..15, 0_usize..4), 0..120)) {
        let mut world = World::new();
        for (action, client) in script {
            world.act(action, client);
        }
        world.finish();
    }
}
