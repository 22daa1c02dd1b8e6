//! Tests `statehouse watch`. It must print one line for each change until its count is reached or
//! it is interrupted.

use std::{
    process::{Child, Stdio},
    time::Duration,
};

use statehouse_tests::{Lines, Server, Store, client::PATIENCE, command, server};

/// A running `statehouse watch`. It is killed at the end of the test.
struct Watch {
    child: Child,
    lines: Lines,
    read: usize,
}

impl Watch {
    /// Starts the command and waits until it watches.
    fn start(server: &Server, arguments: &[&str]) -> Watch {
        let port = server.port().to_string();
        let mut all = vec!["watch", "--port", &port];
        all.extend(arguments);
        let mut child = command(&all)
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let notices = Lines::follow(child.stderr.take().unwrap());
        let watch = Watch {
            lines: Lines::follow(child.stdout.take().unwrap()),
            read: 0,
            child,
        };
        let notice = notices.wait(PATIENCE, |line| line.contains("watching"));
        assert!(notice.is_some(), "the command prints {:?}", notices.all());
        watch
    }

    fn line(&mut self) -> String {
        self.read += 1;
        self.lines
            .at(self.read - 1, PATIENCE)
            .expect("a line is missing")
    }

    fn end(mut self) -> Option<i32> {
        let status = server::wait(&mut self.child, Duration::from_secs(20));
        assert_eq!(
            self.lines.at(self.read, PATIENCE),
            None,
            "an unexpected line"
        );
        status.expect("the command did not end").code()
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        // The process may have ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
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
    // Only changes of the same key have an order.
    let mut lines: Vec<String> = (0..3).map(|_| watch.line()).collect();
    lines.sort();
    assert!(lines[0].starts_with("deleted\tone\t"), "{lines:?}");
    assert_eq!(lines[1], format!("set\tone\t{}\ta\\tb", versions[0]));
    assert_eq!(lines[2], format!("set\ttwo\t{}\t\\xff", versions[1]));
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
    assert_eq!(
        (&set["key"], &set["value"]),
        (&"one".into(), &"a\tb".into())
    );
    assert_eq!(set["version"], versions[0]);
    let deleted = object();
    assert_eq!(
        (&deleted["event"], &deleted["key"]),
        (&"deleted".into(), &"one".into())
    );
    assert!(deleted["version"].as_str().unwrap() > versions[0].as_str());
    assert_eq!(watch.end(), Some(0));
}

#[test]
fn sigint_ends_watch_with_code_0() {
    let server = Server::start();
    let mut watch = Watch::start(&server, &["key"]);
    server.store("writer").set("key", "v");
    assert!(watch.line().ends_with("\tv"));
    server::signal(watch.child.id(), "INT");
    assert_eq!(watch.end(), Some(0));
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

#[test]
fn pattern_that_is_no_prefix_is_refused() {
    for pattern in ["pl*nt", "plant/?", "plant/**"] {
        let output = command(&["watch", pattern]).output().unwrap();
        assert_eq!(output.status.code(), Some(2));
        let error = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(error.contains("--exact"), "{error}");
    }
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
    let output = command(&["watch", "--port", &port, "plant/*", "--from", later]).output();
    let output = output.unwrap();
    assert_ne!(output.status.code(), Some(0));
    let error = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(
        error.contains("later than the last change of the store"),
        "{error}"
    );
}
