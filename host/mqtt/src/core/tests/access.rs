//! Enforcement of the access control, and its isolation between clients.

use std::{
    collections::BTreeSet,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    time::Instant,
};

use bytes::Bytes;
use wire::{DisconnectReasonCode, Packet, PubAckReason, PubRecReason};

use crate::{
    Access, Anyone, Attempt, Broker, Deciding, Identity, Limits, Message, NoService, Options,
    Origin, Proof, QoS, dispatch::Turn, testing::*,
};

/// Allows everything except publishing below `forbidden/`, for clients whose proofs are valid and
/// who are not in `strangers`.
#[derive(Default)]
struct Rules {
    strangers: Mutex<BTreeSet<String>>,
    /// Whether publishing to `valve` and subscribing below `plans/` are forbidden too, and a queued
    /// `secret` may not be sent.
    strict: AtomicBool,
    /// How many subscriptions were refused.
    refused: AtomicUsize,
}

impl Rules {
    fn may_read(&self, filter: &[u8]) -> bool {
        !filter.starts_with(b"plans/") || !self.strict.load(Ordering::Relaxed)
    }
}

impl Access for Rules {
    fn admit(&self, attempt: Attempt) -> Deciding {
        Anyone.admit(attempt)
    }

    fn may_connect(&self, who: &Origin) -> bool {
        who.identity.is_proven() && !self.strangers.lock().unwrap().contains(&*who.client)
    }

    fn may_publish(&self, _: &Origin, topic: &[u8]) -> bool {
        !topic.starts_with(b"forbidden/")
            && (topic != b"valve" || !self.strict.load(Ordering::Relaxed))
    }

    fn may_receive(&self, _: &Origin, topic: &[u8]) -> bool {
        topic != b"secret" || !self.strict.load(Ordering::Relaxed)
    }

    fn may_subscribe(&self, _: &Origin, filter: &[u8]) -> bool {
        let may = self.may_read(filter);
        self.refused.fetch_add(usize::from(!may), Ordering::Relaxed);
        may
    }

    fn may_resume(&self, _: &Origin, filter: &[u8]) -> bool {
        self.may_read(filter)
    }

    fn may_have_answer(&self, client: &str, requester: Option<&str>, _: &[u8]) -> bool {
        client != "neighbour" || requester == Some("friend")
    }
}

fn ruled(limits: Limits) -> (Broker, Arc<Rules>, Instant) {
    serving(limits, Arc::new(RecordingService::default()))
}

fn serving(limits: Limits, service: Arc<RecordingService>) -> (Broker, Arc<Rules>, Instant) {
    let rules = Arc::new(Rules::default());
    let options = Options {
        limits,
        access: rules.clone(),
        ..Options::default()
    };
    (Broker::new(options, service), rules, Instant::now())
}

/// A proof that is valid until it is revoked.
struct Key(AtomicBool);

impl Key {
    fn new() -> Arc<Self> {
        Arc::new(Self(AtomicBool::new(true)))
    }

    fn revoke(&self) {
        self.0.store(false, Ordering::Relaxed);
    }
}

impl Proof for Key {
    fn is_good(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }
}

fn proven(client: &str, by: &Arc<Key>) -> Arc<Identity> {
    Arc::new(Identity {
        user: Some(client.into()),
        proofs: vec![by.clone()],
        ..Identity::default()
    })
}

fn reauthenticate(peer: &Peer, by: &Arc<Key>) {
    let identity = proven(&peer.origin.client, by);
    let mut core = peer.broker.lock();
    core.authenticated(peer.session, peer.origin.connection, identity, "M");
}

/// The reasons of the PUBACKs that the client has received.
fn acknowledged(peer: &mut Peer) -> Vec<PubAckReason> {
    let packets = peer.receive().into_iter();
    let acks = packets.filter_map(|packet| match packet {
        Packet::PubAck(ack) => Some(ack.reason),
        _ => None,
    });
    acks.collect()
}

/// The client reads and acknowledges all its messages. Returns their topics.
fn topics(peer: &mut Peer, now: Instant) -> Vec<Bytes> {
    let messages = peer.read_all(now).into_iter();
    messages.map(|message| message.topic).collect()
}

