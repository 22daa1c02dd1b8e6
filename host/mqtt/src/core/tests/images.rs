//! Snapshots taken during changes, together with all later changes, give the same state as all
//! changes.

use std::{
    borrow::Cow,
    sync::Arc,
    time::{Duration, Instant},
};

use proptest::prelude::*;
use wire::{DisconnectReasonCode, Packet};

use crate::{Broker, ImageCursor, Limits, Message, NoService, PropertiesBuilder, QoS, testing::*};

const CLIENTS: [&str; 3] = ["a", "b", "c"];
const FILTERS: [&str; 4] = ["t/0", "t/+", "#", "t/1"];
const TOPICS: [&str; 3] = ["t/0", "t/1", "u"];

#[derive(Debug, Clone)]
enum Action {
    Connect {
        client: usize,
        expiry_s: u32,
        clean: bool,
        will: bool,
    },
    Lose(usize),
    Disconnect {
        client: usize,
        expiry_s: u32,
    },
    Subscribe {
        client: usize,
        filter: usize,
        qos: u8,
    },
    Unsubscribe {
        client: usize,
        filter: usize,
    },
    Publish {
        client: usize,
        topic: usize,
        qos: u8,
        retain: bool,
        empty: bool,
    },
    Release {
        client: usize,
    },
    FromBroker {
        topic: usize,
        qos: u8,
        expires_s: Option<u8>,
    },
    Deliver {
        client: usize,
        qos: u8,
    },
    /// The client reads and acknowledges this many packets. A QoS 2 message needs two steps.
    Acknowledge {
        client: usize,
        steps: usize,
    },
    Wait(u8),
    Piece,
    BeginImage,
    Crash,
}

fn action() -> impl Strategy<Value = Action> {
    let client = || 0..CLIENTS.len();
    let qos = || 0_u8..3;
    prop_oneof![
        3 => (client(), prop_oneof![Just(0_u32), Just(5), Just(1000)], prop::bool::weighted(0.2), any::<bool>())
            .prop_map(|(client, expiry_s, clean, will)| Action::Connect { client, expiry_s, clean, will }),
        1 => client().prop_map(Action::Lose),
        1 => (client(), prop_oneof![Just(0_u32), Just(7)])
            .prop_map(|(client, expiry_s)| Action::Disconnect { client, expiry_s }),
        3 => (client(), 0..FILTERS.len(), qos())
            .prop_map(|(client, filter, qos)| Action::Subscribe { client, filter, qos }),
        1 => (client(), 0..FILTERS.len()).prop_map(|(client, filter)| Action::Unsubscribe { client, filter }),
        6 => (client(), 0..TOPICS.len(), qos(), prop::bool::weighted(0.3), prop::bool::weighted(0.2))
            .prop_map(|(client, topic, qos, retain, empty)| Action::Publish { client, topic, qos, retain, empty }),
        2 => client().prop_map(|client| Action::Release { client }),
        3 => (0..TOPICS.len(), qos(), prop::option::of(0_u8..10))
            .prop_map(|(topic, qos, expires_s)| Action::FromBroker { topic, qos, expires_s }),
        2 => (client(), qos()).prop_map(|(client, qos)| Action::Deliver { client, qos }),
        5 => (client(), 1_usize..4).prop_map(|(client, steps)| Action::Acknowledge { client, steps }),
        1 => (0_u8..8).prop_map(Action::Wait),
        4 => Just(Action::Piece),
        1 => Just(Action::BeginImage),
        1 => Just(Action::Crash),
    ]
}

/// The pieces of a snapshot, and the number of records when it was begun.
#[derive(Default)]
struct Image {
    cursor: ImageCursor,
    pieces: Vec<Vec<u8>>,
    from: usize,
    over: bool,
}

struct World {
    log: Arc<TestLog>,
    broker: Broker,
    began: Instant,
    now: Instant,
    peers: [Option<Peer>; 3],
    inboxes: [Vec<Packet>; 3],
    packet_id: u16,
    image: Image,
}

