//! One run: the host, its disk, its clients, the network and the time.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use statehouse_core::clock::ManualSource;
use statehouse_wal::simulation::{Dice, Simulation};

use crate::captured::Captured;
use crate::client::Client;
use crate::egress::Egress;
use crate::fault::Snapshotting;
use crate::fault_plan::FaultPlan;
use crate::foreign::Foreign;
use crate::ledger::Ledger;
use crate::node::{Found, Node, RECEIVE_MAX, Requests, Time};
use crate::operation::{LARGE, Operation};
use crate::oracle::Oracle;
use crate::packet::Publish;
use crate::policies;
use crate::trace::{Tally, Trace};
use crate::wills::Wills;

/// The wall clock at the beginning of every run.
const START_MS: u64 = 1_700_000_000_000;

pub(crate) struct World {
    pub(crate) dice: Dice,
    pub(crate) plan: FaultPlan,
    pub(crate) disk: Simulation,
    pub(crate) node: Node,
    /// The number of this life of the host.
    pub(crate) life: u64,
    pub(crate) started_ms: u64,
    pub(crate) time: Time,
    pub(crate) elapsed_ms: u64,
    pub(crate) clients: Vec<Client>,
    pub(crate) oracle: Oracle,
    pub(crate) wills: Wills,
    pub(crate) egress: Arc<Mutex<Vec<Egress>>>,
    pub(crate) snapshot: Option<Snapshotting>,
    pub(crate) next_link: u64,
    pub(crate) next_number: u64,
    pub(crate) tally: Tally,
    pub(crate) trace: Trace,
    pub(crate) crashed_at: bool,
    /// All requests as clients sent them, for comparison with records.
    pub(crate) sent: Requests,
    pub(crate) ledger: Ledger,
    /// The states behind the records that a crash may end with.
    pub(crate) captured: VecDeque<Captured>,
    pub(crate) run: u32,
    pub(crate) foreign: Foreign,
}

/// The instant at which every run begins. Far ahead, so that the system's time never reaches it.
fn begin() -> Instant {
    Instant::now() + Duration::from_secs(30 * 24 * 3600)
}

impl World {
    /// Runs a seed to its end. Returns its tally, and the last position of its log.
    pub(crate) fn run(seed: u64, plan: Option<FaultPlan>, traced: bool) -> (Tally, u64) {
        let mut dice = Dice::new(seed);
        let chosen = FaultPlan::of(&mut dice);
        let mut world = Self::new(dice, plan.unwrap_or(chosen), Trace::new(traced));
        world.warm_up();
        for _ in 0..world.plan.steps {
            world.event();
            world.check();
        }
        world.settle();
        (world.tally, world.node.appended())
    }

    fn new(mut dice: Dice, plan: FaultPlan, mut trace: Trace) -> Self {
        let time = Time {
            source: Arc::new(ManualSource::at(START_MS)),
            now: begin(),
            wall_ms: START_MS,
        };
        let disk = Simulation::new(dice.roll());
        let found = Found::read(&disk, &plan, START_MS, &Requests::new()).expect("an empty disk");
        let captured = VecDeque::from([found.captured()]);
        let assignment = policies::assignment(match plan.faulty {
            true => policies::FAULTY,
            false => policies::STANDARD,
        });
        let foreign = Foreign::new(&mut dice);
        let node = Node::start(found, &plan, &time, (&assignment, None), |log| {
            foreign.outlet(log)
        });
        let clients = plan.clients(&mut dice);
        trace.add(|| format!("{plan:?}"));
        let next_number = if plan.large { LARGE } else { 1 };
        let mut world = Self {
            dice,
            plan,
            disk,
            node,
            life: 1,
            started_ms: 0,
            time,
            elapsed_ms: 0,
            clients,
            oracle: Oracle::default(),
            wills: Wills::default(),
            egress: Arc::default(),
            snapshot: None,
            next_link: 1,
            next_number,
            tally: Tally::default(),
            trace,
            crashed_at: false,
            sent: Requests::new(),
            ledger: Ledger::default(),
            captured,
            run: 1,
            foreign,
        };
        let tally = &mut world.tally;
        tally.add_to("runs behind a foreign broker", world.plan.foreign.into());
        tally.add_to("runs in interval mode", world.plan.interval.into());
        world.begin(assignment);
        world
    }

    pub(crate) fn now_ms(&self) -> u64 {
        START_MS + self.elapsed_ms
    }

    /// The observer's subscriptions are durable before anything else happens.
    fn warm_up(&mut self) {
        if self.plan.foreign {
            return;
        }
        self.connect(0);
        for _ in 0..4 {
            self.flow();
        }
        assert!(self.clients[0].subscribed, "the observer has subscribed");
    }

    fn event(&mut self) {
        if self.dice.once_in(self.plan.crash_once_in) {
            self.crash();
            return;
        }
        let reached = |at: u64| self.node.log.durable().0 >= at;
        if !self.crashed_at && self.plan.crash_at.is_some_and(reached) {
            self.crashed_at = true;
            self.crash();
            return;
        }
        if self.dice.once_in(self.plan.commit_once_in) {
            self.commit();
        }
        if self.plan.foreign {
            self.foreign_event();
            return;
        }
        let who = self.dice.below(self.clients.len() as u64) as usize;
        if self.dice.once_in(self.plan.cut_once_in) {
            self.cut(who);
            return;
        }
        match self.dice.below(40) {
            0..=13 => self.act(who),
            14..=22 => self.deliver_up(who),
            23..=31 => self.deliver_down(who),
            32 => self.pass_time(),
            33 => self.hang_up(who),
            34 if self.plan.takeovers => self.connect(who),
            35 | 36 => self.common_event(),
            37 => self.fault(),
            _ => {
                self.deliver_up(who);
                self.deliver_down(who);
            }
        }
    }

