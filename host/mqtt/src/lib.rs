//! A small embeddable broker for MQTT 5 and MQTT 3.1.1.
//!
//! The broker serves clients over sockets or any byte stream. Sections without a version are those
//! of MQTT 5. It hands the PUBLISHes that the embedder claims to the embedder ([`Service`]), if
//! they use MQTT 5, and routes all others. Sessions,
//! subscriptions, retained messages and wills are in memory. Every change of durable state goes to
//! the embedder's log, if there is one ([`Persistence`]).
//!
//! The broker must never interpret or change a payload or a user property. One client must never
//! slow down another: every queue is bounded in bytes ([`Limits`]), and a client that does not read
//! is disconnected.
//!
//! The modules in the order in which a packet passes them:
//!
//! * `access`: the embedder's decisions about who may connect, publish and subscribe ([`Access`]);
//! * `admission`: authenticates a CONNECT, and a client that re-authenticates;
//! * `refusal`: counts refusals and reports them;
//! * `connection`: a reader and a writer task per socket, time-outs, back pressure;
//! * `codec`: bytes to packets and back; properties stay one raw slice;
//! * `dispatch`: keeps the packet order of a connection and collects requests for the service;
//! * `core`: sessions, router, retained messages, wills, deadlines; no I/O, time is an argument,
//!   one mutex;
//! * `ledger`: accounts the memory of clients, by owner and in total;
//! * `output`: the bytes that wait for one socket; `write_batch`: writes the output of several
//!   sockets together;
//! * `persist`, `change`: records of durable changes; `durability_gate`: output that waits for
//!   them; `recovery`, `image`: state from records; `session_users`: users from records;
//! * `lease`: the permission to decide, if several hosts could.
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
//! broker.listen(listener).await;
//! # Ok(())
//! # }
//! ```
#![forbid(unsafe_code)]

mod accept_failures;
mod access;
mod admission;
mod barrier;
mod broker;
mod change;
mod clock;
mod codec;
mod connection;
mod core;
mod dispatch;
mod durability_gate;
mod exchanges;
mod group;
pub mod handshakes;
mod image;
mod incomplete;
mod lease;
mod ledger;
mod limits;
mod link;
mod log_throttle;
mod message;
mod nagle;
mod output;
mod persist;
mod properties;
mod rate_limit;
mod reason;
mod recovery;
mod refusal;
mod retained;
mod router;
mod service;
mod session;
mod session_queue;
mod session_users;
mod shared_writer;
#[cfg(any(test, feature = "simulation"))]
pub mod simulation;
mod stats;
#[cfg(test)]
mod testing;
mod topic;
mod version;
mod write_batch;

pub use accept_failures::AcceptFailures;
pub use access::{
    Access, Admission, Anyone, Attempt, Deciding, Door, Enhanced, Identity, Proof, TopicCheck,
    Verdict,
};
pub use broker::{Batch, Broker, Options};
pub use change::CorruptChanges;
pub use image::ImageCursor;
pub use lease::Lease;
pub use ledger::network;
pub use limits::Limits;
pub use log_throttle::LogThrottle;
pub use message::{Message, QoS};
pub use output::Direct;
pub use persist::Persistence;
pub use properties::{Properties, PropertiesBuilder, PropertyError};
pub use reason::ReasonCode;
pub use recovery::Recovery;
pub use refusal::{Refusal, RefusalCount, Refused};
pub use service::{Claim, NoService, Origin, Request, Service, Token};
pub use session_users::SessionUsers;
pub use shared_writer::SharedWriter;
pub use stats::{ClientStatus, ConnectionSummary, SessionSummary, Stats};
pub use topic::{check_filter as check_topic_filter, check_name as check_topic_name};
pub use version::ProtocolVersion;
