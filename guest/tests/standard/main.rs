//! Behaviour that transcripts cannot express: rights, faults of the host, long scans, and the shape
//! of outcomes.

mod scan;

use statehouse_guest::Standard;
use statehouse_policy::testing::cases::{self, request};
use statehouse_policy::testing::{Answer, Right, Table};
use statehouse_policy::{
    Access, Body, Bytes, Change, Dialect, Entry, Event, Fault, Hlc, Host, Level, Page, Policy,
    Reached, Repeat, Request, Scope, Span, Stamp, resp,
};

fn policy() -> Standard {
    Standard::configure(&[]).expect("it takes no options")
}

fn call(table: &mut Table, words: &[&[u8]]) -> Answer {
    table.call(&policy(), &request(words))
}

/// The bytes of the response.
fn answer(table: &mut Table, words: &[&[u8]]) -> Vec<u8> {
    call(table, words).bytes
}

fn error(text: &str) -> Vec<u8> {
    format!("-ERR {text}\r\n").into_bytes()
}

#[test]
fn it_describes_itself() {
    let info = Standard::describe();
    assert_eq!(info.name, "standard");
    assert_eq!(info.version, env!("CARGO_PKG_VERSION"));
    assert_eq!(
        info.commands,
        ["SET", "GET", "DEL", "VDEL", "KEYNOTIFY", "SCAN", "META"]
    );
}

#[test]
fn it_refuses_options() {
    let refused = Standard::configure(&[("mode".to_owned(), "fast".to_owned())]);
    assert!(refused.is_err_and(|sentence| sentence.contains("`mode`")));
}

#[test]
fn an_outcome_names_its_command() {
    let mut table = Table::new(cases::NOW_MS);
    let commands = Standard::describe().commands;
    let mut named = |words: &[&[u8]]| {
        let command = call(&mut table, words).command;
        command.map(|index| commands[usize::from(index)].as_str())
    };
    assert_eq!(named(&[b"SET", b"k", b"v"]), Some("SET"));
    assert_eq!(named(&[b"get", b"k"]), Some("GET"));
    assert_eq!(named(&[b"VDEL", b"k", b"v"]), Some("VDEL"));
    assert_eq!(named(&[b"DEL", b"k"]), Some("DEL"));
    assert_eq!(named(&[b"KEYNOTIFY", b"k"]), Some("KEYNOTIFY"));
    assert_eq!(named(&[b"KEYNOTIFY", b"k", b"STOP"]), Some("KEYNOTIFY"));
    assert_eq!(named(&[b"SCAN", b"*"]), Some("SCAN"));
    // An error of form names the command if it was recognized.
    assert_eq!(named(&[b"SET", b"k"]), Some("SET"));
    assert_eq!(named(&[b"GET", b""]), Some("GET"));
    assert_eq!(named(&[b"PING"]), None);
}

#[test]
fn routing_finds_the_key() {
    let policy = policy();
    let routed = |words: &[&[u8]]| {
        let payload = resp::request(words);
        let key = policy.route(&payload);
        key.map(|span| payload[resp::range(span)].to_vec())
    };
    for words in [
        &[b"SET" as &[u8], b"key", b"v", b"NX"] as &[&[u8]],
        &[b"GET", b"key"],
        &[b"DEL", b"key"],
        &[b"VDEL", b"key", b"v"],
        &[b"KEYNOTIFY", b"key", b"STOP"],
    ] {
        assert_eq!(routed(words).as_deref(), Some(b"key" as &[u8]));
    }
    assert_eq!(routed(&[b"SCAN", b"key"]), None);
    // Unknown commands have no key to route by.
    assert_eq!(routed(&[b"PING", b"key"]), None);
    assert_eq!(routed(&[b"GET", b""]), None);
    assert_eq!(policy.route(b"*1\r\n"), None);
}

