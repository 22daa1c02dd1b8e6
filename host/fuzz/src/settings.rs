//! Targets for the texts of operators: the configuration and access rules.

use std::fs;
use std::path::PathBuf;

use statehouse_access::rules::Rules;
use statehouse_config::{Config, ConfigError, Flags};

/// Parses a text as a configuration file and as access rules. An error must have a message.
pub(crate) fn settings(data: &[u8]) {
    let Ok(text) = std::str::from_utf8(data) else {
        return;
    };
    if let Err(error) = Rules::parse(text) {
        assert!(!error.to_string().is_empty());
    }
    if let Some(Err(error)) = load(text) {
        assert!(!error.to_string().is_empty());
    }
}

/// Loads a configuration file with this text. `None` if the file cannot be written: a full disk is
/// not a failure of the parser.
fn load(text: &str) -> Option<Result<Config, ConfigError>> {
    let path = path();
    fs::write(&path, text).ok()?;
    let flags = Flags {
        config: Some(path),
        ..Flags::default()
    };
    Some(Config::load(flags))
}

/// The path of a file that only this thread uses.
fn path() -> PathBuf {
    let thread = std::thread::current().id();
    let name = format!("statehouse-fuzz-{}-{thread:?}.toml", std::process::id());
    std::env::temp_dir().join(name)
}

pub(crate) fn setting_seeds() -> Vec<Vec<u8>> {
    let texts = [
        include_str!("../../dist/statehouse.toml"),
        "durability = \"interval\"\nsync_interval = \"2s\"\nmax_keys = 10\nmax_packet_bytes = 65536\nadmin = \"off\"\n",
        concat!(
            "[[rules]]\nprincipals = { clientIds = [\"press\"], usernames = [\"operator\"] }\n",
            "brokerResources = [{ method = \"Publish\", topics = [\"a/{principal.clientId}/#\"] }]\n",
            "stateStoreResources = [{ method = \"ReadWrite\", keyType = \"Pattern\", keys = [\"k[a-z]*\"] }]\n",
        ),
        "broker = \"mqtt://user@gateway\"\nbroker_window = 64\npresence = \"auto\"\nstandby = true\n",
    ];
    texts.map(|text| text.as_bytes().to_vec()).to_vec()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Mutations of an invalid text test little more than the first error.
    #[test]
    fn every_seed_is_valid() {
        for seed in setting_seeds() {
            let text = String::from_utf8_lossy(&seed);
            let is_config = load(&text).is_some_and(|it| it.is_ok());
            assert!(is_config || Rules::parse(&text).is_ok(), "{text}");
        }
    }
}
