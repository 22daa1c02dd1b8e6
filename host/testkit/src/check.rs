//! Checks whether a file is a policy for this host, lists its interfaces and measures its commands.
//!
//! If the file is not a policy, the result has the reason and advice.

use std::time::{Duration, Instant};

use statehouse_transcript::quote;

use super::compose::interfaces;
use super::harness::Harness;
use super::setup;
use statehouse_core::policy::{Instance, LoadError};
use statehouse_core::trial;

/// The kind of a file. The host turns a core module into a component when it loads the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A component.
    Component,
    /// A core module.
    Module,
    /// Neither a component nor a core module.
    Other,
}

/// The result of a check.
#[derive(Debug)]
pub struct Checked {
    /// The kind of the file.
    pub kind: Kind,
    /// The length of the file.
    pub bytes: u64,
    /// The BLAKE3 digest of the file, which identifies a policy.
    pub digest: blake3::Hash,
    /// The interfaces that it imports, with their versions.
    pub imports: Vec<String>,
    /// The interfaces that it exports.
    pub exports: Vec<String>,
    /// The description of the policy, or the reason why the file is not a policy.
    pub policy: Result<Fit, Wrong>,
}

/// Why a file is not a policy.
#[derive(Debug)]
pub struct Wrong {
    /// The error of the host.
    pub what: String,
    /// Advice for the author.
    pub advice: Vec<String>,
}

/// A policy that this host can run.
#[derive(Debug)]
pub struct Fit {
    /// The name that the policy declares.
    pub name: String,
    /// The version that the policy declares.
    pub version: String,
    /// How long the policy takes to compile on this machine, including the start of an instance.
    pub compile: Duration,
    /// How long an instance takes to start, describe and configure.
    pub start: Duration,
    /// The linear memory of a started instance.
    pub memory_bytes: usize,
    /// The cost of a sample request for each command.
    pub commands: Vec<Cost>,
}

/// The cost of a sample request of a command, on an instance that has run it before.
#[derive(Debug)]
pub struct Cost {
    /// The command.
    pub command: String,
    /// The request.
    pub request: String,
    /// The answer, as a word of a transcript.
    pub answer: String,
    /// Why the policy failed, if it did.
    pub failure: Option<String>,
    /// The fuel of the request.
    pub fuel: u64,
    /// The time of the request, including the work of the store.
    pub time: Duration,
}

/// The number of repetitions for a time, of which the median counts.
const ROUNDS: usize = 15;

/// Checks a file.
pub fn check(file: &[u8]) -> Checked {
    let kind = match file {
        [0, b'a', b's', b'm', 1, 0, 0, 0, ..] => Kind::Module,
        [0, b'a', b's', b'm', ..] => Kind::Component,
        _ => Kind::Other,
    };
    let fit = fit(file);
    // Only the compiler has limits: other files may take any time to decode.
    let has_compiled = !matches!(
        &fit,
        Err(LoadError::Engine(_)
            | LoadError::Size(_)
            | LoadError::NotWasm
            | LoadError::Cut
            | LoadError::Encode(_)
            | LoadError::Compile(_)
            | LoadError::Costly(_)
            | LoadError::Compiler(_))
    );
    let declared = has_compiled.then(|| interfaces(file)).flatten();
    let (imports, exports) = declared.unwrap_or_default();
    let policy = fit.map_err(|error| Wrong {
        what: error.to_string(),
        advice: advice(&error, &imports),
    });
    Checked {
        kind,
        bytes: file.len() as u64,
        digest: blake3::hash(file),
        imports,
        exports,
        policy,
    }
}

