//! The official client of Azure IoT Operations, with configurable credentials.

use std::time::Duration;

use azure_iot_operations_mqtt::{
    aio::connection_settings::MqttConnectionSettingsBuilder,
    session::{Session, SessionOptionsBuilder},
};
use azure_iot_operations_protocol::application::ApplicationContextBuilder;
use azure_iot_operations_services::state_store;
use statehouse_tests::{Server, client::PATIENCE};

/// Runs `f` with a state store client, on a session that ends with `f`.
pub(crate) fn with_client<F>(
    server: &Server,
    id: &str,
    credentials: impl FnOnce(MqttConnectionSettingsBuilder) -> MqttConnectionSettingsBuilder,
    f: impl FnOnce(state_store::Client) -> F,
) -> F::Output
where
    F: Future,
{
    let settings = MqttConnectionSettingsBuilder::default()
        .client_id(id)
        .hostname(server.address().ip().to_string())
        .tcp_port(server.port())
        .use_tls(false);
    let options = SessionOptionsBuilder::default()
        .connection_settings(credentials(settings).build().unwrap())
        .build()
        .unwrap();
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .unwrap();
    runtime.block_on(async {
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
        let session = tokio::spawn(session.run());
        let output = f(store).await;
        session.abort();
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
