//! Tests orders over MQTT. The tests build orders by hand with a key of their own, so the
//! description of the protocol must be complete.

use std::{
    fs,
    io::{self, Read, Write},
    net::{Shutdown, SocketAddr, TcpListener, TcpStream},
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    thread,
};

use ed25519_compact::SecretKey;
use serde_json::{Value as Json, json};
use statehouse_tests::{Client, Property, Publish, Ran, Server, property, run_in};

use crate::{OURS, answers, eventually, keygen, listing, ours, policy, roles, sign};

const TOPIC: &str = "statehouse/v1/admin/policy";

/// A store, and the key that it trusts.
struct Fleet {
    server: Server,
    /// The store's name.
    store: String,
    directory: tempfile::TempDir,
    key: SecretKey,
    /// The bytes of our policy, signed.
    file: Vec<u8>,
}

fn fleet() -> Fleet {
    let directory = tempfile::tempdir().unwrap();
    let here = directory.path();
    let trusted = keygen(here, "trusted");
    let server = trusting(&trusted);
    let file = fs::read(sign(here, "trusted.key", &ours(), "signed.wasm")).unwrap();
    Fleet {
        store: name(&server),
        server,
        key: secret(&here.join("trusted.key")),
        directory,
        file,
    }
}

/// A store that trusts this key.
fn trusting(key: &str) -> Server {
    Server::with(&format!("trusted_keys = [\"{key}\"]"), &[])
}

/// The name by which orders address this store.
fn name(server: &Server) -> String {
    let listing = listing(server);
    listing["store"].as_str().unwrap().to_owned()
}

/// Reads a key file: one byte for the kind of key, then the key.
fn secret(path: &Path) -> SecretKey {
    SecretKey::from_slice(&fs::read(path).unwrap()[1..]).unwrap()
}

fn base64(bytes: &[u8]) -> String {
    let digits = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut text = String::new();
    for group in bytes.chunks(3) {
        let at = |index: usize| u32::from(group.get(index).copied().unwrap_or(0));
        let bits = at(0) << 16 | at(1) << 8 | at(2);
        for index in 0..=group.len() {
            text.push(char::from(digits[(bits >> (18 - 6 * index) & 63) as usize]));
        }
        text.push_str(&"=".repeat(3 - group.len()));
    }
    text
}

const CHUNK_BYTES: usize = 20_000;

/// An order that ships a file.
fn order(store: &str, serial: u64, action: &str, file: &[u8]) -> Json {
    let hash = |bytes: &[u8]| blake3::hash(bytes).to_hex().to_string();
    json!({
        "serial": serial,
        "stores": [store],
        "action": action,
        "digest": hash(file),
        "size": file.len(),
        "chunks": file.chunks(CHUNK_BYTES).map(hash).collect::<Vec<_>>(),
    })
}

fn signed(order: &Json, key: &SecretKey) -> Publish {
    let payload = order.to_string();
    let message = [b"statehouse order v1\0", payload.as_bytes()].concat();
    let signature = base64(key.sign(message, None).as_ref());
    Publish::new(&format!("{TOPIC}/order"), payload)
        .with(Property::user("signature", &signature))
        .qos(1)
}

fn chunks(file: &[u8]) -> Vec<Publish> {
    let digest = blake3::hash(file).to_hex();
    let chunks = file.chunks(CHUNK_BYTES).enumerate();
    chunks
        .map(|(index, chunk)| {
            Publish::new(&format!("{TOPIC}/chunk/{digest}/{index}"), chunk).qos(1)
        })
        .collect()
}

/// Publishes a message. Returns the reason code and the reason string of its PUBACK.
fn publish(client: &mut Client, publish: &Publish) -> (u8, String) {
    let ack = client.publish(publish.clone());
    let text = property::reason_string(&ack.properties);
    (ack.reason, text.unwrap_or_default())
}

