//! Which policies there are, and which one answers a request.
//!
//! What enters: loaded policies, and an assignment that says what each is there for. What leaves: the instance that
//! is to answer. Requests ask here before each call, so that a change takes effect between two requests.

use std::sync::Arc;

use bytes::Bytes;

use super::assignment::{Assignment, CanaryRule};
use super::budget::{Failure, Share};
use super::digest::Digest;
use super::engine::Policy;
use super::guest::Host;
use super::instance::Instance;
use crate::limits;

/// All policies that are held ready.
pub struct Registry<H: Host> {
    slots: Vec<Instance<H>>,
    /// Those that nothing names any more, but that handled requests which may come again.
    retired: Vec<Arc<Policy<H>>>,
    assignment: Assignment,
    active: usize,
    built_in: usize,
    canary: Option<(usize, CanaryRule)>,
    shadow: Option<(usize, u16)>,
    routes: Arc<Routes>,
    /// Their slots, in their order.
    routed: Vec<usize>,
}

/// Who owns which keys: the longest prefix first.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Routes(Vec<(Vec<u8>, Digest)>);

impl Routes {
    fn of(assignment: &Assignment) -> Self {
        let routes = assignment.routes.iter();
        let mut routes: Vec<_> = routes.map(|it| (it.prefix.0.clone(), it.policy)).collect();
        routes.sort_by_key(|(prefix, _)| std::cmp::Reverse(prefix.len()));
        Self(routes)
    }

    /// The route of a key.
    fn place(&self, key: &[u8]) -> Option<usize> {
        self.0
            .iter()
            .position(|(prefix, _)| key.starts_with(prefix))
    }

    /// Whether a key is another policy's by a route.
    pub fn is_owned_by_other(&self, policy: &Digest, key: &[u8]) -> bool {
        self.place(key).is_some_and(|at| self.0[at].1 != *policy)
    }

    /// Whether a key is that policy's by a route.
    pub fn owns(&self, policy: &Digest, key: &[u8]) -> bool {
        self.place(key).is_some_and(|at| self.0[at].1 == *policy)
    }
}

/// Who answers a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Choice {
    pub(crate) slot: usize,
    /// Why it is that one.
    pub part: Part,
}

/// Why a policy answers a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    /// Nobody else does.
    Active,
    /// It is tried on this client or key.
    Canary,
    /// It owns the key by a route, and may write nothing but its own keys.
    Routed,
}

/// The key of a request, as far as a policy could tell.
#[derive(Debug, Default)]
pub struct Keyed {
    /// The key.
    pub key: Option<Bytes>,
    /// Who failed to tell it, what that burnt, and why.
    pub failures: Vec<(Choice, u64, Failure)>,
}

/// An assignment that names a policy which is not here.
#[derive(Debug, PartialEq, Eq)]
pub struct Absent(pub Digest);

impl<H: Host> Registry<H> {
    /// Starts with `active`, and with `built_in` behind it: it can be gone back to, and notifications of an expiry
    /// fall back to it. Without one the active policy takes that part too.
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

    /// Keeps a policy that is named no more for the requests that it handled; of too many, the newest.
    pub fn retire(&mut self, policy: Arc<Policy<H>>) {
        if self.by_digest(&policy.digest).is_some() {
            return;
        }
        if self.retired.len() >= limits::RETIRED_POLICIES_MAX {
            self.retired.remove(0);
        }
        self.retired.push(policy);
    }

    /// Who answers what.
    pub fn assignment(&self) -> &Assignment {
        &self.assignment
    }

    /// Takes another assignment into force from the next request on. `ready` are instances for it: new policies, and
    /// warm ones for those that are about to answer. What comes back is not needed any more: to be dropped where
    /// nobody waits.
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
            match self
                .slots
                .iter()
                .position(|it| it.digest() == instance.digest())
            {
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
        // Each named one is here, as was just seen.
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
        // An instance holds memory; only those that may have to answer at once are kept.
        let before = self.assignment.previous.first().copied();
        for at in 0..self.slots.len() {
            let answers = at == self.active
                || at == self.built_in
                || self.canary.as_ref().is_some_and(|(slot, _)| *slot == at)
                || self.routed.contains(&at)
                || before == Some(self.slots[at].digest());
            if !answers && self.slots[at].is_warm() {
                let cold = Instance::new(self.slots[at].policy().clone());
                left.push(std::mem::replace(&mut self.slots[at], cold));
            }
        }
        Ok(left)
    }

