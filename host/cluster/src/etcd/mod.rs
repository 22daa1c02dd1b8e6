//! The engine on etcd 3.4 to 3.6, over gRPC.
//!
//! The calls go to one endpoint until it does not answer ([`Engine::next_endpoint`]). The leader of
//! the cluster prefers the server that leads etcd ([`Engine::prefer_leader`]). The client
//! never repeats a call, because only its caller knows whether a repetition is safe.
//!
//! A server of another etcd cluster at the address of an endpoint counts as one that was not
//! reached, see the module `cluster_id`.

mod check;
mod cluster_id;
mod connection;
mod login;
mod messages;
mod tls;
mod version;

use std::sync::atomic::{AtomicUsize, Ordering};

use tokio::sync::mpsc;
use tonic::Streaming;

use crate::check::Finding;
use crate::engine::{
    Call, Change, Condition, Engine, EngineError, KeyRange, Outcome, Page, Revision, Status,
    Transaction, Value, Watch,
};
use crate::limits;
pub use check::CheckError;
use cluster_id::{ClusterId, cluster_of};
use connection::{Server, failure, streaming, unary};
pub use login::Login;
use messages::{
    AlarmAction, AlarmRequest, AlarmResponse, AlarmType, CompactionRequest, CompactionResponse,
    Compare, CompareTarget, DeleteRangeRequest, Empty, Expected, KeyValue, MemberListResponse,
    PutRequest, RangeRequest, RangeResponse, Request, RequestOp, ResponseHeader, StatusResponse,
    TxnRequest, TxnResponse, WatchCreateRequest, WatchRequest, WatchResponse,
};
use tls::Renewal;
pub use tls::{ReadTls, Tls};

const RANGE: &str = "/etcdserverpb.KV/Range";
const TXN: &str = "/etcdserverpb.KV/Txn";
const COMPACT: &str = "/etcdserverpb.KV/Compact";
const WATCH: &str = "/etcdserverpb.Watch/Watch";
const STATUS: &str = "/etcdserverpb.Maintenance/Status";
const DEFRAGMENT: &str = "/etcdserverpb.Maintenance/Defragment";
const ALARM: &str = "/etcdserverpb.Maintenance/Alarm";
const MEMBERS: &str = "/etcdserverpb.Cluster/MemberList";

/// A cluster of etcd.
#[derive(Debug)]
pub struct Etcd {
    endpoints: Vec<Server>,
    /// The endpoint in use; counts on without end.
    current: AtomicUsize,
    /// The etcd cluster that the endpoints must belong to.
    cluster: ClusterId,
}

impl Etcd {
    /// Prepares connections to the endpoints, such as `https://etcd1:2379`. Must be called within a
    /// tokio runtime. Connects only when it is used. Fails if an endpoint or the TLS material is
    /// invalid, with a text for the operator.
    pub fn new(endpoints: &[String], tls: Option<&Tls>) -> Result<Self, String> {
        if endpoints.is_empty() {
            return Err("no etcd endpoint is configured".into());
        }
        let channels = endpoints
            .iter()
            .map(|url| Server::new(url, tls.filter(|_| uses_tls(url))));
        Ok(Self {
            endpoints: channels.collect::<Result<_, _>>()?,
            current: AtomicUsize::new(0),
            cluster: ClusterId::default(),
        })
    }

    /// Replaces the certificates `tls` of the endpoints by those that `read` returns. Reads them
    /// after a connection failed, for the next one.
    #[must_use]
    pub fn with_renewed_tls(self, tls: &Tls, read: &ReadTls) -> Self {
        for server in self.endpoints.iter().filter(|it| uses_tls(it.url())) {
            server.renew_with(Renewal::new(read.clone(), tls.clone()));
        }
        self
    }

    /// Sends each request as this user.
    #[must_use]
    pub fn with_login(mut self, login: Login) -> Self {
        for server in &mut self.endpoints {
            server.log_in(login.clone());
        }
        self
    }

