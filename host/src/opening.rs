//! The policies of a start: who answered last, who is to answer now, and every module that this takes.
//!
//! What enters: what was recorded, and the setting. What leaves: a registry, or words that say which file is missing.
//! A policy that is asked for and cannot be had is never replaced in silence.

use std::io;
use std::sync::Arc;

use anyhow::Context;

use crate::config::PolicyChoice;
use crate::control::trial;
use crate::limits;
use crate::ship::Trust;
use statehouse_core::log::Image;
use statehouse_core::log::record::PolicyRecord;
use statehouse_core::policy::{
    Assignment, Digest, Engine, Failure, Instance, LoadError, Policy, Registry, Role,
};
use statehouse_core::store::Transaction;
use statehouse_precompiled::Modules;
use statehouse_precompiled::read_file;

/// What a start has at hand.
pub(crate) struct Opening<'a> {
    pub(crate) engine: &'a Engine<Transaction>,
    pub(crate) standard: &'a Arc<Policy<Transaction>>,
    pub(crate) modules: &'a Modules,
    /// Whose files may be named.
    pub(crate) trust: &'a Trust,
    /// Whether anything is kept.
    pub(crate) keeps: bool,
}

type Loaded = Vec<Arc<Policy<Transaction>>>;

/// Why a policy that was kept is not there.
#[derive(Debug, thiserror::Error)]
enum Unloaded {
    #[error(transparent)]
    File(#[from] io::Error),
    #[error(transparent)]
    Module(#[from] LoadError),
}

impl Unloaded {
    /// Whether another start may well have it: the machine lacks something, or was too slow.
    fn may_pass(&self) -> bool {
        match self {
            Self::File(error) => {
                let gone = [io::ErrorKind::NotFound, io::ErrorKind::InvalidData];
                !gone.contains(&error.kind())
            }
            Self::Module(error) => matches!(
                error,
                LoadError::Engine(_)
                    | LoadError::Costly(_)
                    | LoadError::Compiler(_)
                    | LoadError::Trial(_, Failure::Watchdog)
            ),
        }
    }
}

impl Opening<'_> {
    /// The registry to go on with, and what is to be recorded of its policies.
    pub(crate) fn registry(
        &self,
        choice: &PolicyChoice,
        image: &Image,
    ) -> anyhow::Result<(Registry<Transaction>, Vec<PolicyRecord>)> {
        let mut assignment = self.recorded(image);
        let mut loaded = vec![self.standard.clone()];
        if self.keeps {
            // Another version of this program may need it, to answer what comes again.
            let file = crate::STANDARD_POLICY;
            self.keep(&self.standard.digest, file)?;
        }
        match choice {
            PolicyChoice::Last => {}
            PolicyChoice::BuiltIn => assignment = assignment.promote(assignment.built_in)?,
            PolicyChoice::File(path) => {
                let file = read_file(path)
                    .with_context(|| format!("cannot read the policy {}", path.display()))?;
                self.trust
                    .check(&file)
                    .with_context(|| format!("{} cannot be used", path.display()))?;
                let policy = self
                    .engine
                    .load(&file)
                    .with_context(|| format!("{} cannot be used", path.display()))?;
                let digest = Digest::from(policy.digest);
                if digest != assignment.built_in {
                    let policy = Arc::new(policy);
                    trial::run(&policy)
                        .with_context(|| format!("{} cannot be used", path.display()))?;
                    if self.keeps {
                        self.keep(&policy.digest, &file)?;
                    }
                    loaded.push(policy);
                }
                assignment = assignment.load(digest)?;
                // A supervisor starts it again and again with the same setting, which is no new decision.
                match assignment.guard.as_ref().filter(|it| it.policy == digest) {
                    Some(guard) => {
                        let (path, why) = (path.display(), &guard.why);
                        tracing::error!(%path, %digest, why, "the policy of --policy is held ready and does not answer, for the host itself went back from it; `statehouse policy promote` forgives it");
                    }
                    None => assignment = assignment.promote(digest)?,
                }
            }
        }
        let named = *choice != PolicyChoice::Last;
        for digest in assignment.all() {
            if loaded.iter().any(|it| it.digest == digest.0) {
                continue;
            }
            match self.load(&digest) {
                Ok(policy) => loaded.push(Arc::new(policy)),
                Err(error) => assignment = self.lost(assignment, digest, &error, named, image)?,
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
        if self.keeps {
            self.tidy(&assignment, remembered);
        }
        // Those that answer start before anybody waits for it. A trial of each went well already.
        let ready =
            loaded
                .into_iter()
                .map(|policy| match assignment.roles(&policy.digest.into())[..] {
                    [] => Instance::new(policy),
                    _ => Instance::warm(policy.clone()).unwrap_or_else(|_| Instance::new(policy)),
                });
        let ready = ready.collect();
        registry
            .assign(assignment, ready)
            .map_err(|absent| anyhow::anyhow!("the policy {} is not there", absent.0))?;
        Ok((registry, records))
    }

    /// Who answered what when the store ended. The built-in policy is the one of this program.
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

    fn load(&self, digest: &Digest) -> Result<Policy<Transaction>, Unloaded> {
        let file = self.modules.load(&digest.0)?;
        Ok(self.engine.load(&file)?)
    }

    fn keep(&self, digest: &blake3::Hash, file: &[u8]) -> anyhow::Result<()> {
        // Before any record that needs it.
        self.modules
            .save(digest, file)
            .context("cannot keep the policy's module in the data directory")
    }

    /// What becomes of an assignment whose policy cannot be had. `named`: the operator said which one is to answer.
    fn lost(
        &self,
        assignment: Assignment,
        digest: Digest,
        error: &Unloaded,
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
        if roles.contains(&Role::Active) {
            anyhow::bail!(
                "{name} answered last, but its module {path} cannot be used ({error}): name it with --policy FILE, or take the built-in one with --policy builtin"
            );
        }
        if roles.contains(&Role::Routed) && !named {
            anyhow::bail!(
                "{name} owns the keys of a route, but its module {path} cannot be used ({error}): put it back, or say which policy is to answer with --policy, and the route ends"
            );
        }
        // What is dropped is recorded so, and a later start would not find it again.
        anyhow::ensure!(
            !error.may_pass(),
            "{name} is held ready, but its module {path} cannot be used now ({error}): start again; where that does not help, remove the file, and what it was there for ends"
        );
        tracing::error!(policy = name, %digest, ?roles, "a policy is lost, and so is what it was there for: {error}");
        Ok(assignment.without(digest))
    }

    /// Removes modules that nobody needs, where they take too much. A start does not fail for it.
    fn tidy(&self, assignment: &Assignment, remembered: Vec<blake3::Hash>) {
        let named = assignment.all().into_iter().map(|digest| digest.0);
        let needed = || named.chain(remembered).collect();
        if let Err(error) = self.modules.tidy(limits::MODULE_BYTES_MAX, needed) {
            tracing::warn!(%error, "modules that nobody needs cannot be removed");
        }
    }

    /// Those that handled requests which may come again.
    fn retired(&self, remembered: &[blake3::Hash], loaded: &Loaded) -> Loaded {
        let here = |digest: &blake3::Hash| loaded.iter().any(|it| it.digest == *digest);
        let needed = remembered.iter().filter(|digest| !here(digest));
        let mut retired = Loaded::new();
        for digest in needed {
            match self.load(&Digest::from(*digest)) {
                Ok(policy) => retired.push(Arc::new(policy)),
                Err(error) => {
                    tracing::warn!(%digest, %error, "an older policy cannot be loaded: where requests that it handled come again, short answers are given from the record, and long ones cannot be given");
                }
            }
        }
        retired
    }
}

#[cfg(test)]
mod tests;
