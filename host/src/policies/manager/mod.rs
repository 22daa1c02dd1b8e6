//! Changes the policies of the running store: load, trial, promote, roll back. Every way of
//! shipping policies calls this module.
//!
//! The caller must have checked that the operator may make the change. A change of the assignment
//! is durable when the call returns. Every call blocks, for seconds if it compiles. The store's
//! lock is held only to exchange instances that are ready. So no request ever waits for a compiler,
//! for the start of an instance or for a disk because of this module.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Instant;

use serde::Serialize;

use statehouse_access::audit;
use statehouse_config::limits;
use statehouse_core::policy::{
    Act, Actor, Assignment, AssignmentError, Canary, CanaryRule, Candidate, Delivered, Digest,
    Done, Engine, Failure, Instance, LoadError, Policy, Role, Selector, SelectorError, Shadow,
    Swap,
};
use statehouse_core::store::Transaction;
use statehouse_core::trial;
use statehouse_precompiled::{CompileError, Modules};
use statehouse_protocol::Shown;
use statehouse_server::{
    AssignError, Server,
    shadow::{PolicyName, ShadowReport},
};

mod kept;
mod lines;
mod orders;

/// Loads, assigns and lists the policies of a running store, for one author of changes.
pub struct Control {
    shared: Arc<Shared>,
    by: Actor,
}

/// What the controls of all authors share.
struct Shared {
    server: Arc<Server>,
    engine: Arc<Engine<Transaction>>,
    /// None if the store has no data directory.
    modules: Option<Modules>,
    /// Gives the file of a policy to the other hosts of a cluster.
    publish: Option<Publish>,
    /// The check of saved files, if this store has trusted keys.
    check: OnceLock<kept::Check>,
    /// The name of this store, by which signed orders address it.
    store: String,
    /// Held during a change, from reading the current assignment to recording the next one.
    changing: Mutex<()>,
    compiling: Mutex<()>,
}

/// Makes the file of a policy durable elsewhere. May block.
pub type Publish = Box<dyn Fn(&[u8]) -> std::io::Result<()> + Send + Sync>;

/// A policy in a listing.
#[derive(Clone, Debug, Serialize)]
pub struct PolicyView {
    /// The name that the policy declares.
    pub name: String,
    /// Its version.
    pub version: String,
    /// The BLAKE3 of its file.
    pub digest: Digest,
    /// The size of its file in bytes.
    pub bytes: u64,
    /// Whether it is part of the program.
    pub built_in: bool,
    /// Its roles; empty if it is only loaded.
    pub roles: Vec<Role>,
    /// Its counters since the program started, or since it was loaded.
    #[serde(flatten)]
    pub done: Done,
    /// Requests by command.
    pub commands: Vec<CommandView>,
    /// Its own counters, for metrics.
    #[serde(skip)]
    pub counters: BTreeMap<String, u64>,
    /// The errors that it answered with, by their texts, for metrics.
    #[serde(skip)]
    pub errors: BTreeMap<String, u64>,
}

/// Requests of one command.
#[derive(Clone, Debug, Serialize)]
pub struct CommandView {
    /// The policy's name for it.
    pub name: String,
    /// How many.
    pub requests: u64,
}

/// All loaded policies, and the requests that each handles.
#[derive(Clone, Debug, Serialize)]
pub struct Listing {
    /// The name of the store.
    pub store: String,
    /// The policies.
    pub policies: Vec<PolicyView>,
    /// The roles of the policies.
    pub assignment: Assignment,
    /// The last changes of the active policy, the oldest first.
    pub swaps: Vec<Swap>,
}