    /// Uses the etcd cluster of `other`, and accepts no answer of another one.
    #[must_use]
    pub fn of_same_cluster(self, other: &Self) -> Self {
        let cluster = other.cluster.clone();
        Self { cluster, ..self }
    }

    async fn read(&self, request: RangeRequest) -> Result<RangeResponse, EngineError> {
        let server = self.server();
        let response: RangeResponse = unary(server, RANGE, request).await?;
        self.accept(server, response.header.as_ref())?;
        Ok(response)
    }

    /// Accepts an answer with this header, see [`ClusterId::accept`].
    fn accept(&self, server: &Server, header: Option<&ResponseHeader>) -> Result<(), EngineError> {
        self.cluster.accept(server, cluster_of(header))
    }

    fn server(&self) -> &Server {
        let current = self.current.load(Ordering::Relaxed);
        &self.endpoints[current % self.endpoints.len()]
    }

    /// Defragments a server that answers: one that is frozen must not delay the others.
    async fn defragment(&self, server: &Server) -> Result<(), EngineError> {
        let limit = limits::PROBE_TIMEOUT;
        let status = unary::<_, StatusResponse>(server, STATUS, Empty {});
        let late = |_| EngineError::NotApplied(format!("no answer within {limit:?}"));
        let status = tokio::time::timeout(limit, status).await.map_err(late)??;
        self.accept(server, status.header.as_ref())?;
        unary::<_, Empty>(server, DEFRAGMENT, Empty {})
            .await
            .map(drop)
    }

    /// Compacts, and waits for the end if `physical`.
    async fn compact_versions(&self, to: Revision, physical: bool) -> Result<(), EngineError> {
        let server = self.server();
        let request = CompactionRequest {
            revision: signed(to),
            physical,
        };
        match unary::<_, CompactionResponse>(server, COMPACT, request).await {
            Ok(response) => self.accept(server, response.header.as_ref()),
            // Another client compacted further.
            Err(EngineError::Compacted) => Ok(()),
            Err(error) => Err(error),
        }
    }
}

/// Whether the connection to an endpoint with this URL is encrypted.
fn uses_tls(url: &str) -> bool {
    url.starts_with("https:")
}

/// The id of the etcd cluster that a server belongs to, and the state. Takes one round trip,
/// because a caller may give up before a second one.
async fn read_member(server: &Server) -> Result<(u64, Status), EngineError> {
    let status = unary::<_, StatusResponse>(server, STATUS, Empty {});
    let list = unary::<_, MemberListResponse>(server, MEMBERS, Empty {});
    let (status, list) = tokio::try_join!(status, list)?;
    let cluster = cluster_of(status.header.as_ref());
    let status = Status {
        leads: leads(&status),
        version: status.version,
        voters: list.members.iter().filter(|it| !it.is_learner).count(),
        bytes: unsigned(status.db_size_in_use),
        file_bytes: unsigned(status.db_size),
        quota_bytes: Some(unsigned(status.db_size_quota)).filter(|&it| it > 0),
        alarms: status.errors,
    };
    Ok((cluster, status))
}

/// Whether the server that sent this leads the others.
fn leads(status: &StatusResponse) -> bool {
    let sender = status.header.as_ref().map(|it| it.member_id);
    sender == Some(status.leader)
}

/// etcd's counters are signed but never negative.
fn unsigned(number: i64) -> u64 {
    u64::try_from(number).unwrap_or(0)
}

fn signed(revision: Revision) -> i64 {
    i64::try_from(revision.0).unwrap_or(i64::MAX)
}

fn revision(header: Option<ResponseHeader>) -> Revision {
    Revision(header.map_or(0, |it| unsigned(it.revision)))
}

fn operation(request: Request) -> RequestOp {
    RequestOp {
        request: Some(request),
    }
}

/// A range request for one key.
fn one(key: &[u8]) -> RangeRequest {
    RangeRequest {
        key: key.to_vec(),
        ..RangeRequest::default()
    }
}

