//! Arrivals from a foreign broker: requests, PUBACKs, and messages about clients.
//!
//! Converts the arrivals of one read to one batch for the store. The order of the broker must stay.

use std::collections::VecDeque;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Mutex};
use std::time::Instant;

use rumqttc::v5::mqttbytes::QoS;
use rumqttc::v5::mqttbytes::v5::{Filter, Publish, RetainForwardRule, SubscribeReasonCode};
use statehouse_link::{Arrival, End, Outlet, Owner, Place, Verdict};
use tokio::sync::Notify;

use super::claim::{Claim, Meaning};
use super::incoming::{ForeignRequest, InvalidRequest, request_topic};
use super::outgoing::Outgoing;
use super::state::{State, Watcher};
use super::{Foreign, Phase, identity, lock};
use crate::{Inbound, Ticket};
use statehouse_access::Authorizer;
use statehouse_config::limits;
use statehouse_core::request::{PREVIEW_TOPIC, REQUEST_TOPIC};
use statehouse_core::store::Peer;

/// An arrival that is not handled yet.
enum Held {
    /// A message, and its receipt unless it is at QoS 0.
    Message(Publish, Option<u64>),
    /// A notification for this key found no subscriber.
    Undeliverable(Peer, Vec<u8>),
}

/// The arrivals that are not handled yet, in order.
///
/// Its memory is bounded. The broker limits the messages that need a PUBACK. Undeliverable
/// notifications are at most as many as the notifications in the outlet. Only messages at QoS 0
/// have no other limit, so `bytes` counts these.
#[derive(Default)]
pub(super) struct Backlog {
    held: VecDeque<Held>,
    bytes: usize,
}

impl Backlog {
    fn push(&mut self, held: Held) {
        self.bytes += held.unbounded_bytes();
        self.held.push_back(held);
    }

    /// Takes the oldest arrivals.
    fn chunk(&mut self) -> Vec<Held> {
        let chunk = self.held.len().min(limits::BROKER_HELD_CHUNK);
        let chunk: Vec<_> = self.held.drain(..chunk).collect();
        self.bytes -= chunk.iter().map(Held::unbounded_bytes).sum::<usize>();
        chunk
    }

    /// Drops the messages of a lost connection.
    fn drop_messages(&mut self) {
        self.held
            .retain(|held| matches!(held, Held::Undeliverable(..)));
        self.bytes = 0;
    }

    /// Whether a message at QoS 0 can wait here. A request at QoS 0 cannot: its response would only
    /// be the error that it needs QoS 1.
    fn has_room_for(&self, publish: &Publish) -> bool {
        request_topic(&publish.topic).is_none()
            && self.bytes + bytes(publish) <= limits::BROKER_HELD_BYTES_MAX
    }
}

impl Held {
    fn unbounded_bytes(&self) -> usize {
        match self {
            Self::Message(publish, None) => bytes(publish),
            Self::Message(_, Some(_)) | Self::Undeliverable(..) => 0,
        }
    }
}

fn bytes(publish: &Publish) -> usize {
    publish.size() + limits::BROKER_OUTBOX_OVERHEAD_BYTES
}

/// An input for the store.
enum Input {
    Request(ForeignRequest, Option<u64>),
    Disconnected(Peer),
    Undeliverable(Peer, Vec<u8>),
}

impl Input {
    fn inbound(&self, rules: Option<&Authorizer>) -> Inbound<'_> {
        match self {
            Self::Request(request, receipt) => {
                let grants = rules.map(|it| it.grants_of(&request.peer) as _);
                Inbound::Publish(request.incoming(grants), receipt.map(Ticket::Foreign))
            }
            Self::Disconnected(peer) => Inbound::Disconnected(peer),
            Self::Undeliverable(peer, key) => Inbound::Undeliverable(peer, key),
        }
    }
}

impl Foreign {
    /// Whether arrivals must wait: there is too much output, or the store stops.
    fn is_paused(&self, state: &State) -> bool {
        state.is_full() || self.closed.load(Relaxed)
    }

