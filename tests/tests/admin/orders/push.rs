//! Tests `statehouse policy push`, which signs orders and ships their files.

use std::{fs, path::Path};

use serde_json::{Value as Json, json};
use statehouse_tests::{
    Fate, Mosquitto, Proxy, Publish, Ran, Server, Way,
    broker::{Broker, Greeting, Peer},
    packet::kind,
    run_in,
};
use tokio::task::{JoinHandle, spawn_blocking};

use super::{Fleet, TOPIC, fleet, name};
use crate::{answers, keygen, ours, policy};

/// Runs `statehouse policy push` in the directory of the keys.
fn push(directory: &Path, broker: &str, key: &str, more: &[&str]) -> Ran {
    let all = ["policy", "push", "--broker", broker, "--key", key];
    run_in(directory, &[&all, more].concat())
}

impl Fleet {
    /// Pushes to the store of the fleet.
    fn push(&self, key: &str, more: &[&str]) -> Ran {
        let broker = format!("mqtt://{}", self.server.address());
        push(self.directory.path(), &broker, key, more)
    }
}

#[test]
fn push_without_a_store_says_how_to_find_its_name() {
    let fleet = fleet();
    let (server, store) = (&fleet.server, &fleet.store);
    let rollback = |more: &[&str]| fleet.push("trusted.key", &[&["--rollback"], more].concat());
    let says = "`statehouse policy list` on the gateway shows the store's name";
    rollback(&[]).fails(2, "--store").says(says);
    rollback(&["--store", ""]).fails(2, "--store");
    rollback(&["--store", "other"]).fails(4, store);
    let list = policy(server, &["list"]).code(0).text();
    assert!(list.contains(&format!("\nstore: {store}\n")), "{list}");
    server.wait_for_log(&format!("the name of this store is {store}"));
}

#[test]
fn push_signs_ships_and_reports_errors() {
    let fleet = fleet();
    let (server, store) = (&fleet.server, &fleet.store);
    let here = fleet.directory.path();
    let push_with =
        |key: &str, more: &[&str]| fleet.push(key, &[&["--store", store.as_str()], more].concat());
    let trusted = |more: &[&str]| push_with("trusted.key", more);
    // The command signs an unsigned file, which gives the same bytes as `policy sign`.
    let module = ours();
    let done = trusted(&[&module, "--promote", "--json"]).code(0);
    let status = done.object();
    assert_eq!(status["state"], "done");
    assert_eq!(
        status["digest"],
        blake3::hash(&fleet.file).to_hex().to_string()
    );
    assert!(answers(server, "tally"));
    let done = trusted(&["--rollback"]).code(0).text();
    assert!(done.contains("active is standard "), "{done}");
    assert!(!answers(server, "tally"));
    trusted(&["--rollback", "--serial", "5"]).fails(4, "not newer");
    trusted(&["--rollback"]).fails(4, "nothing to go back to");
    fs::write(here.join("rubbish.wasm"), b"\0asm\x01\0\0\0").unwrap();
    trusted(&["rubbish.wasm"]).fails(4, "component");
    keygen(here, "other");
    push_with("other.key", &[&module]).fails(4, "not signed by a key");
    let nowhere = "127.0.0.1:1";
    push(here, nowhere, "trusted.key", &["--store", store, &module]).fails(3, "127.0.0.1:1");
}

/// Regression: the retained status of the earlier order counted as the result.
#[test]
fn push_with_the_serial_of_another_order_is_refused() {
    let fleet = fleet();
    let store = ["--store", fleet.store.as_str(), "--serial", "7"];
    let push = |more: &[&str]| fleet.push("trusted.key", &[&store, more].concat());
    let module = ours();
    push(&[&module]).code(0);
    push(&[&module, "--promote"]).fails(4, "not newer than 7");
    push(&["--rollback"]).fails(4, "not newer than 7");
    assert!(!answers(&fleet.server, "tally"));
    // This is the same order, so its result is known.
    push(&[&module]).code(0);
}

/// Pushes order 7, a rollback, through this broker.
fn push_7(broker: &Broker) -> JoinHandle<Ran> {
    let url = format!("mqtt://{}", broker.address());
    spawn_blocking(move || {
        let directory = tempfile::tempdir().unwrap();
        keygen(directory.path(), "trusted");
        let arguments = ["--store", "any", "--rollback", "--serial", "7"];
        push(directory.path(), &url, "trusted.key", &arguments)
    })
}

fn status(status: &Json) -> Publish {
    Publish::new(&format!("{TOPIC}/status"), status.to_string())
}

/// Accepts a connection of the command at a broker with this retained status.
async fn accept_with(broker: &Broker, retained: &Json) -> Peer {
    let mut client = broker.accept().await;
    client.greet(&Greeting::default()).await;
    client.answer_subscribe(&[1]).await;
    client.send(&status(retained).retained().bytes()).await;
    client
}

