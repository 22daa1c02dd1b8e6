//! Limits on the work of one turn of a connection.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex},
    time::Instant,
};

use wire::{Packet, RetainForwardRule};

use crate::{
    Claim, Limits, Message, Options, Origin, QoS, ReasonCode, RefusalCount, Refused, Request,
    Service,
    dispatch::Turn,
    limits::{FILTERS_PER_STEP, WORK_PER_TURN_MAX, work},
    testing::*,
};

/// A broker with `count` retained messages on topics `r/NUMBER/NUMBER`.
fn with_retained(count: usize) -> crate::Broker {
    retained_within(count, Limits::default())
}

fn retained_within(count: usize, limits: Limits) -> crate::Broker {
    let broker = broker(limits);
    for number in 0..count {
        retain(&broker, number, "x");
    }
    assert_eq!(broker.stats().retained, count);
    broker
}

/// Such a broker, with a small queue for a client that takes one message at a time.
pub(super) fn with_slow_peer(count: usize, now: Instant) -> (crate::Broker, Peer) {
    let limits = Limits {
        queue_bytes_max: 64 << 10,
        queue_bytes_reserve: 0,
        ..Limits::default()
    };
    let broker = retained_within(count, limits);
    let peer = Peer::new(&broker, &Hello::new("a").window(1), now);
    (broker, peer)
}

fn retain(broker: &crate::Broker, number: usize, payload: &'static str) {
    let mut message = Message::new(format!("r/{number:05}/{number}"), payload, QoS::ExactlyOnce);
    message.retain = true;
    broker.batch(|batch| batch.publish(message));
}

/// A SUBSCRIBE with these filters at QoS 0.
pub(super) fn subscribe_all(filters: &[impl AsRef<str>]) -> Packet {
    let filters = filters
        .iter()
        .map(|it| wire::Filter::new(it.as_ref(), Q::AtMostOnce));
    subscribe_to(filters, None)
}

/// Whether no turn exceeded its limit by more than its last operation, which may do this much work.
fn are_bounded(works: &[u64], last: u64) -> bool {
    works.iter().all(|work| *work <= WORK_PER_TURN_MAX + last)
}

#[test]
fn a_search_for_retained_messages_is_cut_into_turns() {
    const RETAINED: usize = 4000;
    let (broker, now) = (with_retained(RETAINED), Instant::now());
    let mut peer = Peer::new(&broker, &Hello::new("a"), now);
    let filters: Vec<_> = (0..20).map(|number| format!("+/+/x{number}/#")).collect();
    let packets = bytes(&[subscribe_all(&filters), subscribe_all(&["#"]), ping()]);
    let (turn, works) = peer.turns(&packets, now);
    assert_eq!(turn, Turn::Drained);
    let found = work::delivery(1) + work::RETAINED_EXAMINED;
    let subscribed = work::PACKET + work::SUBSCRIPTION * filters.len() as u64;
    assert!(are_bounded(&works, found.max(subscribed)), "{works:?}");
    assert!(
        works.len()
            > 21 * RETAINED * work::RETAINED_EXAMINED as usize / WORK_PER_TURN_MAX as usize / 2
    );
    let received = peer.receive();
    assert!(matches!(
        received[..3],
        [Packet::SubAck(_), Packet::SubAck(_), Packet::Publish(_)]
    ));
    assert!(matches!(received.last(), Some(Packet::PingResp(_))));
    assert_eq!(received.len(), RETAINED + 3);
}