#[test]
fn rights_come_before_timestamp_and_fence() {
    let mut table = Table::new(cases::NOW_MS);
    call(&mut table, &[b"SET", b"k", b"v"]);
    table.deny(Right::Write, b"k");
    let denied = error("not authorized");
    for words in [
        &[b"SET" as &[u8], b"k", b"w"] as &[&[u8]],
        &[b"DEL", b"k"],
        &[b"VDEL", b"k", b"v"],
    ] {
        let request = Request {
            timestamp: None,
            fencing_token: Some("x".to_owned()),
            ..request(words)
        };
        let answer = table.call(&policy(), &request);
        assert_eq!(answer.bytes, denied);
        assert_eq!((answer.version, answer.repeat), (None, Repeat::Same));
    }
    // The right to read is separate.
    assert_eq!(answer(&mut table, &[b"GET", b"k"]), b"$1\r\nv\r\n");
    assert_eq!(answer(&mut table, &[b"KEYNOTIFY", b"k"]), b"+OK\r\n");
    let stop: [&[u8]; 3] = [b"KEYNOTIFY", b"k", b"STOP"];
    assert_eq!(answer(&mut table, &stop), b"+OK\r\n");
    table.deny(Right::Read, b"k");
    for words in [
        &[b"GET" as &[u8], b"k"] as &[&[u8]],
        &[b"KEYNOTIFY", b"k"],
        &stop,
        &[b"KEYNOTIFY", b"k", b"FROM", b"no version"],
    ] {
        assert_eq!(answer(&mut table, words), denied, "{words:?}");
    }
    assert_eq!(answer(&mut table, &[b"SCAN", b"*"]), b"*1\r\n*0\r\n");
}

#[test]
fn form_comes_before_rights() {
    let mut table = Table::new(cases::NOW_MS);
    table.deny(Right::Write, b"k");
    let answer = answer(&mut table, &[b"SET", b"k", b"v", b"FOO"]);
    assert_eq!(answer, error("syntax error"));
}

#[test]
fn a_quota_forbids_watches() {
    let mut table = Table::new(cases::NOW_MS);
    table.limit_watches(1);
    assert_eq!(answer(&mut table, &[b"KEYNOTIFY", b"a"]), b"+OK\r\n");
    assert_eq!(answer(&mut table, &[b"KEYNOTIFY", b"a"]), b"+OK\r\n");
    let refused = call(&mut table, &[b"KEYNOTIFY", b"b"]);
    assert_eq!(refused.bytes, error("the quota has been exceeded"));
    assert_eq!(refused.repeat, Repeat::Free);
}

#[test]
fn a_write_to_an_expired_key_notifies_the_expiry_first() {
    let mut table = Table::new(cases::NOW_MS);
    call(&mut table, &[b"SET", b"k", b"v", b"PX", b"10"]);
    call(&mut table, &[b"KEYNOTIFY", b"k"]);
    // There is no sweep in between; only the request brings the later time.
    let later = Request {
        now: cases::NOW_MS + 10,
        ..request(&[b"SET", b"k", b"w", b"NX"])
    };
    let answer = table.call(&policy(), &later);
    assert_eq!(answer.bytes, b"+OK\r\n");
    let notified = table.take_deliveries();
    let payloads: Vec<&[u8]> = notified.iter().map(|it| it.payload.as_slice()).collect();
    assert_eq!(
        payloads,
        [
            b"*2\r\n$6\r\nNOTIFY\r\n$6\r\nDELETE\r\n" as &[u8],
            b"*4\r\n$6\r\nNOTIFY\r\n$3\r\nSET\r\n$5\r\nVALUE\r\n$1\r\nw\r\n",
        ]
    );
    let order = |stamp: Stamp| (stamp.wall, stamp.counter);
    assert!(order(notified[0].version) < order(notified[1].version));
    assert_eq!(Some(notified[1].version), answer.version);
}

#[test]
fn an_expiry_is_at_most_the_largest_signed_integer() {
    let mut table = Table::new(cases::NOW_MS);
    let longest = b"9223372036854775807";
    call(&mut table, &[b"SET", b"k", b"v", b"PX", longest]);
    let meta = answer(&mut table, &[b"META", b"k"]);
    let meta = String::from_utf8_lossy(&meta);
    let expires = "$7\r\nexpires\r\n$19\r\n9223372036854775807\r\n";
    assert!(meta.contains(expires), "{meta}");
}

