//! Topics of the protocol.

use alloc::{format, string::String};

/// The request topic of current clients (protocol, section 1).
pub const REQUEST_TOPIC: &str = "statestore/v1/FA9AE35F-2F64-47CD-9BFF-08E2B32A0FE8/command/invoke";
/// The request topic of clients of the 2023 preview.
pub const PREVIEW_TOPIC: &str = "$services/statestore/_any_/command/invoke/request";
/// The prefix of all notification topics. Only the store publishes there.
pub const NOTIFICATION_TOPICS: &str = "clients/statestore/v1/FA9AE35F-2F64-47CD-9BFF-08E2B32A0FE8";
/// The prefix of the topics for orders and their status (protocol, section 12). Of all topics below,
/// clients publish only orders and pieces of policies.
pub const ADMIN_TOPICS: &str = "statehouse/v1/admin/";

/// The topic of a client's notifications about a key: both in Base 16 (protocol, section 8).
#[must_use]
pub fn notification_topic(client: &str, key: &[u8]) -> String {
    let hex = |bytes: &[u8]| -> String { bytes.iter().map(|byte| format!("{byte:02X}")).collect() };
    let (client, key) = (hex(client.as_bytes()), hex(key));
    format!("{NOTIFICATION_TOPICS}/{client}/command/notify/{key}")
}
