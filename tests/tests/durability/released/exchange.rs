//! Requests with the answers that the released program gave.

use data_encoding::BASE64;
use serde_json::{Value, json};
use statehouse_tests::{Packet, Publish, Store, packet::kind, store::is_answer};

/// Asks, and records the request and its answer.
pub(super) fn ask(store: &mut Store, recorded: &mut Vec<Value>, command: &[&str]) {
    let request = store.command(command);
    let mut publish = request.publish();
    publish.packet_id = store.client.packet_id();
    store.client.start(publish.clone());
    let answer = store.finish(&request, publish.packet_id);
    assert!(
        answer.payload().first() != Some(&b'-'),
        "{command:?}: {}",
        answer.text()
    );
    recorded.push(json!({
        "command": command,
        "request": BASE64.encode(&publish.bytes()),
        "answer": BASE64.encode(&bytes(answer.publish)),
    }));
}

/// Sends the recorded requests again. Their answers must have the same bytes and properties.
pub(super) fn redeliver(store: &mut Store, recorded: &Value) {
    for it in recorded.as_array().unwrap() {
        let text = |name: &str| it[name].as_str().unwrap().as_bytes().to_vec();
        let mut request = BASE64.decode(&text("request")).unwrap();
        let mut request = Packet::cut(&mut request).unwrap().publish();
        request.dup = store.is_broker;
        store.client.start(request.clone());
        let what = format!("the answer to {}", it["command"]);
        let answer = store
            .client
            .take(&what, |packet| is_answer(packet, request.correlation()));
        store.client.take_ack(kind::PUBACK, request.packet_id);
        let (answer, first) = (bytes(answer.publish()), BASE64.decode(&text("answer")));
        assert_eq!(
            answer.escape_ascii().to_string(),
            first.unwrap().escape_ascii().to_string(),
            "{what}"
        );
    }
}

/// The bytes of an answer, without those that depend on its connection.
fn bytes(answer: Publish) -> Vec<u8> {
    let answer = Publish {
        packet_id: 0,
        dup: false,
        ..answer
    };
    answer.bytes()
}
