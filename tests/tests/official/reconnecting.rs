//! Connections break. The official client asks for its session back and gives up where there is none; what is
//! tested is that it goes on.

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
    peer::{Peer, TIMEOUT, heard_that, within},
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

pub(crate) async fn a_broken_connection_is_resumed(place: Place) {
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

/// A watch ends with its connection, and the client says so: the observation ends and can begin again.
pub(crate) async fn an_observation_ends_with_its_connection_and_begins_again(place: Place) {
    let server = place.start(&[]);
    let relay = Relay::start(&server).await;
    let peer = Peer::connect_to("127.0.0.1", relay.port, "observing");
    let writer = Peer::connect(&server, "writer");
    let key = || b"key".to_vec();
    let mut seen = peer.store.observe(key(), TIMEOUT).await.unwrap().response;
    writer.set("key", "one").await;
    heard_that(&mut seen, Operation::Set(b"one".to_vec())).await;

    relay.cut.send(()).unwrap();
    let end = within(seen.recv_notification()).await;
    assert!(end.is_none(), "the observation goes on");
    within(peer.monitor.connected()).await;
    writer.set("key", "unheard").await;

    let mut seen = peer.store.observe(key(), TIMEOUT).await.unwrap().response;
    writer.set("key", "two").await;
    heard_that(&mut seen, Operation::Set(b"two".to_vec())).await;
    peer.leave().await;
    writer.leave().await;
}
