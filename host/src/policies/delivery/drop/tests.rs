use std::os::unix::fs::symlink;

use super::*;
use crate::policies::delivery::trust::Trust;
use crate::policies::manager::tests::{Rig, digest, rig, twin};
use statehouse_core::policy::{Failure, LoadError};
use statehouse_precompiled::CompileError;

#[test]
fn too_many_files_are_reported() {
    let directory = tempfile::tempdir().unwrap();
    let create = |name: String| fs::write(directory.path().join(name), "").unwrap();
    for number in 0..limits::DROP_ENTRIES_MAX - 1 {
        create(number.to_string());
    }
    create("policy.wasm".to_owned());
    let (found, is_whole) = files(directory.path()).unwrap();
    assert_eq!((found.len(), trouble(1, is_whole)), (1, None));
    create("one.more".to_owned());
    let (_, is_whole) = files(directory.path()).unwrap();
    assert!(trouble(1, is_whole).is_some_and(|it| it.contains("4096")));
    let many = trouble(limits::DROP_FILES_MAX + 1, true);
    assert!(many.is_some_and(|it| it.contains("first 64 by name")));
}

/// Regression: the file of such a policy was refused for good.
#[test]
fn lack_of_a_resource_may_pass() {
    let lack = || Failure::Machine("no memory".into());
    for error in [
        LoadError::Trial("its start", lack()),
        LoadError::SelfTest("PING", lack()),
        LoadError::Thread(io::ErrorKind::WouldBlock.into()),
        CompileError::Machine("no process".to_owned()).into(),
    ] {
        let error = ControlError::from(error);
        assert_eq!(error.kind(), ControlErrorKind::Failed, "{error}");
        assert!(DropError::from(ShipError::from(error)).may_pass());
    }
    let trap = LoadError::Trial("its start", Failure::Trap("unreachable".into()));
    assert!(!DropError::from(ShipError::from(ControlError::from(trap))).may_pass());
}

/// A start of a store that promotes the files of `directory`, after the polls that handle them.
fn started(rig: &Rig, directory: &Path) -> DropDirectory {
    let gate = Gate::new(rig.control.clone(), Trust::default());
    let mut drop = DropDirectory::new(directory.into(), DropAction::Promote, Arc::new(gate));
    twice(&mut drop);
    drop
}

/// A file is handled at the second poll that finds it.
fn twice(drop: &mut DropDirectory) {
    drop.poll();
    drop.poll();
}

fn line(path: &Path) -> String {
    status(path).unwrap_or_default()
}

/// In an earlier version only the status file kept a restart from promoting a policy again.
#[test]
fn restart_without_a_status_file_promotes_no_file_again() {
    let (rig, directory) = (rig(), tempfile::tempdir().unwrap());
    let built_in = rig.control.list().assignment.built_in;
    // The name of its status file is too long for the file system.
    let long = directory.path().join("x".repeat(250) + ".wasm");
    fs::write(&long, twin(b'a')).unwrap();
    started(&rig, directory.path());
    assert_eq!(rig.active(), digest(b'a'));
    rig.control.rollback().unwrap();
    started(&rig, directory.path());
    assert_eq!(rig.active(), built_in);
}

/// Another host of a cluster has the same file and no status file, and the operator has decided
/// since then. In an earlier version it promoted the policy again when it took the lead.
#[test]
fn next_leader_delivers_no_file_again() {
    let rig = rig();
    let directories = [(); 2].map(|()| tempfile::tempdir().unwrap());
    for directory in &directories {
        fs::write(directory.path().join("a.wasm"), twin(b'a')).unwrap();
    }
    let (a, list) = (digest(b'a'), || rig.control.list().assignment);
    let built_in = list().built_in;
    let started = || {
        for directory in &directories {
            started(&rig, directory.path());
        }
    };
    started();
    assert_eq!(list().active, a);
    rig.control.rollback().unwrap();
    rig.control.promote(&a.into()).unwrap();
    rig.control.rollback().unwrap();
    started();
    assert_eq!(list().active, built_in);
    rig.control.unload(&a.into()).unwrap();
    started();
    assert_eq!((list().active, list().loaded), (built_in, vec![]));
    // The same policy under another name is another file.
    let path = directories[1].path();
    fs::rename(path.join("a.wasm"), path.join("b.wasm")).unwrap();
    started();
    assert_eq!(list().active, a);
}

