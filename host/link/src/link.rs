//! The task that owns the connection. It polls rumqttc and calls the owner. It must never publish
//! from here, because it would wait for room that only polling frees.
//!
//! This module and [`crate::outlet`] work around these faults of rumqttc 0.25:
//! * It drops its messages when a reconnect finds no session. The ledger resends them.
//! * It resends without DUP. The outlet sets the flag.
//! * It waits for ever for a packet id that was acknowledged out of order, and it fails when a
//!   broker reconnects with a smaller Receive Maximum. In both cases rumqttc is rebuilt.
//! * It sends no PUBACK while as many messages are in flight as the broker allows. The outlet stays
//!   one below that number.
//! * It cannot read a PUBACK with a reason code that MQTT 5 defines for other packets, and does not
//!   report its packet id. The ledger finds the message that was refused.
//! * It connects to the addresses of a name within one time limit, always in the same order. See
//!   [`crate::addresses`].
//! * A write to a broker that does not read blocks for ever, and no PINGREQ is sent then. Each poll
//!   has a time limit.

use std::sync::{Arc, Mutex, TryLockError};
use std::time::Duration;

use rumqttc::Outgoing as Sent;
use rumqttc::v5::mqttbytes::v5::{ConnAck, Filter, Packet, PubAck, Publish, SubscribeReasonCode};
use rumqttc::v5::{AsyncClient, ConnectionError, Event, EventLoop, MqttOptions};
use tokio::sync::Notify;
use tokio::task::spawn_blocking;
use tokio::time::error::Elapsed;
use tokio::time::{Instant, sleep, sleep_until, timeout};

use crate::addresses::Attempts;
use crate::limits;
use crate::loss::{
    Blame, describe_loss, is_rate_refusal, is_refusal, is_takeover, is_unavailable, needs_rebuild,
};
use crate::options::{Options, Place};
use crate::outlet::{Message, Outlet};
use crate::random::random;

/// The owner of a session.
pub trait Owner: Send + Sync + 'static {
    /// The type of the messages that it sends.
    type Message: Message;

    /// Calls `work` with the outlet, usually under a lock. `work` never calls the owner.
    fn with<R>(&self, work: impl FnOnce(&mut Outlet<Self::Message>) -> R) -> R;

    /// Notified when the link must end.
    fn stopping(&self) -> &Notify;

    /// The filters to subscribe to on each connection. There must be at least one.
    fn filters(&self) -> Vec<Filter>;

    /// A connection is established but not yet subscribed.
    fn connected(self: &Arc<Self>, accepted: Accepted);

    /// The broker has answered the SUBSCRIBE, with one code per filter.
    fn subscribed(&self, granted: &[SubscribeReasonCode]) -> Verdict;

    /// Receives everything that arrived, in order. Called after each read, even if nothing arrived.
    /// Entries that remain in the list are dropped.
    fn arrived(&self, arrivals: &mut Vec<Arrival>);

    /// The connection was lost or could not be established. `why` is the second half of a sentence.
    /// Returning false ends the link.
    fn lost(&self, why: &str) -> bool;

    /// The broker ended the connection because it stops or has no leader at present, or without a
    /// reason. Like [`Owner::lost`], but another attempt may succeed soon.
    fn unavailable(&self, why: &str) -> bool {
        self.lost(why)
    }

    /// The broker refused this client: its password, its rights or its client id. Like
    /// [`Owner::lost`], but another attempt gets the same answer until the broker is changed,
    /// or for a minute if it `passes`: other clients of the address logged in too often.
    fn refused(&self, why: &str, _passes: bool) -> bool {
        self.lost(why)
    }

    /// Another connection took over the session (MQTT 5 section 3.1.4, DISCONNECT 0x8E). Returns
    /// whether the link ends with [`End::TakenOver`], because a reconnection would take the session
    /// back, and so on for ever. Otherwise this is a lost connection like any other.
    fn ends_when_taken_over(&self) -> bool {
        true
    }

    /// The broker closes the connection because of this message, so it was removed from the ledger.
    /// `why` is the second half of a sentence.
    fn hopeless(&self, message: Self::Message, why: &str);

    /// The broker refused this message with this reason code of a PUBACK, which rumqttc cannot
    /// read: see [`describe_reason`](crate::describe_reason). It was removed from
    /// the ledger, and the connection was lost. The PUBACK of the message that caused it is not
    /// sent, so the broker redelivers that one.
    fn unacceptable(&self, message: Self::Message, code: u8);

    /// Returns the address and the credentials for the next connection if they may have changed,
    /// for example the certificates in files. Called before each further attempt, on a thread that
    /// may block. If it does not return within 2 s, its result is ignored: the attempt uses the
    /// place before. It is not called again until it returns.
    fn place(&self) -> Option<Place> {
        None
    }

    /// No further connection will be established. This is the last call.
    fn ended(&self, end: End);
}

