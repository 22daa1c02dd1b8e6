//! Compiles untrusted files to policies that can be instantiated in microseconds.

use std::io;
use std::sync::Arc;

use statehouse_precompiled::{CompileError, Directory, Precompiled};
use wasmtime::component::{Component, HasSelf, Linker};

use super::bindings::{self, PolicyPre};
use super::budget::Failure;
use super::counters::Counters;
use super::digest::Digest;
use super::guest::{Guest, Host};
use super::instance::Instance;
use super::lines::Lines;
use super::sections;
use super::work::Work;
use crate::limits;

/// The interface version of this host, as it appears in imports and exports.
const PACKAGE: &str = "statehouse:policy";
const MAJOR: &str = "1.";
const MINOR: &str = "1.0.";

/// A configured WebAssembly engine with the imports of policies.
pub struct Engine<H: Host> {
    engine: wasmtime::Engine,
    linker: Linker<Guest<H>>,
    precompiled: Precompiled,
    lines: Arc<Lines>,
}

/// A compiled policy.
pub struct Policy<H: Host> {
    /// Its name, as it describes itself.
    pub name: String,
    /// Its version.
    pub version: String,
    /// Its commands, for metrics. `outcome.command` is an index into this list.
    pub commands: Vec<String>,
    /// The BLAKE3 digest of the file, which identifies the policy.
    pub digest: blake3::Hash,
    /// NAME@DIGEST with 16 digits, as it appears in answers.
    pub tag: String,
    /// The size of its file.
    pub bytes: u64,
    /// The fuel that an instance uses before its first call.
    pub start_fuel: u64,
    /// The counters of the guest.
    pub counters: Arc<Counters>,
    /// Requests, fuel and failures.
    pub work: Arc<Work>,
    pub(super) pre: PolicyPre<Guest<H>>,
}

