//! Brings the policies that the log names to this host: from the log's engine into the data
//! directory, and compiled, so that a takeover does not wait for a compiler.
//!
//! A host that lacks a policy with a role, or still compiles it, must not lead.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use blake3::Hash;
use statehouse_cluster::Modules as Shared;
use statehouse_precompiled::Modules;
use tokio::sync::{Notify, watch};

use statehouse_config::limits;
use statehouse_core::log::Image;
use statehouse_core::policy::{Assignment, Engine};
use statehouse_core::store::Transaction;
use statehouse_files::blocking;

/// The policies that the log names, and whether each has a role.
type Named = BTreeMap<[u8; 32], bool>;

/// The policies that this host has loaded, or cannot load. A policy that cannot be loaded must not
/// keep the host from leading: its roles end when the host leads.
#[derive(Clone, Default)]
struct Tried(Arc<Mutex<BTreeSet<[u8; 32]>>>);

impl Tried {
    fn locked(&self) -> MutexGuard<'_, BTreeSet<[u8; 32]>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The policies that this host wants to have.
pub struct Wanted {
    local: Modules,
    named: watch::Sender<Named>,
    tried: Tried,
}

impl Wanted {
    /// Wants nothing yet, and has loaded `standard`. The future brings what is wanted, until it is
    /// dropped, and notifies `arrived` of each policy.
    pub fn begin(
        local: Modules,
        shared: Shared,
        engine: Arc<Engine<Transaction>>,
        standard: Hash,
        arrived: Arc<Notify>,
    ) -> (Self, impl Future<Output = ()> + Send) {
        let (named, wanted) = watch::channel(Named::new());
        let tried = Tried::default();
        tried.locked().insert(*standard.as_bytes());
        let fetching = fetch(
            local.clone(),
            shared,
            engine,
            wanted,
            tried.clone(),
            arrived,
        );
        let wanted = Self {
            local,
            named,
            tried,
        };
        (wanted, fetching)
    }

    /// The log names the policies of this image.
    pub fn name(&self, image: &Image) {
        let assigned: BTreeSet<_> = assigned(image).collect();
        let policies = image.policies.iter().map(|it| it.digest);
        let named: Named = policies
            .map(|it| (*it.as_bytes(), assigned.contains(it.as_bytes())))
            .collect();
        self.named.send_if_modified(|wanted| {
            let is_new = *wanted != named;
            *wanted = named;
            is_new
        });
    }

    /// Whether every policy with a role is here and loaded. Fails with the name of the policy that
    /// is missing, for the operator.
    pub fn check(&self, image: &Image) -> Result<(), String> {
        self.missing(image).next().map_or(Ok(()), |digest| {
            let named = image.policies.iter().find(|it| it.digest == digest);
            let name = named.map_or("unknown", |it| &it.name);
            Err(format!(
                "it does not have the policy {name} ({digest}) yet, which it reads from the log of the cluster and compiles"
            ))
        })
    }

