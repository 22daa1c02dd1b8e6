use super::*;

fn digest(name: &str) -> Digest {
    Digest::of(name.as_bytes())
}

/// The built-in policy is active, and `loaded` are loaded.
fn with(loaded: &[&str]) -> Assignment {
    let mut assignment = Assignment::of(digest("built-in"));
    for name in loaded {
        assignment = assignment.load(digest(name)).unwrap();
    }
    assignment
}

/// So many policies are loaded, and each was active in turn.
fn with_promoted(count: usize) -> Assignment {
    let names: Vec<String> = (0..count).map(|n| n.to_string()).collect();
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    let mut it = with(&names);
    for name in names {
        it = it.promote(digest(name)).unwrap();
    }
    it
}

fn canary(policy: Digest) -> Canary {
    let rule = CanaryRule::Percent(5);
    Canary { policy, rule }
}

fn failed(policy: Digest, now_ms: u64) -> RolledBack {
    RolledBack {
        policy,
        why: "it failed".into(),
        now_ms,
        canary: false,
    }
}

#[test]
fn promotions_are_rolled_back_one_by_one() {
    let [a, b, c] = ["a", "b", "c"].map(digest);
    let built_in = digest("built-in");
    let mut it = with(&["a", "b", "c"]);
    for next in [a, b, c] {
        it = it.promote(next).unwrap();
    }
    assert_eq!((it.active, &it.previous[..]), (c, &[b, a, built_in][..]));
    // A policy that is promoted again is listed once.
    let again = it.promote(a).unwrap();
    assert_eq!(again.active, a);
    assert_eq!(again.previous, [c, b, built_in]);
    for before in [b, a, built_in] {
        it = it.rollback().unwrap();
        assert_eq!(it.active, before);
        assert!(!it.previous.contains(&before));
    }
    assert_eq!(it.rollback(), Err(AssignmentError::NothingBefore));
    let absent = digest("d");
    assert_eq!(it.promote(absent), Err(AssignmentError::NotLoaded(absent)));
    let previous = with_promoted(9).previous;
    assert_eq!(previous.len(), limits::PREVIOUS_POLICIES_MAX);
}

/// In an earlier version the guard could not stop such a policy.
#[test]
fn rollback_without_a_previous_policy_is_to_the_built_in_one() {
    let [a, built_in] = ["a", "built-in"].map(digest);
    // An operator returns to the built-in policy by name, and then rolls that back.
    let it = with(&["a"]).promote(a).unwrap().promote(built_in).unwrap();
    let it = it.rollback().unwrap();
    assert_eq!((it.active, it.previous.len()), (a, 0));
    assert_eq!(it.before(), Some(built_in));
    let it = it.roll_back_for("it failed".into(), 7).unwrap();
    assert_eq!((it.active, it.previous.len()), (built_in, 0));
    assert!(it.decision(a).is_some());
    assert_eq!(it.before(), None);
    assert_eq!(it.rollback(), Err(AssignmentError::NothingBefore));
    // So many promotions push it out of the previous ones.
    let count = limits::PREVIOUS_POLICIES_MAX + 1;
    let mut it = with_promoted(count);
    assert!(!it.previous.contains(&built_in));
    for _ in 0..count {
        it = it.rollback().unwrap();
    }
    assert_eq!((it.active, it.before()), (built_in, None));
}

#[test]
fn promoted_candidate_is_no_longer_a_candidate() {
    let [a, b] = ["a", "b"].map(digest);
    let shadow = |policy, per_mille| Some(Shadow { policy, per_mille });
    let it = with(&["a", "b"]).shadow(shadow(a, 1000)).unwrap();
    let it = it.canary(Some(canary(a))).unwrap();
    assert_eq!(it.roles(&a), [Role::Shadow, Role::Canary]);
    let promoted = it.promote(a).unwrap();
    assert_eq!(promoted.roles(&a), [Role::Active]);
    // Candidates keep their roles when another policy is promoted.
    let other = it.promote(b).unwrap();
    assert_eq!(other.roles(&a), [Role::Shadow, Role::Canary]);
    let active = Err(AssignmentError::Active(b));
    assert_eq!(other.shadow(shadow(b, 1)), active);
    assert!(it.shadow(shadow(a, 1001)).is_err());
    let rule = |rule| it.canary(Some(Canary { policy: a, rule }));
    for percent in [0, 101] {
        let refused = rule(CanaryRule::Percent(percent));
        assert_eq!(refused, Err(AssignmentError::Percent));
    }
    let long = "*".repeat(limits::CANARY_PATTERN_BYTES_MAX + 1);
    // Rules refuse unclosed brackets too.
    for pattern in ["", &long, "[", "a[b", "[a-]b[!c"] {
        for of in [CanaryRule::Keys, CanaryRule::Clients] {
            assert_eq!(rule(of(pattern.into())), Err(AssignmentError::Pattern));
        }
    }
    assert!(rule(CanaryRule::Keys("\\[[a-z]".into())).is_ok());
}

