//! Reads the figures of a host about once a second, and makes an overview of their differences.

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use statehouse_core::clock::wall_ms;
use statehouse_protocol::Histogram;
use statehouse_wal::LogFigures;

use super::document::{
    ClientCounts, ClusterView, DiskUse, ForeignBroker, HotKeyRate, Latencies, Latency, MemoryUse,
    Overview, PolicyRate, ProcessUse, Stages, StoreSize,
};
use super::sample::{Sample, latency, per_second, tenths};
use crate::admin::Sources;
use crate::admin::api::Api;
use crate::admin::cluster::{ClusterFigures, ClusterPlace};
use crate::admin::metrics::{disk, process, store};
use crate::admin::requests::Subject;
use crate::past::json_bytes;
use crate::policies::manager::Listing;
use crate::time::millis;
use statehouse_config::limits;
use statehouse_core::policy::Digest;
use statehouse_server::{HotKey, Longest, Stats};

/// What stays the same while the process runs.
pub(super) struct Unchanging {
    host: String,
    started_ms: u64,
    memory_limit: Option<u64>,
    fds_limit: Option<u64>,
}

impl Unchanging {
    pub(super) fn read() -> Self {
        let name = std::fs::read_to_string("/proc/sys/kernel/hostname");
        let started = process::started().map(millis);
        Self {
            host: name.unwrap_or_default().trim().to_owned(),
            started_ms: started.unwrap_or_else(wall_ms),
            memory_limit: statehouse_config::memory_bytes(),
            fds_limit: statehouse_config::open_files_max(),
        }
    }
}

/// The samples of the last seconds.
#[derive(Default)]
pub(super) struct Sampler {
    /// The store of the samples. It may end before this.
    store: Weak<Api>,
    samples: VecDeque<Sample>,
    /// When the CPU time was read last, and that time.
    cpu: Option<(Instant, Duration)>,
    /// When open files were counted last, and their number.
    fds: Option<(Instant, Option<u64>)>,
}

