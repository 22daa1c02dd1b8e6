//! Measures the parts of the cost of a sandbox call: a GET of 64 B by the standard policy, with a
//! host that returns the entry at once.
//!
//! ```text
//! cargo bench -p statehouse --bench boundary
//! ```
//!
//! The benchmark calls the component as the store does. It also calls the core module inside the
//! component by hand, without the checks and conversions of the canonical ABI: it writes bytes to
//! memory that the guest allocates, and reads the answer in place. The difference is the most that
//! an interface below WIT could save. Further rows omit the fuel count and the watchdog's epoch
//! check to show their cost. Each figure is the tenth percentile of many short samples.

use std::hint::black_box;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use statehouse::STANDARD_POLICY;
use statehouse_core::clock;
use statehouse_core::policy::{
    Access, Denial, Dialect, Engine, Entry, Host, Instance, Page, Put, Reached, Request, Scope,
    Stamp,
};
use statehouse_policy::resp;
use wasmtime::{Caller, Linker, Memory, Module, Store, TypedFunc};

const SAMPLES: usize = 4_000;
const CALLS: usize = 50;
const NOW_MS: u64 = 1_700_000_000_000;
const TIMESTAMP: &str = "001700000000000:00000:bench";
const CLIENT: Option<&str> = Some("bench-0000000000000000-0");
const VALUE_BYTES: u32 = 64;
const FUEL: u64 = 4_000_000;
const TICKS: u64 = 1_000_000;

/// A host on which every key exists. It refuses all other operations.
struct OneKey;

fn refused<T>() -> Result<T, Denial> {
    Err(Denial::Violation("a GET only reads the key"))
}

impl Host for OneKey {
    fn head(&mut self, _: &[u8], _: Access) -> Result<Option<Entry>, Denial> {
        Ok(Some(Entry {
            len: VALUE_BYTES,
            version: Stamp {
                wall: NOW_MS,
                counter: 0,
            },
            fence: None,
            expires: None,
        }))
    }

    fn load(&mut self, _: &[u8], _: u32, _: u32) -> Result<Option<Bytes>, Denial> {
        refused()
    }

    fn matches(&mut self, _: &[u8], _: &[u8]) -> Result<bool, Denial> {
        refused()
    }

    fn put(&mut self, _: Put<'_>) -> Result<clock::Stamp, Denial> {
        refused()
    }

    fn delete(&mut self, _: &[u8]) -> Result<bool, Denial> {
        refused()
    }

    fn keys(&mut self, _: &[u8], _: Option<&[u8]>, _: u32) -> Result<Page, Denial> {
        refused()
    }

    fn watch(&mut self, _: &[u8]) -> Result<(), Denial> {
        refused()
    }

    fn unwatch(&mut self, _: &[u8]) -> Result<bool, Denial> {
        refused()
    }

    fn follow(&mut self, _: Scope, _: &[u8]) -> Result<clock::Stamp, Denial> {
        refused()
    }

    fn follow_since(&mut self, _: Scope, _: &[u8], _: clock::Stamp) -> Result<Reached, Denial> {
        refused()
    }

    fn unfollow(&mut self, _: Scope, _: &[u8]) -> Result<bool, Denial> {
        refused()
    }

    fn property(&mut self, _: &str) -> Option<String> {
        None
    }

    fn random(&mut self, _: usize) -> Vec<u8> {
        Vec::new()
    }

    fn may_have_assigned(&self, _: clock::Stamp) -> bool {
        true
    }

    fn is_rerun(&self) -> bool {
        false
    }

    fn now_ms(&self) -> u64 {
        NOW_MS
    }

    fn fuel_max(&self) -> u64 {
        FUEL
    }

    fn take_examined(&mut self) -> u64 {
        0
    }
}

/// The host's data of an instance.
#[derive(Default)]
struct Within {
    /// `None` until the instance exists.
    memory: Option<Memory>,
    /// Calls across the boundary in both directions.
    crossings: u32,
}

/// The core module of the standard policy, called without the component around it.
struct Core {
    store: Store<Within>,
    memory: Memory,
    allocate: TypedFunc<(u32, u32, u32, u32), u32>,
    handle: TypedFunc<Handle, u32>,
    release: TypedFunc<u32, ()>,
    fuel: bool,
    epochs: bool,
}

