//! Authorization rules. A refusal must be visible to the client, in the log, in a metric and in
//! `authz explain`. A change of the rules must take effect for connected clients, but must not
//! change the answers of earlier requests.

use std::{fs, path::PathBuf};

use statehouse_tests::{
    Client, Ran, Server, command,
    connect::Connect,
    packet::{Publish, kind},
    store::{Store, notification_topic},
};
use tempfile::TempDir;

const NOT_AUTHORIZED: u8 = 0x87;
const DENIED: &str = "-ERR not authorized\\r\\n";

/// All listed clients may connect and use their own keys. `reader` may read the keys below
/// `shared/`, and `writer` may write them.
const RULES: &str = r#"
[[rules]]
principals.clientIds = ["reader", "writer", "+", "a/b", "absent"]
brokerResources = [{ method = "Connect" }]
stateStoreResources = [{ method = "ReadWrite", keyType = "Pattern", keys = ["own/{principal.clientId}/*"] }]

[[rules]]
principals.clientIds = ["reader"]
brokerResources = [{ method = "Subscribe", topics = ["news/#"] }]
stateStoreResources = [{ method = "Read", keyType = "Pattern", keys = ["shared/*"] }]

[[rules]]
principals.clientIds = ["writer"]
brokerResources = [{ method = "Publish", topics = ["news/+"] }]
stateStoreResources = [{ method = "Write", keyType = "Pattern", keys = ["shared/*"] }]
"#;

/// The first rule alone: each client may use only its own keys.
fn revoked() -> &'static str {
    RULES.split("\n\n").next().unwrap()
}

/// A file of rules that a server uses.
struct RulesFile {
    path: PathBuf,
    _directory: TempDir,
}

impl RulesFile {
    fn new(text: &str) -> RulesFile {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("rules.toml");
        fs::write(&path, text).unwrap();
        RulesFile {
            path,
            _directory: directory,
        }
    }

    fn name(&self) -> &str {
        self.path.to_str().unwrap()
    }

    /// Replaces the file, and waits until the rules are in force.
    fn change(&self, server: &Server, text: &str) {
        server.change_file(&self.path, text);
    }
}

/// Starts a server with rules.
fn server_with(rules: &RulesFile) -> Server {
    Server::with("", &["--rules", rules.name()])
}

/// Runs `authz explain`, which must end with this code.
fn explain(rules: &RulesFile, code: i32, arguments: &[&str]) -> Ran {
    let arguments = [&["authz", "explain", "--rules", rules.name()], arguments].concat();
    command::run(&arguments, b"").code(code)
}

#[test]
fn denied_request_shows_in_answer_log_metric_and_explain() {
    let rules = RulesFile::new(RULES);
    let server = server_with(&rules);

    let (_, connack) = Client::try_connect(server.address(), &Connect::new("stranger"));
    assert_eq!(connack.reason, NOT_AUTHORIZED);
    assert!(connack.text().contains("may not connect"));
    server.wait_for_log("no rule lets it connect");
    assert_eq!(server.refused("connect"), 1);
    let output = explain(&rules, 1, &["stranger", "CONNECT"]).text();
    assert!(
        output.starts_with("denied: no rule lets stranger connect"),
        "{output}"
    );

    let mut reader = server.store("reader");
    assert_eq!(reader.ask(&["SET", "shared/a", "v"]).text(), DENIED);
    assert_eq!(reader.ask(&["GET", "shared/a"]).text(), "$-1\\r\\n");
    server.wait_for_log("no rule lets it write shared/a");
    assert_eq!(server.refused("write"), 1);
    explain(&rules, 1, &["reader", "SET", "shared/a"]).prints(&["for others: rule 3"]);
    explain(&rules, 0, &["reader", "get", "shared/a"]).prints(&["rule 2", "line 10"]);

    let mut writer = server.store("writer");
    assert_eq!(writer.ask(&["GET", "shared/a"]).text(), DENIED);
    assert_eq!(writer.ask(&["KEYNOTIFY", "shared/a"]).text(), DENIED);
    writer.set("shared/a", "v");
    writer.set("own/writer/a", "v");
    assert_eq!(writer.ask(&["SET", "own/reader/a", "v"]).text(), DENIED);
    assert_eq!(server.refused("read"), 2);

    let puback = writer.client.publish(Publish::new("news/a/b", b"x").qos(1));
    assert_eq!(puback.reason, NOT_AUTHORIZED);
    assert!(puback.text().contains("may not publish"));
    assert_eq!(server.refused("publish"), 1);
    assert_eq!(writer.client.subscribe("news/a", 1), NOT_AUTHORIZED);
    for filter in [
        "#",
        "+/#",
        "new",
        "clients/+/x",
        "clients/writer/x/#",
        "$share/g/#",
    ] {
        let granted = reader.client.subscribe(filter, 1) < 0x80;
        assert!(!granted, "{filter}");
        explain(&rules, 1, &["reader", "SUBSCRIBE", filter]);
    }
    let others = notification_topic("writer", b"shared/a");
    assert!(reader.client.subscribe(&others, 1) >= 0x80);
    let own = notification_topic("reader", b"shared/a");
    for filter in ["news/#", "news/+/x", "clients/reader/#", &own] {
        assert_eq!(reader.client.subscribe(filter, 1), 1, "{filter}");
        explain(&rules, 0, &["reader", "SUBSCRIBE", filter]);
    }
}

