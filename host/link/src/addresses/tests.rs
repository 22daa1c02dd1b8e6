//! With brokers on two addresses of this machine. The first one does not answer, like a machine
//! without power: its queue of connections is full.

use std::io::ErrorKind;
use std::path::PathBuf;
use std::sync::Arc;

use rumqttc::tokio_rustls::TlsAcceptor;
use rumqttc::tokio_rustls::server::TlsStream;
use rumqttc::v5::Incoming;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::{TcpListener, TcpSocket, TcpStream};

use super::*;
use crate::tls;

/// A name of 127.0.0.1.
const NAME: &str = "localhost";

const LIMIT: Duration = Duration::from_secs(20);

const CONNACK: [u8; 5] = [0x20, 3, 0, 0, 0];

fn both(_: String, port: u16) -> Addresses {
    Box::pin(async move {
        let first = SocketAddr::from(([127, 0, 0, 1], port));
        vec![first, SocketAddr::from(([127, 0, 0, 2], port))]
    })
}

fn attempts() -> Attempts {
    Attempts {
        resolve: both,
        ..Attempts::default()
    }
}

/// A certificate for the name, which signs itself, and its key.
fn pem() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/localhost.pem")
}

fn acceptor() -> TlsAcceptor {
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let builder = rustls::ServerConfig::builder_with_provider(provider);
    let builder = builder.with_safe_default_protocol_versions().unwrap();
    let chain = tls::certificates(&pem()).unwrap();
    let key = tls::private_key(&pem()).unwrap();
    let config = builder.with_no_client_auth().with_single_cert(chain, key);
    TlsAcceptor::from(Arc::new(config.unwrap()))
}

/// A broker that accepts no connection.
struct Silent {
    _listener: TcpListener,
    _waiting: Vec<TcpStream>,
    port: u16,
}

impl Silent {
    async fn start() -> Self {
        let socket = TcpSocket::new_v4().unwrap();
        socket.bind(([127, 0, 0, 1], 0).into()).unwrap();
        let listener = socket.listen(1).unwrap();
        let address = listener.local_addr().unwrap();
        let mut waiting = Vec::new();
        let wait = Duration::from_millis(300);
        while let Ok(connected) = timeout(wait, TcpStream::connect(address)).await {
            waiting.push(connected.unwrap());
        }
        Self {
            _listener: listener,
            _waiting: waiting,
            port: address.port(),
        }
    }
}

fn place(port: u16, has_tls: bool, websocket: Option<&str>) -> Place {
    Place {
        host: NAME.to_owned(),
        port,
        tls: has_tls.then(|| tls::config(Some(&pem()), None).unwrap()),
        websocket: websocket.map(str::to_owned),
        login: None,
    }
}

/// A silent broker, one that answers on the same port, and their place.
async fn brokers(has_tls: bool, websocket: Option<&str>) -> (Silent, TcpListener, Place) {
    loop {
        let silent = Silent::start().await;
        let port = silent.port;
        match TcpListener::bind(("127.0.0.2", port)).await {
            Ok(answering) => return (silent, answering, place(port, has_tls, websocket)),
            Err(error) if error.kind() == ErrorKind::AddrInUse => {}
            Err(error) => panic!("{error}"),
        }
    }
}

async fn connect(
    attempts: &mut Attempts,
    place: &Place,
) -> (EventLoop, Result<Event, ConnectionError>) {
    let mut events = EventLoop::new(place.mqtt("tester"), 8);
    let configure = |mut mqtt: MqttOptions| {
        mqtt.set_connection_timeout(LIMIT.as_secs());
        mqtt
    };
    let connecting = attempts.connect(&mut events, place, "tester", configure);
    let result = connecting.await;
    (events, result)
}

/// Accepts a client, and returns its connection after the CONNACK.
async fn greet<S: AsyncRead + AsyncWrite + Unpin>(mut stream: S) -> S {
    let mut packet = [0; 1024];
    let count = stream.read(&mut packet).await.unwrap();
    assert!(count > 0 && packet[0] == 0x10, "no CONNECT");
    stream.write_all(&CONNACK).await.unwrap();
    stream
}

/// Accepts a client. The connection that asked whether this address answers came before.
async fn accept(listener: &TcpListener) -> TcpStream {
    loop {
        let (socket, _) = listener.accept().await.unwrap();
        if socket.peek(&mut [0]).await.unwrap() > 0 {
            return socket;
        }
    }
}

async fn accept_tls(listener: TcpListener) -> TlsStream<TcpStream> {
    let socket = accept(&listener).await;
    let stream = acceptor().accept(socket).await.unwrap();
    assert_eq!(stream.get_ref().1.server_name(), Some(NAME));
    stream
}

fn is_connack(result: &Result<Event, ConnectionError>) -> bool {
    matches!(result, Ok(Event::Incoming(Incoming::ConnAck(_))))
}

