//! Tests the manual pages and shell completions, which are generated from the definition of the
//! command line.

use std::{env, fs, path::Path, process::Command};

use statehouse_tests::{Server, binary, command::finish, policies, run_in};

#[test]
fn every_command_has_a_manual_page_with_examples() {
    let directory = tempfile::tempdir().unwrap();
    run_in(directory.path(), &["man", "pages"]).code(0);
    let help = run_in(directory.path(), &["--help"]).code(0);
    let help = help.text();
    let commands = help.split("Commands:").nth(1).unwrap();
    let commands = commands.split("Options:").next().unwrap();
    // Continuation lines of a description are indented further.
    let named = commands
        .lines()
        .filter(|line| line.starts_with("  ") && !line.starts_with("   "));
    let mut count = 0;
    for line in named {
        let name = line.split_whitespace().next().unwrap();
        if name == "help" {
            continue;
        }
        let page = directory.path().join(format!("pages/statehouse-{name}.1"));
        let page = fs::read_to_string(page).unwrap_or_else(|error| panic!("{name}: {error}"));
        assert!(page.contains(".SH SYNOPSIS"), "{name}");
        count += 1;
    }
    assert!(count > 15, "{commands}");
    // A page repeats the help of its command. The commands of these groups have common examples.
    let groups = ["authz", "clients", "cluster", "context", "user"];
    let is_of_a_group = |page: &str| {
        groups
            .iter()
            .any(|it| page.starts_with(&format!("statehouse-{it}-")))
    };
    for page in fs::read_dir(directory.path().join("pages")).unwrap() {
        let page = page.unwrap();
        let name = page.file_name().into_string().unwrap();
        let text = fs::read_to_string(page.path()).unwrap();
        assert!(
            text.contains("Examples:") || name == "statehouse.1" || is_of_a_group(&name),
            "no example in {name}"
        );
    }
    let serve = fs::read_to_string(directory.path().join("pages/statehouse-serve.1")).unwrap();
    assert!(serve.contains("durability") && serve.contains("STATEHOUSE_LISTEN"));
    let get = fs::read_to_string(directory.path().join("pages/statehouse-get.1")).unwrap();
    assert!(get.contains("STATEHOUSE_URL"), "{get}");
    // Lines are kept between `.nf` and `.fi`.
    let (_, examples) = serve.split_once(".SH EXAMPLES\n.nf\n").unwrap();
    let (examples, _) = examples.split_once(".fi\n").unwrap();
    assert!(examples.contains("\n  statehouse serve\n"), "{examples}");
}

/// Completes the last word as bash does, in a directory. Returns the completions.
fn completed(directory: &Path, words: &[&str]) -> Vec<String> {
    let tools = binary::statehouse().parent().unwrap();
    let path = format!("{}:{}", tools.display(), env::var("PATH").unwrap());
    let script = "source <(statehouse completions bash)
        COMP_WORDS=(\"$@\") COMP_CWORD=$(($# - 1))
        _clap_complete_statehouse statehouse \"${@: -1}\" \"${@: -2:1}\"
        printf '%s\\n' \"${COMPREPLY[@]}\"";
    let mut bash = Command::new("bash");
    bash.args(["-c", script, "bash", "statehouse"]).args(words);
    bash.current_dir(directory).env("PATH", path);
    let ran = finish(bash, b"").code(0);
    assert_eq!(ran.stderr, "", "{ran:#?}");
    ran.text().lines().map(|it| it.trim().to_owned()).collect()
}

#[test]
fn shells_complete_commands_flags_and_commands_of_policies() {
    let directory = tempfile::tempdir().unwrap();
    for shell in ["bash", "zsh", "fish"] {
        let script = run_in(directory.path(), &["completions", shell]).code(0);
        assert!(script.text().contains("statehouse"), "{shell}");
    }

    let none = directory.path();
    assert_eq!(completed(none, &["hist"]), ["history"]);
    assert_eq!(completed(none, &["serve", "--durab"]), ["--durability"]);
    // Without a store nothing is completed, and no error is printed.
    assert_eq!(completed(none, &["call", "IN"]), [""]);

    let server = Server::start();
    let policy = policies::example("incr");
    let load = ["policy", "load", policy.to_str().unwrap()];
    server.run(&load).code(0);
    let call = |word| completed(server.directory(), &["call", word]);
    assert_eq!(call("ME"), ["META"]);
    assert_eq!(
        call("IN"),
        [""],
        "a policy that is only loaded does not answer"
    );
    server.run(&["policy", "promote", "incr"]).code(0);
    assert_eq!(call("in"), ["INCR", "INCRBY"]);
    let arguments = completed(server.directory(), &["call", "GET", "IN"]);
    assert_eq!(arguments, [""], "only the first word is a command");
}
