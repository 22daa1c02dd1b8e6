//! Arrivals from a foreign broker: requests, PUBACKs, and messages about clients.
//!
//! Converts arrivals to batches for the store. The order of the broker must stay. If the store must
//! not execute more, the rest waits. The link calls [`Owner::arrived`] after each packet in either
//! direction, so the rest is passed on when output leaves or is acknowledged.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Instant;

use rumqttc::v5::mqttbytes::QoS;
use rumqttc::v5::mqttbytes::v5::{Filter, Publish, RetainForwardRule, SubscribeReasonCode};
use statehouse_link::{Accepted, Arrival, End, Outlet, Owner, Place, Verdict, describe_suback};
use tokio::sync::Notify;

use super::backlog::{Held, Input};
use super::claim::Meaning;
use super::incoming::{ForeignRequest, InvalidRequest, request_topic};
use super::outgoing::Outgoing;
use super::state::{State, Watcher};
use super::{Foreign, Phase, identity, lock};
use statehouse_core::request::{PREVIEW_TOPIC, REQUEST_TOPIC};
use statehouse_core::store::Peer;

impl Foreign {
    /// Whether arrivals must wait: there is too much output, the mark of a later run may arrive, or
    /// the store stops.
    fn is_paused(&self, state: &State) -> bool {
        state.is_full() || state.awaits_mark() || self.closed.load(Relaxed)
    }

    /// Handles the marks among the arrivals, which decide whether the others may be handled.
    fn read_marks(&self, arrivals: &mut Vec<Arrival>) {
        let Some(claim) = &self.claim else {
            return;
        };
        let is_mark = |it: &mut Arrival| match it {
            Arrival::Message(publish, _) => publish.topic == lock(claim).topic().as_bytes(),
            Arrival::Acknowledged(..) => false,
        };
        for mark in arrivals.extract_if(.., is_mark) {
            let Arrival::Message(publish, receipt) = mark else {
                continue;
            };
            let meaning = lock(claim).read(&publish.payload, publish.retain);
            match meaning {
                Meaning::Nothing => {}
                Meaning::Republish => _ = self.publish_mark(true),
                Meaning::TakenOver => self.taken_over(),
            }
            if let Some(receipt) = receipt {
                self.state().outlet.settle(receipt);
            }
        }
    }

    /// Adds arrivals to those that wait. Returns the clients that have taken a notification.
    fn receive(&self, arrivals: &mut Vec<Arrival>, now: Instant) -> Vec<Peer> {
        let mut subscribed = Vec::new();
        let mut held = lock(&self.held);
        let must_wait = !held.is_empty();
        let mut state = self.state();
        for arrival in arrivals.drain(..) {
            match arrival {
                Arrival::Message(publish, None)
                    if (must_wait || self.is_paused(&state)) && !held.has_room_for(&publish) =>
                {
                    state.sums.dropped += 1;
                }
                Arrival::Message(publish, receipt) => {
                    held.push(Held::Message(publish, receipt, now));
                }
                Arrival::Acknowledged(number, ack) => match state.acknowledged(number, &ack) {
                    Some(Watcher::Subscribed(peer)) => subscribed.push(peer),
                    Some(Watcher::Unsubscribed(peer, key)) => {
                        held.push(Held::Input(Input::Undeliverable(peer, key)));
                    }
                    None => {}
                },
            }
        }
        subscribed
    }

    /// Passes the oldest arrivals to the store. Returns false if there are none, or the rest must
    /// wait.
    fn pass_chunk(&self) -> bool {
        if self.is_paused(&self.state()) {
            return false;
        }
        let chunk = lock(&self.held).chunk();
        if chunk.is_empty() {
            return false;
        }
        let mut inputs = self.read(chunk);
        let passed = self.pass(&inputs);
        let passed_all = passed == inputs.len();
        lock(&self.held).put_back(inputs.drain(passed..));
        passed_all
    }

    /// Passes inputs to the store until one must wait. Returns how many the store has taken.
    fn pass(&self, inputs: &[Input]) -> usize {
        let rules = self.rules.as_deref();
        let mut passed = 0;
        let mut batch = std::iter::from_fn(|| {
            let input = inputs.get(passed).filter(|it| self.begin(it))?;
            passed += 1;
            Some(input.inbound(rules))
        });
        self.intake.take_with_room(&mut batch);
        passed
    }

    /// Counts an input that the store takes now. Returns false if it must wait. The caller may hold
    /// the store's lock, which no thread takes under the lock of the state.
    fn begin(&self, input: &Input) -> bool {
        let mut state = self.state();
        let begins = !self.is_paused(&state);
        if begins {
            state.unsettled += usize::from(input.needs_puback());
        }
        begins
    }

    /// Converts arrivals to inputs. Acknowledges at once all messages that are not valid requests.
    fn read(&self, held: Vec<Held>) -> Vec<Input> {
        let now = Instant::now();
        let mut inputs = Vec::new();
        let (mut settled, mut malformed, mut kicked) = (Vec::new(), 0, 0);
        for held in held {
            let (publish, receipt, arrived) = match held {
                Held::Input(input) => {
                    inputs.push(input);
                    continue;
                }
                Held::Message(publish, receipt, arrived) => (publish, receipt, arrived),
            };
            let Some(topic) = request_topic(&publish.topic) else {
                self.read_log(&publish, &mut inputs);
                settled.extend(receipt);
                continue;
            };
            match ForeignRequest::new(topic, publish, arrived) {
                Ok(request) => {
                    self.renew(&request.peer, now);
                    inputs.push(Input::Request(request, receipt));
                }
                Err(invalid) => {
                    settled.extend(receipt);
                    match invalid {
                        InvalidRequest::Malformed => malformed += 1,
                        InvalidRequest::ResponseTopic(peer, text) => {
                            kicked += 1;
                            self.log_violation(&peer, text);
                        }
                    }
                }
            }
        }
        let mut state = self.state();
        state.sums.malformed += malformed;
        state.sums.kicked += kicked;
        for receipt in settled {
            state.outlet.settle(receipt);
        }
        inputs
    }

