//! The transcripts of the published protocol. The end-to-end tests run them over sockets, and
//! `policy test --conformance` runs them over any policy.

macro_rules! transcripts {
    ($($name:literal)*) => {
        &[$((
            $name,
            include_str!(concat!("../../../tests/transcripts/", $name, ".txt")),
        )),*]
    };
}

/// The names and texts of the transcripts.
pub const TRANSCRIPTS: &[(&str, &str)] = transcripts! {
    "carriage"
    "clocks-documents" "clocks-preview" "clocks-sdk"
    "commands-documents" "commands-preview" "commands-sdk"
    "dialects"
    "expiry-documents" "expiry-preview" "expiry-sdk"
    "fencing-documents" "fencing-preview" "fencing-sdk"
    "forced-documents" "forced-sdk"
    "malformed-documents" "malformed-preview" "malformed-sdk"
    "notifications-documents" "notifications-sdk"
    "preview-2023"
    "quota-clients" "quota-keys-documents" "quota-keys-preview" "quota-keys-sdk"
    "scan-documents" "scan-preview" "scan-sdk"
};

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Harness, transcript};

    #[test]
    fn standard_policy_passes_all_transcripts() {
        let harness = Harness::standard().unwrap();
        for (name, text) in TRANSCRIPTS {
            let report = transcript::run(&harness, text).unwrap();
            assert!(report.is_well(), "{name}: {report:#?}");
            assert!(report.requests > 0, "{name}");
            assert_eq!(report.corrected, *text, "{name}");
        }
    }

    #[test]
    fn list_contains_every_transcript_file() {
        let directory = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/transcripts");
        let there = std::fs::read_dir(directory).unwrap();
        let there = there.map(|entry| entry.unwrap().file_name().into_string().unwrap());
        let mut there: Vec<String> = there.collect();
        there.sort();
        let known = TRANSCRIPTS.iter().map(|(name, _)| format!("{name}.txt"));
        assert_eq!(known.collect::<Vec<_>>(), there);
    }
}
