//! Counts the bytes that a thread has appended to a log. A connection compares two values to find
//! out whether its own turn appended anything.

use std::cell::Cell;

thread_local! {
    static APPENDED: Cell<u64> = const { Cell::new(0) };
}

/// This thread appends these records.
pub(crate) fn add(records: &[&[u8]]) {
    let bytes: usize = records.iter().map(|record| record.len()).sum();
    APPENDED.set(APPENDED.get().wrapping_add(bytes as u64));
}

/// Bytes that this thread has appended since its start.
pub(crate) fn here() -> u64 {
    APPENDED.get()
}
