//! Tests orders over MQTT. The tests build orders by hand with a key of their own, so the
//! description of the protocol must be complete.

mod acceptance;
mod chunk;
mod push;
mod status;

use std::{fs, path::Path};

use data_encoding::BASE64;
use ed25519_compact::SecretKey;
use serde_json::{Value as Json, json};
use statehouse_tests::{Client, Property, Publish, Server, property};

use crate::{eventually, keygen, listing, ours, sign};

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

impl Fleet {
    /// A signed order that ships our policy.
    fn order(&self, serial: u64, action: &str) -> Publish {
        self.sign(&order(&self.store, serial, action, &self.file))
    }

    fn sign(&self, order: &Json) -> Publish {
        signed(order, &self.key)
    }
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
    let signature = BASE64.encode(key.sign(message, None).as_ref());
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

/// Publishes a message that the store must take.
#[track_caller]
fn ship(client: &mut Client, message: &Publish) {
    let (reason, text) = publish(client, message);
    assert_eq!(reason, 0, "{text}");
}

/// Publishes the chunks of a file, which the store must take.
fn ship_file(client: &mut Client, file: &[u8]) {
    for chunk in chunks(file) {
        ship(client, &chunk);
    }
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
