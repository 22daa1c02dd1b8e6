//! A switch: a setting that is on, off, or not set, so that an environment variable can turn off
//! what the file turns on.

use std::ffi::OsStr;

use clap::builder::{BoolishValueParser, TypedValueParser, ValueParserFactory};

use super::layer::Layer;

/// A setting that is on, off, or not set. As a flag it has no value and means on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Deserialize)]
#[serde(from = "bool")]
pub struct Switch(Option<bool>);

impl Switch {
    /// The value that clap uses without flag and variable. No variable can contain it.
    pub(super) const UNSET: &'static str = "\0";

    /// Whether it is on.
    pub fn is_on(self) -> bool {
        self.0 == Some(true)
    }
}

impl From<bool> for Switch {
    fn from(on: bool) -> Self {
        Self(Some(on))
    }
}

impl Layer for Switch {
    fn over(self, lower: Self) -> Self {
        Self(self.0.or(lower.0))
    }

    /// A switch that is off changes nothing, so it needs no other setting.
    fn is_set(&self) -> bool {
        self.is_on()
    }
}

impl ValueParserFactory for Switch {
    type Parser = SwitchParser;

    fn value_parser() -> SwitchParser {
        SwitchParser
    }
}

/// Parses the value of a variable, in the spellings of [`BoolishValueParser`].
#[derive(Clone, Debug)]
pub struct SwitchParser;

impl TypedValueParser for SwitchParser {
    type Value = Switch;

    fn parse_ref(
        &self,
        command: &clap::Command,
        arg: Option<&clap::Arg>,
        value: &OsStr,
    ) -> Result<Switch, clap::Error> {
        if value == Switch::UNSET {
            return Ok(Switch::default());
        }
        let on = BoolishValueParser::new().parse_ref(command, arg, value)?;
        Ok(on.into())
    }
}

#[cfg(test)]
mod tests {
    use clap::{Args, FromArgMatches};

    use super::*;
    use crate::ListenFlags;

    fn flags(arguments: &[&str]) -> ListenFlags {
        let command = ListenFlags::augment_args(clap::Command::new("serve"));
        let matches = command.no_binary_name(true).get_matches_from(arguments);
        ListenFlags::from_arg_matches(&matches).unwrap()
    }

    fn variable(value: &str) -> Result<Switch, clap::Error> {
        SwitchParser.parse_ref(&clap::Command::new("serve"), None, value.as_ref())
    }

    #[test]
    fn unset_switch_leaves_the_file_in_force() {
        let (on, off) = (Switch::from(true), Switch::from(false));
        assert_eq!(flags(&[]).insecure, Switch::default());
        assert_eq!(flags(&["--insecure"]).insecure, on);
        assert_eq!(Switch::default().over(on), on);
        assert_eq!(on.over(off), on);
    }

    #[test]
    fn variable_turns_off_what_the_file_turns_on() {
        for text in ["false", "0", "no", "OFF"] {
            assert!(!variable(text).unwrap().over(true.into()).is_on(), "{text}");
        }
        for text in ["true", "1", "yes", "On"] {
            assert!(variable(text).unwrap().over(false.into()).is_on(), "{text}");
        }
        assert!(variable("perhaps").is_err());
        assert!(variable("").is_err());
    }
}
