//! Arrivals of a store that responds to each request at once.

use std::sync::{Mutex, Weak};
use std::time::Duration;

use rumqttc::v5::mqttbytes::v5::PublishProperties;
use statehouse_mqtt::Message;

use super::*;
use crate::{Inbound, Intake, Outbound, Transport};
use statehouse_config::{ForeignConfig, limits};

#[derive(Default)]
struct Store {
    transport: Mutex<Weak<Foreign>>,
    requests: Mutex<usize>,
    /// When the requests expire, in order.
    expires: Mutex<Vec<Option<Instant>>>,
    /// After how many requests too many outputs wait for the log.
    room: Mutex<Option<usize>>,
}

impl Intake for Store {
    fn take(&self, batch: &mut dyn Iterator<Item = Inbound<'_>>) {
        let transport = lock(&self.transport).upgrade().unwrap();
        for inbound in batch {
            if let Inbound::Publish(incoming, _) = inbound {
                lock(&self.expires).push(incoming.expires);
            }
            *lock(&self.requests) += 1;
            let message = Message {
                topic: "answers".into(),
                ..Message::default()
            };
            let mut ready = vec![Outbound::Response(message, None)];
            transport.deliver(&mut |out| out.append(&mut ready));
        }
    }

    fn take_with_room(&self, batch: &mut dyn Iterator<Item = Inbound<'_>>) {
        let (room, requests) = (*lock(&self.room), *lock(&self.requests));
        match room {
            None => self.take(batch),
            Some(room) => self.take(&mut batch.take(room - requests)),
        }
    }
}

fn scene() -> (Arc<Store>, Arc<Foreign>) {
    let store = Arc::new(Store::default());
    let config = ForeignConfig {
        window: 64,
        watch_ttl: None,
        ..super::super::tests::config()
    };
    let foreign = Foreign::new(store.clone(), &config, "store", None);
    *lock(&store.transport) = Arc::downgrade(&foreign);
    (store, foreign)
}

fn arrive(foreign: &Foreign, topic: &'static str, payload: usize, receipt: Option<u64>) {
    arrive_with(
        foreign,
        topic,
        payload,
        receipt,
        PublishProperties::default(),
    );
}

fn arrive_with(
    foreign: &Foreign,
    topic: &'static str,
    payload: usize,
    receipt: Option<u64>,
    properties: PublishProperties,
) {
    let publish = Publish {
        topic: topic.into(),
        payload: vec![0; payload].into(),
        properties: Some(properties),
        ..Publish::default()
    };
    foreign.arrived(&mut vec![Arrival::Message(publish, receipt)]);
}

/// Fills the outlet, except for room for this many messages.
fn fill(foreign: &Foreign, room: usize) {
    let mut state = foreign.state();
    while state.outlet.len() < limits::BROKER_OUTBOX_HOLD - room {
        let peer = identity::named("watcher");
        state.take(Outbound::Notification(peer, Message::default(), None));
    }
}

fn empty(foreign: &Foreign) {
    foreign.state().outlet.drain().for_each(drop);
}

#[test]
fn requests_at_qos_zero_are_dropped_while_the_outlet_is_full() {
    let (store, foreign) = scene();
    fill(&foreign, 0);
    for _ in 0..3 {
        arrive(&foreign, REQUEST_TOPIC, 10, None);
    }
    arrive(&foreign, REQUEST_TOPIC, 10, Some(0));
    assert_eq!(lock(&foreign.held).size().0, 1);
    assert_eq!(foreign.state().sums.dropped, 3);
    empty(&foreign);
    foreign.arrived(&mut Vec::new());
    assert_eq!(*lock(&store.requests), 1);
}

#[test]
fn other_messages_at_qos_zero_wait_up_to_a_limit() {
    let (_, foreign) = scene();
    fill(&foreign, 0);
    let half = limits::BROKER_HELD_BYTES_MAX / 2 - 1024;
    for _ in 0..3 {
        arrive(&foreign, "$SYS/broker/log/N", half, None);
    }
    assert_eq!(foreign.state().sums.dropped, 1);
    empty(&foreign);
    foreign.arrived(&mut Vec::new());
    assert_eq!(lock(&foreign.held).size(), (0, 0));
}

