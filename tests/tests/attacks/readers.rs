//! Attacks the outgoing buffers: connections that request much and read nothing must not use up the
//! memory of the server.

use std::time::Duration;

use statehouse_tests::{Client, Server, attack};

/// Fewer than the default limit of file descriptors in a shell.
const CONNECTIONS: usize = 252;
const VALUE_BYTES: usize = 256 << 10;
/// More than the socket buffers and the queue of a connection hold.
const REQUESTS: usize = 64;

/// Each connection requests answers of 16 MiB, which are 4 GiB in total.
#[test]
#[ignore = "an attack takes half a minute"]
fn connections_that_do_not_read_do_not_delay_others() {
    let Some(mut server) = Server::limited(512) else {
        return;
    };
    server.store("owner").set("large", vec![b'x'; VALUE_BYTES]);
    let outcome = attack::run("252 connections that do not read", &mut server, |server| {
        (0..CONNECTIONS)
            .map(|n| silent_reader(server, n))
            .collect::<Vec<_>>()
    });
    outcome.assert_victim_served(Duration::from_secs(1));
}

/// Opens a connection, and requests the large value many times.
fn silent_reader(server: &Server, number: usize) -> Client {
    let mut store = server.store(&format!("reader{number}"));
    store.client.set_write_timeout(Duration::from_millis(100));
    for _ in 0..REQUESTS {
        let mut publish = store.command(&["GET", "large"]).publish();
        publish.packet_id = store.client.packet_id();
        // The server may stop reading, or close the connection.
        if store.client.try_send(&publish.bytes()).is_err() {
            break;
        }
    }
    store.client
}
