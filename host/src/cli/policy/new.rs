//! `statehouse policy new`: a project for a policy.

use std::path::PathBuf;

use crate::cli::output::{Exit, Failure, emit};
use statehouse_testkit::project::{self, Language, ProjectError};

/// Write a project for a policy: small, complete, and its tests pass
///
/// A Rust project stands on the standard policy, adds one rule, and brings along all it is written with. One in JavaScript
/// or Python is a small store of its own, run by an interpreter within the module: 1.7 MB and 18 MB, and some ten times
/// the time of a request.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  statehouse policy new setpoint
  cd setpoint && statehouse policy build && statehouse policy test setpoint.wasm tests/
  statehouse policy new setpoint --lang js --dir policies/setpoint")]
pub(in crate::cli) struct Args {
    /// What it is called: lower-case letters, digits and `-`
    name: String,

    /// What it is written in: rust, js or python
    #[arg(long, value_name = "LANGUAGE", default_value = "rust", value_parser = language)]
    lang: Language,

    /// Where it is written to [default: a directory of its name]
    #[arg(long, value_name = "DIR")]
    dir: Option<PathBuf>,
}

fn language(name: &str) -> Result<Language, String> {
    match name {
        "rust" => Ok(Language::Rust),
        "js" | "javascript" => Ok(Language::JavaScript),
        "python" => Ok(Language::Python),
        _ => Err("a project can be written in rust, js or python".into()),
    }
}

pub(super) fn run(args: &Args) -> Result<Exit, Failure> {
    let directory = args
        .dir
        .clone()
        .unwrap_or_else(|| PathBuf::from(&args.name));
    project::create(&args.name, args.lang, &directory).map_err(|error| match error {
        ProjectError::Io(..) => Failure::transport(error.to_string()),
        _ => Failure::usage(error.to_string()),
    })?;
    let text = format!(
        "wrote {}. Next:\n  cd {}\n  statehouse policy build\n  statehouse policy test {}.wasm tests/\n",
        directory.display(),
        directory.display(),
        args.name
    );
    emit(text.as_bytes())?;
    Ok(Exit::Done)
}
