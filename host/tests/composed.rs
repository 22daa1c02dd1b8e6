//! Tests policies that are composed of a rule and the standard policy. The rule is
//! tests/policies/rule.

use std::sync::OnceLock;

use statehouse_testkit::compose::{ComposeError, compose, is_rule};
use statehouse_testkit::{Answer, Harness, check::check, conformance, transcript};
use statehouse_tests::{assert_contains, policies::example};

/// Builds a module of tests/policies.
fn module(package: &str) -> Vec<u8> {
    std::fs::read(example(package)).expect("cargo built it")
}

fn composed() -> &'static [u8] {
    static POLICY: OnceLock<Vec<u8>> = OnceLock::new();
    POLICY.get_or_init(|| compose(&module("rule")).expect("the rule composes"))
}

fn harness() -> Harness {
    Harness::of(composed()).expect("a composed rule is a policy")
}

/// Sends the words of a request.
fn send(harness: &mut Harness, request: &str) -> Answer {
    let words: Vec<&str> = request.split(' ').collect();
    let answer = harness.client("client").send(&words);
    assert_eq!(answer.hidden_state, None, "{request}");
    answer
}

/// Sends requests and compares their answers.
fn converse(harness: &mut Harness, requests: &[(&str, &str)]) {
    for (request, expected) in requests {
        let answer = send(harness, request);
        assert_eq!(answer.payload, expected.as_bytes(), "{request}");
    }
}

#[test]
fn composed_rule_is_an_ordinary_policy() {
    let checked = check(composed());
    let fit = checked.policy.expect("it is a policy");
    assert_eq!((&*fit.name, &*fit.version), ("rule", "0.1.0"));
    assert_eq!(checked.exports, ["statehouse:policy/handler@1.0.0"]);
    let mut imports = checked.imports.iter();
    assert!(imports.all(|it| it.starts_with("statehouse:policy/")));
    assert!(!is_rule(composed()));
    let again = compose(&module("rule")).unwrap();
    assert_eq!(again, composed(), "the bytes are the same");
}

/// Regression: the advice was to export a handler, which a rule does not need.
#[test]
fn rule_that_is_not_composed_is_refused_with_the_advice_to_build_it() {
    let checked = check(&module("rule"));
    let wrong = checked.policy.expect_err("it is no policy");
    assert_contains!(wrong.what, "`statehouse policy build`");
    assert_eq!(wrong.advice, [""; 0]);
}

#[test]
fn standard_transcripts_hold_through_an_admitting_rule() {
    let harness = harness();
    for (name, text) in conformance::TRANSCRIPTS {
        let report = transcript::run(&harness, text).expect("a transcript");
        assert!(report.requests > 0, "{name}");
        assert!(report.is_well(), "{name}: {report:?}");
    }
}

#[test]
fn rule_refuses_counts_and_fails_by_the_key() {
    let mut harness = harness();
    let refused = [
        ("SET refused/a 1", "-ERR no SET  +OK\r\n"),
        ("DEL refused/a", "-ERR no DEL  +OK\r\n"),
        ("GET refused/a", "$-1\r\n"),
    ];
    converse(&mut harness, &refused);
    converse(&mut harness, &refused);
    for expected in ["+OK\r\n", "+OK\r\n", "-ERR twice is enough\r\n"] {
        converse(&mut harness, &[("SET twice/a 1 NEX", expected)]);
    }
    // The rule wrote, so a duplicate must not run again.
    let read = send(&mut self::harness(), "GET twice/a");
    assert_eq!(read.payload, b"$-1\r\n");
    assert!(read.same_for_duplicate);
    // A duplicate of a refused change gets the refusal again.
    assert!(send(&mut harness, "SET refused/a 1").same_for_duplicate);
    assert!(!send(&mut harness, "GET refused/a").same_for_duplicate);
    converse(&mut harness, &[("SET other 1", "+OK\r\n")]);

    let failed = send(&mut harness, "SET crash/a 1");
    let cause = "rule.txt:1: a crash on request";
    assert_eq!(failed.failure.as_deref(), Some(cause));
    assert_eq!(failed.payload, b"-ERR internal error\r\n");
    assert_eq!(failed.log[0].text, cause);
    converse(&mut harness, &[("SET other 2", "+OK\r\n")]);
}

/// Regression: a NEX with another value to compare with was reported as a renewal, so a client that
/// knew the value of a lock could take the lock.
#[test]
fn nex_with_another_value_is_no_renewal() {
    let refused = "-ERR only renewals\r\n";
    let requests = [
        ("SET renew/a holder NEX", "+OK\r\n"),
        ("SET renew/a holder PX 60000 NEX holder", "+OK\r\n"),
        ("SET renew/a thief NEX holder", refused),
        ("SET renew/a thief NEX holder PX 60000", refused),
        ("SET renew/a thief", refused),
        ("GET renew/a", "$6\r\nholder\r\n"),
    ];
    converse(&mut harness(), &requests);
}

#[test]
fn module_that_is_no_rule_is_not_composed() {
    assert!(is_rule(&module("rule")));
    let faulty = module("faulty");
    for other in [&b""[..], b"\0asm", &faulty, statehouse::STANDARD_POLICY] {
        assert!(!is_rule(other));
    }
    let refused = compose(&faulty);
    assert!(matches!(&refused, Err(ComposeError::NoRule)), "{refused:?}");
    for other in [&b"\0asm\x01\0\0\0"[..], b"\0asm\x01\0\0\0\x01"] {
        assert!(compose(other).is_err(), "{other:?}");
    }
}

/// Regression: the advice was to build it without WASI.
#[test]
fn rule_for_another_contract_is_refused_with_its_version() {
    let named = |name: &str| {
        let len = u8::try_from(name.len()).expect("a short name");
        [&[1, 0, len][..], name.as_bytes(), &[5, 0]].concat()
    };
    let component = |import: &str| {
        // The type of an empty instance, and one import of that type.
        let mut file = b"\0asm\x0d\0\x01\0\x07\x03\x01\x42\0".to_vec();
        let import = named(import);
        file.extend([10, u8::try_from(import.len()).expect("a short section")]);
        file.extend(import);
        file
    };
    for interface in ["table@1.1.0", "more@1.1.0"] {
        let interface = format!("statehouse:policy/{interface}");
        let refused = compose(&component(&interface)).expect_err("a newer contract");
        assert!(matches!(refused, ComposeError::Version(_)), "{refused}");
    }
    for (import, is_wasi) in [
        ("wasi:cli/environment@0.2.3", true),
        ("other:a/b@1.0.0", false),
    ] {
        let refused = compose(&component(import)).expect_err("a foreign import");
        assert!(matches!(refused, ComposeError::Import(_)), "{refused}");
        assert_eq!(refused.to_string().contains("WASI"), is_wasi, "{refused}");
    }
}
