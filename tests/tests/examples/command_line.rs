//! Runs every command of the table in `host/docs/cli.md`, in order, against one store.

use std::{env, fs, path::Path, process::Command};

use statehouse_tests::{Server, binary, command::finish};

#[test]
fn every_command_of_the_table_works() {
    let page = Path::new(env!("CARGO_MANIFEST_DIR")).join("../host/docs/cli.md");
    let page = fs::read_to_string(page).unwrap();
    let rows = page.lines().filter(|line| line.starts_with("| "));
    // The first row has the names of the tools.
    let commands: Vec<String> = rows.skip(1).map(command).collect();
    assert!(commands.len() >= 30, "{}", commands.len());

    let server = Server::start();
    let tools = binary::statehouse().parent().unwrap().to_owned();
    let path = format!("{}:{}", tools.display(), env::var("PATH").unwrap());
    for text in &commands {
        let mut shell = Command::new("sh");
        shell.args(["-c", text]).current_dir(server.directory());
        shell
            .env("PATH", &path)
            .env("XDG_CONFIG_HOME", server.directory())
            .env("STATEHOUSE_PORT", server.port().to_string());
        let ran = finish(shell, b"");
        assert_eq!(ran.code, Some(0), "{text}\n{ran:#?}");
    }
}

/// The command in the last column of a row.
fn command(line: &str) -> String {
    let command = line
        .strip_suffix("` |")
        .and_then(|row| row.rsplit_once("| `"));
    let (_, command) = command.unwrap_or_else(|| panic!("no command of ours in {line}"));
    assert!(command.contains("statehouse "), "{line}");
    command.replace("\\|", "|")
}
