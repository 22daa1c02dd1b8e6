//! The imports of a policy, which the host executes while the guest runs.
//!
//! All input of the guest is hostile. Spans are resolved here, so that a [`Host`] sees only valid
//! slices.
//!
//! Invariant: every import must be charged for each byte that it copies and each key that it
//! examines, before it handles the next. Otherwise a loop over a cheap call would block the store
//! for as long as the watchdog allows. The charge must depend on bytes and on the table, never on
//! time.

use std::sync::Arc;

use super::budget::{Account, Bounds};
use bytes::Bytes;

use super::bindings::statehouse::policy::{follow, log, property, seeded, table, types, watch};
use super::counters::Counters;
use super::lines::on_one_line;
use super::{Access, Entry, Fault, Given, Hlc, Page, Scope, Span, Stamp};
use crate::{clock, limits};

/// The effects of a policy within one request: reads and staged writes.
pub trait Host: Send + 'static {
    /// Opens a key and returns its metadata. Must be the first access to the key in the request.
    fn head(&mut self, key: &[u8], access: Access) -> Result<Option<Entry>, Denial>;
    /// A part of a value.
    fn load(&mut self, key: &[u8], at: u32, len: u32) -> Result<Option<Bytes>, Denial>;
    /// Whether the key exists and its value equals `value`.
    fn matches(&mut self, key: &[u8], value: &[u8]) -> Result<bool, Denial>;
    /// Stages a write and returns its version.
    fn put(&mut self, put: Put<'_>) -> Result<clock::Stamp, Denial>;
    /// Stages a removal. Returns false if the key is absent.
    fn delete(&mut self, key: &[u8]) -> Result<bool, Denial>;
    /// A page of keys in order.
    fn keys(&mut self, prefix: &[u8], cursor: Option<&[u8]>, limit: u32) -> Result<Page, Denial>;
    /// Stages a watch of the requesting connection.
    fn watch(&mut self, key: &[u8]) -> Result<(), Denial>;
    /// Stages the end of a watch. Returns false if there is none.
    fn unwatch(&mut self, key: &[u8]) -> Result<bool, Denial>;
    /// Stages a watch of a key or of a prefix. Returns the version of the last change, staged or
    /// not.
    fn follow(&mut self, scope: Scope, key: &[u8]) -> Result<clock::Stamp, Denial>;
    /// Stages notifications of the changes after `since`, the staged ones included, and a watch if
    /// these are all.
    fn follow_since(
        &mut self,
        scope: Scope,
        key: &[u8],
        since: clock::Stamp,
    ) -> Result<Reached, Denial>;
    /// Stages the end of such a watch. Returns false if there is none.
    fn unfollow(&mut self, scope: Scope, key: &[u8]) -> Result<bool, Denial>;
    /// The first user property with this name.
    fn property(&mut self, name: &str) -> Option<String>;
    /// The next `len` bytes of the request's pseudo-random stream.
    fn random(&mut self, len: usize) -> Vec<u8>;
    /// Whether the store may have assigned this version, as far as clock and counter tell.
    fn may_have_assigned(&self, version: clock::Stamp) -> bool;
    /// Whether this is a re-execution, which must not log or count anything.
    fn is_rerun(&self) -> bool;
    /// The time, used only for the rate limit of the log.
    fn now_ms(&self) -> u64;
    /// The fuel of a call, in addition to the fuel for each payload byte.
    fn fuel_max(&self) -> u64;
    /// Returns and resets the number of keys and patterns that the host examined for this call. A
    /// re-execution examines no more than the original.
    fn take_examined(&mut self) -> u64;
}

/// How far the changes that a client missed were sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Reached {
    /// All changes up to this version were sent.
    pub version: clock::Stamp,
    /// Whether these are all, so that the watch begins.
    pub complete: bool,
}

