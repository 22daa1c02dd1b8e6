//! The state that callers and the connection share: pending requests, watches and the clock.
//!
//! Invariant: no code may wait while it holds the lock of this state, because all callers and the
//! connection need it.

mod registrations;

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use bytes::Bytes;
use data_encoding::HEXUPPER;
use rumqttc::v5::mqttbytes::QoS;
use rumqttc::v5::mqttbytes::v5::{
    Filter, PubAck, PubAckReason, Publish, PublishProperties, SubscribeReasonCode,
};
use statehouse_link::{
    Accepted, Arrival, End, Outlet, Owner, Verdict, describe_reason, describe_suback, random,
    reason_name,
};
use tokio::sync::{Notify, Semaphore, oneshot};
use tokio::time::{Instant, timeout_at};

use crate::clock::Clock;
use crate::duration::later;
use crate::error::{Error, NO_STORE};
use crate::limits;
use crate::request::{Answer, Request, expiry_s};
use crate::resp::printable;
use crate::topics;
use crate::version::Version;
use crate::watch::{self, GapCause, Watched};
use crate::watches::Watches;

pub(crate) use registrations::Registration;

/// A client's session with the store. It survives the loss of connections.
#[derive(Debug)]
pub(crate) struct Session {
    pub(crate) names: Names,
    /// `host:port`, for messages.
    pub(crate) address: String,
    pub(crate) timeout: Duration,
    /// The pause between two questions how far the store is.
    watch_refresh: Duration,
    /// Notified when the client is closed or dropped.
    pub(crate) stopping: Notify,
    /// The first half of all correlation data. It differs between processes with the same client
    /// id.
    nonce: u64,
    permits: Semaphore,
    /// Of watches that are registered after a reconnect.
    registrations: Semaphore,
    state: Mutex<State>,
}

/// The client id and the topics derived from it.
#[derive(Debug)]
pub(crate) struct Names {
    pub(crate) client_id: String,
    pub(crate) response_topic: String,
    pub(crate) notify_prefix: String,
}

impl Names {
    /// Length of the longest key whose notifications fit a topic.
    pub(crate) fn watched_key_bytes_max(&self) -> usize {
        limits::TOPIC_BYTES_MAX.saturating_sub(self.notify_prefix.len()) / 2
    }
}

#[derive(Debug)]
pub(crate) struct State {
    connection: Connection,
    outlet: Outlet<Request>,
    clock: Clock,
    watches: Watches,
    /// Keys and prefixes whose STOP is not sent yet, because rumqttc had no room for it. Empty
    /// without a connection.
    unsent_stops: BTreeSet<Watched>,
    /// Counts connections, so that tasks for an earlier one can stop.
    epoch: u64,
    /// Notified when the next connection begins or the client is closed. Each connection has its
    /// own.
    over: Arc<Notify>,
    /// The reason why there are no notifications, if the broker did not grant the subscription.
    pub(crate) notifications_refused: Option<String>,
    /// Receives the outcome of the first connection.
    ready: Option<oneshot::Sender<Result<(), Error>>>,
}

#[derive(Debug)]
enum Connection {
    /// Further attempts follow.
    Down(Error),
    Up,
    Closed(Error),
}

impl Session {
    pub(crate) fn new(
        client_id: String,
        address: String,
        (timeout, watch_refresh): (Duration, Duration),
        ready: oneshot::Sender<Result<(), Error>>,
    ) -> Self {
        let clock = Clock::new(&client_id);
        let connection = Connection::Down(unanswered(&address, timeout));
        Self {
            names: Names {
                response_topic: topics::response(&client_id),
                notify_prefix: topics::notify_prefix(&client_id),
                client_id,
            },
            address,
            timeout,
            watch_refresh,
            stopping: Notify::new(),
            nonce: random(),
            permits: Semaphore::new(limits::REQUESTS_MAX),
            registrations: Semaphore::new(limits::WATCH_REGISTRATIONS_MAX),
            state: Mutex::new(State {
                connection,
                outlet: Outlet::default(),
                clock,
                watches: Watches::default(),
                unsent_stops: BTreeSet::new(),
                epoch: 0,
                over: Arc::default(),
                notifications_refused: None,
                ready: Some(ready),
            }),
        }
    }

