//! Measures a step of the store with routes, a canary, a shadow or access rules, a swap of the
//! active policy, and the start of an instance.
//!
//! ```text
//! cargo bench -p statehouse --bench lifecycle [POLICY.wasm ...]
//! ```
//!
//! All figures are medians of many rounds in one process. Quote only ratios.

use std::hint::black_box;
use std::sync::Arc;
use std::time::Instant;

use bytes::Bytes;
use statehouse::STANDARD_POLICY;
use statehouse_access::rules::{Grants, Principal, Rules};
use statehouse_core::policy::{
    Assignment, Canary, CanaryRule, Digest, Engine, Instance, Policy, Registry, Shadow,
};
use statehouse_core::request::{Delivery, Incoming};
use statehouse_core::store::{Peer, Quota, Store, Transaction};

use statehouse_core::{Core, Input, Now, Settings};
use statehouse_mqtt::{Properties, PropertiesBuilder};
use statehouse_protocol::rights::ClientRights;

const NOW_MS: u64 = 1_700_000_000_000;
const TIMESTAMP: &str = "001700000000000:00000:bench";
const ROUNDS: usize = 60;
const STEPS: usize = 2_000;
const LOOKUPS: usize = 100_000;

type Loaded = Arc<Policy<Transaction>>;

fn median(mut all: Vec<f64>) -> f64 {
    all.sort_by(f64::total_cmp);
    all[all.len() / 2]
}

fn microseconds(since: Instant) -> f64 {
    since.elapsed().as_secs_f64() * 1e6
}

struct Bench {
    standard: Loaded,
    other: Loaded,
    plain: Assignment,
}

impl Bench {
    fn store(&self, assignment: Assignment) -> Store {
        let mut registry = Registry::new(self.standard.clone(), None);
        let ready = vec![Instance::new(self.other.clone())];
        assert!(registry.assign(assignment, ready).is_ok());
        let mut store = Store::new(registry, Quota::default());
        store.supervision().purity_every = 0;
        store
    }

    /// Measures a step in microseconds.
    fn steps(
        &self,
        assignment: &Assignment,
        grants: Option<&Arc<Grants>>,
        arguments: &[&[u8]],
    ) -> f64 {
        let mut core = Core::in_memory(self.store(assignment.clone()), Settings::default());
        let now = Now {
            ms: NOW_MS,
            instant: Instant::now(),
        };
        let properties = PropertiesBuilder::new()
            .response_topic("clients/bench/response")
            .correlation_data(&[7; 16])
            .user("__ts", TIMESTAMP)
            .user("__protVer", "1.0")
            .finish()
            .and_then(Properties::parse)
            .expect("short properties");
        let peer = Peer::numbered("bench", 1);
        let payload = Bytes::from(statehouse_policy::resp::request(arguments));
        let grants = grants.map(|it| it.clone() as Arc<dyn ClientRights>);
        let mut ask = |packet_id: usize| {
            let incoming = Incoming {
                delivery: Delivery::new(&peer, (packet_id % 60_000 + 1) as u16, false),
                grants: grants.clone(),
                ..Incoming::new(&peer, &payload, &properties)
            };
            let effects = core.handle(Input::Publish(&incoming), now).effects;
            assert_eq!(effects.failures, 0);
            black_box(effects);
        };
        let rounds = (0..ROUNDS).map(|_| {
            let start = Instant::now();
            (0..STEPS).for_each(&mut ask);
            microseconds(start) / STEPS as f64
        });
        median(rounds.collect())
    }

    fn table(&self) {
        let (plain, policy) = (&self.plain, Digest::from(self.other.digest));
        let route = plain.route(b"elsewhere/", Some(policy));
        let canary = |rule| plain.canary(Some(Canary { policy, rule }));
        let of_clients = canary(CanaryRule::Percent(10));
        let of_keys = canary(CanaryRule::Keys("elsewhere/*".into()));
        let shadow = |per_mille| plain.shadow(Some(Shadow { policy, per_mille }));
        let kinds = [
            ("one policy", Ok(plain.clone())),
            ("a route for other keys", route),
            ("a canary of 10 % of clients", of_clients),
            ("a canary of other keys", of_keys),
            ("a shadow of 1 % of requests", shadow(10)),
            ("a shadow of all requests", shadow(1000)),
        ];
        let value = [b'v'; 64];
        println!(
            "{:<32}{:>10}{:>10}   microseconds of a step",
            "", "GET 64 B", "SET 64 B"
        );
        for (name, assignment) in kinds {
            let assignment = assignment.expect("the policy is loaded");
            let get = self.steps(&assignment, None, &[b"GET", b"key"]);
            let set = self.steps(&assignment, None, &[b"SET", b"key", &value]);
            println!("{name:<32}{get:>10.2}{set:>10.2}");
        }
    }

