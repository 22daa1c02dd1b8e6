//! Many requests in flight when the process is killed. The client redelivers every request without
//! a PUBACK, and each must take effect exactly once.
//!
//! A command that is executed twice or not at all changes its own answer or a later one.

use std::{
    collections::{HashMap, HashSet},
    thread,
    time::Duration,
};

use statehouse_tests::{
    Client, Dice, Heard, Hlc, Packet, Property, Publish, Request, Server, Store, client::PATIENCE,
    packet::kind, property, store::version,
};

use crate::resumed::{begin, connect, resume};

/// Below the Receive Maximum of the server, so that all requests may be in flight at once.
const IN_FLIGHT: usize = 400;

/// The answer to a request: payload and version.
type Answer = (Vec<u8>, Option<Hlc>);

/// The answers and acknowledgements that arrived so far.
struct Received {
    /// The correlation data of the requests by packet id.
    sent: HashMap<u16, Vec<u8>>,
    /// Whether the client acknowledges answers at once.
    prompt: bool,
    answers: HashMap<Vec<u8>, Answer>,
    acknowledged: HashSet<u16>,
    /// The number of repeated answers.
    repeated: usize,
}

impl Received {
    fn nothing_for(sent: &[(u16, Publish)], prompt: bool) -> Received {
        let correlation = |publish: &Publish| publish.correlation().unwrap().to_vec();
        Received {
            sent: (sent.iter())
                .map(|(id, publish)| (*id, correlation(publish)))
                .collect(),
            prompt,
            answers: HashMap::new(),
            acknowledged: HashSet::new(),
            repeated: 0,
        }
    }

    /// Adds the next packet. A repeated answer must be the same as the first. For a `prompt`
    /// client, a PUBACK must follow its answer. For another client, the PUBACK may come first,
    /// because the answer waits until the client acknowledges earlier ones.
    fn take(&mut self, packet: &Packet) {
        match packet.kind() {
            kind::PUBLISH => {
                let publish = packet.publish();
                let answer = (publish.payload.clone(), version(&publish));
                let key = publish.correlation().expect("an answer").to_vec();
                if !self.prompt && !self.sent.values().any(|it| *it == key) {
                    // An answer of the previous round. Its acknowledgement was lost with the
                    // connection that was taken over.
                    return;
                }
                if let Some(first) = self.answers.insert(key, answer.clone()) {
                    assert_eq!(first, answer, "the repeated answer differs");
                    self.repeated += 1;
                }
            }
            kind::PUBACK => {
                let ack = packet.ack();
                assert_eq!(ack.reason, 0, "{ack:?}");
                assert!(
                    !self.prompt || self.answers.contains_key(&self.sent[&ack.packet_id]),
                    "PUBACK {} before the answer",
                    ack.packet_id
                );
                assert!(
                    self.acknowledged.insert(ack.packet_id),
                    "{ack:?} arrived twice"
                );
            }
            other => panic!("a packet of type {other}"),
        }
    }

    /// Kills the server after a random number of packets. The others may be lost with the
    /// connection.
    fn take_some_and_kill(&mut self, server: &mut Server, client: &mut Client, dice: &mut Dice) {
        for _ in 0..dice.below(IN_FLIGHT as u64) {
            match client.poll(Duration::from_millis(20)) {
                Heard::Packet(packet) => self.take(&packet),
                Heard::Silence => break,
                Heard::Closed => panic!("closed before the kill"),
            }
        }
        thread::sleep(dice.below_ms(5));
        server.kill();
        loop {
            match client.poll(PATIENCE) {
                Heard::Packet(packet) => self.take(&packet),
                Heard::Closed => return,
                Heard::Silence => panic!("the connection outlives the process"),
            }
        }
    }

    /// Reads until each request has an answer and an acknowledgement. The server redelivers the
    /// answer to an acknowledged request unasked.
    fn take_rest(&mut self, client: &mut Client) {
        while self.acknowledged.len() < self.sent.len() || self.answers.len() < self.sent.len() {
            match client.poll(PATIENCE) {
                Heard::Packet(packet) => self.take(&packet),
                other => panic!("{other:?} instead of the rest"),
            }
        }
    }
}

/// Pairs of a SET NX and a second command on the same key, with their expected answers.
fn requests(store: &mut Store, round: usize) -> Vec<(Request, &'static [u8])> {
    (0..IN_FLIGHT / 2)
        .flat_map(|n| {
            let key = format!("{round}/{n}");
            let set = store.command(&["SET", &key, "value", "NX"]);
            let remove = match n % 4 {
                0 => (store.command(&["DEL", &key]), &b":1\r\n"[..]),
                1 => (store.command(&["VDEL", &key, "value"]), &b":1\r\n"[..]),
                2 => (store.command(&["VDEL", &key, "another"]), &b":-1\r\n"[..]),
                _ => (
                    store.command(&["SET", &key, "again", "NX"]),
                    &b":-1\r\n"[..],
                ),
            };
            [(set, &b"+OK\r\n"[..]), remove]
        })
        .collect()
}