    pub(crate) fn state(&self) -> MutexGuard<'_, State> {
        // No code panics while it holds this lock. If it did, continuing with the intact requests
        // would be better than failing all of them.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sends a request and waits for its response, its rejection or its timeout.
    pub(crate) async fn request(
        &self,
        payload: Bytes,
        fence: Option<&Version>,
        traceparent: Option<&str>,
    ) -> Result<Answer, Error> {
        let deadline = later(Instant::now(), self.timeout);
        let waiting = async {
            // The semaphore is never closed.
            let _permit = self.permits.acquire().await;
            let (done, answer) = oneshot::channel();
            let _pending = self.submit(payload, (fence, traceparent), deadline, done)?;
            // The sender was dropped without a response because the connection task ended.
            answer.await.unwrap_or_else(|_| Err(self.no_response()))
        };
        timeout_at(deadline, waiting)
            .await
            .unwrap_or_else(|_| Err(self.no_response()))
    }

    fn submit(
        &self,
        payload: Bytes,
        (fence, traceparent): (Option<&Version>, Option<&str>),
        deadline: Instant,
        done: oneshot::Sender<Result<Answer, Error>>,
    ) -> Result<PendingRequest<'_>, Error> {
        let fence = fence.map(fence_text).transpose()?;
        let mut state = self.state();
        if let Connection::Closed(error) = &state.connection {
            return Err(error.clone());
        }
        let timestamp = state.clock.read(now_ms());
        let number = state.outlet.add(None, |number| {
            let mut properties = self.properties(number, timestamp);
            if let Some(fence) = fence {
                properties.user_properties.push(("__ft".into(), fence));
            }
            if let Some(traceparent) = traceparent {
                let traceparent = ("traceparent".into(), traceparent.into());
                properties.user_properties.push(traceparent);
            }
            Request {
                publish: publish(payload, properties),
                deadline,
                done,
            }
        });
        state.outlet.flush();
        Ok(PendingRequest {
            session: self,
            number,
        })
    }

    fn no_response(&self) -> Error {
        self.disconnected().unwrap_or(Error::Timeout(self.timeout))
    }

    pub(crate) fn disconnected(&self) -> Option<Error> {
        match &self.state().connection {
            Connection::Down(error) | Connection::Closed(error) => Some(error.clone()),
            Connection::Up => None,
        }
    }

    /// Why there was no first connection in time: the end of the last attempt, if one has ended.
    pub(crate) fn not_in_time(&self) -> Error {
        let last = self.disconnected();
        last.unwrap_or_else(|| unanswered(&self.address, self.timeout))
    }

    /// Notes why there is no connection. Returns whether further attempts follow. If no connection
    /// was established yet, `connect` fails with the error `first`, and its caller decides whether
    /// to retry.
    fn down(&self, first: Error, error: fn(String) -> Error, why: &str) -> bool {
        let is_first = self.state().ready.is_some();
        if is_first {
            self.close(first);
            return false;
        }
        let mut state = self.state();
        // Registrations end with their connection (section 8).
        state.unsent_stops.clear();
        if !matches!(state.connection, Connection::Closed(_)) {
            let why = format!("the connection to {} is lost: {why}", self.address);
            state.connection = Connection::Down(error(why));
        }
        true
    }

    fn properties(&self, number: u64, timestamp: String) -> PublishProperties {
        let mut correlation = [0; 16];
        correlation[..8].copy_from_slice(&self.nonce.to_be_bytes());
        correlation[8..].copy_from_slice(&number.to_be_bytes());
        PublishProperties {
            message_expiry_interval: Some(expiry_s(self.timeout)),
            response_topic: Some(self.names.response_topic.clone()),
            correlation_data: Some(Bytes::copy_from_slice(&correlation)),
            user_properties: vec![
                ("__protVer".into(), "1.0".into()),
                ("__ts".into(), timestamp),
                ("__srcId".into(), self.names.client_id.clone()),
            ],
            ..PublishProperties::default()
        }
    }

    /// Handles a message. Anything except a response or a notification is ignored.
    fn message(&self, publish: &Publish) {
        if publish.topic == self.names.response_topic.as_bytes() {
            self.answer(publish);
        } else if let Some(hex) = publish
            .topic
            .strip_prefix(self.names.notify_prefix.as_bytes())
            && let Ok(key) = HEXUPPER.decode(hex)
        {
            self.notification(&key, publish);
        }
    }

    fn answer(&self, publish: &Publish) {
        let properties = publish.properties.as_ref();
        let number = properties
            .and_then(|properties| properties.correlation_data.as_ref())
            .and_then(|data| data.strip_prefix(&self.nonce.to_be_bytes()))
            .and_then(|number| Some(u64::from_be_bytes(number.try_into().ok()?)));
        let Some(number) = number else { return };
        let mut state = self.state();
        // The request timed out, or this is the response to a STOP.
        let Some(request) = state.outlet.remove(number) else {
            return;
        };
        let version = version(properties).and_then(|it| status(properties).map(|()| it));
        if let Ok(Some(version)) = &version {
            state.clock.observe(version, now_ms());
        }
        drop(state);
        request.finish(version.map(|version| Answer {
            payload: publish.payload.clone(),
            version,
        }));
    }

    fn notification(&self, key: &[u8], publish: &Publish) {
        let mut state = self.state();
        if state.watches.of(key).next().is_none() {
            return;
        }
        let event = match version(publish.properties.as_ref()) {
            Ok(Some(version)) => {
                state.clock.observe(&version, now_ms());
                watch::event(key, &publish.payload, version)
                    .map_err(|bad| Error::Protocol(bad.0.into()))
            }
            Ok(None) => Err(Error::Protocol("a notification without __ts".into())),
            Err(error) => Err(error),
        };
        for inbox in state.watches.of(key) {
            match &event {
                Ok(event) => inbox.change(event.clone(), publish.dup),
                Err(_) => inbox.notice(event.clone()),
            }
        }
    }

    /// A reason code of 0x80 or above fails the request. Otherwise the response will follow.
    fn acknowledged(&self, number: u64, ack: &PubAck) {
        let reason = match ack.reason {
            PubAckReason::Success => return,
            // The message was not delivered, and it will not be resent because it is acknowledged.
            PubAckReason::NoMatchingSubscribers => NO_STORE.to_owned(),
            other => {
                let properties = ack.properties.as_ref();
                let text = properties.and_then(|p| p.reason_string.as_ref());
                text.map_or_else(|| reason_name(&other), |it| printable(it.as_bytes()))
            }
        };
        let error = match ack.reason {
            PubAckReason::QuotaExceeded => Error::QuotaExceeded(reason),
            _ => Error::Rejected(reason),
        };
        if let Some(request) = self.state().outlet.remove(number) {
            request.finish(Err(error));
        }
    }

    /// Fails everything that is pending with this error and closes the session.
    fn close(&self, why: Error) {
        let mut state = self.state();
        if matches!(state.connection, Connection::Closed(_)) {
            return;
        }
        state.connection = Connection::Closed(why.clone());
        state.over.notify_one();
        if let Some(ready) = state.ready.take() {
            let _ = ready.send(Err(why.clone()));
        }
        for request in state.outlet.drain() {
            request.finish(Err(why.clone()));
        }
        for inbox in state.watches.all_readers() {
            inbox.end(why.clone());
        }
    }
}

