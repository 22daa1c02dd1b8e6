//! Tests policies that are composed of a rule and the standard policy. The rule is
//! tests/policies/rule.

use std::path::Path;
use std::sync::OnceLock;

use statehouse_testkit::compose::{ComposeError, compose, is_rule};
use statehouse_testkit::{Answer, Harness, check::check, conformance, transcript};

#[path = "../../tests/policies/building.rs"]
mod building;

/// Builds a module of tests/policies.
fn module(package: &str) -> Vec<u8> {
    let target = Path::new(env!("CARGO_TARGET_TMPDIR")).join("policies");
    std::fs::read(building::build(package, &target, |_| {})).expect("cargo built it")
}

fn composed() -> &'static [u8] {
    static POLICY: OnceLock<Vec<u8>> = OnceLock::new();
    POLICY.get_or_init(|| compose(&module("rule")).expect("the rule composes"))
}

fn harness() -> Harness {
    Harness::of(composed()).expect("a composed rule is a policy")
}

fn send(harness: &mut Harness, words: &[&str]) -> Answer {
    let answer = harness.client("client").send(words);
    assert_eq!(answer.hidden_state, None, "{words:?}");
    answer
}

#[test]
fn composed_rule_is_an_ordinary_policy() {
    let checked = check(composed());
    let fit = checked.policy.expect("it is a policy");
    assert_eq!((&*fit.name, &*fit.version), ("rule", "0.1.0"));
    assert_eq!(checked.exports, ["statehouse:policy/handler@1.0.0"]);
    assert!(
        checked
            .imports
            .iter()
            .all(|it| it.starts_with("statehouse:policy/"))
    );
    assert!(!is_rule(composed()));
    assert_eq!(
        compose(&module("rule")).unwrap(),
        composed(),
        "the bytes are the same"
    );
}

/// Regression: the advice was to export a handler, which a rule does not need.
#[test]
fn rule_that_is_not_composed_is_refused_with_the_advice_to_build_it() {
    let checked = check(&module("rule"));
    let wrong = checked.policy.expect_err("it is no policy");
    assert!(
        wrong.what.contains("`statehouse policy build`"),
        "{}",
        wrong.what
    );
    assert_eq!(wrong.advice, [""; 0]);
}

#[test]
fn standard_transcripts_hold_through_an_admitting_rule() {
    let harness = harness();
    for (name, text) in conformance::TRANSCRIPTS {
        let report = transcript::run(&harness, text).expect("a transcript");
        assert!(
            report.requests > 0 && report.is_well(),
            "{name}: {report:?}"
        );
    }
}

#[test]
fn rule_refuses_counts_and_fails_by_the_key() {
    let mut harness = harness();
    for _ in 0..2 {
        assert_eq!(
            send(&mut harness, &["SET", "refused/a", "1"]).payload,
            b"-ERR no SET  +OK\r\n"
        );
        assert_eq!(
            send(&mut harness, &["DEL", "refused/a"]).payload,
            b"-ERR no DEL  +OK\r\n"
        );
        assert_eq!(
            send(&mut harness, &["GET", "refused/a"]).payload,
            b"$-1\r\n"
        );
    }
    for expected in ["+OK\r\n", "+OK\r\n", "-ERR twice is enough\r\n"] {
        let answer = send(&mut harness, &["SET", "twice/a", "1", "NEX"]);
        assert_eq!(answer.payload, expected.as_bytes());
    }
    // The rule wrote, so a duplicate must not run again.
    let read = send(&mut Harness::of(composed()).unwrap(), &["GET", "twice/a"]);
    assert_eq!(read.payload, b"$-1\r\n");
    assert!(read.same_for_duplicate);
    // A duplicate of a refused change gets the refusal again.
    assert!(send(&mut harness, &["SET", "refused/a", "1"]).same_for_duplicate);
    assert!(!send(&mut harness, &["GET", "refused/a"]).same_for_duplicate);
    assert_eq!(
        send(&mut harness, &["SET", "other", "1"]).payload,
        b"+OK\r\n"
    );

    let failed = send(&mut harness, &["SET", "crash/a", "1"]);
    assert_eq!(
        failed.failure.as_deref(),
        Some("rule.txt:1: a crash on request")
    );
    assert_eq!(failed.payload, b"-ERR internal error\r\n");
    assert_eq!(failed.log[0].text, "rule.txt:1: a crash on request");
    assert_eq!(
        send(&mut harness, &["SET", "other", "2"]).payload,
        b"+OK\r\n"
    );
}

/// Regression: a NEX with another value to compare with was reported as a renewal, so a client that
/// knew the value of a lock could take the lock.
#[test]
fn nex_with_another_value_is_no_renewal() {
    let mut harness = harness();
    for (request, expected) in [
        ("SET renew/a holder NEX", "+OK\r\n"),
        ("SET renew/a holder PX 60000 NEX holder", "+OK\r\n"),
        ("SET renew/a thief NEX holder", "-ERR only renewals\r\n"),
        (
            "SET renew/a thief NEX holder PX 60000",
            "-ERR only renewals\r\n",
        ),
        ("SET renew/a thief", "-ERR only renewals\r\n"),
        ("GET renew/a", "$6\r\nholder\r\n"),
    ] {
        let words: Vec<&str> = request.split(' ').collect();
        let answer = send(&mut harness, &words);
        assert_eq!(answer.payload, expected.as_bytes(), "{request}");
    }
}

#[test]
fn module_that_is_no_rule_is_not_composed() {
    assert!(is_rule(&module("rule")));
    for other in [
        &b""[..],
        b"\0asm",
        &module("faulty"),
        statehouse::STANDARD_POLICY,
    ] {
        assert!(!is_rule(other));
    }
    let refused = compose(&module("faulty"));
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
        let refused = compose(&component(&format!("statehouse:policy/{interface}")));
        assert!(
            matches!(&refused, Err(ComposeError::Version(_))),
            "{refused:?}"
        );
    }
    for (import, is_wasi) in [
        ("wasi:cli/environment@0.2.3", true),
        ("other:a/b@1.0.0", false),
    ] {
        let refused = compose(&component(import)).expect_err("a foreign import");
        assert!(matches!(&refused, ComposeError::Import(_)), "{refused}");
        assert_eq!(refused.to_string().contains("WASI"), is_wasi, "{refused}");
    }
}
