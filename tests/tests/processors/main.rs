//! The programs for other processors: the golden transcripts, a data directory that moves between
//! two processors, and a minute of load. `tests/official` runs the official client against these
//! programs.
//!
//! `bash tests/run --all` builds the programs. A test whose program or emulator is missing says so
//! and ends.
#![allow(missing_docs, clippy::unwrap_used)]

mod soak;

use std::{env, fs, path::Path};

use statehouse_tests::{
    Admin, Client, Connect, Processor, Publish, Server, policies, transcript, wait::until,
};

macro_rules! processors {
    ($($name:ident = $target:literal;)*) => { $(
        mod $name {
            use statehouse_tests::Processor;

            #[test]
            #[ignore = "emulates another processor"]
            fn sdk_transcripts_are_answered() {
                if let Some(processor) = Processor::find($target) {
                    crate::answer_sdk_transcripts(&processor);
                }
            }

            #[test]
            #[ignore = "emulates another processor"]
            fn data_directory_moves_there_and_back() {
                if let Some(processor) = Processor::find($target) {
                    crate::move_there_and_back(&processor);
                }
            }

            #[test]
            #[ignore = "emulates another processor"]
            fn default_limits_fit_the_address_space() {
                if let Some(processor) = Processor::find($target) {
                    crate::derive_limits(&processor);
                }
            }

            #[test]
            #[ignore = "takes a minute on an emulated processor"]
            fn minute_of_load_is_answered_in_bounded_memory() {
                if let Some(processor) = Processor::find($target) {
                    crate::soak::run(&processor);
                }
            }
        }
    )* };
}

processors! {
    aarch64 = "aarch64-unknown-linux-musl";
    armv7 = "armv7-unknown-linux-musleabihf";
    x86_64 = "x86_64-unknown-linux-musl";
}

fn answer_sdk_transcripts(processor: &Processor) {
    let directory = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/transcripts"));
    let mut checked = 0;
    for file in fs::read_dir(directory).unwrap() {
        let path = file.unwrap().path();
        if path.to_str().unwrap().ends_with("-sdk.txt") {
            transcript::check_emulated(&path, processor);
            checked += 1;
        }
    }
    assert!(checked >= 8, "{checked} transcripts");
}

/// Writes to a key that fill the log until a snapshot is taken, and the size of its value.
const FILLING: usize = 120;
const FILLING_BYTES: usize = 100_000;

fn move_there_and_back(processor: &Processor) {
    let directory = tempfile::tempdir().unwrap();
    let data = directory.path().join("data");
    let at = ("data", data.to_str().unwrap());
    // A small history makes the store take a snapshot early.
    let settings = [at, ("history_bytes", "16MiB")];

    let mut native = Server::restartable(&settings);
    let mut writer = native.store("writer");
    for number in 0..FILLING {
        writer.set("large", [b'a' + (number % 26) as u8].repeat(FILLING_BYTES));
    }
    until("a snapshot", || has_file(&data, ".snapshot"));
    let module = fs::read(policies::marked("one")).unwrap();
    let admin = Admin::at(&data);
    admin.done("POST", "/v1/policies", &module);
    admin.done("POST", "/v1/policies/marked-one/promote", b"");
    let version = writer.set("native", "1");
    assert_eq!(writer.ask(&["TALLY", "tally"]).text(), tallied(1));
    let resume = Connect::resume("away", u32::MAX);
    let mut away = Client::connect(native.address(), &resume);
    assert_eq!(away.subscribe("news", 1), 1);
    away.abort();
    native
        .connect("sender")
        .publish(Publish::new("news", "while away").qos(1));
    // Nothing is written in an orderly end: recovery reads the snapshot and the log.
    native.kill();
    let codes = codes(&data);
    assert_eq!(codes.len(), 1, "{codes:?}");

    let mut other = Server::emulated(processor, &settings);
    let mut reader = other.store("reader");
    assert_eq!(
        reader.ask(&["GET", "native"]).version(),
        Some(version.clone())
    );
    assert_eq!(reader.get("large").unwrap().len(), FILLING_BYTES);
    // The policy was compiled again, and is the active one.
    assert_eq!(reader.ask(&["TALLY", "tally"]).text(), tallied(2));
    let rebuilt = self::codes(&data);
    let same_code = processor.target.starts_with(env::consts::ARCH);
    assert!(rebuilt.len() > codes.len() || same_code, "{rebuilt:?}");
    let later = reader.set("other", "2");
    assert!(later > version);
    other.kill();

    let native = Server::restartable(&settings);
    let mut reader = native.store("reader");
    assert_eq!(reader.ask(&["GET", "native"]).version(), Some(version));
    assert_eq!(reader.ask(&["GET", "other"]).version(), Some(later));
    assert_eq!(reader.ask(&["TALLY", "tally"]).text(), tallied(3));
    assert_eq!(self::codes(&data), rebuilt);
    let mut away = Client::connect(native.address(), &resume);
    assert_eq!(away.take_publish("news").payload, b"while away");
}

fn derive_limits(processor: &Processor) {
    let server = Server::emulated(processor, &[]);
    let line = server.wait_for_log("default limits are derived from");
    let (_, rest) = line.split_once("derived from ").unwrap();
    let mib: u64 = rest.split_once(' ').unwrap().0.parse().unwrap();
    assert!(mib < 2048 || !processor.target.starts_with("arm"), "{line}");
}

fn tallied(count: u64) -> String {
    format!("*3\\r\\n+one\\r\\n:{count}\\r\\n+one\\r\\n")
}

fn has_file(directory: &Path, end: &str) -> bool {
    let mut files = fs::read_dir(directory).unwrap();
    files.any(|file| file.unwrap().file_name().to_str().unwrap().ends_with(end))
}

/// The names of the files of machine code, sorted.
fn codes(data: &Path) -> Vec<String> {
    let files = fs::read_dir(data.join("code")).unwrap();
    let names = files.map(|file| file.unwrap().file_name().into_string().unwrap());
    let mut names: Vec<_> = names.collect();
    names.sort();
    names
}
