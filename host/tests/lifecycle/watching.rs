//! What the host sees of policies that answer, and of those that are only tried.

use std::sync::Mutex;
use std::time::{Duration, Instant};

use statehouse::control::Control;
use statehouse::server::Server;
use statehouse::shadow::ShadowReport;
use statehouse::transport::{Inbound, Intake, Outbound, Transport};
use statehouse_core::clock::{Clock, ManualSource, Stamp};
use statehouse_core::log::{Memory, Recorder};
use statehouse_core::policy::{Failure, Role, Selector, Shadow};
use statehouse_core::request::{Incoming, REQUEST_TOPIC};
use statehouse_core::store::{Key, Reexecution};
use statehouse_mqtt::{PropertiesBuilder, QoS};

use super::*;

/// Keeps answers, each with its properties.
#[derive(Default)]
struct Notebook(Mutex<Vec<(Bytes, Bytes)>>);

impl Transport for Notebook {
    fn deliver(&self, ready: &mut dyn FnMut(&mut Vec<Outbound>)) {
        let mut out = Vec::new();
        ready(&mut out);
        let mut notes = self.0.lock().unwrap();
        notes.extend(out.into_iter().map(|out| match out {
            Outbound::Answer(message, _) | Outbound::Notify(_, message, _) => {
                (message.payload, message.properties)
            }
            _ => panic!("nothing else comes of these requests"),
        }));
    }
}

/// A server over a store, with its controls.
struct Rig {
    server: Arc<Server>,
    control: Arc<Control>,
    notebook: Arc<Notebook>,
}

fn rig(assignment: Assignment, purity_every: u32) -> Rig {
    rig_over(store(assignment), purity_every)
}

fn rig_over(mut store: Store, purity_every: u32) -> Rig {
    store.supervision().purity_every = purity_every;
    let recorder = Recorder::new(Arc::new(Memory), Vec::new(), None);
    let settings = Settings {
        node: "StateStore".into(),
        dialect: Some(Dialect::Sdk),
        policy_property: true,
    };
    let core = Core::new(store, recorder, 1, settings);
    let clock = Clock::new(Arc::new(ManualSource::at(NOW_MS)));
    let server = Server::new(core, clock, Mode::Embedded);
    let notebook = Arc::new(Notebook::default());
    server.attach(notebook.clone());
    let control = Control::new(
        server.clone(),
        policies().engine.clone(),
        None,
        "store".into(),
    );
    Rig {
        server,
        control,
        notebook,
    }
}

impl Rig {
    /// The answer, and which policy it says that it is from.
    fn ask(&self, arguments: &[&str]) -> (Bytes, String) {
        let properties = PropertiesBuilder::new()
            .response_topic("answers")
            .correlation_data(b"1")
            .user("__ts", "1700000000000:0:client")
            .finish()
            .unwrap();
        let properties = Properties::parse(properties).unwrap();
        let peer = Peer {
            client: "client".into(),
            connection: 1,
            session: 1,
        };
        let arguments: Vec<&[u8]> = arguments.iter().map(|text| text.as_bytes()).collect();
        let payload = Bytes::from(statehouse_policy::resp::request(&arguments));
        let incoming = Incoming {
            topic: REQUEST_TOPIC,
            payload: &payload,
            properties: &properties,
            qos: QoS::AtLeastOnce,
            delivery: Delivery::default(),
            expires: None,
            peer: &peer,
            grants: None,
        };
        let one = Inbound::Publish(incoming, None);
        self.server.take(&mut std::iter::once(one));
        let (payload, properties) = self.notebook.0.lock().unwrap().pop().expect("an answer");
        let properties = Properties::parse(properties).unwrap();
        let policy = properties.user().find(|(name, _)| *name == "policy");
        (payload, policy.expect("it is set so").1.to_owned())
    }

