//! Which servers can be used: at the start of a host, and for an operator who checks them.

use std::sync::atomic::Ordering;

use bytes::Bytes;
use tokio::task::JoinSet;
use tokio::time::{Instant, timeout_at};

use super::connection::{Server, unary};
use super::login;
use super::messages::{Compare, CompareTarget, Expected, Request, TxnRequest, TxnResponse};
use super::version::{Verdict, check_version, judge};
use super::{Etcd, TXN, one, operation, read_member};
use crate::check::{Finding, Severity};
use crate::engine::{EngineError, Status};

/// What to do about a version with faults.
const UPDATE: &str = "use etcd 3.5.30 or later";

impl Etcd {
    /// Checks every endpoint that answers: its version, whether it is etcd, and whether it belongs
    /// to the same etcd cluster as the others. Returns the state of the last one. Fails if an
    /// endpoint must not be used, or none serves this client. One that does not answer, refuses its
    /// requests or is lost during the check is no error as long as another one serves it. It is not
    /// compared with the others. The following calls then go to one that serves this client, and
    /// fail at servers of another etcd cluster. Fails with [`CheckError::Unusable`] if an earlier
    /// call was answered by another etcd cluster.
    pub async fn check(&self) -> Result<Status, CheckError> {
        let mut answer = Err(CheckError::NoAnswer("there is none".to_owned()));
        let (mut clusters, mut serving, mut others) = (Vec::new(), Vec::new(), Vec::new());
        let mut doubts = Vec::new();
        for (number, found) in self.check_servers().await.into_iter().enumerate() {
            let url = self.endpoints[number].url();
            match found {
                Ok((cluster, status)) => {
                    clusters.push((url, cluster));
                    serving.push(number);
                    note_doubt(&mut doubts, &status.version);
                    answer = Ok(status);
                }
                Err(error @ CheckError::Unusable(_)) => return Err(error),
                Err(error) => {
                    others.push((url, error.reason().to_owned()));
                    // A refusal says more than no answer.
                    if matches!(answer, Err(CheckError::NoAnswer(_))) {
                        answer = Err(error);
                    }
                }
            }
        }
        check_clusters(&clusters).map_err(CheckError::Unusable)?;
        if let Some((url, cluster)) = clusters.first() {
            self.check_known(url, *cluster)?;
        }
        // A host repeats this call until it succeeds, so only then anything is logged.
        if let Ok(status) = &answer {
            for reason in doubts {
                tracing::warn!("{reason}");
            }
            for (url, reason) in others {
                tracing::warn!("etcd at {url} does not serve this host: {reason}");
            }
            self.use_one_of(&serving);
            if status.voters < 3 {
                tracing::warn!(
                    "the number of voters of etcd is {}: with fewer than 3 the loss of one machine stops the cluster",
                    status.voters
                );
            }
        }
        answer
    }

    /// Checks all endpoints at the same time, and returns what it found in their order. Those that
    /// do not answer within [`Server::answer_limit`] after another one are skipped: a server whose
    /// process is frozen answers nothing until the connection is given up. Without an answer of
    /// another one, an endpoint has the time that a login takes.
    async fn check_servers(&self) -> Vec<Result<(u64, Status), CheckError>> {
        let limit = self.server().answer_limit();
        let late = || Err(CheckError::NoAnswer(format!("no answer within {limit:?}")));
        let mut found: Vec<_> = self.endpoints.iter().map(|_| late()).collect();
        let mut checks = JoinSet::new();
        for (number, server) in self.endpoints.iter().cloned().enumerate() {
            checks.spawn(async move { (number, check_server(&server).await) });
        }
        let mut end: Option<Instant> = None;
        loop {
            let next = checks.join_next();
            let joined = match end {
                None => next.await,
                Some(end) => timeout_at(end, next).await.unwrap_or(None),
            };
            let Some(joined) = joined else {
                return found;
            };
            // A check that panicked found nothing.
            let Ok((number, result)) = joined else {
                continue;
            };
            if matches!(result, Ok(_) | Err(CheckError::Unusable(_))) {
                end.get_or_insert(Instant::now() + limit);
            }
            found[number] = result;
        }
    }

