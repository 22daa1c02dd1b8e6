//! Traces of requests. A collector that decodes OTLP with the official definitions receives them.

use std::{
    collections::BTreeMap,
    fs,
    sync::Arc,
    time::{Duration, Instant, SystemTime},
};

use opentelemetry_proto::tonic::trace::v1::Span;
use rustls::{ServerConfig, pki_types::PrivatePkcs8KeyDer};
use statehouse_tests::{
    Answer, Client, Cluster, Connect, Mosquitto, Request, Server, Store, assert_contains,
    command::finish, store::hex, wait::eventually, wait::until,
};

use crate::collector::{Collector, Received, SERVER, pairs, silent};

const TRACE: &str = "4bf92f3577b34da6a3ce929d0e0e4736";
const PARENT: &str = "00f067aa0ba902b7";

/// The context of a request of a sampled trace.
fn context() -> String {
    format!("00-{TRACE}-{PARENT}-01")
}

/// A SET with these values of the user property.
fn set(store: &mut Store, value: &str, contexts: &[&str]) -> Request {
    let request = store.command(&["SET", "secret-key", value]);
    let with = |request: Request, it: &&str| request.with("traceparent", it);
    contexts.iter().fold(request, with)
}

/// The value of the property in an answer.
fn traceparent(answer: &Answer) -> Option<String> {
    answer.publish.user("traceparent").map(str::to_owned)
}

fn id(bytes: &[u8]) -> String {
    hex(bytes).to_lowercase()
}

/// The spans of a request, without the span of the whole.
fn stages<'a>(spans: &'a [Span], request: &Span) -> Vec<&'a Span> {
    let below = |it: &&Span| it.parent_span_id == request.span_id;
    spans.iter().filter(below).collect()
}

fn attributes(span: &Span) -> BTreeMap<String, String> {
    pairs(&span.attributes).into_iter().collect()
}

/// The requests among spans, in the order of their beginnings.
fn requests(spans: &[Span]) -> Vec<Span> {
    let requests = spans.iter().filter(|it| it.kind == SERVER);
    let mut requests: Vec<Span> = requests.cloned().collect();
    requests.sort_by_key(|it| it.start_time_unix_nano);
    requests
}

/// Asserts that no message holds a key or a value.
fn assert_silent_about_contents(received: &[Received]) {
    for it in received {
        let text = String::from_utf8_lossy(&it.body);
        assert!(!text.contains("secret"), "{text}");
    }
}

#[test]
fn a_trace_context_yields_spans_and_reaches_the_watcher() {
    let collector = Collector::start(None);
    let directory = tempfile::tempdir().unwrap();
    let headers = directory.path().join("headers");
    fs::write(&headers, "authorization: Bearer token\nx-path: a%20b\n").unwrap();
    let server = Server::with(
        "traces_sample = 0.0\n",
        &[
            "--traces",
            &format!("http://{}", collector.address),
            "--traces-headers",
            headers.to_str().unwrap(),
        ],
    );
    let began = SystemTime::now();
    let mut watcher = server.store("watcher");
    watcher.watch("secret-key");
    let mut writer = server.store("writer");
    let request = set(&mut writer, "secret-value", &[&context()]);
    let answer = writer.call(&request);
    let named = traceparent(&answer).unwrap();
    let notification = watcher.notification();
    assert_eq!(notification.user("traceparent"), Some(&*named));
    let untraced = writer.ask(&["GET", "secret-key"]);
    assert_eq!(traceparent(&untraced), None);

    // The spans of a notification may arrive with a later message.
    let spans = eventually("the spans of request and notification", || {
        let spans = collector.spans();
        let is_whole = spans.iter().any(|it| it.name == "notify") && spans.len() > 1;
        is_whole.then_some(spans)
    });
    let [request] = &requests(&spans)[..] else {
        panic!("{spans:?}")
    };
    assert_eq!(id(&request.trace_id), TRACE);
    assert_eq!(id(&request.parent_span_id), PARENT);
    assert_eq!(named, format!("00-{TRACE}-{}-01", id(&request.span_id)));
    assert_eq!(request.name, "SET");
    let about = attributes(request);
    assert_eq!(about["statehouse.command"], "SET");
    assert_eq!(about["statehouse.outcome"], "ok");
    assert_eq!(about["statehouse.client"], "writer");
    assert_eq!(about["statehouse.notifications"], "1");
    assert!(
        about["statehouse.policy"].starts_with("standard"),
        "{about:?}"
    );
    let stages = stages(&spans, request);
    let names: Vec<&str> = stages.iter().map(|it| &*it.name).collect();
    assert_eq!(
        names,
        ["receive", "policy", "append", "flush", "respond", "notify"]
    );
    assert_eq!(attributes(stages[5])["statehouse.client"], "watcher");
    let nanos = |it: SystemTime| {
        it.duration_since(SystemTime::UNIX_EPOCH)
            .unwrap()
            .as_nanos()
    };
    let bounds = nanos(began)..=nanos(SystemTime::now());
    for span in &spans {
        let times = [span.start_time_unix_nano, span.end_time_unix_nano];
        assert!(times[0] <= times[1] && times.iter().all(|it| bounds.contains(&u128::from(*it))));
        assert!(span.start_time_unix_nano >= request.start_time_unix_nano);
    }
    let received = collector.received();
    assert_silent_about_contents(&received);
    let head = received[0].head.to_lowercase();
    assert!(head.starts_with("post /v1/traces http/1.1\r\n"), "{head}");
    let agent = concat!("user-agent: statehouse/", env!("CARGO_PKG_VERSION"));
    for line in ["authorization: bearer token", "x-path: a%20b", agent] {
        assert!(head.contains(&format!("\r\n{line}\r\n")), "{line}: {head}");
    }
    assert_eq!(head.matches("user-agent").count(), 1, "{head}");
    let resource: BTreeMap<String, String> = received[0].resource().into_iter().collect();
    assert_eq!(resource["service.name"], "statehouse");
    assert!(!resource["service.instance.id"].is_empty());
    let sent = "trace_spans_total{result=\"sent\"}";
    until("the figures of this message", || {
        server.metric(sent) == spans.len() as u64
    });
}

