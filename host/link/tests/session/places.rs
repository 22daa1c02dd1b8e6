//! Where the next connection goes.

use super::*;

#[tokio::test]
async fn later_connections_go_to_the_new_place() {
    let mut test = SessionTest::start().await;
    let peer = test.accept(Greeting::default()).await;
    let other = Broker::start().await;
    *test.owner.place.lock().unwrap() = Some(place(&other));
    let before = std::mem::replace(&mut test.broker, other);
    drop((peer, before));
    // The message of the first connection is sent again, and the session continues.
    test.add([note("a")]);
    let mut peer = test.accept(Greeting::resumed()).await;
    assert_eq!(peer.text().await, "a");
}

/// The system may start no thread for the owner.
#[tokio::test]
async fn owner_that_does_not_answer_delays_no_connection_for_ever() {
    let test = SessionTest::start().await;
    let peer = test.accept(Greeting::default()).await;
    let owner = test.owner.clone();
    let (locked, is_locked) = tokio::sync::oneshot::channel();
    let (release, is_released) = std::sync::mpsc::channel::<()>();
    let holding = std::thread::spawn(move || {
        let _place = owner.place.lock().unwrap();
        locked.send(()).unwrap();
        // Also returns if the test fails, because that drops the sender.
        _ = is_released.recv();
    });
    is_locked.await.unwrap();
    drop(peer);
    test.add([note("a")]);
    let mut peer = test.accept(Greeting::resumed()).await;
    assert_eq!(peer.text().await, "a");
    drop(release);
    holding.join().unwrap();
}