/// `handler.handle` in the canonical ABI: payload, dialect, three optional strings, now.
#[rustfmt::skip]
type Handle = (
    u32, u32,
    u32,
    u32, u32, u32,
    u32, u32, u32,
    u32, u32, u32,
    u64,
);

impl Core {
    fn new(fuel: bool, epochs: bool) -> wasmtime::Result<Self> {
        let mut config = statehouse_precompiled::config();
        config.consume_fuel(fuel).epoch_interruption(epochs);
        let engine = wasmtime::Engine::new(&config)?;
        let module = Module::new(&engine, core_module(STANDARD_POLICY))?;
        let mut linker = Linker::new(&engine);
        linker.func_wrap("statehouse:policy/table@1.0.0", "head", head)?;
        linker.define_unknown_imports_as_traps(&module)?;
        let mut store = Store::new(&engine, Within::default());
        fill(&mut store, fuel, epochs)?;
        let instance = linker.instantiate(&mut store, &module)?;
        let Some(memory) = instance.get_memory(&mut store, "memory") else {
            wasmtime::bail!("a policy has a memory");
        };
        store.data_mut().memory = Some(memory);
        let handler = "statehouse:policy/handler@1.0.0";
        let name = format!("{handler}#configure");
        let configure = instance.get_typed_func::<(u32, u32), u32>(&mut store, &name)?;
        let configured = configure.call(&mut store, (4, 0))?;
        let name = format!("cabi_post_{name}");
        let release = instance.get_typed_func::<u32, ()>(&mut store, &name)?;
        release.call(&mut store, configured)?;
        let name = format!("{handler}#handle");
        Ok(Self {
            allocate: instance.get_typed_func(&mut store, "cabi_realloc")?,
            handle: instance.get_typed_func(&mut store, &name)?,
            release: instance.get_typed_func(&mut store, &format!("cabi_post_{name}"))?,
            store,
            memory,
            fuel,
            epochs,
        })
    }

    /// A call into the guest that does nothing there.
    fn nothing(&mut self) -> wasmtime::Result<u32> {
        self.allocate.call(&mut self.store, (0, 0, 1, 0))
    }

    fn pass(&mut self, bytes: &[u8]) -> wasmtime::Result<(u32, u32)> {
        let len = bytes.len() as u32;
        let at = self.allocate.call(&mut self.store, (0, 0, 1, len))?;
        self.store.data_mut().crossings += 1;
        self.memory.write(&mut self.store, at as usize, bytes)?;
        Ok((at, len))
    }

    fn pass_option(&mut self, text: Option<&str>) -> wasmtime::Result<(u32, u32, u32)> {
        let Some(text) = text else {
            return Ok((0, 0, 0));
        };
        let (at, len) = self.pass(text.as_bytes())?;
        Ok((1, at, len))
    }

    fn handle(&mut self, payload: &[u8], client: Option<&str>) -> wasmtime::Result<Vec<u8>> {
        fill(&mut self.store, self.fuel, self.epochs)?;
        let payload = self.pass(payload)?;
        let timestamp = self.pass_option(Some(TIMESTAMP))?;
        let client = self.pass_option(client)?;
        #[rustfmt::skip]
        let request = (
            payload.0, payload.1,
            0,
            timestamp.0, timestamp.1, timestamp.2,
            0, 0, 0,
            client.0, client.1, client.2,
            NOW_MS,
        );
        let outcome = self.handle.call(&mut self.store, request)?;
        // The outcome begins with the head of the reply.
        let memory = self.memory.data(&self.store);
        let word = |at: u32| {
            let word = memory.get(at as usize..)?.first_chunk()?;
            Some(u32::from_le_bytes(*word))
        };
        let head = (|| {
            let (at, len) = (word(outcome)? as usize, word(outcome + 4)? as usize);
            Some(memory.get(at..at.checked_add(len)?)?.to_vec())
        })();
        self.release.call(&mut self.store, outcome)?;
        self.store.data_mut().crossings += 2;
        head.ok_or_else(|| wasmtime::Error::msg("the outcome lies outside the memory"))
    }
}

fn fill<T>(store: &mut Store<T>, fuel: bool, epochs: bool) -> wasmtime::Result<()> {
    if fuel {
        store.set_fuel(FUEL)?;
    }
    if epochs {
        store.set_epoch_deadline(TICKS);
    }
    Ok(())
}

