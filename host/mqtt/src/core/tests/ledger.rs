//! The memory of clients is counted, shared among owners and limited, including after a restart.

use std::{sync::Arc, time::Instant};

use wire::{DisconnectReasonCode, Packet, PubRec, PubRecReason};

use crate::{
    Broker, Limits, NoService, Options, Recovery, clock::Clock, core::ConnectRefusal, testing::*,
};

const WILL_BYTES: usize = 60_000;

/// Connects as a user and loses the connection again.
fn visit(broker: &Broker, user: &str, hello: &Hello, now: Instant) -> Result<(), ConnectRefusal> {
    let accepted = accept(broker, hello, Some(user), now)?;
    let mut core = broker.lock();
    core.detach(accepted.session, accepted.origin.connection, now);
    Ok(())
}

fn with_large_will(client: &str) -> Hello {
    Hello::new(client).will("gone", &"x".repeat(WILL_BYTES), 1000)
}

/// How many of `count` visits with a large will are accepted.
fn visits(broker: &Broker, user: &str, count: usize, now: Instant) -> usize {
    let clients = (0..count).map(|n| with_large_will(&format!("{user}-{n}")));
    clients
        .filter(|hello| match visit(broker, user, hello, now) {
            Ok(()) => true,
            Err((reason, _)) => {
                assert_eq!(reason.0, 0x97);
                false
            }
        })
        .count()
}

#[test]
fn wills_are_bounded_and_shared_among_users() {
    let max = 1 << 20;
    let (broker, now) = start(limited(|it| it.state_bytes_total_max = max));
    let greedy = visits(&broker, "greedy", 100, now);
    assert!((10..=13).contains(&greedy), "{greedy} of the 17 that fit");
    assert!(visits(&broker, "another", 100, now) >= 3);
    assert!(broker.stats().state_bytes <= max);
    // Replacing a will by one of the same size needs no room, nor does a client without a will.
    visit(&broker, "greedy", &with_large_will("greedy-0"), now).unwrap();
    visit(&broker, "greedy", &Hello::new("plain"), now).unwrap();
    let third = Hello::new("third").will("w", "small", 5);
    visit(&broker, "third", &third, now).unwrap();
    for n in 0..greedy {
        let hello = Hello::new(&format!("greedy-{n}")).clean().expiry(0);
        visit(&broker, "greedy", &hello, now).unwrap();
    }
    assert_eq!(visits(&broker, "greedy", 5, now), 5, "there is room again");
}

fn reasons(packets: &[Packet]) -> Vec<PubRecReason> {
    let reasons = packets.iter().filter_map(|packet| match packet {
        Packet::PubRec(PubRec { reason, .. }) => Some(*reason),
        _ => None,
    });
    reasons.collect()
}

#[test]
fn unreleased_qos_2_messages_are_bounded_over_all_sessions() {
    let max = 256 << 10;
    let (broker, now) = start(limited(|it| it.state_bytes_total_max = max));
    let mut peers = Vec::new();
    for n in 0..40 {
        let mut peer = Peer::new(&broker, &Hello::new(&format!("peer-{n}")), now);
        for id in 1..=1024 {
            peer.publish("t", Q::ExactlyOnce, id, "", now);
        }
        peers.push(peer);
    }
    assert!(broker.stats().state_bytes <= max);
    let answers = reasons(&peers[0].receive());
    assert_eq!(answers, [PubRecReason::NoMatchingSubscribers; 1024]);
    let last = &mut peers[39];
    let answers = reasons(&last.receive());
    assert_eq!(answers.len(), 1024, "all are answered");
    assert!(answers.contains(&PubRecReason::QuotaExceeded));
    assert!(broker.lock().is_open(last.session, last.origin.connection));
    // Refused messages are not remembered, and finished exchanges make room for new ones.
    for peer in &mut peers[..20] {
        for id in 1..=1024 {
            peer.send(&[pubrel(id)], now);
        }
    }
    let last = &mut peers[39];
    for id in 1..=1024 {
        last.publish("t", Q::ExactlyOnce, id, "", now);
    }
    let answers = reasons(&last.receive());
    assert_eq!(answers, [PubRecReason::NoMatchingSubscribers; 1024]);
    drop(peers);
}