#[test]
fn a_topic_too_long_for_a_packet_is_refused() {
    // 59 bytes before the client id and 16 after it leave 65,460: 32,730 bytes of client id and
    // key.
    let prefix = "clients/statestore/v1/FA9AE35F-2F64-47CD-9BFF-08E2B32A0FE8/".len();
    let suffix = "/command/notify/".len();
    let longest = (65_535 - prefix - suffix) / 2 - "client".len();
    let mut table = Table::new(cases::NOW_MS);
    let key = vec![b'k'; longest];
    assert_eq!(answer(&mut table, &[b"KEYNOTIFY", &key]), b"+OK\r\n");
    call(&mut table, &[b"SET", &key, b"v"]);
    assert!(table.take_deliveries()[0].topic.len() <= 65_535);
    let key = vec![b'k'; longest + 1];
    let from: [&[u8]; 4] = [b"KEYNOTIFY", &key, b"FROM", b"1:0:n"];
    for words in [&from[..2], &from[..]] {
        let refused = answer(&mut table, words);
        assert_eq!(refused, error("syntax error"), "{} words", words.len());
    }
    // Such a key has no watch that could end. Other commands accept it.
    for words in [
        &[b"KEYNOTIFY" as &[u8], &key, b"STOP"] as &[&[u8]],
        &[b"KEYNOTIFY", &key, b"PREFIX", b"STOP"],
    ] {
        let stopped = answer(&mut table, words);
        assert_eq!(stopped, b":0\r\n", "{} words", words.len());
    }
    assert_eq!(answer(&mut table, &[b"SET", &key, b"v"]), b"+OK\r\n");
    table.deny(Right::Read, &key);
    for words in [&from[..2], &from[..]] {
        let denied = answer(&mut table, words);
        assert_eq!(denied, error("not authorized"), "{} words", words.len());
    }
}

#[test]
fn a_notification_is_a_head_and_the_stored_value() {
    let change = Change {
        event: Event::Set,
        key: b"\x0f\xa0".to_vec(),
        version: Stamp {
            wall: 1,
            counter: 2,
        },
        len: 70_000,
    };
    let notification = policy().notify(&change, Dialect::Sdk);
    assert_eq!(notification.topic_suffix, "/command/notify/0FA0");
    assert_eq!(
        notification.payload.head,
        b"*4\r\n$6\r\nNOTIFY\r\n$3\r\nSET\r\n$5\r\nVALUE\r\n$70000\r\n"
    );
    let key = Bytes::Span(Span { at: 0, len: 2 });
    assert_eq!(notification.payload.body, Body::Stored(key));
}

const VERSION: Stamp = Stamp {
    wall: 1,
    counter: 0,
};

/// A host that refuses one call.
struct Faulty {
    at: &'static str,
    fault: Fault,
}

impl Faulty {
    fn answer<T>(&self, call: &str, value: T) -> Result<T, Fault> {
        if call == self.at {
            Err(self.fault.clone())
        } else {
            Ok(value)
        }
    }
}

