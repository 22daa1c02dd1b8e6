//! Policies as machine code, so that a start does not compile them.
//!
//! With the feature `embedded-code`, the program contains the machine code of the standard policy.
//! That of other policies is saved in a directory after their first compilation. Without a
//! directory, a component is compiled when it is loaded.
//!
//! The feature is off by default, because the build then compiles Cranelift twice: for the program,
//! and without optimization for the build script. Packages and tests use it.
//!
//! # Trust
//!
//! Machine code is not checked: its author can do everything that this process can. So it must come
//! only from the program itself or from a [`Directory`] that only this account can write to.
//!
//! The directory holds a file for each component and engine (its version, its settings, the
//! processor's features). The file begins with a digest of all three. If it is damaged, truncated,
//! or of another engine or component, the component is compiled and the file is replaced. The
//! digest has no key, because the key could not be stored in a safer place than the directory. So
//! write access to the directory is equivalent to running code as this account, like write access
//! to the program.

#![deny(unsafe_code)]

mod compiler;
mod directory;
mod file;
mod modules;
mod settings;

use std::hash::{Hash, Hasher};
use std::io;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::time::Instant;

use wasmtime::component::Component;
use wasmtime::{Config, Engine};

pub use compiler::{CompileBounds, CompileError, Compiler, child, encode};
pub use directory::{Bounds, Directory, Error};
pub use file::read_file;
pub use modules::Modules;

/// The standard policy as a component: built from `guest/` by the build script.
pub const STANDARD_POLICY: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/standard.wasm"));

/// The features of this crate that are compiled in.
pub const FEATURES: &[&str] = &[
    #[cfg(feature = "embedded-code")]
    "embedded-code",
    #[cfg(feature = "interpreter")]
    "interpreter",
];

/// The standard policy as machine code for every processor of the target's architecture. Empty
/// without the feature `embedded-code`, and if the build could not compile for the target.
#[cfg(feature = "embedded-code")]
const STANDARD_CODE: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/standard.code"));
#[cfg(not(feature = "embedded-code"))]
const STANDARD_CODE: &[u8] = &[];

/// The standard policy that asks a rule: a component to compose with the rule. Empty if this
/// program was built with a standard policy that was built elsewhere.
pub const RULED_POLICY: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/ruled.wasm"));

/// The first sections of a composed policy: the imports of the contract.
pub const POLICY_IMPORTS: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/imports.wasm"));

/// Largest size of a policy file. Python policies with their interpreter have 18 MB.
pub const POLICY_FILE_BYTES_MAX: u64 = 64 << 20;

/// The basic configuration of an engine for policies. Callers must not add settings that machine
/// code depends on.
#[must_use]
pub fn config() -> Config {
    settings::config()
}

/// The error of the system that made wasmtime fail, such as a lack of memory or of address space.
/// `None` if the system is not the cause.
#[must_use]
pub fn system_error(error: &wasmtime::Error) -> Option<io::Error> {
    let errno = error.downcast_ref::<rustix::io::Errno>();
    let errno = errno.map(|it| it.raw_os_error());
    // Errors of files in memory have theirs as their source.
    let mut causes = error.chain().map(|it| it.downcast_ref::<io::Error>());
    let code = errno.or_else(|| causes.find_map(|it| it?.raw_os_error()));
    let code = code.or_else(|| error.downcast_ref::<io::Error>()?.raw_os_error());
    code.map(io::Error::from_raw_os_error)
}

/// Converts components to a form that can be instantiated.
#[derive(Debug, Default)]
pub struct Precompiled {
    directory: Option<Directory>,
    compiled: AtomicU64,
    /// True after the warning that machine code cannot be saved.
    warned: AtomicBool,
}

impl Precompiled {
    /// Saves compiled code in `directory` from now on.
    pub fn keep_in(&mut self, directory: Directory) {
        self.directory = Some(directory);
    }

    /// The number of components compiled so far.
    pub fn compiled(&self) -> u64 {
        self.compiled.load(Relaxed)
    }

    /// Loads the component of a policy's file from the fastest source. The configuration of
    /// `engine` must begin with [`config`].
    pub fn component(&self, engine: &Engine, file: &[u8]) -> Result<Component, CompileError> {
        if file == STANDARD_POLICY
            && let Ok(component) = run(engine, STANDARD_CODE)
        {
            return Ok(component);
        }
        let Some(directory) = &self.directory else {
            let code = self.compile(engine, file)?;
            return run(engine, &code).map_err(refused);
        };
        let (engine_digest, digest) = (digest_of(engine), blake3::hash(file));
        let loaded = directory.load(&engine_digest, &digest);
        if let Some(component) = loaded.and_then(|code| run(engine, &code).ok()) {
            return Ok(component);
        }
        let code = self.compile(engine, file)?;
        let component = run(engine, &code).map_err(refused)?;
        if let Err(error) = directory.save(&engine_digest, &digest, &code)
            && !self.warned.swap(true, Relaxed)
        {
            tracing::warn!(%error, "the machine code of a policy cannot be saved: the next start compiles it again");
        }
        Ok(component)
    }

    fn compile(&self, engine: &Engine, file: &[u8]) -> Result<Vec<u8>, CompileError> {
        let begun = Instant::now();
        let code = compiler::code(engine, file)?;
        self.compiled.fetch_add(1, Relaxed);
        // A log in JSON has numbers of 64 bits.
        let ms = u64::try_from(begun.elapsed().as_millis()).unwrap_or(u64::MAX);
        tracing::info!(bytes = file.len(), ms, "compiled a policy");
        Ok(code)
    }
}

/// Only a lack of memory, threads or files may pass. A right that is missing does not.
fn refused(error: wasmtime::Error) -> CompileError {
    use rustix::io::Errno;
    let lacks = [Errno::NOMEM, Errno::AGAIN, Errno::MFILE, Errno::NFILE];
    let lacks = lacks.map(|it| Some(it.raw_os_error()));
    match system_error(&error) {
        Some(lack) if lacks.contains(&lack.raw_os_error()) => {
            CompileError::Machine(lack.to_string())
        }
        _ => CompileError::Refused(error.root_cause().to_string()),
    }
}

/// Creates a component from trusted machine code: embedded in the program, loaded by
/// [`Directory::load`], or just compiled by this process or by a child of the same program.
#[allow(unsafe_code)]
fn run(engine: &Engine, code: &[u8]) -> wasmtime::Result<Component> {
    // SAFETY: these bytes were returned by `Engine::precompile_component` and are unchanged.
    // Embedded code is a private constant that the build script wrote. Code from a directory has
    // the digest that `Directory::save` wrote, in a file that only this account could write. Code
    // from a child came through a pipe that only this program's own child could write to, and the
    // child exited successfully after the last byte. wasmtime itself checks that the code fits this
    // engine: its version, the target, the processor's features and all settings.
    unsafe { Component::deserialize(engine, code) }
}

/// A digest that differs between engines whose machine code is incompatible.
fn digest_of(engine: &Engine) -> blake3::Hash {
    struct Digester(blake3::Hasher);
    impl Hasher for Digester {
        fn write(&mut self, bytes: &[u8]) {
            self.0.update(bytes);
        }
        fn finish(&self) -> u64 {
            let digest = self.0.finalize();
            digest
                .as_bytes()
                .first_chunk()
                .map_or(0, |it| u64::from_le_bytes(*it))
        }
    }
    let mut digester = Digester(blake3::Hasher::new());
    engine.precompile_compatibility_hash().hash(&mut digester);
    digester.0.finalize()
}

#[cfg(test)]
mod tests;
