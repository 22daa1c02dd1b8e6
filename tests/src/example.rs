//! Sets up a broker with the documented files of `host/docs/foreign-brokers.md`, so that the tests
//! cover those files.

use std::{fs, path::PathBuf, process::Command};

use crate::{Client, Connect, Mosquitto, Server, command::finish, store::Store};

/// The store's user name, which is also its client id.
pub const STORE: &str = "statehouse";

/// The password of all users.
pub const PASSWORD: &str = "secret";

/// The path of one of the documented files.
pub fn file(name: &str) -> PathBuf {
    let docs = concat!(env!("CARGO_MANIFEST_DIR"), "/../host/docs/foreign-brokers");
    PathBuf::from(docs).join(name)
}

/// The shell block of the page whose first line contains `word`. [`PASSWORD`] replaces the
/// placeholders.
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

/// Starts Mosquitto with the documented configuration and access file, for the store's user and
/// these users.
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
        // The harness sets the listener.
        let lines = lines.replace("listener 1883\n", "");
        lines
            .replace("/etc/mosquitto", here)
            .replace("/var/lib/mosquitto", here)
    })
}

/// The path of the dynamic security plugin. In Debian it depends on the machine's architecture.
fn plug_in() -> PathBuf {
    let libraries = fs::read_dir("/usr/lib")
        .unwrap()
        .map(|it| it.unwrap().path());
    let mut found = libraries.map(|it| it.join("mosquitto_dynamic_security.so"));
    found
        .find(|it| it.exists())
        .expect("Debian's package mosquitto is installed")
}

/// Starts Mosquitto with dynamic security, set up by the documented script for the store and one
/// client.
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

/// The CONNECT of a user, whose client id is the user name.
pub fn connect(user: &str) -> Connect {
    Connect {
        user_name: Some(user.into()),
        password: Some(PASSWORD.into()),
        ..Connect::new(user)
    }
}

pub fn client(broker: &Mosquitto, user: &str) -> Client {
    Client::connect(broker.address(), &connect(user))
}

/// Starts the store behind the broker with these additional settings.
pub fn attached(broker: &Mosquitto, settings: &[(&str, &str)]) -> Server {
    let url = format!("mqtt://{STORE}:{PASSWORD}@{}", broker.address());
    let mut all = vec![("broker_client_id", STORE)];
    all.extend(settings);
    Server::attached(&url, broker.address(), &all)
}

/// Connects a user as a client of the store.
pub fn store(broker: &Mosquitto, user: &str) -> Store {
    Store::behind(client(broker, user), user)
}