    /// Reads a message of the broker's log about clients.
    fn read_log(&self, publish: &Publish, inputs: &mut Vec<Input>) {
        let topic = String::from_utf8_lossy(&publish.topic);
        let client = lock(&self.presence).read(&topic, &publish.payload);
        inputs.extend(client.map(|it| Input::Disconnected(identity::named(it))));
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

    /// Logs once that the broker refuses a subscription without which the store still works. Those
    /// of presence have a log line of their own.
    fn report_subscription(&self, filter: &str, is_granted: bool) {
        let claim = self.claim.as_ref();
        let consequence = if filter == PREVIEW_TOPIC {
            "clients with the preview dialect get no response"
        } else if claim.is_some_and(|claim| lock(claim).topic() == filter) {
            "the store may not detect that another one took its client id"
        } else {
            return;
        };
        if self.state().note_subscription(filter, is_granted) {
            tracing::warn!(
                "the broker does not let the store subscribe to {filter}, so {consequence}: check the broker's access rules"
            );
        }
    }

    /// Logs that the connection is stable again, or that the broker does not deliver this run's
    /// mark. The link calls this at least once per Keep Alive.
    pub(super) fn log_progress(&self, now: Instant) {
        let (is_stable, is_mark_due) = {
            let mut state = self.state();
            (state.note_stable(), state.is_mark_due(now))
        };
        if is_stable {
            tracing::info!("attached to {}", self.place);
        }
        if is_mark_due {
            self.report_undelivered_mark();
        }
    }

    /// Logs once that the broker took this run's mark and did not send it back. With `acl_file`
    /// Mosquitto grants every subscription, and drops what the subscriber may not read.
    fn report_undelivered_mark(&self) {
        let topic = match &self.claim {
            Some(claim) if !self.is_confirmed() => lock(claim).topic().to_owned(),
            _ => return,
        };
        if self.state().note_undelivered_mark(&topic) {
            tracing::warn!(
                "the broker does not deliver the store's own mark on {topic}, so the store may not detect that another one took its client id, and may receive no requests: check the broker's read rights of the store"
            );
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
            // At QoS 0, because requests that wait for the mark may fill the Receive Maximum.
            filters.push(Filter::new(mark, QoS::AtMostOnce));
        }
        filters
    }

    fn connected(self: &Arc<Self>, accepted: Accepted) {
        // Before its mark was at the broker, this run cannot find out which run is the later one.
        let checks_mark = self.is_confirmed();
        let mut state = self.state();
        state.connected(accepted, checks_mark);
        if state.note_retain(accepted.retain_available) && self.claim.is_some() {
            tracing::warn!(
                "the broker takes no retained messages, so the store may not detect that another one took its client id: see retain_available of Mosquitto"
            );
        }
        let session_present = accepted.session_present;
        tracing::debug!(session_present, "connected to {}", self.place);
    }

    fn subscribed(&self, granted: &[SubscribeReasonCode]) -> Verdict {
        for (filter, code) in self.filters().iter().zip(granted) {
            let is_granted =
                matches!(code, SubscribeReasonCode::Success(qos) if *qos >= filter.qos);
            if filter.path == REQUEST_TOPIC && !is_granted {
                return Verdict::TryAgain(format!(
                    "it does not let the store subscribe to {REQUEST_TOPIC} at QoS 1 ({})",
                    describe_suback(Some(code))
                ));
            }
            lock(&self.presence).subscribed(&filter.path, is_granted);
            self.report_subscription(&filter.path, is_granted);
        }
        let resumed = self.state().resumed;
        // A confirmed mark is still at the broker, unless another run used the session since. Then
        // the broker sends that run's mark, which must not be replaced before it is read.
        let mark = self.publish_mark(!resumed || !self.is_confirmed());
        let is_logged = {
            let mut state = self.state();
            state.subscribed(mark);
            state.note_attached()
        };
        if is_logged {
            tracing::info!("attached to {}", self.place);
        }
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
        let now = Instant::now();
        self.read_marks(arrivals);
        for peer in self.receive(arrivals, now) {
            self.renew(&peer, now);
        }
        while self.pass_chunk() {}
        let is_idle = lock(&self.held).is_empty();
        let receiving = is_idle && !self.is_paused(&self.state());
        self.set_receiving(receiving, now);
        self.log_progress(now);
    }

    fn ends_when_taken_over(&self) -> bool {
        // Without a mark, nothing else would stop two runs that take over from each other.
        let Some(claim) = &self.claim else {
            return true;
        };
        let mut claim = lock(claim);
        let state = self.state();
        state.lacks_retain() || state.is_refused(claim.topic()) || claim.taken_over()
    }

    fn lost(&self, why: &str) -> bool {
        // The broker redelivers messages without a PUBACK, unless it has lost them too.
        lock(&self.held).drop_messages();
        self.set_receiving(false, Instant::now());
        let mut state = self.state();
        state.lost();
        if state.note_loss(why) {
            tracing::warn!("no connection to {}: {why}; trying again", self.place);
        }
        true
    }

    fn hopeless(&self, message: Outgoing, why: &str) {
        self.state().hopeless(&message, why);
    }

    fn unacceptable(&self, message: Outgoing, code: u8) {
        self.state().unacceptable(&message, code);
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
mod tests;
