//! `statehouse policy list`: shows the name of a running store, its loaded policies and their
//! roles.

use hyper::Method;
use serde_json::Value as Json;

use super::words::{message, named, number, short, text};
use crate::cli::data::count;
use crate::cli::output::{Exit, Failure, printable};
use crate::cli::store::Store;
use crate::cli::table;
use crate::cli::time::utc;
use crate::past::bytes_of;

/// List the policies of a running store, with their roles and counts
///
/// Below the table: when each policy was loaded and got its last role, on which way and by whom,
/// and the id of the trusted key that signed its file or the order. The store does not know this of
/// the built-in policy, and of policies that an older version of the program loaded.
///
/// Counts start when the store starts or when the policy is loaded. The store's name is the value
/// for `policy push --store`.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  statehouse policy list
  statehouse policy list --json")]
pub(super) struct Args {
    #[command(flatten)]
    store: Store,
}

pub(super) async fn run(args: &Args) -> Result<Exit, Failure> {
    let listing = args.store.ask(Method::GET, "/v1/policies").await?;
    args.store.print(&listing, in_words)
}

const HEAD: [&str; 7] = [
    "policy",
    "digest",
    "there as",
    "requests",
    "failures",
    "fuel mean",
    "fuel max",
];

fn in_words(listing: &Json) -> String {
    let policies = || listing["policies"].as_array().into_iter().flatten();
    let rows = policies().map(|view| {
        let roles = view["roles"].as_array().into_iter().flatten();
        let roles: Vec<String> = roles.map(text).collect();
        let failures = view["failures"].as_object().into_iter().flatten();
        let failures: u64 = failures.filter_map(|(_, count)| count.as_u64()).sum();
        [
            format!("{}@{}", text(&view["name"]), text(&view["version"])),
            short(&view["digest"]),
            if roles.is_empty() {
                "-".to_owned()
            } else {
                roles.join(", ")
            },
            number(&view["requests"]),
            failures.to_string(),
            number(&view["fuel_mean"]),
            number(&view["fuel_max"]),
        ]
    });
    let mut out = table::of(HEAD, rows, 3);
    out.push_str(&origins(listing));
    for view in policies() {
        let last = &view["last_failure"];
        if let Some(at_ms) = last["at_ms"].as_u64() {
            let policy = named(listing, &view["digest"]);
            let (at, why) = (utc(at_ms), message(&last["why"]));
            out.push_str(&format!("last failure of {policy}, {at}: {why}\n"));
        }
    }
    for view in policies() {
        if let Some(requests @ 1..) = view["impure"].as_u64() {
            let policy = named(listing, &view["digest"]);
            let requests = count(requests, "request");
            out.push_str(&format!(
                "hidden state of {policy}: a fresh instance answered {requests} differently\n"
            ));
        }
    }
    out.push_str(&assignment(listing));
    out
}

/// When and by whom each policy was loaded and got its last role.
fn origins(listing: &Json) -> String {
    let mut out = String::new();
    let all = listing["assignment"]["origins"].as_array();
    for origin in all.into_iter().flatten() {
        for what in ["loaded", "assigned"] {
            let act = &origin[what];
            let Some(at_ms) = act["at_ms"].as_u64() else {
                continue;
            };
            let (policy, at) = (named(listing, &origin["policy"]), utc(at_ms));
            let signed = match (what, origin["signed_by"].as_str()) {
                ("loaded", Some(_)) => {
                    format!("; its file is signed by key {}", text(&origin["signed_by"]))
                }
                _ => String::new(),
            };
            out.push_str(&format!("{what} {policy}, {at}: {}{signed}\n", author(act)));
        }
    }
    out
}

fn author(act: &Json) -> String {
    let user = match &act["user"] {
        Json::Null => String::new(),
        user => format!(", user {}", text(user)),
    };
    match act["path"].as_str() {
        Some("admin") => format!("the admin API{user}"),
        Some("directory") => format!("the drop directory, file {}", text(&act["file"])),
        Some("order") => format!(
            "order {} of client {}{user}, signed by key {}",
            number(&act["serial"]),
            text(&act["client"]),
            text(&act["key"])
        ),
        Some("setting") => "the setting `policy` at a start".to_owned(),
        Some("guard") => "the guard, as a rollback".to_owned(),
        _ => text(&act["path"]),
    }
}

