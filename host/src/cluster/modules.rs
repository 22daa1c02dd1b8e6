//! Brings the policies that the log names to this host: from the log's engine into the data
//! directory, and compiled, so that a takeover does not wait for a compiler.
//!
//! A host that lacks a policy with a role must not lead.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use blake3::Hash;
use statehouse_cluster::Modules as Shared;
use statehouse_precompiled::Modules;
use tokio::sync::{Notify, watch};

use statehouse_config::limits;
use statehouse_core::log::Image;
use statehouse_core::policy::{Assignment, Engine};
use statehouse_core::store::Transaction;

/// The policies that the log names, and whether each has a role.
type Named = BTreeMap<[u8; 32], bool>;

/// The policies that this host wants to have.
pub struct Wanted {
    local: Modules,
    named: watch::Sender<Named>,
}

impl Wanted {
    /// Wants nothing yet. The future brings what is wanted, until it is dropped, and notifies
    /// `arrived` of each policy.
    pub fn begin(
        local: Modules,
        shared: Shared,
        engine: Arc<Engine<Transaction>>,
        arrived: Arc<Notify>,
    ) -> (Self, impl Future<Output = ()> + Send) {
        let (named, wanted) = watch::channel(Named::new());
        let fetching = fetch(local.clone(), shared, engine, wanted, arrived);
        (Self { local, named }, fetching)
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

    /// Whether every policy with a role is here.
    ///
    /// # Errors
    /// The policy that is missing, for the operator.
    pub fn check(&self, image: &Image) -> Result<(), String> {
        self.missing(image).next().map_or(Ok(()), |digest| {
            let named = image.policies.iter().find(|it| it.digest == digest);
            let name = named.map_or("unknown", |it| &it.name);
            Err(format!(
                "it does not have the policy {name} ({digest}) yet, which it reads from the log of the cluster"
            ))
        })
    }

    /// The policies with a role that are not here.
    pub fn missing(&self, image: &Image) -> impl Iterator<Item = Hash> {
        assigned(image)
            .map(Hash::from_bytes)
            .filter(|it| !self.local.path(it).exists())
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
                    arrived.notify_one();
                    continue;
                }
                // The leader removes modules that have no use.
                Ok(false) if !has_role => continue,
                Ok(false) => warn_of(
                    digest,
                    "no host has written it to the log of the cluster yet",
                ),
                Err(error) => warn_of(digest, &format!("{error:#}")),
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
    tokio::task::spawn_blocking(prepare).await?
}