/// Regression: the command ended with the earlier failure, and sent nothing.
#[tokio::test(flavor = "multi_thread")]
async fn push_sends_an_order_again_whose_pieces_were_late() {
    let broker = Broker::start().await;
    let pushing = push_7(&broker);
    let late = json!({ "state": "failed", "serial": 7, "missing": 2, "error": "late" });
    let mut client = accept_with(&broker, &late).await;
    assert_eq!(client.read().await.kind(), kind::PUBLISH);
    let done = json!({ "state": "done", "serial": 7 });
    client.send(&status(&done).bytes()).await;
    pushing.await.unwrap().code(0);
}

/// Regression: it exited with 4, as if the store had refused an order that it has carried out.
#[tokio::test(flavor = "multi_thread")]
async fn push_says_that_a_restart_lost_the_result() {
    let broker = Broker::start().await;
    let pushing = push_7(&broker);
    // The status of a store that has started again after it took the order.
    let idle = json!({ "state": "idle", "last_serial": 7 });
    let mut client = accept_with(&broker, &idle).await;
    // It cannot know yet that this is its own order.
    assert_eq!(client.read().await.kind(), kind::PUBLISH);
    drop(client);
    // The connection must last until the command has read the status.
    let _client = accept_with(&broker, &idle).await;
    pushing.await.unwrap().fails(3, "policy list");
}

/// The connection breaks after the order and half of its file.
#[test]
fn push_continues_over_another_connection() {
    let fleet = fleet();
    let server = &fleet.server;
    let proxy = Proxy::start(server.address());
    let half = fleet.file.len() / 2;
    let mut bytes = 0;
    proxy.script(move |seen| {
        if seen.way == Way::ToBroker {
            bytes += seen.packet.body.len();
        }
        match seen.connection == 0 && bytes > half {
            true => Fate::CutWithin,
            false => Fate::Pass,
        }
    });
    push(
        fleet.directory.path(),
        &proxy.url(),
        "trusted.key",
        &["--store", &fleet.store, &ours(), "--promote"],
    )
    .code(0);
    assert_eq!(proxy.connections(), 2);
    assert!(answers(server, "tally"));
}

/// Without the status the operator could not see the result of an order, so the command sends none.
#[tokio::test(flavor = "multi_thread")]
async fn push_fails_if_it_may_not_subscribe_to_the_status() {
    let broker = Broker::start().await;
    let url = format!("mqtt://{}", broker.address());
    let pushing = tokio::task::spawn_blocking(move || {
        let directory = tempfile::tempdir().unwrap();
        keygen(directory.path(), "trusted");
        let arguments = ["--store", "any", "--rollback"];
        push(directory.path(), &url, "trusted.key", &arguments)
    });
    let mut client = broker.accept().await;
    client.greet(&Greeting::default()).await;
    client.answer_subscribe(&[0x87]).await;
    assert!(client.rest().await.is_empty(), "it sent more");
    pushing.await.unwrap().fails(4, "not authorized");
}

/// Regression: only a slow store was named, also if the broker ended each connection.
#[tokio::test(flavor = "multi_thread")]
async fn push_without_a_result_says_why_its_connection_was_lost() {
    let broker = Broker::start().await;
    let url = format!("mqtt://{}", broker.address());
    // Its last connection may end before its CONNECT, which ends the task.
    let losing = tokio::spawn(async move {
        loop {
            broker.accept().await.greet(&Greeting::default()).await;
        }
    });
    let pushing = tokio::task::spawn_blocking(move || {
        let directory = tempfile::tempdir().unwrap();
        keygen(directory.path(), "trusted");
        let arguments = ["--store", "any", "--rollback", "--timeout", "2s"];
        push(directory.path(), &url, "trusted.key", &arguments)
    });
    let pushed = pushing.await.unwrap().code(3);
    losing.abort();
    pushed
        .says("in time")
        .says("a connection was lost before: ");
}

/// The order was not sent, so no missing result may be reported.
#[tokio::test(flavor = "multi_thread")]
async fn push_without_a_leader_says_that_it_reached_no_store() {
    let broker = Broker::start().await;
    let url = format!("mqtt://{}", broker.address());
    let refusing = tokio::spawn(async move {
        loop {
            // CONNACK: server unavailable.
            broker.accept().await.send(&[0x20, 3, 0, 0x88, 0]).await;
        }
    });
    let pushing = spawn_blocking(move || {
        let directory = tempfile::tempdir().unwrap();
        keygen(directory.path(), "trusted");
        let arguments = ["--store", "any", "--rollback", "--timeout", "2s"];
        push(directory.path(), &url, "trusted.key", &arguments)
    });
    let pushed = pushing.await.unwrap();
    refusing.abort();
    pushed
        .fails(3, "cannot reach the broker")
        .says("server unavailable");
}

/// Regression: the exit code was that of a refusal by a store.
#[test]
fn push_to_a_broker_without_a_store_exits_with_3() {
    let broker = Mosquitto::start();
    let directory = tempfile::tempdir().unwrap();
    keygen(directory.path(), "trusted");
    let rollback = ["--store", "any", "--rollback"];
    push(directory.path(), &broker.url(), "trusted.key", &rollback)
        .fails(3, "no subscriber for orders");
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
