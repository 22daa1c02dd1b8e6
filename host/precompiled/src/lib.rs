//! Policies as machine code, so that a start need not compile them.
//!
//! What enters: a component, and the engine that is to run it. What leaves: the same component, ready to be
//! instantiated. The code of the standard policy is a part of the program: the build script compiled it. That of others
//! is kept in a directory when it was compiled once. What is in neither is compiled.
//!
//! # Who is trusted
//!
//! Nothing checks what machine code does: who can hand some in can do whatever this process can. So it is taken from the
//! program itself, and from a [`Directory`] that only this account can write to. There it is a file for each
//! component and engine (its version, its settings, the processor's features), which begins with a digest of all
//! three. One that is damaged, cut, of another engine or of another component is as good as none: the component is
//! compiled, and the file replaced. The digest has no key, since there is no place for one that the directory is not as
//! good as. So who can write to the directory can run code as this account, as who can replace the program can.

#![deny(unsafe_code)]

mod compiler;
mod directory;
mod file;
mod modules;
mod settings;

use std::hash::{Hash, Hasher};
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

/// The same as machine code that every processor of the target's architecture runs. Empty where the build could not compile
/// for the target.
const STANDARD_CODE: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/standard.code"));

/// A policy file: Python policies with their interpreter are 18 MB.
pub const POLICY_FILE_BYTES_MAX: u64 = 64 << 20;

/// A configuration of an engine for policies. What is set on top of it may be nothing that machine code depends on.
#[must_use]
pub fn config() -> Config {
    settings::config()
}

/// Makes components ready to be instantiated.
#[derive(Debug, Default)]
pub struct Precompiled {
    directory: Option<Directory>,
    compiled: AtomicU64,
    /// Somebody was told that nothing can be kept.
    told: AtomicBool,
}

impl Precompiled {
    /// Keeps what it compiles in `directory` from now on.
    pub fn keep_in(&mut self, directory: Directory) {
        self.directory = Some(directory);
    }

    /// How many components had to be compiled.
    pub fn compiled(&self) -> u64 {
        self.compiled.load(Relaxed)
    }

    /// A component of a policy's file, by the shortest way there is. The engine's configuration begins with [`config`].
    ///
    /// # Errors
    /// [`CompileError`].
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
        let kept = directory.load(&engine_digest, &digest);
        if let Some(component) = kept.and_then(|code| run(engine, &code).ok()) {
            return Ok(component);
        }
        let code = self.compile(engine, file)?;
        let component = run(engine, &code).map_err(refused)?;
        if let Err(error) = directory.save(&engine_digest, &digest, &code)
            && !self.told.swap(true, Relaxed)
        {
            tracing::warn!(%error, "the machine code of a policy cannot be kept: the next start compiles it again");
        }
        Ok(component)
    }

    fn compile(&self, engine: &Engine, file: &[u8]) -> Result<Vec<u8>, CompileError> {
        let begun = Instant::now();
        let code = compiler::code(engine, file)?;
        self.compiled.fetch_add(1, Relaxed);
        let ms = begun.elapsed().as_millis();
        tracing::info!(bytes = file.len(), ms, "compiled a policy");
        Ok(code)
    }
}

fn refused(error: wasmtime::Error) -> CompileError {
    CompileError::Refused(error.root_cause().to_string())
}

/// Makes a component of machine code that is trusted: code of the program's own, from
/// [`Directory::load`], or compiled just now by this process or by a child of the same program.
#[allow(unsafe_code)]
fn run(engine: &Engine, code: &[u8]) -> wasmtime::Result<Component> {
    // SAFETY: these are bytes that `Engine::precompile_component` returned, unchanged. Those of the
    // program are a private constant, which the build script wrote. Those of a directory have the
    // digest that `Directory::save` gave them, in a file that only this account could write. Those
    // of a child came through a pipe that only this program's own child could write to, and the
    // child ended well after the last of them. That they are of this very engine's kind wasmtime
    // checks itself: its version, the target, the processor's features and all settings.
    unsafe { Component::deserialize(engine, code) }
}

/// Tells engines apart whose machine code is not each other's.
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
