//! Who answers: routes, canaries, and the owners of keys.

use super::*;
use statehouse_core::clock::Stamp;
use statehouse_core::policy::{Canary, CanaryRule};
use statehouse_core::store::{Key, Rerun, StoredPayload};

fn canary(rule: CanaryRule) -> Store {
    let policy = digest(&policies().twin);
    store(loaded().canary(Some(Canary { policy, rule })).unwrap())
}

#[test]
fn a_canary_by_percent_answers_the_same_clients_always() {
    let mut store = canary(CanaryRule::Percent(30));
    let twin = digest(&policies().twin);
    let mut taken = Vec::new();
    for round in 0..3 {
        let clients = (0..1000).map(|n| format!("client-{n}"));
        let by_canary: Vec<String> = clients
            .filter(|client| by(&ask(&mut store, client, &["GET", "k"]).0) == twin)
            .collect();
        match round {
            0 => taken = by_canary,
            _ => assert_eq!(by_canary, taken),
        }
    }
    // A digest spreads them evenly enough.
    assert!((200..400).contains(&taken.len()), "{}", taken.len());
    // More percent means more clients, and none of the first ones less.
    let mut store = canary(CanaryRule::Percent(60));
    for client in &taken {
        assert_eq!(by(&ask(&mut store, client, &["GET", "k"]).0), twin);
    }
}

#[test]
fn a_canary_by_pattern_answers_those_clients_or_keys() {
    let (standard, twin) = (digest(&policies().standard), digest(&policies().twin));
    let mut store = canary(CanaryRule::Clients("press-*".into()));
    assert_eq!(by(&ask(&mut store, "press-7", &["GET", "k"]).0), twin);
    assert_eq!(by(&ask(&mut store, "lathe-7", &["GET", "k"]).0), standard);
    let mut store = canary(CanaryRule::Keys("*/speed".into()));
    assert_eq!(by(&ask(&mut store, "a", &["GET", "1/speed"]).0), twin);
    assert_eq!(by(&ask(&mut store, "a", &["GET", "1/heat"]).0), standard);
    // What is about no key is about none of these.
    assert_eq!(by(&ask(&mut store, "a", &["NONSENSE"]).0), standard);
}

#[test]
fn the_longest_prefix_owns_a_key_and_a_canary_does_not_take_it() {
    let all = policies();
    let [standard, twin, faulty] = [&all.standard, &all.twin, &all.faulty].map(|it| digest(it));
    let assignment = loaded().route(b"a/", Some(twin)).unwrap();
    let assignment = assignment.route(b"a/b/", Some(faulty)).unwrap();
    let assignment = assignment
        .canary(Some(Canary {
            policy: faulty,
            rule: CanaryRule::Percent(100),
        }))
        .unwrap();
    let mut store = store(assignment);
    assert_eq!(by(&ask(&mut store, "c", &["GET", "a/x"]).0), twin);
    assert_eq!(by(&ask(&mut store, "c", &["GET", "a/b/x"]).0), faulty);
    assert_eq!(by(&ask(&mut store, "c", &["GET", "x"]).0), faulty);
    let end = store.registry().assignment().canary(None).unwrap();
    assert!(store.registry().assign(end, Vec::new()).is_ok());
    assert_eq!(by(&ask(&mut store, "c", &["GET", "x"]).0), standard);
}

#[test]
fn a_routed_policy_writes_its_own_keys_and_no_others() {
    let faulty = digest(&policies().faulty);
    let mut store = store(loaded().route(b"rule/", Some(faulty)).unwrap());
    let (effects, answer) = ask(&mut store, "c", &["SET", "rule/a", "fine"]);
    assert_eq!((by(&effects), &answer[..]), (faulty, &b"+OK\r\n"[..]));
    let (effects, answer) = ask(&mut store, "c", &["SET", "rule/b", "stray"]);
    assert_eq!(answer, "-ERR internal error\r\n");
    let failure = effects.failed.expect("it strayed").to_string();
    assert!(failure.contains("beyond the prefixes"), "{failure}");
    assert_eq!(store.state().table.keys(), 1, "nothing of it stays");
    // The same policy may do so where it answers everything.
    let free = store.registry().assignment().promote(faulty).unwrap();
    assert!(store.registry().assign(free, Vec::new()).is_ok());
    assert_eq!(ask(&mut store, "c", &["SET", "x", "stray"]).1, "+OK\r\n");
    assert_eq!(store.state().table.keys(), 3);
}