/// Regression: the other files displaced it from the list, and its policy was unloaded.
#[test]
fn file_that_stays_is_not_delivered_again_after_many_others() {
    let (rig, directory) = (rig(), tempfile::tempdir().unwrap());
    fs::write(directory.path().join("a.wasm"), twin(b'a')).unwrap();
    let mut drop = started(&rig, directory.path());
    assert_eq!(rig.active(), digest(b'a'));
    rig.control.rollback().unwrap();
    rig.control.unload(&digest(b'a').into()).unwrap();
    for number in 0..limits::DROP_FILES_MAX {
        let other = directory.path().join(format!("b{number}.wasm"));
        fs::write(&other, twin(b'b')).unwrap();
        twice(&mut drop);
        fs::remove_file(other).unwrap();
    }
    started(&rig, directory.path());
    assert_eq!(rig.active(), digest(b'b'));
}

#[test]
fn file_does_not_promote_a_policy_that_the_guard_rolled_back() {
    let (rig, directory) = (rig(), tempfile::tempdir().unwrap());
    let path = directory.path().join("a.wasm");
    fs::write(&path, twin(b'a')).unwrap();
    let mut drop = started(&rig, directory.path());
    rig.trip();
    let built_in = rig.active();
    // Neither a restart under another name nor a new copy is a decision of an operator.
    fs::rename(&path, directory.path().join("b.wasm")).unwrap();
    started(&rig, directory.path());
    assert_eq!(rig.active(), built_in);
    fs::write(&path, twin(b'a')).unwrap();
    twice(&mut drop);
    assert_eq!(rig.active(), built_in);
    let line = line(&path);
    assert!(line.contains("policy promote"), "{line}");
}

/// In an earlier version a second copy of a file did nothing, and its status said "active".
#[test]
fn second_copy_of_a_file_is_a_new_delivery() {
    let (rig, directory) = (rig(), tempfile::tempdir().unwrap());
    let path = directory.path().join("a.wasm");
    let mut drop = started(&rig, directory.path());
    let a = digest(b'a');
    for _ in 0..2 {
        fs::write(&path, twin(b'a')).unwrap();
        twice(&mut drop);
        assert_eq!(rig.active(), a);
        assert!(line(&path).starts_with("active "));
        rig.control.rollback().unwrap();
        twice(&mut drop);
        assert_ne!(rig.active(), a);
    }
}

/// The file that the link names is older than the start.
#[test]
fn link_that_is_made_again_is_a_new_delivery() {
    let (rig, directory) = (rig(), tempfile::tempdir().unwrap());
    let file = directory.path().join("a");
    fs::write(&file, twin(b'a')).unwrap();
    let link = directory.path().join("a.wasm");
    let mut drop = started(&rig, directory.path());
    drop.began_s += 60;
    for _ in 0..2 {
        symlink(&file, &link).unwrap();
        twice(&mut drop);
        assert_eq!(rig.active(), digest(b'a'));
        rig.control.rollback().unwrap();
        fs::remove_file(&link).unwrap();
        twice(&mut drop);
    }
}

