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

impl Target {
    const fn of(name: &'static str, run: fn(&[u8]), seeds: fn() -> Vec<Vec<u8>>) -> Self {
        Self { name, run, seeds }
    }
}

/// All targets.
pub const TARGETS: [Target; 8] = [
    Target::of("packets", mqtt::packets, mqtt::packet_seeds),
    Target::of("properties", mqtt::properties, mqtt::property_seeds),
    Target::of("sessions", mqtt::sessions, mqtt::session_seeds),
    Target::of("requests", store::requests, store::request_seeds),
    Target::of("clocks", store::clocks, store::clock_seeds),
    Target::of("records", records::records, records::record_seeds),
    Target::of("journal", records::journal, records::journal_seeds),
    Target::of("settings", settings::settings, settings::setting_seeds),
];

/// Finds a target by name.
#[must_use]
pub fn target(name: &str) -> Option<&'static Target> {
    TARGETS.iter().find(|it| it.name == name)
}
