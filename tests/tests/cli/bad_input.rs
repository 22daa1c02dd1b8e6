//! Tests bad input for every command of the definition of the command line. Each must say what is
//! wrong on standard error, exit with the documented code, and change nothing.

use std::fs;

use statehouse_tests::{
    Server, assert_contains, command,
    command::{finish, subcommands},
    files::contents,
};

/// Arguments, the exit code, and what the message says.
type Row = (&'static [&'static str], i32, &'static str);

const BAD: [Row; 96] = [
    (&["authz", "check", "none"], 2, "none"),
    (&["authz", "check", "no.wasm"], 2, "line 1"),
    (&["authz", "explain", "a", "FLY", "k"], 2, "FLY"),
    (
        &["authz", "explain", "a", "GET", "k", "--rules", "no.wasm"],
        2,
        "line 1",
    ),
    (&["bench", "--keys", "0"], 2, "--keys"),
    (&["bench", "--value-bytes", "2 apples"], 2, "512MB"),
    (&["call", "FLUSHALL"], 4, "unknown command"),
    (&["clients", "--limit", "x"], 2, "--limit"),
    (&["clients", "kick", "a\nb"], 1, "the id a\\nb is connected"),
    (
        &["cluster", "check", "--cluster", "etcd1"],
        2,
        "`etcd1` is not the address",
    ),
    (
        &[
            "cluster",
            "check",
            "--cluster",
            "http://e",
            "--cluster-quota",
            "0",
        ],
        2,
        "at least 1 byte",
    ),
    (&["cluster", "handover", "gw2"], 1, "not part of a cluster"),
    (
        &["cluster", "init", "--cluster", "etcd1:2379"],
        2,
        "http://etcd1:2379",
    ),
    (
        &["cluster", "remove", "gw2", "--cluster", "http://"],
        2,
        "is not the address",
    ),
    (
        &["cluster", "status", "--cluster", ""],
        2,
        "is not the address",
    ),
    (&["cluster", "upgrade"], 1, "not part of a cluster"),
    (&["completions", "klingon"], 2, "bash"),
    (&["context", "add", "a b"], 2, "1 to 64 letters"),
    (&["context", "list", "x"], 2, "'x'"),
    (&["context", "remove", "none"], 2, "context none"),
    (&["context", "use", "none"], 2, "statehouse context add"),
    (&["del"], 2, "<KEY>"),
    (&["del", "--prefix", ""], 2, "delete every key"),
    (&["doctor", "none"], 2, "no directory none"),
    (&["doctor", "--salvage", "no.wasm", "data"], 2, "--force"),
    (
        &["explain", "--policy", "none", "--", "GET", "k"],
        2,
        "none",
    ),
    (
        &["explain", "--policy", "no.wasm", "--", "GET", "k"],
        1,
        "with \\0asm",
    ),
    (&["export", "--timeout", "soon"], 2, "500ms"),
    (&["get"], 2, "<KEY>"),
    (&["get", "a", "b"], 2, "'b'"),
    (&["get", "none"], 1, "none does not exist"),
    (&["get", "k", "--as-of", "soon"], 2, "2026-11-21T03:00:00Z"),
    (
        &["get", "k", "--meta", "--context", "c", "--data", "d"],
        2,
        "either by a context",
    ),
    (&["get", "k", "--port", "0"], 2, "--port"),
    (&["get", "k", "--port", "x"], 2, "--port"),
    (&["get", "k", "--timeout", "soon"], 2, "500ms"),
    (&["get", "k", "--url", "http://x"], 2, "mqtt://"),
    (&["history", "k", "--data", "none"], 2, "no directory none"),
    (&["import", "lines"], 2, "line 1"),
    (&["import", "none"], 2, "none"),
    (&["lock", "k"], 2, "<COMMAND>"),
    (&["lock", "k", "true"], 2, "true"),
    (&["lock", "free", "--", "./none"], 127, "./none"),
    (&["man", "no.wasm"], 2, "no.wasm"),
    (&["policy", "bench", "no.wasm"], 1, "with \\0asm"),
    (&["policy", "bench", "none"], 2, "none"),
    (&["policy", "build", "project"], 2, "no project of a policy"),
    (&["policy", "canary", "builtin"], 2, "--percent"),
    (
        &["policy", "canary", "none", "--percent", "5"],
        1,
        "standard@",
    ),
    (&["policy", "check", "none"], 2, "none"),
    (&["policy", "dev", "project"], 2, "no project of a policy"),
    (&["policy", "diff"], 1, "statehouse policy shadow"),
    (&["policy", "keygen", "none/k"], 2, "none/k"),
    (&["policy", "keygen", "keys/"], 2, "as in keys/gateway"),
    (&["policy", "keygen", ".."], 2, "as in keys/gateway"),
    (&["policy", "list", "--data", "none"], 3, "statehouse serve"),
    (&["policy", "load", "none"], 2, "none"),
    (&["policy", "load", "no.wasm"], 4, "with \\0asm"),
    (&["policy", "logs", "none"], 1, "standard@"),
    (&["policy", "new", "Not A Name"], 2, "lower-case"),
    (&["policy", "promote", "none"], 1, "standard@"),
    (
        &["policy", "push", "no.wasm", "--key", "none", "--store", "s"],
        2,
        "statehouse policy keygen",
    ),
    (&["policy", "rollback"], 1, "nothing to go back to"),
    (&["policy", "route", "x"], 2, "<WHICH>"),
    (&["policy", "route", "x", "none"], 1, "standard@"),
    (
        &["policy", "shadow", "builtin", "--sample", "200%"],
        2,
        "0.1%",
    ),
    (&["policy", "shadow", "none"], 1, "standard@"),
    (
        &["policy", "sign", "no.wasm", "--key", "lines", "-o", "s"],
        2,
        "no secret Ed25519 key",
    ),
    (&["policy", "test", "builtin", "lines"], 2, "line 1"),
    (&["policy", "test", "no.wasm", "lines"], 1, "with \\0asm"),
    (&["policy", "test", "none", "lines"], 2, "none"),
    (&["policy", "unload", "none"], 1, "standard@"),
    (&["ready", "--data", "none"], 3, "no store runs in none"),
    (&["replay", "--from", "soon"], 2, "a record's number"),
    (&["replay", "--policy", "no.wasm"], 2, "\\0asm"),
    (&["restore", "no.wasm", "--data", "other"], 3, "damaged"),
    (&["scan", "-0", "--json"], 2, "--json"),
    (&["serve", "--max-bytes", "2 apples"], 2, "512MB"),
    (&["set"], 2, "<KEY>"),
    (&["set", "k", "w", "--ttl", "soon"], 2, "500ms"),
    (
        &["set", "k", "w", "--if-version", "soon"],
        2,
        "wall:counter:node",
    ),
    (&["slow", "--data", "none"], 3, "no store runs in none"),
    (&["snapshot", "no.wasm"], 2, "--force"),
    (&["top", "--once", "--list", "locks"], 2, "policies"),
    (&["usage", "--clients", "x"], 2, "--clients"),
    (&["usage", "--context", "none"], 2, "statehouse context add"),
    (
        &["usage", "--admin", "nonsense"],
        2,
        "http://127.0.0.1:8080",
    ),
    (&["user", "add", "a:b", "--users", "new"], 2, "no colon"),
    (&["user", "list", "--users", "new"], 2, "no file new"),
    (&["user", "remove", "a", "--users", "new"], 2, "no file new"),
    (
        &["user", "role", "a", "root", "--users", "new"],
        2,
        "no role",
    ),
    (&["vdel", "k"], 2, "<VALUE>"),
    (&["watch"], 2, "<KEY>"),
    (&["watch", "a?"], 2, "--exact"),
    (&["watch", "a*b"], 2, "--exact"),
    (&["watch", "a**"], 2, "--exact"),
];

