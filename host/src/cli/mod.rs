//! The command line: one file per command, which the enum and the match below name.
//!
//! Exit codes: 0 done, 1 not found or not applied, 2 usage, 3 no store or no answer, 4 refused. A
//! server exits with 74 if its disk failed, and with 70 if it lost its state because of a bug
//! (sysexits.h).

mod authz;
mod bench;
mod call;
mod clients;
#[cfg(feature = "cluster")]
mod cluster;
mod completions;
mod context;
mod data;
mod del;
mod doctor;
mod entries;
mod environment;
mod explain;
mod export;
mod get;
mod history;
mod import;
mod lock;
mod man;
mod outage;
mod output;
mod policy;
mod progress;
mod prompt;
mod ready;
mod remote;
mod replay;
mod restore;
mod scan;
mod serve;
mod set;
mod signals;
mod slow;
mod snapshot;
mod store;
mod table;
mod top;
mod usage;
mod user;
mod vdel;
mod watch;

use std::env;
use std::ffi::OsString;
use std::process::ExitCode;

use clap::error::{ContextKind, ContextValue};
use clap::{CommandFactory, FromArgMatches, Parser, Subcommand};

use crate::{app, build, time};
use statehouse_config::{ConfigError, limits};

/// An MQTT 5 state store whose command logic is a WebAssembly component.
#[derive(Parser)]
#[command(name = "statehouse", version, long_version = build::IN_FULL.as_str())]
#[command(about, max_term_width = 100)]
#[command(after_help = "\
Start with `statehouse serve` in one terminal and `statehouse set greeting hello` in another.
Exit codes: 0 done, 1 not found or not applied, 2 usage, 3 no store or no answer, 4 refused.")]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Run a state store with its own broker for MQTT 5 and MQTT 3.1.1
    #[command(after_help = "\
Examples:
  statehouse serve
  statehouse serve --listen 127.0.0.1:1884 --policy my-policy.wasm
  STATEHOUSE_LISTEN=127.0.0.1:0 statehouse serve --log json
  statehouse serve --check --config /etc/statehouse/statehouse.toml

The file that --config names may contain every other setting, under its name with underscores:
  listen = [\"127.0.0.1:1883\", \"[::1]:1883\"]
  max_keys = 100000
Flags take precedence over environment variables, and these over the file.

Exit codes: 0 stopped by SIGTERM or SIGINT (143 and 130 before the settings are read), 2 usage or an
unusable data directory, 3 the start failed, for example because an address is in use, 65 the log of
the cluster contradicts itself or is older than before, 70 a bug lost the state in memory, 74 the
disk failed, 75 the system clock is behind the data directory, or the machine lacks disk space,
memory, threads or files, 76 another host took the client id at the broker, 78 the cluster needs a
newer version, or was deleted. After 70 and 74 start the store again: it recovers everything that is
durable.")]
    Serve(Box<serve::Args>),
    Get(get::Args),
    Set(set::Args),
    Del(del::Args),
    Vdel(vdel::Args),
    Scan(scan::Args),
    Watch(watch::Args),
    Lock(lock::Args),
    Call(call::Args),
    Export(export::Args),
    Import(import::Args),
    Policy(policy::Args),
    Explain(explain::Args),
    History(history::Args),
    Replay(replay::Args),
    Snapshot(snapshot::Args),
    Restore(restore::Args),
    Doctor(doctor::Args),
    User(user::Args),
    Authz(authz::Args),
    Usage(usage::Args),
    Clients(clients::Args),
    Slow(slow::Args),
    Top(top::Args),
    Ready(ready::Args),
    #[cfg(feature = "cluster")]
    Cluster(cluster::Args),
    Bench(Box<bench::Args>),
    Context(context::Args),
    Completions(completions::Args),
    Man(man::Args),
}

