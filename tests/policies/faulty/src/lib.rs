//! A policy that fails on request, so that tests can check that the host contains the failure.
//!
//! Each SET first stages a write under its key. Then the mode decides:
//!
//! * `SET key fine` answers `+OK`.
//! * `SET key stray [other]` also writes the key `stray` or `other`, and answers `+OK`.
//! * `SET key spread count` also writes the key `stray` and this many keys `key/0`, `key/1` and so
//!   on, and answers `+OK`.
//! * `SET key long` answers some hundred bytes.
//! * `SET key burn [rounds]` runs a loop of this many rounds, or uses some hundred thousand units
//!   of fuel, and then answers some hundred bytes.
//! * `SET key repeat import` calls this import without end, and counts the calls as `repeated`.
//! * `SET key block bytes` makes the host compare these bytes without end, which takes little fuel
//!   but much time.
//! * `SET key say text times` logs this text so often, and answers `+OK`.
//! * `SET key thousandth` fails on every thousandth request of the instance.
//! * `SET key latest` answers `+OK` with the latest version and the last command of this policy.
//!   `ahead` and `wide` answer with a later version and with a larger counter than the store
//!   assigns, `beyond` with a command that it does not declare.
//! * The other modes are faults. `faults.txt` lists them for the tests.
//!
//! Other commands:
//!
//! * `GET key` works as usual.
//! * `HIDE key` writes a hidden key that expires after a second.
//! * `COUNT key` answers the number of requests that this instance has handled. A new instance
//!   starts from zero.
//!
//! Some keys cause faults in other calls. `route` writes a log line for `chatty-route`, panics for
//! `bad-route` and never returns for `endless-route`. `notify` panics for keys that begin with
//! `bad-notify`, and uses some hundred thousand units of fuel for keys that begin with
//! `slow-notify`.
//!
//! The counter `configured` counts the calls of `configure`.

#![deny(unsafe_code)]

use std::sync::atomic::{AtomicU64, Ordering};

use statehouse_policy::{
    Access, Body, Bytes, Change, Dialect, Frame, Host, Imports, Info, Level, Notification, Outcome,
    Policy, Repeat, Request, Span, Stamp, resp,
};

/// The policy. It has no settings.
pub struct Faulty;

impl Policy for Faulty {
    fn describe() -> Info {
        let commands = ["SET", "GET", "KEYNOTIFY"].map(str::to_owned).to_vec();
        Info {
            name: "faulty".to_owned(),
            version: "0.1.0".to_owned(),
            commands,
        }
    }

    fn configure(_options: &[(String, String)]) -> Result<Self, String> {
        Imports.count("configured", 1);
        Ok(Self)
    }

    fn route(&self, payload: &[u8]) -> Option<Span> {
        let arguments = resp::parse(payload).ok()?;
        match arguments.get(1) {
            b"chatty-route" => Imports.log(Level::Info, "a log line on request"),
            b"bad-route" => panic!("a panic in route on request"),
            b"endless-route" => loop {
                std::hint::black_box(&arguments);
            },
            _ => {}
        }
        arguments.span(1)
    }

