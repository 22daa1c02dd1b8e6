//! Orders over MQTT, on `statehouse/v1/admin/policy/#` of the embedded broker.
//!
//! ```text
//! …/order               JSON, with its signature in the user property `signature`
//! …/chunk/DIGEST/INDEX  a chunk of the file that the order names
//! …/status              retained JSON, from the store to its subscribers
//! ```
//!
//! Any client may publish an order. The publisher gets an acknowledgement, and subscribers get the
//! status. A thread of its own carries the order out through [`Gate`]. An order that no trusted key
//! signed must leave no state. The store refuses an order whose serial is not higher than the last
//! one. It drops an order at QoS 0, which it could not acknowledge. The store receives or carries
//! out one order at a time.

use std::panic::{self, AssertUnwindSafe};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Instant;

use serde_json::{Value as Json, json};
use statehouse_mqtt::{Broker, Claim, Message, Origin, QoS, ReasonCode, Request};

use super::gate::{Gate, ShipError};
use super::order::{Action, Assembly, Order, OrderError};
use statehouse_access::audit::{self, Audit, Refused};
use statehouse_config::limits;
use statehouse_core::policy::{Actor, Digest, Selector};
use statehouse_protocol::topics::{ADMIN_TOPICS, CHUNK_TOPICS, is_order};
use statehouse_transport::embedded::Orders;

/// The topic of the status.
pub const STATUS: &str = "statehouse/v1/admin/policy/status";

/// The user property with the signature of an order.
pub const SIGNATURE: &str = "signature";

/// Receives orders and carries them out.
pub struct PolicyOrders {
    gate: Arc<Gate>,
    audit: Arc<Audit>,
    /// Held while its status is published, so that the retained status is the last one. The locks
    /// of the server and of the broker are taken under this lock.
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    now: Option<Now>,
    /// The last order that ended. A client may redeliver it.
    last: Option<Known>,
}

/// Identifies an order and its file.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Known {
    /// The hash of the whole order.
    payload: blake3::Hash,
    serial: u64,
    file: Option<Digest>,
}

/// The order that is being received or carried out.
struct Now {
    known: Known,
    since: Instant,
    by: Actor,
    /// None from the moment when the order is carried out.
    assembly: Option<Assembly>,
}

/// The result of a PUBLISH, for its acknowledgement.
type Outcome = Result<(), (ReasonCode, String)>;

impl PolicyOrders {
    /// Carries out orders through `gate`, and reports refusals to `audit`.
    pub fn new(gate: Arc<Gate>, audit: Arc<Audit>) -> Arc<Self> {
        Arc::new(Self {
            gate,
            audit,
            state: Mutex::default(),
        })
    }

    /// Publishes the status `idle`, and then drops orders whose chunks do not arrive in time. Runs
    /// until the future is dropped.
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