/// What the broker said when it accepted a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Accepted {
    /// Whether it has the session of an earlier connection.
    pub session_present: bool,
    /// Whether it takes retained messages. Otherwise none may be sent (MQTT 5 [MQTT-3.2.2-14]).
    pub retain_available: bool,
}

/// The decision of an owner about the answer to its subscriptions.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Verdict {
    /// Continue with these subscriptions.
    GoOn,
    /// Reconnect and subscribe again later. The text is the second half of a sentence.
    TryAgain(String),
    /// End the link.
    End,
}

/// A packet from the broker.
#[derive(Debug)]
pub enum Arrival {
    /// A message. The number is its receipt if the owner acknowledges by hand.
    Message(Publish, Option<u64>),
    /// The PUBACK of the message with this number.
    Acknowledged(u64, PubAck),
}

/// Why no further connection will be established.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum End {
    /// The owner ended the link, or the link panicked.
    Closed,
    /// Another client took over the session: see [`Owner::ends_when_taken_over`].
    TakenOver(String),
}

/// Runs until the owner ends the link, or another client takes over the session and the owner does
/// not take it back.
pub async fn run<O: Owner>(owner: Arc<O>, options: Options) {
    // Callers may wait for the end, so [`Owner::ended`] must be called even after a panic.
    let mut end = EndOnDrop(Arc::clone(&owner), End::Closed);
    let mut link = Link::new(Arc::clone(&owner), options);
    let mut closing: Option<Instant> = None;
    let asking = Arc::<Mutex<()>>::default();
    loop {
        let polled = tokio::select! {
            polled = link.poll() => polled,
            () = owner.stopping().notified(), if closing.is_none() => {
                // This cancels the poll above, which may lose an acknowledgement. That is harmless
                // when the link ends.
                let filters = link.filters_to_remove();
                if !link.owner.with(|outlet| outlet.disconnect(filters)) {
                    return;
                }
                closing = Some(Instant::now() + limits::CLOSE_WAIT);
                continue;
            }
            () = sleep_until(closing.unwrap_or_else(Instant::now)), if closing.is_some() => return,
        };
        let (mut refusal, mut taken_over, mut unavailable) = (None, false, false);
        let (why, rebuild, blame) = match polled {
            Ok(Ok(event)) => match link.take(Some(event)) {
                Next::Poll => continue,
                Next::End => return,
                Next::Rebuild(why) => (why, true, Blame::NoMessage),
            },
            Ok(Err(error)) => {
                let connected = link.connected;
                let why = describe_loss(&error, connected);
                // rumqttc reads ahead, so process what arrived before the loss.
                let rebuild = match link.take(None) {
                    Next::Poll => needs_rebuild(&error),
                    Next::End => return,
                    // Otherwise the next connection would begin with the events that are left.
                    Next::Rebuild(_) => true,
                };
                taken_over = is_takeover(&error);
                if taken_over && link.owner.ends_when_taken_over() {
                    end.1 = End::TakenOver(why);
                    return;
                }
                refusal = is_refusal(&error).then(|| is_rate_refusal(&error));
                unavailable = is_unavailable(&error);
                (why, rebuild, Blame::of(&error, connected))
            }
            Err(_) => {
                let why = "the broker does not read any more".to_owned();
                (why, true, Blame::NoMessage)
            }
        };
        link.lost(rebuild, blame, &why);
        if closing.is_some() {
            return;
        }
        let goes_on = match refusal {
            Some(passes) => link.owner.refused(&why, passes),
            None if unavailable => link.owner.unavailable(&why),
            None => link.owner.lost(&why),
        };
        if !goes_on {
            return;
        }
        let pause = cut(match refusal {
            Some(_) => limits::REFUSED_PAUSE,
            None if taken_over => limits::TAKEOVER_PAUSE,
            None => link.pause,
        });
        let (owner, asking) = (link.owner.clone(), asking.clone());
        let place = async {
            sleep(pause).await;
            next_place(owner, asking).await
        };
        tokio::select! {
            place = place => if let Some(place) = place {
                link.ours.place = place;
            },
            () = link.owner.stopping().notified() => return,
        }
        link.pause = link.pause.saturating_mul(2).min(link.ours.pauses.1);
    }
}

