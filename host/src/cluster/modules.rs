//! Brings the policies that the log names to this host: from the log's engine into the data
//! directory, and compiled, so that a takeover does not wait for a compiler.
//!
//! A host that lacks a policy with a role, or still compiles it, must not lead.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use blake3::Hash;
use statehouse_cluster::Modules as Shared;
use statehouse_precompiled::Modules;
use tokio::sync::{Notify, watch};
use tokio::time::{Duration, Instant};

use statehouse_config::limits;
use statehouse_core::log::Image;
use statehouse_core::policy::{Assignment, Digest, Engine, LoadError, Role};
use statehouse_core::store::Transaction;
use statehouse_files::blocking;

use crate::policies::startup::may_be_temporary;

/// The policies that the log names.
type Named = BTreeMap<[u8; 32], Need>;

/// What a policy is needed for, the most urgent last.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Need {
    /// For redeliveries of requests that it handled.
    Redeliveries,
    /// The assignment names it. If it can never be loaded, the host leads without it.
    Assignment,
    /// It is active, or owns keys. The host cannot lead without it.
    Requests,
}

impl Need {
    fn of(policy: &Digest, assignment: &Assignment) -> Self {
        let roles = assignment.roles(policy);
        if roles.contains(&Role::Active) || roles.contains(&Role::Routed) {
            Self::Requests
        } else if assignment.all().contains(policy) {
            Self::Assignment
        } else {
            Self::Redeliveries
        }
    }
}

/// The policies that this host has loaded, and those whose roles end when the host leads because
/// they cannot be loaded.
type Tried = Arc<Mutex<BTreeSet<[u8; 32]>>>;

