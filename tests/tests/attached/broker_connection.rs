//! Tests how a store connects to a foreign broker: TLS with and without a client certificate, user
//! names and passwords, a broker that starts after the store, and one that ends connections.

use std::{
    collections::HashSet, fs, net::SocketAddr, path::Path, process::Command, thread, time::Duration,
};

use statehouse_tests::{
    Fate, Mosquitto, Server, Way, command::finish, packet::kind, store::Store, wait::until,
};

use crate::scene::Scene;

const TLS_LISTENER: &str = "cafile ca.crt\ncertfile server.crt\nkeyfile server.key";

fn openssl(directory: &Path, arguments: &str) {
    let mut command = Command::new("openssl");
    command.args(arguments.split(' ')).current_dir(directory);
    finish(command, b"").code(0);
}

/// Creates the certificate and key of a certificate authority.
fn create_authority(directory: &Path, name: &str) {
    openssl(
        directory,
        &format!(
            "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN={name} -keyout {name}.key -out {name}.crt"
        ),
    );
}

/// Creates a certificate for this name and address, signed by the authority `ca`, and its key.
fn create_certificate(directory: &Path, name: &str, address: SocketAddr) {
    openssl(
        directory,
        &format!(
            "req -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -subj /CN={name} -keyout {name}.key -out {name}.csr"
        ),
    );
    let alternative = format!("subjectAltName=IP:{}\n", address.ip());
    fs::write(directory.join("extensions"), alternative).unwrap();
    openssl(
        directory,
        &format!(
            "x509 -req -in {name}.csr -CA ca.crt -CAkey ca.key -CAcreateserial -days 2 -extfile extensions -out {name}.crt"
        ),
    );
}

/// Starts a broker with a TLS listener for the store, and a listener without TLS for clients, whose
/// address is returned. `lines` extend the configuration of the TLS listener.
fn tls_broker(lines: &str) -> (Mosquitto, SocketAddr) {
    let mut plain = None;
    let broker = Mosquitto::set_up(|directory, address| {
        create_authority(directory, "ca");
        create_authority(directory, "other");
        create_certificate(directory, "server", address);
        create_certificate(directory, "store", address);
        // No other process uses this port, since the IP address belongs to this test.
        let second = SocketAddr::new(address.ip(), address.port() + 10_000);
        plain = Some(second);
        format!(
            "{TLS_LISTENER}\n{lines}\nlistener {} {}",
            second.port(),
            second.ip()
        )
    });
    (broker, plain.unwrap())
}

fn file(broker: &Mosquitto, name: &str) -> String {
    let path = broker.directory().join(name);
    path.to_str().unwrap().to_owned()
}

fn attaching(broker: &Mosquitto, clients: SocketAddr, settings: &[(&str, &str)]) -> Server {
    let url = format!("mqtts://{}", broker.address());
    let settings = [&[("presence", "off")], settings].concat();
    Server::attaching(&url, clients, &settings)
}

fn assert_serves(server: &mut Server) {
    server.wait_until_ready();
    let mut store: Store = server.store("client");
    store.set("key", "value");
    assert_eq!(store.get("key"), Some(b"value".to_vec()));
}

#[test]
fn store_checks_the_certificate_of_the_broker() {
    let (broker, clients) = tls_broker("");
    let ca = file(&broker, "ca.crt");
    let mut server = attaching(&broker, clients, &[("broker_ca", &ca)]);
    assert_serves(&mut server);
    server.wait_for_line(&format!("attached to mqtts://{} as ", broker.address()));

    let other = file(&broker, "other.crt");
    for settings in [&[("broker_ca", other.as_str())][..], &[]] {
        let mut server = attaching(&broker, clients, settings);
        server.wait_for_log("certificate");
        assert!(server.runs(), "the store must keep trying");
        assert!(!server.stdout().contains(&"ready".to_owned()));
    }
}

#[test]
fn store_authenticates_with_its_own_certificate() {
    let (broker, clients) = tls_broker("require_certificate true\nuse_identity_as_username true");
    let (ca, certificate, key) = (
        file(&broker, "ca.crt"),
        file(&broker, "store.crt"),
        file(&broker, "store.key"),
    );
    let all = [
        ("broker_ca", ca.as_str()),
        ("broker_cert", &certificate),
        ("broker_key", &key),
    ];
    let mut server = attaching(&broker, clients, &all);
    assert_serves(&mut server);
    broker.wait_for_log("u'store'");
    let server = attaching(&broker, clients, &all[..1]);
    server.wait_for_log("ertificate");
    assert!(!server.stdout().contains(&"ready".to_owned()));
}