/// Why a file was refused.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    /// WebAssembly does not run on this machine.
    #[error("the WebAssembly engine cannot be started: {0}")]
    Engine(String),
    /// The system starts no thread for the watchdog.
    #[error("the watchdog thread of the WebAssembly engine cannot be started: {0}")]
    Thread(#[source] io::Error),
    /// The file is too large.
    #[error("the file has {0} bytes, and a policy at most {max}", max = limits::POLICY_FILE_BYTES_MAX)]
    Size(u64),
    /// The file is not WebAssembly.
    #[error("the file is not WebAssembly: it does not begin with \\0asm")]
    NotWasm,
    /// The file is truncated.
    #[error("the file ends in the middle of a section: it was cut, or is still being copied")]
    Cut,
    /// The core module cannot be converted to a component.
    #[error(
        "the core module cannot be converted to a component ({0}); build it with the bindings of wit/policy.wit for wasm32-unknown-unknown"
    )]
    Encode(String),
    /// The policy imports something that this host does not offer.
    #[error(
        "the policy imports `{0}`, but a policy may import only {PACKAGE} 1.x{hint}",
        hint = remedy(.0)
    )]
    Import(String),
    /// The policy, or a rule, needs another version of the interface.
    #[error(
        "the policy is built for `{0}`, but this host offers {PACKAGE} 1.0: rebuild it against wit/policy.wit of this version"
    )]
    Version(String),
    /// The component exports no handler.
    #[error("the component does not export {PACKAGE}/handler@1.0.0, so it is not a policy")]
    NoHandler,
    /// The component is a rule.
    #[error(
        "the file is a rule and not a whole policy: `statehouse policy build` composes it with the standard policy"
    )]
    Rule,
    /// Cranelift or the linker refused it.
    #[error("the policy does not fit this host: {0}")]
    Compile(String),
    /// The compilation exceeded its limits.
    #[error("the policy is refused: {0}; make it smaller, or split its largest functions")]
    Costly(CompileError),
    /// The compiler failed.
    #[error(transparent)]
    Compiler(CompileError),
    /// Its trial instance failed.
    #[error("the policy failed in {0}: {text}", text = in_start(.1))]
    Trial(&'static str, Failure),
    /// It failed every request of the self-test.
    #[error("the policy failed its self-test: it answered no request, for example {0}: {1}")]
    SelfTest(&'static str, Failure),
    /// It refused its configuration.
    #[error("the policy refused its configuration: {0}")]
    Configure(String),
    /// Its description cannot be used in logs.
    #[error("the policy's description is invalid: {0}")]
    Description(&'static str),
}

/// What to do about an import that no policy can have, as the end of a sentence.
pub fn remedy(import: &str) -> &'static str {
    match import.starts_with("wasi:") {
        true => ": build it without WASI",
        false => "",
    }
}

/// The text of a failure at the start of an instance. No setting changes the fuel of a start.
fn in_start(failure: &Failure) -> String {
    match failure {
        Failure::Fuel => format!(
            "it used up its fuel, which is {} for a start",
            limits::FUEL_SETUP
        ),
        other => other.to_string(),
    }
}

impl From<CompileError> for LoadError {
    fn from(error: CompileError) -> Self {
        match error {
            CompileError::NoComponent(text) => Self::Encode(text),
            CompileError::Refused(text) => Self::Compile(text),
            CompileError::Exceeded(_) => Self::Costly(error),
            CompileError::Crashed(_) | CompileError::Machine(_) => Self::Compiler(error),
        }
    }
}

impl From<LoadError> for Failure {
    /// Converts the error of an instance that did not start. A timeout stays one: it says nothing
    /// about the policy.
    fn from(error: LoadError) -> Self {
        match error {
            LoadError::Trial(_, failure) => failure,
            other => Self::Trap(other.to_string()),
        }
    }
}

impl<H: Host> Engine<H> {
    /// Creates an engine and the thread of its watchdog, which ends with the engine.
    pub fn new() -> Result<Self, LoadError> {
        let made = Self::without_watchdog()?;
        let ticking = made.engine.weak();
        std::thread::Builder::new()
            .name("watchdog".into())
            .spawn(move || {
                while let Some(engine) = ticking.upgrade() {
                    engine.increment_epoch();
                    drop(engine);
                    std::thread::sleep(limits::EPOCH_TICK);
                }
            })
            .map_err(LoadError::Thread)?;
        Ok(made)
    }

    /// Creates an engine for runs without a deadline, such as a replay. Only fuel ends a call, so
    /// its result does not depend on the speed of the machine.
    pub fn without_watchdog() -> Result<Self, LoadError> {
        let broken = |e: wasmtime::Error| LoadError::Engine(format!("{e:#}"));
        let mut config = statehouse_precompiled::config();
        config.max_wasm_stack(limits::GUEST_STACK_BYTES_MAX);
        let engine = wasmtime::Engine::new(&config).map_err(broken)?;
        let mut linker = Linker::new(&engine);
        bindings::Policy::add_to_linker::<_, HasSelf<_>>(&mut linker, |guest: &mut Guest<H>| guest)
            .map_err(broken)?;
        Ok(Self {
            engine,
            linker,
            precompiled: Precompiled::default(),
            lines: Arc::default(),
        })
    }

    /// Stores the machine code of policies in `directory` and loads it from there.
    pub fn keep_in(&mut self, directory: Directory) {
        self.precompiled.keep_in(directory);
    }

    /// The number of policies that were compiled.
    pub fn compiled(&self) -> u64 {
        self.precompiled.compiled()
    }

    /// The recent log lines of all policies that this engine loaded.
    pub fn lines(&self) -> &Arc<Lines> {
        &self.lines
    }

    /// Loads a policy from a component, or from a core module that contains its component type. A
    /// trial instance is described and configured before this returns.
    pub fn load(&self, file: &[u8]) -> Result<Policy<H>, LoadError> {
        if file.len() as u64 > limits::POLICY_FILE_BYTES_MAX {
            return Err(LoadError::Size(file.len() as u64));
        }
        // The component encoder trusts every length.
        if sections::of(file).is_some() && !sections::are_whole(file) {
            return Err(LoadError::Cut);
        }
        if !file.starts_with(b"\0asm") {
            return Err(LoadError::NotWasm);
        }
        let component = self.precompiled.component(&self.engine, file)?;
        self.check_interfaces(&component)?;
        let compile = |e: wasmtime::Error| match self.newer_interface(&component) {
            Some(name) => LoadError::Version(name),
            None => LoadError::Compile(format!("{e:#}")),
        };
        let pre = self.linker.instantiate_pre(&component).map_err(compile)?;
        let digest = blake3::hash(file);
        let mut policy = Policy {
            name: String::new(),
            version: String::new(),
            commands: Vec::new(),
            digest,
            tag: String::new(),
            bytes: file.len() as u64,
            start_fuel: 0,
            work: Arc::default(),
            counters: self.counters(format!("?@{}", &digest.to_hex()[..8]), digest),
            pre: PolicyPre::new(pre).map_err(compile)?,
        };
        let (live, info) = Instance::start(&policy, 0, false)?;
        policy.start_fuel = live.fuel_used(limits::FUEL_SETUP);
        let invalid = |why| Err(LoadError::Description(why));
        let is_long = |text: &String| text.len() > limits::POLICY_NAME_BYTES_MAX;
        if info.name.is_empty() || is_long(&info.name) {
            return invalid("its name is empty or longer than 64 bytes");
        }
        if info.version.is_empty() || is_long(&info.version) {
            return invalid("its version is empty or longer than 64 bytes");
        }
        if info.commands.len() > limits::POLICY_COMMANDS_MAX || info.commands.iter().any(is_long) {
            return invalid("it has more than 64 commands, or a command longer than 64 bytes");
        }
        // Name and version appear in user properties, log lines and commands of operators.
        let plain = |text: &str| !text.chars().any(|c| c.is_control() || c.is_whitespace());
        if !plain(&info.name) || !plain(&info.version) || info.name.contains('@') {
            return invalid(
                "its name and version must not contain spaces or control characters, and its name must not contain @",
            );
        }
        (policy.name, policy.version, policy.commands) = (info.name, info.version, info.commands);
        policy.tag = format!("{}@{}", policy.name, Digest::from(digest).short());
        policy.counters = self.counters(policy.to_string(), digest);
        policy.work = Arc::new(Work::of(policy.commands.len()));
        Ok(policy)
    }

    fn counters(&self, policy: String, digest: blake3::Hash) -> Arc<Counters> {
        Arc::new(Counters::new(policy, digest.into(), self.lines.clone()))
    }

    /// The linker would refuse these, too, but with errors that do not help.
    fn check_interfaces(&self, component: &Component) -> Result<(), LoadError> {
        let shape = component.component_type();
        for (name, _) in shape.imports(&self.engine) {
            match name
                .strip_prefix(PACKAGE)
                .and_then(|rest| rest.split_once('@'))
            {
                Some((_, version)) if version.starts_with(MAJOR) => {}
                Some(_) => return Err(LoadError::Version(name.to_owned())),
                None => return Err(LoadError::Import(name.to_owned())),
            }
        }
        let export = |interface: &str| {
            shape.exports(&self.engine).find_map(|(name, _)| {
                name.strip_prefix(PACKAGE)?
                    .strip_prefix(interface)
                    .map(|version| (name, version))
            })
        };
        match (export("/handler@"), export("/admission@")) {
            (Some((_, version)), _) if version.starts_with(MAJOR) => Ok(()),
            (None, Some((_, version))) if version.starts_with(MINOR) => Err(LoadError::Rule),
            (Some((name, _)), _) | (None, Some((name, _))) => {
                Err(LoadError::Version(name.to_owned()))
            }
            (None, None) => Err(LoadError::NoHandler),
        }
    }

    /// An interface of a later 1.x than this host offers. It may have functions that this host does
    /// not know.
    fn newer_interface(&self, component: &Component) -> Option<String> {
        let shape = component.component_type();
        let imports = shape.imports(&self.engine).map(|(name, _)| name.to_owned());
        let exports = shape.exports(&self.engine).map(|(name, _)| name.to_owned());
        let is_newer = |name: &String| {
            let version = name.strip_prefix(PACKAGE).and_then(|it| it.split_once('@'));
            version.is_some_and(|(_, version)| !version.starts_with(MINOR))
        };
        imports.chain(exports).find(is_newer)
    }
}

impl<H: Host> std::fmt::Debug for Policy<H> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Policy({self})")
    }
}

impl<H: Host> std::fmt::Display for Policy<H> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "{} {}@{}",
            self.name,
            self.version,
            &self.digest.to_hex()[..8]
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::STANDARD_POLICY;
    use crate::store::Transaction;

    /// The build must compile the policy with the same settings, or every start would compile it.
    #[test]
    fn standard_policy_is_precompiled() {
        for engine in [Engine::<Transaction>::new(), Engine::without_watchdog()] {
            let engine = engine.unwrap();
            engine.load(STANDARD_POLICY).unwrap();
            assert_eq!(engine.compiled(), 0);
        }
    }

    /// Regression: it counted as a failure of the policy, and as a different answer to a duplicate.
    #[test]
    fn slow_start_is_a_watchdog_failure() {
        let slow = LoadError::Trial("configure", Failure::Watchdog);
        assert_eq!(Failure::from(slow), Failure::Watchdog);
        let hungry = LoadError::Trial("configure", Failure::Fuel).to_string();
        assert!(!hungry.contains("max_fuel"), "{hungry}");
        let refused = Failure::from(LoadError::Configure("no".into()));
        assert!(matches!(refused, Failure::Trap(text) if text.contains("no")));
    }
}
