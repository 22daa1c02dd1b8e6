//! The log of the cluster without a store: how many groups of records per second it commits.

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use statehouse_cluster::etcd::Etcd;
use statehouse_cluster::{
    Embedder, Ended, Head, Id, LeaderLog, MachineClock, Member, Options, Takeover, create,
};
use statehouse_protocol::LogPosition;
use tokio::runtime::Runtime;

use crate::servers::{Figures, Work};

/// About the record of a SET of 64 B.
const RECORD_BYTES: usize = 256;

const NAME: &str = "bare";

/// A leader in this process.
pub(crate) struct Bare {
    runtime: Runtime,
    log: Arc<LeaderLog>,
}

impl Bare {
    pub(crate) fn start(urls: &[String]) -> Self {
        let runtime = Runtime::new().expect("a runtime");
        let log = runtime.block_on(async {
            let engine = Etcd::new(urls, None).expect("valid URLs");
            let id = || Id::random().expect("random bytes");
            let created = create(&engine, NAME, id(), 0).await;
            assert!(created.expect("etcd answers"), "the cluster is new");
            let options = Options::new(NAME, "bare", "127.0.0.1:1", id());
            let member = Member::new(Arc::new(engine), Arc::new(MachineClock), options);
            let member = member.expect("valid options");
            let leading = Arc::<Mutex<Option<Arc<LeaderLog>>>>::default();
            let mut nothing = Nothing(leading.clone());
            tokio::spawn(async move {
                let stopped = member.run(&mut nothing).await;
                panic!("the log stopped: {stopped:?}");
            });
            loop {
                let log = leading.lock().expect("no holder panics").clone();
                if let Some(log) = log {
                    log.may_decide().await.expect("it leads");
                    return log;
                }
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        });
        Self { runtime, log }
    }

    /// Appends as the clients of this work do: each one waits until its groups are committed.
    pub(crate) fn round(&self, work: &Work) -> Figures {
        let end = Instant::now() + work.round;
        let tasks: Vec<_> = (0..work.connections)
            .map(|_| {
                let (log, in_flight) = (self.log.clone(), work.in_flight);
                self.runtime.spawn(async move {
                    let mut micros = Vec::new();
                    while Instant::now() < end {
                        let began = Instant::now();
                        let mut last = LogPosition::NONE;
                        for _ in 0..in_flight {
                            last = log
                                .append(&[&[b'r'; RECORD_BYTES]])
                                .expect("a short record");
                        }
                        log.wait_released(last).await.expect("it leads");
                        micros.push(began.elapsed().as_micros() as f64);
                    }
                    micros
                })
            })
            .collect();
        let began = Instant::now();
        let mut micros: Vec<f64> = self.runtime.block_on(async {
            let mut all = Vec::new();
            for task in tasks {
                all.extend(task.await.expect("a client of the log"));
            }
            all
        });
        let groups = micros.len() as f64 * f64::from(work.in_flight);
        micros.sort_by(f64::total_cmp);
        Figures {
            per_second: groups / began.elapsed().as_secs_f64(),
            p50_us: micros[micros.len() / 2],
            p99_us: micros[micros.len() * 99 / 100],
            cpu_us: None,
        }
    }
}

/// A store without a state.
struct Nothing(Arc<Mutex<Option<Arc<LeaderLog>>>>);

impl Embedder for Nothing {
    fn now_ms(&self) -> u64 {
        0
    }

    fn reset(&mut self) {}

    fn block(&mut self, _: &[u8]) -> Result<(), String> {
        Ok(())
    }

    fn record(&mut self, _: LogPosition, _: &[u8]) -> Result<(), String> {
        Ok(())
    }

    fn may_lead(&mut self, _: &Head) -> Result<(), String> {
        Ok(())
    }

    fn opening(&mut self, _: u64) -> Vec<u8> {
        b"opening".to_vec()
    }

    fn leading(&mut self, takeover: Takeover) {
        *self.0.lock().expect("no holder panics") = Some(takeover.log);
    }

    fn released(&mut self, _: LogPosition) {}

    fn ended(&mut self, _: Ended) {
        panic!("nobody else leads this log");
    }

    fn snapshot_bytes(&self) -> u64 {
        0
    }

    fn begin_snapshot(&mut self) {}

    fn next_block(&mut self, _: &mut Vec<u8>) -> Result<bool, String> {
        Ok(false)
    }
}
