//! Texts of rules with placeholders for a client: `{principal.clientId}`, `{principal.username}`
//! and `{principal.attributes.NAME}`.
//!
//! An inserted value must be literal, so that a client with the id `#` or `*` gains nothing (in
//! mosquitto it gained everything, CVE-2017-7650). If a value is missing or too long, the text
//! grants nothing to this client.

use super::principal::Principal;
use super::{Filter, RuleError};
use crate::limits;
use statehouse_protocol::pattern;

/// The prefix of every placeholder.
const PREFIX: &str = "{principal.";

#[derive(Debug)]
pub(crate) struct Template {
    text: Box<str>,
    parts: Vec<Part>,
}

#[derive(Debug)]
enum Part {
    Bytes(Box<[u8]>),
    ClientId,
    UserName,
    Attribute(Box<str>),
}

impl Part {
    /// The placeholder with this name, which follows [`PREFIX`].
    fn placeholder(name: &str) -> Result<Self, RuleError> {
        Ok(match name.split_once('.') {
            None if name == "clientId" => Self::ClientId,
            None if name == "username" => Self::UserName,
            Some(("attributes", name)) if !name.is_empty() => Self::Attribute(name.into()),
            _ => return Err(RuleError::Placeholder(format!("{PREFIX}{name}}}"))),
        })
    }

    /// The bytes of this part for a client. `None` if the part is a placeholder and there is no
    /// client, or its value is unknown or empty.
    fn value<'a>(&'a self, principal: Option<&Principal<'a>>) -> Option<&'a [u8]> {
        let value = match self {
            Self::Bytes(bytes) => return Some(bytes),
            Self::ClientId => principal?.client,
            Self::UserName => principal?.user?,
            Self::Attribute(name) => {
                let mut attributes = principal?.attributes.iter();
                &attributes.find(|(it, _)| it == name)?.1
            }
        };
        (!value.is_empty()).then_some(value.as_bytes())
    }
}

impl Template {
    /// Parses a literal text with placeholders.
    pub(super) fn parse(text: &str) -> Result<Self, RuleError> {
        let mut parts = Vec::new();
        let mut rest = text;
        while let Some((before, after)) = rest.split_once(PREFIX) {
            let (name, behind) = (after.split_once('}'))
                .ok_or_else(|| RuleError::Placeholder(format!("{PREFIX}{after}")))?;
            parts.push(Part::Bytes(before.as_bytes().into()));
            parts.push(Part::placeholder(name)?);
            rest = behind;
        }
        parts.push(Part::Bytes(rest.as_bytes().into()));
        Ok(Self {
            text: text.into(),
            parts,
        })
    }

    pub(super) fn parse_pattern(text: &str) -> Result<Self, RuleError> {
        if !pattern::is_closed(text.as_bytes()) {
            return Err(RuleError::Bracket(text.into()));
        }
        let template = Self::parse(text)?;
        // Only a whole pattern may precede a placeholder. The last part precedes none.
        let before = &template.parts[..template.parts.len() - 1];
        let is_open = |part: &Part| match part {
            Part::Bytes(bytes) => !pattern::is_closed(bytes) || ends_in_escape(bytes),
            _ => false,
        };
        if before.iter().any(is_open) {
            return Err(RuleError::Enclosed(text.into()));
        }
        // Checked again after the values are inserted.
        if text.len() > limits::RULE_PATTERN_BYTES_MAX
            || pattern::floating(text.as_bytes()) > limits::RULE_FLOATING_BYTES_MAX
        {
            return Err(RuleError::LongPattern);
        }
        Ok(template)
    }

    /// Parses a topic filter. A placeholder must be a whole level.
    pub(super) fn parse_topic(text: &str) -> Result<Self, RuleError> {
        let wrong = |why| RuleError::Topic(text.into(), why);
        if text.is_empty() {
            return Err(wrong("it is empty"));
        }
        if text.contains('\0') {
            return Err(wrong("it contains U+0000"));
        }
        let levels = text.split('/').count();
        if levels > limits::RULE_TOPIC_LEVELS_MAX {
            return Err(wrong("it has too many levels"));
        }
        for (at, level) in text.split('/').enumerate() {
            match level {
                "+" => {}
                "#" if at + 1 == levels => {}
                "#" => return Err(wrong("`#` is not its last level")),
                _ if level.contains(PREFIX) => {
                    let alone =
                        level.starts_with(PREFIX) && level.find('}') == Some(level.len() - 1);
                    if !alone {
                        return Err(wrong("a placeholder must be a whole level"));
                    }
                }
                _ if level.contains(['+', '#']) => {
                    return Err(wrong("a wildcard must be a whole level"));
                }
                _ => {}
            }
        }
        Self::parse(text)
    }

    /// Bytes without placeholders. `text` is their form in the file.
    pub(super) fn literal(text: &str, bytes: Vec<u8>) -> Self {
        Self {
            text: text.into(),
            parts: vec![Part::Bytes(bytes.into())],
        }
    }

    /// The text as written in the file.
    pub(crate) fn text(&self) -> &str {
        &self.text
    }