#[test]
fn a_thousand_filters_in_one_packet_take_several_turns() {
    const FILTERS: usize = 1000;
    let (broker, now) = (with_retained(10), Instant::now());
    let mut peer = Peer::new(&broker, &Hello::new("a"), now);
    let mut filters: Vec<_> = (0..FILTERS).map(|number| format!("t/{number}")).collect();
    filters[0] = "r/#".to_owned();
    let packets = bytes(&[subscribe_all(&filters), ping(), unsubscribe(&filters)]);
    let (turn, works) = peer.turns(&packets, now);
    assert_eq!(turn, Turn::Drained);
    let step = work::PACKET + work::SUBSCRIPTION * FILTERS_PER_STEP as u64;
    assert!(are_bounded(&works, step), "{works:?}");
    let received = peer.receive();
    let [
        Packet::SubAck(granted),
        messages @ ..,
        Packet::UnsubAck(ended),
    ] = &received[..]
    else {
        panic!("{received:?}");
    };
    assert_eq!(granted.return_codes.len(), FILTERS);
    assert_eq!(
        messages.len(),
        10 + 1,
        "retained messages, and the PINGRESP"
    );
    let success = |it: &&wire::UnsubAckReason| **it == wire::UnsubAckReason::Success;
    assert_eq!(ended.reasons.iter().filter(success).count(), FILTERS);
    assert_eq!(broker.stats().subscriptions, 0);
}

/// Regression: the broker discarded an answer above the Maximum Packet Size of the client, although
/// the filters took effect.
#[test]
fn filters_with_an_answer_too_large_for_the_client_disconnect() {
    const FITTING: usize = 95;
    let (broker, now) = start(Limits::default());
    let hello = Hello::new("a").set(|it| it.max_packet_size = Some(5 + FITTING as u32));
    // The others need two steps.
    let filters: Vec<_> = (0..120).map(|number| format!("t/{number}")).collect();
    let fitting = subscribe_all(&filters[..FITTING]);
    for (step, too_large) in [
        subscribe_all(&filters),
        subscribe_all(&filters[..=FITTING]),
        unsubscribe(&filters),
    ]
    .into_iter()
    .enumerate()
    {
        let mut peer = Peer::new(&broker, &hello, now);
        assert_eq!(
            peer.send(std::slice::from_ref(&fitting), now),
            Turn::Drained
        );
        assert_packets!(peer.receive(), [Packet::SubAck(_)]);
        assert_eq!(peer.send(&[too_large], now), Turn::Over);
        let reason = wire::DisconnectReasonCode::PacketTooLarge;
        peer.assert_disconnected(reason);
        assert_eq!(broker.stats().subscriptions, FITTING);
        let refused = RefusalCount {
            what: Refused::Connection,
            reason: ReasonCode::PACKET_TOO_LARGE,
            count: step as u64 + 1,
        };
        assert_eq!(broker.refusals(), [refused]);
        peer.lose(now);
    }
}

#[test]
fn a_resumed_session_is_sent_the_rest_of_its_retained_messages() {
    const RETAINED: usize = 2000;
    let (broker, now) = (with_retained(RETAINED), Instant::now());
    let mut peer = Peer::new(&broker, &Hello::new("a"), now);
    let turn = peer.turn(&mut bytes(&[subscribe_all(&["r/#"])]), now);
    assert_eq!(turn, Turn::Cut);
    let before = peer.messages().len();
    assert!((1..RETAINED).contains(&before));
    peer.lose(now);
    let mut peer = Peer::new(&broker, &Hello::new("a"), now);
    assert_eq!(peer.send(&[], now), Turn::Drained);
    assert_eq!(before + peer.messages().len(), RETAINED);
}

#[test]
fn a_message_is_sent_live_or_as_retained_but_not_both() {
    const RETAINED: usize = 2000;
    for qos in [Q::AtMostOnce, Q::AtLeastOnce, Q::ExactlyOnce] {
        let (broker, now) = (with_retained(RETAINED), Instant::now());
        let mut peer = Peer::new(&broker, &Hello::new("a"), now);
        let turn = peer.turn(&mut bytes(&[subscribe("r/#", qos)]), now);
        assert_eq!(turn, Turn::Cut);
        let mut messages = peer.messages();
        assert!((1..RETAINED).contains(&messages.len()));
        // The first was sent before, the others are ahead of the search.
        for number in [0, RETAINED - 1, RETAINED] {
            retain(&broker, number, "new");
        }
        while peer.send(&[], now) != Turn::Drained {}
        messages.extend(peer.read_all(now));
        let new = messages.iter().filter(|it| it.payload == "new").count();
        assert_eq!((new, messages.len()), (3, RETAINED - 1 + 3), "{qos:?}");
    }
}