/// A write that a policy requests.
pub struct Put<'a> {
    /// The key.
    pub key: &'a [u8],
    /// The value.
    pub value: &'a [u8],
    /// A stamp that the new version must exceed.
    pub observed: Option<clock::Stamp>,
    /// The new fence of the entry.
    pub fence: Option<clock::Fence>,
    /// When the entry expires, in milliseconds.
    pub expires_ms: Option<u64>,
}

/// Why an import failed.
#[derive(Debug)]
pub enum Denial {
    /// The guest gets the error and formats it.
    Fault(Fault),
    /// The guest violated the contract: the call ends as a trap.
    Violation(&'static str),
}

/// The phase of a call, which determines the allowed imports.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Phase {
    /// `describe` and `configure`: only logging is allowed.
    Setup,
    /// `handle`: everything is allowed.
    Handle,
    /// `notify`: only reads are allowed, because the changes are already decided.
    Notify,
}

/// The data of a wasmtime store: the host of the current call, and the limits of the instance.
pub(super) struct Guest<H> {
    pub(super) host: Option<Box<H>>,
    /// The target of spans: the payload, or in `notify` the key.
    pub(super) bytes: Bytes,
    pub(super) phase: Phase,
    pub(super) bounds: Bounds,
    /// The cost of the host's work for the current call.
    pub(super) account: Account,
    pub(super) counters: Arc<Counters>,
    /// The time, used only for the rate limit of the log; zero if unknown.
    pub(super) now_ms: u64,
    /// Set in a re-execution, so that nothing is logged or counted twice.
    pub(super) silent: bool,
    /// The last line at the level `error` of the current call, escaped. It explains a trap.
    pub(super) cause: Option<String>,
}

impl<H: Host> Guest<H> {
    pub(super) fn new(counters: Arc<Counters>, now_ms: u64, silent: bool) -> Self {
        Self {
            host: None,
            bytes: Bytes::new(),
            phase: Phase::Setup,
            bounds: Bounds::default(),
            account: Account::of(limits::FUEL_SETUP),
            counters,
            now_ms,
            silent,
            cause: None,
        }
    }

    fn touch(&mut self, writes: bool) -> wasmtime::Result<&mut H> {
        if writes && self.phase == Phase::Notify {
            return Err(violation("a write during notify, which may only read"));
        }
        match &mut self.host {
            Some(host) if self.phase != Phase::Setup => Ok(host),
            _ => Err(violation("an access to the table outside of a request")),
        }
    }

    /// The bytes that the guest refers to. A span costs a reference count and no copy.
    fn resolve(&self, given: Given) -> wasmtime::Result<Bytes> {
        match given {
            Given::Span(span) => slice(&self.bytes, span).ok_or_else(outside),
            Given::Owned(bytes) => Ok(Bytes::from(bytes)),
        }
    }

    /// Resolves a key and charges the import for it.
    fn key(&mut self, given: Given) -> wasmtime::Result<Bytes> {
        let key = self.resolve(given)?;
        self.account.import(key.len())?;
        Ok(key)
    }

    /// Resolves a value and charges for it.
    fn value(&mut self, given: Given) -> wasmtime::Result<Bytes> {
        let value = self.resolve(given)?;
        self.account.moved(value.len())?;
        Ok(value)
    }

    /// Executes an import, if the phase allows it, and charges for the keys that it examined.
    fn ask<T>(
        &mut self,
        writes: bool,
        import: impl FnOnce(&mut H) -> Result<T, Denial>,
    ) -> wasmtime::Result<Result<T, Fault>> {
        let host = self.touch(writes)?;
        let result = import(host);
        let examined = host.take_examined();
        self.account.examined(examined)?;
        answer(result)
    }
}

/// The part of `bytes` that a span refers to, if it is in range.
pub(super) fn slice(bytes: &Bytes, span: Span) -> Option<Bytes> {
    let at = span.at as usize;
    let end = at.checked_add(span.len as usize)?;
    (end <= bytes.len()).then(|| bytes.slice(at..end))
}

fn outside() -> wasmtime::Error {
    violation("a span outside of the call's bytes")
}

fn violation(what: &'static str) -> wasmtime::Error {
    wasmtime::Error::msg(what)
}

