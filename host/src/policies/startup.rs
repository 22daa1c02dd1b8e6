//! Loads the policies at a start: the recorded assignment, changed by the setting `policy`.
//!
//! Returns a registry, or an error that names the missing file. A policy that handles requests must
//! never be replaced silently: if it cannot be loaded, the start fails.

use std::fs;
use std::io;
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use anyhow::Context;

use crate::policies::delivery::Trust;
use statehouse_config::{PolicyChoice, limits, policy_file_bytes_max};
use statehouse_core::clock::wall_ms;
use statehouse_core::log::Image;
use statehouse_core::log::record::PolicyRecord;
use statehouse_core::policy::{
    Act, Actor, Assignment, Digest, Engine, Failure, Instance, LoadError, Policy, Registry, Role,
};
use statehouse_core::store::Transaction;
use statehouse_core::trial;
use statehouse_precompiled::read_file;
use statehouse_precompiled::{CompileError, Modules};
use statehouse_wal::{probe, probe_room};

/// What a start needs to load policies.
pub(crate) struct Opening<'a> {
    pub(crate) engine: &'a Engine<Transaction>,
    pub(crate) standard: &'a Arc<Policy<Transaction>>,
    pub(crate) standard_file: &'a [u8],
    pub(crate) modules: &'a Modules,
    /// The keys that must have signed a file of the setting, and should have signed the others.
    pub(crate) trust: &'a Trust,
    pub(crate) keeps: Keeps,
}

/// What happens to the files of policies that a start saves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Keeps {
    /// The store has no data directory.
    Nothing,
    /// They are saved.
    Files,
    /// Only a check that they can be saved.
    Checks,
}

type Loaded = Vec<Arc<Policy<Transaction>>>;

/// The policy of the setting `policy`.
struct Configured {
    digest: Digest,
    /// None if it is the built-in one.
    policy: Option<Arc<Policy<Transaction>>>,
    /// The id of the trusted key that signed it.
    signed_by: Option<String>,
}

