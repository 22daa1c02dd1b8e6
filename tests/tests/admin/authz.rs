//! Tests `statehouse authz explain` on a running store. Its answer must match the decision that the
//! store makes for a real client.

use std::fs;

use serde_json::Value as Json;
use statehouse_tests::{
    Admin, Client, Connect, Publish, Ran, Server, assert_contains,
    command::add_user,
    run_in,
    store::{NOTIFICATION_PREFIX, REQUEST_TOPIC},
};

use statehouse_tests::wait::until;

const RULES: &str = r#"
[[rules]]
principals.clientIds = ["*"]
brokerResources = [{ method = "Connect" }]

[[rules]]
principals.usernames = ["operator"]
stateStoreResources = [{ method = "ReadWrite", keyType = "String", keys = ["speed limit"] }]
"#;

const QUOTA_EXCEEDED: u8 = 0x97;

fn as_user(id: &str, user: &str) -> Connect {
    Connect::new(id).login(user, "secret")
}

/// Starts a server in a directory with these files, users and settings. Settings name files of this
/// directory.
fn serve(files: &[(&str, &str)], users: &[&str], settings: &str) -> Server {
    let directory = tempfile::tempdir().unwrap();
    for (name, text) in files {
        fs::write(directory.path().join(name), text).unwrap();
    }
    for name in users {
        add_user(directory.path().join("users"), name, "secret").code(0);
    }
    fs::write(directory.path().join("statehouse.toml"), settings).unwrap();
    let all = [
        "serve",
        "--listen",
        "127.0.0.1:0",
        "--config",
        "statehouse.toml",
    ];
    Server::spawn(statehouse_tests::command(&all), directory)
}

fn explain(server: &Server, arguments: &[&str]) -> Ran {
    let all = [&["authz", "explain"], arguments].concat();
    server.run(&all)
}

#[test]
fn explain_uses_active_rules_and_the_connected_user() {
    let server = serve(
        &[("rules.toml", RULES)],
        &["operator", "guest"],
        "users = \"users\"\nrules = \"rules.toml\"\n",
    );
    let question = ["press-4", "SET", "speed limit"];
    let says = |code: i32, arguments: &[&str]| {
        explain(&server, &[&question, arguments].concat())
            .code(code)
            .text()
    };
    let output = says(1, &[]);
    assert!(
        output.starts_with("denied: no rule lets press-4 write"),
        "{output}"
    );
    assert_contains!(
        output,
        "for others: rule 2 (rules.toml, line 8: `speed limit`)"
    );
    assert_contains!(output, "press-4 is not connected; asked about as no user");
    let output = says(0, &["--user", "operator"]);
    assert!(output.starts_with("allowed: rule 2"), "{output}");

    let client = Client::connect(server.address(), &as_user("press-4", "operator"));
    let output = says(0, &[]);
    assert_contains!(
        output,
        "press-4 is connected; asked about as the user operator"
    );
    says(1, &["--user", "guest"]);
    let json: Json = serde_json::from_str(&says(0, &["--json"])).unwrap();
    assert_eq!(json["user"], "operator");
    assert_eq!(json["explanation"]["why"]["rule"]["line"], 8);
    drop(client);

    let fewer = RULES.replace("speed limit", "something else");
    server.change_file(&server.directory().join("rules.toml"), &fewer);
    explain(&server, &[&question[..], &["--user", "operator"]].concat()).code(1);
    let page = server.metrics_page();
    assert!(
        !page.contains("what=\"write\""),
        "explain must not count as a refusal: {page}"
    );
}

/// The limit that `authz explain` names, if it names one.
fn limit(server: &Server, question: &[&str]) -> Option<String> {
    let ran = explain(server, question);
    let text = ran.text();
    let limit = text
        .lines()
        .find_map(|line| line.strip_prefix("denied at present: "));
    assert_eq!(ran.code, Some(i32::from(limit.is_some())), "{text}");
    limit.map(str::to_owned)
}

