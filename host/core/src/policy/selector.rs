//! Selectors: how operators refer to a policy, by the prefix of its digest, by name, or by name and
//! version.

use std::str::FromStr;

use super::digest::Digest;
use crate::limits;

/// Selects the policy that is part of the program. No loaded policy may have this name.
pub const BUILT_IN: &str = "builtin";

/// A digest prefix of at least six hex digits, also behind `blake3:`, NAME, NAME@VERSION,
/// NAME@DIGEST, or `builtin`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Selector(String);

/// A policy that can be selected.
#[derive(Clone, Copy)]
pub struct Candidate<'a> {
    /// Its digest.
    pub digest: Digest,
    /// Its name.
    pub name: &'a str,
    /// Its version.
    pub version: &'a str,
    /// Whether it is part of the program.
    pub built_in: bool,
}

/// Why a selector selects no policy.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SelectorError {
    /// It is not a selector.
    #[error(
        "a policy is selected by at least {min} hex digits of its digest, by NAME, by NAME@VERSION, by NAME@DIGEST, or by `builtin`",
        min = limits::DIGEST_DIGITS_MIN
    )]
    Form,
    /// It matches no policy.
    #[error("no policy {0} is loaded; loaded policies: {1}")]
    Unknown(String, String),
    /// It matches several policies.
    #[error(
        "{0} is ambiguous: it may mean {1}; use the digest, which begins with the digits in brackets"
    )]
    Ambiguous(String, String),
}

impl FromStr for Selector {
    type Err = SelectorError;

    fn from_str(text: &str) -> Result<Self, SelectorError> {
        // The program prints digests in this form.
        let text = text.strip_prefix("blake3:").unwrap_or(text);
        if text.is_empty() || text.len() > limits::SELECTOR_BYTES_MAX {
            return Err(SelectorError::Form);
        }
        Ok(Self(text.to_owned()))
    }
}

impl From<Digest> for Selector {
    fn from(digest: Digest) -> Self {
        Self(digest.to_string())
    }
}

impl std::fmt::Display for Selector {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

impl Selector {
    /// The policy that the selector matches.
    pub fn resolve<'a>(
        &self,
        candidates: impl Iterator<Item = Candidate<'a>> + Clone,
    ) -> Result<Digest, SelectorError> {
        let meant: Vec<_> = candidates.clone().filter(|it| self.matches(it)).collect();
        match &meant[..] {
            [one] => Ok(one.digest),
            [] => Err(SelectorError::Unknown(self.0.clone(), names(candidates))),
            _ => Err(SelectorError::Ambiguous(
                self.0.clone(),
                names(meant.into_iter()),
            )),
        }
    }

    /// Whether the selector matches this policy, and perhaps others.
    pub fn matches(&self, it: &Candidate<'_>) -> bool {
        if self.0 == BUILT_IN {
            return it.built_in;
        }
        // A whole digest must match only a digest, never a name.
        if let Ok(digest) = blake3::Hash::from_hex(&self.0) {
            return it.digest.0 == digest;
        }
        if let Some((name, rest)) = self.0.rsplit_once('@')
            && name == it.name
        {
            return rest == it.version || begins(&it.digest, rest);
        }
        self.0 == it.name || begins(&it.digest, &self.0)
    }
}

fn begins(digest: &Digest, digits: &str) -> bool {
    digits.len() >= limits::DIGEST_DIGITS_MIN
        && digest.to_string().starts_with(&digits.to_ascii_lowercase())
}

fn names<'a>(candidates: impl Iterator<Item = Candidate<'a>>) -> String {
    let names = candidates.map(|it| format!("{}@{} ({})", it.name, it.version, it.digest.short()));
    names.collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn selector_matches_digest_name_and_version() {
        let digest = |text: &str| Digest::of(text.as_bytes());
        let all = [
            ("rule", "1", "a"),
            ("rule", "2", "b"),
            ("rule", "2", "d"),
            ("standard", "1", "c"),
        ];
        let candidates = || {
            all.iter().map(|(name, version, file)| Candidate {
                digest: digest(file),
                name,
                version,
                built_in: *name == "standard",
            })
        };
        let find = |text: &str| {
            let selector = Selector::from_str(text).unwrap();
            selector.resolve(candidates())
        };
        assert_eq!(find("rule@1"), Ok(digest("a")));
        assert_eq!(find("standard"), Ok(digest("c")));
        assert_eq!(find("builtin"), Ok(digest("c")));
        let short = digest("a").short();
        assert_eq!(find(&short), Ok(digest("a")));
        assert_eq!(find(&short[..6].to_uppercase()), Ok(digest("a")));
        assert_eq!(find(&format!("rule@{short}")), Ok(digest("a")));
        for digits in [&short, &digest("a").to_string()] {
            assert_eq!(find(&format!("blake3:{digits}")), Ok(digest("a")));
        }
        assert!(matches!(find(&short[..5]), Err(SelectorError::Unknown(..))));
        let ambiguous = find("rule").unwrap_err().to_string();
        for version in ["rule@1", "rule@2"] {
            assert!(ambiguous.contains(version), "{ambiguous}");
        }
        // Two builds of one version differ only in their digests, which the error has.
        let ambiguous = find("rule@2").unwrap_err().to_string();
        let (_, digits) = ambiguous.rsplit_once('(').unwrap();
        let (digits, advice) = digits.split_once(')').unwrap();
        assert_eq!(find(digits), Ok(digest("d")), "{ambiguous}");
        assert!(advice.starts_with("; use the digest"), "{ambiguous}");
        let unknown = find("other").unwrap_err().to_string();
        assert!(unknown.contains("standard@1"), "{unknown}");
        for text in ["", "blake3:"] {
            assert_eq!(Selector::from_str(text), Err(SelectorError::Form));
        }
    }

    /// Orders refer to files by digest. A policy chooses its own name, so it could pose as another
    /// policy.
    #[test]
    fn whole_digest_never_matches_a_name() {
        let (meant, other) = (Digest::of(b"meant"), Digest::of(b"other"));
        let name = meant.to_string();
        let impostor = Candidate {
            digest: other,
            name: &name,
            version: "1",
            built_in: false,
        };
        let found = Selector::from(meant).resolve(std::iter::once(impostor));
        let is_unknown = matches!(found, Err(SelectorError::Unknown(..)));
        assert!(is_unknown, "{found:?}");
        let it = Candidate {
            digest: meant,
            name: "rule",
            ..impostor
        };
        let both = [impostor, it];
        let found = Selector::from(meant).resolve(both.into_iter());
        assert_eq!(found, Ok(meant));
    }
}
