//! Attacks with requests that cause much work under the lock of the broker or the store. They must
//! not delay an honest client.
//!
//! If Mosquitto can serve the same attack, the test measures its PINGRESPs too, and prints both
//! figures. The servers are in memory, because a single slow flush would hide what a lock costs.

use std::{
    net::SocketAddr,
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::{Duration, Instant},
};

use statehouse_tests::{
    Client, Connect, Publish, Server, attack,
    client::PATIENCE,
    mosquitto::Mosquitto,
    packet::{self, kind},
    resp,
};

/// The bound for a release build. A debug build is about twenty times slower.
const VICTIM_P99_MAX: Duration = match cfg!(debug_assertions) {
    true => Duration::from_millis(250),
    false => Duration::from_millis(10),
};

/// The duration of an attack.
const TIME: Duration = Duration::from_secs(3);

/// Filters in one SUBSCRIBE.
const FILTERS_PER_PACKET: usize = 50;

const RETAINED: usize = 16_000;

#[test]
#[ignore = "an attack takes half a minute"]
fn searches_of_many_retained_topics_do_not_stall() {
    let fill = |address| {
        let mut filler = Client::connect(address, &Connect::new("filler"));
        for number in 0..RETAINED {
            let topic = format!("t{number}{}", "/x".repeat(59));
            filler.send(&Publish::new(&topic, "x").retained().bytes());
        }
        filler.ping();
    };
    let subscribe = |address, ()| {
        let filter = |number| format!("+{}/y{number}", "/x".repeat(58));
        let filters: Vec<_> = (0..64).map(filter).collect();
        let mut client = Client::connect(address, &Connect::new("searcher"));
        let began = Instant::now();
        while began.elapsed() < TIME {
            send_subscribe(&mut client, &filters);
            thread::sleep(Duration::from_millis(200));
        }
    };
    compare("64 filters over 16 000 retained topics", fill, subscribe);
}

#[test]
#[ignore = "an attack takes half a minute"]
fn messages_through_many_wildcards_do_not_stall() {
    const CLIENTS: usize = 8;
    const FILTERS: usize = 750;
    let fill = |address| {
        let subscriber = |client| {
            let filter = |number: usize| {
                let bit = |bit: usize| if number >> bit & 1 == 0 { "+/" } else { "a/" };
                (0..13).map(bit).collect::<String>() + "never"
            };
            let filters: Vec<_> = (client * FILTERS..(client + 1) * FILTERS)
                .map(filter)
                .collect();
            let mut client = Client::connect(address, &Connect::new(&format!("deep{client}")));
            for filters in filters.chunks(FILTERS_PER_PACKET) {
                send_subscribe(&mut client, filters);
            }
            client.ping();
            client
        };
        (0..CLIENTS).map(subscriber).collect::<Vec<_>>()
    };
    let flood = |address, subscribers| {
        let mut client = Client::connect(address, &Connect::new("flood"));
        let publish = Publish::new(&"a/".repeat(13), "x").bytes().repeat(100);
        let began = Instant::now();
        while began.elapsed() < TIME {
            client.send(&publish);
        }
        drop(subscribers);
    };
    compare("6 000 deep wildcards and a flood", fill, flood);
}

#[test]
#[ignore = "an attack takes a minute"]
fn messages_to_groups_of_absent_members_do_not_stall() {
    const MEMBERS: usize = 4000;
    const GROUPS: usize = 16;
    let fill = |address| {
        let filters: Vec<_> = (0..GROUPS).map(|it| format!("$share/g{it}/work")).collect();
        for number in 0..MEMBERS {
            let connect = Connect::resume(&format!("member{number}"), 3600);
            let mut member = Client::connect(address, &connect);
            send_subscribe(&mut member, &filters);
            member.ping();
            member.disconnect();
        }
    };
    let publish = |address, ()| {
        let mut client = Client::connect(address, &Connect::new("publisher"));
        let began = Instant::now();
        while began.elapsed() < TIME {
            let mut batch = Vec::new();
            for _ in 0..20 {
                let mut publish = Publish::new("work", "x").qos(1);
                publish.packet_id = client.packet_id();
                batch.extend(publish.bytes());
            }
            client.send(&batch);
            wait_for_acks(&mut client, 20);
        }
    };
    compare("16 groups of 4 000 absent members", fill, publish);
}

