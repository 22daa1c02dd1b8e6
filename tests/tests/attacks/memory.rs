//! Clients fill every structure that outlives a packet, in little memory, and the server is then
//! killed and started again on what they left.
//!
//! Each attack sends more than fits the memory limit, from 64 attackers in turn. All come from one
//! address, like the honest client, so that only what is guaranteed to every client helps it.

use std::time::Duration;

use statehouse_tests::{
    Client, Connect, Property, Publish, Server, attack,
    client::PATIENCE,
    packet::{self, kind},
};

const ATTACKERS: usize = 64;
const WEEK_S: u32 = 7 * 24 * 3600;
const QUOTA_EXCEEDED: u8 = 0x97;
/// Sessions and exchanges take a debug build long: so many attempts suffice for the smaller limits.
const ATTEMPTS_MAX: usize = 6000;
/// A debug build on a busy machine serves each attack and the honest client.
const P99_MAX: Duration = Duration::from_secs(5);

/// A client id of one of the attackers.
fn id(what: &str, number: usize) -> String {
    format!("{what}-{}-{number}", number % ATTACKERS)
}

/// Connects if the server accepts it. A refusal must have the code of a quota.
fn connect(server: &Server, connect: &Connect) -> Option<Client> {
    let (client, connack) = Client::try_connect(server.address(), connect);
    match connack.reason {
        0 => Some(client),
        QUOTA_EXCEEDED => None,
        other => panic!("CONNACK {other:#x}"),
    }
}

/// Sessions with a will of 60 KB that is due in a week.
fn wills(server: &Server, limit_mib: usize) -> usize {
    let attempts = (limit_mib * 20).min(ATTEMPTS_MAX);
    let will = Publish::new("will", vec![b'w'; 60_000]);
    (0..attempts)
        .filter(|n| {
            let hello = Connect::resume(&id("will", *n), WEEK_S).will(will.clone(), WEEK_S);
            connect(server, &hello).is_some()
        })
        .count()
}

/// Sessions with 1024 QoS 2 messages that are never released.
fn exchanges(server: &Server, limit_mib: usize) -> usize {
    let sessions = (limit_mib * 5).min(ATTEMPTS_MAX / 10);
    let publishes: Vec<u8> = (1..=1024)
        .flat_map(|packet_id| {
            let mut publish = Publish::new("t", "").qos(2);
            publish.packet_id = packet_id;
            publish.bytes()
        })
        .collect();
    let mut accepted = 0;
    for n in 0..sessions {
        let Some(mut client) = connect(server, &Connect::resume(&id("exchange", n), WEEK_S)) else {
            continue;
        };
        client.send(&publishes);
        for _ in 0..1024 {
            let answer = client
                .take("a PUBREC", |it| it.kind() == kind::PUBREC)
                .ack();
            accepted += usize::from(answer.reason < 0x80);
            assert!(answer.reason < 0x80 || answer.reason == QUOTA_EXCEEDED);
        }
    }
    accepted
}

/// Connections that stay, with 32 topic aliases of 65 KB each.
fn aliases(server: &Server, limit_mib: usize) -> Vec<Client> {
    let connections = (limit_mib * 3 / 4).min(400);
    let attack = |n: usize| {
        let mut client = connect(server, &Connect::new(&id("alias", n)))?;
        for alias in 1..=32 {
            let topic = format!("{n:065000}");
            let publish = Publish::new(&topic, "").with(Property::TopicAlias(alias));
            // It is disconnected at its bound.
            if client.try_send(&publish.bytes()).is_err() {
                break;
            }
        }
        Some(client)
    };
    (0..connections).filter_map(attack).collect()
}

/// Sessions with the most subscriptions that a client may have, each as long as it is useful.
fn subscriptions(server: &Server, _: usize) -> usize {
    let level = "x".repeat(60);
    let mut granted = 0;
    for n in 0..ATTACKERS {
        let Some(mut client) = connect(server, &Connect::resume(&id("subscriber", n), WEEK_S))
        else {
            continue;
        };
        for m in 0..16 {
            let filters: Vec<String> = (0..64)
                .map(|k| format!("{n}/{m}/{k}/+/{level}/+/{level}/#"))
                .collect();
            let filters: Vec<_> = filters.iter().map(|it| (&**it, 1)).collect();
            let packet_id = client.packet_id();
            client.send(&packet::subscribe(packet_id, &[], &filters));
            let suback = client.take("a SUBACK", |it| it.kind() == kind::SUBACK);
            let (_, reasons) = suback.suback();
            granted += reasons.iter().filter(|it| **it < 0x80).count();
        }
    }
    granted
}

/// Retained messages of 500 bytes.
fn retained(server: &Server, _: usize) -> usize {
    let mut accepted = 0;
    for attacker in 0..ATTACKERS {
        let Some(mut client) = connect(server, &Connect::new(&id("retainer", attacker))) else {
            continue;
        };
        for n in 0..300 {
            let topic = format!("retained/{attacker}/{n}");
            let answer = client.publish(Publish::new(&topic, [b'r'; 500]).qos(1).retained());
            accepted += usize::from(answer.reason < 0x80);
        }
    }
    accepted
}

/// Absent sessions that hold nothing, and more that hold a subscription.
fn sessions(server: &Server, limit_mib: usize) -> usize {
    let attempts = (limit_mib * 10).min(ATTEMPTS_MAX);
    (0..attempts)
        .filter(|n| {
            let hello = Connect::resume(&id("session", *n), WEEK_S);
            let Some(mut client) = connect(server, &hello) else {
                return false;
            };
            if n % 2 == 0 {
                client.subscribe("s", 0);
            }
            true
        })
        .count()
}

/// A client that was not there before is served.
fn newcomer_is_served(server: &Server, what: &str) {
    let mut store = server.store(&format!("newcomer-{what}"));
    store.set("newcomer", what);
    assert_eq!(store.get("newcomer"), Some(what.as_bytes().to_vec()));
    store.client.disconnect();
}

fn attacked<T>(server: &mut Server, name: &str, limit_mib: usize, attack: fn(&Server, usize) -> T) {
    let title = format!("{name} of {ATTACKERS} clients in {limit_mib} MiB");
    let outcome = attack::run(&title, server, |server| attack(server, limit_mib));
    outcome.assert_victim_served(P99_MAX.min(PATIENCE));
    newcomer_is_served(server, name);
    let kills = server.cgroup().map_or(0, |it| it.oom_kills());
    assert_eq!(kills, 0, "{title}: killed after the restart");
}

/// The attacks one after the other. The state of each stays for the next, over restarts.
fn all(limit_mib: usize) {
    let Some(mut server) = Server::limited(limit_mib as u64, &[]) else {
        return;
    };
    attacked(&mut server, "wills", limit_mib, wills);
    attacked(
        &mut server,
        "unreleased QoS 2 messages",
        limit_mib,
        exchanges,
    );
    attacked(&mut server, "topic aliases", limit_mib, aliases);
    attacked(&mut server, "subscriptions", limit_mib, subscriptions);
    attacked(&mut server, "retained messages", limit_mib, retained);
    attacked(&mut server, "sessions", limit_mib, sessions);
}

#[test]
#[ignore = "it fills 128 MiB six times, with restarts"]
fn memory_of_128_mib_is_not_exhausted() {
    all(128);
}

#[test]
#[ignore = "it fills 256 MiB six times, with restarts"]
fn memory_of_256_mib_is_not_exhausted() {
    all(256);
}

#[test]
#[ignore = "it fills 1 GiB six times, with restarts"]
fn memory_of_1_gib_is_not_exhausted() {
    all(1024);
}
