//! The engine settings that machine code depends on. The build script includes this file, so that
//! the embedded code fits the engine.

use wasmtime::{Config, OptLevel};

/// The configuration for policies, without the host's limits.
pub(crate) fn config() -> Config {
    let mut config = Config::new();
    config
        .wasm_component_model(true)
        .concurrency_support(false)
        .consume_fuel(true)
        .epoch_interruption(true)
        // Behaviour that may differ between machines is disabled, because re-executing a request
        // must give the same result.
        .cranelift_nan_canonicalization(true)
        .wasm_relaxed_simd(false)
        .cranelift_opt_level(OptLevel::Speed);
    // On a 32-bit processor, the engine interprets without being told.
    #[cfg(all(feature = "interpreter", target_pointer_width = "64"))]
    config
        .target("pulley64")
        .expect("this is the name of a target");
    config
}
