//! The file `newest`: the number of the newest segment, and a position up to which the log was
//! durable.
//!
//! Without this file, a removed newest segment would look like a log that ends one segment earlier.
//!
//! Invariant: each segment must be recorded here durably after its name is durable and before its
//! first frame is written. So a crash never leaves a recorded segment without its file, and no
//! acknowledged record is in a segment that is not recorded.
//!
//! ```text
//! 0    header with magic SHNW: the newest segment with an even number | zeros
//! 512  the same for odd numbers                                       | zeros
//! ```
//!
//! Each header has a sector of its own: a torn write of one leaves the other, which names the
//! previous segment.

use std::io;
use std::sync::Arc;

use crate::disk::{Disk, File};
use crate::error::{Error, LaterFormat, is_unreadable};
use crate::files;
use crate::segment::{HEADER_BYTES, Header, HeaderFault, Magic};
use crate::survey::read_witness;

const SLOT_BYTES: usize = 512;
const FILE_BYTES: usize = 2 * SLOT_BYTES;

/// The file, open for writing.
pub(crate) struct Newest {
    file: Arc<dyn File>,
    /// The header that was written last.
    last: Header,
}

impl Newest {
    /// Opens or creates the file and records a segment durably.
    pub(crate) fn begin(disk: &dyn Disk, segment: Header) -> io::Result<Self> {
        let file = match disk.open(files::NEWEST) {
            Ok(file) if file.bytes()? == FILE_BYTES as u64 && is_readable(&*file)? => file,
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {
                let file = disk.create(files::NEWEST)?;
                // Allocates the whole file, so that later writes do not change its length.
                file.write_at(&[0; FILE_BYTES], 0)?;
                file
            }
        };
        let mut newest = Self {
            file,
            last: segment,
        };
        newest.record(segment)?;
        disk.sync_directory()?;
        Ok(newest)
    }

    /// Records durably that a segment exists.
    pub(crate) fn record(&mut self, segment: Header) -> io::Result<()> {
        // The header of a segment is durable only after all earlier records.
        self.write(Header {
            position: segment.position - 1,
            ..segment
        })?;
        self.file.sync()
    }

    /// Records that the log is durable up to a position. The note is not synced. It only narrows
    /// the damage that can go unnoticed.
    pub(crate) fn note(&mut self, position: u64) -> io::Result<()> {
        if position <= self.last.position {
            return Ok(());
        }
        self.write(Header {
            position,
            ..self.last
        })
    }

    fn write(&mut self, header: Header) -> io::Result<()> {
        let offset = header.number % 2 * SLOT_BYTES as u64;
        self.file.write_at(&header.encode(Magic::Newest), offset)?;
        self.last = header;
        Ok(())
    }
}

/// Whether the device returns the content. If not, a write to a part of it fails too, because the
/// kernel must read the rest of its page.
fn is_readable(file: &dyn File) -> io::Result<bool> {
    match file.read_at(&mut [0; FILE_BYTES], 0) {
        Err(error) if is_unreadable(&error) => Ok(false),
        read => read.map(|_| true),
    }
}

/// Decodes the content of the file. Returns `None` if no slot is intact.
pub(crate) fn decode(content: &[u8]) -> Result<Option<Header>, LaterFormat> {
    let mut newest: Option<Header> = None;
    for slot in content.chunks(SLOT_BYTES) {
        match Header::decode(slot, Magic::Newest) {
            Ok(header) if newest.is_none_or(|it| it.number < header.number) => {
                newest = Some(header);
            }
            Ok(_) | Err(HeaderFault::Damaged) => {}
            Err(HeaderFault::Format(format)) => return Err(format),
        }
    }
    Ok(newest)
}

/// Reads the file. If it is missing, damaged, incomplete or unreadable, the log is read without it.
pub(crate) fn read(disk: &dyn Disk) -> Result<Option<Header>, Error> {
    let mut content = [0; SLOT_BYTES + HEADER_BYTES];
    let content = read_witness(disk, files::NEWEST, &mut content)?;
    decode(content.unwrap_or_default()).map_err(|format| Error::UnknownFormat {
        file: files::NEWEST.to_owned(),
        format,
    })
}