/// Regression: a client that was allowed to publish nothing used up the rate of all clients.
#[test]
fn refused_messages_do_not_use_up_the_shared_rate() {
    let (broker, _, now) = ruled(limited(|it| it.publishes_per_second_total_max = 2));
    let mut hostile = Peer::new(&broker, &Hello::new("hostile"), now);
    let mut honest = Peer::new(&broker, &Hello::new("honest"), now);
    // Refused by the access control, by the service, and by a limit.
    let deep = "a/".repeat(1000);
    for topic in ["forbidden/t", "no/t", &deep] {
        for _ in 0..100 {
            hostile.publish(topic, Q::AtMostOnce, 0, "", now);
        }
    }
    let packets = [1, 2, 3].map(|id| Packet::Publish(publish("t", Q::AtLeastOnce, id, "")));
    honest.send(&packets, now);
    assert_eq!(
        acknowledged(&mut honest),
        [
            PubAckReason::NoMatchingSubscribers,
            PubAckReason::NoMatchingSubscribers,
            PubAckReason::QuotaExceeded
        ]
    );
    // Requests count against the same rate.
    honest.publish("req/t", Q::AtLeastOnce, 4, "", now);
    assert_eq!(acknowledged(&mut honest), [PubAckReason::QuotaExceeded]);
}

/// Its message was taken before, and its PUBREC says so.
#[test]
fn repetition_of_a_taken_message_counts_as_no_refusal() {
    let limits = limited(|it| it.publishes_per_second_max = 2);
    let (broker, rules, now) = ruled(limits);
    let mut peer = Peer::new(&broker, &Hello::new("a"), now);
    peer.publish("valve", Q::ExactlyOnce, 1, "", now);
    rules.strict.store(true, Ordering::Relaxed);
    // The rules forbid the first repetition, and the rate limit the second one.
    for _ in 0..2 {
        peer.send(&[repeated("valve", Q::ExactlyOnce, 1, "")], now);
    }
    let packets = peer.receive();
    assert_eq!(packets.len(), 3, "{packets:?}");
    for packet in packets {
        let Packet::PubRec(ack) = packet else {
            panic!("{packet:?} instead of a PUBREC")
        };
        assert_eq!(ack.reason, PubRecReason::NoMatchingSubscribers);
    }
    assert!(broker.refusals().is_empty());
    assert_eq!(broker.stats().throttled, 0);
    peer.publish("valve", Q::ExactlyOnce, 2, "", now);
    assert_eq!((broker.refusals().len(), broker.stats().throttled), (1, 1));
}

/// Regression: a message that waited because its client did not read was routed by the rules of when
/// it arrived, and messages that waited for the client were sent although it may not have them.
#[test]
fn waiting_messages_obey_the_new_rules() {
    let (broker, rules, now) = ruled(Limits {
        queue_bytes_max: 2000,
        queue_bytes_reserve: 0,
        ..Limits::default()
    });
    let mut a = Peer::new(&broker, &Hello::new("a").window(1), now);
    a.subscribe("secret", Q::AtLeastOnce, now);
    a.subscribe("open", Q::AtLeastOnce, now);
    let mut b = Peer::new(&broker, &Hello::new("b"), now);
    b.subscribe("valve", Q::AtMostOnce, now);
    let text = "x".repeat(400);
    let packets = [("secret", 1), ("secret", 2), ("open", 3), ("valve", 4)];
    let packets =
        packets.map(|(topic, id)| Packet::Publish(publish(topic, Q::AtLeastOnce, id, &text)));
    assert_eq!(a.send(&packets, now), Turn::Paused);
    rules.strict.store(true, Ordering::Relaxed);
    broker.recheck();
    let mut topics = Vec::new();
    let mut reasons = Vec::new();
    loop {
        let received = a.receive();
        let sent: Vec<_> = received
            .iter()
            .filter_map(|packet| match packet {
                Packet::Publish(it) => Some((it.topic.clone(), it.pkid)),
                _ => None,
            })
            .collect();
        reasons.extend(received.iter().filter_map(|packet| match packet {
            Packet::PubAck(ack) if ack.pkid == 4 => Some(ack.reason),
            _ => None,
        }));
        if sent.is_empty() {
            break;
        }
        for (topic, id) in sent {
            topics.push(topic);
            a.send(&[puback(id)], now);
        }
    }
    // The first was sent before.
    assert_eq!(topics, ["secret", "open"]);
    assert_eq!(reasons, [PubAckReason::NotAuthorized]);
    assert_eq!(b.messages().len(), 0);
}

