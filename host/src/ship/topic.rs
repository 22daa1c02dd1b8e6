//! Orders over MQTT, on `statehouse/v1/admin/policy/#` of the embedded broker.
//!
//! ```text
//! …/order               JSON, with its signature in the user property `signature`
//! …/chunk/DIGEST/INDEX  a piece of the file that the order names
//! …/status              retained JSON, from the store to whoever subscribes
//! ```
//!
//! What enters: PUBLISHes of anybody. What leaves: their acknowledgements, a status, and calls of [`Gate`] from a
//! thread of their own. Nothing is kept of what no trusted key signed; an order whose number is not higher than that of the last one
//! is a repetition. One order is received or carried out at a time.

use std::panic::{self, AssertUnwindSafe};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use serde_json::{Value as Json, json};
use statehouse_mqtt::{Broker, Claim, Message, Origin, QoS, ReasonCode, Request};

use super::gate::{Gate, ShipError};
use super::order::{Action, Assembly, Order, OrderError};
use crate::limits;
use crate::policy::{Digest, Selector};
use crate::transport::embedded::Orders;

/// All topics of the administration begin so.
const TOPICS: &str = "statehouse/v1/admin/";

/// Where orders go.
pub const ORDER: &str = "statehouse/v1/admin/policy/order";

/// Where the pieces of files go: this, the file's digest, and the number of the piece.
pub const CHUNKS: &str = "statehouse/v1/admin/policy/chunk/";

/// Where the status is.
pub const STATUS: &str = "statehouse/v1/admin/policy/status";

/// The user property with the signature of an order.
pub const SIGNATURE: &str = "signature";

/// Takes orders.
pub struct PolicyOrders {
    gate: Arc<Gate>,
    /// Held while a status is published that tells of it, so that the retained one is the last. Before the locks of the
    /// server and of the broker, which are taken for that.
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    now: Option<Now>,
    /// The last order that was carried out: it may come again.
    last: Option<Known>,
    /// The last line about something refused, and how much was refused since.
    told: Option<Instant>,
    untold: u64,
}

/// Tells whether an order or a chunk is of one that is known.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Known {
    /// Of the whole order.
    payload: blake3::Hash,
    serial: u64,
    file: Option<Digest>,
}

/// The order that is being dealt with.
struct Now {
    known: Known,
    since: Instant,
    /// None once it is carried out.
    assembly: Option<Assembly>,
}

/// What a PUBLISH came to.
type Outcome = Result<(), (ReasonCode, String)>;

impl PolicyOrders {
    /// Gives to `gate` what is ordered.
    pub fn new(gate: Arc<Gate>) -> Arc<Self> {
        Arc::new(Self {
            gate,
            state: Mutex::default(),
        })
    }

    /// Says where things stand, and forgets orders whose chunks do not come. Runs until it is dropped.
    pub async fn run(self: Arc<Self>, broker: Broker) {
        if self.gate.trust().keys() == 0 {
            return;
        }
        {
            let state = self.lock();
            if state.now.is_none() && state.last.is_none() {
                self.publish(&broker, "idle", None, json!({}));
            }
        }
        loop {
            tokio::time::sleep(limits::ORDER_CHECK_INTERVAL).await;
            self.expire(&broker, Instant::now());
        }
    }