/// A PUBLISH that sets a topic alias.
fn aliased(topic: &str, alias: u16) -> Packet {
    let mut publish = publish(topic, Q::AtMostOnce, 0, "");
    let properties = wire::PublishProperties {
        topic_alias: Some(alias),
        ..Default::default()
    };
    publish.properties = Some(properties);
    Packet::Publish(publish)
}

#[test]
fn topic_aliases_are_bounded_in_bytes() {
    let quota = Some(DisconnectReasonCode::QuotaExceeded);
    let (broker, now) = start(limited(|it| it.state_bytes_total_max = 1 << 20));
    let long = |n: usize| format!("{n:065000}");
    let mut one = Peer::new(&broker, &Hello::new("one"), now);
    one.send(&[aliased(&long(1), 1), aliased(&long(2), 1)], now);
    assert_eq!(disconnected(&one.receive()), None, "the alias was replaced");
    one.send(&[aliased(&long(3), 2), aliased(&long(4), 3)], now);
    assert_eq!(disconnected(&one.receive()), quota);
    drop(one);
    assert_eq!(broker.stats().state_bytes, 0);
    let mut all = Vec::new();
    for n in 0..30 {
        let mut peer = Peer::new(&broker, &Hello::new(&n.to_string()), now);
        peer.send(&[aliased(&long(n), 1)], now);
        all.push(peer);
    }
    assert!(broker.stats().state_bytes <= 1 << 20);
    assert_eq!(disconnected(&all[0].receive()), None);
    assert_eq!(disconnected(&all[29].receive()), quota);
    // Aliases of ordinary length are still accepted.
    let mut honest = Peer::new(&broker, &Hello::new("honest"), now);
    for alias in 1..=32 {
        honest.send(&[aliased(&format!("plant/{alias}"), alias)], now);
    }
    assert_eq!(disconnected(&honest.receive()), None);
}

/// A client that only sends PUBRECs, and forgets its window with each connection.
#[test]
fn unfinished_deliveries_count_against_the_queue() {
    let limits = Limits {
        queue_bytes_max: 100 << 10,
        in_flight_max: 100,
        ..Limits::default()
    };
    let (broker, now) = start(limits);
    let mut writer = Peer::new(&broker, &Hello::new("writer"), now);
    let mut reader = Peer::new(&broker, &Hello::new("reader"), now);
    reader.subscribe("t", Q::ExactlyOnce, now);
    for _ in 0..10 {
        for _ in 0..100 {
            writer.publish("t", Q::ExactlyOnce, 1, "", now);
            writer.send(&[pubrel(1)], now);
        }
        writer.receive();
        for message in reader.messages() {
            reader.send(&[pubrec(message.pkid)], now);
        }
        reader.lose(now);
        reader = Peer::new(&broker, &Hello::new("reader"), now);
    }
    let core = broker.lock();
    let ids = core.sessions.iter().flatten().map(|it| it.queue.in_order());
    let kept = ids.map(|ids| ids.len()).sum::<usize>();
    assert!((100..=400).contains(&kept), "{kept}");
}

#[test]
fn start_above_the_state_limit_drops_the_excess() {
    let (log, now) = (TestLog::new(true), Instant::now());
    let start = |limits| restored(&log, limits, Arc::new(NoService), now, now);
    let before = start(Limits::default());
    assert_eq!(visits(&before, "greedy", 100, now), 100);
    for n in 0..40 {
        let mut peer = Peer::new(&before, &Hello::new(&format!("exchanges-{n}")), now);
        peer.begin_exchanges(1..1025, now);
    }
    drop(before);
    let max = 256 << 10;
    let after = start(limited(|it| it.state_bytes_total_max = max));
    let stats = after.stats();
    assert!(stats.state_bytes <= max, "{stats:?}");
    // Sessions survive without their wills, but not without the packet ids that they remember.
    assert!((100..140).contains(&stats.sessions), "{stats:?}");
    assert!(
        stats.state_bytes > max / 2,
        "it keeps as much as fits: {stats:?}"
    );
    // A second start from the same log finds the same state.
    let again = start(Limits::default());
    assert_eq!(again.stats(), stats);
}