impl Host for Faulty {
    fn head(&mut self, _: &Bytes, _: Access) -> Result<Option<Entry>, Fault> {
        let entry = Entry {
            len: 1,
            version: VERSION,
            fence: None,
            expires: None,
        };
        self.answer("head", Some(entry))
    }
    fn load(&mut self, _: &Bytes, _: u32, _: u32) -> Result<Option<Vec<u8>>, Fault> {
        unreachable!("the standard policy looks into no value")
    }
    fn matches(&mut self, _: &Bytes, _: &Bytes) -> Result<bool, Fault> {
        self.answer("matches", true)
    }
    fn put(
        &mut self,
        _: &Bytes,
        _: &Bytes,
        _: Option<Stamp>,
        _: Option<&Hlc>,
        _: Option<u64>,
    ) -> Result<Stamp, Fault> {
        self.answer("put", VERSION)
    }
    fn delete(&mut self, _: &Bytes) -> Result<bool, Fault> {
        self.answer("delete", true)
    }
    fn keys(&mut self, _: &Bytes, _: Option<&[u8]>, _: u32) -> Result<Page, Fault> {
        let (keys, next) = (Vec::new(), None);
        self.answer("keys", Page { keys, next })
    }
    fn watch(&mut self, _: &Bytes) -> Result<(), Fault> {
        self.answer("watch", ())
    }
    fn unwatch(&mut self, _: &Bytes) -> Result<bool, Fault> {
        self.answer("unwatch", true)
    }
    fn follow(&mut self, _: Scope, _: &Bytes) -> Result<Stamp, Fault> {
        self.answer("follow", VERSION)
    }
    fn follow_since(&mut self, _: Scope, _: &Bytes, since: Stamp) -> Result<Reached, Fault> {
        let reached = Reached {
            version: since,
            complete: true,
        };
        self.answer("follow_since", reached)
    }
    fn unfollow(&mut self, _: Scope, _: &Bytes) -> Result<bool, Fault> {
        self.answer("unfollow", true)
    }
    fn property(&mut self, _: &str) -> Option<String> {
        None
    }
    fn log_enabled(&mut self, _: Level) -> bool {
        false
    }
    fn log(&mut self, _: Level, _: &str) {}
    fn count(&mut self, _: &str, _: u64) {}
    fn random(&mut self, _: u32) -> Vec<u8> {
        Vec::new()
    }
}

#[test]
fn a_fault_of_the_host_is_answered_at_every_call() {
    type Row<'a> = (&'a [&'a [u8]], &'a [&'a str], Repeat);
    let commands: [Row<'_>; 10] = [
        (
            &[b"SET", b"k", b"v", b"NEX"],
            &["head", "matches", "put"],
            Repeat::Same,
        ),
        (&[b"GET", b"k"], &["head"], Repeat::Free),
        (&[b"DEL", b"k"], &["head", "delete"], Repeat::Same),
        (
            &[b"VDEL", b"k", b"v"],
            &["head", "matches", "delete"],
            Repeat::Same,
        ),
        (&[b"KEYNOTIFY", b"k"], &["head", "watch"], Repeat::Free),
        (
            &[b"KEYNOTIFY", b"k", b"STOP"],
            &["head", "unwatch"],
            Repeat::Same,
        ),
        (&[b"KEYNOTIFY", b"k", b"PREFIX"], &["follow"], Repeat::Free),
        (
            &[b"KEYNOTIFY", b"k", b"FROM", b"1:0:n"],
            &["head", "follow_since"],
            Repeat::Free,
        ),
        (
            &[b"KEYNOTIFY", b"k", b"STOP", b"PREFIX"],
            &["unfollow"],
            Repeat::Same,
        ),
        (&[b"SCAN", b"*"], &["keys"], Repeat::Free),
    ];
    let faults = [
        (Fault::Denied, "not authorized"),
        (Fault::Quota, "the quota has been exceeded"),
        (
            Fault::Other("read only\r\n+OK\r\n".to_owned()),
            "read only  +OK  ",
        ),
    ];
    for (words, calls, repeat) in commands {
        for at in calls {
            for (fault, text) in &faults {
                let mut host = Faulty {
                    at,
                    fault: fault.clone(),
                };
                let outcome = policy().handle(&mut host, &request(words));
                assert_eq!(outcome.reply.head, error(text), "{words:?} at {at}");
                assert_eq!(outcome.reply.body, Body::None);
                assert_eq!((outcome.version, outcome.repeat), (None, repeat));
            }
        }
        let mut host = Faulty {
            at: "nowhere",
            fault: Fault::Denied,
        };
        let outcome = policy().handle(&mut host, &request(words));
        assert!(!outcome.reply.head.starts_with(b"-ERR"), "{words:?}");
    }
}
