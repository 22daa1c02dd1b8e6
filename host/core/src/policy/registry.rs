//! The loaded policies, and the choice of the one that handles a request.
//!
//! Every request chooses its policy here before the call, so a change takes effect between two
//! requests.

use std::sync::Arc;

use bytes::Bytes;

use super::assignment::{Assignment, CanaryRule};
use super::budget::{Failure, Share};
use super::digest::Digest;
use super::engine::Policy;
use super::guest::Host;
use super::instance::Instance;
use crate::limits;

/// All loaded policies.
pub struct Registry<H: Host> {
    slots: Vec<Instance<H>>,
    /// Policies that the assignment no longer names, but that handled requests which may be
    /// redelivered.
    retired: Vec<Arc<Policy<H>>>,
    assignment: Assignment,
    active: usize,
    built_in: usize,
    canary: Option<(usize, CanaryRule)>,
    shadow: Option<(usize, u16)>,
    routes: Arc<Routes>,
    /// The slots of the routes, in the same order.
    routed: Vec<usize>,
}

/// Routes, sorted by descending length of the prefix.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Routes(Vec<(Vec<u8>, Digest)>);

impl Routes {
    fn of(assignment: &Assignment) -> Self {
        let routes = assignment.routes.iter();
        let mut routes: Vec<_> = routes.map(|it| (it.prefix.0.clone(), it.policy)).collect();
        routes.sort_by_key(|(prefix, _)| std::cmp::Reverse(prefix.len()));
        Self(routes)
    }

    /// The index of the route that a key belongs to.
    fn place(&self, key: &[u8]) -> Option<usize> {
        self.0
            .iter()
            .position(|(prefix, _)| key.starts_with(prefix))
    }

    /// Whether a route gives the key to another policy.
    pub fn is_owned_by_other(&self, policy: &Digest, key: &[u8]) -> bool {
        self.place(key).is_some_and(|at| self.0[at].1 != *policy)
    }

    /// Whether a route gives the key to `policy`.
    pub fn owns(&self, policy: &Digest, key: &[u8]) -> bool {
        self.place(key).is_some_and(|at| self.0[at].1 == *policy)
    }
}

/// The policy that handles a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Choice {
    pub(crate) slot: usize,
    /// Why it was chosen.
    pub part: Part,
    /// Whether a route chose it. The guard does not count such a request, because a rollback does
    /// not end the route.
    pub by_route: bool,
}

/// Why a policy handles a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    /// It is the active policy.
    Active,
    /// It is a canary for this client or key.
    Canary,
    /// It owns the key by a route, and may write only keys of its routes.
    Routed,
}

/// The key of a request, if a policy could determine it.
#[derive(Debug, Default)]
pub struct KeyLookup {
    /// The key.
    pub key: Option<Bytes>,
    /// The policies that failed, with the fuel used and the failure.
    pub failures: Vec<(Choice, u64, Failure)>,
}

/// The assignment names this policy, which is not loaded.
#[derive(Debug, PartialEq, Eq)]
pub struct Absent(pub Digest);

impl<H: Host> Registry<H> {
    /// Starts with `active`, and with `built_in` for rollbacks and as the fallback for
    /// notifications. Without `built_in`, `active` has that role, too.
    pub fn new(active: Arc<Policy<H>>, built_in: Option<Arc<Policy<H>>>) -> Self {
        let built_in = built_in.unwrap_or_else(|| active.clone());
        let mut assignment = Assignment::of(built_in.digest.into());
        if active.digest != built_in.digest {
            assignment.loaded.push(active.digest.into());
            assignment.previous.push(built_in.digest.into());
            assignment.active = active.digest.into();
        }
        let mut slots = vec![Instance::new(built_in)];
        if assignment.active != assignment.built_in {
            slots.push(Instance::new(active));
        }
        Self {
            active: slots.len() - 1,
            slots,
            retired: Vec::new(),
            assignment,
            built_in: 0,
            canary: None,
            shadow: None,
            routes: Arc::default(),
            routed: Vec::new(),
        }
    }

    /// Removes retained policies unless their requests are remembered.
    pub fn forget_retired(&mut self, is_remembered: impl Fn(&blake3::Hash) -> bool) {
        self.retired.retain(|policy| is_remembered(&policy.digest));
    }