/// Why a call failed.
#[derive(Debug, thiserror::Error)]
pub enum ControlError {
    /// The file is no policy for this store.
    #[error(transparent)]
    Load(#[from] LoadError),
    /// The selector matches no policy, or several.
    #[error(transparent)]
    Selector(#[from] SelectorError),
    /// The current assignment does not allow the change.
    #[error(transparent)]
    Assignment(#[from] AssignmentError),
    /// Another change was faster, or the store stops.
    #[error(transparent)]
    Assign(#[from] AssignError),
    /// The module cannot be saved.
    #[error("the module cannot be saved in the data directory, so nothing was changed: {0}")]
    Disk(#[from] std::io::Error),
    /// The module cannot be given to the other hosts.
    #[error("the module cannot be written to the log of the cluster, so nothing was changed: {0}")]
    Publish(std::io::Error),
    /// The policy was loaded with other trusted keys.
    #[error(
        "the policy {0} of an earlier start gets no new role: {1}. The signed file is a policy of its own: load it, and promote it by its digest (or `load --promote`)"
    )]
    Unverified(String, String),
}

/// The kind of a failure, for an HTTP status and an exit code.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ControlErrorKind {
    /// The policy or route does not exist.
    NotFound,
    /// The argument is invalid.
    Refused,
    /// The current assignment does not allow the change.
    Conflict,
    /// The host failed.
    Failed,
}

impl ControlError {
    /// The kind of this failure.
    pub fn kind(&self) -> ControlErrorKind {
        match self {
            Self::Load(
                LoadError::Engine(_)
                | LoadError::Thread(_)
                | LoadError::Compiler(CompileError::Machine(_))
                | LoadError::Trial(_, Failure::Machine(_))
                | LoadError::SelfTest(_, Failure::Machine(_)),
            )
            | Self::Assign(AssignError::Stopped | AssignError::Unknown)
            | Self::Disk(_)
            | Self::Publish(_) => ControlErrorKind::Failed,
            Self::Load(_) | Self::Unverified(..) => ControlErrorKind::Refused,
            Self::Selector(SelectorError::Unknown(..)) => ControlErrorKind::NotFound,
            Self::Selector(SelectorError::Form) => ControlErrorKind::Refused,
            Self::Selector(SelectorError::Ambiguous(..)) | Self::Assign(_) => {
                ControlErrorKind::Conflict
            }
            Self::Assignment(error) => match error {
                AssignmentError::NotLoaded(_) | AssignmentError::NoRoute => {
                    ControlErrorKind::NotFound
                }
                AssignmentError::NothingBefore
                | AssignmentError::InUse(..)
                | AssignmentError::Full
                | AssignmentError::Routes
                | AssignmentError::Active(_)
                | AssignmentError::Serial(..) => ControlErrorKind::Conflict,
                AssignmentError::Prefix
                | AssignmentError::Percent
                | AssignmentError::Pattern
                | AssignmentError::PerMille => ControlErrorKind::Refused,
            },
        }
    }
}

/// The assignment and the loaded policies at one moment.
struct Seen {
    assignment: Assignment,
    policies: Vec<Arc<Policy<Transaction>>>,
}

impl Seen {
    fn candidates(&self) -> impl Iterator<Item = Candidate<'_>> + Clone {
        let built_in = self.assignment.built_in;
        self.policies.iter().map(move |policy| Candidate {
            digest: policy.digest.into(),
            name: &policy.name,
            version: &policy.version,
            built_in: policy.digest == built_in.0,
        })
    }

    fn resolve(&self, which: &Selector) -> Result<Digest, ControlError> {
        Ok(which.resolve(self.candidates())?)
    }

    fn policy(&self, digest: Digest) -> Result<&Arc<Policy<Transaction>>, ControlError> {
        let found = self.policies.iter().find(|it| it.digest == digest.0);
        Ok(found.ok_or(AssignmentError::NotLoaded(digest))?)
    }

    fn view(&self, digest: Digest) -> Result<PolicyView, ControlError> {
        let policy = self.policy(digest)?;
        let commands = policy.commands.iter().zip(policy.work.commands());
        Ok(PolicyView {
            name: policy.name.clone(),
            version: policy.version.clone(),
            digest,
            bytes: policy.bytes,
            built_in: digest == self.assignment.built_in,
            roles: self.assignment.roles(&digest),
            counters: policy.counters.all(),
            errors: policy.counters.errors(),
            done: policy.work.done(),
            commands: commands
                .map(|(name, requests)| CommandView {
                    name: name.clone(),
                    requests,
                })
                .collect(),
        })
    }
}

impl Control {
    /// Controls the policies of `server`, which `engine` compiles. Saves their files in `modules`
    /// if the store has a data directory, and gives them to `publish` before a record names them.
    /// Signed orders address the store as `store`. The author of changes is the admin API.
    pub fn new(
        server: Arc<Server>,
        engine: Arc<Engine<Transaction>>,
        modules: Option<Modules>,
        publish: Option<Publish>,
        store: String,
    ) -> Arc<Self> {
        let shared = Shared {
            server,
            engine,
            modules,
            publish,
            check: OnceLock::new(),
            store,
            changing: Mutex::new(()),
            compiling: Mutex::new(()),
        };
        Arc::new(Self {
            shared: Arc::new(shared),
            by: Actor::admin(None),
        })
    }

