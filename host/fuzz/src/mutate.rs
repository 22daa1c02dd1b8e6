//! Mutates inputs. The same number must give the same mutation, so that a failure can be
//! reproduced.

use statehouse_wal::simulation::Dice;

/// Byte strings with a special meaning in some format.
const SPECIAL: [&[u8]; 9] = [
    b"\r\n",
    b"$-1",
    b"*2147483648\r\n",
    b"$18446744073709551616\r\n",
    b"\xFF\xFF\xFF\x7F",
    b"\xFF\xFF\xFF\xFF\x7F",
    b"\0",
    b"18446744073709551615:4294967295:n",
    b"#",
];

/// Mutates `input`, possibly with parts of `other`. The result is at most some hundred bytes
/// longer.
#[must_use]
pub fn mutate(input: &[u8], other: &[u8], number: u64) -> Vec<u8> {
    let mut dice = Dice::new(number);
    // Lengths are far below 2^64.
    let mut below = |end: usize| dice.below(end as u64) as usize;
    let mut bytes = input.to_vec();
    for _ in 0..=below(4) {
        let at = below(bytes.len() + 1);
        match below(7) {
            0 if at < bytes.len() => bytes[at] ^= 1 << below(8),
            1 if at < bytes.len() => bytes[at] = below(256) as u8,
            2 => bytes.truncate(at),
            3 => {
                let special = SPECIAL[below(SPECIAL.len())];
                bytes.splice(at..at, special.iter().copied());
            }
            4 => {
                let end = at + below(bytes.len() - at + 1).min(64);
                bytes.drain(at..end);
            }
            5 => {
                let end = at + below(bytes.len() - at + 1).min(64);
                let again = bytes[at..end].to_vec();
                bytes.splice(at..at, again);
            }
            _ => {
                let from = below(other.len() + 1);
                let end = from + below(other.len() - from + 1).min(64);
                bytes.splice(at..at, other[from..end].iter().copied());
            }
        }
    }
    bytes
}
