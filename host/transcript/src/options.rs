//! The options after `--` on the line of a request, which change its PUBLISH.

use crate::matching::{Properties, Variables};
use crate::quote::Word;

/// The options of one request.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Options {
    /// User properties that are set, in order.
    pub set: Properties,
    /// User properties that are left out.
    pub without: Vec<String>,
    /// `@qos`.
    pub qos: Option<u8>,
    /// `@expiry`, in seconds.
    pub expiry_s: Option<u32>,
    /// `@type`.
    pub content_type: Option<String>,
    /// `@response`.
    pub response_topic: Option<String>,
    /// `-@response`.
    pub without_response: bool,
    /// `-@correlation`.
    pub without_correlation: bool,
    /// `@times`: how often the payload is repeated.
    pub times: Option<usize>,
}

impl Options {
    /// Parses the words after `--`. `now` returns a reading of the clock with an offset in
    /// milliseconds.
    pub fn read(
        words: &[Word],
        variables: &Variables,
        now: impl Fn(i64) -> String,
    ) -> Result<Self, String> {
        Self::parse(words, |value| variables.value(value, &now))
    }

    /// Checks the words after `--` before any variable has a value.
    pub(crate) fn check(words: &[Word]) -> Result<(), String> {
        // A variable stands for a text and for a number.
        let value = |word: &str| match word.starts_with('$') {
            true => "0".to_owned(),
            false => word.to_owned(),
        };
        Self::parse(words, |word| Ok(value(word))).map(drop)
    }

    fn parse(
        words: &[Word],
        value_of: impl Fn(&str) -> Result<String, String>,
    ) -> Result<Self, String> {
        let mut options = Self::default();
        for word in words {
            let text = word.text()?;
            let unknown = || format!("unknown option {text:?}");
            let Some((name, value)) = text.split_once('=') else {
                match text.strip_prefix('-') {
                    Some("@response") => options.without_response = true,
                    Some("@correlation") => options.without_correlation = true,
                    Some(name) if !name.starts_with('@') => options.without.push(name.into()),
                    _ => return Err(unknown()),
                }
                continue;
            };
            let value = match word.quoted {
                true => value.to_owned(),
                false => value_of(value)?,
            };
            let number = || format!("{text:?} is not a number");
            match name {
                "@qos" => {
                    let qos: Option<u8> = value.parse().ok().filter(|qos| *qos <= 2);
                    let wrong = || format!("{text:?}: the QoS is 0, 1 or 2");
                    options.qos = Some(qos.ok_or_else(wrong)?);
                }
                "@expiry" => options.expiry_s = Some(value.parse().map_err(|_| number())?),
                "@times" => options.times = Some(value.parse().map_err(|_| number())?),
                "@type" => options.content_type = Some(value),
                "@response" => options.response_topic = Some(value),
                _ if name.starts_with('@') => return Err(unknown()),
                _ => options.set.push((name.into(), value)),
            }
        }
        Ok(options)
    }

    /// Applies the options to the user properties that a client of the dialect sends.
    pub fn shape(&self, user: &mut Properties) {
        let given = |name: &String| self.set.iter().any(|(set, _)| set == name);
        user.retain(|(name, _)| !given(name) && !self.without.contains(name));
        user.extend(self.set.iter().cloned());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::quote::words;

    #[test]
    fn options_change_the_user_properties_of_a_request() {
        let read = |line: &str| {
            let variables = Variables::default();
            Options::read(&words(line).unwrap(), &variables, |ms| format!("now{ms:+}"))
        };
        let error = read("__ts=$now-5 -__srcId x=1 x=$2 @qos=2 -@response").unwrap_err();
        assert!(error.contains("$2"), "{error}");
        let options = read("__ts=$now-5 -__srcId x=1 \"x=$2\" @qos=2 -@response").unwrap();
        assert!(options.without_response && options.qos == Some(2));
        let mut user = ["__ts", "__protVer", "__srcId"]
            .map(|name| (name.to_owned(), String::new()))
            .to_vec();
        options.shape(&mut user);
        let expected = [
            ("__protVer", ""),
            ("__ts", "now-5"),
            ("x", "1"),
            ("x", "$2"),
        ];
        assert_eq!(
            user,
            expected.map(|(name, value)| (name.to_owned(), value.to_owned()))
        );
        assert!(read("qos").is_err() && read("@qos=x").is_err());
    }
}
