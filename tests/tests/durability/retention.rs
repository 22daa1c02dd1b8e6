//! Retention of requests for deduplication over `kill -9`. Requests of ended sessions must never
//! evict the last requests of live sessions.

use statehouse_tests::{Request, Server, Store};

use crate::resumed::{begin, resume};

/// Live sessions.
const LIVE: usize = 6;
/// Requests of each live session.
const REQUESTS: usize = 5;
/// Clients that send one request, and whose sessions end.
const ENDED: usize = 150;

/// Sends a request whose second execution would give another answer.
fn ask(store: &mut Store, n: usize) -> (Request, u16, Vec<u8>) {
    let key = format!("{} {n}", store.id);
    let request = store.command(&["SET", &key, "value", "NX"]);
    let (id, answer) = store.exchange(&request);
    assert_eq!(answer.payload(), b"+OK\r\n");
    (request, id, answer.version().unwrap().to_string().into())
}

/// The server remembers at most twice the configured bytes. The requests of the live sessions fit,
/// but not those of all ended sessions.
#[test]
fn ended_sessions_evict_no_requests_of_live_sessions() {
    let mut server = Server::restartable(&[("max_duplicate_bytes", "40000")]);
    let mut live = Vec::new();
    for client in 0..LIVE {
        let mut store = begin(&server, &format!("live {client}"));
        let asked: Vec<_> = (0..REQUESTS).map(|n| ask(&mut store, n)).collect();
        live.push((store.id.clone(), asked));
        store.client.abort();
    }
    for client in 0..ENDED {
        let mut store = server.store(&format!("ended {client}"));
        ask(&mut store, 0);
    }
    // The first start recovers from the log alone, the second from what the first one wrote.
    for _ in 0..2 {
        server.kill_and_restart();
        for (client, asked) in &live {
            let mut store = resume(&server, client);
            for (request, id, version) in asked {
                let answer = store.redeliver(request, *id, true);
                assert_eq!(answer.payload(), b"+OK\r\n", "{client}");
                let repeated = answer.version().unwrap().to_string();
                assert_eq!(repeated.as_bytes(), version, "{client}");
            }
            store.client.abort();
        }
    }
}
