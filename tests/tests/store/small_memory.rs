//! A gateway with 64 MiB of memory for the store: its control group kills what needs more.

use std::{fs, thread};

use serde_json::Value as Json;
use statehouse_tests::{Admin, Server, Store, command, policies};

#[path = "../../policies/wasm.rs"]
mod wasm;

const LIMIT_MIB: u64 = 64;
const CLIENTS: usize = 100;
const KEYS: usize = 10_000;
const VALUE: [u8; 64] = [b'v'; 64];

fn key(n: usize) -> String {
    format!("key/{n}")
}

fn clients(server: &Server) -> Vec<Store> {
    (0..CLIENTS)
        .map(|n| server.store(&format!("client-{n}")))
        .collect()
}

/// Every client writes its part of the keys, with all its requests in flight.
fn fill(clients: &mut [Store]) {
    let mut all = Vec::new();
    for (n, store) in clients.iter_mut().enumerate() {
        for k in (n..KEYS).step_by(CLIENTS) {
            let request = store.command(&[&b"SET"[..], key(k).as_bytes(), &VALUE]);
            let id = store.client.start(request.publish());
            all.push((n, request, id));
        }
    }
    for (n, request, id) in all {
        let answer = clients[n].finish(&request, id);
        assert_eq!(answer.payload(), b"+OK\r\n", "{}", answer.text());
    }
}

fn assert_holds_all(clients: &mut [Store]) {
    for (n, store) in clients.iter_mut().enumerate() {
        let k = KEYS - CLIENTS + n;
        assert_eq!(store.get(key(k)), Some(VALUE.to_vec()), "{}", key(k));
    }
}

fn kills(server: &Server) -> u64 {
    server.cgroup().unwrap().oom_kills()
}

/// Recovery, compilation and exchange of a policy, a backup, and the page.
#[test]
#[ignore = "fills and restarts a store, and compiles two policies"]
fn ten_thousand_keys_and_a_hundred_clients_fit_64_mib() {
    let Some(mut server) = Server::limited(LIMIT_MIB) else {
        return;
    };
    let mut before = clients(&server);
    fill(&mut before);
    for page in ["/", "/v1/overview"] {
        assert_eq!(Admin::of(&server).ask("GET", page, b"").0, 200, "{page}");
    }
    let directory = server.directory().to_owned();
    let run = |arguments: &[&str]| command::run_in(&directory, arguments).code(0);
    let backup = run(&["snapshot", "backup"]);
    let printed = backup.text() + &backup.stderr;
    assert!(printed.contains("10000 keys"), "{printed}");
    let other = policies::marked("small");
    run(&["policy", "load", other.to_str().unwrap(), "--promote"]);
    assert_holds_all(&mut before);
    assert_eq!(kills(&server), 0);

    // The compiler of this policy needs more than the limit. The kernel ends it, and not the store.
    fs::write(directory.join("bomb.wasm"), wasm::bomb(270_000)).unwrap();
    let refused = command::run_in(&directory, &["policy", "load", "bomb.wasm"]);
    refused.fails(4, "the free memory of this machine");
    assert_eq!(kills(&server), 1);
    assert_holds_all(&mut before);

    // A file that would not fit beside the store is refused before it is read.
    fs::write(directory.join("large.wasm"), vec![0; 40 << 20]).unwrap();
    let refused = command::run_in(&directory, &["policy", "load", "large.wasm"]);
    refused.fails(4, "larger than the limit of 16777216 bytes");
    assert_eq!(kills(&server), 1);

    server.kill_and_restart();
    let mut after = clients(&server);
    assert_holds_all(&mut after);
    assert_eq!(kills(&server), 1);
}

/// Each of four operators at once reads the longest history that there is.
#[test]
#[ignore = "writes a long history"]
fn histories_of_large_values_fit_64_mib() {
    const CHANGES: usize = 2200;
    let Some(server) = Server::limited(LIMIT_MIB) else {
        return;
    };
    fill(&mut clients(&server));
    let mut store = server.store("writer");
    let value = [b'v'; 4096];
    for _ in 0..CHANGES {
        store.set("hot", value);
    }
    let admin = Admin::of(&server);
    thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                let asked = admin.ask("GET", "/v1/history?key=hot&limit=2000", b"");
                assert_eq!(asked.0, 200, "{}", asked.1);
                let answer: Json = serde_json::from_str(&asked.1).unwrap();
                let listed = answer["changes"].as_array().unwrap().len();
                assert!((10..2000).contains(&listed), "{listed}");
                assert_eq!(answer["beginning"]["changes"], CHANGES);
            });
        }
    });
    assert_eq!(kills(&server), 0);
    assert_eq!(store.get("hot"), Some(value.to_vec()));
}
