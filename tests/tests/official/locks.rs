//! The lock client. It must wait while another client holds the lock, and get the lock after a
//! release, an expiry, or the death of the holder.

use std::{
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use crate::{
    peer::{Peer, TIMEOUT, newer, within},
    place::Place,
};

const LEASE: Duration = Duration::from_secs(60);

pub(crate) async fn lock_is_acquired_and_released(place: Place) {
    let server = place.start(&[]);
    let peer = Peer::connect(&server, "one");
    let lock = peer.lock("lock");
    let token = lock.lock(LEASE, TIMEOUT, None).await.unwrap();
    assert_eq!(lock.current_lock_fencing_token(), Some(token.clone()));
    assert_eq!(
        peer.lease("lock").get_holder(TIMEOUT).await.unwrap(),
        Some(b"one".to_vec())
    );
    lock.unlock(TIMEOUT).await.unwrap();
    assert_eq!(lock.current_lock_fencing_token(), None);
    let again = lock.lock(LEASE, TIMEOUT, None).await.unwrap();
    assert!(newer(&again, &token));
    peer.leave().await;
}

/// The second client waits until the first one unlocks.
pub(crate) async fn unlock_passes_the_lock_on(place: Place) {
    let server = place.start(&[]);
    let (one, two) = Peer::pair(&server);
    let first = one.lock("lock");
    let token = first.lock(LEASE, TIMEOUT, None).await.unwrap();
    let second = two.lock("lock");
    let waiting = tokio::spawn(async move { second.lock(LEASE, TIMEOUT, None).await });
    tokio::time::sleep(Duration::from_millis(300)).await;
    assert!(!waiting.is_finished(), "two holders at once");
    first.unlock(TIMEOUT).await.unwrap();
    let next = within(waiting).await;
    assert!(newer(&next.unwrap().unwrap(), &token));
    one.leave().await;
    two.leave().await;
}

/// The holder does not unlock. The lease expires, and its notification wakes the waiting client.
pub(crate) async fn expired_lock_passes_on(place: Place) {
    let server = place.start(&[]);
    let (one, two) = Peer::pair(&server);
    let lease = Duration::from_secs(1);
    let token = one.lock("lock").lock(lease, TIMEOUT, None).await.unwrap();
    let next = within(two.lock("lock").lock(LEASE, TIMEOUT, None)).await;
    assert!(newer(&next.unwrap(), &token));
    one.leave().await;
    two.leave().await;
}

/// The holder renews the lease, then dies: its connection breaks and the renewals stop.
pub(crate) async fn lock_of_a_killed_holder_passes_on(place: Place) {
    let server = place.start(&[]);
    let (one, two) = Peer::pair(&server);
    let (lease, period) = (Duration::from_secs(2), Duration::from_millis(500));
    let first = one.lock("lock");
    let token = first.lock(lease, TIMEOUT, Some(period)).await.unwrap();
    let second = two.lock("lock");
    let waiting = tokio::spawn(async move { second.lock(LEASE, TIMEOUT, None).await });
    // Longer than the lease, so only the renewals can keep it.
    tokio::time::sleep(Duration::from_millis(2500)).await;
    assert!(!waiting.is_finished(), "the lease was not renewed");
    one.die();
    let next = within(waiting).await;
    assert!(newer(&next.unwrap().unwrap(), &token));
    two.leave().await;
}

/// Five clients increment a counter under one lock. Two clients must never hold the lock at once,
/// and no increment may be lost.
pub(crate) async fn lock_shared_by_five_clients_excludes(place: Place) {
    let server = place.start(&[]);
    let inside = Arc::new(AtomicUsize::new(0));
    let mut tasks = tokio::task::JoinSet::new();
    for n in 0..5 {
        let peer = Peer::connect(&server, &format!("client{n}"));
        let inside = inside.clone();
        tasks.spawn(async move {
            let lock = peer.lock("lock");
            for _ in 0..4 {
                let token = lock.lock(LEASE, TIMEOUT, None).await.unwrap();
                assert_eq!(inside.fetch_add(1, Ordering::SeqCst), 0, "two holders");
                let got = peer.store.get(b"count".to_vec(), TIMEOUT).await.unwrap();
                let count: u32 = match got.response {
                    Some(text) => String::from_utf8(text).unwrap().parse().unwrap(),
                    None => 0,
                };
                let count = (count + 1).to_string();
                peer.set_with("count", &count, Some(token), Default::default())
                    .await;
                inside.fetch_sub(1, Ordering::SeqCst);
                lock.unlock(TIMEOUT).await.unwrap();
            }
            peer.leave().await;
        });
    }
    tasks.join_all().await;
    assert_eq!(
        server.store("reader").get("count"),
        Some(b"20".to_vec()),
        "an increment was lost"
    );
}