    /// Retains a policy that the assignment no longer names for redeliveries of its requests.
    /// Removes the oldest one if there are too many.
    pub fn retire(&mut self, policy: Arc<Policy<H>>) {
        if self.by_digest(&policy.digest).is_some() {
            return;
        }
        if self.retired.len() >= limits::RETIRED_POLICIES_MAX {
            self.retired.remove(0);
        }
        self.retired.push(policy);
    }

    /// The current assignment.
    pub fn assignment(&self) -> &Assignment {
        &self.assignment
    }

    /// Applies another assignment from the next request on. `ready` contains instances for it: new
    /// policies, and warm instances of those that will handle requests. Returns instances that are
    /// no longer needed. The caller must drop them outside of the store's lock, because that takes
    /// time. Fails if a policy of the assignment is missing.
    pub fn assign(
        &mut self,
        assignment: Assignment,
        ready: Vec<Instance<H>>,
    ) -> Result<Vec<Instance<H>>, Absent> {
        let all = assignment.all();
        let here = |digest: &Digest| {
            let mut instances = self.slots.iter().chain(&ready);
            instances.any(|it| it.digest() == *digest)
        };
        if let Some(absent) = all.iter().find(|digest| !here(digest)) {
            return Err(Absent(*absent));
        }
        let mut left = Vec::new();
        for instance in ready {
            let is_its = |it: &Instance<H>| it.digest() == instance.digest();
            match self.slots.iter().position(is_its) {
                Some(at) if self.slots[at].is_warm() => left.push(instance),
                Some(at) => left.push(std::mem::replace(&mut self.slots[at], instance)),
                None => self.slots.push(instance),
            }
        }
        for at in (0..self.slots.len()).rev() {
            if !all.contains(&self.slots[at].digest()) {
                left.push(self.slots.remove(at));
            }
        }
        // The check above makes sure that all of them are present.
        let slot = |digest: Digest| self.slots.iter().position(|it| it.digest() == digest);
        let place = |digest: Digest| slot(digest).ok_or(Absent(digest));
        self.active = place(assignment.active)?;
        self.built_in = place(assignment.built_in)?;
        self.canary = match &assignment.canary {
            Some(canary) => Some((place(canary.policy)?, canary.rule.clone())),
            None => None,
        };
        self.shadow = match &assignment.shadow {
            Some(shadow) => Some((place(shadow.policy)?, shadow.per_mille)),
            None => None,
        };
        let routes = Routes::of(&assignment);
        self.routed = routes
            .0
            .iter()
            .map(|(_, policy)| place(*policy))
            .collect::<Result<_, _>>()?;
        self.routes = Arc::new(routes);
        self.assignment = assignment;
        // An instance holds memory, so only policies that may have to handle a request at once keep
        // theirs.
        let before = self.assignment.fallback();
        for at in 0..self.slots.len() {
            let answers = self.part(at).is_some() || before == Some(self.slots[at].digest());
            if !answers && self.slots[at].is_warm() {
                let cold = Instance::new(self.slots[at].policy().clone());
                left.push(std::mem::replace(&mut self.slots[at], cold));
            }
        }
        Ok(left)
    }

    /// The policy that the next rollback by the guard returns to, if it has no warm instance.
    pub fn cold_before(&self) -> Option<Arc<Policy<H>>> {
        let before = self.assignment.fallback()?;
        let slot = self.slots.iter().find(|it| it.digest() == before)?;
        (!slot.is_warm()).then(|| slot.policy().clone())
    }

    /// Takes a warm instance for [`Self::cold_before`], if that is still needed. Returns the
    /// instance to drop outside of the store's lock.
    pub fn warmed(&mut self, mut instance: Instance<H>) -> Instance<H> {
        let wanted = self.cold_before();
        let mut slots = self.slots.iter_mut();
        let slot = slots.find(|it| it.digest() == instance.digest());
        if let Some(slot) = slot
            && wanted.is_some_and(|it| it.digest == slot.policy().digest)
        {
            std::mem::swap(slot, &mut instance);
        }
        instance
    }

    /// All loaded policies.
    pub fn policies(&self) -> impl Iterator<Item = &Arc<Policy<H>>> {
        self.slots.iter().map(Instance::policy)
    }

