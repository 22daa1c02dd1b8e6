//! The share of the clients that one thread connects and runs.
//!
//! A thread reports when its clients are connected, and waits for the start signal, so that no
//! connection sends a request before all are open.

use std::cell::RefCell;
use std::rc::Rc;
use std::sync::{Arc, mpsc};

use tokio::runtime::Builder;
use tokio::sync::Notify;
use tokio::task::LocalSet;

use super::conversation::Conversation;
use super::drive::{self, Connection};
use super::pace::{Pace, Turns};
use super::protocol::{Protocol, Role};
use super::run::Run;
use super::tally::Tally;
use super::work::{Job, Source};
use super::{LoadError, Plan};

/// The clients of thread `number` of `threads`.
#[derive(Clone, Copy)]
pub(super) struct Share<'a> {
    pub(super) plan: &'a Plan,
    pub(super) number: usize,
    pub(super) threads: usize,
}

/// The start signal for a client thread, sent when all clients are connected.
pub(super) struct Start {
    pub(super) run: Arc<Run>,
    /// In an open loop: one for each connection that sends requests.
    pub(super) wakes: Option<Vec<Arc<Notify>>>,
}

struct Connections<P> {
    /// Connections that send requests, with their number and the maximum in flight.
    senders: Vec<(usize, u16, Connection<P>)>,
    /// Connections that watch, with their key.
    watchers: Vec<(u64, Connection<P>)>,
}

impl Share<'_> {
    /// Connects the clients and runs them until the end.
    pub(super) fn run<P: Protocol>(
        self,
        client: &impl Fn(Role, usize) -> P,
        connected: &mpsc::Sender<Result<(), LoadError>>,
        started: &mpsc::Receiver<Start>,
    ) -> Tally {
        let connect = || {
            let runtime = Builder::new_current_thread().enable_all().build();
            let runtime = runtime.map_err(LoadError::System)?;
            let connections = runtime.block_on(self.connect(client))?;
            Ok::<_, LoadError>((runtime, connections))
        };
        let (runtime, connections) = match connect() {
            Ok(both) => both,
            Err(error) => {
                let _ = connected.send(Err(error));
                return Tally::default();
            }
        };
        let _ = connected.send(Ok(()));
        let Ok(start) = started.recv() else {
            // Another thread could not connect.
            return Tally::default();
        };
        let tally = Rc::new(RefCell::new(Tally::default()));
        runtime.block_on(connections.spawn(self.plan, &start, &tally));
        tally.take()
    }

    async fn connect<P: Protocol>(
        self,
        client: &impl Fn(Role, usize) -> P,
    ) -> Result<Connections<P>, LoadError> {
        let plan = self.plan;
        let (mut senders, mut watchers) = (Vec::new(), Vec::new());
        for number in (self.number..plan.connections).step_by(self.threads) {
            let connection = Connection::open(plan, client(Role::Asks, number)).await?;
            let max = connection.in_flight_max();
            let in_flight = match (plan.in_flight, plan.job) {
                (Some(asked), Job::Fill | Job::Clean) => asked.min(max),
                (Some(asked), Job::Mix { .. }) if asked > max => {
                    return Err(LoadError::InFlight { asked, max });
                }
                (in_flight, _) => in_flight.unwrap_or(max),
            };
            senders.push((number, in_flight, connection));
        }
        for number in (self.number..plan.watchers).step_by(self.threads) {
            let mut connection = Connection::open(plan, client(Role::Watches, number)).await?;
            let key = number as u64 % plan.keys;
            connection.watch(plan, key).await?;
            watchers.push((key, connection));
        }
        Ok(Connections { senders, watchers })
    }
}

impl<P: Protocol> Connections<P> {
    /// The tasks of all connections. They end with the run.
    fn spawn(self, plan: &Plan, start: &Start, tally: &Rc<RefCell<Tally>>) -> LocalSet {
        let watched = self.watchers.len() as u64;
        tally.borrow_mut().sent += watched;
        tally.borrow_mut().replied += watched;
        let local = LocalSet::new();
        for (number, in_flight, connection) in self.senders {
            let source = Source::new(plan.job, plan.keys, plan.seed, number, plan.connections);
            let turns = match plan.pace {
                Pace::Closed => None,
                Pace::Open { per_second } => Some(Turns::new(per_second, number, plan.connections)),
            };
            let (stream, protocol, input) = connection.split();
            let (run, tally) = (start.run.clone(), tally.clone());
            let conversation = Conversation::new(protocol, run, tally, source, turns, in_flight);
            let wake = start.wakes.as_ref().map(|wakes| wakes[number].clone());
            let run = start.run.clone();
            local.spawn_local(drive::converse(stream, conversation, input, run, wake));
        }
        for (key, connection) in self.watchers {
            let (run, tally) = (start.run.clone(), tally.clone());
            local.spawn_local(drive::count_notifications(connection, key, run, tally));
        }
        local
    }
}
