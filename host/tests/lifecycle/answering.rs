//! The selection of policies: routes, canaries, and the owners of keys.

use super::*;
use statehouse_core::clock::Stamp;
use statehouse_core::log::JournalRoom;
use statehouse_core::policy::{Canary, CanaryRule};
use statehouse_core::store::{Key, Notification, Rerun, StoredPayload};

fn canary(rule: CanaryRule) -> Core {
    let policy = digest(&policies().twin);
    core(loaded().canary(Some(Canary { policy, rule })).unwrap())
}

#[test]
fn percent_canary_always_answers_the_same_clients() {
    let mut core = canary(CanaryRule::Percent(30));
    let twin = digest(&policies().twin);
    let mut taken = Vec::new();
    for round in 0..3 {
        let clients = (0..1000).map(|n| format!("client-{n}"));
        let by_canary: Vec<String> = clients
            .filter(|client| by(&ask(&mut core, client, &["GET", "k"]).0) == twin)
            .collect();
        match round {
            0 => taken = by_canary,
            _ => assert_eq!(by_canary, taken),
        }
    }
    // The digest spreads clients evenly.
    assert!((200..400).contains(&taken.len()), "{}", taken.len());
    // A higher percentage adds clients and removes none.
    let mut core = canary(CanaryRule::Percent(60));
    for client in &taken {
        assert_eq!(by(&ask(&mut core, client, &["GET", "k"]).0), twin);
    }
}

#[test]
fn pattern_canary_answers_matching_clients_or_keys() {
    let (standard, twin) = (digest(&policies().standard), digest(&policies().twin));
    let mut core = canary(CanaryRule::Clients("press-*".into()));
    assert_eq!(by(&ask(&mut core, "press-7", &["GET", "k"]).0), twin);
    assert_eq!(by(&ask(&mut core, "lathe-7", &["GET", "k"]).0), standard);
    let mut core = canary(CanaryRule::Keys("*/speed".into()));
    assert_eq!(by(&ask(&mut core, "a", &["GET", "1/speed"]).0), twin);
    assert_eq!(by(&ask(&mut core, "a", &["GET", "1/heat"]).0), standard);
    // A request without a key matches no pattern.
    assert_eq!(by(&ask(&mut core, "a", &["NONSENSE"]).0), standard);
}

#[test]
fn longest_prefix_owns_a_key_despite_a_canary() {
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
    let end = assignment.canary(None).unwrap();
    let mut core = core(assignment);
    assert_eq!(by(&ask(&mut core, "c", &["GET", "a/x"]).0), twin);
    assert_eq!(by(&ask(&mut core, "c", &["GET", "a/b/x"]).0), faulty);
    assert_eq!(by(&ask(&mut core, "c", &["GET", "x"]).0), faulty);
    assert!(core.assign(end, Vec::new()).is_ok());
    assert_eq!(by(&ask(&mut core, "c", &["GET", "x"]).0), standard);
}

#[test]
fn routed_policy_writes_only_its_own_keys() {
    let faulty = digest(&policies().faulty);
    let assignment = loaded().route(b"rule/", Some(faulty)).unwrap();
    let free = assignment.promote(faulty).unwrap();
    let mut core = core(assignment);
    let (effects, answer) = ask(&mut core, "c", &["SET", "rule/a", "fine"]);
    assert_eq!((by(&effects), &answer[..]), (faulty, &b"+OK\r\n"[..]));
    let (effects, answer) = ask(&mut core, "c", &["SET", "rule/b", "stray"]);
    assert_eq!(answer, "-ERR internal error\r\n");
    let failure = effects.failed.expect("a write outside the route fails");
    assert_contains!(failure.to_string(), "beyond the prefixes");
    let keys = core.store().state().table.keys();
    assert_eq!(keys, 1, "the request is rolled back");
    // The active policy may write all keys.
    assert!(core.assign(free, Vec::new()).is_ok());
    assert_eq!(ask(&mut core, "c", &["SET", "x", "stray"]).1, "+OK\r\n");
    assert_eq!(core.store().state().table.keys(), 3);
}

