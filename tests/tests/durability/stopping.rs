//! What SIGTERM leaves behind: each request that was executed is acknowledged.

use std::{thread, time::Duration};

use statehouse_tests::{Heard, Server, Store, client::PATIENCE, packet::kind, resp};

/// Below the Receive Maximum of the server, so that all requests may be in flight at once.
const IN_FLIGHT: usize = 400;

/// The acknowledgements until the server closes the connection.
fn acknowledged(store: &mut Store) -> usize {
    let mut count = 0;
    loop {
        match store.client.poll(PATIENCE) {
            Heard::Packet(packet) if packet.kind() == kind::PUBACK => {
                assert_eq!(packet.ack().reason, 0);
                count += 1;
            }
            Heard::Packet(_) => {}
            _ => return count,
        }
    }
}

#[test]
fn requests_that_were_executed_before_sigterm_are_acknowledged() {
    // Many requests wait for a flush when the signal arrives.
    let mut server = Server::restartable(&[("commit_delay", "5ms")]);
    let mut interrupted = 0;
    for round in 0..4 {
        let mut store = server.store("writer");
        for number in 0..IN_FLIGHT {
            let request = store.command(&["SET", &format!("round{round} {number}"), "value"]);
            store.client.start(request.publish());
        }
        thread::sleep(Duration::from_millis(round));
        server.stop();
        let acknowledged = acknowledged(&mut store);
        server.restart();
        let mut reader = server.store("reader");
        let pattern = format!("round{round} *");
        let executed = scan_all(&mut reader, &pattern);
        assert_eq!(acknowledged, executed, "round {round}");
        interrupted += usize::from((1..IN_FLIGHT).contains(&executed));
    }
    println!("{interrupted} of 4 rounds were interrupted");
}

/// The number of keys that match.
fn scan_all(store: &mut Store, pattern: &str) -> usize {
    let mut count = 0;
    let mut token: Option<Vec<u8>> = None;
    loop {
        let mut arguments = vec![b"SCAN".to_vec(), pattern.into()];
        arguments.extend(token);
        let (keys, next) = resp::scan(store.ask(&arguments).payload());
        count += keys.len();
        token = next;
        if token.is_none() {
            return count;
        }
    }
}
