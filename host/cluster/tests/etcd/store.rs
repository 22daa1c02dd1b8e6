//! A store that remembers its records, and a host that runs it.

use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use statehouse_cluster::etcd::Etcd;
use statehouse_cluster::{
    Embedder, Ended, Head, Id, LeaderLog, LogPosition, MachineClock, Member, Options, Takeover,
};
use tokio::task::JoinHandle;

/// All records by position, and the role.
#[derive(Default)]
pub(crate) struct Shared {
    pub(crate) records: Vec<Vec<u8>>,
    pub(crate) log: Option<Arc<LeaderLog>>,
    pub(crate) blocks: usize,
    /// Snapshots have one small block, as if each record replaced the one before.
    pub(crate) is_constant: bool,
}

struct Store {
    shared: Arc<Mutex<Shared>>,
    /// The next record of a snapshot.
    cursor: usize,
}

impl Store {
    fn locked(&self) -> MutexGuard<'_, Shared> {
        self.shared.lock().unwrap()
    }
}

impl Embedder for Store {
    fn now_ms(&self) -> u64 {
        0
    }

    fn reset(&mut self) {
        *self.locked() = Shared::default();
    }

    fn block(&mut self, block: &[u8]) -> Result<(), String> {
        let mut shared = self.locked();
        shared.records.push(block.to_vec());
        shared.blocks += 1;
        Ok(())
    }

    fn record(&mut self, position: LogPosition, record: &[u8]) -> Result<(), String> {
        let index = usize::try_from(position.0 - 1).unwrap();
        let mut shared = self.locked();
        // A snapshot can contain later records than its beginning.
        match shared.records.get(index) {
            Some(known) if known != record => return Err(format!("record {position} differs")),
            Some(_) => {}
            None if index == shared.records.len() => shared.records.push(record.to_vec()),
            None => return Err(format!("record {position} came too early")),
        }
        Ok(())
    }

    fn may_lead(&mut self, _head: &Head) -> Result<(), String> {
        Ok(())
    }

    fn opening(&mut self, epoch: u64) -> Vec<u8> {
        format!("epoch {epoch}").into_bytes()
    }

    fn leading(&mut self, takeover: Takeover) {
        self.locked().log = Some(takeover.log);
    }

    fn released(&mut self, _position: LogPosition) {}

    fn ended(&mut self, _ended: Ended) {
        self.locked().log = None;
    }

    fn snapshot_bytes(&self) -> u64 {
        let shared = self.locked();
        let blocks = if shared.is_constant { 1 } else { usize::MAX };
        let records = shared.records.iter().take(blocks);
        records.map(|it| it.len() as u64 + 4).sum()
    }

    fn begin_snapshot(&mut self) {
        self.cursor = 0;
    }

    fn next_block(&mut self, block: &mut Vec<u8>) -> Result<bool, String> {
        let cursor = self.cursor;
        let shared = self.locked();
        if shared.is_constant && cursor > 0 {
            return Ok(false);
        }
        let Some(record) = shared.records.get(cursor) else {
            return Ok(false);
        };
        block.extend_from_slice(record);
        drop(shared);
        self.cursor += 1;
        Ok(true)
    }
}

/// A host that takes part in a cluster.
pub(crate) struct Host {
    pub(crate) shared: Arc<Mutex<Shared>>,
    task: JoinHandle<()>,
}

impl Drop for Host {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Host {
    /// Starts a host; `change` changes its settings.
    pub(crate) fn start(name: &str, etcd: Etcd, change: impl FnOnce(&mut Options)) -> Self {
        let mut options = Options::new("test", name, "127.0.0.1:1", Id::random().unwrap());
        change(&mut options);
        let member = Member::new(Arc::new(etcd), Arc::new(MachineClock), options).unwrap();
        let shared = Arc::<Mutex<Shared>>::default();
        let mut store = Store {
            shared: Arc::clone(&shared),
            cursor: 0,
        };
        let task = tokio::spawn(async move {
            let stopped = member.run(&mut store).await;
            panic!("the host stopped: {stopped:?}");
        });
        Self { shared, task }
    }

    /// Waits until a condition holds for what the host knows.
    pub(crate) async fn wait<T>(&self, what: &str, condition: impl Fn(&Shared) -> Option<T>) -> T {
        let deadline = Instant::now() + Duration::from_secs(30);
        loop {
            if let Some(value) = condition(&self.shared.lock().unwrap()) {
                return value;
            }
            assert!(!self.task.is_finished(), "the host stopped before {what}");
            assert!(Instant::now() < deadline, "too late: {what}");
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }

    /// Waits until the host leads and may decide.
    pub(crate) async fn leads(&self) -> Arc<LeaderLog> {
        let log = self.wait("the host leads", |it| it.log.clone()).await;
        log.may_decide().await.unwrap();
        log
    }

    /// Waits until the host has applied a position, and returns all records.
    pub(crate) async fn records(&self, position: LogPosition) -> Vec<Vec<u8>> {
        let count = usize::try_from(position.0).unwrap();
        self.wait("the records arrive", |it| {
            (it.records.len() >= count).then(|| it.records.clone())
        })
        .await
    }

    /// Appends a record as a store does: the state changes under the same lock.
    pub(crate) fn append(&self, log: &LeaderLog, record: &[u8]) -> LogPosition {
        let mut shared = self.shared.lock().unwrap();
        shared.records.push(record.to_vec());
        let position = log.append(&[record]).unwrap();
        assert_eq!(position.0, shared.records.len() as u64);
        position
    }
}
