//! Limits the memory of incomplete packets of all connections together.
//!
//! Small packets are not counted. So connections that send only these touch no shared counter, and
//! continue even when large packets use up the limit.

use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use bytes::BytesMut;

use crate::limits::{ARRIVING_BYTES_FREE, IDLE_BUFFER_BYTES_MAX};

/// The bytes of incomplete packets of all connections.
#[derive(Debug, Default)]
pub(crate) struct IncompletePackets(AtomicUsize);

/// The bytes of one connection. Dropping it subtracts them from the total.
#[derive(Debug)]
pub(crate) struct ConnectionBytes<'a> {
    all: &'a AtomicUsize,
    bytes: usize,
}

impl IncompletePackets {
    /// Adds a connection without bytes.
    pub(crate) fn add_connection(&self) -> ConnectionBytes<'_> {
        ConnectionBytes {
            all: &self.0,
            bytes: 0,
        }
    }
}

/// The bytes that a read buffer with an allocation of this size counts. Small packets count
/// nothing.
pub(crate) fn counted_bytes(buffer: &BytesMut, allocated_bytes: usize) -> usize {
    match buffer.len() > ARRIVING_BYTES_FREE || allocated_bytes > IDLE_BUFFER_BYTES_MAX {
        true => allocated_bytes.max(buffer.capacity()),
        false => 0,
    }
}

impl ConnectionBytes<'_> {
    /// Sets the bytes of this connection. Returns false if they grew and the total exceeds the
    /// limit.
    pub(crate) fn fits(&mut self, now: usize, bytes_max: impl FnOnce() -> usize) -> bool {
        let before = std::mem::replace(&mut self.bytes, now);
        if now <= before {
            if now < before {
                self.all.fetch_sub(before - now, Relaxed);
            }
            return true;
        }
        let more = now - before;
        self.all.fetch_add(more, Relaxed) + more <= bytes_max()
    }

    /// Whether the total exceeds the limit and this connection has a part of it.
    pub(crate) fn is_over(&self, bytes_max: impl FnOnce() -> usize) -> bool {
        self.bytes > 0 && self.all.load(Relaxed) > bytes_max()
    }
}

impl Drop for ConnectionBytes<'_> {
    fn drop(&mut self) {
        self.all.fetch_sub(self.bytes, Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn buffer(len: usize) -> BytesMut {
        BytesMut::from(&vec![0; len][..])
    }

    #[test]
    fn growth_above_the_total_fits_after_others_end() {
        let all = IncompletePackets::default();
        let (mut one, mut other) = (all.add_connection(), all.add_connection());
        assert!(one.fits(60_000, || 100_000));
        assert!(!other.fits(60_000, || 100_000));
        assert!(other.fits(60_000, || 100_000), "it has not grown");
        drop(other);
        let mut other = all.add_connection();
        assert!(other.fits(30_000, || 100_000));
        assert!(one.fits(0, || 0), "its packet is whole");
        drop((one, other));
        assert_eq!(all.0.load(Relaxed), 0);
    }

    #[test]
    fn small_packets_always_fit() {
        let all = IncompletePackets::default();
        let fits = |len| {
            all.add_connection()
                .fits(counted_bytes(&buffer(len), 0), || 0)
        };
        assert!(fits(ARRIVING_BYTES_FREE));
        assert!(!fits(ARRIVING_BYTES_FREE + 1));
    }
}
