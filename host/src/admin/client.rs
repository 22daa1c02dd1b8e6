//! The HTTP client with which commands call the admin API of a running store, with one connection
//! per request. Of the hosts of a cluster, one after another is asked until one does not leave the
//! answer to another host.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http_body_util::{BodyExt, Full, Limited};
use hyper::header::{AUTHORIZATION, HOST};
use hyper::http::uri::Authority;
use hyper::{Method, Request, StatusCode};
use hyper_util::rt::TokioIo;
use rustls::ClientConfig;
use rustls::pki_types::ServerName;
use serde_json::Value as Json;
use tokio::net::{TcpStream, UnixStream};
use tokio_rustls::TlsConnector;

use super::access::Endpoint;
use super::listener::Stream;
use statehouse_config::limits;

/// Limit for connecting, with the handshake.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);

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

/// A response, or the error of the request, and the URL of its host.
pub(crate) type Asked<'a> = (&'a str, io::Result<(StatusCode, Json)>);

/// Sends a request to the first host that can be reached and does not answer 421. A host answers
/// 421 if it does not lead, or has no history for the answer.
/// The credentials go to the hosts in this list only. A request must not be sent again after any
/// other response or error, since it may have taken effect.
pub(crate) async fn ask<'a>(
    hosts: &'a [Connection],
    method: Method,
    path: &str,
    body: Vec<u8>,
) -> Asked<'a> {
    let body = Bytes::from(body);
    let mut last: Asked<'a> = ("", Err(io::ErrorKind::InvalidInput.into()));
    for host in hosts {
        let connecting = tokio::time::timeout(CONNECT_TIMEOUT, host.connect());
        let connected = connecting.await.map_err(io::Error::from).flatten();
        let (asked, is_final) = match connected {
            Err(error) => (Err(error), false),
            Ok(connected) => {
                let request = request(&method, path, host, connected.1, body.clone());
                let asked = send(connected.0, request).await;
                let misdirected = StatusCode::MISDIRECTED_REQUEST;
                let is_final = !matches!(&asked, Ok((status, _)) if *status == misdirected);
                (asked, is_final)
            }
        };
        // A host that answers says more than one that cannot be reached.
        if is_final || asked.is_ok() || last.1.is_err() {
            last = (&host.url, asked);
        }
        if is_final {
            break;
        }
    }
    last
}

fn request(
    method: &Method,
    path: &str,
    to: &Connection,
    host: &str,
    body: Bytes,
) -> io::Result<Request<Full<Bytes>>> {
    let mut request = Request::builder()
        .method(method)
        .uri(path)
        .header(HOST, host);
    if let Some(authorization) = &to.authorization {
        request = request.header(AUTHORIZATION, authorization);
    }
    request.body(Full::new(body)).map_err(io::Error::other)
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
    /// Connects, and returns the value of the Host header.
    async fn connect(&self) -> io::Result<(Box<dyn Stream>, &str)> {
        if let Some(path) = self.url.strip_prefix("unix:") {
            return Ok((Box::new(UnixStream::connect(path).await?), "localhost"));
        }
        if let (Some(address), Some(config)) = (self.url.strip_prefix("https://"), &self.tls) {
            let address = address.trim_end_matches('/');
            let (host, port) = host_and_port(address).ok_or(io::ErrorKind::InvalidInput)?;
            let name = ServerName::try_from(host.clone()).map_err(io::Error::other)?;
            let socket = TcpStream::connect((host, port)).await?;
            let connector = TlsConnector::from(config.clone());
            return Ok((Box::new(connector.connect(name, socket).await?), address));
        }
        let address = self.url.strip_prefix("http://").unwrap_or(&self.url);
        let address = address.trim_end_matches('/');
        Ok((Box::new(TcpStream::connect(address).await?), address))
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
    use super::*;

    /// A host that reads one request and sends this answer, or none.
    async fn host(answer: &'static str) -> (Connection, tokio::task::JoinHandle<()>) {
        use tokio::io::{AsyncReadExt, AsyncWriteExt};
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let to = Connection {
            url: format!("http://{}", listener.local_addr().unwrap()),
            authorization: Some("Bearer secret".to_owned()),
            tls: None,
        };
        let serving = tokio::spawn(async move {
            let mut socket = listener.accept().await.unwrap().0;
            let mut request = [0; 1024];
            let count = socket.read(&mut request).await.unwrap();
            assert!(request[..count].starts_with(b"POST /v1/rollback"));
            socket.write_all(answer.as_bytes()).await.unwrap();
        });
        (to, serving)
    }

    #[tokio::test]
    async fn another_host_is_asked_only_if_none_was_asked_to_act() {
        let misdirected = "HTTP/1.1 421 \r\ncontent-length: 2\r\n\r\n{}";
        let done = "HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}";
        let (follower, one) = host(misdirected).await;
        let (leader, two) = host(done).await;
        let expected = leader.url.clone();
        let hosts = [follower, leader];
        let (url, asked) = ask(&hosts, Method::POST, "/v1/rollback", Vec::new()).await;
        assert_eq!((url, asked.unwrap().0), (&*expected, StatusCode::OK));
        one.await.unwrap();
        two.await.unwrap();

        // The connection ended without an answer: the host may have acted.
        let (lost, one) = host("").await;
        let (other, two) = host(done).await;
        let expected = lost.url.clone();
        let hosts = [lost, other];
        let (url, asked) = ask(&hosts, Method::POST, "/v1/rollback", Vec::new()).await;
        assert!(asked.is_err());
        assert_eq!(url, expected);
        one.await.unwrap();
        assert!(!two.is_finished());
        two.abort();
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
