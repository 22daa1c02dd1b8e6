//! Runs one attack while an honest client is measured, and prints the cost as a row of a table.

use std::{
    fs::OpenOptions,
    io::Write,
    time::{Duration, Instant},
};

use crate::{
    client::PATIENCE,
    connect::Connect,
    server::Server,
    victim::{Latencies, Victim, milliseconds},
};

/// How long the victim is measured before the attack.
const BASELINE: Duration = Duration::from_secs(2);

/// The columns of a row.
const HEAD: &str = "\
| attack | victim p50, before → during | victim p99 | victim max | failures | RSS, before → during | peak | restart |
|---|---|---|---|---|---|---|---|
";

pub struct Outcome<T> {
    pub name: String,
    pub before: Latencies,
    pub during: Latencies,
    pub rss_before_kib: u64,
    /// Resident memory at the end of the attack, in KiB. The attacker's connections are still open.
    pub rss_during_kib: u64,
    /// The peak of resident memory up to the end of the attack, in KiB.
    pub peak_kib: u64,
    /// How long the server took to become ready again after `kill -9`.
    pub restart: Duration,
    /// What the attack returned; its connections have ended with the server.
    pub result: T,
}

/// Measures a victim, then the victim under attack, then memory, then a restart after `kill -9`.
/// The server must survive the attack; the test asserts all other requirements.
pub fn run<T>(name: &str, server: &mut Server, attack: impl FnOnce(&Server) -> T) -> Outcome<T> {
    run_as(name, server, &Connect::new("victim"), attack)
}

/// Like [`run`], with a victim that sends this CONNECT.
pub fn run_as<T>(
    name: &str,
    server: &mut Server,
    victim: &Connect,
    attack: impl FnOnce(&Server) -> T,
) -> Outcome<T> {
    let victim = Victim::start_as(server.address(), victim.clone());
    let before = victim.undisturbed(BASELINE);
    assert_eq!(before.failures(), 0, "before the attack: {before}");
    let rss_before_kib = server.memory_kib();
    let (during, result) = victim.during(|| attack(server));
    drop(victim);
    if let Some(cgroup) = server.cgroup() {
        assert_eq!(cgroup.oom_kills(), 0, "{name}: killed for lack of memory");
    }
    assert!(server.runs(), "{name}: the server ended");
    let (rss_during_kib, peak_kib) = (server.memory_kib(), server.memory_peak_kib());
    let outcome = Outcome {
        name: name.to_owned(),
        before,
        during,
        rss_before_kib,
        rss_during_kib,
        peak_kib,
        restart: restart(server),
        result,
    };
    outcome.print();
    outcome
}

/// How long a server takes to become ready again after `kill -9`.
pub fn restart(server: &mut Server) -> Duration {
    server.kill();
    let began = Instant::now();
    server.restart();
    began.elapsed()
}

impl<T> Outcome<T> {
    pub fn row(&self) -> String {
        let mib = |kib: u64| format!("{:.0}", kib as f64 / 1024.0);
        format!(
            "| {} | {} → {} | {} → {} | {} | {} | {} → {} MiB | {} MiB | {:.2} s |\n",
            self.name,
            milliseconds(self.before.p50()),
            milliseconds(self.during.p50()),
            milliseconds(self.before.p99()),
            milliseconds(self.during.p99()),
            milliseconds(self.during.max()),
            self.during.failures(),
            mib(self.rss_before_kib),
            mib(self.rss_during_kib),
            mib(self.peak_kib),
            self.restart.as_secs_f64()
        )
    }

    /// Asserts that no request of the victim failed, and that 99 of 100 took at most `p99_max`.
    #[track_caller]
    pub fn assert_victim_served(&self, p99_max: Duration) {
        assert!(p99_max < PATIENCE, "a longer request counts as a failure");
        assert_eq!(self.during.failures(), 0, "{}: {}", self.name, self.during);
        let p99 = self.during.p99();
        assert!(
            p99 <= p99_max,
            "{}: {} (before: {})",
            self.name,
            self.during,
            self.before
        );
    }

    /// Prints the row, and appends it to `attacks.md` in the directory of the binaries. Each attack
    /// runs in its own process, so `tests/run --all` prints the table from that file.
    fn print(&self) {
        print!("{HEAD}{}", self.row());
        let test = std::env::current_exe().unwrap();
        // target/<profile>/deps/<test> → target/<profile>
        let path = test.ancestors().nth(2).unwrap().join("attacks.md");
        let mut table = OpenOptions::new()
            .create(true)
            .append(true)
            .open(path)
            .unwrap();
        let head = match table.metadata().unwrap().len() {
            0 => HEAD,
            _ => "",
        };
        // A single write cannot interleave with the rows of other processes.
        write!(table, "{head}{}", self.row()).unwrap();
    }
}
