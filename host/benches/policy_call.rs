//! Measures the cost of the sandbox: one GET or SET through the component, compared with a native
//! call of the same code on the same transaction.
//!
//! ```text
//! cargo bench -p statehouse --bench policy_call
//! ```

use std::hint::black_box;
use std::sync::Arc;

use bytes::Bytes;
use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use statehouse::STANDARD_POLICY;
use statehouse_core::clock;
use statehouse_core::policy::{self, Denial, Engine, Host as _, Instance, Put};
use statehouse_core::request::{Delivery, Dialect, Request};
use statehouse_core::store::{Peer, Quota, State, Transaction};
use statehouse_mqtt::Properties;
use statehouse_policy::{
    Access, Bytes as Given, Entry, Fault, Hlc, Host, Level, Page, Policy as _, Reached, Scope,
    Stamp, resp,
};

const NOW_MS: u64 = 1_700_000_000_000;
const TIMESTAMP: &str = "001700000000000:00000:bench";

/// The host of the native policy, on the same table.
struct Native<'a> {
    transaction: &'a mut Transaction,
    payload: &'a [u8],
}

impl<'a> Native<'a> {
    fn slice<'b>(&self, given: &'b Given) -> &'b [u8]
    where
        'a: 'b,
    {
        match given {
            Given::Span(span) => &self.payload[span.at as usize..][..span.len as usize],
            Given::Owned(bytes) => bytes,
        }
    }
}

fn fault(denial: Denial) -> Fault {
    match denial {
        Denial::Fault(policy::Fault::Denied) => Fault::Denied,
        Denial::Fault(policy::Fault::Quota) => Fault::Quota,
        Denial::Fault(policy::Fault::Other(text)) => Fault::Other(text),
        Denial::Violation(what) => panic!("{what}"),
    }
}

fn scope_of(scope: Scope) -> policy::Scope {
    match scope {
        Scope::Key => policy::Scope::Key,
        Scope::Prefix => policy::Scope::Prefix,
    }
}

fn stamp(version: clock::Stamp) -> Stamp {
    Stamp {
        wall: version.wall,
        counter: version.counter,
    }
}

impl Host for Native<'_> {
    fn head(&mut self, key: &Given, access: Access) -> Result<Option<Entry>, Fault> {
        let key = self.slice(key);
        let access = match access {
            Access::Read => policy::Access::Read,
            Access::Write => policy::Access::Write,
            Access::Hidden => policy::Access::Hidden,
        };
        let entry = self.transaction.head(key, access).map_err(fault)?;
        Ok(entry.map(|entry| Entry {
            len: entry.len,
            version: Stamp {
                wall: entry.version.wall,
                counter: entry.version.counter,
            },
            fence: entry.fence.map(|f| Hlc {
                wall: f.wall,
                counter: f.counter,
                node: f.node,
            }),
            expires: entry.expires,
        }))
    }

    fn load(&mut self, key: &Given, at: u32, len: u32) -> Result<Option<Vec<u8>>, Fault> {
        let key = self.slice(key);
        let part = self.transaction.load(key, at, len).map_err(fault)?;
        Ok(part.map(Vec::from))
    }

    fn matches(&mut self, key: &Given, value: &Given) -> Result<bool, Fault> {
        let (key, value) = (self.slice(key), self.slice(value));
        self.transaction.matches(key, value).map_err(fault)
    }

    fn put(
        &mut self,
        key: &Given,
        value: &Given,
        observed: Option<Stamp>,
        fence: Option<&Hlc>,
        expires_ms: Option<u64>,
    ) -> Result<Stamp, Fault> {
        let put = Put {
            key: self.slice(key),
            value: self.slice(value),
            observed: observed.map(|o| clock::Stamp {
                wall: o.wall,
                counter: o.counter,
            }),
            fence: fence.map(|f| clock::Fence {
                wall: f.wall,
                counter: f.counter,
                node: f.node.as_str().into(),
            }),
            expires_ms,
        };
        self.transaction.put(put).map(stamp).map_err(fault)
    }

    fn delete(&mut self, key: &Given) -> Result<bool, Fault> {
        let key = self.slice(key);
        self.transaction.delete(key).map_err(fault)
    }

    fn keys(&mut self, prefix: &Given, cursor: Option<&[u8]>, limit: u32) -> Result<Page, Fault> {
        let prefix = self.slice(prefix);
        let page = self
            .transaction
            .keys(prefix, cursor, limit)
            .map_err(fault)?;
        Ok(Page {
            keys: page.keys,
            next: page.next,
        })
    }

    fn watch(&mut self, key: &Given) -> Result<(), Fault> {
        let key = self.slice(key);
        self.transaction.watch(key).map_err(fault)
    }

    fn unwatch(&mut self, key: &Given) -> Result<bool, Fault> {
        let key = self.slice(key);
        self.transaction.unwatch(key).map_err(fault)
    }

    fn follow(&mut self, scope: Scope, key: &Given) -> Result<Stamp, Fault> {
        let (scope, key) = (scope_of(scope), self.slice(key));
        let version = self.transaction.follow(scope, key);
        version.map(stamp).map_err(fault)
    }

    fn follow_since(&mut self, scope: Scope, key: &Given, since: Stamp) -> Result<Reached, Fault> {
        let (scope, key) = (scope_of(scope), self.slice(key));
        let since = clock::Stamp {
            wall: since.wall,
            counter: since.counter,
        };
        let reached = self.transaction.follow_since(scope, key, since);
        let reached = reached.map_err(fault)?;
        Ok(Reached {
            version: stamp(reached.version),
            complete: reached.complete,
        })
    }

    fn unfollow(&mut self, scope: Scope, key: &Given) -> Result<bool, Fault> {
        let (scope, key) = (scope_of(scope), self.slice(key));
        self.transaction.unfollow(scope, key).map_err(fault)
    }

    fn property(&mut self, name: &str) -> Option<String> {
        self.transaction.property(name)
    }

    fn log_enabled(&mut self, _level: Level) -> bool {
        false
    }

    fn log(&mut self, _level: Level, _message: &str) {}

    fn count(&mut self, _name: &str, _by: u64) {}

    fn random(&mut self, len: u32) -> Vec<u8> {
        self.transaction.random(len as usize)
    }
}