#[test]
fn a_lost_connection_drops_the_waiting_messages() {
    let (_, foreign) = scene();
    fill(&foreign, 0);
    arrive(&foreign, "$SYS/broker/log/N", 10, None);
    Owner::lost(&*foreign, "the broker closed it");
    assert_eq!(lock(&foreign.held).size(), (0, 0));
}

#[test]
fn waiting_requests_execute_while_the_outlet_has_room() {
    let (store, foreign) = scene();
    fill(&foreign, 0);
    for receipt in 0..3 * limits::BROKER_HELD_CHUNK as u64 {
        arrive(&foreign, REQUEST_TOPIC, 10, Some(receipt));
    }
    empty(&foreign);
    fill(&foreign, 1);
    foreign.arrived(&mut Vec::new());
    assert_eq!(*lock(&store.requests), 1);
    assert_eq!(foreign.state().unsettled, 1);
    empty(&foreign);
    foreign.arrived(&mut Vec::new());
    assert_eq!(*lock(&store.requests), 3 * limits::BROKER_HELD_CHUNK);
}

#[test]
fn requests_that_the_store_leaves_wait_in_order() {
    let (store, foreign) = scene();
    *lock(&store.room) = Some(2);
    let brief = |seconds| PublishProperties {
        message_expiry_interval: Some(seconds),
        ..PublishProperties::default()
    };
    for n in 1..=5 {
        arrive_with(&foreign, REQUEST_TOPIC, 10, Some(n.into()), brief(n * 1000));
    }
    assert_eq!((*lock(&store.requests), foreign.state().unsettled), (2, 2));
    arrive(&foreign, REQUEST_TOPIC, 10, None);
    assert_eq!(foreign.state().sums.dropped, 1, "it cannot wait");
    *lock(&store.room) = Some(4);
    foreign.arrived(&mut Vec::new());
    assert_eq!(*lock(&store.requests), 4);
    *lock(&store.room) = None;
    foreign.arrived(&mut Vec::new());
    assert_eq!(*lock(&store.requests), 5);
    assert!(lock(&store.expires).is_sorted());
    assert_eq!(lock(&foreign.held).size(), (0, 0));
}

#[test]
fn a_lost_connection_drops_requests_that_the_store_left() {
    let (store, foreign) = scene();
    *lock(&store.room) = Some(0);
    arrive(&foreign, REQUEST_TOPIC, 10, Some(1));
    let watcher = identity::named("watcher");
    let ended = Input::Undeliverable(watcher, b"k".to_vec());
    lock(&foreign.held).push(Held::Input(ended));
    Owner::lost(&*foreign, "the broker closed it");
    *lock(&store.room) = None;
    foreign.arrived(&mut Vec::new());
    assert_eq!(
        *lock(&store.requests),
        1,
        "the broker redelivers the request"
    );
    assert!(lock(&store.expires).is_empty());
    assert_eq!(foreign.state().unsettled, 0);
}

#[test]
fn a_request_expires_also_while_it_waits_here() {
    let (store, foreign) = scene();
    fill(&foreign, 0);
    let properties = PublishProperties {
        message_expiry_interval: Some(1),
        ..PublishProperties::default()
    };
    arrive_with(&foreign, REQUEST_TOPIC, 10, Some(0), properties);
    let arrived = Instant::now();
    // Any time later shows the difference.
    std::thread::sleep(Duration::from_millis(2));
    empty(&foreign);
    foreign.arrived(&mut Vec::new());
    let expires = lock(&store.expires)[0].unwrap();
    assert!(expires <= arrived + Duration::from_secs(1));
}

#[test]
fn requests_with_a_forbidden_response_topic_count_as_kicked() {
    let (store, foreign) = scene();
    let too_deep = "/".repeat(limits::BROKER_TOPIC_LEVELS_MAX);
    let answers = |topic: &str| PublishProperties {
        response_topic: Some(topic.to_owned()),
        ..PublishProperties::default()
    };
    let malformed = PublishProperties {
        user_properties: vec![("a\0b".into(), String::new())],
        ..PublishProperties::default()
    };
    for properties in [answers("clients/c/#"), answers(&too_deep), malformed] {
        arrive_with(&foreign, REQUEST_TOPIC, 10, Some(1), properties);
    }
    let sums = foreign.state().sums;
    assert_eq!((sums.kicked, sums.malformed), (2, 1));
    assert_eq!(*lock(&store.requests), 0);
}
