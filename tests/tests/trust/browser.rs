//! A web page in a real browser, which uses MQTT.js over WebSocket and the client of
//! `examples/clients/javascript`. A page of an allowed origin must be able to set and watch keys,
//! and another page must be refused.

use std::{
    fs,
    io::{BufRead, BufReader, Write},
    net::{SocketAddr, TcpListener},
    path::{Path, PathBuf},
    thread,
};

use statehouse_tests::{Browser, Server, wait::until};

use crate::websocket::start;

/// The page, which runs without input. The tests observe its effects in the store.
const PAGE: &str = r#"<!doctype html><meta charset="utf-8"><script type="importmap">
{"imports": {"mqtt": "/clients/javascript/node_modules/mqtt/dist/mqtt.esm.js"}}
</script><script type="module">
import { connect } from "/clients/javascript/statehouse.js";
const [, url] = decodeURIComponent(location.search).split("=");
try {
  const store = await connect(url);
  await store.set("page", "hello from " + location.origin);
  const watch = await store.watch("watched");
  await store.set("ready", "yes");
  for await (const { data } of watch) {
    if (data) await store.set("echo", data);
  }
} catch (error) {
  console.error("TROUBLE " + error.message);
}
</script>"#;

/// Serves the page and the directory of the examples to a browser.
fn site() -> SocketAddr {
    let examples = Path::new(env!("CARGO_MANIFEST_DIR")).join("../examples");
    let library = examples.join("clients/javascript/node_modules/mqtt/dist/mqtt.esm.js");
    assert!(
        library.is_file(),
        "tests/run installs MQTT.js as {}",
        library.display()
    );
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    thread::spawn(move || {
        for socket in listener.incoming().map_while(Result::ok) {
            let mut lines = BufReader::new(&socket).lines().map_while(Result::ok);
            let request = lines.next().unwrap_or_default();
            lines
                .by_ref()
                .take_while(|line| !line.is_empty())
                .for_each(drop);
            let path = request.split([' ', '?']).nth(1).unwrap_or_default();
            let (kind, body) = match path {
                "/" => ("text/html", PAGE.as_bytes().to_vec()),
                path => {
                    let file: PathBuf = examples.join(path.trim_start_matches('/'));
                    let kind = match path.ends_with(".html") {
                        true => "text/html",
                        false => "text/javascript",
                    };
                    (kind, fs::read(file).unwrap_or_default())
                }
            };
            let head = format!(
                "HTTP/1.1 200 OK\r\nContent-Type: {kind}\r\nContent-Length: {}\r\nConnection: close\r\n\r\n",
                body.len()
            );
            let mut socket = &socket;
            // The browser may close the connection early.
            _ = socket
                .write_all(head.as_bytes())
                .and_then(|()| socket.write_all(&body));
        }
    });
    address
}

/// Waits until a key has this value.
fn wait_for_value(server: &Server, key: &str, value: &str) {
    let mut store = server.store(&format!("waits-for-{key}"));
    until(&format!("the page sets {key}"), || {
        store.get(key).as_deref() == Some(value.as_bytes())
    });
}

#[test]
fn page_in_a_browser_sets_a_key_and_gets_changes() {
    let (server, address) = start(&[]);
    let site = site();
    let browser = Browser::show(&format!("http://{site}/?url=ws://{address}/mqtt"));
    wait_for_value(&server, "ready", "yes");
    wait_for_value(&server, "page", &format!("hello from http://{site}"));
    let mut store = server.store("other");
    store.set("watched", "to the page");
    wait_for_value(&server, "echo", "to the page");
    drop(browser);
}

/// The origin of the page is not on the list of allowed origins.
#[test]
fn page_of_an_unlisted_origin_is_refused() {
    let (server, address) = start(&["--ws-origin", "https://panel.example"]);
    let site = site();
    let browser = Browser::show(&format!("http://{site}/?url=ws://{address}/mqtt"));
    server.wait_for_log(&format!("http://{site}"));
    assert_eq!(server.store("other").get("page"), None);
    drop(browser);
}
