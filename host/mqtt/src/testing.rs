//! A client without a socket, for tests. It encodes packets with rumqttc's codec, and the test
//! passes the time.

mod packets;

use std::{
    borrow::Cow,
    net::{Ipv4Addr, SocketAddr, SocketAddrV4},
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};

use bytes::BytesMut;
pub(crate) use packets::*;
pub(crate) use rumqttc::v5::mqttbytes::{QoS as Q, v5 as wire};
use statehouse_protocol::{LogPosition, SessionId};
use wire::Packet;

use crate::{
    Broker, Claim, Identity, ImageCursor, Limits, Message, NoService, Options, Origin, Persistence,
    ReasonCode, Recovery, Request, Service,
    clock::Clock,
    codec,
    core::{Accepted, ConnectRefusal, Source},
    dispatch::{Dispatch, Turn},
    output::Output,
    router::SessionKey,
};

/// The address of test clients.
pub(crate) const LOOPBACK: SocketAddr =
    SocketAddr::V4(SocketAddrV4::new(Ipv4Addr::LOCALHOST, 49_152));

pub(crate) const OPEN: Duration = Duration::from_secs(1000);

/// A broker with these limits that routes everything.
pub(crate) fn broker(limits: Limits) -> Broker {
    Broker::new(
        Options {
            limits,
            ..Options::default()
        },
        Arc::new(NoService),
    )
}

/// Such a broker, and the time at which its test begins.
pub(crate) fn start(limits: Limits) -> (Broker, Instant) {
    (broker(limits), Instant::now())
}

/// The default limits, except for this change.
pub(crate) fn limited(change: impl FnOnce(&mut Limits)) -> Limits {
    let mut limits = Limits::default();
    change(&mut limits);
    limits
}

/// A log in memory.
#[derive(Default)]
pub(crate) struct TestLog(Mutex<TestLogState>);

#[derive(Default)]
struct TestLogState {
    records: Vec<Vec<u8>>,
    released: usize,
    /// Releases every record at once.
    prompt: bool,
    /// Has no room for additional records.
    full: bool,
}

impl Persistence for TestLog {
    fn append(&self, changes: &[u8]) -> LogPosition {
        let mut state = self.0.lock().unwrap();
        state.records.push(changes.to_vec());
        if state.prompt {
            state.released = state.records.len();
        }
        LogPosition(state.records.len() as u64)
    }

    fn released(&self) -> LogPosition {
        LogPosition(self.0.lock().unwrap().released as u64)
    }

    fn has_room(&self) -> bool {
        !self.0.lock().unwrap().full
    }
}

impl TestLog {
    /// A log that releases every record at once, or only on request of the test.
    pub(crate) fn new(prompt: bool) -> Arc<Self> {
        let log = Self::default();
        log.0.lock().unwrap().prompt = prompt;
        Arc::new(log)
    }

    pub(crate) fn set_full(&self, full: bool) {
        self.0.lock().unwrap().full = full;
    }

    pub(crate) fn len(&self) -> usize {
        self.0.lock().unwrap().records.len()
    }

    pub(crate) fn records(&self) -> Vec<Vec<u8>> {
        self.0.lock().unwrap().records.clone()
    }

    pub(crate) fn bytes(&self) -> usize {
        self.0.lock().unwrap().records.iter().map(Vec::len).sum()
    }

    pub(crate) fn released_len(&self) -> usize {
        self.0.lock().unwrap().released
    }

    /// Releases records up to this count and notifies the broker.
    pub(crate) fn release(&self, broker: &Broker, count: usize) {
        self.0.lock().unwrap().released = count;
        broker.released(LogPosition(count as u64));
    }

    pub(crate) fn release_all(&self, broker: &Broker) {
        self.release(broker, self.len());
    }

    /// Simulates a crash: this many records survive, and they are durable.
    pub(crate) fn crash(&self, survivors: usize) {
        let mut state = self.0.lock().unwrap();
        assert!(survivors >= state.released);
        state.records.truncate(survivors);
        state.released = survivors;
    }

    /// Applies the records after this count to a recovery.
    pub(crate) fn replay(&self, recovery: &mut Recovery, from: usize) {
        for record in &self.0.lock().unwrap().records[from..] {
            recovery.apply(record).unwrap();
        }
    }

    pub(crate) fn recovery(&self) -> Recovery {
        recovered(&self.0.lock().unwrap().records)
    }
}

/// The wall clock at the start of a test.
pub(crate) const WALL_MS: u64 = 1_700_000_000_000;

