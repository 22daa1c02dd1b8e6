//! Decisions of the access control about queued messages and suspended subscriptions.

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

fn me() -> Origin {
    Origin {
        client: "me".into(),
        connection: ConnectionId(1),
        session: SessionId(1),
        identity: Identity::anonymous(),
    }
}

/// Access by a rule, and access without rules in which a client has its own topics only.
fn both() -> [AccessControl; 2] {
    let rules = "[[rules]]\nprincipals.clientIds = [\"me\"]\n\
        brokerResources = [{ method = \"Subscribe\", topics = [\"plans/#\"] }]\n\
        stateStoreResources = [{ method = \"Read\", keyType = \"String\", keys = [\"k\"] }]\n";
    [access(false, Some(rules)), access(true, None)]
}

#[test]
fn suspended_subscription_is_refused_without_an_audit_line() {
    let [ruled, own] = both();
    for (access, filter, expected) in [
        (&ruled, "plans/#", true),
        (&ruled, "news", false),
        (&own, "news", true),
        (&own, "clients/#", false),
    ] {
        let filter = filter.as_bytes();
        let before = access.0.audit.counts();
        assert_eq!(access.may_resume(&me(), filter), expected);
        assert_eq!(access.0.audit.counts(), before);
        assert_eq!(access.may_subscribe(&me(), filter), expected);
        assert_eq!(access.0.audit.counts() == before, expected);
    }
    assert!(access(false, None).may_resume(&me(), b"#"));
}

#[test]
fn queued_messages_are_kept_by_rules_or_own_topics() {
    let me = me();
    assert!(access(false, None).topics_to_keep(&me).is_none());
    let [ruled, own] = both();
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
