//! The transcripts of the published protocol. The end-to-end tests run them over sockets, and
//! `policy test --conformance` runs them over any policy.

/// The names and texts of the transcripts.
#[rustfmt::skip]
pub const TRANSCRIPTS: &[(&str, &str)] = &[
    ("carriage", include_str!("../../../tests/transcripts/carriage.txt")),
    ("clocks-documents", include_str!("../../../tests/transcripts/clocks-documents.txt")),
    ("clocks-preview", include_str!("../../../tests/transcripts/clocks-preview.txt")),
    ("clocks-sdk", include_str!("../../../tests/transcripts/clocks-sdk.txt")),
    ("commands-documents", include_str!("../../../tests/transcripts/commands-documents.txt")),
    ("commands-preview", include_str!("../../../tests/transcripts/commands-preview.txt")),
    ("commands-sdk", include_str!("../../../tests/transcripts/commands-sdk.txt")),
    ("dialects", include_str!("../../../tests/transcripts/dialects.txt")),
    ("expiry-documents", include_str!("../../../tests/transcripts/expiry-documents.txt")),
    ("expiry-preview", include_str!("../../../tests/transcripts/expiry-preview.txt")),
    ("expiry-sdk", include_str!("../../../tests/transcripts/expiry-sdk.txt")),
    ("fencing-documents", include_str!("../../../tests/transcripts/fencing-documents.txt")),
    ("fencing-preview", include_str!("../../../tests/transcripts/fencing-preview.txt")),
    ("fencing-sdk", include_str!("../../../tests/transcripts/fencing-sdk.txt")),
    ("forced-documents", include_str!("../../../tests/transcripts/forced-documents.txt")),
    ("forced-sdk", include_str!("../../../tests/transcripts/forced-sdk.txt")),
    ("malformed-documents", include_str!("../../../tests/transcripts/malformed-documents.txt")),
    ("malformed-preview", include_str!("../../../tests/transcripts/malformed-preview.txt")),
    ("malformed-sdk", include_str!("../../../tests/transcripts/malformed-sdk.txt")),
    ("notifications-documents",
        include_str!("../../../tests/transcripts/notifications-documents.txt")),
    ("notifications-sdk", include_str!("../../../tests/transcripts/notifications-sdk.txt")),
    ("preview-2023", include_str!("../../../tests/transcripts/preview-2023.txt")),
    ("quota-clients", include_str!("../../../tests/transcripts/quota-clients.txt")),
    ("quota-keys-documents", include_str!("../../../tests/transcripts/quota-keys-documents.txt")),
    ("quota-keys-preview", include_str!("../../../tests/transcripts/quota-keys-preview.txt")),
    ("quota-keys-sdk", include_str!("../../../tests/transcripts/quota-keys-sdk.txt")),
    ("scan-documents", include_str!("../../../tests/transcripts/scan-documents.txt")),
    ("scan-preview", include_str!("../../../tests/transcripts/scan-preview.txt")),
    ("scan-sdk", include_str!("../../../tests/transcripts/scan-sdk.txt")),
];

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
        let mut there: Vec<String> = std::fs::read_dir(directory)
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        there.sort();
        let known: Vec<String> = TRANSCRIPTS
            .iter()
            .map(|(name, _)| format!("{name}.txt"))
            .collect();
        assert_eq!(known, there);
    }
}
