//! A store that remembers what it receives, and hosts on the simulated engine without faults.

use std::future::Future;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::task::JoinHandle;
use tokio::time::sleep;

use crate::keys::Keys;
use crate::simulated::{Faults, SimulatedClock, World};
use crate::{
    Access, Clock, Description, Embedder, Ended, Engine, Head, Id, LeaderLog, LogPosition, Member,
    Options, Stop, Takeover, create,
};

/// Runs a future on the paused clock of tokio.
pub(super) fn simulate<T>(future: impl Future<Output = T>) -> T {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_time()
        .start_paused(true)
        .build();
    runtime.unwrap().block_on(future)
}

pub(super) fn clock() -> Arc<dyn Clock> {
    Arc::new(SimulatedClock::new(Duration::ZERO, 1_000_000))
}

/// The cluster `c` as operators see it.
pub(super) fn access(world: &World) -> Access {
    Access::new(world.engine(0), clock(), "c")
}

/// The id of the cluster `c`.
pub(super) const CLUSTER: Id = Id([1; 16]);

/// An engine without faults that holds the new cluster `c`.
pub(super) async fn world(seed: u64) -> World {
    let world = World::new(seed, Faults::default());
    create(&*world.engine(0), "c", CLUSTER, 0).await.unwrap();
    world
}

pub(super) async fn head(world: &World) -> Head {
    let head = world.engine(0).get(&Keys::new("c").head()).await.unwrap();
    Head::decode(&head.value.unwrap()).unwrap()
}

/// What a host received.
#[derive(Debug, Default)]
pub(super) struct Seen {
    pub(super) blocks: Vec<Vec<u8>>,
    pub(super) records: Vec<(u64, Vec<u8>)>,
    pub(super) log: Option<Arc<LeaderLog>>,
    pub(super) leader: String,
    /// The size of the next snapshot; 10 kB if it is zero.
    pub(super) state_bytes: usize,
    pub(super) description: Description,
    /// The wall clock of the host; 1 s after 1970 if it is not set.
    pub(super) wall_ms: Option<u64>,
    /// The time at which the clock of the store begins when the host leads.
    pub(super) begins_ms: u64,
}

struct Store {
    seen: Arc<Mutex<Seen>>,
    captured: bool,
}

impl Store {
    fn state_bytes(&self) -> usize {
        match self.seen.lock().unwrap().state_bytes {
            0 => 10_000,
            bytes => bytes,
        }
    }
}

impl Embedder for Store {
    fn now_ms(&self) -> u64 {
        self.seen.lock().unwrap().wall_ms.unwrap_or(1_000)
    }

    fn reset(&mut self) {
        let mut seen = self.seen.lock().unwrap();
        let description = seen.description.clone();
        *seen = Seen {
            description,
            ..Seen::default()
        };
    }

    fn block(&mut self, block: &[u8]) -> Result<(), String> {
        self.seen.lock().unwrap().blocks.push(block.to_vec());
        Ok(())
    }

    fn record(&mut self, position: LogPosition, record: &[u8]) -> Result<(), String> {
        let record = (position.0, record.to_vec());
        self.seen.lock().unwrap().records.push(record);
        Ok(())
    }

    fn following(&mut self, head: &Head) {
        self.seen.lock().unwrap().leader = head.leader.clone();
    }

    fn describe(&mut self) -> Description {
        self.seen.lock().unwrap().description.clone()
    }

    fn may_lead(&mut self, _head: &Head) -> Result<(), String> {
        Ok(())
    }

    fn opening(&mut self, epoch: u64) -> Vec<u8> {
        format!("epoch {epoch}").into_bytes()
    }

    fn leading(&mut self, takeover: Takeover) {
        let mut seen = self.seen.lock().unwrap();
        let since_ms = u64::try_from(takeover.since.as_millis()).unwrap();
        seen.begins_ms = takeover.previous.now_ms + since_ms;
        seen.log = Some(takeover.log);
    }

