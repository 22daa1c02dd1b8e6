//! Tests `get`, `set`, `del`, `vdel` and `scan`, and how commands use their connection. Results
//! must go to standard output, messages to standard error, and each outcome must have its exit
//! code.

use std::{
    fs,
    io::{Read, Write},
    net::{Shutdown, TcpListener},
    os::unix::ffi::OsStrExt,
    process::Stdio,
    thread,
    time::{Duration, Instant},
};

use serde_json::Value;
use statehouse_tests::{
    Fate, Hlc, Mosquitto, Proxy, Ran, Server, Way,
    client::PATIENCE,
    command,
    command::finish,
    packet::kind,
    run,
    server::{signal, wait},
    wait::until,
};

use crate::{ask, ask_with};

#[test]
fn set_get_and_del_change_one_key() {
    let server = Server::start();
    let set = ask(&server, &["set", "key", "value"]).code(0);
    assert!(set.stdout.is_empty() && set.stderr.is_empty(), "{set:?}");
    assert_eq!(ask(&server, &["get", "key"]).code(0).stdout, b"value");
    assert_eq!(ask(&server, &["del", "key"]).code(0).stdout, b"");
    assert_eq!(ask(&server, &["get", "key"]).code(1).stdout, b"");
    ask(&server, &["del", "key"]).code(1);
}

#[test]
fn failed_condition_exits_with_code_1() {
    let server = Server::start();
    ask(&server, &["set", "key", "a", "--nx"]).code(0);
    ask(&server, &["set", "key", "b", "--nx"]).fails(1, "not applied");
    ask(&server, &["set", "key", "a", "--nex"]).code(0);
    ask(&server, &["set", "key", "b", "--nex"]).code(1);
    ask(&server, &["set", "key", "b", "--nx", "--nex"]).code(2);
    ask(&server, &["vdel", "key", "b"]).code(1);
    ask(&server, &["vdel", "key", "a"]).code(0);
    ask(&server, &["vdel", "key", "a"]).code(1);
}

#[test]
fn expiry_removes_the_key_or_is_refused() {
    let server = Server::start();
    for how in [["--px", "300"], ["--ttl", "300ms"]] {
        ask(&server, &["set", "key", "a", how[0], how[1]]).code(0);
        // The key has expired when a SET with NX succeeds.
        let mut waits = server.store("waits");
        let mut tries = 0;
        while waits.ask(&["SET", "key", "b", "NX"]).payload() != b"+OK\r\n" {
            std::thread::sleep(std::time::Duration::from_millis(20));
            tries += 1;
            assert!(tries < 1000, "the key never expires");
        }
    }
    for wrong in [
        ["--px", "0"],
        ["--px", "-5"],
        ["--px", "x"],
        ["--ttl", "0s"],
    ] {
        ask(&server, &["set", "key", "a", wrong[0], wrong[1]]).code(2);
    }
}

#[test]
fn values_and_keys_are_binary_safe() {
    let server = Server::start();
    let all: Vec<u8> = (0..=255).collect();
    for arguments in [&["set", "key"][..], &["set", "key", "-"]] {
        ask_with(&server, arguments, &all).code(0);
        assert_eq!(ask(&server, &["get", "key"]).code(0).stdout, all);
        ask(&server, &["del", "key"]).code(0);
    }
    ask_with(&server, &["set", "key"], b"").code(0);
    assert_eq!(ask(&server, &["get", "key"]).code(0).stdout, b"");
    let large = vec![b'\n'; 900 * 1024];
    ask_with(&server, &["set", "large"], &large).code(0);
    assert!(ask(&server, &["get", "large"]).code(0).stdout == large);

    // An argument that is not UTF-8.
    let odd = std::ffi::OsStr::from_bytes(b"k\xFF\n");
    let port = server.port().to_string();
    let mut set = command(&["set", "--port", &port]);
    set.arg(odd).arg(odd);
    finish(set, b"").code(0);
    assert_eq!(
        server.store("other").get(b"k\xFF\n"),
        Some(b"k\xFF\n".to_vec())
    );
    let mut get = command(&["get", "--json", "--port", &port]);
    get.arg(odd);
    let object = finish(get, b"").code(0).object();
    assert_eq!(object["value"]["base64"], "a/8K");
}