/// Why a saved policy cannot be loaded.
#[derive(Debug, thiserror::Error)]
enum LoadFailure {
    #[error(transparent)]
    File(#[from] io::Error),
    #[error(transparent)]
    Module(#[from] LoadError),
}

impl LoadFailure {
    /// Whether a later start may succeed: the machine lacks a resource, or was too slow.
    fn may_be_temporary(&self) -> bool {
        match self {
            Self::File(error) => {
                let permanent = [io::ErrorKind::NotFound, io::ErrorKind::InvalidData];
                !permanent.contains(&error.kind())
            }
            Self::Module(error) => may_be_temporary(error),
        }
    }
}

/// Whether the same file may be loaded later: the machine lacks a resource, or was too slow.
pub(crate) fn may_be_temporary(error: &LoadError) -> bool {
    matches!(
        error,
        LoadError::Engine(_)
            | LoadError::Thread(_)
            | LoadError::Costly(_)
            | LoadError::Compiler(_)
            | LoadError::Trial(_, Failure::Watchdog | Failure::Machine(_))
            | LoadError::SelfTest(_, Failure::Machine(_))
    )
}

/// A start that fails because an assigned policy cannot be loaded now. A later start may succeed.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub(crate) struct NotNow(pub(crate) String);

impl Opening<'_> {
    /// Builds the registry, and the records of its policies for the log.
    pub(crate) fn registry(
        &self,
        choice: &PolicyChoice,
        image: &Image,
    ) -> anyhow::Result<(Registry<Transaction>, Vec<PolicyRecord>)> {
        let recorded = self.recorded(image);
        let mut assignment = recorded.clone();
        let mut signed_by = None;
        let mut loaded = vec![self.standard.clone()];
        if self.keeps != Keeps::Nothing {
            // Another version of this program may need it to re-execute redelivered requests.
            self.save(&self.standard.digest, self.standard_file)?;
        }
        match choice {
            PolicyChoice::Last => {}
            PolicyChoice::BuiltIn => assignment = assignment.promote(assignment.built_in)?,
            PolicyChoice::File(path) => {
                let it = self.read(path, &recorded)?;
                signed_by = it.signed_by;
                loaded.extend(it.policy);
                assignment = promote_configured(assignment.load(it.digest)?, it.digest, path)?;
            }
        }
        let act = Act {
            at_ms: wall_ms().max(image.now_ms),
            by: Actor::setting(),
        };
        assignment = assignment.noted(&recorded, &act, signed_by.as_deref());
        let named = *choice != PolicyChoice::Last;
        for digest in assignment.all() {
            if loaded.iter().any(|it| it.digest == digest.0) {
                continue;
            }
            match self.load_kept(&digest, &assignment) {
                Ok(policy) => loaded.push(Arc::new(policy)),
                Err(error) => {
                    assignment = self.drop_missing(assignment, digest, &error, named, image)?;
                }
            }
        }
        let record =
            |it: &Arc<Policy<Transaction>>| PolicyRecord::of(it, it.digest == self.standard.digest);
        let records = loaded.iter().map(record).collect();
        let mut registry = Registry::new(self.standard.clone(), None);
        let remembered = image.duplicates.policies();
        for policy in self.retired(&remembered, &loaded) {
            registry.retire(policy);
        }
        if self.keeps == Keeps::Files {
            self.tidy(&assignment, remembered);
        }
        let ready = instances(loaded, &assignment);
        registry
            .assign(assignment, ready)
            .map_err(|absent| anyhow::anyhow!("the policy {} is not loaded", absent.0))?;
        Ok((registry, records))
    }

    /// Loads the policy of the setting `policy`, and tries it out unless the store has loaded it
    /// before: an earlier version may have accepted it.
    fn read(&self, path: &Path, recorded: &Assignment) -> anyhow::Result<Configured> {
        let file = read_file(path, policy_file_bytes_max())
            .with_context(|| format!("cannot read the policy {}", path.display()))?;
        let unusable = || format!("{} cannot be used", path.display());
        let signed_by = self.trust.check(&file).with_context(unusable)?;
        let is_recorded = recorded.all().contains(&Digest::of(&file));
        let loaded = self.engine.load(&file).map_err(|error| match error {
            // As text, which does not count as temporary: a service manager would compile a policy
            // that is too large, or crashes the compiler, again and again.
            LoadError::Costly(_) | LoadError::Compiler(CompileError::Crashed(_))
                if !is_recorded =>
            {
                anyhow::anyhow!("{error}")
            }
            error => error.into(),
        });
        let policy = loaded.with_context(unusable)?;
        let digest = Digest::from(policy.digest);
        if policy.digest == self.standard.digest {
            return Ok(Configured {
                digest,
                policy: None,
                signed_by,
            });
        }
        let policy = Arc::new(policy);
        if !is_recorded {
            trial::accept(&policy, Instant::now()).with_context(unusable)?;
        }
        if self.keeps != Keeps::Nothing {
            self.save(&policy.digest, &file)?;
        }
        Ok(Configured {
            digest,
            policy: Some(policy),
            signed_by,
        })
    }

    /// The assignment when the store stopped, with the built-in policy of this program.
    fn recorded(&self, image: &Image) -> Assignment {
        let standard = Digest::from(self.standard.digest);
        let last = image.active.and_then(|it| image.policies.get(it as usize));
        let assignment = match (&image.assignment, last) {
            (Some(assignment), _) => assignment.clone(),
            (None, Some(last)) if !last.built_in => {
                let mut assignment = Assignment::of(standard);
                assignment.active = last.digest.into();
                assignment.loaded.push(assignment.active);
                assignment.previous.push(standard);
                assignment
            }
            (None, _) => Assignment::of(standard),
        };
        let before = assignment.built_in;
        assignment.replace(before, standard)
    }

    /// Loads a saved policy of the assignment. Without the signature of a trusted key it is loaded
    /// too: the keys may have changed, and the store must go on.
    fn load_kept(
        &self,
        digest: &Digest,
        assignment: &Assignment,
    ) -> Result<Policy<Transaction>, LoadFailure> {
        let file = self.modules.load(&digest.0)?;
        let policy = self.engine.load(&file)?;
        if let Err(error) = self.trust.check(&file) {
            let roles = assignment.roles(digest);
            tracing::warn!(%policy, %digest, ?roles, "a policy of an earlier start keeps its roles, but gets no new one: {error}. The signed file is a policy of its own: load it, and promote it by its digest (or `statehouse policy load --promote`), or promote the built-in policy with `statehouse policy promote builtin`");
        }
        Ok(policy)
    }

    fn load(&self, digest: &Digest) -> Result<Policy<Transaction>, LoadFailure> {
        let file = self.modules.load(&digest.0)?;
        Ok(self.engine.load(&file)?)
    }

    /// Saves a module. Must be called before any record that names the policy is written.
    fn save(&self, digest: &blake3::Hash, file: &[u8]) -> anyhow::Result<()> {
        let saved = match self.keeps {
            Keeps::Checks => self.check_save(digest, file),
            _ => self.modules.save(digest, file).map_err(Into::into),
        };
        saved.context("cannot save the policy's module in the data directory")
    }

    /// Fails if a module could not be saved.
    fn check_save(&self, digest: &blake3::Hash, file: &[u8]) -> anyhow::Result<()> {
        let directory = self.modules.directory();
        if self.modules.load(digest).is_err() {
            probe(directory)?;
            // The data directory, whose log the start writes before.
            if let Some(data) = directory.parent() {
                probe_room(data, file.len() as u64)?;
            }
        } else {
            // A save makes the name of an existing file durable.
            fs::File::open(directory)?;
        }
        Ok(())
    }

    /// Removes a policy that cannot be loaded from the assignment, or fails if its roles do not
    /// allow that. `named` is true if the operator chose the active policy with the setting.
    fn drop_missing(
        &self,
        assignment: Assignment,
        digest: Digest,
        error: &LoadFailure,
        named: bool,
        image: &Image,
    ) -> anyhow::Result<Assignment> {
        let known = image.policies.iter().find(|it| it.digest == digest.0);
        let name = known.map_or_else(
            || digest.to_string(),
            |it| format!("{} {}", it.name, it.version),
        );
        let path = self.modules.path(&digest.0);
        let path = path.display();
        let roles = assignment.roles(&digest);
        let needed = if roles.contains(&Role::Active) {
            Some((
                "was the active policy",
                "name its file with --policy FILE, or use the built-in policy with --policy builtin",
            ))
        } else if roles.contains(&Role::Routed) && !named {
            Some((
                "owns the keys of a route",
                "restore the file, or end the route by naming the active policy with --policy",
            ))
        } else {
            None
        };
        // The start records the assignment without the policy, so a later start would not load it.
        if error.may_be_temporary() {
            let (role, advice) = needed.unwrap_or((
                "is assigned in this store",
                "remove the file to end the roles of the policy",
            ));
            let text = format!(
                "{name} {role}, but its module {path} cannot be used now ({error}): start again; if that does not help, {advice}"
            );
            return Err(NotNow(text).into());
        }
        if let Some((role, advice)) = needed {
            anyhow::bail!(
                "{name} {role}, but its module {path} cannot be used ({error}): {advice}"
            );
        }
        tracing::error!(policy = name, %digest, ?roles, "a policy cannot be loaded, so its roles end: {error}");
        Ok(assignment.without(digest))
    }

    /// Removes unused modules if the modules take too much space. An error does not fail the start.
    fn tidy(&self, assignment: &Assignment, remembered: Vec<blake3::Hash>) {
        let named = assignment.all().into_iter().map(|digest| digest.0);
        let needed = || named.chain(remembered).collect();
        if let Err(error) = self.modules.tidy(limits::MODULE_BYTES_MAX, needed) {
            tracing::warn!(%error, "unused modules cannot be removed");
        }
    }

    /// Loads the last policies that handled remembered requests, to re-execute redeliveries: as many
    /// as a store retains, because each may take seconds of a compiler.
    fn retired(&self, remembered: &[blake3::Hash], loaded: &Loaded) -> Loaded {
        let here = |digest: &blake3::Hash| loaded.iter().any(|it| it.digest == *digest);
        let mut retired = Loaded::new();
        for digest in remembered.iter().rev().filter(|digest| !here(digest)) {
            if retired.len() == limits::RETIRED_POLICIES_MAX {
                break;
            }
            match self.load(&Digest::from(*digest)) {
                Ok(policy) => retired.push(Arc::new(policy)),
                Err(error) => {
                    tracing::warn!(%digest, %error, "an older policy cannot be loaded: a redelivery of a request that it handled gets a short response from the record, and an error instead of a long one");
                }
            }
        }
        retired.reverse();
        retired
    }
}

/// Promotes the policy of the setting `policy`, unless the guard rolled it back or ended its
/// canary: a service manager restarts the program with the same setting, which is no new decision
/// of the operator.
fn promote_configured(
    assignment: Assignment,
    digest: Digest,
    path: &Path,
) -> anyhow::Result<Assignment> {
    match assignment.decision(digest) {
        Some(decision) => {
            let (path, why) = (path.display(), &decision.why);
            tracing::error!(%path, %digest, why, "the policy of --policy is loaded but not active, because the guard rolled it back or ended its canary; `statehouse policy promote` makes it active again");
            Ok(assignment)
        }
        None => Ok(assignment.promote(digest)?),
    }
}

/// Policies with a role get a warm instance, so that no request waits for its start. Each has
/// already passed its trial.
fn instances(
    loaded: Vec<Arc<Policy<Transaction>>>,
    assignment: &Assignment,
) -> Vec<Instance<Transaction>> {
    let instance =
        |policy: Arc<Policy<Transaction>>| match assignment.roles(&policy.digest.into())[..] {
            [] => Instance::new(policy),
            _ => Instance::warm(policy.clone()).unwrap_or_else(|_| Instance::new(policy)),
        };
    loaded.into_iter().map(instance).collect()
}

#[cfg(test)]
mod tests;
