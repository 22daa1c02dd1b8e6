//! The life cycle of connections: new and resumed sessions, takeover, session expiry and wills
//! (sections 3.1, 3.14, 4.1). Checks of a CONNECT that need no state are in [`crate::admission`].

use statehouse_protocol::{ConnectionId, SessionId};
use std::{
    borrow::Cow,
    hash::BuildHasher,
    net::{IpAddr, SocketAddr},
    sync::Arc,
    time::{Duration, Instant},
};

use super::{
    Core, publish::Source, replace_entry, requester::Requester, room::NO_ROOM_FOR_SESSION,
    session_at,
};
use crate::{
    Identity, Limits, Origin, ProtocolVersion, ReasonCode, Refusal, Refused,
    change::Part,
    codec::{self, Connack, Connect, Disconnect, Violation, Will},
    ledger::{Account, Kind, Owner},
    limits::{PACKET_BYTES_MAX, STATE_BYTES_FLOOR, work},
    link::{Acks, Link},
    output::Output,
    router::SessionKey,
    session::Session,
};

/// A connection whose CONNACK was sent.
#[derive(Debug)]
pub(crate) struct Accepted {
    pub(crate) session: SessionKey,
    pub(crate) origin: Origin,
    pub(crate) version: ProtocolVersion,
    /// The account that the session's memory is charged to.
    pub(crate) account: Arc<Account>,
    /// The limits that the CONNACK announced.
    pub(crate) limits: Arc<Limits>,
    /// Whether the session was there before.
    pub(crate) is_resumed: bool,
    /// The connection ends after this much silence: one and a half times the Keep Alive.
    pub(crate) silence_max: Option<Duration>,
    /// The output of the connection that was taken over. Its last request must be handled before
    /// the first request of this connection.
    pub(crate) previous: Option<Arc<Output>>,
}

