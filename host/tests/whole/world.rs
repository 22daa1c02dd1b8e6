//! One run: the host, its disk, its clients, the network and the time.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use statehouse_core::clock::ManualSource;
use statehouse_wal::simulation::{Dice, Simulation};

use crate::client::{Client, Link, Sent};
use crate::egress::Egress;
use crate::fault::Snapshotting;
use crate::fault_plan::FaultPlan;
use crate::node::{Node, RECEIVE_MAX, Time};
use crate::operation::Operation;
use crate::oracle::{Change, Oracle};
use crate::packet::{self, Connect, Will};
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
    /// The numbers of all requests, and of those that only read; the QoS of each operation.
    pub(crate) requests: HashSet<u64>,
    pub(crate) reads: HashSet<u64>,
    pub(crate) qos: HashMap<u64, u8>,
    /// Reads at QoS 2 whose packet id may not be recorded, and those that a crash left so.
    pub(crate) unrecorded: HashSet<u64>,
    pub(crate) open: HashSet<u64>,
    /// Operations whose acknowledgement has just left, and how many commits there were before.
    pub(crate) acked: Vec<(u64, u64)>,
    pub(crate) commits: u64,
    /// Every response that a request had when it was handled.
    pub(crate) possible: HashMap<u64, HashSet<Vec<u8>>>,
    /// Requests that were handled while the disk was full, when a response may be dropped.
    pub(crate) cramped: HashSet<u64>,
    /// Operations that some life has handled, and messages that were published again.
    pub(crate) handled: HashSet<u64>,
    pub(crate) repeated: HashSet<u64>,
    /// Retained messages that the last subscriber received.
    pub(crate) retained: BTreeMap<String, u64>,
}

/// The instant at which every run begins. Far ahead, so that the system's time never reaches it.
fn begin() -> Instant {
    Instant::now() + Duration::from_secs(30 * 24 * 3600)
}

impl World {
    /// Runs a seed to its end. Returns its tally, and the last position of its log.
    pub(crate) fn run(seed: u64, plan: Option<FaultPlan>) -> (Tally, u64) {
        let mut dice = Dice::new(seed);
        let chosen = FaultPlan::of(&mut dice);
        let mut world = Self::new(seed, dice, plan.unwrap_or(chosen));
        world.warm_up();
        for _ in 0..world.plan.steps {
            world.event();
            world.check();
        }
        world.settle();
        (world.tally, world.node.appended())
    }

    fn new(seed: u64, mut dice: Dice, plan: FaultPlan) -> Self {
        let time = Time {
            source: Arc::new(ManualSource::at(START_MS)),
            now: begin(),
            wall_ms: START_MS,
        };
        let disk = Simulation::new(dice.roll());
        let (node, _) = Node::start(&disk, &plan.options(), &time).expect("an empty disk");
        let clients = plan.clients(&mut dice);
        let mut trace = Trace::new(seed);
        trace.add(|| format!("{plan:?}"));
        Self {
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
            next_number: 1,
            tally: Tally::default(),
            trace,
            crashed_at: false,
            requests: HashSet::new(),
            reads: HashSet::new(),
            qos: HashMap::new(),
            unrecorded: HashSet::new(),
            open: HashSet::new(),
            acked: Vec::new(),
            commits: 0,
            possible: HashMap::new(),
            cramped: HashSet::new(),
            handled: HashSet::new(),
            repeated: HashSet::new(),
            retained: BTreeMap::new(),
        }
    }

    pub(crate) fn now_ms(&self) -> u64 {
        START_MS + self.elapsed_ms
    }

    /// The observer's subscriptions are durable before anything else happens.
    fn warm_up(&mut self) {
        self.connect(0);
        for _ in 0..4 {
            self.flow();
        }
        assert!(self.clients[0].subscribed, "the observer has subscribed");
    }

