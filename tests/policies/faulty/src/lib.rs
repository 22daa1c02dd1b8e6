//! A policy that goes wrong on request. `SET key mode` first stages a write under `key`, as any SET, and
//! then does what `mode` names (`faults.txt` lists them all for the tests); `SET key fine` does nothing more
//! and answers `+OK`, as does `SET key stray`, which writes the key `stray` as well, or another one that is named behind it. `GET key` works.
//! `SET key long` answers some hundred bytes, and so does `SET key burn` after some hundred thousand units of fuel, or after so
//! many rounds of a loop as are named behind it.
//! `SET key repeat import` calls this import again and again and counts the calls as `repeated`.
//! `SET key block bytes` lets the host compare these bytes again and again: little fuel, much time.
//! `HIDE key` writes a hidden key that lives for a second.
//! `COUNT key` tells how many requests this instance has handled: an instance that was replaced begins anew.
//! Asked for the key of a request it writes a line about `chatty-route`, panics about `bad-route` and never ends about
//! `endless-route`.
//! It counts how often it was configured.
//! A key that begins with `bad-notify` is written as usual, and telling of it goes wrong; telling of one that begins with
//! `slow-notify` takes some hundred thousand units of fuel.

#![deny(unsafe_code)]

use std::sync::atomic::{AtomicU64, Ordering};

use statehouse_policy::{
    Access, Body, Bytes, Change, Dialect, Frame, Host, Imports, Info, Level, Notification, Outcome,
    Policy, Repeat, Request, Span, Stamp, resp,
};

/// The policy: all it knows is in the request.
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
            b"chatty-route" => Imports.log(Level::Info, "asked to say something"),
            b"bad-route" => panic!("asked to fail while routing"),
            b"endless-route" => loop {
                std::hint::black_box(&arguments);
            },
            _ => {}
        }
        arguments.span(1)
    }

    fn handle(&self, host: &mut impl Host, request: &Request) -> Outcome {
        let arguments = resp::parse(&request.payload).expect("a request of RESP");
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
                    assert!(!handled.is_multiple_of(1000), "asked to fail by and by");
                    return answer(b"+OK\r\n", Body::None);
                }
                go_wrong(host, &arguments, &key, request.now)
            }
        }
    }

    fn notify(&self, change: &Change, _dialect: Dialect) -> Notification {
        assert!(
            !change.key.starts_with(b"bad-notify"),
            "asked to fail while telling"
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

/// Calls an import without end, with a megabyte if it takes or returns that much.
fn repeat(host: &mut impl Host, import: &[u8], key: &Bytes) -> ! {
    let megabyte = Bytes::Owned(vec![b'x'; 1 << 20]);
    host.put(key, &megabyte, None, None, None)
        .expect("writing is allowed");
    let Bytes::Owned(long) = &megabyte else {
        unreachable!("it was just made");
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

/// So many rounds of a loop.
fn burn(rounds: u32) {
    for round in 0..rounds {
        std::hint::black_box(round);
    }
}

fn go_wrong(
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
        b"block" => {
            let bytes = arguments.bytes(3).expect("bytes to compare");
            host.put(key, &bytes, None, None, None)
                .expect("writing is allowed");
            loop {
                drop(host.matches(key, &bytes));
            }
        }
        b"repeat" => repeat(host, arguments.get(3), key),
        b"panic" => panic!("asked to panic"),
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
            // Few writes, each of them allowed.
            let value = Bytes::Owned(vec![0; 1 << 20]);
            for _ in 0..40 {
                drop(host.put(key, &value, None, None, None));
            }
        }
        b"much-random" => drop(host.random(u32::MAX)),
        _ => panic!("no such mode"),
    }
    answer(b"+OK\r\n", Body::None)
}

/// Each level needs the next one's result, so that no compiler makes a loop of it.
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
