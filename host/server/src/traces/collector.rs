//! The HTTP client that passes messages to the collector, with one connection per message.

use std::fmt;
use std::future::Future;
use std::io;
use std::path::PathBuf;
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};

use anyhow::Context;
use bytes::Bytes;
use http_body_util::{BodyExt, Full, Limited};
use hyper::header::{HOST, HeaderValue};
use hyper::{Request, Response, Uri};
use hyper_util::rt::TokioIo;
use opentelemetry_http::{HttpClient, HttpError};
use opentelemetry_proto::tonic::collector::trace::v1::ExportTraceServiceResponse;
use prost::Message;
use rustls::ClientConfig;
use rustls::pki_types::ServerName;
use tokio::net::TcpStream;
use tokio::time::timeout;
use tokio_rustls::TlsConnector;

use statehouse_config::{TracesConfig, limits};
use statehouse_link::tls::{self, TlsError};
use statehouse_protocol::Shown;

pub(super) struct Collector {
    host: String,
    port: u16,
    tls: Option<Tls>,
    reports: Reports,
}

/// How to verify the collector.
struct Tls {
    /// The file of certificates to trust; without it those of the system.
    ca: Option<PathBuf>,
    /// With the last content of this file that could be used.
    config: Mutex<Arc<ClientConfig>>,
}

impl Tls {
    fn new(ca: Option<PathBuf>) -> Result<Self, TlsError> {
        let config = Mutex::new(tls::config(ca.as_deref(), None)?);
        Ok(Self { ca, config })
    }

    /// The settings of the next connection. Reads the file again: it may have been replaced.
    fn present(&self) -> Arc<ClientConfig> {
        let mut config = self.config.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(ca) = &self.ca
            && let Ok(present) = tls::config(Some(ca), None)
        {
            *config = present;
        }
        config.clone()
    }
}

/// What became of the last message. The exporter itself does not say it.
#[derive(Default)]
pub(super) struct Report {
    /// The spans that the collector rejected, although it took the message.
    pub(super) rejected: u64,
    /// Why the message did not arrive, or spans were rejected.
    pub(super) why: Option<String>,
}

/// The report of the last message.
#[derive(Clone, Default)]
pub(super) struct Reports(Arc<Mutex<Report>>);

impl Reports {
    pub(super) fn take(&self) -> Report {
        std::mem::take(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }

    fn set(&self, report: Report) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = report;
    }
}

impl Report {
    fn of(sent: &io::Result<Response<Bytes>>) -> Self {
        match sent {
            Ok(answer) => Self::of_answer(answer.body()),
            Err(error) => Self {
                rejected: 0,
                why: Some(error.to_string()),
            },
        }
    }

    /// A body of another form, such as that of an error, rejects nothing.
    fn of_answer(body: &[u8]) -> Self {
        let answer = ExportTraceServiceResponse::decode(body).ok();
        let rejection = answer.and_then(|it| it.partial_success);
        let Some(rejection) = rejection.filter(|it| it.rejected_spans > 0) else {
            return Self::default();
        };
        let said = rejection.error_message.as_bytes();
        let said = Shown::cut(said, limits::TRACE_TEXT_BYTES_MAX).on_one_line();
        Self {
            rejected: rejection.rejected_spans.unsigned_abs(),
            why: Some(format!("it rejects them: {said}")),
        }
    }
}

impl fmt::Debug for Collector {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.host, self.port)
    }
}

impl Collector {
    pub(super) fn new(config: &TracesConfig) -> anyhow::Result<(Self, Reports)> {
        let tls = match config.url.is_tls() {
            true => {
                let tls = Tls::new(config.ca.clone());
                Some(tls.context("traces cannot be sent over TLS")?)
            }
            false => None,
        };
        let reports = Reports::default();
        let collector = Self {
            host: config.url.host().to_owned(),
            port: config.url.port(),
            tls,
            reports: reports.clone(),
        };
        Ok((collector, reports))
    }

    async fn send(&self, request: Request<Bytes>) -> io::Result<Response<Bytes>> {
        let socket = TcpStream::connect((self.host.as_str(), self.port)).await?;
        match &self.tls {
            None => send_over(socket, request).await,
            Some(tls) => {
                let name = ServerName::try_from(self.host.clone()).map_err(io::Error::other)?;
                let connector = TlsConnector::from(tls.present());
                send_over(connector.connect(name, socket).await?, request).await
            }
        }
    }
}

async fn send_over<S>(socket: S, request: Request<Bytes>) -> io::Result<Response<Bytes>>
where
    S: tokio::io::AsyncRead + tokio::io::AsyncWrite + Unpin + Send + 'static,
{
    let (mut sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(socket))
        .await
        .map_err(io::Error::other)?;
    // This task ends when the sender is dropped; the sender reports its errors.
    tokio::spawn(connection);
    let request = addressed(request)?;
    let answer = sender.send_request(request).await;
    let (head, body) = answer.map_err(io::Error::other)?.into_parts();
    let body = Limited::new(body, limits::TRACE_ANSWER_BYTES_MAX);
    let body = match timeout(limits::TRACE_ANSWER_TIMEOUT, body.collect()).await {
        Ok(Ok(body)) => body.to_bytes(),
        // The collector has the message, so it must not be sent again.
        _ if head.status.is_success() => Bytes::new(),
        Ok(Err(error)) => return Err(io::Error::other(error)),
        Err(error) => return Err(io::Error::other(error)),
    };
    Ok(Response::from_parts(head, body))
}

/// The request with its path as the target, and the rest of its URL as the header Host (RFC 9112
/// section 3.2.1).
fn addressed(request: Request<Bytes>) -> io::Result<Request<Full<Bytes>>> {
    let mut request = request.map(Full::new);
    let authority = request.uri().authority().map_or("", |it| it.as_str());
    let host = HeaderValue::from_str(authority).map_err(io::Error::other)?;
    let target = request.uri().path_and_query().cloned();
    *request.uri_mut() = target.map_or_else(|| Uri::from_static("/"), Uri::from);
    request.headers_mut().insert(HOST, host);
    Ok(request)
}

impl HttpClient for Collector {
    fn send_bytes<'a, 'b>(
        &'a self,
        request: Request<Bytes>,
    ) -> Pin<Box<dyn Future<Output = Result<Response<Bytes>, HttpError>> + Send + 'b>>
    where
        'a: 'b,
        Self: 'b,
    {
        Box::pin(async move {
            let sending = self.send(request);
            let sent = tokio::time::timeout(limits::TRACE_EXPORT_TIMEOUT, sending).await;
            let sent = sent.unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into()));
            self.reports.set(Report::of(&sent));
            Ok(sent?)
        })
    }
}
