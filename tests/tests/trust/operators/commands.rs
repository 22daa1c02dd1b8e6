//! Commands on a store of another machine, by its admin API over TLS.

use std::{fs, path::Path};

use serde_json::Value as Json;
use statehouse_tests::{
    Admin, command,
    command::{finish, subcommands},
    policies,
};

use super::plant::Plant;
use crate::tls::text;

/// Every command that logs in at the admin API, but `ready`: probes need no login.
const LOGGING_IN: [&[&str]; 21] = [
    &["clients"],
    &["clients", "kick", "c"],
    &["cluster", "handover"],
    &["cluster", "upgrade"],
    &["get", "k", "--as-of", "1s"],
    &["history", "k"],
    &["policy", "canary", "builtin", "--percent", "5"],
    &["policy", "dev", "project"],
    &["policy", "diff"],
    &["policy", "list"],
    &["policy", "load", "password"],
    &["policy", "logs"],
    &["policy", "promote", "builtin"],
    &["policy", "rollback"],
    &["policy", "route", "x", "builtin"],
    &["policy", "shadow", "builtin"],
    &["policy", "unload", "builtin"],
    &["replay"],
    &["slow"],
    &["top", "--once"],
    &["usage"],
];

#[test]
fn every_command_refuses_a_wrong_password_in_words() {
    let credentials = |flags: &str| flags.contains("[--password-file]");
    let logs_in = |flags: &str| flags.contains("[--admin]") && credentials(flags);
    for (name, _) in subcommands().iter().filter(|(_, flags)| logs_in(flags)) {
        let has = |it: &&[&str]| format!("{} ", it.join(" ")).starts_with(&format!("{name} "));
        let is_other = ["ready", "context add", "lock"].contains(&&**name);
        assert!(
            is_other || LOGGING_IN.iter().any(has),
            "{name} is not tested"
        );
    }
    // An address may guess wrong only 16 times.
    for commands in LOGGING_IN.chunks(11) {
        let plant = Plant::start();
        fs::write(plant.file("wrong"), "wrong").unwrap();
        fs::create_dir(plant.file("project")).unwrap();
        fs::write(plant.file("project/Cargo.toml"), "").unwrap();
        let (url, ca) = (plant.url(), plant.file("ca.crt"));
        let login = ["--admin", &url, "--ca", &ca, "--user", "reader"];
        for command in commands {
            let all = [*command, &login, &["--password-file", "wrong"]].concat();
            let ran = plant.run(&all).fails(4, "wrong user name or password");
            assert!(ran.stdout.is_empty(), "{ran:?}");
        }
    }
}

/// Regression: it demanded a login.
#[test]
fn ready_over_tls_needs_no_login() {
    let plant = Plant::start();
    let (url, ca) = (plant.url(), plant.file("ca.crt"));
    let ready = ["ready", "--admin", &url, "--ca", &ca];
    plant.run(&ready).code(0);
}

/// Regression: the help showed the values of variables, and a URL may have a password.
#[test]
fn help_shows_no_password_of_a_variable() {
    for (variable, words) in [
        ("STATEHOUSE_BROKER", &["serve"][..]),
        ("STATEHOUSE_URL", &["get"]),
        ("STATEHOUSE_POLICY_BROKER", &["policy", "push"]),
        // These are refused with a password, and then an operator may look into the help.
        ("STATEHOUSE_TRACES", &["serve"]),
        ("STATEHOUSE_CLUSTER", &["cluster", "check"]),
        ("STATEHOUSE_ADMIN_URL", &["usage"]),
    ] {
        let mut help = command(&[words, &["--help"]].concat());
        help.env(variable, "mqtt://anna:SECRET@gateway");
        let shown = finish(help, b"").code(0).text();
        assert!(shown.contains(variable), "{shown}");
        assert!(!shown.contains("SECRET"), "{shown}");
    }
}

/// Regression: `authz explain` had no --ca, which its errors and its help named.
#[test]
fn explain_logs_in_with_the_token_of_the_store() {
    let plant = Plant::start();
    let (url, ca) = (plant.url(), plant.file("ca.crt"));
    let token = Admin::of(&plant.server).token().to_owned();
    let token = ("STATEHOUSE_ADMIN_TOKEN", &*token);
    let explain = |more: &[&str], variables: &[(&str, &str)]| {
        let explain = ["authz", "explain", "press-4", "GET", "k", "--admin", &url];
        let mut explain = command(&[&explain[..], more].concat());
        explain.envs(variables.iter().copied());
        finish(explain, b"")
    };
    explain(&["--ca", &ca], &[token]).code(0);
    explain(&[], &[token, ("STATEHOUSE_CA", &ca)]).code(0);
    explain(&["--ca", &ca], &[]).fails(2, "--context");
    let help = plant.run(&["authz", "explain", "--help"]).code(0).text();
    assert!(!help.contains("--password-file"), "{help}");
}

