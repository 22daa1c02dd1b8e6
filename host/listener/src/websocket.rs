//! The upgrade from HTTP to WebSocket (RFC 6455 section 4, MQTT 5 section 6).
//!
//! Reads an HTTP/1.1 request from a stream, and returns the stream of MQTT that follows it, or
//! refuses with an HTTP response that gives the reason. A browser lets every page open a WebSocket,
//! so this module must check the origin of the page.

use std::convert::Infallible;
use std::net::IpAddr;
use std::sync::{Arc, Mutex, PoisonError};

use async_tungstenite::tungstenite::handshake::derive_accept_key;
use bytes::Bytes;
use http_body_util::Full;
use hyper::body::Incoming;
use hyper::header::{self, HeaderMap, HeaderName, HeaderValue};
use hyper::http::uri::Authority;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::upgrade::OnUpgrade;
use hyper::{Method, Request, Response, StatusCode, Version};
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::io::{AsyncRead, AsyncWrite};

use super::frames::Frames;
use crate::headers::{has_host, only_once};
use statehouse_config::{Origin, limits};

/// The paths of MQTT. Most clients request the first by default; most brokers document the second.
const PATHS: [&str; 2] = ["/", "/mqtt"];

/// The subprotocol (MQTT 5 section 6).
const MQTT: &str = "mqtt";

/// The headers that have one value (RFC 9112 section 3.2, RFC 6455 section 4.1, RFC 6454 section
/// 7.3).
const SINGLE: [HeaderName; 4] = [
    header::HOST,
    header::ORIGIN,
    header::SEC_WEBSOCKET_KEY,
    header::SEC_WEBSOCKET_VERSION,
];

/// Why an upgrade failed. The text is for the log.
#[derive(Debug, thiserror::Error)]
pub(super) enum UpgradeError {
    /// The bytes are not HTTP, or the stream ended.
    #[error("the client sent no valid HTTP request: {0}")]
    Http(#[from] hyper::Error),
    /// The request was refused, and the client received the reason.
    #[error("{0}")]
    Refused(String),
    /// The client closed before it sent a request.
    #[error("the client closed the connection before it sent a request")]
    Nothing,
}

/// Reads the request, responds to it, and returns the stream that follows.
pub(super) async fn upgrade<S>(stream: S, origins: Arc<[Origin]>) -> Result<Frames<S>, UpgradeError>
where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let found: Arc<Mutex<Option<Result<OnUpgrade, String>>>> = Arc::default();
    let service = service_fn({
        let found = found.clone();
        move |mut request: Request<Incoming>| {
            let (response, outcome) = match accept(&request, &origins) {
                Ok(response) => (response, Ok(hyper::upgrade::on(&mut request))),
                Err(refusal) => {
                    let why = refusal.why.clone();
                    (refusal.response(), Err(why))
                }
            };
            *found.lock().unwrap_or_else(PoisonError::into_inner) = Some(outcome);
            std::future::ready(Ok::<_, Infallible>(response))
        }
    });
    http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(limits::HANDSHAKE_TIMEOUT)
        .max_headers(limits::WS_HEADERS_MAX)
        .max_header_size(limits::WS_HEAD_BYTES_MAX)
        .serve_connection(TokioIo::new(stream), service)
        .with_upgrades()
        .await?;
    let found = found.lock().unwrap_or_else(PoisonError::into_inner).take();
    let upgraded = match found {
        None => return Err(UpgradeError::Nothing),
        Some(Err(why)) => return Err(UpgradeError::Refused(why)),
        Some(Ok(upgrade)) => upgrade.await?,
    };
    let parts = upgraded.downcast::<TokioIo<S>>();
    // This is the type that was passed to `serve_connection` above.
    let parts = parts.map_err(|_| UpgradeError::Nothing)?;
    Ok(Frames::new(parts.io.into_inner(), &parts.read_buf))
}

struct Refusal {
    status: StatusCode,
    why: String,
    /// An extra header of the response.
    header: Option<(HeaderName, &'static str)>,
}

impl Refusal {
    fn new(status: StatusCode, why: impl Into<String>) -> Self {
        let why = why.into();
        Self {
            status,
            why,
            header: None,
        }
    }

