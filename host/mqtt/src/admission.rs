//! Admission of clients: authenticates a CONNECT, and the AUTH packets of a connected client.
//!
//! Gets the packet and what the listener knows of the stream; returns a connection that the core
//! knows, or a refusal. Waits for the access control without a lock and for a bounded time.

use std::{
    future::pending,
    sync::Arc,
    time::{Instant, SystemTime},
};

use tokio::{
    sync::watch,
    time::{sleep_until, timeout, timeout_at},
};

use crate::{
    Attempt, Broker, Claim, Door, Origin, ReasonCode, Refusal, Refused, Service, Verdict,
    codec::{Auth, Connect, Violation},
    core::{Accepted, ConnectRefusal},
    limits::EXPIRY_CHECK_INTERVAL,
    output::Output,
    router::SessionKey,
    topic,
};

/// Refusals that the access control did not decide.
const BUSY: &str = "too many clients are connecting: retry in a second";
const LATE: &str = "this client was not authenticated in time: retry later";
/// The end of a connection whose client did not renew its credentials.
pub(crate) const EXPIRED: &str =
    "the credentials of this client have expired: authenticate again in time";
const OTHER_IDENTITY: &str = "the re-authenticated identity differs from that of CONNECT";
/// The refusals of credentials that the access control did not decide.
pub(crate) const OF_CREDENTIALS: [&str; 4] = [BUSY, LATE, EXPIRED, OTHER_IDENTITY];
const NO_LEASE: &str =
    "this host does not lead, or cannot reach the log of its cluster: connect again";

/// The credentials of a connection that expire, or that the client may renew by AUTH.
pub(crate) struct Credentials {
    method: Option<Box<str>>,
    door: Door,
    expires: watch::Sender<Option<Instant>>,
}

impl Credentials {
    /// Waits until the credentials expire.
    pub(crate) async fn expired(&self) {
        let mut expires = self.expires.subscribe();
        loop {
            let at = *expires.borrow_and_update();
            let expired = async {
                match at {
                    Some(at) => reached(at, SystemTime::now).await,
                    None => pending().await,
                }
            };
            tokio::select! {
                () = expired => return,
                // `changed` never fails, since `self` owns the sender.
                _ = expires.changed() => {}
            }
        }
    }
}

/// Waits until a time, also by the wall clock, which tells when credentials expire: the other one
/// stands still while the machine is suspended, and the wall clock may have been behind.
async fn reached(at: Instant, wall: impl Fn() -> SystemTime) {
    let left = at.saturating_duration_since(Instant::now());
    let end = wall().checked_add(left);
    loop {
        let now = Instant::now();
        if now >= at || end.is_some_and(|end| wall() >= end) {
            return;
        }
        sleep_until(at.min(now + EXPIRY_CHECK_INTERVAL).into()).await;
    }
}

/// Authenticates the client and then registers the connection in the core.
pub(crate) async fn accept(
    broker: &Broker,
    mut connect: Connect,
    door: Door,
    deadline: tokio::time::Instant,
    output: &Arc<Output>,
) -> Result<(Accepted, Option<Credentials>), ConnectRefusal> {
    let limits = broker.limits();
    let attempt = Attempt {
        client: connect.client_id.clone(),
        user: connect.user.take(),
        password: connect.password.take(),
        enhanced: connect.enhanced.clone(),
        door: door.clone(),
    };
    let (client, user) = (attempt.client.clone(), attempt.user.clone());
    let refuse = |reason, text| {
        broker.refusal_log().report(&Refusal {
            client: &client,
            user: user.as_deref(),
            ..Refusal::of_connect(reason, text, door.peer)
        });
        Err((reason, text))
    };
    if client.len() > limits.client_id_bytes_max {
        let text = "the client identifier is too long";
        return refuse(ReasonCode::CLIENT_IDENTIFIER_NOT_VALID, text);
    }
    if let Some(will) = &connect.will {
        let topic = &will.message.topic;
        if let Err(text) = check_will(&**broker.service(), topic, limits.topic_levels_max) {
            return refuse(ReasonCode::TOPIC_NAME_INVALID, text);
        }
    }
    let admission = match timeout_at(deadline, broker.admit(attempt)).await {
        Ok(Some(Verdict::Admit(admission))) => admission,
        Ok(Some(Verdict::Refuse(reason, text))) => {
            broker.refusal_log().count(Refused::Connect, reason);
            return Err((reason, text));
        }
        Ok(None) => return refuse(ReasonCode::SERVER_BUSY, BUSY),
        Err(_) => return refuse(ReasonCode::SERVER_BUSY, LATE),
    };
    let method = connect.enhanced.as_ref().map(|it| it.method.clone());
    if !broker.may_decide().await {
        return refuse(ReasonCode::SERVER_UNAVAILABLE, NO_LEASE);
    }
    let mut core = broker.lock();
    let now = Instant::now();
    let accepted = core.connect(connect, admission.identity, door.peer, output, now)?;
    let expires = admission.expires;
    let credentials = (method.is_some() || expires.is_some()).then(|| Credentials {
        method,
        door,
        expires: watch::Sender::new(expires),
    });
    Ok((accepted, credentials))
}