    /// Forgets an order that was not completed in time.
    fn expire(&self, broker: &Broker, now: Instant) {
        let mut state = self.lock();
        let is_late = state.now.as_ref().is_some_and(|it| {
            it.assembly.is_some() && now.duration_since(it.since) >= limits::ORDER_TIMEOUT
        });
        let late = is_late.then(|| state.now.take()).flatten();
        if let Some(assembly) = late.and_then(|late| late.assembly) {
            let missing = assembly.missing();
            let serial = assembly.order().serial;
            tracing::warn!(
                serial,
                missing,
                "an order is given up: its chunks did not come in time"
            );
            let more = json!({ "missing": missing, "error": "the chunks did not come in time" });
            self.publish(broker, "failed", Some(assembly.order()), more);
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // Every change of the state is one assignment, so a panic leaves none half done.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn dispatch(self: &Arc<Self>, broker: &Broker, request: &Request) -> Outcome {
        if self.gate.trust().keys() == 0 {
            let error = super::TrustError::NoKeys.to_string();
            return Err((ReasonCode::NOT_AUTHORIZED, error));
        }
        // The broker has checked that it is UTF-8.
        let topic = std::str::from_utf8(&request.topic).unwrap_or_default();
        match topic.strip_prefix(CHUNKS) {
            Some(place) => self.chunk(broker, place, &request.payload),
            None => {
                let mut user = request.properties.user();
                let signature = user.find(|(name, _)| *name == SIGNATURE);
                self.order(broker, &request.payload, signature.map(|(_, value)| value))
            }
        }
    }

    fn order(
        self: &Arc<Self>,
        broker: &Broker,
        payload: &[u8],
        signature: Option<&str>,
    ) -> Outcome {
        if payload.len() > limits::ORDER_BYTES_MAX {
            let error = format!("an order has at most {} bytes", limits::ORDER_BYTES_MAX);
            return Err((ReasonCode::QUOTA_EXCEEDED, error));
        }
        (self.gate.trust())
            .check_order(payload, signature)
            .map_err(|error| (ReasonCode::NOT_AUTHORIZED, error.to_string()))?;
        let order = Order::parse(payload)
            .map_err(|error| (ReasonCode::PAYLOAD_FORMAT_INVALID, error.to_string()))?;
        let known = Known {
            payload: blake3::hash(payload),
            serial: order.serial,
            file: order.digest,
        };
        let is_here = order.digest.is_some_and(|digest| self.is_loaded(digest));
        let missing = if is_here { 0 } else { order.chunks.len() };
        let mut state = self.lock();
        let under_way = state.now.as_ref().map(|now| now.known);
        if under_way.is_some_and(|it| it.payload == known.payload)
            || state.last.is_some_and(|it| it.payload == known.payload)
        {
            // QoS 1 delivers at least once.
            return Ok(());
        }
        let mut latest = self.gate.control().serial();
        if let Some(now) = &state.now {
            if now.assembly.is_none() {
                let error = "another order is being carried out: send this one again later";
                return Err((ReasonCode::IMPLEMENTATION_SPECIFIC_ERROR, error.to_owned()));
            }
            latest = latest.max(now.known.serial);
        }
        if order.serial <= latest {
            let error = format!(
                "the order {} is not newer than {latest}, the last one that was taken",
                order.serial
            );
            return Err((ReasonCode::IMPLEMENTATION_SPECIFIC_ERROR, error));
        }
        let assembly = (missing > 0).then(|| Assembly::new(order.clone()));
        state.now = Some(Now {
            known,
            since: Instant::now(),
            assembly,
        });
        tracing::info!(serial = order.serial, action = ?order.action, missing, "took an order over MQTT");
        if missing > 0 {
            let more = json!({ "missing": missing });
            self.publish(broker, "receiving", Some(&order), more);
        } else {
            drop(state);
            self.clone()
                .start(broker.clone(), known, move || Ok((order, None)));
        }
        Ok(())
    }

    fn is_loaded(&self, digest: Digest) -> bool {
        let listing = self.gate.control().list();
        listing.policies.iter().any(|it| it.digest == digest)
    }

    fn chunk(self: &Arc<Self>, broker: &Broker, place: &str, payload: &[u8]) -> Outcome {
        let invalid = || {
            let error = "the topic of a chunk ends with the file's digest and the chunk's number";
            (ReasonCode::TOPIC_NAME_INVALID, error.to_owned())
        };
        let (digest, index) = place.split_once('/').ok_or_else(invalid)?;
        let digest = blake3::Hash::from_hex(digest).map_err(|_| invalid())?;
        let digest = Digest::from(digest);
        let index: usize = index.parse().map_err(|_| invalid())?;

        let mut state = self.lock();
        let is_last = state.last.is_some_and(|it| it.file == Some(digest));
        let Some(now) = state
            .now
            .as_mut()
            .filter(|it| it.known.file == Some(digest))
        else {
            if is_last {
                return Ok(());
            }
            let error = "no order names this file: publish the order first";
            return Err((ReasonCode::IMPLEMENTATION_SPECIFIC_ERROR, error.to_owned()));
        };
        // Once it is carried out, chunks can only be repetitions.
        let Some(assembly) = now.assembly.as_mut() else {
            return Ok(());
        };
        assembly.put(index, payload).map_err(|error| {
            let reason = match error {
                OrderError::Index => ReasonCode::TOPIC_NAME_INVALID,
                _ => ReasonCode::PAYLOAD_FORMAT_INVALID,
            };
            (reason, error.to_string())
        })?;
        if assembly.missing() == 0
            && let Some(assembly) = now.assembly.take()
        {
            let known = now.known;
            drop(state);
            self.clone().start(broker.clone(), known, move || {
                let (order, file) = assembly.file()?;
                Ok((order, Some(file)))
            });
        }
        Ok(())
    }

    /// Carries an order out on a thread of its own: compiling takes seconds, and whoever published waits for an
    /// acknowledgement.
    fn start<F>(self: Arc<Self>, broker: Broker, known: Known, whole: F)
    where
        F: FnOnce() -> Result<(Order, Option<Vec<u8>>), OrderError> + Send + 'static,
    {
        let (orders, way_out) = (self.clone(), broker.clone());
        let started = thread::Builder::new()
            .name("order".into())
            .spawn(move || orders.work(&way_out, known, whole));
        if let Err(error) = started {
            let error = format!("there is no thread to carry the order out on: {error}");
            self.end(&broker, known, None, Err(error));
        }
    }

    fn work<F>(&self, broker: &Broker, known: Known, whole: F)
    where
        F: FnOnce() -> Result<(Order, Option<Vec<u8>>), OrderError>,
    {
        let work = || match whole() {
            Ok((order, file)) => {
                self.publish(broker, "working", Some(&order), json!({}));
                let done = self.carry_out(&order, file);
                (Some(order), done.map_err(|error| error.to_string()))
            }
            Err(error) => (None, Err(error.to_string())),
        };
        // Where it panics no order would ever be taken again. What it touched has locks of its own, which know.
        let worked = panic::catch_unwind(AssertUnwindSafe(work));
        let (order, done) = worked.unwrap_or_else(|_| {
            let error = "the store has a bug here, and the order may be carried out in part: its log says more";
            (None, Err(error.to_owned()))
        });
        self.end(broker, known, order.as_ref(), done);
    }

    /// An order is over. Its status is published before another order is taken, so that the last one stays.
    fn end(&self, broker: &Broker, known: Known, order: Option<&Order>, done: Result<(), String>) {
        let serial = known.serial;
        let mut state = self.lock();
        state.last = Some(known);
        state.now = None;
        match done {
            Ok(()) => {
                tracing::info!(serial, "carried out an order");
                self.publish(broker, "done", order, json!({}));
            }
            Err(error) => {
                tracing::error!(serial, error, "an order cannot be carried out");
                let more = json!({ "serial": serial, "error": error });
                self.publish(broker, "failed", order, more);
            }
        }
    }

    fn carry_out(&self, order: &Order, file: Option<Vec<u8>>) -> Result<(), ShipError> {
        let control = self.gate.control();
        // First of all: should the process end now, the order is lost rather than carried out twice.
        control.accept_order(order.serial)?;
        if let Some(file) = file {
            self.gate.load(&file)?;
        }
        let which = order.digest.map(Selector::from);
        match (order.action, &which) {
            (Action::Promote, Some(which)) => drop(control.promote(which)?),
            (Action::Rollback, _) => drop(control.rollback()?),
            (Action::Unload, Some(which)) => control.unload(which)?,
            (Action::Shadow, which) => {
                let per_mille = order.per_mille.unwrap_or(1000);
                control.shadow(which.as_ref().map(|which| (which, per_mille)))?;
            }
            (Action::Canary, which) => {
                let rule = order.rule.clone();
                control.canary(which.as_ref().zip(rule))?;
            }
            // Loading is done; the others were refused without a digest.
            (Action::Load | Action::Promote | Action::Unload, _) => {}
        }
        Ok(())
    }

    /// Publishes the retained status.
    fn publish(&self, broker: &Broker, what: &str, order: Option<&Order>, more: Json) {
        let listing = self.gate.control().list();
        let active = listing.assignment.active;
        let active = listing.policies.iter().find(|it| it.digest == active);
        let mut status = json!({
            "state": what,
            "last_serial": listing.assignment.serial,
            "active": active.map(|it| json!({
                "name": it.name,
                "version": it.version,
                "digest": it.digest,
            })),
        });
        if let Some(order) = order {
            status["serial"] = json!(order.serial);
            status["action"] = json!(order.action);
            status["digest"] = json!(order.digest);
        }
        for (name, value) in more.as_object().into_iter().flatten() {
            status[name] = value.clone();
        }
        let message = Message {
            retain: true,
            ..Message::new(STATUS, status.to_string(), QoS::AtLeastOnce)
        };
        broker.batch(|batch| batch.publish(message));
    }

    /// A line for the first refusal of a second; whoever publishes decides how many there are.
    fn tell(&self, from: &Origin, error: &str) {
        let mut state = self.lock();
        let now = Instant::now();
        let quiet = state
            .told
            .is_some_and(|told| now.duration_since(told) < Duration::from_secs(1));
        if quiet {
            state.untold += 1;
            return;
        }
        state.told = Some(now);
        let before = std::mem::take(&mut state.untold);
        drop(state);
        let client = from.client.escape_debug();
        tracing::warn!(%client, before, "refused what was published for the administration: {error}");
    }
}

impl Orders for Arc<PolicyOrders> {
    fn claim(&self, topic: &str) -> Option<Claim> {
        if !topic.starts_with(TOPICS) {
            return None;
        }
        Some(if topic == ORDER || topic.starts_with(CHUNKS) {
            Claim::Take
        } else {
            Claim::Refuse(
                ReasonCode::NOT_AUTHORIZED,
                "only the state store publishes here",
            )
        })
    }