impl Sampler {
    /// The overview of the time since the last look. None at the first look at a store.
    pub(super) fn look(&mut self, subject: &Subject, unchanging: &Unchanging) -> Option<Overview> {
        let mut overview = Overview {
            host: unchanging.host.clone(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            started_ms: unchanging.started_ms,
            time_ms: wall_ms(),
            memory: MemoryUse {
                rss: process::resident_bytes(),
                limit: unchanging.memory_limit,
                owners: BTreeMap::new(),
            },
            process: ProcessUse {
                cpu: self.cpu(),
                fds: self.fds(),
                fds_limit: unchanging.fds_limit,
            },
            ..Overview::default()
        };
        match subject {
            Subject::Store(api) => return self.of_store(api, overview),
            Subject::Follower {
                impediment,
                place,
                figures,
                ..
            } => {
                self.end();
                overview.store.clone_from(&place.cluster);
                overview.host.clone_from(&place.host);
                set_readiness(&mut overview, impediment());
                overview.cluster = Some(cluster(place, &figures()));
            }
        }
        Some(overview)
    }

    /// The store need not measure more any longer.
    pub(super) fn end(&mut self) {
        if let Some(api) = std::mem::take(&mut self.store).upgrade() {
            api.sources().server.watch(false);
        }
        self.samples.clear();
    }

    fn of_store(&mut self, api: &Arc<Api>, mut overview: Overview) -> Option<Overview> {
        let sources = api.sources();
        if !std::ptr::eq(Weak::as_ptr(&self.store), Arc::as_ptr(api)) {
            self.end();
            self.store = Arc::downgrade(api);
            sources.server.watch(true);
        }
        let server = &sources.server;
        let stats = server.stats();
        let listing = api.listing();
        let rate = self.requests_per_second(stats.requests);
        let observed = server.observed(rate)?;
        let log = sources.disk.as_ref().map(|disk| disk.log().figures());
        let of_broker = sources.broker.as_ref().map(|it| it.stats());
        let flushes = log.as_ref().map(|it| it.times.flushes.clone());
        let hot_keys = observed.hot_keys.clone();
        if self.samples.len() > limits::OVERVIEW_WINDOW {
            self.samples.pop_front();
        }
        let broker = of_broker.as_ref();
        let sample = Sample::of(server, &stats, broker, &listing, observed, flushes);
        self.samples.push_back(sample);
        let (first, last) = (self.samples.front()?, self.samples.back()?);
        let before = self.samples.iter().rev().nth(1)?;
        let seconds = last.at.duration_since(before.at).as_secs_f64();
        let rates = last.counts.rates(&before.counts, seconds);
        overview.store.clone_from(&listing.store);
        overview.hot_keys = of_keys(hot_keys, rates.requests);
        overview.policies = of_policies(&listing, &before.policies, seconds);
        overview.rates = Some(rates);
        overview.latency_us = Some(self.latencies(first, last));
        let flushes = latency(last.times.disk.as_ref(), first.times.disk.as_ref(), None);
        let unwritten = log.as_ref().map_or(0, |it| it.unwritten);
        overview.queues = named(store::queues(&stats, broker, unwritten));
        overview.disk = log.map(|it| disk_use(&it, stats.disk_full, flushes));
        set_present(&mut overview, sources, &stats, of_broker);
        Some(overview)
    }

    fn requests_per_second(&self, requests: u64) -> f64 {
        self.samples.back().map_or(0.0, |before| {
            let seconds = before.at.elapsed().as_secs_f64();
            per_second(requests, before.counts.requests, seconds)
        })
    }

    /// The times between two samples. The longest ones are those of all samples after the first.
    fn latencies(&self, first: &Sample, last: &Sample) -> Latencies {
        let longest = |of: fn(&Longest) -> Duration| {
            let samples = self.samples.iter().skip(1);
            samples.map(|it| of(&it.longest)).max()
        };
        let (now, then) = (&last.times, &first.times);
        let of = |now: &Histogram, then: &Histogram, max| latency(Some(now), Some(then), max);
        Latencies {
            window_s: tenths(last.at.duration_since(first.at).as_secs_f64()),
            request: latency(
                now.request.as_ref(),
                then.request.as_ref(),
                longest(|it| it.request),
            ),
            stages: Stages {
                queue: of(&now.queue, &then.queue, longest(|it| it.queue)),
                policy: of(&now.policy, &then.policy, longest(|it| it.policy)),
                flush: of(&now.flush, &then.flush, longest(|it| it.flush)),
                send: of(&now.send, &then.send, longest(|it| it.send)),
            },
            notification: of(
                &now.notification,
                &then.notification,
                longest(|it| it.notification),
            ),
        }
    }

    /// The CPU time per second since the last look.
    fn cpu(&mut self) -> Option<f64> {
        let now = (Instant::now(), process::cpu()?);
        let (at, before) = self.cpu.replace(now)?;
        let seconds = now.0.duration_since(at).as_secs_f64();
        let used = now.1.saturating_sub(before).as_secs_f64();
        Some((used / seconds * 1000.0).round() / 1000.0)
    }

    fn fds(&mut self) -> Option<u64> {
        let due = |at: &Instant| at.elapsed() >= limits::OVERVIEW_FDS_INTERVAL;
        if self.fds.as_ref().is_none_or(|(at, _)| due(at)) {
            self.fds = Some((Instant::now(), process::open_files()));
        }
        self.fds.as_ref()?.1
    }
}

/// Sets the figures that are not differences.
fn set_present(
    overview: &mut Overview,
    sources: &Sources,
    stats: &Stats,
    broker: Option<statehouse_mqtt::Stats>,
) {
    let server = &sources.server;
    overview.store_time_ms = Some(server.now_ms());
    set_readiness(overview, sources.impediment());
    overview.store_size = Some(StoreSize {
        keys: stats.keys,
        bytes: stats.bytes,
        watches: stats.watches,
        dedup_entries: stats.remembered,
    });
    overview.memory.owners = named(store::owners(stats, broker.as_ref()));
    let limits = sources.broker.as_ref().map(|it| it.limits());
    overview.limits = named(statehouse_config::named(&server.quota(), limits.as_deref()));
    let of_broker = broker.zip(limits);
    overview.clients = of_broker.map(|(stats, limits)| clients(&stats, &limits));
    overview.foreign_broker = server.link().map(|it| ForeignBroker {
        connected: it.connected,
        outstanding: it.outstanding,
        unacknowledged: it.unacknowledged,
    });
    if let Some(leadership) = &sources.leadership {
        let place = leadership.place();
        // Each host of a cluster shows its name; `/v1/policies` has that of the store.
        overview.store.clone_from(&place.cluster);
        overview.host.clone_from(&place.host);
        overview.cluster = Some(cluster(&place, &leadership.figures()));
    }
}

fn disk_use(log: &LogFigures, is_full: bool, flush_us: Latency) -> DiskUse {
    DiskUse {
        free: log.free,
        room: log.room,
        used: named(disk::parts(log)),
        is_full,
        flush_us,
    }
}

fn clients(stats: &statehouse_mqtt::Stats, limits: &statehouse_mqtt::Limits) -> ClientCounts {
    ClientCounts {
        connected: stats.connections as u64,
        limit: limits.connections_max as u64,
        sessions: stats.sessions as u64,
        sessions_limit: limits.sessions_max as u64,
        subscriptions: stats.subscriptions as u64,
        retained: stats.retained as u64,
    }
}

fn set_readiness(overview: &mut Overview, impediment: Option<&'static str>) {
    overview.ready = impediment.is_none();
    overview.why_not_ready = impediment.map(str::to_owned);
}

fn of_keys(keys: Vec<HotKey>, requests: f64) -> Vec<HotKeyRate> {
    let keys = keys.into_iter().map(|it| HotKeyRate {
        key: json_bytes(&it.key),
        is_cut: it.is_cut,
        requests_per_s: tenths(requests * it.share),
        share: (it.share * 1000.0).round() / 1000.0,
    });
    keys.collect()
}

fn of_policies(listing: &Listing, before: &[(Digest, u64)], seconds: f64) -> Vec<PolicyRate> {
    let with_role = listing.policies.iter().filter(|it| !it.roles.is_empty());
    let rates = with_role.map(|it| {
        let known = before.iter().find(|(digest, _)| *digest == it.digest);
        let done = known.map_or(0, |(_, requests)| *requests);
        let roles = it.roles.iter().map(|role| role.name().to_owned());
        PolicyRate {
            name: it.name.clone(),
            version: it.version.clone(),
            digest: it.digest.to_string(),
            roles: roles.collect(),
            calls_per_s: tenths(per_second(it.done.requests, done, seconds)),
            failures: it.done.failures.total(),
            fuel_mean: it.done.fuel_mean,
        }
    });
    rates.collect()
}

fn cluster(place: &ClusterPlace, figures: &ClusterFigures) -> ClusterView {
    let role = match figures.leader {
        Some(_) => "leader",
        None => "follower",
    };
    ClusterView {
        name: place.cluster.clone(),
        role: role.to_owned(),
        leader: place.leader.clone(),
        followers: place.followers.clone(),
        epoch: figures.epoch,
        position: figures.position,
        history_position: figures.history,
        lag_records: figures.lag,
        reaches_log: figures.reaches_log,
        log_records: figures.log_records,
        log_bytes: figures.log_bytes,
        snapshot_age_ms: figures.snapshot_age.map(millis),
        unreleased: figures.leader.as_ref().map(|it| it.unreleased),
        lease_ms: figures.leader.as_ref().map(|it| millis(it.lease)),
    }
}

fn named(values: impl IntoIterator<Item = (&'static str, u64)>) -> BTreeMap<String, u64> {
    let values = values.into_iter();
    values
        .map(|(name, value)| (name.to_owned(), value))
        .collect()
}
