//! One life of the host: the log on the simulated disk, the state machine, the broker.
//!
//! Everything that decides is production code. A life starts as `host/src/app/start.rs` does it.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::{Arc, Weak};
use std::time::Instant;

use statehouse_core::clock::{Clock, ManualSource, Stamp};
use statehouse_core::log::record::{self, Handled, Record};
use statehouse_core::log::{Block, Image, Recorder, read_block};
use statehouse_core::policy::Assignment;
use statehouse_core::request::Dialect;
use statehouse_core::store::{Mode, Store};
use statehouse_core::{Core, Settings};
use statehouse_mqtt::{Broker, Limits, Options as BrokerOptions, Recovery, SessionUsers};
use statehouse_protocol::ConnectionId;
use statehouse_server::Server;
use statehouse_transport::{Inbound, Intake, Transport, embedded::StoreService};
use statehouse_wal::simulation::Simulation;
use statehouse_wal::{Error, Log, LogPosition, Opened, Room, Sink};

use crate::captured::Captured;
use crate::fault_plan::FaultPlan;
use crate::journal::LogJournal;
use crate::packet::Publish;
use crate::policies;

/// The Receive Maximum of the broker.
pub(crate) const RECEIVE_MAX: u16 = 16;

/// All requests that clients have sent, by their timestamps, which are unique.
pub(crate) type Requests = HashMap<String, Publish>;

/// Applies the log to an image, and checks that records contain requests as clients sent them.
/// Recovery does not read these parts; history and replays do.
struct CheckedSink<'a> {
    image: Image,
    requests: &'a Requests,
    /// The requests with writes, if none may be recorded twice.
    executed: Option<HashSet<String>>,
    plan: &'a FaultPlan,
    users: SessionUsers,
    /// The clock at the end of the snapshot.
    complete: Stamp,
}

impl CheckedSink<'_> {
    /// Checks that the user of a request is known: every client is a user of the same name.
    fn check_user(&self, found: &Handled<'_>) {
        let session = found.remembered.delivery.session;
        let user = self.users.user(session).map(|user| &**user);
        // A session that ended while the snapshot was taken is not in it. While the disk is full,
        // sessions are not durable and their users are not recorded.
        let is_durable = self.image.sessions.has_session(session);
        let may_be_unknown = found.clock <= self.complete || !is_durable && self.plan.full;
        assert!(
            user == Some(found.client) || user.is_none() && may_be_unknown,
            "obligation 1: a request of {} is recorded with the user {user:?}",
            found.client
        );
    }
}

impl Sink for CheckedSink<'_> {
    fn reset(&mut self) {
        self.image.reset();
        (self.users, self.complete) = Default::default();
        self.executed = self.executed.take().map(|_| HashSet::new());
    }

    fn block(&mut self, block: &[u8]) -> Result<(), String> {
        match read_block(block).map_err(|error| error.to_string())? {
            Block::Sessions(changes) => self.users.apply(changes).expect("changes of the broker"),
            Block::Meta(meta) => self.complete = meta.clock,
            _ => {}
        }
        self.image.block(block).map_err(|error| error.to_string())
    }

    fn record(&mut self, _: LogPosition, record: &[u8]) -> Result<(), String> {
        let read = record::read(record).map_err(|error| error.to_string())?;
        if let Record::Sessions(changes) = read {
            self.users.apply(changes).expect("changes of the broker");
        } else if let Record::Handled(found) = read {
            if !self.plan.foreign {
                self.check_user(&found);
            }
            let timestamp = found.timestamp.expect("every request has one");
            let sent = &self.requests[timestamp];
            assert!(timestamp.ends_with(&format!(":{}", found.client)));
            assert_eq!(found.payload, &sent.payload[..], "a record of a request");
            assert_eq!(found.fencing_token, sent.user("__ft"));
            if let Some(executed) = self.executed.as_mut().filter(|_| !found.writes.is_empty()) {
                let first = executed.insert(timestamp.to_owned());
                assert!(first, "obligation 1: {timestamp} is recorded twice");
            }
        }
        (self.image.record(record)).map_err(|error| error.to_string())
    }
}

/// The server without a reference count, which would keep every life in memory.
struct Entrance(Weak<Server>);