fn fit(file: &[u8]) -> Result<Fit, LoadError> {
    let engine = setup::compiling_engine()?;
    let begin = Instant::now();
    let policy = std::sync::Arc::new(engine.load(file)?);
    let compile = begin.elapsed();
    trial::accept(&policy, Instant::now())?;
    let mut starts = Vec::with_capacity(ROUNDS);
    let mut memory_bytes = 0;
    for _ in 0..ROUNDS {
        let begin = Instant::now();
        let instance = Instance::warm(policy.clone())?;
        starts.push(begin.elapsed());
        memory_bytes = instance.memory_bytes();
    }
    let harness = Harness::with(policy.clone());
    let commands = policy.commands.iter();
    Ok(Fit {
        name: policy.name.clone(),
        version: policy.version.clone(),
        compile,
        start: median(&mut starts),
        memory_bytes,
        commands: commands.map(|it| cost(&harness, it)).collect(),
    })
}

/// The median, or the default of an empty slice.
pub(super) fn median<T: Copy + Ord + Default>(all: &mut [T]) -> T {
    all.sort_unstable();
    all.get(all.len() / 2).copied().unwrap_or_default()
}

/// A sample request of a command. For a command that is not part of the published protocol, the
/// sample has one key, because most commands begin with a key.
fn sample(command: &str) -> Vec<&str> {
    const VALUE: &str = "0123456789012345678901234567890123456789012345678901234567890123";
    match command.to_ascii_uppercase().as_str() {
        "SET" => vec![command, "key", VALUE],
        "VDEL" => vec![command, "key", VALUE],
        "SCAN" => vec![command, "*"],
        _ => vec![command, "key"],
    }
}

fn cost(harness: &Harness, command: &str) -> Cost {
    let request = sample(command);
    let (mut fuel, mut times) = (Vec::new(), Vec::new());
    let mut last = super::Answer::default();
    let mut it = harness.anew().once();
    for _ in 0..ROUNDS {
        it.put("key", "0");
        last = it.client("check").send(&request);
        fuel.push(last.fuel);
        times.push(last.time);
    }
    Cost {
        command: command.to_owned(),
        request: request.join(" "),
        answer: quote(&last.payload),
        failure: last.failure,
        fuel: median(&mut fuel),
        time: median(&mut times),
    }
}

/// Advice for a file that is not a policy.
fn advice(error: &LoadError, imports: &[String]) -> Vec<String> {
    const NEW: &str = "`statehouse policy new NAME --lang rust` writes a project that builds";
    let advice: &[&str] = match error {
        LoadError::Import(_) => return import_advice(imports),
        LoadError::Encode(text) if text.contains("wasi") => &[
            "the module was built for WASI: in Rust, build it for wasm32-unknown-unknown",
            NEW,
        ],
        LoadError::Encode(_) => &[NEW],
        LoadError::NoHandler => &[
            "it must export statehouse:policy/handler: in Rust with `statehouse_policy::export!`, in other languages by building it for the world `policy` of wit/policy.wit",
            "`statehouse policy new` writes a project that does, with that file in it",
        ],
        LoadError::NotWasm => &[
            "name the .wasm file that the build creates; `statehouse policy build` prints its path",
        ],
        LoadError::Cut => &["build or copy it once more"],
        LoadError::Version(_) => {
            &["`statehouse policy new` writes the contract that this host offers"]
        }
        _ => &[],
    };
    advice.iter().map(|it| (*it).to_owned()).collect()
}

/// Advice for a file that imports what a policy cannot have.
fn import_advice(imports: &[String]) -> Vec<String> {
    let foreign = imports.iter().map(String::as_str);
    let foreign: Vec<&str> = foreign
        .filter(|name| !name.starts_with("statehouse:policy/"))
        .collect();
    let mut advice = vec![format!(
        "it imports interfaces that a policy cannot have: {}",
        foreign.join(", ")
    )];
    if foreign.iter().any(|name| name.starts_with("wasi:")) {
        let builds = [
            "Rust: build for wasm32-unknown-unknown, not for wasm32-wasip1 or wasm32-wasip2",
            "JavaScript: componentize-qjs with --sync --stub-wasi",
            "Python: componentize-py componentize with --stub-wasi",
            "`statehouse policy build` uses these settings",
        ];
        advice.extend(builds.map(str::to_owned));
    }
    advice
}
