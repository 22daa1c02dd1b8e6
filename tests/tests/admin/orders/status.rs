//! Tests the retained status of orders.

use serde_json::Value as Json;
use statehouse_tests::Publish;

use super::{Fleet, TOPIC, fleet, publish};

/// Operators of a fleet rely on the status, so only the store may publish it.
#[test]
fn forged_status_is_refused() {
    let Fleet { server, store, .. } = fleet();
    let mut client = server.connect("client");
    client.subscribe("statehouse/#", 0);
    let status = client.take_publish(TOPIC);
    assert!(status.retain);
    let status: Json = serde_json::from_slice(&status.payload).unwrap();
    assert_eq!(status["state"], "idle");
    assert_eq!(status["store"], store);
    assert_eq!(status["active"]["name"], "standard");
    for topic in ["status", "other", "chunk", "order/x"] {
        let forged = Publish::new(&format!("{TOPIC}/{topic}"), "{}")
            .qos(1)
            .retained();
        assert_eq!(publish(&mut client, &forged).0, 0x87, "{topic}");
    }
    client.expect_nothing();
}
