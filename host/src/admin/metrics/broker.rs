//! Metrics of the embedded broker, or of the connection to a foreign one.

use statehouse_mqtt::{RefusalCount, Stats};

use super::page::Page;
use statehouse_transport::foreign::Figures;

/// The embedded broker. All counts fit into 64 bits.
pub(super) fn embedded(page: &mut Page, broker: &Stats) {
    let help = "Clients that are connected";
    page.measure("connections", help, broker.connections as u64);
    let help = "Clients that are connected with MQTT 3.1.1, which cannot use the store";
    page.measure("connections_mqtt_3", help, broker.connections_v311 as u64);
    let help = "Sessions, connected or not";
    page.measure("sessions", help, broker.sessions as u64);
    let help = "Subscriptions of all sessions";
    page.measure("subscriptions", help, broker.subscriptions as u64);
    let help = "Messages queued for clients or awaiting their acknowledgement";
    page.measure("queued_bytes", help, broker.queued_bytes as u64);
    let help = "Wills, packet ids of unfinished QoS 2 exchanges and topic aliases";
    page.measure("client_state_bytes", help, broker.state_bytes as u64);
    page.measure("retained", "Retained messages", broker.retained as u64);
    let help = "Memory of retained messages";
    page.measure("retained_bytes", help, broker.retained_bytes as u64);
    page.count("messages_in", "PUBLISHes of clients", broker.messages_in);
    let help = "PUBLISHes sent to clients, repetitions included";
    page.count("messages_out", help, broker.messages_out);
    let help = "Messages dropped: expired, over the limit of a queue, too large for their client, refused at QoS 0";
    page.count("dropped", help, broker.dropped);
    let help = "PUBLISHes refused by the rate limit of one client or of all clients";
    page.count("throttled", help, broker.throttled);
    let help =
        "Connections ended for a violation, a limit, silence or missing rights, or by an operator";
    page.count("disconnected", help, broker.disconnected);
    let help = "Empty sessions of disconnected clients ended to make room for other sessions";
    page.count("sessions_evicted", help, broker.evicted);
    let help = "Sockets closed at once because too many were open";
    page.count("turned_away", help, broker.turned_away);
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
    let help = "Connections made to the broker";
    page.count("broker_connections", help, link.connections);
    let help = "Malformed messages on a request topic";
    page.count("broker_malformed", help, link.malformed);
    let help = "Responses and notifications that the broker refused";
    page.count("broker_refused", help, link.refused);
    let help = "Notifications without a subscriber";
    page.count("broker_unheard", help, link.unheard);
    let help = "Notifications lost because too many waited for an acknowledgement of the broker";
    page.count("broker_lost", help, link.lost);
    let help = "Messages at QoS 0 dropped because too many messages were being sent";
    page.count("broker_dropped", help, link.dropped);
    let help = "1 if there is a connection to the broker";
    page.measure("broker_connected", help, link.connected.into());
    let help = "Responses and notifications that the broker has not acknowledged yet";
    page.measure("broker_outstanding", help, link.outstanding);
    let help = "Size of the responses and notifications that the broker has not acknowledged yet";
    page.measure("broker_outstanding_bytes", help, link.outstanding_bytes);
    let help = "Messages from the broker that the store has not acknowledged yet";
    page.measure("broker_unacknowledged", help, link.unacknowledged);
}
