//! Many sessions with many requests that may come again, over `kill -9`: what is forgotten is what the dead asked.

use statehouse_tests::{Request, Server, Store};

use crate::resumed::{begin, resume};

/// Sessions that live, the requests of each, and clients that come once and go.
const LIVING: usize = 6;
const OWED: usize = 5;
const PASSING: usize = 150;

/// A request whose second run would show.
fn ask(store: &mut Store, n: usize) -> (Request, u16, Vec<u8>) {
    let key = format!("{} {n}", store.id);
    let request = store.command(&["SET", &key, "value", "NX"]);
    let id = store.client.start(request.publish());
    let answer = store.finish(&request, id);
    assert_eq!(answer.payload(), b"+OK\r\n");
    (request, id, answer.version().unwrap().to_string().into())
}

/// Remembered is what fits twice into this: those of the living, with room to spare, and some more.
#[test]
fn the_dead_push_out_nothing_of_the_living() {
    let mut server = Server::restartable(&[("max_duplicate_bytes", "40000")]);
    let mut owed = Vec::new();
    for client in 0..LIVING {
        let mut store = begin(&server, &format!("living {client}"));
        let asked: Vec<_> = (0..OWED).map(|n| ask(&mut store, n)).collect();
        owed.push((store.id.clone(), asked));
        store.client.abort();
    }
    for client in 0..PASSING {
        let mut store = server.store(&format!("passing {client}"));
        ask(&mut store, 0);
    }
    // Once from the log alone, and once from what the first start made of it.
    for _ in 0..2 {
        server.kill();
        server.restart();
        for (client, asked) in &owed {
            let mut store = resume(&server, client);
            for (request, id, version) in asked {
                let mut publish = request.publish();
                (publish.packet_id, publish.dup) = (*id, true);
                store.client.start(publish);
                let again = store.finish(request, *id);
                assert_eq!(again.payload(), b"+OK\r\n", "{client}");
                let again = again.version().unwrap().to_string();
                assert_eq!(again.as_bytes(), version, "{client}");
            }
            store.client.abort();
        }
    }
}
