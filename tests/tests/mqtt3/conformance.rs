//! Runs the checks, and compares them with the table of `host/docs/mqtt-3-conformance.md`.

use crate::scene::{self, Check};

/// The checks of all modules. Those of `access` and `limits` need settings of their own.
const MODULES: [&[Check]; 13] = [
    crate::clients::CHECKS,
    crate::connect::CHECKS,
    crate::delivery::CHECKS,
    crate::malformed::CHECKS,
    crate::ordering::CHECKS,
    crate::restarts::CHECKS,
    crate::retained::CHECKS,
    crate::sessions::CHECKS,
    crate::subscriptions::CHECKS,
    crate::transports::CHECKS,
    crate::versions::CHECKS,
    crate::wills::CHECKS,
    &[],
];

fn checks() -> impl Iterator<Item = &'static Check> {
    MODULES.iter().copied().flatten()
}

#[test]
fn statehouse_passes_every_check() {
    scene::run(true, checks());
}

#[test]
fn mosquitto_passes_every_check_but_those_of_its_choice() {
    scene::run(false, checks());
}