/// Regression: a file that was absent for a while, or not among those that are handled, was a new
/// delivery, which undid the decisions since then.
#[test]
fn file_that_appears_again_unchanged_is_not_delivered_again() {
    let (rig, directory) = (rig(), tempfile::tempdir().unwrap());
    let path = directory.path().join("z.wasm");
    fs::write(&path, twin(b'a')).unwrap();
    let mut drop = started(&rig, directory.path());
    rig.control.rollback().unwrap();
    let built_in = rig.active();
    // As an unmounted file system.
    let mounted = std::mem::replace(&mut drop.directory, tempfile::tempdir().unwrap().keep());
    twice(&mut drop);
    fs::remove_dir(std::mem::replace(&mut drop.directory, mounted)).unwrap();
    twice(&mut drop);
    assert_eq!(rig.active(), built_in);

    // As a file system that is mounted after a restart.
    let empty = tempfile::tempdir().unwrap();
    let mut early = started(&rig, empty.path());
    early.directory = directory.path().into();
    early.began_s += 60;
    twice(&mut early);
    assert_eq!(rig.active(), built_in);

    let before = |number: usize| directory.path().join(format!("{number}.wasm"));
    for number in 0..limits::DROP_FILES_MAX {
        fs::write(before(number), "").unwrap();
    }
    twice(&mut drop);
    let mut restarted = started(&rig, directory.path());
    fs::remove_file(before(0)).unwrap();
    for drop in [&mut drop, &mut restarted] {
        twice(drop);
        assert_eq!(rig.active(), built_in);
    }
}

/// In an earlier version a restart promoted the policy after an operator had overruled the guard,
/// and had then decided otherwise.
#[test]
fn file_refused_because_of_the_guard_is_not_delivered_again() {
    let (rig, directory) = (rig(), tempfile::tempdir().unwrap());
    let a = rig.control.load(&twin(b'a'), None).unwrap().digest;
    rig.control.promote(&a.into()).unwrap();
    rig.trip();
    let path = directory.path().join("a.wasm");
    fs::write(&path, twin(b'a')).unwrap();
    started(&rig, directory.path());
    assert!(line(&path).starts_with("refused: "), "{}", line(&path));
    // An operator overrules the guard, and then decides otherwise.
    rig.control.promote(&a.into()).unwrap();
    rig.control.rollback().unwrap();
    let before = rig.control.list().assignment;
    started(&rig, directory.path());
    assert_eq!(rig.control.list().assignment, before);
}

/// A store whose data directory can hold no policy, and a file that it refused for this reason.
/// Returns the obstacle, too.
fn refused_for_now(rig: &Rig, path: &Path) -> (DropDirectory, PathBuf) {
    let modules = rig.data().join("policies");
    fs::write(&modules, "").unwrap();
    fs::write(path, twin(b'a')).unwrap();
    let drop = started(rig, path.parent().unwrap());
    let line = line(path);
    assert!(line.contains("tries it again every minute"), "{line}");
    (drop, modules)
}

/// Ends the pause before the next attempt.
fn end_pause(drop: &mut DropDirectory) {
    for seen in drop.seen.as_mut().unwrap().values_mut() {
        let Progress::Waiting(waiting) = &mut seen.progress else {
            panic!("the file does not wait");
        };
        waiting.again = Instant::now();
    }
}

#[test]
fn file_refused_by_the_disk_is_tried_again() {
    let (rig, directory) = (rig(), tempfile::tempdir().unwrap());
    let path = directory.path().join("a.wasm");
    let a = digest(b'a');
    let (mut drop, modules) = refused_for_now(&rig, &path);
    end_pause(&mut drop);
    drop.poll();
    assert!(line(&path).starts_with("refused: "), "it is still refused");
    fs::remove_file(modules).unwrap();
    drop.poll();
    assert_ne!(rig.active(), a, "the pause is not over");
    end_pause(&mut drop);
    drop.poll();
    assert_eq!(rig.active(), a);
    assert!(line(&path).starts_with("active "), "{}", line(&path));
    rig.control.rollback().unwrap();
    started(&rig, directory.path());
    assert_ne!(rig.active(), a, "a restart delivers it no second time");
}

#[test]
fn waiting_file_does_not_undo_a_later_promotion() {
    let (rig, directory) = (rig(), tempfile::tempdir().unwrap());
    let path = directory.path().join("a.wasm");
    let (mut drop, modules) = refused_for_now(&rig, &path);
    fs::remove_file(modules).unwrap();
    let b = rig.control.load(&twin(b'b'), None).unwrap().digest;
    rig.control.promote(&b.into()).unwrap();
    end_pause(&mut drop);
    drop.poll();
    let line = line(&path);
    assert!(line.contains("copy the file again"), "{line}");
    started(&rig, directory.path());
    assert_eq!(rig.active(), b);
}
