//! A small MQTT 5 broker to embed.
//!
//! In come sockets (or any byte stream) of MQTT 5 clients; out go packets to them, and to the embedder those PUBLISHes
//! that it claims ([`Service`]). The broker keeps sessions, subscriptions, retained messages and wills in memory. It
//! never interprets a payload or a user property, never changes one, and never lets one client's pace decide another's:
//! every queue is bounded in bytes ([`Limits`]), and who does not read is disconnected.
//!
//! The way of a packet:
//!
//! * `connection`: a reader and a writer task per socket, time-outs, back pressure;
//! * `codec`: bytes to packets and back; properties stay one raw slice;
//! * `dispatch`: the order inside one connection; collects the requests of one socket read for the service;
//! * `core`: sessions, router, retained messages, wills, deadlines; no I/O, time comes in as an argument, one mutex;
//! * `output`: the bytes that wait for one socket.
//!
//! ```
//! # async fn example() -> std::io::Result<()> {
//! use std::sync::Arc;
//!
//! use statehouse_mqtt::{Broker, Message, NoService, Options, QoS};
//!
//! let broker = Broker::new(Options::default(), Arc::new(NoService));
//! let listener = tokio::net::TcpListener::bind("127.0.0.1:1883").await?;
//! tokio::spawn({
//!     let broker = broker.clone();
//!     async move { broker.run_timers().await }
//! });
//! broker.batch(|batch| batch.publish(Message::new("greeting", "hello", QoS::AtMostOnce)));
//! broker.listen(listener).await
//! # }
//! ```
#![forbid(unsafe_code)]

mod broker;
mod codec;
mod connection;
mod core;
mod dispatch;
mod limits;
mod link;
mod message;
mod outbox;
mod output;
mod properties;
mod reason;
mod retained;
mod router;
mod service;
mod session;
mod stats;
#[cfg(test)]
mod testing;
mod topic;

pub use broker::{Batch, Broker, Options};
pub use limits::Limits;
pub use message::{Message, QoS};
pub use properties::{Properties, PropertiesBuilder, PropertyError};
pub use reason::ReasonCode;
pub use service::{Claim, NoService, Origin, Request, Service, Token};
pub use stats::Stats;
