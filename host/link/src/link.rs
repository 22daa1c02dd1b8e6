//! The task that owns the connection. Enters: rumqttc's events. Leaves: calls on the owner. It only polls: publishing
//! from here could wait for room that only polling makes.
//!
//! rumqttc 0.25 needs help with these, all of it here and in [`crate::outlet`]:
//! * it forgets what it holds when a reconnect finds no session (the ledger sends it again);
//! * it sends again without DUP (set in the outlet);
//! * it waits for ever for a packet id that was acknowledged out of order, and goes astray when a broker comes back with
//!   a smaller Receive Maximum (both: start rumqttc anew);
//! * it sends no PUBACK while as many messages are in flight as the broker allows (the outlet stays one below);
//! * a write to a broker that does not read waits for ever, and no PINGREQ is due meanwhile (a bound around each poll).

use std::sync::Arc;
use std::time::Duration;

use rumqttc::Outgoing as Sent;
use rumqttc::v5::mqttbytes::v5::{ConnAck, Filter, Packet, PubAck, Publish, SubscribeReasonCode};
use rumqttc::v5::{AsyncClient, Event, EventLoop, MqttOptions};
use tokio::sync::Notify;
use tokio::time::{Instant, sleep, sleep_until, timeout};

use crate::limits;
use crate::loss::{Blame, describe, is_confused, is_final};
use crate::options::Options;
use crate::outlet::{Message, Outlet};
use crate::random::random;

/// Whose session it is.
pub trait Owner: Send + Sync + 'static {
    /// What it keeps of a message that it sends.
    type Message: Message;

    /// Lends the outlet. Nothing here calls the owner meanwhile.
    fn with<R>(&self, work: impl FnOnce(&mut Outlet<Self::Message>) -> R) -> R;

    /// Notified when the link is to end.
    fn stopping(&self) -> &Notify;

    /// What to subscribe to, on each connection. At least one.
    fn filters(&self) -> Vec<Filter>;

    /// There is a connection, which is not subscribed yet.
    fn connected(self: &Arc<Self>, session_present: bool);

    /// The broker has answered the SUBSCRIBE, filter by filter.
    fn subscribed(&self, granted: &[SubscribeReasonCode]) -> Verdict;

    /// What came, in the order it came in; called after each read, also where there is nothing. What is left is dropped.
    fn arrived(&self, arrivals: &mut Vec<Arrival>);

    /// The connection is lost, or could not be made; why is the end of a sentence. False ends the link.
    fn lost(&self, why: &str) -> bool;

    /// The broker closes the connection because of this message, which is not in the ledger any more; why is the end of
    /// a sentence.
    fn hopeless(&self, message: Self::Message, why: &str);

    /// There will be no other connection. The last call.
    fn ended(&self, end: End);
}

/// What an owner makes of its subscriptions.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Verdict {
    /// They will do.
    GoOn,
    /// They will not; perhaps later they do. Why is the end of a sentence.
    TryAgain(String),
    /// They will not.
    End,
}

/// What came from the broker.
#[derive(Debug)]
pub enum Arrival {
    /// A message, and the number to settle it under, where that is the owner's part.
    Message(Publish, Option<u64>),
    /// The PUBACK of the message with this number.
    Acknowledged(u64, PubAck),
}

/// Why there will be no other connection.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum End {
    /// The owner wanted it, or the link panicked.
    Closed,
    /// Another client took the session over (MQTT 5 section 3.1.4, DISCONNECT 0x8E): connecting again would only throw
    /// that one out, and so on for ever.
    TakenOver(String),
}

/// Runs until the owner ends it, or another client takes the session over.
pub async fn run<O: Owner>(owner: Arc<O>, options: Options) {
    // Whatever ends this task, somebody may wait for it.
    let mut end = EndOnDrop(Arc::clone(&owner), End::Closed);
    let mut link = Link::new(owner, options);
    let mut closing: Option<Instant> = None;
    loop {
        let polled = tokio::select! {
            polled = timeout(link.patience(), link.events.poll()) => polled,
            () = link.owner.stopping().notified(), if closing.is_none() => {
                // Cancels the poll above, which may lose an acknowledgement: harmless, as we leave.
                if !link.owner.with(|outlet| outlet.say_goodbye()) {
                    return;
                }
                closing = Some(Instant::now() + limits::CLOSE_WAIT);
                continue;
            }
            () = sleep_until(closing.unwrap_or_else(Instant::now)), if closing.is_some() => return,
        };
        let (why, anew, blame) = match polled {
            Ok(Ok(event)) => match link.take(Some(event)) {
                Next::Poll => continue,
                Next::Leave => return,
                Next::StartAnew(why) => (why, true, Blame::Nobody),
            },
            Ok(Err(error)) => {
                let why = describe(&error);
                // rumqttc reads ahead: what came before the loss still counts.
                if matches!(link.take(None), Next::Leave) {
                    return;
                }
                if is_final(&error) {
                    end.1 = End::TakenOver(why);
                    return;
                }
                (why, is_confused(&error), Blame::of(&error))
            }
            Err(_) => {
                let why = "the broker does not read any more".to_owned();
                (why, true, Blame::Nobody)
            }
        };
        if let Some(message) = link.lost(anew, blame) {
            link.owner.hopeless(message, &why);
        }
        if closing.is_some() || !link.owner.lost(&why) {
            return;
        }
        tokio::select! {
            () = sleep(cut(link.pause)) => {}
            () = link.owner.stopping().notified() => return,
        }
        link.pause = (link.pause * 2).min(link.ours.pauses.1);
    }
}

