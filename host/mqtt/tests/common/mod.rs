//! Raw clients over streams, using only rumqttc's codec.
#![allow(dead_code, reason = "each test binary uses its own part")]
#![allow(clippy::unwrap_used, reason = "tests fail by panicking")]

use std::{
    net::SocketAddr,
    sync::{Arc, Mutex},
    time::Duration,
};

use bytes::{Bytes, BytesMut};
pub(crate) use rumqttc::v5::mqttbytes::{QoS as Q, v5 as wire};
use statehouse_mqtt::{
    Broker, Claim, Door, Limits, Message, NoService, Options, Origin, Properties,
    PropertiesBuilder, QoS, ReasonCode, Request, Service,
};
use statehouse_protocol::SessionId;
use tokio::{
    io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, BufStream},
    net::{TcpListener, TcpStream},
    time::timeout,
};
use wire::Packet;

/// Long enough on any machine; tests that pass never wait this long.
pub(crate) const PATIENCE: Duration = Duration::from_secs(30);
pub(crate) const PEER: SocketAddr =
    SocketAddr::new(std::net::IpAddr::V4(std::net::Ipv4Addr::LOCALHOST), 1);

pub(crate) fn broker(limits: Limits) -> Broker {
    serving(limits, Arc::new(NoService))
}

fn serving(limits: Limits, service: Arc<dyn Service>) -> Broker {
    let options = Options {
        limits,
        ..Options::default()
    };
    Broker::new(options, service)
}

pub(crate) async fn until(condition: impl Fn() -> bool) {
    let wait = async {
        while !condition() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    timeout(PATIENCE, wait)
        .await
        .expect("the condition holds in time");
}

/// Serves a broker on a free port.
pub(crate) async fn listen(broker: &Broker) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let broker = broker.clone();
    tokio::spawn(async move { broker.listen(listener).await });
    address
}

pub(crate) fn connect(client: &str, clean: bool, expiry_s: u32, keep_alive: u16) -> Packet {
    Packet::Connect(greeting(client, clean, expiry_s, keep_alive), None, None)
}

/// The content of a CONNECT without will and login.
pub(crate) fn greeting(
    client: &str,
    clean_start: bool,
    expiry_s: u32,
    keep_alive: u16,
) -> wire::Connect {
    let mut properties = wire::ConnectProperties::new();
    properties.session_expiry_interval = Some(expiry_s);
    wire::Connect {
        keep_alive,
        client_id: client.to_owned(),
        clean_start,
        properties: Some(properties),
    }
}

pub(crate) fn publish(topic: &str, qos: Q, packet_id: u16, payload: impl Into<Bytes>) -> Packet {
    let mut publish = wire::Publish::new(topic, qos, payload, None);
    publish.pkid = packet_id;
    Packet::Publish(publish)
}

/// A request whose Response Topic is `answers`.
pub(crate) fn request(topic: &str, qos: Q, packet_id: u16) -> Packet {
    let properties = wire::PublishProperties {
        response_topic: Some("answers".to_owned()),
        correlation_data: Some(Bytes::copy_from_slice(&packet_id.to_be_bytes())),
        ..Default::default()
    };
    let mut publish = wire::Publish::new(topic, qos, "question", Some(properties));
    publish.pkid = packet_id;
    Packet::Publish(publish)
}

pub(crate) fn subscribe(filter: &str, qos: Q) -> Packet {
    subscribe_to(&[filter], qos)
}

pub(crate) fn subscribe_to(filters: &[&str], qos: Q) -> Packet {
    let filters = filters.iter().map(|it| wire::Filter::new(*it, qos));
    let mut subscribe = wire::Subscribe::new_many(filters, None);
    subscribe.pkid = 1;
    Packet::Subscribe(subscribe)
}

pub(crate) fn puback(packet_id: u16) -> Packet {
    Packet::PubAck(wire::PubAck::new(packet_id, None))
}

pub(crate) fn bytes(packets: &[Packet]) -> BytesMut {
    let mut bytes = BytesMut::new();
    for packet in packets {
        packet.write(&mut bytes, None).unwrap();
    }
    bytes
}

