//! Ways into a broker: TLS with and without a certificate of the store's own, names and passwords, and a broker that is
//! not there yet.

use std::{fs, net::SocketAddr, path::Path, process::Command, thread, time::Duration};

use statehouse_tests::{Mosquitto, Server, command::finish, store::Store};

const ONE_LISTENER_OF_TLS: &str = "cafile ca.crt\ncertfile server.crt\nkeyfile server.key";

fn openssl(directory: &Path, arguments: &str) {
    let mut command = Command::new("openssl");
    command.args(arguments.split(' ')).current_dir(directory);
    finish(command, b"").code(0);
}

/// An authority: its certificate and key.
fn authority(directory: &Path, name: &str) {
    openssl(
        directory,
        &format!(
            "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN={name} -keyout {name}.key -out {name}.crt"
        ),
    );
}

/// A certificate of the authority `ca` for this name and address, and its key.
fn certificate(directory: &Path, name: &str, address: SocketAddr) {
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

/// A broker with a certificate, and these lines more; the store's clients come without TLS over another listener.
fn encrypted(lines: &str) -> (Mosquitto, SocketAddr) {
    let mut plain = None;
    let broker = Mosquitto::set_up(|directory, address| {
        authority(directory, "ca");
        authority(directory, "other");
        certificate(directory, "server", address);
        certificate(directory, "store", address);
        // A port above those that are given out: the address is the test's own.
        let beside = SocketAddr::new(address.ip(), address.port() + 10_000);
        plain = Some(beside);
        format!(
            "{ONE_LISTENER_OF_TLS}\n{lines}\nlistener {} {}",
            beside.port(),
            beside.ip()
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

fn serves(server: &mut Server) {
    server.wait_until_ready();
    let mut store: Store = server.store("client");
    store.set("key", "value");
    assert_eq!(store.get("key"), Some(b"value".to_vec()));
}

#[test]
fn the_brokers_certificate_is_checked() {
    let (broker, clients) = encrypted("");
    let ca = file(&broker, "ca.crt");
    let mut server = attaching(&broker, clients, &[("broker_ca", &ca)]);
    serves(&mut server);
    let attached = format!("attached to mqtts://{} as ", broker.address());
    let said = server.stdout();
    assert!(
        said.iter().any(|line| line.starts_with(&attached)),
        "{said:?}"
    );

    let other = file(&broker, "other.crt");
    for settings in [&[("broker_ca", other.as_str())][..], &[]] {
        let mut server = attaching(&broker, clients, settings);
        server.wait_for_log("certificate");
        assert!(server.runs(), "it tries again: the broker may be mended");
        assert!(!server.stdout().contains(&"ready".to_owned()));
    }
}

#[test]
fn the_store_shows_its_own_certificate() {
    let (broker, clients) = encrypted("require_certificate true\nuse_identity_as_username true");
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
    serves(&mut server);
    broker.wait_for_log("u'store'");
    let server = attaching(&broker, clients, &all[..1]);
    server.wait_for_log("ertificate");
    assert!(!server.stdout().contains(&"ready".to_owned()));
}

/// A broker for one user, `store`, whose password is `open sesame`.
fn guarded() -> Mosquitto {
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
fn a_password_opens_and_is_never_shown() {
    let broker = guarded();
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
        let said = [server.stdout(), server.stderr()].concat();
        assert!(!said.iter().any(|line| line.contains("sesame")), "{said:?}");
    }
}

#[test]
fn a_wrong_password_is_told_of_once_and_tried_again() {
    let broker = guarded();
    let url = format!("mqtt://store:wrong@{}", broker.address());
    let mut server = Server::attaching(&url, broker.address(), &[]);
    let told = server.wait_for_log("refused");
    assert!(!told.contains("wrong"), "{told}");
    let attempts = || {
        let log = broker.log();
        log.iter()
            .filter(|it| it.contains("not authorised"))
            .count()
    };
    crate::scene::eventually("it tries again", || attempts() >= 3);
    let log = server.stderr();
    let told = log.iter().filter(|it| it.contains("refused")).count();
    assert_eq!(told, 1, "{log:?}");
    assert!(server.runs());
}

#[test]
fn a_broker_that_is_not_there_yet_is_waited_for() {
    let mut broker = Mosquitto::start();
    broker.stop();
    let mut server = Server::attaching(&broker.url(), broker.address(), &[]);
    server.wait_for_log("connection refused");
    thread::sleep(Duration::from_millis(300));
    assert!(server.runs());
    broker.restart();
    serves(&mut server);
    // Nor is it a hurry when it is told to stop meanwhile.
    broker.stop();
    server.signal("TERM");
    let ended = server.wait(statehouse_tests::client::PATIENCE);
    assert_eq!(ended.code(), Some(0));
}