    fn handle(&self, host: &mut impl Host, request: &Request) -> Outcome {
        let arguments = resp::parse(&request.payload).expect("a RESP request");
        let key = arguments.bytes(1).expect("a key");
        static HANDLED: AtomicU64 = AtomicU64::new(0);
        let handled = HANDLED.fetch_add(1, Ordering::Relaxed) + 1;
        match arguments.get(0) {
            b"GET" => {
                let head = host.head(&key, Access::Read).expect("reading is allowed");
                let Some(entry) = head else {
                    return answer(b"$-1\r\n", Body::None);
                };
                let head = format!("${}\r\n", entry.len);
                answer(head.as_bytes(), Body::Stored(key))
            }
            b"COUNT" => answer(format!(":{handled}\r\n").as_bytes(), Body::None),
            b"HIDE" => {
                host.head(&key, Access::Hidden).expect("hiding is allowed");
                let expires = request.now.checked_add(1000);
                host.put(&key, &key, None, None, expires)
                    .expect("writing is allowed");
                answer(b"+OK\r\n", Body::None)
            }
            b"KEYNOTIFY" => {
                host.watch(&key).expect("there is room");
                answer(b"+OK\r\n", Body::None)
            }
            _ => {
                let expires = request.now.checked_add(1000);
                let value = arguments.bytes(2).expect("a mode");
                host.put(&key, &value, None, None, expires)
                    .expect("writing is allowed");
                if arguments.get(2) == b"thousandth" {
                    assert!(
                        !handled.is_multiple_of(1000),
                        "a panic on every thousandth request"
                    );
                    return answer(b"+OK\r\n", Body::None);
                }
                run_mode(host, &arguments, &key, request.now)
            }
        }
    }

    fn notify(&self, change: &Change, _dialect: Dialect) -> Notification {
        assert!(
            !change.key.starts_with(b"bad-notify"),
            "a panic in notify on request"
        );
        if change.key.starts_with(b"slow-notify") {
            burn(100_000);
        }
        Notification {
            topic_prefix: "told/".to_owned(),
            topic_suffix: "/end".to_owned(),
            payload: Frame {
                head: b"changed\r\n".to_vec(),
                body: Body::None,
            },
        }
    }
}

fn answer(head: &[u8], body: Body) -> Outcome {
    let reply = Frame {
        head: head.to_vec(),
        body,
    };
    Outcome {
        reply,
        version: None,
        repeat: Repeat::Same,
        command: None,
    }
}

/// `+OK` with this version and command.
fn named(wall: u64, counter: u32, command: u16) -> Outcome {
    Outcome {
        version: Some(Stamp { wall, counter }),
        command: Some(command),
        ..answer(b"+OK\r\n", Body::None)
    }
}

/// Calls an import without end, with a megabyte if it accepts or returns that much.
fn repeat(host: &mut impl Host, import: &[u8], key: &Bytes) -> ! {
    let megabyte = Bytes::Owned(vec![b'x'; 1 << 20]);
    host.put(key, &megabyte, None, None, None)
        .expect("writing is allowed");
    let Bytes::Owned(long) = &megabyte else {
        unreachable!("it was just created");
    };
    let text = str::from_utf8(long).expect("it is ASCII");
    loop {
        host.count("repeated", 1);
        match import {
            b"head" => drop(host.head(key, Access::Read)),
            b"load" => drop(host.load(key, 0, u32::MAX)),
            b"matches" => drop(host.matches(key, &megabyte)),
            b"keys" => drop(host.keys(&Bytes::Owned(Vec::new()), None, 1)),
            b"long-key" => drop(host.head(&megabyte, Access::Read)),
            b"property" => drop(host.property(text)),
            b"log" => host.log(Level::Info, text),
            b"count" => host.count(text, 1),
            b"random" => drop(host.random(1024)),
            b"unwatch" => drop(host.unwatch(&megabyte)),
            _ => panic!("no such import"),
        }
    }
}

/// Runs this many rounds of a loop.
fn burn(rounds: u32) {
    for round in 0..rounds {
        std::hint::black_box(round);
    }
}

/// Writes the key `stray`, and as many keys below `key` as the request says.
fn spread(host: &mut impl Host, arguments: &resp::Arguments<'_>, key: &Bytes) {
    let count = str::from_utf8(arguments.get(3)).ok();
    let count: u32 = count.and_then(|it| it.parse().ok()).expect("a number");
    let below = (0..count).map(|number| {
        let end = format!("/{number}");
        [arguments.get(1), end.as_bytes()].concat()
    });
    for name in std::iter::once(b"stray".to_vec()).chain(below) {
        host.put(&Bytes::Owned(name), key, None, None, None)
            .expect("writing is allowed");
    }
}

