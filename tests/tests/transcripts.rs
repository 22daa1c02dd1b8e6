//! Golden transcripts: compares the traffic over real sockets with the files of `transcripts/`,
//! byte for byte. Each file is run against a server of its own, and against a server behind
//! Mosquitto.
//!
//! `UPDATE=1 cargo test -p statehouse-tests --test transcripts` writes the server's messages into
//! the files if they differ. Read the difference before committing it: the transcripts are the
//! specification.
//!
//! The crate `statehouse-transcript` describes the format. These tests also require that each
//! version is padded and of the node `StateStore`, and that each acknowledgement follows its
//! answer. They also check topic, QoS, RETAIN, correlation data, remaining expiry and every other
//! property.
#![allow(missing_docs, clippy::unwrap_used)]

use std::{collections::BTreeSet, fs, path::Path};

use statehouse_tests::transcript;

macro_rules! transcripts {
    ($($name:ident = $file:literal $(, not behind a broker: $reason:literal)?;)+) => {
        $(
            #[test]
            fn $name() {
                transcript::check(&directory().join(concat!($file, ".txt")));
            }
        )+

        mod attached {
            $(transcripts!(@attached $name $file $($reason)?);)+
        }

        #[test]
        fn every_transcript_file_has_a_test() {
            let known: BTreeSet<String> = [$(concat!($file, ".txt")),+].map(String::from).into();
            let found: BTreeSet<String> = fs::read_dir(directory())
                .unwrap()
                .map(|entry| entry.unwrap().file_name().into_string().unwrap())
                .collect();
            assert_eq!(known, found);
        }
    };
    (@attached $name:ident $file:literal) => {
        #[test]
        fn $name() {
            let broker = statehouse_tests::Mosquitto::start();
            let path = crate::directory().join(concat!($file, ".txt"));
            statehouse_tests::transcript::check_behind(&path, &broker);
        }
    };
    (@attached $name:ident $file:literal $reason:literal) => {};
}

fn directory() -> &'static Path {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/transcripts"))
}

transcripts! {
    carriage = "carriage", not behind a broker:
        "the broker sends the PUBACKs of requests and the DISCONNECTs";
    clocks_documents = "clocks-documents";
    clocks_preview = "clocks-preview";
    clocks_sdk = "clocks-sdk";
    commands_documents = "commands-documents";
    commands_preview = "commands-preview";
    commands_sdk = "commands-sdk";
    dialects = "dialects";
    expiry_documents = "expiry-documents";
    expiry_preview = "expiry-preview";
    expiry_sdk = "expiry-sdk";
    fencing_documents = "fencing-documents";
    fencing_preview = "fencing-preview";
    fencing_sdk = "fencing-sdk";
    forced_documents = "forced-documents";
    forced_sdk = "forced-sdk";
    malformed_documents = "malformed-documents";
    malformed_preview = "malformed-preview";
    malformed_sdk = "malformed-sdk";
    notifications_documents = "notifications-documents", not behind a broker:
        "only a subscription delivers there, and watches outlive connections";
    notifications_sdk = "notifications-sdk", not behind a broker:
        "only a subscription delivers there, and watches outlive connections";
    preview_2023 = "preview-2023";
    quota_clients = "quota-clients";
    quota_documents = "quota-keys-documents";
    quota_preview = "quota-keys-preview";
    quota_sdk = "quota-keys-sdk";
    scan_documents = "scan-documents";
    scan_preview = "scan-preview";
    scan_sdk = "scan-sdk";
}