#[test]
fn bad_input_of_each_command_is_explained_and_changes_nothing() {
    for (name, _) in subcommands() {
        let has = |(it, ..): &Row| format!("{} ", it.join(" ")).starts_with(&format!("{name} "));
        assert!(BAD.iter().any(has), "no bad input for {name}");
    }
    let server = Server::start();
    let here = server.directory();
    for name in ["no.wasm", "lines"] {
        fs::write(here.join(name), "nonsense").unwrap();
    }
    fs::create_dir(here.join("project")).unwrap();
    server.store("writer").set("k", "v");
    let run = |arguments: &[&str]| {
        let mut command = command(arguments);
        command.current_dir(here);
        command.env("STATEHOUSE_PORT", server.port().to_string());
        command.env("XDG_CONFIG_HOME", here);
        finish(command, b"")
    };
    // The store's directory changes by itself, so its content is compared.
    let state = || {
        let mut files = contents(here);
        files.retain(|path, _| !path.starts_with(server.data_directory()));
        let policies = run(&["policy", "list", "--json"]).code(0).object();
        let loaded = policies["policies"].as_array().unwrap().len();
        let keys = run(&["export"]).code(0).text();
        (files, keys, loaded, policies["assignment"].clone())
    };
    let before = state();
    for (arguments, code, says) in BAD {
        let ran = run(arguments).code(code).says(says);
        assert!(ran.stdout.is_empty(), "{arguments:?} {ran:?}");
        assert!(!ran.stderr.contains("panicked"), "{ran:?}");
    }
    assert_eq!(state(), before);
}

/// Regression: an error for any argument without dashes named a variable that was set.
#[test]
fn errors_name_the_variable_of_a_flag_alone() {
    let error = |arguments: &[&str]| {
        let mut command = command(arguments);
        command.env("STATEHOUSE_DATA", "data");
        command.env("STATEHOUSE_PORT", "none");
        finish(command, b"").code(2).stderr
    };
    let shell = error(&["completions", "foo"]);
    assert!(shell.contains("'foo'"), "{shell}");
    assert!(!shell.contains("environment variable"), "{shell}");
    let port = error(&["get", "k"]);
    assert_contains!(port, "environment variable STATEHOUSE_PORT");
}