#[test]
#[ignore = "an attack takes seconds"]
fn requests_of_many_empty_strings_do_not_stall() {
    let payload = resp::array(&vec![""; 300_000]);
    let mut server = in_memory();
    let outcome = attack::run("1.8 MB of empty strings", &mut server, |server| {
        let mut store = server.store("empty");
        let began = Instant::now();
        while began.elapsed() < TIME {
            let request = store.request(payload.clone());
            assert_eq!(store.call(&request).text(), "-ERR unknown command\\r\\n");
        }
    });
    outcome.assert_victim_served(VICTIM_P99_MAX);
}

#[test]
#[ignore = "an attack takes seconds"]
fn scans_of_long_keys_do_not_stall() {
    let mut server = in_memory();
    let mut owner = server.store("owner");
    for number in 0..64 {
        owner.set(format!("{number:02}{}", "k".repeat(30 << 10)), "v");
    }
    let outcome = attack::run("256 SCANs of keys of 30 KB", &mut server, |server| {
        let mut store = server.store("scanner");
        let began = Instant::now();
        while began.elapsed() < TIME {
            let mut batch = Vec::new();
            for _ in 0..256 {
                let mut publish = store.command(&["SCAN", "*"]).publish();
                publish.packet_id = store.client.packet_id();
                batch.extend(publish.bytes());
            }
            store.client.send(&batch);
            wait_for_acks(&mut store.client, 256);
        }
    });
    outcome.assert_victim_served(VICTIM_P99_MAX);
}

fn in_memory() -> Server {
    Server::with("", &["--durability", "memory"])
}

/// Runs an attack that Mosquitto can serve too.
fn compare<T>(name: &str, fill: impl Fn(SocketAddr) -> T, run: impl Fn(SocketAddr, T)) {
    let mosquitto = Mosquitto::start();
    let filled = fill(mosquitto.address());
    // Mosquitto may be silent for longer than a test client waits.
    let theirs = ping_p99(mosquitto.address(), || run(mosquitto.address(), filled));
    let theirs = theirs.unwrap_or(PATIENCE);
    drop(mosquitto);
    let mut server = in_memory();
    let filled = fill(server.address());
    let (outcome, ours) = {
        let mut ours = Duration::ZERO;
        let outcome = attack::run(name, &mut server, |server| {
            let address = server.address();
            ours = ping_p99(address, || run(address, filled)).unwrap();
        });
        (outcome, ours)
    };
    println!("{name}: p99 of a PINGRESP {ours:?}, of Mosquitto's {theirs:?}");
    outcome.assert_victim_served(VICTIM_P99_MAX);
}

/// Runs `work` and sends a PINGREQ every five milliseconds. Returns the 99th percentile of the time
/// to the PINGRESP, or an error if a PINGRESP does not arrive within [`PATIENCE`].
fn ping_p99(address: SocketAddr, work: impl FnOnce()) -> thread::Result<Duration> {
    let over = AtomicBool::new(false);
    thread::scope(|scope| {
        let pings = scope.spawn(|| {
            let mut client = Client::connect(address, &Connect::new("ping"));
            let mut times = Vec::new();
            while !over.load(Ordering::Relaxed) {
                let began = Instant::now();
                client.ping();
                times.push(began.elapsed());
                thread::sleep(Duration::from_millis(5));
            }
            times.sort_unstable();
            times[times.len() * 99 / 100]
        });
        work();
        over.store(true, Ordering::Relaxed);
        pings.join()
    })
}

fn send_subscribe(client: &mut Client, filters: &[String]) {
    let filters: Vec<_> = filters.iter().map(|it| (it.as_str(), 0)).collect();
    let id = client.packet_id();
    client.send(&packet::subscribe(id, &[], &filters));
}

fn wait_for_acks(client: &mut Client, count: usize) {
    let acks = std::iter::repeat_with(|| client.next()).filter(|it| it.kind() == kind::PUBACK);
    assert_eq!(acks.take(count).count(), count);
}