fn answer<T>(result: Result<T, Denial>) -> wasmtime::Result<Result<T, Fault>> {
    match result {
        Ok(value) => Ok(Ok(value)),
        Err(Denial::Fault(fault)) => Ok(Err(fault)),
        Err(Denial::Violation(what)) => Err(violation(what)),
    }
}

impl<H: Host> types::Host for Guest<H> {}

impl<H: Host> table::Host for Guest<H> {
    fn head(
        &mut self,
        key: Given,
        access: Access,
    ) -> wasmtime::Result<Result<Option<Entry>, Fault>> {
        let key = self.key(key)?;
        self.ask(false, |host| host.head(&key, access))
    }

    fn load(
        &mut self,
        key: Given,
        at: u32,
        len: u32,
    ) -> wasmtime::Result<Result<Option<Vec<u8>>, Fault>> {
        let key = self.key(key)?;
        let loaded = self.ask(false, |host| host.load(&key, at, len))?;
        if let Ok(Some(part)) = &loaded {
            self.account.moved(part.len())?;
        }
        Ok(loaded.map(|part| part.map(Vec::from)))
    }

    fn matches(&mut self, key: Given, value: Given) -> wasmtime::Result<Result<bool, Fault>> {
        let (key, value) = (self.key(key)?, self.value(value)?);
        self.ask(false, |host| host.matches(&key, &value))
    }

    fn put(
        &mut self,
        key: Given,
        value: Given,
        observed: Option<Stamp>,
        fence: Option<Hlc>,
        expires_ms: Option<u64>,
    ) -> wasmtime::Result<Result<Stamp, Fault>> {
        let (key, value) = (self.key(key)?, self.value(value)?);
        let node = fence.as_ref().map_or(0, |fence| fence.node.len());
        self.account.moved(node)?;
        let put = Put {
            key: &key,
            value: &value,
            observed: observed.map(Into::into),
            fence: fence.map(Into::into),
            expires_ms,
        };
        let stamped = self.ask(true, |host| host.put(put))?;
        Ok(stamped.map(Into::into))
    }

    fn delete(&mut self, key: Given) -> wasmtime::Result<Result<bool, Fault>> {
        let key = self.key(key)?;
        self.ask(true, |host| host.delete(&key))
    }

    fn keys(
        &mut self,
        prefix: Given,
        cursor: Option<Vec<u8>>,
        limit: u32,
    ) -> wasmtime::Result<Result<Page, Fault>> {
        let prefix = self.key(prefix)?;
        self.account.moved(cursor.as_ref().map_or(0, Vec::len))?;
        let page = self.ask(false, |host| host.keys(&prefix, cursor.as_deref(), limit))?;
        if let Ok(page) = &page {
            let keys: usize = page.keys.iter().map(Vec::len).sum();
            self.account.moved(keys)?;
        }
        Ok(page)
    }
}

impl<H: Host> watch::Host for Guest<H> {
    fn add(&mut self, key: Given) -> wasmtime::Result<Result<(), Fault>> {
        let key = self.key(key)?;
        self.ask(true, |host| host.watch(&key))
    }

    fn remove(&mut self, key: Given) -> wasmtime::Result<Result<bool, Fault>> {
        let key = self.key(key)?;
        self.ask(true, |host| host.unwatch(&key))
    }
}

impl<H: Host> follow::Host for Guest<H> {
    fn add(&mut self, scope: Scope, key: Given) -> wasmtime::Result<Result<Stamp, Fault>> {
        let key = self.key(key)?;
        let version = self.ask(true, |host| host.follow(scope, &key))?;
        Ok(version.map(Into::into))
    }

    fn add_since(
        &mut self,
        scope: Scope,
        key: Given,
        since: Stamp,
    ) -> wasmtime::Result<Result<follow::Reached, Fault>> {
        let key = self.key(key)?;
        let reached = self.ask(true, |host| host.follow_since(scope, &key, since.into()))?;
        Ok(reached.map(|it| follow::Reached {
            version: it.version.into(),
            complete: it.complete,
        }))
    }

