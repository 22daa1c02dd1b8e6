//! Duplicate requests (protocol, section 9). A redelivered request must have one effect and return
//! its first answer, even over `kill -9`.

use statehouse_tests::{Answer, Hlc, Request, Server, Store, assert_contains, policies, store};

use crate::resumed::{begin, resume};

/// The interruption between a request and its redelivery.
#[derive(Clone, Copy, Debug)]
enum Break {
    /// None: the client redelivers on the same connection.
    None,
    /// The connection is closed.
    Connection,
    /// The process is killed.
    Kill,
    /// The process is killed twice, the second time before anything was sent.
    KillTwice,
}

/// Interrupts the connection of `store`, and returns the same client with its session.
fn after(server: &mut Server, between: Break, store: Store) -> Store {
    let id = store.id.clone();
    match between {
        Break::None => return store,
        Break::Connection => store.client.abort(),
        Break::Kill => server.kill_and_restart(),
        Break::KillTwice => {
            server.kill_and_restart();
            server.kill_and_restart();
        }
    }
    resume(server, &id)
}

/// A request, its first answer, the commands of another client before it and before its redelivery,
/// and the value of the key at the end.
struct Case {
    before: Option<&'static [&'static str]>,
    request: &'static [&'static str],
    answer: &'static [u8],
    between: Option<&'static [&'static str]>,
    at_the_end: Option<&'static [u8]>,
}

#[rustfmt::skip]
const CASES: &[Case] = &[
    Case { before: None, request: &["SET", "k", "1"], answer: b"+OK\r\n", between: Some(&["SET", "k", "2"]), at_the_end: Some(b"2") },
    Case { before: None, request: &["SET", "k", "1"], answer: b"+OK\r\n", between: None, at_the_end: Some(b"1") },
    Case { before: None, request: &["SET", "k", "1"], answer: b"+OK\r\n", between: Some(&["DEL", "k"]), at_the_end: None },
    Case { before: None, request: &["SET", "k", "1", "PX", "600000"], answer: b"+OK\r\n", between: Some(&["SET", "k", "1"]), at_the_end: Some(b"1") },
    Case { before: None, request: &["SET", "k", "1", "NX"], answer: b"+OK\r\n", between: None, at_the_end: Some(b"1") },
    Case { before: None, request: &["SET", "k", "1", "NX"], answer: b"+OK\r\n", between: Some(&["SET", "k", "2"]), at_the_end: Some(b"2") },
    Case { before: None, request: &["SET", "k", "1", "NX"], answer: b"+OK\r\n", between: Some(&["DEL", "k"]), at_the_end: None },
    Case { before: Some(&["SET", "k", "0"]), request: &["SET", "k", "1", "NX"], answer: b":-1\r\n", between: Some(&["DEL", "k"]), at_the_end: None },
    Case { before: Some(&["SET", "k", "0"]), request: &["SET", "k", "1", "NEX"], answer: b":-1\r\n", between: Some(&["SET", "k", "1"]), at_the_end: Some(b"1") },
    Case { before: Some(&["SET", "k", "1"]), request: &["SET", "k", "1", "NEX"], answer: b"+OK\r\n", between: Some(&["SET", "k", "2"]), at_the_end: Some(b"2") },
    Case { before: Some(&["SET", "k", "0"]), request: &["DEL", "k"], answer: b":1\r\n", between: None, at_the_end: None },
    Case { before: Some(&["SET", "k", "0"]), request: &["DEL", "k"], answer: b":1\r\n", between: Some(&["SET", "k", "2"]), at_the_end: Some(b"2") },
    Case { before: None, request: &["DEL", "k"], answer: b":0\r\n", between: Some(&["SET", "k", "2"]), at_the_end: Some(b"2") },
    Case { before: Some(&["SET", "k", "1"]), request: &["VDEL", "k", "1"], answer: b":1\r\n", between: None, at_the_end: None },
    Case { before: Some(&["SET", "k", "1"]), request: &["VDEL", "k", "1"], answer: b":1\r\n", between: Some(&["SET", "k", "1"]), at_the_end: Some(b"1") },
    Case { before: Some(&["SET", "k", "0"]), request: &["VDEL", "k", "1"], answer: b":-1\r\n", between: Some(&["SET", "k", "1"]), at_the_end: Some(b"1") },
    Case { before: None, request: &["VDEL", "k", "1"], answer: b":0\r\n", between: Some(&["SET", "k", "1"]), at_the_end: Some(b"1") },
];

