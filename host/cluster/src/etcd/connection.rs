//! Calls of one server of etcd over gRPC, and the meaning of their errors.

use std::error::Error;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use http::uri::PathAndQuery;
use prost::Message;
use tonic::client::Grpc;
use tonic::transport::{Certificate, Channel, ClientTlsConfig, Endpoint, Identity};
use tonic::{Code, Request, Status, Streaming};
use tonic_prost::ProstCodec;

use super::login::{Login, Session, Token, explained, has_expired};
use super::tls::{Renewal, Tls};
use crate::engine::EngineError;
use crate::limits;

/// How long a connection may take to be established.
const CONNECT: Duration = Duration::from_secs(1);

/// The time between two pings of a connection. etcd closes connections that ping more often than
/// every 5 s.
const PING: Duration = Duration::from_secs(6);

/// How long a ping may be unanswered. After that a watch ends, and its user watches elsewhere.
const PONG: Duration = Duration::from_secs(2);

/// One server of etcd. Clones share its connection and its login.
#[derive(Clone, Debug)]
pub(super) struct Server {
    url: Arc<str>,
    link: Arc<Mutex<Link>>,
    /// The login, if a user is configured.
    session: Option<Session>,
    /// Whether it may have refused the certificate of this host: with TLS, until it answers.
    may_refuse: Arc<AtomicBool>,
    /// Whether its last answer was that of another etcd cluster.
    is_foreign: Arc<AtomicBool>,
}

#[derive(Debug)]
struct Link {
    channel: Channel,
    /// Its certificates, if they may be replaced.
    renewal: Option<Renewal>,
}

/// What to check if a server refuses the certificate of this host.
const CHECK_OWN: &str = "if etcd asks for certificates, check --cluster-cert and --cluster-key";

impl Server {
    /// Prepares a connection, which is established by its first call.
    pub(super) fn new(url: &str, tls: Option<&Tls>) -> Result<Self, String> {
        let link = Link {
            channel: channel(url, tls)?,
            renewal: None,
        };
        Ok(Self {
            url: url.into(),
            link: Arc::new(Mutex::new(link)),
            session: None,
            may_refuse: Arc::new(AtomicBool::new(tls.is_some())),
            is_foreign: Arc::default(),
        })
    }

    pub(super) fn url(&self) -> &str {
        &self.url
    }

    /// Takes note of whether it belongs to another etcd cluster. Returns whether it does, and did
    /// not before.
    pub(super) fn set_foreign(&self, is_foreign: bool) -> bool {
        let was_foreign = self.is_foreign.swap(is_foreign, Relaxed);
        is_foreign && !was_foreign
    }

    /// Replaces the certificates after the connection failed.
    pub(super) fn renew_with(&self, renewal: Renewal) {
        self.link().renewal = Some(renewal);
    }

    fn link(&self) -> MutexGuard<'_, Link> {
        self.link.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn channel(&self) -> Channel {
        self.link().channel.clone()
    }

    /// Begins another connection if the certificates of this one were replaced. Calls under way,
    /// such as watches, continue on theirs.
    fn renew_tls(&self) {
        // Taken, so that other calls do not wait for a disk that hangs.
        let Some(mut renewal) = self.link().renewal.take() else {
            return;
        };
        let renewed = renewal.renew(|tls| channel(&self.url, Some(tls)));
        let mut link = self.link();
        link.renewal = Some(renewal);
        let Some(channel) = renewed else {
            return;
        };
        link.channel = channel;
        drop(link);
        self.may_refuse.store(true, Relaxed);
        let url = &self.url;
        tracing::info!("connecting to etcd at {url} with the present certificates");
    }

    pub(super) fn log_in(&mut self, login: Login) {
        self.session = Some(Session::new(login));
    }

    /// How long it has for an answer if other servers answer. A server that computes the hash of a
    /// password must not be taken for one that does not answer.
    pub(super) fn answer_limit(&self) -> Duration {
        match self.session {
            Some(_) => limits::LOGIN_TIMEOUT,
            None => limits::PROBE_TIMEOUT,
        }
    }

    /// Logs in again before the next request.
    pub(super) fn expire_login(&self) {
        if let Some(session) = &self.session {
            session.expire();
        }
    }

    /// Sends a request with the token of the login. Sends it again after another login if the
    /// server has forgotten the token, or began to ask for one.
    async fn send<T, F>(&self, send: impl Fn(Token) -> F) -> Result<T, EngineError>
    where
        F: Future<Output = Result<T, EngineError>>,
    {
        let answer = self.send_with_login(send).await;
        match &answer {
            Ok(_) => self.may_refuse.store(false, Relaxed),
            Err(EngineError::NotApplied(_) | EngineError::Unknown(_)) => self.renew_tls(),
            Err(_) => {}
        }
        answer.map_err(|error| match error {
            // In TLS 1.3 a client learns this after its first request, if at all.
            EngineError::Unknown(why) if self.may_refuse.load(Relaxed) || is_alert(&why) => {
                EngineError::Unknown(format!("{why}; {CHECK_OWN}"))
            }
            EngineError::NotApplied(why) if is_alert(&why) => {
                EngineError::NotApplied(format!("{why}; {CHECK_OWN}"))
            }
            error => error,
        })
    }