#[test]
fn expiry_notification_is_the_owners_or_the_built_in_one() {
    let faulty = digest(&policies().faulty);
    let assignment = loaded().route(b"rule/", Some(faulty)).unwrap();
    let owned = assignment.route(b"bad-notify", Some(faulty)).unwrap();
    let mut core = core(owned.clone());
    watch(&mut core, &["plain", "rule/a", "bad-notify"]);
    let plain = "*2\r\n$6\r\nNOTIFY\r\n$6\r\nDELETE\r\n";
    // The faulty policy sets an expiry of one second for each key. It cannot render a notification
    // for the third key, so the standard policy writes that key while it owns it.
    ask(&mut core, "c", &["SET", "rule/a", "fine"]);
    ask(&mut core, "c", &["SET", "plain", "v", "PX", "1000"]);
    let open = owned.route(b"bad-notify", None).unwrap();
    assert!(core.assign(open, Vec::new()).is_ok());
    let (_, answer) = ask(&mut core, "c", &["SET", "bad-notify", "v", "PX", "1001"]);
    assert_eq!(answer, "+OK\r\n");
    assert!(core.assign(owned, Vec::new()).is_ok());

    let effects = core.handle(Input::Sweep, at(NOW_MS + 1000)).effects;
    let payloads = effects.expired.iter().map(|it| &it.payload[..]);
    let mut payloads: Vec<_> = payloads.collect();
    payloads.sort_unstable();
    assert_eq!(payloads, [plain.as_bytes(), b"changed\r\n"]);
    assert_eq!(effects.failures, 0);
    let effects = core.handle(Input::Sweep, at(NOW_MS + 1001)).effects;
    assert_eq!(effects.expired[0].payload, plain);
    assert_eq!(effects.failures, 1);
    assert_eq!(core.store().state().table.keys(), 0);
}

/// Keys whose notifications take the faulty policy much fuel.
fn slow_keys(count: usize) -> Vec<String> {
    (0..count).map(|it| format!("slow-notify/{it}")).collect()
}

/// How many of these the faulty policy rendered, and not the built-in one.
fn rendered_by_faulty(notifications: &[Notification]) -> usize {
    let own = notifications.iter();
    own.filter(|it| &*it.payload == b"changed\r\n").count()
}

/// The notifications of a SET of `own` by the faulty policy, and of `stray` by the standard policy.
fn expect_both_notifications(effects: &Effects) {
    let payloads = effects.notifications.iter().map(|it| &it.payload[..]);
    let standards = b"*4\r\n$6\r\nNOTIFY\r\n$3\r\nSET\r\n$5\r\nVALUE\r\n$3\r\nown\r\n";
    let payloads: Vec<_> = payloads.collect();
    assert_eq!(payloads, [&b"changed\r\n"[..], standards]);
}

/// A store whose active policy is the faulty one. The key `stray` belongs to the standard one.
fn core_routing_stray() -> Core {
    let (standard, faulty) = (digest(&policies().standard), digest(&policies().faulty));
    let assignment = loaded().promote(faulty).unwrap();
    core(assignment.route(b"stray", Some(standard)).unwrap())
}

#[test]
fn change_of_another_policys_key_is_notified_by_its_owner() {
    let faulty = digest(&policies().faulty);
    let mut core = core_routing_stray();
    watch(&mut core, &["stray", "own"]);
    let (effects, answer) = ask(&mut core, "c", &["SET", "own", "stray"]);
    assert_eq!((by(&effects), &answer[..]), (faulty, &b"+OK\r\n"[..]));
    expect_both_notifications(&effects);
}

/// Regression test: such a request failed, and the guard rolled the active policy back for
/// failures of the owning policy.
#[test]
fn built_in_policy_notifies_if_the_owner_fails() {
    let (faulty, owner) = (digest(&policies().faulty), faulty_alone());
    let assignment = loaded().load(digest(&owner)).unwrap();
    let assignment = assignment.promote(faulty).unwrap();
    let assignment = assignment
        .route(b"bad-notify", Some(digest(&owner)))
        .unwrap();
    let mut core = core_with(assignment, vec![owner.clone()]);
    watch(&mut core, &["own", "bad-notify/1"]);
    for _ in 0..20 {
        let (effects, answer) = ask(&mut core, "c", &["SET", "own", "stray", "bad-notify/1"]);
        assert_eq!((by(&effects), &answer[..]), (faulty, &b"+OK\r\n"[..]));
        assert_eq!((effects.failures, &effects.tripped), (1, &None));
        expect_both_notifications(&effects);
    }
    assert_eq!(owner.work.done().failures.trap, 20);
}

