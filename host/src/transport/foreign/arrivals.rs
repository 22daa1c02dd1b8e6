//! What comes from a foreign broker, in the order it sent it: requests, PUBACKs, and messages that tell of clients.
//!
//! What enters: one read of rumqttc. What leaves: one batch for the store.

use std::collections::VecDeque;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Mutex};
use std::time::Instant;

use rumqttc::v5::mqttbytes::QoS;
use rumqttc::v5::mqttbytes::v5::{Filter, Publish, RetainForwardRule, SubscribeReasonCode};
use statehouse_link::{Arrival, End, Outlet, Owner, Verdict};
use tokio::sync::Notify;

use super::claim::{Claim, Meaning};
use super::incoming::{Asked, Bad, request_topic};
use super::outgoing::Outgoing;
use super::state::{State, Watcher};
use super::{Foreign, Phase, identity, lock};
use crate::limits;
use crate::transport::{Inbound, Ticket};
use statehouse_access::Authorizer;
use statehouse_core::request::{PREVIEW_TOPIC, REQUEST_TOPIC};
use statehouse_core::store::Peer;

/// What came and has not been looked at.
enum Held {
    Message(Publish, Option<u64>),
    Unheard(Peer, Vec<u8>),
}

/// All of this, in order. The broker bounds what is to be acknowledged, the number of notifications what nobody heard, and
/// the bytes are those of messages at QoS 0, which nobody else bounds.
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

    /// Takes the oldest.
    fn chunk(&mut self) -> Vec<Held> {
        let chunk = self.held.len().min(limits::BROKER_HELD_CHUNK);
        let chunk: Vec<_> = self.held.drain(..chunk).collect();
        self.bytes -= chunk.iter().map(Held::unbounded_bytes).sum::<usize>();
        chunk
    }

    /// Drops the messages, with the connection that they came over.
    fn lost(&mut self) {
        self.held.retain(|held| matches!(held, Held::Unheard(..)));
        self.bytes = 0;
    }

    /// Whether a message at QoS 0 can wait here. A request cannot: the answer would only say that it needs QoS 1.
    fn has_room_for(&self, publish: &Publish) -> bool {
        request_topic(&publish.topic).is_none()
            && self.bytes + bytes(publish) <= limits::BROKER_HELD_BYTES_MAX
    }
}

impl Held {
    fn unbounded_bytes(&self) -> usize {
        match self {
            Self::Message(publish, None) => bytes(publish),
            Self::Message(_, Some(_)) | Self::Unheard(..) => 0,
        }
    }
}

fn bytes(publish: &Publish) -> usize {
    publish.size() + limits::BROKER_OUTBOX_OVERHEAD_BYTES
}

/// What the store is told.
enum Told {
    Asked(Asked, Option<u64>),
    Gone(Peer),
    Unheard(Peer, Vec<u8>),
}

impl Told {
    fn inbound(&self, rules: Option<&Authorizer>) -> Inbound<'_> {
        match self {
            Self::Asked(asked, receipt) => {
                let grants = rules.map(|it| it.grants_of(&asked.peer) as _);
                Inbound::Publish(asked.incoming(grants), receipt.map(Ticket::Foreign))
            }
            Self::Gone(peer) => Inbound::Gone(peer),
            Self::Unheard(peer, key) => Inbound::Unheard(peer, key),
        }
    }
}

impl Foreign {
    /// Whether nothing more is looked at for now.
    fn waits(&self, state: &State) -> bool {
        state.is_full() || self.closed.load(Relaxed)
    }

    /// Reads what came. What is no request is settled at once.
    fn read(&self, held: Vec<Held>) -> Vec<Told> {
        let now = Instant::now();
        let mut told = Vec::new();
        let (mut settled, mut asked, mut malformed) = (Vec::new(), 0, 0);
        for held in held {
            let (publish, receipt) = match held {
                Held::Unheard(peer, key) => {
                    told.push(Told::Unheard(peer, key));
                    continue;
                }
                Held::Message(publish, receipt) => (publish, receipt),
            };
            let Some(topic) = request_topic(&publish.topic) else {
                self.hear(&publish, &mut told);
                settled.extend(receipt);
                continue;
            };
            match Asked::new(topic, publish, now) {
                Ok(request) => {
                    self.renew(&request.peer, now);
                    asked += usize::from(receipt.is_some());
                    told.push(Told::Asked(request, receipt));
                }
                Err(bad) => {
                    malformed += 1;
                    settled.extend(receipt);
                    if let Bad::ResponseTopic(peer, text) = bad {
                        self.broke_a_rule(&peer, text);
                    }
                }
            }
        }
        let mut state = self.state();
        state.unsettled += asked;
        state.sums.malformed += malformed;
        for receipt in settled {
            state.outlet.settle(receipt);
        }
        told
    }

    /// A message that is no request tells of clients.
    fn hear(&self, publish: &Publish, told: &mut Vec<Told>) {
        let topic = String::from_utf8_lossy(&publish.topic);
        let is_here = |claim: &&Mutex<Claim>| *topic == *lock(claim).topic();
        if let Some(claim) = self.claim.as_ref().filter(is_here) {
            let meaning = lock(claim).read(&publish.payload, publish.retain);
            match meaning {
                Meaning::Nothing => {}
                Meaning::Overtake => self.claim(),
                Meaning::TakenOver => self.taken_over(),
            }
            return;
        }
        lock(&self.presence).read(&topic, &publish.payload, &mut |client| {
            told.push(Told::Gone(identity::named(client)));
        });
    }

