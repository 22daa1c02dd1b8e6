//! One run: three hosts and their clients over the simulated engine, with faults.

use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll};
use std::time::Duration;

use fastrand::Rng;
use tokio::sync::Notify;
use tokio::time::{Instant, Sleep, sleep, sleep_until, timeout};

use super::cluster::simulate;
use super::ledger::Ledger;
use super::store::{KEYS, Shared, Store, Write};
use crate::simulated::{Faults, SimulatedClock, World, chance};
use crate::{Broken, Id, Member, NotLeading, Options, Reads, Sizes, Timing};

const HOSTS: usize = 3;
const CLIENTS: u64 = 6;
/// The length of the part with faults, some 16 leases.
const FAULTS: Duration = Duration::from_secs(8);
/// How long a leader may be missing after the faults.
const RECOVERY: Duration = Duration::from_secs(8);

struct Run {
    world: World,
    ledger: Arc<Mutex<Ledger>>,
    hosts: Vec<SimulatedHost>,
    broken: Option<Broken>,
    reads: Reads,
    /// A quota that the log and its snapshots use up. Then no other client writes.
    quota: Option<u64>,
    /// Clients write about once in so many requests.
    writes_once_in: u64,
}

struct SimulatedHost {
    clock: Arc<SimulatedClock>,
    lease: Duration,
    shared: Arc<Mutex<Shared>>,
    pauses: Arc<Mutex<Pauses>>,
    member: Mutex<Option<Arc<Member>>>,
    kill: Notify,
}

/// When a host stands still.
struct Pauses {
    until: Instant,
    rng: Rng,
    /// A pause begins once in so many polls.
    once_in: u64,
}

/// A future of a host, which makes no progress while the host is paused.
struct Paused<F> {
    pauses: Arc<Mutex<Pauses>>,
    sleep: Option<Pin<Box<Sleep>>>,
    inner: Pin<Box<F>>,
}

impl<F: Future> Future for Paused<F> {
    type Output = F::Output;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<F::Output> {
        loop {
            if let Some(sleep) = &mut self.sleep {
                std::task::ready!(sleep.as_mut().poll(context));
                self.sleep = None;
            }
            let until = {
                let mut pauses = self.pauses.lock().unwrap();
                let once_in = pauses.once_in;
                if once_in > 0 && chance(&mut pauses.rng, once_in) {
                    let length = Duration::from_millis(pauses.rng.u64(..1500));
                    pauses.until = Instant::now() + length;
                }
                pauses.until
            };
            if until <= Instant::now() {
                return self.inner.as_mut().poll(context);
            }
            self.sleep = Some(Box::pin(sleep_until(until)));
        }
    }
}

pub(super) fn run(seed: u64, broken: Option<Broken>) -> Result<Ledger, String> {
    let ledger = simulate(async {
        let run = Arc::new(Run::new(seed, broken));
        run.clone().go(seed).await;
        run.ledger.clone()
    });
    let ledger = std::mem::take(&mut *ledger.lock().unwrap());
    match ledger.violation {
        Some(violation) => Err(violation),
        None => Ok(ledger),
    }
}

impl Run {
    fn new(seed: u64, broken: Option<Broken>) -> Self {
        let mut rng = Rng::with_seed(seed);
        let often = |rng: &mut Rng, n: u64| {
            if chance(rng, 3) { 0 } else { n + rng.u64(..n) }
        };
        let faults = Faults {
            lost_request: often(&mut rng, 50),
            lost_answer: often(&mut rng, 50),
            delayed: often(&mut rng, 30),
            duplicated: often(&mut rng, 20),
            stale_read: often(&mut rng, 4),
            lost_change: often(&mut rng, 25),
            repeated_change: often(&mut rng, 20),
            late: Duration::from_millis(900),
        };
        let once_in = often(&mut rng, 2000);
        let hosts = (0..HOSTS).map(|_| SimulatedHost {
            clock: Arc::new(SimulatedClock::new(
                Duration::from_millis(rng.u64(..1_000_000)),
                950_000 + 10_000 * u32::try_from(rng.u64(..11)).unwrap(),
            )),
            lease: Duration::from_millis(if chance(&mut rng, 4) { 700 } else { 500 }),
            shared: Arc::default(),
            pauses: Arc::new(Mutex::new(Pauses {
                until: Instant::now(),
                rng: Rng::with_seed(rng.u64(..)),
                once_in,
            })),
            member: Mutex::new(None),
            kill: Notify::new(),
        });
        Self {
            hosts: hosts.collect(),
            world: World::new(seed, faults),
            ledger: Arc::default(),
            broken,
            quota: chance(&mut Rng::with_seed(seed ^ 0xF111), 3).then(|| 20_000 + seed % 8 * 2_000),
            writes_once_in: if chance(&mut rng, 3) { 30 } else { 2 },
            reads: if broken.is_none() && seed.is_multiple_of(8) {
                Reads::Confirmed
            } else {
                Reads::Lease
            },
        }
    }