/// The rest of the assignment, which does not fit into the table.
fn assignment(listing: &Json) -> String {
    let it = &listing["assignment"];
    let mut out = format!("store: {}\n", text(&listing["store"]));
    for route in it["routes"].as_array().into_iter().flatten() {
        let prefix = match bytes_of(&route["prefix"]) {
            Some(bytes) => printable(&bytes),
            None => route["prefix"].to_string(),
        };
        let policy = named(listing, &route["policy"]);
        out.push_str(&format!("keys under {prefix}: {policy}\n"));
    }
    if let Some(rule) = it["canary"]["rule"]
        .as_object()
        .and_then(|rule| rule.iter().next())
    {
        let share = match (rule.0.as_str(), rule.1) {
            ("percent", percent) => format!("{percent} percent of the clients"),
            (what, pattern) => format!("{what} {}", text(pattern)),
        };
        let policy = named(listing, &it["canary"]["policy"]);
        out.push_str(&format!("canary, {share}: {policy}\n"));
    }
    if let Some(per_mille) = it["shadow"]["per_mille"].as_u64() {
        let policy = named(listing, &it["shadow"]["policy"]);
        out.push_str(&format!("shadow, {per_mille} of 1000 requests: {policy}\n"));
    }
    let before = it["guard_before"].as_array().into_iter().flatten();
    for decision in std::iter::once(&it["guard"]).chain(before) {
        if let why @ Json::String(_) = &decision["why"] {
            let policy = named(listing, &decision["policy"]);
            let done = match decision["canary"].as_bool() {
                Some(true) => "ended the canary of",
                _ => "rolled back from",
            };
            out.push_str(&format!("{done} {policy}: {}\n", message(why)));
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_listing_is_a_table_and_the_assignment() {
        let digest = |digit: &str| digit.repeat(64);
        let listing = json!({
            "store": "gateway\u{1b}7",
            "policies": [
                { "name": "standard", "version": "1.0.0", "digest": digest("a"), "roles": ["previous"],
                  "requests": 5, "failures": { "trap": 0, "fuel": 0 }, "fuel_mean": 1364, "fuel_max": 3523 },
                { "name": "ru\u{1b}le", "version": "2", "digest": digest("b"), "roles": ["active", "routed"],
                  "requests": 12345, "failures": { "trap": 1, "fuel": 2 }, "fuel_mean": 7, "fuel_max": 8, "impure": 2,
                  "last_failure": { "at_ms": 1_700_000_000_000_u64, "why": "src/lib.rs:7: a bug\u{1b}" } },
            ],
            "assignment": {
                "routes": [
                    { "prefix": "a/", "policy": digest("b") },
                    { "prefix": { "base64": "Yv8v" }, "policy": digest("b") },
                ],
                "canary": { "policy": digest("a"), "rule": { "percent": 5 } },
                "shadow": { "policy": digest("a"), "per_mille": 100 },
                "guard": { "policy": digest("c"), "why": "it trapped" },
                "guard_before": [
                    { "policy": digest("b"), "why": "it failed" },
                    { "policy": digest("a"), "why": "it trapped", "canary": true },
                ],
                "origins": [{ "policy": digest("b"), "signed_by": "4567",
                    "loaded": { "at_ms": 1_700_000_000_000_u64, "path": "order", "serial": 7,
                        "client": "ga\u{1b}te", "user": "anna", "key": "0123" },
                    "assigned": { "at_ms": 1_700_000_001_000_u64, "path": "admin" } }],
            },
        });
        assert_eq!(
            in_words(&listing),
            "\
policy          digest            there as        requests  failures  fuel mean  fuel max
standard@1.0.0  aaaaaaaaaaaaaaaa  previous               5         0       1364      3523
ru\\u{1b}le@2    bbbbbbbbbbbbbbbb  active, routed     12345         3          7         8
loaded ru\\u{1b}le@2 (bbbbbbbbbbbbbbbb), 2023-11-14T22:13:20.000Z: order 7 of client ga\\u{1b}te, user anna, signed by key 0123; its file is signed by key 4567
assigned ru\\u{1b}le@2 (bbbbbbbbbbbbbbbb), 2023-11-14T22:13:21.000Z: the admin API
last failure of ru\\u{1b}le@2 (bbbbbbbbbbbbbbbb), 2023-11-14T22:13:20.000Z: src/lib.rs:7: a bug\\u{1b}
hidden state of ru\\u{1b}le@2 (bbbbbbbbbbbbbbbb): a fresh instance answered 2 requests differently
store: gateway\\u{1b}7
keys under a/: ru\\u{1b}le@2 (bbbbbbbbbbbbbbbb)
keys under b\\xff/: ru\\u{1b}le@2 (bbbbbbbbbbbbbbbb)
canary, 5 percent of the clients: standard@1.0.0 (aaaaaaaaaaaaaaaa)
shadow, 100 of 1000 requests: standard@1.0.0 (aaaaaaaaaaaaaaaa)
rolled back from cccccccccccccccc: it trapped
rolled back from ru\\u{1b}le@2 (bbbbbbbbbbbbbbbb): it failed
ended the canary of standard@1.0.0 (aaaaaaaaaaaaaaaa): it trapped
"
        );
    }
}