/// The limits are small, so that the actions reach them.
fn limits() -> Limits {
    Limits {
        queue_bytes_max: 4000,
        retained_max: 2,
        receive_max: 8,
        session_expiry_max_s: 900,
        ..Limits::default()
    }
}

impl World {
    fn new() -> Self {
        let (log, began) = (TestLog::new(true), Instant::now());
        Self {
            broker: restored(&log, limits(), Arc::new(NoService), began, began),
            log,
            began,
            now: began,
            peers: Default::default(),
            inboxes: Default::default(),
            packet_id: 0,
            image: Image::default(),
        }
    }

    fn send(&mut self, client: usize, packet: Packet) {
        if let Some(peer) = &mut self.peers[client] {
            peer.send(&[packet], self.now);
        }
    }

    fn lose(&mut self, client: usize) {
        self.inboxes[client].clear();
        if let Some(peer) = self.peers[client].take() {
            peer.lose(self.now);
        }
    }

    fn piece(&mut self) {
        if !self.image.over {
            match self.broker.image(&mut self.image.cursor, 60) {
                Some(piece) => self.image.pieces.push(piece),
                None => self.image.over = true,
            }
        }
    }

    fn begin_image(&mut self) {
        self.image = Image {
            from: self.log.len(),
            ..Image::default()
        };
    }

    fn acknowledge(&mut self, client: usize) {
        let Some(peer) = &mut self.peers[client] else {
            return;
        };
        self.inboxes[client].extend(peer.receive());
        if self.inboxes[client].is_empty() {
            return;
        }
        let answer = match self.inboxes[client].remove(0) {
            Packet::Publish(publish) => match publish.qos {
                Q::AtMostOnce => return,
                Q::AtLeastOnce => puback(publish.pkid),
                Q::ExactlyOnce => pubrec(publish.pkid),
            },
            Packet::PubRel(rel) => pubcomp(rel.pkid),
            _ => return,
        };
        self.send(client, answer);
    }

    fn act(&mut self, action: Action) {
        match action {
            Action::Connect {
                client,
                expiry_s,
                clean,
                will,
            } => self.connect(client, expiry_s, clean, will),
            Action::Lose(client) => self.lose(client),
            Action::Disconnect { client, expiry_s } => self.disconnect(client, expiry_s),
            Action::Subscribe {
                client,
                filter,
                qos,
            } => self.subscribe(client, filter, qos),
            Action::Unsubscribe { client, filter } => {
                self.send(client, unsubscribe(&[FILTERS[filter]]));
            }
            Action::Publish {
                client,
                topic,
                qos,
                retain,
                empty,
            } => {
                self.packet_id = self.packet_id % 5 + 1;
                let payload = if empty { "" } else { "payload" };
                let id = if qos == 0 { 0 } else { self.packet_id };
                let mut publish = publish(TOPICS[topic], wire_qos(qos), id, payload);
                publish.retain = retain;
                self.send(client, Packet::Publish(publish));
            }
            Action::Release { client } => {
                let id = self.packet_id.max(1);
                self.send(client, pubrel(id));
            }
            Action::FromBroker {
                topic,
                qos,
                expires_s,
            } => self.publish_from_broker(topic, qos, expires_s),
            Action::Deliver { client, qos } => self.deliver(client, qos),
            Action::Acknowledge { client, steps } => {
                (0..steps).for_each(|_| self.acknowledge(client));
            }
            Action::Wait(seconds) => self.wait(seconds),
            Action::Piece => self.piece(),
            Action::BeginImage => self.begin_image(),
            Action::Crash => self.crash(),
        }
    }

    fn connect(&mut self, client: usize, expiry_s: u32, clean: bool, will: bool) {
        self.inboxes[client].clear();
        let mut hello = Hello::new(CLIENTS[client]).expiry(expiry_s).window(2);
        hello.connect.clean_start = clean;
        if will {
            hello = hello.will("u", "will", expiry_s / 2);
        }
        // The task of the old connection notices the takeover later.
        let old = self.peers[client].take();
        self.peers[client] = Some(Peer::new(&self.broker, &hello, self.now));
        if let Some(old) = old {
            old.lose(self.now);
        }
    }