    async fn send_with_login<T, F>(&self, send: impl Fn(Token) -> F) -> Result<T, EngineError>
    where
        F: Future<Output = Result<T, EngineError>>,
    {
        let Some(session) = &self.session else {
            return send(None).await.map_err(|it| explained(it, None));
        };
        let mut token = session.token(&self.channel()).await?;
        let mut answer = send(token.clone()).await;
        if matches!(&answer, Err(EngineError::Refused(it)) if has_expired(it, token.as_ref())) {
            session.forget(&token).await;
            token = session.token(&self.channel()).await?;
            answer = send(token.clone()).await;
        }
        answer.map_err(|it| explained(it, token.as_ref()))
    }
}

fn channel(url: &str, tls: Option<&Tls>) -> Result<Channel, String> {
    let mut endpoint = Endpoint::from_shared(url.to_owned())
        .map_err(|error| format!("the etcd endpoint {url}: {}", innermost(&error)))?
        .connect_timeout(CONNECT)
        .tcp_nodelay(true)
        .http2_keep_alive_interval(PING)
        .keep_alive_timeout(PONG)
        .keep_alive_while_idle(true);
    if let Some(tls) = tls {
        let ca = Certificate::from_pem(&tls.ca_pem);
        let mut config = ClientTlsConfig::new().ca_certificate(ca);
        if let Some((certificate, key)) = &tls.identity_pem {
            config = config.identity(Identity::from_pem(certificate, key));
        }
        endpoint = endpoint.tls_config(config).map_err(|error| {
            let why = innermost(&error);
            format!("the files of --cluster-ca, --cluster-cert and --cluster-key: {why}")
        })?;
    }
    Ok(endpoint.connect_lazy())
}

fn client(channel: Channel) -> Grpc<Channel> {
    Grpc::new(channel).max_decoding_message_size(limits::ANSWER_BYTES_MAX)
}

/// A request with the proof of the login.
fn authorized<Q>(request: Q, token: Token) -> Request<Q> {
    let mut request = Request::new(request);
    if let Some(token) = token {
        request.metadata_mut().insert("token", token);
    }
    request
}

pub(super) async fn unary<Q, A>(
    server: &Server,
    path: &'static str,
    request: Q,
) -> Result<A, EngineError>
where
    Q: Message + Clone + 'static,
    A: Message + Default + 'static,
{
    let send = |token| call(server.channel(), path, request.clone(), token);
    server.send(send).await
}

/// One request with this token, and its response.
pub(super) async fn call<Q, A>(
    channel: Channel,
    path: &'static str,
    request: Q,
    token: Token,
) -> Result<A, EngineError>
where
    Q: Message + 'static,
    A: Message + Default + 'static,
{
    let mut client = client(channel);
    client.ready().await.map_err(|it| unsent(&it))?;
    let path = PathAndQuery::from_static(path);
    let response = client
        .unary(authorized(request, token), path, ProstCodec::default())
        .await;
    response.map(tonic::Response::into_inner).map_err(failure)
}

/// One request and a stream of responses. The request stays open, so that the server does not end
/// the stream.
pub(super) async fn streaming<Q, A>(
    server: &Server,
    path: &'static str,
    request: Q,
) -> Result<Streaming<A>, EngineError>
where
    Q: Message + Clone + 'static,
    A: Message + Default + 'static,
{
    use tokio_stream::StreamExt as _;
    server
        .send(|token| {
            let mut client = client(server.channel());
            let requests = tokio_stream::once(request.clone()).chain(tokio_stream::pending());
            async move {
                client.ready().await.map_err(|it| unsent(&it))?;
                let path = PathAndQuery::from_static(path);
                let requests = authorized(requests, token);
                let response = client
                    .streaming(requests, path, ProstCodec::default())
                    .await;
                response.map(tonic::Response::into_inner).map_err(failure)
            }
        })
        .await
}

/// Whether the other side ended a TLS connection with this error, as rustls words it.
fn is_alert(why: &str) -> bool {
    why.contains("received fatal alert")
}

fn unsent(error: &dyn Error) -> EngineError {
    EngineError::NotApplied(innermost(error))
}

/// The meaning of a status. A status that is not known to mean otherwise leaves the outcome open.
pub(super) fn failure(status: Status) -> EngineError {
    let message = status.message().to_owned();
    let mut source = status.source();
    while let Some(error) = source {
        if error.is::<tonic::ConnectError>() {
            return unsent(error);
        }
        source = error.source();
    }
    match status.code() {
        Code::OutOfRange if message.contains("compacted") => EngineError::Compacted,
        Code::ResourceExhausted if message.contains("database space exceeded") => {
            EngineError::NoSpace
        }
        // The server applies what it accepted before, and accepts nothing until then.
        Code::ResourceExhausted if message.contains("too many requests") => {
            EngineError::NotApplied(message)
        }
        Code::InvalidArgument
        | Code::PermissionDenied
        | Code::Unauthenticated
        | Code::FailedPrecondition
        | Code::OutOfRange
        | Code::ResourceExhausted
        | Code::Unimplemented => EngineError::Refused(message),
        _ => EngineError::Unknown(match status.source() {
            Some(source) => innermost(source),
            None => message,
        }),
    }
}

/// The text of the first cause of an error.
fn innermost(mut error: &dyn Error) -> String {
    while let Some(source) = error.source() {
        error = source;
    }
    error.to_string()
}