#[test]
fn vdel_compares_with_the_value_on_stdin() {
    let server = Server::start();
    // Longer than an argument may be, and with NUL.
    let value: Vec<u8> = (0..=255).cycle().take(200 * 1024).collect();
    ask_with(&server, &["set", "key"], &value).code(0);
    ask_with(&server, &["vdel", "key", "-"], &value[1..]).code(1);
    ask_with(&server, &["vdel", "key", "-"], &value).code(0);
    ask(&server, &["get", "key"]).code(1);
}

/// Runs a command through a proxy, with a timeout of three seconds.
fn ask_through(proxy: &Proxy, arguments: &[&str], stdin: &[u8]) -> Ran {
    let address = proxy.address();
    let (host, port) = (address.ip().to_string(), address.port().to_string());
    let options = ["--host", &host, "--port", &port, "--timeout", "3s"];
    run(&[arguments, &options].concat(), stdin)
}

/// A read is sent again on a new session. Regression: the broker recorded one for each `get`.
#[test]
fn reads_need_no_session_and_survive_a_lost_connection() {
    let server = Server::start();
    server.store("writer").set("k", "v");
    let proxy = Proxy::start(server.address());
    let mut answers = 0;
    proxy.script(move |seen| {
        let is_answer = seen.way == Way::FromBroker && seen.packet.kind() == kind::PUBLISH;
        answers += usize::from(is_answer);
        match is_answer && answers == 1 {
            true => Fate::CutBefore,
            false => Fate::Pass,
        }
    });
    let got = ask_through(&proxy, &["get", "k"], b"").code(0);
    assert_eq!(got.text(), "v");
    ask_through(&proxy, &["scan", "--values"], b"").code(0);
    ask_through(&proxy, &["export"], b"").code(0);
    ask_through(&proxy, &["set", "k", "w"], b"").code(0);
    // The property Session Expiry Interval, in seconds.
    let has_expiry = |packet: Vec<u8>, seconds: u8| {
        let property = [0x11, 0, 0, 0, seconds];
        packet.windows(5).any(|it| it == property)
    };
    let seen = proxy.seen().into_iter().map(|it| it.packet);
    let connects = seen.filter(|it| it.kind() == kind::CONNECT);
    let connects: Vec<Vec<u8>> = connects.map(|it| it.bytes()).collect();
    assert_eq!(connects.len(), 5, "the first get connects twice");
    for (connect, seconds) in connects.into_iter().zip([0, 0, 0, 0, 3]) {
        assert!(has_expiry(connect, seconds), "not {seconds} s");
    }
}

/// Regression: 64 requests were sent at once, and all but the first ones timed out.
#[test]
fn export_and_import_of_large_values_pass_a_slow_link() {
    let server = Server::start();
    let mut store = server.store("writer");
    for number in 0..32 {
        store.set(format!("k{number}"), vec![b'v'; 64 << 10]);
    }
    let proxy = Proxy::start(server.address());
    // All values together take at least four seconds.
    proxy.limit(Some(500_000));
    let exported = ask_through(&proxy, &["export"], b"").code(0);
    let exported = exported.says("32 keys written").stdout;
    ask_through(&proxy, &["import"], &exported)
        .code(0)
        .says("32 keys imported");
}

/// Regression: it did not name the --after.
#[test]
fn export_that_cannot_write_names_the_last_written_key() {
    let server = Server::start();
    for key in ["a", "b"] {
        ask(&server, &["set", key, "v"]).code(0);
    }
    let full = fs::OpenOptions::new().write(true).open("/dev/full");
    let mut export = command(&["export", "--after", "a", "--port"]);
    export.arg(server.port().to_string());
    export.stdout(full.unwrap()).stderr(Stdio::piped());
    let output = export.spawn().unwrap().wait_with_output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    for part in [
        "cannot write the output",
        "The last line of the output may be incomplete: remove it first",
        "0 keys written; continue with --after='a'",
    ] {
        assert!(said.contains(part), "{said}");
    }
    assert_eq!(output.status.code(), Some(3));
}

