//! Tests `statehouse context` and commands that use a context.

use std::{
    fs,
    os::unix::fs::{PermissionsExt, symlink},
    path::Path,
    thread,
};

use serde_json::json;
use statehouse_tests::{
    Ran, Server, assert_contains, command,
    command::{add_user, finish},
};

/// Runs a command with contexts in this directory.
fn run(home: &Path, arguments: &[&str]) -> Ran {
    run_with(home, arguments, &[])
}

/// Like [`run`], with these variables in the environment.
fn run_with(home: &Path, arguments: &[&str], variables: &[(&str, &str)]) -> Ran {
    let mut command = command(arguments);
    command.env("XDG_CONFIG_HOME", home).current_dir(home);
    command.envs(variables.iter().copied());
    finish(command, b"")
}

#[test]
fn context_names_the_store_of_a_command() {
    let server = Server::start();
    let home = tempfile::tempdir().unwrap();
    let home = home.path();
    let url = format!("mqtt://127.0.0.1:{}", server.port());
    let data = &server.data();
    let add = ["context", "add", "plant7", "--url", &url, "--data", data];
    run(home, &add).code(0);

    run(home, &["set", "k", "v", "--context", "plant7"]).code(0);
    run(home, &["context", "use", "plant7"]).code(0);
    assert_eq!(run(home, &["get", "k"]).code(0).text(), "v");
    let usage = run(home, &["usage", "--json"]).code(0).object();
    assert_eq!(usage["keys"]["used"], json!(1));
    let listed = run(home, &["context", "list"]).code(0).text();
    assert_contains!(listed, "*  plant7", &url);

    let file = home.join("statehouse/contexts.toml");
    assert_eq!(
        fs::metadata(&file).unwrap().permissions().mode() & 0o777,
        0o600
    );
    run(home, &["context", "use", "--none"]).code(0);
    run(home, &["usage"]).fails(3, "no store runs in statehouse-data");
    run(home, &["context", "remove", "plant7"]).code(0);
    run(home, &["get", "k", "--context", "plant7"]).fails(2, "there is none");
}

#[test]
fn flags_take_precedence_over_variables_of_another_store() {
    let server = Server::start();
    let home = tempfile::tempdir().unwrap();
    let home = home.path();
    let (data, port) = (&server.data(), server.port().to_string());
    let url = format!("mqtt://127.0.0.1:{port}");
    let add = ["context", "add", "plant7", "--url", &url, "--data", data];
    run(home, &add).code(0);
    let with =
        |arguments: &[&str], variables: &[(&str, &str)]| run_with(home, arguments, variables);
    let elsewhere = [("STATEHOUSE_DATA", "nowhere"), ("STATEHOUSE_PORT", "1")];
    with(&["set", "k", "v", "--context", "plant7"], &elsewhere).code(0);
    with(&["usage", "--context=plant7"], &elsewhere).code(0);
    with(&["policy", "list", "--context", "plant7"], &elsewhere).code(0);
    let context = [("STATEHOUSE_CONTEXT", "nowhere")];
    with(&["get", "k", "--port", &port], &context).code(0);
    with(&["usage", "--data", data], &context).code(0);
    let both = [("STATEHOUSE_CONTEXT", "plant7"), elsewhere[0], elsewhere[1]];
    with(&["get", "k"], &both).code(0);
    with(&["usage"], &both).code(0);
    // The variable has the address in another form. Regression: it took precedence.
    let far = [("STATEHOUSE_URL", "mqtt://127.0.0.1:1")];
    with(&["get", "k", "--port", &port], &far).code(0);
    with(&["get", "k", "--host=127.0.0.1", "--port", &port], &far).code(0);
    with(&["get", "k"], &far).code(3);
    let far = [("STATEHOUSE_ADMIN_URL", "https://127.0.0.1:1")];
    with(&["usage", "--data", data], &far).code(0);
    with(&["clients", "--json", "--data", data], &far).code(0);
    // The --data of `bench` names the process of the store, and no address.
    let bench = ["bench", "--data", data, "--keys", "5", "--duration"];
    let bench = [&bench[..], &["300ms", "--warm-up", "0s"]].concat();
    with(&bench, &[("STATEHOUSE_CONTEXT", "plant7")]).code(0);
    with(&bench, &context).code(2);
    // The prefix is no flag. Regression: keys were deleted in the store at the default port.
    let (url, alone) = ([("STATEHOUSE_URL", &*url)], tempfile::tempdir().unwrap());
    run_with(alone.path(), &["del", "--prefix", "--host"], &url).code(1);
}

