//! The compilation of policies in a separate process: a policy that is costly to compile must not
//! take resources from the store.
#![allow(clippy::unwrap_used, reason = "tests fail by panicking")]

#[path = "../../tests/policies/wasm.rs"]
mod wasm;

use std::time::Duration;

use statehouse::STANDARD_POLICY;
use statehouse_config::limits;
use statehouse_precompiled::{CompileBounds, CompileError, Compiler};
use statehouse_tests::assert_contains;
use wasm::bomb;

/// Compiles a file with the binary of this package.
fn compile(bounds: CompileBounds, file: &[u8]) -> Result<Vec<u8>, CompileError> {
    Compiler::new(env!("CARGO_BIN_EXE_statehouse"), bounds).compile(file)
}

/// Calls of a bomb of half a megabyte.
const CALLS: usize = 270_000;

#[test]
fn standard_policy_compiles_within_the_bounds() {
    let code = compile(limits::COMPILE, STANDARD_POLICY).unwrap();
    assert!(code.len() > STANDARD_POLICY.len());
    // A small component of the bomb's form is valid, too.
    compile(limits::COMPILE, &bomb(10)).unwrap();
}

#[test]
fn invalid_file_is_refused_with_the_compilers_error() {
    let module = compile(limits::COMPILE, b"\0asm\x01\0\0\0\x01").unwrap_err();
    assert!(matches!(module, CompileError::NoComponent(_)), "{module}");
    let component = compile(limits::COMPILE, b"\0asm\x0d\0\x01\0\x7f\0").unwrap_err();
    assert!(matches!(component, CompileError::Refused(_)), "{component}");
}

#[test]
fn compilation_ends_at_each_of_its_bounds() {
    let all = limits::COMPILE;
    let memory = CompileBounds {
        memory_bytes: 64 << 20,
        ..all
    };
    let wall = CompileBounds {
        wall: Duration::from_millis(200),
        ..all
    };
    let code = CompileBounds {
        code_bytes_max: 1000,
        ..all
    };
    check_exceeded(memory, &bomb(CALLS), "bytes of memory");
    check_exceeded(wall, &bomb(CALLS), "200ms");
    check_exceeded(code, STANDARD_POLICY, "1000 bytes of machine code");
}

/// Checks that a file exceeds this bound.
fn check_exceeded(bounds: CompileBounds, file: &[u8], what: &str) {
    let error = compile(bounds, file).unwrap_err();
    assert!(
        matches!(error, CompileError::Exceeded(_)),
        "{what}: {error}"
    );
    assert_contains!(error.to_string(), what);
}

/// With the bounds of a real store, the bomb must fail.
#[test]
fn half_a_megabyte_of_calls_exceeds_the_memory_bound() {
    check_exceeded(limits::COMPILE, &bomb(CALLS), "bytes of memory");
}

#[test]
fn processor_time_is_bounded() {
    let bounds = CompileBounds {
        cpu: Duration::from_secs(1),
        memory_bytes: 4 << 30,
        memory_bytes_max: 4 << 30,
        ..limits::COMPILE
    };
    check_exceeded(bounds, &bomb(2 * CALLS), "1s of processor time");
}

#[test]
fn missing_compiler_is_reported_as_a_machine_error() {
    let compiler = Compiler::new("/nowhere/at/all", limits::COMPILE);
    let error = compiler.compile(STANDARD_POLICY).unwrap_err();
    assert!(matches!(error, CompileError::Machine(_)), "{error}");
}
