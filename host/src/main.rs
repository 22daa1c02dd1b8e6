//! The `statehouse` program: see `statehouse --help`.
#![forbid(unsafe_code)]

use std::process::ExitCode;

fn main() -> ExitCode {
    statehouse::cli::main()
}
