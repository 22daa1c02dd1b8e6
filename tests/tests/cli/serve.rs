//! Tests `statehouse serve`: its output and logs, its start, and its shutdown, which must lose no
//! answer.

use std::{
    fs::{self, File, OpenOptions},
    io::{BufRead, BufReader, Write},
    net::TcpListener,
    os::{fd::OwnedFd, unix::net::UnixStream},
    path::Path,
    process::{Command, Stdio},
    time::{Duration, Instant},
};

use data_encoding::HEXLOWER;
use statehouse_tests::{
    Client, Connect, Packet, Publish, Request, Server, Store, binary,
    client::PATIENCE,
    command,
    packet::kind,
    policies, run, run_in,
    server::{signal, wait},
    store::is_answer,
};

#[test]
fn serve_prints_version_policy_data_and_addresses() {
    let server = Server::start();
    let lines = server.stdout();
    assert_eq!(lines.len(), 5, "{lines:#?}");
    assert_eq!(lines[0], "statehouse 0.1.0");
    let policy: Vec<&str> = lines[1].split(' ').collect();
    let [word, name, version, digest] = policy[..] else {
        panic!("{lines:#?}");
    };
    assert_eq!((word, name), ("policy", "standard"));
    assert_eq!(version.split('.').count(), 3);
    let digest = digest.strip_prefix("blake3:").unwrap();
    assert_eq!(digest.len(), 64);
    assert!(
        digest
            .bytes()
            .all(|b| b.is_ascii_hexdigit() && !b.is_ascii_uppercase())
    );
    assert_eq!(
        lines[2],
        "the store is in statehouse-data: a write is on disk before its answer"
    );
    let listens = format!("listening on mqtt://{}", server.address());
    assert_eq!(lines[3], listens);
    assert_eq!(lines[4], "ready");
    assert_ne!(server.port(), 0);
}

/// Regression: the store exited with 2, at which systemd does not start it again.
#[test]
#[cfg(target_pointer_width = "64")]
fn start_without_enough_address_space_is_temporary() {
    let directory = tempfile::tempdir().unwrap();
    // Less than one instance of a policy reserves. `timeout` ends a store that starts all the same.
    let mut serve = Command::new("timeout");
    serve.args(["60", "prlimit", "--as=4294967296"]);
    serve.arg(binary::statehouse());
    serve.args(["serve", "--listen", "127.0.0.1:0", "--threads", "2"]);
    let output = serve.current_dir(directory.path()).output().unwrap();
    let log = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(75), "{log}");
    assert!(log.contains("os error 12"), "{log}");
}

#[test]
fn several_listeners_share_one_store() {
    let server = Server::with("", &["--listen", "127.0.0.2:0", "--listen", "localhost:0"]);
    let addresses = server.addresses();
    assert_eq!(addresses.len(), 3);
    server.store("one").set("key", "value");
    for (n, address) in addresses.into_iter().enumerate() {
        let id = format!("client{n}");
        let client = Client::connect(address, &Connect::new(&id));
        let mut store = Store::new(client, &id);
        assert_eq!(store.get("key"), Some(b"value".to_vec()), "{address}");
    }
}

#[test]
fn open_listener_without_authentication_needs_insecure() {
    for address in ["0.0.0.0:0", "[::]:0", "192.0.2.1:1883"] {
        run(&["serve", "--listen", address], b"")
            .fails(2, "--insecure")
            .says("authentication");
        // Any open listener makes the command refuse to start.
        let both = ["serve", "--listen", "127.0.0.1:0", "--listen", address];
        run(&both, b"").code(2);
    }
    let server = Server::with("", &["--listen", "0.0.0.0:0", "--insecure"]);
    let open = server.addresses()[1];
    let open = ([127, 0, 0, 1], open.port()).into();
    Client::connect(open, &Connect::new("client")).ping();
    let server = Server::with("insecure = true", &["--listen", "0.0.0.0:0"]);
    assert_eq!(server.addresses().len(), 2);
}

#[test]
fn address_in_use_exits_with_code_3() {
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap().to_string();
    let ran = run(&["serve", "--listen", &address], b"").code(3);
    assert!(!ran.text().contains("ready"));
    ran.says(&address).says("--listen");
}

