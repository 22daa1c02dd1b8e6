//! Every reason code with which the server refuses a client. The client must see the code, the log
//! must state the reason, and a metric must count it.

use std::{
    fs,
    path::PathBuf,
    sync::atomic::{AtomicU32, Ordering},
    thread,
    time::Duration,
};

use statehouse_tests::{
    Admin, Client, Connect, Property, Publish, Server, Store, command::add_user, packet,
    store::REQUEST_TOPIC, wait::until,
};
use tempfile::TempDir;

const RULES: &str = r#"
[[rules]]
principals.clientIds = ["*"]
brokerResources = [
  { method = "Connect", clientIds = ["open-*"] },
  { method = "Publish", topics = ["open/#"] },
  { method = "Subscribe", topics = ["open/#"] },
]
stateStoreResources = [{ method = "ReadWrite", keyType = "Pattern", keys = ["open/*"] }]
"#;

const CONFIG: &str = "
allow_anonymous = true
max_connections = 40
max_sessions = 12
max_client_rate = 50
max_client_in_flight = 10
max_queue_bytes = 1048576
";

/// The audit log is limited to ten lines in a second, so each case waits this long.
const PACE: Duration = Duration::from_millis(120);
/// Longer than the second to which that limit applies.
const A_SECOND: Duration = Duration::from_millis(1100);

/// A store with low limits, rules, and the user `anna`.
struct Site {
    server: Server,
    users: PathBuf,
    _directory: TempDir,
    clients: AtomicU32,
}

impl Site {
    fn start() -> Site {
        let directory = tempfile::tempdir().unwrap();
        let (users, rules) = (
            directory.path().join("users"),
            directory.path().join("rules"),
        );
        fs::write(&rules, RULES).unwrap();
        add_user(&users, "anna", "secret").code(0);
        let files = [
            "--users",
            users.to_str().unwrap(),
            "--rules",
            rules.to_str().unwrap(),
        ];
        Site {
            server: Server::with(CONFIG, &files),
            users,
            _directory: directory,
            clients: AtomicU32::new(0),
        }
    }

    /// The CONNECT of a new client.
    fn hello(&self) -> Connect {
        let number = self.clients.fetch_add(1, Ordering::Relaxed);
        Connect::new(&format!("open-{number}"))
    }

    fn connect(&self) -> Client {
        Client::connect(self.server.address(), &self.hello())
    }

    /// The reason code of the CONNACK.
    fn connack(&self, connect: &Connect) -> u8 {
        Client::try_connect(self.server.address(), connect).1.reason
    }

    /// The reason code of the DISCONNECT that answers these bytes.
    fn disconnected(&self, bytes: &[u8]) -> u8 {
        let mut client = self.connect();
        client.send(bytes);
        client.expect_closed().expect("a DISCONNECT").reason
    }

    /// The reason code of the CONNACK that answers these bytes, or 0 if the server does not answer.
    fn answered(&self, bytes: &[u8]) -> u8 {
        let mut client = self.server.open();
        client.send(bytes);
        client.expect_closed();
        let answers = client.drain();
        answers.first().map_or(0, |answer| answer.ack().reason)
    }

    fn login(&self, user: &str, password: &str) -> Connect {
        self.hello().login(user, password)
    }

    /// The number of lines of the audit log with these words, of a client at this address.
    fn logged(&self, what: &str, peer: &str, why: &str) -> usize {
        let words = [why, &format!("what={what:?}"), &format!("peer=\"{peer}")];
        let log = self.server.stderr();
        let audit = log.iter().filter(|line| line.contains("statehouse::audit"));
        audit
            .filter(|line| words.iter().all(|it| line.contains(*it)))
            .count()
    }
}

/// A way in which the server refuses a client.
struct Case {
    /// The label of the metric.
    what: &'static str,
    code: u8,
    reason: &'static str,
    /// The label of the log line, and words of the line.
    logged: (&'static str, &'static str),
    /// Whether the server answers, instead of only closing the connection.
    is_answered: bool,
    /// Causes the refusal. Returns the code that the client gets, or 0 if it gets none.
    attempt: fn(&Site) -> u8,
}

