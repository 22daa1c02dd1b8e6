//! `statehouse serve`: runs a state store until a signal stops it.

use std::process::ExitCode;

use statehouse_cluster::{Malformed, Stop};

use super::output::{self, Failure};
use crate::config::Flags;
use crate::{app, logging};

/// Exit code of a store whose MQTT session was taken over (EX_PROTOCOL of sysexits.h). A service
/// manager should not restart it.
const EXIT_TAKEN_OVER: u8 = 76;

/// Exit code of a host whose cluster has a log that contradicts itself (EX_DATAERR of sysexits.h).
const EXIT_LOG_DAMAGED: u8 = 65;

/// Exit code of a host that is too old for its cluster, or whose cluster was deleted (EX_CONFIG of
/// sysexits.h).
const EXIT_CLUSTER_SETTINGS: u8 = 78;

fn exit_code(stop: &Stop) -> u8 {
    match stop {
        Stop::Head(Malformed::LaterFormat { .. }) | Stop::NotCreated(_) => EXIT_CLUSTER_SETTINGS,
        _ => EXIT_LOG_DAMAGED,
    }
}

/// Runs until SIGTERM or SIGINT.
pub(super) fn run(flags: Flags) -> ExitCode {
    let ended = app::run(flags).map_err(|failure| match failure {
        app::Failure::Usage(message) => Failure::usage(message),
        app::Failure::Transport(message) => Failure::transport(message),
        app::Failure::TakenOver(message) => Failure::new(EXIT_TAKEN_OVER, message),
        app::Failure::Cluster(stop) => Failure::new(exit_code(&stop), stop.to_string()),
    });
    // Goes through the log queue, since a direct write would block if stderr is not read.
    if let Err(failure) = &ended {
        logging::last_words(&output::line(failure.message()));
    }
    logging::flush();
    ended.map_or_else(|failure| failure.exit_code(), |()| ExitCode::SUCCESS)
}
