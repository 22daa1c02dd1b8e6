//! TLS. The server must present its certificate, must check client certificates if so configured,
//! and must limit unfinished handshakes.

use std::{
    fs,
    io::{Read, Write},
    iter,
    net::{SocketAddr, TcpStream},
    path::{Path, PathBuf},
    process::Command,
    thread,
    time::{Duration, Instant},
};

use azure_iot_operations_mqtt::aio::connection_settings::MqttConnectionSettingsBuilder;
use statehouse_tests::{
    Background, Ran, Server,
    client::PATIENCE,
    command::{command, finish},
    run,
};
use tempfile::TempDir;

use crate::{authority::Authority, official};

/// A store with a second listener, for TLS, and the files of its clients.
pub(crate) struct Encrypted {
    pub(crate) server: Server,
    pub(crate) directory: TempDir,
    pub(crate) authority: Authority,
    pub(crate) address: SocketAddr,
}

impl Encrypted {
    /// Starts a store with further arguments, which may name files of the directory.
    pub(crate) fn start(scheme: &str, further: impl FnOnce(&Path) -> Vec<String>) -> Encrypted {
        let directory = tempfile::tempdir().unwrap();
        let authority = Authority::new(directory.path(), "ca");
        let presented = authority.server("server");
        let mut arguments = vec![
            "--listen".to_owned(),
            format!("{scheme}://127.0.0.1:0"),
            "--tls-cert".to_owned(),
            text(&presented.certificate),
            "--tls-key".to_owned(),
            text(&presented.key),
        ];
        arguments.extend(further(directory.path()));
        let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
        let server = Server::with("", &arguments);
        let address = server.addresses()[1];
        Encrypted {
            server,
            directory,
            authority,
            address,
        }
    }

    /// Starts a store whose clients need a certificate of `clients.crt` that `revoked.crl` does not
    /// list.
    fn strict() -> Encrypted {
        Encrypted::start("mqtts", |directory| {
            let clients = Authority::new(directory, "clients");
            let revoked = directory.join("revoked.crl");
            clients.revoke(&revoked, &[66]);
            clients.client("good", 1);
            clients.client("stolen", 66);
            clients.client_until("old", 2, 2020);
            Authority::new(directory, "strangers").client("stranger", 1);
            vec![
                "--tls-client-ca".to_owned(),
                text(&clients.certificate),
                "--tls-client-crl".to_owned(),
                text(&revoked),
                "--tls-client-required".to_owned(),
                // For the plain listener, where clients of the test write.
                "--allow-anonymous".to_owned(),
            ]
        })
    }

    fn file(&self, name: &str) -> String {
        text(&self.directory.path().join(name))
    }

    /// A command of the store's own client, with this certificate.
    pub(crate) fn command(&self, certificate: Option<&str>, arguments: &[&str]) -> Command {
        self.command_trusting(&self.authority.certificate, certificate, arguments)
    }

    fn command_trusting(
        &self,
        ca: &Path,
        certificate: Option<&str>,
        arguments: &[&str],
    ) -> Command {
        let mut command = command(arguments);
        command.args(["--url", &format!("mqtts://{}", self.address)]);
        command.arg("--ca").arg(ca);
        if let Some(name) = certificate {
            let [certificate, key] = [".crt", ".key"].map(|end| self.file(&format!("{name}{end}")));
            command.args(["--cert", &certificate, "--cert-key", &key]);
        }
        command
    }

    /// Sends a GET with the store's own client.
    pub(crate) fn get(&self, key: &str, certificate: Option<&str>) -> Ran {
        finish(self.command(certificate, &["get", key]), b"")
    }
}

/// Where the admin API listens with TLS.
pub(crate) fn admin_address(server: &Server) -> SocketAddr {
    let line = server.wait_for_log("the admin API listens on https://");
    let address = line.rsplit_once("https://").unwrap().1;
    let end = |c: char| !(c.is_ascii_digit() || c == '.' || c == ':');
    address.split(end).next().unwrap().parse().unwrap()
}

