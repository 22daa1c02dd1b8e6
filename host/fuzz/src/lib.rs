//! Entry points for hostile bytes.
//!
//! What enters: any bytes. What leaves: nothing, or a panic where something that has to hold does not. Each target has seeds,
//! made by the code that writes what it reads. The tests replay these, what was found before (`corpus/TARGET/`), and changes
//! of both; `bash host/fuzz/run` searches further with libFuzzer.
//!
//! Architecture invariant: a target is deterministic. What it keeps between two inputs cannot change what one does.
#![forbid(unsafe_code)]

mod mqtt;
pub mod mutate;
mod records;
mod settings;
mod store;

/// Something that reads what others send.
pub struct Target {
    /// Its name, and that of its corpus.
    pub name: &'static str,
    /// Feeds it. Panics where it is broken.
    pub run: fn(&[u8]),
    /// What it is meant to read.
    pub seeds: fn() -> Vec<Vec<u8>>,
}

/// All of them.
pub const TARGETS: [Target; 8] = [
    Target {
        name: "packets",
        run: mqtt::packets,
        seeds: mqtt::packet_seeds,
    },
    Target {
        name: "properties",
        run: mqtt::properties,
        seeds: mqtt::property_seeds,
    },
    Target {
        name: "sessions",
        run: mqtt::sessions,
        seeds: mqtt::session_seeds,
    },
    Target {
        name: "requests",
        run: store::requests,
        seeds: store::request_seeds,
    },
    Target {
        name: "clocks",
        run: store::clocks,
        seeds: store::clock_seeds,
    },
    Target {
        name: "records",
        run: records::records,
        seeds: records::record_seeds,
    },
    Target {
        name: "journal",
        run: records::journal,
        seeds: records::journal_seeds,
    },
    Target {
        name: "settings",
        run: settings::settings,
        seeds: settings::setting_seeds,
    },
];

/// The target of this name.
#[must_use]
pub fn target(name: &str) -> Option<&'static Target> {
    TARGETS.iter().find(|it| it.name == name)
}
