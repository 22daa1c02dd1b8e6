//! Tests one rule in three languages. Each is built with packages of its registry, and all must
//! give the same answers, byte for byte.

use crate::policies::{assert_transcript_holds, transcript_of};
use statehouse_tests::command::{command, finish_within};
use statehouse_tests::policies;

#[test]
fn set_point_in_rust_matches_the_transcript() {
    assert_transcript_holds(&policies::set_point("rust"), &transcript_of("set-point"));
}

/// Without a server, because it would compile the interpreter once more.
fn check(language: &str) {
    let policy = policies::set_point(language);
    let (policy, transcript) = (policy.to_str().unwrap(), transcript_of("set-point"));
    let test = command(&["policy", "test", policy, &transcript]);
    let ran = finish_within(test, b"", policies::COMPILER_PATIENCE).code(0);
    ran.prints(&["no hidden state"]);
}

#[test]
fn set_point_in_javascript_matches_the_transcript() {
    check("js");
}

#[test]
#[ignore = "slow: builds and compiles the interpreter of Python"]
fn set_point_in_python_matches_the_transcript() {
    check("python");
}