/// Asks the owner for a new place. After a panic, or if it takes too long, the link uses the place
/// that it has.
async fn next_place<O: Owner>(owner: Arc<O>, asking: Arc<Mutex<()>>) -> Option<Place> {
    let asked = spawn_blocking(move || {
        // Calls that never return must not take one thread per attempt.
        let turn = asking.try_lock();
        if matches!(turn, Err(TryLockError::WouldBlock)) {
            return None;
        }
        owner.place()
    });
    let place = timeout(limits::PLACE_TIME, asked).await;
    place.map(Result::unwrap_or_default).unwrap_or_default()
}

/// Returns between half and all of the pause, so that clients that lost the same broker do not all
/// reconnect at once.
fn cut(pause: Duration) -> Duration {
    let share = random() % 1000;
    // Cannot lose precision: the value is below 1000.
    pause.mul_f64(0.5 + share as f64 / 2000.0)
}

struct EndOnDrop<O: Owner>(Arc<O>, End);

impl<O: Owner> Drop for EndOnDrop<O> {
    fn drop(&mut self) {
        self.0.ended(self.1.clone());
    }
}

enum Next {
    Poll,
    End,
    /// The connection must be closed and rumqttc rebuilt. The text says why.
    Rebuild(String),
}

struct Link<O> {
    owner: Arc<O>,
    ours: Options,
    /// Whether the next connection begins a new session.
    clean_start: bool,
    client: AsyncClient,
    events: EventLoop,
    attempts: Attempts,
    /// Whether the broker has accepted the connection.
    connected: bool,
    pause: Duration,
    /// The broker's Receive Maximum. rumqttc handles an increase but not a decrease.
    receive_max: Option<u16>,
    /// Reused by each read.
    arrivals: Vec<Arrival>,
}

impl<O: Owner> Link<O> {
    fn new(owner: Arc<O>, ours: Options) -> Self {
        let (client, events) = AsyncClient::new(ours.mqtt(), ours.channel());
        Self {
            owner,
            pause: ours.pauses.0,
            clean_start: !ours.resume,
            ours,
            client,
            events,
            attempts: Attempts::default(),
            connected: false,
            receive_max: None,
            arrivals: Vec::new(),
        }
    }

    /// Polls rumqttc, or connects it, which has time limits of its own.
    async fn poll(&mut self) -> Result<Result<Event, ConnectionError>, Elapsed> {
        if self.connected {
            return timeout(self.poll_timeout(), self.events.poll()).await;
        }
        let (ours, clean_start) = (&self.ours, self.clean_start);
        let configure = |mqtt: MqttOptions| ours.configured(mqtt, clean_start);
        let (attempts, events) = (&mut self.attempts, &mut self.events);
        let connecting = attempts.connect(events, &ours.place, &ours.client_id, configure);
        Ok(connecting.await)
    }

    /// The subscriptions that the end of the link removes, so that the broker may evict the
    /// session. rumqttc cannot set the Session Expiry Interval of a DISCONNECT to 0.
    fn filters_to_remove(&self) -> Vec<Filter> {
        match self.ours.resume {
            // Another process may resume the session.
            true => Vec::new(),
            false => self.owner.filters(),
        }
    }

    /// The longest possible poll, because a PINGREQ is an event.
    fn poll_timeout(&self) -> Duration {
        // The broker may have set another keep alive than ours.
        let options = &self.events.options;
        let connecting = Duration::from_secs(options.connection_timeout());
        connecting.saturating_add(2 * options.keep_alive())
    }

    /// Processes an event and everything else that rumqttc has read.
    fn take(&mut self, first: Option<Event>) -> Next {
        let mut arrivals = std::mem::take(&mut self.arrivals);
        let mut next = Next::Poll;
        let mut event = first.or_else(|| self.events.state.events.pop_front());
        while let Some(it) = event {
            next = self.event(it, &mut arrivals);
            if !matches!(next, Next::Poll) {
                break;
            }
            event = self.events.state.events.pop_front();
        }
        self.owner.arrived(&mut arrivals);
        arrivals.clear();
        self.arrivals = arrivals;
        let pending = &mut self.events.pending;
        self.owner.with(|outlet| {
            outlet.send_again(pending);
            outlet.flush();
        });
        next
    }

