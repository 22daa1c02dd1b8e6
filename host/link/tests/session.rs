//! One session over several connections, against a broker that does exactly what a test says.
// A test fails where a step of it does.
#![allow(clippy::unwrap_used)]

use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use rumqttc::v5::mqttbytes::v5::{
    ConnAck, ConnAckProperties, ConnectReturnCode, Filter, Packet, PubAck, PubAckReason, Publish,
    SubAck, SubscribeReasonCode,
};
use rumqttc::v5::mqttbytes::{Error as WireError, QoS};
use statehouse_link::{Arrival, End, Message, Options, Outlet, Owner, Place, Verdict};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Notify, mpsc};
use tokio::time::timeout;

/// How long a step may take on a busy machine.
const PATIENCE: Duration = Duration::from_secs(30);

/// A payload, for as long as it may be sent; and whether a shorter one may stand for it.
#[derive(Debug, Clone)]
struct Note {
    payload: Bytes,
    expired: bool,
    shorter: bool,
}

fn note(payload: impl Into<Bytes>) -> Note {
    Note {
        payload: payload.into(),
        expired: false,
        shorter: false,
    }
}

impl Message for Note {
    fn publish(&self) -> Option<Publish> {
        let payload = self.payload.clone();
        (!self.expired).then(|| Publish::new("notes", QoS::AtLeastOnce, payload, None))
    }

    fn too_large(self, _bytes: usize, _bytes_max: usize) -> Option<Self> {
        self.shorter.then(|| note("too long"))
    }
}

/// Hands everything to its test.
struct Tester {
    outlet: Mutex<Outlet<Note>>,
    stopping: Notify,
    subscribed: Notify,
    arrived: mpsc::UnboundedSender<Arrival>,
    /// What to make of the next subscriptions.
    verdicts: Mutex<Vec<Verdict>>,
    lost: Mutex<Vec<String>>,
    hopeless: Mutex<Vec<Bytes>>,
    ended: Mutex<Option<End>>,
}

impl Owner for Tester {
    type Message = Note;

    fn with<R>(&self, work: impl FnOnce(&mut Outlet<Note>) -> R) -> R {
        work(&mut self.outlet.lock().unwrap())
    }

    fn stopping(&self) -> &Notify {
        &self.stopping
    }

    fn filters(&self) -> Vec<Filter> {
        vec![Filter::new("requests", QoS::AtLeastOnce)]
    }

    fn connected(self: &Arc<Self>, _session_present: bool) {}

    fn subscribed(&self, _granted: &[SubscribeReasonCode]) -> Verdict {
        self.subscribed.notify_one();
        self.verdicts.lock().unwrap().pop().unwrap_or(Verdict::GoOn)
    }

    fn arrived(&self, arrivals: &mut Vec<Arrival>) {
        for arrival in arrivals.drain(..) {
            if let Arrival::Acknowledged(number, _) = &arrival {
                self.with(|outlet| outlet.remove(*number));
            }
            self.arrived.send(arrival).unwrap();
        }
    }

    fn lost(&self, why: &str) -> bool {
        self.lost.lock().unwrap().push(why.to_owned());
        true
    }

    fn hopeless(&self, message: Note, _why: &str) {
        self.hopeless.lock().unwrap().push(message.payload);
    }

    fn ended(&self, end: End) {
        *self.ended.lock().unwrap() = Some(end);
    }
}

struct Scene {
    listener: TcpListener,
    owner: Arc<Tester>,
    arrivals: mpsc::UnboundedReceiver<Arrival>,
}

