//! Runs transcripts on a harness: conversations in files, compared byte for byte.
//!
//! `statehouse_transcript` defines the format. A run reports every line that differs from the
//! received message, every request that a fresh instance answers differently, and the corrected
//! text. The clock is scripted: it begins at 1700000000000 (or at the time of the snapshot) and
//! `wait` advances it. If a line expects a notification that has not arrived, the clock advances to
//! the next expiry of a key.

mod lines;
mod report;
mod run;

use statehouse_transcript::{self as language, Script};

pub use self::report::{Cost, Difference, Failed, Hidden, LoggedAt, Report};
use self::run::Run;
use super::harness::Harness;
use statehouse_core::request::Dialect;
use statehouse_core::store::Quota;

/// Runs a transcript with the policy of a harness, on the initial state of the harness. The error
/// is about the transcript itself: a malformed line, or a setting that has no meaning here.
pub fn run(harness: &Harness, text: &str) -> Result<Report, String> {
    run_script(harness.anew(), text).map(|run| run.finish())
}

/// Measures the cost of each request of a transcript.
pub(super) fn costs(harness: &Harness, text: &str) -> Result<Vec<Cost>, String> {
    run_script(harness.anew().once(), text).map(|run| run.costs)
}

fn run_script(mut harness: Harness, text: &str) -> Result<Run, String> {
    let script = language::parse(text)?;
    configure(&mut harness, &script)?;
    let mut run = Run::new(harness, text, lines::balances(&script.steps));
    for (at, step) in script.steps {
        run.step(at, step);
    }
    run.quiet();
    Ok(run)
}

/// Applies the lines of the configuration. Only settings of a store without a network are allowed.
fn configure(harness: &mut Harness, script: &Script) -> Result<(), String> {
    let mut quota = harness.quota();
    let (mut client, mut seen) = ((None, None), toml::Table::new());
    for (at, line) in script.config.lines().enumerate() {
        let named = |error: &str| format!("line {}: {error}", at + 1);
        let table: toml::Table = line
            .parse()
            .map_err(|error: toml::de::Error| named(error.message()))?;
        for (name, value) in table {
            let done = set(harness, &mut quota, &mut client, &name, &value);
            done.map_err(|error| named(&error))?;
            if seen.insert(name, value).is_some() {
                return Err(named("this setting is given twice"));
            }
        }
    }
    let (client_keys, client_bytes) = client;
    harness.set_quota(quota.with_client(client_keys, client_bytes));
    Ok(())
}

/// Applies one setting. `client` has the keys and bytes of each client.
fn set(
    harness: &mut Harness,
    quota: &mut Quota,
    client: &mut (Option<u64>, Option<u64>),
    name: &str,
    value: &toml::Value,
) -> Result<(), String> {
    let number = || {
        let number = value.as_integer().and_then(|it| u64::try_from(it).ok());
        number.ok_or_else(|| format!("config {name} is a number of keys or bytes"))
    };
    match name {
        "max_keys" => quota.keys_max = number()?,
        "max_bytes" => quota.bytes_max = number()?,
        "max_client_keys" => client.0 = Some(number()?),
        "max_client_bytes" => client.1 = Some(number()?),
        "max_key_bytes" => quota.key_bytes_max = number()?,
        "max_value_bytes" => quota.value_bytes_max = number()?,
        "node" => harness.set_node(value.as_str().ok_or("config node is a text")?),
        "dialect" => harness.force_dialect(match value.as_str() {
            Some("auto") => None,
            Some("sdk") => Some(Dialect::Sdk),
            Some("documents") => Some(Dialect::Documents),
            _ => return Err("config dialect is \"auto\", \"sdk\" or \"documents\"".into()),
        }),
        _ => {
            return Err(format!(
                "config {name} means nothing without a server; the settings of a transcript are max_keys, max_bytes, max_client_keys, max_client_bytes, max_key_bytes, max_value_bytes, dialect and node"
            ));
        }
    }
    Ok(())
}