    fn released(&mut self, _position: LogPosition) {}

    fn ended(&mut self, _ended: Ended) {
        self.seen.lock().unwrap().log = None;
    }

    fn snapshot_bytes(&self) -> u64 {
        self.state_bytes() as u64 + 4
    }

    fn begin_snapshot(&mut self) {
        self.captured = false;
    }

    /// The state is one block of constant size: a store that overwrites its values.
    fn next_block(&mut self, block: &mut Vec<u8>) -> Result<bool, String> {
        block.resize(self.state_bytes(), 1);
        Ok(!std::mem::replace(&mut self.captured, true))
    }
}

/// A host that takes part in the cluster `c`.
pub(super) struct Host {
    pub(super) seen: Arc<Mutex<Seen>>,
    pub(super) member: Arc<Member>,
    task: JoinHandle<Stop>,
}

impl Drop for Host {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Host {
    pub(super) fn start(world: &World, name: &str, change: impl FnOnce(&mut Options)) -> Self {
        Self::start_on(world.engine(0), name, change)
    }

    /// Starts a host that sees this engine.
    pub(super) fn start_on(
        engine: Arc<dyn Engine>,
        name: &str,
        change: impl FnOnce(&mut Options),
    ) -> Self {
        let mut options = Options::new("c", name, "h:1", Id::random().unwrap());
        change(&mut options);
        let member = Member::new(engine, clock(), options).unwrap();
        let member = Arc::new(member);
        let seen = Arc::<Mutex<Seen>>::default();
        seen.lock().unwrap().description.version = "1.2.3".into();
        let mut store = Store {
            seen: Arc::clone(&seen),
            captured: false,
        };
        let running = Arc::clone(&member);
        let task = tokio::spawn(async move {
            let Err(stopped) = running.run(&mut store).await;
            stopped
        });
        Self { seen, member, task }
    }

    /// Starts a host, and waits until it leads and may decide.
    pub(super) async fn lead(
        world: &World,
        name: &str,
        change: impl FnOnce(&mut Options),
    ) -> (Self, Arc<LeaderLog>) {
        let host = Self::start(world, name, change);
        let log = host.leads().await;
        (host, log)
    }

    /// Waits until a condition holds for what the host received.
    pub(super) async fn wait<T>(&self, condition: impl Fn(&Seen) -> Option<T>) -> T {
        for _ in 0..10_000 {
            if let Some(value) = condition(&self.seen.lock().unwrap()) {
                return value;
            }
            assert!(!self.task.is_finished(), "the host stopped");
            sleep(Duration::from_millis(10)).await;
        }
        panic!("the condition does not hold after 100 s");
    }

    /// Waits until the host follows this leader.
    pub(super) async fn follows(&self, leader: &str) {
        self.wait(|it| (it.leader == leader).then_some(())).await;
    }

    /// Waits until the host has received this record.
    pub(super) async fn receives(&self, position: LogPosition) {
        let has_it = |it: &Seen| it.records.iter().any(|(at, _)| *at == position.0);
        self.wait(|it| has_it(it).then_some(())).await;
    }

    /// Waits until the host leads and may decide.
    pub(super) async fn leads(&self) -> Arc<LeaderLog> {
        let log = self.wait(|it| it.log.clone()).await;
        log.may_decide().await.unwrap();
        log
    }

    pub(super) async fn stops(mut self) -> Stop {
        (&mut self.task).await.unwrap()
    }

    /// The log of a leader that cannot decide now.
    pub(super) fn leads_without_wait(&self) -> Arc<LeaderLog> {
        self.seen.lock().unwrap().log.clone().unwrap()
    }

    /// Appends a record and waits until it is released.
    pub(super) async fn append(log: &LeaderLog, record: &[u8]) -> LogPosition {
        let position = log.append(&[record]).unwrap();
        log.wait_released(position).await.unwrap();
        position
    }
}
