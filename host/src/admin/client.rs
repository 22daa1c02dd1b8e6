//! The HTTP client with which commands call the admin API of a running store, with one connection
//! per request. Of the hosts of a cluster, one after another is asked until one does not leave the
//! answer to another host. A host whose name has several addresses is asked over each of them,
//! since they may be those of several machines.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use http_body_util::{BodyExt, Full, Limited};
use hyper::header::{AUTHORIZATION, HOST};
use hyper::http::uri::Authority;
use hyper::{Method, Request, StatusCode};
use hyper_util::rt::TokioIo;
use rustls::ClientConfig;
use rustls::pki_types::ServerName;
use serde_json::Value as Json;
use tokio::net::{TcpStream, UnixStream, lookup_host};
use tokio::time::timeout;
use tokio_rustls::TlsConnector;

use super::access::Endpoint;
use super::listener::Stream;
use statehouse_config::limits;

/// Limit for connecting to an address, with the handshake.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);

/// Addresses of a name that are asked.
const ADDRESSES_MAX: usize = 4;

/// The port of an address over TLS that names none.
const HTTPS_PORT: u16 = 443;

/// An admin API, and how to log in.
pub(crate) struct Connection {
    /// The URL: `http://`, `https://` or `unix:`.
    pub(crate) url: String,
    /// The value of the Authorization header, if one is needed.
    pub(crate) authorization: Option<String>,
    /// How to verify the server of an `https://` URL.
    pub(crate) tls: Option<Arc<ClientConfig>>,
}

impl From<Endpoint> for Connection {
    fn from(Endpoint { url, token }: Endpoint) -> Self {
        Self {
            url,
            authorization: token.map(|token| format!("Bearer {token}")),
            tls: None,
        }
    }
}

/// A request to an admin API.
pub(crate) struct Question<'a> {
    pub(crate) method: &'a Method,
    pub(crate) path: &'a str,
    pub(crate) body: Bytes,
    /// How long each address of a host may take.
    pub(crate) time: Duration,
    /// Whether the caller asks other hosts too.
    pub(crate) is_one_of_several: bool,
}

/// Why a host did not answer.
#[derive(Debug)]
pub(crate) enum NoAnswer {
    /// It cannot be reached, or the connection failed.
    Failed(io::Error),
    /// It has the request, and sent no answer in time.
    Silent,
}

type Answered = Result<(StatusCode, Json), NoAnswer>;

/// A response, or why there is none, and the URL of its host.
pub(crate) type Asked<'a> = (&'a str, Answered);

/// Where a host listens.
enum Address<'a> {
    Unix(&'a str),
    Tcp(SocketAddr),
}

/// Sends a request to the first host that can be reached and does not answer 421. A host answers
/// 421 if it does not lead, or has no history for the answer. A GET is sent to the next host if one
/// does not answer in time.
/// The credentials go to the hosts in this list only. A request must not be sent again after any
/// other response or error, since it may have taken effect.
pub(crate) async fn ask<'a>(hosts: &'a [Connection], question: &Question<'_>) -> Asked<'a> {
    let mut last: Asked<'a> = ("", failed(io::ErrorKind::InvalidInput));
    for (at, host) in hosts.iter().enumerate() {
        let has_next = question.is_one_of_several || at + 1 < hosts.len();
        let looking_up = timeout(question.time.min(CONNECT_TIMEOUT), host.addresses());
        let (answered, is_final) = match looking_up.await.map_err(io::Error::from).flatten() {
            Err(error) => (Err(NoAnswer::Failed(error)), false),
            Ok(addresses) => host.ask(&addresses, question, has_next).await,
        };
        if is_final || says_more(&answered, &last.1) {
            last = (&host.url, answered);
        }
        if is_final {
            break;
        }
    }
    last
}

fn failed(kind: io::ErrorKind) -> Answered {
    Err(NoAnswer::Failed(kind.into()))
}

/// Whether a result says more than the one before: a host that answers says more than one that is
/// silent, then come one whose certificate is wrong, and one that cannot be reached.
fn says_more(new: &Answered, old: &Answered) -> bool {
    let rank = |it: &Answered| match it {
        Ok(_) => 3,
        Err(NoAnswer::Silent) => 2,
        Err(NoAnswer::Failed(error)) => u8::from(error.kind() == io::ErrorKind::InvalidData),
    };
    rank(new) >= rank(old)
}

