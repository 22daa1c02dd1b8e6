//! A request that comes again has the effect and the answer of the first time (the protocol, section 9), over
//! `kill -9` too.

use statehouse_tests::{Answer, Hlc, Request, Server, Store, policies, store};

use crate::resumed::{begin, resume};

/// What lies between a request and its redelivery.
#[derive(Clone, Copy, Debug)]
enum Break {
    /// Nothing: the same connection.
    None,
    /// The connection.
    Connection,
    /// The process.
    Kill,
    /// The process, and once more before anything was sent.
    KillTwice,
}

/// Breaks it, and returns the same client with its session.
fn after(server: &mut Server, between: Break, store: Store) -> Store {
    let id = store.id.clone();
    match between {
        Break::None => return store,
        Break::Connection => store.client.abort(),
        Break::Kill => {
            server.kill();
            server.restart();
        }
        Break::KillTwice => {
            server.kill();
            server.restart();
            server.kill();
            server.restart();
        }
    }
    resume(server, &id)
}

/// Sends a request as it was sent before.
fn again(store: &mut Store, request: &Request, packet_id: u16, dup: bool) -> Answer {
    let mut publish = request.publish();
    publish.packet_id = packet_id;
    publish.dup = dup;
    store.client.start(publish);
    store.finish(request, packet_id)
}

/// One request, what others do before it and between it and its redelivery, and what is there at the end.
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

