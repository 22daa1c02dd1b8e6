//! An official client for tests: a session that runs in a task, and a state store client on it.

use std::{net::SocketAddr, sync::Arc, time::Duration};

use azure_iot_operations_mqtt::{
    aio::connection_settings::MqttConnectionSettingsBuilder,
    session::{Session, SessionExitHandle, SessionMonitor, SessionOptionsBuilder},
};
use azure_iot_operations_protocol::{
    application::ApplicationContextBuilder, common::hybrid_logical_clock::HybridLogicalClock,
};
use azure_iot_operations_services::{
    leased_lock::{lease, lock},
    state_store::{self, Error, KeyNotification, KeyObservation, Operation, Response},
};
use statehouse_tests::Server;
use tokio::task::JoinHandle;

/// How long a request may take. It is long because the machine may be busy.
pub(crate) const TIMEOUT: Duration = Duration::from_secs(20);

/// An official client with its session.
pub(crate) struct Peer {
    pub(crate) store: Arc<state_store::Client>,
    pub(crate) monitor: SessionMonitor,
    id: String,
    exit: SessionExitHandle,
    session: JoinHandle<Result<(), String>>,
}

impl Peer {
    /// Connects two clients, `one` and `two`.
    pub(crate) fn pair(server: &Server) -> (Peer, Peer) {
        let connect = |id| Peer::connect(server, id);
        (connect("one"), connect("two"))
    }

    /// Connects as the examples do, with the defaults of the crate.
    pub(crate) fn connect(server: &Server, id: &str) -> Peer {
        Peer::connect_to(server.address(), id)
    }

    /// Connects with the defaults of the crate to another address.
    pub(crate) fn connect_to(address: SocketAddr, id: &str) -> Peer {
        Peer::connect_with(address, id, |settings| settings)
    }

    /// Connects with the client id as the user name.
    pub(crate) fn connect_as(server: &Server, id: &str, password: &str) -> Peer {
        Peer::connect_with(server.address(), id, |settings| {
            settings
                .username(id.to_owned())
                .password(password.to_owned())
        })
    }

    /// Connects with changed settings.
    pub(crate) fn connect_with(
        address: SocketAddr,
        id: &str,
        change: impl FnOnce(MqttConnectionSettingsBuilder) -> MqttConnectionSettingsBuilder,
    ) -> Peer {
        let settings = MqttConnectionSettingsBuilder::default()
            .client_id(id)
            .hostname(address.ip().to_string())
            .tcp_port(address.port())
            .keep_alive(Duration::from_secs(5))
            .use_tls(false);
        let settings = change(settings).build().unwrap();
        let options = SessionOptionsBuilder::default()
            .connection_settings(settings)
            .build()
            .unwrap();
        let session = Session::new(options).unwrap();
        let store = state_store::Client::new(
            ApplicationContextBuilder::default().build().unwrap(),
            session.create_managed_client(),
            session.create_session_monitor(),
            state_store::ClientOptionsBuilder::default()
                .build()
                .unwrap(),
        )
        .unwrap();
        Peer {
            store: Arc::new(store),
            monitor: session.create_session_monitor(),
            id: id.into(),
            exit: session.create_exit_handle(),
            session: tokio::spawn(async move { session.run().await.map_err(|e| e.to_string()) }),
        }
    }

    /// A lease client whose holder name is the client id.
    pub(crate) fn lease(&self, name: &str) -> lease::Client {
        lease::Client::new(self.store.clone(), name.into(), self.id.as_str().into()).unwrap()
    }

    /// A lock client whose holder name is the client id.
    pub(crate) fn lock(&self, name: &str) -> lock::Client {
        lock::Client::new(self.store.clone(), name.into(), self.id.as_str().into()).unwrap()
    }

    /// Sends a SET without options. Returns the version.
    pub(crate) async fn set(&self, key: &str, value: &str) -> HybridLogicalClock {
        self.set_with(key, value, None, state_store::SetOptions::default())
            .await
            .unwrap()
    }

    /// Sends a SET with a token and options. Returns the version.
    pub(crate) async fn set_with(
        &self,
        key: &str,
        value: &str,
        token: Option<HybridLogicalClock>,
        options: state_store::SetOptions,
    ) -> Option<HybridLogicalClock> {
        let set = (self.store).set(key.into(), value.into(), TIMEOUT, token, options);
        let response = set.await.unwrap();
        assert!(response.response, "SET {key} was not applied");
        response.version
    }

    /// Sends a SET without options, which may be refused.
    pub(crate) async fn try_set(
        &self,
        key: impl Into<Vec<u8>>,
        value: impl Into<Vec<u8>>,
        token: Option<HybridLogicalClock>,
    ) -> Result<Response<bool>, Error> {
        let options = state_store::SetOptions::default();
        let set = (self.store).set(key.into(), value.into(), TIMEOUT, token, options);
        set.await
    }

    /// Shuts down as the examples do. Every step must succeed.
    pub(crate) async fn leave(self) {
        within(self.store.shutdown()).await.unwrap();
        self.exit.try_exit().unwrap();
        within(self.session).await.unwrap().unwrap();
    }

    /// Breaks the connection without a DISCONNECT or any clean-up.
    pub(crate) fn die(self) {
        self.session.abort();
    }
}

/// Waits for a result with a timeout, so that a failed test ends.
pub(crate) async fn within<T>(future: impl Future<Output = T>) -> T {
    tokio::time::timeout(TIMEOUT, future)
        .await
        .expect("in time")
}

/// Waits for the next notification.
pub(crate) async fn next_notification(observation: &mut KeyObservation) -> KeyNotification {
    within(observation.recv_notification())
        .await
        .expect("a notification, not the end")
        .0
}

/// Waits for the next notification, which must be of this operation. Returns the version.
pub(crate) async fn expect_notification(
    observation: &mut KeyObservation,
    operation: Operation,
) -> HybridLogicalClock {
    let notification = next_notification(observation).await;
    assert_eq!(notification.operation, operation);
    assert_eq!(notification.key, observation.key);
    notification.version
}

/// Whether a version is newer. Versions are ordered by wall clock, counter and node.
pub(crate) fn newer(one: &HybridLogicalClock, than: &HybridLogicalClock) -> bool {
    let order = |hlc: &HybridLogicalClock| (hlc.timestamp, hlc.counter, hlc.node_id.clone());
    order(one) > order(than)
}
