//! Runs the standard policy's own cases on its component in the host's engine. The answers must
//! have the same bytes as those of the native code.

use std::fs;
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use bytes::Bytes;
use statehouse::STANDARD_POLICY;
use statehouse_config::limits;
use statehouse_core::policy::{Engine, Policy, Registry};
use statehouse_core::request::{Dialect, Incoming, PREVIEW_TOPIC, REQUEST_TOPIC};
use statehouse_core::store::{Effects, Peer, Quota, Store, Transaction};
use statehouse_core::{Core, Input, Now, Settings};
use statehouse_mqtt::{Properties, PropertiesBuilder};
use statehouse_policy::testing::cases::{self, Subject};
use statehouse_policy::testing::{Answer, Delivery};
use statehouse_testkit::compose::compose;
use statehouse_tests::policies::example;

/// A store with the standard policy, as the subject of the cases.
struct Host {
    policy: Arc<Policy<Transaction>>,
    /// Whether each request gets a new instance, which shows hidden state.
    fresh: bool,
    core: Core,
    now_ms: u64,
    deliveries: Vec<Delivery>,
}

impl Host {
    fn new(policy: Arc<Policy<Transaction>>, fresh: bool) -> Self {
        Self {
            core: core(&policy, None),
            policy,
            fresh,
            now_ms: 0,
            deliveries: Vec::new(),
        }
    }

    fn handle(&mut self, input: Input<'_>) -> Effects {
        let now = Now {
            ms: self.now_ms,
            instant: Instant::now(),
        };
        let effects = self.core.handle(input, now).effects;
        self.record(&effects);
        effects
    }

    fn record(&mut self, effects: &Effects) {
        assert_eq!(effects.failures, 0, "the standard policy never fails");
        for notice in effects.expired.iter().chain(&effects.notifications) {
            for (peer, topic) in &notice.to {
                self.deliveries.push(Delivery {
                    client: peer.client.to_string(),
                    topic: String::from_utf8_lossy(topic).into_owned(),
                    version: statehouse_policy::Stamp {
                        wall: notice.version.wall,
                        counter: notice.version.counter,
                    },
                    payload: notice.payload.to_vec(),
                });
            }
        }
    }
}

fn core(policy: &Arc<Policy<Transaction>>, keys_max: Option<usize>) -> Core {
    let quota = Quota {
        keys_max: keys_max.map_or(limits::KEYS_MAX_DEFAULT, |keys| keys as u64),
        ..Quota::default()
    };
    let store = Store::new(Registry::new(policy.clone(), None), quota);
    Core::in_memory(store, Settings::default())
}

fn peer(client: &str) -> Peer {
    Peer::numbered(client, 1)
}

impl Subject for Host {
    fn begin(&mut self, now_ms: u64, keys_max: Option<usize>) {
        self.core = core(&self.policy, keys_max);
        self.now_ms = now_ms;
        self.deliveries.clear();
    }

    fn advance(&mut self, now_ms: u64) {
        self.now_ms = now_ms;
        self.handle(Input::Sweep);
    }

    fn call(&mut self, request: &statehouse_policy::Request) -> Answer {
        if self.fresh {
            *self.core.store_mut().registry() = Registry::new(self.policy.clone(), None);
        }
        let peer = peer(request.client.as_deref().unwrap_or_default());
        let payload = Bytes::from(request.payload.clone());
        let (topic, dialect) = match request.dialect {
            statehouse_policy::Dialect::Sdk => (REQUEST_TOPIC, Dialect::Sdk),
            statehouse_policy::Dialect::Documents => (REQUEST_TOPIC, Dialect::Documents),
            statehouse_policy::Dialect::Preview => (PREVIEW_TOPIC, Dialect::Preview),
        };
        self.core.settings_mut().dialect = Some(dialect);
        let mut properties = PropertiesBuilder::new()
            .response_topic("answers")
            .correlation_data(b"1");
        for (name, reading) in [
            (dialect.version_property(), &request.timestamp),
            (dialect.fencing_property(), &request.fencing_token),
        ] {
            if let Some(reading) = reading {
                properties = properties.user(name, reading);
            }
        }
        let properties = properties.finish().and_then(Properties::parse);
        let properties = properties.expect("short properties");
        let incoming = Incoming {
            topic,
            ..Incoming::new(&peer, &payload, &properties)
        };
        let mut effects = self.handle(Input::Publish(&incoming));
        let answer = effects.answer.take().expect("every request has an answer");
        Answer {
            bytes: answer.payload.to_vec(),
            version: answer.version.map(|version| statehouse_policy::Stamp {
                wall: version.wall,
                counter: version.counter,
            }),
            repeat: match answer.repeat {
                statehouse_core::policy::Repeat::Free => statehouse_policy::Repeat::Free,
                statehouse_core::policy::Repeat::Same => statehouse_policy::Repeat::Same,
            },
            command: answer.command,
        }
    }

    fn disconnect(&mut self, client: &str) {
        self.handle(Input::Disconnected(&peer(client)));
    }

    fn deliveries(&mut self) -> Vec<Delivery> {
        std::mem::take(&mut self.deliveries)
    }
}

/// Runs all cases.
fn run_all(fresh: bool, file: &[u8]) {
    run(fresh, file, |_, text| Some(text));
}

/// Runs the part of each case that `part` returns.
fn run(fresh: bool, file: &[u8], part: impl for<'a> Fn(&str, &'a str) -> Option<&'a str>) {
    let engine = Engine::new().expect("an engine");
    let policy = Arc::new(engine.load(file).expect("the standard policy"));
    let mut host = Host::new(policy, fresh);
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("../guest/cases");
    let mut requests = 0;
    for file in fs::read_dir(directory).expect("guest/cases") {
        let path = file.expect("guest/cases").path();
        let text = fs::read_to_string(&path).expect("a transcript");
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        let Some(text) = part(&name, &text) else {
            continue;
        };
        match cases::run(text, &mut host) {
            Ok(count) => requests += count,
            Err(error) => panic!("{}: {error}", path.display()),
        }
    }
    assert!(requests > 100, "the cases have only {requests} requests");
}

#[test]
fn cases_pass_on_a_long_lived_instance() {
    run_all(false, STANDARD_POLICY);
}

#[test]
fn cases_pass_on_a_new_instance_per_request() {
    run_all(true, STANDARD_POLICY);
}

/// The standard policy of the first commit with an SDK, d683efe of 21 November 2026, as a core
/// module. The contract had neither `follow` nor rules then.
#[test]
fn policy_of_the_first_sdk_still_passes_its_cases() {
    let file =
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/fixtures/policy-of-first-sdk.wasm");
    let file = fs::read(file).expect("the fixture");
    for fresh in [false, true] {
        run(fresh, &file, |name, text| match name {
            "extensions.txt" => None,
            "notify.txt" => text.split("== a prefix covers").next(),
            _ => Some(text),
        });
    }
}

#[test]
fn cases_pass_through_a_rule_that_admits_everything() {
    let rule = fs::read(example("rule")).expect("cargo built it");
    let composed = compose(&rule).expect("the rule composes");
    run_all(false, &composed);
    run_all(true, &composed);
}
