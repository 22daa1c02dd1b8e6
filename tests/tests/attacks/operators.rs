//! Attacks the admin API. An operator must get an answer while an attacker holds connections.

use std::{
    io::{Read, Write},
    net::TcpStream,
    time::{Duration, Instant},
};

use statehouse_tests::{Admin, Server, attack};

/// All connections that operators may have at once.
const HALF_REQUESTS: usize = 16;
/// The server waits ten seconds for the head of a request.
const ANSWERED_WITHIN: Duration = Duration::from_secs(15);

/// A connection that has sent half of a request, without any token.
fn half_request(address: &str) -> TcpStream {
    let mut stream = TcpStream::connect(address).unwrap();
    stream.set_nonblocking(true).unwrap();
    // The server may have closed the connection.
    let _ = stream.write(b"GET /metrics HTTP/1.1\r\nHost: ");
    stream
}

/// Opens again each connection that the server has closed.
fn keep_open(halves: &mut [TcpStream], address: &str) {
    for half in halves {
        let mut byte = [0];
        if matches!(half.read(&mut byte), Ok(0)) {
            *half = half_request(address);
        }
    }
}

/// The attacker holds all connections of the admin API, and opens a new one when the server closes
/// one. Meanwhile an operator sends a request.
#[test]
#[ignore = "an attack takes a minute"]
fn half_sent_admin_requests_do_not_block_operators() {
    let mut server = Server::start();
    let url = Admin::of(&server).url();
    let address = url.trim_start_matches("http://").to_owned();
    let name = "16 half-sent admin requests";
    let outcome = attack::run(name, &mut server, |server| {
        let mut halves: Vec<_> = (0..HALF_REQUESTS).map(|_| half_request(&address)).collect();
        let mut longest = Duration::ZERO;
        for _ in 0..3 {
            let asked = Instant::now();
            std::thread::scope(|scope| {
                let answer = scope.spawn(|| Admin::of(server).ask("GET", "/metrics", b""));
                while !answer.is_finished() {
                    keep_open(&mut halves, &address);
                    std::thread::sleep(Duration::from_millis(20));
                }
                assert_eq!(answer.join().unwrap().0, 200);
            });
            longest = longest.max(asked.elapsed());
        }
        longest
    });
    outcome.assert_victim_served(Duration::from_secs(1));
    let longest = outcome.result;
    assert!(longest < ANSWERED_WITHIN, "the operator waited {longest:?}");
}
