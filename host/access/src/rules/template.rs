//! Text of a rule with places for what is known of a client: `{principal.clientId}`, `{principal.username}`,
//! `{principal.attributes.NAME}`.
//!
//! What is put in means itself: a client that calls itself `#` or `*` gets no more by that (mosquitto once gave it
//! everything, CVE-2017-7650). Where something is not known of a client, or too long, the text is for others.

use super::principal::Principal;
use super::{Filter, Mistake};
use crate::limits;
use statehouse_protocol::pattern;

/// What every place begins with.
const OPENS: &str = "{principal.";

/// The text.
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
    /// What the place between the braces is for.
    fn place(name: &str) -> Result<Self, Mistake> {
        Ok(match name.split_once('.') {
            None if name == "clientId" => Self::ClientId,
            None if name == "username" => Self::UserName,
            Some(("attributes", name)) if !name.is_empty() => Self::Attribute(name.into()),
            _ => return Err(Mistake::Place(format!("{OPENS}{name}}}"))),
        })
    }

    /// What stands there; none where that is not known, or where the part is a place and nobody is asked about.
    fn value<'a>(&'a self, who: Option<&Principal<'a>>) -> Option<&'a [u8]> {
        let value = match self {
            Self::Bytes(bytes) => return Some(bytes),
            Self::ClientId => who?.client,
            Self::UserName => who?.user?,
            Self::Attribute(name) => {
                let mut attributes = who?.attributes.iter();
                &attributes.find(|(it, _)| it == name)?.1
            }
        };
        (!value.is_empty()).then_some(value.as_bytes())
    }
}

impl Template {
    /// Reads one.
    pub(super) fn parse(text: &str) -> Result<Self, Mistake> {
        let mut parts = Vec::new();
        let mut rest = text;
        while let Some((before, place)) = rest.split_once(OPENS) {
            let (name, behind) =
                (place.split_once('}')).ok_or_else(|| Mistake::Place(format!("{OPENS}{place}")))?;
            parts.push(Part::Bytes(before.as_bytes().into()));
            parts.push(Part::place(name)?);
            rest = behind;
        }
        parts.push(Part::Bytes(rest.as_bytes().into()));
        Ok(Self {
            text: text.into(),
            parts,
        })
    }

    /// Reads a pattern.
    pub(super) fn parse_pattern(text: &str) -> Result<Self, Mistake> {
        if !pattern::is_closed(text.as_bytes()) {
            return Err(Mistake::Bracket(text.into()));
        }
        let template = Self::parse(text)?;
        // As long as it can be without what is put in.
        if text.len() > limits::RULE_PATTERN_BYTES_MAX
            || pattern::floating(text.as_bytes()) > limits::RULE_FLOATING_BYTES_MAX
        {
            return Err(Mistake::LongPattern);
        }
        Ok(template)
    }

    /// Reads a topic filter. A place takes a whole level.
    pub(super) fn parse_topic(text: &str) -> Result<Self, Mistake> {
        let wrong = |why| Mistake::Topic(text.into(), why);
        if text.is_empty() {
            return Err(wrong("it is empty"));
        }
        if text.contains('\0') {
            return Err(wrong("it holds U+0000"));
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
                _ if level.contains(OPENS) => {
                    let alone =
                        level.starts_with(OPENS) && level.find('}') == Some(level.len() - 1);
                    if !alone {
                        return Err(wrong("a place in braces has to take a whole level"));
                    }
                }
                _ if level.contains(['+', '#']) => {
                    return Err(wrong("a wildcard has to take a whole level"));
                }
                _ => {}
            }
        }
        Self::parse(text)
    }

    /// Bytes without any place; `text` is how they stand in the file.
    pub(super) fn literal(text: &str, bytes: Vec<u8>) -> Self {
        Self {
            text: text.into(),
            parts: vec![Part::Bytes(bytes.into())],
        }
    }

    /// The text as it stands in the file.
    pub(crate) fn text(&self) -> &str {
        &self.text
    }

    /// Whether it is the same for everybody.
    pub(crate) fn is_static(&self) -> bool {
        self.parts.iter().all(|it| matches!(it, Part::Bytes(_)))
    }

    /// Whether a place of this pattern has no end: a wildcard or another place stands directly next
    /// to it. `{principal.username}*` means all names that begin with the user's: for `press-1`
    /// also those of `press-10`.
    pub(crate) fn has_open_place(&self) -> bool {
        let is_place = |part: &Part| !matches!(part, Part::Bytes(_));
        let opens_to = |left: &Part, right: &Part| match (left, right) {
            (Part::Bytes(left), right) if is_place(right) => ends_with_wildcard(left),
            (left, Part::Bytes(right)) if is_place(left) => {
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
            is_place(left) && is_place(right) || opens_to(left, right)
        })
    }

    /// The bytes, with what is known of a client.
    pub(crate) fn exact(&self, who: Option<&Principal<'_>>) -> Option<Vec<u8>> {
        let mut bytes = Vec::new();
        for part in &self.parts {
            bytes.extend_from_slice(part.value(who)?);
        }
        Some(bytes)
    }

    /// The pattern, with what is known of a client.
    pub(crate) fn pattern(&self, who: Option<&Principal<'_>>) -> Option<Vec<u8>> {
        let mut pattern = Vec::new();
        for part in &self.parts {
            let value = part.value(who)?;
            match part {
                Part::Bytes(_) => pattern.extend_from_slice(value),
                _ => pattern::escape(&mut pattern, value),
            }
        }
        // A client chooses its id: it may not choose how long a comparison takes.
        let is_short = pattern.len() <= limits::RULE_PATTERN_BYTES_MAX
            && pattern::floating(&pattern) <= limits::RULE_FLOATING_BYTES_MAX;
        is_short.then_some(pattern)
    }

    /// The topic filter, with what is known of a client.
    pub(crate) fn filter(&self, who: Option<&Principal<'_>>) -> Option<Filter> {
        let mut filter = Filter::default();
        for level in self.text.split('/') {
            let place = level
                .strip_prefix(OPENS)
                .and_then(|it| it.strip_suffix('}'));
            match place {
                None => filter.push(level.as_bytes()),
                Some(name) => filter.push_literal(Part::place(name).ok()?.value(who)?)?,
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
    let escapes = before.iter().rev().take_while(|byte| **byte == b'\\');
    matches!(last, b'*' | b'?' | b']') && escapes.count() % 2 == 0
}
