//! The assignment: which policy handles which requests, and how operators may change that.
//!
//! Every change produces a new document, or an error that says what to do. The whole document is
//! recorded with every change and recovered after a restart. This module neither loads nor runs
//! policies.

use serde::{Deserialize, Serialize};

use super::digest::Digest;
use super::origin::{Act, Actor, Origin};
use crate::limits;
use statehouse_protocol::pattern;

mod delivered;
mod prefix;

pub use delivered::Delivered;
pub use prefix::Prefix;

/// The policies and their roles.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Assignment {
    /// The policy that is part of the program. It is always loaded, and renders notifications when
    /// another policy cannot.
    pub built_in: Digest,
    /// Handles every request that no route and no canary takes.
    pub active: Digest,
    /// Formerly active policies, the newest first. A rollback returns to the first, or that of the
    /// guard to the first that it did not decide about, and to the built-in policy if there is none.
    #[serde(default)]
    pub previous: Vec<Digest>,
    /// A candidate that re-executes live requests only for comparison.
    #[serde(default)]
    pub shadow: Option<Shadow>,
    /// A candidate that handles a part of the requests.
    #[serde(default)]
    pub canary: Option<Canary>,
    /// Policies that handle requests for keys under a prefix. The longest prefix wins.
    #[serde(default)]
    pub routes: Vec<Route>,
    /// All loaded policies apart from the built-in one, the newest last.
    #[serde(default)]
    pub loaded: Vec<Digest>,
    /// The last rollback, or end of a canary, that the guard decided. It is kept until an operator
    /// makes that policy active again.
    #[serde(default)]
    pub guard: Option<RolledBack>,
    /// The decisions of the guard before, about other policies, the newest first. A field of their
    /// own, because version 0.1.0 of the program reads the last one.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub guard_before: Vec<RolledBack>,
    /// The files that a drop directory delivered, the newest last. Policies that were unloaded since
    /// are among them, so that no restart and no other host of a cluster delivers a file again.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub delivered: Vec<Delivered>,
    /// The serial number of the last signed order that was carried out. Lower or equal numbers are
    /// refused as replays.
    #[serde(default)]
    pub serial: u64,
    /// How policies came to the store and to their roles. Older versions record none.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub origins: Vec<Origin>,
    /// Fields of later versions, which every change keeps. A field that decides which policy
    /// handles a request must not be one of them: it needs a new kind of record, which this version
    /// refuses.
    #[serde(flatten)]
    pub later: serde_json::Map<String, serde_json::Value>,
}

/// A candidate in shadow.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Shadow {
    /// The candidate.
    pub policy: Digest,
    /// How many of a thousand requests it re-executes.
    pub per_mille: u16,
}

/// A canary.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Canary {
    /// The candidate.
    pub policy: Digest,
    /// The requests that it handles.
    pub rule: CanaryRule,
}

/// Which requests a canary handles.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum CanaryRule {
    /// Requests of clients whose id matches this pattern.
    Clients(String),
    /// Requests for keys that match this pattern.
    Keys(String),
    /// Requests of this percentage of clients: always the same clients.
    Percent(u8),
}

impl CanaryRule {
    /// Whether the canary handles a request.
    pub(super) fn takes(&self, client: &str, key: Option<&[u8]>) -> bool {
        match self {
            Self::Clients(pattern) => pattern::matches(pattern.as_bytes(), client.as_bytes()),
            Self::Keys(pattern) => key.is_some_and(|key| pattern::matches(pattern.as_bytes(), key)),
            Self::Percent(percent) => share_of(client) < u64::from(*percent),
        }
    }

