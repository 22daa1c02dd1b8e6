//! Ending the connection of a client that breaks a rule: MQTT has no way to ask a broker for it, so each kind of broker
//! has its own.
//!
//! What enters: who broke a rule, and what the broker tells of clients. What leaves: orders to the broker. The client
//! id that a request claims is not proven behind a foreign broker: whoever may publish requests can have another client
//! kicked. So nobody is unless it is asked for.

pub mod dynsec;

use bytes::Bytes;

/// Publishes to the broker for who is not the store, at QoS 1 and without properties.
pub trait Post: Send + Sync {
    /// Publishes, now or as soon as there is a connection. It does not wait.
    fn post(&self, topic: &str, payload: Bytes);
}

/// Ends connections of clients.
pub trait Kick: Send + Sync {
    /// The topics that it has to hear.
    fn filters(&self) -> &'static [&'static str];

    /// A message on one of these.
    fn read(&self, topic: &str, payload: &[u8]);

    /// A client has come, and its user name is known.
    fn came(&self, client: &str, user: &str);

    /// A client has gone.
    fn gone(&self, client: &str);

    /// There is a connection to the broker, the first one or another.
    fn attached(&self);

    /// Ends the connection of a client that broke a rule, if it can.
    fn kick(&self, client: &str);

    /// The store leaves the broker in a moment: takes back what would last longer.
    fn leave(&self);

    /// Whether all of that is taken back.
    fn has_left(&self) -> bool;
}