/// All parts of a request except the payload.
struct Client {
    peer: Peer,
    properties: Properties,
}

impl Client {
    fn request<'a>(&'a self, payload: &'a Bytes) -> Request<'a> {
        Request {
            dialect: Dialect::Sdk,
            payload,
            timestamp: Some(TIMESTAMP),
            fencing_token: None,
            peer: &self.peer,
            properties: &self.properties,
            delivery: Delivery::default(),
            grants: None,
        }
    }
}

fn sandboxed(
    instance: &mut Instance<Transaction>,
    state: Box<State>,
    client: &Client,
    payload: &Bytes,
) -> Box<State> {
    let request = client.request(payload);
    let transaction = Transaction::begin(state, Quota::default(), NOW_MS, &request);
    let mut call = instance.begin(transaction, payload.clone());
    let outcome = call.handle(policy::Request {
        payload,
        dialect: policy::Dialect::Sdk,
        timestamp: Some(TIMESTAMP),
        fencing_token: None,
        client: Some(&client.peer.client),
        now: NOW_MS,
    });
    black_box(outcome.expect("the standard policy never fails"));
    call.end().commit().0
}

fn native(
    policy: &statehouse_guest::Standard,
    state: Box<State>,
    client: &Client,
    payload: &Bytes,
) -> Box<State> {
    let request = client.request(payload);
    let mut transaction = Transaction::begin(state, Quota::default(), NOW_MS, &request);
    // The native call gets its own copies of the payload and the strings, as the guest does.
    let request = statehouse_policy::Request {
        payload: payload.to_vec(),
        dialect: statehouse_policy::Dialect::Sdk,
        timestamp: Some(TIMESTAMP.to_owned()),
        fencing_token: None,
        client: Some(client.peer.client.to_string()),
        now: NOW_MS,
    };
    let mut host = Native {
        transaction: &mut transaction,
        payload,
    };
    black_box(policy.handle(&mut host, &request));
    transaction.commit().0
}

fn policy_call(c: &mut Criterion) {
    let engine = Engine::new().expect("an engine");
    let policy = Arc::new(engine.load(STANDARD_POLICY).expect("the standard policy"));
    let mut instance = Instance::new(policy);
    let standard = statehouse_guest::Standard::configure(&[]).expect("no options are fine");
    let client = Client {
        peer: Peer::numbered("bench", 1),
        properties: Properties::default(),
    };
    for (size, bytes) in [("64 B", 64), ("4 KiB", 4096)] {
        let value = vec![b'v'; bytes];
        let set = Bytes::from(resp::request(&[b"SET", b"bench/key", &value]));
        let get = Bytes::from(resp::request(&[b"GET", b"bench/key"]));
        for (command, payload) in [("GET", &get), ("SET", &set)] {
            let mut group = c.benchmark_group(format!("{command} {size}"));
            group.throughput(Throughput::Elements(1));
            // Each call takes the state and returns it, as in the store.
            let mut state = Some(sandboxed(&mut instance, Box::default(), &client, &set));
            group.bench_function("native", |b| {
                b.iter(|| {
                    let lent = state.take().expect("every call returns the state");
                    state = Some(native(&standard, lent, &client, payload));
                });
            });
            group.bench_function("component", |b| {
                b.iter(|| {
                    let lent = state.take().expect("every call returns the state");
                    state = Some(sandboxed(&mut instance, lent, &client, payload));
                });
            });
            group.finish();
        }
    }
}

criterion_group!(benches, policy_call);
criterion_main!(benches);