    /// The policy that the next rollback goes back to, where no instance of it has started.
    pub fn cold_before(&self) -> Option<Arc<Policy<H>>> {
        let before = self.assignment.previous.first()?;
        let slot = self.slots.iter().find(|it| it.digest() == *before)?;
        (!slot.is_warm()).then(|| slot.policy().clone())
    }

    /// Takes a warm instance for [`Self::cold_before`], if it still is that. What comes back is to be dropped where nobody
    /// waits.
    pub fn warmed(&mut self, mut instance: Instance<H>) -> Instance<H> {
        let wanted = self.cold_before();
        let slot = self
            .slots
            .iter_mut()
            .find(|it| it.digest() == instance.digest());
        if let Some(slot) = slot
            && wanted.is_some_and(|it| it.digest == slot.policy().digest)
        {
            std::mem::swap(slot, &mut instance);
        }
        instance
    }

    /// All that are held ready.
    pub fn policies(&self) -> impl Iterator<Item = &Arc<Policy<H>>> {
        self.slots.iter().map(Instance::policy)
    }

    /// The policy of that digest, if it is here.
    pub fn by_digest(&self, digest: &blake3::Hash) -> Option<Arc<Policy<H>>> {
        let mut all = self.policies().chain(&self.retired);
        all.find(|policy| policy.digest == *digest).cloned()
    }

    /// Whether who answers depends on the key of a request.
    pub fn wants_key(&self) -> bool {
        !self.routes.0.is_empty() || matches!(self.canary, Some((_, CanaryRule::Keys(_))))
    }

    /// The key that a request is about, as the built-in policy reads it. What that does not understand is put to the
    /// others: commands of their own are about keys too. A routed policy can only claim a key that is its own.
    /// Each call may burn `fuel_max`, beside the part for each byte.
    pub fn key_of(&mut self, payload: &Bytes, now_ms: u64, fuel_max: u64) -> Keyed {
        let mut keyed = Keyed::default();
        let mut share = Share::of(fuel_max, payload.len());
        let others = (0..self.slots.len()).filter(|slot| *slot != self.built_in);
        for slot in std::iter::once(self.built_in).chain(others) {
            let Some(part) = self.part(slot) else {
                continue;
            };
            if !share.is_left() {
                break;
            }
            let (key, burnt) = self.slots[slot].route(payload, now_ms, fuel_max);
            share.burn(burnt);
            match key {
                Ok(Some(key)) if part != Part::Routed || self.may_claim(slot, &key) => {
                    keyed.key = Some(key);
                    break;
                }
                Ok(_) => {}
                Err(failure) => {
                    let who = Choice { slot, part };
                    keyed.failures.push((who, burnt, failure));
                }
            }
        }
        keyed
    }

    /// What a policy answers as; none where it answers nothing.
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

    /// Who answers a request: the owner of its key, else the canary where it takes it, else the active one.
    pub fn choose(&self, client: &str, key: Option<&[u8]>) -> Choice {
        if let Some(at) = key.and_then(|key| self.routes.place(key)) {
            let slot = self.routed[at];
            let part = match slot == self.active {
                true => Part::Active,
                false => Part::Routed,
            };
            return Choice { slot, part };
        }
        match &self.canary {
            Some((slot, rule)) if rule.takes(client, key) => Choice {
                slot: *slot,
                part: Part::Canary,
            },
            _ => Choice {
                slot: self.active,
                part: Part::Active,
            },
        }
    }

    /// Who owns a key: its watchers hear of its end in that policy's words.
    pub(crate) fn owner(&self, key: &[u8]) -> usize {
        self.route_owner(key).unwrap_or(self.active)
    }

    /// Who owns a key by a route.
    pub(crate) fn route_owner(&self, key: &[u8]) -> Option<usize> {
        self.routes.place(key).map(|at| self.routed[at])
    }

    /// The candidate in shadow, and of how many of a thousand requests it is to see.
    pub(crate) fn shadow(&self) -> Option<(&Arc<Policy<H>>, u16)> {
        let (slot, per_mille) = self.shadow?;
        Some((self.slots[slot].policy(), per_mille))
    }

    /// Who owns which keys.
    pub(crate) fn routes(&self) -> &Arc<Routes> {
        &self.routes
    }

    /// The one that speaks where another cannot.
    pub(crate) fn built_in(&self) -> usize {
        self.built_in
    }

    /// An instance by its place.
    pub(crate) fn slot(&mut self, slot: usize) -> &mut Instance<H> {
        &mut self.slots[slot]
    }

    /// The policy that answers what no other does.
    pub fn active(&self) -> &Arc<Policy<H>> {
        self.slots[self.active].policy()
    }
}
