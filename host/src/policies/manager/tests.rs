use std::sync::Arc;

use super::*;
use crate::STANDARD_POLICY;
use statehouse_core::clock::{Clock, ManualSource};
use statehouse_core::log::record::{self, Record};
use statehouse_core::log::{Image, JournalRoom, Recorder, Records};
use statehouse_core::policy::Registry;
use statehouse_core::store::{Mode, Quota, Retention, Store};
use statehouse_core::{Core, Settings};

pub(crate) const STORE: &str = "here";

const QUOTA: Quota = Quota {
    keys_max: 100,
    bytes_max: 100_000,
    client_keys_max: 100,
    client_bytes_max: 100_000,
    key_bytes_max: 100,
    value_bytes_max: 1000,
    watches_max: 100,
    watches_per_connection_max: 100,
    watch_bytes_max: 1 << 20,
    recent_bytes_max: 1 << 20,
    unreleased_bytes_max: 1 << 20,
    fuel_max: statehouse_config::limits::FUEL_PER_CALL_DEFAULT,
    journal: JournalRoom::Growth,
};

/// Another build of the standard policy. It has an extra custom section, which the engine ignores:
/// id 0, its length, its name.
pub(crate) fn twin(name: u8) -> Vec<u8> {
    [STANDARD_POLICY, &[0, 2, 1, name]].concat()
}

/// The digest of [`twin`].
pub(crate) fn digest(name: u8) -> Digest {
    Digest::of(&twin(name))
}

pub(crate) struct Rig {
    pub(crate) control: Arc<Control>,
    records: Arc<Records>,
    data: tempfile::TempDir,
}

pub(crate) fn rig() -> Rig {
    rig_with(None)
}

/// A store that gives the files of its policies to `publish`.
fn rig_with(publish: Option<Publish>) -> Rig {
    let engine = Arc::new(Engine::new().unwrap());
    let standard = Arc::new(engine.load(STANDARD_POLICY).unwrap());
    let registry = Registry::new(standard, None);
    let records = Arc::new(Records::default());
    let recorder = Recorder::new(records.clone(), Vec::new(), None);
    let core = Core::new(
        Store::new(registry, QUOTA),
        recorder,
        1,
        Settings::default(),
    );
    let clock = Clock::new(Arc::new(ManualSource::at(1_700_000_000_000)));
    let server = Server::new(core, clock, Mode::Embedded);
    let data = tempfile::tempdir().unwrap();
    let modules = Modules::of(data.path());
    Rig {
        control: Control::new(server, engine, Some(modules), publish, STORE.into()),
        records,
        data,
    }
}

impl Rig {
    /// The guard rolls the active policy back.
    pub(crate) fn trip(&self) {
        let before = self.control.list().assignment;
        let next = before.roll_back_for("it failed".into(), 1).unwrap();
        let server = &self.control.shared.server;
        server.assign(&before, next, Vec::new()).unwrap();
    }

    pub(crate) fn active(&self) -> Digest {
        self.control.list().assignment.active
    }

    pub(crate) fn data(&self) -> &std::path::Path {
        self.data.path()
    }

    /// The image that a start would recover.
    pub(crate) fn recorded(&self) -> Image {
        let mut image = Image::new(Retention::default());
        for record in self.records.all() {
            image.record(&record).unwrap();
        }
        image
    }
}

fn select(digest: Digest) -> Selector {
    digest.into()
}

#[test]
fn a_policy_is_loaded_promoted_and_rolled_back() {
    let rig = rig();
    let control = &rig.control;
    let a = control.load(&twin(b'a'), None).unwrap();
    assert!(a.roles.is_empty() && !a.built_in);
    assert_eq!(a.done, Done::default(), "its trial is not counted");
    assert_eq!(control.load(&twin(b'a'), None).unwrap().digest, a.digest);
    let kept = Modules::of(rig.data.path()).load(&a.digest.0).unwrap();
    assert_eq!(kept, twin(b'a'));

    let promoted = control.promote(&select(a.digest)).unwrap();
    assert_eq!(promoted.roles, [Role::Active]);
    let built_in = control.list().assignment.built_in;
    assert_eq!(control.list().assignment.previous, [built_in]);
    let image = rig.recorded();
    assert_eq!(image.assignment, Some(control.list().assignment));
    let active = &image.policies[image.active.unwrap() as usize];
    assert_eq!(active.digest, a.digest.0);

    assert!(control.rollback().unwrap().built_in);
    assert_eq!(rig.recorded().assignment, Some(control.list().assignment));
    let error = control.rollback().unwrap_err();
    assert_eq!(error.kind(), ControlErrorKind::Conflict, "{error}");
}

/// In an earlier version the guard could roll back while the operator's own rollback warmed an
/// instance, and the second attempt of the operator's rollback rolled back one more policy.
#[test]
fn a_rollback_that_the_guard_made_first_is_not_repeated() {
    let rig = rig();
    let control = &rig.control;
    let a = control.load(&twin(b'a'), None).unwrap().digest;
    let b = control.load(&twin(b'b'), None).unwrap().digest;
    for policy in [a, b] {
        control.promote(&select(policy)).unwrap();
    }
    let mut from = None;
    let next = control.change(|seen, ready| {
        if from.is_none() {
            rig.trip();
        }
        roll_back(&mut from, seen, ready)
    });
    assert_eq!(next.unwrap().active, a);
    assert_eq!(rig.active(), a);
    let guard = control.list().assignment.guard;
    assert!(guard.is_some(), "the reason of the guard stays");
    // A second call is another rollback.
    assert!(control.rollback().unwrap().built_in);
}