#[test]
fn recovery_limits_wills_and_messages() {
    let (log, broker, now) = logged(Limits::default());
    Peer::leave_subscribed(&broker, "reader", now);
    let mut writer = Peer::new(&broker, &Hello::new("writer"), now);
    for id in 1..=100 {
        let payload = "x".repeat(1000);
        writer.publish("t", Q::AtLeastOnce, id, &payload, now);
    }
    assert_eq!(visits(&broker, "greedy", 100, now), 100);
    let limits = Limits {
        state_bytes_total_max: 1 << 20,
        queue_bytes_total_max: 25_000,
        ..Limits::default()
    };
    let mut recovery = Recovery::within(&limits);
    log.replay(&mut recovery, 0);
    let wills = recovery.sessions.values().filter(|it| it.will.is_some());
    let wills = wills.count();
    assert!((10..=35).contains(&wills), "{wills}");
    assert_eq!(wills + recovery.without_will.len(), 100);
    let messages = recovery.sessions.values().map(|it| it.messages.len());
    assert_eq!(messages.sum::<usize>() + recovery.lost_messages(), 100);
    assert!(recovery.lost_messages() > 50);
    // A recovery without limits counts the same sums.
    let mut unbounded = Recovery::within(&Limits::default());
    log.replay(&mut unbounded, 0);
    assert_eq!(unbounded.counts(), recovery.counts());
    for number in unbounded.session_numbers().collect::<Vec<_>>() {
        let session = unbounded.sessions.remove(&number).unwrap();
        unbounded.subtract(&session);
    }
    assert_eq!(unbounded.held_bytes(), 0);
}

/// A message that the snapshot and a later record hold takes room once.
#[test]
fn recovery_keeps_messages_that_fill_their_limit() {
    let (log, broker, now) = logged(Limits::default());
    Peer::leave_subscribed(&broker, "reader", now);
    let mut writer = Peer::new(&broker, &Hello::new("writer"), now);
    let before = log.len();
    for id in 1..=3 {
        writer.publish("t", Q::AtLeastOnce, id, "x", now);
    }
    let queued = broker.stats().queued_bytes;
    let limits = limited(|it| it.queue_bytes_total_max = queued.div_ceil(2));
    let mut recovery = Recovery::within(&limits);
    for piece in image(&broker, 1 << 20) {
        recovery.apply(&piece).unwrap();
    }
    log.replay(&mut recovery, before);
    assert_eq!(recovery.lost_messages(), 0);
    assert_eq!(recovery.held_bytes(), queued);
}

/// A log of `count` messages of more than a kilobyte to an absent client, of which it has
/// acknowledged the first ones.
fn log_of_messages(count: u16, acknowledged: usize) -> (Arc<TestLog>, Instant) {
    let (log, broker, now) = logged(Limits::default());
    Peer::leave_subscribed(&broker, "reader", now);
    let mut writer = Peer::new(&broker, &Hello::new("writer"), now);
    for id in 1..=count {
        let payload = "x".repeat(1000);
        writer.publish("t", Q::AtLeastOnce, id, &payload, now);
    }
    let mut reader = Peer::new(&broker, &Hello::new("reader"), now);
    for message in reader.messages().iter().take(acknowledged) {
        reader.send(&[puback(message.pkid)], now);
    }
    (log, now)
}

fn message_count(recovery: &Recovery) -> usize {
    let sessions = recovery.sessions.values();
    sessions.map(|it| it.messages.len()).sum()
}

