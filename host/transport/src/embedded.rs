//! The embedded broker as a transport.
//!
//! Requests arrive on the client's own connection. So the client id is proven, the end of a
//! connection is known, and a PUBACK carries a reason.

use std::sync::Arc;

use statehouse_mqtt::{Broker, Claim, Origin, ReasonCode, Request, Service, Token};
use statehouse_protocol::{SessionId, topics::is_kept_for_brokers};

use super::{Inbound, Intake, Outbound, Ticket, Transport};
use statehouse_access::{Authorizer, CachedGrants};
use statehouse_core::request::{
    Delivery, Incoming, NOTIFICATION_TOPICS, PREVIEW_TOPIC, REQUEST_TOPIC,
};
use statehouse_core::store::Peer;

/// Takes orders to the admin API, which are published over MQTT and are not requests to the store.
pub trait Orders: Send + Sync {
    /// What to do with a PUBLISH on this topic; `None` if it is not an order. Called for every
    /// PUBLISH.
    fn claim(&self, topic: &[u8]) -> Option<Claim>;

    /// Handles an order that was claimed, and acknowledges it.
    fn take(self: Arc<Self>, broker: &Broker, from: &Origin, request: Request);
}

/// The service that the broker calls. It passes requests to the store.
pub struct StoreService {
    intake: Arc<dyn Intake>,
    orders: Option<Arc<dyn Orders>>,
    rules: Option<Arc<Authorizer>>,
}

impl StoreService {
    /// A service that passes requests to `intake`. Without rules every client may do everything.
    pub fn new(
        intake: Arc<dyn Intake>,
        orders: Option<Arc<dyn Orders>>,
        rules: Option<Arc<Authorizer>>,
    ) -> Self {
        Self {
            intake,
            orders,
            rules,
        }
    }
}

impl Service for StoreService {
    fn claim(&self, topic: &[u8]) -> Claim {
        if is_for_the_store(topic) {
            Claim::Take
        } else if topic.starts_with(NOTIFICATION_TOPICS.as_bytes()) {
            Claim::Refuse(
                ReasonCode::NOT_AUTHORIZED,
                "only the state store publishes notifications of the state store",
            )
        } else if is_kept_for_brokers(topic) {
            Claim::Refuse(
                ReasonCode::NOT_AUTHORIZED,
                "topics below $SYS/ are reserved for the broker",
            )
        } else {
            let orders = self.orders.as_ref();
            orders
                .and_then(|it| it.claim(topic))
                .unwrap_or(Claim::Route)
        }
    }

    fn requests(&self, broker: &Broker, from: &Origin, requests: &mut Vec<Request>) {
        if let Some(orders) = &self.orders {
            // Orders and requests are independent, so they may be reordered against each other.
            for order in requests.extract_if(.., |it| !is_for_the_store(&it.topic)) {
                orders.clone().take(broker, from, order);
            }
            if requests.is_empty() {
                return;
            }
        }
        if requests.len() > 1 {
            let mut payloads = requests.iter().map(|it| &it.payload[..]);
            self.intake.announce(from.session, &mut payloads);
        }
        let peer = peer(from);
        let mut cached = CachedGrants::default();
        let mut taken = 0;
        let mut batch = requests.iter_mut().map(|request| {
            taken += 1;
            let ticket = request.token.take().map(Ticket::Embedded);
            let incoming = Incoming {
                // Only these two topics were claimed.
                topic: match request.topic == PREVIEW_TOPIC.as_bytes() {
                    true => PREVIEW_TOPIC,
                    false => REQUEST_TOPIC,
                },
                payload: &request.payload,
                properties: &request.properties,
                qos: request.qos,
                delivery: Delivery {
                    session: from.session,
                    connection: from.connection,
                    packet_id: request.packet_id,
                    dup: request.dup,
                },
                expires: request.expires,
                peer: &peer,
                // Evaluated when the turn of the request comes. Rules that change later still apply
                // to the watches that the request begins.
                grants: (self.rules.as_ref()).map(|it| it.cached_grants(from, &mut cached) as _),
            };
            Inbound::Publish(incoming, ticket)
        });
        self.intake.take_some(from.connection, &mut batch);
        requests.drain(..taken);
    }

    fn disconnected(&self, _broker: &Broker, who: &Origin) {
        self.intake
            .take(&mut std::iter::once(Inbound::Disconnected(&peer(who))));
        if let Some(rules) = &self.rules {
            rules.remove_connection(who.connection);
        }
    }

    fn sessions_ended(&self, _broker: &Broker, sessions: &[SessionId]) {
        self.intake
            .take(&mut std::iter::once(Inbound::SessionsEnded(sessions)));
    }
}

fn is_for_the_store(topic: &[u8]) -> bool {
    topic == REQUEST_TOPIC.as_bytes() || topic == PREVIEW_TOPIC.as_bytes()
}

/// The client of a connection, as the store knows it.
pub fn peer(origin: &Origin) -> Peer {
    Peer {
        client: origin.client.clone(),
        connection: origin.connection,
        session: origin.session,
    }
}

/// The token of a ticket. This transport receives only its own kind back.
fn token(ticket: Ticket) -> Option<Token> {
    match ticket {
        Ticket::Embedded(token) => Some(token),
        Ticket::Foreign(_) | Ticket::Own(_) => None,
    }
}

impl Transport for Broker {
    fn deliver(&self, ready: &mut dyn FnMut(&mut Vec<Outbound>)) {
        self.batch(|batch| {
            let mut out = Vec::new();
            loop {
                ready(&mut out);
                if out.is_empty() {
                    break;
                }
                for out in out.drain(..) {
                    match out {
                        // A response without a subscriber is dropped, as any PUBLISH is.
                        Outbound::Response(message, ticket) => {
                            let token = ticket.and_then(token);
                            let _ = batch.answer(token.as_ref(), message);
                        }
                        Outbound::AcknowledgedResponse(message, ticket) => {
                            let token = token(ticket);
                            let _ = batch.answer(token.as_ref(), message);
                            if let Some(token) = token {
                                batch.acknowledge(token, ReasonCode::SUCCESS, None);
                            }
                        }
                        Outbound::Notification(to, message, _) => {
                            let _ = batch.deliver(&to.client, to.connection, message);
                        }
                        Outbound::Acknowledge(ticket, reason, text) => {
                            if let Some(token) = token(ticket) {
                                batch.acknowledge(token, reason, text);
                            }
                        }
                        Outbound::Disconnect(peer, reason, text) => {
                            batch.disconnect(&peer.client, peer.connection, reason, Some(text));
                        }
                    }
                }
            }
        });
    }
}