fn locked(tried: &Tried) -> MutexGuard<'_, BTreeSet<[u8; 32]>> {
    tried.lock().unwrap_or_else(PoisonError::into_inner)
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
        locked(&tried).insert(*standard.as_bytes());
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

    /// The log names the policies of this image. Looks for them also if it named them before: this
    /// host may have removed their files while it led.
    pub fn name(&self, image: &Image) {
        let need = |policy: Hash| {
            let assignment = image.assignment.as_ref();
            assignment.map_or(Need::Redeliveries, |it| Need::of(&policy.into(), it))
        };
        let policies = image.policies.iter().map(|it| it.digest);
        let named = policies.map(|it| (*it.as_bytes(), need(it))).collect();
        self.named.send_replace(named);
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
        let is_tried = |it: &Hash| locked(&self.tried).contains(it.as_bytes());
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

/// The policies without which the host cannot lead, and then the others: each may take seconds.
fn by_need(named: &Named) -> Vec<(&[u8; 32], Need)> {
    let mut policies: Vec<_> = named.iter().map(|(digest, need)| (digest, *need)).collect();
    policies.sort_by_key(|it| Reverse(it.1));
    policies
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
    let mut retries: BTreeMap<[u8; 32], Retry> = BTreeMap::new();
    loop {
        let named = wanted.borrow_and_update().clone();
        // A leader removes files from its directory that have no use, and they may get one again.
        loaded.retain(|it| local.path(&Hash::from_bytes(*it)).exists());
        retries.retain(|it, _| named.contains_key(it));
        let mut is_complete = true;
        for (digest, need) in by_need(&named) {
            // One that was just promoted must not wait for those that have no role.
            if wanted.has_changed().unwrap_or(true) {
                break;
            }
            if loaded.contains(digest) {
                continue;
            }
            if retries.get(digest).is_some_and(|it| it.at > Instant::now()) {
                is_complete = false;
                continue;
            }
            match fetch_one(&local, &shared, &engine, Hash::from_bytes(*digest)).await {
                Ok(true) => {
                    loaded.insert(*digest);
                    retries.remove(digest);
                    locked(&tried).insert(*digest);
                    arrived.notify_one();
                    continue;
                }
                // The leader removes modules that have no use.
                Ok(false) if need == Need::Redeliveries => continue,
                Ok(false) => {
                    if retries.entry(*digest).or_default().reports_absence() {
                        warn_of(
                            digest,
                            "no host has written it to the log of the cluster yet",
                        );
                    }
                }
                Err(error) => {
                    warn_of(digest, &format!("{error:#}"));
                    retries.entry(*digest).or_default().postpone();
                    if need != Need::Requests
                        && is_permanent(&error)
                        && locked(&tried).insert(*digest)
                    {
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

/// When to try a policy again that could not be saved or loaded. Each attempt may cost its transfer
/// from the log's engine, or seconds of a compiler.
struct Retry {
    at: Instant,
    wait: Duration,
    /// How often no host had written it.
    absences: u32,
}

impl Default for Retry {
    fn default() -> Self {
        Self {
            at: Instant::now(),
            wait: limits::CLUSTER_START_RETRY,
            absences: 0,
        }
    }
}

impl Retry {
    /// No host has written the policy. Returns whether to report it: at the absences 1, 2, 4, 8 and
    /// so on, since a policy that the log's engine has lost may be absent for ever.
    fn reports_absence(&mut self) -> bool {
        self.absences = self.absences.saturating_add(1);
        self.absences.is_power_of_two()
    }

    /// An attempt has failed.
    fn postpone(&mut self) {
        self.at = Instant::now() + self.wait;
        self.wait = (self.wait * 2).min(limits::CLUSTER_POLICY_RETRY_MAX);
    }
}

/// Whether a policy can never be loaded, so that its roles end when this host leads.
fn is_permanent(error: &anyhow::Error) -> bool {
    let error = error.downcast_ref::<LoadError>();
    error.is_some_and(|it| !may_be_temporary(it))
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
    use statehouse_cluster::{Access, MachineClock, etcd::Etcd};
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

    /// Wants nothing yet, and has loaded `built-in`. No etcd answers.
    fn begin(local: Modules) -> (Wanted, impl Future<Output = ()> + Send) {
        let etcd = Etcd::new(&["http://127.0.0.1:1".to_owned()], None).unwrap();
        let access = Access::new(Arc::new(etcd), Arc::new(MachineClock), "plant7");
        let engine = Arc::new(Engine::new().unwrap());
        let built_in = blake3::hash(b"built-in");
        let shared = Shared::new(access, 0);
        Wanted::begin(local, shared, engine, built_in, Arc::default())
    }

    /// Wants the policies of a state, and waits until the host may lead with them, at most so long.
    async fn bring(local: &Modules, image: &Image, file: &[u8], limit: Duration) -> Wanted {
        // The file will be here, so etcd is not asked.
        let (wanted, fetching) = begin(local.clone());
        wanted.name(image);
        // The file is saved before it is compiled.
        local.save(&blake3::hash(file), file).unwrap();
        wanted.check(image).unwrap_err();
        let brought = async {
            while wanted.check(image).is_err() {
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        };
        tokio::select! {
            () = fetching => {}
            () = brought => {}
            () = tokio::time::sleep(limit) => {}
        }
        wanted
    }

    /// A host that led may have removed the file of a policy that the log still names.
    #[tokio::test]
    async fn policies_are_looked_for_each_time_that_they_are_named() {
        let directory = tempfile::tempdir().unwrap();
        let (wanted, _fetching) = begin(Modules::of(directory.path()));
        let image = image(blake3::hash(b"built-in"));
        let mut named = wanted.named.subscribe();
        for _ in 0..2 {
            wanted.name(&image);
            assert!(named.has_changed().unwrap());
            named.mark_unchanged();
        }
    }

    #[test]
    fn policies_that_requests_need_are_brought_first() {
        let needs = [Need::Redeliveries, Need::Requests, Need::Assignment];
        let named = (0..).zip(needs).map(|(number, need)| ([number; 32], need));
        let named: Named = named.collect();
        let order: Vec<u8> = by_need(&named).iter().map(|it| it.0[0]).collect();
        assert_eq!(order, [1, 2, 0]);
    }

    #[test]
    fn absent_policy_is_reported_ever_more_rarely() {
        let mut retry = Retry::default();
        let reported: Vec<u32> = (1..=86_400).filter(|_| retry.reports_absence()).collect();
        assert_eq!(reported[..4], [1, 2, 4, 8]);
        assert_eq!(reported.len(), 17, "in a day");
        assert!(retry.at <= Instant::now(), "it is tried again at once");
    }

    #[tokio::test]
    async fn host_leads_only_with_policies_that_requests_need() {
        let directory = tempfile::tempdir().unwrap();
        let local = Modules::of(directory.path());
        let (standard, broken) = (blake3::hash(STANDARD_POLICY), b"no policy");
        let (long, short) = (Duration::from_secs(60), Duration::from_millis(500));
        let only = image(standard);
        let wanted = bring(&local, &only, STANDARD_POLICY, long).await;
        assert_eq!(wanted.check(&only), Ok(()));

        // It is not active any more, and never will be: nothing waits for it.
        let mut replaced = image(blake3::hash(broken));
        let assignment = replaced.assignment.take().unwrap();
        let next = assignment.load(standard.into()).unwrap();
        replaced.assignment = Some(next.promote(standard.into()).unwrap());
        replaced.policies.extend(only.policies.clone());
        let wanted = bring(&local, &replaced, broken, long).await;
        assert_eq!(wanted.check(&replaced), Ok(()));

        let active = image(blake3::hash(broken));
        let wanted = bring(&local, &active, broken, short).await;
        let why = wanted.check(&active).unwrap_err();
        assert!(why.contains("does not have the policy"), "{why}");
    }
}
