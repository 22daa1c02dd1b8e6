//! The endpoints of the admin API.
//!
//! ```text
//! GET    /                           the page for operators; no login needed, as for its files
//! POST   /v1/session                 begin a session with the token, or with a name and a password
//! GET    /v1/session                 who sends this request, and until when the session lasts
//! DELETE /v1/session                 end the session
//! GET    /v1/policies                the store's name, all loaded policies, and their roles
//! POST   /v1/policies                load a policy; the body is its file
//! DELETE /v1/policies/WHICH          unload a policy
//! POST   /v1/policies/WHICH/promote  make it the active policy
//! POST   /v1/rollback                reactivate the previous policy
//! GET    /v1/log?from=N&policy=WHICH log lines of policies from position N on, which is `next` of
//!                                    the response before; waits some seconds for a line. Without
//!                                    `from`: the recent lines, at once
//! GET    /v1/events?from=N&kind=KIND the last lines of the audit log: acts and refusals, or the
//!                                    KIND `act` or `refusal`. Waits like /v1/log
//! GET    /v1/shadow                  the comparison of the shadow with the active policy
//! PUT    /v1/shadow                  {"policy": WHICH, "per_mille": 1000}
//! DELETE /v1/shadow
//! PUT    /v1/canary                  {"policy": WHICH, "rule": {"percent": 5}}; the rule may also
//!                                    be "clients" or "keys" with a pattern
//! DELETE /v1/canary
//! PUT    /v1/routes?prefix=PREFIX    {"policy": WHICH}
//! DELETE /v1/routes?prefix=PREFIX
//! POST   /v1/authz                   {"client": ID, "command": "SET", "on": KEY}: explain a
//!                                    decision
//! GET    /v1/usage?clients=N         keys and bytes in use, and the clients that own the most
//! GET    /v1/slow?from=N             the last slow requests with their times, those after the
//!                                    first N slow ones. `next` is the N to continue from
//! GET    /v1/clients?clients=N       the clients of the embedded broker
//! DELETE /v1/clients/ID              end the connection of a client; its session stays
//! DELETE /v1/clients?id=ID           the same, for any id: a browser normalizes `.` in a path
//! GET    /v1/overview                rates, times, sizes and limits of this host, of the last
//!                                    second
//! GET    /v1/live                    the same as server-sent events, one a second
//! GET    /v1/keys?prefix=PREFIX&delimiter=TEXT&after=CURSOR&limit=N  a list of keys in order; keys
//!                                    that agree up to a delimiter are one entry
//! GET    /v1/key?key=KEY             the value of a key, and what the store knows about it
//! PUT    /v1/key?key=KEY&if_version=VERSION&px=MS&fence=TOKEN  set a key to the body; the version
//!                                    `none` stands for a key that does not exist
//! DELETE /v1/key?key=KEY&if_version=VERSION&fence=TOKEN  remove a key
//! GET    /v1/changes?prefix=PREFIX   a stream of the changes of these keys, as they happen
//! GET    /v1/history?key=KEY&limit=N the changes of a key, the newest first
//! GET    /v1/value?key=KEY&as_of=MOMENT  the value of a key at a version or a time
//! GET    /v1/replay?from=A&to=B&limit=N&max_fuel=N  replay recorded requests; A and B are record
//!                                    numbers or times; `max_fuel` is ignored without a policy
//! POST   /v1/replay?from=A&to=B&limit=N&max_fuel=N  the same with another policy; the body is its
//!                                    file
//! POST   /v1/cluster/handover?to=HOST  end this host's leadership, so that HOST or any other leads
//! POST   /v1/cluster/upgrade         raise the format of the log to the newest that all hosts read
//! GET    /metrics                    OpenMetrics, or the text format of Prometheus
//! GET    /livez                      whether the process answers; no token needed
//! GET    /readyz                     whether the store can answer requests, or 503 and the
//!                                    reason; no token needed
//! ```
//!
//! WHICH is a digest (at least six digits), a name, NAME@VERSION, NAME@DIGEST, or `builtin`. Errors
//! are {"error": "..."}.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http_body_util::{BodyExt, LengthLimitError, Limited};
use hyper::body::{Body, Incoming};
use hyper::{Method, Request, StatusCode, Uri};
use serde::de::{DeserializeOwned, Error as _};
use serde::{Deserialize, Deserializer};
use serde_json::{Value as Json, json};
use tokio::sync::{Mutex, OwnedSemaphorePermit, Semaphore};

