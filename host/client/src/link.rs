//! The task that owns the connection. Enters: rumqttc's events. Leaves: calls on the session. It
//! only polls: publishing from here could wait for room that only polling makes.
//!
//! rumqttc 0.25 needs help with four things, all of them here: it forgets what it holds when a
//! reconnect finds no session (the session sends it again); it re-sends without DUP (set here); it
//! waits for ever for a packet id that was acknowledged out of order, and it goes astray when a
//! broker comes back with a smaller Receive Maximum (both: start rumqttc anew).

use std::io;
use std::sync::Arc;
use std::time::Duration;

use rumqttc::v5::mqttbytes::v5::{
    ConnAck, ConnectProperties, DisconnectReasonCode, Filter, Packet, PubAck, PubAckReason, SubAck,
    SubscribeReasonCode,
};
use rumqttc::v5::mqttbytes::{Error as WireError, QoS};
use rumqttc::v5::{
    AsyncClient, ConnectionError, Event, EventLoop, MqttOptions, Request as Outgoing, StateError,
};
use rumqttc::{NetworkOptions, Outgoing as Sent};
use tokio::time::{Instant, sleep, sleep_until};

use crate::error::Error;
use crate::limits;
use crate::options::Options;
use crate::session::{Connection, Session, State};

/// rumqttc's options for ours.
pub(crate) fn mqtt_options(options: &Options, client_id: &str) -> MqttOptions {
    let mut mqtt = MqttOptions::new(client_id, options.host_in_address(), options.port);
    let keep_alive = options
        .keep_alive
        .clamp(limits::KEEP_ALIVE_MIN, limits::KEEP_ALIVE_MAX);
    let mut properties = ConnectProperties::new();
    let expiry_s = options.session_expiry.as_secs();
    properties.session_expiry_interval = Some(u32::try_from(expiry_s).unwrap_or(u32::MAX));
    properties.receive_maximum = Some(limits::IN_FLIGHT_MAX);
    properties.max_packet_size = u32::try_from(limits::PACKET_BYTES_MAX).ok();
    let mut network = NetworkOptions::new();
    network.set_tcp_nodelay(true);
    mqtt.set_keep_alive(keep_alive)
        .set_clean_start(true)
        .set_connection_timeout(options.timeout.as_secs().max(1))
        .set_connect_properties(properties)
        .set_network_options(network)
        .set_outgoing_inflight_upper_limit(limits::IN_FLIGHT_MAX);
    mqtt
}

/// Runs until the client is closed, the first connection fails, or another client takes the id.
pub(crate) async fn run(session: Arc<Session>, options: MqttOptions) {
    // Whatever ends this task, nobody waits for it afterwards.
    let _closed = CloseOnDrop(Arc::clone(&session));
    let mut link = Link::new(session, options);
    let mut closing: Option<Instant> = None;
    loop {
        let polled = tokio::select! {
            polled = link.events.poll() => polled,
            () = link.session.stopping.notified(), if closing.is_none() => {
                // Cancels the poll above, which may lose an acknowledgement: harmless, as we leave.
                if !link.say_goodbye() {
                    return;
                }
                closing = Some(Instant::now() + limits::CLOSE_WAIT);
                continue;
            }
            () = sleep_until(closing.unwrap_or_else(Instant::now)), if closing.is_some() => return,
        };
        let (why, anew) = match polled {
            Ok(Event::Outgoing(Sent::Disconnect)) => return,
            Ok(event) => match link.event(event) {
                Next::Poll => continue,
                Next::Leave => return,
                Next::StartAnew(why) => (why.to_owned(), true),
            },
            Err(error) => {
                let why = describe(&error);
                if link.read_before_loss() {
                    return;
                }
                if is_final(&error) {
                    let why = format!("{} closed the connection for good: {why}", link.address());
                    link.session.close(Error::Transport(why));
                    return;
                }
                (why, is_confused(&error))
            }
        };
        if closing.is_some() || link.first_attempt_failed(&why) {
            return;
        }
        link.lost(why, anew);
        tokio::select! {
            () = sleep(link.pause) => {}
            () = link.session.stopping.notified() => return,
        }
        link.pause = (link.pause * 2).min(limits::RECONNECT_PAUSE_MAX);
    }
}

struct CloseOnDrop(Arc<Session>);

impl Drop for CloseOnDrop {
    fn drop(&mut self) {
        self.0
            .close(Error::Transport("the client was closed".into()));
    }
}

enum Next {
    Poll,
    /// The session was closed.
    Leave,
    /// This connection cannot be kept, and rumqttc's state neither.
    StartAnew(&'static str),
}

struct Link {
    session: Arc<Session>,
    options: MqttOptions,
    client: AsyncClient,
    events: EventLoop,
    pause: Duration,
    /// The broker's Receive Maximum, which rumqttc survives growing but not shrinking.
    receive_max: Option<u16>,
}

impl Link {
    fn new(session: Arc<Session>, options: MqttOptions) -> Self {
        let (client, events) = AsyncClient::new(options.clone(), limits::CHANNEL_REQUESTS_MAX);
        Self {
            session,
            options,
            client,
            events,
            pause: limits::RECONNECT_PAUSE_MIN,
            receive_max: None,
        }
    }

