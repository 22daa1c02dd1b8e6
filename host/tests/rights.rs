//! The effect of access rules on keys: the standard policy on a store, with and without rights.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "tests")]

use std::sync::Arc;
use std::time::Instant;

use bytes::Bytes;
use statehouse::STANDARD_POLICY;
use statehouse_access::rules::{Grants, Principal, Rules};
use statehouse_core::policy::{Engine, Registry};
use statehouse_core::request::{Delivery, Dialect, Incoming};
use statehouse_core::store::{Effects, Peer, Quota, Rerun, Right, Store};
use statehouse_core::{Core, Input, Now, Settings};
use statehouse_mqtt::{Properties, PropertiesBuilder};
use statehouse_protocol::rights::ClientRights;

const NOW_MS: u64 = 1_700_000_000_000;
const NOT_AUTHORIZED: &str = "-ERR not authorized\r\n";

const RULES: &str = r#"
[[rules]]
principals.clientIds = ["reader", "both"]
stateStoreResources = [{ method = "Read", keyType = "Pattern", keys = ["shared/*"] }]

[[rules]]
principals.clientIds = ["writer", "both"]
stateStoreResources = [{ method = "Write", keyType = "Pattern", keys = ["shared/*"] }]

[[rules]]
principals.clientIds = ["picky"]
stateStoreResources = [{ method = "Read", keyType = "Pattern", keys = ["k49?7"] }]
"#;

/// A store and its clients, which send requests one after the other.
struct World {
    core: Core,
    packet_id: u16,
}

impl World {
    fn new() -> Self {
        let policy = Engine::new().unwrap().load(STANDARD_POLICY).unwrap();
        let mut store = Store::new(Registry::new(Arc::new(policy), None), Quota::default());
        store.supervision().purity_every = 1;
        let settings = Settings {
            dialect: Some(Dialect::Sdk),
            ..Settings::default()
        };
        Self {
            core: Core::in_memory(store, settings),
            packet_id: 0,
        }
    }

    /// Sends a new request.
    fn ask(
        &mut self,
        client: &str,
        grants: Option<&Arc<Grants>>,
        arguments: &[&[u8]],
    ) -> (Effects, Bytes) {
        self.packet_id += 1;
        let packet_id = self.packet_id;
        self.send(client, grants, arguments, packet_id, false)
    }

    fn send(
        &mut self,
        client: &str,
        grants: Option<&Arc<Grants>>,
        arguments: &[&[u8]],
        packet_id: u16,
        dup: bool,
    ) -> (Effects, Bytes) {
        let payload = Bytes::from(statehouse_policy::resp::request(arguments));
        let peer = peer(client);
        let properties = PropertiesBuilder::new()
            .response_topic(&format!("clients/{client}/y"))
            .correlation_data(b"1")
            .user("__ts", "1700000000000:0:client");
        let properties = Properties::parse(properties.finish().unwrap()).unwrap();
        let incoming = Incoming {
            delivery: Delivery::new(&peer, packet_id, dup),
            grants: grants.map(|it| it.clone() as Arc<dyn ClientRights>),
            ..Incoming::new(&peer, &payload, &properties)
        };
        let now = Now {
            ms: NOW_MS,
            instant: Instant::now(),
        };
        let decision = self.core.handle(Input::Publish(&incoming), now);
        let mut effects = decision.effects;
        let answer = effects.answer.take().expect("every request has an answer");
        (effects, answer.payload)
    }
}

fn peer(client: &str) -> Peer {
    let number = client.len() as u64;
    Peer::numbered(client, number)
}

fn grants(client: &str) -> Option<Arc<Grants>> {
    grants_by(RULES, client)
}

fn grants_by(rules: &str, client: &str) -> Option<Arc<Grants>> {
    let principal = Principal {
        client,
        user: None,
        attributes: &[],
    };
    Some(Rules::parse(rules).unwrap().grants(principal))
}

