//! SCAN through the pager of the newest official client. It must list every matching key exactly
//! once.

use crate::{
    peer::{Peer, TIMEOUT},
    place::Place,
};
use azure_iot_operations_services::state_store::SetOptions;

async fn keys(peer: &Peer, pattern: &str) -> (Vec<String>, usize) {
    let mut pager = peer.store.list_keys(pattern.into(), TIMEOUT).unwrap();
    let (mut keys, mut pages) = (Vec::new(), 0);
    while let Some(page) = pager.next().await.unwrap() {
        pages += 1;
        assert!(pages <= 64, "the pager does not end");
        keys.extend(page.into_iter().map(|key| String::from_utf8(key).unwrap()));
    }
    assert!(pager.next().await.unwrap().is_none());
    keys.sort();
    (keys, pages)
}

fn sorted(keys: &[&str]) -> Vec<String> {
    let mut keys: Vec<String> = keys.iter().map(|key| (*key).to_string()).collect();
    keys.sort();
    keys
}

pub(crate) async fn scan_lists_the_keys_of_a_pattern(place: Place) {
    let server = place.start(&[]);
    let peer = Peer::connect(&server, "patterns");
    let all = [
        "p", "pa", "pb", "pc", "p1", "p2", "pab", "pabc", "p.x", "p*lit",
    ];
    for key in all.iter().chain(&["other", "xp"]) {
        peer.set(key, "v").await;
    }
    let cases: [(&str, &[&str]); 10] = [
        ("p*", &all),
        ("p?", &["pa", "pb", "pc", "p1", "p2"]),
        ("p??", &["pab", "p.x"]),
        ("p[ab]", &["pa", "pb"]),
        ("p[0-9]", &["p1", "p2"]),
        ("p[!0-9]", &["pa", "pb", "pc"]),
        ("p[^0-9]", &["p1", "p2"]),
        ("p*c", &["pc", "pabc"]),
        ("p[*]lit", &["p*lit"]),
        ("pnomatch*", &[]),
    ];
    for (pattern, expected) in cases {
        assert_eq!(keys(&peer, pattern).await.0, sorted(expected), "{pattern}");
    }
    peer.leave().await;
}

pub(crate) async fn scan_after_deletions_lists_the_rest(place: Place) {
    let server = place.start(&[]);
    let peer = Peer::connect(&server, "changes");
    let mut expected: Vec<String> = (0..100).map(|n| format!("key{n:03}")).collect();
    for key in &expected {
        peer.set(key, "v").await;
    }
    assert_eq!(keys(&peer, "key*").await.0, expected);
    for key in expected.drain(..25) {
        let deleted = peer.store.del(key.into(), None, TIMEOUT).await.unwrap();
        assert_eq!(deleted.response, 1);
    }
    assert_eq!(keys(&peer, "key*").await.0, expected);
    assert_eq!(keys(&peer, "key03?").await.0.len(), 10);
    peer.leave().await;
}

pub(crate) async fn scan_over_pages_lists_every_key_once(place: Place) {
    let server = place.start(&[]);
    let peer = Peer::connect(&server, "pages");
    let expected: Vec<String> = (0..3000).map(|n| format!("key{n:05}")).collect();
    let mut tasks = tokio::task::JoinSet::new();
    for key in expected.clone() {
        let store = peer.store.clone();
        tasks.spawn(async move {
            let options = SetOptions::default();
            let set = store.set(key.into(), b"v".to_vec(), TIMEOUT, None, options);
            set.await.unwrap().response
        });
    }
    assert!(tasks.join_all().await.into_iter().all(|done| done));
    let (found, pages) = keys(&peer, "*").await;
    assert_eq!(found, expected);
    assert!(pages > 1, "3000 keys in one answer");
    assert_eq!(keys(&peer, "key0299?").await.0.len(), 10);
    peer.leave().await;
}
