//! Tests `statehouse watch`. It must print one line for each change until its count is reached or
//! it is interrupted.

use std::{collections::HashSet, net::SocketAddr, process::Stdio, time::Duration};

use statehouse_tests::{
    Background, Fate, Lines, Proxy, Server, Store, Way, assert_contains, client::PATIENCE, command,
    packet::kind, proxy::Seen, run, server, wait::until,
};

/// A running `statehouse watch`.
struct Watch {
    process: Background,
    read: usize,
    /// What it says when it watches.
    notice: String,
}

impl Watch {
    /// Starts the command and waits until it watches.
    fn start(server: &Server, arguments: &[&str]) -> Watch {
        Watch::start_at(server.address(), arguments)
    }

    /// As `start`, at the address of a relay.
    fn start_at(address: SocketAddr, arguments: &[&str]) -> Watch {
        let (host, port) = (address.ip().to_string(), address.port().to_string());
        let mut all = vec!["watch", "--host", &host, "--port", &port];
        all.extend(arguments);
        let mut process = Background::start(command(&all).stderr(Stdio::piped()));
        let notices = Lines::follow(process.child.stderr.take().unwrap());
        let notice = notices.wait(PATIENCE, |line| line.contains("watching"));
        let notice = notice.unwrap_or_else(|| panic!("the command prints {:?}", notices.all()));
        Watch {
            process,
            read: 0,
            notice,
        }
    }

    fn line(&mut self) -> String {
        self.read += 1;
        let line = self.process.lines.at(self.read - 1, PATIENCE);
        line.expect("a line is missing")
    }

    fn end(mut self) -> Option<i32> {
        let status = server::wait(&mut self.process.child, Duration::from_secs(20));
        let further = self.process.lines.at(self.read, PATIENCE);
        assert_eq!(further, None, "an unexpected line");
        status.expect("the command did not end").code()
    }
}

fn change(store: &mut Store) -> Vec<String> {
    let one = store.set("one", "a\tb");
    let two = store.set("two", b"\xFF");
    assert_eq!(store.ask(&["DEL", "one"]).payload(), b":1\r\n");
    store.set("other", "unwatched");
    vec![one.to_string(), two.to_string()]
}

#[test]
fn watch_prints_a_line_for_each_change() {
    let server = Server::start();
    let mut watch = Watch::start(&server, &["one", "two", "--count", "3"]);
    let versions = change(&mut server.store("writer"));
    assert_eq!(watch.line(), format!("set\tone\t{}\ta\\tb", versions[0]));
    assert_eq!(watch.line(), format!("set\ttwo\t{}\t\\xff", versions[1]));
    assert!(watch.line().starts_with("deleted\tone\t"));
    assert_eq!(watch.end(), Some(0));
}

#[test]
fn watch_with_json_prints_an_object_per_change() {
    let server = Server::start();
    let mut watch = Watch::start(&server, &["--json", "one", "--count", "2"]);
    let versions = change(&mut server.store("writer"));
    let mut object = || serde_json::from_str::<serde_json::Value>(&watch.line()).unwrap();
    let set = object();
    assert_eq!(set["event"], "set");
    assert_eq!(set["key"], "one");
    assert_eq!(set["value"], "a\tb");
    assert_eq!(set["version"], versions[0]);
    let deleted = object();
    assert_eq!(deleted["event"], "deleted");
    assert_eq!(deleted["key"], "one");
    assert!(deleted["version"].as_str().unwrap() > versions[0].as_str());
    assert_eq!(watch.end(), Some(0));
}

#[test]
fn sigint_ends_watch_with_code_0() {
    let server = Server::start();
    let mut watch = Watch::start(&server, &["key"]);
    server.store("writer").set("key", "v");
    assert!(watch.line().ends_with("\tv"));
    server::signal(watch.process.child.id(), "INT");
    assert_eq!(watch.end(), Some(0));
}

