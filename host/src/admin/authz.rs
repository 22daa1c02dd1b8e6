//! Explains what a client may do in the running store, by its current rules and limits.
//!
//! For `statehouse authz explain`. Asking has no side effects.

use std::path::PathBuf;
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use statehouse_mqtt::{Broker, ClientStatus, Identity};
use statehouse_protocol::{ConnectionId, SessionId};

use super::Sources;
use super::answer::Refusal;
use super::query::bad;
use statehouse_access::explain::{Explanation, Question, Wanted, reservation};
use statehouse_access::rules::{Action, Principal};
use statehouse_core::store::Peer;
use statehouse_transport::foreign::identity;

/// A question: may this client do that?
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Ask {
    pub(crate) client: String,
    /// The client's identity. An absent user, or absent attributes, are those of the connected
    /// client with this id.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) who: Option<Who>,
    /// The action.
    pub(crate) command: Wanted,
    /// The key, the topic or the topic filter, percent-encoded; empty for CONNECT.
    #[serde(default)]
    pub(crate) on: String,
}

/// The identity of a client apart from its id.
#[derive(Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Who {
    /// The user.
    #[serde(default)]
    pub(crate) user: Option<Box<str>>,
    /// The attributes of its certificate or token.
    #[serde(default)]
    pub(crate) attributes: Vec<(Box<str>, Box<str>)>,
}

impl Who {
    /// Adds the user and the attributes of the connection, each if none is given.
    fn fill(&mut self, connected: &Identity) {
        if self.user.is_none() {
            self.user.clone_from(&connected.user);
        }
        if self.attributes.is_empty() {
            self.attributes.clone_from(&connected.attributes);
        }
    }
}

/// The decision and its reasons.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Decision {
    /// The rules file, if rules are configured.
    pub(crate) rules: Option<PathBuf>,
    /// Whether a client with this id is connected.
    pub(crate) connected: bool,
    /// Whether clients connect to a foreign broker, so that it is unknown whether this one is
    /// connected.
    #[serde(default)]
    pub(crate) behind_broker: bool,
    /// The identity that the decision is based on.
    pub(crate) who: Who,
    /// The decision by the rules.
    pub(crate) explanation: Explanation,
    /// The limit that would refuse the action at present, regardless of the rules.
    pub(crate) limit: Option<String>,
    /// Why the client may not do this, regardless of the rules.
    #[serde(default)]
    pub(crate) reserved: Option<String>,
    /// The sessions that the client's owner may have (the store does not report how many it has),
    /// or what counts behind a foreign broker.
    #[serde(default)]
    pub(crate) note: Option<String>,
}

impl Decision {
    /// Whether the action would succeed.
    pub(crate) fn is_allowed(&self) -> bool {
        self.explanation.allowed && self.limit.is_none() && self.reserved.is_none()
    }
}

/// Why the client may not do this, regardless of rules and limits.
pub(crate) fn reserved(client: &str, question: Question<'_>) -> Option<String> {
    reservation(client, question).map(str::to_owned)
}

/// Why there is no decision about the empty client id, unless a foreign broker has the clients.
pub(crate) const ASSIGNED_ID: &str = "a client that connects without a client id gets one from the broker: name that one, such as auto-0123456789abcdef";

/// Evaluates the question. `on` is the decoded key, topic or filter. Fails if a foreign broker
/// decides it, and if the store's own broker has no client with such an id.
pub(super) fn explain(sources: &Sources, ask: Ask, on: &[u8]) -> Result<Decision, Refusal> {
    match sources.server.link() {
        Some(_) => explain_behind_broker(sources, ask, on),
        None if ask.client.is_empty() => Err(bad(ASSIGNED_ID)),
        None => Ok(explain_here(sources, ask, on)),
    }
}

/// The decision of a store whose clients connect to a foreign broker. The store knows only the
/// client ids in their requests.
fn explain_behind_broker(sources: &Sources, ask: Ask, on: &[u8]) -> Result<Decision, Refusal> {
    let question = Question::of(ask.command, on);
    if !matches!(question.action, Action::Read | Action::Write) {
        return Err(bad(
            "clients connect to a foreign broker, and its rules decide this: ask about a key, such as SET KEY",
        ));
    }
    let principal = Principal {
        client: &ask.client,
        user: None,
        attributes: &[],
    };
    Ok(Decision {
        rules: sources.access.rules_file(),
        connected: false,
        behind_broker: true,
        who: Who::default(),
        explanation: sources.access.explain(&principal, question),
        limit: quota(sources, ask.command, &identity::named(&ask.client), on),
        reserved: reserved(&ask.client, question),
        note: Some("behind a foreign broker only the client id counts".to_owned()),
    })
}

