//! One life of the host: the log on the simulated disk, the state machine, the broker.
//!
//! Everything that decides is production code. A life starts as `host/src/cli/serve.rs` does it.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock, Weak};
use std::time::{Duration, Instant};

use statehouse::STANDARD_POLICY;
use statehouse::server::Server;
use statehouse::transport::embedded::{Embedded, StoreService};
use statehouse::transport::{Inbound, Intake};
use statehouse_core::clock::{Clock, ManualSource};
use statehouse_core::log::record::{self, PolicyRecord};
use statehouse_core::log::{Image, Journal, Recorder};
use statehouse_core::policy::{Engine, Policy, Registry};
use statehouse_core::request::Dialect;
use statehouse_core::store::{Mode, Quota, Retention, Store, Transaction};
use statehouse_core::{Core, Settings};
use statehouse_mqtt::{Broker, Limits, Options as BrokerOptions, Persistence, Recovery};
use statehouse_offline::ImageSink;
use statehouse_protocol::ConnectionId;
use statehouse_wal::simulation::Simulation;
use statehouse_wal::{Error, Log, LogPosition, Options, Room};

/// The Receive Maximum of the broker.
pub(crate) const RECEIVE_MAX: u16 = 16;

/// The log as the store and the broker see it.
struct OnLog(Arc<Log>, AtomicU64);

impl Journal for OnLog {
    fn keeps(&self) -> bool {
        true
    }

    fn append(&self, records: &[&[u8]], urgent: bool) -> LogPosition {
        let bytes: usize = records.iter().map(|it| it.len()).sum();
        self.1.fetch_add(bytes as u64, Ordering::Relaxed);
        let appended = match urgent {
            true => self.0.append_urgent(records),
            false => self.0.append(records),
        };
        appended.expect("small records")
    }

    fn released(&self) -> LogPosition {
        self.0.released()
    }

    fn persisted(&self, _urgent: bool) -> &'static str {
        "disk"
    }

    fn has_room(&self) -> bool {
        matches!(self.0.room(), Room::Plenty | Room::Tight)
    }

    fn promise(&self) -> String {
        String::new()
    }
}

impl Persistence for OnLog {
    fn append(&self, changes: &[u8]) -> LogPosition {
        let mut record = Vec::new();
        record::sessions(&mut record, changes);
        Journal::append(self, &[&record], false)
    }

    fn released(&self) -> LogPosition {
        self.0.released()
    }

    fn has_room(&self) -> bool {
        Journal::has_room(self)
    }

    fn appended_here(&self) -> u64 {
        self.1.load(Ordering::Relaxed)
    }
}

/// The server without a reference count, which would keep every life in memory.
struct Requests(Weak<Server>);

impl Intake for Requests {
    fn take_within(&self, time_max: Duration, batch: &mut dyn Iterator<Item = Inbound<'_>>) {
        if let Some(server) = self.0.upgrade() {
            server.take_within(time_max, batch);
        }
    }

    fn take_some(&self, connection: ConnectionId, batch: &mut dyn Iterator<Item = Inbound<'_>>) {
        if let Some(server) = self.0.upgrade() {
            server.take_some(connection, batch);
        }
    }
}

/// The time of both clocks.
#[derive(Clone)]
pub(crate) struct Time {
    pub(crate) source: Arc<ManualSource>,
    pub(crate) now: Instant,
    pub(crate) wall_ms: u64,
}

/// A running host.
pub(crate) struct Node {
    pub(crate) log: Arc<Log>,
    pub(crate) server: Arc<Server>,
    pub(crate) broker: Broker,
}

/// What a start found on the disk.
pub(crate) struct Found {
    pub(crate) position: u64,
    pub(crate) torn: bool,
    pub(crate) from_snapshot: bool,
    pub(crate) table: BTreeMap<String, Vec<u8>>,
}

fn policy() -> Arc<Policy<Transaction>> {
    static POLICY: OnceLock<Arc<Policy<Transaction>>> = OnceLock::new();
    let load = || {
        // A seed ends the same way on a slow machine.
        let engine = Engine::without_watchdog().expect("an engine");
        Arc::new(engine.load(STANDARD_POLICY).expect("the standard policy"))
    };
    POLICY.get_or_init(load).clone()
}

impl Node {
    pub(crate) fn start(
        disk: &Simulation,
        options: &Options,
        time: &Time,
    ) -> Result<(Self, Found), Error> {
        let mut image = Image::new(Retention {
            per_session: RECEIVE_MAX.into(),
            ..Retention::default()
        });
        let limits = limits();
        image.sessions = Recovery::within(&limits);
        let (log, opened) = Log::open(
            Arc::new(disk.clone()),
            options.clone(),
            time.wall_ms,
            &mut ImageSink(&mut image),
        )?;
        image.finish();
        image.begin(Mode::Embedded);
        let table = image.state.table.range(b"", None);
        let found = Found {
            position: opened.position.0,
            torn: opened.torn,
            from_snapshot: opened.base > LogPosition::NONE,
            table: table
                .filter(|it| !it.expired(image.now_ms.max(time.wall_ms)))
                .map(|it| {
                    let key = String::from_utf8(it.key().to_vec()).expect("keys are ASCII");
                    (key, it.value().to_vec())
                })
                .collect(),
        };
        let log = Arc::new(log);
        let journal = Arc::new(OnLog(log.clone(), AtomicU64::new(0)));
        let mut clock = Clock::resume(time.source.clone(), image.now_ms);
        let run = image.run + 1;
        let recorder = Recorder::new(journal.clone(), image.policies, image.active);
        let registry = Registry::new(policy(), None);
        let store = Store::restore(registry, Quota::default(), image.state, image.duplicates);
        let settings = Settings {
            node: "StateStore".into(),
            dialect: Some(Dialect::Sdk),
            ..Settings::default()
        };
        let mut core = Core::new(store, recorder, run, settings);
        let named = vec![PolicyRecord::of(&policy(), true)];
        core.begin(Mode::Embedded, named, clock.read().now_ms);
        let server = Server::new(core, clock, Mode::Embedded);
        let service = StoreService::new(Arc::new(Requests(Arc::downgrade(&server))));
        let broker_options = BrokerOptions {
            limits,
            persistence: Some(journal),
            run,
            state_lost: || panic!("the broker lost its state"),
            ..BrokerOptions::default()
        };
        let broker = Broker::restore_simulated(
            broker_options,
            Arc::new(service),
            image.sessions,
            time.now,
            time.wall_ms,
        );
        server.attach(Arc::new(Embedded::new(broker.clone())));
        server.retain_sessions(&broker.sessions());
        let node = Self {
            log,
            server,
            broker,
        };
        Ok((node, found))
    }

    /// Makes everything durable, and lets go what waited for it, as the log's listener does.
    pub(crate) fn commit(&self) -> bool {
        let committed = self.log.commit().is_ok();
        self.release();
        committed
    }

    pub(crate) fn release(&self) {
        if self.log.failure().is_none() {
            self.server.release();
            self.broker.released(self.log.released());
        }
    }

    /// Whether the host accepts more than removals.
    pub(crate) fn has_room(&self) -> bool {
        matches!(self.log.room(), Room::Plenty | Room::Tight)
    }

    pub(crate) fn appended(&self) -> u64 {
        self.log.appended().0
    }
}

fn limits() -> Limits {
    Limits {
        receive_max: RECEIVE_MAX,
        ..Limits::default()
    }
}
