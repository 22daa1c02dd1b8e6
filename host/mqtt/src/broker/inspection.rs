//! What operators and the embedder see of the sessions, and what they may end.

use std::sync::atomic::Ordering;

use statehouse_protocol::SessionId;

use super::Broker;
use crate::{
    ClientStatus, ImageCursor, Origin, ReasonCode, RefusalCount, SessionSummary, Stats, ledger,
    limits::{PAUSE_BETWEEN_HOLDS, SESSIONS_FLOOR},
    session::Session,
};

impl Broker {
    /// Applies changed rules of the [access control](Access), or revoked credentials, to connected
    /// clients.
    ///
    /// Connections that are no longer allowed end with DISCONNECT 0x87. Subscriptions of the others
    /// that are no longer allowed are suspended until they are allowed again. Both lose wills that
    /// are no longer allowed. Packets after the change follow the new rules anyway. Sessions
    /// without a connection are checked when they are resumed, so their wills are still published.
    ///
    /// Other clients are served during this call. Call it from a thread that may block.
    pub fn recheck(&self) {
        // Without the lock: this may verify many certificates and evaluate many rules.
        let mut refused = self.connected();
        refused.retain(|who| !self.0.access.may_connect(who));
        self.end_refused(refused);
    }

    /// All current connections, without their session numbers, so that the caller can ask the
    /// access control about them.
    pub(crate) fn connected(&self) -> Vec<Origin> {
        self.collect(|session| {
            let origin = session.origin()?;
            Some(Origin {
                session: SessionId::NONE,
                ..origin
            })
        })
    }

    /// Collects the results of `of` for all sessions. Other clients are served during this call.
    fn collect<T>(&self, of: impl Fn(&Session) -> Option<T>) -> Vec<T> {
        let mut results = Vec::new();
        let mut next = Some(0);
        while let Some(from) = next {
            next = self.lock().collect(from, &mut results, &of);
        }
        results
    }

    /// Ends these connections. Suspends subscriptions, and drops wills, that are no longer allowed.
    pub(crate) fn end_refused(&self, refused: Vec<Origin>) {
        let refused = refused
            .into_iter()
            .map(|who| (who.connection, who))
            .collect();
        let mut next = self.lock().recheck(0, &refused, self.now());
        while let Some(from) = next {
            std::thread::sleep(PAUSE_BETWEEN_HOLDS);
            next = self.lock().recheck(from, &refused, self.now());
        }
    }

    /// The next piece, of about `bytes_max` bytes, of an image of all durable sessions and retained
    /// messages; `None` at its end.
    ///
    /// The embedder must note a position of its log before the first piece. The pieces, followed by
    /// every change behind that position, reproduce the state ([`Recovery::apply`]). Changes may
    /// happen between two pieces.
    #[must_use]
    pub fn image(&self, cursor: &mut ImageCursor, bytes_max: usize) -> Option<Vec<u8>> {
        self.lock().image(cursor, bytes_max)
    }

    /// The approximate size of an image in bytes. Only differences between two calls are
    /// meaningful. Takes the lock for a moment.
    #[must_use]
    pub fn image_bytes(&self) -> u64 {
        self.lock().image_bytes() as u64
    }

    /// The numbers of all sessions, connected or not.
    #[must_use]
    pub fn sessions(&self) -> Vec<SessionId> {
        self.lock().session_numbers()
    }

    /// The connection and subscriptions of the client with this id; `None` if it has no session.
    #[must_use]
    pub fn client_status(&self, client: &str) -> Option<ClientStatus> {
        self.lock().client_status(client)
    }

    /// The limit that would refuse a subscription of this client to this filter at present. None if
    /// there is room, or if the client has this subscription or no session.
    #[must_use]
    pub fn subscription_limit(&self, client: &str, filter: &[u8]) -> Option<&'static str> {
        self.lock().subscription_limit(client, filter)
    }

    /// The refusal that a CONNECT of this client would get at present for lack of room for its
    /// session, after the broker has evicted an empty one. None if there is room, or if the client
    /// has a session. Without a user, it is that of a client whose address has no sessions.
    #[must_use]
    pub fn session_limit(&self, client: &str, user: Option<&str>) -> Option<&'static str> {
        self.lock().session_limit(client, user)
    }

    /// Whether the client with this id is connected.
    pub(crate) fn is_connected(&self, client: &str) -> bool {
        self.lock().is_connected(client)
    }

    /// What all sessions hold. Other clients are served during this call.
    #[must_use]
    pub fn session_summaries(&self) -> Vec<SessionSummary> {
        self.collect(|session| Some(session.summary()))
    }

    /// Ends the connection of a client, for an operator. Its session stays, and it may connect
    /// again. Returns false if the client is not connected.
    pub fn kick(&self, client: &str) -> bool {
        let mut core = self.lock();
        let status = core.client_status(client);
        let Some(origin) = status.and_then(|status| status.origin) else {
            return false;
        };
        let reason = ReasonCode::ADMINISTRATIVE_ACTION;
        let text = "an operator ended the connection";
        core.disconnect(client, origin.connection, reason, Some(text));
        true
    }

    /// The session quota of one owner (a user, or the network address of anonymous clients) if one
    /// more session begins now.
    #[must_use]
    pub fn session_quota(&self) -> usize {
        let max = self.limits().sessions_max;
        ledger::quota(self.stats().sessions + 1, max, SESSIONS_FLOOR)
    }

    /// Gauges and counters.
    #[must_use]
    pub fn stats(&self) -> Stats {
        Stats {
            turned_away: self.0.turned_away.load(Ordering::Relaxed),
            ..self.lock().stats()
        }
    }

    /// Counts of refusals since the start, including those decided by the access control and the
    /// service.
    #[must_use]
    pub fn refusals(&self) -> Vec<RefusalCount> {
        self.0.refusals.counts()
    }
}