    fn event(&mut self, event: Event, arrivals: &mut Vec<Arrival>) -> Next {
        let by_hand = self.ours.by_hand;
        match event {
            Event::Incoming(Packet::ConnAck(ack)) => return self.accepted(&ack),
            Event::Incoming(Packet::SubAck(ack)) => {
                match self.owner.subscribed(&ack.return_codes) {
                    Verdict::GoOn => {}
                    Verdict::TryAgain(why) => return Next::Rebuild(why),
                    Verdict::End => return Next::End,
                }
                self.owner.with(Outlet::subscribed);
            }
            Event::Outgoing(Sent::Disconnect) => return Next::End,
            Event::Outgoing(Sent::AwaitAck(_)) => {
                return Next::Rebuild("the broker acknowledges out of order".to_owned());
            }
            Event::Outgoing(Sent::Publish(packet_id)) => {
                self.owner.with(|outlet| outlet.sent(packet_id));
            }
            Event::Incoming(Packet::Publish(publish)) => {
                arrivals.push(self.owner.with(|outlet| outlet.received(publish, by_hand)));
            }
            Event::Incoming(Packet::PubAck(ack)) => {
                arrivals.extend(self.owner.with(|outlet| outlet.acknowledged(ack)));
            }
            _ => {}
        }
        Next::Poll
    }

    fn accepted(&mut self, ack: &ConnAck) -> Next {
        self.connected = true;
        let properties = ack.properties.as_ref();
        let ours = self.ours.in_flight_max;
        let receive_max = properties.and_then(|it| it.receive_max);
        let receive_max = receive_max.map_or(ours, |max| max.min(ours));
        let before = self.receive_max.replace(receive_max);
        if before.is_some_and(|before| receive_max < before) {
            let why = "the broker reduced its Receive Maximum";
            return Next::Rebuild(why.to_owned());
        }
        if self.events.options.keep_alive().is_zero() {
            // A Server Keep Alive of 0 turns the timer off (MQTT 5 section 3.2.2.3.14), but rumqttc
            // would then send PINGREQ without a pause.
            let keep_alive = self.ours.sent_keep_alive();
            self.events.options.set_keep_alive(keep_alive);
        }
        // Later connections must resume this session, because a store recognizes a duplicate
        // request only within its session.
        self.clean_start = false;
        let filters = self.owner.filters();
        if self.client.try_subscribe_many(filters).is_err() {
            return Next::Rebuild("the send queue has no room for the SUBSCRIBE".to_owned());
        }
        let ours = self.ours.sent_bytes_max;
        let packet_bytes_max = properties
            .and_then(|p| p.max_packet_size)
            .map_or(ours, |max| max.min(ours));
        let packet_bytes_max = usize::try_from(packet_bytes_max).unwrap_or(usize::MAX);
        let client = self.client.clone();
        self.owner.with(|outlet| {
            outlet.up(client, ack.session_present, packet_bytes_max, receive_max);
        });
        self.owner.connected(Accepted {
            session_present: ack.session_present,
            retain_available: properties.and_then(|p| p.retain_available) != Some(0),
        });
        Next::Poll
    }

    /// Synchronizes the outlet with rumqttc after the connection was lost, and passes the message
    /// that is certainly the cause to the owner.
    fn lost(&mut self, rebuild: bool, blame: Blame, why: &str) {
        let rebuild = rebuild || self.events.state.collision.is_some();
        let events = &mut self.events;
        let (rejected, is_stable) = self.owner.with(|outlet| {
            let rejected = outlet.down(rebuild, blame);
            // Under the lock, because publishers could use rumqttc until the line above. The outlet
            // stores all of it.
            events.clean();
            events.pending.clear();
            (rejected, outlet.is_stable())
        });
        if std::mem::take(&mut self.connected) && is_stable {
            self.pause = self.ours.pauses.0;
        }
        if rebuild {
            (self.client, self.events) = AsyncClient::new(self.ours.mqtt(), self.ours.channel());
            self.receive_max = None;
        }
        match (rejected, blame) {
            (Some(message), Blame::Puback(code)) => self.owner.unacceptable(message, code),
            (Some(message), _) => self.owner.hopeless(message, why),
            (None, _) => {}
        }
    }
}