impl Owner for Session {
    type Message = Request;

    fn with<R>(&self, work: impl FnOnce(&mut Outlet<Request>) -> R) -> R {
        work(&mut self.state().outlet)
    }

    fn stopping(&self) -> &Notify {
        &self.stopping
    }

    fn filters(&self) -> Vec<Filter> {
        let notifications = format!("{}+", self.names.notify_prefix);
        [self.names.response_topic.clone(), notifications]
            .map(|filter| Filter::new(filter, QoS::AtLeastOnce))
            .into()
    }

    fn connected(self: &Arc<Self>, _accepted: Accepted) {
        let mut state = self.state();
        if matches!(state.connection, Connection::Closed(_)) {
            return;
        }
        state.epoch += 1;
        state.connection = Connection::Up;
        // Registrations end with their connection (section 8). This begins before the first
        // notification of the new one. A later watch registers itself.
        for inbox in state.watches.inboxes() {
            let since = inbox.reconnected();
            let cause = Some(GapCause::Reconnected);
            let registration = Registration::new(self, &inbox, state.epoch, since, cause);
            tokio::spawn(registration.run());
        }
        state.over.notify_one();
        state.over = Arc::default();
        let (epoch, over) = (state.epoch, Arc::clone(&state.over));
        let (session, pause) = (Arc::downgrade(self), self.watch_refresh);
        tokio::spawn(Self::refresh_watches(session, epoch, over, pause));
    }

    fn subscribed(&self, granted: &[SubscribeReasonCode]) -> Verdict {
        let refused = |code: Option<&SubscribeReasonCode>, what: &str| match code {
            Some(SubscribeReasonCode::Success(_)) => None,
            code => Some(format!(
                "it does not allow this client to subscribe to its {what} ({})",
                describe_suback(code)
            )),
        };
        if let Some(why) = refused(granted.first(), "answers") {
            self.close(Error::Rejected(why));
            return Verdict::End;
        }
        let mut state = self.state();
        state.notifications_refused = refused(granted.get(1), "notifications");
        if let Some(why) = &state.notifications_refused {
            for inbox in state.watches.inboxes() {
                inbox.end(Error::Rejected(why.clone()));
            }
        }
        if let Some(ready) = state.ready.take() {
            // The caller of `connect` may have stopped waiting.
            let _ = ready.send(Ok(()));
        }
        Verdict::GoOn
    }