/// Starts a broker with one user, `store`, and the password `open sesame`.
fn password_broker() -> Mosquitto {
    Mosquitto::set_up(|directory, _| {
        let mut command = Command::new("mosquitto_passwd");
        command
            .args(["-b", "-c", "passwords", "store", "open sesame"])
            .current_dir(directory);
        finish(command, b"").code(0);
        "allow_anonymous false\npassword_file passwords\n".into()
    })
}

#[test]
fn password_is_used_and_never_logged() {
    let broker = password_broker();
    let secret = broker.directory().join("secret");
    fs::write(&secret, "open sesame\n").unwrap();
    let address = broker.address();
    let in_url = format!("mqtt://store:open%20sesame@{address}");
    for (url, settings) in [
        (in_url.as_str(), &[][..]),
        (
            &broker.url(),
            &[
                ("broker_user", "store"),
                ("broker_password_file", secret.to_str().unwrap()),
            ],
        ),
        (
            &broker.url(),
            &[("broker_user", "store"), ("broker_password", "open sesame")],
        ),
    ] {
        let settings = [&[("presence", "off")], settings].concat();
        let server = Server::attached(url, address, &settings);
        let lines = [server.stdout(), server.stderr()].concat();
        let leak = lines.iter().find(|line| line.contains("sesame"));
        assert_eq!(leak, None);
    }
}

#[test]
fn wrong_password_is_logged_once_and_retried() {
    let broker = password_broker();
    let url = format!("mqtt://store:wrong@{}", broker.address());
    let mut server = Server::attaching(&url, broker.address(), &[]);
    let line = server.wait_for_log("refused");
    assert!(!line.contains("wrong"), "{line}");
    let attempts = || {
        let log = broker.log();
        log.iter()
            .filter(|it| it.contains("not authorised"))
            .count()
    };
    until("the store tries again", || attempts() >= 3);
    let log = server.stderr();
    let logged = log.iter().filter(|it| it.contains("refused")).count();
    assert_eq!(logged, 1, "{log:?}");
    assert!(server.runs());
}

#[test]
fn store_waits_for_a_broker_that_starts_later() {
    let mut broker = Mosquitto::start();
    broker.stop();
    let mut server = Server::attaching(&broker.url(), broker.address(), &[]);
    server.wait_for_log("connection refused");
    thread::sleep(Duration::from_millis(300));
    assert!(server.runs());
    broker.restart();
    assert_serves(&mut server);
    // A store without its broker stops normally on SIGTERM.
    broker.stop();
    server.stop();
}

/// Regression: the store published a retained mark, so that the broker ended each connection.
#[test]
fn broker_without_retained_messages_gets_no_retained_mark() {
    let broker = Mosquitto::with(&["retain_available false"]);
    let mut server = Server::attached(&broker.url(), broker.address(), &[("presence", "off")]);
    assert_serves(&mut server);
    let warning = "takes no retained messages";
    server.wait_for_log(warning);
    assert_eq!(server.metric("broker_connections_total"), 1);
    let log = server.stderr();
    let logged = log.iter().filter(|line| line.contains(warning)).count();
    assert_eq!(logged, 1, "{log:?}");
}

/// Regression: the store connected 14 times a second, and logged each time.
#[test]
fn broker_that_ends_each_connection_meets_pauses_and_few_lines() {
    let scene = Scene::start();
    scene
        .proxy
        .script(|seen| match (seen.way, seen.packet.kind()) {
            (Way::FromBroker, kind::SUBACK) => Fate::CutAfter,
            _ => Fate::Pass,
        });
    scene.proxy.cut();
    until("the store tries again", || scene.proxy.connections() >= 6);
    let before = scene.proxy.connections();
    // The pauses are longer than this by now.
    thread::sleep(Duration::from_secs(1));
    assert!(scene.proxy.connections() <= before + 2);
    let log = scene.host.stderr();
    let reasons: Vec<_> = log
        .iter()
        .filter_map(|line| line.split_once("no connection to "))
        .map(|(_, reason)| reason)
        .collect();
    let different: HashSet<_> = reasons.iter().collect();
    // A reason is logged again if the first connection had lasted.
    assert!(reasons.len() <= different.len() + 1, "{reasons:?}");

    let attached = || {
        let log = scene.host.stderr();
        log.iter()
            .filter(|line| line.contains("attached to "))
            .count()
    };
    let before = attached();
    assert!(before <= 2, "{log:?}");
    scene.proxy.pass();
    let mut client = scene.client("client");
    client.set("key", "value");
    until("the log says that it is attached", || attached() > before);
}
