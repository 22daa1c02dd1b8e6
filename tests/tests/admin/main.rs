//! Ways to ship policies into a running store and to steer them: the commands, HTTP, a socket, signatures, the drop directory,
//! orders over MQTT; limits that change while it runs, and who may do what there.
#![allow(missing_docs, clippy::unwrap_used)]

mod authz;
mod commands;
mod drop;
mod hostile;
mod http;
mod limits;
mod orders;
mod socket;
mod trust;
mod usage;
#[path = "../../policies/wasm.rs"]
mod wasm;

use std::{
    path::Path,
    thread,
    time::{Duration, Instant},
};

use serde_json::Value as Json;
use statehouse_tests::{Ran, Server, policies, run_in};

/// Runs `statehouse policy …` beside a server, so that it finds the data directory by its default name.
fn policy(server: &Server, arguments: &[&str]) -> Ran {
    let all = [&["policy"], arguments].concat();
    run_in(server.directory(), &all, b"")
}

/// The listing as JSON.
fn listing(server: &Server) -> Json {
    let text = policy(server, &["list", "--json"]).code(0).text();
    serde_json::from_str(&text).unwrap()
}

/// What a loaded policy of this name is there for; none where it is not loaded.
fn roles(server: &Server, name: &str) -> Option<Vec<String>> {
    let listing = listing(server);
    let policies = listing["policies"].as_array().unwrap();
    let view = policies.iter().find(|view| view["name"] == name)?;
    let roles = view["roles"].as_array().unwrap().iter();
    Some(
        roles
            .map(|role| role.as_str().unwrap().to_owned())
            .collect(),
    )
}

/// The name of a policy whose answers tell it from the standard one.
const OURS: &str = "marked-ship";

/// Its file.
fn ours() -> String {
    let path = policies::marked("ship");
    path.into_os_string().into_string().unwrap()
}

/// Whether our policy answers about this key.
fn answers(server: &Server, key: &str) -> bool {
    let answer = server.store("asking").ask(&["TALLY", key]);
    let answer = String::from_utf8_lossy(answer.payload()).into_owned();
    assert!(
        answer.starts_with("*3\r\n+ship\r\n") || answer.starts_with("-ERR "),
        "{answer:?}"
    );
    answer.starts_with('*')
}

/// Waits for what has to come.
#[track_caller]
fn eventually<T>(what: &str, mut look: impl FnMut() -> Option<T>) -> T {
    let end = Instant::now() + Duration::from_secs(30);
    loop {
        if let Some(found) = look() {
            return found;
        }
        assert!(Instant::now() < end, "still not: {what}");
        thread::sleep(Duration::from_millis(50));
    }
}

/// A pair of keys in this directory: PREFIX.key and PREFIX.pub.
fn keygen(directory: &Path, prefix: &str) -> String {
    let all = ["policy", "keygen", prefix, "--json"];
    let made = run_in(directory, &all, b"").code(0).text();
    let made: Json = serde_json::from_str(&made).unwrap();
    made["trusted_key"].as_str().unwrap().to_owned()
}

/// A file, signed.
fn sign(directory: &Path, key: &str, file: &str, out: &str) -> String {
    let all = ["policy", "sign", "--key", key, file, "-o", out];
    run_in(directory, &all, b"").code(0);
    directory.join(out).into_os_string().into_string().unwrap()
}