    /// Whether there are no placeholders.
    pub(crate) fn is_static(&self) -> bool {
        self.parts.iter().all(|it| matches!(it, Part::Bytes(_)))
    }

    /// Whether a placeholder touches another placeholder or, in a pattern, a wildcard.
    /// `{principal.username}*` matches all names that begin with the user's name: for `press-1`
    /// also those of `press-10`.
    pub(crate) fn has_open_placeholder(&self, is_pattern: bool) -> bool {
        let is_placeholder = |part: &Part| !matches!(part, Part::Bytes(_));
        let touches_wildcard = |left: &Part, right: &Part| match (left, right) {
            (Part::Bytes(left), right) if is_placeholder(right) => ends_with_wildcard(left),
            (left, Part::Bytes(right)) if is_placeholder(left) => {
                matches!(right.first(), Some(b'*' | b'?' | b'['))
            }
            _ => false,
        };
        let parts = self.parts.iter();
        let parts: Vec<_> = parts
            .filter(|it| !matches!(it, Part::Bytes(bytes) if bytes.is_empty()))
            .collect();
        parts.windows(2).any(|pair| {
            let [left, right] = pair else { return false };
            is_placeholder(left) && is_placeholder(right)
                || is_pattern && touches_wildcard(left, right)
        })
    }

    /// A text in braces that is probably meant as a placeholder, but is literal: `{username}`,
    /// `{Principal.clientId}` or `${principal.username}`, whose `$` is literal.
    pub(crate) fn misspelt_placeholder(&self) -> Option<&str> {
        let texts = self.text.split_inclusive('}');
        texts.filter(|it| it.ends_with('}')).find_map(|text| {
            let open = text.find('{')?;
            let inside = &text[open..];
            if inside.starts_with(PREFIX) {
                return text[..open].ends_with('$').then(|| &text[open - 1..]);
            }
            let lower = inside.to_ascii_lowercase();
            let names = ["principal", "username", "clientid"];
            names.iter().any(|it| lower.contains(it)).then_some(inside)
        })
    }

    /// Whether the pattern has brackets with no byte in them, `[]`, which match nothing.
    pub(crate) fn has_empty_brackets(&self) -> bool {
        let (mut bytes, mut is_inside) = (self.text.bytes().peekable(), false);
        while let Some(byte) = bytes.next() {
            match byte {
                b'\\' => _ = bytes.next(),
                b'[' if !is_inside && bytes.peek() == Some(&b']') => return true,
                b'[' => is_inside = true,
                b']' => is_inside = false,
                _ => {}
            }
        }
        false
    }

    /// The key or the pattern with the values of a client.
    pub(crate) fn bytes(
        &self,
        is_pattern: bool,
        principal: Option<&Principal<'_>>,
    ) -> Option<Vec<u8>> {
        match is_pattern {
            true => self.pattern(principal),
            false => self.exact(principal),
        }
    }

    fn exact(&self, principal: Option<&Principal<'_>>) -> Option<Vec<u8>> {
        let mut bytes = Vec::new();
        for part in &self.parts {
            bytes.extend_from_slice(part.value(principal)?);
        }
        Some(bytes)
    }

    /// The pattern with the values of a client.
    pub(crate) fn pattern(&self, principal: Option<&Principal<'_>>) -> Option<Vec<u8>> {
        let mut pattern = Vec::new();
        for part in &self.parts {
            let value = part.value(principal)?;
            match part {
                Part::Bytes(_) => pattern.extend_from_slice(value),
                _ => pattern::escape(&mut pattern, value),
            }
        }
        // A client chooses its id, but must not choose the cost of a comparison by it.
        let is_short = pattern.len() <= limits::RULE_PATTERN_BYTES_MAX
            && pattern::floating(&pattern) <= limits::RULE_FLOATING_BYTES_MAX;
        is_short.then_some(pattern)
    }

    /// The topic filter with the values of a client.
    pub(crate) fn filter(&self, principal: Option<&Principal<'_>>) -> Option<Filter> {
        let mut filter = Filter::default();
        for level in self.text.split('/') {
            let placeholder = level
                .strip_prefix(PREFIX)
                .and_then(|it| it.strip_suffix('}'));
            match placeholder {
                None => filter.push(level.as_bytes()),
                Some(name) => {
                    filter.push_literal(Part::placeholder(name).ok()?.value(principal)?)?;
                }
            }
        }
        Some(filter)
    }
}

/// Whether the last of these bytes of a pattern is a wildcard, and not an escaped character.
fn ends_with_wildcard(bytes: &[u8]) -> bool {
    let Some((last, before)) = bytes.split_last() else {
        return false;
    };
    matches!(last, b'*' | b'?' | b']') && !ends_in_escape(before)
}

/// Whether the next byte after these bytes of a pattern, which end outside brackets, is escaped.
fn ends_in_escape(bytes: &[u8]) -> bool {
    let escapes = bytes.iter().rev().take_while(|byte| **byte == b'\\');
    escapes.count() % 2 == 1
}
