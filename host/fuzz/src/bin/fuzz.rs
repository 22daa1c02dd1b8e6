//! Runs the target that `STATEHOUSE_FUZZ_TARGET` names under libFuzzer.
#![no_main]
#![allow(missing_docs)]

use std::sync::LazyLock;

use libfuzzer_sys::fuzz_target;
use statehouse_fuzz::{Target, target};

static CHOSEN: LazyLock<&Target> = LazyLock::new(|| {
    let name = std::env::var("STATEHOUSE_FUZZ_TARGET").unwrap_or_default();
    target(&name).unwrap_or_else(|| panic!("STATEHOUSE_FUZZ_TARGET is no target: `{name}`"))
});

fuzz_target!(|data: &[u8]| (CHOSEN.run)(data));
