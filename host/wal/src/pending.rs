//! What is appended and not yet written: the one place where appenders and the disk meet.
//!
//! Enters: groups of records. Leaves: whole groups, as the body of a frame. It does no I/O, so that
//! its lock is held for a copy at most.

use std::collections::VecDeque;

use crate::frame;

/// The end of a group in the buffer.
#[derive(Clone, Copy, Debug)]
struct Group {
    end: usize,
    last: u64,
}

/// Records on their way to the disk. The buffer begins with room for a frame's header, so that a
/// commit of all of it copies nothing.
pub(crate) struct Pending {
    buffer: Vec<u8>,
    groups: VecDeque<Group>,
    /// The position of the first record in the buffer.
    first: u64,
    /// The last position that was given out.
    pub(crate) appended: u64,
    /// First and last position of urgent groups that are not durable yet.
    pub(crate) urgent: VecDeque<(u64, u64)>,
    /// The I/O thread waits for work.
    pub(crate) idle: bool,
    /// The log failed: what is appended goes nowhere.
    pub(crate) failed: bool,
    /// The I/O thread is to end once all is written.
    pub(crate) closing: bool,
}

/// The body of a frame, with room for its header in front.
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

    /// Bytes of the frame of the next group alone.
    pub(crate) fn next_frame_bytes(&self) -> Option<u64> {
        self.groups.front().map(|group| group.end as u64)
    }

    /// Takes as many groups as fit a frame of `bytes_max`; `spare` becomes the buffer.
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

    /// What may leave in interval mode: everything, but nothing from the first urgent group on.
    pub(crate) fn released(&self) -> u64 {
        self.urgent
            .front()
            .map_or(self.appended, |&(first, _)| first - 1)
    }

    /// Drops what became durable.
    pub(crate) fn settle(&mut self, durable: u64) {
        while self
            .urgent
            .front()
            .is_some_and(|&(_, last)| last <= durable)
        {
            self.urgent.pop_front();
        }
    }

    /// The log failed: nothing that is here will ever be durable.
    pub(crate) fn fail(&mut self) {
        self.failed = true;
        self.buffer = vec![0; frame::HEADER_BYTES];
        self.groups = VecDeque::new();
    }
}