#[test]
fn the_port_variable_of_kubernetes_is_ignored() {
    let server = Server::start();
    let home = tempfile::tempdir().unwrap();
    let url = format!("mqtt://127.0.0.1:{}", server.port());
    let add = ["context", "add", "plant7", "--url", &url];
    let port = server.port().to_string();
    // The selected context names the store, although such a variable is set.
    let get = ["get", "k"];
    for arguments in [
        &add[..],
        &["set", "k", "v", "--port", &port],
        &["context", "use", "plant7"],
        &get,
    ] {
        let of_kubernetes = [("STATEHOUSE_PORT", "tcp://10.96.0.7:1883")];
        run_with(home.path(), arguments, &of_kubernetes).code(0);
    }
    let invalid = [("STATEHOUSE_PORT", "10.96.0.7:1883")];
    run_with(home.path(), &get, &invalid)
        .fails(2, "--port")
        .says("the environment variable STATEHOUSE_PORT");
}

/// Regression: `doctor` and `snapshot` took the data directory of another store.
#[test]
fn commands_that_read_a_data_directory_take_that_of_the_context() {
    let server = Server::start();
    server.store("writer").set("k", "v");
    let home = tempfile::tempdir().unwrap();
    let home = home.path();
    let data = &server.data();
    run(home, &["context", "add", "here", "--data", data]).code(0);
    run(home, &["context", "add", "far", "--url", "mqtt://far:1"]).code(0);
    for named in [&["--context", "here"][..], &[]] {
        run(home, &["context", "use", "here"]).code(0);
        let doctor = run(home, &[&["doctor"], named].concat()).code(0);
        assert!(doctor.text().contains("1 key"), "{doctor:?}");
        let file = format!("backup{}", named.len());
        let snapshot = run(home, &[&["snapshot", &file], named].concat()).code(0);
        assert!(snapshot.text().contains("1 key"), "{snapshot:?}");
    }
    run(home, &["context", "use", "far"]).code(0);
    run(home, &["doctor"]).fails(2, "the context far has no --data");
    run(home, &["doctor", data]).code(0);
    // `doctor` takes the directory as an argument, and `restore` has no context.
    run(home, &["context", "use", "here"]).code(0);
    for context in ["far", ""] {
        let context = ("STATEHOUSE_CONTEXT", context);
        run_with(home, &["doctor", data], &[context]).code(0);
        let restored = format!("restored{}", context.1.len());
        let variables = [context, ("STATEHOUSE_DATA", &restored)];
        run_with(home, &["restore", "backup0"], &variables).code(0);
        assert!(home.join(&restored).is_dir());
    }
}

/// Regression: a context without the address that a command needs left it with that of another
/// store, which the command then changed.
#[test]
fn context_without_an_address_names_no_other_store() {
    let home = tempfile::tempdir().unwrap();
    let home = home.path();
    let add = |name, what, value| run(home, &["context", "add", name, what, value]).code(0);
    add("operated", "--admin", "https://127.0.0.1:1");
    add("used", "--url", "mqtt://127.0.0.1:1");
    for (name, command, lacks) in [
        ("operated", &["set", "k", "v"][..], "has no --url"),
        ("operated", &["bench", "--keys", "1"], "has no --url"),
        ("used", &["usage"], "has neither --admin nor --data"),
        (
            "used",
            &["policy", "rollback"],
            "has neither --admin nor --data",
        ),
    ] {
        let says = format!("the context {name} {lacks}");
        let named = [command, &["--context", name]].concat();
        run(home, &named).fails(2, &says);
        run(home, &["context", "use", name]).code(0);
        run(home, command).fails(2, &says);
    }
    run(home, &["get", "k", "--port", "1"]).fails(3, "127.0.0.1:1:");
}

