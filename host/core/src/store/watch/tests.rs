use std::sync::atomic::{AtomicUsize, Ordering};

use proptest::prelude::*;
use statehouse_protocol::{ConnectionId, SessionId};

use super::super::rights::counted::CountedRights;
use super::*;

fn peer(client: &str, connection: u64) -> Peer {
    Peer {
        client: client.into(),
        connection: ConnectionId(connection),
        session: SessionId(1),
    }
}

#[test]
fn last_dialect_of_a_watch_wins() {
    let mut watches = Watches::default();
    let key = Key::from_static(b"k");
    let one = peer("a", 1);
    for dialect in [Dialect::Sdk, Dialect::Documents] {
        watches.add(Scope::Key, key.clone(), &one, dialect);
    }
    assert_eq!(watches.of(b"k"), [(&one, Dialect::Documents)]);
    assert!(watches.contains(Scope::Key, b"k", &one));
    assert!(!watches.contains(Scope::Key, b"k", &peer("a", 2)));
    assert!(watches.remove(Scope::Key, b"k", &one));
    assert!(!watches.remove(Scope::Key, b"k", &one));
    assert!(watches.is_empty() && watches.count_of(b"k") == 0);
}

#[test]
fn end_of_an_old_connection_keeps_newer_watches() {
    let mut watches = Watches::default();
    let key = Key::from_static(b"k");
    watches.add(Scope::Key, key.clone(), &peer("a", 1), Dialect::Sdk);
    watches.add(Scope::Key, key.clone(), &peer("a", 2), Dialect::Sdk);
    let other = Key::from_static(b"other");
    watches.add(Scope::Key, other, &peer("a", 1), Dialect::Sdk);
    watches.remove_all(&peer("a", 1));
    assert_eq!(watches.of(b"k"), [(&peer("a", 2), Dialect::Sdk)]);
    assert_eq!(watches.count_of(b"other"), 0);
    assert_eq!(watches.len(), 1);
}

#[test]
fn watches_of_a_connection_are_limited() {
    let mut watches = Watches::default();
    let (greedy, other) = (peer("a", 1), peer("b", 2));
    let mut quota = Quota {
        watches_max: 5,
        watches_per_connection_max: 3,
        ..Quota::default()
    };
    let mut add = |peer: &Peer, key: &'static str, quota: &Quota| {
        watches.check(peer, Scope::Key, key.as_bytes(), quota)?;
        watches.add(Scope::Key, Key::from(key), peer, Dialect::Sdk);
        Ok(())
    };
    for key in ["0", "1", "2"] {
        assert_eq!(add(&greedy, key, &quota), Ok(()));
    }
    let own = Err(Exceeded::ClientWatches(3));
    assert_eq!(add(&greedy, "one more", &quota), own);
    assert_eq!(add(&greedy, "0", &quota), Ok(()), "it exists already");
    assert_eq!(add(&other, "0", &quota), Ok(()));
    assert_eq!(add(&other, "1", &quota), Ok(()));
    let all = Err(Exceeded::Watches(5));
    assert_eq!(add(&other, "2", &quota), all);
    quota.watches_max = 2;
    assert_eq!(add(&other, "1", &quota), Ok(()), "existing watches stay");
}

#[test]
fn watched_keys_are_limited_in_bytes() {
    let mut watches = Watches::default();
    let greedy = peer("a", 1);
    let long = |n: usize| Key::from(format!("{n:032000}"));
    let mut held = 0;
    let quota = Quota {
        watch_bytes_max: 8 << 20,
        ..Quota::default()
    };
    let check =
        |watches: &Watches, peer: &Peer, held| watches.check(peer, Scope::Key, &long(held), &quota);
    while check(&watches, &greedy, held).is_ok() {
        watches.add(Scope::Key, long(held), &greedy, Dialect::Sdk);
        held += 1;
    }
    assert_eq!(held, (1 << 20) / weight(&long(0)), "an eighth of all");
    let other = check(&watches, &peer("b", 2), held);
    assert_eq!(other, Ok(()), "the limit of another client is separate");
    watches.remove(Scope::Key, &long(0), &greedy);
    assert_eq!(check(&watches, &greedy, held), Ok(()));
    watches.remove_all(&greedy);
    assert_eq!((watches.bytes, watches.len()), (0, 0));
}

/// The watchers of a key by definition.
fn expected<'a>(all: &'a [(Scope, Key, Peer, Dialect)], key: &[u8]) -> Vec<(&'a Peer, Dialect)> {
    let mut found: BTreeMap<&Peer, (usize, Dialect)> = BTreeMap::new();
    for (scope, watched, peer, dialect) in all {
        let rank = match scope {
            Scope::Key if watched == key => usize::MAX,
            Scope::Prefix if key.starts_with(watched) => watched.len(),
            _ => continue,
        };
        let best = found.entry(peer).or_insert((rank, *dialect));
        if rank > best.0 {
            *best = (rank, *dialect);
        }
    }
    let found = found.into_iter();
    found.map(|(peer, (_, dialect))| (peer, dialect)).collect()
}

fn arb_key() -> impl Strategy<Value = Key> {
    let byte = prop::sample::select(&[0u8, b'a', b'b', 0xff][..]);
    prop::collection::vec(byte, 0..6).prop_map(Key::from)
}