/// Every case on a key of its own: all requests, the break, what others do, all redeliveries.
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
        let packet_id = store.client.start(request.publish());
        let answer = store.finish(&request, packet_id);
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
    // Twice, since what is remembered is not used up.
    for _ in 0..2 {
        for (case, (request, packet_id, first)) in CASES.iter().zip(&sent) {
            let answer = again(&mut store, request, *packet_id, dup);
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
    // Nobody was told anything.
    other.expect_nothing();
    store.expect_nothing();
}

#[test]
fn a_redelivery_on_the_same_connection() {
    one_effect_and_one_answer(Break::None, true);
}

#[test]
fn a_redelivery_on_the_next_connection() {
    one_effect_and_one_answer(Break::Connection, true);
    one_effect_and_one_answer(Break::Connection, false);
}

#[test]
fn a_redelivery_after_a_kill() {
    one_effect_and_one_answer(Break::Kill, true);
    one_effect_and_one_answer(Break::Kill, false);
}

#[test]
fn a_redelivery_after_two_kills() {
    one_effect_and_one_answer(Break::KillTwice, true);
    one_effect_and_one_answer(Break::KillTwice, false);
}

/// A client with an old fencing token was refused. That the fence is gone by now does not let its redelivery through.
#[test]
fn a_refusal_by_the_fence_stays_one() {
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
    assert!(
        refused.text().contains("lower version"),
        "{}",
        refused.text()
    );
    let required = store.finish(&bare, ids[1]);
    assert!(
        required.text().contains("is required"),
        "{}",
        required.text()
    );
    for key in ["one", "two"] {
        let delete = other.command(&["DEL", key]).with("__ft", &new);
        assert_eq!(other.call(&delete).payload(), b":1\r\n");
    }
    let mut store = after(&mut server, Break::Kill, store);
    for (request, id, first) in [(&late, ids[0], &refused), (&bare, ids[1], &required)] {
        assert_eq!(again(&mut store, request, id, true).text(), first.text());
        assert_eq!(again(&mut store, request, id, false).text(), first.text());
    }
    assert_eq!(store.get("one"), None);
    assert_eq!(store.get("two"), None);
    // New requests are not refused, the same in all but their correlation data and packet id.
    let mut anew = late.clone();
    anew.correlation = Some(b"another".to_vec());
    assert_eq!(store.call(&anew).payload(), b"+OK\r\n");
}

/// The same bytes are a redelivery only where MQTT says so: scripts use one correlation data for everything.
#[test]
fn the_same_bytes_without_dup_are_a_new_request() {
    let mut server = Server::restartable(&[]);
    let mut store = begin(&server, "client");
    let request = store.command(&["SET", "key", "value", "NX"]);
    assert_eq!(store.call(&request).payload(), b"+OK\r\n");
    assert_eq!(store.call(&request).payload(), b":-1\r\n");
    // On the next connection too, where the packet id is another one.
    for between in [Break::Connection, Break::Kill] {
        store = after(&mut server, between, store);
        assert_eq!(
            again(&mut store, &request, 900, false).payload(),
            b":-1\r\n"
        );
    }
    // A session that begins anew has sent nothing before, whatever its first packet says.
    drop(store);
    assert!(!server.connect("client").session_present());
    let mut store = begin(&server, "client");
    store.ask(&["DEL", "key"]);
    assert_eq!(again(&mut store, &request, 1, true).payload(), b"+OK\r\n");
}

/// Reads and errors of form are not remembered; they run again, on what is there by then.
#[test]
fn reads_run_again() {
    let mut server = Server::restartable(&[]);
    let mut store = begin(&server, "client");
    let requests = [
        store.command(&["GET", "key"]),
        store.command(&["SCAN", "k*"]),
        store.command(&["SET", "key"]),
    ];
    let answers: Vec<(u16, Answer)> = requests
        .iter()
        .map(|request| {
            let id = store.client.start(request.publish());
            (id, store.finish(request, id))
        })
        .collect();
    store.set("key", "value");
    let mut store = after(&mut server, Break::Kill, store);
    let mut repeat = |n: usize| again(&mut store, &requests[n], answers[n].0, true);
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

/// Watches end with their connections. The redelivery of a KEYNOTIFY registers the connection it comes over; that of
/// a STOP gives the first answer.
#[test]
fn a_redelivered_watch_is_of_the_new_connection() {
    let mut server = Server::restartable(&[]);
    for between in [Break::Connection, Break::Kill] {
        let name = format!("{between:?}");
        let mut store = begin(&server, &name);
        let watch = store.command(&["KEYNOTIFY", "heard"]);
        let watch_id = store.client.start(watch.publish());
        assert_eq!(store.finish(&watch, watch_id).payload(), b"+OK\r\n");
        store.watch("ended");
        store.watch("stopped");
        let stop = store.command(&["KEYNOTIFY", "stopped", "STOP"]);
        let stop_id = store.client.start(stop.publish());
        assert_eq!(store.finish(&stop, stop_id).payload(), b"+OK\r\n");
        let nothing = store.command(&["KEYNOTIFY", "none", "STOP"]);
        let nothing_id = store.client.start(nothing.publish());
        assert_eq!(store.finish(&nothing, nothing_id).payload(), b":0\r\n");

        let mut store = after(&mut server, between, store);
        let answer = again(&mut store, &watch, watch_id, true);
        assert_eq!(answer.payload(), b"+OK\r\n");
        let answer = again(&mut store, &stop, stop_id, true);
        assert_eq!(answer.payload(), b"+OK\r\n", "there is no watch now");
        store.watch("none");
        let answer = again(&mut store, &nothing, nothing_id, true);
        assert_eq!(answer.payload(), b":0\r\n", "there is a watch now");
        let mut other = server.store("other");
        other.set("ended", "unheard");
        other.set("stopped", "unheard");
        let version = other.set("heard", "once");
        let notification = store.notification();
        assert!(notification.payload.ends_with(b"$4\r\nonce\r\n"));
        assert_eq!(store::version(&notification), Some(version));
        // What a STOP answers again does not stop what was begun since.
        other.set("none", "heard");
        assert!(store.notification().payload.ends_with(b"heard\r\n"));
        store.expect_nothing();
    }
}

/// The request's answer is that of the policy that handled it, although another one answers by now.
#[test]
fn the_policy_of_the_first_time_answers() {
    let mut server = Server::restartable(&[]);
    let mut store = begin(&server, "client");
    store.set("taken", "by another");
    // The other policy knows no options: it takes the value for the name of a fault.
    let requests = [
        store.command(&["SET", "free", "value", "NX"]),
        store.command(&["SET", "taken", "fine", "NX"]),
        store.command(&["VDEL", "taken", "fine"]),
    ];
    let answers: Vec<(u16, Answer)> = requests
        .iter()
        .map(|request| {
            let id = store.client.start(request.publish());
            (id, store.finish(request, id))
        })
        .collect();
    let said: Vec<&[u8]> = answers.iter().map(|(_, answer)| answer.payload()).collect();
    assert_eq!(said, [&b"+OK\r\n"[..], b":-1\r\n", b":-1\r\n"]);
    // There and back again: each has handled requests of this session.
    server.kill();
    server.restart_with(&[("policy", policies::faulty())]);
    let mut store = resume(&server, "client");
    assert_eq!(
        store.ask(&["SET", "new", "NX", "NX"]).payload(),
        b"-ERR internal error\r\n"
    );
    let fine = store.command(&["SET", "taken", "fine", "NX"]);
    let fine_id = store.client.start(fine.publish());
    let by_faulty = store.finish(&fine, fine_id);
    assert_eq!(by_faulty.payload(), b"+OK\r\n");
    for (request, (id, first)) in requests.iter().zip(&answers) {
        let answer = again(&mut store, request, *id, true);
        assert_eq!(
            (answer.text(), answer.version()),
            (first.text(), first.version())
        );
    }
    assert_eq!(store.get("free"), Some(b"value".to_vec()));
    server.kill();
    server.restart_with(&[("policy", "builtin")]);
    let mut store = resume(&server, "client");
    let answer = again(&mut store, &fine, fine_id, true);
    assert_eq!(
        (answer.text(), answer.version()),
        (by_faulty.text(), by_faulty.version())
    );
    for (request, (id, first)) in requests.iter().zip(&answers) {
        let answer = again(&mut store, request, *id, true);
        assert_eq!(
            (answer.text(), answer.version()),
            (first.text(), first.version())
        );
    }
    assert!(
        server
            .stderr()
            .iter()
            .all(|line| !line.contains("answered otherwise"))
    );
}

/// A policy that counts in its own memory is not what it says: the first answer counts, and the log says both.
#[test]
fn a_policy_that_answers_otherwise_is_told_of() {
    let server = Server::restartable(&[("policy", policies::faulty())]);
    let mut store = begin(&server, "client");
    let mut asked = Vec::new();
    for _ in 0..3 {
        let request = store.command(&["COUNT", "-"]);
        let id = store.client.start(request.publish());
        asked.push((store.finish(&request, id).payload().to_vec(), request, id));
    }
    let (first, request, id) = asked.pop().unwrap();
    assert_eq!(first, b":3\r\n");
    assert_eq!(again(&mut store, &request, id, true).payload(), first);
    let told = server.wait_for_log("answered otherwise");
    let digest = |name: &str| {
        let value = told.split(&format!(" {name}=")).nth(1).unwrap();
        value.split(' ').next().unwrap().to_owned()
    };
    let (first, now) = (digest("first"), digest("now"));
    assert!(first.len() == 64 && now.len() == 64, "{told}");
    assert_ne!(first, now);
}