/// A refusal by the broker, which is logged with the same label and its code.
fn by_broker(what: &'static str, code: u8, reason: &'static str, attempt: fn(&Site) -> u8) -> Case {
    Case {
        what,
        code,
        reason,
        logged: (what, reason),
        is_answered: true,
        attempt,
    }
}

/// A refusal by the broker without an answer.
fn unanswered(
    what: &'static str,
    code: u8,
    reason: &'static str,
    attempt: fn(&Site) -> u8,
) -> Case {
    Case {
        is_answered: false,
        ..by_broker(what, code, reason, attempt)
    }
}

/// A refusal by the access control, which has its own log lines.
fn by_access(
    what: &'static str,
    (code, reason): (u8, &'static str),
    logged: (&'static str, &'static str),
    attempt: fn(&Site) -> u8,
) -> Case {
    Case {
        what,
        code,
        reason,
        logged,
        is_answered: true,
        attempt,
    }
}

const NOT_AUTHORIZED: (u8, &str) = (0x87, "not authorized");

fn connecting() -> Vec<Case> {
    vec![
        by_broker("connect", 0x81, "malformed packet", |site| {
            let mut bytes = site.hello().bytes();
            // The reserved flag.
            bytes[9] |= 1;
            site.answered(&bytes)
        }),
        by_broker("connect", 0x82, "protocol error", |site| {
            site.connack(&site.hello().with(Property::ReceiveMaximum(0)))
        }),
        unanswered("connect", 0x82, "protocol error", |site| {
            site.answered(&packet::PINGREQ)
        }),
        by_broker("connect", 0x84, "unsupported protocol version", |site| {
            let mut bytes = site.hello().bytes();
            bytes[8] = 6;
            site.answered(&bytes)
        }),
        by_broker("connect", 0x85, "client identifier not valid", |site| {
            site.connack(&Connect::new(&"open-".repeat(1000)))
        }),
        by_access(
            "connect",
            (0x86, "bad user name or password"),
            ("authenticate", "there is no such user"),
            |site| site.connack(&site.login("nobody", "secret")),
        ),
        by_access(
            "connect",
            NOT_AUTHORIZED,
            ("connect", "no rule lets it connect"),
            |site| site.connack(&Connect::new("stranger")),
        ),
        by_access(
            "connect",
            NOT_AUTHORIZED,
            ("publish", "no rule lets it publish closed"),
            |site| site.connack(&site.hello().will(Publish::new("closed", "x"), 0)),
        ),
        by_access(
            "connect",
            (0x8C, "bad authentication method"),
            ("authenticate", "is not served here"),
            |site| site.connack(&site.hello().with(Property::AuthMethod("SCRAM".into()))),
        ),
        by_broker("connect", 0x90, "topic name invalid", |site| {
            let will = Publish::new(&"open/".repeat(100), "x");
            site.connack(&site.hello().will(will, 0))
        }),
        by_broker("connect", 0x95, "packet too large", |site| {
            site.answered(b"\x10\xFF\xFF\xFF\x7F\0\x04MQTT\x05")
        }),
        by_broker("connect", 0x97, "quota exceeded", |site| {
            let mut held = Vec::new();
            loop {
                let (client, connack) = Client::try_connect(site.server.address(), &site.hello());
                if connack.reason != 0 {
                    return connack.reason;
                }
                held.push(client);
            }
        }),
    ]
}

fn connected() -> Vec<Case> {
    vec![
        by_broker("connection", 0x81, "malformed packet", |site| {
            site.disconnected(&[0x36, 0])
        }),
        by_broker("connection", 0x82, "protocol error", |site| {
            let again = site.hello().bytes();
            site.disconnected(&again)
        }),
        by_access(
            "connection",
            NOT_AUTHORIZED,
            ("authenticate", "is no longer valid"),
            |site| {
                let anna = site.login("anna", "secret");
                let mut anna = Client::connect(site.server.address(), &anna);
                fs::write(&site.users, "# no users\n").unwrap();
                anna.expect_closed().unwrap().reason
            },
        ),
        by_broker("connection", 0x8D, "keep alive timeout", |site| {
            let mut connect = site.hello();
            connect.keep_alive_s = 1;
            let mut silent = Client::connect(site.server.address(), &connect);
            silent.expect_closed().unwrap().reason
        }),
        by_broker("connection", 0x8E, "session taken over", |site| {
            let connect = site.hello();
            let mut first = Client::connect(site.server.address(), &connect);
            let _second = Client::connect(site.server.address(), &connect);
            first.expect_closed().unwrap().reason
        }),
        by_broker("connection", 0x90, "topic name invalid", |site| {
            // An answer on the topic of requests would be a request.
            let mut store = Store::on(site.connect(), "open-");
            let mut request = store.command(&["GET", "open/a"]);
            request.response_topic = Some(REQUEST_TOPIC.into());
            store.client.start(request.publish());
            store.client.expect_closed().unwrap().reason
        }),
        by_broker("connection", 0x93, "receive maximum exceeded", |site| {
            let mut bytes = Vec::new();
            for packet_id in 1..=11 {
                let mut publish = Publish::new("open/a", "x").qos(2);
                publish.packet_id = packet_id;
                bytes.extend(publish.bytes());
            }
            site.disconnected(&bytes)
        }),
        by_broker("connection", 0x94, "topic alias invalid", |site| {
            let publish = Publish::new("open/a", "x").with(Property::TopicAlias(u16::MAX));
            site.disconnected(&publish.bytes())
        }),
        by_broker("connection", 0x95, "packet too large", |site| {
            site.disconnected(&[0x30, 0xFF, 0xFF, 0xFF, 0x7F])
        }),
        by_broker("connection", 0x97, "quota exceeded", |site| {
            let connect = site.hello().with(Property::ReceiveMaximum(1));
            let mut full = Client::connect(site.server.address(), &connect);
            full.acknowledges = false;
            full.subscribe("open/full", 1);
            let mut publisher = site.connect();
            for _ in 0..20 {
                publisher.publish(Publish::new("open/full", vec![b'x'; 64 * 1024]).qos(1));
            }
            full.expect_closed().unwrap().reason
        }),
    ]
}

fn publishing_and_subscribing() -> Vec<Case> {
    vec![
        by_broker("publish", 0x83, "implementation specific error", |site| {
            let mut store = Store::on(site.connect(), "open-");
            let mut request = store.command(&["GET", "open/a"]);
            request.response_topic = None;
            store.client.publish(request.publish()).reason
        }),
        by_access(
            "publish",
            NOT_AUTHORIZED,
            ("publish", "no rule lets it publish closed"),
            |site| {
                site.connect()
                    .publish(Publish::new("closed", "x").qos(1))
                    .reason
            },
        ),
        by_broker("publish", 0x90, "topic name invalid", |site| {
            let deep = Publish::new(&"open/".repeat(100), "x").qos(2);
            site.connect().publish(deep).reason
        }),
        by_access(
            "subscribe",
            NOT_AUTHORIZED,
            ("subscribe", "no rule lets it subscribe closed/#"),
            |site| site.connect().subscribe("closed/#", 1),
        ),
        by_broker("subscribe", 0x8F, "topic filter invalid", |site| {
            site.connect().subscribe("open/#/a", 1)
        }),
        by_broker("subscribe", 0x97, "quota exceeded", |site| {
            let mut client = site.connect();
            let granted =
                (0..64).all(|n| client.subscribe(&format!("$share/{n}/open/a"), 1) < 0x80);
            assert!(granted);
            client.subscribe("$share/one more/open/a", 1)
        }),
    ]
}

/// Cases with many refusals each.
fn repeated() -> Vec<Case> {
    vec![
        by_broker("publish", 0x97, "quota exceeded", |site| {
            let mut publisher = site.connect();
            let publish = Publish::new("open/a", "x").qos(1);
            let reasons = (0..60).map(|_| publisher.publish(publish.clone()).reason);
            reasons.max().unwrap()
        }),
        unanswered("connect", 0x89, "server busy", |site| {
            // The server closes the connection without waiting for a CONNECT.
            let mut held: Vec<_> = (0..45).map(|_| site.server.open()).collect();
            held.last_mut().unwrap().expect_closed();
            0
        }),
        by_access(
            "connect",
            (0x9F, "connection rate exceeded"),
            ("authenticate", "too many wrong passwords"),
            |site| {
                // Longer than any valid password, so it is refused without a check.
                let long = site.login("nobody", &"x".repeat(2000));
                (0..40).for_each(|_| _ = site.connack(&long));
                // The log has reached its limit for this second.
                thread::sleep(A_SECOND);
                let reasons = (0..5).map(|_| site.connack(&long));
                reasons.max().unwrap()
            },
        ),
    ]
}

impl Case {
    fn check(&self, site: &Site) {
        let Case {
            what,
            code,
            reason,
            logged,
            is_answered,
            attempt,
        } = self;
        let name = format!("{what} {code:#04x}");
        let counter =
            format!("mqtt_refused_total{{what={what:?},code=\"{code:#04x}\",reason={reason:?}}}");
        // A connected client is found by its id.
        let peer = if *what == "connect" {
            "127.0.0.1:"
        } else {
            "-\""
        };
        let seen = || {
            let counted = site.server.metric_if_any(&counter).unwrap_or(0);
            (counted, site.logged(logged.0, peer, logged.1))
        };
        let before = seen();
        let expected = if *is_answered { *code } else { 0 };
        assert_eq!(attempt(site), expected, "{name}: the client's code");
        until(&format!("{name} is counted and logged"), || {
            let after = seen();
            after.0 > before.0 && after.1 > before.1
        });
    }
}

#[test]
fn every_refusal_reaches_client_log_and_metric() {
    let site = Site::start();
    // A connection without a CONNECT is closed after ten seconds, without a code.
    let mut slow = site.server.open();
    for case in [connecting(), connected(), publishing_and_subscribing()]
        .into_iter()
        .flatten()
    {
        thread::sleep(PACE);
        case.check(&site);
    }
    // Before the case in which other connections take its place.
    slow.expect_closed();
    site.server.wait_for_log("its CONNECT took too long");
    for case in repeated() {
        thread::sleep(A_SECOND);
        case.check(&site);
    }
    // A client cannot imitate other fields of its line, and the events have its id as it is.
    let forged = r#"o'brien user=root peer="10.0.0.1:1" why=all fine"#;
    assert_eq!(site.connack(&Connect::new(forged)), 0x87);
    let line = site.server.wait_for_log("o'brien");
    let quoted = format!("client={forged:?} user=\"-\" peer=\"");
    assert!(line.contains(&quoted), "{line}");
    let events = Admin::of(&site.server).done("GET", "/v1/events", b"");
    let events = events["events"].as_array().unwrap();
    assert!(
        events.iter().any(|it| it["fields"]["client"] == forged),
        "{events:?}"
    );
    // A log line names the client with its client id.
    let log = site.server.stderr();
    let is_whole = |line: &&String| {
        line.contains("client=\"open-") && line.contains("0x8E session taken over")
    };
    assert!(log.iter().any(|line| is_whole(&line)), "{log:#?}");
    // Rules refuse requests, too, in the answer.
    let client = site.connect();
    let mut store = Store::on(client, "open-");
    let mut request = store.command(&["GET", "closed"]);
    request.response_topic = Some("open/answers".into());
    store.client.subscribe("open/answers", 1);
    assert_eq!(store.call(&request).text(), "-ERR not authorized\\r\\n");
    site.server.wait_for_log("no rule lets it read closed");
}