/// Runs every case on a key of its own: all requests, the interruption, the other client's
/// commands, then all redeliveries.
fn one_effect_and_one_answer(between: Break, dup: bool) {
    let mut server = Server::restartable(&[]);
    let mut store = begin(&server, "client");
    let mut other = server.store("other");
    let on_key = |command: &[&'static str], n: usize| -> Vec<String> {
        let mut arguments: Vec<String> = command.iter().map(|&word| word.into()).collect();
        arguments[1] = format!("key {n}");
        arguments
    };
    let mut sent = Vec::new();
    for (n, case) in CASES.iter().enumerate() {
        if let Some(before) = case.before {
            other.ask(&on_key(before, n));
        }
        let request = store.command(&on_key(case.request, n));
        let (packet_id, answer) = store.exchange(&request);
        assert_eq!(answer.payload(), case.answer, "{:?}", case.request);
        sent.push((request, packet_id, answer));
    }
    let mut store = after(&mut server, between, store);
    let mut other = server.store("other");
    let mut states = Vec::new();
    for (n, case) in CASES.iter().enumerate() {
        if let Some(between) = case.between {
            other.ask(&on_key(between, n));
        }
        other.watch(format!("key {n}"));
        states.push(other.ask(&["GET".into(), format!("key {n}")]));
    }
    // Redelivers twice, since a remembered request can be redelivered more than once.
    for _ in 0..2 {
        for (case, (request, packet_id, first)) in CASES.iter().zip(&sent) {
            let answer = store.redeliver(request, *packet_id, dup);
            let what = format!("{:?} then {:?}", case.request, case.between);
            assert_eq!(answer.text(), first.text(), "{what}");
            assert_eq!(answer.version(), first.version(), "{what}");
        }
    }
    for (n, (case, state)) in CASES.iter().zip(&states).enumerate() {
        let key = format!("key {n}");
        assert_eq!(
            other.get(&key).as_deref(),
            case.at_the_end,
            "{:?}",
            case.request
        );
        let now = other.ask(&["GET", &key]);
        assert_eq!(now.version(), state.version(), "{:?}", case.request);
    }
    // The redeliveries notified no watcher.
    other.expect_nothing();
    store.expect_nothing();
}

#[test]
fn redelivery_on_the_same_connection_has_one_effect() {
    one_effect_and_one_answer(Break::None, true);
}

#[test]
fn redelivery_on_the_next_connection_has_one_effect() {
    one_effect_and_one_answer(Break::Connection, true);
    one_effect_and_one_answer(Break::Connection, false);
}

#[test]
fn redelivery_after_a_kill_has_one_effect() {
    one_effect_and_one_answer(Break::Kill, true);
    one_effect_and_one_answer(Break::Kill, false);
}

#[test]
fn redelivery_after_two_kills_has_one_effect() {
    one_effect_and_one_answer(Break::KillTwice, true);
    one_effect_and_one_answer(Break::KillTwice, false);
}

/// A request with an old fencing token was refused. Its redelivery must stay refused, although the
/// fence no longer exists.
#[test]
fn redelivery_of_a_fenced_off_request_stays_refused() {
    let mut server = Server::restartable(&[]);
    let mut store = begin(&server, "client");
    let mut other = server.store("other");
    let (old, new) = (Hlc::now(-2000), Hlc::now(-1000));
    for key in ["one", "two"] {
        let fenced = other.command(&["SET", key, "0"]).with("__ft", &new);
        assert_eq!(other.call(&fenced).payload(), b"+OK\r\n");
    }
    let late = store.command(&["SET", "one", "late"]).with("__ft", &old);
    let bare = store.command(&["SET", "two", "bare"]);
    let ids = [&late, &bare].map(|request| store.client.start(request.publish()));
    let refused = store.finish(&late, ids[0]);
    assert_contains!(refused.text(), "lower version");
    let required = store.finish(&bare, ids[1]);
    assert_contains!(required.text(), "is required");
    for key in ["one", "two"] {
        let delete = other.command(&["DEL", key]).with("__ft", &new);
        assert_eq!(other.call(&delete).payload(), b":1\r\n");
    }
    let mut store = after(&mut server, Break::Kill, store);
    for (request, id, first) in [(&late, ids[0], &refused), (&bare, ids[1], &required)] {
        assert_eq!(store.redeliver(request, id, true).text(), first.text());
        assert_eq!(store.redeliver(request, id, false).text(), first.text());
    }
    assert_eq!(store.get("one"), None);
    assert_eq!(store.get("two"), None);
    // A new request is accepted, although only its correlation data and packet id differ.
    let mut fresh = late.clone();
    fresh.correlation = Some(b"another".to_vec());
    assert_eq!(store.call(&fresh).payload(), b"+OK\r\n");
}

