//! The table for tests keeps the contract: staged writes are visible and commit, the client's
//! rights apply, hidden keys belong to the policy, and a failing transcript names its line.

mod common;

use std::panic::{AssertUnwindSafe, catch_unwind};

use common::Function;
use statehouse_policy::testing::{Right, Table, Tabled, Transaction, cases};
use statehouse_policy::{
    Access, Body, Bytes, Fault, Frame, Host, Level, Outcome, Repeat, Request, Scope, Span, Stamp,
    resp,
};

const COUNTING: Function = Function(count);

/// Counts its calls in a hidden key. Stores the property `value` under the key in the payload, and
/// answers with the key.
fn count(host: &mut dyn Host, request: &Request) -> Outcome {
    let counter = Bytes::Owned(b"counter".to_vec());
    let calls = match host.head(&counter, Access::Hidden) {
        Ok(Some(_)) => {
            let loaded = host.load(&counter, 0, 100);
            loaded.ok().flatten().unwrap_or_default()
        }
        _ => Vec::new(),
    };
    let calls = [calls.as_slice(), b"i"].concat();
    host.put(&counter, &Bytes::Owned(calls.clone()), None, None, None)
        .expect("no quota");
    // A staged write is visible at once.
    let second: Vec<u8> = calls.iter().skip(1).take(1).copied().collect();
    assert_eq!(host.load(&counter, 1, 1), Ok(Some(second)));
    host.count("calls", 1);
    if host.log_enabled(Level::Info) {
        host.log(Level::Info, "called");
    }
    let key = Span {
        at: 0,
        len: u32::try_from(request.payload.len()).expect("short"),
    };
    let version = host.property("value").and_then(|value| {
        let (key, value) = (Bytes::Span(key), Bytes::Owned(value.into_bytes()));
        host.put(&key, &value, None, None, None).ok()
    });
    let head = format!("{}:", calls.len()).into_bytes();
    Outcome {
        reply: Frame {
            head,
            body: Body::Given(key),
        },
        version,
        repeat: Repeat::Free,
        command: None,
    }
}

fn request(payload: &[u8]) -> Request {
    common::request(payload, 1000)
}

fn owned(bytes: &[u8]) -> Bytes {
    Bytes::Owned(bytes.to_vec())
}

#[test]
fn hidden_keys_are_the_policys_own() {
    let mut table = Table::new(1000);
    table.deny(Right::Read, b"counter");
    table.deny(Right::Write, b"counter");
    table.set_property("value", "v");
    table.set_property("value", "second");
    let answer = table.call(&COUNTING, &request(b"counter"));
    assert_eq!(answer.bytes, b"1:counter\r\n");
    let answer = table.call(&COUNTING, &request(b"other"));
    assert_eq!(answer.bytes, b"2:other\r\n");
    assert_eq!(answer.version.map(|stamp| stamp.wall), Some(1000));
    assert_eq!((table.counter("calls"), table.counter("none")), (2, 0));
    let line = (Level::Info, "called".to_owned());
    assert_eq!(table.lines(), [line.clone(), line]);

    let request = request(b"");
    let mut host = table.begin(&request);
    // The client's key `counter` is another key, to which it has no right.
    for access in [Access::Read, Access::Write] {
        let found = host.head(&owned(b"counter"), access);
        assert_eq!(found, Err(Fault::Denied), "{access:?}");
    }
    assert_eq!(host.load(&owned(b"other"), 0, 9), Ok(Some(b"v".to_vec())));
    let page = host.keys(&owned(b""), None, 10).expect("readable");
    assert_eq!((page.keys, page.next), (vec![b"other".to_vec()], None));
}

#[test]
fn staged_writes_are_visible_until_the_transaction_drops() {
    let mut table = Table::new(1000);
    let request = request(b"");
    let mut host = table.begin(&request);
    let (key, value) = (owned(b"k"), owned(b"v"));
    let first = host
        .put(&key, &value, None, None, Some(1001))
        .expect("no quota");
    let second = host.put(&key, &value, None, None, None).expect("no quota");
    assert_eq!(
        (first.wall, second.wall, second.counter),
        (1000, 1000, first.counter + 1)
    );
    assert_eq!(host.matches(&key, &value), Ok(true));
    assert_eq!(host.matches(&key, &owned(b"w")), Ok(false));
    assert_eq!(host.delete(&key), Ok(true));
    assert_eq!(host.delete(&key), Ok(false));
    assert_eq!(host.head(&key, Access::Read), Ok(None));
    // As in the host, a staged entry is there until the commit, even if it has expired.
    host.put(&key, &value, None, None, Some(1000))
        .expect("no quota");
    let entry = host.head(&key, Access::Read).expect("allowed");
    assert_eq!(entry.and_then(|it| it.expires), Some(1000));
    host.put(&key, &value, None, None, Some(1001))
        .expect("no quota");
    let entry = host.head(&key, Access::Read).expect("allowed");
    assert!(entry.is_some());
    host.watch(&key).expect("allowed");
    assert_eq!(host.unwatch(&key), Ok(true));
    assert_eq!(host.unwatch(&key), Ok(false));
    drop(host);
    assert_eq!(table.begin(&request).head(&key, Access::Read), Ok(None));
}

