use std::fs;

use super::*;
use crate::STANDARD_POLICY;
use crate::policies::manager::tests::{digest, twin};
use statehouse_core::policy::{Canary, CanaryRule, Shadow};
use statehouse_core::store::Retention;

struct Rig {
    engine: Engine<Transaction>,
    standard: Arc<Policy<Transaction>>,
    modules: Modules,
    data: tempfile::TempDir,
}

impl Rig {
    /// Modules a, b and c are on disk.
    fn new() -> Self {
        let engine = Engine::new().unwrap();
        let standard = Arc::new(engine.load(STANDARD_POLICY).unwrap());
        let data = tempfile::tempdir().unwrap();
        let modules = Modules::of(data.path());
        for name in *b"abc" {
            modules.save(&digest(name).0, &twin(name)).unwrap();
        }
        Self {
            engine,
            standard,
            modules,
            data,
        }
    }

    fn built_in(&self) -> Digest {
        self.standard.digest.into()
    }

    /// Policy a is active, b has a route, c is a canary and in shadow.
    fn assignment(&self) -> Assignment {
        let [a, b, c] = *b"abc";
        let mut it = Assignment::of(self.built_in());
        for name in [a, b, c] {
            it = it.load(digest(name)).unwrap();
        }
        let policy = digest(c);
        let rule = CanaryRule::Percent(10);
        let shadow = Shadow {
            policy,
            per_mille: 5,
        };
        it.promote(digest(a))
            .and_then(|it| it.route(b"b/", Some(digest(b))))
            .and_then(|it| it.canary(Some(Canary { policy, rule })))
            .and_then(|it| it.shadow(Some(shadow)))
            .unwrap()
    }

    fn open(&self, image: &Image, choice: &PolicyChoice) -> anyhow::Result<Assignment> {
        self.open_and(Keeps::Files, image, choice)
    }

    fn open_and(
        &self,
        keeps: Keeps,
        image: &Image,
        choice: &PolicyChoice,
    ) -> anyhow::Result<Assignment> {
        let opening = Opening {
            standard_file: STANDARD_POLICY,
            engine: &self.engine,
            standard: &self.standard,
            modules: &self.modules,
            trust: &Trust::default(),
            keeps,
        };
        let (registry, records) = opening.registry(choice, image)?;
        let assignment = registry.assignment().clone();
        for named in assignment.all() {
            assert!(records.iter().any(|it| it.digest == named.0));
        }
        Ok(assignment)
    }

    /// The error of a start with this image.
    fn refused(&self, image: &Image) -> String {
        let refused = self.open(image, &PolicyChoice::Last).unwrap_err();
        refused.to_string()
    }

    fn remove_module(&self, name: u8) {
        fs::remove_file(self.modules.path(&digest(name).0)).unwrap();
    }
}

fn image(assignment: Option<Assignment>) -> Image {
    let mut image = Image::new(Retention::default());
    image.assignment = assignment;
    image
}

#[test]
fn a_start_restores_the_recorded_assignment() {
    let rig = Rig::new();
    let assigned = rig.assignment();
    let found = rig.open(&image(Some(assigned.clone())), &PolicyChoice::Last);
    assert_eq!(found.unwrap(), assigned);
    // A policy of the setting becomes the active one; the other roles stay.
    let file = rig.data.path().join("d.wasm");
    fs::write(&file, twin(b'd')).unwrap();
    let recorded = image(Some(assigned.clone()));
    let found = rig.open(&recorded, &PolicyChoice::File(file)).unwrap();
    assert_eq!(found.active, digest(b'd'));
    assert_eq!(found.previous, [digest(b'a'), rig.built_in()]);
    assert_eq!(found.routes, assigned.routes);
    assert_eq!(found.canary, assigned.canary);
    assert!(rig.modules.load(&digest(b'd').0).is_ok(), "it is saved");
    // A new store has the built-in policy.
    let found = rig.open(&image(None), &PolicyChoice::Last).unwrap();
    assert_eq!(found, Assignment::of(rig.built_in()));
}

#[test]
fn a_check_finds_modules_that_cannot_be_saved() {
    let rig = Rig::new();
    let check = || rig.open_and(Keeps::Checks, &image(None), &PolicyChoice::Last);
    check().unwrap();
    // It saves nothing.
    assert!(rig.modules.load(&rig.standard.digest).is_err());
    let directory = rig.modules.directory();
    fs::remove_dir_all(directory).unwrap();
    check().unwrap();
    assert!(!directory.exists());
    fs::write(directory, "a file").unwrap();
    let error = check().unwrap_err().to_string();
    assert!(error.contains("cannot save the policy's module"), "{error}");
}

#[test]
fn a_missing_policy_with_requests_fails_the_start() {
    let rig = Rig::new();
    let image = image(Some(rig.assignment()));
    rig.remove_module(b'c');
    let found = rig.open(&image, &PolicyChoice::Last).unwrap();
    assert_eq!((&found.canary, &found.shadow), (&None, &None));
    assert_eq!(found.active, digest(b'a'));
    rig.remove_module(b'b');
    let refused = rig.refused(&image);
    assert!(refused.contains("owns the keys of a route"), "{refused}");
    assert!(refused.contains(&digest(b'b').to_string()), "{refused}");
    let found = rig.open(&image, &PolicyChoice::BuiltIn).unwrap();
    assert!(found.routes.is_empty(), "the setting ends the route");
    rig.remove_module(b'a');
    let refused = rig.refused(&image);
    assert!(refused.contains("--policy builtin"), "{refused}");
    let found = rig.open(&image, &PolicyChoice::BuiltIn).unwrap();
    assert_eq!((found.active, found.previous.len()), (rig.built_in(), 0));
}

