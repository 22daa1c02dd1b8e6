//! Many requests on their way when the process is killed. Whatever the client has no PUBACK for it sends again;
//! the commands are such that one that ran twice, or not at all, shows in its own answer or in a later one.

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

/// Below the Receive Maximum of the server, so that all may be on their way at once.
const IN_FLIGHT: usize = 400;

/// What came back so far.
#[derive(Default)]
struct Heads {
    answers: HashMap<Vec<u8>, (Vec<u8>, Option<Hlc>)>,
    acknowledged: HashSet<u16>,
    /// Answers that came once more.
    repeated: usize,
}

impl Heads {
    /// Takes what came next. An answer is the same each time; an acknowledgement comes behind its answer, but for a
    /// client that is not `prompt`: it would wait for itself.
    fn take(&mut self, packet: &Packet, sent: &HashMap<u16, Vec<u8>>, prompt: bool) {
        match packet.kind() {
            kind::PUBLISH => {
                let publish = packet.publish();
                let answer = (publish.payload.clone(), version(&publish));
                let key = correlation(&publish).expect("an answer");
                if !prompt && !sent.values().any(|it| *it == key) {
                    // Of the round before: its acknowledgement was lost with the connection that was taken over.
                    return;
                }
                if let Some(first) = self.answers.insert(key, answer.clone()) {
                    assert_eq!(first, answer, "another answer than the first time");
                    self.repeated += 1;
                }
            }
            kind::PUBACK => {
                let ack = packet.ack();
                assert_eq!(ack.reason, 0, "{ack:?}");
                assert!(
                    !prompt || self.answers.contains_key(&sent[&ack.packet_id]),
                    "PUBACK {} came before the answer",
                    ack.packet_id
                );
                assert!(
                    self.acknowledged.insert(ack.packet_id),
                    "{ack:?} came twice"
                );
            }
            other => panic!("a packet of type {other}"),
        }
    }
}

fn correlation(publish: &Publish) -> Option<Vec<u8>> {
    publish
        .properties
        .iter()
        .find_map(|property| match property {
            Property::CorrelationData(data) => Some(data.clone()),
            _ => None,
        })
}

/// Pairs of SET NX and its removal, now and then on a key that is there already.
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

/// One round after the other on one session, each with a kill; `dup` is what the client sends again with. A client that
/// is not `prompt` takes few answers at once and
/// acknowledges none before the kill. Returns how many requests were sent
/// again, and how many answers came once more.
fn kill_with_requests_in_flight(rounds: usize, dup: bool, prompt: bool) -> (usize, usize) {
    let mut dice = Dice::thrown();
    let mut server = Server::restartable(&[]);
    let mut store = begin(&server, "client");
    let mut last: Option<Hlc> = None;
    let (mut sent_again, mut heard_again) = (0, 0);
    for round in 0..rounds {
        if !prompt {
            let connect = connect("client").with(Property::ReceiveMaximum(10));
            store.client = Client::connect(server.address(), &connect);
            store.client.acknowledges = false;
        }
        let requests = requests(&mut store, round);
        let all: Vec<(u16, Publish)> = (1..)
            .zip(&requests)
            .map(|(id, (request, _))| (id, request.publish()))
            .collect();
        let sent = all
            .iter()
            .map(|(id, publish)| (*id, correlation(publish).unwrap()))
            .collect();
        let mut heads = Heads::default();
        send(&mut store.client, &all, false);
        // Read in between: what was not yet read is lost with the connection, and so is what the kill found in time.
        let read = dice.below(IN_FLIGHT as u64);
        for _ in 0..read {
            match store.client.poll(Duration::from_millis(20)) {
                Heard::Packet(packet) => heads.take(&packet, &sent, prompt),
                Heard::Silence => break,
                Heard::Closed => panic!("closed before the kill"),
            }
        }
        thread::sleep(dice.below_ms(5));
        server.kill();
        loop {
            match store.client.poll(PATIENCE) {
                Heard::Packet(packet) => heads.take(&packet, &sent, prompt),
                Heard::Closed => break,
                Heard::Silence => panic!("the connection outlives the process"),
            }
        }

        server.restart();
        store = resume(&server, "client");
        let open: Vec<_> = all
            .iter()
            .filter(|(id, _)| !heads.acknowledged.contains(id))
            .cloned()
            .collect();
        sent_again += open.len();
        send(&mut store.client, &open, dup);
        // An answer whose request was acknowledged is not asked for again: it comes by itself.
        while heads.acknowledged.len() < all.len() || heads.answers.len() < all.len() {
            match store.client.poll(PATIENCE) {
                Heard::Packet(packet) => heads.take(&packet, &sent, prompt),
                other => panic!("{other:?} instead of the rest"),
            }
        }
        heard_again += heads.repeated;
        for (n, ((request, expected), (id, _))) in requests.iter().zip(&all).enumerate() {
            let (payload, version) = &heads.answers[&sent[id]];
            assert_eq!(payload, expected, "{}", request.payload.escape_ascii());
            // A SET has a new version, and what follows it on its key tells that one.
            if n % 2 == 0 {
                assert!(version > &last, "{version:?} after {last:?}");
                last.clone_from(version);
            } else {
                assert_eq!(version, &last);
            }
        }
        // What is there is what was answered.
        for n in (0..IN_FLIGHT / 2).step_by(17) {
            let there = store.ask(&["GET", &format!("{round}/{n}")]);
            let expected = match n % 4 {
                0 | 1 => (&b"$-1\r\n"[..], None),
                _ => (
                    &b"$5\r\nvalue\r\n"[..],
                    heads.answers[&sent[&all[2 * n].0]].1.clone(),
                ),
            };
            assert_eq!((there.payload(), there.version()), expected);
        }
        store.client.drain();
    }
    (sent_again, heard_again)
}

#[test]
fn requests_in_flight_are_sent_again_with_dup() {
    let (sent_again, _) = kill_with_requests_in_flight(10, true, true);
    assert!(sent_again > 0, "no kill came in time");
}

/// Some clients do.
#[test]
fn requests_in_flight_are_sent_again_without_dup() {
    let (sent_again, _) = kill_with_requests_in_flight(10, false, true);
    assert!(sent_again > 0, "no kill came in time");
}

/// Answers that had to wait for their client come by themselves too, and are the same as those to its redeliveries.
#[test]
fn answers_that_waited_are_sent_again() {
    let mut heard_again = (0..4).map(|_| kill_with_requests_in_flight(5, true, false).1);
    assert!(heard_again.any(|count| count > 0), "no answer came again");
}

/// What the answer of a request carries besides its version: the same, too.
#[test]
fn the_answer_to_a_redelivery_has_the_same_properties() {
    let mut server = Server::restartable(&[]);
    let mut store = begin(&server, "client");
    let mut request = store.command(&["SET", "key", "value"]);
    request.expiry_s = Some(600);
    request = request.with("aio-persistence", "true");
    let id = store.client.start(request.publish());
    let first = store.finish(&request, id);
    server.kill();
    server.restart();
    let mut store = resume(&server, "client");
    let mut publish = request.publish();
    (publish.packet_id, publish.dup) = (id, true);
    store.client.start(publish);
    let second = store.finish(&request, id);
    assert_eq!(first.user(), second.user());
    assert_eq!(property::users(&first.publish.properties).len(), 4);
    assert_eq!(first.publish.topic, second.publish.topic);
}
