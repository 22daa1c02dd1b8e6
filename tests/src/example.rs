//! A broker set up as the page for operators has it (`host/docs/foreign-brokers.md`): the files
//! next to that page run here.

use std::{fs, path::PathBuf, process::Command};

use crate::{Client, Connect, Mosquitto, Server, command::finish, packet::Ack, store::Store};

/// The store's user, which is its client id too.
pub const STORE: &str = "statehouse";

/// Everybody's password.
pub const PASSWORD: &str = "secret";

/// A file of the page.
fn file(name: &str) -> PathBuf {
    let docs = concat!(env!("CARGO_MANIFEST_DIR"), "/../host/docs/foreign-brokers");
    PathBuf::from(docs).join(name)
}

/// A block of the page, by a word of its first line, with everybody's password for the page's placeholders.
pub fn block(word: &str) -> String {
    let page = concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../host/docs/foreign-brokers.md"
    );
    let page = fs::read_to_string(page).unwrap();
    let found = page
        .split("```sh\n")
        .skip(1)
        .find(|it| it.lines().next().unwrap().contains(word));
    let (block, _) = found.unwrap().split_once("```").unwrap();
    ["STORE_PASSWORD", "CLIENT_PASSWORD", "ADMIN_PASSWORD"]
        .iter()
        .fold(block.to_owned(), |block, it| block.replace(it, PASSWORD))
}

/// Mosquitto with the page's configuration and access file, and these users in addition to the
/// store's.
pub fn mosquitto(users: &[&str]) -> Mosquitto {
    Mosquitto::set_up(|directory, _| {
        let passwords = directory.join("passwords");
        fs::write(&passwords, "").unwrap();
        for user in users.iter().chain([&STORE]) {
            let mut command = Command::new("mosquitto_passwd");
            command.arg("-b").arg(&passwords).args([user, PASSWORD]);
            finish(command, b"").code(0);
        }
        fs::copy(file("mosquitto.acl"), directory.join("statehouse.acl")).unwrap();
        let here = directory.to_str().unwrap();
        let lines = fs::read_to_string(file("mosquitto.conf")).unwrap();
        // The harness has an address of its own.
        let lines = lines.replace("listener 1883\n", "");
        lines
            .replace("/etc/mosquitto", here)
            .replace("/var/lib/mosquitto", here)
    })
}

/// Debian has it in a directory for each kind of machine.
fn plug_in() -> PathBuf {
    let libraries = fs::read_dir("/usr/lib")
        .unwrap()
        .map(|it| it.unwrap().path());
    let mut found = libraries.map(|it| it.join("mosquitto_dynamic_security.so"));
    found.find(|it| it.exists()).expect("Debian's mosquitto")
}

/// Mosquitto with dynamic security, set up by the page's script for the store and one client.
pub fn dynamic_security(client: &str) -> Mosquitto {
    let broker = Mosquitto::set_up(|directory, _| {
        let mut command = Command::new("mosquitto_ctrl");
        command
            .args(["dynsec", "init"])
            .arg(directory.join("dynsec.json"))
            .args(["admin", PASSWORD]);
        finish(command, b"").code(0);
        [
            "allow_anonymous false",
            &format!("plugin {}", plug_in().display()),
            "plugin_opt_config_file dynsec.json",
            "log_dest topic",
        ]
        .join("\n")
    });
    let mut command = Command::new("bash");
    let address = broker.address();
    let (host, port) = (address.ip().to_string(), address.port().to_string());
    command
        .arg(file("dynsec.sh"))
        .args([PASSWORD, PASSWORD, client, PASSWORD, &host, &port]);
    finish(command, b"").code(0);
    broker
}

/// How a user connects: its name is its client id.
pub fn connect(user: &str) -> Connect {
    Connect {
        user_name: Some(user.into()),
        password: Some(PASSWORD.into()),
        ..Connect::new(user)
    }
}

/// A user's client.
pub fn client(broker: &Mosquitto, user: &str) -> Client {
    Client::connect(broker.address(), &connect(user))
}

/// What the broker says to a user who wants in.
pub fn attempt(broker: &Mosquitto, user: &str) -> Ack {
    Client::try_connect(broker.address(), &connect(user)).1
}

/// The store, as its user, with these settings more.
pub fn attached(broker: &Mosquitto, settings: &[(&str, &str)]) -> Server {
    let url = format!("mqtt://{STORE}:{PASSWORD}@{}", broker.address());
    let mut all = vec![("broker_client_id", STORE)];
    all.extend(settings);
    Server::attached(&url, broker.address(), &all)
}

/// A user as a client of the store.
pub fn store(broker: &Mosquitto, user: &str) -> Store {
    Store::behind(client(broker, user), user)
}