    /// Converts arrivals to inputs. Acknowledges at once all messages that are not valid requests.
    fn read(&self, held: Vec<Held>) -> Vec<Input> {
        let now = Instant::now();
        let mut inputs = Vec::new();
        let (mut settled, mut requests, mut malformed) = (Vec::new(), 0, 0);
        for held in held {
            let (publish, receipt) = match held {
                Held::Undeliverable(peer, key) => {
                    inputs.push(Input::Undeliverable(peer, key));
                    continue;
                }
                Held::Message(publish, receipt) => (publish, receipt),
            };
            let Some(topic) = request_topic(&publish.topic) else {
                self.read_other(&publish, &mut inputs);
                settled.extend(receipt);
                continue;
            };
            match ForeignRequest::new(topic, publish, now) {
                Ok(request) => {
                    self.renew(&request.peer, now);
                    requests += usize::from(receipt.is_some());
                    inputs.push(Input::Request(request, receipt));
                }
                Err(invalid) => {
                    malformed += 1;
                    settled.extend(receipt);
                    if let InvalidRequest::ResponseTopic(peer, text) = invalid {
                        self.log_violation(&peer, text);
                    }
                }
            }
        }
        let mut state = self.state();
        state.unsettled += requests;
        state.sums.malformed += malformed;
        for receipt in settled {
            state.outlet.settle(receipt);
        }
        inputs
    }

    /// Reads a message that is no request: a mark, or the broker's log about clients.
    fn read_other(&self, publish: &Publish, inputs: &mut Vec<Input>) {
        let topic = String::from_utf8_lossy(&publish.topic);
        let is_mark = |claim: &&Mutex<Claim>| *topic == *lock(claim).topic();
        if let Some(claim) = self.claim.as_ref().filter(is_mark) {
            let meaning = lock(claim).read(&publish.payload, publish.retain);
            match meaning {
                Meaning::Nothing => {}
                Meaning::Republish => self.publish_mark(),
                Meaning::TakenOver => self.taken_over(),
            }
            return;
        }
        lock(&self.presence).read(&topic, &publish.payload, &mut |client| {
            inputs.push(Input::Disconnected(identity::named(client)));
        });
    }

    /// Sets whether the store takes requests now. While it does not, no client counts as silent.
    fn set_receiving(&self, receiving: bool, now: Instant) {
        let Some(ttl) = &self.ttl else {
            return;
        };
        match receiving {
            true => lock(ttl).resume(now),
            false => lock(ttl).pause(),
        }
    }

    /// Records a sign of life of a client.
    fn renew(&self, peer: &Peer, now: Instant) {
        if let (Some(ttl), Some(client)) = (&self.ttl, peer.known()) {
            lock(ttl).renew(client, now);
        }
    }
}

impl Owner for Foreign {
    type Message = Outgoing;

    fn with<R>(&self, work: impl FnOnce(&mut Outlet<Outgoing>) -> R) -> R {
        work(&mut self.state().outlet)
    }

    fn stopping(&self) -> &Notify {
        &self.stopping
    }

    fn filters(&self) -> Vec<Filter> {
        let presence = lock(&self.presence);
        let mut filters = vec![REQUEST_TOPIC, PREVIEW_TOPIC];
        filters.extend(presence.filters());
        let filter = |path: &str| Filter {
            // A retained request would be executed at each connection.
            retain_forward_rule: match presence.wants_retained(path) {
                true => RetainForwardRule::OnEverySubscribe,
                false => RetainForwardRule::Never,
            },
            ..Filter::new(path, QoS::AtLeastOnce)
        };
        let mut filters: Vec<_> = filters.into_iter().map(filter).collect();
        if let Some(claim) = &self.claim {
            let mark = lock(claim).topic().to_owned();
            filters.push(Filter::new(mark, QoS::AtLeastOnce));
        }
        filters
    }

    fn connected(self: &Arc<Self>, session_present: bool) {
        self.state().connected(session_present);
        tracing::debug!(session_present, "connected to {}", self.place);
    }