/// Waits until this order has ended. Returns the retained status.
fn ended(server: &Server, serial: u64) -> Json {
    let mut count = 0;
    eventually("the order has ended", || {
        count += 1;
        let mut client = server.connect(&format!("observer{count}"));
        client.subscribe(&format!("{TOPIC}/status"), 0);
        let status = client.take_publish(TOPIC);
        assert!(status.retain);
        let status: Json = serde_json::from_slice(&status.payload).unwrap();
        let over = status["state"] == "done" || status["state"] == "failed";
        (over && status["serial"] == serial).then_some(status)
    })
}

#[test]
fn signed_order_ships_and_promotes_a_policy() {
    let Fleet {
        server,
        store,
        key,
        file,
        ..
    } = fleet();
    let mut client = server.connect("fleet");
    let order = signed(&order(&store, 7, "promote", &file), &key);
    assert_eq!(publish(&mut client, &order), (0, String::new()));
    let all = chunks(&file);
    assert!(
        all.len() > 2,
        "a file of {} bytes has too few chunks",
        file.len()
    );
    // Chunks arrive in reverse order, over two connections, and each of them twice, since QoS 1
    // delivers at least once.
    for chunk in all.iter().skip(1).rev() {
        assert_eq!(publish(&mut client, chunk).0, 0);
        assert_eq!(publish(&mut client, chunk).0, 0);
    }
    assert!(!answers(&server, "tally"));
    let mut second = server.connect("second");
    assert_eq!(publish(&mut second, &order).0, 0);
    assert_eq!(publish(&mut second, &all[0]).0, 0);
    let status = ended(&server, 7);
    assert_eq!(status["state"], "done", "{status}");
    assert_eq!(status["active"]["name"], OURS);
    assert_eq!(status["last_serial"], 7);
    assert!(answers(&server, "tally"));
    // Late duplicates are acknowledged and have no effect.
    policy(&server, &["rollback"]).code(0);
    assert_eq!(publish(&mut client, &order).0, 0);
    assert_eq!(publish(&mut client, &all[0]).0, 0);
    assert!(!answers(&server, "tally"));
}

#[test]
fn old_order_is_refused_also_after_a_restart() {
    let Fleet {
        mut server,
        store,
        key,
        file,
        ..
    } = fleet();
    let first = signed(&order(&store, 7, "promote", &file), &key);
    let back = signed(
        &json!({ "serial": 8, "stores": [store], "action": "rollback" }),
        &key,
    );
    let mut client = server.connect("fleet");
    assert_eq!(publish(&mut client, &first).0, 0);
    for chunk in chunks(&file) {
        assert_eq!(publish(&mut client, &chunk).0, 0);
    }
    assert_eq!(ended(&server, 7)["state"], "done");
    assert_eq!(publish(&mut client, &back).0, 0);
    assert_eq!(ended(&server, 8)["state"], "done");
    assert!(!answers(&server, "tally"));
    let refused = |client: &mut Client| {
        for old in [&first, &signed(&order(&store, 7, "load", &file), &key)] {
            let (reason, text) = publish(client, old);
            assert_eq!(reason, 0x83, "{text}");
            assert!(text.contains("not newer than 8"), "{text}");
        }
    };
    refused(&mut client);
    server.signal("TERM");
    server.wait(std::time::Duration::from_secs(20));
    server.restart();
    refused(&mut server.connect("fleet"));
    assert!(!answers(&server, "tally"));
    // An order needs no chunks if its policy is loaded already.
    let again = json!({ "serial": 9, "stores": [store], "action": "promote", "digest": blake3::hash(&file).to_hex().to_string() });
    assert_eq!(
        publish(&mut server.connect("fleet"), &signed(&again, &key)).0,
        0
    );
    assert_eq!(ended(&server, 9)["state"], "done");
    assert!(answers(&server, "tally"));
}