    /// Compares a step under access rules, of which the last one allows it, with a step without
    /// rules.
    fn under_rules(&self) {
        let key = b"area/7/press/4/speed";
        let ask: &[&[u8]] = &[b"GET", key];
        println!(
            "\n{:<32}{:>10}{:>10}{:>10}{:>12}   a GET with rules; its ratio to one without; a lookup; evaluation for a client",
            "", "µs", "ratio", "ns", "ms"
        );
        for (count, kind) in [
            (1, "Pattern"),
            (100, "Pattern"),
            (10_000, "Pattern"),
            (10_000, "String"),
        ] {
            let rule = |number: usize| {
                let key = match (number + 1 == count, kind) {
                    (true, "Pattern") => "area/7/*".to_owned(),
                    (true, _) => "area/7/press/4/speed".to_owned(),
                    (false, "Pattern") => format!("line/{number}/*"),
                    (false, _) => format!("line/{number}/speed"),
                };
                format!(
                    "[[rules]]\nprincipals.clientIds = [\"bench\"]\nstateStoreResources = [{{ method = \"Read\", keyType = \"{kind}\", keys = [\"{key}\"] }}]\n"
                )
            };
            let rules = Rules::parse(&(0..count).map(rule).collect::<String>()).expect("rules");
            let principal = Principal {
                client: "bench",
                user: None,
                attributes: &[],
            };
            let start = Instant::now();
            let grants = rules.grants(principal);
            let evaluated = microseconds(start) / 1e3;
            let start = Instant::now();
            for _ in 0..LOOKUPS {
                assert!(black_box(&grants).may_read(black_box(key)));
            }
            let lookup = microseconds(start) * 1e3 / LOOKUPS as f64;
            // Alternate, because the speed of a machine varies.
            let (mut with, mut without) = (Vec::new(), Vec::new());
            for _ in 0..5 {
                without.push(self.steps(&self.plain, None, ask));
                with.push(self.steps(&self.plain, Some(&grants), ask));
            }
            let (with, without) = (median(with), median(without));
            let name = format!("{count} rules, {kind}");
            let ratio = with / without;
            println!("{name:<32}{with:>10.2}{ratio:>10.3}{lookup:>10.0}{evaluated:>12.2}");
        }
    }

    /// Measures how long a swap of the active policy blocks requests.
    fn swaps(&self) {
        let mut store = self.store(self.plain.clone());
        let mut times = Vec::new();
        for round in 0..400 {
            let which = [&self.other, &self.standard][round % 2];
            let ready = Instance::warm(which.clone()).expect("it was loaded");
            let next = store.registry().assignment().promote(which.digest.into());
            let start = Instant::now();
            let left = store.registry().assign(next.expect("loaded"), vec![ready]);
            times.push(microseconds(start));
            assert!(left.is_ok());
        }
        let worst = times.iter().copied().fold(0.0, f64::max);
        println!(
            "\nswap of the active policy: median {:.1} µs, worst of 400 {worst:.1} µs",
            median(times)
        );
    }
}

/// Measures the start and the end of an instance.
fn instances(name: &str, policy: &Loaded) {
    let (mut starts, mut ends) = (Vec::new(), Vec::new());
    let mut memory = 0;
    for _ in 0..50 {
        let start = Instant::now();
        let instance = Instance::warm(policy.clone()).expect("it was loaded");
        starts.push(microseconds(start));
        memory = instance.memory_bytes();
        let end = Instant::now();
        drop(instance);
        ends.push(microseconds(end));
    }
    println!(
        "start of an instance of {name}: median {:.0} µs, its end {:.0} µs, {} KiB of memory",
        median(starts),
        median(ends),
        memory >> 10
    );
}

fn main() {
    let engine = Engine::new().expect("an engine");
    let load = |file: &[u8]| Arc::new(engine.load(file).expect("a policy"));
    // A custom section gives the same policy another digest: id 0, its length, its name with a
    // length.
    let twin = [STANDARD_POLICY, b"\0\x05\x04twin"].concat();
    let (standard, other) = (load(STANDARD_POLICY), load(&twin));
    let plain = Assignment::of(standard.digest.into());
    let plain = plain.load(other.digest.into()).expect("there is room");
    let bench = Bench {
        standard,
        other,
        plain,
    };
    bench.table();
    bench.under_rules();
    bench.swaps();
    instances("the standard policy", &bench.standard);
    // Skip the flags that cargo adds.
    for path in std::env::args()
        .skip(1)
        .filter(|argument| !argument.starts_with('-'))
    {
        let file = std::fs::read(&path).expect("a file");
        let start = Instant::now();
        let policy = load(&file);
        println!("\n{path}: loaded in {:.1} s", start.elapsed().as_secs_f64());
        instances(&policy.name, &policy);
    }
}