    async fn go(self: Arc<Self>, seed: u64) {
        let mut rng = Rng::with_seed(seed ^ 0xC1A5);
        let ledger = Arc::clone(&self.ledger);
        self.world
            .observe(move |it| ledger.lock().unwrap().applied(it));
        self.world.limit(self.quota.unwrap_or(1 << 30));
        let engine = self.world.engine(HOSTS);
        while timeout(RECOVERY, crate::create(&*engine, "c", Id([7; 16]), 0)).await != Ok(Ok(true))
        {
        }
        for host in 0..HOSTS {
            tokio::spawn(Arc::clone(&self).serve(host, Rng::with_seed(rng.u64(..))));
            tokio::spawn(Arc::clone(&self).watch_links(host, Rng::with_seed(rng.u64(..))));
        }
        for _ in 0..CLIENTS {
            tokio::spawn(Arc::clone(&self).client(Rng::with_seed(rng.u64(..))));
        }
        let end = Instant::now() + FAULTS;
        let mut takeovers = 0;
        while Instant::now() < end && !self.is_violated() {
            sleep(Duration::from_millis(40)).await;
            if chance(&mut rng, 5) {
                self.disturb(&mut rng);
            }
            if self.quota.is_some() && self.world.is_full() {
                let mut ledger = self.ledger.lock().unwrap();
                ledger.violated("the hosts have used the quota up".into());
            }
            // A leader is most vulnerable while it waits for the lease of the one before.
            let before = std::mem::replace(&mut takeovers, self.ledger.lock().unwrap().takeovers);
            if let Some(leader) = self.leader()
                && takeovers > before
                && chance(&mut rng, 4)
            {
                self.hosts[leader].kill.notify_one();
            }
        }
        self.heal();
        if timeout(RECOVERY, self.read_all()).await.is_err() {
            let mut ledger = self.ledger.lock().unwrap();
            ledger.violated("no leader answers after the end of the faults".into());
        }
    }

    fn is_violated(&self) -> bool {
        self.ledger.lock().unwrap().violation.is_some()
    }

    /// Causes one fault, or ends one.
    fn disturb(&self, rng: &mut Rng) {
        let mut index = rng.u64(..HOSTS as u64) as usize;
        if let Some(leader) = self.leader()
            && chance(rng, 2)
        {
            index = leader;
        }
        let host = &self.hosts[index];
        match rng.u64(..15) {
            0 => self.world.cut(index, true, true),
            1 => self.world.cut(index, false, true),
            2 => self.world.cut(index, true, false),
            3..=6 => self.world.cut(index, false, false),
            7 | 8 => {
                let length = Duration::from_millis(300 + rng.u64(..1500));
                host.pauses.lock().unwrap().until = Instant::now() + length;
            }
            9..=11 => host.kill.notify_one(),
            12 => self.world.compact(),
            13 if self.quota.is_none() => self.world.fill(),
            13 => {}
            _ => {
                if let Some(log) = &host.shared.lock().unwrap().log {
                    match rng.usize(..2 * HOSTS) {
                        successor @ 0..HOSTS => log.hand_over(Some(&successor.to_string())),
                        _ => log.hand_over(None),
                    }
                }
            }
        }
    }

