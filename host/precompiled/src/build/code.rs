//! Compiles the standard policy in the build.

use std::env;

#[path = "../settings.rs"]
mod settings;

/// The machine code of a component, or nothing if this compiler has none for the target.
pub(crate) fn compile(component: &[u8]) -> Result<Vec<u8>, env::VarError> {
    let target = engine_target()?;
    Ok(for_target(component, &target).unwrap_or_else(|error| {
        println!("cargo::warning=The standard policy is compiled when the program starts: not possible here for {target} ({error:#})");
        Vec::new()
    }))
}

/// Compiles to machine code that every processor of the target's architecture runs.
fn for_target(component: &[u8], target: &str) -> wasmtime::Result<Vec<u8>> {
    let mut config = settings::config();
    // Set the target even if it is that of this machine: a named target stands for the oldest
    // processor of its architecture.
    config.target(target)?;
    wasmtime::Engine::new(&config)?.precompile_component(component)
}

/// The target of the engine that will run the code. The engine interprets Pulley's bytecode on
/// processors that Cranelift cannot compile for, such as 32-bit ARM.
fn engine_target() -> Result<String, env::VarError> {
    let architecture = env::var("CARGO_CFG_TARGET_ARCH")?;
    match &*architecture {
        "x86_64" | "aarch64" | "riscv64" | "s390x" if cfg!(not(feature = "interpreter")) => {
            env::var("TARGET")
        }
        _ => {
            let big = env::var("CARGO_CFG_TARGET_ENDIAN")? == "big";
            let pointers = env::var("CARGO_CFG_TARGET_POINTER_WIDTH")?;
            Ok(format!("pulley{pointers}{}", if big { "be" } else { "" }))
        }
    }
}