/// A client on a stream.
pub(crate) struct Client<S> {
    pub(crate) stream: S,
    buffer: BytesMut,
}

impl Client<TcpStream> {
    pub(crate) async fn tcp(address: SocketAddr) -> Self {
        Self::over(TcpStream::connect(address).await.unwrap())
    }
}

impl Client<tokio::io::DuplexStream> {
    /// A client on an in-memory stream that holds this many bytes in each direction.
    pub(crate) fn duplex(broker: &Broker, buffer_bytes: usize) -> Self {
        let (ours, theirs) = tokio::io::duplex(buffer_bytes);
        Self::serve(broker, theirs);
        Self::over(ours)
    }

    /// Like `duplex`, and the broker's end accepts output before the stream has room for it, like
    /// TLS and WebSocket.
    pub(crate) fn buffered(broker: &Broker, buffer_bytes: usize) -> Self {
        let (ours, theirs) = tokio::io::duplex(buffer_bytes);
        Self::serve(broker, BufStream::with_capacity(1 << 16, 1 << 16, theirs));
        Self::over(ours)
    }

    fn serve<S: AsyncRead + AsyncWrite + Unpin + Send + 'static>(broker: &Broker, stream: S) {
        let broker = broker.clone();
        tokio::spawn(async move { broker.serve_connection(stream, Door::open(PEER)).await });
    }
}

impl<S: AsyncRead + AsyncWrite + Unpin> Client<S> {
    pub(crate) fn over(stream: S) -> Self {
        Self {
            stream,
            buffer: BytesMut::new(),
        }
    }

    pub(crate) async fn send(&mut self, packets: &[Packet]) {
        self.stream.write_all(&bytes(packets)).await.unwrap();
    }

    /// Sends a CONNECT and reads its CONNACK.
    pub(crate) async fn hello(mut self, client: &str, expiry_s: u32) -> Self {
        self.send(&[connect(client, false, expiry_s, 60)]).await;
        let code = self.connack().await.code;
        assert_eq!(code, wire::ConnectReturnCode::Success);
        self
    }

    pub(crate) async fn connack(&mut self) -> wire::ConnAck {
        match self.next().await {
            Some(Packet::ConnAck(ack)) => ack,
            other => panic!("{other:?} instead of CONNACK"),
        }
    }

    /// Sends a PINGREQ. No other packet precedes its answer.
    pub(crate) async fn ping(&mut self) {
        self.send(&[Packet::PingReq(wire::PingReq)]).await;
        assert_eq!(self.next().await, Some(Packet::PingResp(wire::PingResp)));
    }

    pub(crate) async fn listen_to(&mut self, filter: &str, qos: Q) {
        self.send(&[subscribe(filter, qos)]).await;
        let next = self.next().await;
        assert!(
            matches!(next, Some(Packet::SubAck(_))),
            "{next:?} instead of SUBACK"
        );
    }

    /// The next packet; `None` if the broker has closed.
    pub(crate) async fn next(&mut self) -> Option<Packet> {
        loop {
            if !self.buffer.is_empty() {
                let before = self.buffer.len();
                match Packet::read(&mut self.buffer, None) {
                    Ok(packet) => return Some(packet),
                    Err(error) => assert_eq!(before, self.buffer.len(), "{error:?}"),
                }
            }
            let read = timeout(PATIENCE, self.stream.read_buf(&mut self.buffer))
                .await
                .expect("the broker sent no packet in time");
            if !matches!(read, Ok(1..)) {
                assert!(
                    self.buffer.is_empty(),
                    "an incomplete packet: {:02x?}",
                    self.buffer
                );
                return None;
            }
        }
    }

    /// The next packet, which must be a PUBLISH.
    pub(crate) async fn message(&mut self) -> wire::Publish {
        match self.next().await {
            Some(Packet::Publish(message)) => message,
            other => panic!("{other:?} instead of PUBLISH"),
        }
    }

    /// All packets to the end of the connection.
    pub(crate) async fn rest(&mut self) -> Vec<Packet> {
        let mut packets = Vec::new();
        while let Some(packet) = self.next().await {
            packets.push(packet);
        }
        packets
    }