/// A password of a context must never be sent to a store that flags name.
#[test]
fn flags_that_name_another_store_exclude_the_context() {
    let server = Server::with_config("log_filter = \"info\"\n");
    let home = tempfile::tempdir().unwrap();
    let home = home.path();
    fs::write(home.join("password"), "secret").unwrap();
    let add = ["context", "add", "far", "--url", "mqtt://127.0.0.1:1"];
    let login = ["--user", "anna", "--password-file", "password"];
    run(home, &[&add[..], &login].concat()).code(0);
    run(home, &["context", "use", "far"]).code(0);
    run(home, &["get", "k"]).fails(3, "127.0.0.1:1");
    let port = server.port().to_string();
    run(home, &["set", "k", "v", "--port", &port]).code(0);
    let data = &server.data();
    let watch = ["watch", "k", "--count", "1", "--context", "far"];
    run(home, &[&watch[..], &["--port", &port]].concat()).code(2);
    let clients = run(home, &["clients", "--json", "--data", data]).code(0);
    assert!(!clients.text().contains("anna"), "{clients:?}");
    // The address of the data, and that of the broker, exclude the other one of the context.
    let ran = run(home, &["get", "k", "--data", data]);
    assert!(!ran.stderr.contains(" 127.0.0.1:1: "), "{ran:?}");
    run(home, &["context", "add", "near", "--data", data]).code(0);
    run(home, &["context", "use", "near"]).code(0);
    let at_present = ["get", "k", "--as-of", "0s"];
    assert_eq!(run(home, &at_present).code(0).text(), "v");
    run(home, &[&at_present[..], &["--port", &port]].concat()).fails(2, "statehouse-data");
    // Paths are saved as absolute ones.
    let saved = fs::read_to_string(home.join("statehouse/contexts.toml")).unwrap();
    let expected = home.join("password").display().to_string();
    assert!(saved.contains(&expected), "{saved}");
}

/// Regression: the password file of the context took precedence.
#[test]
fn password_variable_takes_precedence_over_the_context() {
    let home = tempfile::tempdir().unwrap();
    let home = home.path();
    let users = home.join("users");
    add_user(&users, "anna", "secret").code(0);
    let server = Server::with("", &["--users", users.to_str().unwrap()]);
    fs::write(home.join("password"), "an old one").unwrap();
    let url = format!("mqtt://127.0.0.1:{}", server.port());
    let add = ["context", "add", "plant7", "--url", &url, "--user", "anna"];
    run(home, &[&add[..], &["--password-file", "password"]].concat()).code(0);
    run(home, &["context", "use", "plant7"]).code(0);
    let set = |password: &str| {
        let variable = ("STATEHOUSE_PASSWORD", password);
        run_with(home, &["set", "k", "v"], &[variable])
    };
    set("secret").code(0);
    let refused = set("");
    assert_ne!(refused.code, Some(0), "{refused:?}");
    refused.says("wrong user name or password");
}

