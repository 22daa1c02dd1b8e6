//! A broker decides nothing while its host has no lease.
#![allow(clippy::unwrap_used, reason = "tests fail by panicking")]

mod common;

use std::{
    future::Future,
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use common::*;
use statehouse_mqtt::{Broker, Lease, NoService, Options};
use tokio::{sync::Notify, time::timeout};
use wire::Packet;

/// A lease that the test grants and ends.
#[derive(Default)]
struct TestLease {
    is_valid: AtomicBool,
    granted: Notify,
}

impl TestLease {
    fn grant(&self) {
        self.is_valid.store(true, Ordering::SeqCst);
        self.granted.notify_waiters();
    }

    fn end(&self) {
        self.is_valid.store(false, Ordering::SeqCst);
    }
}

impl Lease for TestLease {
    fn is_valid(&self) -> bool {
        self.is_valid.load(Ordering::SeqCst)
    }

    fn renewed(&self) -> Pin<Box<dyn Future<Output = bool> + Send + '_>> {
        Box::pin(async {
            loop {
                let granted = self.granted.notified();
                if self.is_valid() {
                    return true;
                }
                granted.await;
            }
        })
    }
}

/// Nothing arrives within this time.
const SILENCE: Duration = Duration::from_millis(200);

#[tokio::test]
async fn connects_and_packets_wait_for_the_lease() {
    let lease = Arc::new(TestLease::default());
    let options = Options {
        lease: Some(lease.clone()),
        ..Options::default()
    };
    let broker = Broker::new(options, Arc::new(NoService));
    let mut client = Client::tcp(listen(&broker).await).await;
    client.send(&[connect("a", true, 0, 0)]).await;
    assert!(timeout(SILENCE, client.next()).await.is_err());
    lease.grant();
    client.connack().await;
    client.listen_to("t", Q::AtMostOnce).await;

    lease.end();
    client
        .send(&[publish("t", Q::AtMostOnce, 0, "payload")])
        .await;
    assert!(timeout(SILENCE, client.next()).await.is_err());
    assert_eq!(broker.stats().connections, 1);
    lease.grant();
    assert!(matches!(client.next().await, Some(Packet::Publish(_))));
}
