//! A policy that is one function, and its requests.

use statehouse_policy::{
    Body, Change, Dialect, Frame, Host, Info, Notification, Outcome, Policy, Request, Span,
};

/// Handles every request with this function. Its notifications are empty.
pub(crate) struct Function(pub(crate) fn(&mut dyn Host, &Request) -> Outcome);

/// A request of the client `client`.
pub(crate) fn request(payload: &[u8], now: u64) -> Request {
    Request {
        payload: payload.to_vec(),
        dialect: Dialect::Sdk,
        timestamp: None,
        fencing_token: None,
        client: Some("client".to_owned()),
        now,
    }
}

/// No bytes.
pub(crate) const NOTHING: Frame = Frame {
    head: Vec::new(),
    body: Body::None,
};

impl Policy for Function {
    fn describe() -> Info {
        Info {
            name: "function".to_owned(),
            version: "1".to_owned(),
            commands: Vec::new(),
        }
    }

    fn configure(_: &[(String, String)]) -> Result<Self, String> {
        Err("it is made from a function".to_owned())
    }

    fn route(&self, _: &[u8]) -> Option<Span> {
        None
    }

    fn handle(&self, host: &mut impl Host, request: &Request) -> Outcome {
        (self.0)(host, request)
    }

    fn notify(&self, _: &Change, _: Dialect) -> Notification {
        Notification {
            topic_prefix: String::new(),
            topic_suffix: String::new(),
            payload: NOTHING,
        }
    }
}
