use std::fs;

use tempfile::TempDir;

use super::*;

/// Flags that name a file with this text, and the directory of the file.
fn flags_with(text: &str) -> (TempDir, Flags) {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("statehouse.toml");
    fs::write(&path, text).unwrap();
    let flags = Flags {
        config: Some(path),
        ..Flags::default()
    };
    (directory, flags)
}

fn file(text: &str) -> Result<Config, ConfigError> {
    let (_directory, flags) = flags_with(text);
    Config::load(flags)
}

/// Checks that a file with this text is refused, by an error with these parts.
#[track_caller]
fn assert_refused(text: &str, says: &[&str]) {
    let Err(error) = file(text) else {
        panic!("{text}: accepted");
    };
    let error = error.to_string();
    for part in says {
        assert!(error.contains(part), "{text}: {error}");
    }
}

#[test]
fn nothing_given_is_a_loopback_store() {
    let config = Config::load(Flags::default()).unwrap();
    let TransportChoice::Embedded(listen) = config.transport else {
        panic!("no broker was configured");
    };
    assert_eq!(listen.listeners, [Listen::default()]);
    assert_eq!(listen.tls, None);
    assert_eq!((config.node.as_str(), config.dialect), ("StateStore", None));
    assert_eq!(config.bounds.quota.keys_max, limits::KEYS_MAX_DEFAULT);
}

#[test]
fn an_admin_api_over_tls_needs_users() {
    let tls = "tls_cert = \"c\"\ntls_key = \"k\"\nadmin = \"https://0.0.0.0:8443\"\n";
    assert_refused(tls, &["--users FILE"]);
    let config = file(&format!("{tls}users = \"u\"\n")).unwrap();
    let remote = config.admin_tls.unwrap();
    assert_eq!(remote.address, ([0, 0, 0, 0], 8443).into());
    assert_eq!(remote.files.certificate, PathBuf::from("c"));
    assert_eq!(config.admin, AdminAddress::default().local);
}

#[test]
fn users_behind_a_foreign_broker_are_operators() {
    let users = "broker = \"mqtt://b\"\nusers = \"u\"\ntls_cert = \"c\"\ntls_key = \"k\"\n";
    assert_refused(users, &["add --admin https://"]);
    let admin = format!("{users}admin = \"https://0.0.0.0:8443\"\n");
    let config = file(&admin).unwrap();
    assert!(config.admin_tls.is_some() && !config.access.authenticates());
    assert!(file(&format!("{admin}allow_anonymous = true\n")).is_err());
}

#[test]
fn flags_win_over_the_file() {
    let text = "max_keys = 5\nmax_bytes = \"7kB\"\nnode = \"gateway-7\"\n";
    let (_directory, mut flags) = flags_with(text);
    flags.limits.max_keys = NonZeroU64::new(9);
    let config = Config::load(flags).unwrap();
    let quota = &config.bounds.quota;
    assert_eq!((quota.keys_max, quota.bytes_max), (9, 7000));
    assert_eq!(config.node, "gateway-7");
}

/// Regression: the documents and an error text name 0, which was refused.
#[test]
fn zero_is_a_duration_without_a_unit() {
    for text in ["history_retention = 0\n", "history_retention = \"0\"\n"] {
        assert_eq!(file(text).unwrap().storage.history_ms, 0, "{text}");
    }
    let (_directory, mut flags) = flags_with("");
    flags.storage.history_retention = Some("0".parse().unwrap());
    assert_eq!(Config::load(flags).unwrap().storage.history_ms, 0);
    assert_refused("sync_interval = 0\n", &["sync_interval"]);
    assert!("1".parse::<Span>().is_err());
}