/// Sends a request and waits for the response.
async fn send(
    socket: Box<dyn Stream>,
    request: io::Result<Request<Full<Bytes>>>,
) -> io::Result<(StatusCode, Json)> {
    let (mut sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(socket))
        .await
        .map_err(io::Error::other)?;
    // This task ends when the sender is dropped; the sender reports its errors.
    tokio::spawn(connection);
    let answer = sender
        .send_request(request?)
        .await
        .map_err(io::Error::other)?;
    let status = answer.status();
    let body = Limited::new(answer.into_body(), limits::ADMIN_ANSWER_BYTES_MAX)
        .collect()
        .await
        .map_err(io::Error::other)?
        .to_bytes();
    let document = serde_json::from_slice(&body).map_err(|_| {
        io::Error::other("the response is not JSON, so this is not the admin API of a state store")
    })?;
    Ok((status, document))
}

impl Connection {
    /// Asks over one address after another; `has_next` is whether another host can be asked then.
    /// Returns whether no other host must be asked.
    async fn ask(
        &self,
        addresses: &[Address<'_>],
        question: &Question<'_>,
        has_next: bool,
    ) -> (Answered, bool) {
        let mut last = failed(io::ErrorKind::NotFound);
        for (at, address) in addresses.iter().enumerate() {
            let has_next = has_next || at + 1 < addresses.len();
            let (answered, is_final) = self.ask_at(address, question, has_next).await;
            if is_final {
                return (answered, true);
            }
            if says_more(&answered, &last) {
                last = answered;
            }
        }
        (last, false)
    }

    async fn ask_at(
        &self,
        address: &Address<'_>,
        question: &Question<'_>,
        has_next: bool,
    ) -> (Answered, bool) {
        let Question { method, path, .. } = *question;
        let began = Instant::now();
        let connecting = self.connect(address, has_next);
        let connecting = timeout(question.time.min(CONNECT_TIMEOUT), connecting);
        let socket = match connecting.await.map_err(io::Error::from).flatten() {
            Ok(socket) => socket,
            Err(error) => return (Err(NoAnswer::Failed(error)), false),
        };
        let sending = send(socket, self.request(method, path, question.body.clone()));
        let left = question.time.saturating_sub(began.elapsed());
        match timeout(left, sending).await {
            Ok(Ok(answer)) => {
                let is_final = answer.0 != StatusCode::MISDIRECTED_REQUEST;
                (Ok(answer), is_final)
            }
            Ok(Err(error)) => (Err(NoAnswer::Failed(error)), true),
            // A GET changes nothing.
            Err(_) => (Err(NoAnswer::Silent), method != Method::GET),
        }
    }

    fn request(
        &self,
        method: &Method,
        path: &str,
        body: Bytes,
    ) -> io::Result<Request<Full<Bytes>>> {
        let mut request = Request::builder()
            .method(method)
            .uri(path)
            .header(HOST, self.authority());
        if let Some(authorization) = &self.authorization {
            request = request.header(AUTHORIZATION, authorization);
        }
        request.body(Full::new(body)).map_err(io::Error::other)
    }

    /// Connects. The system accepts connections for a process that is stopped. So if another host
    /// can be asked instead, this one must answer a probe before it gets the request and the
    /// credentials. Over TLS the handshake is such an answer.
    async fn connect(&self, address: &Address<'_>, has_next: bool) -> io::Result<Box<dyn Stream>> {
        if has_next && self.tls.is_none() {
            let probe = Request::builder().uri("/livez");
            let probe = probe.header(HOST, self.authority()).body(Full::default());
            let probe = probe.map_err(io::Error::other);
            send(self.open(address).await?, probe).await?;
        }
        self.open(address).await
    }

    async fn open(&self, address: &Address<'_>) -> io::Result<Box<dyn Stream>> {
        let socket = match address {
            Address::Unix(path) => return Ok(Box::new(UnixStream::connect(path).await?)),
            Address::Tcp(address) => TcpStream::connect(address).await?,
        };
        let Some(config) = &self.tls else {
            return Ok(Box::new(socket));
        };
        let (host, _) = host_and_port(self.authority()).ok_or(io::ErrorKind::InvalidInput)?;
        let name = ServerName::try_from(host).map_err(io::Error::other)?;
        let connector = TlsConnector::from(config.clone());
        Ok(Box::new(connector.connect(name, socket).await?))
    }

    async fn addresses(&self) -> io::Result<Vec<Address<'_>>> {
        if let Some(path) = self.url.strip_prefix("unix:") {
            return Ok(vec![Address::Unix(path)]);
        }
        let found = host_and_port(self.authority()).ok_or(io::ErrorKind::InvalidInput)?;
        let found = lookup_host(found).await?.take(ADDRESSES_MAX);
        Ok(found.map(Address::Tcp).collect())
    }

