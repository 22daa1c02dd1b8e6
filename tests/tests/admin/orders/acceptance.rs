//! Tests which orders a store carries out.

use serde_json::{Value as Json, json};
use statehouse_tests::{Client, Connect, Publish, Server, assert_contains};

use super::{
    TOPIC, chunks, ended, fleet, name, order, publish, secret, ship, ship_file, signed, trusting,
};
use crate::{OURS, answers, keygen, listing, policy, roles};

#[test]
fn signed_order_ships_and_promotes_a_policy() {
    let fleet = fleet();
    let server = &fleet.server;
    let mut client = server.connect("fleet");
    let order = fleet.order(7, "promote");
    assert_eq!(publish(&mut client, &order), (0, String::new()));
    let all = chunks(&fleet.file);
    assert!(all.len() > 2, "{} chunks are too few", all.len());
    // Chunks arrive in reverse order, over two connections, and each of them twice, since QoS 1
    // delivers at least once.
    for chunk in all.iter().skip(1).rev() {
        ship(&mut client, chunk);
        ship(&mut client, chunk);
    }
    assert!(!answers(server, "tally"));
    let mut second = server.connect("second");
    ship(&mut second, &order);
    ship(&mut second, &all[0]);
    let status = ended(server, 7);
    assert_eq!(status["state"], "done", "{status}");
    assert_eq!(status["active"]["name"], OURS);
    assert_eq!(status["last_serial"], 7);
    assert!(answers(server, "tally"));
    let list = policy(server, &["list"]).code(0).text();
    for what in ["loaded", "assigned"] {
        let line = list.lines().find(|it| it.starts_with(what)).unwrap();
        assert_contains!(line, ": order 7 of client fleet, signed by key ");
    }
    // Late duplicates are acknowledged and have no effect.
    policy(server, &["rollback"]).code(0);
    ship(&mut client, &order);
    ship(&mut client, &all[0]);
    assert!(!answers(server, "tally"));
}

#[test]
fn old_order_is_refused_also_after_a_restart() {
    let mut fleet = fleet();
    let [first, other] = ["promote", "load"].map(|action| fleet.order(7, action));
    let back = json!({ "serial": 8, "stores": [fleet.store], "action": "rollback" });
    let mut client = fleet.server.connect("fleet");
    ship(&mut client, &first);
    ship_file(&mut client, &fleet.file);
    assert_eq!(ended(&fleet.server, 7)["state"], "done");
    ship(&mut client, &fleet.sign(&back));
    assert_eq!(ended(&fleet.server, 8)["state"], "done");
    assert!(!answers(&fleet.server, "tally"));
    let refused = |client: &mut Client| {
        for old in [&first, &other] {
            let (reason, text) = publish(client, old);
            assert_eq!(reason, 0x83, "{text}");
            assert!(text.contains("not newer than 8"), "{text}");
        }
    };
    refused(&mut client);
    fleet.server.stop();
    fleet.server.restart();
    refused(&mut fleet.server.connect("fleet"));
    assert!(!answers(&fleet.server, "tally"));
    // An order needs no chunks if its policy is loaded already.
    let digest = blake3::hash(&fleet.file).to_hex().to_string();
    let stores = [&fleet.store];
    let again = json!({ "serial": 9, "stores": stores, "action": "promote", "digest": digest });
    ship(&mut fleet.server.connect("fleet"), &fleet.sign(&again));
    assert_eq!(ended(&fleet.server, 9)["state"], "done");
    assert!(answers(&fleet.server, "tally"));
}

#[test]
fn invalid_or_untrusted_order_is_refused() {
    let fleet = fleet();
    let (server, store, directory) = (&fleet.server, &fleet.store, fleet.directory.path());
    keygen(directory, "other");
    let other = secret(&directory.join("other.key"));
    let mut client = server.connect("fleet");
    let good = order(store, 7, "promote", &fleet.file);
    let mut unsigned = fleet.sign(&good);
    unsigned.properties.clear();
    let mut changed = fleet.sign(&good);
    changed.payload = good
        .to_string()
        .replace("\"serial\":7", "\"serial\":8")
        .into_bytes();
    for publication in [signed(&good, &other), unsigned, changed] {
        let (reason, text) = publish(&mut client, &publication);
        assert_eq!(reason, 0x87, "{text}");
        assert!(text.contains("not signed"), "{text}");
    }
    server.wait_for_log("the order is not signed by a key");
    for order in [
        json!({ "serial": 7, "stores": [store], "action": "explode" }),
        json!({ "serial": 7, "stores": [store], "action": "promote" }),
        json!([]),
        json!({ "serial": 7, "stores": [], "action": "rollback" }),
        json!({ "serial": 7, "action": "rollback" }),
    ] {
        let (reason, text) = publish(&mut client, &fleet.sign(&order));
        assert_eq!(reason, 0x99, "{order}: {text}");
    }
    let line = server.wait_for_log("the order names no store");
    assert!(line.contains("statehouse::audit"), "{line}");
    let long = Publish::new(&format!("{TOPIC}/order"), vec![b' '; 200_000]).qos(1);
    assert_eq!(publish(&mut client, &long).0, 0x97);
    // No order announced these chunks.
    assert_eq!(publish(&mut client, &chunks(&fleet.file)[0]).0, 0x83);
    assert_eq!(roles(server, OURS), None);
    // Regression: the broker logged each refusal again.
    server.wait_for_log("an order has at most");
    let lines = server.stderr().into_iter();
    let again: Vec<_> = lines
        .filter(|line| line.contains("what=\"publish\""))
        .collect();
    assert!(again.is_empty(), "{again:?}");
}