#[test]
fn hostile_contexts_are_ignored_and_duplicates_keep_their_name() {
    let collector = Collector::start(None);
    let url = format!("http://{}", collector.address);
    let server = Server::with("", &["--traces", &url, "--traces-sample", "0"]);
    let connect = Connect::resume("writer", 60);
    let mut writer = Store::new(Client::connect(server.address(), &connect), "writer");
    let long = format!("{}-{}", context(), "0".repeat(60_000));
    let upper = context().to_uppercase();
    for contexts in [
        &[&*long][..],
        &[&upper],
        &[""],
        &["secret"],
        &[&upper, &context()],
    ] {
        let request = set(&mut writer, "v", contexts);
        assert_eq!(traceparent(&writer.call(&request)), None, "{contexts:.80?}");
    }
    // The sender does not record this trace, so neither does the store.
    let unsampled = context().replace("-01", "-00");
    let request = set(&mut writer, "v", &[&unsampled]);
    let answered = traceparent(&writer.call(&request)).unwrap();
    assert!(answered.starts_with(&unsampled[..36]) && answered.ends_with("-00"));
    assert_ne!(answered, unsampled);

    let request = set(&mut writer, "v", &[&context(), "second"]);
    let packet_id = writer.client.start(request.publish());
    let first = writer.finish(&request, packet_id);
    writer.client.abort();
    let mut writer = Store::on(Client::connect(server.address(), &connect), "writer");
    let again = writer.redeliver(&request, packet_id, true);
    assert_eq!(first.payload(), again.payload());
    assert_eq!(first.publish.properties, again.publish.properties);

    let spans = collector.requests(2);
    let requests = requests(&spans);
    let outcomes = requests
        .iter()
        .map(|it| attributes(it)["statehouse.outcome"].clone());
    assert_eq!(outcomes.collect::<Vec<_>>(), ["ok", "duplicate"]);
    assert_ne!(requests[0].span_id, requests[1].span_id);
    assert_eq!(requests[1].links[0].span_id, requests[0].span_id);
    assert_eq!(
        traceparent(&again).unwrap()[36..52],
        id(&requests[0].span_id)
    );
}

#[test]
fn a_collector_that_fails_delays_nothing_and_is_logged_once() {
    let collector = Collector::start(None);
    collector.answer(401);
    for (address, refused) in [(collector.address, true), (silent(), false)] {
        let url = format!("http://{address}");
        let server = Server::with(
            "durability = \"interval\"\n",
            &["--traces", &url, "--traces-sample", "1"],
        );
        let mut store = server.store("writer");
        let began = Instant::now();
        let slowest = (0..300).map(|at| {
            let sent = Instant::now();
            store.set(format!("key-{at}"), "v");
            // Several messages to the collector.
            std::thread::sleep(Duration::from_millis(2));
            sent.elapsed()
        });
        let slowest = slowest.max().unwrap();
        assert!(
            slowest < Duration::from_secs(2),
            "{slowest:?} of {:?}",
            began.elapsed()
        );
        if !refused {
            continue;
        }
        server.wait_for_log("did not take");
        let lines = server.stderr();
        let warned: Vec<_> = lines
            .iter()
            .filter(|it| it.contains("did not take"))
            .collect();
        assert!(warned.len() == 1 && warned[0].contains("401"), "{warned:?}");
        collector.answer(200);
        store.set("key", "v");
        server.wait_for_log("takes spans again");
        let page = server.metrics_page();
        assert!(!page.contains("statehouse_trace_spans_total{result=\"refused\"} 0\n"));
    }
}