impl Intake for Entrance {
    fn take(&self, batch: &mut dyn Iterator<Item = Inbound<'_>>) {
        if let Some(server) = self.0.upgrade() {
            server.take(batch);
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
    /// None behind a foreign broker.
    pub(crate) broker: Option<Broker>,
    /// The position of the assignment that the start recorded.
    pub(crate) began: u64,
}

/// What a start found on the disk.
pub(crate) struct Found {
    pub(crate) log: Log,
    pub(crate) image: Image,
    pub(crate) opened: Opened,
}

impl Found {
    /// Reads the disk as a start does.
    pub(crate) fn read(
        disk: &Simulation,
        plan: &FaultPlan,
        wall_ms: u64,
        requests: &Requests,
    ) -> Result<Self, Error> {
        let mut image = Image::new(plan.retention());
        image.sessions = Recovery::within(&limits());
        let mut sink = CheckedSink {
            image,
            requests,
            // A foreign broker may redeliver a request after its retention.
            executed: (!plan.foreign).then(HashSet::new),
            plan,
            users: SessionUsers::default(),
            complete: Stamp::default(),
        };
        let disk = Arc::new(disk.clone());
        let (log, opened) = Log::open(disk, plan.options(), wall_ms, &mut sink)?;
        let mut image = sink.image;
        image.finish();
        Ok(Self { log, image, opened })
    }

    pub(crate) fn captured(&self) -> Captured {
        let image = &self.image;
        let position = self.opened.position.0;
        Captured::of(position, image.run, image.assignment.as_ref(), &image.state)
    }

    /// Keys and values without those that have expired.
    pub(crate) fn table(&self, wall_ms: u64) -> BTreeMap<String, Vec<u8>> {
        let now_ms = self.image.now_ms.max(wall_ms);
        let table = self.image.state.table.range(b"", None);
        let live = table.filter(|it| !it.expired(now_ms)).map(|it| {
            let key = String::from_utf8(it.key().to_vec()).expect("keys are ASCII");
            (key, it.value().to_vec())
        });
        live.collect()
    }
}

impl Node {
    /// Starts on what was found. The module of the policy `missing` is lost.
    pub(crate) fn start(
        found: Found,
        plan: &FaultPlan,
        time: &Time,
        (assignment, missing): (&Assignment, Option<usize>),
        outlet: impl FnOnce(&Arc<Log>) -> Arc<dyn Transport>,
    ) -> Self {
        let Found { log, mut image, .. } = found;
        let mode = plan.mode();
        image.begin(mode);
        let expired = image.ends();
        let log = Arc::new(log);
        let journal = Arc::new(LogJournal::new(log.clone()));
        let mut clock = Clock::resume(time.source.clone(), image.now_ms);
        let run = image.run + 1;
        let recorder = Recorder::new(journal.clone(), image.policies, image.active);
        let registry = policies::registry(assignment, missing);
        let mut store = Store::restore(registry, plan.quota(), image.state, image.duplicates);
        store.supervision().guard.failures_max = plan.guard_failures;
        // Re-execution on fresh instances runs in a thread.
        store.supervision().purity_every = 0;
        let settings = Settings {
            node: "StateStore".into(),
            dialect: Some(Dialect::Sdk),
            policy_property: true,
            ..Settings::default()
        };
        let mut core = Core::new(store, recorder, run, settings);
        core.begin(mode, policies::records(), clock.read().now_ms);
        let began = log.appended().0;
        let server = Server::new(core, clock, mode);
        if mode == Mode::Foreign {
            server.attach(outlet(&log));
            server.renotify_expired(&expired);
            return Self {
                log,
                server,
                broker: None,
                began,
            };
        }
        let entrance = Arc::new(Entrance(Arc::downgrade(&server)));
        let service = StoreService::new(entrance, None, None);
        let broker_options = BrokerOptions {
            limits: limits(),
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
        server.attach(Arc::new(broker.clone()));
        server.retain_sessions(&broker.sessions());
        Self {
            log,
            server,
            broker: Some(broker),
            began,
        }
    }

    /// Lets go what waited for the log, as the log's listener does.
    pub(crate) fn release(&self) {
        if self.log.failure().is_none() {
            self.server.release();
            if let Some(broker) = &self.broker {
                broker.released(self.log.released());
            }
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
