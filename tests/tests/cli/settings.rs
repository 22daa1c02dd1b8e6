//! Tests settings. Flags must override the environment, which must override the file. A wrong
//! setting must be refused with a message that names it.

use std::{fs, path::Path};

use statehouse_tests::{Ran, Server, command, run, run_in};

/// Runs a store with this settings file, which it must refuse.
fn serve_with(directory: &Path, file: &str) -> Ran {
    let serve = ["serve", "--listen", "127.0.0.1:0", "--config", file];
    run_in(directory, &serve).fails(2, file)
}

fn node(server: &Server) -> String {
    let answer = server.store("client").ask(&["SET", "key", "value"]);
    answer.version().unwrap().node
}

#[test]
fn flags_override_the_environment_and_the_file() {
    let directory = || tempfile::tempdir().unwrap();
    for (file, environment, flag, expected) in [
        (None, None, None, "StateStore"),
        (Some("file"), None, None, "file"),
        (Some("file"), Some("environment"), None, "environment"),
        (Some("file"), Some("environment"), Some("flag"), "flag"),
        (None, Some("environment"), Some("flag"), "flag"),
        (Some("file"), None, Some("flag"), "flag"),
    ] {
        let directory = directory();
        let mut serve = command(&["serve", "--listen", "127.0.0.1:0"]);
        if let Some(file) = file {
            let path = directory.path().join("settings.toml");
            fs::write(&path, format!("# a comment\nnode = \"{file}\"\n")).unwrap();
            // The environment can name the file too.
            match environment {
                Some(_) => serve.env("STATEHOUSE_CONFIG", path),
                None => serve.arg("--config").arg(path),
            };
        }
        if let Some(environment) = environment {
            serve.env("STATEHOUSE_NODE", environment);
        }
        if let Some(flag) = flag {
            serve.args(["--node", flag]);
        }
        let server = Server::spawn(serve, directory);
        assert_eq!(node(&server), expected);
    }
}

#[test]
fn variable_turns_off_a_switch_of_the_file() {
    let check = |variable: Option<&str>, flags: &[&str]| {
        let directory = tempfile::tempdir().unwrap();
        let settings = "listen = [\"0.0.0.0:0\"]\ninsecure = true\n";
        fs::write(directory.path().join("settings.toml"), settings).unwrap();
        let mut serve = command(&["serve", "--check", "--config", "settings.toml"]);
        serve.args(flags).current_dir(directory.path());
        if let Some(variable) = variable {
            serve.env("STATEHOUSE_INSECURE", variable);
        }
        serve.output().unwrap().status.code()
    };
    assert_eq!(check(None, &[]), Some(0));
    assert_eq!(check(Some("true"), &[]), Some(0));
    assert_eq!(check(Some("false"), &[]), Some(2));
    assert_eq!(check(Some("off"), &[]), Some(2));
    assert_eq!(check(Some("false"), &["--insecure"]), Some(0));
}

#[test]
fn file_may_contain_every_setting() {
    let directory = tempfile::tempdir().unwrap();
    let data = directory.path().join("elsewhere");
    let server = Server::with_config(&format!(
        r#"
data = {data:?}
durability = "interval"
sync_interval = "2s"
commit_delay = "1ms"
history_retention = "1h"
history_bytes = 1000000
duplicate_window = "2m"
max_duplicates = 1000
max_duplicate_bytes = 1000000
accept_clock = true
policy = "builtin"
listen = ["127.0.0.1:0"]
dialect = "auto"
node = "Node"
log = "text"
log_filter = "warn"
insecure = false
max_keys = 10
max_bytes = 100000
max_client_keys = 5
max_client_bytes = 50000
max_key_bytes = 1000
max_value_bytes = 10000
max_watches = 1000
max_client_watches = 100
max_fuel = 1000000
max_packet_bytes = 65536
max_queue_bytes = 1000000
max_total_queue_bytes = 10000000
max_connections = 100
max_sessions = 100
max_client_subscriptions = 10
max_client_in_flight = 100
max_client_rate = 1000
max_rate = 10000
threads = 2
traces = "http://127.0.0.1:9"
traces_sample = 0.5
"#,
    ));
    assert_eq!(node(&server), "Node");
    assert!(data.join("policies").is_dir());
}

/// Every setting that is a number of bytes, a value, and the same in bytes.
const SIZES: [(&str, &str, u64); 9] = [
    ("history_bytes", "16MB", 16_000_000),
    ("max_duplicate_bytes", "8m", 8 << 20),
    ("max_bytes", "512MB", 512_000_000),
    ("max_client_bytes", "256 MiB", 256 << 20),
    ("max_key_bytes", "2kB", 2_000),
    ("max_value_bytes", "64KiB", 64 << 10),
    ("max_packet_bytes", "1mb", 1_000_000),
    ("max_queue_bytes", "12MB", 12_000_000),
    ("max_total_queue_bytes", "1GB", 1_000_000_000),
];

