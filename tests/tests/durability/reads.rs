//! The durability barrier for answers and notifications, including those of reads. The server must
//! send nothing before it is durable, so every state that a client has seen must survive `kill -9`.

use std::{
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::Duration,
};

use statehouse_tests::{
    Client, Connect, Dice, Heard, Hlc, Property, Server, Store,
    packet::{acknowledge, kind},
    store::version,
};

const KEYS: u64 = 4;

fn key(n: u64) -> String {
    format!("key {n}")
}

/// The newest version of each key that a client has seen.
type Seen = Vec<Option<Hlc>>;

fn newer(seen: &mut Seen, key: usize, version: Option<Hlc>) {
    assert!(version.is_some() || seen[key].is_none(), "a key was lost");
    assert!(version >= seen[key], "{version:?} after {:?}", seen[key]);
    seen[key] = version;
}

/// Writes as fast as possible, with many requests in flight and without checking the answers, until
/// the connection breaks.
fn write(mut store: Store) {
    store.client.acknowledges = false;
    let mut n = 0;
    loop {
        let requests: Vec<u8> = (0..50)
            .flat_map(|_| {
                n += 1;
                let request = store.command(&["SET", &key(n % KEYS), &n.to_string()]);
                let mut publish = request.publish();
                publish.packet_id = store.client.packet_id();
                publish.bytes()
            })
            .collect();
        if store.client.try_send(&requests).is_err() {
            return;
        }
        let mut open = 50;
        while open > 0 {
            match store.client.poll(Duration::from_secs(20)) {
                Heard::Packet(packet) if packet.kind() == kind::PUBACK => open -= 1,
                Heard::Packet(packet) => {
                    let id = packet.publish().packet_id;
                    let _ = store.client.try_send(&acknowledge(kind::PUBACK, id));
                }
                _ => return,
            }
        }
    }
}

/// Reads the keys in turn, with one GET in flight, until the connection breaks. After `changes`
/// changes, it kills the process as soon as it sees the last one.
fn read(mut store: Store, server: &Mutex<Server>, changes: Option<u64>) -> Seen {
    let mut seen = vec![None; KEYS as usize];
    let mut n = 0;
    let mut left = changes;
    loop {
        let request = store.command(&["GET", &key(n)]);
        let mut publish = request.publish();
        publish.packet_id = store.client.packet_id();
        if store.client.try_send(&publish.bytes()).is_err() {
            return seen;
        }
        loop {
            match store.client.poll(Duration::from_secs(20)) {
                Heard::Packet(packet) if packet.kind() == kind::PUBLISH => {
                    let version = version(&packet.publish());
                    if version > seen[n as usize] {
                        left = left.map(|left| left.saturating_sub(1));
                    }
                    if left == Some(0) {
                        server.lock().unwrap().kill();
                    }
                    newer(&mut seen, n as usize, version);
                }
                Heard::Packet(_) => break,
                _ => return seen,
            }
        }
        n = (n + 1) % KEYS;
    }
}

/// Collects the notifications of all keys, until the connection breaks.
fn watch(mut store: Store, ready: &AtomicBool) -> Seen {
    for n in 0..KEYS {
        store.watch(key(n));
    }
    ready.store(true, Ordering::SeqCst);
    let mut seen = vec![None; KEYS as usize];
    loop {
        match store.client.poll(Duration::from_secs(20)) {
            Heard::Packet(packet) if packet.kind() == kind::PUBLISH => {
                let publish = packet.publish();
                let last = publish.topic.as_bytes().last().unwrap() - b'0';
                newer(&mut seen, last.into(), version(&publish));
            }
            Heard::Packet(_) => {}
            _ => return seen,
        }
    }
}

#[test]
fn observed_versions_survive_kills() {
    let mut dice = Dice::thrown();
    let server = Arc::new(Mutex::new(Server::restartable(&[])));
    let connect = |id: &str| server.lock().unwrap().store(id);
    let mut seen: Seen = vec![None; KEYS as usize];
    for _ in 0..12 {
        // The watcher must be ready before a reader can kill the process.
        let ready = Arc::new(AtomicBool::new(false));
        let watcher = {
            let (store, ready) = (connect("watcher"), ready.clone());
            thread::spawn(move || watch(store, &ready))
        };
        while !ready.load(Ordering::SeqCst) {
            assert!(!watcher.is_finished(), "the watcher failed");
            thread::yield_now();
        }
        let writer = connect("writer");
        let readers = [None, Some(1 + dice.below(60))]
            .map(|changes| (connect(&format!("reader {changes:?}")), changes));
        let readers = readers.map(|(store, changes)| {
            let server = server.clone();
            thread::spawn(move || read(store, &server, changes))
        });
        let writer = thread::spawn(move || write(writer));
        writer.join().unwrap();
        let mut all: Vec<Seen> = readers
            .into_iter()
            .map(|reader| reader.join().unwrap())
            .collect();
        all.push(watcher.join().unwrap());
        for one in all {
            for (seen, one) in seen.iter_mut().zip(one) {
                *seen = seen.clone().max(one);
            }
        }
        server.lock().unwrap().restart();
        let mut after = connect("after");
        for n in 0..KEYS {
            let version = after.ask(&["GET", &key(n)]).version();
            newer(&mut seen, n as usize, version);
        }
    }
    assert!(seen.iter().all(Option::is_some), "a key was never seen");
}

/// Acknowledgements keep the order of their messages (MQTT 5, section 4.6). The PUBACK of a write
/// waits for the disk, and the PUBACKs of reads and other messages must not overtake it.
#[test]
fn acknowledgements_of_reads_and_writes_keep_order() {
    let server = Server::start();
    let connect = Connect::new("client").with(Property::ReceiveMaximum(1000));
    let client = Client::connect(server.address(), &connect);
    let mut store = Store::new(client, "client");
    let mut bytes = Vec::new();
    for n in 1..=300_u16 {
        let mut publish = match n % 3 {
            0 => statehouse_tests::Publish::new("nobody", "x").qos(1),
            1 => store.command(&["SET", "key", &n.to_string()]).publish(),
            _ => store.command(&["GET", "key"]).publish(),
        };
        publish.packet_id = n;
        bytes.extend(publish.bytes());
    }
    store.client.send(&bytes);
    let mut acknowledged = 0;
    let mut answers = 0;
    while acknowledged < 300 {
        let packet = store.client.next();
        if packet.kind() == kind::PUBLISH {
            answers += 1;
            continue;
        }
        acknowledged += 1;
        assert_eq!(packet.ack().packet_id, acknowledged);
        // Two of three are requests, and each was answered before its acknowledgement.
        assert!(
            answers >= acknowledged - acknowledged / 3,
            "PUBACK {acknowledged} after {answers} answers"
        );
    }
    store.expect_nothing();
}