pub(crate) fn text(path: &Path) -> String {
    path.to_str().unwrap().to_owned()
}

#[test]
fn official_client_connects_over_mutual_tls() {
    let store = Encrypted::strict();
    let over_tls = |settings: MqttConnectionSettingsBuilder| {
        settings
            // Its TLS checks host names, but supports no addresses.
            .hostname("localhost")
            .tcp_port(store.address.port())
            .use_tls(true)
            .ca_file(Some(text(&store.authority.certificate)))
            .cert_file(Some(store.file("good.crt")))
            .key_file(Some(store.file("good.key")))
    };
    official::with_client(&store.server, "official", over_tls, async |client| {
        official::set(&client, "official", "value").await;
        let got = client.get("official".into(), PATIENCE).await.unwrap();
        assert_eq!(got.response.as_deref(), Some(&b"value"[..]));
        client.shutdown().await.unwrap();
    });
    let got = store.get("official", Some("good"));
    assert_eq!(got.code(0).stdout, b"value");
}

#[test]
fn mosquitto_pub_and_own_client_connect_over_tls() {
    let store = Encrypted::start("mqtts", |_| Vec::new());
    let line = format!("listening on mqtts://{}", store.address);
    assert!(store.server.stdout().contains(&line));
    let mut command = Command::new("mosquitto_pub");
    let (host, port) = (
        store.address.ip().to_string(),
        store.address.port().to_string(),
    );
    command.args([
        "-V", "5", "-h", &host, "-p", &port, "-q", "1", "-t", "greeting", "-m", "hello", "-r",
    ]);
    command.arg("--cafile").arg(&store.authority.certificate);
    finish(command, b"").code(0);
    store.get("nothing", None).code(1);
}

#[test]
fn refused_client_certificate_is_explained_and_logged() {
    let store = Encrypted::strict();
    store.get("nothing", Some("good")).code(1);
    let cases = [
        (
            None,
            "wants a certificate of the client",
            "peer sent no certificates",
        ),
        (
            Some("stolen"),
            "the client's certificate is revoked",
            "or that of one of its authorities, is revoked",
        ),
        (
            Some("stranger"),
            "does not trust the authority that issued",
            "no authority in --tls-client-ca issued",
        ),
        (
            Some("old"),
            "the client's certificate has expired",
            "certificate expired",
        ),
    ];
    for (count, (certificate, says, logged)) in (1..).zip(cases) {
        let refused = store.get("nothing", certificate);
        assert_eq!(refused.code, Some(3), "{certificate:?}: {refused:#?}");
        refused.says(says);
        let line = store.server.wait_for_log(logged);
        let words = ["statehouse::audit", "what=\"tls\"", "peer=\"127.0.0.1:"];
        assert!(words.iter().all(|word| line.contains(word)), "{line}");
        assert_eq!(store.server.refused("tls"), count, "{certificate:?}");
    }
}

/// Checks that the refusal of a handshake is in the log, with the address of its client.
fn assert_logged(server: &Server, client: &TcpStream, what: &str, why: &str) {
    let peer = format!("peer=\"{}\"", client.local_addr().unwrap());
    let line = server.wait_for_log(&peer);
    let words = ["statehouse::audit", &format!("what=\"{what}\""), why];
    assert!(words.iter().all(|word| line.contains(word)), "{line}");
}

#[test]
fn bad_server_certificate_is_explained_by_the_client() {
    let store = Encrypted::start("mqtts", |directory| {
        Authority::new(directory, "other");
        vec!["--listen".to_owned(), "mqtts://127.0.0.2:0".to_owned()]
    });
    let get_fails = |url: String, ca: &str| {
        let arguments = ["get", "k", "--url", &url, "--ca", &store.file(ca)];
        run(&arguments, b"").code(3)
    };
    get_fails(format!("mqtts://{}", store.address), "other.crt")
        .says("no authority that is trusted here");
    // The certificate is for 127.0.0.1.
    let by_another_name = store.server.addresses()[2];
    get_fails(format!("mqtts://{by_another_name}"), "ca.crt").says("for another name");
    get_fails(format!("mqtts://{}", store.server.address()), "ca.crt").says("speak TLS");
    let plain = format!("mqtt://{}", store.address);
    run(&["get", "k", "--url", &plain], b"").fails(3, "not MQTT 5");
    let useless = store.file("ca.crt");
    run(&["get", "k", "--url", &plain, "--ca", &useless], b"").fails(2, "mqtts://");
}

