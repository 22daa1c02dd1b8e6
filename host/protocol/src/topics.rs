//! Topics of the protocol.

/// Where current clients send requests (the protocol, section 1).
pub const REQUEST_TOPIC: &str = "statestore/v1/FA9AE35F-2F64-47CD-9BFF-08E2B32A0FE8/command/invoke";
/// Where clients of the 2023 preview send them.
pub const PREVIEW_TOPIC: &str = "$services/statestore/_any_/command/invoke/request";
/// What all notification topics begin with; only the store publishes there.
pub const NOTIFICATION_TOPICS: &str = "clients/statestore/v1/FA9AE35F-2F64-47CD-9BFF-08E2B32A0FE8";