/// A command that catches signals must end even if it is blocked in a read.
#[test]
fn sigterm_ends_an_import_that_waits_for_lines() {
    let server = Server::start();
    let mut import = command(&["import", "--port"]);
    import.arg(server.port().to_string());
    import.stdin(Stdio::piped()).stderr(Stdio::null());
    let mut child = import.spawn().unwrap();
    let mut input = child.stdin.take().unwrap();
    // As many lines as are sent together.
    for number in 0..64 {
        writeln!(input, "{{\"key\":\"k{number}\",\"value\":\"v\"}}").unwrap();
    }
    let mut store = server.store("reader");
    until("the lines are imported", || store.get("k63").is_some());
    signal(child.id(), "TERM");
    let Some(status) = wait(&mut child, PATIENCE) else {
        _ = child.kill();
        panic!("the command still waits");
    };
    assert_eq!(status.code(), Some(143));
}

#[test]
fn scan_lists_matching_keys() {
    let server = Server::start();
    assert_eq!(ask(&server, &["scan"]).code(1).stdout, b"");
    let mut store = server.store("store");
    for key in ["a1", "a2", "b"] {
        store.set(key, "v");
    }
    assert_eq!(ask(&server, &["scan"]).code(0).text(), "a1\na2\nb\n");
    assert_eq!(ask(&server, &["scan", "a?"]).code(0).text(), "a1\na2\n");
    assert_eq!(
        ask(&server, &["scan", "-0", "a*"]).code(0).text(),
        "a1\0a2\0"
    );
    let objects = ask(&server, &["scan", "--json", "a*"]).code(0).objects();
    let keys: Vec<&Value> = objects.iter().map(|it| &it["key"]).collect();
    assert_eq!(keys, ["a1", "a2"]);
    ask(&server, &["scan", "nothing*"]).code(1);
    // More keys than one page of a scan has.
    for n in 0..1500 {
        store.set(format!("many{n:04}"), "v");
    }
    let text = ask(&server, &["scan", "many*"]).code(0).text();
    assert_eq!(text.lines().count(), 1500);
    assert!(text.lines().is_sorted());
}

#[test]
fn json_output_has_values_and_versions() {
    let server = Server::start();
    let set = ask(&server, &["set", "key", "ü", "--json"])
        .code(0)
        .object();
    assert_eq!(set["applied"], true);
    let version = Hlc::parse_padded(set["version"].as_str().unwrap()).unwrap();
    assert_eq!(version.node, "StateStore");
    let get = ask(&server, &["get", "key", "--json"]).code(0).object();
    assert_eq!((&get["value"], &get["key"]), (&"ü".into(), &"key".into()));
    assert_eq!(get["version"], set["version"]);
    let text = ask(&server, &["get", "key", "--with-version"])
        .code(0)
        .text();
    assert_eq!(text, format!("{version}\nü"));
    let missing = ask(&server, &["get", "missing", "--json"]).code(1).object();
    assert!(missing["value"].is_null() && missing["version"].is_null());
    let refused = ask(&server, &["set", "key", "x", "--nx", "--json"])
        .code(1)
        .object();
    assert_eq!(refused["applied"], false);
    assert_eq!(refused["version"], set["version"]);
    let other = ask(&server, &["vdel", "key", "x", "--json"])
        .code(1)
        .object();
    assert_eq!(other["deleted"], false);
    let deleted = ask(&server, &["del", "key", "--json"]).code(0).object();
    assert_eq!(deleted["deleted"], true);
    assert_eq!(deleted["version"], set["version"]);
}

#[test]
fn fencing_token_is_checked() {
    let server = Server::start();
    let lock = ask(&server, &["set", "lock", "me", "--json"])
        .code(0)
        .object();
    let token = lock["version"].as_str().unwrap();
    ask(&server, &["set", "key", "a", "--fencing-token", token]).code(0);
    for refused in [
        &["set", "key", "b"][..],
        &["del", "key"],
        &["vdel", "key", "a"],
    ] {
        ask(&server, refused).fails(4, "fencing token is required");
    }
    let older = Hlc::parse_padded(token).unwrap().moved(-1).to_string();
    ask(&server, &["set", "key", "b", "--fencing-token", &older]).fails(4, "lower version");
    ask(&server, &["set", "key", "b", "--fencing-token", "rubbish"]).fails(2, "rubbish");
    ask(&server, &["vdel", "key", "a", "--fencing-token", token]).code(0);
}

