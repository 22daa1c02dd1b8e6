//! Tests `statehouse clients`, which lists connections and ends them.

use serde_json::{Value as Json, json};
use statehouse_tests::{Connect, Publish, Ran, Server, assert_contains, client::Client};

fn clients(server: &Server, arguments: &[&str]) -> Ran {
    server.run(&[&["clients"], arguments].concat())
}

fn listed(server: &Server) -> Json {
    clients(server, &["--json"]).code(0).object()
}

#[test]
fn clients_shows_connections_queues_and_watches() {
    let server = Server::start();
    assert_eq!(listed(&server)["clients"], json!([]));
    let mut watcher = server.store("watcher");
    for key in ["a", "b"] {
        watcher.ask(&["KEYNOTIFY", key]);
    }
    // A lock; a value without an end, one of another holder, and a lock that was released.
    watcher.ask(&["SET", "lock", "watcher", "NX", "PX", "600000"]);
    watcher.set("name", "watcher");
    watcher.ask(&["SET", "other", "press", "NX", "PX", "600000"]);
    watcher.ask(&["SET", "released", "watcher", "NX", "PX", "600000"]);
    watcher.ask(&["VDEL", "released", "watcher"]);
    let mut absent = Client::connect(server.address(), &Connect::resume("absent", 600));
    absent.subscribe("news/#", 1);
    absent.disconnect();
    let mut publisher = server.connect("publisher");
    for _ in 0..3 {
        publisher.publish(Publish::new("news/1", b"hello").qos(1));
    }

    let all = listed(&server);
    assert_eq!(all["connected"], 2);
    assert_eq!(all["disconnected"], 1);
    let of = |name: &str| -> Json {
        let all = all["clients"].as_array().unwrap();
        all.iter().find(|it| it["client"] == name).unwrap().clone()
    };
    let watcher = of("watcher");
    assert_eq!(watcher["watches"], 2);
    assert_eq!(watcher["address"], "127.0.0.1");
    assert_eq!(watcher["locks"], 1);
    let since_ms = watcher["since_ms"].as_u64().unwrap();
    assert!(since_ms > 1_700_000_000_000, "{watcher}");
    assert!(all["time_ms"].as_u64().unwrap() >= since_ms, "{all}");
    assert_eq!(watcher["mqtt"], "5");
    let absent = of("absent");
    assert_eq!(absent["since_ms"], Json::Null);
    assert_eq!(absent["queued"], 3);
    assert_eq!(absent["mqtt"], Json::Null);
    assert_eq!(absent["subscriptions"], 1);
    assert_eq!(absent["in_flight"], 0);
    assert!(absent["queued_bytes"].as_u64().unwrap() > 3 * 5);

    let text = clients(&server, &["--limit", "1"]).code(0).text();
    let end = "2 connected, 1 session without a connection; 2 not shown\n";
    assert!(text.starts_with("client") && text.ends_with(end), "{text}");
    clients(&server, &["--limit", "100000"]).fails(2, "from 0 to 2000");

    let mut old = server.open();
    old.send(b"\x10\x0F\0\x04MQTT\x04\x02\0\0\0\x03old");
    assert_eq!(old.next().bytes(), [0x20, 2, 0, 0]);
    let text = clients(&server, &[]).code(0).text();
    assert_contains!(text, "old        -     127.0.0.1  3.1.1  ");
}

#[test]
fn kick_ends_the_connection_and_keeps_the_session() {
    let server = Server::start();
    let id = "press/4 ü";
    let mut client = Client::connect(server.address(), &Connect::resume(id, 600));
    client.subscribe("news/#", 1);
    clients(&server, &["kick", id]).code(0).says("is ended");
    client.expect_disconnect(0x98);
    clients(&server, &["kick", id]).fails(1, "press/4");
    let again = Client::connect(server.address(), &Connect::resume(id, 600));
    assert!(again.session_present());
}
