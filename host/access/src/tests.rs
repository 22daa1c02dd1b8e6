//! Decisions of the access control about queued messages.

use std::convert::Infallible;

use statehouse_protocol::topics::notification_topic;
use statehouse_protocol::{ConnectionId, SessionId};

use super::*;

fn access(client_certificates: bool, rules: Option<&'static str>) -> AccessControl {
    let config = AccessConfig {
        client_certificates,
        ..AccessConfig::default()
    };
    let rules = rules.map(|text| {
        let read = move || Ok::<_, Infallible>(Rules::parse(text).unwrap());
        let Ok(watched) = Watched::open("rules", Vec::new(), read);
        watched
    });
    let files = AccessFiles {
        users: None,
        owners: None,
        tokens: None,
        rules,
    };
    AccessControl::of(&config, files, Arc::default())
}

#[test]
fn queued_messages_are_kept_by_rules_or_own_topics() {
    let me = Origin {
        client: "me".into(),
        connection: ConnectionId(1),
        session: SessionId(1),
        identity: Identity::anonymous(),
    };
    assert!(access(false, None).topics_to_keep(&me).is_none());
    let rules = "[[rules]]\nprincipals.clientIds = [\"me\"]\n\
        brokerResources = [{ method = \"Subscribe\", topics = [\"plans/#\"] }]\n\
        stateStoreResources = [{ method = \"Read\", keyType = \"String\", keys = [\"k\"] }]\n";
    let (ruled, own) = (access(false, Some(rules)), access(true, None));
    let notified = |key: &[u8]| notification_topic("me", key);
    for (topic, by_rules, by_own_topics) in [
        ("plans/1", true, true),
        ("news", false, true),
        ("clients/you/response", false, false),
        (&*notified(b"k"), true, true),
        (&*notified(b"other"), false, true),
    ] {
        for (access, expected) in [(&ruled, by_rules), (&own, by_own_topics)] {
            let check = access.topics_to_keep(&me).unwrap();
            assert_eq!(check(topic.as_bytes()), expected, "{topic}");
            assert_eq!(access.may_keep(&me, topic.as_bytes()), expected, "{topic}");
        }
    }
}