#[test]
fn routes_are_replaced_ended_and_limited() {
    let [a, b] = ["a", "b"].map(digest);
    let mut it = with(&["a", "b"]);
    assert_eq!(it.route(b"", Some(a)), Err(AssignmentError::Prefix));
    assert_eq!(it.route(b"x", None), Err(AssignmentError::NoRoute));
    it = it.route(b"x", Some(a)).unwrap();
    it = it.route(b"x", Some(b)).unwrap();
    assert_eq!((it.routes.len(), it.routes[0].policy), (1, b));
    assert!(it.route(b"x", None).unwrap().routes.is_empty());
    for n in 1..limits::ROUTES_MAX {
        it = it.route(format!("{n}/").as_bytes(), Some(a)).unwrap();
    }
    assert_eq!(it.route(b"y", Some(a)), Err(AssignmentError::Routes));
    assert!(it.route(b"x", Some(a)).is_ok(), "it exists already");
    // The routes of a lost policy are dropped.
    assert_eq!(it.without(a).routes.len(), 1);
}

#[test]
fn assignment_is_json_with_readable_digests() {
    let it = with(&["a"]).route(b"text/", Some(digest("a"))).unwrap();
    let it = it.route(b"\xff\x00", Some(digest("a"))).unwrap();
    let it = it.promote(digest("a")).unwrap();
    let it = it.roll_back_for("it failed".into(), 7).unwrap();
    let json = serde_json::to_value(&it).unwrap();
    assert_eq!(json["loaded"][0], digest("a").to_string());
    assert_eq!(json["routes"][0]["prefix"], "text/");
    assert_eq!(json["guard"]["why"], "it failed");
    assert_eq!(serde_json::from_value::<Assignment>(json).unwrap(), it);
    // Fields of later versions are kept, and missing fields have defaults.
    let (active, more) = (digest("a").to_string(), "later");
    let json = serde_json::json!({ "built_in": active, "active": active, "more": more });
    let mut read: Assignment = serde_json::from_value(json).unwrap();
    let changed = serde_json::to_value(read.load(digest("b")).unwrap()).unwrap();
    assert_eq!(changed["more"], more);
    read.later.clear();
    assert_eq!(read, Assignment::of(digest("a")));
}

#[test]
fn new_built_in_policy_replaces_the_old_one() {
    let (old, new) = (digest("built-in"), digest("newer"));
    let it = with(&["a"]).promote(digest("a")).unwrap().replace(old, new);
    assert_eq!((it.built_in, &it.previous[..]), (new, &[new][..]));
    assert!(!it.all().contains(&old));
    // It may have been loaded from a file before.
    let it = with(&["newer"]).promote(new).unwrap().replace(old, new);
    assert_eq!(it, Assignment::of(new));
}

/// In an earlier version every promotion and every rollback erased the guard's decision, so the
/// next start with `--policy` activated the policy again.
#[test]
fn guard_decision_is_kept_until_its_policy_is_active_again() {
    let [a, b, c] = ["a", "b", "c"].map(digest);
    let it = with(&["a", "b", "c"]).promote(a).unwrap();
    let it = it.roll_back_for("it failed".into(), 7).unwrap();
    let why = |it: &Assignment, policy| it.decision(policy).map(|it| it.why.clone());
    let it = it.promote(b).unwrap().promote(c).unwrap();
    assert_eq!(why(&it, a).as_deref(), Some("it failed"));
    let it = it.rollback().unwrap();
    assert_eq!(why(&it, a).as_deref(), Some("it failed"));
    // A decision about another policy adds to it.
    let it = it.canary(Some(canary(c))).unwrap();
    let it = it.end_canary_for("it trapped".into(), 8).unwrap();
    assert_eq!(it.guard.as_ref().unwrap().policy, c);
    assert_eq!(why(&it, a).as_deref(), Some("it failed"));
    let is_canary = |policy| it.decision(policy).unwrap().canary;
    assert_eq!((is_canary(c), is_canary(a)), (true, false));
    // Version 0.1.0 recorded no such field.
    let json = serde_json::to_value(&it).unwrap();
    assert_eq!(json["guard"]["canary"], true);
    assert_eq!(json["guard_before"][0].get("canary"), None);
    assert_eq!(serde_json::from_value::<Assignment>(json).unwrap(), it);
    // A second one about the same policy replaces it.
    let again = it.canary(Some(canary(c))).unwrap();
    let again = again.end_canary_for("it trapped again".into(), 9).unwrap();
    assert_eq!(again.guard_before, it.guard_before);
    assert_eq!(why(&again, c).as_deref(), Some("it trapped again"));
    // A promotion or a rollback to the policy ends it.
    let promoted = it.promote(c).unwrap();
    assert_eq!((why(&promoted, c), why(&promoted, b)), (None, None));
    assert_eq!(promoted.guard.as_ref().unwrap().policy, a);
    let promoted = promoted.promote(a).unwrap();
    assert_eq!((promoted.guard, promoted.guard_before), (None, vec![]));
    // `c` was active before `b`, and the guard ended its canary.
    let mut back = with(&["b", "c"]).promote(c).unwrap().promote(b).unwrap();
    back.decide(it.guard.unwrap());
    assert_eq!(back.rollback().unwrap().guard, None);
}