/// Regression: the certificates were refused, since the URL of the store is unencrypted.
#[test]
fn certificates_may_be_for_the_admin_api_alone() {
    let plant = Plant::start();
    plant.server.store("press-4").set("k", "v");
    let url = format!("mqtt://127.0.0.1:{}", plant.server.port());
    let meta = ["get", "k", "--meta", "--url", &url];
    let found = plant.run_as("reader", &meta).code(0).text();
    assert!(found.contains("press-4"), "{found}");
    let mut get = command(&["get", "k", "--url", &url]);
    get.env("STATEHOUSE_CA", plant.file("ca.crt"));
    finish(get, b"").fails(
        2,
        "STATEHOUSE_CA: certificates require an encrypted connection",
    );
}

#[test]
fn commands_read_a_store_of_another_machine() {
    let plant = Plant::start();
    let mut store = plant.server.store("press-4");
    let first = store.set("k", "one").to_string();
    store.set("k", "two\n");
    store.ask(&["DEL", "k"]);
    store.set("k", b"\xFF".repeat(5000));
    let data = text(&plant.server.data_directory());
    // What the store prints of its own directory.
    for arguments in [
        &["history", "k"][..],
        &["history", "k", "--json"],
        &["history", "k", "--limit", "1"],
        &["get", "k", "--as-of", &first, "--with-version"],
        &["get", "k", "--as-of", "0s"],
        &["get", "k", "--as-of", &first, "--json"],
        &["replay", "--json"],
    ] {
        let here = plant
            .run(&[arguments, &["--data", data.as_str()]].concat())
            .code(0);
        let there = plant.run_as("reader", arguments).code(0);
        assert_eq!(there.stdout, here.stdout, "{arguments:?}");
    }
    plant.run_as("reader", &["history", "none"]).code(1);
    let early = ["get", "k", "--as-of", "2020-01-01T00:00:00Z"];
    let here = plant.run(&[&early[..], &["--data", &data]].concat());
    let there = plant.run_as("reader", &early);
    assert_eq!((there.code, &there.stderr), (here.code, &here.stderr));

    // A context names the address and the account.
    let (url, ca, password) = (plant.url(), plant.file("ca.crt"), plant.file("password"));
    for user in ["reader", "shipper", "client"] {
        let add = [
            "context", "add", user, "--admin", &url, "--ca", &ca, "--user", user,
        ];
        plant
            .run(&[&add[..], &["--password-file", &password]].concat())
            .code(0);
    }
    plant.run(&["context", "use", "reader"]).code(0);
    let clients = plant.run(&["clients"]).code(0).text();
    assert!(clients.contains("press-4"), "{clients}");
    let history = plant.run(&["history", "k"]).code(0).text();
    assert!(history.contains("4 changes of k"), "{history}");
    let usage = plant.run(&["usage", "--context", "client"]);
    usage.fails(4, "needs the role read");
    let listed = plant.run(&["policy", "list", "--json"]).code(0).text();
    let listed: Json = serde_json::from_str(&listed).unwrap();
    assert_eq!(listed["policies"].as_array().unwrap().len(), 1);

    // A policy from this machine.
    let ours = text(Path::new(&policies::marked("ship")));
    let load = ["policy", "load", &ours];
    plant.run(&load).fails(4, "needs the role ship");
    let replay = ["replay", "--policy", &ours];
    plant.run(&replay).fails(4, "needs the role ship");
    let replayed = plant.run(&[&replay[..], &["--context", "shipper", "--json"]].concat());
    let here = plant.run(&[&replay[..], &["--data", &data, "--json"]].concat());
    assert_eq!((replayed.code, replayed.stdout), (here.code, here.stdout));
    plant
        .run(&[&load[..], &["--context", "shipper"]].concat())
        .code(0);
    plant
        .run(&["policy", "promote", "marked-ship", "--context", "shipper"])
        .code(0);
    let log = plant
        .server
        .wait_for_log("path=\"/v1/policies/marked-ship/promote\"");
    assert!(log.contains("user=\"shipper\""), "{log}");
    let listed = plant.run(&["policy", "list"]).code(0).text();
    assert!(listed.contains("the admin API, user shipper"), "{listed}");
}