    fn event(&mut self) {
        let who = self.dice.below(self.clients.len() as u64) as usize;
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
            35 => self.snapshot_step(),
            36 => self.fault(),
            _ => {
                self.deliver_up(who);
                self.deliver_down(who);
            }
        }
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
        let number = self.next_number;
        self.next_number += 1;
        let (operation, qos) = self.think(who, number);
        if matches!(operation, Operation::Request { .. }) {
            self.requests.insert(number);
            if !operation.writes() {
                self.reads.insert(number);
            }
        }
        self.qos.insert(number, qos);
        let now_ms = self.time.wall_ms.min(self.now_ms());
        let publish = operation.publish(&self.clients[who].name, number, qos, now_ms);
        self.trace
            .add(|| format!("c{who} sends {number} at QoS {qos}: {operation:?}"));
        self.clients[who].publish(number, operation, publish);
    }

    fn think(&mut self, who: usize, number: u64) -> (Operation, u8) {
        if self.dice.once_in(3) {
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
        let operation = Operation::request(&mut self.dice, watches, self.plan.expiry, number);
        let qos = 1 + u8::from(self.dice.once_in(3));
        (operation, qos)
    }

    /// Opens a connection. If the client has one, the broker ends it when CONNECT arrives.
    pub(crate) fn connect(&mut self, who: usize) {
        // An earlier connection whose CONNECT has not arrived would take over this one.
        if self.clients[who].links.iter().any(|it| it.wire.is_none()) {
            return;
        }
        let number = self.next_link;
        self.next_link += 1;
        let client = &mut self.clients[who];
        let connect = Connect {
            client: client.name.clone(),
            clean_start: false,
            expiry_s: client.expiry_s,
            receive_max: client.receive_max,
            will: client.will_delay_s.map(|delay_s| Will {
                topic: format!("will/{}", client.name),
                payload: format!("w{number}").into_bytes(),
                delay_s,
            }),
        };
        let mut link = Link::new(number);
        link.send(packet::connect(&connect), Sent::Connect(connect));
        for link in &mut client.links {
            link.abandoned = true;
        }
        client.links.push(link);
        self.trace.add(|| format!("c{who} connects: link {number}"));
    }

    /// The client ends its connection by DISCONNECT.
    fn hang_up(&mut self, who: usize) {
        // The observer keeps its connection, and its session in any case.
        let reason = if self.dice.once_in(3) { 4 } else { 0 };
        if let Some(link) = self.clients[who].open() {
            let bytes = packet::disconnect(reason);
            link.send(bytes, Sent::Disconnect { reason });
            self.trace
                .add(|| format!("c{who} sends DISCONNECT {reason}"));
        }
    }

    /// The network loses a connection of a client, with everything on its way.
    pub(crate) fn cut(&mut self, who: usize) {
        let count = self.clients[who].links.len() as u64;
        if count > 0 {
            let at = self.dice.below(count) as usize;
            self.tally.count("connections cut");
            self.end(who, at, "cut");
        }
    }

    /// Both ends of a connection are over.
    pub(crate) fn end(&mut self, who: usize, at: usize, why: &str) {
        let link = self.clients[who].links.remove(at);
        self.trace
            .add(|| format!("link {} of c{who} ends: {why}", link.number));
        if let Some(wire) = link.wire {
            // The observer and the oracle know the end of a connection that was taken over.
            if !wire.is_closing() {
                self.detached(who, link.number);
            }
            drop(wire);
        }
        self.after();
    }

    /// The session has lost its connection, without DISCONNECT.
    pub(crate) fn detached(&mut self, who: usize, link: u64) {
        let expiry_s = self.clients[who].expiry_s;
        self.clients[who].detached_ms = self.elapsed_ms;
        let now_ms = self.elapsed_ms;
        self.wills.lost(link, expiry_s, now_ms, &mut self.tally);
        if expiry_s == 0 {
            self.oracle.note(1, 0, Change::SessionEnded { client: who });
        }
    }

    pub(crate) fn commit(&mut self) {
        self.commits += 1;
        if self.node.commit() {
            self.tally.count("write-ahead log syncs");
        }
        self.after();
        if self.node.log.failure().is_some() {
            self.tally.count("sync errors");
            self.crash();
        }
    }

    fn pass_time(&mut self) {
        let ms = [1, 100, 1_000, 4_000, 12_000][self.dice.below(5) as usize];
        self.advance(ms);
    }

    pub(crate) fn advance(&mut self, ms: u64) {
        self.elapsed_ms += ms;
        self.time.source.advance(ms);
        self.time.wall_ms += ms;
        self.time.now += Duration::from_millis(ms);
        self.trace.add(|| format!("{ms} ms pass"));
        self.wills.due(self.elapsed_ms, &mut self.tally);
        self.node.broker.advance(self.time.now, self.time.wall_ms);
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
            self.cramped.extend(outgoing.map(|it| it.number));
        }
        let has_room = self.node.has_room();
        self.wills.stamp(self.node.appended(), has_room);
        self.take_egress();
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