/// A broker restored from a log, at time `now` of a test that began at `began`.
pub(crate) fn restored(
    log: &Arc<TestLog>,
    limits: Limits,
    service: Arc<dyn Service>,
    began: Instant,
    now: Instant,
) -> Broker {
    let options = Options {
        limits,
        persistence: Some(log.clone()),
        run: log.len() as u32,
        ..Options::default()
    };
    let wall_ms = WALL_MS + (now - began).as_millis() as u64;
    Broker::restore_at(options, service, log.recovery(), Clock::at(now, wall_ms))
}

/// A broker with a log that releases every record at once.
pub(crate) fn logged(limits: Limits) -> (Arc<TestLog>, Broker, Instant) {
    let (log, now) = (TestLog::new(true), Instant::now());
    let broker = restored(&log, limits, Arc::new(NoService), now, now);
    (log, broker, now)
}

/// Takes `req/…`, refuses `no/…`, and records all calls.
#[derive(Default)]
pub(crate) struct RecordingService {
    pub(crate) requests: Mutex<Vec<(Origin, Request)>>,
    pub(crate) ended: Mutex<Vec<SessionId>>,
}

impl Service for RecordingService {
    fn claim(&self, topic: &[u8]) -> Claim {
        match topic {
            _ if topic.starts_with(b"req/") => Claim::Take,
            _ if topic.starts_with(b"no/") => {
                Claim::Refuse(ReasonCode::NOT_AUTHORIZED, "not there")
            }
            _ => Claim::Route,
        }
    }

    fn requests(&self, _: &Broker, from: &Origin, requests: &mut Vec<Request>) {
        let mut kept = self.requests.lock().unwrap();
        kept.extend(requests.drain(..).map(|request| (from.clone(), request)));
    }

    fn disconnected(&self, _: &Broker, _: &Origin) {}

    fn sessions_ended(&self, _: &Broker, sessions: &[SessionId]) {
        self.ended.lock().unwrap().extend(sessions);
    }
}

/// How a client connects.
#[derive(Debug, Clone)]
pub(crate) struct Hello {
    pub(crate) connect: wire::Connect,
    pub(crate) will: Option<wire::LastWill>,
}

impl Hello {
    /// Clean start 0, a session expiry of a thousand seconds, keep alive 60.
    pub(crate) fn new(client: &str) -> Self {
        let mut properties = wire::ConnectProperties::new();
        properties.session_expiry_interval = Some(1000);
        let connect = wire::Connect {
            keep_alive: 60,
            client_id: client.to_owned(),
            clean_start: false,
            properties: Some(properties),
        };
        Self {
            connect,
            will: None,
        }
    }

    pub(crate) fn set(mut self, edit: impl FnOnce(&mut wire::ConnectProperties)) -> Self {
        edit(self.connect.properties.as_mut().unwrap());
        self
    }

    pub(crate) fn expiry(self, seconds: u32) -> Self {
        self.set(|properties| properties.session_expiry_interval = Some(seconds))
    }

    /// The client takes this many messages before it acknowledges one.
    pub(crate) fn window(self, messages: u16) -> Self {
        self.set(|properties| properties.receive_maximum = Some(messages))
    }

    pub(crate) fn clean(mut self) -> Self {
        self.connect.clean_start = true;
        self
    }

    pub(crate) fn will(mut self, topic: &str, payload: &str, delay_s: u32) -> Self {
        let properties = wire::LastWillProperties {
            delay_interval: Some(delay_s),
            payload_format_indicator: None,
            message_expiry_interval: None,
            content_type: None,
            response_topic: None,
            correlation_data: None,
            user_properties: vec![("w".to_owned(), "1".to_owned())],
        };
        self.will = Some(wire::LastWill::new(
            topic,
            payload.to_owned(),
            Q::AtLeastOnce,
            false,
            Some(properties),
        ));
        self
    }

    pub(crate) fn bytes(&self) -> BytesMut {
        let (connect, will) = (self.connect.clone(), self.will.clone());
        bytes(&[Packet::Connect(connect, will, None)])
    }
}

/// The output of a new connection.
fn output(broker: &Broker) -> Arc<Output> {
    let high_bytes = broker.limits().output_bytes_high;
    Arc::new(Output::new(high_bytes, broker.outputs(), None))
}

/// Connects as this user, or anonymously. No client reads the output.
pub(crate) fn accept(
    broker: &Broker,
    hello: &Hello,
    user: Option<&str>,
    now: Instant,
) -> Result<Accepted, ConnectRefusal> {
    let connect = codec::decode_connect(&mut hello.bytes(), 1 << 16);
    let connect = connect.unwrap().unwrap();
    let identity = Identity {
        user: user.map(Into::into),
        ..Identity::default()
    };
    let output = output(broker);
    let mut core = broker.lock();
    core.connect(connect, identity.into(), LOOPBACK, &output, now)
}

