//! Every bound of the host, with its unit in its name and its reason. What the broker bounds by
//! itself (connections, queues, packets) is in `statehouse_mqtt::Limits`; the ones that an operator
//! may move are defaults of the configuration.

mod admin;
mod foreign;
mod listener;
mod logging;
mod past;
mod process;
mod ship;

pub use admin::*;
pub use foreign::*;
pub use listener::*;
pub use logging::*;
pub use past::*;
pub use process::*;
pub use ship::*;
pub use statehouse_access::limits::*;
pub use statehouse_core::limits::*;
pub use statehouse_loadgen::limits::*;
pub use statehouse_offline::limits::*;
pub use statehouse_testkit::limits::*;