    /// Whether this etcd cluster is the one that this client knows, if it knows one.
    fn check_known(&self, url: &str, cluster: u64) -> Result<(), CheckError> {
        let known = self.cluster.known_or(cluster);
        if cluster == 0 || cluster == known {
            return Ok(());
        }
        Err(CheckError::Unusable(format!(
            "the etcd server {url} belongs to another etcd cluster ({cluster:x}) than a server that answered before ({known:x}): name the servers of one of them"
        )))
    }

    /// Sends the following calls to one of these endpoints.
    fn use_one_of(&self, serving: &[usize]) {
        let current = self.current.load(Ordering::Relaxed) % self.endpoints.len();
        if let Some(first) = serving.first()
            && !serving.contains(&current)
        {
            self.current.store(*first, Ordering::Relaxed);
        }
    }

    /// Examines every endpoint, for an operator.
    pub(super) async fn examine_servers(&self) -> Vec<Finding> {
        let (mut findings, mut clusters) = (Vec::new(), Vec::new());
        for server in &self.endpoints {
            let (cluster, finding) = examine(server).await;
            clusters.extend(cluster.map(|it| (server.url(), it)));
            findings.push(finding);
        }
        if let Err(measured) = check_clusters(&clusters) {
            findings.push(Finding::new(Severity::Failure, measured, ""));
        }
        findings
    }
}

/// Why [`Etcd::check`] failed.
#[derive(Debug, thiserror::Error)]
pub enum CheckError {
    /// No endpoint answers at present.
    #[error("no etcd endpoint answers: {0}")]
    NoAnswer(String),
    /// An endpoint refuses the requests of this client, and no other one serves it.
    #[error("{0}")]
    Refused(String),
    /// An endpoint must not be used.
    #[error("{0}")]
    Unusable(String),
}

impl CheckError {
    /// What happened at the endpoint.
    fn reason(&self) -> &str {
        match self {
            Self::NoAnswer(reason) | Self::Refused(reason) | Self::Unusable(reason) => reason,
        }
    }
}

impl From<EngineError> for CheckError {
    fn from(error: EngineError) -> Self {
        match error {
            EngineError::NotApplied(_) | EngineError::Unknown(_) => {
                Self::NoAnswer(error.to_string())
            }
            EngineError::Refused(refusal) if is_of_one_server(&refusal) => Self::Refused(refusal),
            _ => Self::Unusable(error.to_string()),
        }
    }
}

/// Whether another server may serve this client: one that joins etcd refuses requests as a learner,
/// and one that is behind does not know the newest users.
fn is_of_one_server(refusal: &str) -> bool {
    login::is_refused(refusal) || refusal.contains("learner")
}

/// Checks one endpoint. Returns the id of its etcd cluster, and the state.
async fn check_server(server: &Server) -> Result<(u64, Status), CheckError> {
    let (cluster, status) = read_member(server).await?;
    check_version(&status.version).map_err(CheckError::Unusable)?;
    probe(server).await?;
    Ok((cluster, status))
}

/// Adds what is doubtful about a version, once for all servers that have it.
fn note_doubt(doubts: &mut Vec<String>, version: &str) {
    if let Verdict::Doubtful(reason) = judge(version)
        && !doubts.contains(&reason)
    {
        doubts.push(reason);
    }
}

/// Whether all servers belong to one etcd cluster. Otherwise a host could write a part of its keys
/// to another etcd than the other hosts.
fn check_clusters(servers: &[(&str, u64)]) -> Result<(), String> {
    let Some(((url, cluster), others)) = servers.split_first() else {
        return Ok(());
    };
    match others.iter().find(|it| it.1 != *cluster) {
        None => Ok(()),
        Some((other, _)) => Err(format!(
            "the etcd servers {url} and {other} belong to different etcd clusters: name the servers of one of them"
        )),
    }
}