impl Scene {
    async fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let (arrived, arrivals) = mpsc::unbounded_channel();
        let owner = Arc::new(Tester {
            outlet: Mutex::default(),
            stopping: Notify::new(),
            subscribed: Notify::new(),
            arrived,
            verdicts: Mutex::default(),
            lost: Mutex::default(),
            hopeless: Mutex::default(),
            ended: Mutex::default(),
        });
        let options = Options {
            place: Place {
                host: "127.0.0.1".into(),
                port: listener.local_addr().unwrap().port(),
                tls: None,
                websocket: None,
                login: None,
            },
            client_id: "tester".into(),
            keep_alive: Duration::from_secs(5),
            connect_timeout: Duration::from_secs(1),
            session_expiry: Duration::from_secs(60),
            resume: true,
            receive_max: 16,
            in_flight_max: 64,
            packet_bytes_max: 1 << 20,
            sent_bytes_max: u32::MAX,
            by_hand: true,
            pauses: (Duration::from_millis(5), Duration::from_millis(20)),
        };
        tokio::spawn(statehouse_link::run(owner.clone(), options));
        Self {
            listener,
            owner,
            arrivals,
        }
    }

    /// The next connection, through SUBACK. The resends of a resumed session come before its SUBSCRIBE.
    async fn accept(&self, greeting: Greeting) -> Peer {
        let knock = timeout(PATIENCE, self.listener.accept()).await;
        let (stream, _) = knock.expect("the link does not come").unwrap();
        let mut peer = Peer {
            stream,
            unread: BytesMut::new(),
            early: Vec::new(),
        };
        let Packet::Connect(connect, ..) = peer.read().await else {
            panic!("not a CONNECT");
        };
        assert!(!connect.clean_start);
        peer.greet(greeting).await;
        loop {
            match peer.read().await {
                Packet::Subscribe(subscribe) => {
                    peer.write(Packet::SubAck(SubAck {
                        pkid: subscribe.pkid,
                        return_codes: vec![SubscribeReasonCode::Success(QoS::AtLeastOnce)],
                        properties: None,
                    }))
                    .await;
                    return peer;
                }
                early => peer.early.push(early),
            }
        }
    }

    fn add(&self, notes: impl IntoIterator<Item = Note>) {
        self.owner.with(|outlet| {
            for note in notes {
                outlet.add(None, |_| note);
            }
            outlet.flush();
        });
    }

    /// The next message that the link received: its receipt.
    async fn receipt(&mut self) -> u64 {
        loop {
            if let Arrival::Message(_, receipt) = self.arrivals.recv().await.unwrap() {
                return receipt.unwrap();
            }
        }
    }

    fn settle(&self, receipt: u64) {
        self.owner.with(|outlet| {
            outlet.settle(receipt);
            outlet.flush();
        });
    }
}

#[derive(Default)]
struct Greeting {
    session_present: bool,
    receive_max: Option<u16>,
    max_packet_size: Option<u32>,
}

struct Peer {
    stream: TcpStream,
    unread: BytesMut,
    early: Vec<Packet>,
}

impl Peer {
    async fn greet(&mut self, greeting: Greeting) {
        let properties = ConnAckProperties {
            session_expiry_interval: None,
            receive_max: greeting.receive_max,
            max_qos: None,
            retain_available: None,
            max_packet_size: greeting.max_packet_size,
            assigned_client_identifier: None,
            topic_alias_max: None,
            reason_string: None,
            user_properties: vec![],
            wildcard_subscription_available: None,
            subscription_identifiers_available: None,
            shared_subscription_available: None,
            server_keep_alive: None,
            response_information: None,
            server_reference: None,
            authentication_method: None,
            authentication_data: None,
        };
        self.write(Packet::ConnAck(ConnAck {
            session_present: greeting.session_present,
            code: ConnectReturnCode::Success,
            properties: Some(properties),
        }))
        .await;
    }

    async fn read(&mut self) -> Packet {
        loop {
            match Packet::read(&mut self.unread, None) {
                Ok(packet) => return packet,
                Err(WireError::InsufficientBytes(_)) => {
                    let reading = self.stream.read_buf(&mut self.unread);
                    let read = timeout(PATIENCE, reading).await;
                    let read = read.expect("the link says nothing").unwrap();
                    assert_ne!(read, 0, "the link closed the connection");
                }
                Err(error) => panic!("{error}"),
            }
        }
    }

    async fn write(&mut self, packet: Packet) {
        let mut bytes = BytesMut::new();
        packet.write(&mut bytes, None).unwrap();
        self.stream.write_all(&bytes).await.unwrap();
    }

    /// The next packet, in short.
    async fn next(&mut self) -> Seen {
        let packet = match self.early.is_empty() {
            true => self.read().await,
            false => self.early.remove(0),
        };
        match packet {
            Packet::Publish(publish) => Seen::Publish {
                text: String::from_utf8_lossy(&publish.payload).into_owned(),
                packet_id: publish.pkid,
                dup: publish.dup,
            },
            Packet::PubAck(ack) => Seen::PubAck(ack.pkid),
            other => panic!("{other:?}"),
        }
    }