#[test]
fn each_command_needs_its_right() {
    let mut world = World::new();
    let commands: [(&[&[u8]], Right); 6] = [
        (&[b"GET", b"shared/a"], Right::Read),
        (&[b"KEYNOTIFY", b"shared/a"], Right::Read),
        (&[b"KEYNOTIFY", b"shared/a", b"STOP"], Right::Read),
        (&[b"SET", b"shared/a", b"v"], Right::Write),
        (&[b"VDEL", b"shared/a", b"other"], Right::Write),
        (&[b"DEL", b"shared/a"], Right::Write),
    ];
    for (command, needs) in commands {
        for (client, rights) in [
            ("reader", &[Right::Read][..]),
            ("writer", &[Right::Write]),
            ("both", &[Right::Read, Right::Write]),
            ("nobody", &[]),
        ] {
            world.ask("admin", None, &[b"SET", b"shared/a", b"v"]);
            let (effects, answer) = world.ask(client, grants(client).as_ref(), command);
            let may = rights.contains(&needs);
            assert_eq!(
                answer != NOT_AUTHORIZED,
                may,
                "{client} {command:?}: {answer:?}"
            );
            assert_eq!(effects.denied.is_none(), may);
            if !may {
                let wrote = effects.handled.is_some_and(|it| !it.writes.is_empty());
                assert!(
                    !wrote && effects.notifications.is_empty(),
                    "{client} {command:?}"
                );
                assert!(world.core.store().state().table.get(b"shared/a").is_some());
            }
        }
    }
}

#[test]
fn refusal_does_not_reveal_whether_a_key_exists() {
    let mut world = World::new();
    world.ask("admin", None, &[b"SET", b"secret", b"v"]);
    for command in ["GET", "DEL", "KEYNOTIFY"] {
        for key in ["secret", "nothing"] {
            let ask = [command.as_bytes(), key.as_bytes()];
            let (_, answer) = world.ask("both", grants("both").as_ref(), &ask);
            assert_eq!(answer, NOT_AUTHORIZED, "{command} {key}");
        }
    }
}

/// Lists all keys that match. Returns the keys and the received tokens.
fn scan(world: &mut World, client: &str, pattern: &[u8]) -> (Vec<String>, Vec<Vec<u8>>) {
    let grants = grants(client);
    let (mut keys, mut tokens) = (Vec::new(), Vec::<Vec<u8>>::new());
    loop {
        let mut ask = vec![&b"SCAN"[..], pattern];
        ask.extend(tokens.last().map(|it| &it[..]));
        let (_, answer) = world.ask(client, grants.as_ref(), &ask);
        let text = String::from_utf8_lossy(&answer).into_owned();
        keys.extend(
            text.split("\r\n")
                .filter(|it| it.starts_with('k'))
                .map(str::to_owned),
        );
        if text.starts_with("*1\r\n") {
            return (keys, tokens);
        }
        assert!(text.starts_with("*2\r\n"), "{text}");
        let token = token_of(&answer);
        assert!(tokens.len() < 100, "the scan ends");
        tokens.push(token);
    }
}

/// The last bulk string of an answer.
fn token_of(answer: &[u8]) -> Vec<u8> {
    let body = answer.strip_suffix(b"\r\n").unwrap();
    // `$<n>\r\n<bytes>`: only here the length matches the rest.
    let at = (0..body.len()).rev().find(|at| {
        let Some(rest) = body[*at..].strip_prefix(b"$") else {
            return false;
        };
        let Some(end) = rest.windows(2).position(|it| it == b"\r\n") else {
            return false;
        };
        let length = std::str::from_utf8(&rest[..end])
            .ok()
            .and_then(|it| it.parse().ok());
        length == Some(rest.len() - end - 2)
    });
    let rest = &body[at.unwrap()..];
    let end = rest.windows(2).position(|it| it == b"\r\n").unwrap();
    rest[end + 2..].to_vec()
}

#[test]
fn scan_lists_readable_keys_and_tokens_reveal_no_others() {
    let mut world = World::new();
    let keys: Vec<String> = (0..5_000).map(|number| format!("k{number:04}")).collect();
    for key in &keys {
        world.ask("admin", None, &[b"SET", key.as_bytes(), b""]);
    }
    // All readable keys follow more keys than one page examines.
    let readable: Vec<String> = (0..10).map(|it| format!("k49{it}7")).collect();
    let (listed, tokens) = scan(&mut world, "picky", b"k*");
    assert_eq!(listed, readable);
    assert!(!tokens.is_empty(), "the scan has several pages");
    for token in tokens {
        let shows = |key: &String| token.windows(key.len()).any(|it| it == key.as_bytes());
        assert!(!keys.iter().any(shows), "{token:?}");
    }
    assert_eq!(scan(&mut world, "nobody", b"*").0, [""; 0]);
}