    /// The host that leads in the newest epoch, as far as the hosts know.
    fn leader(&self) -> Option<usize> {
        let epoch = |host: &SimulatedHost| Some(host.shared.lock().unwrap().log.as_ref()?.epoch());
        let leaders = (0..HOSTS).filter_map(|it| Some((epoch(&self.hosts[it])?, it)));
        leaders.max().map(|(_, host)| host)
    }

    fn heal(&self) {
        self.world.heal();
        for host in &self.hosts {
            let mut pauses = host.pauses.lock().unwrap();
            pauses.until = Instant::now();
            pauses.once_in = 0;
        }
    }

    async fn read_all(self: &Arc<Self>) {
        for key in 0..KEYS {
            let mut host = 0;
            while !self.is_violated() {
                let read = self.turn(host, key, false, Duration::ZERO, 0);
                if matches!(timeout(Duration::from_secs(1), read).await, Ok(Ok(()))) {
                    break;
                }
                host = (host + 1) % HOSTS;
                sleep(Duration::from_millis(50)).await;
            }
        }
    }

    fn options(&self, host: usize, process: Id, predecessor: Option<Id>) -> Options {
        let mut options = Options::new("c", &host.to_string(), "h:1", process);
        options.predecessor = predecessor;
        options.reads = self.reads;
        options.broken = self.broken;
        // Four times as fast as in production, so that a run has many leases.
        options.timing = Timing {
            lease: self.hosts[host].lease,
            attempt: Duration::from_millis(125),
            read: Duration::from_millis(250),
            silence: Duration::from_millis(100),
            probe: Duration::from_millis(30),
            delay: Duration::from_millis(50),
            poll: Duration::from_millis(500),
            quiet: Duration::from_millis(2500),
            abstention: Duration::from_secs(1),
            precedence: Duration::from_millis(750),
            status: Duration::from_secs(2),
            shrink: Duration::from_secs(1),
            piece: Duration::from_millis(5),
        };
        options.sizes = Sizes {
            frame_bytes: 200,
            part_bytes: 150,
            piece_bytes: 100,
            snapshot_after_bytes: 2_500,
            quota_bytes: 1 << 30,
        };
        options
    }

    /// The processes of a host, one after another.
    async fn serve(self: Arc<Self>, index: usize, mut rng: Rng) {
        let host = &self.hosts[index];
        let mut predecessor = None;
        loop {
            let mut process = Id::default();
            process.0[..8].copy_from_slice(&rng.u64(..).to_le_bytes());
            let options = self.options(index, process, predecessor);
            let engine = self.world.engine(index);
            let member = Arc::new(Member::new(engine, host.clock.clone(), options).unwrap());
            *host.member.lock().unwrap() = Some(Arc::clone(&member));
            let mut store = Store {
                shared: Arc::clone(&host.shared),
                ledger: Arc::clone(&self.ledger),
                now_ms: rng.u64(..1000),
                cursor: 0,
            };
            let stopped = tokio::select! {
                biased;
                () = host.kill.notified() => None,
                stopped = self.paused(index, member.run(&mut store)) => stopped.err(),
            };
            *host.member.lock().unwrap() = None;
            *host.shared.lock().unwrap() = Shared::default();
            // With a broken rule the code's own checks must not hide the consequence.
            if let Some(stop) = stopped
                && self.broken.is_none()
            {
                let mut ledger = self.ledger.lock().unwrap();
                return ledger.violated(format!("host {index} stopped: {stop}"));
            }
            predecessor = chance(&mut rng, 2).then_some(process);
            let downtime_max = if chance(&mut rng, 2) { 40 } else { 1000 };
            sleep(Duration::from_millis(rng.u64(..downtime_max))).await;
        }
    }

    fn paused<F: Future>(&self, host: usize, inner: F) -> Paused<F> {
        Paused {
            pauses: Arc::clone(&self.hosts[host].pauses),
            sleep: None,
            inner: Box::pin(inner),
        }
    }

