//! Guesses of passwords. The server must limit them without delaying or refusing other clients.

use std::{
    collections::HashSet,
    net::{IpAddr, SocketAddr},
};

use statehouse_tests::{
    Client,
    packet::{Ack, kind},
};

use super::{BUSY, OK, TOO_OFTEN, WRONG, connack, connected, file::UsersFile, login};

fn take_connack(client: &mut Client) -> Ack {
    client
        .take("CONNACK", |it| it.kind() == kind::CONNACK)
        .ack()
}

/// Connects from another address of loopback.
fn open_from(from: IpAddr, server: SocketAddr) -> Client {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    let stream = runtime.block_on(async {
        let socket = tokio::net::TcpSocket::new_v4().unwrap();
        socket.bind(SocketAddr::new(from, 0)).unwrap();
        socket.connect(server).await.unwrap().into_std().unwrap()
    });
    stream.set_nonblocking(false).unwrap();
    Client::on(stream)
}

#[test]
fn thousand_password_guesses_delay_no_other_client() {
    let file = UsersFile::new(&[("anna", "secret")]);
    let server = file.server(&[]);
    let before = server.memory_kib();
    let address = server.address();
    let connect = login("guess", Some("anna"), Some("wrong")).bytes();
    let mut guesses: Vec<_> = (0..1000)
        .map(|_| {
            let mut client = Client::open(address);
            client.send(&connect);
            client
        })
        .collect();
    // A client from another address connects while the guesses wait for their answers. The server
    // refuses a CONNECT after ten seconds, so an accepted client has not waited long.
    let mut other = open_from("127.0.0.2".parse().unwrap(), address);
    other.send(&login("anna", Some("anna"), Some("secret")).bytes());
    let answer = take_connack(&mut other);
    let memory = server.memory_kib();
    assert_eq!(answer.reason, OK, "{}", answer.text());
    assert!(memory < before + 100 * 1024, "{before} KiB, then {memory}");
    let reasons: Vec<_> = guesses
        .iter_mut()
        .map(|it| take_connack(it).reason)
        .collect();
    let count = |reason| reasons.iter().filter(|it| **it == reason).count();
    assert_eq!(count(OK), 0);
    assert!(count(WRONG) < 60, "{} were checked", count(WRONG));
    assert!(count(TOO_OFTEN) > 900, "{reasons:x?}");
    // The server has verified anna's password before, so it accepts anna even from the address of
    // the guesses.
    connected(&server, "another", "anna", "secret").ping();
    other.ping();
}

/// The flood fills the queue of password checks, and uses up the allowed guesses of the user and of
/// one address.
#[test]
fn wrong_password_flood_does_not_refuse_a_verified_user() {
    let file = UsersFile::new(&[("anna", "secret")]);
    let server = file.server(&[]);
    let address = server.address();
    connected(&server, "first", "anna", "secret").disconnect();
    let mut flood: Vec<_> = (0..400_u16)
        .map(|number| {
            // No address reaches its limit, except the address of the user.
            let from = match number {
                0..40 => address.ip(),
                _ => IpAddr::from([127, 0, 1, (number / 15) as u8]),
            };
            open_from(from, address)
        })
        .collect();
    // All connections are open before the first guess, so that the guesses outrun their checks.
    for (number, client) in flood.iter_mut().enumerate() {
        let name = format!("name-{number}");
        let user = if number % 2 == 0 { "anna" } else { &name };
        client.send(&login(&name, Some(user), Some("wrong")).bytes());
    }
    for attempt in 0..50 {
        let connect = login(&format!("again-{attempt}"), Some("anna"), Some("secret"));
        assert_eq!(connack(&server, &connect).reason, OK, "attempt {attempt}");
    }
    // The server may read the connections in another order than that of their guesses.
    let mut seen = HashSet::new();
    let reasons = flood.iter_mut().map(|it| take_connack(it).reason);
    for reason in reasons {
        assert_ne!(reason, OK, "a wrong password was accepted");
        seen.insert(reason);
        if seen.contains(&TOO_OFTEN) && seen.contains(&BUSY) {
            return;
        }
    }
    panic!("a limit was never reached, or the queue never full: {seen:x?}");
}
