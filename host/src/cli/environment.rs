//! Environment variables that name a store, and flags that name another one.

use std::ffi::OsString;

use clap::builder::{OsStr, Resettable};
use clap::error::{ContextKind, ContextValue, Error, ErrorKind};
use clap::{Arg, Command, CommandFactory};
use statehouse_config::ADMIN_TOKEN;

use super::Cli;

const PORT: &str = "STATEHOUSE_PORT";

/// The flags that name a store by its address, each with its variable.
const ADDRESSES: [(&str, &str); 5] = [
    ("--url", "STATEHOUSE_URL"),
    ("--host", "STATEHOUSE_HOST"),
    ("--port", PORT),
    ("--data", "STATEHOUSE_DATA"),
    ("--admin", "STATEHOUSE_ADMIN_URL"),
];

/// The flag that names a store by a context, with its variable.
const CONTEXT: (&str, &str) = ("--context", "STATEHOUSE_CONTEXT");

/// Flags whose value counts before that of other flags with the same purpose, each with its variable
/// and the other flags.
const FIRST: [(&str, &str, &[&str]); 2] = [
    ("--url", "STATEHOUSE_URL", &["--host", "--port"]),
    ("--admin", "STATEHOUSE_ADMIN_URL", &["--data"]),
];

/// Whether a variable names a store, for any command: a command that does not read the variable must
/// not use another store than a command that does.
pub(super) fn names_a_store() -> bool {
    let is_set = |name| std::env::var_os(name).is_some_and(|it| !it.is_empty());
    (ADDRESSES.iter()).any(|(_, name)| is_set(name) && !is_of_kubernetes(name))
}

/// Whether the variable has an address that Kubernetes gives to all containers, if there is a
/// service with the name `statehouse`.
fn is_of_kubernetes(variable: &str) -> bool {
    variable == PORT && std::env::var(variable).is_ok_and(|it| it.contains("://"))
}

/// Ignores the variables of addresses if the arguments name a context, and the variable of the
/// context if they name an address. Without such an argument the variable of the context takes
/// precedence. Otherwise clap reports a conflict with a flag that is not among the arguments.
/// Subcommands without the option --context keep all variables. Of the variables of addresses, also
/// ignores one that would count before a flag among the arguments, in all subcommands.
pub(super) fn without_other_store(program: Command, arguments: &[OsString]) -> Command {
    let (command, flags) = given(&program, arguments);
    let has = |flag| flags.contains(&flag);
    // A flag without the variable, such as the --data of `bench`, has another meaning.
    let mut addresses = ADDRESSES.iter();
    let is_named =
        addresses.any(|(flag, variable)| has(flag) && has_variable(command, flag, variable));
    let program = match is_of_kubernetes(PORT) {
        true => ignoring(program, &[PORT], |_| true),
        false => program,
    };
    let program = FIRST
        .into_iter()
        .fold(program, |program, (first, variable, others)| {
            let is_other = !has(first) && others.iter().copied().any(has);
            match is_other {
                true => ignoring(program, &[variable], |_| true),
                false => program,
            }
        });
    let is_set = std::env::var_os(CONTEXT.1).is_some_and(|it| !it.is_empty());
    if !has(CONTEXT.0) && is_named {
        ignoring(program, &[CONTEXT.1], takes_contexts)
    } else if has(CONTEXT.0) || is_set {
        let variables = ADDRESSES.map(|(_, variable)| variable);
        ignoring(program, &variables, takes_contexts)
    } else {
        program
    }
}

/// Leaves the value of a variable out of the help if it may be a URL with a password.
pub(super) fn hide_logins(command: Command) -> Command {
    let has_login = |variable: &std::ffi::OsStr| {
        std::env::var_os(variable).is_some_and(|it| it.to_string_lossy().contains('@'))
    };
    command
        .mut_args(|arg| match arg.get_env().is_some_and(has_login) {
            true => arg.hide_env_values(true),
            false => arg,
        })
        .mut_subcommands(hide_logins)
}

/// Names the environment variable in the error for its value. clap names the flag alone, which is not
/// among the arguments then.
pub(super) fn name_variable(mut error: Error, program: &Command, arguments: &[OsString]) -> Error {
    let kinds = [ErrorKind::ValueValidation, ErrorKind::InvalidValue];
    if let Some(ContextValue::String(arg)) = error.get(ContextKind::InvalidArg)
        && let Some(flag) = arg.split(' ').next()
        && kinds.contains(&error.kind())
        && !given(program, arguments).1.contains(&flag)
        && let Some(variable) = variable_of(program, flag)
    {
        let tip = format!("the value is that of the environment variable {variable}");
        let tip = ContextValue::StyledStrs(vec![tip.into()]);
        error.insert(ContextKind::Suggested, tip);
    }
    error
}

/// Variables with secrets, which have no flag.
const SECRETS: [&str; 4] = [
    "STATEHOUSE_PASSWORD",
    "STATEHOUSE_BROKER_PASSWORD",
    "STATEHOUSE_CLUSTER_PASSWORD",
    ADMIN_TOKEN,
];

