//! Tokens of Kubernetes service accounts (method K8S-SAT). A connection must end when its token
//! expires or the key of its token is removed, unless the client renews the token in time.

use std::{
    fs,
    path::{Path, PathBuf},
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

use data_encoding::BASE64URL_NOPAD;
use ed25519_compact::{KeyPair, Seed};
use serde_json::json;
use statehouse_tests::{
    Client, Connect, Packet, Property, Server,
    packet::{Ack, kind, packet},
    property,
};
use tempfile::TempDir;

use crate::official;

const METHOD: &str = "K8S-SAT";

/// The signing key of a cluster, and a store that trusts it.
struct Cluster {
    pair: KeyPair,
    directory: TempDir,
    server: Server,
}

impl Cluster {
    fn start() -> Cluster {
        let pair = KeyPair::from_seed(Seed::new([7; 32]));
        let directory = tempfile::tempdir().unwrap();
        let keys = directory.path().join("keys.jwks");
        publish(&keys, &[("1", &pair)]);
        let server = Server::with(
            &format!("token_keys = {keys:?}\ntoken_audience = [\"aio-internal\"]\n"),
            &["--token-issuer", "https://cluster"],
        );
        Cluster {
            pair,
            directory,
            server,
        }
    }

    /// A token of the account `press` with this lifetime.
    fn token(&self, lasts: Duration) -> String {
        self.token_of("system:serviceaccount:factory:press", lasts)
    }

    fn token_of(&self, subject: &str, lasts: Duration) -> String {
        token_by(("1", &self.pair), subject, lasts)
    }

    fn connack(&self, connect: &Connect) -> (Client, Ack) {
        Client::try_connect(self.server.address(), connect)
    }
}

/// Writes a key file with these keys and their ids.
fn publish(path: &Path, pairs: &[(&str, &KeyPair)]) {
    let keys = pairs.iter().map(|(id, pair)| {
        json!({"kty": "OKP", "crv": "Ed25519", "kid": id, "x": BASE64URL_NOPAD.encode(&pair.pk[..])})
    });
    let set = json!({"keys": keys.collect::<Vec<_>>()});
    fs::write(path, set.to_string()).unwrap();
}

/// A token that is signed by this key.
fn token_by((id, pair): (&str, &KeyPair), subject: &str, lasts: Duration) -> String {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap();
    let header = json!({"alg": "EdDSA", "kid": id});
    let claims = json!({
        "sub": subject, "aud": ["aio-internal"], "iss": "https://cluster", "exp": (now + lasts).as_secs(),
    });
    let part = |json: serde_json::Value| BASE64URL_NOPAD.encode(json.to_string().as_bytes());
    let message = format!("{}.{}", part(header), part(claims));
    let signature = pair.sk.sign(&message, None);
    format!("{message}.{}", BASE64URL_NOPAD.encode(&signature[..]))
}

fn credentials(method: &str, token: &str) -> Vec<Property> {
    vec![
        Property::AuthMethod(method.into()),
        Property::AuthData(token.into()),
    ]
}

fn connect(id: &str, method: &str, token: &str) -> Connect {
    let mut connect = Connect::new(id);
    connect.properties = credentials(method, token);
    connect
}

/// AUTH with Re-authenticate (section 3.15).
fn renew(method: &str, token: &str) -> Vec<u8> {
    let mut body = vec![0x19];
    body.extend(property::write(&credentials(method, token)));
    packet(0xF0, &body)
}

fn is_auth(packet: &Packet) -> bool {
    packet.kind() == kind::AUTH
}

const LONG: Duration = Duration::from_secs(600);

#[test]
fn valid_token_is_accepted_and_others_refused_with_reason() {
    let cluster = Cluster::start();
    let good = cluster.token(LONG);
    let (_client, answer) = cluster.connack(&connect("press", METHOD, &good));
    assert_eq!(answer.reason, 0);
    // MQTT 5, section 4.12: the CONNACK repeats the method.
    assert!(
        answer
            .properties
            .contains(&Property::AuthMethod(METHOD.into()))
    );
    let expired = cluster.token_of("system:serviceaccount:factory:press", Duration::ZERO);
    let admin = cluster.token_of("system:admin", LONG);
    let forged = good.replace('.', "A.");
    for (method, token, reason, says) in [
        (METHOD, expired.as_str(), 0x87, "expired"),
        (METHOD, &admin, 0x87, "service account"),
        (METHOD, &forged, 0x87, "token"),
        (METHOD, "", 0x87, "not a token"),
        (METHOD, "\0\u{FFFF}", 0x87, "not a token"),
        ("SCRAM-SHA-256", &good, 0x8C, "method"),
        ("k8s-sat", &good, 0x8C, "method"),
    ] {
        let (_, answer) = cluster.connack(&connect("press", method, token));
        assert_eq!(answer.reason, reason, "{method} {token}");
        assert!(answer.text().contains(says), "{}", answer.text());
    }
    let (_, anonymous) = cluster.connack(&Connect::new("press"));
    assert_eq!(anonymous.reason, 0x87);
    let log = cluster.server.stderr().join("\n");
    assert!(!log.contains(good.rsplit('.').next().unwrap()), "{log}");
}

#[test]
fn connection_ends_with_its_token_unless_renewed() {
    let cluster = Cluster::start();
    let short = Duration::from_secs(4);
    let began = Instant::now();
    let (mut passive, _) = cluster.connack(&connect("passive", METHOD, &cluster.token(short)));
    let (mut renewing, _) = cluster.connack(&connect("renewing", METHOD, &cluster.token(short)));
    renewing.send(&renew(METHOD, &cluster.token(LONG)));
    let renewed = renewing.take("AUTH", is_auth);
    assert_eq!(renewed.ack().reason, 0, "{renewed:?}");
    passive.expect_disconnect(0x87);
    assert_eq!(cluster.server.refused("authenticate"), 1);
    // Expiry times of tokens are in whole seconds.
    let ended = began.elapsed();
    assert!(ended > short - Duration::from_secs(2), "{ended:?}");
    assert!(ended < short + Duration::from_secs(3), "{ended:?}");
    renewing.ping();

    for (method, token) in [
        (METHOD, "nonsense".to_owned()),
        (METHOD, cluster.token(Duration::ZERO)),
        // A valid token of another account.
        (
            METHOD,
            cluster.token_of("system:serviceaccount:factory:lathe", LONG),
        ),
    ] {
        let (mut client, _) = cluster.connack(&connect("other", METHOD, &cluster.token(LONG)));
        client.send(&renew(method, &token));
        client.expect_disconnect(0x87);
    }
    assert_eq!(cluster.server.refused("authenticate"), 4);
    renewing.send(&renew("SCRAM-SHA-256", &cluster.token(LONG)));
    renewing.expect_disconnect(0x82);
}

/// If a key is removed from the file, the server disconnects only the clients that use a token of
/// that key.
#[test]
fn connection_ends_when_its_token_key_is_removed() {
    const SUBJECT: &str = "system:serviceaccount:factory:press";
    let cluster = Cluster::start();
    let keys = cluster.directory.path().join("keys.jwks");
    let second = KeyPair::from_seed(Seed::new([8; 32]));
    publish(&keys, &[("1", &cluster.pair), ("2", &second)]);
    cluster.server.wait_for_log("token keys: read again");
    let by_second = token_by(("2", &second), SUBJECT, LONG);
    let by_first = cluster.token(LONG);
    let connected = |id: &str, token: &str| {
        let (client, answer) = cluster.connack(&connect(id, METHOD, token));
        assert_eq!(answer.reason, 0, "{id}");
        client
    };
    let mut first = connected("first", &by_first);
    let mut other = connected("other", &by_second);
    let mut renewed = connected("renewed", &by_first);
    renewed.send(&renew(METHOD, &by_second));
    assert_eq!(renewed.take("AUTH", is_auth).ack().reason, 0);
    // The id of the first key changes, but not the key.
    publish(&keys, &[("one", &cluster.pair), ("2", &second)]);
    cluster.server.reload();
    first.ping();

    publish(&keys, &[("2", &second)]);
    let began = Instant::now();
    let end = first.expect_disconnect(0x87);
    assert!(began.elapsed() < Duration::from_secs(5));
    assert!(end.text().contains("no longer"), "{}", end.text());
    cluster.server.wait_for_log("is no longer valid");
    other.ping();
    renewed.ping();
    let (_, answer) = cluster.connack(&connect("first", METHOD, &by_first));
    assert_eq!(answer.reason, 0x87);
}

#[test]
fn official_client_logs_in_and_renews_its_token() {
    let cluster = Cluster::start();
    // As in a pod, the file is replaced by another one.
    let file = cluster.directory.path().join("token");
    let write = |lasts| {
        let new = PathBuf::from(format!("{}.new", file.display()));
        fs::write(&new, cluster.token(lasts)).unwrap();
        fs::rename(&new, &file).unwrap();
    };
    write(Duration::from_secs(20));
    let path = file.to_str().unwrap().to_owned();
    let credentials =
        |it: azure_iot_operations_mqtt::aio::connection_settings::MqttConnectionSettingsBuilder| {
            it.sat_file(path)
        };
    official::with_client(&cluster.server, "official", credentials, async |store| {
        official::set(&store, "key", "before").await;
        write(LONG);
        // The client waits ten seconds for more changes before it reads the file.
        tokio::time::sleep(Duration::from_secs(22)).await;
        official::set(&store, "key", "after").await;
    });
    let log = cluster.server.stderr();
    assert!(
        !log.iter().any(|line| line.contains("statehouse::audit")),
        "{log:?}"
    );
}