#[test]
fn an_expired_key_is_told_of_by_its_owner_and_where_that_fails_by_the_built_in_one() {
    let faulty = digest(&policies().faulty);
    let assignment = loaded().route(b"rule/", Some(faulty)).unwrap();
    let assignment = assignment.route(b"bad-notify", Some(faulty)).unwrap();
    let mut store = store(assignment);
    for key in ["plain", "rule/a", "bad-notify"] {
        ask(&mut store, "c", &["KEYNOTIFY", key]);
    }
    let plain = "*2\r\n$6\r\nNOTIFY\r\n$6\r\nDELETE\r\n";
    // The faulty one lets each key live for a second. Nobody could be told of the third, so it comes by the standard
    // one while that owns it.
    ask(&mut store, "c", &["SET", "rule/a", "fine"]);
    ask(&mut store, "c", &["SET", "plain", "v", "PX", "1000"]);
    let owned = store.registry().assignment().clone();
    let open = owned.route(b"bad-notify", None).unwrap();
    assert!(store.registry().assign(open, Vec::new()).is_ok());
    let (_, answer) = ask(&mut store, "c", &["SET", "bad-notify", "v", "PX", "1001"]);
    assert_eq!(answer, "+OK\r\n");
    assert!(store.registry().assign(owned, Vec::new()).is_ok());

    let effects = store.step(Event::Sweep, NOW_MS + 1000);
    let told = effects.expired.iter().map(|it| &it.payload[..]);
    let mut told: Vec<_> = told.collect();
    told.sort_unstable();
    assert_eq!(told, [plain.as_bytes(), b"changed\r\n"]);
    assert_eq!(effects.failures, 0);
    let effects = store.step(Event::Sweep, NOW_MS + 1001);
    assert_eq!(effects.expired[0].payload, plain);
    assert_eq!((effects.failures, store.state().table.keys()), (1, 0));
}

#[test]
fn a_change_of_anothers_key_is_told_in_its_owners_words() {
    let all = policies();
    let (standard, faulty) = (digest(&all.standard), digest(&all.faulty));
    let assignment = loaded().promote(faulty).unwrap();
    let mut store = store(assignment.route(b"stray", Some(standard)).unwrap());
    ask(&mut store, "c", &["KEYNOTIFY", "stray"]);
    ask(&mut store, "c", &["KEYNOTIFY", "own"]);
    let (effects, answer) = ask(&mut store, "c", &["SET", "own", "stray"]);
    assert_eq!((by(&effects), &answer[..]), (faulty, &b"+OK\r\n"[..]));
    let told: Vec<_> = effects.notifications.iter().map(|it| &it.payload[..]).collect();
    let standards = b"*4\r\n$6\r\nNOTIFY\r\n$3\r\nSET\r\n$5\r\nVALUE\r\n$3\r\nown\r\n";
    assert_eq!(told, [&b"changed\r\n"[..], standards]);
}

/// The request failed once, and who had sent it off was rolled back for what another policy could not say.
#[test]
fn a_change_that_its_owner_cannot_tell_of_is_told_by_the_built_in_one() {
    let (faulty, owner) = (digest(&policies().faulty), faulty_alone());
    let assignment = loaded().load(digest(&owner)).unwrap();
    let assignment = assignment.promote(faulty).unwrap();
    let assignment = assignment
        .route(b"bad-notify", Some(digest(&owner)))
        .unwrap();
    let mut store = store_with(assignment, vec![owner.clone()]);
    for key in ["own", "bad-notify/1"] {
        ask(&mut store, "c", &["KEYNOTIFY", key]);
    }
    for _ in 0..20 {
        let (effects, answer) = ask(&mut store, "c", &["SET", "own", "stray", "bad-notify/1"]);
        assert_eq!((by(&effects), &answer[..]), (faulty, &b"+OK\r\n"[..]));
        assert_eq!((effects.failures, &effects.tripped), (1, &None));
        let told: Vec<_> = effects.notifications.iter().map(|it| &it.payload[..]).collect();
        let standards = b"*4\r\n$6\r\nNOTIFY\r\n$3\r\nSET\r\n$5\r\nVALUE\r\n$3\r\nown\r\n";
        assert_eq!(told, [&b"changed\r\n"[..], standards]);
    }
    assert_eq!(owner.work.done().failures.trap, 20);
}

