//! Revocation of certificates under live connections. The server must disconnect the owners of
//! revoked certificates, and no other client.

use std::{
    fs,
    io::{Read, Write},
    net::TcpStream,
    path::PathBuf,
    process::{Command, Stdio},
    time::{Duration, Instant},
};

use rustls::{ClientConnection, StreamOwned, pki_types::ServerName};
use statehouse_tests::{Background, Publish, admin::Admin, client::PATIENCE, run, tls::presenting};

use crate::{
    authority::Authority,
    tls::{Encrypted, admin_address, text},
};

/// The server checks its files every second, and both cores may be busy.
const SOON: Duration = Duration::from_secs(5);

/// mosquitto_sub with a certificate, subscribed to `news`. It prints every packet that it receives,
/// including DISCONNECT.
fn subscriber(store: &Encrypted, name: &str) -> Background {
    let file = |end: &str| store.directory.path().join(format!("{name}{end}"));
    // Without stdbuf, it would buffer some kilobytes of its output.
    let mut command = Command::new("stdbuf");
    command.args(["-oL", "mosquitto_sub"]);
    command.args(["-V", "5", "-d", "-q", "1", "-t", "news", "-i", name]);
    command.args(["-h", "127.0.0.1", "-p", &store.address.port().to_string()]);
    command.arg("--cafile").arg(&store.authority.certificate);
    command.arg("--cert").arg(file(".crt"));
    command.arg("--key").arg(file(".key"));
    let it = Background::start(command.stderr(Stdio::null()));
    it.wait_for("SUBACK");
    it
}

/// A store that trusts certificates of two authorities.
struct Site {
    store: Encrypted,
    plant: Authority,
    office: Authority,
    /// The file that `--tls-client-ca` names.
    trusted: PathBuf,
}

impl Site {
    /// Starts a store with these further arguments.
    fn start(further: impl FnOnce(&Authority, &Authority) -> Vec<String>) -> Site {
        let mut created = None;
        let store = Encrypted::start("mqtts", |directory| {
            let plant = Authority::new(directory, "plant");
            let office = Authority::new(directory, "office");
            plant.client("press", 7);
            plant.client("lathe", 8);
            office.client("desk", 7);
            let trusted = directory.join("trusted.crt");
            let both = [&plant, &office].map(|it| fs::read_to_string(&it.certificate).unwrap());
            fs::write(&trusted, both.concat()).unwrap();
            let mut arguments = vec![
                "--tls-client-ca".to_owned(),
                text(&trusted),
                // For the plain listener, where the test publishes.
                "--allow-anonymous".to_owned(),
            ];
            arguments.extend(further(&plant, &office));
            created = Some((plant, office, trusted));
            arguments
        });
        let (plant, office, trusted) = created.unwrap();
        Site {
            store,
            plant,
            office,
            trusted,
        }
    }

    fn list(&self, name: &str) -> PathBuf {
        self.store.directory.path().join(name)
    }

    /// Checks that `ended` is soon disconnected as not authorized, and that `others` still get
    /// messages.
    fn expect_ended(&self, ended: &Background, since: Instant, others: &[&Background]) {
        // 0x87.
        ended.wait_for("DISCONNECT (135)");
        assert!(since.elapsed() < SOON, "it took {:?}", since.elapsed());
        let line = self.store.server.wait_for_log("is no longer valid");
        assert!(line.contains("statehouse::audit"), "{line}");
        let mut publisher = self.store.server.connect("publisher");
        publisher.publish(Publish::new("news", "still here").qos(1));
        for other in others {
            other.wait_for("still here");
            assert!(
                !other
                    .lines
                    .all()
                    .iter()
                    .any(|line| line.contains("DISCONNECT"))
            );
        }
    }
}

/// Writes a list of each authority, and returns the arguments that name them.
fn lists(plant: &Authority, office: &Authority) -> Vec<String> {
    let lists = [(plant, "plant.crl"), (office, "office.crl")].map(|(by, name)| {
        let path = by.certificate.with_file_name(name);
        by.revoke(&path, &[66]);
        path
    });
    let arguments = lists
        .iter()
        .flat_map(|it| ["--tls-client-crl".to_owned(), text(it)]);
    arguments.collect()
}

#[test]
fn newly_revoked_certificate_ends_its_connection() {
    let site = Site::start(lists);
    let press = subscriber(&site.store, "press");
    let lathe = subscriber(&site.store, "lathe");
    // A certificate of another authority with the same serial number.
    let desk = subscriber(&site.store, "desk");
    // A list without certificates of connected clients changes nothing for them.
    site.office.revoke(&site.list("office.crl"), &[66, 67]);
    site.store.server.wait_for_log("certificates: read again");
    let since = Instant::now();
    site.plant.revoke(&site.list("plant.crl"), &[66, 7]);
    site.expect_ended(&press, since, &[&lathe, &desk]);
    // From now on, the TLS handshake with this certificate fails.
    site.store.get("nothing", Some("press")).code(3);
    site.store
        .server
        .wait_for_log("of one of its authorities, is revoked");
}