    fn disconnect(&mut self, client: usize, expiry_s: u32) {
        let reason = DisconnectReasonCode::DisconnectWithWillMessage;
        self.send(client, disconnect(reason, expiry_s));
        // Before the task has seen the end of the connection.
        self.piece();
        self.lose(client);
    }

    fn subscribe(&mut self, client: usize, filter: usize, qos: u8) {
        let mut filter = wire::Filter::new(FILTERS[filter], wire_qos(qos));
        filter.nolocal = qos == 1;
        filter.preserve_retain = qos == 2;
        let id = (qos > 0).then_some(usize::from(qos) * 200);
        self.send(client, subscribe_to([filter], id));
    }

    fn publish_from_broker(&mut self, topic: usize, qos: u8, expires_s: Option<u8>) {
        let now = self.now;
        let mut message = Message::new(TOPICS[topic], "from the broker", core_qos(qos));
        message.properties = PropertiesBuilder::new().user("k", "v").finish().unwrap();
        message.retain = expires_s.is_some_and(|seconds| seconds > 5);
        message.expires = expires_s.map(|seconds| now + Duration::from_secs(seconds.into()));
        let source = crate::core::Source::default();
        _ = self.broker.lock().publish(Cow::Owned(message), source, now);
    }

    fn deliver(&mut self, client: usize, qos: u8) {
        if let Some(Peer { origin, .. }) = &self.peers[client] {
            let message = Message::new("t/0", "delivered", core_qos(qos));
            let mut core = self.broker.lock();
            _ = core.deliver(&origin.client, origin.connection, message, self.now);
        }
    }

    fn wait(&mut self, seconds: u8) {
        self.now += Duration::from_secs(seconds.into());
        while self
            .broker
            .lock()
            .run_deadlines(self.now)
            .is_some_and(|at| at <= self.now)
        {}
    }

    fn crash(&mut self) {
        self.peers = Default::default();
        self.inboxes = Default::default();
        let service = Arc::new(NoService);
        self.broker = restored(&self.log, limits(), service, self.began, self.now);
        self.begin_image();
    }
}

fn wire_qos(qos: u8) -> Q {
    [Q::AtMostOnce, Q::AtLeastOnce, Q::ExactlyOnce][usize::from(qos)]
}

fn core_qos(qos: u8) -> QoS {
    QoS::from_bits(qos).unwrap()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1500))]

    #[test]
    fn images_and_changes_converge(actions in prop::collection::vec(action(), 1..120)) {
        let mut world = World::new();
        for action in actions {
            world.act(action);
        }
        while !world.image.over {
            world.piece();
        }
        let all = world.log.recovery();
        // The snapshot agrees with the records, for pieces of any size.
        for bytes_max in [0, 1, 50, 1 << 20] {
            prop_assert_eq!(&recovered(&image(&world.broker, bytes_max)), &all);
        }
        let mut fuzzy = recovered(&world.image.pieces);
        world.log.replay(&mut fuzzy, world.image.from);
        prop_assert_eq!(fuzzy, all);
    }
}

#[test]
fn pieces_are_about_the_requested_size() {
    let mut world = World::new();
    let mut peer = Peer::new(&world.broker, &Hello::new("a"), world.now);
    peer.subscribe("#", Q::AtLeastOnce, world.now);
    peer.lose(world.now);
    for _ in 0..10 {
        world.act(Action::FromBroker {
            topic: 0,
            qos: 1,
            expires_s: Some(9),
        });
    }
    let whole = image(&world.broker, 1 << 20);
    assert_eq!(whole.len(), 1);
    let pieces = image(&world.broker, 100);
    assert!(pieces.len() > 3);
    assert!(pieces.iter().all(|piece| piece.len() < 200));
    assert_eq!(recovered(&pieces), recovered(&whole));
}