    fn remove(&mut self, scope: Scope, key: Given) -> wasmtime::Result<Result<bool, Fault>> {
        let key = self.key(key)?;
        self.ask(true, |host| host.unfollow(scope, &key))
    }
}

impl<H: Host> property::Host for Guest<H> {
    fn get(&mut self, name: String) -> wasmtime::Result<Option<String>> {
        self.account.import(name.len())?;
        let host = self.touch(false)?;
        let (value, examined) = (host.property(&name), host.take_examined());
        self.account.examined(examined)?;
        self.account.moved(value.as_ref().map_or(0, String::len))?;
        Ok(value)
    }
}

impl<H: Host> log::Host for Guest<H> {
    /// The host keeps lines of every level for operators. The answer must not depend on the host's
    /// log filter, which is no part of the read set: a re-execution could give another response.
    fn enabled(&mut self, _level: log::Level) -> wasmtime::Result<bool> {
        self.account.import(0)?;
        Ok(true)
    }

    fn write(&mut self, level: log::Level, message: String) -> wasmtime::Result<()> {
        self.account.import(0)?;
        self.account.moved(message.len())?;
        if level == log::Level::Error {
            self.cause = Some(on_one_line(&message));
        }
        if self.silent {
            return Ok(());
        }
        self.counters.keep(level, &message);
        if !self.counters.may_log(self.now_ms) {
            return Ok(());
        }
        // Escaped, so that a message cannot imitate a log line of the host.
        let (message, policy) = (on_one_line(&message), &*self.counters.policy);
        match level {
            log::Level::Debug => tracing::debug!(policy, "{message}"),
            log::Level::Info => tracing::info!(policy, "{message}"),
            log::Level::Warn => tracing::warn!(policy, "{message}"),
            log::Level::Error => tracing::error!(policy, "{message}"),
        }
        Ok(())
    }

    fn count(&mut self, name: String, by: u64) -> wasmtime::Result<()> {
        self.account.import(name.len())?;
        if !self.silent {
            self.counters.add(&name, by);
        }
        Ok(())
    }
}

impl<H: Host> seeded::Host for Guest<H> {
    fn random(&mut self, len: u32) -> wasmtime::Result<Vec<u8>> {
        if len > limits::RANDOM_BYTES_MAX {
            return Err(violation("a request for too many random bytes"));
        }
        self.account.import(len as usize)?;
        Ok(self.touch(false)?.random(len as usize))
    }
}

impl From<clock::Stamp> for Stamp {
    fn from(stamp: clock::Stamp) -> Self {
        Self {
            wall: stamp.wall,
            counter: stamp.counter,
        }
    }
}

impl From<Stamp> for clock::Stamp {
    fn from(stamp: Stamp) -> Self {
        Self {
            wall: stamp.wall,
            counter: stamp.counter,
        }
    }
}

impl From<Hlc> for clock::Fence {
    fn from(hlc: Hlc) -> Self {
        Self {
            wall: hlc.wall,
            counter: hlc.counter,
            node: hlc.node.into(),
        }
    }
}

impl From<clock::Fence> for Hlc {
    fn from(fence: clock::Fence) -> Self {
        Self {
            wall: fence.wall,
            counter: fence.counter,
            node: fence.node.into(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::log::{Host as _, Level};
    use super::*;
    use crate::policy::{Digest, Lines};
    use crate::store::Transaction;

    #[test]
    fn policy_cannot_observe_the_log_filter() {
        let lines = Arc::<Lines>::default();
        let counters = Counters::new("policy".into(), Digest::of(b"policy"), lines);
        let mut guest = Guest::<Transaction>::new(Arc::new(counters), 0, false);
        // No subscriber is set here, so the host's filter takes no line of any level.
        for level in [Level::Debug, Level::Info, Level::Warn, Level::Error] {
            assert!(guest.enabled(level).unwrap());
        }
    }
}