    /// The text of the next PUBLISH.
    async fn text(&mut self) -> String {
        self.text_and_packet_id().await.0
    }

    async fn text_and_packet_id(&mut self) -> (String, u16) {
        match self.next().await {
            Seen::Publish {
                text, packet_id, ..
            } => (text, packet_id),
            other => panic!("{other:?}"),
        }
    }

    async fn publish(&mut self, packet_id: u16) {
        let mut publish = Publish::new("requests", QoS::AtLeastOnce, "request", None);
        publish.pkid = packet_id;
        self.write(Packet::Publish(publish)).await;
    }

    async fn acknowledge(&mut self, packet_id: u16) {
        self.write(Packet::PubAck(PubAck {
            pkid: packet_id,
            reason: PubAckReason::Success,
            properties: None,
        }))
        .await;
    }

    /// Nothing comes for a moment.
    async fn is_silent(&mut self) -> bool {
        assert!(self.early.is_empty());
        let wait = Duration::from_millis(50);
        timeout(wait, self.read()).await.is_err()
    }
}

#[derive(Debug, PartialEq)]
enum Seen {
    Publish {
        text: String,
        packet_id: u16,
        dup: bool,
    },
    PubAck(u16),
}

#[tokio::test]
async fn what_is_settled_is_acknowledged_in_order_behind_what_it_led_to() {
    let mut scene = Scene::start().await;
    let mut peer = scene.accept(Greeting::default()).await;
    for packet_id in [31, 32, 33] {
        peer.publish(packet_id).await;
    }
    let (first, second, third) = (
        scene.receipt().await,
        scene.receipt().await,
        scene.receipt().await,
    );
    scene.settle(second);
    assert!(peer.is_silent().await, "the first is not settled");
    scene.owner.with(|outlet| {
        for (of, text) in [(None, "a"), (Some(first), "b"), (Some(first), "c")] {
            outlet.add(of, |_| note(text));
        }
        outlet.flush();
    });
    scene.settle(first);
    scene.settle(third);
    let mut sent = Vec::new();
    for _ in 0..3 {
        sent.push(peer.text_and_packet_id().await);
    }
    assert!(sent.iter().map(|it| &*it.0).eq(["a", "b", "c"]));
    peer.acknowledge(sent[1].1).await;
    assert!(peer.is_silent().await, "c has not been taken");
    // Of a nobody has to know: the request did not lead to it.
    peer.acknowledge(sent[2].1).await;
    for packet_id in [31, 32, 33] {
        assert_eq!(peer.next().await, Seen::PubAck(packet_id));
    }
}

#[tokio::test]
async fn nothing_is_acknowledged_before_what_a_lost_request_led_to() {
    for skipped in [false, true] {
        let mut scene = Scene::start().await;
        let mut peer = scene.accept(Greeting::default()).await;
        peer.publish(31).await;
        let lost = scene.receipt().await;
        scene.owner.with(|outlet| {
            for (of, text) in [(Some(lost), "a"), (None, "b")] {
                outlet.add(of, |_| note(text));
            }
            outlet.flush();
        });
        let before = [
            peer.text_and_packet_id().await,
            peer.text_and_packet_id().await,
        ];
        drop(peer);
        let greeting = Greeting {
            session_present: true,
            ..Greeting::default()
        };
        let mut peer = scene.accept(greeting).await;
        peer.publish(31).await;
        let again = scene.receipt().await;
        scene.settle(again);
        for sent in &before {
            assert_eq!(peer.text_and_packet_id().await, *sent);
        }
        assert!(peer.is_silent().await, "a is of the request that was lost");
        // Of what lies before an acknowledgement a broker has no other to come.
        peer.acknowledge(before[usize::from(skipped)].1).await;
        assert_eq!(peer.next().await, Seen::PubAck(31));
    }
}

#[tokio::test]
async fn an_acknowledgement_of_an_earlier_connection_is_not_sent() {
    let mut scene = Scene::start().await;
    let mut peer = scene.accept(Greeting::default()).await;
    peer.publish(31).await;
    let before = scene.receipt().await;
    drop(peer);
    let mut peer = scene
        .accept(Greeting {
            session_present: true,
            ..Greeting::default()
        })
        .await;
    peer.publish(31).await;
    let again = scene.receipt().await;
    scene.settle(before);
    assert!(peer.is_silent().await);
    scene.settle(again);
    assert_eq!(peer.next().await, Seen::PubAck(31));
}

