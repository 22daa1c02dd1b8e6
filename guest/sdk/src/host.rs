//! What a policy may ask of the host.

use crate::bindings::statehouse::policy::{log, property, seeded, table, watch};
use crate::{Access, Bytes, Entry, Fault, Hlc, Level, Page, Stamp};

/// The host as a policy sees it: the imports of the contract, as a trait, so that the same policy runs in
/// a component over [`Imports`], in tests over a table in memory, and natively in the host's benchmarks.
///
/// A [`Bytes::Span`] names bytes of the current payload. In a component it costs nothing to pass, where
/// `Bytes::Owned` is copied: prefer it for keys and values. Every call costs about as much as a list.
pub trait Host {
    /// The entry under `key`, without its value. The first touch of a key says what it is touched for; this
    /// is where the client's rights are checked. An expired entry is absent.
    ///
    /// # Errors
    ///
    /// [`Fault::Denied`] where the client lacks the right, [`Fault::Other`] with a text to answer.
    fn head(&mut self, key: &Bytes, access: Access) -> Result<Option<Entry>, Fault>;

    /// A part of a value, for policies that look inside; shorter than `len` at the end of the value.
    ///
    /// # Errors
    ///
    /// As [`head`](Host::head); needs the right to read.
    fn load(&mut self, key: &Bytes, at: u32, len: u32) -> Result<Option<Vec<u8>>, Fault>;

    /// Whether there is an entry and its value equals `value`. The bytes stay in the host.
    ///
    /// # Errors
    ///
    /// As [`head`](Host::head); needs the right to write.
    fn matches(&mut self, key: &Bytes, value: &Bytes) -> Result<bool, Fault>;

    /// Stages a write and gives its version: the HLC receive update (Kulkarni et al. 2014, figure 5) of the
    /// store's clock with `observed`. `expires` is a time of the store, not a span.
    ///
    /// # Errors
    ///
    /// [`Fault::Quota`] where the table is full; else as [`head`](Host::head), with the right to write.
    fn put(
        &mut self,
        key: &Bytes,
        value: &Bytes,
        observed: Option<Stamp>,
        fence: Option<&Hlc>,
        expires: Option<u64>,
    ) -> Result<Stamp, Fault>;

    /// Stages a deletion; says whether there was an entry.
    ///
    /// # Errors
    ///
    /// As [`head`](Host::head); needs the right to write.
    fn delete(&mut self, key: &Bytes) -> Result<bool, Fault>;

    /// Readable keys that start with `prefix`, in order, from `cursor` on.
    ///
    /// # Errors
    ///
    /// [`Fault::Other`] where `cursor` is not one that the host gave.
    fn keys(&mut self, prefix: &Bytes, cursor: Option<&[u8]>, limit: u32) -> Result<Page, Fault>;

    /// Registers the requesting connection for changes of `key`; again is no error.
    ///
    /// # Errors
    ///
    /// [`Fault::Quota`] where there are too many; else as [`head`](Host::head), with the right to read.
    fn watch(&mut self, key: &Bytes) -> Result<(), Fault>;

    /// Ends a registration; says whether there was one.
    ///
    /// # Errors
    ///
    /// As [`head`](Host::head); needs the right to read.
    fn unwatch(&mut self, key: &Bytes) -> Result<bool, Fault>;

    /// A user property of the request that the request itself does not carry: the first of that name.
    fn property(&mut self, name: &str) -> Option<String>;

    /// Whether a line of this level would be kept.
    fn log_enabled(&mut self, level: Level) -> bool;

    /// Writes a line to the host's log: rate-limited, and silent where a request is run again.
    fn log(&mut self, level: Level, message: &str);

    /// Adds to a counter of the metrics page.
    fn count(&mut self, name: &str, by: u64);

    /// Bytes derived from the request's identity, the same whenever it is run again. No secret.
    fn random(&mut self, len: u32) -> Vec<u8>;
}

/// The imports of the component. Outside of WebAssembly there is no host behind it and every call panics.
#[derive(Debug, Default)]
pub struct Imports;

impl Host for Imports {
    fn head(&mut self, key: &Bytes, access: Access) -> Result<Option<Entry>, Fault> {
        table::head(key, access)
    }

    fn load(&mut self, key: &Bytes, at: u32, len: u32) -> Result<Option<Vec<u8>>, Fault> {
        table::load(key, at, len)
    }

    fn matches(&mut self, key: &Bytes, value: &Bytes) -> Result<bool, Fault> {
        table::matches(key, value)
    }

    fn put(
        &mut self,
        key: &Bytes,
        value: &Bytes,
        observed: Option<Stamp>,
        fence: Option<&Hlc>,
        expires: Option<u64>,
    ) -> Result<Stamp, Fault> {
        table::put(key, value, observed, fence, expires)
    }

    fn delete(&mut self, key: &Bytes) -> Result<bool, Fault> {
        table::delete(key)
    }

    fn keys(&mut self, prefix: &Bytes, cursor: Option<&[u8]>, limit: u32) -> Result<Page, Fault> {
        table::keys(prefix, cursor, limit)
    }

    fn watch(&mut self, key: &Bytes) -> Result<(), Fault> {
        watch::add(key)
    }

    fn unwatch(&mut self, key: &Bytes) -> Result<bool, Fault> {
        watch::remove(key)
    }

    fn property(&mut self, name: &str) -> Option<String> {
        property::get(name)
    }

    fn log_enabled(&mut self, level: Level) -> bool {
        log::enabled(level)
    }

    fn log(&mut self, level: Level, message: &str) {
        log::write(level, message);
    }

    fn count(&mut self, name: &str, by: u64) {
        log::count(name, by);
    }

    fn random(&mut self, len: u32) -> Vec<u8> {
        seeded::random(len)
    }
}