/// Regression: a client whose subscription was forbidden for a moment never got a message of it
/// again, also in a resumed session.
#[test]
fn subscription_continues_when_it_is_allowed_again() {
    let (broker, rules, now) = ruled(Limits::default());
    let mut stays = Peer::new(&broker, &Hello::new("stays"), now);
    let mut returns = Peer::new(&broker, &Hello::new("returns").expiry(60), now);
    let mut ends = Peer::new(&broker, &Hello::new("ends"), now);
    for peer in [&mut stays, &mut returns, &mut ends] {
        peer.subscribe("plans/#", Q::AtMostOnce, now);
    }
    returns.subscribe("$share/g/plans/#", Q::AtMostOnce, now);
    let mut publisher = Peer::new(&broker, &Hello::new("publisher"), now);

    rules.strict.store(true, Ordering::Relaxed);
    broker.recheck();
    assert_eq!(broker.stats().subscriptions, 0);
    ends.send(&[unsubscribe(&["plans/#"])], now);
    returns.lose(now);
    let mut returns = Peer::new(&broker, &Hello::new("returns").expiry(60), now);
    broker.recheck();
    // Regression: each change of the rules, and each return, refused the subscriptions again.
    assert_eq!(rules.refused.load(Ordering::Relaxed), 4);
    publisher.publish("plans/1", Q::AtMostOnce, 0, "secret", now);
    for peer in [&mut stays, &mut returns, &mut ends] {
        assert_eq!(peer.payloads(), [""; 0]);
    }

    rules.strict.store(false, Ordering::Relaxed);
    broker.recheck();
    publisher.publish("plans/1", Q::AtMostOnce, 0, "open", now);
    assert_eq!(stays.payloads(), ["open"]);
    assert_eq!(returns.payloads(), ["open", "open"]);
    assert_eq!(ends.payloads(), [""; 0]);
}

/// Regression: a client kept what was queued for a subscription that it had ended before the rules
/// changed, and a group's messages went to another member that had lost the right, too.
#[test]
fn queued_messages_of_withdrawn_topics_reach_no_client() {
    let (broker, rules, now) = ruled(Limits::default());
    let mut former = Peer::new(&broker, &Hello::new("former").window(1), now);
    former.subscribe("plans/#", Q::AtLeastOnce, now);
    former.subscribe("open", Q::AtLeastOnce, now);
    let mut first = Peer::new(&broker, &Hello::new("first").window(1), now);
    first.subscribe("$share/g/plans/#", Q::AtLeastOnce, now);
    let mut publisher = Peer::new(&broker, &Hello::new("publisher"), now);
    for (topic, id) in [("plans/1", 1), ("plans/2", 2), ("open", 3)] {
        publisher.publish(topic, Q::AtLeastOnce, id, topic, now);
    }
    former.send(&[unsubscribe(&["plans/#"])], now);
    let mut second = Peer::new(&broker, &Hello::new("second"), now);
    second.subscribe("$share/g/plans/#", Q::AtLeastOnce, now);
    rules.strict.store(true, Ordering::Relaxed);
    broker.recheck();
    // The first message of each was in flight.
    assert_eq!(topics(&mut former, now), ["plans/1", "open"]);
    assert_eq!(topics(&mut first, now), ["plans/1"]);
    assert_eq!(topics(&mut second, now), [""; 0]);
}

/// Regression: a message of the service that was decided before the rules changed, and arrived
/// after they were applied, stayed in the queue.
#[test]
fn message_of_the_service_that_arrives_after_new_rules_does_not_wait() {
    let (broker, rules, now) = ruled(Limits::default());
    let mut a = Peer::new(&broker, &Hello::new("a").window(1), now);
    let deliver = |topic: &'static str| {
        let message = Message::new(topic, topic.to_owned(), QoS::AtLeastOnce);
        let mut core = broker.lock();
        assert!(core.deliver("a", a.origin.connection, message, now));
    };
    deliver("secret");
    deliver("open");
    rules.strict.store(true, Ordering::Relaxed);
    broker.recheck();
    deliver("secret");
    deliver("open");
    // The first was sent before.
    assert_eq!(topics(&mut a, now), ["secret", "open", "open"]);
    assert_eq!(broker.stats().dropped, 1);
}

/// Forbids that `secret` waits for a client. Counts the questions.
#[derive(Default)]
struct Counting(AtomicUsize);

impl Access for Counting {
    fn admit(&self, attempt: Attempt) -> Deciding {
        Anyone.admit(attempt)
    }

    fn may_publish(&self, _: &Origin, _: &[u8]) -> bool {
        true
    }

    fn may_subscribe(&self, _: &Origin, _: &[u8]) -> bool {
        true
    }

    fn may_keep(&self, _: &Origin, topic: &[u8]) -> bool {
        self.0.fetch_add(1, Ordering::Relaxed);
        topic != b"secret"
    }
}