    fn subscribed(&self, granted: &[SubscribeReasonCode]) -> Verdict {
        let filters = self.filters();
        let is_granted = |code: &SubscribeReasonCode| matches!(code, SubscribeReasonCode::Success(qos) if *qos != QoS::AtMostOnce);
        for (filter, code) in filters.iter().zip(granted) {
            if filter.path == REQUEST_TOPIC && !is_granted(code) {
                return Verdict::TryAgain(format!(
                    "it does not let the store subscribe to {REQUEST_TOPIC} at QoS 1 ({code:?})"
                ));
            }
            lock(&self.presence).subscribed(&filter.path, is_granted(code));
        }
        let resumed = {
            let mut state = self.state();
            state.down = None;
            state.resumed
        };
        // A confirmed mark is still at the broker, unless another run used the session since. Then
        // the broker sends that run's mark, which must not be replaced before it is read.
        let confirmed = (self.claim.as_ref()).is_some_and(|claim| lock(claim).is_confirmed());
        if !resumed || !confirmed {
            self.publish_mark();
        }
        tracing::info!("attached to {}", self.place);
        self.phase.send_if_modified(|phase| {
            let first = *phase == Phase::Waiting;
            if first {
                *phase = Phase::Attached;
            }
            first
        });
        Verdict::GoOn
    }

    fn arrived(&self, arrivals: &mut Vec<Arrival>) {
        let mut held = lock(&self.held);
        let mut subscribed = Vec::new();
        let paused = {
            let mut state = self.state();
            for arrival in arrivals.drain(..) {
                match arrival {
                    Arrival::Message(publish, None)
                        if self.is_paused(&state) && !held.has_room_for(&publish) =>
                    {
                        state.sums.dropped += 1;
                    }
                    Arrival::Message(publish, receipt) => {
                        held.push(Held::Message(publish, receipt));
                    }
                    Arrival::Acknowledged(number, ack) => match state.acknowledged(number, &ack) {
                        Some(Watcher::Subscribed(peer)) => subscribed.push(peer),
                        Some(Watcher::Unsubscribed(peer, key)) => {
                            held.push(Held::Undeliverable(peer, key));
                        }
                        None => {}
                    },
                }
            }
            self.is_paused(&state)
        };
        let now = Instant::now();
        for peer in subscribed {
            self.renew(&peer, now);
        }
        self.set_receiving(!paused, now);
        drop(held);
        while !self.is_paused(&self.state()) {
            let chunk = lock(&self.held).chunk();
            if chunk.is_empty() {
                return;
            }
            let inputs = self.read(chunk);
            let rules = self.rules.get().map(|it| &**it);
            self.intake
                .take(&mut inputs.iter().map(|it| it.inbound(rules)));
        }
    }

    fn lost(&self, why: &str) -> bool {
        // The broker redelivers messages without a PUBACK, unless it has lost them too.
        lock(&self.held).drop_messages();
        self.set_receiving(false, Instant::now());
        let mut state = self.state();
        state.lost();
        if state.down.as_deref() != Some(why) {
            tracing::warn!("no connection to {}: {why}; trying again", self.place);
            state.down = Some(why.to_owned());
        }
        true
    }

    fn hopeless(&self, message: Outgoing, why: &str) {
        self.state().hopeless(&message, why);
    }

    fn place(&self) -> Option<Place> {
        self.read_place()
    }