/// Regression: all of these were allowed.
#[test]
fn explain_names_limits_of_topics_and_client_ids() {
    let server = Server::start();
    let deep = "a/".repeat(64);
    for command in ["PUBLISH", "SUBSCRIBE"] {
        let levels = limit(&server, &["press-4", command, &deep]);
        assert_eq!(levels.as_deref(), Some("it has more than 64 levels"));
        assert_eq!(limit(&server, &["press-4", command, &deep[1..127]]), None);
    }
    let shared = format!("$share/group/{}", &deep[..127]);
    assert_eq!(limit(&server, &["press-4", "SUBSCRIBE", &shared]), None);
    let long = limit(&server, &[&"x".repeat(1025), "CONNECT"]);
    let bytes = "the client id has more than 1024 bytes";
    assert_eq!(long.as_deref(), Some(bytes));
}

/// Regression: orders need no right to publish, and were denied; similar topics were allowed.
#[test]
fn explain_does_not_judge_orders() {
    let server = Server::start();
    for topic in ["order", "chunk/00/1"] {
        let topic = format!("statehouse/v1/admin/policy/{topic}");
        explain(&server, &["press-4", "PUBLISH", &topic]).fails(2, "the signature decides");
    }
    let beside = "statehouse/v1/admin/policy/order/x";
    explain(&server, &["press-4", "PUBLISH", beside]).code(1);
    // The admin API checks what is asked, like the command.
    let ask = |on: &str| {
        let body = format!(r#"{{"client": "c", "command": "SUBSCRIBE", "on": "{on}"}}"#);
        Admin::of(&server)
            .ask("POST", "/v1/authz", body.as_bytes())
            .0
    };
    assert_eq!(ask("a%2F%23"), 200);
    for wrong in ["$share%2F%2Fa", "$share%2Fg%2F", "a%2F%23%2Fb"] {
        assert_eq!(ask(wrong), 400, "{wrong}");
    }
}

#[test]
fn explain_names_an_exhausted_client_quota() {
    let server = Server::with_config("max_client_keys = 1\n");
    let mut store = server.store("press-4");
    store.set("there", "value");
    server.store("press-5").set("other", "value");
    let full = Some("it owns max_client_keys, which is 1");
    for (client, key, expected) in [
        ("press-4", "new", full),
        ("press-4", "there", None),
        ("press-4", "other", full),
        ("press-6", "new", None),
        ("press-6", "there", None),
    ] {
        assert_eq!(limit(&server, &[client, "SET", key]).as_deref(), expected);
        assert_eq!(limit(&server, &[client, "DEL", key]), None);
    }
    assert!(store.ask(&["SET", "other", "v"]).text().contains("quota"));
}

/// The store refuses a request if and only if `authz explain` names a limit for it.
#[test]
fn explain_names_the_limit_that_refuses_a_client() {
    let server = Server::with_config(
        "max_keys = 1\nmax_client_watches = 1\nmax_client_subscriptions = 3\nmax_sessions = 1\n",
    );
    let mut store = server.store("press-4");
    store.set("there", "value");
    store.watch("there");
    let limit = |question: &[&str]| limit(&server, question);
    let full = "the store holds max_keys, which is 1";
    assert_eq!(limit(&["press-4", "SET", "new"]).as_deref(), Some(full));
    assert!(store.ask(&["SET", "new", "v"]).text().contains("quota"));
    assert_eq!(limit(&["press-4", "SET", "there"]), None);
    assert_eq!(limit(&["press-4", "DEL", "there"]), None);

    let watches = "it watches max_client_watches, which is 1";
    assert_eq!(
        limit(&["press-4", "KEYNOTIFY", "new"]).as_deref(),
        Some(watches)
    );
    assert!(store.ask(&["KEYNOTIFY", "new"]).text().contains("quota"));
    assert_eq!(limit(&["press-4", "KEYNOTIFY", "there"]), None);
    assert_eq!(limit(&["press-5", "KEYNOTIFY", "new"]), None);

    // The client has one subscription already, to its response topics.
    let filters = ["a", "b", "c", "d"];
    let taken = filters.map(|filter| store.client.subscribe(filter, 1));
    assert_eq!(taken.last(), Some(&QUOTA_EXCEEDED), "{taken:x?}");
    let subscriptions = "it has max_client_subscriptions, which is 3";
    assert_eq!(
        limit(&["press-4", "SUBSCRIBE", "new"]).as_deref(),
        Some(subscriptions)
    );
    assert_eq!(store.client.subscribe("new", 1), QUOTA_EXCEEDED);
    assert_eq!(limit(&["press-4", "SUBSCRIBE", "a"]), None);

    let sessions = limit(&["press-5", "CONNECT"]).unwrap();
    assert!(
        sessions.contains("max_sessions is 1, 1 are taken, and its owner")
            && sessions.ends_with(" may have 16"),
        "{sessions}"
    );
    let (_, ack) = Client::try_connect(server.address(), &Connect::new("press-5"));
    assert_eq!(ack.reason, QUOTA_EXCEEDED);
    assert_eq!(limit(&["press-4", "CONNECT"]), None);
}

/// Regression: absent sessions that the broker evicts for a new one were a reason to deny it.
#[test]
fn explain_allows_a_session_in_place_of_an_absent_one() {
    let server = Server::with_config("max_sessions = 2\n");
    for client in ["press-4", "press-5"] {
        Client::connect(server.address(), &Connect::resume(client, 600)).disconnect();
    }
    let question = ["press-6", "CONNECT"];
    until("the broker has noticed that one is absent", || {
        limit(&server, &question).is_none()
    });
    // Asking has evicted neither of them.
    for client in ["press-4", "press-5"] {
        let again = Client::connect(server.address(), &Connect::resume(client, 600));
        assert!(again.session_present(), "{client}");
        again.disconnect();
    }
    until("one is absent again", || {
        limit(&server, &question).is_none()
    });
    let _connected = server.connect("press-6");
}

/// Regression: a shared subscription beyond the limit was allowed.
#[test]
fn explain_names_the_limit_of_shared_subscriptions() {
    let server = Server::start();
    let mut store = server.store("press-4");
    for number in 0..64 {
        let filter = format!("$share/g/{number}");
        assert_eq!(store.client.subscribe(&filter, 1), 1, "{filter}");
    }
    let limit = |filter: &str| limit(&server, &["press-4", "SUBSCRIBE", filter]);
    let full = "the session has as many shared subscriptions as it may have";
    assert_eq!(limit("$share/g/64").as_deref(), Some(full));
    assert_eq!(store.client.subscribe("$share/g/64", 1), QUOTA_EXCEEDED);
    for allowed in ["$share/g/0", "plain"] {
        assert_eq!(limit(allowed), None, "{allowed}");
    }
}

/// Regression: a client with a session was allowed, although the store reads no CONNECT then.
#[test]
fn explain_denies_every_client_at_max_connections() {
    let server = Server::with_config("max_connections = 1\n");
    let _client = server.connect("press-4");
    let full = Some("there are max_connections, which is 1");
    for client in ["press-4", "press-5"] {
        assert_eq!(limit(&server, &[client, "CONNECT"]).as_deref(), full);
    }
}

/// One address may not have more than 30 of 40 sessions, although ten are free.
#[test]
fn session_share_is_named_before_it_refuses() {
    let server = Server::with_config("max_sessions = 40\n");
    let ask = || explain(&server, &["one-more", "CONNECT"]).code(0).text();
    let connect = |n: usize| server.connect(&format!("client-{n}"));
    let mut clients: Vec<_> = (0..20).map(connect).collect();
    assert!(!ask().contains("max_sessions"), "{}", ask());
    clients.extend((20..30).map(connect));
    let output = ask();
    assert_contains!(output, "may have 27 of max_sessions, which is 40");
    let (_, ack) = Client::try_connect(server.address(), &Connect::new("one-more"));
    assert_eq!(ack.reason, QUOTA_EXCEEDED);
    clients.truncate(20);
    until("a further session is allowed", || {
        !ask().contains("max_sessions")
    });
    server.connect("one-more");
}

#[test]
fn explain_without_rules_says_so() {
    let server = Server::start();
    let output = explain(&server, &["press-4", "GET", "speed"])
        .code(0)
        .text();
    assert!(
        output.starts_with("allowed: the store has no rules"),
        "{output}"
    );
    explain(&server, &["press-4", "SUBSCRIBE", "#"]).code(0);

    let server = serve(&[], &["operator"], "users = \"users\"\n");
    let output = explain(&server, &["press-4", "SUBSCRIBE", "#"])
        .code(1)
        .text();
    assert!(
        output.starts_with("denied: press-4 may not subscribe to #"),
        "{output}"
    );
    let mut client = Client::connect(server.address(), &as_user("press-4", "operator"));
    assert_eq!(client.subscribe("#", 1), 0x87);
    explain(&server, &["press-4", "SUBSCRIBE", "clients/press-4/#"]).code(0);
}

/// No rule decides about these: the broker assigns an id to a client without one, and the other one
/// is that of operators.
#[test]
fn explain_knows_client_ids_that_no_client_has() {
    let server = Server::start();
    fs::write(server.directory().join("rules.toml"), RULES).unwrap();
    for question in [
        &["CONNECT"][..],
        &["SET", "k"],
        &["CONNECT", "--rules", "rules.toml"],
    ] {
        explain(&server, &[&[""], question].concat()).fails(2, "gets one from the broker");
        let output = explain(&server, &[&["$operator"], question].concat());
        let output = output.code(1).text();
        assert!(output.contains("that of operators"), "{output}");
    }
}

#[test]
fn explain_knows_topics_of_the_store() {
    let server = Server::start();
    let rules = server.directory().join("rules.toml");
    fs::write(&rules, format!("{RULES}\n[[rules]]\nprincipals.clientIds = [\"*\"]\nbrokerResources = [{{ method = \"Publish\", topics = [\"#\"] }}]\n")).unwrap();
    let mut client = server.connect("press-4");
    let notifications = format!("{NOTIFICATION_PREFIX}/00/command/notify/00");
    let only_store = "only the state store publishes there\n";
    for (topic, reason) in [
        (&notifications[..], only_store),
        ("statehouse/v1/admin/policy/status", only_store),
        ("$SYS/broker/uptime", "reserved for the broker\n"),
    ] {
        assert_eq!(client.publish(Publish::new(topic, "x").qos(1)).reason, 0x87);
        for more in [&[][..], &["--rules", "rules.toml"]] {
            let question = [&["press-4", "PUBLISH", topic], more].concat();
            let output = explain(&server, &question).code(1).text();
            assert!(
                output.starts_with("denied: ") && output.ends_with(reason),
                "{output}"
            );
        }
    }
    for (question, reason) in [
        (["PUBLISH", "a/+"], "the topic name holds a wildcard"),
        (
            ["SUBSCRIBE", "a#"],
            "a wildcard does not occupy a whole level",
        ),
        (["SUBSCRIBE", "$share//a"], "has no name"),
        (["PUBLISH", REQUEST_TOPIC], "ask about a key"),
    ] {
        let question = [&["press-4"][..], &question].concat();
        explain(&server, &question).fails(2, reason);
    }
}

#[test]
fn explain_without_a_store_or_rules_file_fails() {
    let directory = tempfile::tempdir().unwrap();
    let all = ["authz", "explain", "press-4", "GET", "speed"];
    run_in(directory.path(), &all).fails(3, "no store runs");
}