#[test]
fn errors_of_flags_name_the_range() {
    let command = <Flags as clap::Args>::augment_args(clap::Command::new("serve"));
    for (flag, value, expected) in [
        ("--max-client-in-flight", "0", "from 1 to 65535"),
        ("--max-client-in-flight", "70000", "from 1 to 65535"),
        ("--max-client-rate", "0", "leave it out for no limit"),
        (
            "--max-sessions",
            "0",
            "a whole number from 1 to 18446744073709551615",
        ),
        (
            "--max-client-keys",
            "many",
            "a whole number from 1 to 18446744073709551615",
        ),
        ("--purity-sample", "5000000000", "from 0 to 4294967295"),
    ] {
        let matches = command.clone().try_get_matches_from(["serve", flag, value]);
        let error = matches.unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
    }
}

#[test]
fn errors_name_the_line() {
    for (text, line, expected) in [
        (
            "max_keys = 5\nmaxbytes = 7\n",
            2,
            "unknown setting `maxbytes`: did you mean `max_bytes`?",
        ),
        ("whatever = 7\n", 1, "names of the flags"),
        ("max_memory = 7\n", 1, "names of the flags"),
        (
            "\n\nmax_keys = 0\n",
            3,
            "a whole number from 1 to 18446744073709551615",
        ),
        (
            "max_duplicates = -1\n",
            1,
            "a whole number from 1 to 18446744073709551615",
        ),
        ("max_client_in_flight = 70000\n", 1, "from 1 to 65535"),
        ("max_rate = 0\n", 1, "leave it out for no limit"),
        ("guard_failures = 5000000000\n", 1, "from 0 to 4294967295"),
        ("max_bytes = 0\n", 1, "at least 1 byte"),
        ("max_bytes = \"512 apples\"\n", 1, "such as 4194304, 512MB"),
        (
            "max_keys = 5\nlisten = [\"here\"]\n",
            2,
            "is not an address and port",
        ),
        ("dialect = \"redis\"\n", 1, "unknown variant `redis`"),
        ("max_packet_bytes = 12\n", 1, "at least 1024"),
        ("node = \"a:b\"\n", 1, "no `:`"),
        ("node = \"a\\u0007\"\n", 1, "no control characters"),
        ("node = \"a\\uFDD0\"\n", 1, "no Unicode noncharacters"),
        ("node = \"a\\U0010FFFF\"\n", 1, "no Unicode noncharacters"),
        ("max_key_bytes = 1000000\n", 1, "a key has 1 to 65535 bytes"),
    ] {
        let error = file(text).unwrap_err().to_string();
        assert_eq!(error, error.trim_end(), "something may follow it");
        assert!(
            error.contains(&format!("line {line},")) && error.contains(expected),
            "{error}"
        );
    }
}

/// Regression: the log and standard error got the whole line.
#[test]
fn errors_show_no_secret_of_the_file() {
    for (text, named) in [
        ("broker = \"mqtt://u:SECRET%@h\"\n", "in `broker`"),
        ("broker = \"mqtt://u:SECRET@h:1x\"\n", "in `broker`"),
        ("broker = \"mqtt://u:SECRET@h\n", "line 1,"),
        ("broker = [\"mqtt://u:SECRET@h\"]\n", "in `broker`"),
        ("broker = \"mqtt://u:SECRET@h\" max_keys = 1\n", "line 1,"),
        ("max_keys = 0 # SECRET\n", "in `max_keys`"),
        ("max_keys = \"mqtt://u:SECRET@h\"\n", "in `max_keys`"),
        ("listen = [\"mqtt://u:SECRET@h\"]\n", "in `listen`"),
        ("dialect = \"mqtt://u:SECRET@h\"\n", "mqtt://***@h"),
        ("broker_passwd = \"SECRET\"\n", "`broker_passwd`"),
        ("\"SECRET = 1\n", "line 1,"),
        ("traces = \"http://u:SECRET@h\"\n", "in `traces`"),
    ] {
        let error = file(text).unwrap_err().to_string();
        assert!(!error.contains("SECRET"), "{error}");
        assert!(error.contains(named), "{text}: {error}");
        assert_eq!(error.lines().count(), 1, "{error}");
    }
    for (text, shown) in [
        ("mqtt://u:p@ss@h:1", "mqtt://***@h:1"),
        ("mqtt://h", "mqtt://h"),
        ("u@h", "u@h"),
        ("me@h, not mqtt://h", "me@h, not mqtt://h"),
    ] {
        assert_eq!(ConfigError::without_login(text), shown);
    }
}

