//! Upgrades under load: the hosts run two builds of the program, whose built-in policies differ.

use std::{fs, os::unix::fs::symlink, path::PathBuf, process::Command};

use serde_json::Value as Json;
use statehouse_tests::{Admin, Cluster, Server, binary, cluster, histories::Play, server};
use tempfile::TempDir;

use crate::{CLIENTS, SHORT_LEASE};

/// The paths of the programs of all hosts: links, which an upgrade changes.
struct Programs(TempDir);

impl Programs {
    fn path(&self, host: usize) -> PathBuf {
        self.0.path().join(cluster::name(host))
    }

    fn install(&self, build: &PathBuf, host: usize) {
        let new = self.0.path().join("new");
        symlink(build, &new).unwrap();
        fs::rename(&new, self.path(host)).unwrap();
    }

    /// Another build of the program. Its built-in policy says that other tools built it, so it has
    /// another digest.
    fn other_build(&self) -> PathBuf {
        let mut program = fs::read(binary::statehouse()).unwrap();
        let tool = b"\x10wit-bindgen-rust\x060.";
        let last = tool.len() + 3;
        let found = program.windows(tool.len()).enumerate();
        let found = found.filter_map(|(at, it)| (it == tool).then_some(at + last));
        let found: Vec<usize> = found.collect();
        assert!(!found.is_empty(), "the policy does not name its tools");
        for at in found {
            program[at] = if program[at] == b'9' { b'8' } else { b'9' };
        }
        let path = self.0.path().join("other");
        fs::copy(binary::statehouse(), &path).unwrap();
        fs::write(&path, program).unwrap();
        path
    }
}

/// The digest of the built-in policy.
fn built_in(host: &Server) -> String {
    let listed = Admin::of(host).done("GET", "/v1/policies", b"");
    let mut policies = listed["policies"].as_array().unwrap().iter();
    let built_in = policies.find(|it| it["built_in"] == true).unwrap();
    built_in["digest"].as_str().unwrap().to_owned()
}

/// A single host of a build, for its built-in policy.
fn own_policy(build: &PathBuf) -> String {
    let mut single = Command::new(build);
    single.args(["serve", "--listen", &server::own_address().to_string()]);
    built_in(&Server::spawn(single, tempfile::tempdir().unwrap()))
}

/// Stops the followers one after another and then the leader, and starts each with a build.
fn upgrade(cluster: &mut Cluster, programs: &Programs, build: &PathBuf, play: &mut Play) {
    let leader = cluster.present_leader();
    for host in [cluster.followers(), vec![leader.host]].concat() {
        play.go_on();
        cluster[host].stop();
        if host == leader.host {
            cluster.wait_for_leader_after(leader.epoch);
            play.died();
        }
        programs.install(build, host);
        cluster[host].restart();
    }
    play.go_on();
}

#[test]
fn rolling_upgrade_and_its_way_back_keep_every_answer() {
    let programs = Programs(tempfile::tempdir().unwrap());
    let (present, other) = (binary::statehouse().to_owned(), programs.other_build());
    let policy = own_policy(&present);
    assert_ne!(own_policy(&other), policy);
    let mut cluster = Cluster::without_hosts(1, &[SHORT_LEASE]);
    for host in 0..3 {
        programs.install(&present, host);
        cluster.add_program(&programs.path(host));
    }
    cluster.wait_until_ready();
    let mut play = Play::over(&cluster, "play", &CLIENTS);
    for build in [&other, &present] {
        upgrade(&mut cluster, &programs, build, &mut play);
        // A new program keeps the built-in policy that the log names.
        let leader = cluster.present_leader().host;
        assert_eq!(built_in(&cluster[leader]), policy);
    }
    play.end();
    // A host with an empty directory gets that policy from etcd.
    let later = cluster.add_program(&other);
    cluster[later].wait_until_ready();
    let epoch = cluster.present_leader().epoch;
    for host in 0..3 {
        cluster[host].kill();
    }
    assert_eq!(cluster.wait_for_leader_after(epoch).host, later);
    cluster.store(later, "client").set("key", "value");
    assert_eq!(built_in(&cluster[later]), policy);
    let listed: Json = Admin::of(&cluster[later]).done("GET", "/v1/policies", b"");
    assert_eq!(listed["policies"].as_array().unwrap().len(), 1, "{listed}");
}