/// Checks a will's topic. A will cannot be a request or an order, since it has no client left to
/// answer.
fn check_will(
    service: &dyn Service,
    name: &[u8],
    topic_levels_max: usize,
) -> Result<(), &'static str> {
    if topic::level_count(name) > topic_levels_max {
        return Err("the topic of the will has too many levels");
    }
    match service.claim(name) {
        Claim::Route => Ok(()),
        Claim::Take => Err("a will may not be a request or an order"),
        Claim::Refuse(_, text) => Err(text),
    }
}

/// Re-authenticates a connected client (section 4.12.1). The identity must stay the same, since
/// other clients know this client by it.
pub(crate) async fn renew(
    broker: &Broker,
    session: SessionKey,
    origin: &Origin,
    auth: Option<Auth>,
    credentials: Option<&Credentials>,
) -> Result<(), Violation> {
    let Some((credentials, method)) = credentials.and_then(|it| Some((it, it.method.as_deref()?)))
    else {
        return Err(Violation::protocol(
            "AUTH without an authentication method in CONNECT",
        ));
    };
    let auth = auth.filter(|auth| auth.reason == ReasonCode::REAUTHENTICATE);
    let enhanced = auth
        .and_then(|auth| auth.enhanced)
        .filter(|enhanced| *enhanced.method == *method)
        .ok_or(Violation::protocol(
            "AUTH must re-authenticate by the authentication method of CONNECT",
        ))?;
    let attempt = Attempt {
        client: (*origin.client).into(),
        user: None,
        password: None,
        enhanced: Some(enhanced),
        door: credentials.door.clone(),
    };
    let verdict = timeout(broker.limits().connect_timeout, broker.admit(attempt)).await;
    let (reason, text) = match verdict {
        Ok(Some(Verdict::Admit(admission))) if admission.identity == origin.identity => {
            credentials.expires.send_replace(admission.expires);
            let mut core = broker.lock();
            core.authenticated(session, origin.connection, admission.identity, method);
            return Ok(());
        }
        Ok(Some(Verdict::Admit(_))) => (ReasonCode::NOT_AUTHORIZED, OTHER_IDENTITY),
        // DISCONNECT has only these of CONNACK's codes.
        Ok(Some(Verdict::Refuse(
            reason @ (ReasonCode::SERVER_BUSY | ReasonCode::CONNECTION_RATE_EXCEEDED),
            text,
        ))) => (reason, text),
        Ok(Some(Verdict::Refuse(_, text))) => (ReasonCode::NOT_AUTHORIZED, text),
        Ok(None) => (ReasonCode::SERVER_BUSY, BUSY),
        Err(_) => (ReasonCode::SERVER_BUSY, LATE),
    };
    Err(Violation { reason, text })
}

#[cfg(test)]
mod tests {
    use std::{cell::Cell, time::Duration};

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn credentials_expire_by_the_wall_clock_too() {
        let (begin, steps) = (SystemTime::now(), Cell::new(0));
        // As after a suspension of two minutes.
        let wall = || {
            steps.set(steps.get() + 1);
            begin + Duration::from_secs(if steps.get() > 2 { 120 } else { 0 })
        };
        let waited = tokio::time::Instant::now();
        reached(Instant::now() + Duration::from_secs(100), wall).await;
        assert!(waited.elapsed() < Duration::from_secs(60));
        reached(Instant::now(), SystemTime::now).await;
    }
}
