//! The interface between a policy and its host.

use crate::bindings::statehouse::policy::{follow, log, property, seeded, table, watch};
use crate::{Access, Bytes, Entry, Fault, Hlc, Level, Page, Reached, Scope, Stamp};

/// The imports of the contract as a trait. The same policy runs in a component with [`Imports`], in
/// tests with a table in memory, and natively in the host's benchmarks.
///
/// A [`Bytes::Span`] refers to bytes of the current payload. In a component it is passed without a
/// copy, while `Bytes::Owned` is copied, so prefer spans for keys and values. Every call costs
/// about as much as passing a list.
pub trait Host {
    /// The entry of `key`, without its value. The first access to a key names the purpose, and the
    /// host checks the client's right to it. An expired entry is absent.
    ///
    /// # Errors
    ///
    /// [`Fault::Denied`] if the client lacks the right, [`Fault::Other`] with the error text of the
    /// reply.
    fn head(&mut self, key: &Bytes, access: Access) -> Result<Option<Entry>, Fault>;

    /// Part of a value, for policies that examine values; shorter than `len` at the end of the
    /// value.
    ///
    /// # Errors
    ///
    /// As [`head`](Host::head); needs the right to read.
    fn load(&mut self, key: &Bytes, at: u32, len: u32) -> Result<Option<Vec<u8>>, Fault>;

    /// Whether the key has an entry with this value. The stored bytes stay in the host.
    ///
    /// # Errors
    ///
    /// As [`head`](Host::head); needs the right to write.
    fn matches(&mut self, key: &Bytes, value: &Bytes) -> Result<bool, Fault>;

    /// Stages a write and returns its version: the HLC receive update (Kulkarni et al. 2014, figure
    /// 5) of the store's clock with `observed`. `expires` is a point in the store's time, not a
    /// duration.
    ///
    /// # Errors
    ///
    /// [`Fault::Quota`] if the table is full; otherwise as [`head`](Host::head), with the right to
    /// write.
    fn put(
        &mut self,
        key: &Bytes,
        value: &Bytes,
        observed: Option<Stamp>,
        fence: Option<&Hlc>,
        expires: Option<u64>,
    ) -> Result<Stamp, Fault>;

    /// Stages a deletion; returns whether the key had an entry.
    ///
    /// # Errors
    ///
    /// As [`head`](Host::head); needs the right to write.
    fn delete(&mut self, key: &Bytes) -> Result<bool, Fault>;

    /// Readable keys that start with `prefix`, in order, from `cursor` on.
    ///
    /// # Errors
    ///
    /// [`Fault::Other`] if `cursor` cannot be one of this prefix.
    fn keys(&mut self, prefix: &Bytes, cursor: Option<&[u8]>, limit: u32) -> Result<Page, Fault>;

    /// Makes the requesting connection a watcher of `key`; repeating it is no error. The watch
    /// reports changes of later requests.
    ///
    /// # Errors
    ///
    /// [`Fault::Quota`] if there are too many watches; otherwise as [`head`](Host::head), with the
    /// right to read.
    fn watch(&mut self, key: &Bytes) -> Result<(), Fault>;

    /// Removes a watch; returns whether there was one. It still reports the changes of this
    /// request. This needs no right.
    ///
    /// # Errors
    ///
    /// None at present.
    fn unwatch(&mut self, key: &Bytes) -> Result<bool, Fault>;

    /// Makes the requesting connection a watcher of a key, as [`watch`](Host::watch) does, or of
    /// all keys with a prefix. Returns the version of the store's last change, which may be one of
    /// this request. A change of a key that the client may not read is not reported.
    ///
    /// # Errors
    ///
    /// As [`watch`](Host::watch). [`Fault::Other`] if the prefix is too long.
    fn follow(&mut self, scope: Scope, key: &Bytes) -> Result<Stamp, Fault>;

    /// Sends the notifications of the changes after `since` to the client, before the reply, and
    /// makes it a watcher if these are all. Changes that this request has made are among them. One
    /// request may do this once.
    ///
    /// # Errors
    ///
    /// As [`follow`](Host::follow). [`Fault::Other`] if the host does not know all changes after
    /// `since`.
    fn follow_since(&mut self, scope: Scope, key: &Bytes, since: Stamp) -> Result<Reached, Fault>;

    /// Removes such a watch; returns whether there was one. This needs no right.
    ///
    /// # Errors
    ///
    /// None at present.
    fn unfollow(&mut self, scope: Scope, key: &Bytes) -> Result<bool, Fault>;

    /// A user property of the request that is not a field of [`Request`](crate::Request): the first
    /// of that name.
    fn property(&mut self, name: &str) -> Option<String>;

    /// Whether the host keeps lines of this level. It keeps those of all levels: an answer that
    /// depended on a setting could make a re-execution differ.
    fn log_enabled(&mut self, level: Level) -> bool;

    /// Writes a line to the host's log. It is rate-limited, and re-executions write nothing.
    fn log(&mut self, level: Level, message: &str);

    /// Increases a counter on the metrics page.
    fn count(&mut self, name: &str, by: u64);

    /// Bytes derived from the request's identity, the same in every re-execution. They are not
    /// secret.
    fn random(&mut self, len: u32) -> Vec<u8>;
}

/// The imports of the component. On other targets than WebAssembly there is no host, and every call
/// panics.
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

    fn follow(&mut self, scope: Scope, key: &Bytes) -> Result<Stamp, Fault> {
        follow::add(scope, key)
    }

    fn follow_since(&mut self, scope: Scope, key: &Bytes, since: Stamp) -> Result<Reached, Fault> {
        follow::add_since(scope, key, since)
    }

    fn unfollow(&mut self, scope: Scope, key: &Bytes) -> Result<bool, Fault> {
        follow::remove(scope, key)
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