    fn check(&self) -> Result<(), AssignmentError> {
        match self {
            Self::Percent(1..=100) => Ok(()),
            Self::Percent(_) => Err(AssignmentError::Percent),
            Self::Clients(pattern) | Self::Keys(pattern) => {
                let has_length = (1..=limits::CANARY_PATTERN_BYTES_MAX).contains(&pattern.len());
                // A `[` without `]` is probably a mistake, and makes each comparison slower.
                match has_length && pattern::is_closed(pattern.as_bytes()) {
                    true => Ok(()),
                    false => Err(AssignmentError::Pattern),
                }
            }
        }
    }
}

/// A number below 100 that depends on the client id alone.
fn share_of(client: &str) -> u64 {
    let hash = blake3::hash(client.as_bytes());
    let first = hash.as_bytes().first_chunk().unwrap_or(&[0; 8]);
    u64::from_be_bytes(*first) % 100
}

/// A policy that owns the keys under a prefix.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Route {
    /// The prefix of its keys.
    pub prefix: Prefix,
    /// The policy that owns them.
    pub policy: Digest,
}

/// A rollback, or the end of a canary, that the guard decided.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RolledBack {
    /// The policy that handled requests until then.
    pub policy: Digest,
    /// The reason, as text.
    pub why: String,
    /// The time in milliseconds.
    pub now_ms: u64,
    /// Whether the policy was the canary and only the canary ended. False in records of versions
    /// without this field.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub canary: bool,
}

/// A role of a policy.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Role {
    /// Handles every request that no other role takes.
    Active,
    /// A rollback can return to it.
    Previous,
    /// Re-executes requests for comparison.
    Shadow,
    /// Handles some clients or keys.
    Canary,
    /// Owns the keys under a prefix.
    Routed,
}

impl Role {
    /// The name, as in JSON.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Active => "active",
            Self::Previous => "previous",
            Self::Shadow => "shadow",
            Self::Canary => "canary",
            Self::Routed => "routed",
        }
    }
}

/// Why a change of the assignment was refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AssignmentError {
    /// The policy is not loaded.
    #[error("the policy {0} is not loaded: load its file first")]
    NotLoaded(Digest),
    /// There is no previous policy.
    #[error("there is nothing to go back to: no other policy was active before this one")]
    NothingBefore,
    /// The policy is in use.
    #[error("the policy {0} cannot be unloaded, because it {1}")]
    InUse(Digest, &'static str),
    /// Too many policies are loaded.
    #[error(
        "{max} policies are loaded and each of them is in use: unload one, or end a route, a canary or a shadow",
        max = limits::LOADED_POLICIES_MAX
    )]
    Full,
    /// Too many routes.
    #[error("there are {max} routes, the maximum: end one first", max = limits::ROUTES_MAX)]
    Routes,
    /// The length of a prefix is out of range.
    #[error("a prefix must have 1 to {max} bytes", max = limits::ROUTE_PREFIX_BYTES_MAX)]
    Prefix,
    /// There is no route for this prefix.
    #[error("there is no route for this prefix; the routes are listed by `statehouse policy list`")]
    NoRoute,
    /// The percentage is out of range.
    #[error("a canary takes 1 to 100 percent of the clients")]
    Percent,
    /// The length of a pattern is out of range, or a bracket is not closed.
    #[error(
        "a pattern must have 1 to {max} bytes, and a `]` for each `[`; `\\[` stands for a bracket",
        max = limits::CANARY_PATTERN_BYTES_MAX
    )]
    Pattern,
    /// The share of requests is out of range.
    #[error("a shadow re-executes 1 to 1000 of a thousand requests")]
    PerMille,
    /// The order is a replay, or was overtaken by a newer one.
    #[error("the order {0} is not newer than {1}, the last one that was taken")]
    Serial(u64, u64),
    /// The candidate is already active.
    #[error("the policy {0} is the active one and cannot be its own candidate")]
    Active(Digest),
}

impl Assignment {
    /// An assignment of the built-in policy alone.
    pub fn of(built_in: Digest) -> Self {
        Self {
            built_in,
            active: built_in,
            previous: Vec::new(),
            shadow: None,
            canary: None,
            routes: Vec::new(),
            loaded: Vec::new(),
            guard: None,
            guard_before: Vec::new(),
            delivered: Vec::new(),
            serial: 0,
            origins: Vec::new(),
            later: serde_json::Map::new(),
        }
    }

