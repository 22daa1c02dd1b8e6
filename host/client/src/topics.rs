//! The topics of the protocol, section 1.

use data_encoding::HEXUPPER;

pub(crate) const REQUEST: &str =
    "statestore/v1/FA9AE35F-2F64-47CD-9BFF-08E2B32A0FE8/command/invoke";

const NOTIFY_PREFIX: &str = "clients/statestore/v1/FA9AE35F-2F64-47CD-9BFF-08E2B32A0FE8/";

/// The topic of responses to `client_id`.
pub(crate) fn response(client_id: &str) -> String {
    format!("clients/{client_id}/services/statestore/_any_/command/invoke/response")
}

/// The prefix of the notification topics of `client_id`. The key in Base 16 follows.
pub(crate) fn notify_prefix(client_id: &str) -> String {
    format!(
        "{NOTIFY_PREFIX}{}/command/notify/",
        HEXUPPER.encode(client_id.as_bytes())
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn topic_of_the_protocol_example() {
        assert_eq!(
            notify_prefix("client-id1") + &HEXUPPER.encode(b"SOMEKEY"),
            "clients/statestore/v1/FA9AE35F-2F64-47CD-9BFF-08E2B32A0FE8/636C69656E742D696431/command/notify/534F4D454B4559"
        );
    }
}
