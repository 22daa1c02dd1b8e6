//! Tests of restores: the name of the restored store, and files that are not backups. One more test
//! is about the directory of a host of a cluster, which a store refuses.

use std::fs;
use std::sync::Arc;

use super::client_id;
use super::tests::{recover, settings_of};
use statehouse_offline::{ClusterMark, check_backup, restore};
use statehouse_wal::{Directory, Discard, Log, LogPosition, Options, Source, write_snapshot_file};

/// The blocks of an empty state.
struct NoBlocks;

impl Source for NoBlocks {
    fn begin(&mut self) {}

    fn next(&mut self, _block: &mut Vec<u8>) -> Result<bool, String> {
        Ok(false)
    }
}

/// Under its old name, the store would accept orders again that were captured before.
#[test]
fn a_restored_store_has_a_new_name() {
    let place = tempfile::tempdir().unwrap();
    let (backup, data) = (place.path().join("backup"), place.path().join("data"));
    write_snapshot_file(&backup, LogPosition(7), 0, &mut NoBlocks).unwrap();
    fs::create_dir(&data).unwrap();
    let before = client_id::of(&data).unwrap();
    restore(&backup, &data, 1).unwrap();
    assert_eq!(client_id::existing(&data).unwrap(), None);
    assert_ne!(client_id::of(&data).unwrap(), before);
}

#[test]
fn a_snapshot_that_needs_its_log_is_not_restored() {
    let place = tempfile::tempdir().unwrap();
    let store = place.path().join("store");
    let disk = Arc::new(Directory::open(&store).unwrap());
    let (log, _) = Log::open(disk, Options::default(), 1, &mut Discard).unwrap();
    log.append(&[b"one"]).unwrap();
    let snapshot = log.begin_snapshot(1).unwrap().unwrap();
    log.append(&[b"two"]).unwrap();
    log.finish_snapshot(snapshot).unwrap();
    let file = store.join("00000000000000000001.snapshot");
    let data = place.path().join("data");
    let errors = [
        check_backup(&file).unwrap_err(),
        restore(&file, &data, 1).unwrap_err(),
    ];
    for error in errors {
        let text = error.to_string();
        assert!(
            text.contains("records up to 2") && text.contains("--salvage"),
            "{text}"
        );
    }
    assert!(!data.exists());
}

#[test]
fn directory_of_a_host_is_refused_with_an_escaped_name() {
    let data = tempfile::tempdir().unwrap();
    let mark = r#"{"cluster":"07","name":"a\u001b[2J","copy":null}"#;
    fs::write(ClusterMark::path(data.path()), mark).unwrap();
    let refused = recover(&settings_of(data.path())).err();
    let refused = refused.expect("it holds no store").to_string();
    let named = r"the cluster a\u{1b}[2J and may hold";
    assert!(refused.contains(named), "{refused}");
}