#[test]
fn unsubscribe_ends_a_search_that_waits_for_the_client() {
    const RETAINED: usize = 1000;
    let now = Instant::now();
    let (broker, mut peer) = with_slow_peer(RETAINED, now);
    let turn = peer.send(&[subscribe("r/#", Q::AtLeastOnce)], now);
    assert_eq!(turn, Turn::Paused);
    let turn = peer.send(&[unsubscribe(&["r/#"])], now);
    assert_eq!(turn, Turn::Drained);
    retain(&broker, RETAINED - 1, "new");
    let received = peer.read_all(now);
    assert!((1..RETAINED).contains(&received.len()), "{received:?}");
    // The other one was published after the UNSUBACK.
    assert!(received.iter().all(|it| it.payload == "x"), "{received:?}");
}

#[test]
fn a_repeated_subscribe_begins_its_search_again() {
    const RETAINED: usize = 1000;
    const REPEATED: usize = 50;
    let now = Instant::now();
    let (_broker, mut peer) = with_slow_peer(RETAINED, now);
    let filters = ["r/#"; REPEATED].map(|filter| wire::Filter::new(filter, Q::AtLeastOnce));
    let turn = peer.send(&[subscribe_to(filters, None)], now);
    assert_eq!(turn, Turn::Paused);
    assert_eq!(peer.read_all(now).len(), RETAINED);
}

/// A search continues with the options of the last SUBSCRIBE, as after a restart [MQTT-3.8.4-3].
#[test]
fn a_repeated_subscribe_replaces_the_options_of_its_search() {
    const RETAINED: usize = 1000;
    for rule in [RetainForwardRule::OnNewSubscribe, RetainForwardRule::Never] {
        let now = Instant::now();
        let (_broker, mut peer) = with_slow_peer(RETAINED, now);
        let mut filter = wire::Filter::new("r/#", Q::AtLeastOnce);
        let turn = peer.send(&[subscribe_to([filter.clone()], None)], now);
        assert_eq!(turn, Turn::Paused);
        (filter.qos, filter.retain_forward_rule) = (Q::AtMostOnce, rule);
        peer.send(&[subscribe_to([filter], Some(7))], now);
        let received = peer.read_all(now);
        assert_eq!(received.len(), RETAINED);
        assert_eq!(received[RETAINED - 1].qos, Q::AtMostOnce);
        for message in &received {
            let properties = message.properties.as_ref();
            let ids = properties.map_or(0, |it| it.subscription_identifiers.len());
            assert_eq!(ids, usize::from(message.qos == Q::AtMostOnce));
        }
    }
}

#[test]
fn a_flood_through_many_wildcards_is_cut_into_turns() {
    let (broker, now) = (broker(Limits::default()), Instant::now());
    let mut subscriber = Peer::new(&broker, &Hello::new("a"), now);
    for number in 0..512_u32 {
        let levels = (0..9).map(|bit| if number >> bit & 1 == 0 { "+" } else { "a" });
        let filter = levels.collect::<Vec<_>>().join("/") + "/never";
        subscriber.subscribe(&filter, Q::AtMostOnce, now);
    }
    let mut publisher = Peer::new(&broker, &Hello::new("b"), now);
    let flood = vec![Packet::Publish(publish(&["a"; 9].join("/"), Q::AtMostOnce, 0, "")); 200];
    let (turn, works) = publisher.turns(&bytes(&flood), now);
    assert_eq!(turn, Turn::Drained);
    assert!(works.len() >= 20, "{works:?}");
    // Each level doubles the nodes of the tree that a match visits.
    assert!(are_bounded(&works, 2 * 1024), "{works:?}");
    assert_eq!(broker.stats().messages_in, 200);
}