/// Regression: each byte of such a key or topic was escaped, and the log escaped the escape again.
#[test]
fn refused_keys_and_topics_are_text_in_the_log() {
    let rules = RulesFile::new(RULES);
    let server = server_with(&rules);
    let mut writer = server.store("writer");
    assert_eq!(writer.ask(&["GET", "Wärme/Halle 4"]).text(), DENIED);
    let line = server.wait_for_log("no rule lets it read");
    assert!(line.contains("read Wärme/Halle 4\""), "{line}");
    assert_eq!(writer.ask(&["SET", "a\nb", "v"]).text(), DENIED);
    let line = server.wait_for_log("no rule lets it write");
    assert!(line.contains("write a\\nb\""), "{line}");
    let refused = Publish::new("Wärme", b"x").qos(1);
    assert_eq!(writer.client.publish(refused).reason, NOT_AUTHORIZED);
    let line = server.wait_for_log("no rule lets it publish");
    assert!(line.contains("publish Wärme\""), "{line}");
}

#[test]
fn own_topic_is_explained_by_what_is_published_there() {
    let rules = RulesFile::new(RULES);
    let notifications = notification_topic("reader", b"shared/a");
    for filter in ["clients/reader/answers", &notifications] {
        let says = "responses and notifications to it are published there";
        explain(&rules, 0, &["reader", "SUBSCRIBE", filter]).prints(&[says]);
    }
}

#[test]
fn will_requires_the_right_to_publish_its_topic() {
    let rules = RulesFile::new(RULES);
    let server = server_with(&rules);
    for (topic, expected) in [("news/end", 0), ("valves/7", NOT_AUTHORIZED)] {
        let connect = Connect::new("writer").will(Publish::new(topic, b"gone"), 0);
        let (_, connack) = Client::try_connect(server.address(), &connect);
        assert_eq!(connack.reason, expected, "{topic}");
    }
}

/// The store must not publish an answer on a topic on which the client itself may not publish.
#[test]
fn response_topic_requires_the_right_to_publish() {
    let rules = RulesFile::new(RULES);
    let server = server_with(&rules);
    let mut writer = server.store("writer");
    for (topic, refused) in [
        ("valves/7", true),
        ("clients/reader/services/answers", true),
        ("news/answers", false),
        ("clients/writer/anything", false),
    ] {
        let mut request = writer.command(&["SET", "own/writer/key", topic]);
        request.response_topic = Some(topic.to_owned());
        let id = writer.client.start(request.publish());
        let puback = writer.client.take_ack(kind::PUBACK, id);
        assert_eq!(puback.reason == NOT_AUTHORIZED, refused, "{topic}");
    }
    assert_eq!(
        writer.get("own/writer/key").as_deref(),
        Some(&b"clients/writer/anything"[..])
    );
    server.wait_for_log("no rule lets it have answers at valves/7");
}

#[test]
fn client_id_with_wildcards_grants_no_foreign_topics() {
    let rules = RulesFile::new(RULES);
    let server = server_with(&rules);
    let mut plus = Store::on(server.connect("+"), "+");
    for filter in ["clients/+/#", "own/+", "#"] {
        assert!(plus.client.subscribe(filter, 1) >= 0x80, "{filter}");
    }
    drop(plus);
    let mut slash = server.connect("a/b");
    assert!(
        slash.subscribe("clients/a/b/#", 1) >= 0x80,
        "these topics may belong to `a`"
    );
    for id in ["#", "*", &"x".repeat(60_000)] {
        let (_, connack) = Client::try_connect(server.address(), &Connect::new(id));
        assert!(connack.reason >= 0x80, "{}", &id[..1]);
    }
}

