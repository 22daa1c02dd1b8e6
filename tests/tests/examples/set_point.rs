//! Tests one policy in three languages. Each is built with packages of its registry, and all must
//! give the same answers, byte for byte.

use crate::policies::{assert_transcript_holds, transcript_of};
use statehouse_tests::policies;

#[test]
fn set_point_in_rust_matches_the_transcript() {
    assert_transcript_holds(
        &policies::example("set-point-rust"),
        &transcript_of("set-point"),
    );
}

#[test]
fn set_point_in_javascript_matches_the_transcript() {
    assert_transcript_holds(&policies::in_javascript(), &transcript_of("set-point"));
}

#[test]
fn set_point_in_python_matches_the_transcript() {
    assert_transcript_holds(&policies::in_python(), &transcript_of("set-point"));
}