    /// The policies with a role that are not here, or not loaded yet.
    pub fn missing(&self, image: &Image) -> impl Iterator<Item = Hash> {
        let is_tried = |it: &Hash| self.tried.locked().contains(it.as_bytes());
        assigned(image)
            .map(Hash::from_bytes)
            .filter(move |it| !is_tried(it) || !self.local.path(it).exists())
    }
}

/// The policies with a role.
fn assigned(image: &Image) -> impl Iterator<Item = [u8; 32]> {
    let assigned = image.assignment.iter().flat_map(Assignment::all);
    assigned.map(|it| *it.0.as_bytes())
}

async fn fetch(
    local: Modules,
    shared: Shared,
    engine: Arc<Engine<Transaction>>,
    mut wanted: watch::Receiver<Named>,
    tried: Tried,
    arrived: Arc<Notify>,
) {
    // Loaded once: its machine code is saved then.
    let mut loaded = BTreeSet::new();
    loop {
        let named = wanted.borrow_and_update().clone();
        // A leader removes files from its directory that have no use, and they may get one again.
        loaded.retain(|it| local.path(&Hash::from_bytes(*it)).exists());
        let mut is_complete = true;
        for (digest, has_role) in &named {
            if loaded.contains(digest) {
                continue;
            }
            match fetch_one(&local, &shared, &engine, Hash::from_bytes(*digest)).await {
                Ok(true) => {
                    loaded.insert(*digest);
                    tried.locked().insert(*digest);
                    arrived.notify_one();
                    continue;
                }
                // The leader removes modules that have no use.
                Ok(false) if !has_role => continue,
                Ok(false) => warn_of(
                    digest,
                    "no host has written it to the log of the cluster yet",
                ),
                Err(error) => {
                    warn_of(digest, &format!("{error:#}"));
                    // Without the file, the log's engine did not answer or the disk failed.
                    let is_here = local.path(&Hash::from_bytes(*digest)).exists();
                    if is_here && tried.locked().insert(*digest) {
                        arrived.notify_one();
                    }
                }
            }
            is_complete = false;
        }
        tokio::select! {
            changed = wanted.changed() => if changed.is_err() {
                return;
            },
            () = tokio::time::sleep(limits::CLUSTER_START_RETRY), if !is_complete => {}
        }
    }
}

fn warn_of(digest: &[u8; 32], reason: &str) {
    let digest = Hash::from_bytes(*digest);
    tracing::warn!(%digest, "a policy of the cluster is not here: {reason}");
}

/// Returns false if neither this host nor the log's engine has the policy.
async fn fetch_one(
    local: &Modules,
    shared: &Shared,
    engine: &Arc<Engine<Transaction>>,
    digest: Hash,
) -> anyhow::Result<bool> {
    let saved = local.load(&digest).ok();
    let received = match &saved {
        Some(_) => None,
        None => shared.get(digest.as_bytes()).await?,
    };
    if saved.is_none() && received.is_none() {
        return Ok(false);
    }
    let (local, engine) = (local.clone(), engine.clone());
    let prepare = move || {
        if let Some(file) = &received {
            local.save(&digest, file)?;
        }
        let file = saved.or(received).unwrap_or_default();
        engine.load(&file)?;
        anyhow::Ok(true)
    };
    blocking::run("module", prepare).await?
}

#[cfg(test)]
mod tests {
    use statehouse_cluster::{MachineClock, etcd::Etcd};
    use statehouse_core::log::record::PolicyRecord;
    use statehouse_core::store::Retention;

    use super::*;
    use crate::STANDARD_POLICY;

    /// A state with this policy, which is active.
    fn image(digest: Hash) -> Image {
        let mut image = Image::new(Retention::default());
        image.policies.push(PolicyRecord {
            digest,
            name: "policy".to_owned(),
            version: "1.0.0".to_owned(),
            built_in: false,
        });
        image.assignment = Some(Assignment::of(digest.into()));
        image
    }

    #[tokio::test]
    async fn host_may_lead_after_it_has_tried_to_load_a_policy() {
        let directory = tempfile::tempdir().unwrap();
        let local = Modules::of(directory.path());
        let engine = Arc::new(Engine::new().unwrap());
        for file in [STANDARD_POLICY, b"no policy"] {
            let digest = blake3::hash(file);
            // The file is here, so etcd is not asked.
            let etcd = Etcd::new(&["http://127.0.0.1:1".to_owned()], None).unwrap();
            let shared = Shared::new(Arc::new(etcd), Arc::new(MachineClock), "plant7");
            let (arrived, built_in) = (Arc::<Notify>::default(), blake3::hash(b"built-in"));
            let (wanted, fetching) = Wanted::begin(
                local.clone(),
                shared,
                engine.clone(),
                built_in,
                arrived.clone(),
            );
            let image = image(digest);
            wanted.name(&image);
            // The file is saved before it is compiled.
            local.save(&digest, file).unwrap();
            wanted.check(&image).unwrap_err();
            tokio::select! {
                () = fetching => {}
                () = arrived.notified() => {}
            }
            assert_eq!(wanted.check(&image), Ok(()));
        }
    }
}
