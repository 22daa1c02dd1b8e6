//! What the access control forbids, and what others notice of that: nothing.

use std::{
    collections::BTreeSet,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
    },
    time::Instant,
};

use wire::{DisconnectReasonCode, Packet, PubAckReason};

use crate::{
    Access, Anyone, Attempt, Broker, Deciding, Identity, Limits, Message, Options, Origin, Proof,
    QoS, testing::*,
};

/// Lets everybody do everything but publish below `forbidden/`, as long as what they have shown is good and nobody has
/// forbidden them to connect.
#[derive(Default)]
struct Rules {
    strangers: Mutex<BTreeSet<String>>,
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
    }

    fn may_subscribe(&self, _: &Origin, _: &[u8]) -> bool {
        true
    }

    fn may_have_answer(&self, client: &str, asker: Option<&str>, _: &[u8]) -> bool {
        client != "neighbour" || asker == Some("friend")
    }
}

fn ruled(limits: Limits) -> (Broker, Arc<Rules>) {
    serving(limits, Arc::new(Recorder::default()))
}

fn serving(limits: Limits, service: Arc<Recorder>) -> (Broker, Arc<Rules>) {
    let rules = Arc::new(Rules::default());
    let options = Options {
        limits,
        access: rules.clone(),
        ..Options::default()
    };
    (Broker::new(options, service), rules)
}

/// A key, as long as it is there.
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

/// The reasons of the PUBACKs among what the broker has sent.
fn acknowledged(peer: &mut Peer) -> Vec<PubAckReason> {
    let packets = peer.receive().into_iter();
    let acks = packets.filter_map(|packet| match packet {
        Packet::PubAck(ack) => Some(ack.reason),
        _ => None,
    });
    acks.collect()
}

/// A client that could publish nothing used up the rate of everybody.
#[test]
fn what_is_refused_anyway_uses_up_nothing_of_the_rate_that_all_clients_share() {
    let (broker, _) = ruled(Limits {
        publishes_per_second_total_max: 2,
        ..Limits::default()
    });
    let now = Instant::now();
    let mut hostile = Peer::new(&broker, &Hello::new("hostile"), now);
    let mut honest = Peer::new(&broker, &Hello::new("honest"), now);
    // By the access control, by the service, and by a bound.
    let deep = "a/".repeat(1000);
    for topic in ["forbidden/t", "no/t", &deep] {
        for _ in 0..100 {
            let packet = Packet::Publish(publish(topic, Q::AtMostOnce, 0, ""));
            hostile.send(&[packet], now);
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
    // Requests are of the rate too.
    honest.send(
        &[Packet::Publish(publish("req/t", Q::AtLeastOnce, 4, ""))],
        now,
    );
    assert_eq!(acknowledged(&mut honest), [PubAckReason::QuotaExceeded]);
}

/// The token was verified by the old keys, these were replaced, and everybody was asked: about the token before it.
#[test]
fn a_client_that_shows_anew_what_was_just_revoked_is_disconnected() {
    let (broker, _) = ruled(Limits::default());
    let now = Instant::now();
    let mut client = Peer::new(&broker, &Hello::new("a"), now);
    let key = Key::new();
    reauthenticate(&client, &key);
    assert_eq!(client.output.drain()[0], 0xf0, "an AUTH");
    let asked = broker.connected();
    key.revoke();
    reauthenticate(&client, &key);
    broker.end_refused(asked);
    assert_eq!(
        disconnected(&client.receive()),
        Some(DisconnectReasonCode::NotAuthorized)
    );
}

#[test]
fn a_client_that_authenticates_anew_after_rules_have_forbidden_it_is_disconnected() {
    let (broker, rules) = ruled(Limits::default());
    let mut client = Peer::new(&broker, &Hello::new("a"), Instant::now());
    rules.strangers.lock().unwrap().insert("a".to_owned());
    reauthenticate(&client, &Key::new());
    assert_eq!(
        disconnected(&client.receive()),
        Some(DisconnectReasonCode::NotAuthorized)
    );
}

/// Sends a request, which the service has to answer.
fn ask(peer: &mut Peer, service: &Recorder, now: Instant) -> crate::Token {
    peer.send(
        &[Packet::Publish(publish("req/x", Q::AtLeastOnce, 1, ""))],
        now,
    );
    let (_, request) = service.requests.lock().unwrap().pop().unwrap();
    request.token.unwrap()
}

fn answer(broker: &Broker, token: crate::Token) {
    broker
        .batch(|batch| batch.answer(Some(&token), Message::new("answers", "x", QoS::AtLeastOnce)));
}

#[test]
fn an_answer_reaches_no_client_that_may_not_have_it() {
    let service = Arc::new(Recorder::default());
    let (broker, _) = serving(Limits::default(), service.clone());
    let now = Instant::now();
    let mut clients = ["asker", "friend", "neighbour"].map(|name| {
        let mut peer = Peer::new(&broker, &Hello::new(name).expiry(0), now);
        peer.subscribe("answers", Q::AtLeastOnce, now);
        peer.subscribe("$share/g/answers", Q::AtLeastOnce, now);
        peer
    });
    let mut received = |asker: usize, count: usize| {
        for _ in 0..count {
            let token = ask(&mut clients[asker], &service, now);
            answer(&broker, token);
        }
        clients.each_mut().map(|it| it.payloads().len())
    };
    // The members of the group but one take turns.
    assert_eq!(received(0, 6), [6 + 3, 6 + 3, 0]);
    // Here all of them do.
    assert_eq!(received(1, 6), [6 + 2, 6 + 2, 6 + 2]);
    // Once its session has ended, another one has the asker's place.
    let token = ask(&mut clients[0], &service, now);
    let [asker, _friend, mut neighbour] = clients;
    let place = asker.session;
    asker.lose(now);
    let mut late = Peer::new(&broker, &Hello::new("late"), now);
    assert_eq!(late.session, place);
    late.subscribe("answers", Q::AtLeastOnce, now);
    answer(&broker, token);
    assert_eq!(late.payloads(), ["x"]);
    assert_eq!(neighbour.payloads(), [""; 0]);
}