/// Regression: each of them recorded the start of a run, and a service manager repeats such a start
/// without end.
#[test]
fn failed_starts_add_nothing_to_the_log() {
    let mut server = Server::restartable(&[]);
    server.store("client").set("key", "value");
    server.stop();
    let last_record = || {
        let found = server.run(&["doctor", "--json"]).code(0).object();
        found["history"]["to_record"].as_u64().unwrap()
    };
    let before = last_record();
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap().to_string();
    let serve = [
        "serve",
        "--listen",
        "127.0.0.1:0",
        "--admin",
        address.as_str(),
    ];
    for _ in 0..2 {
        server.run(&serve).fails(3, &address);
    }
    assert_eq!(last_record(), before);
    server.restart();
    assert_eq!(server.store("client").get("key"), Some(b"value".to_vec()));
}

/// The server sends DISCONNECT to its clients and exits with code 0 within two seconds, even if a
/// client does not read.
#[test]
fn sigterm_and_sigint_shut_down_in_two_seconds() {
    for signal in ["TERM", "INT"] {
        let mut server = Server::start();
        let mut client = server.connect("client");
        let mut resumed = Client::connect(server.address(), &Connect::resume("resumed", 60));
        let mut half = server.open();
        half.send(&[0x10]);
        let mut slow = server.connect("slow");
        slow.subscribe("flood", 0);
        for _ in 0..40 {
            client.publish(Publish::new("flood", vec![0; 64 * 1024]).qos(1));
        }
        let began = Instant::now();
        server.signal(signal);
        client.expect_disconnect(0x8B);
        resumed.expect_disconnect(0x8B);
        assert_eq!(half.expect_closed(), None);
        let status = server.wait(Duration::from_secs(20));
        assert!(
            began.elapsed() < Duration::from_secs(2),
            "{:?} after SIG{signal}",
            began.elapsed()
        );
        assert_eq!(status.code(), Some(0), "{:#?}", server.stderr());
    }
}

/// The signal arrives while requests wait for their turn and answers for the disk. A request with a
/// PUBACK has its answer. The client redelivers the others, and each has one effect.
#[test]
fn shutdown_loses_no_answer() {
    let mut server = Server::restartable(&[]);
    let connect = Connect::resume("client", 60);
    let mut store = Store::new(Client::connect(server.address(), &connect), "client");
    let value = "value".repeat(1000);
    let requests: Vec<Request> = (0..400)
        .map(|n| store.command(&["SET", &format!("key {n}"), &value, "NX"]))
        .collect();
    let mut sent: Vec<Publish> = requests.iter().map(Request::publish).collect();
    for publish in &mut sent {
        publish.packet_id = store.client.packet_id();
    }
    let bytes: Vec<u8> = sent.iter().flat_map(Publish::bytes).collect();
    store.client.send(&bytes);
    store.finish(&requests[0], sent[0].packet_id);
    server.signal("TERM");
    store.client.expect_disconnect(0x8B);
    assert_eq!(server.wait(Duration::from_secs(20)).code(), Some(0));
    let received = store.client.drain();

    server.restart();
    let client = Client::connect(server.address(), &connect);
    assert!(client.session_present());
    let mut store = Store::on(client, "client");
    for (request, mut publish) in requests.iter().zip(sent).skip(1) {
        let is_puback =
            |it: &Packet| it.kind() == kind::PUBACK && it.ack().packet_id == publish.packet_id;
        let correlation = request.correlation.as_deref();
        let payload = if received.iter().any(is_puback) {
            let answer = received.iter().find(|it| is_answer(it, correlation));
            answer.expect("an answer").publish().payload
        } else {
            publish.dup = true;
            let id = store.client.start(publish);
            store.finish(request, id).payload().to_vec()
        };
        assert_eq!(payload, b"+OK\r\n");
    }
}

#[test]
fn json_log_has_one_object_per_line() {
    let server = Server::with("", &["--log", "json", "--log-filter", "debug"]);
    let mut client = server.connect("client");
    client.send(&[0, 0]);
    client.expect_closed();
    server.signal("TERM");
    server.wait_for_log("stopped");
    let lines = server.stderr();
    assert!(!lines.is_empty());
    for line in lines {
        let value: serde_json::Value = serde_json::from_str(&line)
            .unwrap_or_else(|error| panic!("{line:?} is not JSON: {error}"));
        assert!(value["level"].is_string(), "{line}");
    }
}