#[tokio::test]
async fn silent_address_is_followed_by_the_next_one() {
    let (_silent, answering, place) = brokers(false, None).await;
    let serving = tokio::spawn(async move { greet(accept(&answering).await).await });
    let (_events, result) = connect(&mut attempts(), &place).await;
    assert!(is_connack(&result), "{result:?}");
    serving.await.unwrap();
}

#[tokio::test]
async fn silent_address_takes_half_of_a_short_time_limit() {
    let (_silent, answering, place) = brokers(false, None).await;
    let begin = std::time::Instant::now();
    let limit = limits::PROBE_TIME / 5;
    let target = attempts().target(&place, limit).await;
    let answering = answering.local_addr().unwrap();
    assert_eq!(target.unwrap(), Target::Address(answering));
    assert!(begin.elapsed() < limits::PROBE_TIME);
}

/// The host of the other address may be restarting.
#[tokio::test]
async fn refusal_beside_a_silent_address_ends_the_attempt() {
    let (_silent, answering, place) = brokers(false, None).await;
    let address = answering.local_addr().unwrap();
    drop(answering);
    let mut attempts = attempts();
    let (_events, result) = connect(&mut attempts, &place).await;
    let is_refused = matches!(&result, Err(ConnectionError::Io(error))
        if error.kind() == ErrorKind::ConnectionRefused);
    assert!(is_refused, "{result:?}");
    // Some attempts wait for the silent address, which may only be slow.
    for failed in 1..limits::REFUSED_ATTEMPTS {
        attempts.failed = failed;
        let target = attempts.target(&place, LIMIT).await;
        assert_eq!(target.is_ok(), failed == limits::REFUSED_ATTEMPTS - 1);
    }
    // The host has restarted.
    let answering = TcpListener::bind(address).await.unwrap();
    let serving = tokio::spawn(async move { greet(accept(&answering).await).await });
    let (_events, result) = connect(&mut attempts, &place).await;
    assert!(is_connack(&result), "{result:?}");
    serving.await.unwrap();
}

#[tokio::test]
async fn next_address_gets_the_name_over_tls() {
    let (_silent, answering, place) = brokers(true, None).await;
    let serving = tokio::spawn(async move { greet(accept_tls(answering).await).await });
    let mut attempts = attempts();
    let (events, result) = connect(&mut attempts, &place).await;
    assert!(is_connack(&result), "{result:?}");
    let mut stream = serving.await.unwrap();
    // The end of the connection reaches the broker.
    drop(events);
    assert_eq!(stream.read(&mut [0]).await.unwrap(), 0);
}

#[tokio::test]
async fn next_address_gets_the_name_over_a_websocket() {
    let (_silent, answering, place) = brokers(true, Some("/mqtt")).await;
    let authority = place.address();
    let serving = tokio::spawn(async move {
        let mut stream = accept_tls(answering).await;
        let mut request = Vec::new();
        while !request.ends_with(b"\r\n\r\n") {
            assert_ne!(stream.read_buf(&mut request).await.unwrap(), 0);
        }
        String::from_utf8(request).unwrap()
    });
    // The broker closes the connection after the request.
    let (_events, result) = connect(&mut attempts(), &place).await;
    assert!(result.is_err(), "{result:?}");
    let request = timeout(Duration::from_secs(20), serving).await;
    let request = request.expect("no request").unwrap().to_ascii_lowercase();
    assert!(request.starts_with("get /mqtt http/1.1\r\n"), "{request}");
    let host = format!("\r\nhost: {authority}\r\n");
    assert!(request.contains(&host), "{request}");
}

#[tokio::test]
async fn failed_attempts_are_followed_by_one_to_another_address() {
    let (first, other) = loop {
        let first = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = first.local_addr().unwrap().port();
        if let Ok(other) = TcpListener::bind(("127.0.0.2", port)).await {
            break (first, other);
        }
    };
    let [first, other] = [first, other].map(|it| {
        let address = it.local_addr().unwrap();
        (it, Target::Address(address))
    });
    let place = place(first.0.local_addr().unwrap().port(), false, None);
    let mut attempts = attempts();
    for target in [Target::Name, other.1, first.1, Target::Name] {
        assert_eq!(attempts.target(&place, LIMIT).await.unwrap(), target);
        attempts.failed += 1;
    }
    // An address that refuses connections is no target, and rumqttc itself goes on.
    drop(other.0);
    attempts.failed = 0;
    for target in [Target::Name, first.1, Target::Name] {
        assert_eq!(attempts.target(&place, LIMIT).await.unwrap(), target);
        attempts.failed += 1;
    }
    let literal = Place {
        host: "127.0.0.1".to_owned(),
        ..place
    };
    assert_eq!(
        attempts.target(&literal, LIMIT).await.unwrap(),
        Target::Name
    );
}
