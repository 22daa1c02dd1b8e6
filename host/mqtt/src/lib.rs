//! A small MQTT 5 broker to embed.
//!
//! In come sockets (or any byte stream) of MQTT 5 clients; out go packets to them, and to the embedder those PUBLISHes
//! that it claims ([`Service`]). The broker keeps sessions, subscriptions, retained messages and wills in memory, and
//! gives every change of what has to outlive the process to a log of the embedder, if there is one ([`Persistence`]). It
//! never interprets a payload or a user property, never changes one, and never lets one client's pace decide another's:
//! every queue is bounded in bytes ([`Limits`]), and who does not read is disconnected.
//!
//! The way of a packet:
//!
//! * `access`: who may connect, publish and subscribe, by the embedder's answers ([`Access`]);
//! * `admission`: finds that out for a CONNECT, and again where a client authenticates anew;
//! * `refusal`: what is refused, by what is said to the client, counted and told;
//! * `connection`: a reader and a writer task per socket, time-outs, back pressure;
//! * `codec`: bytes to packets and back; properties stay one raw slice;
//! * `dispatch`: the order inside one connection; collects the requests of one socket read for the service;
//! * `core`: sessions, router, retained messages, wills, deadlines; no I/O, time comes in as an argument, one mutex;
//! * `ledger`: how much memory clients hold, by owner and in total;
//! * `output`: the bytes that wait for one socket; `round`: the sockets that are written to together;
//! * `persist`, `change`: what is durable, as records; `gate`: what waits for them; `recovery`, `image`: back from them.
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

mod access;
mod admission;
mod allowance;
mod arriving;
mod broker;
mod change;
mod clock;
mod codec;
mod connection;
mod core;
mod dispatch;
mod exchanges;
mod gate;
mod group;
mod image;
mod ledger;
mod limits;
mod link;
mod message;
mod nagle;
mod output;
mod persist;
mod properties;
mod reason;
mod recovery;
mod refusal;
mod retained;
mod round;
mod router;
mod service;
mod session;
mod session_queue;
#[cfg(any(test, feature = "simulation"))]
pub mod simulation;
mod stats;
#[cfg(test)]
mod testing;
mod topic;
mod writer;

pub use access::{
    Access, Admission, Anyone, Attempt, Deciding, Door, Enhanced, Identity, Proof, Verdict,
};
pub use broker::{Batch, Broker, Options};
pub use change::CorruptChanges;
pub use image::ImageCursor;
pub use limits::Limits;
pub use message::{Message, QoS};
pub use persist::Persistence;
pub use properties::{Properties, PropertiesBuilder, PropertyError};
pub use reason::ReasonCode;
pub use recovery::Recovery;
pub use refusal::{Refusal, RefusalCount, Refused};
pub use service::{Claim, NoService, Origin, Request, Service, Token};
pub use stats::{Standing, Stats};