/// Regression: its session kept the place of another client for a minute.
#[test]
fn sigterm_ends_watch_with_its_session() {
    let server = Server::with_config("max_sessions = 1\n");
    let watch = Watch::start(&server, &["key"]);
    server::signal(watch.process.child.id(), "TERM");
    assert_eq!(watch.end(), Some(143));
    let port = server.port().to_string();
    let get = || run(&["get", "key", "--port", &port], b"");
    until("another client connects", || get().code == Some(1));
}

#[test]
fn star_at_the_end_watches_a_prefix() {
    let server = Server::start();
    let mut watch = Watch::start(&server, &["plant/*", "--count", "2"]);
    let mut writer = server.store("writer");
    writer.set("plant", "v");
    let one = writer.set("plant/1", "a");
    writer.set("plant/*", "b");
    assert_eq!(watch.line(), format!("set\tplant/1\t{one}\ta"));
    assert!(watch.line().starts_with("set\tplant/*\t"));
    assert_eq!(watch.end(), Some(0));

    let mut watch = Watch::start(&server, &["--exact", "plant/*", "--count", "1"]);
    writer.set("plant/1", "c");
    writer.set("plant/*", "d");
    assert!(watch.line().ends_with("\td"));
    assert_eq!(watch.end(), Some(0));

    let mut watch = Watch::start(&server, &["--prefix", "pl", "--count", "1", "--json"]);
    writer.set("plant", "e");
    let object = serde_json::from_str::<serde_json::Value>(&watch.line()).unwrap();
    assert_eq!(object["key"], "plant");
    assert_eq!(watch.end(), Some(0));
}

/// Otherwise a watch from the version of the last line would miss changes.
#[test]
fn changes_of_several_keys_are_printed_in_order() {
    let server = Server::start();
    let mut writer = server.store("writer");
    let mut last = writer.set("other", "0").to_string();
    let mut change = |number: usize| writer.set(["p/a", "p/b"][number % 2], number.to_string());
    for number in 0..4 {
        change(number);
    }
    for first in [0, 2] {
        let from = ["p/a", "p/b", "--from", &last, "--count", "2"];
        let mut watch = Watch::start(&server, &from);
        for number in first..first + 2 {
            let line = watch.line();
            assert!(line.ends_with(&format!("\t{number}")), "{line}");
            line.split('\t').nth(2).unwrap().clone_into(&mut last);
        }
        assert_eq!(watch.end(), Some(0));
    }
    let mut watch = Watch::start(&server, &["p/a", "p/*", "--count", "40"]);
    for number in 0..40 {
        change(number);
    }
    for number in 0..40 {
        assert!(watch.line().ends_with(&format!("\t{number}")));
    }
    assert_eq!(watch.end(), Some(0));
}

#[test]
fn change_that_two_arguments_cover_is_printed_once() {
    let server = Server::start();
    let mut writer = server.store("writer");
    let old = writer.set("dd", "0");
    let arguments = ["dd", "d*", "--initial", "--count", "2"];
    let mut watch = Watch::start(&server, &arguments);
    assert_contains!(watch.notice, "watching 1 prefix;");
    assert_eq!(watch.line(), format!("present\tdd\t{old}\t0"));
    for value in ["1", "2"] {
        let version = writer.set("dd", value);
        assert_eq!(watch.line(), format!("set\tdd\t{version}\t{value}"));
    }
    assert_eq!(watch.end(), Some(0));
}

/// The store sends no more than the command prints, so its buffer need not hold all of them.
#[test]
fn watch_from_a_version_prints_many_changes_without_a_gap() {
    const CHANGES: usize = 1500;
    let server = Server::start();
    let mut writer = server.store("writer");
    let from = writer.set("other", "0").to_string();
    for number in 0..CHANGES {
        writer.set("fz/k", number.to_string());
    }
    let count = CHANGES.to_string();
    let arguments = ["fz/*", "--from", &from, "--count", &count];
    let mut watch = Watch::start(&server, &arguments);
    for number in 0..CHANGES {
        let line = watch.line();
        assert!(line.ends_with(&format!("\t{number}")), "{line}");
    }
    assert_eq!(watch.end(), Some(0));
}