#[test]
fn sizes_take_units_in_flags_variables_and_the_file() {
    let help = run(&["serve", "--help"], b"").code(0).text();
    let sizes = help
        .lines()
        .filter_map(|line| line.trim().strip_suffix(" <BYTES>"));
    let sizes: Vec<String> = sizes
        .map(|it| it.trim_start_matches("--").replace('-', "_"))
        .filter(|it| it != "cluster_quota")
        .collect();
    assert_eq!(sizes, SIZES.map(|it| it.0));

    let flag = |name: &str| format!("--{}", name.replace('_', "-"));
    let variable = |name: &str| format!("STATEHOUSE_{}", name.to_uppercase());
    for way in ["flag", "variable", "file"] {
        let directory = tempfile::tempdir().unwrap();
        let mut serve = command(&["serve", "--listen", "127.0.0.1:0"]);
        let mut file = String::new();
        for (name, value, _) in SIZES {
            match way {
                "flag" => _ = serve.args([&flag(name), value]),
                "variable" => _ = serve.env(variable(name), value),
                _ => file.push_str(&format!("{name} = \"{value}\"\n")),
            }
        }
        fs::write(directory.path().join("sizes.toml"), file).unwrap();
        serve.args(["--config", "sizes.toml"]);
        let server = Server::spawn(serve, directory);
        for (name, value, bytes) in &SIZES[2..] {
            let limit = server.metric(&format!("limit{{setting=\"{name}\"}}"));
            assert_eq!(limit, *bytes, "{way} {name} {value}");
        }
    }
    for (name, ..) in SIZES {
        let directory = tempfile::tempdir().unwrap();
        let wrong = format!("{name} = \"512 apples\"\n");
        fs::write(directory.path().join("wrong.toml"), wrong).unwrap();
        let mut by_variable = command(&["serve", "--check"]);
        by_variable.env(variable(name), "512 apples");
        let check = |setting: [&str; 2]| {
            let check = [&["serve", "--check"], &setting[..]].concat();
            run_in(directory.path(), &check)
        };
        for ran in [
            check([&flag(name), "512 apples"]),
            check(["--config", "wrong.toml"]),
            command::finish(by_variable, b""),
        ] {
            let ran = ran.fails(2, "`512 apples` is not a number of bytes");
            ran.says("such as 4194304, 512MB or 4MiB");
        }
    }
}

#[test]
fn invalid_setting_is_refused_with_its_line() {
    let directory = tempfile::tempdir().unwrap();
    for (line, named) in [
        ("max_kyes = 5", "max_kyes"),
        ("max_keys = \"many\"", "max_keys"),
        ("max_keys = 0", "max_keys"),
        ("max_keys = -1", "max_keys"),
        ("max_keys = 1.5", "max_keys"),
        ("dialect = \"klingon\"", "dialect"),
        ("listen = \"127.0.0.1:0\"", "listen"),
        ("listen = [\"nowhere\"]", "nowhere"),
        ("listen = [\"127.0.0.1:99999\"]", "99999"),
        ("node = \"\"", "node"),
        ("node = \"a:b\"", "node"),
        ("insecure = 1", "insecure"),
        ("max_packet_bytes = 1", "max_packet_bytes"),
        ("max_fuel = 1", "max_fuel"),
        ("max_fuel = 40000001", "50000 to 40000000"),
        ("threads = 0", "threads"),
        ("threads = 65", "1 to 64"),
        ("traces = \"grpc://c\"", "http://HOST:PORT"),
        ("traces_sample = 1.5", "from 0 to 1"),
        ("[table]\nmax_keys = 5", "table"),
        ("this is no TOML", "3"),
        ("policy = 5", "policy"),
    ] {
        fs::write(
            directory.path().join("wrong.toml"),
            format!("# one\nlog = \"text\"\n{line}\n"),
        )
        .unwrap();
        let ran = serve_with(directory.path(), "wrong.toml");
        let ran = ran.says(named).says("line 3");
        assert!(ran.stdout.is_empty(), "{ran:?}");
    }
}

#[test]
fn unreadable_settings_file_is_refused() {
    let directory = tempfile::tempdir().unwrap();
    fs::write(directory.path().join("bytes.toml"), b"node = \"\xFF\"").unwrap();
    fs::write(directory.path().join("large.toml"), vec![b'#'; 2 << 20]).unwrap();
    for name in ["missing.toml", ".", "bytes.toml", "large.toml"] {
        serve_with(directory.path(), name);
    }
}

#[test]
fn invalid_flag_or_variable_is_refused() {
    let directory = tempfile::tempdir().unwrap();
    for (flag, value) in [
        ("--listen", "nowhere"),
        ("--max-keys", "many"),
        ("--max-keys", "0"),
        ("--dialect", "klingon"),
        ("--node", "a:b"),
        ("--log", "xml"),
        ("--log-filter", "=="),
    ] {
        run_in(directory.path(), &["serve", flag, value]).fails(2, value);
    }
    let mut serve = command(&["serve", "--listen", "127.0.0.1:0"]);
    serve.env("STATEHOUSE_LOG_FILTER", "");
    serve.current_dir(directory.path());
    command::finish(serve, b"").fails(2, "log filter");
    let mut serve = command(&["serve", "--listen", "127.0.0.1:0"]);
    serve.env("STATEHOUSE_MAX_KEYS", "several");
    command::finish(serve, b"")
        .fails(2, "several")
        .says("the environment variable STATEHOUSE_MAX_KEYS");
    // The variable is valid, and the flag takes precedence.
    let mut serve = command(&["serve", "--max-keys=many"]);
    serve.env("STATEHOUSE_MAX_KEYS", "7");
    let refused = command::finish(serve, b"").code(2);
    assert!(
        !refused.text().contains("STATEHOUSE_MAX_KEYS"),
        "{refused:?}"
    );
}