    /// A control for changes by this author.
    pub fn by(&self, by: Actor) -> Arc<Self> {
        let shared = self.shared.clone();
        Arc::new(Self { shared, by })
    }

    /// Compiles a policy, runs its trial and saves its file. Loading a loaded policy is no error,
    /// and gives its file to the other hosts if they have lost it. `signed_by` is the id of the
    /// trusted key that signed the file.
    pub fn load(&self, file: &[u8], signed_by: Option<&str>) -> Result<PolicyView, ControlError> {
        // The size is checked before the bytes are used.
        if file.len() as u64 > limits::POLICY_FILE_BYTES_MAX {
            return Err(LoadError::Size(file.len() as u64).into());
        }
        let digest = Digest::of(file);
        if let Ok(view) = self.seen().view(digest) {
            let _one = locked(&self.shared.changing);
            self.publish(file)?;
            return Ok(view);
        }
        let policy = self.compile(file)?;
        let mut unloaded = None;
        self.change_as(signed_by, true, |seen, ready| {
            // A second caller with the same file may have been faster.
            if seen.policy(digest).is_err() {
                if let Some(modules) = &self.shared.modules {
                    modules.save(&policy.digest, file)?;
                }
                self.publish(file)?;
                ready.push(Instance::new(policy.clone()));
            }
            let next = seen.assignment.load(digest)?;
            let mut before = seen.assignment.loaded.iter();
            let missing = before.find(|it| !next.loaded.contains(it));
            unloaded = missing.and_then(|it| seen.policy(*it).ok().cloned());
            Ok(next)
        })?;
        tracing::info!(target: audit::TARGET, %policy, digest = %policy.digest, bytes = file.len(), "loaded a policy");
        if let Some(policy) = unloaded {
            let max = statehouse_core::limits::LOADED_POLICIES_MAX;
            tracing::info!(target: audit::TARGET, %policy, digest = %policy.digest, "unloaded the oldest policy without a role: a store has at most {max} loaded policies");
        }
        self.seen().view(digest)
    }

    /// Gives the file of a policy to the other hosts of a cluster, unless they have it. The caller
    /// must hold [`Shared::changing`].
    fn publish(&self, file: &[u8]) -> Result<(), ControlError> {
        let publish = self.shared.publish.as_ref();
        publish.map_or(Ok(()), |publish| {
            publish(file).map_err(ControlError::Publish)
        })
    }

    /// Makes a policy the active one, from the next request on. [`Self::rollback`] undoes this.
    pub fn promote(&self, which: &Selector) -> Result<PolicyView, ControlError> {
        let next = self.change(|seen, ready| {
            let digest = seen.resolve(which)?;
            ready.push(Instance::warm(seen.policy(digest)?.clone())?);
            Ok(seen.assignment.promote(digest)?)
        })?;
        self.log_active(next.active, "promoted a policy")
    }

    /// Makes the previous policy the active one. A further call rolls back one more policy.
    pub fn rollback(&self) -> Result<PolicyView, ControlError> {
        let mut from = None;
        // Whatever key signed it: a policy that was active is safer than one that fails.
        let next = self.change_as(None, false, |seen, ready| roll_back(&mut from, seen, ready))?;
        self.log_active(next.active, "rolled back to a policy")
    }

    /// Starts a comparison, in which a candidate re-executes this many of a thousand live requests
    /// without effect. None ends the comparison.
    pub fn shadow(&self, which: Option<(&Selector, u16)>) -> Result<(), ControlError> {
        let next = self.change(|seen, _| {
            let shadow = match which {
                Some((which, per_mille)) => Some(Shadow {
                    policy: seen.resolve(which)?,
                    per_mille,
                }),
                None => None,
            };
            Ok(seen.assignment.shadow(shadow)?)
        })?;
        let seen = self.seen();
        match next.shadow {
            Some(shadow) => {
                let policy = seen.policy(shadow.policy)?;
                let against = seen.policy(next.active)?;
                let observer = self.shared.server.observer();
                observer.begin(PolicyName::of(policy), PolicyName::of(against));
                tracing::info!(target: audit::TARGET, %policy, digest = %policy.digest, per_mille = shadow.per_mille, "a policy is compared in shadow");
            }
            None => {
                tracing::info!(target: audit::TARGET, "no policy is compared in shadow any more")
            }
        }
        Ok(())
    }