    /// Whether requests are taken now. While they are not, nobody is silent by their own choice.
    fn listens(&self, listens: bool, now: Instant) {
        let Some(ttl) = &self.ttl else {
            return;
        };
        match listens {
            true => lock(ttl).hears(now),
            false => lock(ttl).deafen(),
        }
    }

    /// A sign of life.
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
            // A retained request would run at each connection.
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
        // Where it stands, nobody else's is in its place unless the session was another's meanwhile. Then that is shown,
        // and must not be replaced before.
        let stands = (self.claim.as_ref()).is_some_and(|claim| lock(claim).stands());
        if !resumed || !stands {
            self.claim();
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
        let mut heard = Vec::new();
        let waits = {
            let mut state = self.state();
            for arrival in arrivals.drain(..) {
                match arrival {
                    Arrival::Message(publish, None)
                        if self.waits(&state) && !held.has_room_for(&publish) =>
                    {
                        state.sums.dropped += 1;
                    }
                    Arrival::Message(publish, receipt) => {
                        held.push(Held::Message(publish, receipt));
                    }
                    Arrival::Acknowledged(number, ack) => match state.acknowledged(number, &ack) {
                        Some(Watcher::Heard(peer)) => heard.push(peer),
                        Some(Watcher::Unheard(peer, key)) => {
                            held.push(Held::Unheard(peer, key));
                        }
                        None => {}
                    },
                }
            }
            self.waits(&state)
        };
        let now = Instant::now();
        for peer in heard {
            self.renew(&peer, now);
        }
        self.listens(!waits, now);
        drop(held);
        while !self.waits(&self.state()) {
            let chunk = lock(&self.held).chunk();
            if chunk.is_empty() {
                return;
            }
            let told = self.read(chunk);
            let rules = self.rules.get().map(|it| &**it);
            self.intake
                .take(&mut told.iter().map(|it| it.inbound(rules)));
        }
    }

    fn lost(&self, why: &str) -> bool {
        // What was not acknowledged comes again, or is lost to the broker too.
        lock(&self.held).lost();
        self.listens(false, Instant::now());
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
    use crate::config::ForeignConfig;
    use crate::transport::{Outbound, Transport};

    /// Answers each request at once.
    #[derive(Default)]
    struct Store {
        transport: Mutex<Weak<Foreign>>,
        told: Mutex<usize>,
    }

    impl crate::transport::Intake for Store {
        fn take_within(
            &self,
            _: std::time::Duration,
            batch: &mut dyn Iterator<Item = Inbound<'_>>,
        ) {
            let transport = lock(&self.transport).upgrade().unwrap();
            for _ in batch {
                *lock(&self.told) += 1;
                let message = Message {
                    topic: "answers".into(),
                    ..Message::default()
                };
                let mut ready = vec![Outbound::Answer(message, None)];
                transport.deliver(&mut |out| out.append(&mut ready));
            }
        }
    }

    fn scene() -> (Arc<Store>, Arc<Foreign>) {
        let store = Arc::new(Store::default());
        let config = ForeignConfig {
            broker: "mqtt://broker".parse().unwrap(),
            user: None,
            password: None,
            password_file: None,
            ca: None,
            certificate: None,
            client_id: None,
            keeps_client_id: true,
            window: 64,
            keep_alive: limits::BROKER_CONNECT_TIMEOUT,
            presence: crate::config::PresenceKind::Off,
            watch_ttl: None,
            standby: false,
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

    /// Leaves room for so many.
    fn fill(foreign: &Foreign, room: usize) {
        let mut state = foreign.state();
        while state.outlet.len() < limits::BROKER_OUTBOX_HOLD - room {
            let peer = identity::named("watcher");
            state.take(Outbound::Notify(peer, Message::default(), None));
        }
    }

    fn empty(foreign: &Foreign) {
        foreign.state().outlet.drain().for_each(drop);
    }

    #[test]
    fn requests_at_qos_zero_do_not_wait_for_the_outbox() {
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
        assert_eq!(*lock(&store.told), 1);
    }

    #[test]
    fn what_else_comes_at_qos_zero_waits_within_a_bound() {
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
    fn a_loss_of_the_connection_empties_what_waits() {
        let (_, foreign) = scene();
        fill(&foreign, 0);
        arrive(&foreign, "$SYS/broker/log/N", 10, None);
        Owner::lost(&*foreign, "the broker closed it");
        assert_eq!(lock(&foreign.held).bytes, 0);
    }

    #[test]
    fn what_waited_runs_as_far_as_there_is_room_for_what_it_leads_to() {
        let (store, foreign) = scene();
        fill(&foreign, 0);
        for receipt in 0..3 * limits::BROKER_HELD_CHUNK as u64 {
            arrive(&foreign, REQUEST_TOPIC, 10, Some(receipt));
        }
        empty(&foreign);
        fill(&foreign, 1);
        foreign.arrived(&mut Vec::new());
        assert_eq!(*lock(&store.told), limits::BROKER_HELD_CHUNK);
    }
}
