//! Whether a file is a policy for this host, what it asks for, and what its commands cost.
//!
//! What enters: the bytes of a file. What leaves: what could be found out of it, and where it is no policy, in words
//! why and what to do about it.

use std::time::{Duration, Instant};

use statehouse_transcript::quote;

use super::harness::Harness;
use statehouse_core::policy::{self, Instance, LoadError, sections};

/// Whether a file is a component or a core module, which the host wraps at load.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A component.
    Component,
    /// A core module.
    Module,
    /// Neither.
    Other,
}

/// What was found out of a file.
#[derive(Debug)]
pub struct Checked {
    /// What it is.
    pub kind: Kind,
    /// Its length.
    pub bytes: u64,
    /// What tells it from every other policy: BLAKE3 of the file.
    pub digest: blake3::Hash,
    /// The interfaces it imports, with their versions.
    pub imports: Vec<String>,
    /// The interfaces it exports.
    pub exports: Vec<String>,
    /// What it is as a policy, or what is wrong with it.
    pub policy: Result<Fit, Wrong>,
}

/// Why it is no policy.
#[derive(Debug)]
pub struct Wrong {
    /// What the host says of it.
    pub what: String,
    /// What to do about it.
    pub advice: Vec<String>,
}

/// A policy that this host can run.
#[derive(Debug)]
pub struct Fit {
    /// Its name for itself.
    pub name: String,
    /// Its version.
    pub version: String,
    /// How long it took to compile here, its trial included.
    pub compile: Duration,
    /// How long an instance takes to start, describe and configure.
    pub start: Duration,
    /// The linear memory that an instance holds then.
    pub memory_bytes: usize,
    /// What a request of each of its commands costs, by a sample.
    pub commands: Vec<Cost>,
}

/// What a sample of a command costs on an instance that has run it before.
#[derive(Debug)]
pub struct Cost {
    /// The command.
    pub command: String,
    /// The request.
    pub request: String,
    /// Its answer, as a word of a transcript.
    pub answer: String,
    /// Why the policy failed at it, if it did.
    pub failure: Option<String>,
    /// The fuel it burnt.
    pub fuel: u64,
    /// The time it took, the store's own work included.
    pub time: Duration,
}

/// How often things are done that are timed; the median counts.
const ROUNDS: usize = 15;

/// Looks at a file.
pub fn check(file: &[u8]) -> Checked {
    let kind = match file {
        [0, b'a', b's', b'm', 1, 0, 0, 0, ..] => Kind::Module,
        [0, b'a', b's', b'm', ..] => Kind::Component,
        _ => Kind::Other,
    };
    let (imports, exports) = interfaces(file, kind).unwrap_or_default();
    let policy = fit(file).map_err(|error| Wrong {
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

/// The interfaces of a component, or of what a core module becomes.
fn interfaces(file: &[u8], kind: Kind) -> Option<(Vec<String>, Vec<String>)> {
    if !sections::are_whole(file) {
        return None;
    }
    let encoded;
    let component = match kind {
        Kind::Module => {
            encoded = statehouse_precompiled::encode(file).ok()?;
            &encoded[..]
        }
        Kind::Component => file,
        Kind::Other => return None,
    };
    let decoded = wit_component::decode(component).ok()?;
    let wit_component::DecodedWasm::Component(resolve, world) = decoded else {
        return None;
    };
    let world = resolve.worlds.get(world)?;
    let names = |keys: Vec<_>| {
        keys.into_iter()
            .map(|key| resolve.name_world_key(key))
            .collect()
    };
    Some((
        names(world.imports.keys().collect()),
        names(world.exports.keys().collect()),
    ))
}

fn fit(file: &[u8]) -> Result<Fit, LoadError> {
    let engine = policy::Engine::without_watchdog()?;
    let begin = Instant::now();
    let policy = std::sync::Arc::new(engine.load(file)?);
    let compile = begin.elapsed();
    let mut starts = Vec::with_capacity(ROUNDS);
    let mut memory_bytes = 0;
    for _ in 0..ROUNDS {
        let begin = Instant::now();
        let instance = Instance::warm(policy.clone())?;
        starts.push(begin.elapsed());
        memory_bytes = instance.memory_bytes();
    }
    let harness = Harness::with(policy.clone());
    Ok(Fit {
        name: policy.name.clone(),
        version: policy.version.clone(),
        compile,
        start: median(&mut starts),
        memory_bytes,
        commands: policy
            .commands
            .iter()
            .map(|command| cost(&harness, command))
            .collect(),
    })
}

/// The middle one.
pub(super) fn median<T: Copy + Ord + Default>(all: &mut [T]) -> T {
    all.sort_unstable();
    all.get(all.len() / 2).copied().unwrap_or_default()
}

/// A request of a command. Of those that are not published only the name is known: a key comes first in most.
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

/// What to do about a file that is no policy.
fn advice(error: &LoadError, imports: &[String]) -> Vec<String> {
    let mut advice = Vec::new();
    match error {
        LoadError::Import(_) => {
            let foreign: Vec<&str> = imports
                .iter()
                .map(String::as_str)
                .filter(|name| !name.starts_with("statehouse:policy/"))
                .collect();
            advice.push(format!(
                "it imports what no policy may: {}",
                foreign.join(", ")
            ));
            if foreign.iter().any(|name| name.starts_with("wasi:")) {
                advice.push("Rust: build for wasm32-unknown-unknown, not for wasm32-wasip1 or wasm32-wasip2".into());
                advice.push("JavaScript: componentize-qjs with --sync --stub-wasi".into());
                advice.push("Python: componentize-py componentize with --stub-wasi".into());
                advice.push("`statehouse policy build` does so".into());
            }
        }
        LoadError::Encode(text) => {
            if text.contains("wasi") {
                advice.push(
                    "the module was built for WASI: Rust builds it for wasm32-unknown-unknown"
                        .into(),
                );
            }
            advice.push(
                "`statehouse policy new NAME --lang rust` writes a project that builds".into(),
            );
        }
        LoadError::NoHandler => {
            advice.push("it has to export statehouse:policy/handler: in Rust by `statehouse_policy::export!`, elsewhere by building it for the world `policy` of wit/policy.wit".into());
            advice.push(
                "`statehouse policy new` writes a project that does, with that file in it".into(),
            );
        }
        LoadError::NotWasm => {
            advice.push("name the .wasm file that the build makes; `statehouse policy build` says where it is".into());
        }
        LoadError::Cut => {
            advice.push("build or copy it once more".into());
        }
        LoadError::Version(_) => {
            advice.push("`statehouse policy new` writes the contract that this host offers".into());
        }
        _ => {}
    }
    advice
}