/// Regression: an empty list counted as not set, so that every policy or issuer was accepted.
#[test]
fn an_empty_list_that_would_allow_everything_is_refused() {
    let tokens = "token_keys = \"k\"\ntoken_audience = [\"a\"]\n";
    for setting in ["trusted_keys", "token_issuer"] {
        for list in ["[]", "[ # none\n]", "[\"\"]"] {
            let text = format!("{tokens}{setting} = {list}\n");
            assert_refused(&text, &["line 3,", "remove the line"]);
        }
        assert!(file(&format!("{tokens}{setting} = [\"x\"]\n")).is_ok());
    }
    // The same as without the line: no list of revoked certificates, pages of the same host.
    assert!(file("tls_client_crl = []\nws_origin = []\n").is_ok());
}

/// Regression: a check accepted an empty `data`, and a start failed at an empty `users`.
#[test]
fn empty_paths_are_refused() {
    for setting in ["data", "users", "policy", "broker_ca", "traces_ca"] {
        let text = format!("max_keys = 5\n{setting} = \"\"\n");
        assert_refused(&text, &["line 2,", "the path is empty"]);
    }
    let lists = "tls_client_crl = [\"a\", \"\"]\n";
    assert_refused(lists, &["the path is empty"]);
}

#[test]
fn only_loopback_without_authentication() {
    let open = "listen = [\"127.0.0.1:0\", \"0.0.0.0:1883\"]\n";
    assert_refused(open, &["0.0.0.0:1883", "--insecure"]);
    assert!(file("listen = [\"0.0.0.0:1883\"]\ninsecure = true\n").is_ok());
    assert!(file("listen = [\"[::1]:1883\", \"127.9.9.9:1\"]\n").is_ok());
}

#[test]
fn a_value_must_fit_into_a_packet() {
    let config = file("max_packet_bytes = 100000\n").unwrap();
    let most = 100_000 - limits::KEY_BYTES_MAX_DEFAULT;
    assert_eq!(config.bounds.quota.value_bytes_max, most);
    let config = file("max_queue_bytes = 500000\n").unwrap();
    assert!(config.bounds.quota.value_bytes_max < 500_000);
    let short = "max_queue_bytes = 500000\nmax_value_bytes = 499999\n";
    assert_refused(short, &["raise max_queue_bytes"]);
    // The foreign broker has the queues.
    assert!(file("broker = \"mqtt://b\"\nmax_total_queue_bytes = 1\n").is_ok());
    assert_refused("max_value_bytes = 5000000\n", &["raise max_packet_bytes"]);
}

/// Regression: the default of `max_value_bytes` became 0, and every SET was refused.
#[test]
fn limits_without_room_for_values_are_refused_with_the_least() {
    for (name, bytes, rest) in [
        ("max_queue_bytes", 20_000, ""),
        ("max_queue_bytes", 100, ""),
        ("max_total_queue_bytes", 20_000, ""),
        ("max_packet_bytes", 20_000, "max_key_bytes = 19990\n"),
        ("max_packet_bytes", 2_000, "max_key_bytes = 65535\n"),
    ] {
        let text = |bytes: u64| format!("{name} = {bytes}\n{rest}");
        let error = file(&text(bytes)).unwrap_err();
        let ConfigError::NoRoomForValues { least, .. } = error else {
            panic!("{name}: {error}");
        };
        let advice = format!("raise {name} to at least {least}");
        assert_refused(&text(bytes), &[&advice]);
        let quota = file(&text(least)).unwrap().bounds.quota;
        assert_eq!(quota.value_bytes_max, limits::VALUE_BYTES_DERIVED_MIN);
        assert!(file(&text(least - 1)).is_err(), "{name}");
    }
    let smallest = file("max_packet_bytes = 1024\n").unwrap().bounds.quota;
    assert_eq!(smallest.key_bytes_max, 512);
    assert_eq!(smallest.value_bytes_max, 512);
}

