//! The sections of a WebAssembly file: each has an id, a length and that many bytes. Input is
//! untrusted.

/// First bytes of a core module and of a component.
const HEADERS: [&[u8; 8]; 2] = [b"\0asm\x01\0\0\0", b"\0asm\x0d\0\x01\0"];

/// A reader of the file's sections; `None` if its header is unknown.
pub fn of(file: &[u8]) -> Option<Reader<'_>> {
    let (header, rest) = file.split_at_checked(8)?;
    let is_known = HEADERS.iter().any(|known| known[..] == *header);
    is_known.then_some(Reader(rest))
}

/// Whether the file consists of a header and complete sections.
pub fn are_whole(file: &[u8]) -> bool {
    let read = || {
        let mut reader = of(file)?;
        while !reader.0.is_empty() {
            let id = reader.byte()?;
            let mut section = Reader(reader.slice()?);
            // A custom section has a name.
            if id == 0 {
                section.slice()?;
            }
        }
        Some(())
    };
    read().is_some()
}

/// Reads numbers and slices. Returns `None` if there are fewer bytes than claimed.
pub struct Reader<'a>(pub &'a [u8]);

impl<'a> Reader<'a> {
    /// The next bytes.
    pub fn take(&mut self, bytes: usize) -> Option<&'a [u8]> {
        let (head, rest) = self.0.split_at_checked(bytes)?;
        self.0 = rest;
        Some(head)
    }

    /// The next byte.
    pub fn byte(&mut self) -> Option<u8> {
        self.take(1)?.first().copied()
    }

    /// A LEB128 number of at most 32 bits.
    pub fn number(&mut self) -> Option<usize> {
        let mut number = 0_u64;
        for shift in (0..35).step_by(7) {
            let byte = self.byte()?;
            number |= u64::from(byte & 0x7f) << shift;
            if byte & 0x80 == 0 {
                return usize::try_from(number).ok();
            }
        }
        None
    }

    /// A length, and that many bytes.
    pub fn slice(&mut self) -> Option<&'a [u8]> {
        let bytes = self.number()?;
        self.take(bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::STANDARD_POLICY;

    #[test]
    fn truncated_file_is_not_whole() {
        assert!(are_whole(STANDARD_POLICY) && are_whole(HEADERS[0]));
        let module = b"\0asm\x01\0\0\0\0\x06\x04nameX";
        assert!(are_whole(module));
        // A file that is only a header is complete.
        for cut in (0..8).chain(9..module.len()) {
            assert!(!are_whole(&module[..cut]), "cut at {cut}");
        }
        assert!(!are_whole(b"\0asm\x02\0\0\0"));
        assert!(!are_whole(b"\0asm\x01\0\0\0\0\xff\xff\xff\xff\x0f"));
        // A name that is longer than its section.
        assert!(!are_whole(b"\0asm\x01\0\0\0\0\x02\x05a"));
    }
}