/// It told of them in its own words before, under whatever bound there was.
#[test]
fn what_an_earlier_run_may_not_have_told_is_told_by_its_owner_whatever_the_bound_of_fuel_is_by_now()
{
    let all = policies();
    let mut store = store(loaded().promote(digest(&all.faulty)).unwrap());
    ask(&mut store, "watcher", &["KEYNOTIFY", "slow-notify"]);
    store.quota().fuel_max = limits::FUEL_PER_CALL_MIN;
    let version = Stamp {
        wall: NOW_MS,
        counter: 0,
    };
    let removed = [(Key::from_static(b"slow-notify"), version)];
    let effects = store.step(Event::Expired(&removed), NOW_MS);
    let [notice] = &effects.expired[..] else {
        panic!("one key: {:?}", effects.expired);
    };
    assert_eq!(
        (&*notice.payload, effects.failures),
        (&b"changed\r\n"[..], 0)
    );
}

/// A hundred thousand rounds for each would take seconds, and everybody waits for them.
#[test]
fn what_is_told_again_takes_no_more_fuel_than_one_request_and_the_rest_is_told_in_other_words() {
    let all = policies();
    let mut store = store(loaded().promote(digest(&all.faulty)).unwrap());
    let keys: Vec<_> = (0..400).map(|it| format!("slow-notify/{it}")).collect();
    for key in &keys {
        ask(&mut store, "watcher", &["KEYNOTIFY", key]);
    }
    let version = Stamp {
        wall: NOW_MS,
        counter: 0,
    };
    let removed: Vec<_> = keys
        .iter()
        .map(|key| (Key::copy_from_slice(key.as_bytes()), version))
        .collect();
    let effects = store.step(Event::Expired(&removed), NOW_MS);
    assert_eq!((effects.expired.len(), effects.failures), (400, 0));
    let own = effects.expired.iter();
    let own = own.filter(|it| &*it.payload == b"changed\r\n").count();
    assert!((1..400).contains(&own), "{own}");
}

/// On a busy machine the watchdog may stop it, and what is left of its answer then is what was kept of it.
#[test]
fn of_a_request_that_burns_more_than_any_may_by_default_the_answer_is_kept_whole() {
    let all = policies();
    let mut store = store(loaded().promote(digest(&all.faulty)).unwrap());
    store.quota().fuel_max = limits::FUEL_PER_CALL_MAX;
    let mut kept = |rounds| {
        let (effects, answer) = ask(&mut store, "client", &["SET", "key", "burn", rounds]);
        let remembered = effects.handled.expect("it wrote").remembered;
        assert!(remembered.captured.is_some(), "it can still run again");
        (effects.fuel, remembered.outcome.payload, answer)
    };
    let (fuel, payload, answer) = kept("2000000");
    assert!(fuel > limits::FUEL_PER_CALL_DEFAULT);
    assert_eq!(payload, StoredPayload::Whole(answer));
    let (fuel, payload, answer) = kept("100000");
    assert!(fuel < limits::FUEL_PER_CALL_DEFAULT);
    assert_eq!(payload, StoredPayload::Digest(blake3::hash(&answer)));
}

/// Each key once cost a failure of its own, under the lock: with the watchdog, two minutes for one sweep.
#[test]
fn a_policy_that_cannot_tell_of_one_expired_key_is_not_asked_about_the_next() {
    let faulty = faulty_alone();
    let assignment = loaded().load(digest(&faulty)).unwrap();
    let assignment = assignment.promote(digest(&faulty)).unwrap();
    let mut store = store_with(assignment, vec![faulty.clone()]);
    let keys: Vec<String> = (0..100).map(|n| format!("bad-notify/{n}")).collect();
    for key in &keys {
        assert_eq!(ask(&mut store, "c", &["SET", key, "fine"]).1, "+OK\r\n");
        ask(&mut store, "c", &["KEYNOTIFY", key]);
    }
    let effects = store.step(Event::Sweep, NOW_MS + 1000);
    assert_eq!((effects.failures, effects.expired.len()), (1, keys.len()));
    assert_eq!(faulty.work.done().failures.trap, 1);
    let deleted = "*2\r\n$6\r\nNOTIFY\r\n$6\r\nDELETE\r\n";
    assert!(effects.expired.iter().all(|it| it.payload == deleted));
}

#[test]
fn commands_of_its_own_are_routed_by_the_policy_that_has_them() {
    let (standard, faulty) = (digest(&policies().standard), digest(&policies().faulty));
    let mut store = store(loaded().route(b"rule/", Some(faulty)).unwrap());
    // The built-in policy knows no COUNT.
    let (effects, answer) = ask(&mut store, "c", &["COUNT", "rule/a"]);
    assert_eq!((by(&effects), &answer[..]), (faulty, &b":1\r\n"[..]));
    // A key that is not its own it cannot claim.
    let (effects, answer) = ask(&mut store, "c", &["COUNT", "plain"]);
    assert_eq!(by(&effects), standard);
    assert!(answer.starts_with(b"-ERR"), "{answer:?}");
}

