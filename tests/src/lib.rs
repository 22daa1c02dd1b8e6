//! The harness of the end-to-end tests: runs the built `statehouse` binary on its own ports,
//! connects clients that show every byte, and compares transcripts byte for byte. Tests of the MQTT
//! clients use its scripted broker.
//!
//! The harness never builds the server. It must not share code with the server, because an encoder
//! that checks its own output proves nothing.
//!
//! Every helper panics on an unexpected result, which fails the test.
#![forbid(unsafe_code)]
// A panic fails the test, so each unwrap is an assertion.
#![allow(clippy::unwrap_used)]
#![allow(
    missing_docs,
    reason = "most names say it, and nothing publishes this crate"
)]

/// Asserts that a text contains each of these parts.
#[macro_export]
macro_rules! assert_contains {
    ($text:expr, $($part:expr),+ $(,)?) => {{
        let text: &str = &$text;
        $({
            let part: &str = $part;
            assert!(text.contains(part), "no {part:?} in\n{text}");
        })+
    }};
}

pub mod admin;
pub mod attack;
pub mod background;
pub mod binary;
pub mod broker;
pub mod browser;
pub mod cgroup;
pub mod client;
pub mod client3;
pub mod cluster;
pub mod command;
pub mod connect;
pub mod dice;
pub mod etcd;
pub mod example;
pub mod files;
pub mod histories;
pub mod hlc;
pub mod injected;
pub mod linearizable;
pub mod lines;
pub mod mosquitto;
pub mod packet;
pub mod packet3;
pub mod policies;
pub mod processor;
pub mod prometheus;
pub mod property;
pub mod proxy;
pub mod reload;
pub mod resp;
pub mod server;
pub mod slow_disk;
pub mod small;
pub mod store;
pub mod switch;
pub mod tls;
pub mod transcript;
pub mod victim;
pub mod wait;
pub mod wall_clock;
pub mod websocket;

pub use admin::Admin;
pub use background::Background;
pub use browser::Browser;
pub use cgroup::Cgroup;
pub use client::{Client, Heard};
pub use client3::Client3;
pub use cluster::Cluster;
pub use command::{Ran, command, run, run_in};
pub use connect::{Connect, Will};
pub use dice::Dice;
pub use etcd::Etcd;
pub use hlc::Hlc;
pub use lines::Lines;
pub use mosquitto::Mosquitto;
pub use packet::{Packet, Publish};
pub use processor::Processor;
pub use property::Property;
pub use proxy::{Fate, Proxy, Way};
pub use server::Server;
pub use slow_disk::SlowDisk;
pub use store::{Answer, Dialect, Request, Store};
pub use victim::{Latencies, Victim};
pub use wall_clock::WallClock;