/// Regression: a value within its limit disconnected each client that asked for it.
#[test]
fn an_answer_must_fit_into_the_queues_of_all_clients() {
    let bounds = file("max_total_queue_bytes = 400000\n").unwrap().bounds;
    assert_eq!(bounds.broker.queue_bytes_max, 400_000);
    let most = 400_000 - limits::ENVELOPE_BYTES;
    let longest = most - limits::KEY_BYTES_MAX_DEFAULT;
    assert_eq!(bounds.quota.value_bytes_max, longest);
    let text = |value: u64| format!("max_total_queue_bytes = 400000\nmax_value_bytes = {value}\n");
    assert!(file(&text(most)).is_ok());
    for queue in ["", "max_queue_bytes = 500000\n"] {
        let least = "raise max_total_queue_bytes to at least 400001";
        assert_refused(&(text(most + 1) + queue), &[least]);
    }
}

#[test]
fn a_clock_can_be_accepted_in_the_file() {
    assert!(file("accept_clock = true\n").unwrap().storage.accept_clock);
    assert!(!file("accept_clock = false\n").unwrap().storage.accept_clock);
    assert!(!file("").unwrap().storage.accept_clock);
}

/// An earlier run may have announced up to the default, whichever value the file has now. The log
/// records larger values.
#[test]
fn remembered_requests_cover_the_announced_receive_maximum() {
    for (most, remembered) in [(10, 1024), (1024, 1024), (3000, 3000)] {
        let config = file(&format!("max_client_in_flight = {most}\n")).unwrap();
        assert_eq!(config.bounds.broker.receive_max, most);
        assert_eq!(config.storage.duplicates.per_session, remembered);
    }
}

#[test]
fn a_store_behind_a_broker_does_not_listen() {
    let config = file(
        "broker = \"mqtt://me@gateway:1884\"\nbroker_window = 8\nbroker_keep_alive = \"5s\"\nwatch_ttl = \"1h\"\nmax_queue_bytes = 1\n",
    );
    let config = config.unwrap();
    // Behind a foreign broker, only time and space limit how long a request is remembered.
    assert_eq!(config.storage.duplicates.per_session, 0);
    let TransportChoice::Foreign(foreign) = config.transport else {
        panic!("a broker is named");
    };
    assert_eq!(foreign.broker.to_string(), "mqtt://gateway:1884");
    assert_eq!(foreign.user.as_deref(), Some("me"));
    assert_eq!((foreign.window, foreign.keep_alive.as_secs()), (8, 5));
    assert_eq!(foreign.watch_ttl.map(|ttl| ttl.as_secs()), Some(3600));
    assert_eq!(foreign.presence, PresenceKind::Auto);
}

#[test]
fn contradictory_broker_settings_are_refused() {
    let broker = "broker = \"mqtt://gateway\"\n";
    for (text, expected) in [
        ("listen = [\"127.0.0.1:0\"]\n", "not both"),
        ("max_rate = 5\n", "remove max_rate"),
        ("max_client_rate = 5\n", "remove max_client_rate"),
        ("insecure = true\n", "remove insecure"),
        ("standby = true\ndurability = \"memory\"\n", "standby"),
        ("broker_cert = \"a\"\n", "both or none"),
        ("broker_ca = \"a\"\n", "mqtts://"),
        ("broker_password_file = \"/none/such\"\n", "/none/such"),
        ("broker_keep_alive = \"4s\"\n", "at least 5s"),
        ("watch_ttl = \"9s\"\n", "at least 10s"),
        ("broker_window = 0\n", "1 to 4096"),
        ("broker_client_id = \"a\\nb\"\n", "control"),
        ("presence = \"emqx\"\n", "unknown variant `emqx`"),
        ("kick = \"dynsec\"\n", "unknown setting `kick`"),
    ] {
        assert_refused(&format!("{broker}{text}"), &[expected]);
    }
    assert!(file(&format!("{broker}insecure = false\nmax_sessions = 5\n")).is_ok());
    for text in [
        "standby = true\n",
        "presence = \"off\"\n",
        "broker_window = 3\n",
    ] {
        assert_refused(text, &["--broker URL"]);
    }
}