#[test]
fn a_full_turn_of_ordinary_messages_is_not_cut() {
    let (broker, now) = (broker(Limits::default()), Instant::now());
    let mut subscriber = Peer::new(&broker, &Hello::new("a"), now);
    subscriber.subscribe("a", Q::AtMostOnce, now);
    let mut publisher = Peer::new(&broker, &Hello::new("b"), now);
    let count = broker.limits().packets_per_turn_max;
    let packets = vec![Packet::Publish(publish("a", Q::AtMostOnce, 0, "payload")); count];
    let turn = publisher.turn(&mut bytes(&packets), now);
    assert_eq!(turn, Turn::More);
    assert_eq!(subscriber.messages().len(), count);
}

/// Connects 50 clients with 32 subscriptions each.
fn with_sessions(broker: &crate::Broker, now: Instant) -> Vec<Peer> {
    let filters: Vec<_> = (0..32).map(|number| format!("t/{number}")).collect();
    let connect = |number| {
        let mut peer = Peer::new(broker, &Hello::new(&format!("c{number}")), now);
        peer.send(&[subscribe_all(&filters)], now);
        peer
    };
    (0..50).map(connect).collect()
}

#[test]
fn a_recheck_of_all_sessions_is_cut_into_holds() {
    let (broker, now) = (broker(Limits::default()), Instant::now());
    let _peers = with_sessions(&broker, now);
    assert_eq!(broker.connected().len(), 50);
    let (mut holds, mut next) = (0, Some(0));
    while let Some(from) = next {
        let mut core = broker.lock();
        let before = core.work();
        next = core.recheck(from, &HashMap::new(), now);
        assert!(core.work() - before <= WORK_PER_TURN_MAX + 33 * work::SUBSCRIPTION);
        holds += 1;
    }
    assert!(holds >= 10, "{holds}");
    assert_eq!(broker.stats().subscriptions, 50 * 32);
}

#[test]
fn the_end_of_many_sessions_is_cut_into_holds() {
    let (broker, now) = (broker(Limits::default()), Instant::now());
    let peers = with_sessions(&broker, now);
    peers.into_iter().for_each(|peer| peer.lose(now));
    let later = now + 2 * OPEN;
    let mut holds = 0;
    while broker.stats().sessions > 0 {
        let mut core = broker.lock();
        let before = core.work();
        core.run_deadlines(later);
        assert!(core.work() - before <= WORK_PER_TURN_MAX + 33 * work::SUBSCRIPTION);
        drop(core);
        holds += 1;
    }
    assert!(holds >= 10, "{holds}");
    assert_eq!(broker.stats().subscriptions, 0);
}

/// The packets of a client wait for its acknowledgement while its PUBRELs come.
#[test]
fn pubrels_behind_waiting_packets_are_cut_into_turns() {
    const EXCHANGES: u16 = 500;
    const WAITING: usize = 4000;
    let limits = Limits {
        queue_bytes_max: 10_000,
        queue_bytes_reserve: 1000,
        ..Limits::default()
    };
    let (broker, now) = (broker(limits), Instant::now());
    let mut peer = Peer::new(&broker, &Hello::new("a"), now);
    peer.subscribe("a", Q::AtLeastOnce, now);
    assert_eq!(peer.begin_exchanges(1..2 * EXCHANGES + 1, now), None);
    broker.batch(|batch| batch.publish(Message::new("a", vec![0; 6000], QoS::AtLeastOnce)));
    let unacknowledged = peer.messages()[0].pkid;
    let waiting = vec![Packet::Publish(publish("t", Q::AtMostOnce, 0, "")); WAITING];
    assert_eq!(peer.send(&waiting, now), Turn::Paused);

    // No waiting packet is a repetition of these.
    let packets: Vec<_> = (1..=EXCHANGES).map(pubrel).collect();
    let (turn, works) = peer.turns(&bytes(&packets), now);
    assert_eq!(turn, Turn::Paused);
    let work: u64 = works.iter().sum();
    assert!(work < 2 * u64::from(EXCHANGES), "{works:?}");
    assert_eq!(peer.receive().len(), packets.len());

    let ids = EXCHANGES + 1..=2 * EXCHANGES;
    let again = |id| repeated("t", Q::ExactlyOnce, id, "");
    let packets: Vec<_> = ids.clone().map(again).chain(ids.map(pubrel)).collect();
    let (turn, works) = peer.turns(&bytes(&packets), now);
    assert_eq!(turn, Turn::Paused);
    let search = (WAITING as u64 + u64::from(EXCHANGES)) / 16;
    assert!(are_bounded(&works, work::PACKET + search), "{works:?}");
    assert!(works.len() >= 40, "{works:?}");
    let received = peer.receive();
    let [Packet::PubRec(_), Packet::PubComp(_), ..] = &received[..] else {
        panic!("{received:?}");
    };
    assert_eq!(received.len(), packets.len());
    assert_eq!(peer.send(&[puback(unacknowledged)], now), Turn::Drained);
}

