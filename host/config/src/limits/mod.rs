//! Every limit of the host. Each has its unit in the name and the reason for its value in its
//! comment.
//!
//! The broker's own limits (connections, queues, packets) are in `statehouse_mqtt::Limits`. Limits
//! that an operator can change are defaults of the configuration.

mod admin;
mod cluster;
mod delivery;
mod foreign;
mod front;
mod listener;
mod logging;
mod metrics;
mod past;
mod process;
mod traces;

pub use admin::*;
pub use cluster::*;
pub use delivery::*;
pub use foreign::*;
pub use front::*;
pub use listener::*;
pub use logging::*;
pub use metrics::*;
pub use past::*;
pub use process::*;
pub use statehouse_access::limits::*;
pub use statehouse_core::limits::*;
pub use traces::*;
