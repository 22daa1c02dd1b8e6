//! Tests of an engine of several servers, of which some do not serve.

use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use tokio::sync::{Notify, mpsc};
use tokio::time::sleep;

use super::cluster::{Host, clock, world};
use crate::simulated::World;
use crate::{
    Access, Call, ClusterError, Engine, EngineError, Finding, KeyRange, Outcome, Page, Revision,
    Status, Transaction, Value, Watch, check, identity, limits,
};

/// What a server does with each call.
#[derive(Clone, Copy, Debug)]
enum Server {
    Works,
    Refuses,
    IsDown,
}

#[derive(Debug)]
struct Servers {
    engine: Arc<dyn Engine>,
    servers: Vec<Server>,
    /// The server in use; counts on without end.
    current: AtomicUsize,
    /// Ends all watches.
    ends: Arc<Notify>,
    /// How long an examination takes.
    examined: Duration,
    /// Whether the servers have no majority: each answers only what it knows alone.
    lacks_majority: AtomicBool,
}

impl Servers {
    fn new(world: &World, servers: &[Server]) -> Self {
        Self {
            engine: world.engine(0),
            servers: servers.to_vec(),
            current: AtomicUsize::new(0),
            ends: Arc::default(),
            examined: Duration::ZERO,
            lacks_majority: AtomicBool::new(false),
        }
    }

    /// Executes a call if there is a majority and the server in use works.
    fn serve<'a, T: Send + 'a>(&self, call: Call<'a, T>) -> Call<'a, T> {
        if self.lacks_majority.load(Ordering::Relaxed) {
            return Box::pin(std::future::pending());
        }
        self.serve_alone(call)
    }

    /// Executes a call that needs no majority if the server in use works.
    fn serve_alone<'a, T: Send + 'a>(&self, call: Call<'a, T>) -> Call<'a, T> {
        let current = self.current.load(Ordering::Relaxed);
        let error = match self.servers[current % self.servers.len()] {
            Server::Works => return call,
            Server::Refuses => EngineError::Refused("rpc not supported for learner".into()),
            Server::IsDown => EngineError::NotApplied("connection refused".into()),
        };
        Box::pin(std::future::ready(Err(error)))
    }
}

impl Engine for Servers {
    fn transact<'a>(&'a self, transaction: &'a Transaction) -> Call<'a, Outcome> {
        self.serve(self.engine.transact(transaction))
    }

    fn get<'a>(&'a self, key: &'a [u8]) -> Call<'a, Value> {
        self.serve(self.engine.get(key))
    }

    fn range<'a>(
        &'a self,
        range: &'a KeyRange,
        at: Option<Revision>,
        values_max: usize,
    ) -> Call<'a, Page> {
        self.serve(self.engine.range(range, at, values_max))
    }

    fn watch<'a>(&'a self, range: &'a KeyRange, from: Revision) -> Call<'a, Watch> {
        let call = self.serve_alone(self.engine.watch(range, from));
        let ends = Arc::clone(&self.ends);
        Box::pin(async move {
            let mut changes = call.await?;
            let (sender, receiver) = mpsc::channel(limits::WATCH_EVENTS_MAX);
            tokio::spawn(async move {
                let mut ended = pin!(ends.notified());
                loop {
                    let change = tokio::select! {
                        biased;
                        () = &mut ended => return,
                        change = changes.recv() => change,
                    };
                    let Some(change) = change else { return };
                    if sender.send(change).await.is_err() {
                        return;
                    }
                }
            });
            Ok(receiver)
        })
    }

    fn compact(&self, revision: Revision) -> Call<'_, ()> {
        self.serve(self.engine.compact(revision))
    }

    fn status(&self) -> Call<'_, Status> {
        self.serve_alone(self.engine.status())
    }

    fn examine(&self) -> Call<'_, Vec<Finding>> {
        Box::pin(async move {
            sleep(self.examined).await;
            Ok(Vec::new())
        })
    }

    fn next_endpoint(&self) {
        self.current.fetch_add(1, Ordering::Relaxed);
    }

    fn servers(&self) -> usize {
        self.servers.len()
    }
}

