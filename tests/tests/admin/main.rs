//! Tests how operators manage a running store: policies by commands, HTTP, a Unix socket, the drop
//! directory and signed orders over MQTT; changed limits; `authz explain` and `usage`.
#![allow(missing_docs, clippy::unwrap_used)]

mod alerts;
mod authz;
mod browser;
mod clients;
mod commands;
mod dev;
mod drop;
mod headers;
mod hostile;
mod http;
mod keys;
mod limits;
mod live;
mod logs;
mod metrics;
mod orders;
mod page;
mod socket;
mod top;
mod trust;
mod usage;
#[path = "../../policies/wasm.rs"]
mod wasm;

use std::path::Path;

use serde_json::Value as Json;
use statehouse_tests::{
    Ran, Server, policies, run_in,
    wait::{eventually, until},
};

/// Runs `statehouse policy …` in the server's directory, where the data directory has its default
/// name.
fn policy(server: &Server, arguments: &[&str]) -> Ran {
    let all = [&["policy"], arguments].concat();
    server.run(&all)
}

/// The output of `statehouse policy list` as JSON.
fn listing(server: &Server) -> Json {
    policy(server, &["list", "--json"]).code(0).object()
}

/// The roles of the loaded policy with this name; none if it is not loaded.
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

/// The name of a policy whose answers differ from those of the standard policy.
const OURS: &str = "marked-ship";

/// The path of its file.
fn ours() -> String {
    let path = policies::marked("ship");
    path.into_os_string().into_string().unwrap()
}

/// Whether our policy answers a request for this key.
fn answers(server: &Server, key: &str) -> bool {
    let answer = server.store("asking").ask(&["TALLY", key]);
    let answer = String::from_utf8_lossy(answer.payload()).into_owned();
    assert!(
        answer.starts_with("*3\r\n+ship\r\n") || answer.starts_with("-ERR "),
        "{answer:?}"
    );
    answer.starts_with('*')
}

/// Creates the key pair PREFIX.key and PREFIX.pub in a directory. Returns the public key.
fn keygen(directory: &Path, prefix: &str) -> String {
    let all = ["policy", "keygen", prefix, "--json"];
    let made = run_in(directory, &all).code(0).object();
    made["trusted_key"].as_str().unwrap().to_owned()
}

/// Runs `statehouse policy sign` in a directory.
fn try_sign(directory: &Path, key: &str, file: &str, out: &str) -> Ran {
    let all = ["policy", "sign", "--key", key, file, "-o", out];
    run_in(directory, &all)
}

/// Signs a policy file. Returns the path of the signed file.
fn sign(directory: &Path, key: &str, file: &str, out: &str) -> String {
    try_sign(directory, key, file, out).code(0);
    directory.join(out).into_os_string().into_string().unwrap()
}
