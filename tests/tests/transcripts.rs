//! Golden transcripts: what goes over the wire, byte for byte, over real sockets. Each file of `transcripts/`
//! is one test with a server of its own.
//!
//! `UPDATE=1 cargo test -p statehouse-tests --test transcripts` writes what the server says into the files, where
//! it differs. Read the difference before committing it: the transcripts are the specification.
//!
//! # The format
//!
//! A line is one step; lines that begin with `#` are comments. Words are split at spaces; `"…"` keeps spaces;
//! `\r \n \t \0 \\ \" \xHH` mean bytes, inside quotes and outside.
//!
//! ```text
//! config max_keys = 2           a line of the server's TOML file
//! dialect sdk                   how requests are written from here on: sdk, documents or preview
//! client a [id [filter qos]]    connects a client, with one more subscription
//! close a                       DISCONNECT and close
//! a> SET k v NX -- options      a request of client a; `>` alone is client `me`, which connects itself
//! a>> *1\r\n -- options         a request with this payload, right or wrong
//! a< +OK\r\n __ts=$v1           the answer to a's oldest open request, with all of its user properties
//! a<puback 0x83 "topic"         it is refused by its acknowledgement, whose Reason String says this
//! a<disconnect 0x90 "topic"     the connection is ended, with this reason
//! a<nothing                     it was dropped
//! a! k *2\r\n… __ts=$v2         a notification of key k, on the topic of client a and key k
//! quiet                         nobody has been sent anything else (checked at the end as well)
//! wait 50ms                     for time itself, in tests of expiry
//! ? $v2 > $v1                   compares versions: < = >
//! ```
//!
//! A client sends the properties of its dialect: `__ts` with its clock, `__protVer`, `__srcId`; or `Timestamp`.
//! Options change that: `name=value` sets (twice sends it twice), `-name` leaves out, and `@qos=2`, `@expiry=10`,
//! `@type=…`, `@response=…`, `-@response`, `-@correlation`, `@times=3` (repeats the payload) shape the PUBLISH.
//! A value `$name` is a variable, `$now` this machine's clock, `$name-1` a reading one millisecond earlier.
//!
//! In an answer the first use of a variable takes the value, every later one compares with it. Every version has to be padded
//! and of the node `StateStore`. The properties that every answer carries (`__stat`=`200`, and `__protVer`=`1.0`
//! where the client sent one) are checked without being written, unless the line says `@bare`. The order of user properties is free;
//! one too many or too few is an error. Topic, QoS, RETAIN, correlation data, remaining expiry and every other property
//! are checked as well, and that the acknowledgement comes after the answer. A notification may say `@qos=0`.
#![allow(missing_docs, clippy::unwrap_used)]

use std::{collections::BTreeSet, fs, path::Path};

use statehouse_tests::transcript;

macro_rules! transcripts {
    ($($name:ident = $file:literal),+ $(,)?) => {
        $(
            #[test]
            fn $name() {
                transcript::check(&directory().join(concat!($file, ".txt")));
            }
        )+

        #[test]
        fn every_transcript_is_run() {
            let known: BTreeSet<String> = [$(concat!($file, ".txt")),+].map(String::from).into();
            let there: BTreeSet<String> = fs::read_dir(directory())
                .unwrap()
                .map(|entry| entry.unwrap().file_name().into_string().unwrap())
                .collect();
            assert_eq!(known, there);
        }
    };
}

fn directory() -> &'static Path {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/transcripts"))
}

transcripts! {
    carriage = "carriage",
    clocks_documents = "clocks-documents",
    clocks_preview = "clocks-preview",
    clocks_sdk = "clocks-sdk",
    commands_documents = "commands-documents",
    commands_preview = "commands-preview",
    commands_sdk = "commands-sdk",
    dialects = "dialects",
    expiry_documents = "expiry-documents",
    expiry_preview = "expiry-preview",
    expiry_sdk = "expiry-sdk",
    fencing_documents = "fencing-documents",
    fencing_preview = "fencing-preview",
    fencing_sdk = "fencing-sdk",
    forced_documents = "forced-documents",
    forced_sdk = "forced-sdk",
    malformed_documents = "malformed-documents",
    malformed_preview = "malformed-preview",
    malformed_sdk = "malformed-sdk",
    notifications_documents = "notifications-documents",
    notifications_sdk = "notifications-sdk",
    preview_2023 = "preview-2023",
    quota_documents = "quota-keys-documents",
    quota_preview = "quota-keys-preview",
    quota_sdk = "quota-keys-sdk",
    scan_documents = "scan-documents",
    scan_preview = "scan-preview",
    scan_sdk = "scan-sdk",
}
