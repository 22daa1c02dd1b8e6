//! Memory of packets that have begun to arrive and are not whole, of all connections together.
//!
//! In come read buffers as they are; out goes whether there is room for them. What small packets take is not counted: their
//! connections touch nothing that is shared, and go on where large packets of others take all the room.

use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use bytes::BytesMut;

use crate::limits::{ARRIVING_BYTES_FREE, IDLE_BUFFER_BYTES_MAX};

/// What all connections hold, in bytes.
#[derive(Debug, Default)]
pub(crate) struct Arriving(AtomicUsize);

/// What one of them holds, until it is dropped.
#[derive(Debug)]
pub(crate) struct Share<'a> {
    all: &'a AtomicUsize,
    bytes: usize,
}

impl Arriving {
    /// That of a connection that holds nothing yet.
    pub(crate) fn share(&self) -> Share<'_> {
        Share {
            all: &self.0,
            bytes: 0,
        }
    }
}

/// What a read buffer counts, whose allocation is so large. What small packets take does not count.
pub(crate) fn counted(buffer: &BytesMut, allocated_bytes: usize) -> usize {
    match buffer.len() > ARRIVING_BYTES_FREE || allocated_bytes > IDLE_BUFFER_BYTES_MAX {
        true => allocated_bytes.max(buffer.capacity()),
        false => 0,
    }
}

impl Share<'_> {
    /// Counts what a connection holds by now. False: it has grown, and all together hold more than they may.
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

    /// Whether all together hold more than they may, and this one some of it.
    pub(crate) fn is_over(&self, bytes_max: impl FnOnce() -> usize) -> bool {
        self.bytes > 0 && self.all.load(Relaxed) > bytes_max()
    }
}

impl Drop for Share<'_> {
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
    fn who_grows_beyond_what_all_may_hold_does_not_fit_until_others_have_gone() {
        let all = Arriving::default();
        let (mut one, mut other) = (all.share(), all.share());
        assert!(one.fits(60_000, || 100_000));
        assert!(!other.fits(60_000, || 100_000));
        assert!(other.fits(60_000, || 100_000), "it has not grown");
        drop(other);
        let mut other = all.share();
        assert!(other.fits(30_000, || 100_000));
        assert!(one.fits(0, || 0), "its packet is whole");
        drop((one, other));
        assert_eq!(all.0.load(Relaxed), 0);
    }

    #[test]
    fn small_packets_always_fit() {
        let all = Arriving::default();
        let fits = |len| all.share().fits(counted(&buffer(len), 0), || 0);
        assert!(fits(ARRIVING_BYTES_FREE));
        assert!(!fits(ARRIVING_BYTES_FREE + 1));
    }
}
