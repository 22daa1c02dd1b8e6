//! Connects to the nodes of etcd that a test runs.

use std::time::Duration;

use statehouse_cluster::etcd::{Etcd, Tls};
pub(crate) use statehouse_tests::{Etcd as Nodes, server::own_address};

/// Connects to the nodes and waits until the engine may be used.
pub(crate) async fn connect(nodes: &Nodes, tls: Option<&Tls>) -> Etcd {
    let etcd = Etcd::new(nodes.urls(), tls).unwrap();
    for _ in 0..300 {
        if etcd.check().await.is_ok() {
            return etcd;
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    panic!("etcd does not answer: {:?}", etcd.check().await);
}
