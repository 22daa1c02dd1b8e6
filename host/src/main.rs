//! The `statehouse` program: see `statehouse --help`.
#![forbid(unsafe_code)]

use std::process::ExitCode;

#[cfg(all(target_arch = "x86_64", target_env = "musl"))]
use statehouse_memory as _;

fn main() -> ExitCode {
    statehouse::cli::main()
}
