//! The imports of a policy: what the host answers while a guest runs.
//!
//! What enters: calls from the guest, all of it hostile. What leaves: what a [`Host`] says. Spans
//! are resolved here, so that a [`Host`] only ever sees slices that exist.

use std::sync::Arc;

use super::budget::Bounds;
use bytes::Bytes;

use super::bindings::statehouse::policy::{log, property, seeded, table, types, watch};
use super::counters::Counters;
use super::{Access, Entry, Fault, Given, Hlc, Page, Span, Stamp};
use crate::{clock, limits};

/// What a policy can do to the world: read and stage, within one request.
pub trait Host: Send + 'static {
    /// Opens a key for an access and says what it holds. Must be its first touch.
    fn head(&mut self, key: &[u8], access: Access) -> Result<Option<Entry>, Denial>;
    /// A part of a value.
    fn load(&mut self, key: &[u8], at: u32, len: u32) -> Result<Option<Bytes>, Denial>;
    /// Whether the key exists and its value equals `value`.
    fn matches(&mut self, key: &[u8], value: &[u8]) -> Result<bool, Denial>;
    /// Stages a write and stamps it.
    fn put(&mut self, put: Put<'_>) -> Result<clock::Stamp, Denial>;
    /// Stages a removal; false where there was nothing.
    fn delete(&mut self, key: &[u8]) -> Result<bool, Denial>;
    /// A page of keys in order.
    fn keys(&mut self, prefix: &[u8], cursor: Option<&[u8]>, limit: u32) -> Result<Page, Denial>;
    /// Stages a watch of the requesting connection.
    fn watch(&mut self, key: &[u8]) -> Result<(), Denial>;
    /// Stages the end of one; false where there was none.
    fn unwatch(&mut self, key: &[u8]) -> Result<bool, Denial>;
    /// The first user property of that name.
    fn property(&mut self, name: &str) -> Option<String>;
    /// The next `len` bytes of the request's own pseudo-random stream.
    fn random(&mut self, len: usize) -> Vec<u8>;
    /// Whether this is a run of something that ran before: it says nothing to anybody.
    fn is_rerun(&self) -> bool;
    /// The store's time, for the log's rate limit only.
    fn now_ms(&self) -> u64;
    /// What a call may burn, beside the part for each byte of its payload.
    fn fuel_max(&self) -> u64;
}

/// A write as a policy asks for it.
pub struct Put<'a> {
    /// Its key.
    pub key: &'a [u8],
    /// Its value.
    pub value: &'a [u8],
    /// The clock reading that the new version must exceed.
    pub observed: Option<clock::Stamp>,
    /// The fence that the entry carries from now on.
    pub fence: Option<clock::Fence>,
    /// When it is gone, in the store's milliseconds.
    pub expires_ms: Option<u64>,
}

/// Why an import does not do what it was asked for.
#[derive(Debug)]
pub enum Denial {
    /// The guest is told and formats the error.
    Fault(Fault),
    /// The guest broke the contract: the call ends as a trap.
    Violation(&'static str),
}

/// What an instance may do at the moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Phase {
    /// `describe` and `configure`: nothing but logging.
    Setup,
    /// `handle`: everything.
    Handle,
    /// `notify`: reading only, since what it describes is already decided.
    Notify,
}

/// The data of a wasmtime store: the host of the current call and the instance's own bounds.
pub(super) struct Guest<H> {
    pub(super) host: Option<H>,
    /// What spans point into: the payload, or in `notify` the key.
    pub(super) bytes: Bytes,
    pub(super) phase: Phase,
    pub(super) bounds: Bounds,
    pub(super) counters: Arc<Counters>,
    /// The store's time, for the log's rate limit only; zero where nobody knows it.
    pub(super) now_ms: u64,
    /// What was said the first time is not said again.
    pub(super) silent: bool,
}

impl<H: Host> Guest<H> {
    pub(super) fn new(counters: Arc<Counters>, now_ms: u64, silent: bool) -> Self {
        Self {
            host: None,
            bytes: Bytes::new(),
            phase: Phase::Setup,
            bounds: Bounds::default(),
            counters,
            now_ms,
            silent,
        }
    }

    fn touch(&mut self, writes: bool) -> wasmtime::Result<&mut H> {
        if writes && self.phase == Phase::Notify {
            return Err(violation(
                "a write during notify, when everything is decided",
            ));
        }
        match &mut self.host {
            Some(host) if self.phase != Phase::Setup => Ok(host),
            _ => Err(violation("a touch of the table outside a request")),
        }
    }

    /// The bytes that a guest named. A span costs a reference count, never a copy.
    fn resolve(&self, given: Given) -> wasmtime::Result<Bytes> {
        match given {
            Given::Span(span) => slice(&self.bytes, span).ok_or_else(outside),
            Given::Owned(bytes) => Ok(Bytes::from(bytes)),
        }
    }
}