#[test]
fn invalid_or_untrusted_order_is_refused() {
    let Fleet {
        server,
        store,
        directory,
        key,
        file,
    } = fleet();
    keygen(directory.path(), "other");
    let other = secret(&directory.path().join("other.key"));
    let mut client = server.connect("fleet");
    let good = order(&store, 7, "promote", &file);
    let mut unsigned = signed(&good, &key);
    unsigned.properties.clear();
    let mut changed = signed(&good, &key);
    changed.payload = good
        .to_string()
        .replace("\"serial\":7", "\"serial\":8")
        .into_bytes();
    for (publication, says) in [
        (signed(&good, &other), "not signed"),
        (unsigned, "not signed"),
        (changed, "not signed"),
    ] {
        let (reason, text) = publish(&mut client, &publication);
        assert_eq!(reason, 0x87, "{text}");
        assert!(text.contains(says), "{text}");
    }
    server.wait_for_log("the order is not signed by a key");
    for (order, reason) in [
        (
            json!({ "serial": 7, "stores": [store], "action": "explode" }),
            0x99,
        ),
        (
            json!({ "serial": 7, "stores": [store], "action": "promote" }),
            0x99,
        ),
        (json!([]), 0x99),
        (
            json!({ "serial": 7, "stores": [], "action": "rollback" }),
            0x99,
        ),
        (json!({ "serial": 7, "action": "rollback" }), 0x99),
    ] {
        assert_eq!(publish(&mut client, &signed(&order, &key)).0, reason);
    }
    let line = server.wait_for_log("the order names no store");
    assert!(line.contains("statehouse::audit"), "{line}");
    let long = Publish::new(&format!("{TOPIC}/order"), vec![b' '; 200_000]).qos(1);
    assert_eq!(publish(&mut client, &long).0, 0x97);
    // No order announced these chunks.
    assert_eq!(publish(&mut client, &chunks(&file)[0]).0, 0x83);
    assert_eq!(roles(&server, OURS), None);
}

/// Both stores trust the key, so the signature alone does not say which one the order is for.
#[test]
fn captured_order_is_refused_by_another_store() {
    let Fleet {
        server,
        store,
        directory,
        key,
        file,
    } = fleet();
    let other = trusting(directory.path().join("trusted.pub").to_str().unwrap());
    let other_name = name(&other);
    assert_ne!(other_name, store);
    let captured = signed(&order(&store, 7, "promote", &file), &key);
    let mut all = vec![captured.clone()];
    all.extend(chunks(&file));
    for publication in &all {
        assert_eq!(publish(&mut server.connect("fleet"), publication).0, 0);
    }
    assert_eq!(ended(&server, 7)["state"], "done");

    let before = listing(&other);
    let mut client = other.connect("fleet");
    let (reason, text) = publish(&mut client, &captured);
    assert_eq!(reason, 0x87, "{text}");
    assert!(
        text.contains("for other stores") && text.contains(&other_name),
        "{text}"
    );
    let line = other.wait_for_log("the order is for other stores");
    assert!(line.contains("statehouse::audit"), "{line}");
    // The store has taken no order, so it takes no chunks.
    assert_eq!(publish(&mut client, &all[1]).0, 0x83);
    assert_eq!(listing(&other), before);
    // The refused order has not used up its serial. One order may name both stores.
    let both = json!({
        "serial": 7,
        "stores": [store, other_name],
        "action": "shadow",
    });
    assert_eq!(
        publish(&mut client, &signed(&both, &key)),
        (0, String::new())
    );
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
    assert_eq!(publish(&mut server.connect("fleet"), &order).0, 0);
    assert_eq!(ended(&server, 7)["state"], "done");
    server.signal("TERM");
    server.wait(std::time::Duration::from_secs(20));
    server.restart();
    assert_eq!(publish(&mut server.connect("fleet"), &order).0, 0x87);
}