    fn take(&self, broker: &Broker, from: &Origin, request: Request) {
        let outcome = self.dispatch(broker, &request);
        if let Err((_, error)) = &outcome {
            self.tell(from, error);
        }
        let Some(token) = request.token else {
            return;
        };
        let (reason, text) = match outcome {
            Ok(()) => (ReasonCode::SUCCESS, None),
            Err((reason, error)) => (reason, Some(error)),
        };
        broker.batch(|batch| batch.settle(token, reason, text.as_deref()));
    }
}

#[cfg(test)]
mod tests {
    use statehouse_mqtt::{NoService, Options};
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    use super::super::{Trust, digits, generate, sign_order};
    use super::*;
    use crate::control::tests::{Rig, rig};

    struct Orderly {
        orders: Arc<PolicyOrders>,
        broker: Broker,
        key: wasmsign2::SecretKey,
        _rig: Rig,
    }

    fn orderly() -> Orderly {
        let (rig, pair) = (rig(), generate());
        let trust = Trust::new(&[digits(&pair.pk)], false).unwrap();
        Orderly {
            orders: PolicyOrders::new(Arc::new(Gate::new(rig.control.clone(), trust))),
            broker: Broker::new(Options::default(), Arc::new(NoService)),
            key: pair.sk,
            _rig: rig,
        }
    }

