//! Clients that know nothing of this project: mosquitto's commands, paho for Python, rumqttc.
#![allow(missing_docs, clippy::unwrap_used)]

mod mosquitto;
mod paho;
mod rumqtt;
