//! A collector of traces: OTLP over HTTP, decoded with the official protobuf definitions.

use std::{
    io::{BufRead, BufReader, Read, Write},
    net::{SocketAddr, TcpListener, TcpStream},
    sync::{
        Arc, Mutex,
        atomic::{AtomicU16, Ordering},
    },
    thread,
};

use opentelemetry_proto::tonic::{
    collector::trace::v1::{
        ExportTracePartialSuccess, ExportTraceServiceRequest, ExportTraceServiceResponse,
    },
    common::v1::{KeyValue, any_value::Value},
    trace::v1::Span,
};
use prost::Message;
use rustls::{ServerConfig, ServerConnection, StreamOwned};
use statehouse_tests::wait::eventually;

/// A message from the store.
#[derive(Clone)]
pub(crate) struct Received {
    /// The request line and the header lines.
    pub(crate) head: String,
    pub(crate) body: Vec<u8>,
}

impl Received {
    fn decoded(&self) -> ExportTraceServiceRequest {
        ExportTraceServiceRequest::decode(&self.body[..]).unwrap()
    }

    /// The attributes of the process.
    pub(crate) fn resource(&self) -> Vec<(String, String)> {
        let message = self.decoded();
        let resource = message.resource_spans[0].resource.clone().unwrap();
        pairs(&resource.attributes)
    }

    fn spans(&self) -> Vec<Span> {
        let resources = self.decoded().resource_spans.into_iter();
        let scopes = resources.flat_map(|it| it.scope_spans);
        scopes.flat_map(|it| it.spans).collect()
    }
}

/// Attributes as texts.
pub(crate) fn pairs(attributes: &[KeyValue]) -> Vec<(String, String)> {
    let text = |it: &KeyValue| match it.value.clone().unwrap().value.unwrap() {
        Value::StringValue(text) => text,
        Value::IntValue(number) => number.to_string(),
        other => panic!("{other:?}"),
    };
    let pairs = attributes.iter().map(|it| (it.key.clone(), text(it)));
    pairs.collect()
}

pub(crate) struct Collector {
    pub(crate) address: SocketAddr,
    received: Arc<Mutex<Vec<Received>>>,
    answers: Arc<Answers>,
}

/// How messages are answered.
struct Answers {
    status: AtomicU16,
    /// The spans of each message that are rejected.
    rejected: AtomicU16,
}

impl Collector {
    /// Listens on a free port, over TLS if there is a configuration.
    pub(crate) fn start(tls: Option<Arc<ServerConfig>>) -> Collector {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let collector = Collector {
            address: listener.local_addr().unwrap(),
            received: Arc::default(),
            answers: Arc::new(Answers {
                status: AtomicU16::new(200),
                rejected: AtomicU16::new(0),
            }),
        };
        let (received, answers) = (collector.received.clone(), collector.answers.clone());
        thread::spawn(move || {
            for stream in listener.incoming() {
                let stream = stream.unwrap();
                match &tls {
                    None => serve(stream, &received, &answers),
                    Some(tls) => {
                        let tls = ServerConnection::new(tls.clone()).unwrap();
                        serve(StreamOwned::new(tls, stream), &received, &answers);
                    }
                }
            }
        });
        collector
    }

    /// Answers with this status from now on. Other messages than those with status 200 are dropped.
    pub(crate) fn answer(&self, status: u16) {
        self.answers.status.store(status, Ordering::Relaxed);
    }

    /// Rejects this number of spans of each message from now on.
    pub(crate) fn reject(&self, spans: u16) {
        self.answers.rejected.store(spans, Ordering::Relaxed);
    }

    pub(crate) fn received(&self) -> Vec<Received> {
        self.received.lock().unwrap().clone()
    }

    pub(crate) fn spans(&self) -> Vec<Span> {
        let received = self.received();
        received.iter().flat_map(Received::spans).collect()
    }

    /// Waits for spans of this number of requests, and returns all of them.
    pub(crate) fn requests(&self, count: usize) -> Vec<Span> {
        eventually("the spans of all requests", || {
            let spans = self.spans();
            let requests = spans.iter().filter(|it| it.kind == SERVER);
            (requests.count() >= count).then_some(spans)
        })
    }
}

/// The kind of a span of a request.
pub(crate) const SERVER: i32 = 2;

/// Reads one message of a connection, and answers.
fn serve<S: Read + Write>(stream: S, received: &Mutex<Vec<Received>>, answers: &Answers) {
    let mut reader = BufReader::new(stream);
    let mut head = String::new();
    while !head.ends_with("\r\n\r\n") {
        if reader.read_line(&mut head).unwrap_or(0) == 0 {
            return;
        }
    }
    let length = head
        .lines()
        .find_map(|it| it.strip_prefix("content-length: "));
    let mut body = vec![0; length.unwrap().parse().unwrap()];
    reader.read_exact(&mut body).unwrap();
    let status = answers.status.load(Ordering::Relaxed);
    if status == 200 {
        received.lock().unwrap().push(Received { head, body });
    }
    let rejected = answers.rejected.load(Ordering::Relaxed);
    let answer = ExportTraceServiceResponse {
        partial_success: (rejected > 0).then(|| ExportTracePartialSuccess {
            rejected_spans: rejected.into(),
            error_message: "over the\nquota".into(),
        }),
    };
    let body = answer.encode_to_vec();
    let length = body.len();
    let head = format!("HTTP/1.1 {status} Answer\r\ncontent-length: {length}\r\n\r\n");
    let mut stream = reader.into_inner();
    // A store that is stopping does not wait for the answer.
    let answered = stream.write_all(&[head.as_bytes(), &body].concat());
    let _ = answered.and_then(|()| stream.flush());
}

/// A collector that accepts connections and never answers.
pub(crate) fn silent() -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    thread::spawn(move || listener.incoming().flatten().collect::<Vec<TcpStream>>());
    address
}