#[tokio::test(start_paused = true)]
async fn call_is_refused_only_if_each_server_refuses_it() {
    let world = world(1).await;
    let read = async |servers: &[Server]| {
        let servers = Arc::new(Servers::new(&world, servers));
        let found = identity(&Access::new(servers.clone(), clock(), "c")).await;
        (found, servers.current.load(Ordering::Relaxed))
    };
    for servers in [
        &[Server::Refuses, Server::Works][..],
        &[Server::Refuses, Server::IsDown, Server::Works],
    ] {
        let (found, _) = read(servers).await;
        assert!(found.is_ok(), "{servers:?}: {found:?}");
    }
    let (found, asked) = read(&[Server::Refuses, Server::Refuses]).await;
    let Err(ClusterError::Engine { error, .. }) = &found else {
        panic!("{found:?}");
    };
    assert!(matches!(error, EngineError::Refused(_)), "{error}");
    assert_eq!(asked, 2);
}

/// If a failed attempt changed the server twice, a host would ask the same one of two without end.
#[tokio::test(start_paused = true)]
async fn host_joins_although_its_first_server_is_down() {
    let world = world(1).await;
    let servers = Servers::new(&world, &[Server::IsDown, Server::Works]);
    let host = Host::start_on(Arc::new(servers), "a", |_| {});
    host.leads().await;
}

#[tokio::test(start_paused = true)]
async fn follower_watches_again_although_a_server_is_down() {
    let world = world(1).await;
    let (_leader, log) = Host::lead(&world, "a", |_| {}).await;
    let servers = Arc::new(Servers::new(&world, &[Server::Works, Server::IsDown]));
    let follower = Host::start_on(servers.clone(), "b", |_| {});
    follower.follows("a").await;
    sleep(Duration::from_secs(1)).await;
    for _ in 0..3 {
        servers.ends.notify_waiters();
        let position = Host::append(&log, b"next").await;
        follower.receives(position).await;
    }
}

#[tokio::test(start_paused = true)]
async fn idle_leader_without_a_majority_does_not_reach_the_log() {
    let world = world(1).await;
    let servers = Arc::new(Servers::new(&world, &[Server::Works]));
    let host = Host::start_on(servers.clone(), "a", |_| {});
    host.leads().await;
    let figures = host.member.figures();
    let stays = async |expected: bool| {
        // Longer than the pause between two questions.
        for _ in 0..150 {
            assert_eq!(figures.reaches_log(), expected);
            sleep(Duration::from_millis(100)).await;
        }
    };
    sleep(Duration::from_secs(20)).await;
    stays(true).await;
    servers.lacks_majority.store(true, Ordering::Relaxed);
    sleep(Duration::from_secs(12)).await;
    stays(false).await;
    // A server creates a watch alone.
    servers.ends.notify_waiters();
    stays(false).await;
    servers.lacks_majority.store(false, Ordering::Relaxed);
    sleep(Duration::from_secs(3)).await;
    stays(true).await;
}

/// Servers that do not answer delay the check, and the leader's clock goes on meanwhile.
#[tokio::test(start_paused = true)]
async fn slow_server_is_not_taken_for_a_wrong_clock() {
    let world = world(1).await;
    let (_leader, log) = Host::lead(&world, "a", |_| {}).await;
    let servers = Servers {
        examined: Duration::from_millis(900),
        ..Servers::new(&world, &[Server::Works])
    };
    let access = Access::new(Arc::new(servers), clock(), "c");
    let appends = async {
        loop {
            Host::append(&log, b"x").await;
        }
    };
    // The leader's clock shows 1000 ms. This host's clock does so while the heads are read.
    let report = tokio::select! {
        () = appends => panic!("appends ended"),
        report = check(&access, 80, 1 << 30) => report,
    };
    let report = report.to_string();
    assert!(
        report.contains("the clocks of this host and of the leader agree"),
        "{report}"
    );
}
