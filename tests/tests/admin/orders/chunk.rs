//! Tests the chunks of the file that an order announces.

use std::fs;

use statehouse_tests::{Publish, assert_contains};

use super::{TOPIC, chunks, ended, fleet, order, publish, ship, ship_file};
use crate::{OURS, answers, ours, roles};

#[test]
fn chunk_that_does_not_match_the_order_is_refused() {
    let fleet = fleet();
    let (server, file) = (&fleet.server, &fleet.file);
    let mut client = server.connect("fleet");
    ship(&mut client, &fleet.order(7, "load"));
    let all = chunks(file);
    let mut tampered = all[0].clone();
    tampered.payload[100] ^= 1;
    assert_eq!(publish(&mut client, &tampered).0, 0x99);
    let mut swapped = all[0].clone();
    swapped.payload.clone_from(&all[1].payload);
    assert_eq!(publish(&mut client, &swapped).0, 0x99);
    let digest = blake3::hash(file).to_hex();
    for place in [
        format!("{digest}/9999"),
        format!("{digest}/x"),
        format!("{digest}"),
        "x/0".into(),
    ] {
        let chunk = Publish::new(&format!("{TOPIC}/chunk/{place}"), "x").qos(1);
        assert_eq!(publish(&mut client, &chunk).0, 0x90, "{place}");
    }
    ship_file(&mut client, file);
    assert_eq!(ended(server, 7)["state"], "done");
    assert_eq!(roles(server, OURS).unwrap(), [""; 0]);
    // An unsigned file is refused even if the order is signed: a valid order does not make its file
    // trusted.
    let unsigned = fs::read(ours()).unwrap();
    let announced = order(&fleet.store, 8, "promote", &unsigned);
    ship(&mut client, &fleet.sign(&announced));
    ship_file(&mut client, &unsigned);
    let status = ended(server, 8);
    assert_eq!(status["state"], "failed");
    assert_contains!(status["error"].as_str().unwrap(), "not signed");
    assert!(!answers(server, "tally"));
}