/// Regression: pages showed staged writes, a limit of 0 ended the listing, and a hidden key stayed
/// hidden.
#[test]
fn pages_and_hidden_keys_are_those_of_the_host() {
    let mut table = Table::new(1000);
    table.set_property("value", "v");
    table.call(&COUNTING, &request(b"a"));
    let mut request = request(b"");
    let (a, b) = (owned(b"a"), owned(b"b"));
    let mut host = table.begin(&request);
    host.put(&b, &owned(b"v"), None, None, None)
        .expect("no quota");
    assert_eq!(host.delete(&a), Ok(true));
    let page = host.keys(&owned(b""), None, 0).expect("readable");
    assert_eq!((page.keys, page.next), (vec![b"a".to_vec()], None));
    drop(host);
    let mut host = table.begin(&request);
    assert_eq!(host.head(&a, Access::Hidden), Ok(None));
    assert_eq!(host.load(&a, 0, 9), Ok(None));
    assert!(host.head(&a, Access::Read).is_ok_and(|it| it.is_some()));
    assert_eq!(host.load(&a, 0, 9), Ok(Some(b"v".to_vec())));
    drop(host);
    request.client = None;
    let mut host = table.begin(&request);
    assert_eq!(host.watch(&a), Err(Fault::Denied));
    let since = Stamp {
        wall: 0,
        counter: 0,
    };
    let followed = host.follow_since(Scope::Prefix, &a, since).map(drop);
    assert_eq!(followed, Err(Fault::Denied));
}

#[test]
fn a_quota_counts_existing_entries() {
    let mut table = Table::new(1000);
    table.limit_keys(1);
    let request = request(b"");
    let mut host = table.begin(&request);
    assert_eq!(put(&mut host, b"a"), Ok(()));
    assert_eq!(put(&mut host, b"a"), Ok(()));
    assert_eq!(put(&mut host, b"b"), Err(Fault::Quota));
    assert_eq!(host.delete(&owned(b"a")), Ok(true));
    assert_eq!(put(&mut host, b"b"), Ok(()));
}

#[test]
fn random_bytes_depend_only_on_the_request() {
    let mut table = Table::new(1000);
    let mut draw = |payload: &[u8]| {
        let request = request(payload);
        let mut host = table.begin(&request);
        (host.random(20), host.random(20))
    };
    let (first, second) = draw(b"a");
    assert_eq!(first.len(), 20);
    assert_ne!(first, second);
    assert_eq!(draw(b"a"), (first.clone(), second));
    assert_ne!(draw(b"b").0, first);
}

#[test]
#[should_panic(expected = "outside of the 2 bytes")]
fn a_span_beyond_the_payload_is_a_trap() {
    let request = request(b"ab");
    let key = Bytes::Span(Span { at: 1, len: 2 });
    let _ = Table::new(1000).begin(&request).head(&key, Access::Read);
}

#[test]
#[should_panic(expected = "more than 60 s ahead")]
fn a_time_beyond_the_skew_is_a_trap() {
    let request = request(b"");
    let observed = Stamp {
        wall: 61_001,
        counter: 0,
    };
    let (key, value) = (owned(b"k"), owned(b"v"));
    let mut table = Table::new(1000);
    let _ = table
        .begin(&request)
        .put(&key, &value, Some(observed), None, None);
}