#[test]
fn request_log_has_one_line_per_request() {
    let filter = "info,statehouse::request=debug";
    let server = Server::with("", &["--log", "json", "--log-filter", filter]);
    let mut store = server.store("client\n1");
    let request = store.command(&["SET", "secret-key", "secret-value"]);
    assert_eq!(store.call(&request).payload(), b"+OK\r\n");
    store.ask(&["NONSENSE", "secret-key"]);
    store.ask(&["GET", "secret-key"]);
    server.wait_for_log("GET");
    let lines = server.stderr();
    let lines = lines.iter().filter(|it| it.contains("statehouse::request"));
    let lines: Vec<serde_json::Value> = lines.map(|it| serde_json::from_str(it).unwrap()).collect();
    let [set, nonsense, get] = &lines[..] else {
        panic!("{lines:#?}")
    };
    assert_eq!(
        set["client"], "client\n1",
        "the client id as it is, on one line"
    );
    let correlation = request.correlation.as_ref().unwrap();
    assert_eq!(set["request"], HEXLOWER.encode(correlation));
    assert_eq!(set["command"], "SET");
    assert!(
        set["policy"].as_str().unwrap().starts_with("standard@"),
        "{set}"
    );
    assert!(
        set["error"].is_null() && !nonsense["error"].is_null(),
        "{lines:#?}"
    );
    assert_eq!(get["answer_bytes"], "$12\r\nsecret-value\r\n".len());
    assert!(
        lines.iter().all(|it| !it.to_string().contains("secret")),
        "{lines:#?}"
    );
}

#[test]
fn invalid_policy_file_exits_with_code_2() {
    let directory = tempfile::tempdir().unwrap();
    let serve = |policy: &str| {
        let serve = ["serve", "--listen", "127.0.0.1:0", "--policy", policy];
        run_in(directory.path(), &serve)
    };
    serve("missing.wasm").fails(2, "missing.wasm");
    for (name, bytes) in policies::INVALID {
        fs::write(directory.path().join(name), bytes).unwrap();
        let ran = serve(name).fails(2, name);
        assert!(!ran.text().contains("ready"), "{ran:?}");
        assert!(!ran.stderr.contains("panicked"), "{ran:?}");
    }
}

/// A server whose start waits for the policy that the test writes to this file.
fn starting(directory: &Path) -> (Server, File) {
    let pipe = directory.join("policy.wasm");
    let made = Command::new("mkfifo").arg(&pipe).status();
    assert!(made.unwrap().success());
    let mut serve = command(&["serve", "--listen", "127.0.0.1:0", "--data"]);
    serve.arg(directory.join("data"));
    serve.arg("--policy").arg(&pipe);
    let server = Server::run_unready(serve);
    // Returns when the server reads the policy.
    let policy = OpenOptions::new().write(true).open(&pipe).unwrap();
    (server, policy)
}

/// Regression: the kernel ignores the default action of these signals for process 1 of a container.
#[test]
fn sigterm_and_sigint_end_a_start_at_once() {
    for signal in ["TERM", "INT"] {
        let directory = tempfile::tempdir().unwrap();
        let (mut server, _policy) = starting(directory.path());
        server.signal(signal);
        assert_eq!(server.wait(PATIENCE).code(), Some(0));
        server.wait_for_log(&format!(
            "SIG{signal}: stopping before the start is complete"
        ));
    }
}

/// Regression: the signal had no effect until the log was recovered and all policies were ready.
#[test]
fn sigterm_ends_a_standby_that_takes_over_at_once() {
    let mut active = Server::start();
    let password = active.directory().join("password");
    fs::write(&password, "secret").unwrap();
    let mut serve = command(&["serve", "--broker", "mqtt://store@127.0.0.1:1", "--standby"]);
    serve.arg("--data").arg(active.data());
    serve.arg("--broker-password-file").arg(&password);
    let mut standby = Server::run_unready(serve);
    standby.wait_for_line("standby: ");
    // The takeover reads this file again, and takes as long as the pipe is empty.
    fs::remove_file(&password).unwrap();
    let made = Command::new("mkfifo").arg(&password).status();
    assert!(made.unwrap().success());
    active.stop();
    // Returns when the standby reads the file.
    let _pipe = OpenOptions::new().write(true).open(&password).unwrap();
    standby.signal("TERM");
    assert_eq!(standby.wait(PATIENCE).code(), Some(0));
}

