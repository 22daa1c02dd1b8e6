//! Fuzz targets for all parsers of untrusted bytes.
//!
//! A target takes any bytes, and panics if they violate an invariant. Each target has seeds, which
//! the encoder for its format creates. The tests replay the seeds, earlier failing inputs
//! (`corpus/TARGET/`), and mutations of both. `bash host/fuzz/run` searches further with libFuzzer.
//!
//! Invariant: a target must be deterministic. State that it keeps between two inputs must not
//! change the result of an input, or a failure could not be reproduced.
#![forbid(unsafe_code)]

mod mqtt;
pub mod mutate;
mod records;
mod settings;
mod store;

/// A parser of untrusted bytes.
pub struct Target {
    /// The name of the target and of its corpus.
    pub name: &'static str,
    /// Runs the target on an input. Panics if an invariant does not hold.
    pub run: fn(&[u8]),
    /// Valid inputs.
    pub seeds: fn() -> Vec<Vec<u8>>,
}

/// All targets.
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

/// Finds a target by name.
#[must_use]
pub fn target(name: &str) -> Option<&'static Target> {
    TARGETS.iter().find(|it| it.name == name)
}
