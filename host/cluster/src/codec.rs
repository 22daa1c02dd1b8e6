//! Reading of encoded values. No input may panic or allocate by a length that it claims.

/// An encoding that cannot be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Malformed {
    /// The bytes are no encoding of the value.
    #[error("{0}")]
    Damaged(&'static str),
    /// A later version of this program wrote the value.
    #[error(
        "it has format {format}, but this version reads up to format {readable}: update this host"
    )]
    LaterFormat {
        /// The format of the value.
        format: u16,
        /// The latest format that this version reads.
        readable: u16,
    },
}

/// The rest of an encoded value. Integers are little-endian.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Reader<'a>(pub(crate) &'a [u8]);

impl<'a> Reader<'a> {
    pub(crate) fn take(&mut self, bytes: usize) -> Result<&'a [u8], Malformed> {
        let (taken, rest) = self
            .0
            .split_at_checked(bytes)
            .ok_or(Malformed::Damaged("it ends early"))?;
        self.0 = rest;
        Ok(taken)
    }

    pub(crate) fn array<const N: usize>(&mut self) -> Result<[u8; N], Malformed> {
        let mut array = [0; N];
        array.copy_from_slice(self.take(N)?);
        Ok(array)
    }

    pub(crate) fn u8(&mut self) -> Result<u8, Malformed> {
        Ok(u8::from_le_bytes(self.array()?))
    }

    pub(crate) fn u16(&mut self) -> Result<u16, Malformed> {
        Ok(u16::from_le_bytes(self.array()?))
    }

    pub(crate) fn u32(&mut self) -> Result<u32, Malformed> {
        Ok(u32::from_le_bytes(self.array()?))
    }

    pub(crate) fn u64(&mut self) -> Result<u64, Malformed> {
        Ok(u64::from_le_bytes(self.array()?))
    }

    pub(crate) fn bool(&mut self) -> Result<bool, Malformed> {
        match self.u8()? {
            0 => Ok(false),
            1 => Ok(true),
            _ => Err(Malformed::Damaged("a flag is neither 0 nor 1")),
        }
    }

    /// A text of at most `bytes_max` bytes behind its length in one byte.
    pub(crate) fn text(&mut self, bytes_max: usize) -> Result<String, Malformed> {
        let len = usize::from(self.u8()?);
        if len > bytes_max {
            return Err(Malformed::Damaged("a text is too long"));
        }
        let text = std::str::from_utf8(self.take(len)?);
        text.map(str::to_owned)
            .map_err(|_| Malformed::Damaged("a text is not UTF-8"))
    }

    pub(crate) fn end(self) -> Result<(), Malformed> {
        if self.0.is_empty() {
            Ok(())
        } else {
            Err(Malformed::Damaged("bytes follow its end"))
        }
    }
}

/// Appends a text that [`Reader::text`] reads. The caller has checked its length.
pub(crate) fn put_text(out: &mut Vec<u8>, text: &str) {
    debug_assert!(text.len() <= usize::from(u8::MAX));
    out.push(text.len() as u8);
    out.extend_from_slice(text.as_bytes());
}