fn restored_to(log: &Arc<TestLog>, limits: Limits, recovery: Recovery, now: Instant) -> Broker {
    let options = Options {
        limits,
        persistence: Some(log.clone()),
        run: log.len() as u32,
        ..Options::default()
    };
    let clock = Clock::at(now, WALL_MS);
    Broker::restore_at(options, Arc::new(NoService), recovery, clock)
}

/// Connected clients may exceed the total by their reserves, and a snapshot by its pieces.
#[test]
fn recovery_keeps_messages_beyond_the_total_that_fit_later() {
    let (log, _) = log_of_messages(30, 25);
    let mut recovery = Recovery::within(&limited(|it| it.queue_bytes_total_max = 20_000));
    log.replay(&mut recovery, 0);
    assert_eq!((message_count(&recovery), recovery.lost_messages()), (5, 0));
}

/// A lost message that its client acknowledged later needs no record.
#[test]
fn recovery_forgets_lost_messages_that_were_acknowledged() {
    let (log, _) = log_of_messages(20, 20);
    let mut recovery = Recovery::within(&limited(|it| it.queue_bytes_total_max = 5_000));
    log.replay(&mut recovery, 0);
    assert_eq!((message_count(&recovery), recovery.lost_messages()), (0, 0));
}

#[test]
fn messages_beyond_the_limit_of_recovery_are_recorded_as_removed() {
    let (log, now) = log_of_messages(20, 0);
    let limits = limited(|it| it.queue_bytes_total_max = 5_000);
    let mut recovery = Recovery::within(&limits);
    log.replay(&mut recovery, 0);
    assert!(recovery.lost_messages() > 0);
    let broker = restored_to(&log, limits, recovery, now);
    let kept = message_count(&log.recovery());
    assert_eq!(kept as u64 + broker.stats().dropped, 20);
    assert!(
        (1..=3).contains(&kept),
        "what fits half of the total: {kept}"
    );
}

/// The client may remember the packet id. It would take another message with it for a repetition.
#[test]
fn lost_messages_that_were_sent_at_qos_2_are_completed() {
    let (log, broker, now) = logged(Limits::default());
    let mut reader = Peer::new(&broker, &Hello::new("reader"), now);
    reader.subscribe("t", Q::ExactlyOnce, now);
    let mut writer = Peer::new(&broker, &Hello::new("writer"), now);
    writer.publish("t", Q::ExactlyOnce, 1, "x", now);
    let packet_id = reader.messages()[0].pkid;
    let mut recovery = Recovery::within(&limited(|it| it.queue_bytes_total_max = 1));
    log.replay(&mut recovery, 0);
    assert_eq!(recovery.lost_messages(), 1);
    let broker = restored_to(&log, Limits::default(), recovery, now);
    let recorded = log.recovery();
    let mut sessions = recorded.sessions.values();
    let lost = sessions.find_map(|it| it.messages.values().next()).unwrap();
    assert_eq!((lost.packet_id, &lost.content), (Some(packet_id), &None));
    let packets = Peer::new(&broker, &Hello::new("reader"), now).receive();
    assert_packets!(packets, [Packet::PubRel(it)] if it.pkid == packet_id);
}

#[test]
fn empty_absent_sessions_are_evicted_for_new_ones() {
    let (broker, now) = start(limited(|it| it.sessions_max = 100));
    let later = |n: u64| now + std::time::Duration::from_millis(n);
    Peer::leave_subscribed(&broker, "subscribed", now);
    let connected = Peer::new(&broker, &Hello::new("connected"), now);
    let will = Hello::new("will").will("w", "w", 500);
    visit(&broker, "will", &will, now).unwrap();
    let mut unreleased = Peer::new(&broker, &Hello::new("unreleased"), now);
    unreleased.begin_exchanges(1..2, now);
    unreleased.lose(now);
    for n in 0..500 {
        visit(&broker, "greedy", &Hello::new(&format!("g{n}")), later(n)).unwrap();
    }
    let stats = broker.stats();
    assert_eq!((stats.sessions, stats.evicted), (76, 428));
    for client in [
        "subscribed",
        "connected",
        "will",
        "unreleased",
        "g499",
        "g428",
    ] {
        assert!(broker.client_status(client).is_some(), "{client}");
    }
    assert!(
        broker.client_status("g427").is_none(),
        "the oldest are evicted"
    );
    for n in 0..50 {
        let hello = Hello::new(&format!("u{n}"));
        visit(&broker, &format!("user-{n}"), &hello, later(n)).unwrap();
    }
    assert!(broker.stats().sessions <= 100);
    drop(connected);
}

