//! Tests `serve --check`: it must find everything that a start refuses, in one run and with the
//! same words, and change nothing.

use std::{fs, io::Write, net::TcpListener, os::unix::fs::chown, path::Path, process::Command};

use serde_json::json;
use statehouse_tests::{
    Ran, Server, WallClock, assert_contains, binary,
    client::PATIENCE,
    command,
    command::{add_user, finish},
    files::{contents, of_kind},
    policies, run, run_in,
    small::{FileSystem, Small},
};

use crate::data_directory::{OTHER, allow, as_other};

fn check(directory: &Path, toml: &str) -> Ran {
    fs::write(directory.join("settings.toml"), toml).unwrap();
    let check = ["serve", "--check", "--config", "settings.toml"];
    run_in(directory, &check)
}

/// A store without its rules would serve everyone.
#[test]
fn misspelt_variables_are_named() {
    let directory = tempfile::tempdir().unwrap();
    let mut check = command(&["serve", "--check"]);
    check.current_dir(directory.path());
    check.env("STATEHOUSE_RULE", "rules.toml");
    check.env("STATEHOUSE_DURABILTY", "memory");
    check.env("STATEHOUSE_NODES", "3");
    // Of other programs, of secrets, of other commands, and of Kubernetes.
    check.env("STATEHOUSE_BUILD", "7");
    check
        .env("STATEHOUSE_ADMIN_TOKEN", "0123456789abcdef")
        .env("STATEHOUSE_USER", "u");
    check.env("STATEHOUSE_ADMIN_PORT", "tcp://10.96.0.7:80");
    check.env("STATEHOUSE_MAX_SERVICE_HOST", "10.96.0.7");
    let checked = finish(check, b"").code(0);
    let warned = |line: &&str| line.contains("environment variable");
    let warned: Vec<_> = checked.stderr.lines().filter(warned).collect();
    assert_eq!(
        warned,
        [
            "statehouse: unknown environment variable STATEHOUSE_DURABILTY: did you mean STATEHOUSE_DURABILITY?",
            "statehouse: unknown environment variable STATEHOUSE_NODES: did you mean STATEHOUSE_NODE?",
            "statehouse: unknown environment variable STATEHOUSE_RULE: did you mean STATEHOUSE_RULES?",
        ]
    );
    let variable = [("STATEHOUSE_RULE", "rules.toml".to_owned())];
    let server = Server::restartable_in(&[], &variable);
    server.wait_for_log("did you mean STATEHOUSE_RULES?");
}

#[test]
fn fuel_limit_too_low_for_scan_is_warned_of() {
    let directory = tempfile::tempdir().unwrap();
    let warning = "below 3000000 a SCAN of many keys may fail";
    check(directory.path(), "max_fuel = 2999999\n")
        .code(0)
        .says(warning);
    let enough = check(directory.path(), "max_fuel = 3000000\n").code(0);
    assert!(!enough.stderr.contains(warning), "{}", enough.stderr);
    Server::with_config("max_fuel = 50000\n").wait_for_log(warning);
}

/// Regression: an empty variable, as Compose makes of an unset one, was a password without a user.
#[test]
fn empty_password_of_the_cluster_counts_as_unset() {
    let directory = tempfile::tempdir().unwrap();
    let check = |password: &str| {
        let mut check = command(&["serve", "--check", "--listen", "127.0.0.1:0"]);
        check
            .args(["--cluster", "http://127.0.0.1:1", "--name", "gw1"])
            .args(["--cluster-listen", "127.0.0.1:0"])
            .env("STATEHOUSE_CLUSTER_PASSWORD", password)
            .current_dir(directory.path());
        finish(check, b"")
    };
    check("secret").fails(2, "cluster_user and its password");
    let checked = check("").code(0);
    assert!(!checked.stderr.contains("cluster_user"), "{checked:#?}");
}

