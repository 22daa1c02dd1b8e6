//! A set point, a key under `temp/`, is a number from -40 to 125. The rule refuses other values,
//! and says how many of this client it refused. The same rule stands in `../js` and `../python`,
//! and all three answer with the same bytes.
//!
//! A rule must not keep state between two requests: the store re-executes redelivered requests, and
//! the answer must have the same bytes. So the count is in a hidden key per client. It expires when
//! the client had no refusal for a day, so disconnected clients leave nothing behind.

use std::panic;

use bindings::exports::statehouse::policy::admission::{Command, Guest, Identity};
use bindings::statehouse::policy::types::{Access, Bytes, Fault};
use bindings::statehouse::policy::{log, table};

#[allow(missing_docs, unreachable_pub, unsafe_code, clippy::all)]
mod bindings {
    wit_bindgen::generate!({ path: "wit", world: "rule", export_macro_name: "export_rule" });
}

const LOWEST: f64 = -40.0;
const HIGHEST: f64 = 125.0;
const DAY_MS: u64 = 86_400_000;

fn admit(command: &Command) -> Result<(), Fault> {
    let applies = command.name == "SET" && command.key.starts_with(b"temp/");
    if !applies || is_set_point(&command.value) {
        return Ok(());
    }
    let refused = count(command)?;
    Err(Fault::Other(format!(
        "a set point is a number from {LOWEST} to {HIGHEST} (refusal {refused})"
    )))
}

/// Counts a refusal of the client. Returns how many there are.
fn count(command: &Command) -> Result<u64, Fault> {
    let client = command.client.as_deref().unwrap_or_default();
    let key = Bytes::Owned(format!("set-point/refusals/{client}").into_bytes());
    let before = match table::head(&key, Access::Hidden)? {
        Some(entry) => table::load(&key, 0, entry.len)?.unwrap_or_default(),
        None => Vec::new(),
    };
    let before = String::from_utf8_lossy(&before).parse().unwrap_or(0);
    let count: u64 = before + 1;
    let value = Bytes::Owned(count.to_string().into_bytes());
    let expires = Some(command.now + DAY_MS);
    table::put(&key, &value, None, None, expires)?;
    Ok(count)
}

/// The format is defined byte by byte, so that it is the same in every language: `-12`, `21.5`, but
/// not `2e1` or `+3`.
fn is_set_point(value: &[u8]) -> bool {
    // The longest number is `-123456.123456`, but a value may have a megabyte.
    if value.len() > 14 {
        return false;
    }
    let digits = value.strip_prefix(b"-").unwrap_or(value);
    let mut parts = digits.split(|&byte| byte == b'.');
    let is_number = parts.clone().count() <= 2
        && parts.all(|part| matches!(part.len(), 1..=6) && part.iter().all(u8::is_ascii_digit));
    let number = str::from_utf8(value).ok().filter(|_| is_number);
    number
        .and_then(|text| text.parse().ok())
        .is_some_and(|number: f64| (LOWEST..=HIGHEST).contains(&number))
}

struct SetPoint;

impl Guest for SetPoint {
    fn describe() -> Identity {
        // The host calls this first. It names the line of a panic as the cause of the failure.
        panic::set_hook(Box::new(|bug| {
            let place = bug
                .location()
                .map(|it| format!("{}:{}: ", it.file(), it.line()));
            let message = bug.payload_as_str().unwrap_or("a panic");
            log::write(log::Level::Error, &(place.unwrap_or_default() + message));
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

bindings::export_rule!(SetPoint with_types_in bindings);

#[cfg(test)]
mod tests {
    use super::is_set_point;

    #[test]
    fn set_point_is_a_number_within_bounds() {
        for good in ["-40", "125", "21.5", "005", "125.000000", "-39.999999"] {
            assert!(is_set_point(good.as_bytes()), "{good}");
        }
        for bad in [
            "",
            "-",
            ".",
            "5.",
            ".5",
            "-40.000001",
            "125.000001",
            "--5",
            "+7",
            "1e1",
            " 7",
            "7 ",
            "1.2.3",
            "0000007",
            "7.0000000",
            "NaN",
            "inf",
            "7\r",
            "\u{0667}",
        ] {
            assert!(!is_set_point(bad.as_bytes()), "{bad}");
        }
    }
}