/// The payload of a PUBLISH to the client of a relay.
fn received(seen: &Seen) -> Option<Vec<u8>> {
    let is_received = seen.way == Way::FromBroker && seen.packet.kind() == kind::PUBLISH;
    is_received.then(|| seen.packet.publish().payload)
}

/// The relay holds the first keys of the SCAN until all changes have passed, which are more than
/// the watch buffers.
#[test]
fn changes_while_initial_values_are_printed_are_not_lost() {
    const KEYS: usize = 2000;
    let server = Server::start();
    let mut writer = server.store("writer");
    let key = |number: usize| format!("in/{number}");
    for number in 0..KEYS {
        writer.set(key(number), "old");
    }
    let proxy = Proxy::start(server.address());
    proxy.script(|seen| match received(seen) {
        Some(keys) if keys.starts_with(b"*1\r\n*") || keys.starts_with(b"*2\r\n*") => Fate::Hold,
        _ => Fate::Pass,
    });
    let arguments = ["in/*", "--initial", "--count", "1", "--timeout", "1m"];
    let mut watch = Watch::start_at(proxy.address(), &arguments);
    until("the command asks for the keys", || proxy.held() == 1);
    for number in 0..KEYS {
        writer.set(key(number), "new");
    }
    let is_change = |seen: &&Seen| received(seen).is_some_and(|it| it.starts_with(b"*4\r\n"));
    let changes = || proxy.seen().iter().filter(is_change).count();
    until("the changes pass the relay", || changes() >= KEYS);
    proxy.pass();
    proxy.release(|_| {});
    let mut new = HashSet::new();
    while new.len() < KEYS {
        let line = watch.line();
        let fields: Vec<&str> = line.split('\t').collect();
        assert_eq!((fields[0], fields[3]), ("present", "new"), "{line}");
        new.insert(fields[1].to_owned());
    }
    // No gap precedes it.
    let last = writer.set(key(0), "last");
    assert_eq!(watch.line(), format!("set\tin/0\t{last}\tlast"));
    assert_eq!(watch.end(), Some(0));
}

#[test]
fn initial_values_come_first_and_no_change_twice() {
    let server = Server::start();
    let mut writer = server.store("writer");
    let one = writer.set("plant/1", "a");
    let two = writer.set("plant/2", "b");
    writer.set("other", "c");
    let mut watch = Watch::start(&server, &["plant/*", "--initial", "--count", "2"]);
    assert_eq!(watch.line(), format!("present\tplant/1\t{one}\ta"));
    assert_eq!(watch.line(), format!("present\tplant/2\t{two}\tb"));
    let three = writer.set("plant/2", "d");
    assert_eq!(watch.line(), format!("set\tplant/2\t{three}\td"));
    assert_eq!(writer.ask(&["DEL", "plant/1"]).payload(), b":1\r\n");
    assert!(watch.line().starts_with("deleted\tplant/1\t"));
    assert_eq!(watch.end(), Some(0));
}

#[test]
fn watch_from_a_version_prints_what_changed_since() {
    let server = Server::start();
    let mut writer = server.store("writer");
    let one = writer.set("plant/1", "a").to_string();
    let two = writer.set("plant/1", "b");
    let mut watch = Watch::start(&server, &["plant/*", "--from", &one, "--count", "2"]);
    assert_eq!(watch.line(), format!("set\tplant/1\t{two}\tb"));
    let three = writer.set("plant/2", "c");
    assert_eq!(watch.line(), format!("set\tplant/2\t{three}\tc"));
    assert_eq!(watch.end(), Some(0));

    let port = server.port().to_string();
    let later = "999999999999999:0:StateStore";
    let refused = run(&["watch", "--port", &port, "plant/*", "--from", later], b"");
    assert_ne!(refused.code, Some(0));
    refused.says("later than the last change of the store");
}