/// Publishes from the broker itself, with each topic as the payload.
fn send_topics(broker: &Broker, topics: &[&'static str]) {
    broker.batch(|batch| {
        for topic in topics {
            batch.publish(Message::new(*topic, *topic, QoS::AtLeastOnce));
        }
    });
}

/// Regression: each reconnection asked the access control about each message of a long queue.
#[test]
fn resumption_asks_once_for_queued_messages_of_one_topic() {
    let access = Arc::new(Counting::default());
    let options = Options {
        access: access.clone(),
        ..Options::default()
    };
    let broker = Broker::new(options, Arc::new(NoService));
    let now = Instant::now();
    let mut a = Peer::new(&broker, &Hello::new("a"), now);
    a.subscribe("#", Q::AtLeastOnce, now);
    a.lose(now);
    let topics = [
        "open", "open", "secret", "secret", "secret", "open", "news", "open", "open",
    ];
    send_topics(&broker, &topics);
    let mut a = Peer::new(&broker, &Hello::new("a"), now);
    assert_eq!(access.0.load(Ordering::Relaxed), 5);
    assert_eq!(
        a.payloads(),
        ["open", "open", "open", "news", "open", "open"]
    );
}

/// Regression: each reconnection examined the whole queue, also if everything is allowed.
#[test]
fn resumption_without_rules_examines_no_queued_message() {
    let now = Instant::now();
    let work = |count| {
        let broker = broker(Limits::default());
        Peer::leave_subscribed(&broker, "a", now);
        send_topics(&broker, &vec!["t"; count]);
        let before = broker.lock().work();
        let mut a = Peer::new(&broker, &Hello::new("a").window(1), now);
        assert_eq!(a.payloads(), ["t"]);
        broker.lock().work() - before
    };
    assert_eq!(work(2), work(100));
}

/// Regression: a token was verified with keys that were then replaced, and the recheck asked about
/// the token before it.
#[test]
fn reauthentication_with_a_revoked_proof_disconnects() {
    let (broker, _, now) = ruled(Limits::default());
    let mut client = Peer::new(&broker, &Hello::new("a"), now);
    let key = Key::new();
    reauthenticate(&client, &key);
    assert_eq!(client.output.drain()[0], 0xf0, "an AUTH");
    let asked = broker.connected();
    key.revoke();
    reauthenticate(&client, &key);
    broker.end_refused(asked);
    client.assert_disconnected(DisconnectReasonCode::NotAuthorized);
}

#[test]
fn reauthentication_of_a_forbidden_client_disconnects() {
    let (broker, rules, now) = ruled(Limits::default());
    let mut client = Peer::new(&broker, &Hello::new("a"), now);
    rules.strangers.lock().unwrap().insert("a".to_owned());
    reauthenticate(&client, &Key::new());
    client.assert_disconnected(DisconnectReasonCode::NotAuthorized);
}

/// Sends a request to the service and returns its token.
fn ask(peer: &mut Peer, service: &RecordingService, now: Instant) -> crate::Token {
    peer.publish("req/x", Q::AtLeastOnce, 1, "", now);
    let (_, request) = service.requests.lock().unwrap().pop().unwrap();
    request.token.unwrap()
}

fn answer(broker: &Broker, token: crate::Token) {
    broker
        .batch(|batch| batch.answer(Some(&token), Message::new("answers", "x", QoS::AtLeastOnce)));
}

#[test]
fn answer_is_not_sent_to_unauthorized_clients() {
    let service = Arc::new(RecordingService::default());
    let (broker, _, now) = serving(Limits::default(), service.clone());
    let mut clients = ["requester", "friend", "neighbour"].map(|name| {
        let mut peer = Peer::new(&broker, &Hello::new(name).expiry(0), now);
        peer.subscribe("answers", Q::AtLeastOnce, now);
        peer.subscribe("$share/g/answers", Q::AtLeastOnce, now);
        peer
    });
    let mut received = |requester: usize, count: usize| {
        for _ in 0..count {
            let token = ask(&mut clients[requester], &service, now);
            answer(&broker, token);
        }
        clients.each_mut().map(|it| it.payloads().len())
    };
    // All members of the group but one take turns.
    assert_eq!(received(0, 6), [6 + 3, 6 + 3, 0]);
    // Here all three members take turns.
    assert_eq!(received(1, 6), [6 + 2, 6 + 2, 6 + 2]);
    // After the session has ended, another one takes its slot.
    let token = ask(&mut clients[0], &service, now);
    let [requester, _friend, mut neighbour] = clients;
    let place = requester.session;
    requester.lose(now);
    let mut late = Peer::new(&broker, &Hello::new("late"), now);
    assert_eq!(late.session, place);
    late.subscribe("answers", Q::AtLeastOnce, now);
    answer(&broker, token);
    assert_eq!(late.payloads(), ["x"]);
    assert_eq!(neighbour.payloads(), [""; 0]);
}
