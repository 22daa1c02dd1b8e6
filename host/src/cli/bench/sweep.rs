//! The setting that changes from run to run.

use std::str::FromStr;

use statehouse_loadgen::limits;

/// One setting and its values.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Sweep {
    Connections(Vec<u64>),
    Rate(Vec<u64>),
}

impl FromStr for Sweep {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (what, values) = text.split_once('=').ok_or(FORM)?;
        let (max, sweep): (u64, fn(Vec<u64>) -> Self) = match what {
            "connections" => (limits::LOAD_CONNECTIONS_MAX as u64, Self::Connections),
            "rate" => (limits::LOAD_RATE_MAX, Self::Rate),
            _ => return Err(FORM.to_owned()),
        };
        let values = values.split(',').map(|value| {
            let value = value.trim().parse().map_err(|_| FORM.to_owned())?;
            match (1..=max).contains(&value) {
                true => Ok(value),
                false => Err(format!("{value} is not between 1 and {max}")),
            }
        });
        let values = values.collect::<Result<Vec<u64>, String>>()?;
        match values.len() {
            0..=limits::LOAD_SWEEP_MAX => Ok(sweep(values)),
            count => Err(format!(
                "{count} values, and at most {}",
                limits::LOAD_SWEEP_MAX
            )),
        }
    }
}

const FORM: &str = "write connections=1,10,100 or rate=1000,2000,4000";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sweep_is_a_setting_and_its_values() {
        assert_eq!(
            "connections=1,10".parse(),
            Ok(Sweep::Connections(vec![1, 10]))
        );
        assert_eq!("rate=5, 7".parse(), Ok(Sweep::Rate(vec![5, 7])));
        let many = format!("rate={}", vec!["1"; limits::LOAD_SWEEP_MAX + 1].join(","));
        for bad in [
            "",
            "rate",
            "rate=",
            "rate=x",
            "rate=0",
            "rate=1,,2",
            "keys=1",
            "connections=10001",
            &many,
        ] {
            assert!(bad.parse::<Sweep>().is_err(), "{bad}");
        }
    }
}
