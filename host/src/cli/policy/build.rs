//! `statehouse policy build`: runs the build tool of a policy's language, and checks the result.

use std::env;
use std::fs::{self, File, TryLockError};
use std::io::{self, BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use serde_json::Value as Json;
use statehouse_precompiled::encode;

use super::check::text;
use crate::cli::output::{Exit, Failure, emit, notice};
use statehouse_testkit::check::check;
use statehouse_testkit::compose::{compose, is_rule};
use statehouse_testkit::project::{Language, is_name};

/// The target of policies in Rust, which has no WASI.
const TARGET: &str = "wasm32-unknown-unknown";

/// Build a policy and check it
///
/// Detects the language of the project, runs its tool, writes NAME.wasm into the project, and
/// prints the result of `policy check`. Rust: cargo, for wasm32-unknown-unknown. JavaScript:
/// componentize-qjs, installed by npm in the project. Python: componentize-py, in .venv of the
/// project or on the path. All of them build without WASI, which policies must not use.
///
/// A project is built for a world of wit/policy.wit: `policy`, a complete policy, or `rule`, a
/// condition on top of the standard policy. In Rust the sources name the world, elsewhere
/// `"statehouse": { "world": ... }` in package.json or `[tool.statehouse] world` in pyproject.toml.
/// A rule is composed with the standard policy, so the result is a complete policy, too.
///
/// Exit code 1 if the build fails, or if the result is no policy.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  statehouse policy build
  statehouse policy build policies/setpoint -o setpoint.wasm")]
pub(in crate::cli) struct Args {
    /// The directory of the project
    #[arg(default_value = ".")]
    pub(super) dir: PathBuf,

    /// The output file [default: NAME.wasm in the project]
    #[arg(short, long, value_name = "FILE")]
    pub(super) output: Option<PathBuf>,

    /// Build without network access
    #[arg(long)]
    pub(super) offline: bool,
}

pub(super) fn run(args: &Args) -> Result<Exit, Failure> {
    build(args).map(|(_, exit)| exit)
}

/// Builds the policy. Returns the path of its file, and whether it is a policy.
pub(super) fn build(args: &Args) -> Result<(PathBuf, Exit), Failure> {
    let (name, module) = match Language::of(&args.dir) {
        Some(Language::Rust) => rust(args)?,
        Some(Language::JavaScript) => javascript(args)?,
        Some(Language::Python) => python(args)?,
        None => return Err(no_project(&args.dir)),
    };
    let module = match is_rule(&module) {
        true => compose(&module).map_err(|error| Failure::negative(error.to_string()))?,
        false => module,
    };
    // Other tools recognize a component. If the module cannot be encoded as one, the check below
    // reports it.
    let module = encode(&module).unwrap_or(module);
    let path = match &args.output {
        Some(path) => path.clone(),
        None => args.dir.join(format!("{name}.wasm")),
    };
    fs::write(&path, &module)
        .map_err(|error| Failure::transport(format!("cannot write {}: {error}", path.display())))?;
    let checked = check(&module);
    emit(format!("wrote {}\n\n{}", path.display(), text(&checked, None)).as_bytes())?;
    Ok((path, Exit::of(checked.policy.is_ok())))
}

/// Fails if the directory is not the project of a policy.
pub(super) fn require_project(dir: &Path) -> Result<(), Failure> {
    Language::of(dir).map(|_| ()).ok_or_else(|| no_project(dir))
}

fn no_project(dir: &Path) -> Failure {
    Failure::usage(format!(
        "{} is no project of a policy: it has no Cargo.toml, package.json or pyproject.toml. `statehouse policy new NAME` writes one",
        dir.display()
    ))
}

/// The package name, and the module that cargo builds.
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
    // Each message describes the artifact of one target; the last library is the project's own.
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
            "it does not build: see the output of cargo above",
        ));
    }
    let Some((name, path)) = made else {
        return Err(Failure::negative(
            "cargo built no .wasm file: Cargo.toml needs `[lib]` with `crate-type = [\"cdylib\"]`",
        ));
    };
    let module = fs::read(&path)
        .map_err(|error| Failure::transport(format!("cannot read {}: {error}", path.display())))?;
    Ok((name, module))
}

/// The package name and the module path, if cargo reports an artifact.
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

/// The package name, and the module that componentize-qjs builds from policy.js.
fn javascript(args: &Args) -> Result<(String, Vec<u8>), Failure> {
    let manifest: Json = serde_json::from_str(&manifest(&args.dir.join("package.json"))?)
        .map_err(|error| Failure::usage(format!("package.json: {error}")))?;
    let name = named(manifest["name"].as_str(), "package.json")?;
    let world = world_of(manifest["statehouse"]["world"].as_str(), "package.json")?;
    let tool = args.dir.join("node_modules/.bin/componentize-qjs");
    if !tool.exists() {
        return Err(Failure::usage(format!(
            "a policy in JavaScript needs componentize-qjs: run `{}` in {} (npm comes with Node.js, https://nodejs.org)",
            Language::JavaScript.install_commands().join(" && "),
            args.dir.display()
        )));
    }
    let arguments = format!("--wit wit --world {world} --js policy.js --sync --stub-wasi --output");
    let module = interpreted(args, &absolute(&tool)?, &arguments)?;
    Ok((name, module))
}