#[tokio::test]
async fn acknowledgements_go_although_the_broker_takes_no_more_messages() {
    let mut scene = Scene::start().await;
    let greeting = Greeting {
        receive_max: Some(3),
        ..Greeting::default()
    };
    let mut peer = scene.accept(greeting).await;
    peer.publish(31).await;
    let receipt = scene.receipt().await;
    scene.settle(receipt);
    assert_eq!(peer.next().await, Seen::PubAck(31));
    peer.publish(32).await;
    let receipt = scene.receipt().await;
    // Nothing of this is before it: it was settled first.
    scene.settle(receipt);
    scene.add(["a", "b", "c", "d"].map(note));
    let mut texts = Vec::new();
    for _ in 0..3 {
        match peer.next().await {
            Seen::Publish { text, .. } => texts.push(text),
            Seen::PubAck(packet_id) => assert_eq!(packet_id, 32),
        }
    }
    assert_eq!(texts, ["a", "b"]);
    // The window is full, as far as it is used.
    peer.publish(33).await;
    let receipt = scene.receipt().await;
    scene.owner.with(|outlet| {
        outlet.settle(receipt);
        outlet.flush();
    });
    assert_eq!(peer.next().await, Seen::PubAck(33));
}

#[tokio::test]
async fn what_a_lost_connection_held_is_sent_again_before_all_else() {
    let scene = Scene::start().await;
    let greeting = Greeting {
        receive_max: Some(3),
        ..Greeting::default()
    };
    let mut peer = scene.accept(greeting).await;
    scene.add(["a", "b", "c"].map(note));
    let sent = [
        peer.text_and_packet_id().await,
        peer.text_and_packet_id().await,
    ];
    drop(peer);
    let mut peer = scene
        .accept(Greeting {
            session_present: true,
            receive_max: Some(3),
            ..Greeting::default()
        })
        .await;
    for (text, packet_id) in sent.clone() {
        let again = Seen::Publish {
            text,
            packet_id,
            dup: true,
        };
        assert_eq!(peer.next().await, again);
    }
    assert!(peer.is_silent().await);
    peer.acknowledge(sent[0].1).await;
    assert_eq!(peer.text().await, "c");
}

#[tokio::test]
async fn what_is_too_late_is_not_sent_and_holds_nothing_up() {
    let mut scene = Scene::start().await;
    let mut peer = scene.accept(Greeting::default()).await;
    peer.publish(31).await;
    let receipt = scene.receipt().await;
    let late = Note {
        expired: true,
        ..note("late")
    };
    scene.owner.with(|outlet| {
        outlet.add(Some(receipt), |_| late);
        outlet.settle(receipt);
        outlet.flush();
    });
    assert_eq!(peer.next().await, Seen::PubAck(31));
    assert!(scene.owner.with(|outlet| outlet.is_empty()));
}

#[tokio::test]
async fn what_is_too_large_for_the_broker_is_replaced_or_forgotten() {
    let scene = Scene::start().await;
    let mut peer = scene.accept(Greeting::default()).await;
    let long = || note(vec![b'x'; 200]);
    let replaceable = Note {
        shorter: true,
        ..long()
    };
    scene.add([long(), replaceable, note("short")]);
    for length in [200, 200, 5] {
        assert_eq!(peer.text().await.len(), length);
    }
    drop(peer);
    // The broker comes back with a bound that these do not keep.
    let mut peer = scene
        .accept(Greeting {
            session_present: true,
            max_packet_size: Some(100),
            ..Greeting::default()
        })
        .await;
    assert_eq!(
        [peer.text().await, peer.text().await],
        ["too long", "short"]
    );
    assert_eq!(scene.owner.with(|outlet| outlet.len()), 2);
}

#[tokio::test]
async fn what_cannot_be_made_small_enough_is_forgotten() {
    let scene = Scene::start().await;
    let greeting = Greeting {
        // Less than the shorter one, by a byte; more than the SUBSCRIBE.
        max_packet_size: Some(19),
        ..Greeting::default()
    };
    let mut peer = scene.accept(greeting).await;
    scene.owner.subscribed.notified().await;
    let replaceable = Note {
        shorter: true,
        ..note(vec![b'x'; 200])
    };
    scene.add([replaceable]);
    assert!(peer.is_silent().await);
    assert!(scene.owner.with(|outlet| outlet.is_empty()));
}