/// A connected client.
pub(crate) struct Peer {
    pub(crate) broker: Broker,
    pub(crate) session: SessionKey,
    pub(crate) origin: Origin,
    pub(crate) output: Arc<Output>,
    pub(crate) connack: wire::ConnAck,
    pub(crate) silence_max: Option<Duration>,
    dispatch: Dispatch,
    inbox: BytesMut,
}

impl Peer {
    pub(crate) fn new(broker: &Broker, hello: &Hello, now: Instant) -> Self {
        let mut peer = Self::waiting(broker, hello, now);
        peer.inbox = peer.output.drain();
        let Packet::ConnAck(connack) = Packet::read(&mut peer.inbox, None).unwrap() else {
            panic!("no CONNACK")
        };
        peer.connack = connack;
        peer
    }

    /// A client whose CONNACK may wait for a record.
    pub(crate) fn waiting(broker: &Broker, hello: &Hello, now: Instant) -> Self {
        Self::of(broker, &mut hello.bytes(), now)
    }

    /// A client that sends this CONNECT, of any version.
    pub(crate) fn of(broker: &Broker, connect: &mut BytesMut, now: Instant) -> Self {
        let output = output(broker);
        let connect = codec::decode_connect(connect, 1 << 16).unwrap().unwrap();
        // Every client has a user, so that every test covers recording it.
        let identity = Arc::new(Identity {
            user: Some(connect.client_id.clone()),
            ..Identity::default()
        });
        let accepted = broker
            .lock()
            .connect(connect, identity, LOOPBACK, &output, now)
            .unwrap();
        let dispatch = Dispatch::new(broker.clone(), &accepted);
        Self {
            broker: broker.clone(),
            session: accepted.session,
            origin: accepted.origin,
            output,
            connack: wire::ConnAck {
                session_present: false,
                code: wire::ConnectReturnCode::ServerBusy,
                properties: None,
            },
            silence_max: accepted.silence_max,
            dispatch,
            inbox: BytesMut::new(),
        }
    }

    /// Sends packets in one read.
    pub(crate) fn send(&mut self, packets: &[Packet], now: Instant) -> Turn {
        self.send_raw(&bytes(packets), now)
    }

    /// Sends a PUBLISH.
    pub(crate) fn publish(
        &mut self,
        topic: &str,
        qos: Q,
        packet_id: u16,
        payload: &str,
        now: Instant,
    ) -> Turn {
        let publish = publish(topic, qos, packet_id, payload);
        self.send(&[Packet::Publish(publish)], now)
    }

    pub(crate) fn send_raw(&mut self, bytes: &[u8], now: Instant) -> Turn {
        self.turns(bytes, now).0
    }

    /// Runs all turns that these bytes need. Returns the last result and the work of each turn.
    pub(crate) fn turns(&mut self, bytes: &[u8], now: Instant) -> (Turn, Vec<u64>) {
        let mut bytes = BytesMut::from(bytes);
        let mut works = Vec::new();
        loop {
            let before = self.broker.lock().work();
            let turn = self.turn(&mut bytes, now);
            works.push(self.broker.lock().work() - before);
            if !matches!(turn, Turn::More | Turn::Cut) {
                return (turn, works);
            }
        }
    }

    pub(crate) fn turn(&mut self, bytes: &mut BytesMut, now: Instant) -> Turn {
        self.dispatch.turn(bytes, now)
    }

    /// Everything that the broker has sent so far.
    pub(crate) fn receive(&mut self) -> Vec<Packet> {
        let mut bytes = self.receive_bytes();
        let mut packets = Vec::new();
        while !bytes.is_empty() {
            packets.push(Packet::read(&mut bytes, None).unwrap());
        }
        packets
    }

    /// The bytes of everything that the broker has sent so far.
    pub(crate) fn receive_bytes(&mut self) -> BytesMut {
        loop {
            let bytes = self.output.drain();
            let mut chunk = bytes.clone();
            if self.output.written(&mut chunk) && !self.output.is_closing() {
                self.broker.lock().pump(self.session, Instant::now());
            }
            if bytes.is_empty() {
                return std::mem::take(&mut self.inbox);
            }
            self.inbox.unsplit(bytes);
        }
    }

    /// Sends QoS 2 messages without completing the exchanges. Returns the reason if the broker
    /// answers by DISCONNECT.
    pub(crate) fn begin_exchanges(
        &mut self,
        packet_ids: std::ops::Range<u16>,
        now: Instant,
    ) -> Option<wire::DisconnectReasonCode> {
        for packet_id in packet_ids {
            self.publish("t", Q::ExactlyOnce, packet_id, "", now);
        }
        disconnected(&self.receive())
    }