    /// The report once it has seen so many requests.
    fn report(&self, requests: u64) -> ShadowReport {
        let deadline = Instant::now() + Duration::from_secs(60);
        loop {
            let report = self.control.diff().expect("a comparison was begun");
            if report.compared + report.not_comparable + report.skipped >= requests {
                return report;
            }
            assert!(Instant::now() < deadline, "{report:?}");
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

/// It would fail at every step of a start, each time for as long as a call may take.
#[test]
fn a_policy_that_fails_at_telling_of_an_end_is_asked_about_few_others() {
    let faulty = digest(&policies().faulty);
    let rig = rig(loaded().promote(faulty).unwrap(), 0);
    let keys =
        (0..10 * limits::EXPIRIES_NOTIFIED_PER_STEP_MAX).map(|it| format!("bad-notify/{it}"));
    let keys: Vec<_> = keys.collect();
    for key in &keys {
        rig.ask(&["KEYNOTIFY", key]);
    }
    let ends = keys
        .iter()
        .map(|key| (Key::copy_from_slice(key.as_bytes()), Stamp::default()));
    rig.server.tell_of_ends(&ends.collect::<Vec<_>>());
    assert_eq!(rig.notebook.0.lock().unwrap().len(), keys.len());
    assert_eq!(rig.server.stats().policy_failures, 2);
}

fn tag(policy: &Policy<Transaction>) -> String {
    format!("{}@{}", policy.name, digest(policy).short())
}

fn shadowed(policy: &Policy<Transaction>) -> Assignment {
    let policy = digest(policy);
    let shadow = Shadow {
        policy,
        per_mille: 1000,
    };
    loaded().shadow(Some(shadow)).unwrap()
}

#[test]
fn answers_say_which_policy_gave_them_and_a_promotion_is_between_two() {
    let all = policies();
    let rig = rig(loaded(), 0);
    assert_eq!(rig.ask(&["GET", "k"]).1, tag(&all.standard));
    rig.control.promote(&digest(&all.twin).into()).unwrap();
    assert_eq!(rig.ask(&["GET", "k"]).1, tag(&all.twin));
    assert!(rig.control.rollback().unwrap().built_in);
    assert_eq!(rig.ask(&["GET", "k"]).1, tag(&all.standard));
    let listed = rig.control.list();
    let twin = listed
        .policies
        .iter()
        .find(|it| it.digest == digest(&all.twin));
    let twin = twin.expect("it is still loaded");
    assert!(twin.done.requests >= 1 && twin.done.fuel_mean > 1000);
    assert!(twin.done.fuel_max >= twin.done.fuel_mean);
}

#[test]
fn a_policy_that_fails_too_often_is_rolled_back() {
    let all = policies();
    let rig = rig(loaded().promote(digest(&all.faulty)).unwrap(), 0);
    for _ in 0..9 {
        assert_eq!(rig.ask(&["SET", "k", "panic"]).1, tag(&all.faulty));
        assert_eq!(rig.ask(&["GET", "k"]).1, tag(&all.faulty));
    }
    let (answer, policy) = rig.ask(&["SET", "k", "panic"]);
    assert_eq!(answer, "-ERR internal error\r\n");
    assert_eq!(policy, tag(&all.faulty), "the tenth is still its own");
    assert_eq!(rig.ask(&["SET", "k", "panic"]).1, tag(&all.standard));
    let listed = rig.control.list();
    let guard = listed.assignment.guard.expect("it says why");
    assert_eq!(guard.policy, digest(&all.faulty));
    assert_eq!(guard.why, "it failed at 10 of its last 19 requests");
    // It is still there, to be looked into; what it counted is listed.
    let faulty = listed.policies.iter().find(|it| it.digest == guard.policy);
    let faulty = faulty.expect("it is still loaded");
    assert!(faulty.roles.is_empty() && faulty.done.failures.trap >= 10);
    // To promote it again is somebody's decision, and forgives.
    let promoted = rig.control.promote(&digest(&all.faulty).into()).unwrap();
    assert_eq!(promoted.roles, [Role::Active]);
    assert_eq!(rig.control.list().assignment.guard, None);
}

/// Only the first of two rollbacks found its policy warm; with an interpreter the next one kept everybody waiting.
#[test]
fn after_a_rollback_the_next_one_is_made_ready() {
    let policies: Vec<_> = (1..=4).map(faulty_number).collect();
    let mut assignment = loaded();
    for policy in policies.iter().map(|it| digest(it)) {
        assignment = assignment.load(policy).unwrap().promote(policy).unwrap();
    }
    let rig = rig_over(store_with(assignment, policies.clone()), 0);
    // It counts how often it was started and configured.
    let started = |at: usize| policies[at].counters.all().contains_key("configured");
    for _ in 0..10 {
        rig.ask(&["SET", "k", "panic"]);
    }
    assert_eq!(rig.control.list().assignment.active, digest(&policies[2]));
    let deadline = Instant::now() + Duration::from_secs(60);
    while !started(1) {
        assert!(Instant::now() < deadline, "nobody started it");
        std::thread::sleep(Duration::from_millis(5));
    }
    // Where somebody asks for it, it is done when the call returns.
    rig.control.rollback().unwrap();
    assert!(started(0));
}

#[test]
fn one_client_does_not_switch_a_policy_off_that_answers_others() {
    let faulty = digest(&policies().faulty);
    let mut store = store(loaded().promote(faulty).unwrap());
    let tripped = |store: &mut Store, client: &str, arguments: &[&str]| {
        let (effects, _) = ask(store, client, arguments);
        effects.tripped.map(|trip| trip.why)
    };
    assert_eq!(tripped(&mut store, "press", &["GET", "k"]), None);
    for _ in 0..100 {
        assert_eq!(tripped(&mut store, "lathe", &["SET", "k", "panic"]), None);
    }
    for _ in 0..4 {
        assert_eq!(tripped(&mut store, "drill", &["SET", "k", "panic"]), None);
    }
    let why = tripped(&mut store, "drill", &["SET", "k", "panic"]);
    assert_eq!(why.unwrap(), "it failed at 105 of its last 106 requests");
}

/// Where there are routes, a policy is asked for keys before it is asked for answers; what it failed at there counted
/// for nothing.
#[test]
fn a_policy_that_fails_to_tell_keys_is_rolled_back() {
    let faulty = digest(&policies().faulty);
    let assignment = loaded().promote(faulty).unwrap();
    let twin = digest(&policies().twin);
    let mut store = store(assignment.route(b"elsewhere/", Some(twin)).unwrap());
    for _ in 0..9 {
        let (effects, answer) = ask(&mut store, "c", &["COUNT", "bad-route"]);
        assert_eq!((effects.failures, &effects.tripped), (1, &None));
        // On an instance that began anew.
        assert_eq!((by(&effects), &answer[..]), (faulty, &b":1\r\n"[..]));
    }
    let (effects, _) = ask(&mut store, "c", &["COUNT", "bad-route"]);
    let why = effects.tripped.expect("it was one too many").why;
    assert_eq!(why, "it failed at 10 of its last 19 requests");
}

/// Each such request took half a second, and the guard counted one client's as half of what it takes.
#[test]
fn a_policy_that_holds_everybody_up_for_one_client_is_rolled_back() {
    let faulty = digest(&policies().faulty);
    let mut store = store(loaded().promote(faulty).unwrap());
    for client in ["c", "d"] {
        let (effects, _) = ask(&mut store, client, &["SET", "k", "fine"]);
        assert_eq!(effects.failed, None);
    }
    // On a busy machine the watchdog may fire before the fuel is used up. It has a limit of its
    // own.
    let most = 9 + limits::GUARD_WATCHDOG_MAX;
    let trip = (0..most).find_map(|_| {
        let (effects, _) = ask(&mut store, "c", &["SET", "k", "repeat", "load"]);
        let how = effects.failed.expect("no megabytes without end");
        assert!(matches!(how, Failure::Fuel | Failure::Watchdog), "{how}");
        effects.tripped
    });
    let why = trip.expect("one client was enough").why;
    assert!(why.contains("at 10 of its last"), "{why}");
}

#[test]
fn a_canary_that_fails_too_often_is_ended() {
    let all = policies();
    let rig = rig(loaded(), 0);
    let which: Selector = digest(&all.faulty).into();
    let rule = statehouse_core::policy::CanaryRule::Percent(100);
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
fn a_candidate_in_shadow_sees_what_the_active_one_saw_and_changes_nothing() {
    let all = policies();
    let rig = rig(shadowed(&all.twin), 0);
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
    assert!(!report.differs() && report.examples.is_empty());
    assert_eq!(report.commands["VDEL"].compared, 20);
}

#[test]
fn every_fault_in_shadow_leaves_live_traffic_alone_and_is_an_example() {
    let candidate = faulty_alone();
    let shadow = Shadow {
        policy: digest(&candidate),
        per_mille: 1000,
    };
    let assignment = loaded().load(shadow.policy).unwrap();
    let assignment = assignment.shadow(Some(shadow)).unwrap();
    let rig = rig_over(store_with(assignment, vec![candidate.clone()]), 0);
    let faults: Vec<&str> = include_str!("../../../tests/policies/faulty/faults.txt")
        .lines()
        .collect();
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
    // A re-run says nothing, and neither does the start of its instance.
    assert!(candidate.counters.all().is_empty());
    assert_eq!(rig.server.stats().policy_failures, 0);
}

#[test]
fn what_differs_is_told_by_answer_and_by_effect() {
    let all = policies();
    let rig = rig(shadowed(&all.faulty), 0);
    // Another expiry, no version: the answer differs in its version alone.
    assert_eq!(rig.ask(&["SET", "k", "fine"]).0, "+OK\r\n");
    assert_eq!(rig.ask(&["GET", "absent"]).0, "$-1\r\n");
    // It writes one key more.
    assert_eq!(rig.ask(&["SET", "k", "stray"]).0, "+OK\r\n");
    let report = rig.report(3);
    assert_eq!((report.same, report.different_answer), (1, 2), "{report:?}");
    let last = report.examples.last().unwrap();
    assert_eq!(last.candidate.writes.len(), 2, "{last:?}");
    assert_eq!(last.active.writes, ["put k = stray"]);
    assert_eq!(report.against.digest, digest(&all.standard));
    // A comparison is over when it is ended, and what it came to stays to be read.
    rig.control.shadow(None).unwrap();
    rig.ask(&["SET", "k", "fine"]);
    assert_eq!(rig.control.diff().unwrap().compared, 3);
}

/// What the old candidate still had to do took the place of the report, and what was skipped meanwhile was forgotten.
#[test]
fn a_comparison_is_not_ended_by_what_waits_for_the_one_before() {
    let all = policies();
    let rig = rig(shadowed(&all.faulty), 0);
    let long = "x".repeat(1 << 20);
    // The first ones take the candidate all of their fuel; a few dozen fill the queue.
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
    assert!(before > 0, "the queue was as good as full");
    let deadline = Instant::now() + Duration::from_secs(120);
    while rig.control.diff().unwrap().compared == 0 {
        assert!(Instant::now() < deadline);
        std::thread::sleep(Duration::from_millis(100));
        rig.ask(&["GET", "k"]);
    }
    assert!(skipped() >= before);
}

#[test]
fn a_candidate_may_burn_what_it_could_if_it_answered() {
    let all = policies();
    let mut store = store(shadowed(&all.faulty));
    let mut tried = |fuel_max| {
        store.quota().fuel_max = fuel_max;
        let (effects, answer) = ask(&mut store, "client", &["SET", "k", "burn"]);
        assert_eq!(answer, "+OK\r\n");
        let observed = effects.sampled.expect("every request is compared");
        observed.execute_by_candidate(&mut Instance::new(all.faulty.clone()), &[])
    };
    let most = tried(limits::FUEL_PER_CALL_DEFAULT);
    assert!(matches!(most, Reexecution::Ran(..)));
    let least = tried(limits::FUEL_PER_CALL_MIN);
    assert!(matches!(least, Reexecution::Failed(Failure::Fuel)));
}

#[test]
fn a_policy_that_keeps_something_to_itself_is_found() {
    let all = policies();
    let before = all.faulty.work.done().impure;
    let rig = rig(loaded().promote(digest(&all.faulty)).unwrap(), 1);
    // It counts requests in a static.
    for _ in 0..5 {
        rig.ask(&["COUNT", "-"]);
    }
    let deadline = Instant::now() + Duration::from_secs(60);
    while all.faulty.work.done().impure < before + 4 {
        assert!(Instant::now() < deadline, "{:?}", all.faulty.work.done());
        std::thread::sleep(Duration::from_millis(5));
    }
    // The standard one is asked the same, and is well.
    let rig = self::rig(loaded(), 1);
    for _ in 0..50 {
        rig.ask(&["SET", "k", "v"]);
        rig.ask(&["GET", "k"]);
    }
    std::thread::sleep(Duration::from_millis(200));
    assert_eq!(all.standard.work.done().impure, 0);
}