/// Regression test: each notification of the policy's own keys had the fuel and the time of a whole
/// request, so one request could block all clients for as long as sixty.
#[test]
fn own_notifications_share_the_fuel_of_one_request() {
    let faulty = digest(&policies().faulty);
    let mut core = core_routing_stray();
    let count = 60;
    watch(&mut core, &slow_keys(count));
    let request = ["SET", "slow-notify", "spread", "60"];
    let (effects, answer) = ask(&mut core, "c", &request);
    assert_eq!((by(&effects), &answer[..]), (faulty, &b"+OK\r\n"[..]));
    assert_eq!((effects.notifications.len(), effects.failures), (count, 0));
    let own = rendered_by_faulty(&effects.notifications);
    assert!((1..count).contains(&own), "{own}");
    // Each of them takes more than one unit of fuel for each round of its loop.
    assert!(effects.fuel > 100_000 * own as u64, "{}", effects.fuel);
}

/// The version of a key that expired in an earlier run.
const VERSION: Stamp = Stamp {
    wall: NOW_MS,
    counter: 0,
};

/// The earlier run rendered them with the owning policy, possibly under a higher fuel limit.
#[test]
fn owner_renotifies_whatever_the_current_fuel_limit_is() {
    let mut core = faulty_core();
    watch(&mut core, &["slow-notify"]);
    core.store_mut().quota().fuel_max = limits::FUEL_PER_CALL_MIN;
    let removed = [(Key::from_static(b"slow-notify"), VERSION)];
    let effects = core.handle(Input::Expired(&removed), at(NOW_MS)).effects;
    let [notice] = &effects.expired[..] else {
        panic!("one key: {:?}", effects.expired);
    };
    assert_eq!(notice.payload, "changed\r\n");
    assert_eq!(effects.failures, 0);
}

/// A hundred thousand rounds for each key would block all requests for seconds.
#[test]
fn renotification_shares_the_fuel_of_one_request() {
    let mut core = faulty_core();
    let keys = slow_keys(400);
    watch(&mut core, &keys);
    let removed = keys.into_iter().map(|key| (Key::from(key), VERSION));
    let removed: Vec<_> = removed.collect();
    let effects = core.handle(Input::Expired(&removed), at(NOW_MS)).effects;
    assert_eq!((effects.expired.len(), effects.failures), (400, 0));
    let own = rendered_by_faulty(&effects.expired);
    assert!((1..400).contains(&own), "{own}");
}

#[test]
fn notification_of_expiries_shares_the_fuel_of_one_request() {
    let mut core = faulty_core();
    let count = 200;
    let keys = slow_keys(count);
    for key in &keys {
        ask(&mut core, "writer", &["SET", key, "fine"]);
    }
    watch(&mut core, &keys);
    let effects = core.handle(Input::Sweep, at(NOW_MS + 1000)).effects;
    assert_eq!((effects.expired.len(), effects.failures), (count, 0));
    let own = rendered_by_faulty(&effects.expired);
    assert!((1..count).contains(&own), "{own}");
}

/// On a busy machine, the watchdog may stop the re-execution. Then only the remembered answer is
/// left.
#[test]
fn answer_above_the_default_fuel_limit_is_stored_whole() {
    let mut core = faulty_core();
    core.store_mut().quota().fuel_max = limits::FUEL_PER_CALL_MAX;
    let mut remembered = |rounds| {
        let (effects, answer) = ask(&mut core, "client", &["SET", "key", "burn", rounds]);
        let remembered = effects.handled.expect("it wrote").remembered;
        assert!(remembered.captured.is_some(), "it can be re-executed");
        (effects.fuel, remembered.outcome.payload, answer)
    };
    let (fuel, payload, answer) = remembered("2000000");
    assert!(fuel > limits::FUEL_PER_CALL_DEFAULT);
    assert_eq!(payload, StoredPayload::Whole(answer));
    let (fuel, payload, answer) = remembered("100000");
    assert!(fuel < limits::FUEL_PER_CALL_DEFAULT);
    assert_eq!(payload, StoredPayload::Digest(blake3::hash(&answer)));
}

/// Regression test: the response to a GET said where its value was persisted, if a rule had counted
/// the GET in a hidden key.
#[test]
fn hidden_key_is_not_said_to_be_persisted() {
    let mut core = faulty_core();
    for (words, expected) in [("HIDE k", false), ("SET k fine", true)] {
        let words: Vec<_> = words.split(' ').collect();
        let (effects, answer) = ask(&mut core, "c", &words);
        assert_eq!(answer, "+OK\r\n");
        let remembered = effects.handled.expect("it wrote").remembered;
        assert_eq!(remembered.outcome.put, expected, "{words:?}");
    }
}

