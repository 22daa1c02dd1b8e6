//! Who has gone: MQTT does not tell one client of another, so each kind of broker has its own source.

/// What a source has seen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sign<'a> {
    /// The connection of this client has ended.
    Gone(&'a str),
    /// A client has connected.
    Came {
        /// Its client id.
        client: &'a str,
        /// Its user name, where the source tells.
        user: Option<&'a str>,
    },
}

/// Reads what a broker tells of its clients.
pub trait Source: Send {
    /// What it is, for a line at the start.
    fn name(&self) -> &'static str;

    /// The topics that it has to hear.
    fn filters(&self) -> &'static [&'static str];

    /// A message on one of these. It calls `sign` for all that it says, in order.
    fn read(&mut self, topic: &str, payload: &[u8], sign: &mut dyn FnMut(Sign<'_>));
}