/// In an earlier version each restart by a service manager promoted a policy that the guard had
/// rolled back.
#[test]
fn the_setting_does_not_promote_a_policy_that_was_rolled_back() {
    let rig = Rig::new();
    let tripped = rig.assignment().roll_back_for("it failed".into(), 5);
    let tripped = tripped.unwrap();
    let file = |name: u8| {
        let path = rig.data.path().join(format!("{}.wasm", name as char));
        fs::write(&path, twin(name)).unwrap();
        PolicyChoice::File(path)
    };
    let found = rig.open(&image(Some(tripped.clone())), &file(b'a'));
    assert_eq!(found.unwrap(), tripped);
    // Another file is a new decision of the operator, but not about the first policy.
    let other = rig.open(&image(Some(tripped)), &file(b'd')).unwrap();
    assert_eq!(other.active, digest(b'd'));
    let found = rig.open(&image(Some(other.clone())), &file(b'a'));
    assert_eq!(found.unwrap(), other);
}

/// Regression: a start compiled all of them, also those that the store does not retain.
#[test]
fn a_start_loads_as_many_old_policies_as_a_store_retains() {
    let rig = Rig::new();
    let last = u8::try_from(limits::RETIRED_POLICIES_MAX + 1).unwrap();
    let remembered: Vec<_> = (0..=last).map(|name| digest(name).0).collect();
    // The last one is missing, and takes no place.
    for name in 0..last {
        rig.modules.save(&digest(name).0, &twin(name)).unwrap();
    }
    let opening = Opening {
        standard_file: STANDARD_POLICY,
        engine: &rig.engine,
        standard: &rig.standard,
        modules: &rig.modules,
        trust: &Trust::default(),
        keeps: Keeps::Files,
    };
    let retired = opening.retired(&remembered, &Loaded::new());
    let retired: Vec<_> = retired.iter().map(|it| it.digest).collect();
    assert_eq!(retired, remembered[1..usize::from(last)]);
}

/// An earlier version accepted policies with the reserved name.
#[test]
fn the_setting_may_name_a_recorded_policy_without_a_trial() {
    let rig = Rig::new();
    let reserved = statehouse_tests::policies::described("reserved");
    let path = rig.data.path().join("reserved.wasm");
    fs::write(&path, &reserved).unwrap();
    let choice = PolicyChoice::File(path);
    let refused = rig.open(&image(None), &choice).unwrap_err();
    let refused = format!("{refused:#}");
    assert!(refused.contains("reserved for"), "{refused}");
    let digest = Digest::of(&reserved);
    let recorded = rig.assignment().load(digest).unwrap();
    let found = rig.open(&image(Some(recorded)), &choice).unwrap();
    assert_eq!(found.active, digest);
}

/// In an earlier version any error that kept a start from reading a module ended the policy's
/// roles.
#[test]
fn a_temporary_error_fails_the_start_and_keeps_the_roles() {
    let rig = Rig::new();
    let image = image(Some(rig.assignment()));
    // The active policy, that of a route, and one that answers no requests alone.
    for (name, role) in [
        (b'a', "was the active policy"),
        (b'b', "owns the keys of a route"),
        (b'c', "is assigned in this store"),
    ] {
        // A directory of this name cannot be read as a file.
        rig.remove_module(name);
        let path = rig.modules.path(&digest(name).0);
        fs::create_dir(&path).unwrap();
        let refused = rig.open(&image, &PolicyChoice::Last).unwrap_err();
        assert!(refused.is::<NotNow>(), "{refused:?}");
        let refused = refused.to_string();
        for text in [role, "start again", path.to_str().unwrap()] {
            assert!(refused.contains(text), "{refused}");
        }
        let refused = rig.open(&image, &PolicyChoice::BuiltIn).unwrap_err();
        assert!(refused.is::<NotNow>(), "{refused:?}");
        fs::remove_dir(&path).unwrap();
        rig.modules.save(&digest(name).0, &twin(name)).unwrap();
    }
    let path = rig.modules.path(&digest(b'c').0);
    let found = rig.open(&image, &PolicyChoice::Last).unwrap();
    assert_eq!(found, rig.assignment());
    // A damaged file is a permanent error.
    fs::write(&path, b"another file").unwrap();
    let found = rig.open(&image, &PolicyChoice::Last).unwrap();
    assert_eq!((found.canary, found.shadow), (None, None));

    let slow = LoadError::Trial("configure", Failure::Watchdog);
    assert!(LoadFailure::from(slow).may_be_temporary());
    let lack = LoadError::Trial("its start", Failure::Machine("no memory".into()));
    assert!(LoadFailure::from(lack).may_be_temporary());
    assert!(!LoadFailure::from(LoadError::NotWasm).may_be_temporary());
}

#[test]
fn the_data_of_another_program_version_is_accepted() {
    let rig = Rig::new();
    let record = |name: u8, built_in| PolicyRecord {
        digest: digest(name).0,
        name: "standard".into(),
        version: "0.9.0".into(),
        built_in,
    };
    // Data without an assignment: the last policy is the active one.
    for (built_in, active) in [(true, rig.built_in()), (false, digest(b'a'))] {
        let mut image = image(None);
        image.policies.push(record(b'a', built_in));
        image.active = Some(0);
        let found = rig.open(&image, &PolicyChoice::Last).unwrap();
        assert_eq!((found.active, found.built_in), (active, rig.built_in()));
    }
    // This program's built-in policy replaces that of an older program.
    let old = Assignment::of(digest(b'z')).load(digest(b'a')).unwrap();
    let old = old.promote(digest(b'a')).unwrap();
    let found = rig.open(&image(Some(old)), &PolicyChoice::Last).unwrap();
    assert_eq!(found.active, digest(b'a'));
    assert_eq!(found.previous, [rig.built_in()]);
}
