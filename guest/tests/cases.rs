//! Runs the transcripts of `cases/` over the table of the SDK. The host runs the same files over
//! the component.

use statehouse_guest::Standard;
use statehouse_policy::Policy;
use statehouse_policy::testing::{Tabled, cases};

/// Runs a transcript; the minimum of requests keeps a missing or empty file from passing.
fn run(text: &str, requests_min: usize) {
    let policy = Standard::configure(&[]).expect("it takes no options");
    match cases::run(text, &mut Tabled::new(&policy)) {
        Ok(requests) => assert!(requests >= requests_min, "only {requests} requests"),
        Err(error) => panic!("{error}"),
    }
}

#[test]
fn form() {
    run(include_str!("../cases/form.txt"), 120);
}

#[test]
fn answers() {
    run(include_str!("../cases/answers.txt"), 120);
}

#[test]
fn clock() {
    run(include_str!("../cases/clock.txt"), 20);
}

#[test]
fn fence() {
    run(include_str!("../cases/fence.txt"), 60);
}

#[test]
fn expiry() {
    run(include_str!("../cases/expiry.txt"), 25);
}

#[test]
fn notify() {
    run(include_str!("../cases/notify.txt"), 40);
}

#[test]
fn scan() {
    run(include_str!("../cases/scan.txt"), 20);
}

#[test]
fn extensions() {
    run(include_str!("../cases/extensions.txt"), 30);
}
