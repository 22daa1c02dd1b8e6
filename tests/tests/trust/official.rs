//! The official client of Azure IoT Operations, with configurable credentials.

use std::{sync::Arc, time::Duration};

use azure_iot_operations_mqtt::aio::connection_settings::MqttConnectionSettingsBuilder;
use azure_iot_operations_services::state_store;
use statehouse_tests::{Server, client::PATIENCE};

use crate::peer::Peer;

/// Runs `f` with a state store client, on a session that ends with `f`.
pub(crate) fn with_client<F>(
    server: &Server,
    id: &str,
    credentials: impl FnOnce(MqttConnectionSettingsBuilder) -> MqttConnectionSettingsBuilder,
    f: impl FnOnce(Arc<state_store::Client>) -> F,
) -> F::Output
where
    F: Future,
{
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .unwrap();
    runtime.block_on(async {
        let peer = Peer::connect_with(server.address(), id, credentials);
        let output = f(peer.store.clone()).await;
        peer.die();
        output
    })
}

/// Sends a SET, which must succeed.
pub(crate) async fn set(store: &state_store::Client, key: &str, value: &str) {
    let options = state_store::SetOptions::default();
    let set = store.set(key.into(), value.into(), PATIENCE, None, options);
    assert!(set.await.unwrap().response, "SET {key} was not applied");
}

/// Whether a SET is answered within this time.
pub(crate) async fn is_answered(store: &state_store::Client, within: Duration) -> bool {
    let options = state_store::SetOptions::default();
    let set = store.set("key".into(), "value".into(), within, None, options);
    set.await.is_ok()
}
