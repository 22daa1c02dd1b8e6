//! Reads a log for tools, also while another process writes to it.
//!
//! A file that is recycled or written during the read may look damaged. So damage counts only if a
//! second read finds the same.
//!
//! The store starts in spite of damage to history that a newer snapshot covers. So a read from the
//! oldest state on continues with such a snapshot, and reports the damage with [`Sink::gap`].

use std::io;
use std::thread;
use std::time::Duration;

use crate::disk::Disk;
use crate::error::{Damage, Error};
use crate::files::{self, Kind};
use crate::limits;
use crate::recovery::{Base, Range, Sink, plan};
use statehouse_protocol::LogPosition;

/// Reads a log from a base up to a record, also while another process writes to it. If the writer
/// recycles a file that is being read, or if history is damaged, [`Sink::reset`] is called and
/// reading starts again.
///
/// # Errors
/// [`Error::NotRetained`] if the log does not reach back that far, [`Error::Damaged`] if damage is
/// between the base and the record, and [`Error::Moved`] if the log is recycled faster than it is
/// read. Other errors are those of the disk and of the sink.
pub fn read(
    disk: &dyn Disk,
    base: Base,
    until: LogPosition,
    sink: &mut dyn Sink,
) -> Result<Range, Error> {
    // The newest damaged segment, and its damage.
    let mut passed: Option<(u64, Damage)> = None;
    loop {
        let after = passed.as_ref().map_or(0, |(number, _)| *number);
        let damage = match read_after(disk, base, after, until, sink) {
            Ok((range, broken)) => {
                let gap = passed.map(|(_, damage)| damage).or(broken);
                if let Some(damage) = gap.filter(|_| base == Base::Oldest) {
                    sink.gap(&damage);
                }
                return Ok(range);
            }
            Err(Error::Damaged(damage)) if base == Base::Oldest => damage,
            Err(error) => return Err(error),
        };
        match files::kind(&damage.file) {
            Kind::Segment(number) if number > after => {
                sink.reset();
                passed = Some((number, damage));
            }
            // No snapshot covers the damage that was passed.
            _ => return Err(Error::Damaged(passed.map_or(damage, |(_, passed)| passed))),
        }
    }
}

/// Reads a log without the segments up to the number `after`. Returns also why the chain of
/// segments does not reach further back, if that is damage.
fn read_after(
    disk: &dyn Disk,
    base: Base,
    after: u64,
    until: LogPosition,
    sink: &mut dyn Sink,
) -> Result<(Range, Option<Damage>), Error> {
    let mut before = None;
    for _ in 0..limits::READ_ATTEMPTS_MAX {
        let outcome = match plan(disk) {
            Ok(Some(plan)) => plan
                .read(disk, base, after, until, sink)
                .map(|recovered| (recovered.range, recovered.broken)),
            Ok(None) => Ok((Range::default(), None)),
            Err(error) => Err(error),
        };
        match outcome {
            Err(Error::Moved) => before = None,
            Err(Error::Io { source, .. }) if source.kind() == io::ErrorKind::NotFound => {
                before = None
            }
            // A frame that is being written also looks like damage, but not at the second attempt.
            Err(Error::Damaged(damage)) if before.as_ref() != Some(&damage) => {
                before = Some(damage)
            }
            outcome => return outcome,
        }
        sink.reset();
        thread::sleep(Duration::from_millis(limits::READ_RETRY_MS));
    }
    Err(Error::Moved)
}