/// The values do not fit into one TLS record, and more of them are in flight than a socket buffer
/// holds.
#[test]
fn load_over_tls_is_completely_answered() {
    let store = Encrypted::start("mqtts", |_| Vec::new());
    let url = format!("mqtts://{}", store.address);
    let ca = text(&store.authority.certificate);
    let options = "--warm-up 100ms --duration 1s --connections 4 --in-flight 32 --keys 40 \
                   --value-bytes 40000 --watchers 2 --keep";
    let mut load = vec!["bench", "--url", &url];
    load.extend(options.split(' '));
    run(&load, b"").fails(3, "no authority that is trusted here");
    load.extend(["--ca", &ca]);
    let ran = run(&load, b"").code(0);
    let text = ran.text();
    let answered = text.lines().find(|it| it.starts_with("answered"));
    let words: Vec<&str> = answered
        .unwrap()
        .split(' ')
        .filter(|it| !it.is_empty())
        .collect();
    assert!(
        words[1] != "0" && words[1] == words[3].trim_end_matches(','),
        "{ran:?}"
    );
    let kept = store.get("bench/40000/0000000039", None).code(0);
    assert_eq!(kept.stdout.len(), 40_000, "the value has its full length");
}

/// New handshakes use the new certificates, and existing connections continue. A malformed file
/// changes nothing.
#[test]
fn renewed_certificates_keep_existing_connections() {
    let store = Encrypted::strict();
    store.get("nothing", Some("good")).code(1);
    // A client watches the key during all changes.
    let mut watch = store.command(Some("good"), &["watch", "key", "--json"]);
    let watch = Background::start(&mut watch);
    let mut plain = store.server.store("plain");
    let mut expect_notification = |value: &str| {
        let end = Instant::now() + PATIENCE;
        loop {
            plain.set("key", value);
            let short = Duration::from_millis(200);
            let line = watch.lines.wait(short, |line| line.contains(value));
            if line.is_some() {
                return;
            }
            assert!(Instant::now() < end, "the watcher gets no {value}");
        }
    };
    expect_notification("before");

    let list = store.directory.path().join("revoked.crl");
    let before = fs::read(&list).unwrap();
    fs::write(&list, "nonsense").unwrap();
    store
        .server
        .wait_for_log("holds no list of revoked certificates");
    store.get("nothing", Some("good")).code(1);

    fs::write(&list, before).unwrap();
    store.server.wait_for_log("certificates: read again");
    // From now on, the server has a certificate of another authority.
    let other = Authority::new(store.directory.path(), "other");
    other.server("server");
    store.server.reload();
    let get = store.command_trusting(&other.certificate, Some("good"), &["get", "key"]);
    finish(get, b"").code(0);
    store.get("key", Some("good")).code(3);
    expect_notification("after");
}

/// Thousands of connections send garbage, half a record, or nothing. Honest clients still connect,
/// and memory stays limited.
#[test]
fn unfinished_handshakes_block_no_client_in_bounded_memory() {
    let store = Encrypted::start("mqtts", |_| Vec::new());
    store.get("nothing", None).code(1);
    let before_kib = store.server.memory_kib();
    let garbage = [
        &b""[..],
        // The head of a TLS record that claims a longer body.
        &[0x16, 0x03, 0x01, 0x3f, 0xff, 0x01, 0x00, 0x3f],
        &[0x16],
    ];
    let mut attackers = Vec::new();
    let mut most_kib = 0;
    for round in 0..6 {
        for n in 0..500 {
            let Ok(mut attacker) = TcpStream::connect(store.address) else {
                continue;
            };
            _ = attacker.write_all(garbage[n % garbage.len()]);
            attackers.push(attacker);
        }
        most_kib = most_kib.max(store.server.memory_kib());
        store.get("nothing", None).code(1);
        assert!(
            store.server.descriptors() < 700,
            "half-open connections of round {round} remain"
        );
    }
    let grown_kib = most_kib.saturating_sub(before_kib);
    assert!(grown_kib < 48 * 1024, "{grown_kib} KiB for handshakes");
    store
        .server
        .wait_for_log("too many handshakes are in progress");
    let refused = store.server.refused("handshake");
    assert!(
        refused > 2000,
        "{refused} of {} handshakes",
        attackers.len()
    );
}

