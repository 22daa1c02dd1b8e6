//! The lease client: acquire, renew, release, observe. A lease must have at most one holder, and
//! each acquisition must give a newer fencing token.

use std::time::Duration;

use crate::{
    peer::{Peer, TIMEOUT, expect_notification, newer},
    place::Place,
};
use azure_iot_operations_services::{
    leased_lock::{Error, ErrorKind, lease},
    state_store::Operation,
};

const LEASE: Duration = Duration::from_secs(30);
const SHORT: Duration = Duration::from_millis(600);

async fn holder(lease: &lease::Client) -> Option<Vec<u8>> {
    lease.get_holder(TIMEOUT).await.unwrap()
}

fn expect_held<T: std::fmt::Debug>(result: Result<T, Error>) {
    let error = result.expect_err("the lease is held");
    assert!(
        matches!(error.kind(), ErrorKind::LeaseAlreadyHeld),
        "{error:?}"
    );
}

pub(crate) async fn lease_is_acquired_renewed_and_released(place: Place) {
    let server = place.start(&[]);
    let (one, two) = Peer::pair(&server);
    let (first, second) = (one.lease("lease"), two.lease("lease"));
    assert_eq!(holder(&first).await, None);
    let token = first.acquire(LEASE, TIMEOUT, None).await.unwrap();
    assert_eq!(first.current_lease_fencing_token(), Some(token.clone()));
    assert_eq!(holder(&second).await, Some(b"one".to_vec()));
    expect_held(second.acquire(LEASE, TIMEOUT, None).await);
    assert_eq!(second.current_lease_fencing_token(), None);

    // The holder may acquire the lease again, which renews it with a newer token.
    let renewed = first.acquire(LEASE, TIMEOUT, None).await.unwrap();
    assert!(newer(&renewed, &token));

    // A release by another client changes nothing.
    second.release(TIMEOUT).await.unwrap();
    assert_eq!(holder(&second).await, Some(b"one".to_vec()));
    first.release(TIMEOUT).await.unwrap();
    first.release(TIMEOUT).await.unwrap();
    assert_eq!(first.current_lease_fencing_token(), None);
    assert_eq!(holder(&second).await, None);
    let next = second.acquire(LEASE, TIMEOUT, None).await.unwrap();
    assert!(newer(&next, &renewed));
    one.leave().await;
    two.leave().await;
}

pub(crate) async fn lease_ends_at_its_time(place: Place) {
    let server = place.start(&[]);
    let (one, two) = Peer::pair(&server);
    let (first, second) = (one.lease("lease"), two.lease("lease"));
    let token = first.acquire(SHORT, TIMEOUT, None).await.unwrap();
    let mut seen = second.observe(TIMEOUT).await.unwrap();
    // On a busy machine, the lease may have ended before the watch began.
    if holder(&second).await.is_some() {
        expect_notification(&mut seen, Operation::Del).await;
    }
    assert_eq!(holder(&second).await, None);
    let next = second.acquire(LEASE, TIMEOUT, None).await.unwrap();
    assert!(newer(&next, &token));
    expect_held(first.acquire(LEASE, TIMEOUT, None).await);
    assert!(second.unobserve(TIMEOUT).await.unwrap());
    one.leave().await;
    two.leave().await;
}

pub(crate) async fn release_of_a_lease_notifies_observers(place: Place) {
    let server = place.start(&[]);
    let (one, two) = Peer::pair(&server);
    let (first, second) = (one.lease("lease"), two.lease("lease"));
    let mut seen = second.observe(TIMEOUT).await.unwrap();
    let token = first.acquire(LEASE, TIMEOUT, None).await.unwrap();
    let version = expect_notification(&mut seen, Operation::Set(b"one".to_vec())).await;
    assert_eq!(version, token);
    first.release(TIMEOUT).await.unwrap();
    expect_notification(&mut seen, Operation::Del).await;
    one.leave().await;
    two.leave().await;
}

pub(crate) async fn auto_renewed_lease_outlives_its_time(place: Place) {
    let server = place.start(&[]);
    let (one, two) = Peer::pair(&server);
    let (first, second) = (one.lease("lease"), two.lease("lease"));
    let mut seen = second.observe(TIMEOUT).await.unwrap();
    let (lease, period) = (Duration::from_secs(3), Duration::from_millis(200));
    let mut token = first.acquire(lease, TIMEOUT, Some(period)).await.unwrap();
    assert_eq!(
        expect_notification(&mut seen, Operation::Set(b"one".to_vec())).await,
        token
    );
    // 20 renewals take longer than the first lease lasted.
    for _ in 0..20 {
        let renewed = expect_notification(&mut seen, Operation::Set(b"one".to_vec())).await;
        assert!(newer(&renewed, &token));
        token = renewed;
    }
    expect_held(second.acquire(lease, TIMEOUT, None).await);
    first.release(TIMEOUT).await.unwrap();
    // A renewal may still have been in flight. The key is deleted after it, and stays deleted.
    while holder(&second).await.is_some() {
        tokio::time::sleep(period).await;
    }
    one.leave().await;
    two.leave().await;
}

pub(crate) async fn write_with_an_old_lease_token_is_refused(place: Place) {
    let server = place.start(&[]);
    let (one, two) = Peer::pair(&server);
    let (first, second) = (one.lease("lease"), two.lease("lease"));
    let old = first.acquire(LEASE, TIMEOUT, None).await.unwrap();
    one.set_with("shared", "one", Some(old.clone()), Default::default())
        .await;
    first.release(TIMEOUT).await.unwrap();
    let new = second.acquire(LEASE, TIMEOUT, None).await.unwrap();
    two.set_with("shared", "two", Some(new), Default::default())
        .await;
    // The former holder's late write is refused.
    let late = one.try_set("shared", "late", Some(old)).await;
    late.expect_err("the token is old");
    let got = two.store.get(b"shared".to_vec(), TIMEOUT).await.unwrap();
    assert_eq!(got.response, Some(b"two".to_vec()));
    one.leave().await;
    two.leave().await;
}
