//! Data that released programs wrote. This program must open it, with every key, version, session
//! and retained message.
//!
//! `tests/fixtures/statehouse-VERSION.tar.xz` was made by the program of that version. One command
//! makes the archive of the present program:
//!
//! ```sh
//! STATEHOUSE_FIXTURES=tests/fixtures cargo nextest run --workspace --run-ignored only \
//!     -E "test(released::archive_of_this_program)"
//! ```
//!
//! | in the archive | what it is |
//! |---|---|
//! | `embedded/` | a data directory after `kill -9`: a snapshot, and segments after it |
//! | `attached/` | the same of a store behind Mosquitto |
//! | `host/` | the data directory of a host of a cluster, with its history |
//! | `etcd/` | the keys of that cluster, two files each |
//! | `backup.state` | a backup of `embedded/` |
//! | `export.jsonl` | its keys, by `statehouse export` |
//! | `users` | a file of `statehouse user` |
//! | `expected.json` | what the clients of the program saw |
//!
//! Written by hand, for each version: `rules-VERSION.toml` has every construct of a rules file, and
//! `order-VERSION.json` is a signed order to roll back, for the store in `embedded/`. Nothing else
//! was signed with its key, which was thrown away.

mod archive;
mod attached;
mod cluster;
mod embedded;
mod exchange;
mod newer;
mod sessions;
mod trust;

use std::{env, fs, path::PathBuf};

use archive::Archive;

/// The versions whose archives are in `tests/fixtures`.
const VERSIONS: [&str; 1] = ["0.1.0"];

fn fixtures() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("fixtures")
}

fn each(check: impl Fn(&Archive)) {
    for version in VERSIONS {
        check(&Archive::of(version));
    }
}

/// Makes the archive of this program, and checks it as if another program had made it.
#[test]
#[ignore = "long: it runs every kind of store, and builds two policies"]
fn archive_of_this_program_opens() {
    let archive = Archive::make();
    embedded::check(&archive);
    attached::check(&archive);
    cluster::check(&archive);
    if let Some(directory) = env::var_os("STATEHOUSE_FIXTURES") {
        // Tests run in the directory of their package.
        let directory = fixtures().join("../..").join(directory);
        fs::create_dir_all(&directory).unwrap();
        archive.pack(&directory);
    }
}

#[test]
fn data_directory_of_a_release_opens_with_everything() {
    each(embedded::check);
}

#[test]
fn backup_and_export_of_a_release_are_read() {
    each(embedded::check_backup);
}

#[test]
fn attached_store_of_a_release_opens_with_everything() {
    each(attached::check);
}

#[test]
fn cluster_of_a_release_continues() {
    each(cluster::check);
}