#[test]
fn non_tls_input_is_closed_and_logged() {
    let store = Encrypted::start("mqtts", |_| Vec::new());
    for garbage in [
        &b"GET / HTTP/1.1\r\n\r\n"[..],
        &[
            0x10, 0x10, 0, 4, b'M', b'Q', b'T', b'T', 5, 2, 0, 0, 0, 0, 1, b'x',
        ],
        &[0; 2000],
    ] {
        let mut attacker = TcpStream::connect(store.address).unwrap();
        attacker.write_all(garbage).unwrap();
        attacker.set_read_timeout(Some(PATIENCE)).unwrap();
        let mut rest = Vec::new();
        // A TLS alert, then the end of the stream, which may be a reset.
        _ = attacker.read_to_end(&mut rest);
        assert!(rest.len() < 64, "{rest:?}");
        assert_logged(&store.server, &attacker, "tls", "corrupt");
    }
    assert_eq!(store.server.refused("tls"), 3);
    store.get("nothing", None).code(1);
}

/// A handshake has five seconds.
#[test]
fn slow_handshake_is_closed_in_time() {
    let store = Encrypted::start("mqtts", |_| Vec::new());
    let began = Instant::now();
    let mut slow = TcpStream::connect(store.address).unwrap();
    slow.set_read_timeout(Some(Duration::from_millis(500)))
        .unwrap();
    // The head of a TLS record that claims a long body, and its first bytes.
    for byte in [0x16, 0x03, 0x01, 0x3f, 0xff]
        .into_iter()
        .chain(iter::repeat(1))
    {
        _ = slow.write_all(&[byte]);
        match slow.read(&mut [0; 16]) {
            Ok(0) => break,
            Err(error) if error.kind() == std::io::ErrorKind::ConnectionReset => break,
            _ => assert!(began.elapsed() < PATIENCE, "the connection is never closed"),
        }
        thread::sleep(Duration::from_millis(100));
    }
    let took = began.elapsed();
    assert!((4..10).contains(&took.as_secs()), "closed after {took:?}");
    assert_logged(&store.server, &slow, "handshake", "longer than 5 s");
    assert_eq!(store.server.refused("handshake"), 1);
}

#[test]
fn reachable_listener_without_security_flags_is_refused() {
    let missing = |code, arguments: &[&str], says: &[&str]| {
        let refused = run(&[&["serve"], arguments].concat(), b"").code(code);
        for says in says {
            assert!(refused.stderr.contains(says), "{refused:#?}");
        }
    };
    missing(
        2,
        &["--listen", "0.0.0.0:0"],
        &[
            "--listen mqtts://0.0.0.0:0 --tls-cert FILE --tls-key FILE",
            "--users FILE",
            "--insecure",
        ],
    );
    missing(
        2,
        &["--listen", "wss://127.0.0.1:0"],
        &["--tls-cert FILE and --tls-key FILE"],
    );
    missing(
        2,
        &["--listen", "127.0.0.1:0", "--tls-cert", "x"],
        &["--listen mqtts://"],
    );
    let none: PathBuf = "/none/such.pem".into();
    missing(
        3,
        &[
            "--listen",
            "mqtts://127.0.0.1:0",
            "--tls-cert",
            &text(&none),
            "--tls-key",
            &text(&none),
        ],
        &["/none/such.pem"],
    );
}
