//! Supervision of policies: the guard of the active policy and of a canary, and the comparison with
//! a shadow.

use std::fmt::Debug;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use statehouse::policies::manager::Control;
use statehouse_core::Settings;
use statehouse_core::clock::{Clock, ManualSource, Stamp};
use statehouse_core::policy::{Canary, CanaryRule, Failure, Role, Selector, Shadow};
use statehouse_core::request::Incoming;
use statehouse_core::store::{Key, Mode, Reexecution};
use statehouse_mqtt::PropertiesBuilder;
use statehouse_server::{Server, shadow::ShadowReport};
use statehouse_transport::{Inbound, Intake, Outbound, Transport};

use super::*;

/// A transport that collects answers and notifications with their properties.
#[derive(Default)]
struct Collector(Mutex<Vec<(Bytes, Bytes)>>);

impl Transport for Collector {
    fn deliver(&self, ready: &mut dyn FnMut(&mut Vec<Outbound>)) {
        let mut out = Vec::new();
        ready(&mut out);
        let mut collected = self.0.lock().unwrap();
        collected.extend(out.into_iter().map(|out| match out {
            Outbound::Response(message, _) | Outbound::Notification(_, message, _) => {
                (message.payload, message.properties)
            }
            _ => panic!("an unexpected output"),
        }));
    }
}

/// A server over a store, with its controls.
struct Rig {
    server: Arc<Server>,
    control: Arc<Control>,
    sent: Arc<Collector>,
}

fn rig(assignment: Assignment, purity_every: u32) -> Rig {
    rig_over(core(assignment), purity_every)
}

fn rig_over(mut core: Core, purity_every: u32) -> Rig {
    core.store_mut().supervision().purity_every = purity_every;
    *core.settings_mut() = Settings {
        node: "StateStore".into(),
        dialect: Some(Dialect::Sdk),
        policy_property: true,
        ..Settings::default()
    };
    let clock = Clock::new(Arc::new(ManualSource::at(NOW_MS)));
    let server = Server::new(core, clock, Mode::Embedded);
    let sent = Arc::new(Collector::default());
    server.attach(sent.clone());
    let control = Control::new(
        server.clone(),
        policies().engine.clone(),
        None,
        None,
        "store".into(),
    );
    Rig {
        server,
        control,
        sent,
    }
}

impl Rig {
    /// Sends a request. Returns the answer and the policy that its properties name.
    fn ask(&self, arguments: &[&str]) -> (Bytes, String) {
        let properties = common::request_properties();
        let peer = Peer::numbered("client", 1);
        let arguments: Vec<&[u8]> = arguments.iter().map(|text| text.as_bytes()).collect();
        let payload = Bytes::from(statehouse_policy::resp::request(&arguments));
        let incoming = Incoming::new(&peer, &payload, &properties);
        let one = Inbound::Publish(incoming, None);
        self.server.take(&mut std::iter::once(one));
        let (payload, properties) = self.sent.0.lock().unwrap().pop().expect("an answer");
        let properties = Properties::parse(properties).unwrap();
        let policy = properties.user().find(|(name, _)| *name == "policy");
        (
            payload,
            policy.expect("the policy property is on").1.to_owned(),
        )
    }

    /// The comparison report, after it has covered this many requests.
    fn report(&self, requests: u64) -> ShadowReport {
        let look = || self.control.diff().expect("a comparison runs");
        wait(look, |it| {
            it.compared + it.not_comparable + it.skipped >= requests
        })
    }
}