/// Regression test: each expired key caused its own failure under the lock. With the watchdog, one
/// sweep took two minutes.
#[test]
fn policy_that_fails_to_notify_is_not_called_again() {
    let faulty = faulty_alone();
    let mut core = core_under(&faulty);
    let keys: Vec<String> = (0..100).map(|n| format!("bad-notify/{n}")).collect();
    for key in &keys {
        assert_eq!(ask(&mut core, "c", &["SET", key, "fine"]).1, "+OK\r\n");
    }
    watch(&mut core, &keys);
    let effects = core.handle(Input::Sweep, at(NOW_MS + 1000)).effects;
    assert_eq!((effects.failures, effects.expired.len()), (1, keys.len()));
    assert_eq!(faulty.work.done().failures.trap, 1);
    let deleted = "*2\r\n$6\r\nNOTIFY\r\n$6\r\nDELETE\r\n";
    assert!(effects.expired.iter().all(|it| it.payload == deleted));
}

/// Regression test: the notifications of 256 keys were delivered at once, while all clients waited.
#[test]
fn sweep_takes_no_key_after_those_with_many_watches() {
    let max = limits::SWEEP_WATCHES_PER_STEP_MAX;
    for (watchers, keys_at_once) in [(max / 2, 2), (max, 1), (max + 1, 1)] {
        let mut core = core(loaded());
        let keys: Vec<String> = (0..5).map(|n| format!("k/{n}")).collect();
        for key in &keys {
            ask(&mut core, "c", &["SET", key, "v", "PX", "1000"]);
        }
        for number in 0..watchers {
            let client = format!("watcher-{number}");
            ask(&mut core, &client, &["KEYNOTIFY", "k/", "PREFIX"]);
        }
        let later_ms = NOW_MS + 1000;
        // A request removes as many keys first, and the keys that remain are absent for it.
        let (effects, answer) = common::ask(&mut core, "c", &["GET", &keys[4]], later_ms);
        assert_eq!(answer, "$-1\r\n");
        let mut steps = vec![effects];
        while core.store().next_expiry_ms().is_some() {
            steps.push(core.handle(Input::Sweep, at(later_ms)).effects);
        }
        assert_eq!(steps.len(), keys.len().div_ceil(keys_at_once));
        let notified: Vec<_> = steps.iter().flat_map(|it| &it.expired).collect();
        assert_eq!(notified.len(), keys.len());
        assert!(notified.iter().all(|it| it.to.len() == watchers));
    }
}

#[test]
fn custom_commands_are_routed_by_their_own_policy() {
    let (standard, faulty) = (digest(&policies().standard), digest(&policies().faulty));
    let mut core = core(loaded().route(b"rule/", Some(faulty)).unwrap());
    // The built-in policy has no command COUNT.
    let (effects, answer) = ask(&mut core, "c", &["COUNT", "rule/a"]);
    assert_eq!((by(&effects), &answer[..]), (faulty, &b":1\r\n"[..]));
    // A policy cannot claim a key outside its route.
    let (effects, answer) = ask(&mut core, "c", &["COUNT", "plain"]);
    assert_eq!(by(&effects), standard);
    assert!(answer.starts_with(b"-ERR"), "{answer:?}");
}

/// Regression test: `route` had no clock, so a policy could write any number of log lines there.
#[test]
fn log_lines_in_route_count_against_the_limit() {
    let faulty = faulty_alone();
    let assignment = loaded().load(digest(&faulty)).unwrap();
    let assignment = assignment.route(b"rule/", Some(digest(&faulty))).unwrap();
    let mut core = core_with(assignment, vec![faulty.clone()]);
    let lines = 2 * limits::GUEST_LOG_LINES_PER_SECOND_MAX;
    for _ in 0..lines {
        ask(&mut core, "c", &["COUNT", "chatty-route"]);
        ask(&mut core, "c", &["COUNT", "rule/a"]);
    }
    let counted = faulty.counters.all();
    assert_eq!(counted["configured"], 1);
    assert_eq!(counted["log_lines_dropped"], u64::from(lines / 2));
}

