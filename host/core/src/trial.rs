//! The trial of a policy before a store accepts it: a few requests on an empty store of its own.
//!
//! The trial shows whether the policy can respond at all. The responses are not checked. A start
//! must load the recorded policies without a trial: an earlier version may have accepted them. This
//! module reads no clock.

use std::sync::Arc;
use std::time::Instant;

use bytes::Bytes;
use statehouse_mqtt::{Properties, PropertiesBuilder};

use crate::policy::{BUILT_IN, Failure, LoadError, Policy, Registry};
use crate::request::{Dialect, Incoming};
use crate::store::{Peer, Quota, Store, Transaction};
use crate::{Core, Input, Now, Settings};

/// The requests of a trial: every client of a state store sends these commands.
const REQUESTS: [(&str, &[u8]); 3] = [
    ("GET", b"*2\r\n$3\r\nGET\r\n$9\r\nself-test\r\n"),
    ("SET", b"*3\r\n$3\r\nSET\r\n$9\r\nself-test\r\n$1\r\n1\r\n"),
    ("DEL", b"*2\r\n$3\r\nDEL\r\n$9\r\nself-test\r\n"),
];

/// The time of the trial. It is not a round number that a policy might treat as no time.
const NOW_MS: u64 = 1_700_000_000_123;

/// Accepts or refuses a policy: checks its name, and runs its trial at the instant `now`.
///
/// # Errors
/// If its name means the built-in policy, or if it fails on every request of the trial.
pub fn accept(policy: &Arc<Policy<Transaction>>, now: Instant) -> Result<(), LoadError> {
    if policy.name == BUILT_IN {
        return Err(LoadError::Description(
            "its name is reserved for the built-in policy",
        ));
    }
    policy.counters.begin_trial();
    let tried = run(policy, now);
    policy.work.clear();
    policy.counters.end_trial();
    tried
}

/// Runs the trial. A policy may fail on commands that it does not know, so only a policy that fails
/// on every request is refused.
fn run(policy: &Arc<Policy<Transaction>>, instant: Instant) -> Result<(), LoadError> {
    let registry = Registry::new(policy.clone(), None);
    let store = Store::new(registry, Quota::default());
    let settings = Settings {
        dialect: Some(Dialect::Sdk),
        ..Settings::default()
    };
    let mut core = Core::in_memory(store, settings);
    let peer = Peer::numbered("self-test", 1);
    let properties = PropertiesBuilder::new()
        .response_topic("self-test")
        .correlation_data(b"1")
        .finish()
        .and_then(Properties::parse)
        .unwrap_or_default();
    let now = Now {
        ms: NOW_MS,
        instant,
    };
    let mut failed: Option<(&'static str, Failure)> = None;
    let mut failures = 0;
    for (name, payload) in REQUESTS {
        let payload = Bytes::from_static(payload);
        let incoming = Incoming::new(&peer, &payload, &properties);
        let effects = core.handle(Input::Publish(&incoming), now).effects;
        if let Some(failure) = effects.failed {
            failures += 1;
            failed.get_or_insert((name, failure));
        }
    }
    match failed {
        Some((name, failure)) if failures == REQUESTS.len() => {
            Err(LoadError::SelfTest(name, failure))
        }
        _ => Ok(()),
    }
}