#[test]
fn defaults_fit_the_memory_of_a_small_gateway() {
    let bounds = |flags: LimitFlags| {
        let memory = Memory::of(256 << 20);
        flags.load(false, Supervision::default(), memory).unwrap()
    };
    let Bounds { quota, broker, .. } = bounds(LimitFlags::default());
    assert_eq!(quota.bytes_max, 96 << 20);
    assert_eq!(quota.watch_bytes_max, 16 << 20);
    assert_eq!(quota.recent_bytes_max, 4 << 20);
    assert_eq!(broker.queue_bytes_total_max, 32 << 20);
    assert_eq!(broker.packet_bytes_total_max, 16 << 20);
    assert_eq!(broker.subscription_bytes_total_max, 16 << 20);
    assert_eq!(broker.state_bytes_total_max, 8 << 20);
    assert_eq!(broker.sessions_max, 2048);
    assert_eq!(broker.connections_max, 4096);
    // One client leaves room for other clients.
    assert_eq!(quota.watch_bytes_per_connection_max(), 2 << 20);
    assert_eq!(broker.queue_bytes_max, 4 << 20);
    assert_eq!(broker.retained_bytes_max, 2 << 20);
    assert_eq!(broker.subscription_bytes_per_session_max, 2 << 20);
    let set = bounds(LimitFlags {
        max_bytes: NonZeroU64::new(1 << 30),
        ..LimitFlags::default()
    });
    assert_eq!(set.quota.bytes_max, 1 << 30, "a setting overrides it");
}

#[test]
fn a_queue_holds_the_longest_value_on_a_small_machine() {
    let bounds = |flags: LimitFlags| {
        let memory = Memory::of(16 << 20);
        flags.load(false, Supervision::default(), memory).unwrap()
    };
    let Bounds { quota, broker, .. } = bounds(LimitFlags::default());
    assert_eq!(quota.value_bytes_max, limits::VALUE_BYTES_MAX_DEFAULT);
    assert!(broker.queue_bytes_max > broker.packet_bytes_max);
    let long = NonZeroU64::new(4 << 20);
    let set = bounds(LimitFlags {
        max_packet_bytes: Some(PacketBytes(8 << 20)),
        max_value_bytes: long,
        ..LimitFlags::default()
    });
    assert_eq!(NonZeroU64::new(set.quota.value_bytes_max), long);
}

#[test]
fn a_large_machine_gets_the_largest_defaults() {
    let memory = Memory::of(8 << 30);
    let bounds = LimitFlags::default().load(false, Supervision::default(), memory);
    let Bounds { quota, broker, .. } = bounds.unwrap();
    assert_eq!(broker, statehouse_mqtt::Limits::default());
    assert_eq!(quota, statehouse_core::store::Quota::default());
}

#[cfg(feature = "cluster")]
#[test]
fn shipped_settings_of_a_cluster_are_valid() {
    let config = file(include_str!("../../dist/cluster/statehouse.toml")).unwrap();
    let cluster = config.cluster.unwrap();
    assert_eq!((cluster.host.as_str(), cluster.etcd.urls.len()), ("gw1", 3));
    assert_eq!(cluster.quota_bytes, 4 << 30);
}

