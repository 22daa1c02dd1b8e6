//! `statehouse serve`: runs a state store until a signal stops it.

use std::process::ExitCode;

use super::output::{self, Failure};
use crate::config::Flags;
use crate::{app, logging};

/// Exit code of a store whose MQTT session was taken over (EX_PROTOCOL of sysexits.h). A service
/// manager should not restart it.
const EXIT_TAKEN_OVER: u8 = 76;

/// Runs until SIGTERM or SIGINT.
pub(super) fn run(flags: Flags) -> ExitCode {
    let ended = app::run(flags).map_err(|failure| match failure {
        app::Failure::Usage(message) => Failure::usage(message),
        app::Failure::Transport(message) => Failure::transport(message),
        app::Failure::TakenOver(message) => Failure::new(EXIT_TAKEN_OVER, message),
        app::Failure::Cluster { code, message } => Failure::new(code, message),
    });
    // Goes through the log queue, since a direct write would block if stderr is not read.
    if let Err(failure) = &ended {
        logging::last_words(&output::line(failure.message()));
    }
    logging::flush();
    ended.map_or_else(|failure| failure.exit_code(), |()| ExitCode::SUCCESS)
}