#[test]
fn refusal_prints_a_message_and_exits_with_code_4() {
    let server = Server::with_config("max_keys = 1");
    ask(&server, &["set", "one", "v"]).code(0);
    let ran = ask(&server, &["set", "two", "v"]).fails(4, "quota");
    assert!(ran.stdout.is_empty());
    let ran = ask(&server, &["get", ""]);
    // Either the command or the store may refuse an empty key.
    assert!(matches!(ran.code, Some(2 | 4)), "{ran:?}");
    assert!(ran.stderr.contains("key"), "{ran:?}");
}

/// Regression: the exit code was that of a refusal by a store.
#[test]
fn broker_without_a_store_exits_with_code_3() {
    let broker = Mosquitto::start();
    for name in [
        &["get", "key"][..],
        &["set", "key", "v"],
        &["scan"],
        &["lock", "--wait", "1h", "key", "--", "true"],
    ] {
        let mut asked = command(name);
        asked.env("STATEHOUSE_URL", broker.url());
        finish(asked, b"")
            .fails(3, "no state store is subscribed")
            .says("attached to this broker");
    }
}

#[test]
fn missing_store_prints_a_message_and_exits_with_code_3() {
    // No service uses this port. A free port could belong to another test by now.
    let port = "1";
    for name in [
        &["get", "key"][..],
        &["set", "key", "v"],
        &["del", "key"],
        &["scan"],
        &["watch", "key"],
    ] {
        let mut arguments = name.to_vec();
        arguments.extend(["--port", port]);
        run(&arguments, b"")
            .fails(3, "127.0.0.1:1")
            .says("statehouse serve")
            .says("--host");
    }
    // A listener that never answers.
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port().to_string();
    run(&["get", "key", "--port", &port, "--timeout", "300ms"], b"").code(3);
    // The environment can name the store too.
    let mut get = command(&["get", "key"]);
    get.env("STATEHOUSE_PORT", &port)
        .env("STATEHOUSE_HOST", "127.0.0.1")
        .args(["--timeout", "300ms"]);
    finish(get, b"").fails(3, &port);
    // An admin API that never answers.
    let admin = format!("http://127.0.0.1:{port}");
    let mut get = command(&["get", "key", "--as-of", "0s", "--timeout", "300ms"]);
    get.args(["--admin", &admin]);
    get.env("STATEHOUSE_ADMIN_TOKEN", "0123456789abcdef");
    let silent = format!("{admin} does not answer within 300ms.\n");
    let ran = finish(get, b"").code(3);
    assert!(ran.stderr.ends_with(&silent), "{ran:?}");
}