/// The part of `bytes` that a span names, if it lies within.
pub(super) fn slice(bytes: &Bytes, span: Span) -> Option<Bytes> {
    let at = span.at as usize;
    let end = at.checked_add(span.len as usize)?;
    (end <= bytes.len()).then(|| bytes.slice(at..end))
}

fn outside() -> wasmtime::Error {
    violation("a span outside the call's bytes")
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
        let key = self.resolve(key)?;
        answer(self.touch(false)?.head(&key, access))
    }

    fn load(
        &mut self,
        key: Given,
        at: u32,
        len: u32,
    ) -> wasmtime::Result<Result<Option<Vec<u8>>, Fault>> {
        let key = self.resolve(key)?;
        let loaded = answer(self.touch(false)?.load(&key, at, len))?;
        Ok(loaded.map(|part| part.map(Vec::from)))
    }

    fn matches(&mut self, key: Given, value: Given) -> wasmtime::Result<Result<bool, Fault>> {
        let (key, value) = (self.resolve(key)?, self.resolve(value)?);
        answer(self.touch(false)?.matches(&key, &value))
    }

    fn put(
        &mut self,
        key: Given,
        value: Given,
        observed: Option<Stamp>,
        fence: Option<Hlc>,
        expires_ms: Option<u64>,
    ) -> wasmtime::Result<Result<Stamp, Fault>> {
        let (key, value) = (self.resolve(key)?, self.resolve(value)?);
        let put = Put {
            key: &key,
            value: &value,
            observed: observed.map(Into::into),
            fence: fence.map(Into::into),
            expires_ms,
        };
        answer(self.touch(true)?.put(put).map(Into::into))
    }

    fn delete(&mut self, key: Given) -> wasmtime::Result<Result<bool, Fault>> {
        let key = self.resolve(key)?;
        answer(self.touch(true)?.delete(&key))
    }

    fn keys(
        &mut self,
        prefix: Given,
        cursor: Option<Vec<u8>>,
        limit: u32,
    ) -> wasmtime::Result<Result<Page, Fault>> {
        let prefix = self.resolve(prefix)?;
        answer(self.touch(false)?.keys(&prefix, cursor.as_deref(), limit))
    }
}

impl<H: Host> watch::Host for Guest<H> {
    fn add(&mut self, key: Given) -> wasmtime::Result<Result<(), Fault>> {
        let key = self.resolve(key)?;
        answer(self.touch(true)?.watch(&key))
    }

    fn remove(&mut self, key: Given) -> wasmtime::Result<Result<bool, Fault>> {
        let key = self.resolve(key)?;
        answer(self.touch(true)?.unwatch(&key))
    }
}

impl<H: Host> property::Host for Guest<H> {
    fn get(&mut self, name: String) -> wasmtime::Result<Option<String>> {
        Ok(self.touch(false)?.property(&name))
    }
}

impl<H: Host> log::Host for Guest<H> {
    fn enabled(&mut self, level: log::Level) -> wasmtime::Result<bool> {
        Ok(match level {
            log::Level::Debug => tracing::enabled!(tracing::Level::DEBUG),
            log::Level::Info => tracing::enabled!(tracing::Level::INFO),
            log::Level::Warn => tracing::enabled!(tracing::Level::WARN),
            log::Level::Error => tracing::enabled!(tracing::Level::ERROR),
        })
    }

    fn write(&mut self, level: log::Level, message: String) -> wasmtime::Result<()> {
        if self.silent || !self.counters.may_log(self.now_ms) {
            return Ok(());
        }
        let end = message.floor_char_boundary(limits::GUEST_LOG_BYTES_MAX);
        // Escaped, so that a message cannot look like a line of the host.
        let (message, policy) = (message[..end].escape_debug(), &*self.counters.policy);
        match level {
            log::Level::Debug => tracing::debug!(policy, "{message}"),
            log::Level::Info => tracing::info!(policy, "{message}"),
            log::Level::Warn => tracing::warn!(policy, "{message}"),
            log::Level::Error => tracing::error!(policy, "{message}"),
        }
        Ok(())
    }

    fn count(&mut self, name: String, by: u64) -> wasmtime::Result<()> {
        if !self.silent {
            self.counters.add(&name, by);
        }
        Ok(())
    }
}

impl<H: Host> seeded::Host for Guest<H> {
    fn random(&mut self, len: u32) -> wasmtime::Result<Vec<u8>> {
        if len > limits::RANDOM_BYTES_MAX {
            return Err(violation(
                "a draw of more random bytes than a policy may ask for",
            ));
        }
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