/// Between a half and the whole, so that those who lost the same broker do not all come back at once.
fn cut(pause: Duration) -> Duration {
    let share = random() % 1000;
    // Far below what 32 bits hold.
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
    /// The owner wants no more.
    Leave,
    /// This connection cannot be kept, and rumqttc's state neither.
    StartAnew(String),
}

struct Link<O> {
    owner: Arc<O>,
    ours: Options,
    options: MqttOptions,
    client: AsyncClient,
    events: EventLoop,
    pause: Duration,
    /// The broker's Receive Maximum, which rumqttc survives growing but not shrinking.
    receive_max: Option<u16>,
    /// Filled and emptied at each read.
    arrivals: Vec<Arrival>,
}

impl<O: Owner> Link<O> {
    fn new(owner: Arc<O>, ours: Options) -> Self {
        let options = ours.mqtt();
        let (client, events) = AsyncClient::new(options.clone(), ours.channel());
        Self {
            owner,
            pause: ours.pauses.0,
            ours,
            options,
            client,
            events,
            receive_max: None,
            arrivals: Vec::new(),
        }
    }

    /// The longest that a poll can take, since a PINGREQ is an event.
    fn patience(&self) -> Duration {
        let connecting = Duration::from_secs(self.options.connection_timeout());
        // The broker may have named another keep alive.
        connecting + 2 * self.events.options.keep_alive()
    }

    /// Takes an event, and all that rumqttc has read besides it.
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
            Event::Incoming(Packet::ConnAck(ack)) => return self.connected(&ack),
            Event::Incoming(Packet::SubAck(ack)) => {
                match self.owner.subscribed(&ack.return_codes) {
                    Verdict::GoOn => {}
                    Verdict::TryAgain(why) => return Next::StartAnew(why),
                    Verdict::End => return Next::Leave,
                }
                self.pause = self.ours.pauses.0;
                self.owner.with(Outlet::subscribed);
            }
            Event::Outgoing(Sent::Disconnect) => return Next::Leave,
            Event::Outgoing(Sent::AwaitAck(_)) => {
                return Next::StartAnew("the broker acknowledges out of order".to_owned());
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

    fn connected(&mut self, ack: &ConnAck) -> Next {
        let properties = ack.properties.as_ref();
        let receive_max = properties
            .and_then(|p| p.receive_max)
            .map_or(self.ours.in_flight_max, |max| {
                max.min(self.ours.in_flight_max)
            });
        if self
            .receive_max
            .replace(receive_max)
            .is_some_and(|before| receive_max < before)
        {
            let why = "the broker came back with a smaller Receive Maximum";
            return Next::StartAnew(why.to_owned());
        }
        if self.events.options.keep_alive().is_zero() {
            // A Server Keep Alive of 0 turns the timer off (MQTT 5 section 3.2.2.3.14); rumqttc
            // would send PINGREQ without a pause.
            let keep_alive = self.options.keep_alive();
            self.events.options.set_keep_alive(keep_alive);
        }
        // From now on it is one session: a store knows a duplicate only within it.
        self.options.set_clean_start(false);
        self.events.options.set_clean_start(false);
        let filters = self.owner.filters();
        if self.client.try_subscribe_many(filters).is_err() {
            return Next::StartAnew("there is no room to subscribe".to_owned());
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
        self.owner.connected(ack.session_present);
        Next::Poll
    }

    /// Brings outlet and rumqttc to the same state after the connection is lost.
    fn lost(&mut self, anew: bool, blame: Blame) -> Option<O::Message> {
        let anew = anew || self.events.state.collision.is_some();
        let events = &mut self.events;
        let hopeless = self.owner.with(|outlet| {
            let hopeless = outlet.down(anew, blame);
            // Under the lock: somebody could send until the line above. The outlet has it all.
            events.clean();
            events.pending.clear();
            hopeless
        });
        if anew {
            (self.client, self.events) =
                AsyncClient::new(self.options.clone(), self.ours.channel());
            self.receive_max = None;
        }
        hopeless
    }
}
