//! Admits requests to the admin API, and passes them to the endpoints of the store that this host
//! runs at present. A host of a cluster that does not lead answers only probes, the page with its
//! login, and requests for metrics, for its overview and for the past of keys, which it reads from
//! its own copy.

use std::convert::Infallible;
use std::fmt::Display;
use std::net::SocketAddr;
use std::sync::{Arc, OnceLock, Weak};

use bytes::Bytes;
use http_body_util::BodyExt;
use hyper::body::{Body, Incoming};
use hyper::header::{
    CACHE_CONTROL, CONNECTION, CONTENT_ENCODING, CONTENT_RANGE, HOST, HeaderValue, IF_MATCH,
    IF_NONE_MATCH, IF_UNMODIFIED_SINCE, TRANSFER_ENCODING, WWW_AUTHENTICATE,
    X_CONTENT_TYPE_OPTIONS,
};
use hyper::{Method, Request, StatusCode, Uri};
use serde_json::json;
use tokio::sync::{Semaphore, watch};

use super::access::{Access, Denial, Operator};
use super::answer::{Answer, Refusal, json};
use super::api::{Api, segments};
use super::cluster::{ClusterPlace, ReadFigures};
use super::overview::Overviews;
use super::past::Reader;
use super::roles::Endpoint;
use super::seat::{Holder, Seat};
use super::stream::OpenStream;
use super::{Scope, metrics, page, roles};
use statehouse_access::audit::{self, Audit, Refused};
use statehouse_access::roles::Role;
use statehouse_config::limits;
use statehouse_files::watch::Reloads;
use statehouse_listener::headers::has_host;
use statehouse_mqtt::network;

/// Reads why a host cannot pass clients on.
pub type ReadImpediment = Arc<dyn Fn() -> Option<&'static str> + Send + Sync>;

/// What the admin API reports on.
#[derive(Clone)]
pub enum Subject {
    /// The store that this host runs.
    Store(Arc<Api>),
    /// A host of a cluster that does not lead.
    Follower {
        /// Why the host cannot pass clients on, if it cannot.
        impediment: ReadImpediment,
        /// The answer to operators: which host leads.
        leader: Arc<str>,
        /// The names around it.
        place: ClusterPlace,
        /// Reads its figures.
        figures: ReadFigures,
        /// Reads its copy of the log.
        past: Arc<Reader>,
        /// The files that it reloads, once they are known.
        reloads: Arc<OnceLock<Weak<Reloads>>>,
    },
}

pub(super) struct Requests {
    access: Arc<Access>,
    scope: Scope,
    audit: Arc<Audit>,
    subject: watch::Receiver<Subject>,
    overviews: Arc<Overviews>,
    /// The streams of events that may still begin.
    streams: Arc<Semaphore>,
}

impl Requests {
    pub(super) fn new(
        access: Access,
        scope: Scope,
        audit: Arc<Audit>,
        subject: watch::Receiver<Subject>,
        overviews: Arc<Overviews>,
    ) -> Self {
        Self {
            access: Arc::new(access),
            scope,
            audit,
            subject,
            overviews,
            streams: Arc::new(Semaphore::new(limits::ADMIN_STREAMS_MAX)),
        }
    }

