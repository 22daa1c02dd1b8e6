//! `statehouse completions`: prints the script that lets a shell complete commands, flags and
//! values, and answers that script.
//!
//! The script calls this program for each completion, so that values can depend on a running store.
//! A completion must be quick, and must print nothing but values: a failure completes nothing.

use std::ffi::OsStr;
use std::time::Duration;

use clap::{Args as _, CommandFactory, FromArgMatches};
use clap_complete::env::Shells;
use clap_complete::{CompleteEnv, CompletionCandidate, Shell};
use hyper::Method;

use super::output::{Exit, Failure, emit};
use super::store::Store;

/// The environment variable by which the script asks this program.
const VARIABLE: &str = "STATEHOUSE_COMPLETE";

/// A person waits.
const TIMEOUT: Duration = Duration::from_millis(500);

/// Print the completions of a shell
///
/// Besides commands and flags, `statehouse call` completes the commands that the policies of the
/// local store answer: that of STATEHOUSE_DATA, of the selected context, or in statehouse-data.
#[derive(clap::Args)]
#[command(after_help = "\
Examples:
  statehouse completions bash > /etc/bash_completion.d/statehouse
  statehouse completions zsh > ~/.zfunc/_statehouse
  statehouse completions fish > ~/.config/fish/completions/statehouse.fish")]
pub(super) struct Args {
    /// The shell
    shell: Shell,
}

pub(super) fn run(args: &Args) -> Result<Exit, Failure> {
    let mut script = Vec::new();
    let name = args.shell.to_string();
    if let Some(shell) = Shells::builtins().completer(&name) {
        let program = "statehouse";
        shell.write_registration(VARIABLE, program, program, program, &mut script)?;
    }
    emit(&script)?;
    Ok(Exit::Done)
}

/// Answers the script of a shell, and ends the program, if it asks.
pub(super) fn answer<C: CommandFactory>() {
    CompleteEnv::with_factory(C::command)
        .var(VARIABLE)
        .complete();
}

/// The commands that the policies of the local store answer, and that begin with a word.
pub(super) fn commands(word: &OsStr) -> Vec<CompletionCandidate> {
    let begin = word.to_string_lossy().to_uppercase();
    let mut names = known_commands().unwrap_or_default();
    names.retain(|name| name.starts_with(&begin));
    names.sort_unstable();
    names.dedup();
    names.into_iter().map(CompletionCandidate::new).collect()
}

fn known_commands() -> Option<Vec<String>> {
    let matches = Store::augment_args(clap::Command::new("store")).no_binary_name(true);
    let matches = matches.try_get_matches_from([""; 0]).ok()?;
    let store = Store::from_arg_matches(&matches).ok()?;
    let mut runtime = tokio::runtime::Builder::new_current_thread();
    let runtime = runtime.enable_all().build().ok()?;
    let listing = runtime.block_on(async {
        let asking = store.ask(Method::GET, "/v1/policies");
        tokio::time::timeout(TIMEOUT, asking).await.ok()?.ok()
    });
    // Does not wait for the lookup of a name that no server answers.
    runtime.shutdown_background();
    let listing = listing?;
    let policies = listing["policies"].as_array()?.iter();
    let answering = policies.filter(|it| it["roles"].as_array().is_some_and(|it| !it.is_empty()));
    let commands = answering
        .filter_map(|it| it["commands"].as_array())
        .flatten();
    let names = commands.filter_map(|it| it["name"].as_str());
    Some(names.map(str::to_owned).collect())
}
