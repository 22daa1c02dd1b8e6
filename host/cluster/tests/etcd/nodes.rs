//! Starts nodes of etcd on free ports of the loopback interface.

use std::net::TcpListener;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use statehouse_cluster::etcd::{Etcd, Tls};
use tempfile::TempDir;

/// The nodes of a cluster of etcd. They are killed when this is dropped.
pub(crate) struct Nodes {
    children: Vec<Option<Child>>,
    pub(crate) urls: Vec<String>,
    _directory: TempDir,
}

fn free_port() -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    listener.local_addr().unwrap().port()
}

impl Nodes {
    /// Starts so many nodes and waits until they answer.
    pub(crate) async fn start(count: usize) -> Self {
        Self::start_with(count, "http", &[]).await
    }

    /// Starts nodes with additional arguments.
    pub(crate) async fn start_with(count: usize, scheme: &str, arguments: &[String]) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let ports = || (0..count).map(|_| free_port()).collect::<Vec<_>>();
        let (clients, peers) = (ports(), ports());
        let name = |(index, port): (usize, &u16)| format!("n{index}=http://127.0.0.1:{port}");
        let cluster: Vec<_> = peers.iter().enumerate().map(name).collect();
        let urls: Vec<_> = clients
            .iter()
            .map(|port| format!("{scheme}://127.0.0.1:{port}"))
            .collect();
        let children = (0..count)
            .map(|index| {
                let peer = format!("http://127.0.0.1:{}", peers[index]);
                let place = directory.path().join(index.to_string());
                let child = node(&place, index, &urls[index], &peer, &cluster.join(","))
                    .args(arguments)
                    .spawn()
                    .expect("cannot run etcd: install the Debian package etcd-server");
                Some(child)
            })
            .collect();
        Self {
            children,
            urls,
            _directory: directory,
        }
    }

    /// Connects to the nodes and waits until they answer.
    pub(crate) async fn connect(&self, tls: Option<&Tls>) -> Etcd {
        let etcd = Etcd::new(&self.urls, tls).unwrap();
        for _ in 0..300 {
            if etcd.check().await.is_ok() {
                return etcd;
            }
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
        panic!("etcd does not answer: {:?}", etcd.check().await);
    }

    /// Kills a node.
    pub(crate) fn kill(&mut self, index: usize) {
        if let Some(mut child) = self.children[index].take() {
            child.kill().unwrap();
            child.wait().unwrap();
        }
    }
}

impl Drop for Nodes {
    fn drop(&mut self) {
        for index in 0..self.children.len() {
            self.kill(index);
        }
    }
}

fn node(directory: &Path, index: usize, client: &str, peer: &str, cluster: &str) -> Command {
    let mut command = Command::new("etcd");
    command
        .args(["--name", &format!("n{index}"), "--data-dir"])
        .arg(directory)
        .args(["--listen-client-urls", client])
        .args(["--advertise-client-urls", client])
        .args(["--listen-peer-urls", peer])
        .args(["--initial-advertise-peer-urls", peer])
        .args(["--initial-cluster", cluster])
        .args(["--snapshot-count=2000", "--log-level=error"])
        .stdout(Stdio::null())
        .stderr(Stdio::null());
    command
}