fn value(response: RangeResponse) -> Value {
    Value {
        revision: revision(response.header),
        value: response.kvs.into_iter().next().map(|it| it.value),
    }
}

fn request(transaction: &Transaction) -> TxnRequest {
    let compare = |target: CompareTarget, expected| Compare {
        target: target.into(),
        key: transaction.key.clone(),
        expected: Some(expected),
    };
    let deletes = transaction.deletes.iter().map(|range| {
        operation(Request::DeleteRange(DeleteRangeRequest {
            key: range.from.clone(),
            range_end: range.to.clone(),
        }))
    });
    let puts = transaction.puts.iter().map(|(key, value)| {
        operation(Request::Put(PutRequest {
            key: key.clone(),
            value: value.clone(),
        }))
    });
    TxnRequest {
        compare: match &transaction.condition {
            Condition::Value(value) => {
                vec![compare(
                    CompareTarget::Value,
                    Expected::Value(value.clone()),
                )]
            }
            // A comparison of values never holds for a key that does not exist.
            Condition::Absent => vec![compare(CompareTarget::Version, Expected::Version(0))],
            Condition::Always => Vec::new(),
        },
        success: deletes.chain(puts).collect(),
        failure: vec![operation(Request::Range(one(&transaction.key)))],
    }
}

impl Engine for Etcd {
    fn transact<'a>(&'a self, transaction: &'a Transaction) -> Call<'a, Outcome> {
        Box::pin(async move {
            let server = self.server();
            let response: TxnResponse = unary(server, TXN, request(transaction)).await?;
            self.accept(server, response.header.as_ref())?;
            let at = revision(response.header);
            if response.succeeded {
                return Ok(Outcome::Applied(at));
            }
            let range = response.responses.into_iter().next();
            let missing = || EngineError::Unknown("an answer without the compared key".into());
            let range = range.and_then(|it| it.range).ok_or_else(missing)?;
            Ok(Outcome::Failed(Value {
                revision: at,
                ..value(range)
            }))
        })
    }

    fn get<'a>(&'a self, key: &'a [u8]) -> Call<'a, Value> {
        Box::pin(async move { Ok(value(self.read(one(key)).await?)) })
    }