    /// The linear memory of the instances that handle requests, in bytes.
    pub fn memory_bytes(&self) -> usize {
        self.slots.iter().map(Instance::memory_bytes).sum()
    }

    /// The loaded or retired policy with this digest.
    pub fn by_digest(&self, digest: &blake3::Hash) -> Option<Arc<Policy<H>>> {
        let mut all = self.policies().chain(&self.retired);
        all.find(|policy| policy.digest == *digest).cloned()
    }

    /// Whether the choice of the policy depends on the key of a request.
    pub fn wants_key(&self) -> bool {
        !self.routes.0.is_empty() || matches!(self.canary, Some((_, CanaryRule::Keys(_))))
    }

    /// The key of a request, as the built-in policy parses it. If it cannot, the other policies are
    /// asked, because their own commands have keys too. A routed policy can only claim a key that
    /// it owns. Each call may use `fuel_max`, in addition to the fuel for each byte.
    pub fn key_of(&mut self, payload: &Bytes, now_ms: u64, fuel_max: u64) -> KeyLookup {
        let mut keyed = KeyLookup::default();
        let mut share = Share::of(fuel_max, payload.len());
        let others = (0..self.slots.len()).filter(|slot| *slot != self.built_in);
        for slot in std::iter::once(self.built_in).chain(others) {
            let Some(part) = self.part(slot) else {
                continue;
            };
            if !share.is_left() {
                break;
            }
            let (key, fuel_used) = self.slots[slot].route(payload, now_ms, fuel_max);
            share.spend(fuel_used);
            match key {
                Ok(Some(key)) if part != Part::Routed || self.may_claim(slot, &key) => {
                    keyed.key = Some(key);
                    break;
                }
                Ok(_) => {}
                Err(failure) => {
                    let choice = Choice {
                        slot,
                        part,
                        by_route: false,
                    };
                    keyed.failures.push((choice, fuel_used, failure));
                }
            }
        }
        keyed
    }

    /// The part that a policy handles requests as; `None` if it handles none.
    fn part(&self, slot: usize) -> Option<Part> {
        if slot == self.active {
            Some(Part::Active)
        } else if self.canary.as_ref().is_some_and(|(at, _)| *at == slot) {
            Some(Part::Canary)
        } else if slot == self.built_in || self.routed.contains(&slot) {
            Some(Part::Routed)
        } else {
            None
        }
    }

    fn may_claim(&self, slot: usize, key: &[u8]) -> bool {
        slot == self.built_in || self.route_owner(key) == Some(slot)
    }

    /// Chooses the policy for a request: the owner of its key, otherwise the canary if its rule
    /// matches, otherwise the active policy.
    pub fn choose(&self, client: &str, key: Option<&[u8]>) -> Choice {
        if let Some(at) = key.and_then(|key| self.routes.place(key)) {
            let slot = self.routed[at];
            let part = match slot == self.active {
                true => Part::Active,
                false => Part::Routed,
            };
            return Choice {
                slot,
                part,
                by_route: true,
            };
        }
        match &self.canary {
            Some((slot, rule)) if rule.takes(client, key) => Choice {
                slot: *slot,
                part: Part::Canary,
                by_route: false,
            },
            _ => Choice {
                slot: self.active,
                part: Part::Active,
                by_route: false,
            },
        }
    }

    /// The policy that renders the notifications of a key.
    pub(crate) fn owner(&self, key: &[u8]) -> usize {
        self.route_owner(key).unwrap_or(self.active)
    }

    /// The policy that owns a key by a route.
    pub(crate) fn route_owner(&self, key: &[u8]) -> Option<usize> {
        self.routes.place(key).map(|at| self.routed[at])
    }

    /// The candidate in shadow, and how many of a thousand requests it re-executes.
    pub(crate) fn shadow(&self) -> Option<(&Arc<Policy<H>>, u16)> {
        let (slot, per_mille) = self.shadow?;
        Some((self.slots[slot].policy(), per_mille))
    }

    pub(crate) fn routes(&self) -> &Arc<Routes> {
        &self.routes
    }

    /// The policy that renders notifications if another one cannot.
    pub(crate) fn built_in(&self) -> usize {
        self.built_in
    }

    pub(crate) fn slot(&mut self, slot: usize) -> &mut Instance<H> {
        &mut self.slots[slot]
    }
}
