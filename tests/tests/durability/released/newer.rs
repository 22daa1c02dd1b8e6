//! Data of a later version. This program must refuse it, name the version to install, and change
//! nothing: a log that is merely newer must never be cut as if it were damaged.

use std::{
    fs,
    path::{Path, PathBuf},
};

use statehouse_tests::{Ran, files::contents, run};

use super::{VERSIONS, archive::Archive};

/// The version that the changed files name.
const LATER: [u8; 4] = [9, 8, 7, 0];
const ADVICE: &str = concat!(
    "Statehouse 9.8.7 wrote it, and this is Statehouse ",
    env!("CARGO_PKG_VERSION"),
    ": install Statehouse 9.8.7 or later"
);

/// The write-ahead log's description says where these are.
const HEADER_BYTES: usize = 64;
const FRAME_HEADER_BYTES: usize = 56;
const RECORD_OF_SESSIONS: u8 = 6;

/// CRC-32C, bit by bit.
fn crc32c(parts: &[&[u8]]) -> [u8; 4] {
    let mut crc = u32::MAX;
    for byte in parts.iter().flat_map(|part| part.iter()) {
        crc ^= u32::from(*byte);
        for _ in 0..8 {
            let is_odd = crc & 1 == 1;
            crc = crc >> 1 ^ if is_odd { 0x82F6_3B78 } else { 0 };
        }
    }
    (!crc).to_le_bytes()
}

/// Changes a file.
fn change(path: &Path, change: impl FnOnce(&mut Vec<u8>)) {
    let mut bytes = fs::read(path).unwrap();
    change(&mut bytes);
    fs::write(path, bytes).unwrap();
}

/// Gives the header at the beginning of these bytes this format, and the later version.
fn stamp(header: &mut [u8], format: u8) {
    header[4] = format;
    header[56..60].copy_from_slice(&LATER);
    let crc = crc32c(&[&header[..60]]);
    header[60..64].copy_from_slice(&crc);
}

/// Changes the first byte of the last record that `wanted` accepts: its kind, or what follows it.
fn change_record(segment: &mut [u8], wanted: impl Fn(&[u8]) -> bool, at: usize) {
    let (mut frame, mut last) = (HEADER_BYTES, None);
    let number = |bytes: &[u8], at: usize| {
        u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap()) as usize
    };
    while number(segment, frame) > 0 {
        let end = frame + number(segment, frame);
        let mut record = frame + FRAME_HEADER_BYTES;
        while record < end {
            let len = number(segment, record);
            if wanted(&segment[record + 4..record + 4 + len]) {
                last = Some((frame, end, record + 4));
            }
            record += 4 + len;
        }
        frame = end;
    }
    let (frame, end, record) = last.expect("such a record");
    segment[record + at] = 200;
    let crc = crc32c(&[&segment[frame..frame + 4], &segment[frame + 8..end]]);
    segment[frame + 4..frame + 8].copy_from_slice(&crc);
}

/// The file of a data directory with this ending, and which of them.
type Which = (&'static str, fn(&[PathBuf]) -> Option<&PathBuf>);

const FIRST_SEGMENT: Which = (".log", |sorted| sorted.first());
const LAST_SEGMENT: Which = (".log", |sorted| sorted.last());
const SNAPSHOT: Which = (".snapshot", |sorted| sorted.last());
const NEWEST: Which = ("newest", |sorted| sorted.first());

fn find(data: &Path, (ending, which): Which) -> PathBuf {
    let paths = fs::read_dir(data).unwrap().map(|it| it.unwrap().path());
    let mut paths: Vec<_> = paths
        .filter(|path| path.to_str().unwrap().ends_with(ending))
        .collect();
    paths.sort();
    which(&paths).expect("such a file").clone()
}

/// A file of a data directory, and how it differs if a later version wrote it.
type Case = (&'static str, Which, fn(&mut Vec<u8>));

const CASES: [Case; 7] = [
    ("the last segment", LAST_SEGMENT, |it| stamp(it, 2)),
    ("an older segment", FIRST_SEGMENT, |it| stamp(it, 2)),
    ("a snapshot", SNAPSHOT, |it| {
        stamp(it, 3);
    }),
    ("the number of the segment", NEWEST, |it| {
        stamp(&mut it[512..], 2);
    }),
    ("the kind of a record", LAST_SEGMENT, |it| {
        stamp(it, 1);
        change_record(it, |_| true, 0);
    }),
    ("the flags of a record", LAST_SEGMENT, |it| {
        stamp(it, 1);
        change_record(it, |record| record[0] == 1, 1);
    }),
    ("the format of sessions", LAST_SEGMENT, |it| {
        stamp(it, 1);
        change_record(it, |record| record[0] == RECORD_OF_SESSIONS, 1);
    }),
];

#[test]
fn data_of_a_later_version_is_refused_and_kept() {
    let archive = Archive::of(VERSIONS[0]);
    for (what, file, later) in CASES {
        let (directory, data) = archive.copy("embedded");
        change(&find(&data, file), later);
        let before = contents(&data);
        let data = data.to_str().unwrap();
        let salvaged = directory.path().join("salvaged");
        let salvage = ["doctor", data, "--salvage", salvaged.to_str().unwrap()];
        let ask = |arguments: &[&str], code: i32| -> Ran {
            let ran = run(arguments, b"");
            assert_eq!(ran.code, Some(code), "{what}: {arguments:?}: {ran:#?}");
            let said = format!("{}{}", ran.text(), ran.stderr);
            assert!(said.contains(ADVICE), "{what}: {arguments:?}: {said}");
            assert!(!said.contains("panicked"), "{what}: {said}");
            ran
        };
        let listen = ["--listen", "127.0.0.1:0"];
        ask(&[&["serve", "--data", data][..], &listen].concat(), 2);
        let examined = ask(&["doctor", data], 1).text();
        assert!(
            examined.contains("nothing is damaged"),
            "{what}: {examined}"
        );
        assert!(!examined.contains("are lost"), "{what}: {examined}");
        ask(&salvage, 1);
        assert!(!salvaged.exists(), "{what}");
        let is_kept = contents(Path::new(data)) == before;
        assert!(is_kept, "{what}: files have changed");
    }
}

#[test]
fn backup_of_a_later_version_is_refused() {
    let archive = Archive::of(VERSIONS[0]);
    let backup = archive.path("backup.state");
    let data = archive.path("restored");
    change(&backup, |bytes| stamp(bytes, 2));
    let backup = backup.to_str().unwrap();
    for to in ["--check", "--data"] {
        let mut arguments = vec!["restore", backup, to];
        arguments.extend((to == "--data").then(|| data.to_str().unwrap()));
        run(&arguments, b"").fails(3, ADVICE);
    }
    assert!(!data.exists());
}
