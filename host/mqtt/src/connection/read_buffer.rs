//! The size of a connection's read buffer.
//!
//! The buffer must only grow with received bytes, and must shrink again, or idle connections would
//! hold the memory of their largest packets.

use bytes::BytesMut;

use crate::limits::{BUFFER_PARTS_IN_USE, IDLE_BUFFER_BYTES_MAX, READ_BYTES_MIN};

/// The size of the next read, from the size asked for last and the bytes that came. Most clients
/// send little at a time, and a silent connection keeps a buffer of this size.
pub(super) fn next_read_bytes(asked: usize, came: usize, max: usize) -> usize {
    let next = match came {
        _ if came >= asked / 2 => asked * 2,
        _ if came < asked / 8 => asked / 2,
        _ => asked,
    };
    next.max(READ_BYTES_MIN).min(max)
}

/// Shrinks a large allocation of which little is in use. Otherwise one byte behind a large packet
/// would pin the whole buffer.
pub(super) fn release(buffer: &mut BytesMut, allocated: &mut usize) {
    if *allocated > IDLE_BUFFER_BYTES_MAX && buffer.len() <= *allocated / BUFFER_PARTS_IN_USE {
        *buffer = BytesMut::from(&buffer[..]);
        *allocated = buffer.capacity();
    }
}

/// Makes room for one read. The buffer grows only with received bytes, and shrinks again after a
/// large packet.
pub(super) fn make_room(buffer: &mut BytesMut, read_bytes: usize) {
    if buffer.is_empty() && buffer.capacity() > (4 * read_bytes).min(IDLE_BUFFER_BYTES_MAX) {
        *buffer = BytesMut::new();
    }
    if buffer.capacity() - buffer.len() < read_bytes / 2 {
        buffer.reserve(read_bytes);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::incomplete::counted_bytes;

    #[test]
    fn read_size_adapts_to_the_bytes_received() {
        let max = 16 << 10;
        let mut ask = READ_BYTES_MIN;
        for _ in 0..10 {
            ask = next_read_bytes(ask, ask, max);
        }
        assert_eq!(ask, max);
        // A read may return more than was asked for, if the buffer had room.
        assert_eq!(
            next_read_bytes(READ_BYTES_MIN, max, max),
            2 * READ_BYTES_MIN
        );
        assert_eq!(next_read_bytes(max, max / 4, max), max);
        for _ in 0..10 {
            ask = next_read_bytes(ask, 2, max);
        }
        assert_eq!(ask, READ_BYTES_MIN);
        assert_eq!(next_read_bytes(READ_BYTES_MIN, READ_BYTES_MIN, 100), 100);
    }

    #[test]
    fn idle_connection_keeps_a_small_buffer() {
        let mut buffer = BytesMut::new();
        make_room(&mut buffer, 16 << 10);
        assert!(buffer.capacity() >= 16 << 10);
        make_room(&mut buffer, READ_BYTES_MIN);
        let small = buffer.capacity();
        assert!((READ_BYTES_MIN..=4 * READ_BYTES_MIN).contains(&small));
        // The content stays.
        buffer.extend_from_slice(&[7; 3000]);
        make_room(&mut buffer, READ_BYTES_MIN);
        assert_eq!(buffer, [7; 3000][..]);
    }

    #[test]
    fn byte_after_a_large_packet_does_not_pin_its_buffer() {
        let mut buffer = BytesMut::with_capacity(4 << 20);
        let mut allocated = buffer.capacity();
        buffer.extend_from_slice(&vec![7; 2 << 20]);
        release(&mut buffer, &mut allocated);
        assert_eq!(allocated, 4 << 20, "half of it is in use");
        let packet = buffer.split_to((2 << 20) - 1);
        let place = buffer.as_ptr();
        release(&mut buffer, &mut allocated);
        assert_eq!((&buffer[..], buffer.capacity()), (&[7][..], allocated));
        assert!(allocated < 64, "{allocated}");
        assert_ne!(buffer.as_ptr(), place);
        drop(packet);
        // A buffer in use counts with its whole allocation.
        assert_eq!(counted_bytes(&buffer, 4 << 20), 4 << 20);
        assert_eq!(counted_bytes(&buffer, allocated), 0);
    }
}