/// The same bytes are a redelivery only if MQTT marks them as one, because scripts use the same
/// correlation data for every request.
#[test]
fn same_bytes_without_dup_are_a_new_request() {
    let mut server = Server::restartable(&[]);
    let mut store = begin(&server, "client");
    let request = store.command(&["SET", "key", "value", "NX"]);
    assert_eq!(store.call(&request).payload(), b"+OK\r\n");
    assert_eq!(store.call(&request).payload(), b":-1\r\n");
    // The same holds on the next connection if the packet id differs.
    for between in [Break::Connection, Break::Kill] {
        store = after(&mut server, between, store);
        assert_eq!(store.redeliver(&request, 900, false).payload(), b":-1\r\n");
    }
    // A new session has sent nothing before, so DUP on its first packet means nothing.
    drop(store);
    assert!(!server.connect("client").session_present());
    let mut store = begin(&server, "client");
    store.ask(&["DEL", "key"]);
    assert_eq!(store.redeliver(&request, 1, true).payload(), b"+OK\r\n");
}

/// Reads and malformed requests are not remembered. They are executed again on the current state.
#[test]
fn redelivered_reads_and_malformed_requests_run_again() {
    let mut server = Server::restartable(&[]);
    let mut store = begin(&server, "client");
    let requests = [
        store.command(&["GET", "key"]),
        store.command(&["SCAN", "k*"]),
        store.command(&["SET", "key"]),
    ];
    let answers = requests.each_ref().map(|request| store.exchange(request));
    store.set("key", "value");
    let mut store = after(&mut server, Break::Kill, store);
    let mut repeat = |n: usize| store.redeliver(&requests[n], answers[n].0, true);
    assert_eq!(answers[0].1.payload(), b"$-1\r\n");
    assert_eq!(repeat(0).payload(), b"$5\r\nvalue\r\n");
    assert_eq!(answers[1].1.payload(), b"*1\r\n*0\r\n");
    assert_eq!(repeat(1).payload(), b"*1\r\n*1\r\n$3\r\nkey\r\n");
    assert_eq!(
        answers[2].1.payload(),
        b"-ERR wrong number of arguments\r\n"
    );
    assert_eq!(repeat(2).payload(), b"-ERR wrong number of arguments\r\n");
}

/// Watches end with their connections. A redelivered KEYNOTIFY registers its new connection. A
/// redelivered STOP returns its first answer.
#[test]
fn redelivered_keynotify_watches_on_the_new_connection() {
    let mut server = Server::restartable(&[]);
    for between in [Break::Connection, Break::Kill] {
        let name = format!("{between:?}");
        let mut store = begin(&server, &name);
        let watch = store.command(&["KEYNOTIFY", "watched"]);
        let (watch_id, answer) = store.exchange(&watch);
        assert_eq!(answer.payload(), b"+OK\r\n");
        store.watch("ended");
        store.watch("stopped");
        let stop = store.command(&["KEYNOTIFY", "stopped", "STOP"]);
        let (stop_id, answer) = store.exchange(&stop);
        assert_eq!(answer.payload(), b"+OK\r\n");
        let nothing = store.command(&["KEYNOTIFY", "none", "STOP"]);
        let (nothing_id, answer) = store.exchange(&nothing);
        assert_eq!(answer.payload(), b":0\r\n");

        let mut store = after(&mut server, between, store);
        let answer = store.redeliver(&watch, watch_id, true);
        assert_eq!(answer.payload(), b"+OK\r\n");
        let answer = store.redeliver(&stop, stop_id, true);
        assert_eq!(answer.payload(), b"+OK\r\n", "there is no watch now");
        store.watch("none");
        let answer = store.redeliver(&nothing, nothing_id, true);
        assert_eq!(answer.payload(), b":0\r\n", "there is a watch now");
        let mut other = server.store("other");
        other.set("ended", "not notified");
        other.set("stopped", "not notified");
        let version = other.set("watched", "once");
        let notification = store.notification();
        assert!(notification.payload.ends_with(b"$4\r\nonce\r\n"));
        assert_eq!(store::version(&notification), Some(version));
        // A redelivered STOP does not end a watch that was registered since.
        other.set("none", "notified");
        assert!(store.notification().payload.ends_with(b"notified\r\n"));
        store.expect_nothing();
    }
}