#[test]
fn connect_that_is_refused_for_its_will_evicts_no_session() {
    let limits = Limits {
        sessions_max: 1,
        state_bytes_total_max: 1000,
        ..Limits::default()
    };
    let (broker, now) = start(limits);
    visit(&broker, "a", &Hello::new("old"), now).unwrap();
    let refused = visit(&broker, "a", &with_large_will("new"), now);
    assert!(refused.is_err_and(|(_, text)| text.starts_with("wills ")));
    assert!(broker.client_status("old").is_some());
    visit(&broker, "a", &Hello::new("new"), now).unwrap();
    assert!(broker.client_status("old").is_none());
}

/// Asking evicts nothing, and the answer is that of a CONNECT.
#[test]
fn session_limit_counts_sessions_that_would_be_evicted() {
    let (broker, now) = start(limited(|it| it.sessions_max = 40));
    let limit = |user: &str| broker.session_limit("new", Some(user));
    let mut connected = Vec::new();
    for n in 0..30 {
        let hello = Hello::new(&format!("c{n}"));
        connected.push(accept(&broker, &hello, Some("greedy"), now).unwrap());
    }
    assert!(limit("greedy").is_some());
    assert!(visit(&broker, "greedy", &Hello::new("new"), now).is_err());
    assert_eq!(broker.session_limit("c0", Some("greedy")), None);
    for n in 0..10 {
        assert_eq!(limit("another"), None, "{n} absent sessions");
        visit(&broker, "another", &Hello::new(&format!("a{n}")), now).unwrap();
    }
    assert_eq!(limit("another"), None);
    assert_eq!(broker.session_limit("new", None), None);
    assert!(limit("greedy").is_some());
    // Regression: each refused CONNECT ended a session of another user.
    assert!(visit(&broker, "greedy", &Hello::new("new"), now).is_err());
    let stats = broker.stats();
    assert_eq!((stats.sessions, stats.evicted), (40, 0));
    for n in 0..10 {
        let hello = Hello::new(&format!("a{n}"));
        connected.push(accept(&broker, &hello, Some("another"), now).unwrap());
    }
    assert!(limit("another").is_some());
    assert!(broker.session_limit("new", None).is_some());
    assert!(visit(&broker, "another", &Hello::new("new"), now).is_err());
}

#[test]
fn sessions_of_one_user_leave_places_for_others() {
    let (log, now) = (TestLog::new(true), Instant::now());
    let limits = limited(|it| it.sessions_max = 200);
    let start = || restored(&log, limits.clone(), Arc::new(NoService), now, now);
    let fill = |broker: &Broker, user: &str| {
        let hello = |n| Hello::new(&format!("{user}-{n}")).will("w", "w", 500);
        let visits = (0..200).map(|n| visit(broker, user, &hello(n), now));
        visits.filter(Result::is_ok).count()
    };
    let broker = start();
    assert_eq!(fill(&broker, "greedy"), 150);
    assert_eq!(fill(&broker, "another"), 37);
    drop(broker);
    let broker = start();
    assert_eq!(broker.stats().sessions, 187);
    let newcomer = Hello::new("newcomer-0").will("w", "w", 500);
    visit(&broker, "newcomer", &newcomer, now).unwrap();
    let (reason, _) = visit(&broker, "greedy", &Hello::new("greedy-300"), now).unwrap_err();
    assert_eq!(reason.0, 0x97);
}