    /// Lets a canary handle some requests, always those of the same clients or keys. None ends
    /// that.
    pub fn canary(&self, which: Option<(&Selector, CanaryRule)>) -> Result<(), ControlError> {
        let next = self.change(|seen, ready| {
            let canary = match &which {
                Some((which, rule)) => {
                    let policy = seen.resolve(which)?;
                    ready.push(Instance::warm(seen.policy(policy)?.clone())?);
                    Some(Canary {
                        policy,
                        rule: rule.clone(),
                    })
                }
                None => None,
            };
            Ok(seen.assignment.canary(canary)?)
        })?;
        match &next.canary {
            Some(canary) => {
                let seen = self.seen();
                let policy = seen.policy(canary.policy)?;
                tracing::info!(target: audit::TARGET, %policy, digest = %policy.digest, rule = ?canary.rule, "a policy answers as a canary");
            }
            None => tracing::info!(target: audit::TARGET, "no policy answers as a canary any more"),
        }
        Ok(())
    }

    /// The report of the current comparison, or of the last one; none if there was none.
    pub fn diff(&self) -> Option<ShadowReport> {
        let seen = self.seen();
        let report = self.shared.server.observer().report();
        let Some(shadow) = seen.assignment.shadow else {
            return report;
        };
        let policy = PolicyName::of(seen.policy(shadow.policy).ok()?);
        let against = PolicyName::of(seen.policy(seen.assignment.active).ok()?);
        // A start restores the shadow, but not its report.
        let same = |it: &ShadowReport| it.policy == policy && it.against == against;
        Some(
            report
                .filter(same)
                .unwrap_or_else(|| ShadowReport::new(policy, against)),
        )
    }

    /// Lets a policy handle the requests for keys that begin with `prefix`. None ends that.
    pub fn route(&self, prefix: &[u8], which: Option<&Selector>) -> Result<(), ControlError> {
        let next = self.change(|seen, ready| {
            let digest = which.map(|which| seen.resolve(which)).transpose()?;
            if let Some(digest) = digest {
                ready.push(Instance::warm(seen.policy(digest)?.clone())?);
            }
            Ok(seen.assignment.route(prefix, digest)?)
        })?;
        let prefix = Shown::whole(prefix).to_string();
        tracing::info!(target: audit::TARGET, prefix, routes = next.routes.len(), "changed a route");
        Ok(())
    }

    /// Records that this file of a drop directory was delivered, which has the files `present`.
    pub fn deliver(&self, delivered: &Delivered, present: &[String]) -> Result<(), ControlError> {
        self.change(|seen, _| Ok(seen.assignment.deliver(delivered.clone(), present)))?;
        Ok(())
    }

    /// Unloads a policy.
    pub fn unload(&self, which: &Selector) -> Result<(), ControlError> {
        let mut unloaded = None;
        self.change(|seen, _| {
            let digest = seen.resolve(which)?;
            unloaded = Some(seen.policy(digest)?.clone());
            Ok(seen.assignment.unload(digest)?)
        })?;
        if let Some(policy) = unloaded {
            tracing::info!(target: audit::TARGET, %policy, digest = %policy.digest, "unloaded a policy");
        }
        Ok(())
    }

    /// All loaded policies, and the requests that each handles.
    pub fn list(&self) -> Listing {
        let seen = self.seen();
        let digests = seen.policies.iter().map(|it| it.digest.into());
        Listing {
            store: self.shared.store.clone(),
            policies: digests.filter_map(|it| seen.view(it).ok()).collect(),
            assignment: seen.assignment,
            swaps: self.shared.server.swaps(),
        }
    }

