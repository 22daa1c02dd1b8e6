//! Brings the policies that the log names to this host: from the log's engine into the data
//! directory, and compiled, so that a takeover does not wait for a compiler.
//!
//! A host that lacks a policy with a role must not lead.

use std::collections::BTreeSet;
use std::sync::Arc;

use blake3::Hash;
use statehouse_cluster::Modules as Shared;
use statehouse_precompiled::Modules;
use tokio::sync::{Notify, watch};

use statehouse_config::limits;
use statehouse_core::log::Image;
use statehouse_core::log::record::PolicyRecord;
use statehouse_core::policy::{Assignment, Engine};
use statehouse_core::store::Transaction;

/// The policies that this host wants to have.
pub struct Wanted {
    local: Modules,
    digests: watch::Sender<BTreeSet<[u8; 32]>>,
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
        let (digests, wanted) = watch::channel(BTreeSet::new());
        let fetching = fetch(local.clone(), shared, engine, wanted, arrived);
        (Self { local, digests }, fetching)
    }

    /// The log names these policies.
    pub fn name(&self, policies: &[PolicyRecord]) {
        let named = policies.iter().map(|it| *it.digest.as_bytes()).collect();
        self.digests.send_if_modified(|wanted| {
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
        let assigned = image.assignment.iter().flat_map(Assignment::all);
        assigned
            .map(|it| it.0)
            .filter(|it| !self.local.path(it).exists())
    }
}

async fn fetch(
    local: Modules,
    shared: Shared,
    engine: Arc<Engine<Transaction>>,
    mut wanted: watch::Receiver<BTreeSet<[u8; 32]>>,
    arrived: Arc<Notify>,
) {
    // Loaded once: its machine code is saved then.
    let mut ready = BTreeSet::new();
    loop {
        let digests = wanted.borrow_and_update().clone();
        for digest in digests.difference(&ready.clone()) {
            match fetch_one(&local, &shared, &engine, Hash::from_bytes(*digest)).await {
                Ok(()) => {
                    ready.insert(*digest);
                    arrived.notify_one();
                }
                Err(error) => {
                    let digest = Hash::from_bytes(*digest);
                    tracing::warn!(%digest, "a policy of the cluster is not here: {error:#}");
                }
            }
        }
        let is_complete = digests.is_subset(&ready);
        tokio::select! {
            changed = wanted.changed() => if changed.is_err() {
                return;
            },
            () = tokio::time::sleep(limits::CLUSTER_START_RETRY), if !is_complete => {}
        }
    }
}

async fn fetch_one(
    local: &Modules,
    shared: &Shared,
    engine: &Arc<Engine<Transaction>>,
    digest: Hash,
) -> anyhow::Result<()> {
    let saved = local.load(&digest).ok();
    let received = match &saved {
        Some(_) => None,
        None => Some(shared.get(digest.as_bytes()).await?.ok_or_else(|| {
            anyhow::anyhow!("no host has written it to the log of the cluster yet")
        })?),
    };
    let (local, engine) = (local.clone(), engine.clone());
    let prepare = move || {
        if let Some(file) = &received {
            local.save(&digest, file)?;
        }
        let file = saved.or(received).unwrap_or_default();
        engine.load(&file)?;
        anyhow::Ok(())
    };
    tokio::task::spawn_blocking(prepare).await?
}
