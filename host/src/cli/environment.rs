//! The precedence of flags that name a store over environment variables that name another one.

use std::ffi::OsString;

use clap::builder::{OsStr, Resettable};
use clap::{Arg, Command};

/// The flags that name a store by its address, each with its variable.
const ADDRESSES: [(&str, &str); 5] = [
    ("--url", "STATEHOUSE_URL"),
    ("--host", "STATEHOUSE_HOST"),
    ("--port", "STATEHOUSE_PORT"),
    ("--data", "STATEHOUSE_DATA"),
    ("--admin", "STATEHOUSE_ADMIN_URL"),
];

/// The flag that names a store by a context, with its variable.
const CONTEXT: (&str, &str) = ("--context", "STATEHOUSE_CONTEXT");

/// Ignores the variables of addresses if the arguments name a context, and the variable of the
/// context if they name an address. Without such an argument the variable of the context takes
/// precedence. Otherwise clap reports a conflict with a flag that is not among the arguments.
/// Subcommands without the option --context keep all variables.
pub(super) fn without_other_store(program: Command, arguments: &[OsString]) -> Command {
    let has = |flag: &str| {
        let flags = arguments.iter().take_while(|it| *it != "--");
        let mut flags = flags.filter_map(|it| it.to_str());
        flags.any(|it| it.split('=').next() == Some(flag))
    };
    let is_set = std::env::var_os(CONTEXT.1).is_some_and(|it| !it.is_empty());
    if !has(CONTEXT.0) && ADDRESSES.iter().any(|(flag, _)| has(flag)) {
        ignoring(program, &[CONTEXT.1])
    } else if has(CONTEXT.0) || is_set {
        ignoring(program, &ADDRESSES.map(|(_, variable)| variable))
    } else {
        program
    }
}

fn ignoring(command: Command, variables: &[&str]) -> Command {
    let takes_contexts = (command.get_arguments()).any(|it| it.get_long() == Some("context"));
    let names = |arg: &Arg| {
        let is_ignored = |it| variables.iter().any(|variable| it == *variable);
        takes_contexts && arg.get_env().is_some_and(is_ignored)
    };
    command
        .mut_args(|arg| match names(&arg) {
            true => arg.env(Resettable::<OsStr>::Reset),
            false => arg,
        })
        .mut_subcommands(|subcommand| ignoring(subcommand, variables))
}
