//! Compares a line of a transcript with a received message, and corrects the line if they differ.

use std::collections::HashMap;

use crate::quote::{Word, quote};
use crate::reading::Reading;
use crate::script::DEFAULT_CLIENT;

/// User properties in order.
pub type Properties = Vec<(String, String)>;

/// A received message.
#[derive(Clone, Copy, Debug)]
pub struct Said<'a> {
    /// The payload.
    pub payload: &'a [u8],
    /// The user properties.
    pub user: &'a [(String, String)],
    /// Properties that the message must have although the line does not contain them.
    pub implied: &'a [(String, String)],
}

/// The values of the variables so far.
#[derive(Clone, Debug, Default)]
pub struct Variables(HashMap<String, String>);

impl Variables {
    /// The value of a word: the word itself, or that of `$now` or a variable, both optionally with
    /// `+ms` or `-ms`.
    pub fn value(&self, word: &str, now: impl Fn(i64) -> String) -> Result<String, String> {
        let Some(name) = word.strip_prefix('$') else {
            return Ok(word.into());
        };
        let (name, offset_ms) = match name.find(['+', '-']) {
            Some(at) => {
                let offset = name[at..].parse();
                let offset: i64 =
                    offset.map_err(|_| format!("{word:?} has an offset that is not a number"))?;
                (&name[..at], offset)
            }
            None => (name, 0),
        };
        if name == "now" {
            return Ok(now(offset_ms));
        }
        let value = self.0.get(name);
        let value = value.ok_or_else(|| format!("${name} has no value yet"))?;
        if offset_ms == 0 {
            return Ok(value.clone());
        }
        match Reading::parse(value) {
            Some(reading) => Ok(reading.moved(offset_ms).to_string()),
            None => Err(format!("${name} is no version: {value:?}")),
        }
    }

    /// The words of a request. One that is not quoted and begins with `$` is a variable.
    pub fn words(
        &self,
        words: &[Word],
        now: impl Fn(i64) -> String,
    ) -> Result<Vec<Vec<u8>>, String> {
        let bytes = |word: &Word| match word.bare() {
            Some(text) if text.starts_with('$') => self.value(text, &now).map(String::into_bytes),
            _ => Ok(word.bytes.clone()),
        };
        words.iter().map(bytes).collect()
    }

    /// Compares two versions: `$left sign $right`. `now` returns a reading of the clock with an
    /// offset in milliseconds. The error is that the comparison does not hold, or that a version
    /// cannot be read.
    pub fn compare(
        &self,
        left: &str,
        sign: &str,
        right: &str,
        now: impl Fn(i64) -> String,
    ) -> Result<(), String> {
        let reading = |word: &str| {
            let value = self.value(word, &now)?;
            Reading::parse(&value).ok_or_else(|| format!("{word} is no version: {value:?}"))
        };
        let (left, right) = (reading(left)?, reading(right)?);
        let holds = match sign {
            "<" => left < right,
            "=" => left == right,
            ">" => left > right,
            _ => return Err("versions are compared with <, = and >".into()),
        };
        if holds {
            Ok(())
        } else {
            Err(format!("{left} {sign} {right} does not hold"))
        }
    }

    /// Compares payload and user properties (in any order) and binds variables. If they differ,
    /// returns the correct user properties of the line, without the implied ones. The error is
    /// about the line itself, or about a missing implied property.
    pub fn differs(
        &mut self,
        said: Said<'_>,
        payload: &[u8],
        words: &[Word],
    ) -> Result<Option<String>, String> {
        let mut expected: Properties = said.implied.to_vec();
        let mut names: HashMap<&str, &str> = HashMap::new();
        for word in words {
            let text = word.text()?;
            if word.bare().is_some_and(|word| word.starts_with('@')) {
                continue;
            }
            let (name, value) = text
                .split_once('=')
                .ok_or_else(|| format!("a property has the form name=value, not {text:?}"))?;
            let bound = match value.strip_prefix('$') {
                Some(variable) if !word.quoted => {
                    names.insert(name, value);
                    let of_name = said.user.iter().find(|(had, _)| had == name);
                    match (self.0.get(variable), of_name) {
                        (Some(known), _) => known.clone(),
                        (None, Some((_, new))) => {
                            self.0.insert(variable.into(), new.clone());
                            new.clone()
                        }
                        (None, None) => value.into(),
                    }
                }
                _ => value.into(),
            };
            expected.push((name.into(), bound));
        }
        let sorted = |properties: &[(String, String)]| {
            let mut properties = properties.to_vec();
            properties.sort();
            properties
        };
        if said.payload == payload && sorted(said.user) == sorted(&expected) {
            return Ok(None);
        }
        let lacks = |pair: &&(String, String)| !said.user.contains(pair);
        let missing: Vec<_> = said.implied.iter().filter(lacks).collect();
        if !missing.is_empty() {
            return Err(format!("{:?} lacks {missing:?}", said.user));
        }
        let explicit = |pair: &&(String, String)| !said.implied.contains(pair);
        let mut rest = String::new();
        for (name, value) in said.user.iter().filter(explicit) {
            // A variable remains if its value fits. A version that has no variable yet becomes one.
            let shown = match names.get(name.as_str()) {
                Some(variable) if self.0.get(&variable[1..]) == Some(value) => {
                    (*variable).to_owned()
                }
                _ if Reading::parse(value).is_some() => self.name_for(value),
                _ => quote(value.as_bytes()),
            };
            rest.push_str(&format!(" {name}={shown}"));
        }
        Ok(Some(rest))
    }