    impl Orderly {
        fn order(&self, serial: u64, action: Action, file: &[u8]) -> Outcome {
            let order = Order {
                serial,
                action,
                digest: (!file.is_empty()).then(|| Digest::of(file)),
                size: Some(file.len() as u64),
                chunks: file.chunks(10).map(Digest::of).collect(),
                per_mille: None,
                rule: None,
            };
            let payload = order.payload();
            let signature = sign_order(&payload, &self.key);
            self.orders.order(&self.broker, &payload, Some(&signature))
        }

        /// The retained status, as it is sent to somebody who subscribes.
        async fn status(&self) -> Json {
            let (mut near, far) = tokio::io::duplex(1 << 16);
            let broker = self.broker.clone();
            let peer = "127.0.0.1:1".parse().unwrap();
            let serving = tokio::spawn(async move { broker.serve_connection(far, peer).await });
            // A CONNECT of version 5 that starts clean, and a SUBSCRIBE of QoS 0.
            let mut sent = b"\x10\x0e\0\x04MQTT\x05\x02\0\0\0\0\x01a\x82".to_vec();
            let length = u8::try_from(STATUS.len()).unwrap();
            sent.extend([length + 6, 0, 1, 0, 0, length]);
            sent.extend(STATUS.bytes());
            sent.push(0);
            near.write_all(&sent).await.unwrap();
            let mut came = Vec::new();
            let status = loop {
                assert_ne!(near.read_buf(&mut came).await.unwrap(), 0, "{came:?}");
                let text = String::from_utf8_lossy(&came);
                // Only the status has braces.
                if let Some((from, to)) = text.find('{').zip(text.rfind('}'))
                    && let Ok(status) = serde_json::from_str(&text[from..=to])
                {
                    break status;
                }
            };
            serving.abort();
            status
        }
    }

