//! The upgrade from HTTP to WebSocket (RFC 6455 section 4, MQTT 5 section 6).
//!
//! What enters: a stream whose client speaks HTTP/1.1 first. What leaves: the stream of MQTT behind it, or an answer in HTTP
//! that says why not. Whose pages may connect is decided here, since a browser lets every page that it shows ask.

use std::convert::Infallible;
use std::net::IpAddr;
use std::sync::{Arc, Mutex, PoisonError};

use async_tungstenite::tungstenite::handshake::server::create_response_with_body;
use bytes::Bytes;
use http_body_util::Full;
use hyper::body::Incoming;
use hyper::header::{self, HeaderMap, HeaderName, HeaderValue};
use hyper::http::uri::Authority;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::upgrade::OnUpgrade;
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::io::{AsyncRead, AsyncWrite};

use super::frames::Frames;
use crate::config::Origin;
use crate::headers::only_once;
use crate::limits;

/// Where MQTT is: the first is what most clients ask for by themselves, the second what most brokers document.
const PATHS: [&str; 2] = ["/", "/mqtt"];

/// The subprotocol (MQTT 5 section 6).
const MQTT: &str = "mqtt";

/// The headers that have one value (RFC 9112 section 3.2, RFC 6455 section 4.1, RFC 6454 section 7.3).
/// `Upgrade` is a list, but the library reads only the first header of this name.
const SINGLE: [HeaderName; 5] = [
    header::HOST,
    header::ORIGIN,
    header::UPGRADE,
    header::SEC_WEBSOCKET_KEY,
    header::SEC_WEBSOCKET_VERSION,
];

