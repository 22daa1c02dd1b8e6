//! The effect of access rules on keys: the standard policy on a store, with and without rights.

#![allow(clippy::unwrap_used, reason = "tests")]

#[allow(dead_code, reason = "these tests need no policy of their own")]
mod common;

use std::sync::Arc;

use bytes::Bytes;
use common::{NOW_MS, at};
use statehouse::STANDARD_POLICY;
use statehouse_access::rules::{Grants, Principal, Rules};
use statehouse_core::policy::{Engine, Instance, Registry};
use statehouse_core::request::{Delivery, Incoming};
use statehouse_core::store::{Effects, Peer, Quota, Reexecution, Rerun, Right, Store};
use statehouse_core::{Core, Input};
use statehouse_mqtt::{Properties, PropertiesBuilder};
use statehouse_protocol::rights::ClientRights;
use statehouse_tests::resp;

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
    /// Read once, because tokens of SCAN hold for these rules only.
    rules: Rules,
    packet_id: u16,
}

impl World {
    fn new() -> Self {
        let policy = Engine::new().unwrap().load(STANDARD_POLICY).unwrap();
        let mut store = Store::new(Registry::new(Arc::new(policy), None), Quota::default());
        store.supervision().purity_every = 1;
        Self {
            core: common::core(store),
            rules: Rules::parse(RULES).unwrap(),
            packet_id: 0,
        }
    }

    /// Sends a new request. The client `admin` has all rights, and others those of [`RULES`].
    fn ask(&mut self, client: &str, arguments: &[&[u8]]) -> (Effects, Bytes) {
        self.packet_id += 1;
        let grants = (client != "admin").then(|| grants(&self.rules, client));
        self.send(client, grants.as_ref(), arguments, self.packet_id, false)
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
        let peer = Peer::numbered(client, client.len() as u64);
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
        let decision = self.core.handle(Input::Publish(&incoming), at(NOW_MS));
        let mut effects = decision.effects;
        let answer = effects.answer.take().expect("every request has an answer");
        (effects, answer.payload)
    }
}

fn grants(rules: &Rules, client: &str) -> Arc<Grants> {
    let principal = Principal {
        client,
        user: None,
        attributes: &[],
    };
    rules.grants(principal)
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
            world.ask("admin", &[b"SET", b"shared/a", b"v"]);
            let (effects, answer) = world.ask(client, command);
            let may = rights.contains(&needs);
            let case = format!("{client} {command:?}: {answer:?}");
            assert_eq!(answer != NOT_AUTHORIZED, may, "{case}");
            assert_eq!(effects.denied.is_none(), may, "{case}");
            if !may {
                let wrote = effects.handled.is_some_and(|it| !it.writes.is_empty());
                assert!(!wrote && effects.notifications.is_empty(), "{case}");
                let kept = world.core.store().state().table.get(b"shared/a");
                assert!(kept.is_some(), "{case}");
            }
        }
    }
}

#[test]
fn refusal_does_not_reveal_whether_a_key_exists() {
    let mut world = World::new();
    world.ask("admin", &[b"SET", b"secret", b"v"]);
    for command in ["GET", "DEL", "KEYNOTIFY"] {
        for key in ["secret", "nothing"] {
            let (_, answer) = world.ask("both", &[command.as_bytes(), key.as_bytes()]);
            assert_eq!(answer, NOT_AUTHORIZED, "{command} {key}");
        }
    }
}

/// Lists all keys that match. Returns the keys and the received tokens.
fn scan(world: &mut World, client: &str, pattern: &[u8]) -> (Vec<Vec<u8>>, Vec<Vec<u8>>) {
    let (mut keys, mut tokens) = (Vec::new(), Vec::<Vec<u8>>::new());
    loop {
        let mut ask = vec![&b"SCAN"[..], pattern];
        ask.extend(tokens.last().map(|it| &it[..]));
        let (_, answer) = world.ask(client, &ask);
        let (listed, token) = resp::scan(&answer);
        keys.extend(listed);
        let Some(token) = token else {
            return (keys, tokens);
        };
        assert!(tokens.len() < 100, "the scan ends");
        tokens.push(token);
    }
}

