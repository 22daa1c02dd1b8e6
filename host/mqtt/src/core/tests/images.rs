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

const CLIENTS: &[&str] = &["a", "b", "c"];
const FILTERS: &[&str] = &["t/0", "t/+", "#", "t/1"];
const TOPICS: &[&str] = &["t/0", "t/1", "u"];

/// A step of the test. The first six variants concern one client.
#[derive(Debug, Clone)]
enum Action {
    Connect(Hello),
    Lose,
    /// DISCONNECT with this Session Expiry Interval.
    Disconnect(u32),
    Send(Packet),
    /// The broker sends a message to this connection only.
    Deliver(Message),
    /// The client reads and acknowledges this many packets. A QoS 2 message needs two steps.
    Acknowledge(usize),
    /// The broker publishes a message, which expires after these seconds, if there are any.
    Publish(Message, Option<u8>),
    Wait(u8),
    Piece,
    BeginImage,
    Crash,
}

fn connect() -> impl Strategy<Value = Action> {
    let expiry_s = prop_oneof![Just(0_u32), Just(5), Just(1000)];
    let hello = (expiry_s, prop::bool::weighted(0.2), any::<bool>());
    hello.prop_map(|(expiry_s, clean, has_will)| {
        let mut hello = Hello::new("").expiry(expiry_s).window(2);
        hello.connect.clean_start = clean;
        if has_will {
            hello = hello.will("u", "will", expiry_s / 2);
        }
        Action::Connect(hello)
    })
}

fn subscription() -> impl Strategy<Value = Action> {
    (prop::sample::select(FILTERS), 0_u8..3).prop_map(|(filter, qos)| {
        let mut filter = wire::Filter::new(filter, wire_qos(qos));
        filter.nolocal = qos == 1;
        filter.preserve_retain = qos == 2;
        let id = (qos > 0).then_some(usize::from(qos) * 200);
        Action::Send(subscribe_to([filter], id))
    })
}

fn publication() -> impl Strategy<Value = Action> {
    let flags = (prop::bool::weighted(0.3), prop::bool::weighted(0.2));
    let packet = (prop::sample::select(TOPICS), 0_u8..3, 1_u16..6, flags);
    packet.prop_map(|(topic, qos, id, (retain, empty))| {
        let payload = if empty { "" } else { "payload" };
        let id = if qos == 0 { 0 } else { id };
        let mut publish = publish(topic, wire_qos(qos), id, payload);
        publish.retain = retain;
        Action::Send(Packet::Publish(publish))
    })
}

/// The broker publishes a message, which it retains if it expires late.
fn from_broker(topic: &'static str, qos: u8, expires_s: Option<u8>) -> Action {
    let mut message = Message::new(topic, "from the broker", core_qos(qos));
    message.properties = PropertiesBuilder::new().user("k", "v").finish().unwrap();
    message.retain = expires_s.is_some_and(|seconds| seconds > 5);
    Action::Publish(message, expires_s)
}

/// An action, and the client that it concerns.
fn action() -> impl Strategy<Value = (usize, Action)> {
    let unsubscribed = |filter: &str| Action::Send(unsubscribe(&[filter]));
    let delivered = |qos| Action::Deliver(Message::new("t/0", "delivered", core_qos(qos)));
    let messages = (
        prop::sample::select(TOPICS),
        0_u8..3,
        prop::option::of(0_u8..10),
    );
    let actions = prop_oneof![
        3 => connect(),
        1 => Just(Action::Lose),
        1 => prop_oneof![Just(0_u32), Just(7)].prop_map(Action::Disconnect),
        3 => subscription(),
        1 => prop::sample::select(FILTERS).prop_map(unsubscribed),
        6 => publication(),
        2 => (1_u16..6).prop_map(|id| Action::Send(pubrel(id))),
        3 => messages.prop_map(|(topic, qos, expires_s)| from_broker(topic, qos, expires_s)),
        2 => (0_u8..3).prop_map(delivered),
        5 => (1_usize..4).prop_map(Action::Acknowledge),
        1 => (0_u8..8).prop_map(Action::Wait),
        4 => Just(Action::Piece),
        1 => Just(Action::BeginImage),
        1 => Just(Action::Crash),
    ];
    (0..CLIENTS.len(), actions)
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

    fn act(&mut self, client: usize, action: Action) {
        match action {
            Action::Connect(hello) => self.connect(client, hello),
            Action::Lose => self.lose(client),
            Action::Disconnect(expiry_s) => self.disconnect(client, expiry_s),
            Action::Send(packet) => self.send(client, packet),
            Action::Deliver(message) => self.deliver(client, message),
            Action::Acknowledge(steps) => (0..steps).for_each(|_| self.acknowledge(client)),
            Action::Publish(message, expires_s) => self.publish(message, expires_s),
            Action::Wait(seconds) => self.wait(seconds),
            Action::Piece => self.piece(),
            Action::BeginImage => self.begin_image(),
            Action::Crash => self.crash(),
        }
    }

    fn connect(&mut self, client: usize, mut hello: Hello) {
        self.inboxes[client].clear();
        hello.connect.client_id = CLIENTS[client].to_owned();
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

    fn publish(&mut self, mut message: Message, expires_s: Option<u8>) {
        let now = self.now;
        message.expires = expires_s.map(|seconds| now + Duration::from_secs(seconds.into()));
        let source = crate::core::Source::default();
        _ = self.broker.lock().publish(Cow::Owned(message), source, now);
    }

    fn deliver(&mut self, client: usize, message: Message) {
        if let Some(Peer { origin, .. }) = &self.peers[client] {
            let mut core = self.broker.lock();
            _ = core.deliver(&origin.client, origin.connection, message, self.now);
        }
    }

    fn wait(&mut self, seconds: u8) {
        self.now += Duration::from_secs(seconds.into());
        let run = || self.broker.lock().run_deadlines(self.now);
        while run().is_some_and(|at| at <= self.now) {}
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
        for (client, action) in actions {
            world.act(client, action);
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
        world.act(0, from_broker("t/0", 1, Some(9)));
    }
    let whole = image(&world.broker, 1 << 20);
    assert_eq!(whole.len(), 1);
    let pieces = image(&world.broker, 100);
    assert!(pieces.len() > 3);
    assert!(pieces.iter().all(|piece| piece.len() < 200));
    assert_eq!(recovered(&pieces), recovered(&whole));
}