    fn range<'a>(
        &'a self,
        range: &'a KeyRange,
        at: Option<Revision>,
        values_max: usize,
    ) -> Call<'a, Page> {
        let request = RangeRequest {
            key: range.from.clone(),
            range_end: range.to.clone(),
            limit: values_max as i64,
            revision: at.map_or(0, signed),
        };
        Box::pin(async move {
            let response = self.read(request).await?;
            let pair = |it: KeyValue| (it.key, it.value);
            Ok(Page {
                values: response.kvs.into_iter().map(pair).collect(),
                more: response.more,
            })
        })
    }

    fn watch<'a>(&'a self, range: &'a KeyRange, from: Revision) -> Call<'a, Watch> {
        let create = WatchRequest {
            create: Some(WatchCreateRequest {
                key: range.from.clone(),
                range_end: range.to.clone(),
                start_revision: signed(from),
                fragment: true,
            }),
        };
        let server = self.server();
        Box::pin(async move {
            let mut responses: Streaming<WatchResponse> = streaming(server, WATCH, create).await?;
            // The first response says whether the watch exists.
            let (sender, receiver) = mpsc::channel(limits::WATCH_EVENTS_MAX);
            let first = next(&mut responses).await;
            if first.is_err() {
                // etcd also ends a watch whose login it has forgotten.
                server.expire_login();
            }
            let first = first?;
            // The responses that follow come from the same server.
            self.accept(server, first.header.as_ref())?;
            if !first.created {
                return Err(EngineError::Unknown("a watch was not created".into()));
            }
            tokio::spawn(async move {
                let closed = sender.clone();
                tokio::select! {
                    () = closed.closed() => {}
                    () = forward(responses, sender) => {}
                }
            });
            Ok(receiver)
        })
    }

    fn compact(&self, to: Revision) -> Call<'_, ()> {
        Box::pin(self.compact_versions(to, false))
    }

    fn status(&self) -> Call<'_, Status> {
        Box::pin(async move {
            let server = self.server();
            let (cluster, status) = read_member(server).await?;
            self.cluster.accept(server, cluster)?;
            Ok(status)
        })
    }

    fn shrink(&self, to: Revision) -> Call<'_, ()> {
        Box::pin(async move {
            let compacted = self.compact_versions(to, true).await;
            let mut defragmented = Err(EngineError::NotApplied("no server answers".into()));
            for server in &self.endpoints {
                // A server that does not answer is large when it returns. It then arms the alarm
                // again, and is defragmented.
                match self.defragment(server).await {
                    Ok(()) => defragmented = Ok(()),
                    Err(error) => {
                        let url = server.url();
                        tracing::warn!("etcd at {url} was not defragmented: {error}");
                        defragmented = defragmented.or(Err(error));
                    }
                }
            }
            defragmented.and(compacted)
        })
    }

    fn disarm(&self) -> Call<'_, ()> {
        let request = |action: AlarmAction, member, alarm: AlarmType| AlarmRequest {
            action: action.into(),
            member,
            alarm: alarm.into(),
        };
        Box::pin(async move {
            let server = self.server();
            let all = request(AlarmAction::Get, 0, AlarmType::None);
            let response: AlarmResponse = unary(server, ALARM, all).await?;
            for alarm in response.alarms {
                if alarm.alarm == i32::from(AlarmType::NoSpace) {
                    let off = request(AlarmAction::Deactivate, alarm.member, AlarmType::NoSpace);
                    unary::<_, AlarmResponse>(server, ALARM, off).await?;
                }
            }
            Ok(())
        })
    }

    fn examine(&self) -> Call<'_, Vec<Finding>> {
        Box::pin(async move { Ok(self.examine_servers().await) })
    }

    fn next_endpoint(&self) {
        self.current.fetch_add(1, Ordering::Relaxed);
    }

    fn servers(&self) -> usize {
        self.endpoints.len()
    }

    fn prefer_leader(&self) -> Call<'_, ()> {
        Box::pin(async move {
            for (number, server) in self.endpoints.iter().enumerate() {
                let status = unary::<_, StatusResponse>(server, STATUS, Empty {});
                let status = tokio::time::timeout(limits::PROBE_TIMEOUT, status).await;
                // A server that forms an etcd cluster alone leads it.
                if let Ok(Ok(status)) = status
                    && leads(&status)
                    && self.accept(server, status.header.as_ref()).is_ok()
                {
                    self.current.store(number, Ordering::Relaxed);
                    break;
                }
            }
            Ok(())
        })
    }
}

/// The next response of a watch that is not its end.
async fn next(responses: &mut Streaming<WatchResponse>) -> Result<WatchResponse, EngineError> {
    let response = responses.message().await.map_err(failure)?;
    let ended = || EngineError::Unknown("the server ended the watch".into());
    let response = response.ok_or_else(ended)?;
    if response.compact_revision > 0 {
        return Err(EngineError::Compacted);
    }
    if response.canceled {
        return Err(EngineError::Unknown(response.cancel_reason));
    }
    Ok(response)
}

/// Forwards the changes of a watch until an error.
async fn forward(
    mut responses: Streaming<WatchResponse>,
    sender: mpsc::Sender<Result<Change, EngineError>>,
) {
    loop {
        let events = match next(&mut responses).await {
            Ok(response) => response.events,
            Err(error) => {
                // The receiver may have been dropped.
                let _ = sender.send(Err(error)).await;
                return;
            }
        };
        for event in events {
            let Some(kv) = event.kv else { continue };
            let change = Change {
                key: kv.key,
                value: (event.kind == 0).then_some(kv.value),
            };
            if sender.send(Ok(change)).await.is_err() {
                return;
            }
        }
    }
}