/// Regression: the advice was to start a store.
#[test]
fn server_that_answers_wrongly_is_named_as_the_cause() {
    let directory = tempfile::tempdir().unwrap();
    let write = |name: &str, text: String| {
        let path = directory.path().join(name);
        fs::write(&path, text).unwrap();
        path.to_str().unwrap().to_owned()
    };
    let own = rcgen::generate_simple_self_signed(["localhost".to_owned()]).unwrap();
    let certificate = write("own.pem", own.cert.pem());
    let key = write("key.pem", own.signing_key.serialize_pem());
    let mut other = rcgen::CertificateParams::new([]).unwrap();
    let name = rcgen::DnType::CommonName;
    other.distinguished_name.push(name, "another authority");
    let other = other.self_signed(&rcgen::KeyPair::generate().unwrap());
    let ca = write("other.pem", other.unwrap().pem());
    let secure = ["--listen", "mqtts://127.0.0.1:0", "--tls-cert"];
    let server = Server::with(
        "",
        &[&secure[..], &[&*certificate, "--tls-key", &*key]].concat(),
    );
    let of_web = TcpListener::bind("127.0.0.1:0").unwrap();
    let web = of_web.local_addr().unwrap();
    let answering = thread::spawn(move || {
        for _ in 0..2 {
            let mut socket = of_web.accept().unwrap().0;
            let page = "x".repeat(1000);
            let answer = format!("HTTP/1.1 400 Bad Request\r\n\r\n{page}");
            // The client may close the connection first.
            let _ = socket.write_all(answer.as_bytes());
            let _ = socket.shutdown(Shutdown::Write);
            let _ = socket.read_to_end(&mut Vec::new());
        }
    });
    let tls = format!("mqtts://{}", server.addresses()[1]);
    let get = |url: &str| run(&["get", "key", "--url", url], b"");
    let get_trusting = |url: &str| run(&["get", "key", "--url", url, "--ca", &ca], b"");
    let bench = ["bench", "--duration", "100ms", "--warm-up", "0s"];
    let bench = [&bench[..], &["--url", &*tls, "--ca", &*ca]].concat();
    for (ran, says) in [
        (get_trusting(&tls), "--ca FILE names the CA certificates"),
        (run(&bench, b""), "--ca FILE names the CA certificates"),
        (get_trusting(&format!("mqtts://{web}")), "TLS"),
        (get(&format!("mqtt://{web}")), "not MQTT 5"),
    ] {
        let ran = ran.fails(3, says);
        assert!(!ran.stderr.contains("Start one"), "{ran:?}");
    }
    answering.join().unwrap();
}

/// Regression: the command failed at once, and advised to start a store.
#[test]
fn store_without_a_leader_is_asked_until_the_timeout() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port().to_string();
    thread::spawn(move || {
        for socket in listener.incoming() {
            let mut socket = socket.unwrap();
            _ = socket.read(&mut [0; 1024]);
            // CONNACK: server unavailable.
            _ = socket.write_all(&[0x20, 3, 0, 0x88, 0]);
        }
    });
    let begin = Instant::now();
    let get = ["get", "key", "--port", &port, "--timeout", "2s"];
    let says = "(server unavailable). The store stops or has no leader at present";
    let ran = run(&get, b"").fails(3, says);
    assert!(begin.elapsed() >= Duration::from_secs(2), "{ran:?}");
    assert!(!ran.stderr.contains("Start one"), "{ran:?}");
}

#[test]
fn values_of_options_may_begin_with_a_dash() {
    let server = Server::start();
    let first = server.store("writer").set("other", "0").to_string();
    ask(&server, &["set", "--", "-k", "v"]).code(0);
    let watch = ["watch", "--prefix", "-k", "--from", &first, "--count", "1"];
    ask(&server, &watch).code(0).prints(&["set\t-k\t"]);
    let export = ask(&server, &["export", "--after", "-a"]).code(0);
    export.prints(&["\"key\":\"-k\""]);
    let lock = ["lock", "l", "--holder", "-x", "--", "true"];
    ask(&server, &lock).code(0);
    ask(&server, &["del", "--prefix", "-k"]).code(0);
    assert_eq!(ask(&server, &["scan"]).code(0).text(), "other\n");
}

#[test]
fn version_names_the_build_and_so_do_the_metrics() {
    let text = run(&["--version"], b"").code(0).text();
    let build = text
        .strip_prefix("statehouse 0.1.0 (")
        .expect("the version");
    let build = build.strip_suffix(")\n").expect("one line");
    let parts: Vec<&str> = build.split(", ").collect();
    let [commit, target, features] = parts[..] else {
        panic!("{text}");
    };
    assert!(target.contains(std::env::consts::ARCH), "{text}");
    let features = features.strip_prefix("features: ").expect("features");
    // The build of the tests enables both.
    let mut names = features.split(',');
    assert_eq!(names.next(), Some("cluster"), "{text}");
    assert_eq!(names.next(), Some("embedded-code"), "{text}");
    let labels = format!(
        "statehouse_build_info{{version=\"0.1.0\",commit=\"{commit}\",target=\"{target}\",features=\"{features}\","
    );
    let page = Server::start().metrics_page();
    assert!(page.contains(&labels), "{labels}");
}