fn run_mode(
    host: &mut impl Host,
    arguments: &resp::Arguments<'_>,
    key: &Bytes,
    now: u64,
) -> Outcome {
    let mode = arguments.get(2);
    let beyond = Span {
        at: 1 << 30,
        len: 1,
    };
    let wrapping = Span {
        at: u32::MAX,
        len: u32::MAX,
    };
    match mode {
        b"fine" => {}
        b"long" => return answer(&vec![b'+'; 300], Body::None),
        b"burn" => {
            let named = str::from_utf8(arguments.get(3)).ok();
            let rounds = named.and_then(|it| it.parse().ok()).unwrap_or(100_000_u32);
            burn(rounds);
            return answer(&vec![b'+'; 300], Body::None);
        }
        b"stray" => {
            let elsewhere = arguments.bytes(3);
            let elsewhere = elsewhere.unwrap_or(Bytes::Owned(b"stray".to_vec()));
            host.put(&elsewhere, key, None, None, None)
                .expect("writing is allowed");
        }
        b"spread" => spread(host, arguments, key),
        b"block" => {
            let bytes = arguments.bytes(3).expect("bytes to compare");
            host.put(key, &bytes, None, None, None)
                .expect("writing is allowed");
            loop {
                drop(host.matches(key, &bytes));
            }
        }
        b"repeat" => repeat(host, arguments.get(3), key),
        b"say" => {
            let text = str::from_utf8(arguments.get(3)).expect("a text");
            let times = str::from_utf8(arguments.get(4)).ok();
            let times: u32 = times.and_then(|it| it.parse().ok()).unwrap_or(1);
            for _ in 0..times {
                host.log(Level::Info, text);
            }
        }
        b"panic" => panic!("a panic on request"),
        b"loop" => loop {
            std::hint::black_box(mode);
        },
        b"allocate" => {
            let mut hoard: Vec<Vec<u8>> = Vec::new();
            loop {
                hoard.push(vec![1; 1 << 20]);
                std::hint::black_box(&hoard);
            }
        }
        b"recurse" => {
            std::hint::black_box(deeper(1));
        }
        b"span-in" => drop(host.head(&Bytes::Span(beyond), Access::Read)),
        b"span-wrapping" => drop(host.head(&Bytes::Span(wrapping), Access::Read)),
        b"span-out" => return answer(b"$1\r\n", Body::Given(beyond)),
        b"stored-absent" => {
            return answer(b"$1\r\n", Body::Stored(Bytes::Owned(b"absent".to_vec())));
        }
        b"long-head" => return answer(&vec![b'+'; 2 << 20], Body::None),
        b"future" => {
            let observed = Stamp {
                wall: now + 60_001,
                counter: 0,
            };
            drop(host.put(key, key, Some(observed), None, None));
        }
        b"many-writes" => loop {
            drop(host.put(key, key, None, None, None));
        },
        b"many-bytes" => {
            // Few writes, each of them within the limits.
            let value = Bytes::Owned(vec![0; 1 << 20]);
            for _ in 0..40 {
                drop(host.put(key, &value, None, None, None));
            }
        }
        b"much-random" => drop(host.random(u32::MAX)),
        b"latest" => return named(now + 60_000, i32::MAX as u32 - 1, 2),
        b"ahead" => return named(now + 60_001, 0, 2),
        b"wide" => return named(now, i32::MAX as u32, 2),
        b"beyond" => return named(now, 0, 3),
        _ => panic!("no such mode"),
    }
    answer(b"+OK\r\n", Body::None)
}

/// Each level uses the result of the next one, so that the compiler cannot turn the recursion into
/// a loop.
fn deeper(level: u64) -> u64 {
    let mut frame = [level; 64];
    std::hint::black_box(&mut frame);
    if level == u64::MAX {
        0
    } else {
        deeper(level + frame[3] % 2 + 1) + frame[7]
    }
}

statehouse_policy::export!(Faulty);