    fn address(&self) -> &str {
        &self.session.address
    }

    /// Asks rumqttc to send DISCONNECT. False where there is nobody to send it to.
    fn say_goodbye(&self) -> bool {
        match &self.session.state().connection {
            Connection::Up(client) => client.try_disconnect().is_ok(),
            _ => false,
        }
    }

    fn event(&mut self, event: Event) -> Next {
        match event {
            Event::Incoming(Packet::ConnAck(ack)) => return self.connected(&ack),
            Event::Incoming(Packet::SubAck(ack)) => return self.subscribed(&ack),
            Event::Outgoing(Sent::AwaitAck(_)) => {
                return Next::StartAnew("the broker acknowledges out of order");
            }
            Event::Incoming(Packet::Publish(publish)) => self.session.message(&publish),
            Event::Incoming(Packet::PubAck(ack)) => self.acknowledged(&ack),
            Event::Outgoing(Sent::Publish(packet_id)) => {
                let mut state = self.session.state();
                state.ledger.sent(packet_id);
                self.session.flush(&mut state);
            }
            _ => {}
        }
        Next::Poll
    }

    /// rumqttc reads ahead: what came before the loss still counts. True where it is the end.
    fn read_before_loss(&mut self) -> bool {
        while let Some(event) = self.events.state.events.pop_front() {
            if matches!(self.event(event), Next::Leave) {
                return true;
            }
        }
        false
    }

    fn connected(&mut self, ack: &ConnAck) -> Next {
        let properties = ack.properties.as_ref();
        let receive_max = properties.and_then(|p| p.receive_max).unwrap_or(u16::MAX);
        if self
            .receive_max
            .replace(receive_max)
            .is_some_and(|before| receive_max < before)
        {
            return Next::StartAnew("the broker came back with a smaller Receive Maximum");
        }
        if self.events.options.keep_alive().is_zero() {
            // A Server Keep Alive of 0 turns the timer off (MQTT 5 section 3.2.2.3.14); rumqttc
            // would send PINGREQ without a pause.
            let keep_alive = self.options.keep_alive();
            self.events.options.set_keep_alive(keep_alive);
        }
        // From now on it is one session: the store knows a duplicate only within it.
        self.options.set_clean_start(false);
        self.events.options.set_clean_start(false);

        let names = &self.session.names;
        let filters = [
            names.response_topic.clone(),
            format!("{}+", names.notify_prefix),
        ]
        .map(|filter| Filter::new(filter, QoS::AtLeastOnce));
        if self.client.try_subscribe_many(filters).is_err() {
            return Next::StartAnew("there is no room to subscribe");
        }

        let mut state = self.session.state();
        let broker_max = properties.and_then(|p| p.max_packet_size);
        state.packet_bytes_max = broker_max
            .and_then(|max| usize::try_from(max).ok())
            .unwrap_or(usize::MAX)
            .min(limits::PACKET_BYTES_MAX);
        state.epoch += 1;
        state.connection = Connection::Up(self.client.clone());
        if !ack.session_present {
            state.ledger.new_session();
        }
        self.session.flush(&mut state);
        if state.epoch > 1 && Session::has_watches(&state) {
            tokio::spawn(Arc::clone(&self.session).watch_again(state.epoch));
        }
        Next::Poll
    }

    fn subscribed(&mut self, ack: &SubAck) -> Next {
        let [answers, notifications] = ack.return_codes[..] else {
            return Next::StartAnew("a SUBACK for other subscriptions than ours");
        };
        if !matches!(answers, SubscribeReasonCode::Success(_)) {
            self.session.close(Error::Rejected(format!(
                "it does not let this client subscribe to its answers ({answers:?})"
            )));
            return Next::Leave;
        }
        self.pause = limits::RECONNECT_PAUSE_MIN;
        let mut state = self.session.state();
        state.notifications_refused = match notifications {
            SubscribeReasonCode::Success(_) => None,
            refused => Some(format!(
                "it does not let this client subscribe to its notifications ({refused:?})"
            )),
        };
        if let Some(ready) = state.ready.take() {
            // Whoever asked for the connection may have given up.
            let _ = ready.send(Ok(()));
        }
        Next::Poll
    }

    /// A reason code of 0x80 or above is the end of the request; below, the answer will come.
    fn acknowledged(&self, ack: &PubAck) {
        let mut state = self.session.state();
        let Some(number) = state.ledger.acknowledged(ack.pkid) else {
            return;
        };
        let reason = match ack.reason {
            PubAckReason::Success => return,
            // Nobody is there to answer, and nobody will come for it: QoS 1 is over.
            PubAckReason::NoMatchingSubscribers => {
                "no state store is subscribed to requests".to_owned()
            }
            other => {
                let text = ack
                    .properties
                    .as_ref()
                    .and_then(|p| p.reason_string.clone());
                text.unwrap_or_else(|| format!("{other:?}"))
            }
        };
        if let Some(request) = state.ledger.remove(number) {
            let _ = request.done.send(Err(Error::Rejected(reason)));
        }
    }

