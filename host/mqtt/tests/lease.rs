//! A broker decides nothing while its host has no lease.
#![allow(clippy::unwrap_used, reason = "tests fail by panicking")]

mod common;

use std::{pin::Pin, sync::Arc, time::Duration};

use common::*;
use statehouse_mqtt::{Broker, Lease, NoService, Options};
use tokio::{sync::watch, time::timeout};
use wire::Packet;

/// A lease that the test grants and ends.
struct TestLease(watch::Sender<bool>);

impl Lease for TestLease {
    fn is_valid(&self) -> bool {
        *self.0.borrow()
    }

    fn renewed(&self) -> Pin<Box<dyn Future<Output = bool> + Send + '_>> {
        let mut lease = self.0.subscribe();
        Box::pin(async move { lease.wait_for(|is_valid| *is_valid).await.is_ok() })
    }
}

/// Nothing arrives within this time.
const SILENCE: Duration = Duration::from_millis(200);

#[tokio::test]
async fn connects_and_packets_wait_for_the_lease() {
    let lease = Arc::new(TestLease(watch::Sender::new(false)));
    let options = Options {
        lease: Some(lease.clone()),
        ..Options::default()
    };
    let broker = Broker::new(options, Arc::new(NoService));
    let mut client = Client::tcp(listen(&broker).await).await;
    client.send(&[connect("a", true, 0, 0)]).await;
    assert!(timeout(SILENCE, client.next()).await.is_err());
    lease.0.send_replace(true);
    client.connack().await;
    client.listen_to("t", Q::AtMostOnce).await;

    lease.0.send_replace(false);
    client
        .send(&[publish("t", Q::AtMostOnce, 0, "payload")])
        .await;
    assert!(timeout(SILENCE, client.next()).await.is_err());
    assert_eq!(broker.stats().connections, 1);
    lease.0.send_replace(true);
    assert!(matches!(client.next().await, Some(Packet::Publish(_))));
}