/// The calls of a policy in one request.
type Calls = fn(&mut Transaction<'_>);

fn put(host: &mut Transaction<'_>, key: &[u8]) -> Result<(), Fault> {
    let stored = host.put(&owned(key), &owned(b"v"), None, None, None);
    stored.map(|_| ())
}

/// Changes as many watches as a request may.
fn change_watches(host: &mut Transaction<'_>) {
    for _ in 0..32 {
        assert_eq!(host.watch(&owned(b"k")), Ok(()));
        assert_eq!(host.unwatch(&owned(b"k")), Ok(true));
    }
    // There is no watch to end, so nothing is staged.
    assert_eq!(host.unwatch(&owned(b"k")), Ok(false));
}

/// Opens as many hidden keys as a request may.
fn hide_keys(host: &mut Transaction<'_>) {
    for key in 0..64_u8 {
        for _ in 0..2 {
            assert_eq!(host.head(&owned(&[key]), Access::Hidden), Ok(None));
        }
    }
}

/// Stages as many writes as a request may.
fn write_often(host: &mut Transaction<'_>) {
    for _ in 0..32 {
        assert_eq!(put(host, b"k"), Ok(()));
        assert_eq!(host.delete(&owned(b"k")), Ok(true));
    }
    assert_eq!(host.delete(&owned(b"k")), Ok(false));
}

fn follow_since(host: &mut Transaction<'_>) {
    let since = Stamp {
        wall: 0,
        counter: 0,
    };
    let reached = host.follow_since(Scope::Key, &owned(b"k"), since);
    assert!(reached.is_ok_and(|it| it.complete));
}

/// Regression: the table accepted what a host traps at.
#[test]
fn calls_beyond_the_limits_of_a_request_are_traps() {
    let cases: [(Calls, Calls, &str); 5] = [
        (
            write_often,
            |host| drop(put(host, b"k")),
            "more writes than one request may stage",
        ),
        (
            change_watches,
            |host| drop(host.watch(&owned(b"k"))),
            "more watches than one request may stage",
        ),
        (
            hide_keys,
            |host| drop(host.head(&owned(b"k"), Access::Hidden)),
            "more hidden keys than one request may open",
        ),
        (
            follow_since,
            follow_since,
            "more than one watch since a version",
        ),
        (
            |host| assert_eq!(host.random(1024).len(), 1024),
            |host| drop(host.random(1025)),
            "a request for too many random bytes",
        ),
    ];
    for (most, more, text) in cases {
        let request = request(b"");
        let mut table = Table::new(1000);
        let mut host = table.begin(&request);
        most(&mut host);
        let panic = catch_unwind(AssertUnwindSafe(|| more(&mut host)));
        let panic = panic.expect_err(text);
        assert_eq!(panic.downcast_ref::<&str>(), Some(&text));
    }
}

/// Regression: the table accepted what a host refuses.
#[test]
fn keys_and_cursors_are_refused_as_by_the_host() {
    let request = request(b"");
    let mut table = Table::new(1000);
    let mut host = table.begin(&request);
    let other = |text: &str| Err(Fault::Other(text.to_owned()));
    assert_eq!(put(&mut host, b""), other("the key length is zero"));
    let watched = host.watch(&owned(b""));
    assert_eq!(watched, other("the key length is zero"));
    let long = owned(&[b'p'; 1025]);
    let followed = host.follow(Scope::Prefix, &long).map(|_| ());
    assert_eq!(followed, other("the prefix is longer than 1024 bytes"));
    assert!(host.follow(Scope::Prefix, &owned(b"")).is_ok());
    let mut page = |prefix: &[u8], cursor: &[u8]| {
        let page = host.keys(&owned(prefix), Some(cursor), 1);
        page.map(|_| ())
    };
    assert_eq!(page(b"a/", b"a/1"), Ok(()));
    assert_eq!(page(b"a/", b"b/1"), other("syntax error"));
}

#[test]
fn a_failing_transcript_names_its_line() {
    let run = |text: &str| cases::run(text, &mut Tabled::new(&COUNTING));
    let one = "# nothing\n\n== a case\n>> k\n< free - 1:k\\r\\n\n";
    let two = "== a\n>> k\n< free - 1:k\\r\\n\n== b\n>> \\x6b\n< free - 1:k\\r\\n";
    assert_eq!((run(one), run(two)), (Ok(1), Ok(2)));
    for (text, reason) in [
        (
            "== a case\n>> k\n< free - 2:k\\r\\n",
            "line 3 (case `a case`)",
        ),
        (">> k\n< same - 1:k\\r\\n", "got: free - 1:k\\r\\n"),
        (">> k\n< free * 1:k\\r\\n", "got: free - 1:k\\r\\n"),
        (
            ">> k\n< free - 1:k\\r\\n\n< free - 1:k\\r\\n",
            "no request before",
        ),
        (">> k\n>> k", "has no `<`"),
        (">> k", "at the end"),
        ("! topic 1:2 x", "there was no notification"),
        ("dialect klingon", "is no dialect"),
        ("now soon", "is no number"),
        ("what", "begins no line"),
        (">> \\q", "means nothing"),
        (">> \\", "at the end"),
        (">> \\x1", "two digits"),
        (">> \\xzz", "is no byte"),
    ] {
        let error = run(text).expect_err("the transcript fails");
        assert!(error.contains(reason), "{text:?} says {error:?}");
    }
    let words = resp::request(&[b"a b", b"", b"\0\\"]);
    let mut shown = String::from_utf8_lossy(&words).into_owned();
    for (it, escape) in [
        ("\\", "\\\\"),
        ("\r", "\\r"),
        ("\n", "\\n"),
        ("\0", "\\x00"),
    ] {
        shown = shown.replace(it, escape);
    }
    let text = format!("> a\\sb \\e \\0\\\\\n< free - 1:{shown}\\r\\n");
    assert_eq!(run(&text), Ok(1));
}