#[test]
fn spans_that_a_collector_rejects_are_logged_with_its_reason() {
    let collector = Collector::start(None);
    collector.reject(2);
    let url = format!("http://{}", collector.address);
    let arguments = ["--traces", &url, "--traces-sample", "1"];
    let server = Server::with("durability = \"interval\"\n", &arguments);
    server.store("writer").set("key", "v");
    let line = server.wait_for_log("it rejects them");
    assert_contains!(line, "did not take 2 spans", "over the\\nquota");
}

/// A collector over TLS, and its certificate as PEM.
fn collector_over_tls() -> (Collector, String) {
    let certified = rcgen::generate_simple_self_signed(["localhost".to_owned()]).unwrap();
    let key = PrivatePkcs8KeyDer::from(certified.signing_key.serialize_der());
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config = ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_no_client_auth()
        .with_single_cert(vec![certified.cert.der().clone()], key.into())
        .unwrap();
    let collector = Collector::start(Some(Arc::new(config)));
    (collector, certified.cert.pem())
}

/// Regression: a store verified collectors by the certificates of its start.
#[test]
fn replaced_certificates_of_a_collector_need_no_restart() {
    let ((collector, present), (_, former)) = (collector_over_tls(), collector_over_tls());
    let directory = tempfile::tempdir().unwrap();
    let ca = directory.path().join("ca.pem");
    fs::write(&ca, former).unwrap();
    let url = format!("https://localhost:{}", collector.address.port());
    let ca_shown = ca.to_str().unwrap();
    let arguments = [
        "--traces",
        &url,
        "--traces-sample",
        "1",
        "--traces-ca",
        ca_shown,
    ];
    let server = Server::with("", &arguments);
    let mut store = server.store("writer");
    store.set("key", "value");
    server.wait_for_log("did not take");
    fs::write(&ca, present).unwrap();
    store.set("key", "value");
    server.wait_for_log("takes spans again");
}

#[test]
fn traces_go_over_tls_and_the_command_line_names_its_span() {
    let (collector, certificate) = collector_over_tls();
    let directory = tempfile::tempdir().unwrap();
    let ca = directory.path().join("ca.pem");
    fs::write(&ca, certificate).unwrap();
    let url = format!("https://localhost:{}/otlp", collector.address.port());
    let arguments = [
        "--traces",
        &url,
        "--traces-sample",
        "0",
        "--traces-ca",
        ca.to_str().unwrap(),
    ];
    let mut server = Server::with("", &arguments);
    let port = server.port().to_string();
    let run = |arguments: &[&str], inherited: &str| {
        let mut command = statehouse_tests::command(arguments);
        command
            .args(["--port", &port])
            .env("TRACEPARENT", inherited);
        finish(command, b"")
    };
    run(&["set", "key", "value"], &context()).code(0);
    run(&["get", "key"], "nonsense").code(0);
    run(&["get", "key", "--traceparent", &context()], "").code(0);
    run(&["get", "key", "--traceparent", "nonsense"], "").code(2);
    // A store that stops sends the last spans.
    server.stop();
    let spans = requests(&collector.requests(2));
    let names: Vec<&str> = spans.iter().map(|it| &*it.name).collect();
    assert_eq!(names, ["SET", "GET"]);
    assert!(spans.iter().all(|it| id(&it.parent_span_id) == PARENT));
    let head = collector.received().remove(0).head;
    assert!(head.starts_with("POST /otlp HTTP/1.1\r\n"), "{head}");
}

#[test]
fn spans_are_sent_behind_a_broker_and_by_a_leader() {
    let collector = Collector::start(None);
    let url = format!("http://{}", collector.address);
    let settings = [
        ("traces", &*url),
        ("traces_sample", "0"),
        ("presence", "off"),
    ];
    let broker = Mosquitto::start();
    let attached = Server::attached(&broker.url(), broker.address(), &settings);
    let cluster = Cluster::with(1, 1, &settings[..2]);
    for mut writer in [attached.store("writer"), cluster.store(0, "writer")] {
        let request = set(&mut writer, "v", &[&context()]);
        assert!(traceparent(&writer.call(&request)).is_some());
    }
    let spans = collector.requests(2);
    for request in requests(&spans) {
        let names = stages(&spans, &request)
            .into_iter()
            .map(|it| it.name.clone());
        let names: Vec<String> = names.collect();
        assert_eq!(names, ["receive", "policy", "append", "flush", "respond"]);
    }
    let received = collector.received();
    let mut resources = received.iter().flat_map(Received::resource);
    assert!(resources.any(|(name, value)| name == "service.instance.id" && value == "gw1"));
}