/// The project name, and the module that componentize-py builds from src/app.py.
fn python(args: &Args) -> Result<(String, Vec<u8>), Failure> {
    let manifest: toml::Table = manifest(&args.dir.join("pyproject.toml"))?
        .parse()
        .map_err(|error| Failure::usage(format!("pyproject.toml: {error}")))?;
    let project = manifest.get("project").and_then(|it| it.get("name"));
    let name = named(project.and_then(|it| it.as_str()), "pyproject.toml")?;
    let settings = manifest.get("tool").and_then(|it| it.get("statehouse"));
    let world = settings.and_then(|it| it.get("world")?.as_str());
    let world = world_of(world, "pyproject.toml")?;
    let own = args.dir.join(".venv/bin/componentize-py");
    let tool = match own.exists() {
        true => absolute(&own)?,
        false => PathBuf::from("componentize-py"),
    };
    let arguments = format!("-q -d wit -w {world} componentize -s -p src app -o");
    let module = interpreted(args, &tool, &arguments)?;
    Ok((name, module))
}

/// Runs a tool that writes one file, whose path is its last argument. Spaces separate the others.
fn interpreted(args: &Args, tool: &Path, arguments: &str) -> Result<Vec<u8>, Failure> {
    let project = absolute(&args.dir)?;
    // All builds of a project write the same file, one after another. A file system without locks
    // prevents no build.
    let turn = File::open(&project)?;
    let is_alone = match turn.try_lock() {
        Ok(()) => true,
        Err(TryLockError::WouldBlock) => {
            notice("another build of this project is running: waiting for its end");
            turn.lock().is_ok()
        }
        Err(TryLockError::Error(_)) => false,
    };
    // The file is written into the project: in a shared directory another user could have created
    // the name. A build that was stopped leaves its file.
    let made = project.join(match is_alone {
        true => ".unfinished.wasm".to_owned(),
        false => format!(".unfinished-{}.wasm", std::process::id()),
    });
    let _ = fs::remove_file(&made);
    let status = Command::new(tool)
        .current_dir(&args.dir)
        .args(arguments.split(' '))
        .arg(&made)
        .stdin(Stdio::null())
        .status();
    let module = match status {
        Ok(status) if status.success() => fs::read(&made).map_err(|error| {
            Failure::negative(format!("{} wrote no module: {error}", tool.display()))
        }),
        Ok(_) => Err(Failure::negative(
            "it does not build: see the output of the tool above",
        )),
        Err(error) if error.kind() == io::ErrorKind::NotFound && !tool.exists() => {
            Err(Failure::usage(format!(
                "a policy in Python needs componentize-py: run `{}` in {}",
                Language::Python.install_commands().join(" && "),
                args.dir.display()
            )))
        }
        Err(error) => Err(Failure::transport(format!(
            "cannot run {}: {error}",
            tool.display()
        ))),
    };
    // The tool may not have created it.
    let _ = fs::remove_file(&made);
    module
}

/// A relative path refers to the current directory, not to the directory in which the program runs.
fn absolute(path: &Path) -> Result<PathBuf, Failure> {
    Ok(std::path::absolute(path)?)
}

fn manifest(path: &Path) -> Result<String, Failure> {
    fs::read_to_string(path)
        .map_err(|error| Failure::usage(format!("cannot read {}: {error}", path.display())))
}

/// The world that a project is built for.
fn world_of(world: Option<&str>, manifest: &str) -> Result<&'static str, Failure> {
    match world.unwrap_or("policy") {
        "policy" => Ok("policy"),
        "rule" => Ok("rule"),
        other => Err(Failure::usage(format!(
            "{manifest} names the world `{other}`; it is `policy` or `rule`"
        ))),
    }
}

/// The name becomes a file name.
fn named(name: Option<&str>, manifest: &str) -> Result<String, Failure> {
    let name = name.filter(|name| is_name(name));
    let name = name.ok_or_else(|| {
        Failure::usage(format!(
            "{manifest} must contain the policy's name, in lower-case letters, digits and `-`, other than `builtin`"
        ))
    })?;
    Ok(name.to_owned())
}

/// Without the target cargo fails with an unhelpful error about the `core` crate.
fn require_target(args: &Args) -> Result<(), Failure> {
    let rustc = env::var_os("RUSTC").unwrap_or_else(|| "rustc".into());
    let output = Command::new(rustc)
        .current_dir(&args.dir)
        .args(["--print", "target-libdir", "--target", TARGET])
        .output();
    // If there is no rustc on the path, cargo may still find one.
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