    fn arrived(&self, arrivals: &mut Vec<Arrival>) {
        for arrival in arrivals.drain(..) {
            match arrival {
                Arrival::Message(publish, _) => self.message(&publish),
                Arrival::Acknowledged(number, ack) => self.acknowledged(number, &ack),
            }
        }
        self.send_unsent_stops();
    }

    fn lost(&self, why: &str) -> bool {
        self.down(unreached(&self.address, why), Error::Transport, why)
    }

    /// Also the first attempt is followed by others, until `connect` stops waiting: a cluster that
    /// changes its leader is back at once.
    fn unavailable(&self, why: &str) -> bool {
        let mut state = self.state();
        if state.ready.is_none() {
            drop(state);
            return self.lost(why);
        }
        state.connection = Connection::Down(unreached(&self.address, why));
        true
    }

    fn refused(&self, why: &str, passes: bool) -> bool {
        let first = format!("no connection to {}: {why}", self.address);
        let error = match passes {
            true => Error::Transport,
            false => Error::Denied,
        };
        self.down(Error::Denied(first), error, why)
    }

    fn hopeless(&self, message: Request, why: &str) {
        let why = format!("the broker closes the connection because of this request: {why}");
        message.finish(Err(Error::Transport(why)));
    }

    fn unacceptable(&self, message: Request, code: u8) {
        message.finish(Err(Error::Rejected(describe_reason(code))));
    }

    fn ended(&self, end: End) {
        self.close(Error::Closed(match end {
            End::Closed => "the client was closed".into(),
            End::TakenOver(why) => {
                format!("{} ended the session: {why}", self.address)
            }
        }));
    }
}

fn unreached(address: &str, why: &str) -> Error {
    Error::Transport(format!("cannot reach a state store at {address}: {why}"))
}

fn unanswered(address: &str, timeout: Duration) -> Error {
    unreached(
        address,
        &format!("no answer within {} ms", timeout.as_millis()),
    )
}

fn publish(payload: Bytes, properties: PublishProperties) -> Publish {
    Publish::new(topics::REQUEST, QoS::AtLeastOnce, payload, Some(properties))
}

/// The text of a fencing token in a request. It has no padding if an MQTT string has no room for
/// it, so that each token that one client sent can be sent by others.
fn fence_text(fence: &Version) -> Result<String, Error> {
    let mut text = fence.to_string();
    if text.len() > limits::FENCE_TEXT_BYTES_MAX {
        text = format!("{}:{}:{}", fence.wall_ms(), fence.counter(), fence.node());
    }
    match text.len() {
        0..=limits::FENCE_TEXT_BYTES_MAX => Ok(text),
        bytes => Err(Error::Invalid(format!(
            "the fencing token is too long: it has {bytes} bytes, and an MQTT string has at most {}",
            limits::FENCE_TEXT_BYTES_MAX
        ))),
    }
}

/// Removes a request from the outlet when its caller stops waiting for any reason.
struct PendingRequest<'a> {
    session: &'a Session,
    number: u64,
}

impl Drop for PendingRequest<'_> {
    fn drop(&mut self) {
        self.session.state().outlet.remove(self.number);
    }
}

/// The first `__ts` of a response.
fn version(properties: Option<&PublishProperties>) -> Result<Option<Version>, Error> {
    user_property(properties, "__ts")
        .map(|text| {
            text.parse()
                .map_err(|_| Error::Protocol("its __ts is not a version".into()))
        })
        .transpose()
}

fn status(properties: Option<&PublishProperties>) -> Result<(), Error> {
    match user_property(properties, "__stat") {
        Some("200") => Ok(()),
        Some("505") => Err(Error::Protocol(
            "it does not speak version 1.0 of the protocol".into(),
        )),
        Some(other) => Err(Error::Protocol(format!(
            "its __stat is {:?}",
            other.chars().take(16).collect::<String>()
        ))),
        None => Err(Error::Protocol("it has no __stat".into())),
    }
}

fn user_property<'a>(properties: Option<&'a PublishProperties>, name: &str) -> Option<&'a str> {
    properties?
        .user_properties
        .iter()
        .find(|(key, _)| key == name)
        .map(|(_, value)| value.as_str())
}

fn now_ms() -> u64 {
    let since_1970 = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .unwrap_or_default();
    u64::try_from(since_1970.as_millis()).unwrap_or(u64::MAX)
}
