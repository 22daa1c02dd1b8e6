//! One rule in three languages: each is built from its package registry and answers with the same bytes.

use crate::policies::{holds, transcript_of};
use statehouse_tests::policies;

#[test]
fn in_rust() {
    holds(
        &policies::example("set-point-rust"),
        &transcript_of("set-point"),
    );
}

#[test]
fn in_javascript() {
    holds(&policies::in_javascript(), &transcript_of("set-point"));
}

#[test]
fn in_python() {
    holds(&policies::in_python(), &transcript_of("set-point"));
}
