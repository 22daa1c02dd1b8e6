//! Topics of the protocol.

/// The request topic of current clients (protocol, section 1).
pub const REQUEST_TOPIC: &str = "statestore/v1/FA9AE35F-2F64-47CD-9BFF-08E2B32A0FE8/command/invoke";
/// The request topic of clients of the 2023 preview.
pub const PREVIEW_TOPIC: &str = "$services/statestore/_any_/command/invoke/request";
/// The prefix of all notification topics. Only the store publishes there.
pub const NOTIFICATION_TOPICS: &str = "clients/statestore/v1/FA9AE35F-2F64-47CD-9BFF-08E2B32A0FE8";