/// A service that takes one request at a time and remembers its packet id.
#[derive(Default)]
struct OneByOne(Mutex<Vec<u16>>);

impl Service for OneByOne {
    fn claim(&self, topic: &[u8]) -> Claim {
        RecordingService::default().claim(topic)
    }

    fn requests(&self, _: &crate::Broker, _: &Origin, requests: &mut Vec<Request>) {
        self.0.lock().unwrap().push(requests.remove(0).packet_id);
    }

    fn disconnected(&self, _: &crate::Broker, _: &Origin) {}
}

impl OneByOne {
    fn taken(&self) -> Vec<u16> {
        self.0.lock().unwrap().clone()
    }
}

fn requests(ids: std::ops::Range<u16>) -> Vec<Packet> {
    let request = |id| Packet::Publish(publish("req/x", Q::ExactlyOnce, id, ""));
    ids.map(request).collect()
}

#[test]
fn requests_left_by_the_service_come_in_the_next_turns() {
    let service = Arc::new(OneByOne::default());
    let broker = crate::Broker::new(Options::default(), service.clone());
    let now = Instant::now();
    let mut peer = Peer::new(&broker, &Hello::new("a"), now);
    let mut packets = requests(1..4);
    packets.extend([subscribe_all(&["x"]), ping()]);
    let mut buffer = bytes(&packets);
    // The SUBSCRIBE waits for the requests before it.
    for taken in 1..=2 {
        assert_eq!(peer.turn(&mut buffer, now), Turn::Cut);
        assert_eq!(service.taken().len(), taken);
    }
    assert!(peer.receive().is_empty());
    assert_eq!(peer.send(&[], now), Turn::Drained);
    assert_eq!(service.taken(), [1, 2, 3]);
    assert_packets!(peer.receive(), [Packet::SubAck(_), Packet::PingResp(_)]);
}

#[test]
fn requests_left_at_the_connections_end_are_handed_over() {
    let service = Arc::new(OneByOne::default());
    let broker = crate::Broker::new(Options::default(), service.clone());
    let now = Instant::now();
    let mut peer = Peer::new(&broker, &Hello::new("a"), now);
    assert_eq!(peer.turn(&mut bytes(&requests(1..6)), now), Turn::Cut);
    assert!(service.taken().len() < 5);
    peer.lose(now);
    assert_eq!(service.taken(), [1, 2, 3, 4, 5]);
    // The service also receives the requests before a violation.
    let mut peer = Peer::new(&broker, &Hello::new("b"), now);
    let mut buffer = bytes(&requests(6..9));
    buffer.extend_from_slice(&[0xf7, 0]);
    assert_eq!(peer.turns(&buffer, now).0, Turn::Over);
    assert_eq!(service.taken().len(), 8);
}