/// Regression: the guard rolled back to a policy whose canary it had just ended, and forgot that.
#[test]
fn guard_does_not_return_to_a_policy_that_it_stopped() {
    let [good, evil, worse] = ["good", "evil", "worse"].map(digest);
    let mut it = with(&["good", "evil", "worse"]);
    for next in [good, evil, worse] {
        it = it.promote(next).unwrap();
    }
    let it = it.canary(Some(canary(evil))).unwrap();
    let it = it.end_canary_for("it trapped".into(), 8).unwrap();
    // The operator may still return to it.
    assert_eq!((it.before(), it.fallback()), (Some(evil), Some(good)));
    assert_eq!(it.rollback().unwrap().decision(evil), None);
    let back = it.roll_back_for("it failed".into(), 9).unwrap();
    assert_eq!(back.active, good);
    assert_eq!(back.previous, [digest("built-in")]);
    for bad in [evil, worse] {
        assert!(back.decision(bad).is_some());
    }
    // The built-in policy is the last resort, and the decision about it stays.
    let mut last = it.without(good);
    last.decide(failed(last.built_in, 8));
    let last = last.roll_back_for("it failed".into(), 9).unwrap();
    assert_eq!((last.active, last.previous.len()), (last.built_in, 0));
    assert!(last.decision(last.built_in).is_some());
    assert_eq!(last.fallback(), None);
    assert!(last.roll_back_for("it failed".into(), 10).is_err());
}

#[test]
fn delivered_files_are_bounded() {
    let mut it = with(&[]);
    let delivered = |n: usize| Delivered {
        file: format!("{n}.wasm"),
        policy: Digest::of(b"a"),
    };
    for n in 0..2 * limits::DELIVERED_FILES_MAX {
        it = it.deliver(delivered(n), &[]).deliver(delivered(n), &[]);
    }
    assert_eq!(it.delivered.len(), limits::DELIVERED_FILES_MAX);
    let oldest = delivered(limits::DELIVERED_FILES_MAX);
    assert!(it.delivered.contains(&oldest));
    let version = |n: usize| Delivered {
        file: "often.wasm".into(),
        policy: Digest::of(&n.to_le_bytes()),
    };
    for n in 0..2 * limits::DELIVERED_FILES_MAX {
        it = it.deliver(version(n), &[]);
    }
    let last = 2 * limits::DELIVERED_FILES_MAX - 1;
    for file in [delivered(last), version(last)] {
        assert!(it.delivered.contains(&file), "{file:?}");
    }
    assert_eq!(it.delivered.len(), limits::DELIVERED_FILES_MAX);
    let json = serde_json::to_string(&it).unwrap();
    assert_eq!(serde_json::from_str::<Assignment>(&json).unwrap(), it);
}

/// Regression: the oldest file was dropped although the directory still had it, so a restart
/// promoted it again.
#[test]
fn delivered_file_that_is_present_is_not_dropped() {
    let policy = Digest::of(b"a");
    let name = |n: usize| format!("{n}.wasm");
    let mut it = with(&[]);
    for n in 0..=limits::DELIVERED_FILES_MAX {
        // The second file was removed before the last one came.
        let present: Vec<String> = (0..=n).filter(|it| *it != 1).map(name).collect();
        let file = name(n);
        it = it.deliver(Delivered { file, policy }, &present);
    }
    assert_eq!(it.delivered.len(), limits::DELIVERED_FILES_MAX);
    let has = |n: usize| it.delivered.iter().any(|it| it.file == name(n));
    assert_eq!((has(0), has(1)), (true, false));
}

#[test]
fn guard_decisions_are_bounded() {
    let mut it = with(&[]);
    for n in 0..2 * limits::GUARD_DECISIONS_MAX as u64 {
        it.decide(failed(digest(&n.to_string()), n));
    }
    assert_eq!(it.guard_before.len() + 1, limits::GUARD_DECISIONS_MAX);
    assert_eq!(it.guard.unwrap().now_ms, it.guard_before[0].now_ms + 1);
}
