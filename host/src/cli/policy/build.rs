//! `statehouse policy build`: runs the tool of a policy's language, and checks what it made.

use std::env;
use std::fs;
use std::io::{self, BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use serde_json::Value as Json;
use statehouse_precompiled::encode;

use super::check::text;
use crate::cli::output::{Exit, Failure, emit};
use statehouse_testkit::check::check;
use statehouse_testkit::project::{Language, is_name};

/// What Rust builds policies for: a target without WASI.
const TARGET: &str = "wasm32-unknown-unknown";

/// Build a policy and check it
///
/// Finds out the language of the project, runs its tool, writes NAME.wasm into the project, and shows what `policy check`
/// says of it. Rust: cargo, for wasm32-unknown-unknown. JavaScript: componentize-qjs, as npm installed it in the project.
/// Python: componentize-py, of .venv in the project or on the path. All without WASI, which no policy may use.
///
/// Exit code 1 where it does not build, or is no policy.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  statehouse policy build
  statehouse policy build policies/setpoint -o setpoint.wasm")]
pub(in crate::cli) struct Args {
    /// The project
    #[arg(default_value = ".")]
    dir: PathBuf,

    /// Where the policy goes [default: NAME.wasm in the project]
    #[arg(short, long, value_name = "FILE")]
    output: Option<PathBuf>,

    /// Let the tool ask the network for nothing
    #[arg(long)]
    offline: bool,
}

pub(super) fn run(args: &Args) -> Result<Exit, Failure> {
    let (name, module) = match Language::of(&args.dir) {
        Some(Language::Rust) => rust(args)?,
        Some(Language::JavaScript) => javascript(args)?,
        Some(Language::Python) => python(args)?,
        None => {
            return Err(Failure::usage(format!(
                "{} is no project of a policy: there is no Cargo.toml, package.json or pyproject.toml. `statehouse policy new NAME` writes one",
                args.dir.display()
            )));
        }
    };
    // A component says what it is also to other tools; what is none already is left for the check to tell.
    let module = encode(&module).unwrap_or(module);
    let path = match &args.output {
        Some(path) => path.clone(),
        None => args.dir.join(format!("{name}.wasm")),
    };
    fs::write(&path, &module)
        .map_err(|error| Failure::transport(format!("cannot write {}: {error}", path.display())))?;
    let checked = check(&module);
    emit(format!("wrote {}\n\n{}", path.display(), text(&checked, None)).as_bytes())?;
    Ok(match checked.policy {
        Ok(_) => Exit::Done,
        Err(_) => Exit::Negative,
    })
}

/// The name of the package and the module that cargo makes of it.
fn rust(args: &Args) -> Result<(String, Vec<u8>), Failure> {
    let cargo = env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    require_target(args)?;
    let mut command = Command::new(&cargo);
    command
        .current_dir(&args.dir)
        .args(["build", "--release", "--lib", "--target", TARGET])
        .arg("--message-format=json-render-diagnostics")
        .stdin(Stdio::null())
        .stdout(Stdio::piped());
    if args.offline {
        command.arg("--offline");
    }
    let mut child = command.spawn().map_err(|error| match error.kind() {
        io::ErrorKind::NotFound => {
            Failure::usage("a policy in Rust needs cargo: get it from https://rustup.rs")
        }
        _ => Failure::transport(format!("cannot run cargo: {error}")),
    })?;
    // Each is the artifact of one target; the last library is the project's own.
    let mut made = None;
    for line in child
        .stdout
        .take()
        .into_iter()
        .flat_map(|out| BufReader::new(out).lines())
    {
        let message: Json = serde_json::from_str(&line?).unwrap_or_default();
        made = artifact(&message).or(made);
    }
    if !child.wait()?.success() {
        return Err(Failure::negative(
            "it does not build; what cargo says of it stands above",
        ));
    }
    let Some((name, path)) = made else {
        return Err(Failure::negative(
            "cargo made no .wasm of it: Cargo.toml needs `[lib]` with `crate-type = [\"cdylib\"]`",
        ));
    };
    let module = fs::read(&path)
        .map_err(|error| Failure::transport(format!("cannot read {}: {error}", path.display())))?;
    Ok((name, module))
}

/// The package and the module, where cargo says that it made one.
fn artifact(message: &Json) -> Option<(String, PathBuf)> {
    if message["reason"] != "compiler-artifact" {
        return None;
    }
    let files = message["filenames"].as_array()?.iter();
    let module = files
        .filter_map(Json::as_str)
        .find(|file| file.ends_with(".wasm"))?;
    let manifest = message["manifest_path"].as_str()?;
    let manifest: toml::Table = fs::read_to_string(manifest).ok()?.parse().ok()?;
    let name = manifest.get("package")?.get("name")?.as_str()?;
    Some((name.to_owned(), Path::new(module).to_owned()))
}

/// The name of the package, and what componentize-qjs makes of policy.js.
fn javascript(args: &Args) -> Result<(String, Vec<u8>), Failure> {
    let manifest: Json = serde_json::from_str(&manifest(&args.dir.join("package.json"))?)
        .map_err(|error| Failure::usage(format!("package.json: {error}")))?;
    let name = named(manifest["name"].as_str(), "package.json")?;
    let tool = args.dir.join("node_modules/.bin/componentize-qjs");
    if !tool.exists() {
        return Err(Failure::usage(format!(
            "a policy in JavaScript needs componentize-qjs: run `npm install` in {} (npm comes with Node.js, https://nodejs.org)",
            args.dir.display()
        )));
    }
    let module = interpreted(
        args,
        &absolute(&tool)?,
        &[
            "--wit",
            "wit",
            "--world",
            "policy",
            "--js",
            "policy.js",
            "--sync",
            "--stub-wasi",
            "--output",
        ],
    )?;
    Ok((name, module))
}

/// The name of the project, and what componentize-py makes of src/app.py.
fn python(args: &Args) -> Result<(String, Vec<u8>), Failure> {
    let manifest: toml::Table = manifest(&args.dir.join("pyproject.toml"))?
        .parse()
        .map_err(|error| Failure::usage(format!("pyproject.toml: {error}")))?;
    let project = manifest.get("project").and_then(|it| it.get("name"));
    let name = named(project.and_then(|it| it.as_str()), "pyproject.toml")?;
    let own = args.dir.join(".venv/bin/componentize-py");
    let tool = match own.exists() {
        true => absolute(&own)?,
        false => PathBuf::from("componentize-py"),
    };
    let module = interpreted(
        args,
        &tool,
        &[
            "-q",
            "-d",
            "wit",
            "-w",
            "policy",
            "componentize",
            "-s",
            "-p",
            "src",
            "app",
            "-o",
        ],
    )?;
    Ok((name, module))
}

/// Runs a tool that writes one file, whose name is its last argument.
fn interpreted(args: &Args, tool: &Path, arguments: &[&str]) -> Result<Vec<u8>, Failure> {
    // In the project, where nobody else writes: a name in a directory of all could be taken already.
    let made = absolute(&args.dir)?.join(format!(".unfinished-{}.wasm", std::process::id()));
    let status = Command::new(tool)
        .current_dir(&args.dir)
        .args(arguments)
        .arg(&made)
        .stdin(Stdio::null())
        .status();
    let module = match status {
        Ok(status) if status.success() => fs::read(&made).map_err(|error| {
            Failure::negative(format!("{} wrote no module: {error}", tool.display()))
        }),
        Ok(_) => Err(Failure::negative(
            "it does not build; what the tool says of it stands above",
        )),
        Err(error) if error.kind() == io::ErrorKind::NotFound && !tool.exists() => {
            Err(Failure::usage(format!(
                "a policy in Python needs componentize-py: run `python3 -m venv .venv && .venv/bin/pip install componentize-py==0.25.1` in {}",
                args.dir.display()
            )))
        }
        Err(error) => Err(Failure::transport(format!(
            "cannot run {}: {error}",
            tool.display()
        ))),
    };
    // It may not be there at all.
    let _ = fs::remove_file(&made);
    module
}

/// A program that is named by a path is looked for where we are, and not where it is to run.
fn absolute(path: &Path) -> Result<PathBuf, Failure> {
    Ok(std::path::absolute(path)?)
}

fn manifest(path: &Path) -> Result<String, Failure> {
    fs::read_to_string(path)
        .map_err(|error| Failure::usage(format!("cannot read {}: {error}", path.display())))
}

/// The name becomes that of a file.
fn named(name: Option<&str>, manifest: &str) -> Result<String, Failure> {
    let name = name.filter(|name| is_name(name));
    let name = name.ok_or_else(|| {
        Failure::usage(format!(
            "{manifest} has to name the policy, in lower-case letters, digits and `-`"
        ))
    })?;
    Ok(name.to_owned())
}

/// Without the target cargo fails with an error about the `core` crate, which helps nobody.
fn require_target(args: &Args) -> Result<(), Failure> {
    let rustc = env::var_os("RUSTC").unwrap_or_else(|| "rustc".into());
    let output = Command::new(rustc)
        .current_dir(&args.dir)
        .args(["--print", "target-libdir", "--target", TARGET])
        .output();
    // Where there is no rustc by that name, cargo may still know one.
    let Ok(output) = output else {
        return Ok(());
    };
    let directory = String::from_utf8_lossy(&output.stdout).trim().to_owned();
    let core = |name: &str| name.starts_with("libcore-");
    let there = fs::read_dir(directory).is_ok_and(|mut files| {
        files.any(|file| file.is_ok_and(|it| it.file_name().to_str().is_some_and(core)))
    });
    if there || !output.status.success() {
        return Ok(());
    }
    Err(Failure::usage(format!(
        "this compiler cannot build for {TARGET} yet: rustup target add {TARGET}"
    )))
}
