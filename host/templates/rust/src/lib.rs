//! Keys under `setpoint/` hold a number from 5 to 30. The standard policy executes every command
//! that this rule admits.
//!
//! A rule must not keep state between two requests: the store re-executes redelivered requests, and
//! the answer must have the same bytes. It may keep state in hidden keys of the table.

use std::panic;

use exports::statehouse::policy::admission::{Command, Guest, Identity};
use statehouse::policy::{log, types::Fault};

wit_bindgen::generate!({ path: "wit", world: "rule" });

fn admit(command: &Command) -> Result<(), Fault> {
    if command.name != "SET" || !command.key.starts_with(b"setpoint/") {
        return Ok(());
    }
    if !number(&command.value).is_some_and(|it| (5.0..=30.0).contains(&it)) {
        return Err(Fault::Other(
            "a set point is a number from 5 to 30".to_owned(),
        ));
    }
    Ok(())
}

/// Up to six digits, and perhaps a sign and a fraction of up to six digits. Rust's own parser also
/// accepts `1e1` and `inf`.
fn number(value: &[u8]) -> Option<f64> {
    let text = str::from_utf8(value).ok()?;
    let (whole, fraction) = text.split_once('.').unwrap_or((text, "0"));
    let are_digits =
        |it: &str| (1..=6).contains(&it.len()) && it.bytes().all(|it| it.is_ascii_digit());
    let is_plain = are_digits(whole.strip_prefix('-').unwrap_or(whole)) && are_digits(fraction);
    text.parse().ok().filter(|_| is_plain)
}

struct Rule;

impl Guest for Rule {
    fn describe() -> Identity {
        // The host calls this first. It names the line of a panic as the cause of the failure.
        panic::set_hook(Box::new(|bug| {
            let place = bug
                .location()
                .map_or(String::new(), |it| format!("{}:{}: ", it.file(), it.line()));
            let message = bug.payload_as_str().unwrap_or("a panic");
            log::write(log::Level::Error, &format!("{place}{message}"));
        }));
        Identity {
            name: env!("CARGO_PKG_NAME").to_owned(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
        }
    }

    fn admit(command: Command) -> Result<(), Fault> {
        admit(&command)
    }
}

export!(Rule);

#[cfg(test)]
mod tests {
    use exports::statehouse::policy::admission::Condition;

    use super::*;

    /// A native test takes microseconds, which suits many cases. The transcripts in tests/ run on
    /// the real store.
    #[test]
    fn only_numbers_within_the_bounds_are_set() {
        let is_admitted = |key: &str, value: &str| {
            let command = Command {
                name: "SET".to_owned(),
                key: key.into(),
                value: value.into(),
                changes: true,
                condition: Condition::Always,
                expiry: None,
                timestamp: Some("1700000000000:0:test".to_owned()),
                fencing_token: None,
                client: Some("test".to_owned()),
                now: 1_700_000_000_000,
            };
            admit(&command).is_ok()
        };
        for good in ["5", "21.5", "30"] {
            assert!(is_admitted("setpoint/kitchen", good), "{good}");
        }
        for bad in ["", "4.9", "30.1", "-7", "hot", "NaN", "inf", "1e1", "+7", "7.", "0000007"] {
            assert!(!is_admitted("setpoint/kitchen", bad), "{bad}");
        }
        assert!(is_admitted("other", "hot"));
    }
}