    /// True where nobody has been connected yet: then the caller decides what to do.
    fn first_attempt_failed(&self, why: &str) -> bool {
        let failed = self.session.state().ready.is_some();
        if failed {
            let why = format!("cannot reach a state store at {}: {why}", self.address());
            self.session.close(Error::Transport(why));
        }
        failed
    }

    /// Brings ledger and rumqttc to the same state after the connection is lost.
    fn lost(&mut self, why: String, anew: bool) {
        let session = Arc::clone(&self.session);
        let mut state = session.state();
        state.connection = Connection::Down(why);
        // Again, under the lock: callers could send until the line above.
        self.events.clean();
        state.ledger.lost();
        if anew || self.events.state.collision.is_some() {
            self.start_anew(&mut state);
        } else {
            self.keep_in_flight(&state);
        }
    }

    /// Leaves to rumqttc only what has a packet id and a caller, in order. The rest is unsent in
    /// the ledger, and the SUBSCRIBE is sent on every connection anyway.
    fn keep_in_flight(&mut self, state: &State) {
        let mut again: Vec<_> = self
            .events
            .pending
            .drain(..)
            .filter_map(|request| match request {
                Outgoing::Publish(mut publish) => {
                    let number = state.ledger.in_flight(publish.pkid)?;
                    // MQTT 5 section 3.3.1.1: a PUBLISH that is sent again says so.
                    publish.dup = true;
                    Some((number, publish))
                }
                _ => None,
            })
            .collect();
        again.sort_by_key(|(number, _)| *number);
        self.events.pending = again
            .into_iter()
            .map(|(_, publish)| Outgoing::Publish(publish))
            .collect();
    }

    fn start_anew(&mut self, state: &mut State) {
        (self.client, self.events) =
            AsyncClient::new(self.options.clone(), limits::CHANNEL_REQUESTS_MAX);
        self.receive_max = None;
        // rumqttc clears these where the session is gone; where it is not, the store has seen them.
        let session = &self.session;
        self.events.pending = state
            .ledger
            .requeue_in_flight()
            .into_iter()
            .map(|(number, request)| {
                let mut publish = session.publish(number, request);
                publish.dup = true;
                Outgoing::Publish(publish)
            })
            .collect();
    }
}

/// Trying again would only take the session back from whoever took it.
fn is_final(error: &ConnectionError) -> bool {
    matches!(
        error,
        ConnectionError::MqttState(StateError::ServerDisconnect {
            reason_code: DisconnectReasonCode::SessionTakenOver,
            ..
        })
    )
}

/// rumqttc's own state may be wrong: everything but the connection itself failing.
fn is_confused(error: &ConnectionError) -> bool {
    match error {
        ConnectionError::MqttState(error) => !matches!(
            error,
            StateError::Io(_)
                | StateError::ConnectionAborted
                | StateError::ServerDisconnect { .. }
                | StateError::AwaitPingResp
                | StateError::Deserialization(_)
        ),
        _ => false,
    }
}

/// What happened, as the end of a sentence.
fn describe(error: &ConnectionError) -> String {
    match error {
        ConnectionError::Io(error)
        | ConnectionError::MqttState(
            StateError::Io(error) | StateError::Deserialization(WireError::Io(error)),
        ) => describe_io(error),
        ConnectionError::Timeout(_) => "no answer in time".into(),
        ConnectionError::ConnectionRefused(code) => {
            format!("the broker refused the connection ({code:?})")
        }
        ConnectionError::MqttState(StateError::ServerDisconnect {
            reason_code,
            reason_string,
        }) => match reason_string {
            Some(text) => format!("the broker closed it ({reason_code:?}: {text})"),
            None => format!("the broker closed it ({reason_code:?})"),
        },
        ConnectionError::MqttState(StateError::ConnectionAborted) => {
            "the broker closed it without a reason".into()
        }
        ConnectionError::MqttState(StateError::AwaitPingResp) => {
            "the broker does not answer any more".into()
        }
        other => other.to_string(),
    }
}

fn describe_io(error: &io::Error) -> String {
    match error.kind() {
        io::ErrorKind::ConnectionRefused => "connection refused".into(),
        io::ErrorKind::ConnectionReset | io::ErrorKind::BrokenPipe => "connection reset".into(),
        io::ErrorKind::HostUnreachable => "no route to the host".into(),
        io::ErrorKind::NetworkUnreachable => "no route to the network".into(),
        io::ErrorKind::TimedOut => "no answer in time".into(),
        _ => error.to_string(),
    }
}
