//! Metrics of the embedded broker, or of the connection to a foreign one.

use statehouse_mqtt::{RefusalCount, Stats};

use super::page::Page;
use statehouse_transport::foreign::Figures;

/// The embedded broker. All counts fit into 64 bits.
pub(super) fn embedded(page: &mut Page, broker: &Stats) {
    page.gauges(&[
        (
            "connections",
            "Clients that are connected",
            broker.connections as u64,
        ),
        (
            "connections_mqtt_3",
            "Clients that are connected with MQTT 3.1.1, which cannot use the store",
            broker.connections_v311 as u64,
        ),
        (
            "sessions",
            "Sessions, connected or not",
            broker.sessions as u64,
        ),
        (
            "subscriptions",
            "Subscriptions of all sessions",
            broker.subscriptions as u64,
        ),
        (
            "queued_bytes",
            "Messages queued for clients or awaiting their acknowledgement",
            broker.queued_bytes as u64,
        ),
        (
            "client_state_bytes",
            "Wills, packet ids of unfinished QoS 2 exchanges and topic aliases",
            broker.state_bytes as u64,
        ),
        ("retained", "Retained messages", broker.retained as u64),
        (
            "retained_bytes",
            "Memory of retained messages",
            broker.retained_bytes as u64,
        ),
    ]);
    page.counters(&[
        ("messages_in", "PUBLISHes of clients", broker.messages_in),
        (
            "messages_out",
            "PUBLISHes sent to clients, repetitions included",
            broker.messages_out,
        ),
        (
            "dropped",
            "Messages dropped: expired, over the limit of a queue, too large for their client, refused at QoS 0",
            broker.dropped,
        ),
        (
            "throttled",
            "PUBLISHes refused by the rate limit of one client or of all clients",
            broker.throttled,
        ),
        (
            "disconnected",
            "Connections ended for a violation, a limit, silence or missing rights, or by an operator",
            broker.disconnected,
        ),
        (
            "sessions_evicted",
            "Empty sessions of disconnected clients ended to make room for other sessions",
            broker.evicted,
        ),
        (
            "turned_away",
            "Sockets closed at once because too many were open",
            broker.turned_away,
        ),
    ]);
}

/// Refusals by the broker, by reason code of MQTT 5.
pub(super) fn refusals(page: &mut Page, refusals: &[RefusalCount]) {
    let help = "Refusals by the broker, by the attempted action and the MQTT 5 reason code";
    let family = page.counter("mqtt_refused", help);
    for it in refusals {
        let labels = [
            ("what", it.what.name().to_owned()),
            ("code", format!("{:#04x}", it.reason.0)),
            ("reason", it.reason.name().to_owned()),
        ];
        family.sample(labels, it.count);
    }
}

/// The connection to a foreign broker.
pub(super) fn foreign(page: &mut Page, link: &Figures) {
    page.counters(&[
        (
            "broker_connections",
            "Connections made to the broker",
            link.connections,
        ),
        (
            "broker_malformed",
            "Malformed messages on a request topic",
            link.malformed,
        ),
        (
            "broker_refused",
            "Responses and notifications that the broker refused",
            link.refused,
        ),
        (
            "broker_unheard",
            "Notifications without a subscriber",
            link.unheard,
        ),
        (
            "broker_lost",
            "Notifications lost because too many waited for an acknowledgement of the broker",
            link.lost,
        ),
        (
            "broker_dropped",
            "Messages at QoS 0 dropped because too many messages were being sent",
            link.dropped,
        ),
    ]);
    page.gauges(&[
        (
            "broker_connected",
            "1 if there is a connection to the broker",
            link.connected.into(),
        ),
        (
            "broker_outstanding",
            "Responses and notifications that the broker has not acknowledged yet",
            link.outstanding,
        ),
        (
            "broker_outstanding_bytes",
            "Size of the responses and notifications that the broker has not acknowledged yet",
            link.outstanding_bytes,
        ),
        (
            "broker_unacknowledged",
            "Messages from the broker that the store has not acknowledged yet",
            link.unacknowledged,
        ),
    ]);
}
