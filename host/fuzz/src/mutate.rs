//! Mutates inputs. The same number must give the same mutation, so that a failure can be
//! reproduced.

/// A random number generator (SplitMix64).
struct Dice(u64);

impl Dice {
    fn roll(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    fn below(&mut self, end: usize) -> usize {
        // Lengths are far below 2^64.
        (self.roll() % end.max(1) as u64) as usize
    }
}

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
    let mut dice = Dice(number);
    let mut bytes = input.to_vec();
    for _ in 0..=dice.below(4) {
        let at = dice.below(bytes.len() + 1);
        match dice.below(7) {
            0 if at < bytes.len() => bytes[at] ^= 1 << dice.below(8),
            1 if at < bytes.len() => bytes[at] = dice.roll() as u8,
            2 => bytes.truncate(at),
            3 => {
                let special = SPECIAL[dice.below(SPECIAL.len())];
                bytes.splice(at..at, special.iter().copied());
            }
            4 => {
                let end = at + dice.below(bytes.len() - at + 1).min(64);
                bytes.drain(at..end);
            }
            5 => {
                let end = at + dice.below(bytes.len() - at + 1).min(64);
                let again = bytes[at..end].to_vec();
                bytes.splice(at..at, again);
            }
            _ => {
                let from = dice.below(other.len() + 1);
                let end = from + dice.below(other.len() - from + 1).min(64);
                bytes.splice(at..at, other[from..end].iter().copied());
            }
        }
    }
    bytes
}