/// Regression test: each policy had its own budget, so one small request blocked all clients for
/// the sum of the budgets.
#[test]
fn routing_by_many_policies_costs_little_more_than_by_one() {
    let routed: Vec<_> = (0..5).map(faulty_number).collect();
    let mut assignment = loaded();
    for (number, policy) in routed.iter().enumerate() {
        let (prefix, policy) = (format!("rule-{number}/"), digest(policy));
        assignment = assignment.load(policy).unwrap();
        let next = assignment.route(prefix.as_bytes(), Some(policy));
        assignment = next.unwrap();
    }
    let mut core = core_with(assignment, routed.clone());
    let (effects, _) = ask(&mut core, "c", &["COUNT", "endless-route"]);
    let standard = digest(&policies().standard);
    assert_eq!(by(&effects), standard, "no route claims it");
    let failures = || {
        let done = routed.iter().map(|it| it.work.done().failures.fuel);
        done.collect::<Vec<_>>()
    };
    assert_eq!(effects.failures, 1);
    assert_eq!(failures(), [1, 0, 0, 0, 0]);
    // If each policy answers quickly, all of them are called.
    let (effects, _) = ask(&mut core, "c", &["COUNT", "rule-4/a"]);
    assert_eq!(by(&effects), digest(&routed[4]));
}

/// Regression test: after a restart the policy's counters were zero, so it was dropped, and long
/// answers were lost with it.
#[test]
fn unloaded_policy_still_answers_its_redelivered_requests() {
    let policy = faulty_alone();
    let mut core = core_under(&policy);
    let first = Delivery::new(&Peer::numbered("c", 1), 7, false);
    let request = ["SET", "k", "long"];
    let (_, answer) = common::ask_by(&mut core, "c", &request, first, NOW_MS);
    let inline_max = limits::OUTCOME_INLINE_BYTES_MAX;
    assert!(answer.len() > inline_max, "only its digest is stored");
    policy.work.clear();
    let assignment = core.store_mut().registry().assignment().rollback().unwrap();
    let without = assignment.unload(digest(&policy)).unwrap();
    for assignment in [assignment, without] {
        assert!(core.assign(assignment, Vec::new()).is_ok());
    }
    let registry = core.store_mut().registry();
    assert!(registry.policies().all(|it| it.digest != policy.digest));
    let again = Delivery { dup: true, ..first };
    let (effects, answered) = common::ask_by(&mut core, "c", &request, again, NOW_MS);
    assert_eq!(effects.repeated, Some(Rerun::Same));
    assert_eq!(answered, answer);
}

/// Regression test: the re-execution removed the key, and the policy was reported as impure.
#[test]
fn removal_refused_for_want_of_room_keeps_its_answer() {
    let twin = digest(&policies().twin);
    let mut core = core(loaded().promote(twin).unwrap());
    ask(&mut core, "c", &["SET", "k", "v"]);
    core.store_mut().quota().journal = JournalRoom::Nothing;
    let first = Delivery::new(&Peer::numbered("c", 1), 7, false);
    let (effects, refused) = common::ask_by(&mut core, "c", &["DEL", "k"], first, NOW_MS);
    assert_eq!(refused, "-ERR the quota has been exceeded\r\n");
    assert!(effects.handled.is_none(), "the log has no room for it");
    core.store_mut().quota().journal = JournalRoom::Growth;
    let again = Delivery { dup: true, ..first };
    let (effects, answer) = common::ask_by(&mut core, "c", &["DEL", "k"], again, NOW_MS);
    assert_eq!(effects.repeated, Some(Rerun::Stored));
    assert_eq!(answer, refused);
    assert_eq!(core.store().state().table.keys(), 1);
}

/// Regression test: a fresh instance for each thousandth request took a fortieth of the throughput
/// of a busy store.
#[test]
fn reexecution_rate_is_limited_under_high_load() {
    let mut core = core(loaded());
    let mut sampled = |every: u32, requests: usize, now_ms| {
        core.store_mut().supervision().purity_every = every;
        let ask = |_: &usize| {
            let (effects, _) = common::ask(&mut core, "c", &["GET", "k"], now_ms);
            effects.sampled.is_some()
        };
        (0..requests).filter(ask).count()
    };
    assert_eq!(sampled(100, 99, NOW_MS), 0);
    assert_eq!(sampled(100, 500, NOW_MS), 1);
    assert_eq!(sampled(100, 500, NOW_MS + 1), 0);
    // One of a hundred requests is one per two milliseconds.
    assert_eq!(sampled(100, 1, NOW_MS + 2), 1);
    assert_eq!(sampled(100, 99, NOW_MS + 1_000), 0);
    assert_eq!(sampled(100, 1, NOW_MS + 1_000), 1);
    assert_eq!(sampled(1, 5, NOW_MS + 2_000), 5);
}