    /// All policies that the assignment names, each once.
    pub fn all(&self) -> Vec<Digest> {
        let mut all = vec![self.built_in];
        let routed = self.routes.iter().map(|route| route.policy);
        let named = std::iter::once(self.active)
            .chain(self.previous.iter().copied())
            .chain(self.shadow.iter().map(|it| it.policy))
            .chain(self.canary.iter().map(|it| it.policy))
            .chain(routed)
            .chain(self.loaded.iter().copied());
        for digest in named {
            if !all.contains(&digest) {
                all.push(digest);
            }
        }
        all
    }

    /// The roles of a policy.
    pub fn roles(&self, digest: &Digest) -> Vec<Role> {
        let is_shadow = self.shadow.is_some_and(|it| it.policy == *digest);
        let is_canary = self.canary.as_ref().is_some_and(|it| it.policy == *digest);
        let is_routed = self.routes.iter().any(|it| it.policy == *digest);
        let roles = [
            (self.active == *digest, Role::Active),
            (self.previous.contains(digest), Role::Previous),
            (is_shadow, Role::Shadow),
            (is_canary, Role::Canary),
            (is_routed, Role::Routed),
        ];
        let held = roles.into_iter().filter(|(held, _)| *held);
        held.map(|(_, role)| role).collect()
    }

    /// Accepts a signed order. Its serial number, and all lower ones, must never be accepted again.
    pub fn accept(&self, serial: u64) -> Result<Self, AssignmentError> {
        if serial <= self.serial {
            return Err(AssignmentError::Serial(serial, self.serial));
        }
        Ok(Self {
            serial,
            ..self.clone()
        })
    }

    /// Adds a loaded policy. If there are too many, the oldest one without a role is removed.
    pub fn load(&self, policy: Digest) -> Result<Self, AssignmentError> {
        let mut next = self.clone();
        if next.is_loaded(policy) {
            return Ok(next);
        }
        if next.loaded.len() >= limits::LOADED_POLICIES_MAX {
            let idle = next.loaded.iter().position(|it| self.roles(it).is_empty());
            next.loaded.remove(idle.ok_or(AssignmentError::Full)?);
        }
        next.loaded.push(policy);
        Ok(next)
    }

    /// Makes a policy active. The one before becomes the first previous one.
    pub fn promote(&self, policy: Digest) -> Result<Self, AssignmentError> {
        self.check_loaded(policy)?;
        let mut next = self.clone();
        if policy != self.active {
            let previous = &mut next.previous;
            previous.retain(|it| *it != policy && *it != self.active);
            previous.insert(0, self.active);
            previous.truncate(limits::PREVIOUS_POLICIES_MAX);
        }
        next.overrule(policy);
        next.activate(policy);
        Ok(next)
    }

    /// The policy that a rollback by an operator returns to: the first previous one, or else the
    /// built-in one, which is always loaded. `None` if the built-in policy is active and there is
    /// no previous one.
    pub fn before(&self) -> Option<Digest> {
        let built_in = Some(self.built_in).filter(|it| *it != self.active);
        self.previous.first().copied().or(built_in)
    }

    /// The policy that the guard returns to: the first previous one that it has not decided about,
    /// or else the built-in one. `None` if that is active already.
    pub fn fallback(&self) -> Option<Digest> {
        let mut previous = self.previous.iter().copied();
        let built_in = Some(self.built_in).filter(|it| *it != self.active);
        previous
            .find(|it| self.decision(*it).is_none())
            .or(built_in)
    }