#[test]
fn chunk_that_does_not_match_the_order_is_refused() {
    let Fleet {
        server,
        store,
        key,
        file,
        ..
    } = fleet();
    let mut client = server.connect("fleet");
    assert_eq!(
        publish(&mut client, &signed(&order(&store, 7, "load", &file), &key)).0,
        0
    );
    let all = chunks(&file);
    let mut tampered = all[0].clone();
    tampered.payload[100] ^= 1;
    assert_eq!(publish(&mut client, &tampered).0, 0x99);
    let mut swapped = all[0].clone();
    swapped.payload.clone_from(&all[1].payload);
    assert_eq!(publish(&mut client, &swapped).0, 0x99);
    let digest = blake3::hash(&file).to_hex();
    for place in [
        format!("{digest}/9999"),
        format!("{digest}/x"),
        format!("{digest}"),
        "x/0".into(),
    ] {
        let chunk = Publish::new(&format!("{TOPIC}/chunk/{place}"), "x").qos(1);
        assert_eq!(publish(&mut client, &chunk).0, 0x90, "{place}");
    }
    for chunk in &all {
        assert_eq!(publish(&mut client, chunk).0, 0);
    }
    assert_eq!(ended(&server, 7)["state"], "done");
    assert_eq!(roles(&server, OURS).unwrap(), [""; 0]);
    // An unsigned file is refused even if the order is signed: a valid order does not make its file
    // trusted.
    let unsigned = fs::read(ours()).unwrap();
    assert_eq!(
        publish(
            &mut client,
            &signed(&order(&store, 8, "promote", &unsigned), &key)
        )
        .0,
        0
    );
    for chunk in chunks(&unsigned) {
        assert_eq!(publish(&mut client, &chunk).0, 0);
    }
    let status = ended(&server, 8);
    assert_eq!(status["state"], "failed");
    assert!(
        status["error"].as_str().unwrap().contains("not signed"),
        "{status}"
    );
    assert!(!answers(&server, "tally"));
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

/// Runs `statehouse policy push` in the directory of the keys.
fn push(directory: &Path, broker: &str, key: &str, more: &[&str]) -> Ran {
    let all = ["policy", "push", "--broker", broker, "--key", key];
    run_in(directory, &[&all, more].concat(), b"")
}

#[test]
fn push_without_a_store_says_how_to_find_its_name() {
    let Fleet {
        server,
        store,
        directory,
        ..
    } = fleet();
    let broker = format!("mqtt://{}", server.address());
    let rollback = |more: &[&str]| {
        let all = [&["--rollback"], more].concat();
        push(directory.path(), &broker, "trusted.key", &all)
    };
    let says = "`statehouse policy list` on the gateway shows the store's name";
    rollback(&[]).code(2).says("--store").says(says);
    rollback(&["--store", ""]).code(2).says("--store");
    rollback(&["--store", "other"]).code(4).says(&store);
    let list = policy(&server, &["list"]).code(0).text();
    assert!(list.contains(&format!("\nstore: {store}\n")), "{list}");
    server.wait_for_log(&format!("the name of this store is {store}"));
}

#[test]
fn push_signs_ships_and_reports_errors() {
    let Fleet {
        server,
        store,
        directory,
        file,
        ..
    } = fleet();
    let here = directory.path();
    let broker = format!("mqtt://{}", server.address());
    let push_with = |key: &str, more: &[&str]| {
        let all = [&["--store", &store], more].concat();
        push(here, &broker, key, &all)
    };
    let trusted = |more: &[&str]| push_with("trusted.key", more);
    // The command signs an unsigned file, which gives the same bytes as `policy sign`.
    let module = ours();
    let done = trusted(&[&module, "--promote", "--json"]).code(0).text();
    let status: Json = serde_json::from_str(&done).unwrap();
    assert_eq!(status["state"], "done");
    assert_eq!(status["digest"], blake3::hash(&file).to_hex().to_string());
    assert!(answers(&server, "tally"));
    let done = trusted(&["--rollback"]).code(0).text();
    assert!(done.contains("active is standard "), "{done}");
    assert!(!answers(&server, "tally"));
    trusted(&["--rollback", "--serial", "5"])
        .code(4)
        .says("not newer");
    trusted(&["--rollback"])
        .code(4)
        .says("nothing to go back to");
    fs::write(here.join("rubbish.wasm"), b"\0asm\x01\0\0\0").unwrap();
    trusted(&["rubbish.wasm"]).code(4).says("component");
    keygen(here, "other");
    push_with("other.key", &[&module])
        .code(4)
        .says("not signed by a key");
    let nowhere = "127.0.0.1:1";
    push(here, nowhere, "trusted.key", &["--store", &store, &module])
        .code(3)
        .says("127.0.0.1:1");
}

/// Starts a relay in front of a server. It closes the first connection after `bytes` of the client.
/// Returns its address, and counts its connections.
fn cut_after(bytes: u64, server: SocketAddr) -> (SocketAddr, Arc<AtomicUsize>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let connections = Arc::new(AtomicUsize::new(0));
    let count = connections.clone();
    thread::spawn(move || {
        for client in listener.incoming().map_while(Result::ok) {
            let is_first = count.fetch_add(1, Ordering::Relaxed) == 0;
            let store = TcpStream::connect(server).unwrap();
            let (mut from, mut to) = (store.try_clone().unwrap(), client.try_clone().unwrap());
            thread::spawn(move || io::copy(&mut from, &mut to));
            thread::spawn(move || {
                let most = if is_first { bytes } else { u64::MAX };
                let _ = io::copy(&mut (&client).take(most), &mut &store);
                for end in [client, store] {
                    let _ = end.shutdown(Shutdown::Both);
                }
            });
        }
    });
    (address, connections)
}

/// The connection breaks after the order and half of its file.
#[test]
fn push_continues_over_another_connection() {
    let Fleet {
        server,
        store,
        directory,
        file,
        ..
    } = fleet();
    let half = u64::try_from(file.len()).unwrap() / 2;
    let (address, connections) = cut_after(half, server.address());
    let broker = format!("mqtt://{address}");
    push(
        directory.path(),
        &broker,
        "trusted.key",
        &["--store", &store, &ours(), "--promote"],
    )
    .code(0);
    assert_eq!(connections.load(Ordering::Relaxed), 2);
    assert!(answers(&server, "tally"));
}

/// Without the status the operator could not see the result of an order, so the command sends none.
#[test]
fn push_fails_if_it_may_not_subscribe_to_the_status() {
    let directory = tempfile::tempdir().unwrap();
    keygen(directory.path(), "trusted");
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let broker = format!("mqtt://{}", listener.local_addr().unwrap());
    thread::spawn(move || {
        let (mut client, _) = listener.accept().unwrap();
        let mut packet = [0; 1024];
        // CONNECT and CONNACK, SUBSCRIBE and SUBACK: not authorized.
        let _ = client.read(&mut packet).unwrap();
        client.write_all(&[0x20, 3, 0, 0, 0]).unwrap();
        let _ = client.read(&mut packet).unwrap();
        let suback = [0x90, 4, packet[2], packet[3], 0, 0x87];
        client.write_all(&suback).unwrap();
        io::copy(&mut client, &mut io::sink()).unwrap();
    });
    let arguments = ["--store", "any", "--rollback"];
    push(directory.path(), &broker, "trusted.key", &arguments)
        .code(4)
        .says("NotAuthorized");
}

/// The chunks must fit the maximum packet size of the broker.
#[test]
fn push_makes_smaller_chunks_for_small_packets() {
    let Fleet { directory, .. } = fleet();
    let key = directory.path().join("trusted.pub");
    let toml = format!(
        "trusted_keys = [\"{}\"]\nmax_packet_bytes = 16384\nmax_value_bytes = 4096\nmax_key_bytes = 1024\n",
        key.display()
    );
    let server = Server::with_config(&toml);
    let broker = format!("mqtt://{}", server.address());
    push(
        directory.path(),
        &broker,
        "trusted.key",
        &["--store", &name(&server), &ours(), "--promote"],
    )
    .code(0);
    assert!(answers(&server, "tally"));
}