#[test]
fn own_topics_can_be_subscribed_when_all_room_is_taken() {
    let limits = limited(|it| it.subscription_bytes_total_max = 20_000);
    let (log, now) = (TestLog::new(true), Instant::now());
    let start = || restored(&log, limits.clone(), Arc::new(NoService), now, now);
    let broker = start();
    let mut greedy = Peer::new(&broker, &Hello::new("greedy"), now);
    let full = wire::SubscribeReasonCode::QuotaExceeded;
    let granted =
        |peer: &mut Peer, filter: &str| peer.subscribe(filter, Q::AtLeastOnce, now) != full;
    let taken = (0..100).take_while(|n| granted(&mut greedy, &format!("all/{n}")));
    assert!((50..100).contains(&taken.count()));
    let mut honest = Peer::new(&broker, &Hello::new("honest"), now);
    assert!(!granted(&mut honest, "some/topic/of/others"));
    assert!(!granted(&mut honest, "clients/other/response"));
    assert!(!granted(&mut honest, "clients/honest"));
    let own = (0..100).take_while(|n| granted(&mut honest, &format!("clients/honest/{n}")));
    let own = own.count();
    assert!((8..20).contains(&own), "{own}");
    assert!(!granted(&mut greedy, "clients/greedy/#") || granted(&mut greedy, "clients/greedy/1"));
    let before = broker.stats().subscriptions;
    drop(broker);
    assert_eq!(start().stats().subscriptions, before, "the log agrees");
}

#[test]
fn subscriptions_of_one_user_leave_room_for_others() {
    let (broker, now) = start(limited(|it| it.subscription_bytes_total_max = 1 << 20));
    let taken = |client: &str| {
        let mut peer = Peer::new(&broker, &Hello::new(client), now);
        let filters = (0..1024).map(|n| format!("{client}/{n}/{}", "x".repeat(500)));
        let reasons = filters.map(|filter| peer.subscribe(&filter, Q::AtMostOnce, now));
        let full = wire::SubscribeReasonCode::QuotaExceeded;
        reasons.filter(|reason| *reason != full).count()
    };
    let (first, second, third) = (taken("a"), taken("b"), taken("c"));
    assert!(
        first > second && second > third && third > 10,
        "{first} {second} {third}"
    );
}

#[test]
fn retained_messages_of_one_user_leave_room_for_others() {
    let limits = limited(|it| it.retained_max = 400);
    let (log, now) = (TestLog::new(true), Instant::now());
    let start = |limits| restored(&log, limits, Arc::new(NoService), now, now);
    let broker = start(limits.clone());
    let set = |peer: &mut Peer, topic: String, payload: &str| {
        peer.send(&[retained(&topic, Q::AtLeastOnce, 1, payload)], now);
        peer.last_puback().reason != wire::PubAckReason::QuotaExceeded
    };
    let fill = |peer: &mut Peer, name: &str| {
        let topics = (0..400).map(|n| format!("{name}/{n}"));
        topics.filter(|topic| set(peer, topic.clone(), "x")).count()
    };
    let mut greedy = Peer::new(&broker, &Hello::new("greedy"), now);
    assert_eq!(fill(&mut greedy, "greedy"), 300);
    let mut honest = Peer::new(&broker, &Hello::new("honest"), now);
    assert_eq!(fill(&mut honest, "honest"), 75);
    assert!(
        set(&mut greedy, "honest/0".to_owned(), "y"),
        "a replacement needs no room"
    );
    assert!(set(&mut greedy, "greedy/0".to_owned(), ""));
    drop(broker);
    let broker = start(limits);
    assert_eq!(broker.stats().retained, 374);
    let mut greedy = Peer::new(&broker, &Hello::new("greedy"), now);
    assert!(
        !set(&mut greedy, "greedy/400".to_owned(), "x"),
        "they still count against their publisher"
    );
    let mut third = Peer::new(&broker, &Hello::new("third"), now);
    assert!(set(&mut third, "third/0".to_owned(), "x"));
}