/// Sends a transaction that kine cannot execute and that changes nothing. kine offers a part of
/// etcd's API on other databases, and does not compare values.
async fn probe(server: &Server) -> Result<(), CheckError> {
    let key = b"/statehouse/probe".to_vec();
    let compare = |target: CompareTarget, expected| Compare {
        target: target.into(),
        key: key.clone(),
        expected: Some(expected),
    };
    let nested = TxnRequest {
        success: vec![operation(Request::Range(one(&key)))],
        ..TxnRequest::default()
    };
    let transaction = TxnRequest {
        compare: vec![
            compare(CompareTarget::Version, Expected::Version(-1)),
            compare(CompareTarget::Value, Expected::Value(Bytes::new())),
        ],
        success: Vec::new(),
        failure: vec![operation(Request::Txn(nested))],
    };
    match unary::<_, TxnResponse>(server, TXN, transaction).await {
        Ok(response) if !response.succeeded => Ok(()),
        Ok(_) => Err(CheckError::Unusable(
            "an endpoint compares values wrongly: it is not etcd".into(),
        )),
        Err(EngineError::Refused(error)) if is_of_one_server(&error) => {
            Err(CheckError::Refused(error))
        }
        // kine gives its refusals the code of an unknown error.
        Err(EngineError::Unknown(error)) if !error.contains("unsupported") => {
            Err(CheckError::NoAnswer(error))
        }
        Err(EngineError::Refused(error) | EngineError::Unknown(error)) => {
            Err(CheckError::Unusable(format!(
                "an endpoint does not execute transactions as etcd does ({error}): kine and other substitutes cannot be used"
            )))
        }
        Err(error) => Err(error.into()),
    }
}

/// Examines one endpoint. Also returns the id of its etcd cluster, if it answers.
async fn examine(server: &Server) -> (Option<u64>, Finding) {
    let subject = format!("etcd at {}", server.url());
    let limit = server.answer_limit();
    let late = || format!("no answer within {limit:?}");
    let warning = |measured, advice| Finding::new(Severity::Warning, measured, advice);
    let refused = |reason: &str| {
        let measured = format!("{subject} refuses this client: {reason}");
        Finding::new(Severity::Failure, measured, "")
    };
    let (cluster, status) = match tokio::time::timeout(limit, read_member(server)).await {
        Ok(Ok(member)) => member,
        // The refusal says what to do.
        Ok(Err(EngineError::Refused(reason))) => return (None, refused(&reason)),
        failed => {
            let reason = match failed {
                Ok(Err(error)) => error.to_string(),
                _ => late(),
            };
            let measured = format!("{subject} does not answer: {reason}");
            return (None, warning(measured, "start it, or correct the address"));
        }
    };
    let probed = tokio::time::timeout(limit, probe(server)).await;
    let version = match probed.unwrap_or_else(|_| Err(CheckError::NoAnswer(late()))) {
        Ok(()) => judge(&status.version),
        Err(CheckError::NoAnswer(reason)) => {
            let measured = format!("{subject} executes no request: {reason}");
            let advice = "start the other servers of etcd: it needs more than half of them";
            return (Some(cluster), warning(measured, advice));
        }
        Err(CheckError::Refused(reason)) => return (Some(cluster), refused(&reason)),
        Err(CheckError::Unusable(reason)) => Verdict::Unusable(reason),
    };
    let (severity, advice, reason) = match version {
        Verdict::Good => (Severity::Good, "", String::new()),
        Verdict::Doubtful(reason) => (Severity::Warning, UPDATE, reason),
        Verdict::Unusable(reason) => (Severity::Failure, UPDATE, reason),
    };
    let measured = match reason.as_str() {
        "" => format!("{subject} has version {}", status.version),
        reason => format!("{subject}: {reason}"),
    };
    (Some(cluster), Finding::new(severity, measured, advice))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn servers_of_one_doubtful_version_get_one_warning() {
        let mut doubts = Vec::new();
        for version in ["3.5.13", "3.5.30", "3.5.13", "3.4.23"] {
            note_doubt(&mut doubts, version);
        }
        assert_eq!(doubts.len(), 2, "{doubts:?}");
        assert!(doubts[0].contains("3.5.13"), "{doubts:?}");
    }

    #[test]
    fn only_a_refusal_of_this_client_leaves_a_server_usable() {
        let refused = |text: &str| CheckError::from(EngineError::Refused(text.into()));
        for text in [
            "etcdserver: rpc not supported for learner",
            "etcdserver: permission denied",
            "etcd does not let the user root log in (authentication failed)",
        ] {
            assert!(matches!(refused(text), CheckError::Refused(it) if it == text));
        }
        // A substitute must not be used beside etcd.
        let substitute = refused("unknown service etcdserverpb.Cluster");
        assert!(matches!(substitute, CheckError::Unusable(_)));
    }
}