/// Redelivers a request with DUP, which must get its first answer.
fn expect_first_answer(store: &mut Store, request: &Request, id: u16, first: &Answer) {
    let answer = store.redeliver(request, id, true);
    assert_eq!(
        (answer.text(), answer.version()),
        (first.text(), first.version())
    );
}

/// A redelivered request returns the answer of the policy that handled it, although another policy
/// is active now.
#[test]
fn redelivery_after_a_policy_change_keeps_its_answer() {
    let mut server = Server::restartable(&[]);
    let mut store = begin(&server, "client");
    store.set("taken", "by another");
    // The other policy ignores options and reads the value as the name of a fault.
    let requests = [
        store.command(&["SET", "free", "value", "NX"]),
        store.command(&["SET", "taken", "fine", "NX"]),
        store.command(&["VDEL", "taken", "fine"]),
    ];
    let answers = requests.each_ref().map(|request| store.exchange(request));
    let payloads = answers.each_ref().map(|(_, answer)| answer.payload());
    assert_eq!(payloads, [&b"+OK\r\n"[..], b":-1\r\n", b":-1\r\n"]);
    // Switches to the other policy and back, so that each has handled requests of this session.
    server.kill();
    server.restart_with(&[("policy", policies::faulty())]);
    let mut store = resume(&server, "client");
    assert_eq!(
        store.ask(&["SET", "new", "NX", "NX"]).payload(),
        b"-ERR internal error\r\n"
    );
    let fine = store.command(&["SET", "taken", "fine", "NX"]);
    let (fine_id, by_faulty) = store.exchange(&fine);
    assert_eq!(by_faulty.payload(), b"+OK\r\n");
    for (request, (id, first)) in requests.iter().zip(&answers) {
        expect_first_answer(&mut store, request, *id, first);
    }
    assert_eq!(store.get("free"), Some(b"value".to_vec()));
    server.kill();
    server.restart_with(&[("policy", "builtin")]);
    let mut store = resume(&server, "client");
    expect_first_answer(&mut store, &fine, fine_id, &by_faulty);
    for (request, (id, first)) in requests.iter().zip(&answers) {
        expect_first_answer(&mut store, request, *id, first);
    }
    let log = server.stderr();
    assert!(log.iter().all(|line| !line.contains("answered otherwise")));
}

/// A policy that counts in its own memory answers a redelivery differently. The client gets the
/// first answer, and the log shows the digests of both.
#[test]
fn differing_answer_to_a_redelivery_is_logged() {
    let server = Server::restartable(&[("policy", policies::faulty())]);
    let mut store = begin(&server, "client");
    let mut asked = Vec::new();
    for _ in 0..3 {
        let request = store.command(&["COUNT", "-"]);
        let (id, answer) = store.exchange(&request);
        asked.push((answer.payload().to_vec(), request, id));
    }
    let (first, request, id) = asked.pop().unwrap();
    assert_eq!(first, b":3\r\n");
    assert_eq!(store.redeliver(&request, id, true).payload(), first);
    let line = server.wait_for_log("answered otherwise");
    let digest = |name: &str| {
        let value = line.split(&format!(" {name}=")).nth(1).unwrap();
        value.split(' ').next().unwrap().to_owned()
    };
    let (first, now) = (digest("first"), digest("now"));
    assert!(first.len() == 64 && now.len() == 64, "{line}");
    assert_ne!(first, now);
}
