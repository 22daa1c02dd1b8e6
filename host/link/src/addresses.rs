//! Attempts to reach a broker whose name has several addresses.
//!
//! rumqttc 0.25 connects to the addresses of a name one after another, within one time limit that
//! includes TLS and CONNACK, and each attempt begins with the same address. So a machine without
//! power, which does not answer at all, hides the others. Before each attempt all addresses are
//! asked at once, by a TCP connection that is closed again. If one does not answer, the attempt
//! goes to one that accepts. If one does not answer and others refuse, as while a host restarts,
//! most attempts end at once: they could wait for the silent one until their time limit. The broker
//! must get the name all the same, because its certificate is for the name.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::pin::Pin;
use std::time::Duration;

use rumqttc::v5::{ConnectionError, Event, EventLoop, MqttOptions};
use tokio::net::{TcpStream, lookup_host};
use tokio::spawn;
use tokio::sync::oneshot;
use tokio::time::timeout;

use crate::limits;
use crate::options::Place;

/// The addresses of a name. Empty if they are not known.
type Addresses = Pin<Box<dyn Future<Output = Vec<SocketAddr>> + Send>>;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Target {
    /// To the name. rumqttc goes on to its next address if one refuses the connection.
    Name,
    /// To this address of the name.
    Address(SocketAddr),
}

/// The attempts of a client to connect.
pub struct Attempts {
    resolve: fn(String, u16) -> Addresses,
    /// Attempts that have failed since the last connection.
    failed: usize,
    /// Keeps the relay of the connection, if it has one.
    relay: Option<oneshot::Sender<()>>,
}

impl Default for Attempts {
    fn default() -> Self {
        Self {
            resolve,
            failed: 0,
            relay: None,
        }
    }
}

impl Attempts {
    /// Connects an event loop without a connection, and returns its first event. `configure` adds
    /// to the options of the attempt what [`Place`] does not know.
    ///
    /// # Errors
    /// That of the attempt. The next call may choose another address.
    pub async fn connect(
        &mut self,
        events: &mut EventLoop,
        place: &Place,
        client_id: &str,
        configure: impl Fn(MqttOptions) -> MqttOptions,
    ) -> Result<Event, ConnectionError> {
        let limit = Duration::from_secs(configure(place.mqtt(client_id)).connection_timeout());
        let result = match self.target(place, limit).await {
            Ok(target) => {
                let attempt = self.attempt(events, place, client_id, target, &configure);
                let connected = timeout(limit, attempt).await;
                connected.map_err(ConnectionError::from).flatten()
            }
            Err(error) => Err(error.into()),
        };
        self.failed = match result {
            Ok(_) => 0,
            Err(_) => self.failed + 1,
        };
        result
    }

    /// Where the next attempt goes: to the name, unless an address of it does not answer, or
    /// earlier attempts have failed. Fails if no address accepts a connection, one does not answer
    /// and another refuses, but for some attempts: the silent one may be slow. `limit` is the time
    /// of an attempt.
    async fn target(&self, place: &Place, limit: Duration) -> io::Result<Target> {
        // Elsewhere there is no relay.
        let can_choose =
            cfg!(target_os = "linux") || place.tls.is_none() || place.websocket.is_some();
        if !can_choose || place.host.parse::<IpAddr>().is_ok() {
            return Ok(Target::Name);
        }
        let mut found = (self.resolve)(place.host.clone(), place.port).await;
        found.truncate(limits::ADDRESSES_MAX);
        if found.len() < 2 {
            return Ok(Target::Name);
        }
        let Answers {
            mut accepting,
            refusal,
            all_answer,
        } = probe(&found, limits::PROBE_TIME.min(limit / 2)).await;
        if let Some(refusal) = refusal
            && accepting.is_empty()
            && !all_answer
            && self.failed % limits::REFUSED_ATTEMPTS != limits::REFUSED_ATTEMPTS - 1
        {
            return Err(refusal);
        }
        if all_answer && !accepting.is_empty() {
            // By name, rumqttc begins with the first one.
            accepting.rotate_left(1);
        }
        let mut targets: Vec<_> = accepting.into_iter().map(Target::Address).collect();
        if all_answer || targets.is_empty() {
            targets.insert(0, Target::Name);
        }
        Ok(targets[self.failed % targets.len()])
    }

    /// Connects to a target, up to the CONNACK.
    async fn attempt(
        &mut self,
        events: &mut EventLoop,
        place: &Place,
        client_id: &str,
        target: Target,
        configure: &impl Fn(MqttOptions) -> MqttOptions,
    ) -> Result<Event, ConnectionError> {
        // The one of the last connection ends.
        drop(self.relay.take());
        let mqtt = match target {
            Target::Name => place.mqtt(client_id),
            Target::Address(address) => self.mqtt_at(place, client_id, address).await?,
        };
        // The broker may have set another keep alive in the options of the last connection. Each
        // CONNECT asks for the own one.
        events.options = configure(mqtt);
        events.poll().await
    }

    /// rumqttc's options for a connection to this address.
    async fn mqtt_at(
        &mut self,
        place: &Place,
        client_id: &str,
        address: SocketAddr,
    ) -> Result<MqttOptions, ConnectionError> {
        #[cfg(target_os = "linux")]
        if let (Some(tls), None) = (&place.tls, &place.websocket) {
            let (socket, relay) = crate::relay::open(&place.host, tls, address).await?;
            self.relay = Some(relay);
            return Ok(place.mqtt_over(client_id, socket));
        }
        Ok(place.mqtt_at(client_id, address))
    }
}

fn resolve(host: String, port: u16) -> Addresses {
    Box::pin(async move {
        match timeout(limits::RESOLVE_TIME, lookup_host((host, port))).await {
            Ok(Ok(found)) => found.collect(),
            // rumqttc asks again, and reports the error.
            Ok(Err(_)) | Err(_) => Vec::new(),
        }
    })
}

/// What the addresses of a name answered.
struct Answers {
    accepting: Vec<SocketAddr>,
    /// The error of an address whose machine runs and refuses connections.
    refusal: Option<io::Error>,
    /// Whether all answered in time, also with an error.
    all_answer: bool,
}

/// Connects to all these addresses at once, and closes the connections. `wait` limits the time.
async fn probe(addresses: &[SocketAddr], wait: Duration) -> Answers {
    let connect = |it: &SocketAddr| spawn(timeout(wait, TcpStream::connect(*it)));
    let probes: Vec<_> = addresses.iter().map(connect).collect();
    let mut answers = Answers {
        accepting: Vec::new(),
        refusal: None,
        all_answer: true,
    };
    for (address, probe) in addresses.iter().zip(probes) {
        match probe.await {
            Ok(Ok(Ok(_))) => answers.accepting.push(*address),
            Ok(Ok(Err(error))) if error.kind() == io::ErrorKind::ConnectionRefused => {
                answers.refusal = Some(error);
            }
            Ok(Err(_)) => answers.all_answer = false,
            // It cannot be reached, as an IPv6 address from a machine without IPv6.
            Ok(Ok(Err(_))) | Err(_) => {}
        }
    }
    answers
}

#[cfg(test)]
mod tests;