/// A connection to the admin API with a certificate. Its first request is answered.
fn operator(site: &Site, name: &str) -> StreamOwned<ClientConnection, TcpStream> {
    let file = |end: &str| site.list(&format!("{name}{end}"));
    let trusted = &site.store.authority.certificate;
    let config = presenting(&file(".crt"), &file(".key"), trusted);
    let host = ServerName::try_from("localhost").unwrap();
    let connection = ClientConnection::new(config, host).unwrap();
    let socket = TcpStream::connect(admin_address(&site.store.server)).unwrap();
    socket.set_read_timeout(Some(PATIENCE)).unwrap();
    let mut stream = StreamOwned::new(connection, socket);
    assert!(is_answered(site, &mut stream));
    stream
}

/// Sends a request with the token of the store over a connection that stays open.
fn is_answered(site: &Site, stream: &mut StreamOwned<ClientConnection, TcpStream>) -> bool {
    let token = Admin::of(&site.store.server).token().to_owned();
    let request = format!(
        "HEAD /v1/session HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {token}\r\n\r\n"
    );
    let mut answer = [0; 4096];
    stream.write_all(request.as_bytes()).unwrap();
    let length = stream.read(&mut answer).unwrap();
    answer[..length].starts_with(b"HTTP/1.1 200")
}

/// Regression: the admin API served an open connection with any revoked certificate.
#[test]
fn newly_revoked_certificate_ends_its_admin_connection() {
    let site = Site::start(|plant, office| {
        let users = text(&plant.certificate.with_file_name("users"));
        let add = ["user", "add", "anna", "--password-stdin", "--users", &users];
        run(&add, b"right horse").code(0);
        let mut arguments = lists(plant, office);
        arguments.extend(["--users".to_owned(), users]);
        arguments.extend(["--admin", "https://127.0.0.1:0"].map(str::to_owned));
        arguments
    });
    let (mut press, mut lathe) = (operator(&site, "press"), operator(&site, "lathe"));
    let since = Instant::now();
    site.plant.revoke(&site.list("plant.crl"), &[66, 7]);
    let rest = press.read(&mut [0; 4096]);
    assert!(!matches!(rest, Ok(1..)), "the connection ends: {rest:?}");
    assert!(since.elapsed() < SOON, "it took {:?}", since.elapsed());
    let line = site.store.server.wait_for_log("what=\"administer\"");
    assert!(line.contains("no longer valid"), "{line}");
    assert!(is_answered(&site, &mut lathe));
}

/// Regression: of several lists of one authority, only the first counted.
#[test]
fn list_that_is_appended_counts() {
    let site = Site::start(lists);
    let press = subscriber(&site.store, "press");
    let lathe = subscriber(&site.store, "lathe");
    let (path, newer) = (site.list("plant.crl"), site.list("newer.crl"));
    site.plant.revoke(&newer, &[7]);
    let both = [&path, &newer].map(|it| fs::read_to_string(it).unwrap());
    let since = Instant::now();
    site.store.server.change_file(&path, &both.concat());
    site.expect_ended(&press, since, &[&lathe]);
    site.store.get("nothing", Some("press")).code(3);
}

/// Regression: a list that the key of another authority signed locked out all clients.
#[test]
fn list_that_no_authority_signed_is_refused() {
    let site = Site::start(lists);
    let press = subscriber(&site.store, "press");
    let elsewhere = tempfile::tempdir().unwrap();
    let impostor = Authority::new(elsewhere.path(), "plant");
    impostor.revoke(&site.list("plant.crl"), &[7]);
    let line = site.store.server.wait_for_log("has signed it");
    assert!(line.contains("plant.crl"), "{line}");
    let mut publisher = site.store.server.connect("publisher");
    publisher.publish(Publish::new("news", "still here").qos(1));
    press.wait_for("still here");
    site.store.get("nothing", Some("lathe")).code(1);
}

#[test]
fn removed_authority_disconnects_its_clients() {
    let site = Site::start(|_, _| Vec::new());
    let press = subscriber(&site.store, "press");
    let desk = subscriber(&site.store, "desk");
    let since = Instant::now();
    fs::copy(&site.office.certificate, &site.trusted).unwrap();
    site.expect_ended(&press, since, &[&desk]);
    site.store.get("nothing", Some("press")).code(3);
    site.store
        .server
        .wait_for_log("no authority in --tls-client-ca issued");
}

/// Regression: a connected client kept the user and the attributes of its certificate.
#[test]
fn changed_owners_of_certificates_disconnect_their_clients() {
    let owners = |press: &str| {
        format!(
            "[[certificate]]\nsubject = \"CN=press\"\nuser = \"press-4\"\n{press}\n\n\
             [[certificate]]\nsubject = \"CN=lathe\"\nuser = \"lathe-1\"\n"
        )
    };
    let mut file = None;
    let site = Site::start(|plant, _| {
        let path = plant.certificate.with_file_name("owners.toml");
        fs::write(&path, owners("attributes = { role = \"maintenance\" }")).unwrap();
        let arguments = vec!["--certificate-users".to_owned(), text(&path)];
        file = Some(path);
        arguments
    });
    let press = subscriber(&site.store, "press");
    let lathe = subscriber(&site.store, "lathe");
    let since = Instant::now();
    let file = file.unwrap();
    site.store.server.change_file(&file, &owners(""));
    site.expect_ended(&press, since, &[&lathe]);
    let press = subscriber(&site.store, "press");
    site.store
        .server
        .change_file(&file, &owners("attributes = { a = \"b\" }"));
    press.wait_for("DISCONNECT (135)");
}