/// Why there is no WebSocket. Its text is for the log.
#[derive(Debug, thiserror::Error)]
pub(super) enum UpgradeError {
    /// What came is no HTTP, or it ended.
    #[error("what came is not an HTTP request: {0}")]
    Http(#[from] hyper::Error),
    /// The client was told so.
    #[error("{0}")]
    Refused(String),
    /// It closed before it asked.
    #[error("it closed the connection and asked for nothing")]
    Nothing,
}

/// Reads the request, answers it, and goes on with what is behind.
pub(super) async fn upgrade<S>(stream: S, origins: Arc<[Origin]>) -> Result<Frames<S>, UpgradeError>
where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let found: Arc<Mutex<Option<Result<OnUpgrade, String>>>> = Arc::default();
    let service = service_fn({
        let found = found.clone();
        move |mut request: Request<Incoming>| {
            let (answer, outcome) = match accept(&request, &origins) {
                Ok(answer) => (answer, Ok(hyper::upgrade::on(&mut request))),
                Err(refusal) => {
                    let why = refusal.why.clone();
                    (refusal.answer(), Err(why))
                }
            };
            *found.lock().unwrap_or_else(PoisonError::into_inner) = Some(outcome);
            std::future::ready(Ok::<_, Infallible>(answer))
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
    // It is what was handed over above.
    let parts = parts.map_err(|_| UpgradeError::Nothing)?;
    Ok(Frames::new(parts.io.into_inner(), &parts.read_buf))
}

/// What a client is told instead.
struct Refusal {
    status: StatusCode,
    why: String,
    further: Option<(HeaderName, &'static str)>,
}

impl Refusal {
    fn new(status: StatusCode, why: impl Into<String>) -> Self {
        let why = why.into();
        Self {
            status,
            why,
            further: None,
        }
    }

    fn answer(self) -> Response<Full<Bytes>> {
        let mut answer = Response::new(Full::from(format!("{}\n", self.why)));
        *answer.status_mut() = self.status;
        let text = HeaderValue::from_static("text/plain; charset=utf-8");
        answer.headers_mut().insert(header::CONTENT_TYPE, text);
        let close = HeaderValue::from_static("close");
        answer.headers_mut().insert(header::CONNECTION, close);
        if let Some((name, value)) = self.further {
            let value = HeaderValue::from_static(value);
            answer.headers_mut().insert(name, value);
        }
        answer
    }
}

/// The answer that begins a WebSocket.
fn accept<B>(request: &Request<B>, origins: &[Origin]) -> Result<Response<Full<Bytes>>, Refusal> {
    let refused = |status, why: &str| Err(Refusal::new(status, why));
    if !PATHS.contains(&request.uri().path()) {
        return refused(
            StatusCode::NOT_FOUND,
            "MQTT over WebSocket is at / and at /mqtt",
        );
    }
    if request.method() != Method::GET {
        return Err(Refusal {
            further: Some((header::ALLOW, "GET")),
            ..Refusal::new(
                StatusCode::METHOD_NOT_ALLOWED,
                "a WebSocket begins with GET",
            )
        });
    }
    let headers = request.headers();
    only_once(headers, &SINGLE).map_err(|why| Refusal::new(StatusCode::BAD_REQUEST, why))?;
    let is = |name, value: &str| {
        let values = list(headers, name);
        values.into_iter().any(|it| it.eq_ignore_ascii_case(value))
    };
    if !is(header::UPGRADE, "websocket") {
        return Err(Refusal {
            further: Some((header::UPGRADE, "websocket")),
            ..Refusal::new(
                StatusCode::UPGRADE_REQUIRED,
                "this is MQTT over WebSocket, and no website: connect with an MQTT client",
            )
        });
    }
    if !is(header::SEC_WEBSOCKET_VERSION, "13") {
        return Err(Refusal {
            further: Some((header::SEC_WEBSOCKET_VERSION, "13")),
            ..Refusal::new(
                StatusCode::UPGRADE_REQUIRED,
                "WebSocket is spoken in version 13 here",
            )
        });
    }
    if !list(headers, header::SEC_WEBSOCKET_PROTOCOL).contains(&MQTT) {
        return refused(
            StatusCode::BAD_REQUEST,
            "the client must offer the WebSocket subprotocol `mqtt`",
        );
    }
    may_connect(headers, origins).map_err(|why| Refusal::new(StatusCode::FORBIDDEN, why))?;
    let answer = create_response_with_body(request, Full::default);
    let mut answer =
        answer.map_err(|error| Refusal::new(StatusCode::BAD_REQUEST, error.to_string()))?;
    let mqtt = HeaderValue::from_static(MQTT);
    answer
        .headers_mut()
        .insert(header::SEC_WEBSOCKET_PROTOCOL, mqtt);
    Ok(answer)
}

/// The elements of a header that is a list.
fn list(headers: &HeaderMap, name: HeaderName) -> Vec<&str> {
    let values = headers.get_all(name).into_iter();
    let values = values.filter_map(|value| value.to_str().ok());
    values.flat_map(|it| it.split(',')).map(str::trim).collect()
}

/// Whether pages of this site may connect, else what is to be done. A client that is no browser names none.
///
/// Without a list only pages of the very host that is connected to, where it is named by address or as localhost: whoever
/// owns another name can let it lead here, so that a page of his would be one of this host.
fn may_connect(headers: &HeaderMap, origins: &[Origin]) -> Result<(), String> {
    let Some(origin) = headers.get(header::ORIGIN) else {
        return Ok(());
    };
    let origin = origin.to_str().unwrap_or_default().to_ascii_lowercase();
    if origins.iter().any(|allowed| allowed.0 == origin) {
        return Ok(());
    }
    let place = origin.split_once("://").map(|(_, place)| place);
    let host = |place: &str| {
        let authority = place.parse::<Authority>().ok()?;
        Some(authority.host().to_ascii_lowercase())
    };
    let theirs = place.and_then(host);
    let ours = headers
        .get(header::HOST)
        .and_then(|it| it.to_str().ok())
        .and_then(host);
    if origins.is_empty() && theirs.as_deref().is_some_and(is_own_name) && theirs == ours {
        return Ok(());
    }
    Err(format!(
        "pages of {} may not connect: the store's --ws-origin says whose may",
        origin.escape_debug()
    ))
}

/// Whether nobody else can let this name lead here.
fn is_own_name(host: &str) -> bool {
    let bare = host.trim_start_matches('[').trim_end_matches(']');
    host == "localhost" || bare.parse::<IpAddr>().is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The status and the text that a request is answered with, which is right but for these headers.
    fn answered(path: &str, change: &[(&str, Option<&str>)], origins: &[&str]) -> (u16, String) {
        let mut request = Request::get(path).body(()).unwrap();
        let right = [
            ("host", Some("10.0.0.7:8080")),
            ("connection", Some("keep-alive, Upgrade")),
            ("upgrade", Some("WebSocket")),
            ("sec-websocket-version", Some("13")),
            ("sec-websocket-key", Some("dGhlIHNhbXBsZSBub25jZQ==")),
            ("sec-websocket-protocol", Some("mqttv3.1, mqtt")),
        ];
        for (name, value) in right.iter().chain(change) {
            let name: HeaderName = name.parse().unwrap();
            match value {
                Some(value) => request.headers_mut().insert(name, value.parse().unwrap()),
                None => request.headers_mut().remove(name),
            };
        }
        let origins: Vec<Origin> = origins.iter().map(|it| it.parse().unwrap()).collect();
        match accept(&request, &origins) {
            Ok(answer) => {
                let chosen = &answer.headers()["sec-websocket-protocol"];
                (
                    answer.status().as_u16(),
                    chosen.to_str().unwrap().to_owned(),
                )
            }
            Err(refusal) => (refusal.status.as_u16(), refusal.why),
        }
    }

    #[test]
    fn a_request_that_is_right_is_upgraded_to_mqtt() {
        for path in ["/", "/mqtt", "/mqtt?token=1"] {
            assert_eq!(answered(path, &[], &[]), (101, "mqtt".to_owned()));
        }
    }

    #[test]
    fn one_that_is_not_is_told_what_is_missing() {
        for (path, change, status, says) in [
            ("/other", ("host", Some("a")), 404, "/mqtt"),
            ("/", ("upgrade", None), 426, "MQTT client"),
            ("/", ("connection", Some("close")), 400, "pgrade"),
            ("/", ("sec-websocket-version", Some("8")), 426, "version 13"),
            ("/", ("sec-websocket-key", None), 400, "Key"),
            ("/", ("sec-websocket-protocol", None), 400, "`mqtt`"),
            (
                "/",
                ("sec-websocket-protocol", Some("mqttv3.1")),
                400,
                "`mqtt`",
            ),
        ] {
            let (got, why) = answered(path, &[change], &[]);
            assert!(
                got == status && why.contains(says),
                "{change:?}: {got} {why}"
            );
        }
    }

    #[test]
    fn a_header_that_may_occur_once_must_not_be_repeated() {
        let header = |name: &str, values: [&str; 2]| {
            let request = Request::get("/")
                .header("host", "10.0.0.7:8080")
                .header("connection", "Upgrade")
                .header("upgrade", "websocket")
                .header("sec-websocket-version", "13")
                .header("sec-websocket-key", "dGhlIHNhbXBsZSBub25jZQ==")
                .header("sec-websocket-protocol", "mqtt");
            let mut request = request.body(()).unwrap();
            let name: HeaderName = name.parse().unwrap();
            request.headers_mut().remove(&name);
            for value in values {
                let value = value.parse().unwrap();
                request.headers_mut().append(&name, value);
            }
            accept(&request, &[]).map_err(|refusal| (refusal.status.as_u16(), refusal.why))
        };
        for (name, values) in [
            ("host", ["10.0.0.7:8080", "evil.example"]),
            ("origin", ["http://10.0.0.7:8080", "http://evil.example"]),
            ("upgrade", ["websocket", "h2c"]),
            ("sec-websocket-version", ["13", "8"]),
            ("sec-websocket-key", ["dGhlIHNhbXBsZSBub25jZQ=="; 2]),
        ] {
            let (status, why) = header(name, values).unwrap_err();
            assert!(
                status == 400 && why.contains(name),
                "{name}: {status} {why}"
            );
        }
        // This is a list, which may be sent in several headers.
        assert!(header("sec-websocket-protocol", ["mqttv3.1", "mqtt"]).is_ok());
    }

    #[test]
    fn only_pages_that_are_named_or_of_the_same_host_may_connect() {
        let status = |origin: &str, host: &str, origins: &[&str]| {
            let change = [("origin", Some(origin)), ("host", Some(host))];
            answered("/", &change, origins).0
        };
        let here = "10.0.0.7:8080";
        assert_eq!(status("http://10.0.0.7", here, &[]), 101);
        assert_eq!(status("http://localhost:3000", "localhost:8080", &[]), 101);
        assert_eq!(status("http://[::1]:3000", "[::1]:8080", &[]), 101);
        for (origin, host) in [
            ("http://10.0.0.8", here),
            ("https://evil.example", here),
            // A name that its owner lets lead here.
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
        for origin in [
            "http://panel.example",
            "https://panel.example:444",
            "http://10.0.0.7",
        ] {
            assert_eq!(status(origin, here, &named), 403, "{origin}");
        }
    }
}