proptest! {
    #[test]
    fn watchers_are_those_of_the_definition(
        ops in prop::collection::vec(
            (any::<bool>(), any::<bool>(), arb_key(), 0..3u64, any::<bool>()),
            0..60,
        ),
        keys in prop::collection::vec(arb_key(), 1..20),
    ) {
        let mut watches = Watches::default();
        let mut all: Vec<(Scope, Key, Peer, Dialect)> = Vec::new();
        for (add, is_prefix, key, client, sdk) in ops {
            let scope = if is_prefix { Scope::Prefix } else { Scope::Key };
            let peer = peer("a", client);
            let existed = all.iter().any(|(s, k, p, _)| (s, k, p) == (&scope, &key, &peer));
            all.retain(|(s, k, p, _)| (s, k, p) != (&scope, &key, &peer));
            if add {
                let dialect = if sdk { Dialect::Sdk } else { Dialect::Documents };
                watches.add(scope, key.clone(), &peer, dialect);
                all.push((scope, key, peer, dialect));
            } else {
                prop_assert_eq!(watches.remove(scope, &key, &peer), existed);
            }
        }
        for key in keys.iter().chain(all.iter().map(|(_, key, ..)| key)) {
            prop_assert_eq!(watches.of(key), expected(&all, key), "{:?}", key);
            for client in 0..3 {
                let peer = peer("a", client);
                let mut found: Vec<_> = watches.covering(key, &peer).collect();
                found.sort();
                let covers = |(scope, it): &(Scope, &Key)| scope.covers(it, key);
                prop_assert_eq!(found, watches.by(&peer).filter(covers).collect::<Vec<_>>());
            }
        }
        prop_assert_eq!(watches.len(), all.len());
        let bytes: usize = all.iter().map(|(_, key, ..)| weight(key)).sum();
        prop_assert_eq!(watches.bytes, bytes);
        let parts: Vec<_> = watches.range(None).map(|(p, s, k, d)| (s, k.clone(), p.clone(), d)).collect();
        for (at, (scope, key, peer, _)) in parts.iter().enumerate() {
            let after = (peer.clone(), *scope, key.clone());
            let rest = watches.range(Some(&after)).map(|(p, s, k, d)| (s, k.clone(), p.clone(), d));
            prop_assert_eq!(rest.collect::<Vec<_>>(), &parts[at + 1..]);
        }
        all.sort_by_key(|(scope, key, peer, _)| (peer.clone(), *scope, key.clone()));
        prop_assert_eq!(parts, all);
    }
}

/// The rights of a client to the keys that start with `a`.
fn only_a(compared: &Arc<AtomicUsize>) -> Arc<dyn ClientRights> {
    Arc::new(CountedRights {
        patterns: 1,
        compared: compared.clone(),
    })
}

#[test]
fn watch_reports_only_readable_keys() {
    let mut watches = Watches::default();
    let (limited, free) = (peer("a", 1), peer("b", 2));
    for peer in [&limited, &free] {
        watches.add(Scope::Prefix, Key::from_static(b"b1"), peer, Dialect::Sdk);
        for key in [b"a2", b"b2"] {
            watches.add(Scope::Key, Key::from_static(key), peer, Dialect::Sdk);
        }
        watches.add(Scope::Prefix, Key::from_static(b"a1"), peer, Dialect::Sdk);
    }
    let numbers =
        |watches: &Watches| ["a1", "b1", "a2", "b2"].map(|key| watches.of(key.as_bytes()).len());
    watches.set_rights(&limited, Some(only_a(&Arc::default())));
    assert_eq!(numbers(&watches), [2, 1, 2, 1]);
    watches.set_rights(&limited, None);
    assert_eq!(numbers(&watches), [2; 4]);
}

/// A change must not cost a comparison with the same patterns for each watcher.
#[test]
fn rights_that_watchers_share_are_evaluated_once() {
    let mut watches = Watches::default();
    let (compared, other) = (Arc::default(), Arc::default());
    for connection in 0..10 {
        let peer = peer("a", connection);
        watches.add(Scope::Prefix, Key::new(), &peer, Dialect::Sdk);
        let shared = if connection == 0 { &other } else { &compared };
        watches.set_rights(&peer, Some(only_a(shared)));
    }
    for key in [b"a1", b"b1"] {
        let notified = watches.of(key).len();
        assert_eq!(notified, if key[0] == b'a' { 10 } else { 0 });
        let counts = [&compared, &other].map(|it| it.swap(0, Ordering::Relaxed));
        assert_eq!(counts, [1, 1]);
    }
}

/// A change must not cost a step for each of these.
#[test]
fn prefixes_of_one_another_cost_one_step_per_byte() {
    let mut watches = Watches::default();
    let key = vec![b'a'; 4 * WATCH_PREFIX_BYTES_MAX];
    for len in 1..=WATCH_PREFIX_BYTES_MAX {
        let beside = [&key[..len - 1], b"\0"].concat();
        for prefix in [key[..len].to_vec(), beside] {
            watches.add(Scope::Prefix, prefix.into(), &peer("a", 1), Dialect::Sdk);
        }
    }
    assert_eq!(watches.prefixes_of(&key).count(), WATCH_PREFIX_BYTES_MAX);
    assert_eq!(watches.of(&key), [(&peer("a", 1), Dialect::Sdk)]);
}
