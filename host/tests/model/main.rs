//! Compares the store with an oracle over a plain map: random commands in all dialects,
//! redeliveries at random later times, policy swaps, and restarts from records and from snapshots
//! that were taken between requests.
//!
//! The same cases run in both modes. Behind a foreign broker only the identity of a request marks a
//! redelivery, because DUP and packet identifiers mean nothing there, and watches survive restarts.
//!
//! A case must depend on its list of operations alone, so that a failing case can be shrunk and
//! printed as that list.

mod comparison;
mod model;
mod modes;
mod ops;
mod options;
mod oracle;
mod pattern;
mod scan;

use std::sync::{Arc, OnceLock};
use std::time::Instant;

use proptest::prelude::*;
use statehouse::STANDARD_POLICY;
use statehouse_core::log::record::PolicyRecord;
use statehouse_core::log::{Image, JournalRoom};
use statehouse_core::policy::{Engine, Instance, Policy, Registry};
use statehouse_core::request::Dialect;
use statehouse_core::store::{Mode, Quota, Retention, Store, Transaction};
use statehouse_core::{Core, Now};

use model::Model;

const START_MS: u64 = 1_700_000_000_000;
const CLIENTS: usize = 2;
const DIALECTS: [Dialect; 3] = [Dialect::Sdk, Dialect::Documents, Dialect::Preview];
const RETENTION: Retention = Retention {
    window_ms: 600_000,
    count_max: 100_000,
    bytes_max: 64 << 20,
    per_session: 4,
};
/// Behind a foreign broker the store remembers requests only within the window.
fn retention(mode: Mode) -> Retention {
    Retention {
        per_session: match mode {
            Mode::Embedded => RETENTION.per_session,
            Mode::Foreign => 0,
        },
        ..RETENTION
    }
}

/// A request without an expiry is remembered for this long (the protocol, section 9).
const WINDOW_MS: u64 = 60_000;
const QUOTA: Quota = Quota {
    keys_max: 4,
    bytes_max: 1 << 20,
    client_keys_max: 3,
    client_bytes_max: 1 << 20,
    key_bytes_max: 100,
    value_bytes_max: 100,
    watches_max: 1_000_000,
    watches_per_connection_max: 10_000,
    watch_bytes_max: 512 << 20,
    recent_bytes_max: 16 << 20,
    unreleased_bytes_max: 256 << 20,
    fuel_max: statehouse_config::limits::FUEL_PER_CALL_DEFAULT,
    journal: JournalRoom::Growth,
};

type Policies = [Arc<Policy<Transaction>>; 2];

fn policies() -> &'static Policies {
    static POLICIES: OnceLock<(Engine<Transaction>, Policies)> = OnceLock::new();
    let (_, policies) = POLICIES.get_or_init(|| {
        let engine = Engine::without_watchdog().expect("an engine");
        // A custom section changes only the digest: id 0, its length, its name with a length.
        let twin = [STANDARD_POLICY, b"\0\x05\x04twin"].concat();
        let load = |file: &[u8]| Arc::new(engine.load(file).expect("a policy"));
        let policies = [load(STANDARD_POLICY), load(&twin)];
        (engine, policies)
    });
    policies
}

/// The policy records that a start writes.
fn records() -> Vec<PolicyRecord> {
    let all = policies().iter();
    all.map(|policy| PolicyRecord::of(policy, false)).collect()
}

/// Promotes a policy. The policy before it remains loaded.
fn promote(core: &mut Core, policy: Arc<Policy<Transaction>>) {
    let digest = policy.digest.into();
    let registry = core.store_mut().registry();
    let loaded = registry.assignment().load(digest);
    let next = loaded.and_then(|it| it.promote(digest));
    let next = next.expect("there is room for two");
    let assigned = core.assign(next, vec![Instance::new(policy)]);
    assert!(assigned.is_ok(), "every named policy is ready");
}

/// No request here expires, so the instant does not matter.
fn now(ms: u64) -> Now {
    Now {
        ms,
        instant: Instant::now(),
    }
}

fn store_from_image(registry: Registry<Transaction>, image: Image) -> Store {
    Store::restore(registry, QUOTA, image.state, image.duplicates)
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: 1_000,
        failure_persistence: None,
        max_shrink_iters: 2_000,
        ..ProptestConfig::default()
    })]

    #[test]
    fn embedded_store_matches_the_protocol(ops in prop::collection::vec(ops::op(), 1..120)) {
        let mut model = Model::new(Mode::Embedded);
        for op in &ops {
            model.apply(op);
        }
    }

    #[test]
    fn foreign_store_matches_the_protocol(ops in prop::collection::vec(ops::op(), 1..120)) {
        let mut model = Model::new(Mode::Foreign);
        for op in &ops {
            model.apply(op);
        }
    }
}