    /// Compiles one policy at a time, on half of the cores: an interpreter takes seconds of CPU
    /// time, and requests must go on.
    fn compile(&self, file: &[u8]) -> Result<Arc<Policy<Transaction>>, ControlError> {
        let _one = locked(&self.shared.compiling);
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let compilers = rayon::ThreadPoolBuilder::new()
            .num_threads((cores / 2).max(1))
            .thread_name(|_| "compiler".into())
            .build()
            .map_err(|error| LoadError::Engine(error.to_string()))?;
        let policy = Arc::new(compilers.install(|| self.shared.engine.load(file))?);
        trial::accept(&policy, Instant::now())?;
        Ok(policy)
    }

    fn seen(&self) -> Seen {
        let (assignment, policies) = self.shared.server.policies();
        Seen {
            assignment,
            policies,
        }
    }

    /// Logs a change of the active policy, and returns the view of the policy.
    fn log_active(&self, digest: Digest, what: &'static str) -> Result<PolicyView, ControlError> {
        let seen = self.seen();
        if let Ok(policy) = seen.policy(digest) {
            tracing::info!(target: audit::TARGET, %policy, digest = %policy.digest, "{what}");
        }
        seen.view(digest)
    }

    /// Removes unused modules if the modules take too much space. Does nothing unless the change
    /// loaded or unloaded a policy.
    fn tidy(&self, before: &Assignment, after: &Assignment) {
        let Some(modules) = self
            .shared
            .modules
            .as_ref()
            .filter(|_| before.loaded != after.loaded)
        else {
            return;
        };
        let needed = || self.shared.server.needed_policies();
        if let Err(error) = modules.tidy(limits::MODULE_BYTES_MAX, needed) {
            tracing::warn!(%error, "unused modules cannot be removed");
        }
    }

    /// Changes the assignment and waits until the change is durable. `make` returns the next
    /// assignment and prepares the instances that it needs. If the guard changes the assignment at
    /// the same time, `make` is called again.
    fn change(
        &self,
        make: impl FnMut(&Seen, &mut Vec<Instance<Transaction>>) -> Result<Assignment, ControlError>,
    ) -> Result<Assignment, ControlError> {
        self.change_as(None, true, make)
    }

    /// Like [`Self::change`], for a policy whose file this key signed. Without `checks`, a policy
    /// that a load would refuse may get a role.
    fn change_as(
        &self,
        signed_by: Option<&str>,
        checks: bool,
        mut make: impl FnMut(&Seen, &mut Vec<Instance<Transaction>>) -> Result<Assignment, ControlError>,
    ) -> Result<Assignment, ControlError> {
        let _one = locked(&self.shared.changing);
        let mut attempts = 0;
        loop {
            let seen = self.seen();
            let mut ready = Vec::new();
            let next = make(&seen, &mut ready)?;
            if next == seen.assignment {
                return Ok(next);
            }
            if checks {
                self.check_roles(&seen, &next)?;
            }
            let act = Act {
                at_ms: self.shared.server.now_ms(),
                by: self.by.clone(),
            };
            let next = next.noted(&seen.assignment, &act, signed_by);
            attempts += 1;
            match self
                .shared
                .server
                .assign(&seen.assignment, next.clone(), ready)
            {
                // The guard rolled back since the assignment was read.
                Err(AssignError::Overtaken) if attempts < limits::ASSIGN_ATTEMPTS_MAX => {}
                Err(error) => return Err(error.into()),
                Ok(position) => {
                    self.shared.server.wait_durable(position)?;
                    self.tidy(&seen.assignment, &next);
                    self.shared.server.warm_before();
                    return Ok(next);
                }
            }
        }
    }
}

/// Waits for a turn. A caller that panicked in its turn has changed nothing.
fn locked(turn: &Mutex<()>) -> MutexGuard<'_, ()> {
    turn.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Makes the assignment of a rollback. `from` is the policy that was active at the first attempt.
/// If the guard has rolled it back since, the request is already fulfilled.
fn roll_back(
    from: &mut Option<Digest>,
    seen: &Seen,
    ready: &mut Vec<Instance<Transaction>>,
) -> Result<Assignment, ControlError> {
    if *from.get_or_insert(seen.assignment.active) != seen.assignment.active {
        return Ok(seen.assignment.clone());
    }
    let next = seen.assignment.rollback()?;
    ready.push(Instance::warm(seen.policy(next.active)?.clone())?);
    Ok(next)
}

#[cfg(test)]
pub(crate) mod tests;
