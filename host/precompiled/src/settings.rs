//! The settings of an engine that machine code depends on. The build script includes this file, so that what it compiles
//! fits what runs.

use wasmtime::{Config, OptLevel};

/// A configuration for policies, the host's bounds aside.
pub(crate) fn config() -> Config {
    let mut config = Config::new();
    config
        .wasm_component_model(true)
        .concurrency_support(false)
        .consume_fuel(true)
        .epoch_interruption(true)
        // What may differ between machines is off: a re-run must end the same way.
        .cranelift_nan_canonicalization(true)
        .wasm_relaxed_simd(false)
        .cranelift_opt_level(OptLevel::Speed);
    config
}
