//! Tests the manual pages and shell completions, which are generated from the definition of the
//! command line.

use std::fs;

use statehouse_tests::run_in;

#[test]
fn every_command_has_a_manual_page() {
    let directory = tempfile::tempdir().unwrap();
    run_in(directory.path(), &["man", "pages"], b"").code(0);
    let help = run_in(directory.path(), &["--help"], b"").code(0);
    let help = String::from_utf8(help.stdout).unwrap();
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
    let serve = fs::read_to_string(directory.path().join("pages/statehouse-serve.1")).unwrap();
    assert!(serve.contains("durability") && serve.contains("STATEHOUSE_LISTEN"));
}

#[test]
fn unwritable_manual_directory_exits_with_code_2() {
    let directory = tempfile::tempdir().unwrap();
    fs::write(directory.path().join("file"), "").unwrap();
    run_in(directory.path(), &["man", "file"], b"")
        .code(2)
        .says("file");
}

#[test]
fn completions_contain_commands_and_flags() {
    let directory = tempfile::tempdir().unwrap();
    for shell in ["bash", "zsh", "fish"] {
        let script = run_in(directory.path(), &["completions", shell], b"").code(0);
        let script = String::from_utf8(script.stdout).unwrap();
        for word in ["statehouse", "history", "durability"] {
            assert!(script.contains(word), "{shell}: {word}");
        }
    }
    run_in(directory.path(), &["completions", "klingon"], b"").code(2);
}