    /// Puts bytes back that were received.
    pub(crate) fn unread(&mut self, bytes: BytesMut) {
        self.inbox = bytes;
    }

    /// Checks that a DISCONNECT with this reason came last.
    #[track_caller]
    pub(crate) fn assert_disconnected(&mut self, reason: wire::DisconnectReasonCode) {
        assert_eq!(disconnected(&self.receive()), Some(reason));
    }

    /// The PUBACK that came last.
    pub(crate) fn last_puback(&mut self) -> wire::PubAck {
        match self.receive().pop() {
            Some(Packet::PubAck(ack)) => ack,
            other => panic!("{other:?} instead of a PUBACK"),
        }
    }

    /// The messages among the received packets.
    pub(crate) fn messages(&mut self) -> Vec<wire::Publish> {
        let publishes = self
            .receive()
            .into_iter()
            .filter_map(|packet| match packet {
                Packet::Publish(publish) => Some(publish),
                _ => None,
            });
        publishes.collect()
    }

    /// Receives messages, and completes their exchanges, until no further one comes.
    pub(crate) fn read_all(&mut self, now: Instant) -> Vec<wire::Publish> {
        let mut all = Vec::new();
        loop {
            let messages = self.messages();
            if messages.is_empty() {
                return all;
            }
            for message in messages {
                let answers = match message.qos {
                    Q::AtMostOnce => vec![],
                    Q::AtLeastOnce => vec![puback(message.pkid)],
                    Q::ExactlyOnce => vec![pubrec(message.pkid), pubcomp(message.pkid)],
                };
                self.send(&answers, now);
                all.push(message);
            }
        }
    }

    pub(crate) fn payloads(&mut self) -> Vec<String> {
        self.messages()
            .iter()
            .map(|message| String::from_utf8_lossy(&message.payload).into_owned())
            .collect()
    }

    pub(crate) fn subscribe(
        &mut self,
        filter: &str,
        qos: Q,
        now: Instant,
    ) -> wire::SubscribeReasonCode {
        self.subscribe_with(wire::Filter::new(filter, qos), None, now)
    }

    pub(crate) fn subscribe_with(
        &mut self,
        filter: wire::Filter,
        id: Option<usize>,
        now: Instant,
    ) -> wire::SubscribeReasonCode {
        let turn = self.send(&[subscribe_to([filter], id)], now);
        assert_eq!(turn, Turn::Drained);
        // Retained messages may follow; they stay for the test.
        self.inbox.unsplit(self.output.drain());
        match Packet::read(&mut self.inbox, None).unwrap() {
            Packet::SubAck(ack) => ack.return_codes[0],
            other => panic!("{other:?} instead of SUBACK"),
        }
    }

    /// A client subscribes to `t` at QoS 1 and loses its connection.
    pub(crate) fn leave_subscribed(broker: &Broker, client: &str, now: Instant) {
        let mut peer = Self::new(broker, &Hello::new(client), now);
        peer.subscribe("t", Q::AtLeastOnce, now);
        peer.lose(now);
    }

    /// Ends the connection without DISCONNECT.
    pub(crate) fn lose(self, now: Instant) {
        self.broker
            .lock()
            .detach(self.session, self.origin.connection, now);
    }

    /// Sends DISCONNECT with this reason and ends the connection.
    pub(crate) fn disconnect(mut self, reason: wire::DisconnectReasonCode, now: Instant) {
        assert_eq!(
            self.send(&[Packet::Disconnect(wire::Disconnect::new(reason))], now),
            Turn::Over
        );
        self.lose(now);
    }
}

/// Publishes a message of the embedder at this time.
pub(crate) fn publish_at(broker: &Broker, message: Message, now: Instant) {
    let mut core = broker.lock();
    core.publish(Cow::Owned(message), Source::default(), now)
        .unwrap();
}

/// Sends a message of the embedder to one connection.
pub(crate) fn deliver(broker: &Broker, to: &Origin, message: Message) -> bool {
    broker.batch(|batch| batch.deliver(&to.client, to.connection, message))
}

/// A whole snapshot, in pieces of about this size.
pub(crate) fn image(broker: &Broker, bytes_max: usize) -> Vec<Vec<u8>> {
    let mut cursor = ImageCursor::default();
    std::iter::from_fn(|| broker.image(&mut cursor, bytes_max)).collect()
}

/// The state that these records or pieces of a snapshot describe.
pub(crate) fn recovered(records: &[Vec<u8>]) -> Recovery {
    let mut recovery = Recovery::default();
    for record in records {
        recovery.apply(record).unwrap();
    }
    recovery
}