    fn ended(&self, end: End) {
        self.phase.send_if_modified(|phase| {
            let open = !matches!(phase, Phase::Ended(_));
            if open {
                *phase = Phase::Ended(end);
            }
            open
        });
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Weak;

    use rumqttc::v5::mqttbytes::v5::PublishProperties;
    use statehouse_mqtt::Message;

    use super::*;
    use crate::{Outbound, Transport};
    use statehouse_config::ForeignConfig;

    /// Responds to each request at once.
    #[derive(Default)]
    struct Store {
        transport: Mutex<Weak<Foreign>>,
        requests: Mutex<usize>,
    }

    impl crate::Intake for Store {
        fn take_within(
            &self,
            _: std::time::Duration,
            batch: &mut dyn Iterator<Item = Inbound<'_>>,
        ) {
            let transport = lock(&self.transport).upgrade().unwrap();
            for _ in batch {
                *lock(&self.requests) += 1;
                let message = Message {
                    topic: "answers".into(),
                    ..Message::default()
                };
                let mut ready = vec![Outbound::Response(message, None)];
                transport.deliver(&mut |out| out.append(&mut ready));
            }
        }
    }

    fn scene() -> (Arc<Store>, Arc<Foreign>) {
        let store = Arc::new(Store::default());
        let config = ForeignConfig {
            window: 64,
            watch_ttl: None,
            ..super::super::tests::config()
        };
        let foreign = Foreign::new(store.clone(), &config, "store");
        *lock(&store.transport) = Arc::downgrade(&foreign);
        (store, foreign)
    }

    fn arrive(foreign: &Foreign, topic: &'static str, payload: usize, receipt: Option<u64>) {
        let publish = Publish {
            topic: topic.into(),
            payload: vec![0; payload].into(),
            properties: Some(PublishProperties::default()),
            ..Publish::default()
        };
        foreign.arrived(&mut vec![Arrival::Message(publish, receipt)]);
    }

    /// Fills the outlet, except for room for this many messages.
    fn fill(foreign: &Foreign, room: usize) {
        let mut state = foreign.state();
        while state.outlet.len() < limits::BROKER_OUTBOX_HOLD - room {
            let peer = identity::named("watcher");
            state.take(Outbound::Notification(peer, Message::default(), None));
        }
    }

    fn empty(foreign: &Foreign) {
        foreign.state().outlet.drain().for_each(drop);
    }

    #[test]
    fn requests_at_qos_zero_are_dropped_while_the_outlet_is_full() {
        let (store, foreign) = scene();
        fill(&foreign, 0);
        for _ in 0..3 {
            arrive(&foreign, REQUEST_TOPIC, 10, None);
        }
        arrive(&foreign, REQUEST_TOPIC, 10, Some(0));
        assert_eq!(lock(&foreign.held).held.len(), 1);
        assert_eq!(foreign.state().sums.dropped, 3);
        empty(&foreign);
        foreign.arrived(&mut Vec::new());
        assert_eq!(*lock(&store.requests), 1);
    }

    #[test]
    fn other_messages_at_qos_zero_wait_up_to_a_limit() {
        let (_, foreign) = scene();
        fill(&foreign, 0);
        let half = limits::BROKER_HELD_BYTES_MAX / 2 - 1024;
        for _ in 0..3 {
            arrive(&foreign, "$SYS/broker/log/N", half, None);
        }
        assert_eq!(foreign.state().sums.dropped, 1);
        empty(&foreign);
        foreign.arrived(&mut Vec::new());
        let held = lock(&foreign.held);
        assert_eq!((held.held.len(), held.bytes), (0, 0));
    }

    #[test]
    fn a_lost_connection_drops_the_waiting_messages() {
        let (_, foreign) = scene();
        fill(&foreign, 0);
        arrive(&foreign, "$SYS/broker/log/N", 10, None);
        Owner::lost(&*foreign, "the broker closed it");
        assert_eq!(lock(&foreign.held).bytes, 0);
    }

    #[test]
    fn waiting_requests_execute_while_the_outlet_has_room() {
        let (store, foreign) = scene();
        fill(&foreign, 0);
        for receipt in 0..3 * limits::BROKER_HELD_CHUNK as u64 {
            arrive(&foreign, REQUEST_TOPIC, 10, Some(receipt));
        }
        empty(&foreign);
        fill(&foreign, 1);
        foreign.arrived(&mut Vec::new());
        assert_eq!(*lock(&store.requests), limits::BROKER_HELD_CHUNK);
    }
}