/// Reason code and text of a refused CONNECT.
pub(crate) type ConnectRefusal = (ReasonCode, &'static str);

impl Core {
    /// Handles a CONNECT. Puts the CONNACK and the unacknowledged and queued messages of a resumed
    /// session into the output.
    pub(crate) fn connect(
        &mut self,
        mut connect: Connect,
        identity: Arc<Identity>,
        peer: SocketAddr,
        output: &Arc<Output>,
        now: Instant,
    ) -> Result<Accepted, ConnectRefusal> {
        if self.shutting_down {
            let text = "the broker is shutting down";
            return Err((ReasonCode::SERVER_UNAVAILABLE, text));
        }
        let assigned = connect.client_id.is_empty();
        let client: Arc<str> = if assigned {
            self.assign_id()
        } else {
            connect.client_id.clone().into()
        };
        self.last_connection = self.last_connection.next();
        let mut origin = Origin {
            client: client.clone(),
            connection: self.last_connection,
            session: SessionId::NONE,
            identity,
        };
        let will = connect.will.take();
        // Must come before the core changes a session that another connection may have.
        self.authorize_connect(&origin, peer, will.as_ref())?;
        let session_expiry_s = self.granted_session_expiry_s(&connect, &origin, now);
        let keep_alive_s = self.granted_keep_alive_s(connect.version, connect.keep_alive_s);
        let assigned = assigned.then_some(&*client);
        let mut connack = self.connack(&connect, assigned, session_expiry_s, keep_alive_s);
        // Each of these properties binds the client, so the CONNACK must not omit any.
        if codec::connack_bytes(connect.version, &connack) > connect.packet_bytes_max as usize {
            let text = "CONNACK is larger than the Maximum Packet Size of this client";
            return Err(self.refuse_connect(&origin, peer, ReasonCode::PACKET_TOO_LARGE, text));
        }

        let existing = self.by_client.get(&client).copied();
        let account = (self.ledger).account(Owner::of(&origin.identity, peer.ip()));
        self.check_room(will.as_ref(), existing, &account, now)
            .map_err(|it| self.refuse_connect(&origin, peer, ReasonCode::QUOTA_EXCEEDED, it))?;
        let previous = existing.and_then(|key| {
            let user = origin.identity.user.as_deref();
            self.replace_connection(key, connect.clean_start, user, now)
        });
        // The existing session may have ended with its connection.
        let (key, present) = self.resumed_or_new_session(&client, &account);
        self.attach(key, &origin, &account, !present, session_expiry_s, will);
        origin.session = self.link(key, &connect, &origin, (peer.ip(), now), output)?;
        self.register_connection(key, &origin, now);

        connack.session_present = present;
        // The CONNACK reveals this session and the end of an earlier one, so it must wait until
        // both are durable.
        let barrier = self.change_log.barrier_for_all_changes();
        self.change_log.put(output, barrier, |out| {
            codec::connack(out, connect.version, &connack)
        });
        self.pump(key, now);
        let silence_max =
            (keep_alive_s > 0).then(|| Duration::from_millis(1500 * u64::from(keep_alive_s)));
        Ok(Accepted {
            session: key,
            origin,
            version: connect.version,
            account,
            limits: self.limits.clone(),
            is_resumed: present,
            silence_max,
            previous,
        })
    }

    /// Asks the access control whether this client may connect and publish its will.
    fn authorize_connect(
        &self,
        origin: &Origin,
        peer: SocketAddr,
        will: Option<&Will>,
    ) -> Result<(), ConnectRefusal> {
        let is_forbidden =
            |will: &Will| !(self.access).may_publish_will(origin, peer, &will.message.topic);
        let text = if !self.access.may_connect_from(origin, peer) {
            "this client may not connect with this client identifier"
        } else if will.is_some_and(is_forbidden) {
            "this client may not publish to the topic of its will"
        } else {
            return Ok(());
        };
        self.count_refused(Refused::Connect, ReasonCode::NOT_AUTHORIZED);
        Err((ReasonCode::NOT_AUTHORIZED, text))
    }

    /// The Session Expiry Interval that a CONNECT is granted. While the log has no room, a new
    /// session must not outlive its connection. The CONNACK announces the shorter expiry.
    fn granted_session_expiry_s(&self, connect: &Connect, origin: &Origin, now: Instant) -> u32 {
        let user = origin.identity.user.as_deref();
        let existing = self.session_of(&origin.client);
        let resumes = !connect.clean_start && existing.is_some_and(|it| it.is_resumable(user, now));
        match resumes || self.change_log.has_room() {
            true => connect
                .session_expiry_s
                .min(self.limits.session_expiry_max_s),
            false => 0,
        }
    }

    /// The Keep Alive that a CONNECT is granted. Zero means none, in the CONNECT and as a limit.
    /// A CONNACK of MQTT 3.1.1 cannot announce another one than the client requested.
    fn granted_keep_alive_s(&self, version: ProtocolVersion, requested: u16) -> u16 {
        match (requested, self.limits.keep_alive_max_s) {
            _ if version == ProtocolVersion::V311 => requested,
            (requested, 0) => requested,
            (0, max) => max,
            (requested, max) => requested.min(max),
        }
    }

    /// The CONNACK of a new session. It only holds values that differ from those of the CONNECT or
    /// from the defaults of the standard.
    fn connack<'a>(
        &self,
        connect: &'a Connect,
        assigned_client_id: Option<&'a str>,
        session_expiry_s: u32,
        keep_alive_s: u16,
    ) -> Connack<'a> {
        let receive_max = self.limits.receive_max.max(1);
        Connack {
            session_present: false,
            session_expiry_s: (session_expiry_s != connect.session_expiry_s)
                .then_some(session_expiry_s),
            receive_max: (receive_max != u16::MAX).then_some(receive_max),
            packet_bytes_max: u32::try_from(self.limits.packet_bytes_max)
                .unwrap_or(PACKET_BYTES_MAX)
                .min(PACKET_BYTES_MAX),
            assigned_client_id,
            topic_alias_max: self.limits.topic_alias_max,
            server_keep_alive_s: (keep_alive_s != connect.keep_alive_s).then_some(keep_alive_s),
            method: connect.enhanced.as_ref().map(|enhanced| &*enhanced.method),
        }
    }

    /// Checks the limits on sessions and wills. A returning client keeps the place of its existing
    /// session, even if that session ends now or the limit was lowered. Fails with the reason.
    fn check_room(
        &mut self,
        will: Option<&Will>,
        existing: Option<SessionKey>,
        account: &Arc<Account>,
        now: Instant,
    ) -> Result<(), &'static str> {
        let session = existing.and_then(|key| self.peek(key));
        let old_bytes = session.map_or(0, Session::will_bytes);
        let will_bytes = will.map_or(0, |will| will.message.cost_bytes());
        let more = will_bytes.saturating_sub(old_bytes);
        let max = self.limits.state_bytes_total_max;
        if more > 0 && !account.fits(Kind::State, more, max, STATE_BYTES_FLOOR) {
            return Err(
                "wills of this user or address, or of all clients, exceed their memory limit",
            );
        }
        // Must come last, since it may evict another session.
        if existing.is_none() && !self.has_room_for_session(account, now) {
            return Err(NO_ROOM_FOR_SESSION);
        }
        Ok(())
    }

    /// Takes over the connection of an existing session, and ends the session if the client must
    /// not resume it. Returns the output of the old connection.
    fn replace_connection(
        &mut self,
        key: SessionKey,
        clean_start: bool,
        user: Option<&str>,
        now: Instant,
    ) -> Option<Arc<Output>> {
        let previous = self.take_over(key, now);
        // The takeover ends a session without expiry.
        let Some(session) = self.session(key) else {
            return previous;
        };
        // The timers may be late, so due expiries and wills are handled first.
        if clean_start || !session.is_resumable(user, now) {
            self.end_session(key, now);
        } else if session.is_will_due(now) {
            self.send_will(key, now);
        }
        previous
    }

    /// Finds the client's session or creates one. Returns true if it found one.
    fn resumed_or_new_session(
        &mut self,
        client: &Arc<str>,
        account: &Arc<Account>,
    ) -> (SessionKey, bool) {
        if let Some(key) = self.by_client.get(client) {
            return (*key, true);
        }
        self.last_session = self.last_session.next();
        let session = Session::new(client.clone(), self.last_session, account);
        (self.insert(session), false)
    }

    /// Gives out the numbers of a session without a connection, and records its user.
    pub(crate) fn begin_own_session(&mut self, user: Option<&str>) -> (SessionId, ConnectionId) {
        self.last_connection = self.last_connection.next();
        self.last_session = self.last_session.next();
        if let Some(user) = user.filter(|_| self.change_log.has_room()) {
            let mut log = self.change_log.session_log(self.last_session, true);
            log.write(Part::Owner(user));
        }
        (self.last_session, self.last_connection)
    }

    /// Makes this connection's user and account those of the session, and records that the session
    /// begins or is resumed.
    fn attach(
        &mut self,
        key: SessionKey,
        origin: &Origin,
        account: &Arc<Account>,
        begins: bool,
        session_expiry_s: u32,
        will: Option<Will>,
    ) {
        if let Some(session) = session_at(&mut self.sessions, key) {
            session.transfer(account);
            session.attach(begins, session_expiry_s, will, &mut self.change_log);
            session.claim(origin.identity.user.as_deref(), &mut self.change_log);
        }
    }

    /// Links the session to its connection. Returns the number of the session.
    fn link(
        &mut self,
        key: SessionKey,
        connect: &Connect,
        origin: &Origin,
        (address, since): (IpAddr, Instant),
        output: &Arc<Output>,
    ) -> Result<SessionId, ConnectRefusal> {
        let window = connect.receive_max.min(self.limits.in_flight_max).max(1);
        let Some(session) = session_at(&mut self.sessions, key) else {
            return Err((ReasonCode::UNSPECIFIED_ERROR, "no session"));
        };
        let link = Link {
            connection: origin.connection,
            version: connect.version,
            identity: origin.identity.clone(),
            output: output.clone(),
            address,
            since,
            window: window.into(),
            unacknowledged: 0,
            packet_bytes_max: connect.packet_bytes_max.min(PACKET_BYTES_MAX) as usize,
            problem_info: connect.problem_info,
            resend: session.queue.in_order(),
            receive_max: self.limits.receive_max.max(1).into(),
            asked_for_expiry: connect.session_expiry_s > 0,
            unreleased: 0,
            acks: Acks::default(),
        };
        session.connect(link);
        Ok(session.number)
    }

    /// Accounts for a connection that was linked to its session.
    fn register_connection(&mut self, key: SessionKey, origin: &Origin, now: Instant) {
        if let Some(session) = session_at(&mut self.sessions, key) {
            self.counts.connections_v311 += usize::from(session.is_v311());
            for group in session.subscriptions().shared_filters() {
                self.router.set_connected(group, key, true);
            }
        }
        self.update_evictable(key);
        self.apply_rules_to_subscriptions(key, origin, now);
        self.session_ends.connection_begins(origin.session);
        self.counts.connections += 1;
        self.schedule(key);
    }

    /// Reports a refused CONNECT and returns its refusal.
    fn refuse_connect(
        &self,
        origin: &Origin,
        peer: SocketAddr,
        reason: ReasonCode,
        text: &'static str,
    ) -> ConnectRefusal {
        self.refusals.report(&Refusal {
            is_admitted: true,
            client: &origin.client,
            user: origin.identity.user.as_deref(),
            ..Refusal::of_connect(reason, text, peer)
        });
        (reason, text)
    }

    /// The client has reauthenticated as the same user with another proof. The access control must
    /// be asked again: a recheck that asked about the earlier proof spares this connection, but the
    /// new proof may be invalid by now.
    pub(crate) fn authenticated(
        &mut self,
        key: SessionKey,
        connection: ConnectionId,
        identity: Arc<Identity>,
        method: &str,
    ) {
        let Some(session) = self.linked(key, connection) else {
            return;
        };
        if let Some(link) = &mut session.link {
            link.identity = identity;
        }
        let Some(origin) = session.origin() else {
            return;
        };
        let asked = Origin {
            session: SessionId::NONE,
            ..origin.clone()
        };
        if self.access.may_connect(&asked) {
            self.send_when_durable(key, |out, _| codec::auth(out, method));
        } else {
            self.disconnect_unauthorized(key, &origin);
        }
    }

    /// Handles a DISCONNECT. The connection's task ends the connection right after it. The output
    /// may be closing already, if the client has closed the socket.
    pub(crate) fn client_disconnects(
        &mut self,
        key: SessionKey,
        connection: ConnectionId,
        disconnect: Disconnect,
    ) -> Result<(), Violation> {
        let expiry_max_s = self.limits.session_expiry_max_s;
        let Some(session) = session_at(&mut self.sessions, key) else {
            return Ok(());
        };
        let current = session.link.as_ref().map(|link| link.connection);
        if current != Some(connection) {
            return Ok(());
        }
        if let Some(expiry_s) = disconnect.session_expiry_s
            && !session.set_expiry(expiry_s.min(expiry_max_s), &mut self.change_log)
        {
            return Err(Violation::protocol(
                "DISCONNECT cannot raise a session expiry of zero",
            ));
        }
        if disconnect.reason == ReasonCode::SUCCESS {
            session.take_will(&mut self.change_log);
        }
        // The client gets no answer but the end of its connection, so that must wait for the
        // records of these changes.
        self.send_when_durable(key, |_, _| {});
        Ok(())
    }

    /// The task of a connection has ended. Does nothing if another connection has taken over the
    /// session.
    pub(crate) fn detach(&mut self, key: SessionKey, connection: ConnectionId, now: Instant) {
        let current = self.session(key).and_then(|session| session.link.as_ref());
        if current.is_some_and(|link| link.connection == connection) {
            self.unlink(key, now);
        }
    }

    /// Disconnects the session's current connection in favor of another one.
    fn take_over(&mut self, key: SessionKey, now: Instant) -> Option<Arc<Output>> {
        let output = self.session(key)?.link.as_ref()?.output.clone();
        self.close(key, ReasonCode::SESSION_TAKEN_OVER, None);
        self.unlink(key, now);
        Some(output)
    }

    /// Removes the link of a session and handles a will or an expiry that is due at once. Dropped
    /// messages of shared subscriptions are sent to another session of the group.
    fn unlink(&mut self, key: SessionKey, now: Instant) {
        let shutting_down = self.shutting_down;
        let Some(session) = session_at(&mut self.sessions, key) else {
            return;
        };
        self.counts.connections_v311 -= usize::from(session.is_v311());
        let (dropped, orphans) = session.detach(now, shutting_down, &mut self.change_log);
        for group in session.subscriptions().shared_filters() {
            self.router.set_connected(group, key, false);
        }
        let (ended, will) = (session.expiry_s() == 0, session.is_will_due(now));
        self.counts.connections -= 1;
        self.counts.dropped += dropped as u64;
        if ended {
            self.end_session(key, now);
        } else {
            if will {
                self.send_will(key, now);
            }
            self.schedule(key);
            self.update_evictable(key);
        }
        self.redistribute(orphans, Requester::Ended, now);
    }

    /// Drops a will that the client may no longer publish.
    pub(super) fn drop_forbidden_will(&mut self, key: SessionKey, origin: &Origin) {
        let Some(session) = session_at(&mut self.sessions, key) else {
            return;
        };
        let topic = session.will().map(|will| &will.message.topic);
        if topic.is_some_and(|topic| !self.access.may_publish(origin, topic)) {
            session.take_will(&mut self.change_log);
            tracing::info!(
                client = &*origin.client,
                "dropped a will that is no longer allowed"
            );
        }
    }

    /// Publishes the will of a session, if it still has one.
    pub(super) fn send_will(&mut self, key: SessionKey, now: Instant) {
        let Some(session) = session_at(&mut self.sessions, key) else {
            return;
        };
        let recorded = session.recorded_will().is_some();
        let Some(will) = session.take_will(&mut self.change_log) else {
            return;
        };
        let mut message = will.message;
        message.expires = will
            .expiry_s
            .and_then(|expiry| now.checked_add(Duration::from_secs(expiry.into())));
        let source = Source {
            from: Some(key),
            is_will: true,
            recorded,
            ..Source::default()
        };
        if self.publish(Cow::Owned(message), source, now).is_err() {
            self.counts.dropped += 1;
        }
    }

    /// Ends a session. Publishes its will if it is still pending (section 3.1.2.5).
    pub(super) fn end_session(&mut self, key: SessionKey, now: Instant) {
        let Some(slot) = self.sessions.get_mut(key as usize) else {
            return;
        };
        let Some(session) = slot else { return };
        self.work += work::SUBSCRIPTION * session.subscriptions().len() as u64;
        for filter in session.subscriptions().filters() {
            self.router.unsubscribe(filter, key);
        }
        replace_entry(&mut self.deadlines, key, &mut session.deadline, None);
        replace_entry(&mut self.evictable, key, &mut session.evictable, None);
        self.send_will(key, now);
        if let Some(mut session) = self.sessions.get_mut(key as usize).and_then(Option::take) {
            session.end(&mut self.change_log);
            self.session_ends.session_ended(session.number);
            self.by_client.remove(&session.client);
            self.free.push(key);
            // Must be in the same batch as the end of the session, or a crash in between loses
            // these messages.
            let orphans = session.queue.into_orphans();
            self.redistribute(orphans, Requester::Ended, now);
        }
    }

    pub(super) fn insert(&mut self, session: Session) -> SessionKey {
        let client = session.client.clone();
        let key = self.free.pop().unwrap_or_else(|| {
            self.sessions.push(None);
            self.sessions.len() as SessionKey - 1
        });
        self.sessions[key as usize] = Some(Box::new(session));
        self.by_client.insert(client, key);
        key
    }

    /// Makes an unused client identifier (section 3.1.3.1).
    fn assign_id(&mut self) -> Arc<str> {
        loop {
            self.last_assigned_id += 1;
            let random = self.assigned_ids.hash_one(self.last_assigned_id);
            let id = format!("auto-{random:016x}");
            if !self.by_client.contains_key(id.as_str()) {
                return id.into();
            }
        }
    }
}