    fn name_for(&mut self, value: &str) -> String {
        let mut known: Vec<_> = self.0.iter().filter(|(_, had)| *had == value).collect();
        // Several variables may have the value. Sorting makes the choice deterministic.
        known.sort();
        if let Some((name, _)) = known.first() {
            return format!("${name}");
        }
        let mut number = self.0.len() + 1;
        while self.0.contains_key(&format!("v{number}")) {
            number += 1;
        }
        let name = format!("v{number}");
        self.0.insert(name.clone(), value.into());
        format!("${name}")
    }
}

/// Whether the words contain a sign such as `@bare`.
pub fn has_sign(words: &[Word], sign: &str) -> bool {
    words.iter().any(|word| word.bare() == Some(sign))
}

/// A client's name in front of a sign; empty for the default client.
pub fn shown(client: &str) -> &str {
    if client == DEFAULT_CLIENT { "" } else { client }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::quote::words;

    const VERSION: &str = "001700000000000:00001:StateStore";

    fn user(pairs: &[(&str, &str)]) -> Properties {
        let owned = |(name, value): &(&str, &str)| ((*name).to_owned(), (*value).to_owned());
        pairs.iter().map(owned).collect()
    }

    #[test]
    fn variable_keeps_its_first_value() {
        let mut variables = Variables::default();
        let received = user(&[("__stat", "200"), ("__ts", VERSION)]);
        let implied = user(&[("__stat", "200")]);
        let said = Said {
            payload: b"+OK\r\n",
            user: &received,
            implied: &implied,
        };
        let mut differs = |line: &str| {
            let words = words(line).unwrap();
            variables.differs(said, &words[0].bytes, &words[1..])
        };
        assert_eq!(differs("+OK\\r\\n __ts=$a"), Ok(None));
        assert_eq!(differs("+OK\\r\\n __ts=$a"), Ok(None));
        assert_eq!(differs("+OK\\r\\n"), Ok(Some(" __ts=$a".into())));
        assert_eq!(differs("-NO\\r\\n __ts=$a"), Ok(Some(" __ts=$a".into())));
        assert_eq!(
            differs("+OK\\r\\n __ts=$a x=1"),
            Ok(Some(" __ts=$a".into()))
        );
        assert!(differs("+OK\\r\\n nonsense").is_err());
        let compare = |left: &str, sign: &str, right: &str| {
            let now = |ms: i64| format!("{:015}:00000:client", 1_700_000_000_000_i64 + ms);
            variables.compare(left, sign, right, now)
        };
        assert!(compare("$a", "=", "$a").is_ok());
        assert!(compare("$a", "<", "$a").is_err());
        // Regression: the present time was no version.
        assert!(compare("$a", ">", "$now-5000").is_ok());
        assert!(compare("$now+1", ">", "$a").is_ok());
        assert!(compare("$now", ">", "$a").is_err());
        let moved = variables.value("$a-1", |_| unreachable!());
        assert_eq!(moved.as_deref(), Ok("001699999999999:00001:StateStore"));
        assert!(variables.value("$b", |_| unreachable!()).is_err());
        let sent = |line: &str| variables.words(&words(line).unwrap(), |_| "now".to_owned());
        let expected = ["SET", VERSION, "$a", "now"].map(|word| word.as_bytes().to_vec());
        assert_eq!(sent("SET $a \"$a\" $now"), Ok(expected.to_vec()));
        assert!(sent("SET $b").is_err());
    }

    #[test]
    fn implied_properties_are_required_and_new_versions_named() {
        let mut variables = Variables::default();
        let received = user(&[("__ts", VERSION)]);
        let implied = user(&[("__stat", "200")]);
        let payload = b"x";
        let said = |implied| Said {
            payload,
            user: &received,
            implied,
        };
        assert!(variables.differs(said(&implied), b"x", &[]).is_err());
        let differs = variables.differs(said(&[]), b"x", &[]);
        assert_eq!(differs, Ok(Some(" __ts=$v1".into())));
        let differs = variables.differs(said(&[]), b"x", &[]);
        assert_eq!(differs, Ok(Some(" __ts=$v1".into())));
    }
}
