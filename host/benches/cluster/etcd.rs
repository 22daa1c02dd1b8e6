//! Three etcd servers with the settings that `host/docs/cluster.md` advises.

use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use crate::servers::{Process, free_address};

/// The servers. Drop ends them.
pub(crate) struct Etcd {
    _servers: Vec<Process>,
    pub(crate) urls: Vec<String>,
}

impl Etcd {
    pub(crate) fn start(place: &Path) -> Self {
        let addresses = || -> Vec<String> {
            (0..3)
                .map(|_| format!("http://{}", free_address()))
                .collect()
        };
        let (urls, peers) = (addresses(), addresses());
        let members: Vec<String> = (peers.iter().enumerate())
            .map(|(index, peer)| format!("n{index}={peer}"))
            .collect();
        let servers = urls
            .iter()
            .zip(&peers)
            .enumerate()
            .map(|(index, (url, peer))| {
                let mut command = Command::new("etcd");
                command
                    .args(["--name", &format!("n{index}"), "--data-dir"])
                    .arg(place.join(format!("etcd{index}")))
                    .args(["--listen-client-urls", url, "--advertise-client-urls", url])
                    .args(["--listen-peer-urls", peer])
                    .args(["--initial-advertise-peer-urls", peer])
                    .args(["--initial-cluster", &members.join(",")])
                    .args(["--quota-backend-bytes=4294967296", "--snapshot-count=2000"])
                    .args(["--log-level", "error"]);
                let address = url.trim_start_matches("http://").parse();
                let server = Process::start(command, address.expect("an address"));
                server.expect("etcd runs: it is Debian's package etcd-server")
            });
        Self {
            _servers: servers.collect(),
            urls,
        }
    }
}

/// Runs a command of the CLI until it succeeds. etcd may still elect its leader.
pub(crate) fn insist(mut command: impl FnMut() -> Command) {
    let end = Instant::now() + Duration::from_secs(60);
    loop {
        let output = command().output().expect("the binary runs");
        if output.status.success() {
            return;
        }
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(Instant::now() < end, "{said}");
        std::thread::sleep(Duration::from_millis(100));
    }
}