    #[tokio::test]
    async fn an_order_whose_chunks_do_not_come_is_given_up_and_may_come_again() {
        let it = orderly();
        let file = b"0123456789abc";
        let before = Instant::now();
        it.order(7, Action::Load, file).unwrap();
        let after = Instant::now();
        let place = format!("{}/0", Digest::of(file));
        it.orders.chunk(&it.broker, &place, &file[..10]).unwrap();
        let early = before + limits::ORDER_TIMEOUT - Duration::from_millis(1);
        it.orders.expire(&it.broker, early);
        assert_eq!(it.status().await["state"], "receiving");
        it.orders.expire(&it.broker, after + limits::ORDER_TIMEOUT);
        let status = it.status().await;
        assert_eq!(
            (&status["state"], &status["serial"]),
            (&json!("failed"), &json!(7))
        );
        assert_eq!(status["missing"], 1, "{status}");
        let refused = it.orders.chunk(&it.broker, &place, &file[..10]);
        assert!(refused.unwrap_err().1.contains("publish the order first"));
        it.order(7, Action::Load, file).unwrap();
        assert_eq!(it.status().await["missing"], 2);
    }

    /// Whoever ordered it waits for its end, and others for their turn.
    #[tokio::test]
    async fn an_order_at_which_the_store_panics_has_an_end_too() {
        let it = orderly();
        let known = Known {
            payload: blake3::hash(b"order"),
            serial: 7,
            file: None,
        };
        it.orders.lock().now = Some(Now {
            known,
            since: Instant::now(),
            assembly: None,
        });
        let (reason, _) = it.order(8, Action::Rollback, b"").unwrap_err();
        assert_eq!(reason, ReasonCode::IMPLEMENTATION_SPECIFIC_ERROR);
        let orders = it.orders.clone();
        orders.start(it.broker.clone(), known, || panic!("a bug"));
        let deadline = Instant::now() + Duration::from_secs(30);
        while it.orders.lock().now.is_some() {
            assert!(Instant::now() < deadline, "no order is ever taken again");
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        let status = it.status().await;
        assert_eq!(
            (&status["state"], &status["serial"]),
            (&json!("failed"), &json!(7))
        );
        assert!(
            status["error"].as_str().unwrap().contains("bug"),
            "{status}"
        );
        it.order(8, Action::Rollback, b"").unwrap();
    }
}