/// Asked for a key, a policy knew no time, and could write as many lines as it liked.
#[test]
fn what_a_policy_says_while_requests_are_routed_counts_as_all_it_says() {
    let faulty = faulty_alone();
    let assignment = loaded().load(digest(&faulty)).unwrap();
    let assignment = assignment.route(b"rule/", Some(digest(&faulty))).unwrap();
    let mut store = store_with(assignment, vec![faulty.clone()]);
    let lines = 2 * limits::GUEST_LOG_LINES_PER_SECOND_MAX;
    for _ in 0..lines {
        ask(&mut store, "c", &["COUNT", "chatty-route"]);
        ask(&mut store, "c", &["COUNT", "rule/a"]);
    }
    let counted = faulty.counters.all();
    assert_eq!(counted["configured"], 1);
    assert_eq!(counted["log_lines_dropped"], u64::from(lines / 2));
}

/// Each of them had a budget of its own, so that one small request held everybody up for as long as all of them could.
#[test]
fn asking_many_policies_for_a_key_costs_little_more_than_asking_one() {
    let routed: Vec<_> = (0..5).map(faulty_number).collect();
    let mut assignment = loaded();
    for (number, policy) in routed.iter().enumerate() {
        let prefix = format!("rule-{number}/");
        assignment = assignment.load(digest(policy)).unwrap();
        assignment = assignment
            .route(prefix.as_bytes(), Some(digest(policy)))
            .unwrap();
    }
    let mut store = store_with(assignment, routed.clone());
    let (effects, _) = ask(&mut store, "c", &["COUNT", "endless-route"]);
    assert_eq!(
        by(&effects),
        digest(&policies().standard),
        "nobody claims it"
    );
    let failures = || {
        let done = routed.iter().map(|it| it.work.done().failures.fuel);
        done.collect::<Vec<_>>()
    };
    assert_eq!(effects.failures, 1);
    assert_eq!(failures(), [1, 0, 0, 0, 0]);
    // Those that say quickly that it is none of theirs are all asked.
    let (effects, _) = ask(&mut store, "c", &["COUNT", "rule-4/a"]);
    assert_eq!(by(&effects), digest(&routed[4]));
}

/// After a restart it had handled nothing, as far as its counts went: it was let go, and long answers with it.
#[test]
fn what_an_unloaded_policy_answered_it_answers_again() {
    let policy = faulty_alone();
    let it = digest(&policy);
    let assignment = loaded().load(it).unwrap().promote(it).unwrap();
    let mut store = store_with(assignment, vec![policy.clone()]);
    let first = Delivery {
        session: 1,
        connection: 1,
        packet_id: 7,
        dup: false,
    };
    let request = ["SET", "k", "long"];
    let (_, answer) = common::ask_by(&mut store, "c", &request, first, NOW_MS);
    assert!(
        answer.len() > limits::OUTCOME_INLINE_BYTES_MAX,
        "only its digest is kept"
    );
    policy.work.clear();
    let assignment = store.registry().assignment().rollback().unwrap();
    let without = assignment.unload(it).unwrap();
    for assignment in [assignment, without] {
        assert!(store.assign(assignment, Vec::new()).is_ok());
    }
    assert!(
        store
            .registry()
            .policies()
            .all(|it| it.digest != policy.digest)
    );
    let again = Delivery { dup: true, ..first };
    let (effects, answered) = common::ask_by(&mut store, "c", &request, again, NOW_MS);
    assert_eq!(effects.repeated, Some(Rerun::Same));
    assert_eq!(answered, answer);
}

/// A fresh instance for each thousandth request took a fortieth of what a busy store could answer.
#[test]
fn of_many_requests_at_once_no_more_run_again_than_of_fifty_thousand_a_second() {
    let mut store = store(loaded());
    let mut again = |every: u32, requests: usize, now_ms| {
        store.supervision().purity_every = every;
        let ask = |_: &usize| {
            let (effects, _) = common::ask(&mut store, "c", &["GET", "k"], now_ms);
            effects.sampled.is_some()
        };
        (0..requests).filter(ask).count()
    };
    assert_eq!(again(100, 99, NOW_MS), 0);
    assert_eq!(again(100, 500, NOW_MS), 1);
    assert_eq!(again(100, 500, NOW_MS + 1), 0);
    // One of a hundred is one each two milliseconds.
    assert_eq!(again(100, 1, NOW_MS + 2), 1);
    assert_eq!(again(100, 99, NOW_MS + 1_000), 0);
    assert_eq!(again(100, 1, NOW_MS + 1_000), 1);
    assert_eq!(again(1, 5, NOW_MS + 2_000), 5);
}