    /// Something that happens in front of both kinds of brokers.
    pub(crate) fn common_event(&mut self) {
        match self.dice.below(8) {
            0 => self.check_copy(),
            1 | 2 if self.plan.policies => self.change_assignment(),
            3 => self.sweep(),
            _ => self.snapshot_step(),
        }
        self.after();
    }

    /// A client connects if it is not connected, or does something new.
    fn act(&mut self, who: usize) {
        if self.clients[who].link().is_none() {
            self.connect(who);
            return;
        }
        let client = &mut self.clients[who];
        let allowed = client.outgoing.len() < usize::from(RECEIVE_MAX) - 8;
        if client.open().is_none() || !client.subscribed || !allowed {
            return;
        }
        if self.follow(who) {
            return;
        }
        let number = self.next_number;
        self.next_number += 1;
        let (operation, qos) = self.think(who, number);
        let publish = self.create(who, number, &operation, qos);
        self.clients[who].publish(number, operation, publish);
    }

    /// Creates a PUBLISH of a client.
    pub(crate) fn create(
        &mut self,
        who: usize,
        number: u64,
        operation: &Operation,
        qos: u8,
    ) -> Publish {
        self.ledger.qos.insert(number, qos);
        let now_ms = self.time.wall_ms.min(self.now_ms());
        let publish = operation.publish(&format!("c{who}"), number, qos, now_ms);
        if let Some(timestamp) = publish.user("__ts") {
            self.sent.insert(timestamp.to_owned(), publish.clone());
            self.ledger.requests.insert(number);
            if !operation.writes() {
                self.ledger.reads.insert(number);
            }
        }
        self.trace
            .add(|| format!("c{who} sends {number} at QoS {qos}: {operation:?}"));
        publish
    }

    fn think(&mut self, who: usize, number: u64) -> (Operation, u8) {
        if self.clients[who].messenger || self.dice.once_in(3) {
            let qos = self.dice.below(3) as u8;
            // One publisher for each topic of a retained message.
            let operation = match self.dice.once_in(3) {
                true => Operation::Message {
                    topic: format!("ret/{who}/{}", self.dice.below(2)),
                    retain: true,
                    empty: self.dice.once_in(4),
                },
                false => Operation::Message {
                    topic: format!("t/{who}/{}", self.dice.below(2)),
                    retain: false,
                    empty: false,
                },
            };
            return (operation, qos);
        }
        let watches = self.clients[who].watches;
        let known = (&self.plan, &self.oracle);
        let operation = Operation::request(&mut self.dice, watches, known, number);
        // It is open whether a crash preserves the packet id of a request that failed.
        let qos = 1 + u8::from(!self.plan.faulty && self.dice.once_in(3));
        (operation, qos)
    }

    /// Makes everything durable, and lets go what waited for it.
    pub(crate) fn commit(&mut self) {
        self.ledger.commits += 1;
        if self.node.log.commit().is_ok() {
            self.tally.count("write-ahead log syncs");
        }
        self.after_log();
    }

    /// Writes or syncs the log without the other.
    pub(crate) fn write_or_sync(&mut self) {
        let done = match self.dice.once_in(2) {
            true => self.node.log.write(),
            false => self.node.log.sync().map(drop),
        };
        self.trace
            .add(|| format!("writes or syncs: {:?}", done.err()));
        self.after_log();
    }

    /// The log has written something, or has failed.
    pub(crate) fn after_log(&mut self) {
        self.node.release();
        self.after();
        if self.node.log.failure().is_some() {
            self.tally.count("disk errors");
            self.crash();
        }
    }

    /// Expired keys are removed between two requests.
    fn sweep(&mut self) {
        if self.plan.foreign {
            self.foreign_sweep();
        } else {
            self.node.server.sweep_once();
        }
    }

    pub(crate) fn pass_time(&mut self) {
        let mut ms = [1, 100, 1_000, 4_000, 12_000][self.dice.below(5) as usize];
        if self.plan.foreign && self.dice.once_in(6) {
            // The retention of requests there ends with time.
            ms = [70_000, 700_000][self.dice.below(2) as usize];
        }
        self.advance(ms);
    }

    pub(crate) fn advance(&mut self, ms: u64) {
        self.elapsed_ms += ms;
        self.time.source.advance(ms);
        self.time.wall_ms += ms;
        self.time.now += Duration::from_millis(ms);
        self.trace.add(|| format!("{ms} ms pass"));
        self.wills.due(self.elapsed_ms, &mut self.tally);
        if let Some(broker) = &self.node.broker {
            broker.advance(self.time.now, self.time.wall_ms);
        }
        self.after();
    }

    /// Lets connections continue that waited, and takes down what left the broker.
    pub(crate) fn after(&mut self) {
        for who in 0..self.clients.len() {
            for link in &mut self.clients[who].links {
                if let Some(wire) = &mut link.wire {
                    wire.write();
                }
            }
        }
        if !self.node.has_room() {
            let outgoing = self.clients.iter().flat_map(|it| &it.outgoing);
            self.ledger
                .unremembered
                .extend(outgoing.map(|it| it.number));
        }
        let has_room = self.node.has_room();
        self.wills.stamp(self.node.appended(), has_room);
        self.take_egress();
        if self.plan.faulty {
            self.check_guard();
        }
        self.capture();
    }

    /// Everything on its way arrives, and everything appended becomes durable.
    pub(crate) fn flow(&mut self) {
        for who in 0..self.clients.len() {
            while self.deliver_up_some(who) {}
        }
        self.commit();
        for who in 0..self.clients.len() {
            while self.deliver_down_some(who) {}
        }
    }
}