    /// The value of the Host header.
    fn authority(&self) -> &str {
        if self.url.starts_with("unix:") {
            return "localhost";
        }
        let address = self.url.strip_prefix("https://");
        let address = address.or_else(|| self.url.strip_prefix("http://"));
        address.unwrap_or(&self.url).trim_end_matches('/')
    }
}

/// Whether this is the URL of an admin API over TLS: a host and possibly a port.
pub(crate) fn is_tls_url(url: &str) -> bool {
    let address = url.strip_prefix("https://");
    address.is_some_and(|it| host_and_port(it.trim_end_matches('/')).is_some())
}

/// Whether this is the address of an admin API without TLS: a host and a port, with or without
/// http://.
pub(crate) fn is_plain_url(url: &str) -> bool {
    let address = url.strip_prefix("http://").unwrap_or(url);
    let address = address.trim_end_matches('/');
    address.contains(':') && host_and_port(address).is_some()
}

/// The host, without brackets, and the port. None if the text has anything else, such as a password
/// or a path.
fn host_and_port(text: &str) -> Option<(String, u16)> {
    let authority: Authority = text.parse().ok().filter(|_| !text.contains('@'))?;
    let host = authority.host();
    let bare = host.strip_prefix('[').and_then(|it| it.strip_suffix(']'));
    let host = bare.unwrap_or(host).to_owned();
    let port = match text.strip_prefix(authority.host())? {
        "" => HTTPS_PORT,
        port => port.strip_prefix(':')?.parse().ok()?,
    };
    ServerName::try_from(host.clone()).ok()?;
    Some((host, port))
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::TcpListener;

    use super::*;

    const ALIVE: &str = "HTTP/1.1 200 OK\r\ncontent-length: 2\r\nconnection: close\r\n\r\n{}";
    const MISDIRECTED: &str = "HTTP/1.1 421 \r\ncontent-length: 2\r\n\r\n{}";
    const DONE: &str = "HTTP/1.1 202 \r\ncontent-length: 2\r\n\r\n{}";

    static GET: Method = Method::GET;
    static POST: Method = Method::POST;

    /// How long a host may take. Tests wait as long for a silent one.
    const TIME: Duration = Duration::from_secs(4);

    /// The first words of the requests that a host has read.
    type Read = Arc<Mutex<Vec<String>>>;

    /// A host that reads one request of each connection, and sends one of these answers. After the
    /// last one it is silent.
    async fn host(answers: &'static [&'static str]) -> (Connection, Read) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let to = Connection {
            url: format!("http://{}", listener.local_addr().unwrap()),
            authorization: Some("Bearer secret".to_owned()),
            tls: None,
        };
        let read = Read::default();
        let seen = read.clone();
        tokio::spawn(async move {
            for answer in answers {
                let mut socket = listener.accept().await.unwrap().0;
                let mut request = [0; 1024];
                let count = socket.read(&mut request).await.unwrap();
                let request = String::from_utf8_lossy(&request[..count]);
                let words: Vec<_> = request.split(' ').take(2).collect();
                seen.lock().unwrap().push(words.join(" "));
                socket.write_all(answer.as_bytes()).await.unwrap();
            }
            std::future::pending::<()>().await;
            drop(listener);
        });
        (to, read)
    }

    fn question<'a>(method: &'a Method, path: &'a str) -> Question<'a> {
        Question {
            method,
            path,
            body: Bytes::new(),
            time: TIME,
            is_one_of_several: false,
        }
    }

    fn rollback() -> Question<'static> {
        question(&POST, "/v1/rollback")
    }

    #[tokio::test]
    async fn another_host_is_asked_only_if_none_was_asked_to_act() {
        let both = ["GET /livez", "POST /v1/rollback"];
        let (follower, one) = host(&[ALIVE, MISDIRECTED]).await;
        let (leader, two) = host(&[DONE]).await;
        let expected = leader.url.clone();
        let hosts = [follower, leader];
        let (url, asked) = ask(&hosts, &rollback()).await;
        assert_eq!((url, asked.unwrap().0), (&*expected, StatusCode::ACCEPTED));
        assert_eq!(*one.lock().unwrap(), both);
        assert_eq!(*two.lock().unwrap(), both[1..], "no probe");

        // The connection ended without an answer: the host may have acted.
        let (lost, one) = host(&[ALIVE, ""]).await;
        let (other, two) = host(&[ALIVE, DONE]).await;
        let expected = lost.url.clone();
        let hosts = [lost, other];
        let (url, asked) = ask(&hosts, &rollback()).await;
        assert!(matches!(asked, Err(NoAnswer::Failed(_))), "{asked:?}");
        assert_eq!(url, expected);
        assert_eq!(*one.lock().unwrap(), both);
        assert!(two.lock().unwrap().is_empty());
    }

    /// Regression: one time limit for all hosts ended with the first one.
    #[tokio::test]
    async fn next_host_is_asked_after_a_silent_one() {
        const STOPPED: &[&str] = &[];
        const HANGING: &[&str] = &[ALIVE];
        let get = question(&GET, "/v1/usage");
        for (first, question) in [(STOPPED, rollback()), (HANGING, get)] {
            let (silent, _read) = host(first).await;
            let (other, _read) = host(&[DONE]).await;
            let expected = other.url.clone();
            let hosts = [silent, other];
            let (url, asked) = ask(&hosts, &question).await;
            assert_eq!((url, asked.unwrap().0), (&*expected, StatusCode::ACCEPTED));
        }
    }

    #[tokio::test]
    async fn silent_host_that_may_have_acted_is_the_last() {
        let (silent, _read) = host(&[ALIVE]).await;
        let (other, read) = host(&[ALIVE, DONE]).await;
        let expected = silent.url.clone();
        let hosts = [silent, other];
        let (url, asked) = ask(&hosts, &rollback()).await;
        assert!(matches!(asked, Err(NoAnswer::Silent)), "{asked:?}");
        assert_eq!(url, expected);
        assert!(read.lock().unwrap().is_empty());
    }

    /// Regression: all addresses of a name shared one time limit.
    #[tokio::test]
    async fn next_address_of_a_name_is_asked_after_a_silent_one() {
        let (silent, _read) = host(&[]).await;
        let (answering, _read) = host(&[DONE]).await;
        let address = |it: &Connection| Address::Tcp(it.authority().parse().unwrap());
        let addresses = [address(&silent), address(&answering)];
        let (asked, is_final) = silent.ask(&addresses, &rollback(), false).await;
        assert_eq!(asked.unwrap().0, StatusCode::ACCEPTED);
        assert!(is_final);
    }

    #[test]
    fn a_tls_url_has_a_host_and_at_most_a_port() {
        let parsed = |text| host_and_port(text).map(|(host, port)| format!("{host} {port}"));
        assert_eq!(parsed("plant7:8443").unwrap(), "plant7 8443");
        assert_eq!(parsed("plant7").unwrap(), "plant7 443");
        assert_eq!(parsed("[::1]:8443").unwrap(), "::1 8443");
        assert!(is_tls_url("https://plant7:8443/"));
        for wrong in [
            "http://plant7:8443",
            "plant7:8443",
            "https://",
            "https://:8443",
            "https://plant7:",
            "https://plant7:99999",
            "https://anna:secret@plant7",
            "https://plant7/v1",
            "https://a b",
        ] {
            assert!(!is_tls_url(wrong), "{wrong}");
        }
    }
}