/// Regression: the environment replaced the user or the password of the URL.
#[test]
fn user_of_the_url_flag_takes_precedence_over_variables() {
    let home = tempfile::tempdir().unwrap();
    let home = home.path();
    let users = home.join("users");
    for (name, password) in [("anna", "secret"), ("bert", "other")] {
        add_user(&users, name, password).code(0);
    }
    let server = Server::with("", &["--users", users.to_str().unwrap()]);
    let port = server.port();
    let of = |account: &str| format!("mqtt://{account}@127.0.0.1:{port}");
    fs::write(home.join("password"), "other").unwrap();
    let bert = [
        ("STATEHOUSE_USER", "bert"),
        ("STATEHOUSE_PASSWORD", "other"),
    ];
    let with_file = [bert[0], ("STATEHOUSE_PASSWORD_FILE", "password")];
    let only_password = [("STATEHOUSE_PASSWORD", "secret")];
    let empty = [("STATEHOUSE_PASSWORD", "")];
    let (anna, without) = (of("anna:secret"), of("anna"));
    let as_bert = ["--url", &anna, "--user", "bert"];
    for (arguments, variables, code) in [
        (&["--url", &anna][..], &bert[..], 0),
        (&["--url", &anna], &with_file, 0),
        (&["--url", &anna], &empty, 0),
        (&["--url", &without], &only_password, 0),
        // The password of the environment is that of bert.
        (&["--url", &without], &bert, 4),
        (&as_bert, &bert, 0),
    ] {
        let ran = run_with(home, &[&["set", "k", "v"], arguments].concat(), variables);
        assert_eq!(ran.code, Some(code), "{arguments:?} {variables:?} {ran:?}");
    }
    // Of variables alone, the user and the password take precedence, as before.
    let url = of("anna:wrong");
    let variables = [bert[0], bert[1], ("STATEHOUSE_URL", &url)];
    run_with(home, &["set", "k", "v"], &variables).code(0);
}

/// Regression: the error named --user, which is the subject of the question here.
#[test]
fn explain_by_a_context_without_a_user_needs_a_token() {
    let home = tempfile::tempdir().unwrap();
    let add = ["context", "add", "far", "--admin", "https://127.0.0.1:1"];
    run(home.path(), &add).code(0);
    let explain = ["authz", "explain", "a", "GET", "k", "--context", "far"];
    let refused = run(home.path(), &explain).code(2);
    assert!(!refused.stderr.contains("--user"), "{refused:?}");
    refused.says("the user of a --context");
}

#[test]
fn invalid_contexts_are_refused_and_change_nothing() {
    let home = tempfile::tempdir().unwrap();
    let home = home.path();
    for (arguments, says) in [
        (&["add", "a"][..], "--url"),
        (&["add", "a", "--url", "http://x"], "mqtt"),
        (
            &["add", "a", "--url", "mqtt://me:secret@x"],
            "holds no password",
        ),
        (
            &["add", "a", "--admin", "https://me:secret@x"],
            "--admin https://***@x is not",
        ),
        (&["use", "a"], "there is none"),
        (&["remove", "a"], "there is none"),
    ] {
        let ran = run(home, &[&["context"], arguments].concat()).fails(2, says);
        assert!(!ran.stderr.contains("secret"), "{ran:#?}");
    }
    assert!(!home.join("statehouse").exists());
    run(home, &["context", "list"])
        .code(0)
        .says("there is no context");
    fs::create_dir(home.join("statehouse")).unwrap();
    fs::write(home.join("statehouse/contexts.toml"), "current = 1").unwrap();
    run(home, &["get", "k"]).fails(2, "contexts.toml is not valid");
}

#[test]
fn contexts_added_at_the_same_time_are_all_kept() {
    let home = tempfile::tempdir().unwrap();
    let home = home.path();
    fs::create_dir(home.join("statehouse")).unwrap();
    fs::write(home.join("mine.toml"), "[contexts]\n").unwrap();
    let link = home.join("statehouse/contexts.toml");
    symlink("../mine.toml", &link).unwrap();
    thread::scope(|scope| {
        for number in 0..8 {
            let name = format!("plant-{number}");
            let add = move || run(home, &["context", "add", &name, "--user", "anna"]).code(0);
            scope.spawn(add);
        }
    });
    let listed = run(home, &["context", "list"]).code(0).text();
    assert_eq!(listed.matches("plant-").count(), 8, "{listed}");
    assert!(link.is_symlink());
}
