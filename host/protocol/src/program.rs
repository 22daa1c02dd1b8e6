//! Versions of this program, which its files record.

use core::fmt;

/// The version of a program, without the name of a pre-release.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct ProgramVersion {
    major: u8,
    minor: u8,
    patch: u16,
}

impl ProgramVersion {
    /// This program.
    pub const THIS: Self = Self {
        major: small(env!("CARGO_PKG_VERSION_MAJOR")),
        minor: small(env!("CARGO_PKG_VERSION_MINOR")),
        patch: match u16::from_str_radix(env!("CARGO_PKG_VERSION_PATCH"), 10) {
            Ok(number) => number,
            Err(_) => panic!("the version of the workspace has a number that is too large"),
        },
    };

    /// Encodes the version. No version is four zeros, because 0.0.0 is never released.
    #[must_use]
    pub fn encode(version: Option<Self>) -> [u8; 4] {
        let Some(it) = version else { return [0; 4] };
        let [low, high] = it.patch.to_le_bytes();
        [it.major, it.minor, low, high]
    }

    /// Decodes any bytes.
    #[must_use]
    pub fn decode(bytes: [u8; 4]) -> Option<Self> {
        let [major, minor, low, high] = bytes;
        (bytes != [0; 4]).then(|| Self {
            major,
            minor,
            patch: u16::from_le_bytes([low, high]),
        })
    }

    /// Parses a version such as `0.1.0`. None for any other text.
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        let (release, _) = text.split_once(['-', '+']).unwrap_or((text, ""));
        let mut parts = release.split('.');
        let parsed = Self {
            major: parts.next()?.parse().ok()?,
            minor: parts.next()?.parse().ok()?,
            patch: parts.next()?.parse().ok()?,
        };
        parts.next().is_none().then_some(parsed)
    }

    /// Whether this is a later version than this program.
    #[must_use]
    pub fn is_later(self) -> bool {
        self > Self::THIS
    }
}

const fn small(text: &str) -> u8 {
    match u8::from_str_radix(text, 10) {
        Ok(number) => number,
        Err(_) => panic!("the version of the workspace has a number that is too large"),
    }
}

impl fmt::Display for ProgramVersion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}.{}", self.major, self.minor, self.patch)
    }
}

/// The version that wrote data which this program cannot read, if it is known. Displays what to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WrittenBy(pub Option<ProgramVersion>);

impl fmt::Display for WrittenBy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let this = ProgramVersion::THIS;
        match self.0.filter(|it| it.is_later()) {
            Some(it) => write!(
                f,
                "Statehouse {it} wrote it, and this is Statehouse {this}: install Statehouse {it} or later"
            ),
            None => write!(
                f,
                "this is Statehouse {this}: install the version that wrote it, or a later one"
            ),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::string::ToString;

    #[test]
    fn versions_are_ordered_and_round_trip() {
        let parse = |text| ProgramVersion::parse(text).unwrap();
        assert_eq!(parse(env!("CARGO_PKG_VERSION")), ProgramVersion::THIS);
        assert!(!ProgramVersion::THIS.is_later() && parse("255.0.0").is_later());
        assert!(parse("0.9.300") < parse("0.10.0-rc.1") && parse("0.10.0") < parse("1.0.0"));
        let version = Some(parse("1.2.515"));
        assert_eq!(ProgramVersion::encode(version), [1, 2, 3, 2]);
        assert_eq!(ProgramVersion::decode([1, 2, 3, 2]), version);
        assert_eq!(ProgramVersion::decode(ProgramVersion::encode(None)), None);
        for text in [
            "",
            "1",
            "1.2",
            "1.2.x",
            "1.2.3.4",
            "256.0.0",
            "1.2.65536",
            " 1.2.3",
        ] {
            assert_eq!(ProgramVersion::parse(text), None, "{text}");
        }
    }

    #[test]
    fn advice_names_a_later_version_only() {
        let advice = |it| WrittenBy(it).to_string();
        let later = ProgramVersion::parse("255.1.0");
        assert!(advice(later).ends_with("install Statehouse 255.1.0 or later"));
        for unhelpful in [None, Some(ProgramVersion::THIS)] {
            assert!(advice(unhelpful).contains("install the version that wrote it"));
        }
    }
}
