//! Targets for the texts of operators: the configuration and access rules.

use std::fs;
use std::path::PathBuf;

use statehouse::config::{Config, Flags};
use statehouse_access::rules::Rules;

/// Parses a text as a configuration file and as access rules. An error must have a message.
pub(crate) fn settings(data: &[u8]) {
    let Ok(text) = std::str::from_utf8(data) else {
        return;
    };
    if let Err(error) = Rules::parse(text) {
        assert!(!error.to_string().is_empty());
    }
    let path = path();
    if fs::write(&path, text).is_err() {
        // A full disk is not a failure of the parser.
        return;
    }
    let flags = Flags {
        config: Some(path),
        ..Flags::default()
    };
    if let Err(error) = Config::load(flags) {
        assert!(!error.to_string().is_empty());
    }
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
        "[[rule]]\nprincipals = { clientIds = [\"press-*\"], usernames = [\"operator\"] }\n",
        "broker = \"mqtt://user@gateway\"\nbroker_window = 64\npresence = \"auto\"\nstandby = true\n",
    ];
    texts.map(|text| text.as_bytes().to_vec()).to_vec()
}