#[test]
fn scan_token_from_without_rules_is_invalid_with_rules() {
    let mut world = World::new();
    for number in 0..2_000 {
        let key = format!("k{number:04}");
        world.ask("admin", None, &[b"SET", key.as_bytes(), b""]);
    }
    let (_, answer) = world.ask("admin", None, &[b"SCAN", b"*"]);
    let token = token_of(&answer);
    let (_, answer) = world.ask("picky", grants("picky").as_ref(), &[b"SCAN", b"*", &token]);
    assert_eq!(answer, "-ERR syntax error\r\n");
}

#[test]
fn duplicate_is_answered_with_its_original_rights() {
    let mut world = World::new();
    let set: &[&[u8]] = &[b"SET", b"shared/a", b"v"];
    let changed = RULES.replace("both", "another");
    let (all, none) = (grants("both"), grants_by(&changed, "both"));
    let (_, first) = world.send("both", all.as_ref(), set, 1, false);
    assert_eq!(first, "+OK\r\n");
    let (effects, again) = world.send("both", none.as_ref(), set, 1, true);
    assert_eq!((&again, effects.repeated), (&first, Some(Rerun::Same)));

    let (_, first) = world.send("both", none.as_ref(), set, 2, false);
    assert_eq!(first, NOT_AUTHORIZED);
    let (effects, again) = world.send("both", all.as_ref(), set, 2, true);
    assert_eq!((&again, effects.repeated), (&first, Some(Rerun::Same)));
    assert!(
        effects.denied.is_none(),
        "the duplicate was not refused again"
    );
}

#[test]
fn refused_request_has_the_same_result_when_reexecuted() {
    let mut world = World::new();
    for (client, command) in [
        ("reader", &[&b"SET"[..], b"shared/a", b"v"][..]),
        ("writer", &[b"GET", b"shared/a"]),
        ("writer", &[b"SET", b"shared/a", b"v"]),
        ("picky", &[b"SCAN", b"*"]),
    ] {
        let (effects, answer) = world.ask(client, grants(client).as_ref(), command);
        let observed = effects.sampled.expect("every request is sampled");
        let mut instance = statehouse_core::policy::Instance::new(observed.by.clone());
        match observed.reexecute(&mut instance) {
            statehouse_core::store::Reexecution::Ran(again, _) => assert_eq!(again.payload, answer),
            _ => panic!("{client} {command:?} did not run"),
        }
    }
}

#[test]
fn writer_without_read_right_notifies_watchers() {
    let mut world = World::new();
    world.ask(
        "reader",
        grants("reader").as_ref(),
        &[b"KEYNOTIFY", b"shared/a"],
    );
    let (effects, answer) = world.ask(
        "writer",
        grants("writer").as_ref(),
        &[b"SET", b"shared/a", b"v"],
    );
    assert_eq!(answer, "+OK\r\n");
    let notified: Vec<_> = effects
        .notifications
        .iter()
        .flat_map(|it| &it.to)
        .map(|(peer, _)| &*peer.client)
        .collect();
    assert_eq!(notified, ["reader"]);
}

#[test]
fn scan_page_examines_a_bounded_number_of_key_bytes() {
    let mut world = World::new();
    for number in 0..100 {
        let key = format!("k{number:02}{}", "x".repeat(20_000));
        let (_, answer) = world.ask("owner", None, &[b"SET", key.as_bytes(), b"v"]);
        assert_eq!(answer, "+OK\r\n");
    }
    let (listed, tokens) = scan(&mut world, "picky", b"*");
    assert_eq!(listed, [""; 0]);
    assert!(
        tokens.len() >= 3,
        "2 MB of keys in {} pages",
        tokens.len() + 1
    );
}