/// The faults of mosquitto's CVE-2018-12546 and CVE-2021-34434.
#[test]
fn messages_after_a_revocation_are_not_delivered() {
    let rules = RulesFile::new(RULES);
    let server = server_with(&rules);
    let mut reader = server.store("reader");
    assert_eq!(reader.client.subscribe("news/#", 1), 1);
    reader.watch("shared/a");
    let mut writer = server.store("writer");
    writer.set("shared/a", "one");
    assert!(reader.notification().payload.ends_with(b"one\r\n"));
    let away = Connect::resume("absent", 600);
    let absent_may_subscribe = RULES.replace("[\"reader\"]", "[\"reader\", \"absent\"]");
    rules.change(&server, &absent_may_subscribe);
    let mut absent = Client::connect(server.address(), &away);
    assert_eq!(absent.subscribe("news/#", 1), 1);
    absent.disconnect();
    let news = |text: &'static str| Publish::new("news/a", text.as_bytes()).qos(1);
    assert_eq!(writer.client.publish(news("for all")).reason, 0);
    assert_eq!(reader.client.take_publish("news/").payload, b"for all");

    let writer_only = RULES.replacen("[\"reader\"]", "[\"nobody\"]", 1);
    rules.change(&server, &writer_only);
    assert_eq!(writer.client.publish(news("secret")).reason, 0);
    writer.set("shared/a", "two");
    assert_eq!(reader.ask(&["GET", "shared/a"]).text(), DENIED);
    reader.client.expect_nothing();
    // The absent client gets neither the message queued before the revocation nor the one after it.
    let mut absent = Client::connect(server.address(), &away);
    assert!(absent.session_present());
    absent.expect_nothing();

    // A session that is present keeps its subscriptions and watches, so the client does not
    // subscribe again. They continue with the rights.
    rules.change(&server, &absent_may_subscribe);
    assert_eq!(writer.client.publish(news("again")).reason, 0);
    for client in [&mut reader.client, &mut absent] {
        assert_eq!(client.take_publish("news/").payload, b"again");
    }
    assert_eq!(reader.ask(&["GET", "shared/a"]).text(), "$3\\r\\ntwo\\r\\n");
    writer.set("shared/a", "new");
    assert!(reader.notification().payload.ends_with(b"new\r\n"));
}

#[test]
fn client_losing_its_connect_right_is_disconnected() {
    let rules = RulesFile::new(RULES);
    let server = server_with(&rules);
    let (mut reader, mut writer) = (server.connect("reader"), server.connect("writer"));
    rules.change(&server, &RULES.replacen("\"reader\", ", "", 1));
    let end = reader.expect_disconnect(NOT_AUTHORIZED);
    assert!(end.text().contains("no longer"));
    writer.ping();
    let (_, connack) = Client::try_connect(server.address(), &Connect::new("reader"));
    assert_eq!(connack.reason, NOT_AUTHORIZED);
}

#[test]
fn bad_rules_file_is_refused_and_old_rules_remain() {
    let good = RulesFile::new(RULES);
    let server = server_with(&good);
    for (text, says) in [
        ("garbage", "line 1"),
        ("", "holds no rule"),
        (
            "[[rules]]\nprincipals.clientIds = [\"a\"]\n",
            "line 1: this rule allows nothing",
        ),
        ("[[rules]]\nprincipals.clientIDs = [\"a\"]\n", "line 2"),
        (
            "[[rules]]\nprincipals.clientIds = [\"a\"]\nbrokerResources = [{ method = \"Connect\", clientIds = [] }]\n",
            "line 3: this resource has no clientIds",
        ),
    ] {
        let bad = RulesFile::new(text);
        let arguments = ["serve", "--listen", "127.0.0.1:0", "--rules", bad.name()];
        command::run_in(bad.path.parent().unwrap(), &arguments).fails(2, says);
        command::run(&["authz", "check", bad.name()], b"").fails(2, says);
        let before = server.reloads("rules", "refused");
        good.change(&server, text);
        assert!(server.reloads("rules", "refused") > before);
    }
    let missing = [
        "serve",
        "--listen",
        "127.0.0.1:0",
        "--rules",
        "/nonexistent/rules",
    ];
    command::run(&missing, b"").fails(2, "cannot read /nonexistent/rules");
    fs::remove_file(&good.path).unwrap();
    let mut reader = server.store("reader");
    assert_eq!(reader.ask(&["SET", "shared/a", "v"]).text(), DENIED);
    assert_eq!(reader.ask(&["GET", "shared/a"]).text(), "$-1\\r\\n");
    let good = RulesFile::new(RULES);
    let checked = command::run(&["authz", "check", good.name()], b"").code(0);
    checked.prints(&["3 rules"]);
}