/// Looks until a condition holds.
fn wait<T: Debug>(look: impl Fn() -> T, holds: impl Fn(&T) -> bool) -> T {
    let deadline = Instant::now() + Duration::from_secs(120);
    loop {
        let seen = look();
        if holds(&seen) {
            return seen;
        }
        assert!(Instant::now() < deadline, "{seen:?}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// At a start, a failing policy must not be called in every step, because each failure may take as
/// long as a call may take.
#[test]
fn policy_that_fails_to_renotify_is_soon_skipped() {
    let faulty = digest(&policies().faulty);
    let rig = rig(loaded().promote(faulty).unwrap(), 0);
    let count = 10 * limits::EXPIRIES_NOTIFIED_PER_STEP_MAX;
    let keys = (0..count).map(|it| format!("bad-notify/{it}"));
    let ended = keys.map(|key| {
        rig.ask(&["KEYNOTIFY", &key]);
        (Key::from(key), Stamp::default())
    });
    rig.server.renotify_expired(&ended.collect::<Vec<_>>());
    assert_eq!(rig.sent.0.lock().unwrap().len(), count);
    assert_eq!(rig.server.stats().policy_failures, 2);
}

fn tag(policy: &Policy<Transaction>) -> String {
    format!("{}@{}", policy.name, digest(policy).short())
}

/// Compares all requests with this policy.
fn shadowed(assignment: Assignment, policy: &Policy<Transaction>) -> Assignment {
    let shadow = Shadow {
        policy: digest(policy),
        per_mille: 1000,
    };
    assignment.shadow(Some(shadow)).unwrap()
}

#[test]
fn answers_name_their_policy_across_promote_and_rollback() {
    let all = policies();
    let rig = rig(loaded(), 0);
    assert_eq!(rig.ask(&["GET", "k"]).1, tag(&all.standard));
    rig.control.promote(&digest(&all.twin).into()).unwrap();
    assert_eq!(rig.ask(&["GET", "k"]).1, tag(&all.twin));
    assert!(rig.control.rollback().unwrap().built_in);
    assert_eq!(rig.ask(&["GET", "k"]).1, tag(&all.standard));
    let mut listed = rig.control.list().policies.into_iter();
    let twin = listed.find(|it| it.digest == digest(&all.twin));
    let twin = twin.expect("it is still loaded");
    assert!(twin.done.requests >= 1 && twin.done.fuel_mean > 1000);
    assert!(twin.done.fuel_max >= twin.done.fuel_mean);
}

#[test]
fn policy_that_fails_too_often_is_rolled_back() {
    let all = policies();
    let rig = rig(loaded().promote(digest(&all.faulty)).unwrap(), 0);
    for _ in 0..9 {
        assert_eq!(rig.ask(&["SET", "k", "panic"]).1, tag(&all.faulty));
        assert_eq!(rig.ask(&["GET", "k"]).1, tag(&all.faulty));
    }
    let (answer, policy) = rig.ask(&["SET", "k", "panic"]);
    assert_eq!(answer, "-ERR internal error\r\n");
    assert_eq!(policy, tag(&all.faulty), "it gave the tenth answer");
    assert_eq!(rig.ask(&["SET", "k", "panic"]).1, tag(&all.standard));
    let listed = rig.control.list();
    let guard = listed.assignment.guard.expect("the guard names its reason");
    assert_eq!(guard.policy, digest(&all.faulty));
    assert_eq!(guard.why, "it failed at 10 of its last 19 requests");
    // The policy stays loaded for inspection, and its counters are listed.
    let faulty = listed.policies.iter().find(|it| it.digest == guard.policy);
    let faulty = faulty.expect("it is still loaded");
    assert!(faulty.roles.is_empty() && faulty.done.failures.trap >= 10);
    // Promoting it again is an operator's decision, and clears the guard's report.
    let promoted = rig.control.promote(&digest(&all.faulty).into()).unwrap();
    assert_eq!(promoted.roles, [Role::Active]);
    assert_eq!(rig.control.list().assignment.guard, None);
}

/// Regression test: only the first of two rollbacks found a warm instance. With an interpreter, the
/// next one blocked all requests.
#[test]
fn rollback_prepares_the_next_rollback() {
    let policies: Vec<_> = (1..=4).map(faulty_number).collect();
    let mut assignment = loaded();
    for policy in policies.iter().map(|it| digest(it)) {
        assignment = assignment.load(policy).unwrap().promote(policy).unwrap();
    }
    let rig = rig_over(core_with(assignment, policies.clone()), 0);
    // The policy counts its starts.
    let started = |at: usize| policies[at].counters.all().contains_key("configured");
    for _ in 0..10 {
        rig.ask(&["SET", "k", "panic"]);
    }
    assert_eq!(rig.control.list().assignment.active, digest(&policies[2]));
    wait(|| started(1), |it| *it);
    // After an explicit rollback, the next policy is ready when the call returns.
    rig.control.rollback().unwrap();
    assert!(started(0));
}

#[test]
fn failures_of_one_client_do_not_trip_the_guard() {
    let mut core = faulty_core();
    let tripped = |core: &mut Core, client: &str, arguments: &[&str]| {
        let (effects, _) = ask(core, client, arguments);
        effects.tripped.map(|trip| trip.why)
    };
    assert_eq!(tripped(&mut core, "press", &["GET", "k"]), None);
    for _ in 0..100 {
        assert_eq!(tripped(&mut core, "lathe", &["SET", "k", "panic"]), None);
    }
    for _ in 0..4 {
        assert_eq!(tripped(&mut core, "drill", &["SET", "k", "panic"]), None);
    }
    let why = tripped(&mut core, "drill", &["SET", "k", "panic"]);
    assert_eq!(why.unwrap(), "it failed at 105 of its last 106 requests");
}

/// Regression test: with routes, a policy's `route` is called before `handle`, and failures in
/// `route` did not count.
#[test]
fn policy_that_fails_in_route_is_rolled_back() {
    let faulty = digest(&policies().faulty);
    let assignment = loaded().promote(faulty).unwrap();
    let twin = digest(&policies().twin);
    let mut core = core(assignment.route(b"elsewhere/", Some(twin)).unwrap());
    for _ in 0..9 {
        let (effects, answer) = ask(&mut core, "c", &["COUNT", "bad-route"]);
        assert_eq!((effects.failures, &effects.tripped), (1, &None));
        // A new instance answered.
        assert_eq!((by(&effects), &answer[..]), (faulty, &b":1\r\n"[..]));
    }
    let (effects, _) = ask(&mut core, "c", &["COUNT", "bad-route"]);
    let trip = effects.tripped.expect("the tenth failure trips the guard");
    assert_eq!(trip.why, "it failed at 10 of its last 19 requests");
}

/// Regression test: if two policies failed once too often at one request, only one of them ended,
/// and the failures of the other one were counted from zero.
#[test]
fn policies_that_trip_at_one_request_both_end() {
    let faulty = digest(&policies().faulty);
    let canary = faulty_alone();
    let assignment = loaded().promote(faulty).unwrap();
    let assignment = assignment.load(digest(&canary)).unwrap();
    let assignment = assignment.canary(Some(Canary {
        policy: digest(&canary),
        // It answers no request, but is asked for the key of each.
        rule: CanaryRule::Keys("none".into()),
    }));
    let twin = digest(&policies().twin);
    let assignment = assignment.unwrap().route(b"elsewhere/", Some(twin));
    let mut core = core_with(assignment.unwrap(), vec![canary]);
    let mut parts = Vec::new();
    // The tenth and eleventh, unless a slow machine leaves no time for a call. Counting from zero
    // takes twenty.
    for _ in 0..15 {
        let (effects, _) = ask(&mut core, "c", &["COUNT", "bad-route"]);
        parts.extend(effects.tripped.map(|trip| trip.part));
    }
    assert_eq!(parts.len(), 2, "{parts:?}");
    assert_ne!(parts[0], parts[1]);
}

/// Regression test: such failures rolled the active policy back, which does not end the route.
#[test]
fn failures_under_a_route_do_not_trip_the_guard() {
    let faulty = digest(&policies().faulty);
    let assignment = loaded().promote(faulty).unwrap();
    let mut core = core(assignment.route(b"rule/", Some(faulty)).unwrap());
    for _ in 0..2 * limits::GUARD_FAILURES_DEFAULT {
        let (effects, _) = ask(&mut core, "c", &["SET", "rule/a", "panic"]);
        assert_eq!((effects.failures, &effects.tripped), (1, &None));
    }
    let (effects, answer) = ask(&mut core, "c", &["SET", "rule/a", "stray"]);
    assert_eq!((by(&effects), &answer[..]), (faulty, &b"+OK\r\n"[..]));
    let mut trips = (0..limits::GUARD_FAILURES_DEFAULT)
        .map(|_| ask(&mut core, "c", &["SET", "k", "panic"]).0.tripped);
    assert!(trips.any(|it| it.is_some()), "its other requests count");
}

/// Regression test: each such request took half a second, and the guard counted the failures of one
/// client as at most half of those that it tolerates.
#[test]
fn policy_that_blocks_all_for_one_client_is_rolled_back() {
    let mut core = faulty_core();
    for client in ["c", "d"] {
        let (effects, _) = ask(&mut core, client, &["SET", "k", "fine"]);
        assert_eq!(effects.failed, None);
    }
    // On a busy machine the watchdog may fire before the fuel is used up. It has a limit of its
    // own.
    let most = 9 + limits::GUARD_WATCHDOG_MAX;
    let trip = (0..most).find_map(|_| {
        let (effects, _) = ask(&mut core, "c", &["SET", "k", "repeat", "load"]);
        let how = effects.failed.expect("an endless copy fails");
        assert!(matches!(how, Failure::Fuel | Failure::Watchdog), "{how}");
        effects.tripped
    });
    let why = trip.expect("one client trips the guard").why;
    assert!(why.contains("at 10 of its last"), "{why}");
}

#[test]
fn canary_that_fails_too_often_is_ended() {
    let all = policies();
    let rig = rig(loaded(), 0);
    let which: Selector = digest(&all.faulty).into();
    let rule = CanaryRule::Percent(100);
    rig.control.canary(Some((&which, rule))).unwrap();
    for _ in 0..10 {
        assert_eq!(rig.ask(&["SET", "k", "panic"]).1, tag(&all.faulty));
    }
    assert_eq!(rig.ask(&["SET", "k", "panic"]).1, tag(&all.standard));
    let assignment = rig.control.list().assignment;
    assert_eq!(assignment.canary, None);
    assert_eq!(assignment.guard.unwrap().policy, digest(&all.faulty));
    assert_eq!(assignment.active, digest(&all.standard));
}

#[test]
fn shadow_sees_the_active_policys_reads_without_effects() {
    let all = policies();
    let rig = rig(shadowed(loaded(), &all.twin), 0);
    let requests: &[&[&str]] = &[
        &["SET", "k", "1"],
        &["GET", "k"],
        &["SET", "k", "2", "NX"],
        &["SET", "k", "3", "PX", "1000"],
        &["VDEL", "k", "9"],
        &["DEL", "k"],
        &["GET", "k"],
        &["NONSENSE"],
        &["KEYNOTIFY", "k"],
        &["KEYNOTIFY", "k", "STOP"],
    ];
    for _ in 0..20 {
        for request in requests {
            assert_eq!(rig.ask(request).1, tag(&all.standard));
        }
    }
    let report = rig.report(20 * requests.len() as u64);
    assert_eq!(report.not_comparable + report.skipped, 0, "{report:?}");
    assert_eq!(report.same, report.compared, "{report:?}");
    let different = report.different_answer + report.different_effect;
    assert_eq!(different + report.failed, 0, "{report:?}");
    assert!(report.examples.is_empty());
    assert_eq!(report.commands["VDEL"].compared, 20);
}

#[test]
fn fault_in_shadow_is_reported_without_affecting_clients() {
    let candidate = faulty_alone();
    let assignment = loaded().load(digest(&candidate)).unwrap();
    let assignment = shadowed(assignment, &candidate);
    let rig = rig_over(core_with(assignment, vec![candidate.clone()]), 0);
    let faults = include_str!("../../../tests/policies/faulty/faults.txt");
    let faults: Vec<&str> = faults.lines().collect();
    for fault in &faults {
        assert_eq!(rig.ask(&["SET", "k", fault]).0, "+OK\r\n", "{fault}");
        let stored = format!("${}\r\n{fault}\r\n", fault.len());
        assert_eq!(rig.ask(&["GET", "k"]).0, stored, "{fault}");
    }
    let report = rig.report(2 * faults.len() as u64);
    assert_eq!(report.failed, faults.len() as u64, "{report:?}");
    let failed = report.examples.iter().filter(|it| it.kind == "failed");
    assert_eq!(failed.count(), limits::SHADOW_EXAMPLES_ALIKE_MAX);
    let first = &report.examples[0];
    assert_eq!(first.request[..2], ["SET", "k"]);
    assert!(first.candidate.failure.is_some() && first.active.failure.is_none());
    // A shadow execution changes no counters, and neither does the start of its instance.
    assert!(candidate.counters.all().is_empty());
    assert_eq!(rig.server.stats().policy_failures, 0);
}

#[test]
fn report_shows_different_answers_and_writes() {
    let all = policies();
    let rig = rig(shadowed(loaded(), &all.faulty), 0);
    // The answer differs only in its version, which the faulty policy omits.
    assert_eq!(rig.ask(&["SET", "k", "fine"]).0, "+OK\r\n");
    assert_eq!(rig.ask(&["GET", "absent"]).0, "$-1\r\n");
    // The candidate writes one more key.
    assert_eq!(rig.ask(&["SET", "k", "stray"]).0, "+OK\r\n");
    let report = rig.report(3);
    assert_eq!((report.same, report.different_answer), (1, 2), "{report:?}");
    let last = report.examples.last().unwrap();
    assert_eq!(last.candidate.writes.len(), 2, "{last:?}");
    assert_eq!(last.active.writes, ["put k = stray"]);
    assert_eq!(report.against.digest, digest(&all.standard));
    // After the end of a comparison, its report stays readable.
    rig.control.shadow(None).unwrap();
    rig.ask(&["SET", "k", "fine"]);
    assert_eq!(rig.control.diff().unwrap().compared, 3);
}

/// Regression test: queued work of the old candidate replaced the new report, which lost its count
/// of skipped requests.
#[test]
fn new_comparison_survives_queued_work_of_the_old_one() {
    let all = policies();
    let rig = rig(shadowed(loaded(), &all.faulty), 0);
    let long = "x".repeat(1 << 20);
    // The first requests use all fuel of the candidate. A few dozen requests fill the queue.
    let mut asked = 0;
    while rig.control.diff().unwrap().skipped == 0 {
        let mode = if asked < 4 { "loop" } else { "panic" };
        rig.ask(&["SET", "k", mode, &long]);
        asked += 1;
    }
    let which = Selector::from(digest(&all.twin));
    rig.control.shadow(Some((&which, 1000))).unwrap();
    let skipped = || rig.control.diff().unwrap().skipped;
    assert_eq!(skipped(), 0);
    for _ in 0..5 {
        rig.ask(&["SET", "k", "panic", &long]);
    }
    let before = skipped();
    assert!(before > 0, "the queue was nearly full");
    let look = || {
        rig.ask(&["GET", "k"]);
        rig.control.diff().unwrap()
    };
    wait(look, |it| it.compared > 0);
    assert!(skipped() >= before);
}

#[test]
fn candidate_has_the_fuel_of_an_active_policy() {
    let all = policies();
    let mut core = core(shadowed(loaded(), &all.faulty));
    let mut tried = |fuel_max| {
        core.store_mut().quota().fuel_max = fuel_max;
        let (effects, answer) = ask(&mut core, "client", &["SET", "k", "burn"]);
        assert_eq!(answer, "+OK\r\n");
        let observed = effects.sampled.expect("every request is compared");
        observed.execute_by_candidate(&mut Instance::new(all.faulty.clone()), &[])
    };
    let most = tried(limits::FUEL_PER_CALL_DEFAULT);
    assert!(matches!(most, Reexecution::Ran(..)));
    let least = tried(limits::FUEL_PER_CALL_MIN);
    assert!(matches!(least, Reexecution::Failed(Failure::Fuel)));
}

/// Why a re-execution failed.
fn failure(result: Reexecution) -> String {
    match result {
        Reexecution::Failed(failure) => failure.to_string(),
        _ => panic!("it must fail"),
    }
}

/// Regression: these texts counted nothing, so a full queue took a hundred megabytes more.
#[test]
fn texts_of_a_request_count_in_a_sample() {
    let all = policies();
    let mut core = core(shadowed(loaded(), &all.faulty));
    let mut cost_of = |text: &str| {
        let properties = PropertiesBuilder::new()
            .response_topic("answers")
            .correlation_data(b"1")
            .user("__ts", text)
            .user("__ft", text)
            .finish()
            .and_then(Properties::parse)
            .unwrap();
        let arguments: [&[u8]; 2] = [b"GET", b"k"];
        let payload = Bytes::from(statehouse_policy::resp::request(&arguments));
        let peer = Peer::numbered(text, 1);
        let incoming = Incoming::new(&peer, &payload, &properties);
        let effects = core.handle(Input::Publish(&incoming), at(NOW_MS)).effects;
        let observed = effects.sampled.expect("every request is compared");
        observed.cost_bytes()
    };
    let bytes = 60_000;
    // The two texts are in the properties and copied, and the client id is a third one.
    let more = cost_of(&"1".repeat(bytes)) - cost_of("1");
    assert!(more + 1_000 > 5 * bytes as u64, "{more}");
}

/// Regression: a comparison accepted a command that fails after a promotion.
#[test]
fn candidate_with_an_undeclared_command_fails() {
    let all = policies();
    let mut core = core(shadowed(loaded(), &all.faulty));
    let (effects, answer) = ask(&mut core, "client", &["SET", "k", "beyond"]);
    assert_eq!(answer, "+OK\r\n");
    let observed = effects.sampled.expect("every request is compared");
    let mut instance = Instance::new(all.faulty.clone());
    let result = observed.execute_by_candidate(&mut instance, &[]);
    assert_contains!(failure(result), "it declares 3 commands");
    // An earlier version of the program accepted it, so a redelivery must be answered alike.
    let again = observed.reexecute(&mut instance);
    assert!(matches!(again, Reexecution::Ran(..)));
}

/// Regression: a comparison accepted a policy that fails at every write of a watched key.
#[test]
fn candidate_that_cannot_notify_fails() {
    let all = policies();
    let mut core = core(shadowed(loaded(), &all.faulty));
    let mut instance = Instance::new(all.faulty.clone());
    let mut tried = |key: &str| {
        let (effects, answer) = ask(&mut core, "client", &["SET", key, "fine"]);
        assert_eq!(answer, "+OK\r\n");
        let observed = effects.sampled.expect("every request is compared");
        observed.execute_by_candidate(&mut instance, &[])
    };
    assert!(matches!(tried("notify"), Reexecution::Ran(..)));
    assert_contains!(failure(tried("bad-notify")), "a panic in notify");
    // Its instance is replaced.
    assert!(matches!(tried("notify"), Reexecution::Ran(..)));
}

/// Regression: requests at which the active policy failed were left out, so a comparison could not
/// show that the candidate answers them.
#[test]
fn failure_of_the_active_policy_is_a_difference() {
    let active = faulty_alone();
    let assignment = loaded().load(digest(&active)).unwrap();
    let assignment = assignment.promote(digest(&active)).unwrap();
    let assignment = shadowed(assignment, &policies().standard);
    let rig = rig_over(core_with(assignment, vec![active.clone()]), 1);
    let (answer, policy) = rig.ask(&["SET", "k", "panic"]);
    assert_eq!(answer, "-ERR internal error\r\n");
    assert_eq!(policy, tag(&active));
    let report = rig.report(1);
    assert_eq!(report.compared, 1, "{report:?}");
    assert_eq!(report.different_answer, 1, "{report:?}");
    let example = &report.examples[0];
    let failure = example.active.failure.as_deref().unwrap();
    assert_contains!(failure, "a panic on request");
    assert_eq!(example.active.answer, None);
    assert_eq!(example.candidate.answer.as_deref(), Some("+OK\\r\\n"));
    assert_eq!(example.candidate.writes, ["put k = panic"]);
    // A failure is not checked for hidden state.
    assert_eq!(active.work.done().impure, 0);
}

#[test]
fn policy_with_hidden_state_is_detected() {
    let all = policies();
    let before = all.faulty.work.done().impure;
    let rig = rig(loaded().promote(digest(&all.faulty)).unwrap(), 1);
    // The policy counts requests in a static variable.
    for _ in 0..5 {
        rig.ask(&["COUNT", "-"]);
    }
    wait(|| all.faulty.work.done(), |it| it.impure >= before + 4);
    // The standard policy has no hidden state.
    let rig = self::rig(loaded(), 1);
    for _ in 0..50 {
        rig.ask(&["SET", "k", "v"]);
        rig.ask(&["GET", "k"]);
    }
    std::thread::sleep(Duration::from_millis(200));
    assert_eq!(all.standard.work.done().impure, 0);
}
