//! Programs that log in by a password: the official client, `mosquitto_pub`, and every command.

use std::{process::Command, time::Duration};

use statehouse_tests::{
    Ran, command,
    command::{finish, subcommands},
    run_in,
};

use super::file::UsersFile;
use crate::official;

#[test]
fn official_client_logs_in_with_its_password() {
    let file = UsersFile::new(&[("anna", "secret")]);
    let server = file.server(&[]);
    let credentials = |password: &'static str| {
        move |it: azure_iot_operations_mqtt::aio::connection_settings::MqttConnectionSettingsBuilder| {
            it.username("anna".to_owned()).password(password.to_owned())
        }
    };
    official::with_client(&server, "official", credentials("secret"), async |store| {
        official::set(&store, "key", "value").await;
    });
    let refused = official::with_client(&server, "guesser", credentials("wrong"), async |store| {
        official::is_answered(&store, Duration::from_secs(2)).await
    });
    assert!(!refused);
    server.wait_for_log("client=\"guesser\"");
}

#[test]
fn mosquitto_pub_logs_in_with_its_password() {
    let file = UsersFile::new(&[("anna", "secret")]);
    let server = file.server(&[]);
    let port = server.port().to_string();
    let publish = |login: &[&str]| {
        let mut command = Command::new("mosquitto_pub");
        command.args(["-V", "5", "-h", "127.0.0.1", "-p", &port, "-q", "1"]);
        command.args(["-t", "topic", "-m", "hello"]).args(login);
        finish(command, b"")
    };
    publish(&["-u", "anna", "-P", "secret"]).code(0);
    let wrong = publish(&["-u", "anna", "-P", "wrong"]);
    assert_ne!(wrong.code, Some(0));
    wrong.says("user name or password");
    let anonymous = publish(&[]);
    assert_ne!(anonymous.code, Some(0));
    anonymous.says("authori");
}

/// Every command that logs in at the broker of a store.
const LOGGING_IN: [&[&str]; 13] = [
    &["bench", "--duration", "1s"],
    &["call", "GET", "k"],
    &["del", "k"],
    &["export"],
    &["get", "k"],
    &["import"],
    &["lock", "k", "--status"],
    &[
        "policy",
        "push",
        "--key",
        "k.key",
        "--store",
        "s",
        "--rollback",
    ],
    &["scan"],
    &["set", "k", "v"],
    &["vdel", "k", "v"],
    &["watch", "k"],
    &["lock", "k", "--holder", "h", "--", "true"],
];

/// Regression: with the rule of the documents, no command could connect.
#[test]
fn client_id_of_commands_begins_with_the_login() {
    let file = UsersFile::new(&[("anna", "secret")]);
    let rules = file.directory.path().join("rules.toml");
    let text = r#"
        [[rules]]
        principals = { usernames = ["anna"] }
        brokerResources = [
          { method = "Connect", clientIds = ["{principal.username}", "{principal.username}:*"] },
        ]
        stateStoreResources = [{ method = "ReadWrite", keyType = "Pattern", keys = ["*"] }]
    "#;
    std::fs::write(&rules, text).unwrap();
    let server = file.server(&["--rules", rules.to_str().unwrap()]);
    let port = server.port().to_string();
    let run = |arguments: &[&str]| {
        let mut command = command(arguments);
        command.args(["--port", &port, "--user", "anna"]);
        command.env("STATEHOUSE_PASSWORD", "secret");
        finish(command, b"")
    };
    run(&["get", "k"]).fails(1, "k does not exist");
    let bench = [
        "bench",
        "--keys",
        "5",
        "--duration",
        "300ms",
        "--warm-up",
        "0s",
    ];
    run(&bench).code(0);
    run(&["get", "k", "--client-id", "other"]).fails(4, "no rule lets the client id other connect");
}

#[test]
fn every_command_refuses_a_wrong_password_in_words() {
    let logs_in = |flags: &str| {
        flags.contains("[--user]") && (flags.contains("[--port]") || flags.contains("[--broker]"))
    };
    for (name, _) in subcommands().iter().filter(|(_, flags)| logs_in(flags)) {
        let has = |it: &&[&str]| format!("{} ", it.join(" ")).starts_with(&format!("{name} "));
        assert!(LOGGING_IN.iter().any(has), "{name} is not tested");
    }
    let file = UsersFile::new(&[("anna", "secret")]);
    let server = file.server(&[]);
    let here = file.directory.path();
    run_in(here, &["policy", "keygen", "k"]).code(0);
    for arguments in LOGGING_IN {
        let place = match arguments[1..].first() {
            Some(&"push") => [
                "--broker".to_owned(),
                format!("127.0.0.1:{}", server.port()),
            ],
            _ => ["--port".to_owned(), server.port().to_string()],
        };
        // Options come first, since `--` in the arguments would end them.
        let at = if arguments[0] == "policy" { 2 } else { 1 };
        let mut command = command(&arguments[..at]);
        command.args(&place).args(["--user", "anna"]);
        command.args(&arguments[at..]).current_dir(here);
        command.env("STATEHOUSE_PASSWORD", "wrong");
        let ran = finish(command, b"").code(4);
        assert!(ran.stdout.is_empty(), "{ran:?}");
        ran.says("wrong user name or password");
    }
    let port = server.port().to_string();
    let get = || command(&["get", "k", "--port", &port]);
    finish(get(), b"").fails(4, "not authorized");
    let mut right = get();
    right.args(["--user", "anna"]);
    right.env("STATEHOUSE_PASSWORD", "secret");
    finish(right, b"").fails(1, "k does not exist");
    // The store does not check further passwords from this address for a while.
    let mut attempts = (0..17).map(|_| {
        let mut get = get();
        get.args(["--user", "bert"]);
        get.env("STATEHOUSE_PASSWORD", "wrong");
        finish(get, b"").code(4)
    });
    let is_wrong = |ran: &Ran| ran.stderr.contains("wrong user name or password");
    let often = attempts.find(|ran| !is_wrong(ran)).unwrap();
    assert!(often.stderr.contains("too many logins failed"), "{often:?}");
    assert!(!often.stderr.contains("statehouse serve"), "{often:?}");
}