    /// Answers one request of a client at `peer`.
    pub(super) async fn answer(
        &self,
        request: Request<Incoming>,
        seat: &Arc<Seat>,
        peer: SocketAddr,
    ) -> Result<Answer, Infallible> {
        let mut answer = self.respond(request, seat, peer).await;
        let headers = answer.headers_mut();
        // A browser must take an answer for nothing but its type, and must keep no stored data.
        headers.insert(X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
        let unless_set = headers.entry(CACHE_CONTROL);
        unless_set.or_insert(HeaderValue::from_static("no-store"));
        Ok(answer)
    }

    async fn respond(
        &self,
        mut request: Request<Incoming>,
        seat: &Arc<Seat>,
        peer: SocketAddr,
    ) -> Answer {
        // The server leaves out the body.
        if request.method() == Method::HEAD {
            *request.method_mut() = Method::GET;
        }
        if let Err(refusal) = check_form(&request).and_then(|()| check_act(&request)) {
            return end(request, seat, refusal.answer());
        }
        name_host(&mut request);
        let subject = self.subject.borrow().clone();
        if let Some(answer) = probe(&subject, &request) {
            return end(request, seat, answer);
        }
        if self.scope == Scope::Metrics && !is_metrics(&request) {
            let error = "this address answers GET /metrics, /livez and /readyz only";
            let refusal = Refusal::new(StatusCode::NOT_FOUND, error);
            return end(request, seat, refusal.answer());
        }
        let path = request.uri().path();
        if let Some(answer) = page::answer(request.method(), path, request.headers()) {
            let answer = match self.access.check_host(request.headers()) {
                Ok(()) => answer,
                Err(denial) => self.denied(&denial, peer),
            };
            return end(request, seat, answer);
        }
        // The connection keeps its place while a password is checked, since that takes time.
        let operator = match self.access.check(request.headers(), peer).await {
            Ok(operator) => Arc::new(operator),
            Err(denial) => return end(request, seat, self.denied(&denial, peer)),
        };
        // A user without a role is refused, and must not take the place of an operator.
        if operator.role.is_some() {
            if let Err(text) = seat.take(|| self.holder(&operator, peer)) {
                self.report(peer, operator.user(), &text, self.scope == Scope::All);
                let refusal = Refusal::new(StatusCode::SERVICE_UNAVAILABLE, text);
                return end(request, seat, refusal.answer());
            }
            seat.arrived();
        }
        self.admitted(subject, request, &operator, seat, peer).await
    }

    /// Answers a request of an operator, and logs it if it is an act.
    async fn admitted(
        &self,
        subject: Subject,
        mut request: Request<Incoming>,
        operator: &Arc<Operator>,
        seat: &Arc<Seat>,
        peer: SocketAddr,
    ) -> Answer {
        let endpoint = match self.check_role(operator, &request, peer) {
            Ok(endpoint) => endpoint,
            Err(refusal) => return end(request, seat, refusal.answer()),
        };
        let act = (endpoint.role > Role::Read).then(|| Act {
            method: request.method().clone(),
            path: logged_path(request.uri()),
            operator: operator.clone(),
            status: None,
        });
        let answer = match endpoint.check_parameters(request.uri()) {
            Ok(()) => self.route(subject, &mut request, operator.clone()).await,
            Err(refusal) => Err(refusal),
        };
        let answer = answer.and_then(|answer| self.admit_stream(answer, operator.clone(), seat));
        // A refused request may have an unread body, so its connection is closed after the answer.
        let answer = answer.unwrap_or_else(|refusal| last(refusal.answer()));
        discard(request.into_body(), seat.clone());
        if let Some(mut act) = act {
            act.status = Some(answer.status());
        }
        answer
    }

    /// The answer to a request that is not admitted.
    fn denied(&self, denial: &Denial, peer: SocketAddr) -> Answer {
        if !denial.is_audited {
            self.report(peer, None, &denial.why, false);
        }
        let mut answer = Refusal::new(denial.status, denial.why).answer();
        if denial.status == StatusCode::UNAUTHORIZED {
            // Over TLS Basic works too. It is not offered: a browser would ask for the password and
            // then send it with every request to this address, also with those of other pages.
            let scheme = HeaderValue::from_static("Bearer");
            answer.headers_mut().insert(WWW_AUTHENTICATE, scheme);
        }
        answer
    }

    /// Passes an admitted request on. Overviews are those of this host, whether it leads or not.
    async fn route(
        &self,
        subject: Subject,
        request: &mut Request<Incoming>,
        operator: Arc<Operator>,
    ) -> Result<Answer, Refusal> {
        // Of these paths, the table of roles has admitted only GET of overviews, streams and the
        // past of keys.
        match (request.uri().path(), subject) {
            ("/v1/session", _) => session(request.method(), &operator),
            ("/v1/overview", _) => self.overviews.answer().await,
            ("/v1/live", _) => Ok(self.overviews.live()),
            (_, Subject::Store(api)) => api.route(request, operator).await,
            (
                _,
                Subject::Follower {
                    figures, reloads, ..
                },
            ) if is_metrics(request) => {
                let reloads = reloads.get().and_then(Weak::upgrade);
                let page = metrics::of_follower(&figures(), &self.audit, reloads.as_deref());
                Ok(metrics::answer(page, request.headers()))
            }
            ("/v1/history", Subject::Follower { past, .. }) if past.is_current() => {
                past.history(request.uri()).await
            }
            ("/v1/value", Subject::Follower { past, .. }) if past.is_current() => {
                past.value(request.uri()).await
            }
            (_, Subject::Follower { leader, .. }) => {
                Err(Refusal::new(StatusCode::MISDIRECTED_REQUEST, &*leader))
            }
        }
    }

    /// Gives a place to an answer that is a stream of events, for as long as the login of its
    /// operator lasts.
    fn admit_stream(
        &self,
        answer: Answer,
        operator: Arc<Operator>,
        seat: &Seat,
    ) -> Result<Answer, Refusal> {
        let Some(cut) = answer.body().cut() else {
            return Ok(answer);
        };
        let place = self.streams.clone().try_acquire_owned().map_err(|_| {
            let max = limits::ADMIN_STREAMS_MAX;
            let error = format!("{max} streams of events are open, which is the limit: end one of the others, such as a page in another window");
            Refusal::new(StatusCode::SERVICE_UNAVAILABLE, error)
        })?;
        seat.stream(OpenStream {
            cut,
            is_allowed: Box::new(move || operator.is_good()),
            _place: place,
        });
        Ok(answer)
    }

    /// The endpoint of this request, if the role of the operator suffices for it.
    fn check_role(
        &self,
        operator: &Operator,
        request: &Request<Incoming>,
        peer: SocketAddr,
    ) -> Result<&'static Endpoint, Refusal> {
        segments(request.uri())?;
        let path: Vec<&str> = request.uri().path().split('/').skip(1).collect();
        let endpoint = roles::find(request.method(), &path)?;
        let needed = endpoint.role;
        if operator.role.is_some_and(|role| role >= needed) {
            return Ok(endpoint);
        }
        let user = operator.user().unwrap_or_default();
        let has = match operator.role {
            Some(role) => format!("has the role {role}"),
            None => "has no role".to_owned(),
        };
        let why = format!(
            "{} {} needs the role {needed}, and the user {user} {has}: `statehouse user role` changes it in the users file",
            request.method(),
            request.uri().path()
        );
        self.report(peer, Some(user), &why, true);
        Err(Refusal::new(StatusCode::FORBIDDEN, why))
    }