/// A warning for each variable that is probably a misspelt one of `serve`: without it a store could
/// start without the rules that it names. Other unknown variables may be meant for other programs.
pub(super) fn misspelt(program: &Command) -> Vec<String> {
    let known = variables(program);
    let settings = program.find_subcommand("serve").map(variables);
    let names = std::env::vars_os().filter_map(|(name, _)| name.into_string().ok());
    let unknown = names.filter(|name| {
        let is_known = known.contains(name) || SECRETS.contains(&&**name);
        name.starts_with(PREFIX) && !is_known && !is_of_a_service(name)
    });
    let settings = settings.unwrap_or_default();
    let warnings = unknown.filter_map(|name| {
        let settings = settings.iter().filter_map(|it| it.strip_prefix(PREFIX));
        let meant = statehouse_config::similar(name.strip_prefix(PREFIX)?, settings)?;
        Some(format!(
            "unknown environment variable {name}: did you mean {PREFIX}{meant}?"
        ))
    });
    let mut warnings: Vec<String> = warnings.collect();
    warnings.sort();
    warnings
}

const PREFIX: &str = "STATEHOUSE_";

/// Whether Kubernetes gives the variable to all containers, for a service whose name begins with
/// `statehouse`.
fn is_of_a_service(variable: &str) -> bool {
    let has = |part| variable.contains(part);
    variable.ends_with("_PORT") || has("_PORT_") || has("_SERVICE_")
}

/// The variables of a command and its subcommands.
fn variables(command: &Command) -> Vec<String> {
    let own = command.get_arguments().filter_map(Arg::get_env);
    let own = own.filter_map(|it| it.to_str()).map(String::from);
    own.chain(command.get_subcommands().flat_map(variables))
        .collect()
}

/// The variable of a flag, if it is set. An argument without dashes is no flag.
fn variable_of(command: &Command, flag: &str) -> Option<String> {
    let long = flag.strip_prefix("--")?;
    let mut args = command.get_arguments();
    let arg = args.find(|it| it.get_long() == Some(long));
    let variable = arg.and_then(Arg::get_env);
    let set = variable.filter(|it| std::env::var_os(it).is_some());
    let here = set.and_then(|it| it.to_str()).map(String::from);
    here.or_else(|| (command.get_subcommands()).find_map(|it| variable_of(it, flag)))
}

/// The subcommand that the arguments name, and the flags among them. The value of an option is no
/// flag, although a key may begin with dashes.
fn given<'p, 'a>(program: &'p Command, arguments: &'a [OsString]) -> (&'p Command, Vec<&'a str>) {
    let (mut command, mut flags) = (program, Vec::new());
    let mut words = arguments.iter().skip(1);
    while let Some(word) = words.next().filter(|it| *it != "--") {
        // A path behind `=` may not be UTF-8.
        let name = word.as_encoded_bytes().split(|it| *it == b'=').next();
        let name = name.and_then(|it| str::from_utf8(it).ok());
        match name.filter(|it| it.starts_with('-')) {
            Some(flag) => {
                flags.push(flag);
                if flag.len() == word.len() && takes_value(command, flag) {
                    words.next();
                }
            }
            None => command = command.find_subcommand(word).unwrap_or(command),
        }
    }
    (command, flags)
}

/// Whether this flag of a command takes a value.
fn takes_value(command: &Command, flag: &str) -> bool {
    let is_it = |arg: &&Arg| {
        let long = arg.get_long().map(|it| format!("--{it}"));
        let short = arg.get_short().map(|it| format!("-{it}"));
        [long, short].iter().flatten().any(|it| it == flag)
    };
    let mut args = command.get_arguments().filter(is_it);
    args.any(|arg| arg.get_action().takes_values())
}

/// Whether a command has this flag with this variable.
fn has_variable(command: &Command, flag: &str, variable: &str) -> bool {
    let is_it = |arg: &Arg| arg.get_long() == flag.strip_prefix("--");
    let mut args = command.get_arguments().filter(|arg| is_it(arg));
    args.any(|arg| arg.get_env().is_some_and(|it| it == variable))
}

/// Whether a flag is among the arguments of this process.
pub(super) fn has_flag(flag: &str) -> bool {
    let arguments: Vec<OsString> = std::env::args_os().collect();
    given(&Cli::command(), &arguments).1.contains(&flag)
}

fn takes_contexts(command: &Command) -> bool {
    (command.get_arguments()).any(|it| it.get_long() == Some("context"))
}

/// Ignores variables in the subcommands that `applies` selects.
fn ignoring(command: Command, variables: &[&str], applies: fn(&Command) -> bool) -> Command {
    let applies_here = applies(&command);
    let names = |arg: &Arg| {
        let is_ignored = |it| variables.iter().any(|variable| it == *variable);
        applies_here && arg.get_env().is_some_and(is_ignored)
    };
    command
        .mut_args(|arg| match names(&arg) {
            true => arg.env(Resettable::<OsStr>::Reset),
            false => arg,
        })
        .mut_subcommands(|subcommand| ignoring(subcommand, variables, applies))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Regression: `del --prefix --host` ignored STATEHOUSE_URL and deleted keys in another store.
    #[test]
    fn value_of_an_option_is_no_flag() {
        let flags = |line: &str| {
            let words: Vec<OsString> = line.split(' ').map(OsString::from).collect();
            let program = Cli::command();
            let (command, flags) = given(&program, &words);
            format!("{} {}", command.get_name(), flags.join(" "))
        };
        for (line, expected) in [
            ("statehouse del --prefix --host", "del --prefix"),
            ("statehouse del --prefix -- --host x", "del --prefix --host"),
            ("statehouse del --prefix=a --host x", "del --prefix --host"),
            ("statehouse export --after --user", "export --after"),
            ("statehouse get --json --url u", "get --json --url"),
            (
                "statehouse lock a --holder --url -- b --port",
                "lock --holder",
            ),
            ("statehouse policy build -o --data a", "build -o"),
            ("statehouse set - --data=x", "set - --data"),
        ] {
            assert_eq!(flags(line), expected, "{line}");
        }
    }
}
