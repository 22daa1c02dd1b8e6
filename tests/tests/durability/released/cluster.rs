//! A cluster: its keys in etcd, and the data directory of a host.

use std::{
    fs,
    path::{Path, PathBuf},
};

use serde_json::{Value, json};
use statehouse_tests::{Cluster, Etcd, Ran, Store, run, wait::until};

use super::archive::{Archive, copy_all};

fn greet(store: &mut Store) -> String {
    store.set("salute", "hello");
    store.set("salute", "ahoy").to_string()
}

/// Fills a cluster, and copies its data to `directory`. Returns what its clients saw.
pub(super) fn make(directory: &Path) -> Value {
    // A cluster that begins with a store begins with a snapshot, and with the store's policies.
    let mut cluster = Cluster::existing_on(Etcd::start(1), &[]);
    let store = directory.join("embedded");
    cluster
        .ask(&["init", "--from", store.to_str().unwrap()])
        .code(0);
    cluster.add_hosts(1);
    let mut store = cluster.store(0, "writer");
    let version = greet(&mut store);
    store.set("farewell", "after the snapshot");
    let data = cluster[0].data_directory();
    let copied = |ran: &Ran| ran.code == Some(0) && ran.text().contains("after the snapshot");
    until("the history", || {
        let history = ["history", "farewell", "--data", data.to_str().unwrap()];
        copied(&run(&history, b""))
    });
    cluster[0].kill();
    copy_all(&data, &directory.join("host"));
    let keys = directory.join("etcd");
    fs::create_dir(&keys).unwrap();
    for (number, (key, value)) in cluster.etcd.all().iter().enumerate() {
        fs::write(file(&keys, number, "key"), key).unwrap();
        fs::write(file(&keys, number, "value"), value).unwrap();
    }
    json!({ "version": version })
}

fn file(keys: &Path, number: usize, what: &str) -> PathBuf {
    keys.join(format!("{number:04}.{what}"))
}

/// A host continues the cluster, and the tools read the history of the other host.
pub(super) fn check(archive: &Archive) {
    let mut etcd = Etcd::start(1);
    let keys = archive.path("etcd");
    for number in 0.. {
        let Ok(key) = fs::read(file(&keys, number, "key")) else {
            assert!(number > 3, "head, secret, member, log");
            break;
        };
        etcd.put(&key, &fs::read(file(&keys, number, "value")).unwrap());
    }
    let mut cluster = Cluster::existing_on(etcd, &[]);
    cluster.add_hosts(1);
    let mut store = cluster.store(0, "reader");
    let greeting = store.ask(&["GET", "salute"]);
    assert_eq!(greeting.text(), "$4\\r\\nahoy\\r\\n");
    let version = &archive.expected["cluster"]["version"];
    assert_eq!(greeting.version().unwrap().to_string(), *version);
    assert_eq!(store.get("farewell"), Some(b"after the snapshot".to_vec()));
    assert_eq!(
        store.get("sensor/1"),
        Some(b"value 1".to_vec()),
        "of the store"
    );

    let (_directory, data) = archive.copy("host");
    let data = data.to_str().unwrap();
    run(&["doctor", data], b"").code(0);
    let history = run(&["history", "salute", "--data", data], b"").code(0);
    history.prints(&["2 changes of salute", version.as_str().unwrap()]);
}
