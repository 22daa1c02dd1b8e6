//! Limits the memory of incomplete packets of all connections together.
//!
//! Small packets are not counted. So connections that send only these touch no shared state, and
//! continue even when large packets use up the limit. Connections whose large packets make no
//! progress are evicted at the limit, so that they keep out no others.

use std::{
    cmp::Reverse,
    mem,
    sync::{Mutex, MutexGuard, PoisonError},
};

use bytes::BytesMut;
use rustc_hash::FxHashMap;
use statehouse_protocol::ConnectionId;
use tokio::time::Instant;

use crate::{
    limits::{ARRIVING_BYTES_FREE, IDLE_BUFFER_BYTES_MAX, SIGN_OF_LIFE_BYTES, STALLED_PACKET_TIME},
    router::SessionKey,
};

/// A connection that can be ended.
pub(crate) type Connection = (SessionKey, ConnectionId);

/// The bytes of incomplete packets of all connections.
#[derive(Debug, Default)]
pub(crate) struct IncompletePackets(Mutex<Holders>);

#[derive(Debug, Default)]
struct Holders {
    /// The number of the last connection that was added.
    last: u64,
    /// The sum over all entries.
    bytes: usize,
    /// By number. Only connections with counted bytes.
    entries: FxHashMap<u64, Holder>,
}

#[derive(Debug)]
struct Holder {
    connection: Option<Connection>,
    bytes: usize,
    progress: Instant,
}

/// The bytes of one connection. Dropping it subtracts them from the total.
#[derive(Debug)]
pub(crate) struct ConnectionBytes<'a> {
    all: &'a IncompletePackets,
    connection: Option<Connection>,
    /// Its number in the table; 0 while it never counted.
    number: u64,
    bytes: usize,
    /// Bytes that came since the last progress.
    received: usize,
    progress: Instant,
}

impl IncompletePackets {
    /// Adds a connection without bytes. It can only be evicted if it has had its CONNECT.
    pub(crate) fn add_connection(&self, connection: Option<Connection>) -> ConnectionBytes<'_> {
        ConnectionBytes {
            all: self,
            connection,
            number: 0,
            bytes: 0,
            received: 0,
            progress: Instant::now(),
        }
    }

    fn holders(&self) -> MutexGuard<'_, Holders> {
        // The code under this lock does not panic.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Holders {
    fn remove(&mut self, number: u64) -> Option<Holder> {
        let holder = self.entries.remove(&number)?;
        self.bytes -= holder.bytes;
        Some(holder)
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
    /// Notes bytes that came from the client. Enough of them are progress.
    pub(crate) fn received(&mut self, bytes: usize) {
        self.received += bytes;
    }

    /// Sets the bytes of this connection. Returns false if they grew and the total exceeds the
    /// limit.
    pub(crate) fn fits(&mut self, now: usize, bytes_max: impl FnOnce() -> usize) -> bool {
        let before = mem::replace(&mut self.bytes, now);
        if before == now && (now == 0 || self.received < SIGN_OF_LIFE_BYTES) {
            return true;
        }
        if before == 0 || now < before || self.received >= SIGN_OF_LIFE_BYTES {
            (self.progress, self.received) = (Instant::now(), 0);
        }
        let bytes_max = match now > before {
            true => bytes_max(),
            false => usize::MAX,
        };
        let all = self.all;
        let mut holders = all.holders();
        if before > 0 && holders.remove(self.number).is_none() {
            // Evicted: the connection is ending.
            self.bytes = 0;
            return true;
        }
        if now > 0 {
            if self.number == 0 {
                holders.last += 1;
                self.number = holders.last;
            }
            holders.bytes += now;
            let holder = Holder {
                connection: self.connection,
                bytes: now,
                progress: self.progress,
            };
            holders.entries.insert(self.number, holder);
        }
        now <= before || holders.bytes <= bytes_max
    }

    /// Whether the total exceeds the limit and this connection has a part of it.
    pub(crate) fn is_over(&self, bytes_max: impl FnOnce() -> usize) -> bool {
        if self.bytes == 0 {
            return false;
        }
        let bytes_max = bytes_max();
        self.all.holders().bytes > bytes_max
    }

    /// Evicts other connections without progress, the largest first, until the total is within its
    /// limit. The caller must end them. Returns `None` and evicts none if there are too few.
    pub(crate) fn evict_stalled(&self, bytes_max: usize) -> Option<Vec<Connection>> {
        let mut holders = self.all.holders();
        let now = Instant::now();
        let entries = holders.entries.iter();
        let stalled = entries.filter(|(number, holder)| {
            **number != self.number
                && now - holder.progress >= STALLED_PACKET_TIME
                // Small ones give no room.
                && holder.bytes > ARRIVING_BYTES_FREE
        });
        let mut stalled: Vec<_> = stalled
            .filter_map(|(number, it)| Some((it.progress, *number, it.connection?, it.bytes)))
            .collect();
        let bytes: usize = stalled.iter().map(|it| it.3).sum();
        if holders.bytes - bytes > bytes_max {
            return None;
        }
        stalled.sort_unstable_by_key(|it| (Reverse(it.3), it.0, it.1));
        let mut evicted = Vec::new();
        for (_, number, connection, _) in stalled {
            if holders.bytes <= bytes_max {
                break;
            }
            holders.remove(number);
            evicted.push(connection);
        }
        Some(evicted)
    }
}