    /// Makes the policy of [`Self::before`] active again. Repeated rollbacks go further back.
    pub fn rollback(&self) -> Result<Self, AssignmentError> {
        let before = self.before().ok_or(AssignmentError::NothingBefore)?;
        let mut next = self.clone();
        next.overrule(before);
        next.activate(before);
        Ok(next)
    }

    /// Records a rollback that the guard decided, to the policy of [`Self::fallback`]. The policies
    /// that it passes over are no longer previous ones, so a further rollback does not return to
    /// them.
    pub fn roll_back_for(&self, why: String, now_ms: u64) -> Result<Self, AssignmentError> {
        let before = self.fallback().ok_or(AssignmentError::NothingBefore)?;
        let mut next = self.clone();
        let passed = next.previous.iter().take_while(|it| **it != before).count();
        next.previous.drain(..passed);
        next.activate(before);
        next.decide(RolledBack {
            policy: self.active,
            why,
            now_ms,
            canary: false,
        });
        let act = Act {
            at_ms: now_ms,
            by: Actor::guard(),
        };
        Ok(next.noted(self, &act, None))
    }

    /// Records the end of a canary that the guard decided.
    pub fn end_canary_for(&self, why: String, now_ms: u64) -> Result<Self, AssignmentError> {
        let Some(canary) = &self.canary else {
            return Err(AssignmentError::NothingBefore);
        };
        let mut next = self.clone();
        next.decide(RolledBack {
            policy: canary.policy,
            why,
            now_ms,
            canary: true,
        });
        next.canary = None;
        Ok(next)
    }

    /// The guard's decision about a policy, unless an operator made the policy active since. Only
    /// an operator may then do that, and neither the guard nor a setting nor a file that is still
    /// there. Only the built-in policy the guard makes active all the same, if no other is left.
    pub fn decision(&self, policy: Digest) -> Option<&RolledBack> {
        let mut all = self.guard.iter().chain(&self.guard_before);
        all.find(|it| it.policy == policy)
    }

    /// Adds a decision of the guard.
    fn decide(&mut self, decision: RolledBack) {
        self.overrule(decision.policy);
        let last = self.guard.replace(decision);
        self.guard_before.splice(..0, last);
        self.guard_before.truncate(limits::GUARD_DECISIONS_MAX - 1);
    }

    /// Removes the guard's decision about a policy.
    fn overrule(&mut self, policy: Digest) {
        self.guard_before.retain(|it| it.policy != policy);
        if self.guard.as_ref().is_some_and(|it| it.policy == policy) {
            let has_more = !self.guard_before.is_empty();
            self.guard = has_more.then(|| self.guard_before.remove(0));
        }
    }

    /// Starts or ends shadowing.
    pub fn shadow(&self, shadow: Option<Shadow>) -> Result<Self, AssignmentError> {
        if let Some(Shadow { policy, per_mille }) = shadow {
            self.check_candidate(policy)?;
            if !(1..=1000).contains(&per_mille) {
                return Err(AssignmentError::PerMille);
            }
        }
        Ok(Self {
            shadow,
            ..self.clone()
        })
    }

    /// Starts or ends a canary.
    pub fn canary(&self, canary: Option<Canary>) -> Result<Self, AssignmentError> {
        if let Some(Canary { policy, rule }) = &canary {
            self.check_candidate(*policy)?;
            rule.check()?;
        }
        Ok(Self {
            canary,
            ..self.clone()
        })
    }

    /// Adds, changes or ends the route of a prefix.
    pub fn route(&self, prefix: &[u8], policy: Option<Digest>) -> Result<Self, AssignmentError> {
        if prefix.is_empty() || prefix.len() > limits::ROUTE_PREFIX_BYTES_MAX {
            return Err(AssignmentError::Prefix);
        }
        let mut next = self.clone();
        let known = next.routes.iter().position(|it| it.prefix.0 == prefix);
        match (policy, known) {
            (None, None) => return Err(AssignmentError::NoRoute),
            (None, Some(at)) => drop(next.routes.remove(at)),
            (Some(policy), known) => {
                self.check_loaded(policy)?;
                match known {
                    Some(at) => next.routes[at].policy = policy,
                    None if next.routes.len() >= limits::ROUTES_MAX => {
                        return Err(AssignmentError::Routes);
                    }
                    None => next.routes.push(Route {
                        prefix: Prefix(prefix.to_vec()),
                        policy,
                    }),
                }
            }
        }
        Ok(next)
    }

