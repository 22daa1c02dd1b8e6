//! Within one request, the table for tests does what the store does: with watches and changes, with
//! fences, and with the versions and rights of hidden keys.

mod common;

use common::{Function, request};
use statehouse_policy::testing::{Right, Table};
use statehouse_policy::{
    Access, Body, Bytes, Fault, Frame, Hlc, Host, Outcome, Repeat, Request, Scope, Stamp,
};

const NOW_MS: u64 = 1000;

const ZERO: Stamp = Stamp {
    wall: 0,
    counter: 0,
};

fn owned(bytes: &[u8]) -> Bytes {
    Bytes::Owned(bytes.to_vec())
}

const WORDS: Function = Function(execute);

/// Executes the words of its payload on the key `k`, in order. The version of its answers is the
/// one that the watch returned.
fn execute(host: &mut dyn Host, request: &Request) -> Outcome {
    let (key, value) = (owned(b"k"), owned(b"v"));
    let (mut version, mut body) = (None, Body::None);
    for word in request.payload.split(|byte| *byte == b' ') {
        let done = match word {
            b"put" => host.put(&key, &value, None, None, None).map(drop),
            b"hide" => host.head(&key, Access::Hidden).map(drop),
            b"expiring" => {
                let expires = Some(request.now + 1);
                host.put(&key, &value, None, None, expires).map(drop)
            }
            b"follow" => {
                let followed = host.follow(Scope::Key, &key);
                followed.map(|it| version = Some(it))
            }
            b"since" => {
                let reached = host.follow_since(Scope::Key, &key, ZERO);
                reached.map(|it| version = Some(it.version))
            }
            b"unfollow" => host.unfollow(Scope::Key, &key).map(drop),
            _ => {
                body = Body::Stored(key.clone());
                Ok(())
            }
        };
        assert_eq!(done, Ok(()));
    }
    let head = Vec::new();
    Outcome {
        reply: Frame { head, body },
        version,
        repeat: Repeat::Free,
        command: None,
    }
}

/// The counters of the version in the answer, and of the changes that were notified.
fn run(table: &mut Table, words: &str) -> (Option<u32>, Vec<u32>) {
    let answer = table.call(&WORDS, &request(words.as_bytes(), NOW_MS));
    let deliveries = table.take_deliveries().into_iter();
    (
        answer.version.map(|it| it.counter),
        deliveries.map(|it| it.version.counter).collect(),
    )
}

/// Regression: the new watch reported the changes of its own request, and the removed one did not.
#[test]
fn watch_begins_and_ends_after_the_changes() {
    let mut table = Table::new(NOW_MS);
    assert_eq!(run(&mut table, "put follow"), (Some(0), vec![]));
    table.disconnect("client");
    assert_eq!(run(&mut table, "follow put"), (Some(0), vec![]));
    assert_eq!(run(&mut table, "put"), (None, vec![2]));
    assert_eq!(run(&mut table, "unfollow put"), (None, vec![3]));
    assert_eq!(run(&mut table, "put"), (None, vec![]));
    let all = vec![0, 1, 2, 3, 4, 5];
    assert_eq!(run(&mut table, "put since"), (Some(5), all));
    assert_eq!(run(&mut table, "put"), (None, vec![6]));
}

/// Regression: a watch of a key reported changes that the client may not read.
#[test]
fn watch_does_not_report_a_key_that_may_not_be_read() {
    let mut table = Table::new(NOW_MS);
    assert_eq!(run(&mut table, "put follow"), (Some(0), vec![]));
    assert_eq!(run(&mut table, "put"), (None, vec![1]));
    table.deny(Right::Read, b"k");
    assert_eq!(run(&mut table, "put"), (None, vec![]));
}

/// Regression: the deletion of a hidden key took a version, and so did its expiry.
#[test]
fn hidden_keys_take_versions_only_when_put() {
    let mut table = Table::new(NOW_MS);
    table.call(&WORDS, &request(b"hide expiring", NOW_MS));
    let later = request(b"", NOW_MS + 1);
    let (key, value) = (owned(b"k"), owned(b"v"));
    let mut host = table.begin(&later);
    assert_eq!(host.head(&key, Access::Hidden), Ok(None), "it has expired");
    let mut counters = Vec::new();
    for _ in 0..2 {
        let version = host.put(&key, &value, None, None, None).expect("no quota");
        counters.push((version.wall, version.counter));
        assert_eq!(host.delete(&key), Ok(true));
    }
    assert_eq!(counters, [(NOW_MS + 1, 0), (NOW_MS + 1, 1)]);
}

/// Regression: the value was refused, although the client may read it.
#[test]
fn answer_may_have_the_value_of_a_visible_key() {
    let mut table = Table::new(NOW_MS);
    run(&mut table, "put");
    let answer = table.call(&WORDS, &request(b"hide stored", NOW_MS));
    assert_eq!(answer.bytes, b"v\r\n");
}

/// Regression: a policy could watch and list what it had opened as hidden.
#[test]
fn rights_apply_to_a_key_that_is_also_hidden() {
    let mut table = Table::new(NOW_MS);
    run(&mut table, "put");
    table.deny(Right::Read, b"k");
    let request = request(b"", NOW_MS);
    let key = owned(b"k");
    let mut host = table.begin(&request);
    assert_eq!(host.head(&key, Access::Hidden), Ok(None));
    assert_eq!(host.watch(&key), Err(Fault::Denied));
    let followed = host.follow(Scope::Key, &key).map(drop);
    assert_eq!(followed, Err(Fault::Denied));
    let page = host.keys(&owned(b""), None, 10).expect("a prefix");
    assert!(page.keys.is_empty());
    assert_eq!(host.load(&key, 0, 9), Ok(None), "the hidden one");
}

/// Regression: the table accepted fences that the store refuses.
#[test]
fn fence_that_no_client_can_send_is_refused() {
    let request = request(b"", NOW_MS);
    let mut table = Table::new(NOW_MS);
    let mut host = table.begin(&request);
    let mut put = |wall: u64, node: &str| {
        let fence = Hlc {
            wall,
            counter: 0,
            node: node.to_owned(),
        };
        let stored = host.put(&owned(b"k"), &owned(b"v"), None, Some(&fence), None);
        stored.map(drop)
    };
    let longest = "n".repeat(65_531);
    let long = format!("{longest}n");
    for node in ["", "a:b", "a\0", &long[..]] {
        let text = "malformed timestamp".to_owned();
        assert_eq!(put(0, node), Err(Fault::Other(text)));
    }
    let ahead = put(NOW_MS + 60_001, "n").expect_err("too far ahead");
    assert!(matches!(ahead, Fault::Other(text) if text.contains("in the future")));
    assert_eq!(put(NOW_MS + 60_000, &longest), Ok(()));
}