    /// The reason of the DISCONNECT that ends the connection.
    pub(crate) async fn disconnected(&mut self) -> Option<wire::DisconnectReasonCode> {
        match self.rest().await.pop() {
            Some(Packet::Disconnect(disconnect)) => Some(disconnect.reason_code),
            _ => None,
        }
    }
}

/// Answers every request under `req/` on its Response Topic with the same Correlation Data, and
/// logs all calls.
#[derive(Default)]
pub(crate) struct Echo {
    pub(crate) log: Mutex<Vec<(&'static str, Origin)>>,
    /// Ended sessions, each with the number of connections that had ended before.
    pub(crate) ended: Mutex<Vec<(u64, usize)>>,
}

impl Echo {
    pub(crate) fn broker(limits: Limits) -> (Broker, Arc<Self>) {
        let echo = Arc::new(Self::default());
        (serving(limits, echo.clone()), echo)
    }

    pub(crate) fn count(&self, what: &str) -> usize {
        let log = self.log.lock().unwrap();
        log.iter().filter(|(entry, _)| *entry == what).count()
    }
}

/// Answers requests with a large answer, one in each call.
pub(crate) struct Large {
    pub(crate) answer: Bytes,
}

impl Large {
    pub(crate) fn broker(limits: Limits, answer_bytes: usize) -> Broker {
        let answer = vec![b'x'; answer_bytes].into();
        serving(limits, Arc::new(Self { answer }))
    }
}

/// Takes `req/…`.
fn claim(topic: &[u8]) -> Claim {
    match topic.starts_with(b"req/") {
        true => Claim::Take,
        false => Claim::Route,
    }
}

impl Service for Large {
    fn claim(&self, topic: &[u8]) -> Claim {
        claim(topic)
    }

    fn requests(&self, broker: &Broker, _: &Origin, requests: &mut Vec<Request>) {
        let request = requests.remove(0);
        let topic = request.properties.response_topic().unwrap().to_owned();
        broker.batch(|batch| {
            let answer = Message::new(topic, self.answer.clone(), QoS::AtLeastOnce);
            batch.answer(request.token.as_ref(), answer);
            if let Some(token) = request.token {
                batch.acknowledge(token, ReasonCode::SUCCESS, None);
            }
        });
    }

    fn disconnected(&self, _: &Broker, _: &Origin) {}
}

fn answer(properties: &Properties) -> Option<Message> {
    let topic = properties.response_topic()?.to_owned();
    let mut message = Message::new(topic, "answer", QoS::AtLeastOnce);
    let builder = PropertiesBuilder::new().correlation_data(properties.correlation_data()?);
    message.properties = builder.finish().unwrap();
    Some(message)
}

impl Service for Echo {
    fn claim(&self, topic: &[u8]) -> Claim {
        claim(topic)
    }

    fn requests(&self, broker: &Broker, from: &Origin, requests: &mut Vec<Request>) {
        let calls = requests.iter().map(|_| ("request", from.clone()));
        self.log.lock().unwrap().extend(calls);
        assert!(
            !requests.iter().any(|request| request.topic == "req/panic"),
            "panics on purpose"
        );
        broker.batch(|batch| {
            for request in requests.drain(..) {
                let delivered = answer(&request.properties)
                    .is_some_and(|message| batch.deliver(&from.client, from.connection, message));
                let reason = if delivered {
                    ReasonCode::SUCCESS
                } else {
                    ReasonCode::IMPLEMENTATION_SPECIFIC_ERROR
                };
                if let Some(token) = request.token {
                    batch.acknowledge(token, reason, None);
                }
            }
        });
    }

    fn disconnected(&self, _: &Broker, who: &Origin) {
        let call = ("disconnected", who.clone());
        self.log.lock().unwrap().push(call);
    }

    fn sessions_ended(&self, _: &Broker, sessions: &[SessionId]) {
        let disconnected = self.count("disconnected");
        let ended = sessions.iter().map(|session| (session.0, disconnected));
        self.ended.lock().unwrap().extend(ended);
    }
}