/// The quota of the store that would refuse the action.
fn quota(sources: &Sources, command: Wanted, peer: &Peer, on: &[u8]) -> Option<String> {
    let bound = match command {
        Wanted::Set => sources.server.check_write(&peer.client, on),
        Wanted::Keynotify => sources.server.check_watch(peer, on),
        _ => Ok(()),
    };
    bound.err().map(|exceeded| exceeded.to_string())
}

/// The decision of a store that is the broker of its clients.
fn explain_here(sources: &Sources, ask: Ask, on: &[u8]) -> Decision {
    let standing = (sources.broker.as_ref()).and_then(|broker| broker.client_status(&ask.client));
    let origin = standing.as_ref().and_then(|it| it.origin.as_ref());
    let mut who = ask.who.unwrap_or_default();
    if let Some(origin) = origin {
        who.fill(&origin.identity);
    }
    let principal = Principal {
        client: &ask.client,
        user: who.user.as_deref(),
        attributes: &who.attributes,
    };
    let question = Question::of(ask.command, on);
    let explanation = sources.access.explain(&principal, question);
    let peer = Peer {
        client: ask.client.as_str().into(),
        connection: origin.map_or(ConnectionId(0), |it| it.connection),
        session: origin.map_or(SessionId(0), |it| it.session),
    };
    let limit = quota(sources, ask.command, &peer, on).or_else(|| {
        let broker = sources.broker.as_ref()?;
        at_the_broker(broker, &principal, standing.as_ref(), ask.command, on)
    });
    let note = (sources.broker.as_ref())
        .filter(|_| limit.is_none() && standing.is_none() && ask.command == Wanted::Connect)
        .and_then(share);
    Decision {
        rules: sources.access.rules_file(),
        connected: origin.is_some(),
        behind_broker: false,
        who,
        explanation,
        limit,
        reserved: reserved(&ask.client, question),
        note,
    }
}

/// How messages describe the owner of sessions.
const OWNER: &str = "its owner (its user, or the address of anonymous clients)";

/// The sessions of one owner, if an owner can have used them up.
fn share(broker: &Broker) -> Option<String> {
    let (share, sessions) = (broker.session_quota(), broker.stats().sessions);
    let max = broker.limits().sessions_max;
    (share <= sessions).then(|| {
        format!("{OWNER} may have {share} of max_sessions, which is {max}, at present: further ones are refused")
    })
}

/// The limit of the broker that would refuse the action.
fn at_the_broker(
    broker: &Broker,
    principal: &Principal<'_>,
    standing: Option<&ClientStatus>,
    command: Wanted,
    on: &[u8],
) -> Option<String> {
    let (client, limits): (_, Arc<_>) = (principal.client, broker.limits());
    let levels = Question::of(command, on)
        .on
        .split(|byte| *byte == b'/')
        .count();
    match (command, standing) {
        (Wanted::Publish | Wanted::Subscribe, _) if levels > limits.topic_levels_max => Some(
            format!("it has more than {} levels", limits.topic_levels_max),
        ),
        (Wanted::Connect, _) if client.len() > limits.client_id_bytes_max => Some(format!(
            "the client id has more than {} bytes",
            limits.client_id_bytes_max
        )),
        (Wanted::Connect, _) => {
            let stats = broker.stats();
            // The broker refuses a connection before it knows the client.
            if stats.connections >= limits.connections_max {
                return Some(format!(
                    "there are max_connections, which is {}",
                    limits.connections_max
                ));
            }
            let refusal = broker.session_limit(client, principal.user)?;
            Some(format!(
                "{refusal}: max_sessions is {}, {} are taken, and {OWNER} may have {}",
                limits.sessions_max,
                stats.sessions,
                broker.session_quota()
            ))
        }
        (Wanted::Subscribe, Some(standing)) => {
            let max = limits.subscriptions_per_session_max;
            let is_new = standing.filters.iter().all(|filter| **filter != *on);
            if is_new && standing.filters.len() >= max {
                return Some(format!("it has max_client_subscriptions, which is {max}"));
            }
            broker.subscription_limit(client, on).map(str::to_owned)
        }
        _ => None,
    }
}