    fn response(self) -> Response<Full<Bytes>> {
        let mut response = Response::new(Full::from(format!("{}\n", self.why)));
        *response.status_mut() = self.status;
        let text = HeaderValue::from_static("text/plain; charset=utf-8");
        response.headers_mut().insert(header::CONTENT_TYPE, text);
        let close = HeaderValue::from_static("close");
        response.headers_mut().insert(header::CONNECTION, close);
        if let Some((name, value)) = self.header {
            let value = HeaderValue::from_static(value);
            response.headers_mut().insert(name, value);
        }
        response
    }
}

/// The response that upgrades to a WebSocket.
fn accept<B>(request: &Request<B>, origins: &[Origin]) -> Result<Response<Full<Bytes>>, Refusal> {
    check_target(request)?;
    let key = check_upgrade(request)?;
    let headers = request.headers();
    if !list(headers, header::SEC_WEBSOCKET_PROTOCOL).contains(&MQTT) {
        let why = "the client must offer the WebSocket subprotocol `mqtt`";
        return Err(malformed(why));
    }
    may_connect(headers, origins).map_err(|why| Refusal::new(StatusCode::FORBIDDEN, why))?;
    let response = Response::builder()
        .status(StatusCode::SWITCHING_PROTOCOLS)
        .header(header::CONNECTION, "Upgrade")
        .header(header::UPGRADE, "websocket")
        .header(
            header::SEC_WEBSOCKET_ACCEPT,
            derive_accept_key(key.as_bytes()),
        )
        .header(header::SEC_WEBSOCKET_PROTOCOL, MQTT)
        .body(Full::default());
    response.map_err(|error| Refusal::new(StatusCode::INTERNAL_SERVER_ERROR, error.to_string()))
}

fn check_target<B>(request: &Request<B>) -> Result<(), Refusal> {
    if !PATHS.contains(&request.uri().path()) {
        return Err(Refusal::new(
            StatusCode::NOT_FOUND,
            "MQTT over WebSocket is at / and at /mqtt",
        ));
    }
    if request.method() != Method::GET {
        return Err(Refusal {
            header: Some((header::ALLOW, "GET")),
            ..Refusal::new(
                StatusCode::METHOD_NOT_ALLOWED,
                "a WebSocket request must use GET",
            )
        });
    }
    Ok(())
}

/// Checks that the request is for a WebSocket (RFC 6455 section 4.2.1), and returns its key.
/// `Connection` and `Upgrade` are lists, which may span several headers (RFC 9110 section 5.3).
fn check_upgrade<B>(request: &Request<B>) -> Result<&HeaderValue, Refusal> {
    let headers = request.headers();
    only_once(headers, &SINGLE).map_err(malformed)?;
    has_host(request).map_err(malformed)?;
    let names = |name, value: &str| {
        let values = list(headers, name);
        values.into_iter().any(|it| it.eq_ignore_ascii_case(value))
    };
    if !names(header::UPGRADE, "websocket") {
        return Err(Refusal {
            header: Some((header::UPGRADE, "websocket")),
            ..Refusal::new(
                StatusCode::UPGRADE_REQUIRED,
                "this is MQTT over WebSocket, not a website: connect with an MQTT client",
            )
        });
    }
    if request.version() < Version::HTTP_11 {
        return Err(malformed("a WebSocket request must use HTTP/1.1"));
    }
    if !names(header::CONNECTION, "upgrade") {
        return Err(malformed("the header Connection must contain `Upgrade`"));
    }
    let version = headers.get(header::SEC_WEBSOCKET_VERSION);
    if version.is_none_or(|version| version != "13") {
        return Err(Refusal {
            header: Some((header::SEC_WEBSOCKET_VERSION, "13")),
            ..Refusal::new(
                StatusCode::UPGRADE_REQUIRED,
                "only WebSocket version 13 is supported",
            )
        });
    }
    let key = headers.get(header::SEC_WEBSOCKET_KEY);
    key.filter(|it| is_sixteen_bytes(it))
        .ok_or_else(|| malformed("the header Sec-WebSocket-Key must have 16 bytes in base64"))
}

fn malformed(why: impl Into<String>) -> Refusal {
    Refusal::new(StatusCode::BAD_REQUEST, why)
}

/// Whether this is the base64 of 16 bytes (RFC 6455 section 4.2.1).
fn is_sixteen_bytes(key: &HeaderValue) -> bool {
    let is_digit = |byte: &u8| byte.is_ascii_alphanumeric() || matches!(byte, b'+' | b'/');
    let digits = key.as_bytes().strip_suffix(b"==");
    digits.is_some_and(|it| it.len() == 22 && it.iter().all(is_digit))
}

/// The elements of a header that is a list.
fn list(headers: &HeaderMap, name: HeaderName) -> Vec<&str> {
    let values = headers.get_all(name).into_iter();
    let values = values.filter_map(|value| value.to_str().ok());
    values.flat_map(|it| it.split(',')).map(str::trim).collect()
}

/// Whether the page that sent the request may connect; otherwise what to do. Clients other than
/// browsers send no origin.
///
/// Without a configured list, only pages of the same host as in the request may connect, and only
/// if it is an address or localhost. The owner of any other name can make it resolve to this host,
/// so that pages under that name would seem to be of the same host.
fn may_connect(headers: &HeaderMap, origins: &[Origin]) -> Result<(), String> {
    let Some(origin) = headers.get(header::ORIGIN) else {
        return Ok(());
    };
    let origin = origin.to_str().unwrap_or_default().to_ascii_lowercase();
    if origins.iter().any(|allowed| allowed.0 == origin) {
        return Ok(());
    }
    let authority = origin.split_once("://").map(|(_, authority)| authority);
    let host = |authority: &str| {
        let authority = authority.parse::<Authority>().ok()?;
        Some(authority.host().to_ascii_lowercase())
    };
    let page = authority.and_then(host);
    let own = headers
        .get(header::HOST)
        .and_then(|it| it.to_str().ok())
        .and_then(host);
    if origins.is_empty() && page.as_deref().is_some_and(is_own_name) && page == own {
        return Ok(());
    }
    Err(format!(
        "pages of {} may not connect: allow their origin with the store's --ws-origin",
        origin.escape_debug()
    ))
}

/// Whether no foreign owner of this name can make it resolve to this host.
fn is_own_name(host: &str) -> bool {
    let bare = host.trim_start_matches('[').trim_end_matches(']');
    host == "localhost" || bare.parse::<IpAddr>().is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A valid request, with these values of these headers instead.
    fn request(path: &str, changed: &[(&str, &[&str])]) -> Request<()> {
        let mut request = Request::get(path)
            .header("host", "10.0.0.7:8080")
            .header("connection", "keep-alive, Upgrade")
            .header("upgrade", "WebSocket")
            .header("sec-websocket-version", "13")
            .header("sec-websocket-key", "dGhlIHNhbXBsZSBub25jZQ==")
            .header("sec-websocket-protocol", "mqttv3.1, mqtt")
            .body(())
            .unwrap();
        for (name, values) in changed {
            let name: HeaderName = name.parse().unwrap();
            request.headers_mut().remove(&name);
            for value in *values {
                let value = value.parse().unwrap();
                request.headers_mut().append(&name, value);
            }
        }
        request
    }

    /// The status and the text of the response.
    fn response_to(request: &Request<()>, origins: &[&str]) -> (u16, String) {
        let origins: Vec<Origin> = origins.iter().map(|it| it.parse().unwrap()).collect();
        match accept(request, &origins) {
            Ok(response) => {
                let chosen = &response.headers()["sec-websocket-protocol"];
                let chosen = chosen.to_str().unwrap().to_owned();
                (response.status().as_u16(), chosen)
            }
            Err(refusal) => (refusal.status.as_u16(), refusal.why),
        }
    }

    #[test]
    fn a_valid_request_is_upgraded_to_mqtt() {
        for path in ["/", "/mqtt", "/mqtt?token=1"] {
            let response = response_to(&request(path, &[]), &[]);
            assert_eq!(response, (101, "mqtt".to_owned()));
        }
    }

    #[test]
    fn the_refusal_of_an_invalid_request_names_what_is_missing() {
        let (of_15_bytes, no_base64) = ("dGhlIHNhbXBsZSBub25j", "dGhlIHNhbXBsZSBub25j*Q==");
        for (name, value, status, says) in [
            ("host", None, 400, "`host`"),
            ("host", Some(""), 400, "`host`"),
            ("upgrade", None, 426, "MQTT client"),
            ("connection", Some("close"), 400, "`Upgrade`"),
            ("connection", None, 400, "`Upgrade`"),
            ("sec-websocket-version", None, 426, "version 13"),
            ("sec-websocket-version", Some("8"), 426, "version 13"),
            ("sec-websocket-version", Some("8, 13"), 426, "version 13"),
            ("sec-websocket-key", None, 400, "Key"),
            ("sec-websocket-key", Some(""), 400, "Key"),
            ("sec-websocket-key", Some(of_15_bytes), 400, "Key"),
            ("sec-websocket-key", Some(no_base64), 400, "Key"),
            ("sec-websocket-protocol", None, 400, "`mqtt`"),
            ("sec-websocket-protocol", Some("mqttv3.1"), 400, "`mqtt`"),
        ] {
            let changed = request("/", &[(name, value.as_slice())]);
            let (got, why) = response_to(&changed, &[]);
            let is_expected = got == status && why.contains(says);
            assert!(is_expected, "{name}: {value:?}: {got} {why}");
        }
        let (got, why) = response_to(&request("/other", &[]), &[]);
        assert!(got == 404 && why.contains("/mqtt"), "{got} {why}");
    }

    #[test]
    fn request_of_http_1_0_is_refused() {
        let request = Request::get("/").version(Version::HTTP_10);
        let request = request.header("upgrade", "websocket").body(()).unwrap();
        let refusal = accept(&request, &[]).unwrap_err();
        assert_eq!(refusal.status, StatusCode::BAD_REQUEST);
        assert!(refusal.why.contains("HTTP/1.1"), "{}", refusal.why);
    }

    #[test]
    fn only_a_header_that_is_a_list_may_be_repeated() {
        let header = |name: &str, values: [&str; 2]| {
            let request = request("/", &[(name, &values)]);
            accept(&request, &[]).map_err(|refusal| (refusal.status.as_u16(), refusal.why))
        };
        for (name, values) in [
            ("host", ["10.0.0.7:8080", "evil.example"]),
            ("origin", ["http://10.0.0.7:8080", "http://evil.example"]),
            ("sec-websocket-version", ["13", "8"]),
            ("sec-websocket-key", ["dGhlIHNhbXBsZSBub25jZQ=="; 2]),
        ] {
            let (status, why) = header(name, values).unwrap_err();
            assert!(
                status == 400 && why.contains(name),
                "{name}: {status} {why}"
            );
        }
        // Regression: each of the first four was refused.
        for (name, values) in [
            ("connection", ["keep-alive", "Upgrade"]),
            ("upgrade", ["h2c", "websocket"]),
            ("upgrade", ["websocket", "h2c"]),
            ("upgrade", ["websocket, h2c", "x"]),
            ("connection", ["Upgrade", "keep-alive"]),
            ("sec-websocket-protocol", ["mqttv3.1", "mqtt"]),
        ] {
            let response = header(name, values).unwrap();
            assert_eq!(response.status(), 101, "{name}: {values:?}");
            // The answer to this key in RFC 6455 section 1.3.
            for (name, value) in [
                ("connection", "Upgrade"),
                ("upgrade", "websocket"),
                ("sec-websocket-accept", "s3pPLMBiTxaQ9kYGzzhZRbK+xOo="),
                ("sec-websocket-protocol", "mqtt"),
            ] {
                assert_eq!(response.headers()[name], value);
            }
        }
    }

    #[test]
    fn only_pages_of_a_listed_origin_or_of_the_host_may_connect() {
        let status = |origin: &str, host: &str, origins: &[&str]| {
            let changed: [(_, &[_]); 2] = [("origin", &[origin]), ("host", &[host])];
            response_to(&request("/", &changed), origins).0
        };
        let here = "10.0.0.7:8080";
        assert_eq!(status("http://10.0.0.7", here, &[]), 101);
        assert_eq!(status("http://localhost:3000", "localhost:8080", &[]), 101);
        assert_eq!(status("http://[::1]:3000", "[::1]:8080", &[]), 101);
        for (origin, host) in [
            ("http://10.0.0.8", here),
            ("https://evil.example", here),
            // A name that its owner makes resolve to this host.
            ("http://evil.example:8080", "evil.example:8080"),
            ("null", here),
            ("", here),
            ("http://10.0.0.7@evil.example", here),
            ("10.0.0.7", here),
        ] {
            assert_eq!(status(origin, host, &[]), 403, "{origin} at {host}");
        }
        let named = ["https://panel.example"];
        assert_eq!(status("https://Panel.example", here, &named), 101);
        let with_port = ["https://panel.example:443"];
        assert_eq!(status("https://panel.example", here, &with_port), 101);
        for origin in [
            "http://panel.example",
            "https://panel.example:444",
            "http://10.0.0.7",
        ] {
            assert_eq!(status(origin, here, &named), 403, "{origin}");
        }
    }
}
