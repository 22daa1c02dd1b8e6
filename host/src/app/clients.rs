//! Connects a served store to its clients: through the embedded broker, or as a client of a foreign
//! broker.

use std::io;
use std::sync::Arc;

use statehouse_link::{End, Options};
use statehouse_mqtt::Broker;
use tokio::task::JoinHandle;

use super::Failure;
use statehouse_access::Authorizer;
use statehouse_access::audit::Audit;
use statehouse_config::{Config, ForeignConfig, TransportChoice, limits};
use statehouse_files::watch::Reloads;
use statehouse_listener::Listeners;
use statehouse_protocol::Shown;
use statehouse_server::Server;
use statehouse_transport::foreign::{self, Foreign, Phase};

/// What is prepared before the data directory is opened.
pub(super) enum PreparedTransport {
    /// Bound listeners.
    Listening(Listeners),
    /// The options of the connection to a foreign broker, without the client id.
    Attaching(Box<Options>),
}

/// The broker between the store and its clients.
pub(super) enum Clients {
    /// The embedded broker.
    Embedded(Broker),
    /// A foreign broker, to which the store and its clients are connected.
    Foreign(Box<Attached>),
}

/// The store's own connection to a foreign broker.
pub(super) struct Attached {
    foreign: Arc<Foreign>,
    config: ForeignConfig,
    client_id: String,
}

pub(super) struct Open {
    clients: Clients,
    tasks: Vec<JoinHandle<()>>,
    link: Option<JoinHandle<()>>,
    lines: Vec<String>,
}

impl PreparedTransport {
    /// Binds the listeners, if any, and reads the certificates. Clients that connect from now on
    /// wait until the store is ready.
    pub(super) fn prepare(config: &Config) -> anyhow::Result<Self> {
        match &config.transport {
            TransportChoice::Embedded(listen) => Ok(Self::Listening(Listeners::bind(listen)?)),
            TransportChoice::Foreign(foreign) => {
                let options = foreign::options(foreign, config.bounds.broker.packet_bytes_max)?;
                Ok(Self::Attaching(Box::new(options)))
            }
        }
    }

    /// Reloads the certificates. The broker then disconnects clients whose certificate is no longer
    /// valid.
    pub(super) fn reload_with(&self, reloads: &mut Reloads, broker: Option<&Broker>) {
        if let (Self::Listening(listeners), Some(broker)) = (self, broker.cloned()) {
            listeners.reload_with(reloads, move || broker.recheck());
        }
    }
}

impl Clients {
    /// A store behind a foreign broker.
    pub(super) fn foreign(
        server: &Arc<Server>,
        foreign_config: &ForeignConfig,
        client_id: String,
        rules: Option<Arc<Authorizer>>,
    ) -> Self {
        let foreign = Foreign::new(server.clone(), foreign_config, &client_id, rules);
        server.attach(foreign.clone());
        Self::Foreign(Box::new(Attached {
            foreign,
            config: foreign_config.clone(),
            client_id,
        }))
    }

    /// The embedded broker, if that is the one in use.
    pub(super) fn broker(&self) -> Option<&Broker> {
        match self {
            Self::Embedded(broker) => Some(broker),
            Self::Foreign(_) => None,
        }
    }

