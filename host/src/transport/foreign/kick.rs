//! Ending the connection of a client that breaks a rule: MQTT has no way to ask a broker for it, so each kind of broker
//! has its own.

/// Publishes to the broker for who is not the store, at QoS 1 and without properties.
pub trait Post: Send + Sync {
    /// Publishes, now or as soon as there is a connection. It does not wait.
    fn post(&self, topic: &str, payload: bytes::Bytes);
}

/// Ends connections of clients.
pub trait Kick: Send + Sync {
    /// The topics that it has to hear.
    fn filters(&self) -> &'static [&'static str];

    /// A message on one of these.
    fn read(&self, topic: &str, payload: &[u8]);

    /// A client has come, and its user name is known.
    fn came(&self, client: &str, user: &str);

    /// There is a connection to the broker, the first one or another.
    fn attached(&self);

    /// Ends the connection of a client that broke a rule, if it can.
    fn kick(&self, client: &str);
}
