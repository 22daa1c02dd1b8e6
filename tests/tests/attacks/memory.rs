//! Attackers fill every structure that outlives a packet. The server must stay within a small
//! memory limit, also when it is killed and restarted on the data of the attackers.
//!
//! Each attack sends more than fits into the memory limit, from 64 attackers in turn. The attackers
//! and the honest client share one address, so only the guarantees for every client protect it.

use std::time::Duration;

use statehouse_tests::{
    Client, Connect, Property, Publish, Server, attack,
    client::PATIENCE,
    packet::{self, kind},
};

const ATTACKERS: usize = 64;
const WEEK_S: u32 = 7 * 24 * 3600;
const QUOTA_EXCEEDED: u8 = 0x97;
/// Limits the time for a debug build. So many attempts are enough for the smaller memory limits.
const ATTEMPTS_MAX: usize = 6000;
/// Allows for a debug build on a busy machine, which serves the attack and the honest client.
const P99_MAX: Duration = Duration::from_secs(5);

/// The client id for attempt `number`, which belongs to one of the attackers.
fn id(what: &str, number: usize) -> String {
    format!("{what}-{}-{number}", number % ATTACKERS)
}

/// Connects if the server accepts the client. A refusal must have the reason code for a quota.
fn connect(server: &Server, connect: &Connect) -> Option<Client> {
    let (client, connack) = Client::try_connect(server.address(), connect);
    match connack.reason {
        0 => Some(client),
        QUOTA_EXCEEDED => None,
        other => panic!("CONNACK {other:#x}"),
    }
}

/// Creates sessions with a will of 60 KB that is due in a week.
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

/// Creates sessions with 1024 QoS 2 messages that are never released.
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

/// Opens connections with 32 topic aliases of 65 KB each, and keeps them open.
fn aliases(server: &Server, limit_mib: usize) -> Vec<Client> {
    let connections = (limit_mib * 3 / 4).min(400);
    let attack = |n: usize| {
        let mut client = connect(server, &Connect::new(&id("alias", n)))?;
        for alias in 1..=32 {
            let topic = format!("{n:065000}");
            let publish = Publish::new(&topic, "").with(Property::TopicAlias(alias));
            // The server disconnects a client at its limit.
            if client.try_send(&publish.bytes()).is_err() {
                break;
            }
        }
        Some(client)
    };
    (0..connections).filter_map(attack).collect()
}

/// Creates sessions with as many long subscriptions as a client may have.
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

/// Publishes retained messages of 500 bytes.
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

/// Creates sessions without a connection. Every second one has a subscription.
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

/// Asserts that the server serves a client with a new session.
fn assert_newcomer_is_served(server: &Server, what: &str) {
    let mut store = server.store(&format!("newcomer-{what}"));
    store.set("newcomer", what);
    assert_eq!(store.get("newcomer"), Some(what.as_bytes().to_vec()));
    store.client.disconnect();
}

fn run_attack<T>(
    server: &mut Server,
    name: &str,
    limit_mib: usize,
    attack: fn(&Server, usize) -> T,
) {
    let title = format!("{name} of {ATTACKERS} clients in {limit_mib} MiB");
    let outcome = attack::run(&title, server, |server| attack(server, limit_mib));
    outcome.assert_victim_served(P99_MAX.min(PATIENCE));
    assert_newcomer_is_served(server, name);
    let kills = server.cgroup().map_or(0, |it| it.oom_kills());
    assert_eq!(kills, 0, "{title}: killed after the restart");
}

/// Runs all attacks in turn. The state of each attack stays for the next, over restarts.
fn run_all(limit_mib: usize) {
    let Some(mut server) = Server::limited(limit_mib as u64) else {
        return;
    };
    run_attack(&mut server, "wills", limit_mib, wills);
    run_attack(
        &mut server,
        "unreleased QoS 2 messages",
        limit_mib,
        exchanges,
    );
    run_attack(&mut server, "topic aliases", limit_mib, aliases);
    run_attack(&mut server, "subscriptions", limit_mib, subscriptions);
    run_attack(&mut server, "retained messages", limit_mib, retained);
    run_attack(&mut server, "sessions", limit_mib, sessions);
}

#[test]
#[ignore = "fills 64 MiB six times, with restarts"]
fn attacks_do_not_exhaust_64_mib() {
    run_all(64);
}

#[test]
#[ignore = "fills 128 MiB six times, with restarts"]
fn attacks_do_not_exhaust_128_mib() {
    run_all(128);
}

#[test]
#[ignore = "fills 256 MiB six times, with restarts"]
fn attacks_do_not_exhaust_256_mib() {
    run_all(256);
}

#[test]
#[ignore = "fills 1 GiB six times, with restarts"]
fn attacks_do_not_exhaust_1_gib() {
    run_all(1024);
}