/// The store could not acknowledge the order, so it must not carry it out.
#[test]
fn order_at_qos_0_is_dropped_and_audited() {
    let fleet = fleet();
    let server = &fleet.server;
    let order = json!({ "serial": 7, "stores": [fleet.store], "action": "shadow" });
    let order = fleet.sign(&order);
    let mut client = server.connect("fleet");
    client.start(order.clone().qos(0));
    let line = server.wait_for_log("an order must have QoS 1 or 2");
    assert!(line.contains("statehouse::audit"), "{line}");
    client.subscribe(&format!("{TOPIC}/status"), 0);
    let status: Json = serde_json::from_slice(&client.take_publish(TOPIC).payload).unwrap();
    assert_eq!(status["state"], "idle", "{status}");
    // The dropped order has not used up its serial.
    assert_eq!(publish(&mut client, &order), (0, String::new()));
    assert_eq!(ended(server, 7)["state"], "done");
}

#[test]
fn order_as_a_will_is_refused() {
    let fleet = fleet();
    let connect = Connect::new("client").will(fleet.order(7, "promote"), 0);
    let (_, connack) = Client::try_connect(fleet.server.address(), &connect);
    assert_eq!(connack.reason, 0x90, "{connack:?}");
    assert_eq!(connack.text(), "a will may not be a request or an order");
}

/// Both stores trust the key, so the signature alone does not say which one the order is for.
#[test]
fn captured_order_is_refused_by_another_store() {
    let fleet = fleet();
    let key = fleet.directory.path().join("trusted.pub");
    let other = trusting(key.to_str().unwrap());
    let other_name = name(&other);
    assert_ne!(other_name, fleet.store);
    let captured = fleet.order(7, "promote");
    let mut client = fleet.server.connect("fleet");
    ship(&mut client, &captured);
    ship_file(&mut client, &fleet.file);
    assert_eq!(ended(&fleet.server, 7)["state"], "done");

    let before = listing(&other);
    let mut client = other.connect("fleet");
    let (reason, text) = publish(&mut client, &captured);
    assert_eq!(reason, 0x87, "{text}");
    assert_contains!(text, "for other stores", &other_name);
    let line = other.wait_for_log("the order is for other stores");
    assert!(line.contains("statehouse::audit"), "{line}");
    // The store has taken no order, so it takes no chunks.
    assert_eq!(publish(&mut client, &chunks(&fleet.file)[0]).0, 0x83);
    assert_eq!(listing(&other), before);
    // The refused order has not used up its serial. One order may name both stores.
    let stores = [&fleet.store, &other_name];
    let both = json!({ "serial": 7, "stores": stores, "action": "shadow" });
    let taken = publish(&mut client, &fleet.sign(&both));
    assert_eq!(taken, (0, String::new()));
    assert_eq!(ended(&other, 7)["state"], "done");
}

/// Without a data directory, a restart loses the serial of the last order. It must lose the name of
/// the store too, or the old order would be accepted again.
#[test]
fn order_is_refused_after_a_restart_in_memory() {
    let directory = tempfile::tempdir().unwrap();
    let trusted = keygen(directory.path(), "trusted");
    let key = secret(&directory.path().join("trusted.key"));
    let settings = [("trusted_keys", &*trusted), ("durability", "memory")];
    let mut server = Server::restartable(&settings);
    let line = server.wait_for_log("the name of this store is");
    let store = line.rsplit(' ').next().unwrap();
    let order = json!({ "serial": 7, "stores": [store], "action": "shadow" });
    let order = signed(&order, &key);
    ship(&mut server.connect("fleet"), &order);
    assert_eq!(ended(&server, 7)["state"], "done");
    server.stop();
    server.restart();
    assert_eq!(publish(&mut server.connect("fleet"), &order).0, 0x87);
}

#[test]
fn order_to_a_store_without_trusted_keys_is_refused() {
    let directory = tempfile::tempdir().unwrap();
    keygen(directory.path(), "any");
    let key = secret(&directory.path().join("any.key"));
    let server = Server::with("allow_unsigned = true", &[]);
    let mut client = server.connect("fleet");
    let order = json!({ "serial": 7, "stores": [name(&server)], "action": "rollback" });
    let (reason, text) = publish(&mut client, &signed(&order, &key));
    assert_eq!(reason, 0x87);
    assert!(text.contains("trusted_keys"), "{text}");
    server.wait_for_log("trusted_keys");
}