#[test]
fn every_problem_is_reported_in_one_run() {
    let directory = tempfile::tempdir().unwrap();
    for (name, text) in [
        ("server.pem", "no certificate"),
        ("users", "anna"),
        ("rules.toml", "[[rule]]\nnonsense = 1\n"),
        ("policy.wasm", "no wasm"),
        ("data", "a file"),
    ] {
        fs::write(directory.path().join(name), text).unwrap();
    }
    let before = contents(directory.path());
    let toml = "max_kyes = 5
sync_interval = \"2h\"
node = \"a:b\"
commit_delay = \"1s\"
log_filter = \"==\"
listen = [\"mqtts://127.0.0.1:0\", \"127.0.0.1:1\", \"192.0.2.1:1883\"]
tls_cert = \"server.pem\"
tls_key = \"missing.key\"
users = \"users\"
rules = \"rules.toml\"
policy = \"policy.wasm\"
policy_drop = \"missing\"
trusted_keys = [\"nokey\"]
metrics = \"127.0.0.1:1\"
traces = \"https://collector\"
traces_ca = \"missing.pem\"
data = \"data\"
insecure = true
";
    let ran = check(directory.path(), toml).code(2);
    assert_contains!(
        ran.stderr,
        "max_keys",
        "sync_interval is at least",
        "node",
        "commit_delay is at least",
        "log filter",
        "server.pem holds no certificate",
        "missing.key",
        "metrics 127.0.0.1:1 and listen 127.0.0.1:1",
        "cannot listen on 192.0.2.1:1883",
        "users: ",
        "rules: ",
        "nokey",
        "the drop directory missing",
        "missing.pem",
        "the data directory data"
    );
    assert!(ran.stdout.is_empty(), "{ran:#?}");
    fs::remove_file(directory.path().join("settings.toml")).unwrap();
    assert_eq!(contents(directory.path()), before);
}

#[test]
fn start_refuses_with_the_same_words_and_code() {
    let directory = tempfile::tempdir().unwrap();
    fs::write(directory.path().join("users"), "anna").unwrap();
    fs::write(directory.path().join("policy.wasm"), "no wasm").unwrap();
    add_user(directory.path().join("operators"), "anna", "secret").code(0);
    let certified = rcgen::generate_simple_self_signed(["localhost".to_owned()]).unwrap();
    let key = certified.signing_key.serialize_pem();
    fs::write(directory.path().join("cert.pem"), certified.cert.pem()).unwrap();
    fs::write(directory.path().join("key.pem"), key).unwrap();
    // A service manager starts the store again after 3, since an address may be free later.
    for (code, arguments) in [
        (2, "--sync-interval 2h"),
        (3, "--listen 192.0.2.1:1883 --insecure"),
        (2, "--users users"),
        (2, "--policy policy.wasm"),
        (2, "--policy-drop missing"),
        (2, "--data policy.wasm"),
        (3, "--metrics 192.0.2.1:1"),
        (2, "--metrics 192.0.2.1:1 --policy-drop missing"),
        (
            3,
            "--admin https://192.0.2.1:1 --users operators --tls-cert cert.pem --tls-key key.pem",
        ),
        (3, "--listen mqtts://127.0.0.1:0 --tls-cert a --tls-key b"),
        (
            3,
            "--broker mqtt://127.0.0.1:1 --admin https://127.0.0.1:0 --users operators --tls-cert a --tls-key b",
        ),
    ] {
        let arguments: Vec<&str> = arguments.split(' ').collect();
        // The port of a running broker must not decide.
        let listens = arguments.contains(&"--listen") || arguments.contains(&"--broker");
        let free = ["--listen", "127.0.0.1:0"];
        let mut serve = vec!["serve"];
        serve.extend(free.iter().filter(|_| !listens));
        serve.extend(&arguments);
        let started = run_in(directory.path(), &serve);
        serve.push("--check");
        let checked = run_in(directory.path(), &serve);
        assert_eq!(started.code, Some(code), "{started:#?}");
        assert_eq!(checked.code, Some(code), "{checked:#?}");
        let refusal = started.stderr.lines().last().unwrap();
        let refusal = refusal.trim_start_matches("statehouse: ");
        assert!(
            checked.stderr.contains(refusal),
            "{checked:#?} {started:#?}"
        );
    }
}

/// Regression: only the users file was checked for accounts that could change it. A pipe stopped
/// the check, and the reloads of a store.
#[test]
fn files_that_other_accounts_can_change_are_named() {
    let directory = tempfile::tempdir().unwrap();
    let place = |name: &str| directory.path().join(name);
    let certified = rcgen::generate_simple_self_signed(["localhost".to_owned()]).unwrap();
    let key = json!({"kty": "OKP", "crv": "Ed25519", "x": "A".repeat(43)});
    let other = json!({"kty": "EC", "crv": "P-384"});
    let owner = "[[certificate]]\nsubject = \"CN=a\"\nuser = \"a\"\n";
    let rule =
        "[[rules]]\nprincipals.usernames = [\"*\"]\nbrokerResources = [{ method = \"Connect\" }]\n";
    fs::write(place("cert.pem"), certified.cert.pem()).unwrap();
    for (name, text) in [
        ("key.pem", certified.signing_key.serialize_pem()),
        ("ca.pem", certified.cert.pem()),
        ("owners.toml", owner.to_owned()),
        ("rules.toml", rule.to_owned()),
        ("keys.jwks", json!({"keys": [key, other]}).to_string()),
    ] {
        fs::write(place(name), text).unwrap();
    }
    let toml = "listen = [\"mqtts://127.0.0.1:0\"]
tls_cert = \"cert.pem\"
tls_key = \"key.pem\"
tls_client_ca = \"ca.pem\"
certificate_users = \"owners.toml\"
rules = \"rules.toml\"
token_keys = \"keys.jwks\"
token_audience = [\"a\"]
";
    let names = [
        "key.pem",
        "ca.pem",
        "owners.toml",
        "rules.toml",
        "keys.jwks",
    ];
    let check = |mode| {
        names.iter().for_each(|name| allow(&place(name), mode));
        check(directory.path(), toml).code(0)
    };
    let ran = check(0o600);
    assert!(!ran.stderr.contains("other accounts"), "{ran:#?}");
    ran.says("key 2 is not supported (kty EC, crv P-384)");
    let ran = check(0o666);
    for name in &names[1..] {
        let says = format!("{name} can be written by other accounts (mode 666)");
        assert!(ran.stderr.contains(&says), "{ran:#?}");
    }
    assert!(ran.stderr.contains("key.pem can be read by"), "{ran:#?}");
    fs::remove_file(place("key.pem")).unwrap();
    let made = Command::new("mkfifo").arg(place("key.pem")).status();
    assert!(made.unwrap().success());
    let ran = self::check(directory.path(), toml).code(3);
    ran.says("key.pem: it is a named pipe");
}

/// Regression: a start said that another broker may be running there, or only named the second
/// address.
#[test]
fn addresses_that_overlap_are_named() {
    let directory = tempfile::tempdir().unwrap();
    let free = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = free.local_addr().unwrap().port();
    drop(free);
    let (all, one) = (format!("0.0.0.0:{port}"), format!("127.0.0.1:{port}"));
    for (first, option) in [(&all, "listen"), (&one, "metrics"), (&one, "admin")] {
        let second = format!("--{option}");
        let serve = ["serve", "--insecure", "--listen", first, &second, &one];
        let says = format!("{option} {one} and listen {first} are the same address");
        for more in [&["--check"][..], &[]] {
            let serve = [&serve[..], more].concat();
            run_in(directory.path(), &serve).fails(3, &says);
        }
    }
}

/// The socket that the documentation names, in the directory that the unit creates.
#[test]
fn missing_directory_of_the_unit_is_no_problem() {
    let directory = tempfile::tempdir().unwrap();
    let check = |place: &str| check(directory.path(), &format!("admin = \"unix:{place}\"\n"));
    check("/run/statehouse-of-a-stopped-unit/admin")
        .code(0)
        .says("as expected while the unit is stopped");
    check("/missing/directory/admin").fails(3, "create it");
}

#[test]
fn check_beside_a_running_store_changes_nothing() {
    let mut server = Server::start();
    server.store("a").set("key", "value");
    let data = server.data_directory();
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap().to_string();
    let arguments = ["serve", "--check", "--data", data.to_str().unwrap()];
    let arguments = [&arguments[..], &["--listen", &address]].concat();
    run(&arguments, b"")
        .code(0)
        .says("the data directory")
        .says("is in use by another process")
        .says(&format!("{address} is in use"));
    let ready = run(&["ready", "--data", data.to_str().unwrap()], b"").code(0);
    assert_eq!(ready.text(), "ready\n");

    // A policy of the data directory, whose module is damaged while the store is stopped.
    let marked = policies::marked("check");
    let place = ["--data", data.to_str().unwrap()];
    let load = ["policy", "load", marked.to_str().unwrap(), "--promote"];
    run(&[&load[..], &place].concat(), b"").code(0);
    server.stop();
    let before = contents(&data);
    run(&arguments, b"").code(0);
    assert_eq!(contents(&data), before);
    let modules = fs::read_dir(data.join("policies")).unwrap();
    for module in modules {
        fs::write(module.unwrap().path(), "damaged").unwrap();
    }
    run(&arguments, b"").fails(2, "was the active policy");
    run(&["ready", "--data", data.to_str().unwrap()], b"").code(3);
}

#[test]
fn full_disk_is_found_without_a_change() {
    let Some(small) = Small::mount(FileSystem::Tmpfs, 1) else {
        return;
    };
    let mut filler = fs::File::create(small.path().join("filler")).unwrap();
    filler.write_all(&vec![1; 1000 << 10]).unwrap();
    let data = small.path().join("data");
    let serve = ["serve", "--listen", "127.0.0.1:0", "--data"];
    let serve = [&serve[..], &[data.to_str().unwrap()]].concat();
    let check = [&serve[..], &["--check"]].concat();
    run(&check, b"").fails(75, "No space left on device");
    assert!(!data.exists());
    run(&serve, b"").fails(75, "No space left on device");

    filler.set_len(0).unwrap();
    fs::remove_dir_all(&data).unwrap();
    run(&check, b"").code(0);
}

#[test]
fn policies_that_cannot_be_saved_are_found() {
    let directory = tempfile::tempdir().unwrap();
    let data = directory.path().join("data");
    fs::create_dir(&data).unwrap();
    fs::write(data.join("policies"), "a file").unwrap();
    let before = contents(&data);
    let serve = ["serve", "--listen", "127.0.0.1:0", "--data", "data"];
    let check = [&serve[..], &["--check"]].concat();
    let cannot = "cannot save the policy's module";
    run_in(directory.path(), &check).fails(2, cannot);
    assert_eq!(contents(&data), before);
    run_in(directory.path(), &serve).fails(2, cannot);
}

/// A gateway without a clock battery starts in the past, until it reaches a time server. The
/// service manager must then start the store again.
#[test]
fn clock_behind_the_log_has_an_exit_code_of_its_own() {
    let clock = WallClock::right();
    clock.set(3600);
    let mut serve = Command::new(binary::statehouse());
    serve.args(["serve", "--listen", "127.0.0.1:0"]);
    serve.envs(clock.environment());
    let mut server = Server::spawn(serve, tempfile::tempdir().unwrap());
    server.stop();
    clock.set(0);
    server.start_again(&[]);
    assert_eq!(server.wait(PATIENCE).code(), Some(75));
    server.wait_for_log("--accept-clock");
    run_in(server.directory(), &["serve", "--check"]).fails(75, "--accept-clock");
}

/// Regression: files that a start only reads were refused, and a start named the file at which it
/// failed first instead of the directory.
#[test]
fn rights_are_judged_as_by_a_start() {
    let directory = tempfile::tempdir().unwrap();
    let mut serve = Command::new(binary::statehouse());
    serve.args(["serve", "--listen", "127.0.0.1:0"]);
    let Some(serve) = as_other(serve) else { return };
    chown(directory.path(), Some(OTHER), Some(OTHER)).unwrap();
    let mut server = Server::spawn(serve, directory);
    server.stop();
    let run = |server: &Server, more: &[&str]| {
        let mut serve = command(&["serve", "--listen", "127.0.0.1:0"]);
        serve.args(more).current_dir(server.directory());
        finish(as_other(serve).unwrap(), b"")
    };
    let refused = |server: &Server, says: &str| {
        for more in [&["--check"][..], &[]] {
            run(server, more).fails(2, says);
        }
    };
    let place = server.data_directory();
    allow(&place, 0o500);
    refused(
        &server,
        "cannot write to statehouse-data: Permission denied",
    );
    allow(&place, 0o700);
    let allow_logs = |mode| {
        let logs = of_kind(&place, "log");
        logs.iter().for_each(|it| allow(it, mode));
    };
    allow_logs(0o400);
    allow(&place.join("closed"), 0o400);
    run(&server, &["--check"])
        .code(0)
        .says("may not write to a segment");
    server.restart();
    server.stop();
    allow_logs(0o600);
    allow(&place.join("newest"), 0o400);
    refused(&server, "cannot read and write statehouse-data/newest");
}