#[test]
fn scan_lists_readable_keys_and_tokens_reveal_no_others() {
    let mut world = World::new();
    let keys: Vec<String> = (0..5_000).map(|number| format!("k{number:04}")).collect();
    for key in &keys {
        world.ask("admin", &[b"SET", key.as_bytes(), b""]);
    }
    // All readable keys follow more keys than one page examines.
    let readable: Vec<_> = (0..10).map(|it| format!("k49{it}7").into_bytes()).collect();
    let (listed, tokens) = scan(&mut world, "picky", b"k*");
    assert_eq!(listed, readable);
    assert!(!tokens.is_empty(), "the scan has several pages");
    for token in tokens {
        let shows = |key: &String| token.windows(key.len()).any(|it| it == key.as_bytes());
        assert!(!keys.iter().any(shows), "{token:?}");
    }
    assert_eq!(scan(&mut world, "nobody", b"*").0, [b""; 0]);
}

#[test]
fn scan_token_from_without_rules_is_invalid_with_rules() {
    let mut world = World::new();
    for number in 0..2_000 {
        let key = format!("k{number:04}");
        world.ask("admin", &[b"SET", key.as_bytes(), b""]);
    }
    let (_, answer) = world.ask("admin", &[b"SCAN", b"*"]);
    let token = resp::scan(&answer).1.expect("there are more pages");
    let (_, answer) = world.ask("picky", &[b"SCAN", b"*", &token]);
    assert_eq!(answer, "-ERR syntax error\r\n");
}

#[test]
fn duplicate_is_answered_with_its_original_rights() {
    let mut world = World::new();
    let set: &[&[u8]] = &[b"SET", b"shared/a", b"v"];
    let changed = Rules::parse(&RULES.replace("both", "another")).unwrap();
    let (all, none) = (grants(&world.rules, "both"), grants(&changed, "both"));
    let (_, first) = world.send("both", Some(&all), set, 1, false);
    assert_eq!(first, "+OK\r\n");
    let (effects, again) = world.send("both", Some(&none), set, 1, true);
    assert_eq!((&again, effects.repeated), (&first, Some(Rerun::Same)));

    let (_, first) = world.send("both", Some(&none), set, 2, false);
    assert_eq!(first, NOT_AUTHORIZED);
    let (effects, again) = world.send("both", Some(&all), set, 2, true);
    assert_eq!((&again, effects.repeated), (&first, Some(Rerun::Same)));
    assert!(effects.denied.is_none(), "it was not refused again");
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
        let (effects, answer) = world.ask(client, command);
        let observed = effects.sampled.expect("every request is sampled");
        match observed.reexecute(&mut Instance::new(observed.by.clone())) {
            Reexecution::Ran(again, _) => assert_eq!(again.payload, answer),
            _ => panic!("{client} {command:?} did not run"),
        }
    }
}

#[test]
fn writer_without_read_right_notifies_watchers() {
    let mut world = World::new();
    world.ask("reader", &[b"KEYNOTIFY", b"shared/a"]);
    let (effects, answer) = world.ask("writer", &[b"SET", b"shared/a", b"v"]);
    assert_eq!(answer, "+OK\r\n");
    let notified = effects.notifications.iter().flat_map(|it| &it.to);
    let notified: Vec<_> = notified.map(|(peer, _)| &*peer.client).collect();
    assert_eq!(notified, ["reader"]);
}

#[test]
fn scan_page_examines_a_bounded_number_of_key_bytes() {
    let mut world = World::new();
    for number in 0..100 {
        let key = format!("k{number:02}{}", "x".repeat(20_000));
        let (_, answer) = world.ask("admin", &[b"SET", key.as_bytes(), b"v"]);
        assert_eq!(answer, "+OK\r\n");
    }
    let (listed, tokens) = scan(&mut world, "picky", b"*");
    assert_eq!(listed, [b""; 0]);
    let pages = tokens.len() + 1;
    assert!(pages > 3, "2 MB of keys in {pages} pages");
}
