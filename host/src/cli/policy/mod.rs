//! `statehouse policy`: everything about policies, one file per command.

mod bench;
mod build;
mod canary;
mod check;
mod dev;
mod diff;
mod keygen;
mod list;
mod load;
mod logs;
mod new;
mod promote;
mod push;
mod rollback;
mod route;
mod shadow;
mod sign;
mod test;
mod unload;
mod words;

use std::io::ErrorKind;
use std::process::ExitCode;

use super::output;
use statehouse_testkit::KitError;

/// Write, test, sign, deliver, compare, promote and roll back policies
///
/// A policy is the WebAssembly module that implements the commands. A store runs its built-in
/// policy unless it is given another one, which can happen at run time.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  statehouse policy new rule                        # a project that builds
  statehouse policy build rule
  statehouse policy test rule.wasm tests/           # transcripts: requests and their responses
  statehouse policy dev rule                        # build, test and reload on every save
  statehouse policy load rule.wasm                  # into the store of statehouse-data
  statehouse policy shadow rule                     # compare on live requests: `policy diff`
  statehouse policy canary rule --percent 5         # let it answer some clients
  statehouse policy promote rule                    # make it active from the next request on
  statehouse policy list
  statehouse policy logs rule                       # follow the lines that it logs
  statehouse policy rollback                        # reactivate the previous policy
  statehouse policy keygen gateway                  # gateway.key: secret; gateway.pub: for stores
  statehouse policy sign --key gateway.key rule.wasm -o rule.signed.wasm")]
pub(super) struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, clap::Subcommand)]
enum Command {
    New(new::Args),
    Build(build::Args),
    Check(check::Args),
    Dev(dev::Args),
    Test(test::Args),
    Bench(bench::Args),
    Load(load::Args),
    List(list::Args),
    Logs(logs::Args),
    Shadow(shadow::Args),
    Diff(diff::Args),
    Canary(canary::Args),
    Promote(promote::Args),
    Rollback(rollback::Args),
    Route(route::Args),
    Unload(unload::Args),
    Keygen(keygen::Args),
    Sign(sign::Args),
    Push(push::Args),
}

pub(super) fn run(args: Args) -> ExitCode {
    match args.command {
        Command::New(args) => output::finish(async { new::run(&args) }),
        Command::Build(args) => output::finish(async { build::run(&args) }),
        Command::Check(args) => output::finish(async { check::run(&args) }),
        Command::Dev(args) => output::finish(async { dev::run(&args).await }),
        Command::Test(args) => output::finish(async { test::run(&args) }),
        Command::Bench(args) => output::finish(async { bench::run(&args) }),
        Command::Load(args) => output::finish(async { load::run(&args).await }),
        Command::List(args) => output::finish(async { list::run(&args).await }),
        Command::Logs(args) => output::finish(async { logs::run(&args).await }),
        Command::Shadow(args) => output::finish(async { shadow::run(&args).await }),
        Command::Diff(args) => output::finish(async { diff::run(&args).await }),
        Command::Canary(args) => output::finish(async { canary::run(&args).await }),
        Command::Promote(args) => output::finish(async { promote::run(&args).await }),
        Command::Rollback(args) => output::finish(async { rollback::run(&args).await }),
        Command::Route(args) => output::finish(async { route::run(&args).await }),
        Command::Unload(args) => output::finish(async { unload::run(&args).await }),
        Command::Keygen(args) => output::finish(async { keygen::run(&args) }),
        Command::Push(args) => output::finish(async { push::run(&args).await }),
        Command::Sign(args) => output::finish(async { sign::run(&args) }),
    }
}

/// The failure of a command that exits with 1 if the file is no policy. A file that is larger than
/// any policy is none.
pub(super) fn no_policy(error: KitError) -> output::Failure {
    match &error {
        KitError::Unreadable(_, why) if why.kind() == ErrorKind::FileTooLarge => {
            output::Failure::negative(error.to_string())
        }
        _ => error.into(),
    }
}

impl From<KitError> for output::Failure {
    fn from(error: KitError) -> Self {
        match error {
            KitError::Past(error) => error.into(),
            KitError::Unreadable(..) | KitError::Transcript(..) => Self::usage(error.to_string()),
            KitError::Load(_) => Self::negative(error.to_string()),
        }
    }
}