/// A store may start with other trusted keys than those with which its policies were loaded.
#[test]
fn unverified_policies_keep_their_roles_and_get_no_new_one() {
    let rig = rig();
    let control = &rig.control;
    let [a, b, c] = (*b"abc").map(|it| control.load(&twin(it), None).unwrap().digest);
    for policy in [a, b] {
        control.promote(&select(policy)).unwrap();
    }
    control.check_with(Box::new(|file: &[u8]| match file == twin(b'c') {
        true => Ok(()),
        false => Err("it is not signed".into()),
    }));
    let refuse = |done: Result<(), ControlError>| {
        let error = done.unwrap_err();
        assert_eq!(error.kind(), ControlErrorKind::Refused, "{error}");
        let error = error.to_string();
        assert!(error.contains(": it is not signed. The signed"), "{error}");
    };
    let a = select(a);
    refuse(control.promote(&a).map(drop));
    refuse(control.route(b"k/", Some(&a)));
    refuse(control.shadow(Some((&a, 10))));
    refuse(control.canary(Some((&a, CanaryRule::Percent(5)))));
    assert_eq!(rig.active(), b);
    // A rollback protects the store, so it may return to any policy.
    rig.trip();
    assert_eq!(select(rig.active()), a);
    control.promote(&select(c)).unwrap();
    assert_eq!(select(control.rollback().unwrap().digest), a);
    control.promote(&select(c)).unwrap();
    // The built-in policy needs no signature.
    let built_in: Selector = "builtin".parse().unwrap();
    control.route(b"k/", Some(&built_in)).unwrap();
    control.promote(&built_in).unwrap();
    assert_eq!(control.rollback().unwrap().digest, c);
}

/// In an earlier version a load that ended after the store's last record waited forever for its own
/// record to become durable, and so the process never exited.
#[test]
fn a_stopping_store_refuses_changes_and_ends_their_waits() {
    let rig = rig();
    let control = &rig.control;
    let a = control.load(&twin(b'a'), None).unwrap().digest;
    rig.records.hold();
    let waiting = std::thread::spawn({
        let control = control.clone();
        move || control.promote(&select(a))
    });
    while rig.active() != a {
        std::thread::yield_now();
    }
    assert!(!waiting.is_finished(), "its record is not durable");
    control.shared.server.stop();
    let recorded = rig.records.all().len();
    let error = waiting.join().unwrap().unwrap_err();
    assert!(error.to_string().contains("may have been kept"), "{error}");
    let error = control.rollback().unwrap_err();
    assert_eq!(error.kind(), ControlErrorKind::Failed, "{error}");
    assert_eq!(rig.active(), a);
    assert_eq!(rig.records.all().len(), recorded);
}

#[test]
fn a_policy_with_a_route_cannot_be_unloaded() {
    let rig = rig();
    let control = &rig.control;
    let a = control.load(&twin(b'a'), None).unwrap().digest;
    control.route(b"rule/", Some(&select(a))).unwrap();
    let error = control.unload(&select(a)).unwrap_err();
    assert!(error.to_string().contains("owns the keys"), "{error}");
    control.route(b"rule/", None).unwrap();
    let error = control.route(b"rule/", None).unwrap_err();
    assert_eq!(error.kind(), ControlErrorKind::NotFound, "{error}");
    control.unload(&select(a)).unwrap();
    let error = control.promote(&select(a)).unwrap_err();
    assert_eq!(error.kind(), ControlErrorKind::NotFound, "{error}");
    let built_in: Selector = "builtin".parse().unwrap();
    let error = control.unload(&built_in).unwrap_err();
    assert_eq!(error.kind(), ControlErrorKind::Conflict, "{error}");
    assert_eq!(control.list().policies.len(), 1);
}

#[test]
fn a_change_without_effect_is_not_recorded() {
    let rig = rig();
    let a = rig.control.load(&twin(b'a'), None).unwrap().digest;
    rig.control.promote(&select(a)).unwrap();
    let before = rig.records.all().len();
    rig.control.promote(&select(a)).unwrap();
    rig.control.load(&twin(b'a'), None).unwrap();
    assert_eq!(rig.records.all().len(), before);
    let records = rig.records.all();
    let last = record::read(records.last().unwrap()).unwrap();
    assert!(matches!(last, Record::Assignment(_)));
}

/// Regression: a policy that etcd had lost could not be stored there again.
#[test]
fn loading_a_loaded_policy_publishes_its_file_again() {
    let published = Arc::<Mutex<Vec<Vec<u8>>>>::default();
    let seen = published.clone();
    let rig = rig_with(Some(Box::new(move |file: &[u8]| {
        seen.lock().unwrap().push(file.to_vec());
        Ok(())
    })));
    for _ in 0..2 {
        rig.control.load(&twin(b'a'), None).unwrap();
    }
    assert_eq!(*published.lock().unwrap(), [twin(b'a'), twin(b'a')]);
    assert_eq!(rig.control.list().policies.len(), 2);
}

#[test]
fn a_load_beyond_the_limit_unloads_the_oldest_idle_policy() {
    let rig = rig();
    let count = u8::try_from(limits::LOADED_POLICIES_MAX).unwrap();
    let first = rig.control.load(&twin(0), None).unwrap().digest;
    rig.control.promote(&select(first)).unwrap();
    for name in 1..=count {
        rig.control.load(&twin(name), None).unwrap();
    }
    let listed = rig.control.list();
    assert_eq!(listed.assignment.loaded.len(), usize::from(count));
    assert_eq!(listed.assignment.loaded[0], first);
    assert!(!listed.assignment.loaded.contains(&digest(1)));
    assert_eq!(listed.policies.len(), usize::from(count) + 1);
}