/// `table.head` in the canonical ABI for an existing key. `at` is the address for the result.
fn head(
    mut caller: Caller<'_, Within>,
    _owned: u32,
    _key: u32,
    _key_bytes: u32,
    _access: u32,
    at: u32,
) -> wasmtime::Result<()> {
    caller.data_mut().crossings += 1;
    let Some(memory) = caller.data().memory else {
        wasmtime::bail!("no call happens before the start");
    };
    // ok, some; the entry: length, version; no fence; no expiry.
    let mut result = [0; 88];
    result[8] = 1;
    result[16..20].copy_from_slice(&VALUE_BYTES.to_le_bytes());
    result[24..32].copy_from_slice(&NOW_MS.to_le_bytes());
    memory.write(&mut caller, at as usize, &result)?;
    Ok(())
}

/// The first core module of a component, which is the policy.
fn core_module(component: &[u8]) -> &[u8] {
    const CORE_MODULE: u8 = 1;
    let mut rest = &component[8..];
    while let [id, after @ ..] = rest {
        let mut bytes = 0_usize;
        let mut read = 0;
        for byte in after {
            bytes |= usize::from(byte & 0x7f) << (7 * read);
            read += 1;
            if byte & 0x80 == 0 {
                break;
            }
        }
        let (section, left) = after[read..].split_at(bytes);
        if *id == CORE_MODULE {
            return section;
        }
        rest = left;
    }
    panic!("a component contains a core module");
}

/// Calls the component. Returns the head of the reply and the fuel used.
fn component(
    instance: &mut Instance<OneKey>,
    payload: &Bytes,
    client: Option<&str>,
) -> (Vec<u8>, u64) {
    let mut call = instance.begin(Box::new(OneKey), payload.clone());
    let outcome = call.handle(Request {
        payload,
        dialect: Dialect::Sdk,
        timestamp: Some(TIMESTAMP),
        fencing_token: None,
        client,
        now: NOW_MS,
    });
    let fuel = call.fuel_used();
    call.end();
    (outcome.expect("a GET is answered").reply.head, fuel)
}

/// Measures one call in nanoseconds.
fn measured<T>(mut call: impl FnMut() -> T) -> f64 {
    let mut samples: Vec<Duration> = (0..SAMPLES)
        .map(|_| {
            let start = Instant::now();
            (0..CALLS).for_each(|_| drop(black_box(call())));
            start.elapsed()
        })
        .collect();
    samples.sort();
    samples[SAMPLES / 10].as_secs_f64() * 1e9 / CALLS as f64
}

fn main() -> wasmtime::Result<()> {
    let payload = Bytes::from(resp::request(&[b"GET", b"bench/key"]));
    let policy = Arc::new(Engine::new()?.load(STANDARD_POLICY)?);
    let mut instance = Instance::warm(policy)?;
    let mut with_all = Core::new(true, true)?;
    let (answer, fuel) = component(&mut instance, &payload, CLIENT);
    let by_hand = with_all.handle(&payload, CLIENT)?;
    assert_eq!(by_hand, answer, "both ways lead to the same answer");
    let row = |what: &str, ns: f64| println!("{ns:6.0} ns  {what}");

    let crossings = with_all.store.data().crossings;
    println!(
        "A GET of 64 B uses {fuel} units of fuel and {crossings} crossings: an allocation for each list that is"
    );
    println!("passed in, handle, the host's head, and the release of the result.\n");
    let whole = measured(|| component(&mut instance, &payload, CLIENT));
    row("the component", whole);
    let fewer = measured(|| component(&mut instance, &payload, None));
    row("of it one string passed in", whole - fewer);
    let core = measured(|| with_all.handle(&payload, CLIENT));
    row("its core module by hand", core);
    let fewer = measured(|| with_all.handle(&payload, None));
    row("of it one string passed in", core - fewer);
    let most = whole - core;
    row("the most that an interface below WIT could save", most);
    let nothing = measured(|| with_all.nothing());
    row("a call into the guest and back that does nothing", nothing);
    let timed = |fuel, epochs| -> wasmtime::Result<f64> {
        let mut other = Core::new(fuel, epochs)?;
        Ok(measured(|| other.handle(&payload, CLIENT)))
    };
    row("by hand, without counting fuel", timed(false, true)?);
    let unwatched = timed(true, false)?;
    row("by hand, without the watchdog's epoch check", unwatched);
    row("by hand, without both", timed(false, false)?);
    Ok(())
}