    /// The links to other hosts: reports a leader that is down, paused or cut off, and sometimes
    /// another one.
    async fn watch_links(self: Arc<Self>, index: usize, mut rng: Rng) {
        loop {
            sleep(Duration::from_millis(75)).await;
            let leader = self.hosts[index].shared.lock().unwrap().leader.clone();
            let is_silent = leader.parse().is_ok_and(|number: usize| {
                let leader = &self.hosts[number];
                let is_down = leader.member.lock().unwrap().is_none();
                let is_paused = leader.pauses.lock().unwrap().until > Instant::now();
                is_down || is_paused || self.world.is_cut(number)
            });
            if is_silent || chance(&mut rng, 30) {
                let member = self.hosts[index].member.lock().unwrap().clone();
                member.inspect(|it| it.suspect());
            }
        }
    }

    async fn client(self: Arc<Self>, mut rng: Rng) {
        let mut host = 0;
        let patience = Duration::from_millis(200 + rng.u64(..1500));
        let writes_once_in = self.writes_once_in + rng.u64(..6);
        loop {
            sleep(Duration::from_millis(rng.u64(..60))).await;
            let key = rng.u64(..u64::from(KEYS)) as u8;
            let writes = chance(&mut rng, writes_once_in);
            let arrival = Duration::from_millis(rng.u64(..100));
            let filler = if chance(&mut rng, 20) {
                500
            } else {
                rng.u64(..30) as usize
            };
            let turn = self.turn(host, key, writes, arrival, filler);
            let turn = self.paused(host, turn);
            let succeeded = matches!(timeout(patience, turn).await, Ok(Ok(())));
            // A client of a leader that was cut off does not stay with it for ever.
            if !succeeded || chance(&mut rng, 4) {
                host = rng.u64(..HOSTS as u64) as usize;
            }
        }
    }

    /// Handles one request of a client, as a server does.
    async fn turn(
        &self,
        host: usize,
        key: u8,
        writes: bool,
        arrival: Duration,
        filler: usize,
    ) -> Result<(), NotLeading> {
        let shared = &self.hosts[host].shared;
        let log = shared.lock().unwrap().log.clone().ok_or(NotLeading)?;
        let looks_early = self.broken == Some(Broken::LeaseBeforeRead);
        if looks_early {
            log.may_decide().await?;
        }
        sleep(arrival).await;
        let floor = self.ledger.lock().unwrap().floor(key);
        if !looks_early {
            log.may_decide().await?;
            // Without a lease, a transaction has confirmed the state after the request arrived.
            // Such a request may be decided late.
            if log.has_lease() {
                self.ledger.lock().unwrap().decides(log.epoch());
            }
        }
        let is_refused = writes && self.quota.is_some() && !log.has_room();
        let writes = writes && !is_refused;
        self.ledger.lock().unwrap().refused += u64::from(is_refused);
        let decided = decide(&mut shared.lock().unwrap(), &log, key, writes, filler);
        let (version, position, record) = decided.ok_or(NotLeading)?;
        log.wait_released(position).await?;
        let mut ledger = self.ledger.lock().unwrap();
        match record {
            Some(record) => ledger.write_answered(Write { key, version }, position, &record),
            None => ledger.read_answered(key, version, floor),
        }
        Ok(())
    }
}

/// Decides a request on the state of a host. `None` if the host does not lead any more.
fn decide(
    shared: &mut Shared,
    log: &Arc<crate::LeaderLog>,
    key: u8,
    writes: bool,
    filler: usize,
) -> Option<(u64, crate::LogPosition, Option<Vec<u8>>)> {
    if !shared.log.as_ref().is_some_and(|it| Arc::ptr_eq(it, log)) {
        return None;
    }
    if !writes {
        let version = shared.state.versions.get(&key).copied().unwrap_or(0);
        let position = shared.written.get(&key).copied().unwrap_or_default();
        return Some((version, position, None));
    }
    let version = shared.state.last_version + 1;
    let write = Write { key, version };
    let record = write.encode(filler);
    let position = log.append(&[&record]).unwrap();
    shared.state.apply(write);
    shared.written.insert(key, position);
    Some((version, position, Some(record)))
}