    /// What the seat of an operator at `peer` counts for.
    fn holder(&self, operator: &Operator, peer: SocketAddr) -> Holder {
        match (self.scope, operator.user()) {
            (Scope::Metrics, _) => Holder::Network(network(peer.ip())),
            (Scope::All, Some(user)) => Holder::User(user.into()),
            (Scope::All, None) => Holder::Owner,
        }
    }

    /// Counts and logs a refused request. `is_proven`: the client has shown that it may log in.
    fn report(&self, peer: SocketAddr, user: Option<&str>, why: &dyn Display, is_proven: bool) {
        let refused = Refused {
            what: "administer",
            peer: self.access.is_remote().then_some(peer),
            client: "",
            user,
            why,
        };
        self.audit.refused_with_proof(&refused, is_proven);
    }
}

/// An act of an operator. It is logged when it ends, or when its connection ends before: then it
/// may have its effect nevertheless.
struct Act {
    method: Method,
    path: String,
    operator: Arc<Operator>,
    /// The status of the answer, if there is one.
    status: Option<StatusCode>,
}

impl Drop for Act {
    fn drop(&mut self) {
        let Self { method, path, .. } = self;
        let user = self.operator.user().unwrap_or("-");
        // The path is the last field: `/v1/events` cuts a line, and the client chooses the path.
        match self.status.map(|it| it.as_u16()) {
            Some(status) => {
                tracing::info!(target: audit::TARGET, %method, user, status, path, "admin request");
            }
            None => tracing::info!(
                target: audit::TARGET, %method, user, path,
                "admin request, and its connection ended before the answer"
            ),
        }
    }
}

/// Discards what is left of the body of a request, within limits, while the answer is sent. A
/// connection that is closed with unread bytes is reset, and the reset can overtake the answer. A
/// connection that has its place still keeps it until then, so that newer ones can evict it.
fn discard(body: Incoming, seat: Arc<Seat>) {
    if body.is_end_stream() {
        return seat.arrived();
    }
    tokio::spawn(async move {
        drain(body).await;
        seat.arrived();
    });
}

/// Reads the rest of a body, within limits.
async fn drain(mut body: Incoming) {
    let mut left = limits::POLICY_FILE_BYTES_MAX;
    let draining = async {
        let idle = limits::ADMIN_DISCARD_IDLE;
        while let Ok(Some(Ok(frame))) = tokio::time::timeout(idle, body.frame()).await {
            let bytes = frame.data_ref().map_or(0, Bytes::len);
            left = left.saturating_sub(bytes as u64);
            if left == 0 {
                return;
            }
        }
    };
    _ = tokio::time::timeout(limits::ADMIN_DISCARD_TIMEOUT, draining).await;
}

/// Begins, shows or ends the session of an operator.
fn session(method: &Method, operator: &Operator) -> Result<Answer, Refusal> {
    let refused = |error| Err(Refusal::new(StatusCode::CONFLICT, error));
    match *method {
        Method::POST => match operator.begin_session() {
            Ok(Some(begun)) => Ok(json(StatusCode::OK, &begun)),
            Ok(None) => refused(
                "this request was sent in a session: a session begins with the token, or with a name and a password",
            ),
            Err(error) => {
                let status = StatusCode::INTERNAL_SERVER_ERROR;
                Err(Refusal::new(status, error.to_string()))
            }
        },
        Method::DELETE => match operator.end_session() {
            true => Ok(json(StatusCode::OK, &json!({}))),
            false => refused("this request was sent in no session, so none ends"),
        },
        _ => Ok(json(StatusCode::OK, &operator.about())),
    }
}

