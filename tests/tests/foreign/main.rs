//! Tests independent MQTT clients with the store: the commands of Mosquitto, paho for Python, and
//! rumqttc. They must work without any code of this project.
#![allow(missing_docs, clippy::unwrap_used)]

mod mosquitto;
mod paho;
mod rumqtt;