fn send(client: &mut Client, requests: &[(u16, Publish)], dup: bool) {
    let mut bytes = Vec::new();
    for (packet_id, publish) in requests {
        let mut publish = publish.clone();
        publish.packet_id = *packet_id;
        publish.dup = dup;
        bytes.extend(publish.bytes());
    }
    client.send(&bytes);
}

/// Runs rounds on one session, each with a kill. The client redelivers with the flag `dup`. A
/// client that is not `prompt` has a small Receive Maximum, and acknowledges no answer before the
/// kill.
///
/// Returns the numbers of redelivered requests and of repeated answers.
fn kill_with_requests_in_flight(rounds: usize, dup: bool, prompt: bool) -> (usize, usize) {
    let mut dice = Dice::thrown();
    let mut server = Server::restartable(&[]);
    let mut store = begin(&server, "client");
    let mut last = None;
    let (mut redelivered, mut repeated_answers) = (0, 0);
    for round in 0..rounds {
        if !prompt {
            let connect = connect("client").with(Property::ReceiveMaximum(10));
            store.client = Client::connect(server.address(), &connect);
            store.client.acknowledges = false;
        }
        let requests = requests(&mut store, round);
        let mut sent: Vec<(u16, Publish)> = (1..)
            .zip(&requests)
            .map(|(id, (request, _))| (id, request.publish()))
            .collect();
        let mut received = Received::nothing_for(&sent, prompt);
        send(&mut store.client, &sent, false);
        received.take_some_and_kill(&mut server, &mut store.client, &mut dice);

        server.restart();
        store = resume(&server, "client");
        sent.retain(|(id, _)| !received.acknowledged.contains(id));
        redelivered += sent.len();
        send(&mut store.client, &sent, dup);
        received.take_rest(&mut store.client);
        repeated_answers += received.repeated;
        last = check_answers(&requests, &received, last);
        check_values(&mut store, round, &requests, &received);
        store.client.drain();
    }
    (redelivered, repeated_answers)
}

fn answer<'a>(received: &'a Received, (request, _): &(Request, &[u8])) -> &'a Answer {
    &received.answers[request.correlation.as_ref().unwrap()]
}

/// A SET has a new version, and the next command on its key returns that version. `last` is the
/// last version before these requests. Returns their last one.
fn check_answers(
    requests: &[(Request, &[u8])],
    received: &Received,
    mut last: Option<Hlc>,
) -> Option<Hlc> {
    for (n, request) in requests.iter().enumerate() {
        let (payload, version) = answer(received, request);
        assert_eq!(payload, request.1, "{}", request.0.payload.escape_ascii());
        if n % 2 == 0 {
            assert!(*version > last, "{version:?} after {last:?}");
            last.clone_from(version);
        } else {
            assert_eq!(*version, last);
        }
    }
    last
}

/// The values of the keys match the answers.
fn check_values(
    store: &mut Store,
    round: usize,
    requests: &[(Request, &[u8])],
    received: &Received,
) {
    for n in (0..IN_FLIGHT / 2).step_by(17) {
        let current = store.ask(&["GET", &format!("{round}/{n}")]);
        let expected = match n % 4 {
            0 | 1 => (&b"$-1\r\n"[..], None),
            _ => {
                let (_, version) = answer(received, &requests[2 * n]);
                (&b"$5\r\nvalue\r\n"[..], version.clone())
            }
        };
        assert_eq!((current.payload(), current.version()), expected);
    }
}

#[test]
fn requests_in_flight_redelivered_with_dup_run_once() {
    let (redelivered, _) = kill_with_requests_in_flight(10, true, true);
    assert!(redelivered > 0, "no kill interrupted a request");
}

/// Some clients redeliver without DUP.
#[test]
fn requests_in_flight_redelivered_without_dup_run_once() {
    let (redelivered, _) = kill_with_requests_in_flight(10, false, true);
    assert!(redelivered > 0, "no kill interrupted a request");
}

/// Answers waited for a client that acknowledged none. The server redelivers them unasked, and they
/// equal the answers to redelivered requests.
#[test]
fn waiting_answers_are_redelivered_unchanged() {
    let mut repeated_answers = (0..4).map(|_| kill_with_requests_in_flight(5, true, false).1);
    assert!(
        repeated_answers.any(|count| count > 0),
        "no answer was repeated"
    );
}

/// The properties other than the version are the same, too.
#[test]
fn answer_to_a_redelivery_has_the_same_properties() {
    let mut server = Server::restartable(&[]);
    let mut store = begin(&server, "client");
    let mut request = store.command(&["SET", "key", "value"]);
    request.expiry_s = Some(600);
    request = request.with("aio-persistence", "true");
    let (id, first) = store.exchange(&request);
    server.kill_and_restart();
    let mut store = resume(&server, "client");
    let second = store.redeliver(&request, id, true);
    assert_eq!(first.user(), second.user());
    assert_eq!(property::users(&first.publish.properties).len(), 4);
    assert_eq!(first.publish.topic, second.publish.topic);
}