impl Drop for ConnectionBytes<'_> {
    fn drop(&mut self) {
        if self.bytes > 0 {
            self.all.holders().remove(self.number);
        }
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
        let (mut one, mut other) = (all.add_connection(None), all.add_connection(None));
        assert!(one.fits(60_000, || 100_000));
        assert!(!other.fits(60_000, || 100_000));
        assert!(other.fits(60_000, || 100_000), "it has not grown");
        drop(other);
        let mut other = all.add_connection(None);
        assert!(other.fits(30_000, || 100_000));
        assert!(one.fits(0, || 0), "its packet is whole");
        drop((one, other));
        assert_eq!(all.holders().bytes, 0);
    }

    #[test]
    fn small_packets_always_fit() {
        let all = IncompletePackets::default();
        let fits = |len| {
            all.add_connection(None)
                .fits(counted_bytes(&buffer(len), 0), || 0)
        };
        assert!(fits(ARRIVING_BYTES_FREE));
        assert!(!fits(ARRIVING_BYTES_FREE + 1));
    }

    #[tokio::test(start_paused = true)]
    async fn connection_without_progress_is_evicted_first() {
        let all = IncompletePackets::default();
        let connection = |number| (0, ConnectionId(number));
        let add = |number| all.add_connection(Some(connection(number)));
        let [mut slow, mut first, mut second] = [1, 2, 3].map(add);
        for holder in [&mut slow, &mut first, &mut second] {
            assert!(holder.fits(30_000, || 100_000));
            tokio::time::advance(STALLED_PACKET_TIME / 4).await;
        }
        let mut new = add(4);
        assert!(!new.fits(30_000, || 100_000));
        assert_eq!(new.evict_stalled(100_000), None, "none has waited so long");
        slow.received(SIGN_OF_LIFE_BYTES);
        assert!(slow.fits(30_000, || 100_000));
        tokio::time::advance(STALLED_PACKET_TIME * 3 / 4).await;
        assert_eq!(new.evict_stalled(59_999), None, "too few to be of use");
        let evicted = new.evict_stalled(100_000);
        assert_eq!(evicted, Some(vec![connection(2)]));
        assert_eq!(all.holders().bytes, 90_000);
        // It may be read from once more before it ends.
        assert!(first.fits(40_000, || 0));
        drop((slow, first, second, new));
        assert_eq!(all.holders().bytes, 0);
    }
}
