//! Broken connections. The official client resumes its session, and gives up if the session is
//! lost. These tests check that the client continues.

use std::sync::{
    Arc,
    atomic::{AtomicBool, Ordering},
};

use azure_iot_operations_services::state_store::Operation;
use statehouse_tests::Server;
use tokio::{
    net::{TcpListener, TcpStream},
    sync::broadcast,
};

use crate::{
    peer::{Peer, TIMEOUT, expect_notification, within},
    place::Place,
};

/// A relay in front of the server that breaks its connections on demand.
struct Relay {
    port: u16,
    cut: broadcast::Sender<()>,
    up: Arc<AtomicBool>,
}

impl Relay {
    async fn start(server: &Server) -> Relay {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let (cut, _) = broadcast::channel(1);
        let up = Arc::new(AtomicBool::new(true));
        let (address, cuts, open) = (server.address(), cut.clone(), up.clone());
        tokio::spawn(async move {
            while let Ok((mut client, _)) = listener.accept().await {
                if !open.load(Ordering::SeqCst) {
                    continue;
                }
                let mut cut = cuts.subscribe();
                tokio::spawn(async move {
                    let mut server = TcpStream::connect(address).await.unwrap();
                    tokio::select! {
                        _ = tokio::io::copy_bidirectional(&mut client, &mut server) => {}
                        _ = cut.recv() => {}
                    }
                });
            }
        });
        Relay { port, cut, up }
    }
}

pub(crate) async fn broken_connection_is_resumed(place: Place) {
    let server = place.start(&[]);
    let relay = Relay::start(&server).await;
    let peer = Peer::connect_to("127.0.0.1", relay.port, "resuming");
    let version = peer.set("key", "before").await;
    for round in 0..3 {
        relay.up.store(false, Ordering::SeqCst);
        relay.cut.send(()).unwrap();
        within(peer.monitor.disconnected()).await;
        relay.up.store(true, Ordering::SeqCst);
        within(peer.monitor.connected()).await;
        let got = peer.store.get(b"key".to_vec(), TIMEOUT).await.unwrap();
        assert_eq!(got.response, Some(b"before".to_vec()), "round {round}");
        assert_eq!(got.version.as_ref(), Some(&version));
    }
    peer.leave().await;
}

/// A watch ends with its connection. The client ends the observation, and can begin another one.
pub(crate) async fn observation_ends_with_its_connection(place: Place) {
    let server = place.start(&[]);
    let relay = Relay::start(&server).await;
    let peer = Peer::connect_to("127.0.0.1", relay.port, "observing");
    let writer = Peer::connect(&server, "writer");
    let key = || b"key".to_vec();
    let mut seen = peer.store.observe(key(), TIMEOUT).await.unwrap().response;
    writer.set("key", "one").await;
    expect_notification(&mut seen, Operation::Set(b"one".to_vec())).await;

    relay.cut.send(()).unwrap();
    let end = within(seen.recv_notification()).await;
    assert!(end.is_none(), "the observation continues");
    within(peer.monitor.connected()).await;
    writer.set("key", "not observed").await;

    let mut seen = peer.store.observe(key(), TIMEOUT).await.unwrap().response;
    writer.set("key", "two").await;
    expect_notification(&mut seen, Operation::Set(b"two".to_vec())).await;
    peer.leave().await;
    writer.leave().await;
}