/// Regression: it ended the process, without a line, when it came during a long start.
#[test]
fn sighup_during_the_start_is_ignored() {
    let directory = tempfile::tempdir().unwrap();
    let (mut server, mut policy) = starting(directory.path());
    server.signal("HUP");
    let module = fs::read(policies::marked("start")).unwrap();
    policy.write_all(&module).unwrap();
    drop(policy);
    server.wait_until_ready();
}

#[test]
fn help_and_version_are_printed() {
    let help = run(&["--help"], b"").code(0).text();
    for name in [
        "serve", "get", "set", "del", "vdel", "scan", "watch", "lock",
    ] {
        assert!(help.contains(name), "{help}");
    }
    let own = run(&["get", "--help"], b"").code(0).text();
    assert!(own.contains("Usage:"), "{own}");
    let version = run(&["-V"], b"").code(0).text();
    assert_eq!(version, "statehouse 0.1.0\n");
    run(&[], b"").code(2);
    run(&["nonsense"], b"").fails(2, "nonsense");
    run(&["serve", "--nonsense"], b"").fails(2, "--nonsense");
}

/// Servers of the tests do not inherit STATEHOUSE variables, so this one sets its own.
#[test]
fn environment_sets_the_listen_addresses() {
    let mut serve = command(&["serve"]);
    serve.env("STATEHOUSE_LISTEN", "127.0.0.1:0,127.0.0.2:0");
    let server = Server::spawn(serve, tempfile::tempdir().unwrap());
    assert_eq!(server.addresses().len(), 2);
    let connack = server.connect("client").connack.clone().unwrap();
    assert_eq!(connack.reason, 0);
}

/// Standard output may be a file on the full disk that the store is on.
#[test]
fn full_standard_output_does_not_stop_the_store() {
    let directory = tempfile::tempdir().unwrap();
    let data = directory.path().join("data");
    let mut serve = command(&["serve", "--listen", "127.0.0.1:0", "--data"]);
    let full = OpenOptions::new().write(true).open("/dev/full").unwrap();
    serve.arg(&data).stdout(full).stderr(Stdio::piped());
    let mut child = serve.spawn().unwrap();
    let log = BufReader::new(child.stderr.take().unwrap());
    let mut lines = log.lines().map_while(Result::ok);
    let warned = lines.any(|line| line.contains("cannot write to standard output"));
    let data = data.to_str().unwrap();
    let ready = run(&["ready", "--wait", "30s", "--data", data], b"");
    child.kill().unwrap();
    child.wait().unwrap();
    assert!(warned);
    ready.code(0);
}

/// Regression: the start waited for the reader of standard output, and ignored SIGTERM.
#[test]
fn unread_standard_output_does_not_stop_the_store() {
    let directory = tempfile::tempdir().unwrap();
    let data = directory.path().join("data");
    let (_unread, full) = UnixStream::pair().unwrap();
    full.set_nonblocking(true).unwrap();
    while (&full).write(&[0; 4096]).is_ok() {}
    full.set_nonblocking(false).unwrap();
    let mut serve = command(&["serve", "--listen", "127.0.0.1:0", "--data"]);
    serve
        .arg(&data)
        .stdout(OwnedFd::from(full))
        .stderr(Stdio::null());
    let mut child = serve.spawn().unwrap();
    let data = data.to_str().unwrap();
    let ready = run(&["ready", "--wait", "30s", "--data", data], b"");
    signal(child.id(), "TERM");
    let ended = wait(&mut child, PATIENCE);
    // An error means that the process has already ended.
    _ = child.kill();
    child.wait().unwrap();
    ready.code(0);
    assert_eq!(ended.and_then(|it| it.code()), Some(0));
}

/// Regression: the signal of this limit ended the process without a word.
#[test]
fn limit_of_file_sizes_is_an_error_with_words() {
    let directory = tempfile::tempdir().unwrap();
    let mut serve = Command::new("prlimit");
    serve.arg("--fsize=1048576").arg(binary::statehouse());
    serve.args(["serve", "--listen", "127.0.0.1:0"]);
    serve.current_dir(directory.path());
    command::finish(serve, b"").fails(2, "file too large");
}
