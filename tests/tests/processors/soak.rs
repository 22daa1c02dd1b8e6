//! A minute of load: each answer is right, memory is bounded, and a kill loses nothing.

use std::{
    collections::HashMap,
    thread,
    time::{Duration, Instant},
};

use statehouse_tests::{Processor, Server, Store, dice::Dice, store::notification_topic};

const DURATION: Duration = Duration::from_secs(60);

/// After this time all keys have been written.
const FILLING: Duration = Duration::from_secs(20);

/// How much the memory may grow after that. Tables of limited size grow during the first 15000
/// requests, which an emulated store may not get in a minute. A native one gets many more.
const GROWTH_KIB_MAX: u64 = 32 << 10;

const CLIENTS: usize = 4;
const KEYS: u64 = 100;
const VALUE_BYTES_MAX: u64 = 4096;

/// The key that the watched client writes last.
const LAST: &str = "soak/0/last";

/// What a client did.
struct Used {
    /// Its keys and their values at the end.
    values: HashMap<String, Vec<u8>>,
    requests: u64,
    /// Writes, and removals of keys that existed.
    changes: u64,
}

/// Clients use keys of their own at random, and compare each answer with a map. A watcher gets each
/// change of the first client. All keys have their values after `kill -9`.
pub(crate) fn run(processor: &Processor) {
    // qemu for 64 bits keeps 20 MB for each memory that wasmtime reserves, also after its release.
    // So no requests are re-executed on fresh instances there.
    let purity_sample = match processor.target.starts_with("aarch64") {
        true => "0",
        false => "64",
    };
    let settings = [("max_duplicates", "1000"), ("purity_sample", purity_sample)];
    let mut server = Server::emulated(processor, &settings);
    let mut dice = Dice::thrown();
    let mut watcher = server.store("watcher");
    watcher.watch_prefix("soak/0/");
    let end = Instant::now() + DURATION;
    let clients: Vec<_> = (0..CLIENTS)
        .map(|id| {
            let (store, dice) = (server.store(&format!("client{id}")), dice.split());
            thread::spawn(move || use_keys(store, id, dice, end))
        })
        .collect();
    let watching = thread::spawn(move || {
        let last = notification_topic("watcher", LAST.as_bytes());
        let mut notified = 1;
        while watcher.notification().topic != last {
            notified += 1;
        }
        notified
    });
    thread::sleep(FILLING);
    let filled_kib = server.memory_kib();
    let used: Vec<Used> = clients.into_iter().map(|it| it.join().unwrap()).collect();
    let grown_kib = server.memory_kib().saturating_sub(filled_kib);
    assert_eq!(watching.join().unwrap(), used[0].changes);
    let requests: u64 = used.iter().map(|it| it.requests).sum();
    println!("{requests} requests; {filled_kib} KiB, {grown_kib} KiB more at the end");
    assert!(grown_kib < GROWTH_KIB_MAX, "{grown_kib} KiB more");

    server.kill_and_restart();
    let mut reader = server.store("reader");
    for (id, used) in used.iter().enumerate() {
        for number in 0..KEYS {
            let key = key(id, number);
            assert_eq!(reader.get(&key).as_ref(), used.values.get(&key), "{key}");
        }
    }
    assert_eq!(reader.get(LAST).unwrap(), b"0");
}

fn key(client: usize, number: u64) -> String {
    format!("soak/{client}/{number}")
}

fn use_keys(mut store: Store, id: usize, mut dice: Dice, end: Instant) -> Used {
    let mut used = Used {
        values: HashMap::new(),
        requests: 0,
        changes: 0,
    };
    let mut version = None;
    while Instant::now() < end {
        let key = key(id, dice.below(KEYS));
        used.requests += 1;
        match dice.below(4) {
            0 => {
                let removed = used.values.remove(&key).is_some();
                let expected = format!(":{}\\r\\n", u8::from(removed));
                assert_eq!(store.ask(&["DEL", &key]).text(), expected, "DEL {key}");
                used.changes += u64::from(removed);
            }
            1 => assert_eq!(store.get(&key).as_ref(), used.values.get(&key), "GET {key}"),
            _ => {
                let byte = b'a' + u8::try_from(dice.below(26)).unwrap();
                let length = usize::try_from(dice.below(VALUE_BYTES_MAX)).unwrap();
                let value = vec![byte; length];
                let written = Some(store.set(&key, &value));
                assert!(written > version, "{written:?} after {version:?}");
                version = written;
                used.values.insert(key, value);
                used.changes += 1;
            }
        }
    }
    if id == 0 {
        store.set(LAST, "0");
        used.changes += 1;
    }
    used
}