/// Runs the program.
pub fn main() -> ExitCode {
    // A child process that compiles policies has arguments of its own, which clap must not parse.
    if let Some(code) = statehouse_precompiled::child() {
        return code;
    }
    // If this fails, a write beyond the limit ends the process, as it does by default.
    _ = app::ignore_file_size();
    completions::answer::<Cli>();
    statehouse_precompiled::Compiler::this_program(limits::COMPILE).install();
    let arguments: Vec<OsString> = env::args_os().collect();
    let program = environment::without_other_store(Cli::command(), &arguments);
    let mut program = environment::hide_logins(program);
    let matches = program.try_get_matches_from_mut(&arguments);
    let matches = matches.unwrap_or_else(|error| {
        without_logins(environment::name_variable(error, &program, &arguments)).exit();
    });
    let cli = Cli::from_arg_matches(&matches).unwrap_or_else(|error| error.exit());
    match cli.command {
        Command::Serve(args) => serve::run(*args, &environment::misspelt(&Cli::command())),
        Command::Get(args) => output::finish(get::run(args)),
        Command::Set(args) => output::finish(set::run(args)),
        Command::Del(args) => output::finish(del::run(args)),
        Command::Vdel(args) => output::finish(vdel::run(args)),
        Command::Scan(args) => output::finish(scan::run(args)),
        Command::Watch(args) => output::finish(watch::run(args)),
        Command::Lock(args) => output::finish(lock::run(args)),
        Command::Call(args) => output::finish(call::run(args)),
        Command::Export(args) => output::finish(export::run(args)),
        Command::Import(args) => output::finish(import::run(args)),
        Command::Policy(args) => policy::run(args),
        Command::Explain(args) => output::finish(async { explain::run(&args) }),
        Command::History(args) => output::finish(async { history::run(&args).await }),
        Command::Replay(args) => output::finish(async { replay::run(&args).await }),
        Command::Snapshot(args) => output::finish(async { snapshot::run(&args) }),
        Command::Restore(args) => output::finish(async { restore::run(&args) }),
        Command::Doctor(args) => output::finish(async { doctor::run(&args) }),
        Command::User(args) => output::finish(async { user::run(&args) }),
        Command::Authz(args) => output::finish(async { authz::run(&args).await }),
        Command::Usage(args) => output::finish(async { usage::run(&args).await }),
        Command::Clients(args) => output::finish(async { clients::run(&args).await }),
        Command::Slow(args) => output::finish(async { slow::run(&args).await }),
        Command::Top(args) => output::finish(async { top::run(&args).await }),
        Command::Ready(args) => output::finish(async { ready::run(&args).await }),
        #[cfg(feature = "cluster")]
        Command::Cluster(args) => cluster::run(args),
        Command::Bench(args) => output::finish(async { bench::run(&args) }),
        Command::Context(args) => output::finish(async { context::run(&args) }),
        Command::Completions(args) => output::finish(async { completions::run(&args) }),
        Command::Man(args) => output::finish(async { man::run(&args, Cli::command()) }),
    }
}

/// An error of clap that shows no user and no password of a URL. It repeats the wrong value, which
/// may be that of an environment variable.
fn without_logins(mut error: clap::Error) -> clap::Error {
    for kind in [
        ContextKind::InvalidValue,
        ContextKind::InvalidArg,
        ContextKind::InvalidSubcommand,
    ] {
        if let Some(ContextValue::String(value)) = error.get(kind) {
            let value = ConfigError::without_login(value);
            error.insert(kind, ContextValue::String(value));
        }
    }
    error
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_of_arguments_show_no_password() {
        for arguments in [
            &["serve", "--broker", "mqtt://u:SECRET%@h"][..],
            &["serve", "--traces", "http://u:SECRET@h"],
            &["get", "key", "--url", "mqtt://u:SECRET@h:1x"],
            &["get", "key", "mqtt://u:SECRET@h"],
            &["mqtt://u:SECRET@h"],
        ] {
            let program = [&["statehouse"][..], arguments].concat();
            let error = Cli::command().try_get_matches_from(program).unwrap_err();
            let shown = without_logins(error).to_string();
            assert!(!shown.contains("SECRET"), "{shown}");
            assert!(shown.contains("://***@h"), "{shown}");
        }
    }

    /// Clap wraps longer lines at 100 columns: it breaks examples, and text a second time.
    #[test]
    fn lines_after_help_have_at_most_100_columns() {
        let mut long = Vec::new();
        let mut commands = vec![Cli::command()];
        while let Some(command) = commands.pop() {
            let text = (command.get_after_help()).map_or(String::new(), ToString::to_string);
            let lines = text.lines().filter(|line| line.chars().count() > 100);
            long.extend(lines.map(|line| format!("{}: {line}", command.get_name())));
            commands.extend(command.get_subcommands().cloned());
        }
        assert_eq!(long, Vec::<String>::new());
    }
}