use super::access::Operator;
use super::answer::{Answer, Refusal, json};
use super::authz::{self, Ask};
use super::past::Reader;
use super::query::{bad, number, text, value};
use super::{Sources, changes, clients, cluster, edit, keys, log, metrics, roles, usage};
use crate::past::json_bytes;
use crate::policies::delivery::{Gate, ShipError};
use crate::policies::manager::{Control, ControlError, Listing};
use statehouse_access::explain;
use statehouse_config::{limits, percent, policy_file_bytes_max};
use statehouse_core::policy::{Actor, CanaryRule, Selector};
use statehouse_files::blocking;

/// The endpoints of one store.
pub struct Api {
    gate: Arc<Gate>,
    sources: Sources,
    /// Room for the files of policies that are being read, loaded or replayed, in KiB: one of the
    /// largest size, or many smaller ones, so that a slow client keeps out none but large ones. An
    /// upload takes the length that it announces, and gives it back if it stalls.
    uploads: Arc<Semaphore>,
    /// The largest upload, which is also the room for all.
    upload_bytes_max: u64,
    /// Policies are compiled one at a time, since that takes much memory.
    loading: Arc<Mutex<()>>,
    /// Readers that wait for the next log line of a policy, or of the audit log.
    followers: Semaphore,
    reader: Reader,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ShadowBody {
    policy: String,
    per_mille: u16,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct CanaryBody {
    policy: String,
    #[serde(deserialize_with = "rule")]
    rule: CanaryRule,
}

/// The error of a derived implementation does not name the rules.
fn rule<'de, D: Deserializer<'de>>(deserializer: D) -> Result<CanaryRule, D::Error> {
    let rule = Json::deserialize(deserializer)?;
    if rule.as_object().is_none_or(|it| it.len() != 1) {
        let error = "`rule` must have exactly one of `percent`, `clients` and `keys`";
        return Err(D::Error::custom(error));
    }
    let is_percent = rule.get("percent").is_some();
    serde_json::from_value(rule).map_err(|error| match is_percent {
        true => D::Error::custom("`percent` is a whole number from 1 to 100"),
        false => D::Error::custom(error),
    })
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RouteBody {
    policy: String,
}

impl Api {
    /// The endpoints of the store of `gate` and `sources`.
    pub fn new(gate: Arc<Gate>, sources: Sources) -> Self {
        let upload_bytes_max = policy_file_bytes_max();
        Self {
            gate,
            reader: Reader::new(sources.directory.clone()),
            sources,
            uploads: Arc::new(Semaphore::new(kib(upload_bytes_max) as usize)),
            upload_bytes_max,
            loading: Arc::default(),
            followers: Semaphore::new(limits::ADMIN_LOG_FOLLOWERS_MAX),
        }
    }

    /// Why the store is not ready, if it is not.
    pub(super) fn impediment(&self) -> Option<&'static str> {
        self.sources.impediment()
    }

    /// Answers a request of an operator. Its method and path are in the table of roles.
    ///
    /// A host of a cluster that was replaced without knowing it must refuse acts: it would wait for
    /// the log, or find in its old state that nothing is to be changed. So it must lead before the
    /// act. An answer that its state decided counts only if it still leads then.
    pub(super) async fn route(
        self: Arc<Self>,
        request: &mut Request<Incoming>,
        operator: Arc<Operator>,
    ) -> Result<Answer, Refusal> {
        let uri = request.uri().clone();
        let segments = segments(&uri)?;
        let segments: Vec<&str> = segments.iter().map(String::as_str).collect();
        let acts = roles::acts(request.method(), &segments);
        if acts {
            self.sources.check_lease().await?;
        }
        let api = self.clone();
        let answered = api.answer(request, &uri, &segments, &operator).await;
        match acts {
            true => self.sources.confirm(answered).await,
            false => answered,
        }
    }

    async fn answer(
        self: Arc<Self>,
        request: &mut Request<Incoming>,
        uri: &Uri,
        segments: &[&str],
        operator: &Operator,
    ) -> Result<Answer, Refusal> {
        let user = operator.user();
        let method = request.method().clone();
        match segments {
            ["v1", "policies" | "rollback", ..] => {
                let gate = self.gate_of(user);
                self.policies(&method, &segments[1..], request, gate).await
            }
            ["v1", "shadow" | "canary" | "routes", ..] => {
                let gate = self.gate_of(user);
                self.assignment(&method, &segments[1..], request, gate)
                    .await
            }
            ["v1", "log"] => self.log(uri).await,
            ["v1", "events"] => {
                let lines = log::audit_lines(uri, &self.followers).await?;
                Ok(json(StatusCode::OK, &lines))
            }
            ["v1", "cluster", what @ ("handover" | "upgrade")] => {
                cluster::answer(self.sources.leadership.as_deref(), what, uri).await
            }
            ["v1", "authz" | "usage" | "clients" | "slow", ..] => {
                self.questions(&method, &segments[1..], request).await
            }
            ["v1", "keys"] => keys::list(&self.sources, uri).await,
            ["v1", "key"] if method == Method::GET => keys::one(&self.sources, uri).await,
            ["v1", "key"] => edit::change(&self.sources, request, operator).await,
            ["v1", "changes"] => changes::stream(self, uri).await,
            ["v1", "history"] => self.reader.history(uri).await,
            ["v1", "value"] => self.reader.value(uri).await,
            ["v1", "replay"] => self.replay(&method, request).await,
            ["metrics"] => {
                let headers = request.headers().clone();
                self.run_blocking(move |api| Ok(metrics::answer(api.metrics(), &headers)))
                    .await
            }
            _ => Err(no_resource(uri)),
        }
    }

    /// The gate for changes by this user.
    fn gate_of(&self, user: Option<&str>) -> Arc<Gate> {
        match user {
            Some(_) => Arc::new(self.gate.by(Actor::admin(user))),
            None => self.gate.clone(),
        }
    }

    /// The parts that this reports on.
    pub(super) fn sources(&self) -> &Sources {
        &self.sources
    }

    /// The policies.
    pub(super) fn listing(&self) -> Listing {
        self.control().list()
    }

    fn metrics(&self) -> metrics::Page {
        let shadow = self.control().diff();
        metrics::of_store(&self.control().list(), shadow.as_ref(), &self.sources)
    }

    /// Loaded policies, and which one is active.
    async fn policies(
        self: Arc<Self>,
        method: &Method,
        path: &[&str],
        request: &mut Request<Incoming>,
        gate: Arc<Gate>,
    ) -> Result<Answer, Refusal> {
        match (method, path) {
            (&Method::GET, ["policies"]) => self.call(gate, |it| Ok(document(&it.list()))).await,
            (&Method::POST, ["policies"]) => self.load(request, gate).await,
            (&Method::DELETE, ["policies", which]) => {
                let which = selector(which)?;
                self.change(gate, move |it| it.unload(&which)).await
            }
            (&Method::POST, ["policies", which, "promote"]) => {
                let which = selector(which)?;
                self.call(gate, move |it| it.promote(&which)).await
            }
            (&Method::POST, ["rollback"]) => self.call(gate, Control::rollback).await,
            _ => Err(no_resource(request.uri())),
        }
    }

    /// Shadow, canary and routes.
    async fn assignment(
        self: Arc<Self>,
        method: &Method,
        path: &[&str],
        request: &mut Request<Incoming>,
        gate: Arc<Gate>,
    ) -> Result<Answer, Refusal> {
        match (method, path) {
            (&Method::GET, ["shadow"]) => {
                self.blocking(move |_| {
                    gate.control().diff().ok_or_else(|| {
                        let error =
                            "no comparison is running: start one with `statehouse policy shadow`";
                        Refusal::new(StatusCode::NOT_FOUND, error)
                    })
                })
                .await
            }
            (&Method::PUT, ["shadow"]) => {
                let body: ShadowBody = read(request, limits::ADMIN_DOCUMENT_BYTES_MAX).await?;
                let which = selector(&body.policy)?;
                self.change(gate, move |it| it.shadow(Some((&which, body.per_mille))))
                    .await
            }
            (&Method::DELETE, ["shadow"]) => self.change(gate, |it| it.shadow(None)).await,
            (&Method::PUT, ["canary"]) => {
                let body: CanaryBody = read(request, limits::ADMIN_DOCUMENT_BYTES_MAX).await?;
                let which = selector(&body.policy)?;
                self.change(gate, move |it| it.canary(Some((&which, body.rule))))
                    .await
            }
            (&Method::DELETE, ["canary"]) => self.change(gate, |it| it.canary(None)).await,
            (&Method::PUT, ["routes"]) => {
                let prefix = prefix(request.uri())?;
                let body: RouteBody = read(request, limits::ADMIN_DOCUMENT_BYTES_MAX).await?;
                let which = selector(&body.policy)?;
                self.change(gate, move |it| it.route(&prefix, Some(&which)))
                    .await
            }
            (&Method::DELETE, ["routes"]) => {
                let prefix = prefix(request.uri())?;
                self.change(gate, move |it| it.route(&prefix, None)).await
            }
            _ => Err(no_resource(request.uri())),
        }
    }

    /// Rights, usage, clients and slow requests.
    async fn questions(
        self: Arc<Self>,
        method: &Method,
        path: &[&str],
        request: &mut Request<Incoming>,
    ) -> Result<Answer, Refusal> {
        match (method, path) {
            (&Method::POST, ["authz"]) => {
                let ask: Ask = read(request, limits::ADMIN_QUESTION_BYTES_MAX).await?;
                let on =
                    percent::decode(&ask.on).ok_or_else(|| bad("`on` is not percent-encoded"))?;
                explain::check(ask.command, &on).map_err(bad)?;
                self.blocking(move |api| authz::explain(&api.sources, ask, &on))
                    .await
            }
            (&Method::GET, ["usage"]) => {
                let clients = client_count(request.uri())?;
                self.blocking(move |api| Ok(usage::usage(&api.sources, clients)))
                    .await
            }
            (&Method::GET, ["slow"]) => {
                let from = log::position(request.uri())?.unwrap_or(0);
                let slow = self.sources.server.slow_requests(from);
                Ok(json(StatusCode::OK, &slow))
            }
            (&Method::GET, ["clients"]) => {
                let count = client_count(request.uri())?;
                self.blocking(move |api| clients::list(&api.sources, count))
                    .await
            }
            (&Method::DELETE, ["clients"] | ["clients", _]) => {
                let client = match path {
                    [_, client] => Some((*client).to_owned()),
                    _ => text(request.uri(), "id")?,
                };
                let client = client.ok_or_else(|| {
                    bad("name the client, percent-encoded: DELETE /v1/clients?id=ID")
                })?;
                self.blocking(move |api| clients::kick(&api.sources, &client).map(|()| json!({})))
                    .await
            }
            _ => Err(no_resource(request.uri())),
        }
    }

    /// Log lines of policies.
    async fn log(&self, uri: &Uri) -> Result<Answer, Refusal> {
        let from = log::position(uri)?;
        let of = text(uri, "policy")?.map(|which| selector(&which));
        let of = of.transpose()?;
        let logged = log::lines(self.control(), from, of.as_ref(), &self.followers).await?;
        Ok(json(StatusCode::OK, &logged))
    }

    /// Replays recorded requests, with the policy in the body of a POST.
    async fn replay(
        &self,
        method: &Method,
        request: &mut Request<Incoming>,
    ) -> Result<Answer, Refusal> {
        let uri = request.uri().clone();
        let (file, _room) = match *method {
            Method::POST => {
                let (file, room) = self.policy_file(request).await?;
                // A replay runs the policy, so it needs the same signature as one that is loaded.
                (self.gate.trust().check(&file)).map_err(ShipError::from)?;
                (Some(file.to_vec()), Some(room))
            }
            _ => (None, None),
        };
        let store_bytes = self.sources.server.usage(0).bytes;
        let wanted = self.reader.wanted(&uri, store_bytes)?;
        wanted.run(file).await
    }

    async fn load(
        self: Arc<Self>,
        request: &mut Request<Incoming>,
        gate: Arc<Gate>,
    ) -> Result<Answer, Refusal> {
        let (file, room) = self.policy_file(request).await?;
        let turn = soon(self.loading.clone().lock_owned()).await?;
        // The load continues if the client disconnects, and then still takes the room and the turn.
        self.blocking(move |_| {
            let loaded = gate.load(&file);
            drop((file, room, turn));
            Ok(loaded?)
        })
        .await
    }

    /// Reads the file of a policy, with its room.
    async fn policy_file(
        &self,
        request: &mut Request<Incoming>,
    ) -> Result<(Bytes, OwnedSemaphorePermit), Refusal> {
        let announced = request.body().size_hint();
        let max = match announced.upper() {
            Some(_) => self.upload_bytes_max,
            None => (self.upload_bytes_max).min(limits::ADMIN_UPLOAD_UNANNOUNCED_BYTES_MAX),
        };
        if announced.lower() > max {
            return Err(too_large(max));
        }
        let room = self.room(announced.upper().unwrap_or(max)).await?;
        Ok((body(request, max).await?, room))
    }

    /// Waits for room for an upload, within a limit. A smaller upload may overtake a larger one.
    async fn room(&self, bytes: u64) -> Result<OwnedSemaphorePermit, Refusal> {
        soon(async {
            loop {
                let uploads = self.uploads.clone();
                if let Ok(room) = uploads.try_acquire_many_owned(kib(bytes)) {
                    return room;
                }
                tokio::time::sleep(limits::ADMIN_UPLOAD_PAUSE).await;
            }
        })
        .await
    }

    /// Runs work that may take seconds on a blocking thread, and answers with its result.
    async fn blocking<T, F>(self: &Arc<Self>, f: F) -> Result<Answer, Refusal>
    where
        T: serde::Serialize + Send + 'static,
        F: FnOnce(&Self) -> Result<T, Refusal> + Send + 'static,
    {
        let given = self.run_blocking(f).await?;
        Ok(json(StatusCode::OK, &given))
    }

    /// Like [`blocking`](Self::blocking), and returns the result.
    async fn run_blocking<T, F>(self: &Arc<Self>, f: F) -> Result<T, Refusal>
    where
        T: Send + 'static,
        F: FnOnce(&Self) -> Result<T, Refusal> + Send + 'static,
    {
        let api = self.clone();
        blocking::run("admin", move || f(&api)).await?
    }

    /// Like [`blocking`](Self::blocking), for a call of the control of `gate`.
    async fn call<T, F>(self: &Arc<Self>, gate: Arc<Gate>, f: F) -> Result<Answer, Refusal>
    where
        T: serde::Serialize + Send + 'static,
        F: FnOnce(&Control) -> Result<T, ControlError> + Send + 'static,
    {
        self.blocking(move |_| Ok(f(gate.control())?)).await
    }

    /// Like [`call`](Self::call), and answers with an empty object.
    async fn change<F>(self: &Arc<Self>, gate: Arc<Gate>, f: F) -> Result<Answer, Refusal>
    where
        F: FnOnce(&Control) -> Result<(), ControlError> + Send + 'static,
    {
        self.call(gate, move |it| f(it).map(|()| json!({}))).await
    }

    fn control(&self) -> &Control {
        self.gate.control()
    }
}

/// The decoded segments of the path.
pub(super) fn segments(uri: &Uri) -> Result<Vec<String>, Refusal> {
    let segments: Option<Vec<String>> = (uri.path().split('/').skip(1))
        .map(|segment| percent::decode(segment).and_then(|it| String::from_utf8(it).ok()))
        .collect();
    segments.ok_or_else(|| bad("the path is not percent-encoded UTF-8"))
}

fn no_resource(uri: &Uri) -> Refusal {
    let error = format!("there is no resource at {}", uri.path());
    Refusal::new(StatusCode::NOT_FOUND, error)
}

fn too_large(max: u64) -> Refusal {
    let error = format!("the body is larger than the limit of {max} bytes");
    Refusal::new(StatusCode::PAYLOAD_TOO_LARGE, error)
}

fn selector(which: &str) -> Result<Selector, Refusal> {
    which.parse().map_err(|error| bad(format!("{error}")))
}

/// The listing. It shows the prefixes of routes in the form that the API uses for bytes. The log has
/// another form for prefixes that are not UTF-8, because earlier versions read it.
fn document(listing: &Listing) -> Json {
    // This cannot fail: all keys of maps are strings, and the writer is memory.
    let mut json = serde_json::to_value(listing).unwrap_or_default();
    let routes = json.pointer_mut("/assignment/routes");
    let routes = routes.and_then(Json::as_array_mut);
    for (json, route) in routes.into_iter().flatten().zip(&listing.assignment.routes) {
        json["prefix"] = json_bytes(&route.prefix.0);
    }
    json
}

fn prefix(uri: &Uri) -> Result<Vec<u8>, Refusal> {
    value(uri, "prefix")?
        .ok_or_else(|| bad("name the prefix, percent-encoded: /v1/routes?prefix=PREFIX"))
}

/// The requested number of clients.
fn client_count(uri: &Uri) -> Result<usize, Refusal> {
    number(uri, "clients", 0, 0..=limits::ADMIN_CLIENTS_MAX)
}

/// KiB, rounded up.
fn kib(bytes: u64) -> u32 {
    u32::try_from(bytes.div_ceil(1024)).unwrap_or(u32::MAX)
}

/// Waits for other uploads within a limit.
async fn soon<T>(waiting: impl Future<Output = T>) -> Result<T, Refusal> {
    let waited = tokio::time::timeout(limits::ADMIN_UPLOAD_WAIT, waiting).await;
    waited.map_err(|_| {
        let error = "other policies are being sent or compiled: try again later";
        Refusal::new(StatusCode::SERVICE_UNAVAILABLE, error)
    })
}

/// Parses the body as JSON.
async fn read<T: DeserializeOwned>(
    request: &mut Request<Incoming>,
    bytes_max: u64,
) -> Result<T, Refusal> {
    let body = body(request, bytes_max).await?;
    serde_json::from_slice(&body).map_err(|error| bad(format!("the body is not valid: {error}")))
}

/// Reads the whole body, of at most `bytes_max` bytes. The caller discards the rest of a refused
/// one.
pub(super) async fn body(
    request: &mut Request<Incoming>,
    bytes_max: u64,
) -> Result<Bytes, Refusal> {
    if request.body().size_hint().lower() > bytes_max {
        // Refused before any of the body is read.
        return Err(too_large(bytes_max));
    }
    let limit = usize::try_from(bytes_max).unwrap_or(usize::MAX);
    let mut arriving = Limited::new(request.body_mut(), limit);
    let reading = async {
        let mut whole = Vec::new();
        while let Some(frame) = within(limits::ADMIN_BODY_STALL, arriving.frame()).await? {
            let frame = frame.map_err(|error| match error.is::<LengthLimitError>() {
                true => too_large(bytes_max),
                false => bad(format!("the body could not be read: {error}")),
            })?;
            // Trailers are ignored.
            whole.extend_from_slice(&frame.into_data().unwrap_or_default());
        }
        Ok::<_, Refusal>(Bytes::from(whole))
    };
    within(limits::ADMIN_BODY_TIMEOUT, reading).await?
}

/// Waits for a body, or for more of it, within a limit.
async fn within<T>(limit: Duration, arriving: impl Future<Output = T>) -> Result<T, Refusal> {
    let arrived = tokio::time::timeout(limit, arriving).await;
    arrived.map_err(|_| {
        let error = "the body did not arrive in time";
        Refusal::new(StatusCode::REQUEST_TIMEOUT, error)
    })
}