/// Publishes a message for which the broker says `farewell` each time, between others. How many connections it ends.
async fn publish_evil(farewell: &[u8]) -> usize {
    let mut scene = Scene::start().await;
    let mut peer = scene.accept(Greeting::default()).await;
    peer.publish(31).await;
    let receipt = scene.receipt().await;
    scene.add(["good", "evil", "fine"].map(note));
    scene.settle(receipt);
    let mut taken: Vec<String> = Vec::new();
    let mut ended = 0;
    while taken.len() < 2 {
        let (text, packet_id) = peer.text_and_packet_id().await;
        if text != "evil" {
            // The first PUBACK comes too late at first.
            if ended >= 3 {
                peer.acknowledge(packet_id).await;
                taken.push(text);
            }
            continue;
        }
        peer.stream.write_all(farewell).await.unwrap();
        peer.stream.shutdown().await.unwrap();
        while peer.stream.read_buf(&mut peer.unread).await.unwrap_or(0) > 0 {}
        ended += 1;
        assert!(ended < 20, "it is sent again for ever");
        peer = scene
            .accept(Greeting {
                session_present: true,
                ..Greeting::default()
            })
            .await;
    }
    assert_eq!(taken, ["good", "fine"]);
    assert_eq!(*scene.owner.hopeless.lock().unwrap(), ["evil"]);
    // What led to it is not held up any more.
    peer.publish(31).await;
    let receipt = scene.receipt().await;
    scene.settle(receipt);
    assert_eq!(peer.next().await, Seen::PubAck(31));
    ended
}

#[tokio::test]
async fn a_message_that_the_broker_always_closes_for_does_not_stop_the_others() {
    assert_eq!(publish_evil(&[0xe0, 2, 0x82, 0]).await, 4);
}

/// As Mosquitto does: rumqttc does not read its DISCONNECT, which has no length of properties.
#[tokio::test]
async fn so_it_is_where_the_broker_does_not_say_why() {
    assert_eq!(publish_evil(&[0xe0, 1, 0x82]).await, 8);
}

#[tokio::test]
async fn a_subscription_that_will_not_do_is_tried_again() {
    let scene = Scene::start().await;
    let refused = Verdict::TryAgain("it is not allowed".into());
    scene.owner.verdicts.lock().unwrap().push(refused);
    let mut peer = scene.accept(Greeting::default()).await;
    assert_eq!(peer.stream.read_buf(&mut peer.unread).await.unwrap(), 0);
    let mut peer = scene.accept(Greeting::default()).await;
    scene.add([note("a")]);
    assert_eq!(peer.text().await, "a");
    assert_eq!(*scene.owner.lost.lock().unwrap(), ["it is not allowed"]);
}

/// rumqttc waits for ever where a write finds no room, and sends no PINGREQ meanwhile.
#[tokio::test]
async fn a_broker_that_does_not_read_is_given_up() {
    let scene = Scene::start().await;
    let mut stuck = scene.accept(Greeting::default()).await;
    scene.add((0..60).map(|_| note(vec![b'x'; 512 << 10])));
    stuck.text().await;
    // More is not read: what the system buffers is full soon.
    tokio::time::sleep(Duration::from_millis(300)).await;
    tokio::time::pause();
    tokio::time::advance(Duration::from_secs(12)).await;
    tokio::time::resume();
    let mut peer = scene.accept(Greeting::default()).await;
    assert_eq!(peer.text().await.len(), 512 << 10);
    let lost = scene.owner.lost.lock().unwrap().concat();
    assert_eq!(lost, "the broker does not read any more");
}

#[tokio::test]
async fn an_end_that_is_wanted_says_goodbye() {
    let scene = Scene::start().await;
    let mut peer = scene.accept(Greeting::default()).await;
    scene.owner.subscribed.notified().await;
    scene.owner.stopping.notify_one();
    while peer.stream.read_buf(&mut peer.unread).await.unwrap() > 0 {}
    assert_eq!(peer.unread.as_ref(), [0xe0, 0]);
    tokio::task::yield_now().await;
    assert_eq!(*scene.owner.ended.lock().unwrap(), Some(End::Closed));
}