    /// Removes a loaded policy.
    pub fn unload(&self, policy: Digest) -> Result<Self, AssignmentError> {
        self.check_loaded(policy)?;
        if policy == self.built_in {
            return Err(AssignmentError::InUse(policy, "comes with the program"));
        }
        for role in self.roles(&policy) {
            let why = match role {
                Role::Active => "answers requests: promote another one first",
                Role::Shadow => "is the shadow: end that first",
                Role::Canary => "is the canary: end that first",
                Role::Routed => "owns the keys of a route: end that first",
                Role::Previous => continue,
            };
            return Err(AssignmentError::InUse(policy, why));
        }
        let mut next = self.clone();
        next.previous.retain(|it| *it != policy);
        next.loaded.retain(|it| *it != policy);
        Ok(next)
    }

    /// Replaces a policy in all of its roles: with the built-in policy of another version of the
    /// program.
    pub fn replace(&self, old: Digest, new: Digest) -> Self {
        let mut next = self.clone();
        let change = |it: &mut Digest| {
            if *it == old {
                *it = new;
            }
        };
        change(&mut next.built_in);
        change(&mut next.active);
        next.previous.iter_mut().for_each(change);
        next.loaded.iter_mut().for_each(change);
        next.routes.iter_mut().for_each(|it| change(&mut it.policy));
        next.canary.iter_mut().for_each(|it| change(&mut it.policy));
        next.shadow.iter_mut().for_each(|it| change(&mut it.policy));
        // The new policy came with the program, and has the roles since the same act.
        (next.origins).retain(|it| it.policy != new || old == new);
        (next.origins.iter_mut()).for_each(|it| change(&mut it.policy));
        next.tidy();
        next.loaded.retain(|it| *it != next.built_in);
        next
    }

    /// Drops a policy that is lost from all roles but the active one, which must never change
    /// silently.
    pub fn without(&self, policy: Digest) -> Self {
        let mut next = self.clone();
        next.previous.retain(|it| *it != policy);
        next.loaded.retain(|it| *it != policy);
        next.routes.retain(|it| it.policy != policy);
        next.origins.retain(|it| it.policy != policy);
        next.canary = next.canary.filter(|it| it.policy != policy);
        next.shadow = next.shadow.filter(|it| it.policy != policy);
        next
    }

    fn activate(&mut self, policy: Digest) {
        self.active = policy;
        self.tidy();
    }

    /// Removes repetitions, and candidates that are the active policy.
    fn tidy(&mut self) {
        let active = self.active;
        self.canary = self.canary.take().filter(|it| it.policy != active);
        self.shadow = self.shadow.filter(|it| it.policy != active);
        self.previous.retain(|it| *it != active);
        for list in [&mut self.previous, &mut self.loaded] {
            let mut seen = Vec::new();
            list.retain(|it| {
                let new = !seen.contains(it);
                seen.push(*it);
                new
            });
        }
    }

    fn is_loaded(&self, policy: Digest) -> bool {
        policy == self.built_in || self.loaded.contains(&policy)
    }

    fn check_loaded(&self, policy: Digest) -> Result<(), AssignmentError> {
        match self.is_loaded(policy) {
            true => Ok(()),
            false => Err(AssignmentError::NotLoaded(policy)),
        }
    }

    fn check_candidate(&self, policy: Digest) -> Result<(), AssignmentError> {
        self.check_loaded(policy)?;
        match policy == self.active {
            true => Err(AssignmentError::Active(policy)),
            false => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests;