/// A redelivered request returns its first answer, which depended on the rules of that time.
#[test]
fn redelivery_after_a_rules_change_keeps_its_answer() {
    let rules = RulesFile::new(RULES);
    let mut server = Server::restartable(&[("rules", rules.name())]);
    let connect = Connect::resume("writer", 600);
    let mut writer = Store::new(Client::connect(server.address(), &connect), "writer");
    let (allowed, denied) = (
        writer.command(&["SET", "shared/a", "v"]),
        writer.command(&["SET", "shared/b", "v"]),
    );
    let first = |writer: &mut Store, request: &statehouse_tests::Request| {
        let id = writer.client.start(request.publish());
        (id, writer.finish(request, id))
    };
    let (allowed_id, allowed_answer) = first(&mut writer, &allowed);
    assert_eq!(allowed_answer.text(), "+OK\\r\\n");
    rules.change(&server, revoked());
    let (denied_id, denied_answer) = first(&mut writer, &denied);
    assert_eq!(denied_answer.text(), DENIED);

    let check = |writer: &mut Store| {
        let (allowed, denied) = (
            writer.redeliver(&allowed, allowed_id, true),
            writer.redeliver(&denied, denied_id, true),
        );
        assert_eq!(
            (allowed.payload(), allowed.version()),
            (allowed_answer.payload(), allowed_answer.version())
        );
        assert_eq!(denied.payload(), denied_answer.payload());
    };
    check(&mut writer);
    drop(writer);
    server.kill();
    // The first rules again, which allow the request that was denied before.
    fs::write(&rules.path, RULES).unwrap();
    server.restart();
    let client = Client::connect(server.address(), &connect);
    assert!(client.session_present());
    let mut writer = Store::on(client, "writer");
    check(&mut writer);
    assert_eq!(server.metric("duplicates_different_total"), 0);
    server.stop();
    let replayed = command::run_in(server.directory(), &["replay", "--policy", "builtin"]);
    replayed.code(0).prints(&["same"]);
}

#[test]
fn rules_with_attributes_are_checked_and_explained() {
    let rules = RulesFile::new(
        "[[rules]]\nprincipals.attributes = [{ building = \"17\" }]\nstateStoreResources = [\n  { method = \"Read\", keyType = \"Binary\", keys = [\"//4=\"] },\n]\n",
    );
    let known = ["c", "GET", "a", "--attribute", "building=17"];
    explain(&rules, 1, &known).prints(&["line 4: `//4=`", "no rule lets it connect"]);
    let checked = command::run(&["authz", "check", rules.name()], b"").code(0);
    checked.prints(&["no client can connect"]);
    command::run(
        &["authz", "explain", "c", "GET", "--rules", rules.name()],
        b"",
    )
    .fails(2, "name the key");
}

/// A watch of a prefix reports the keys that its client may read at the time of the change.
#[test]
fn prefix_watch_reports_only_readable_keys() {
    let rules = RulesFile::new(RULES);
    let server = server_with(&rules);
    let (mut reader, mut writer) = (server.store("reader"), server.store("writer"));
    reader.watch_prefix("");
    let value = |store: &mut Store| {
        let notification = store.notification();
        String::from_utf8_lossy(&notification.payload).into_owned()
    };
    writer.set("own/writer/a", "hidden from the reader");
    writer.set("shared/a", "one");
    assert!(value(&mut reader).ends_with("one\r\n"));

    let writer_only = RULES.replacen("[\"reader\"]", "[\"nobody\"]", 1);
    rules.change(&server, &writer_only);
    writer.set("shared/a", "two");
    assert_eq!(
        reader.ask(&["SET", "own/reader/a", "own"]).text(),
        "+OK\\r\\n"
    );
    assert!(value(&mut reader).ends_with("own\r\n"));
    reader.client.expect_nothing();

    // The watch continues, and reports again what it may.
    rules.change(&server, RULES);
    writer.set("shared/a", "three");
    assert!(value(&mut reader).ends_with("three\r\n"));
}
