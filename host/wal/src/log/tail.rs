//! Writes and syncs the segment at the end of the log.
//!
//! A position must be published only after its frame is synced.

use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use super::{Log, locked};
use crate::disk::File;
use crate::error::Error;
use crate::files;
use crate::frame;
use crate::limits;
use crate::options::Durability;
use crate::segment::{HEADER_BYTES, Header};
use statehouse_protocol::LogPosition;

/// The segment that is being written.
pub(super) struct Tail {
    pub(super) file: Arc<dyn File>,
    pub(super) header: Header,
    pub(super) bytes: u64,
    pub(super) offset: u64,
    /// The last position that was written.
    pub(super) written: u64,
    /// True if there are written bytes that are not synced.
    pub(super) dirty: bool,
    /// An empty buffer that replaces the appenders' buffer at the next write.
    pub(super) spare: Vec<u8>,
}

enum Step {
    Done,
    Rotate(u64),
}

impl Log {
    /// Writes everything that is appended, without a sync. If the disk is full or no more files can
    /// be opened ([`Error::is_temporary`]), the log is unchanged and the caller may retry. Any
    /// other error is final.
    pub fn write(&self) -> Result<(), Error> {
        self.write_tail(&mut locked(&self.tail))
    }

    /// Makes everything that is written durable, and publishes the new position. Every error is
    /// final, because it is unknown what is on the disk.
    pub fn sync(&self) -> Result<LogPosition, Error> {
        let mut tail = locked(&self.tail);
        self.sync_tail(&mut tail)?;
        Ok(self.durable())
    }

    /// Writes and syncs everything that is appended. Fails as [`Log::write`] and [`Log::sync`].
    pub fn commit(&self) -> Result<LogPosition, Error> {
        let mut tail = locked(&self.tail);
        let written = self.write_tail(&mut tail);
        self.sync_tail(&mut tail)?;
        written.map(|()| self.durable())
    }

    fn write_tail(&self, tail: &mut Tail) -> Result<(), Error> {
        loop {
            match self.write_step(tail)? {
                Step::Done => return Ok(()),
                Step::Rotate(bytes) => self.rotate(tail, bytes)?,
            }
        }
    }

    /// Writes as many pending groups as fit the current segment.
    fn write_step(&self, tail: &mut Tail) -> Result<Step, Error> {
        self.check()?;
        let room = tail.bytes.saturating_sub(tail.offset);
        let (taken, more) = {
            let mut pending = locked(&self.pending);
            match pending.next_frame_bytes() {
                None => return Ok(Step::Done),
                Some(bytes) if bytes > room => return Ok(Step::Rotate(bytes)),
                Some(_) => {}
            }
            let taken = pending.take(room, std::mem::take(&mut tail.spare));
            // Before the bytes stop to count as unwritten, so that their room is promised to nobody.
            let taken_bytes = taken.as_ref().map_or(0, |it| it.frame.len() as u64);
            self.tail_bytes.store(room - taken_bytes, Ordering::Release);
            self.unwritten_bytes
                .store(pending.bytes(), Ordering::Release);
            (taken, pending.next_frame_bytes())
        };
        let Some(mut taken) = taken else {
            return Ok(Step::Done);
        };
        let place = tail.header.place(tail.offset as usize);
        // Cannot truncate: every record takes at least 4 bytes of the frame.
        let count = (taken.last - taken.first + 1) as u32;
        frame::seal(
            &mut taken.frame,
            place,
            taken.first,
            self.durable().0,
            count,
        );
        tail.dirty = true;
        let name = || files::segment(tail.header.number);
        tail.file
            .write_at(&taken.frame, tail.offset)
            .map_err(|error| self.fail("write", name(), &error))?;
        tail.offset += taken.frame.len() as u64;
        tail.written = taken.last;
        self.written_bytes
            .fetch_add(taken.frame.len() as u64, Ordering::AcqRel);
        taken.frame.clear();
        taken.frame.shrink_to(limits::BUFFER_KEPT_BYTES_MAX);
        tail.spare = taken.frame;
        // The remaining groups did not fit the segment.
        Ok(more.map_or(Step::Done, Step::Rotate))
    }

    /// Continues in another segment that has room for a frame of `bytes`.
    fn rotate(&self, tail: &mut Tail, bytes: u64) -> Result<(), Error> {
        self.check_place()?;
        // The header of a segment states that everything before it is durable.
        self.sync_tail(tail)?;
        let mut catalogue = locked(&self.catalogue);
        let (number, position) = (tail.header.number + 1, tail.written + 1);
        let header = Header::new(self.store, number, position, catalogue.now_ms);
        let activated = catalogue.activate(
            &*self.disk,
            header,
            self.options.segment_bytes,
            bytes + HEADER_BYTES as u64,
        );
        let spares = catalogue.spares.len() as u64;
        drop(catalogue);
        self.spare_bytes
            .store(spares * self.options.segment_bytes, Ordering::Release);
        let (file, header) = match activated {
            Ok(activated) => activated,
            Err(error) if error.is_temporary() => {
                if error.is_full() {
                    self.free_bytes.store(0, Ordering::Release);
                    self.waits_for_room.store(true, Ordering::Release);
                }
                return Err(error);
            }
            Err(Error::Io {
                operation,
                file,
                source,
            }) => return Err(self.fail(operation, file, &source)),
            Err(error) => return Err(error),
        };
        self.waits_for_room.store(false, Ordering::Release);
        self.segments.fetch_add(1, Ordering::AcqRel);
        tail.file = file;
        tail.header = header;
        tail.bytes = header.bytes;
        tail.offset = HEADER_BYTES as u64;
        self.tail_bytes
            .store(tail.bytes - tail.offset, Ordering::Release);
        Ok(())
    }

    fn sync_tail(&self, tail: &mut Tail) -> Result<(), Error> {
        self.check()?;
        if tail.dirty {
            let name = || files::segment(tail.header.number);
            let begun = Instant::now();
            tail.file
                .sync()
                .map_err(|error| self.fail("sync", name(), &error))?;
            locked(&self.times).flushes.record(begun.elapsed());
            // Records in a file without a name would be lost with its handle, so they must not be
            // acknowledged.
            let is_linked = tail.file.is_linked();
            if !is_linked.map_err(|error| self.fail("look at", name(), &error))? {
                let removed = "the file was removed or replaced while this process wrote to it";
                return Err(self.fail("write to", name(), &io::Error::other(removed)));
            }
            tail.dirty = false;
            self.publish(tail.written);
        }
        Ok(())
    }

    fn publish(&self, durable: u64) {
        let mut pending = locked(&self.pending);
        pending.drop_durable(durable);
        self.durable.store(durable, Ordering::Release);
        let released = match self.options.durability {
            Durability::Always => durable,
            Durability::Interval(_) => pending.released(),
        };
        self.released.store(released, Ordering::Release);
    }
}
