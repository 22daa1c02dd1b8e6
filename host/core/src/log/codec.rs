//! The encoding of records: small numbers take few bytes, and everything else is prefixed with its
//! length.
//!
//! Reading must never panic and never allocate by a claimed length, only by the bytes that are
//! present, because input may be corrupt.

/// A record that no version of this program wrote.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a record cannot be decoded: {0}")]
pub struct Malformed(pub &'static str);

/// The error for something that this version does not know. To skip it could lose data.
macro_rules! unknown {
    ($what:literal) => {
        $crate::log::Malformed(concat!(
            "an unknown ",
            $what,
            ": use the version of the program that wrote it, or a newer one"
        ))
    };
}
pub(super) use unknown;

/// Writes an unsigned number in groups of seven bits, the lowest first.
pub(super) fn number(out: &mut Vec<u8>, mut value: u64) {
    while value >= 0x80 {
        out.push(value as u8 | 0x80);
        value >>= 7;
    }
    out.push(value as u8);
}

/// Writes a length and the bytes.
pub(super) fn bytes(out: &mut Vec<u8>, value: &[u8]) {
    number(out, value.len() as u64);
    out.extend_from_slice(value);
}

/// Reads what the functions above wrote.
#[derive(Clone, Copy)]
pub(super) struct Reader<'a>(pub(super) &'a [u8]);

impl<'a> Reader<'a> {
    pub(super) fn u8(&mut self) -> Result<u8, Malformed> {
        let (first, rest) = self.0.split_first().ok_or(SHORT)?;
        self.0 = rest;
        Ok(*first)
    }

    pub(super) fn flags(&mut self, known: u8) -> Result<u8, Malformed> {
        let flags = self.u8()?;
        match flags & !known {
            0 => Ok(flags),
            _ => Err(unknown!("flag")),
        }
    }

    pub(super) fn number(&mut self) -> Result<u64, Malformed> {
        let mut value = 0u64;
        for shift in (0..64).step_by(7) {
            let byte = self.u8()?;
            let group = u64::from(byte & 0x7f);
            if shift == 63 && group > 1 {
                break;
            }
            value |= group << shift;
            if byte & 0x80 == 0 {
                return Ok(value);
            }
        }
        Err(Malformed("a number of more than 64 bits"))
    }

    /// A number that must fit a smaller type.
    pub(super) fn small<T: TryFrom<u64>>(&mut self) -> Result<T, Malformed> {
        T::try_from(self.number()?).map_err(|_| Malformed("a number that is out of range"))
    }

    pub(super) fn take(&mut self, len: usize) -> Result<&'a [u8], Malformed> {
        let (taken, rest) = self.0.split_at_checked(len).ok_or(SHORT)?;
        self.0 = rest;
        Ok(taken)
    }

    pub(super) fn array<const N: usize>(&mut self) -> Result<[u8; N], Malformed> {
        let (taken, rest) = self.0.split_first_chunk().ok_or(SHORT)?;
        self.0 = rest;
        Ok(*taken)
    }

    pub(super) fn bytes(&mut self) -> Result<&'a [u8], Malformed> {
        let len = self.small()?;
        self.take(len)
    }

    pub(super) fn text(&mut self) -> Result<&'a str, Malformed> {
        std::str::from_utf8(self.bytes()?).map_err(|_| Malformed("text that is not UTF-8"))
    }

    /// The number of items that follow. Each item takes at least one byte, so a count cannot exceed
    /// the remaining bytes.
    pub(super) fn count(&mut self) -> Result<usize, Malformed> {
        let count = self.small()?;
        if count > self.0.len() {
            return Err(SHORT);
        }
        Ok(count)
    }

    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

const SHORT: Malformed = Malformed("it ends too early");

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_round_trip_and_overlong_ones_fail() {
        let mut out = Vec::new();
        let values = [
            0,
            1,
            127,
            128,
            16_383,
            16_384,
            u64::from(u32::MAX),
            u64::MAX,
        ];
        for value in values {
            number(&mut out, value);
        }
        let mut reader = Reader(&out);
        for value in values {
            assert_eq!(reader.number(), Ok(value));
        }
        assert!(reader.is_empty());
        assert!(Reader(&[0xff; 10]).number().is_err());
        assert!(Reader(&[0x80; 9]).number().is_err());
        assert!(Reader(&[0xff, 1]).small::<u8>().is_ok());
        assert!(Reader(&[0xff, 2]).small::<u8>().is_err());
    }

    #[test]
    fn claimed_length_beyond_input_is_an_error() {
        let mut out = Vec::new();
        number(&mut out, u64::MAX);
        out.extend_from_slice(b"abc");
        assert!(Reader(&out).bytes().is_err());
        assert!(Reader(&out).count().is_err());
        assert!(Reader(&[4, b'a']).count().is_err());
    }
}