    /// Starts to accept clients, or connects to the foreign broker.
    pub(super) fn open(
        self,
        transport: PreparedTransport,
        server: &Arc<Server>,
        audit: &Arc<Audit>,
    ) -> io::Result<Open> {
        let mut open = Open {
            clients: self,
            tasks: Vec::new(),
            link: None,
            lines: Vec::new(),
        };
        match (&open.clients, transport) {
            (Clients::Embedded(broker), PreparedTransport::Listening(listeners)) => {
                for opened in listeners.open(broker, audit)? {
                    open.lines.push(opened.line);
                    open.tasks.push(tokio::spawn(opened.accepting));
                }
                let broker = broker.clone();
                let timers = async move { broker.run_timers().await };
                open.tasks.push(tokio::spawn(timers));
            }
            (Clients::Foreign(attached), PreparedTransport::Attaching(options)) => {
                let Attached {
                    foreign,
                    config,
                    client_id,
                } = &**attached;
                let client = Shown::whole(client_id.as_bytes()).on_one_line();
                open.lines
                    .push(format!("attached to {} as {client}", config.broker));
                let options = Options {
                    client_id: client_id.clone(),
                    ..*options
                };
                let link = statehouse_link::run(foreign.clone(), options);
                open.link = Some(tokio::spawn(link));
                let (foreign, server) = (foreign.clone(), server.clone());
                let aging = async move { foreign.expire_watches(|| server.watching()).await };
                open.tasks.push(tokio::spawn(aging));
            }
            // Both values come from one setting.
            _ => {
                return Err(io::Error::other(
                    "the transport and the broker do not match: this is a bug",
                ));
            }
        }
        Ok(open)
    }
}

/// Decides nothing more, and waits a limited time until the output of everything that was decided
/// can leave. Otherwise requests would be executed whose clients get no response.
pub(super) async fn drain(server: &Server, broker: &Broker) {
    broker.stop_deciding();
    let drained = async {
        server.drained().await;
        while broker.awaits_log() {
            tokio::time::sleep(limits::DRAIN_POLL).await;
        }
    };
    // A log that is stalled or unreachable may release nothing.
    _ = tokio::time::timeout(limits::SHUTDOWN_DRAIN, drained).await;
}

impl Open {
    /// Waits until clients can be served and returns the lines that say where. None if the
    /// connection ended.
    pub(super) async fn addresses(&self) -> Option<&[String]> {
        if let Clients::Foreign(attached) = &self.clients {
            let mut phase = attached.foreign.phase();
            let phase = phase.wait_for(|phase| *phase != Phase::Waiting).await;
            if !matches!(phase.as_deref(), Ok(Phase::Attached)) {
                return None;
            }
        }
        Some(&self.lines)
    }

    /// How disconnected clients are detected, if the broker is a foreign one.
    pub(super) async fn presence(&self) -> Option<String> {
        let Clients::Foreign(attached) = &self.clients else {
            return None;
        };
        let ForeignConfig {
            broker, watch_ttl, ..
        } = &attached.config;
        let shown = attached.foreign.presence();
        let line = shown.line(&broker.host, broker.port, *watch_ttl).await;
        Some(format!("presence: {line}"))
    }

    /// Waits until clients cannot be served any more. With the embedded broker that never happens.
    pub(super) async fn ended(&self) -> Failure {
        let Clients::Foreign(attached) = &self.clients else {
            return std::future::pending().await;
        };
        let mut phase = attached.foreign.phase();
        let ended = phase.wait_for(|phase| matches!(phase, Phase::Ended(_)));
        let broker = &attached.config.broker;
        match ended.await.as_deref() {
            Ok(Phase::Ended(End::TakenOver(why))) => {
                let client = Shown::whole(attached.client_id.as_bytes()).on_one_line();
                Failure::TakenOver(format!(
                    "the MQTT client id {client} at {broker} was taken over: {why}. Two stores cannot share one, so this one stops"
                ))
            }
            // The link panicked. A service manager starts the store again.
            _ => Failure::Transport(format!(
                "the connection to {broker} ended without a reason: this is a bug"
            )),
        }
    }

    /// Stops accepting clients, and waits a limited time until queued messages are sent.
    pub(super) async fn shutdown(self, server: &Server) {
        match &self.clients {
            Clients::Embedded(broker) => {
                drain(server, broker).await;
                broker.shutdown(limits::SHUTDOWN_GRACE).await;
            }
            Clients::Foreign(attached) => attached.foreign.shutdown(limits::SHUTDOWN_GRACE).await,
        }
        if let Some(link) = self.link {
            // The link ends soon after its shutdown was requested.
            _ = tokio::time::timeout(2 * statehouse_link::limits::CLOSE_WAIT, link).await;
        }
        for task in self.tasks {
            task.abort();
        }
    }
}