/// Refuses a request with ambiguous headers, or with a body that the server cannot decode.
fn check_form(request: &Request<Incoming>) -> Result<(), Refusal> {
    has_host(request)
        .and_then(|()| Access::check_form(request.headers()))
        .map_err(|error| Refusal::new(StatusCode::BAD_REQUEST, error))?;
    // The HTTP library accepts any encodings before a last `chunked`, and decodes only that.
    let mut encodings = request.headers().get_all(TRANSFER_ENCODING).iter();
    match (encodings.next(), encodings.next()) {
        (None, _) => Ok(()),
        (Some(only), None) if only.as_bytes().eq_ignore_ascii_case(b"chunked") => Ok(()),
        _ => {
            let error = "the only supported Transfer-Encoding is `chunked`";
            Err(Refusal::new(StatusCode::NOT_IMPLEMENTED, error))
        }
    }
}

/// Refuses an act with headers that would change its meaning, since none of them is evaluated: it
/// would take effect without its condition, or store a body that is not the value.
fn check_act(request: &Request<Incoming>) -> Result<(), Refusal> {
    if request.method() == Method::GET {
        return Ok(());
    }
    let headers = request.headers();
    let conditions = [IF_MATCH, IF_NONE_MATCH, IF_UNMODIFIED_SINCE];
    if let Some(name) = conditions.iter().find(|it| headers.contains_key(*it)) {
        let error = format!("`{name}` is not supported: /v1/key has the parameter `if_version`");
        return Err(Refusal::new(StatusCode::BAD_REQUEST, error));
    }
    if headers.contains_key(CONTENT_RANGE) {
        let error = "`content-range` is not supported: send the whole body without it";
        return Err(Refusal::new(StatusCode::BAD_REQUEST, error));
    }
    let mut encodings = headers.get_all(CONTENT_ENCODING).iter();
    match encodings.all(|it| it.as_bytes().eq_ignore_ascii_case(b"identity")) {
        true => Ok(()),
        false => {
            let error = "a body with a `content-encoding` is not decoded: send it without one";
            Err(Refusal::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, error))
        }
    }
}

/// Takes the host of a request for a whole URL from this URL: the Host header does not count then
/// (RFC 9112 section 3.2.2).
fn name_host(request: &mut Request<Incoming>) {
    let authority = request.uri().authority();
    let host = authority.and_then(|it| HeaderValue::from_str(it.as_str()).ok());
    if let Some(host) = host {
        request.headers_mut().insert(HOST, host);
    }
}

/// Health probes, which need no token because they reveal no stored data.
fn probe(subject: &Subject, request: &Request<Incoming>) -> Option<Answer> {
    let (method, path) = (request.method(), request.uri().path());
    if ["/livez", "/readyz"].contains(&path) && *method != Method::GET {
        return Some(Refusal::method(method, path, "GET, HEAD").answer());
    }
    match path {
        "/livez" => Some(json(StatusCode::OK, &json!({}))),
        "/readyz" => {
            let impediment = match subject {
                Subject::Store(api) => api.impediment(),
                Subject::Follower { impediment, .. } => impediment(),
            };
            Some(match impediment {
                None => json(StatusCode::OK, &json!({})),
                Some(why) => Refusal::new(StatusCode::SERVICE_UNAVAILABLE, why).answer(),
            })
        }
        _ => None,
    }
}

/// The path of a request in the audit log, with the query if that names a client or a host. Other
/// queries contain keys. Empty parameters, which are ignored, are left out: they would displace the
/// name.
fn logged_path(uri: &Uri) -> String {
    let path = uri.path();
    let has_name = ["/v1/clients", "/v1/cluster/handover"].contains(&path);
    match uri.query() {
        Some(query) if has_name => {
            let named: Vec<&str> = query.split('&').filter(|it| !it.is_empty()).collect();
            format!("{path}?{}", named.join("&"))
        }
        _ => path.to_owned(),
    }
}

fn is_metrics(request: &Request<Incoming>) -> bool {
    request.method() == Method::GET && request.uri().path() == "/metrics"
}

/// The answer to a request that goes no further.
fn end(request: Request<Incoming>, seat: &Arc<Seat>, answer: Answer) -> Answer {
    discard(request.into_body(), seat.clone());
    last(answer)
}

/// Closes the connection after this answer.
fn last(mut answer: Answer) -> Answer {
    let close = HeaderValue::from_static("close");
    answer.headers_mut().insert(CONNECTION, close);
    answer
}
