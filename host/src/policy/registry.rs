//! Which policies there are and which one answers.
//!
//! What enters: loaded policies. What leaves: the active one's instance. Requests ask here before
//! each call, so that a change takes effect between two requests.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

use super::engine::Policy;
use super::guest::Host;
use super::instance::Instance;
use crate::limits;

/// The active policy and the one it stands on.
pub struct Registry<H: Host> {
    active: Instance<H>,
    /// Tells of expired keys where the active one fails to: a lock's waiters must hear of it.
    previous: Option<Instance<H>>,
    /// Those that handled requests which may come again.
    retired: Vec<Arc<Policy<H>>>,
}

impl<H: Host> Registry<H> {
    /// Starts with `active`; `previous` is what notifications of an expiry fall back to.
    pub fn new(active: Arc<Policy<H>>, previous: Option<Arc<Policy<H>>>) -> Self {
        Self {
            active: Instance::new(active),
            previous: previous.map(Instance::new),
            retired: Vec::new(),
        }
    }

    /// Keeps a policy for the requests that it handled.
    pub fn retire(&mut self, policy: Arc<Policy<H>>) {
        self.retired.push(policy);
    }

    /// Lets another policy answer from the next request on; the one before it stays behind it.
    pub fn promote(&mut self, policy: Arc<Policy<H>>) {
        let before = std::mem::replace(&mut self.active, Instance::new(policy));
        let oldest = self.previous.replace(before);
        self.retired.extend(oldest.map(|it| it.policy().clone()));
    }

    /// The policy of that digest, if it is here.
    pub fn by_digest(&self, digest: &blake3::Hash) -> Option<Arc<Policy<H>>> {
        let previous = self.previous.as_ref().map(Instance::policy);
        [self.active.policy()]
            .into_iter()
            .chain(previous)
            .chain(&self.retired)
            .find(|policy| policy.digest == *digest)
            .cloned()
    }

    /// The instance that answers requests.
    pub fn active(&mut self) -> &mut Instance<H> {
        &mut self.active
    }

    /// The instance before it.
    pub fn previous(&mut self) -> Option<&mut Instance<H>> {
        self.previous.as_mut()
    }
}

/// What a policy counts under names of its own.
pub struct Counters {
    /// The policy's name, version and short digest, for log lines.
    pub policy: String,
    values: Mutex<BTreeMap<String, u64>>,
    /// The second of the last log line about this policy, and how many there were in it.
    logged: Mutex<(u64, u32)>,
}

impl Counters {
    pub(super) fn new(policy: String) -> Self {
        Self {
            policy,
            values: Mutex::default(),
            logged: Mutex::default(),
        }
    }

    /// Adds to a counter; names beyond the bound are dropped.
    pub fn add(&self, name: &str, by: u64) {
        // A poisoned lock only means that a thread died between two whole updates.
        let mut values = self.values.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(value) = values.get_mut(name) {
            *value = value.saturating_add(by);
        } else if values.len() < limits::GUEST_COUNTERS_MAX
            && name.len() <= limits::POLICY_NAME_BYTES_MAX
        {
            values.insert(name.to_owned(), by);
        }
    }

    /// Whether one more line by or about this policy may be logged: it and its clients decide how many
    /// there would be, and an instance that is replaced after a trap must not begin anew.
    pub fn may_log(&self, now_ms: u64) -> bool {
        let mut logged = self.logged.lock().unwrap_or_else(PoisonError::into_inner);
        let second = now_ms / 1000;
        if logged.0 != second {
            *logged = (second, 0);
        }
        logged.1 = logged.1.saturating_add(1);
        let allowed = logged.1 <= limits::GUEST_LOG_LINES_PER_SECOND_MAX;
        drop(logged);
        if !allowed {
            self.add("log_lines_dropped", 1);
        }
        allowed
    }

    /// All of them.
    pub fn all(&self) -> BTreeMap<String, u64> {
        self.values
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clone()
    }
}
