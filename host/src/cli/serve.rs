//! `statehouse serve`: runs a state store until a signal stops it, or only checks its settings.

use std::process::ExitCode;

use super::output::{self, Failure, emit, notice};
use crate::app;
use statehouse_config::Flags;
use statehouse_server::logging;

/// Exit code of a store whose MQTT session was taken over (EX_PROTOCOL of sysexits.h). A service
/// manager should not restart it.
const EXIT_TAKEN_OVER: u8 = 76;

/// The arguments of `serve`.
#[derive(Debug, clap::Args)]
pub(super) struct Args {
    /// Check the settings and everything they name, print each problem, and exit without a start:
    /// the file, certificates and keys, users and rules, policies, addresses, and the data
    /// directory, which is read as a start reads it. Changes nothing, so it may run beside the
    /// store. Run it with the account of the store. Exit code 0 if a start would find no problem,
    /// otherwise that of the start
    #[arg(long)]
    check: bool,

    #[command(flatten)]
    flags: Flags,
}

impl From<app::Failure> for Failure {
    fn from(failure: app::Failure) -> Self {
        match failure {
            app::Failure::Usage(message) => Self::usage(message),
            app::Failure::Temporary(message) => Self::new(app::EXIT_TEMPORARY, message),
            app::Failure::Transport(message) => Self::transport(message),
            app::Failure::TakenOver(message) => Self::new(EXIT_TAKEN_OVER, message),
            app::Failure::Cluster { code, message } => Self::new(code, message),
        }
    }
}

/// Runs until SIGTERM or SIGINT. The warnings are about the environment.
pub(super) fn run(args: Args, warnings: &[String]) -> ExitCode {
    if args.check {
        return check(args.flags, warnings);
    }
    let ended = app::run(args.flags, warnings).map_err(Failure::from);
    // Goes through the log queue, since a direct write would block if stderr is not read.
    if let Err(failure) = &ended {
        logging::last_words(&output::line(failure.message()));
    }
    logging::flush();
    ended.map_or_else(|failure| failure.exit_code(), |()| ExitCode::SUCCESS)
}

/// Prints every problem. The exit code is that of the first, as in a start.
fn check(flags: Flags, warnings: &[String]) -> ExitCode {
    for warning in warnings {
        notice(warning);
    }
    let app::Findings { problems, notes } = app::check(flags);
    for note in notes {
        notice(&format!("note: {note}"));
    }
    let problems: Vec<Failure> = problems.into_iter().map(Failure::from).collect();
    for problem in &problems {
        notice(problem.message());
    }
    match problems.first() {
        Some(first) => first.exit_code(),
        None => match emit(b"a start would find no problem\n") {
            Ok(_) => ExitCode::SUCCESS,
            Err(failure) => output::report(&failure),
        },
    }
}