    /// Drops an order that was not completed in time.
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
                "an order was dropped: its chunks did not arrive in time"
            );
            let more = json!({ "missing": missing, "error": "the chunks did not arrive in time" });
            self.publish(broker, "failed", Some(assembly.order()), more);
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // Every change of the state is one assignment, so a panic leaves no change incomplete.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn dispatch(self: &Arc<Self>, broker: &Broker, from: &Origin, request: &Request) -> Outcome {
        if self.gate.trust().keys() == 0 {
            let error = super::TrustError::NoKeys.to_string();
            return Err((ReasonCode::NOT_AUTHORIZED, error));
        }
        // The broker has checked that the topic is UTF-8.
        let topic = std::str::from_utf8(&request.topic).unwrap_or_default();
        match topic.strip_prefix(CHUNK_TOPICS) {
            Some(place) => self.chunk(broker, place, &request.payload),
            None if request.qos == QoS::AtMostOnce => {
                let error =
                    "an order must have QoS 1 or 2: at QoS 0 the store cannot acknowledge it";
                Err((ReasonCode::IMPLEMENTATION_SPECIFIC_ERROR, error.to_owned()))
            }
            None => {
                let mut user = request.properties.user();
                let signature = user.find(|(name, _)| *name == SIGNATURE);
                let signature = signature.map(|(_, value)| value);
                self.order(broker, from, &request.payload, signature)
            }
        }
    }

    fn order(
        self: &Arc<Self>,
        broker: &Broker,
        from: &Origin,
        payload: &[u8],
        signature: Option<&str>,
    ) -> Outcome {
        if payload.len() > limits::ORDER_BYTES_MAX {
            let error = format!("an order has at most {} bytes", limits::ORDER_BYTES_MAX);
            return Err((ReasonCode::QUOTA_EXCEEDED, error));
        }
        let key = (self.gate.trust())
            .check_order(payload, signature)
            .map_err(|error| (ReasonCode::NOT_AUTHORIZED, error.to_string()))?;
        let order = Order::parse(payload, self.gate.control().store()).map_err(|error| {
            let reason = match error {
                OrderError::OtherStore(_) => ReasonCode::NOT_AUTHORIZED,
                _ => ReasonCode::PAYLOAD_FORMAT_INVALID,
            };
            (reason, error.to_string())
        })?;
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
        if let Some(displaced) = state.now.take().and_then(|now| now.assembly) {
            let serial = displaced.order().serial;
            tracing::warn!(serial, by = order.serial, "a newer order replaced an order");
            let error = "a newer order replaced it: send it again with a higher serial";
            let error = json!({ "error": error });
            self.publish(broker, "failed", Some(displaced.order()), error);
        }
        let assembly = (missing > 0).then(|| Assembly::new(order.clone()));
        let user = from.identity.user.as_deref();
        let by = Actor::order(&from.client, user, order.serial, key);
        state.now = Some(Now {
            known,
            since: Instant::now(),
            by: by.clone(),
            assembly,
        });
        let (client, serial, action) = (&*from.client, order.serial, order.action);
        tracing::info!(target: audit::TARGET, client, user, serial, ?action, missing, "accepted an order over MQTT");
        if missing > 0 {
            let more = json!({ "missing": missing });
            self.publish(broker, "receiving", Some(&order), more);
        } else {
            drop(state);
            self.clone()
                .start(broker.clone(), known, by, move || Ok((order, None)));
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
        // An order that is carried out is complete, so this chunk is a duplicate.
        let Some(assembly) = now.assembly.as_mut() else {
            return Ok(());
        };
        if let Err(error) = assembly.put(index, payload) {
            let (reason, text) = (chunk_reason(&error), error.to_string());
            // Then no chunks can make the file.
            if error == OrderError::File
                && let Some(assembly) = now.assembly.take()
            {
                let known = now.known;
                drop(state);
                self.end(broker, known, Some(assembly.order()), Err(text.clone()));
            }
            return Err((reason, text));
        }
        if assembly.missing() == 0
            && let Some(assembly) = now.assembly.take()
        {
            let (known, by) = (now.known, now.by.clone());
            drop(state);
            self.clone().start(broker.clone(), known, by, move || {
                let (order, file) = assembly.file()?;
                Ok((order, Some(file)))
            });
        }
        Ok(())
    }

    /// Carries an order out on a thread of its own: compiling takes seconds, and the publisher
    /// waits for an acknowledgement.
    fn start<F>(self: Arc<Self>, broker: Broker, known: Known, by: Actor, whole: F)
    where
        F: FnOnce() -> Result<(Order, Option<Vec<u8>>), OrderError> + Send + 'static,
    {
        let (orders, thread_broker) = (self.clone(), broker.clone());
        let started = thread::Builder::new()
            .name("order".into())
            .spawn(move || orders.work(&thread_broker, known, by, whole));
        if let Err(error) = started {
            let error = format!("cannot start a thread to carry the order out: {error}");
            self.end(&broker, known, None, Err(error));
        }
    }

    fn work<F>(&self, broker: &Broker, known: Known, by: Actor, whole: F)
    where
        F: FnOnce() -> Result<(Order, Option<Vec<u8>>), OrderError>,
    {
        let work = || match whole() {
            Ok((order, file)) => {
                self.publish(broker, "working", Some(&order), json!({}));
                let done = self.carry_out(&order, by, file);
                (Some(order), done.map_err(|error| error.to_string()))
            }
            Err(error) => (None, Err(error.to_string())),
        };
        // An uncaught panic would leave this order in progress, and no other order would ever be
        // accepted. The parts that it used recover from a panic under their own locks.
        let worked = panic::catch_unwind(AssertUnwindSafe(work));
        let (order, done) = worked.unwrap_or_else(|_| {
            let error = "a bug in the store stopped the order, which may be carried out in part: see the store's log";
            (None, Err(error.to_owned()))
        });
        self.end(broker, known, order.as_ref(), done);
    }

    /// Ends an order. Its status is published before another order is accepted, so that the
    /// retained status is always that of the last order.
    fn end(&self, broker: &Broker, known: Known, order: Option<&Order>, done: Result<(), String>) {
        let serial = known.serial;
        let mut state = self.lock();
        state.last = Some(known);
        state.now = None;
        match done {
            Ok(()) => {
                tracing::info!(target: audit::TARGET, serial, "carried out an order");
                self.publish(broker, "done", order, json!({}));
            }
            Err(error) => {
                tracing::error!(target: audit::TARGET, serial, error, "an order failed");
                let more = json!({ "serial": serial, "error": error });
                self.publish(broker, "failed", order, more);
            }
        }
    }

    fn carry_out(&self, order: &Order, by: Actor, file: Option<Vec<u8>>) -> Result<(), ShipError> {
        let gate = self.gate.by(by);
        let control = gate.control();
        // A load takes long and may be repeated. Behind it, the order is accepted first: if the
        // process ends then, the order is lost, but never carried out twice.
        let loaded = file.map(|file| gate.load(&file));
        control.accept_order(order.serial)?;
        loaded.transpose()?;
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
            // The policy is already loaded. Without a digest the other actions were refused.
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
            "store": listing.store,
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
}

/// The reason code for the publisher of a refused chunk.
fn chunk_reason(error: &OrderError) -> ReasonCode {
    match error {
        OrderError::Index => ReasonCode::TOPIC_NAME_INVALID,
        OrderError::ChunkSize => ReasonCode::QUOTA_EXCEEDED,
        _ => ReasonCode::PAYLOAD_FORMAT_INVALID,
    }
}

impl Orders for PolicyOrders {
    fn claim(&self, topic: &[u8]) -> Option<Claim> {
        if !topic.starts_with(ADMIN_TOPICS.as_bytes()) {
            return None;
        }
        Some(if is_order(topic) {
            Claim::Take
        } else {
            Claim::Refuse(
                ReasonCode::NOT_AUTHORIZED,
                "only the state store publishes here",
            )
        })
    }

    fn take(self: Arc<Self>, broker: &Broker, from: &Origin, request: Request) {
        let outcome = self.dispatch(broker, from, &request);
        if let Err((_, error)) = &outcome {
            let refused = Refused::of_client("order", from, error);
            self.audit.refused(&refused);
        }
        let Some(token) = request.token else {
            return;
        };
        let (reason, text) = match outcome {
            Ok(()) => (ReasonCode::SUCCESS, None),
            Err((reason, error)) => (reason, Some(error)),
        };
        broker.batch(|batch| batch.acknowledge_reported(token, reason, text.as_deref()));
    }
}

#[cfg(test)]
mod tests;