#[cfg(feature = "cluster")]
#[test]
fn settings_that_a_cluster_decides_are_refused() {
    let cluster = "cluster = [\"http://e:2379\"]\nname = \"a\"\ncluster_listen = \"127.0.0.1:1\"\n";
    assert!(file(cluster).is_ok());
    for (setting, expected) in [
        ("durability = \"always\"", "durability"),
        ("policy = \"rule.wasm\"", "policy load"),
        ("broker = \"mqtt://b\"", "hosts of the cluster"),
    ] {
        assert_refused(&format!("{cluster}{setting}\n"), &[expected]);
    }
}

#[cfg(not(feature = "cluster"))]
#[test]
fn settings_of_a_cluster_are_refused_by_a_build_without() {
    for setting in ["cluster = [\"http://e:2379\"]", "name = \"gw1\""] {
        let text = format!("listen = [\"127.0.0.1:1\"]\n{setting}\n");
        assert_refused(&text, &["this build has no cluster", "line 2"]);
    }
}

#[test]
fn a_check_finds_every_wrong_setting_and_a_start_the_first() {
    let text = "max_kyes = 5\nlisten = [\n  \"nowhere\",\n]\nnode = \"a:b\"\nmax_keys = 7\n\
                sync_interval = \"2h\"\nduplicate_window = \"1s\"\ntraces_sample = 0.5\n";
    let (_directory, flags) = flags_with(text);
    let (config, wrong) = check(flags.clone());
    let wrong: Vec<String> = wrong.iter().map(ToString::to_string).collect();
    for named in [
        "did you mean `max_keys`",
        "line 3",
        "line 5",
        "sync_interval is at least",
        "duplicate_window is at least",
        "traces_sample requires",
    ] {
        let found = wrong.iter().filter(|it| it.contains(named)).count();
        assert_eq!(found, 1, "{named}: {wrong:#?}");
    }
    assert_eq!(wrong.len(), 6, "{wrong:#?}");
    // The other settings count for the rest of the check.
    assert_eq!(config.bounds.quota.keys_max, 7);
    assert_eq!(Config::load(flags).unwrap_err().to_string(), wrong[0]);
}

/// The rest of a table without its header would be other settings, or no TOML.
#[test]
fn a_check_reports_each_wrong_entry_once() {
    let wrong = |text: &str| {
        let (_directory, flags) = flags_with(text);
        let (config, wrong) = check(flags);
        let wrong: Vec<String> = wrong.iter().map(ToString::to_string).collect();
        (config.bounds.quota.keys_max, wrong)
    };
    for (text, lines) in [
        ("[limits]\nmax_keys = 5\n", &[1][..]),
        ("[limits]\nmax_keys = 5\n[other]\nx = 1\n", &[1, 3]),
        ("[[limits]]\nmax_keys = 5\n[[limits]]\nmax_keys = 6\n", &[1]),
        ("[limits.keys]\nmax_keys = 5\nmax = [\n  [1],\n]\n", &[1]),
        ("limits.max_keys = 5\nnode = \"a:b\"\n", &[1, 2]),
        ("max_keys = 0\n[limits]\nnode = \"a:b\"\n", &[1, 2]),
        ("[max_keys]\nnode = \"a:b\"\n", &[1]),
        ("max_keys = 5\nthis is no TOML\n", &[2]),
    ] {
        let (keys_max, wrong) = wrong(text);
        assert_eq!(wrong.len(), lines.len(), "{text}: {wrong:#?}");
        for line in lines {
            let named = format!("line {line},");
            assert!(wrong.iter().any(|it| it.contains(&named)), "{wrong:#?}");
        }
        assert_eq!(keys_max, limits::KEYS_MAX_DEFAULT, "{text}");
    }
    // What precedes the table counts for the rest of the check.
    let (keys_max, wrong) = wrong("max_keys = 7\n[limits]\nmax_keys = 5\n");
    assert_eq!((keys_max, wrong.len()), (7, 1), "{wrong:#?}");
}
