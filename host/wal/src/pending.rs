//! Records that are appended and not yet written. This is the only state that appenders share with
//! the threads that write to the disk.
//!
//! Input is groups of records; output is whole groups as the body of a frame. It does no I/O, so
//! its lock is held for a copy at most.

use std::collections::VecDeque;

use crate::frame;

/// The end of a group in the buffer.
#[derive(Clone, Copy, Debug)]
struct Group {
    end: usize,
    last: u64,
}

/// Appended records. The buffer begins with room for the header of a frame, so that a commit of the
/// whole buffer copies nothing.
pub(crate) struct Pending {
    buffer: Vec<u8>,
    groups: VecDeque<Group>,
    /// The position of the first record in the buffer.
    first: u64,
    /// The last position that was assigned.
    pub(crate) appended: u64,
    /// First and last position of urgent groups that are not durable yet.
    pub(crate) urgent: VecDeque<(u64, u64)>,
    /// True while the writer thread waits for work.
    pub(crate) idle: bool,
    /// True after a failure of the log. Appended records are then discarded.
    pub(crate) failed: bool,
    /// True if the writer thread must end once everything is written.
    pub(crate) closing: bool,
}

/// The body of a frame, with room for its header at the start.
pub(crate) struct Taken {
    pub(crate) frame: Vec<u8>,
    pub(crate) first: u64,
    pub(crate) last: u64,
}

impl Pending {
    pub(crate) fn new(appended: u64) -> Self {
        Self {
            buffer: vec![0; frame::HEADER_BYTES],
            groups: VecDeque::new(),
            first: appended + 1,
            appended,
            urgent: VecDeque::new(),
            idle: false,
            failed: false,
            closing: false,
        }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.groups.is_empty()
    }

    pub(crate) fn bytes(&self) -> usize {
        self.buffer.len() - frame::HEADER_BYTES
    }

    pub(crate) fn push(&mut self, records: &[&[u8]], urgent: bool) -> u64 {
        let first = self.appended + 1;
        self.appended += records.len() as u64;
        if !self.failed {
            for record in records {
                frame::push(&mut self.buffer, record);
            }
            self.groups.push_back(Group {
                end: self.buffer.len(),
                last: self.appended,
            });
            if urgent {
                self.urgent.push_back((first, self.appended));
            }
        }
        self.appended
    }

    /// Bytes of a frame that holds only the next group.
    pub(crate) fn next_frame_bytes(&self) -> Option<u64> {
        self.groups.front().map(|group| group.end as u64)
    }

    /// Takes as many groups as fit a frame of `bytes_max`. `spare` becomes the new buffer.
    pub(crate) fn take(&mut self, bytes_max: u64, mut spare: Vec<u8>) -> Option<Taken> {
        let fits = |group: &&Group| group.end as u64 <= bytes_max;
        let end = self.groups.iter().take_while(fits).last().copied()?;
        let first = std::mem::replace(&mut self.first, end.last + 1);
        spare.clear();
        spare.resize(frame::HEADER_BYTES, 0);
        spare.extend_from_slice(&self.buffer[end.end..]);
        let mut frame = std::mem::replace(&mut self.buffer, spare);
        frame.truncate(end.end);
        self.groups.retain_mut(|group| {
            let stays = group.last > end.last;
            if stays {
                group.end = group.end - end.end + frame::HEADER_BYTES;
            }
            stays
        });
        Some(Taken {
            frame,
            first,
            last: end.last,
        })
    }

    /// The released position in interval mode: everything before the first urgent group that is not
    /// durable.
    pub(crate) fn released(&self) -> u64 {
        self.urgent
            .front()
            .map_or(self.appended, |&(first, _)| first - 1)
    }

    pub(crate) fn drop_durable(&mut self, durable: u64) {
        let is_durable = |group: &mut (u64, u64)| group.1 <= durable;
        while self.urgent.pop_front_if(is_durable).is_some() {}
    }

    /// Discards everything, because the log failed and nothing here can become durable.
    pub(crate) fn fail(&mut self) {
        self.failed = true;
        self.buffer = vec![0; frame::HEADER_BYTES];
        self.groups = VecDeque::new();
    }
}
