//! The file `newest`: which segment is the newest, and a position up to which the log was durable.
//!
//! Without it a removed newest segment would look like a log that ends one segment earlier. Each segment is recorded
//! here durably after its name is durable and before its first frame is written: so a crash never leaves a recorded
//! segment without its file, and no acknowledged record is in a segment that is not recorded.
//!
//! ```text
//! 0    header with magic SHNW: newest segment of even number | zeros
//! 512  the same for odd numbers                              | zeros
//! ```
//!
//! Each header is in a sector of its own: a torn write of one leaves the other, which names the segment before.

use std::io;
use std::sync::Arc;

use crate::disk::{Disk, File};
use crate::error::Error;
use crate::files;
use crate::segment::{HEADER_BYTES, Header, HeaderFault, Magic};

const SLOT_BYTES: usize = 512;
const FILE_BYTES: usize = 2 * SLOT_BYTES;

/// The file, open for writing.
pub(crate) struct Newest {
    file: Arc<dyn File>,
    /// What was written last.
    last: Header,
}

impl Newest {
    /// Opens the file, or creates it, and records a segment durably.
    pub(crate) fn begin(disk: &dyn Disk, segment: Header) -> io::Result<Self> {
        let file = match disk.open(files::NEWEST) {
            Ok(file) if file.bytes()? == FILE_BYTES as u64 => file,
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {
                let file = disk.create(files::NEWEST)?;
                // Later writes neither allocate nor change its length.
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
        // A segment's header is durable only after everything before it.
        self.write(Header {
            position: segment.position - 1,
            ..segment
        })?;
        self.file.sync()
    }

    /// Records that the log is durable up to a position. The note itself is not synced: it narrows what damage can
    /// hide, and nothing depends on it.
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

/// What the content of the file says; `None` if no slot of it is whole.
pub(crate) fn decode(content: &[u8]) -> Result<Option<Header>, u16> {
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

/// Reads the file. If it is missing, damaged or half created, the log is read without it.
pub(crate) fn read(disk: &dyn Disk) -> Result<Option<Header>, Error> {
    let file = match disk.open_read_only(files::NEWEST) {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(Error::io("open", files::NEWEST)(error)),
    };
    let mut content = [0; SLOT_BYTES + HEADER_BYTES];
    let read = file
        .read_at(&mut content, 0)
        .map_err(Error::io("read", files::NEWEST))?;
    decode(&content[..read]).map_err(|format| Error::UnknownFormat {
        file: files::NEWEST.to_owned(),
        format,
    })
}
