//! Measures how many bytes reach the device for each byte of the records.
//!
//! The kernel's count of a process's writes is wrong for overwritten files. So the data is on a
//! loop device, which also counts the writes of the file system. A round lasts from the end of one
//! snapshot to the end of another, because snapshots are a large part of the writes.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use statehouse_wal::{Base, Directory, LogPosition, Sink};

use crate::common::{Client, Server};
use crate::{IN_FLIGHT, round_of, set};

/// After this many writes, every new segment reuses an old file. The number exceeds the log of two
/// snapshots and the whole history.
const FILLED_WRITES: usize = 2_500_000;
/// How long to wait for a snapshot. A single client may not write enough for one.
const SNAPSHOT_WAIT: Duration = Duration::from_secs(30);
/// Snapshots in a measured round.
const SNAPSHOTS: usize = 3;

/// Prints a row for each number of clients.
pub(crate) fn measure(clients: &[usize]) {
    let scratch = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).expect("a directory");
    let device = LoopDevice::mount(scratch.path());
    // Fill the store first, so that it reuses segments as after a long run.
    let server = Server::start(&device.mount, &[]);
    let data = device.mount.join("statehouse-data");
    let mut filler = Client::connect(&server.address, "filler");
    for _ in 0..FILLED_WRITES / IN_FLIGHT {
        filler.round_trips(std::iter::repeat_n(&set(0)[..], IN_FLIGHT));
    }
    let mut rows = Vec::new();
    for &clients in clients {
        let writes = AtomicU64::new(0);
        let client = |id: usize| {
            let mut client = Client::connect(&server.address, &format!("client{id}"));
            let (set, writes) = (set(id), &writes);
            move || {
                client.round_trip(&set);
                writes.fetch_add(1, Ordering::Relaxed);
            }
        };
        let mut measured = None;
        round_of(clients, client, || {
            next_snapshot(&data);
            let (start, before, first) = (Instant::now(), device.written(), load(&writes));
            let snapshots: u64 = (0..SNAPSHOTS).map_while(|_| next_snapshot(&data)).sum();
            let (after, last) = (device.written(), load(&writes));
            measured = Some((start.elapsed(), before, after, last - first, snapshots));
        });
        rows.push((clients, measured.expect("the round ended")));
    }
    drop(server);
    let record_bytes = bytes_of_a_record(&data);
    println!("a write is a record of {record_bytes:.0} bytes");
    println!("| clients | writes/s | writes for each flush | device / records | of it snapshots |");
    println!("|---|---|---|---|---|");
    for (clients, (took, before, after, writes, snapshots)) in rows {
        let records = writes as f64 * record_bytes;
        println!(
            "| {clients} | {:.0} | {:.1} | {:.2} | {:.2} |",
            writes as f64 / took.as_secs_f64(),
            writes as f64 / (after.flushes - before.flushes) as f64,
            (after.bytes - before.bytes) as f64 / records,
            snapshots as f64 / records
        );
    }
}

fn load(count: &AtomicU64) -> u64 {
    count.load(Ordering::Relaxed)
}

/// Waits for the next snapshot. Returns its length, or `None` at the timeout.
fn next_snapshot(data: &Path) -> Option<u64> {
    let newest = || {
        let entries = std::fs::read_dir(data).expect("a data directory");
        let snapshots = entries.map_while(Result::ok).filter_map(|entry| {
            let name = entry.file_name().to_string_lossy().into_owned();
            let bytes = entry.metadata().ok()?.len();
            name.ends_with(".snapshot").then_some((name, bytes))
        });
        snapshots.max()
    };
    let (before, begun) = (newest(), Instant::now());
    while begun.elapsed() < SNAPSHOT_WAIT {
        let now = newest();
        if now > before {
            return now.map(|(_, bytes)| bytes);
        }
        thread::sleep(Duration::from_millis(10));
    }
    None
}

/// The average length of a record in a data directory, without the overhead of the log.
fn bytes_of_a_record(data: &Path) -> f64 {
    #[derive(Default)]
    struct Lengths {
        records: u64,
        bytes: u64,
    }
    impl Sink for Lengths {
        fn reset(&mut self) {
            *self = Self::default();
        }
        fn block(&mut self, _: &[u8]) -> Result<(), String> {
            Ok(())
        }
        fn record(&mut self, _: LogPosition, record: &[u8]) -> Result<(), String> {
            self.records += 1;
            self.bytes += record.len() as u64;
            Ok(())
        }
    }
    let mut lengths = Lengths::default();
    let directory = Directory::read_only(data).expect("a data directory");
    statehouse_wal::read(&directory, Base::Oldest, LogPosition::END, &mut lengths)
        .expect("the log is intact after a kill of the store");
    lengths.bytes as f64 / lengths.records as f64
}

/// A file system on its own loop device. Drop removes it.
struct LoopDevice {
    device: String,
    mount: PathBuf,
}

/// The write counters of a device.
#[derive(Clone, Copy)]
struct Written {
    bytes: u64,
    flushes: u64,
}

impl LoopDevice {
    fn mount(scratch: &Path) -> Self {
        let (image, mount) = (scratch.join("image"), scratch.join("mount"));
        let file = std::fs::File::create(&image).expect("a file");
        file.set_len(2 << 30).expect("a sparse file");
        std::fs::create_dir(&mount).expect("a directory");
        let device = run(
            "losetup",
            &["--find".as_ref(), "--show".as_ref(), image.as_ref()],
        );
        let it = Self { device, mount };
        run("mkfs.ext4", &["-q".as_ref(), it.device.as_ref()]);
        run("mount", &[it.device.as_ref(), it.mount.as_ref()]);
        it
    }

    fn written(&self) -> Written {
        let name = self.device.rsplit('/').next().expect("a device has a name");
        let stat = std::fs::read_to_string(format!("/sys/block/{name}/stat"));
        let stat = stat.expect("every block device has counters");
        let fields = stat.split_whitespace();
        let fields = fields.map(|field| field.parse().expect("a number"));
        let fields: Vec<u64> = fields.collect();
        Written {
            bytes: 512 * fields[6],
            // Linux 5.5 and later.
            flushes: fields[15],
        }
    }
}

impl Drop for LoopDevice {
    fn drop(&mut self) {
        // The image itself is removed with its directory.
        for (program, arguments) in [
            ("umount", vec![self.mount.as_os_str()]),
            ("losetup", vec!["--detach".as_ref(), self.device.as_ref()]),
        ] {
            let _ = Command::new(program).args(arguments).output();
        }
    }
}

fn run(program: &str, arguments: &[&OsStr]) -> String {
    let output = Command::new(program).args(arguments).output();
    let output = output.unwrap_or_else(|error| panic!("{program}: {error}"));
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(
        output.status.success(),
        "{program} (this needs root): {said}"
    );
    String::from_utf8_lossy(&output.stdout).trim().to_owned()
}
