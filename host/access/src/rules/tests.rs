use proptest::prelude::*;

use statehouse_protocol::rights::{ClientRights as _, Right, SharedAnswers};

use super::*;
use crate::explain::{self, Question, Why};

const FILE: &str = r#"
[[rules]]                                      # line 2
principals = { attributes = [{ building = "17", floor = "1" }, { building = "18" }] }
brokerResources = [
  { method = "Connect", clientIds = ["{principal.attributes.building}-*"] },
  { method = "Publish", topics = ["sensors/{principal.attributes.building}/{principal.clientId}/telemetry"] },
]

[[rules]]                                      # line 9
principals.usernames = ["pump"]
brokerResources = [{ method = "Connect" }]
stateStoreResources = [
  { method = "ReadWrite", keyType = "Pattern", keys = ["pumps/{principal.username}/*"] },
  { method = "Read", keyType = "String", keys = ["limits", "*"] },
  { method = "Write", keyType = "Binary", keys = ["AP8="] },
]
"#;

fn principal(client: &str) -> Principal<'_> {
    Principal {
        client,
        user: None,
        attributes: &[],
    }
}

fn pump() -> Principal<'static> {
    Principal {
        user: Some("pump"),
        ..principal("any")
    }
}

fn rules() -> Rules {
    Rules::parse(FILE).unwrap()
}

fn pair(name: &str, value: &str) -> (Box<str>, Box<str>) {
    (name.into(), value.into())
}

#[test]
fn action_that_no_rule_allows_is_denied() {
    let rules = rules();
    let grants = rules.grants(principal("stranger"));
    assert!(!grants.may_connect());
    assert!(!grants.may_read(b"limits") && !grants.may_write(b"limits"));
    assert!(!grants.may_publish(b"a") && !grants.may_subscribe(b"a"));
    assert!(!grants.may_subscribe(b"clients/stranger/answers"));
}

#[test]
fn user_has_the_keys_that_its_rules_name() {
    let grants = rules().grants(pump());
    assert!(grants.may_connect());
    for (key, read, write) in [
        (&b"pumps/pump/speed"[..], true, true),
        (b"pumps/other/speed", false, false),
        (b"limits", true, false),
        (b"*", true, false),
        (b"anything", false, false),
        (b"\0\xff", false, true),
    ] {
        let allowed = (grants.may_read(key), grants.may_write(key));
        assert_eq!(allowed, (read, write), "{key:?}");
    }
}

#[test]
fn connecting_takes_all_attributes_and_a_matching_client_id() {
    let rules = rules();
    let connects = |client: &str, attributes: &[(Box<str>, Box<str>)]| {
        let grants = rules.grants(Principal {
            attributes,
            ..principal(client)
        });
        grants.may_connect()
    };
    let at = |building: &str| pair("building", building);
    let first = || pair("floor", "1");
    assert!(connects("17-a", &[at("17"), first()]));
    assert!(connects("18-a", &[at("18")]));
    assert!(!connects("17-a", &[at("17")]));
    // The id belongs to another building.
    assert!(!connects("17-a", &[at("18"), first()]));
}

#[test]
fn value_of_a_placeholder_is_literal() {
    let text = r##"
        [[rules]]
        principals = { clientIds = ["*"] }
        brokerResources = [
          { method = "Connect" },
          { method = "Publish", topics = ["data/{principal.clientId}"] },
          { method = "Subscribe", topics = ["data/{principal.clientId}", "users/{principal.username}/#"] },
        ]
        stateStoreResources = [{ method = "ReadWrite", keyType = "Pattern", keys = ["{principal.clientId}/*"] }]
    "##;
    let rules = Rules::parse(text).unwrap();
    let keys = ["a/key", "b/key", "/key", "other/key", "xx/key"];
    let filters = "data/+ data/# data/other data/a/b users//x #";
    let long = "x".repeat(65_535);
    for client in ["+", "#", "*", "?", "[a-z]", "\\", "a/b", "", "\0", &long] {
        let grants = rules.grants(principal(client));
        for key in keys.map(str::as_bytes) {
            let allowed = grants.may_read(key) || grants.may_write(key);
            assert!(!allowed, "{client:?} and {key:?}");
        }
        for filter in filters.split(' ') {
            let allowed = grants.may_subscribe(filter.as_bytes());
            assert!(!allowed, "{client:?} and {filter:?}");
        }
    }
    let star = rules.grants(principal("*"));
    assert!(star.may_read(b"*/key"));
    assert!(star.may_publish(b"data/*") && star.may_subscribe(b"clients/*/answers"));
    let slash = rules.grants(principal("victim/services"));
    // These topics belong to `victim`.
    assert!(!slash.may_subscribe(b"clients/victim/services/#"));
    let store = rules.grants(principal("statestore"));
    assert!(!store.may_subscribe(b"clients/statestore/#"));
}

#[test]
fn client_with_keys_may_subscribe_to_its_own_topics_only() {
    let grants = rules().grants(pump());
    let topics = statehouse_protocol::topics::NOTIFICATION_TOPICS;
    for (filter, is_own) in [
        ("clients/any/services/answers", true),
        (&format!("{topics}/616E79/#"), true),
        (&format!("{topics}/+/#"), false),
        ("clients/#", false),
        ("clients/+/services", false),
        ("clients/anyone/x", false),
        ("clients/any", false),
        ("$share/g", false),
    ] {
        let allowed = grants.may_subscribe(filter.as_bytes());
        assert_eq!(allowed, is_own, "{filter}");
    }
    assert!(grants.may_be_answered_at(b"clients/any/x"));
    assert!(!grants.may_be_answered_at(b"valves/7/open"));
    // Only the store publishes responses there.
    assert!(!grants.may_publish(b"clients/any/x"));
}

#[test]
fn invalid_rule_is_refused_with_its_line() {
    let rule =
        |body: &str| format!("# a comment\n[[rules]]\nprincipals.clientIds = [\"a\"]\n{body}\n");
    let keys = |keys: &str| {
        rule(&format!(
            "stateStoreResources = [{{ method = \"Read\", keyType = \"Pattern\", keys = [\n{keys}] }}]"
        ))
    };
    let topics = |topic: &str| {
        rule(&format!(
            "brokerResources = [{{ method = \"Publish\", topics = [\n\"{topic}\"] }}]"
        ))
    };
    for (text, says) in [
        ("".to_owned(), "it holds no rule"),
        ("rules = []".to_owned(), "it holds no rule"),
        ("garbage".to_owned(), "line 1"),
        ("\u{0}\u{1}".to_owned(), "line 1"),
        ("[[rule]]".to_owned(), "unknown field `rule`"),
        (rule(""), "line 2: this rule allows nothing"),
        (rule("brokerResources = [{ method = \"Deny\" }]"), "line 4"),
        (
            rule("brokerResources = [{ method = \"Connect\", topics = [\"a\"] }]"),
            "line 4: Connect takes no topics",
        ),
        (
            rule("brokerResources = [{ method = \"Publish\" }]"),
            "line 4: this resource has no topics",
        ),
        (
            rule("brokerResources = [{ method = \"Connect\", clientIds = [] }]"),
            "line 4: this resource has no clientIds",
        ),
        (
            rule("brokerResources = [{ method = \"Publish\", clientIds = [], topics = [\"a\"] }]"),
            "line 4: this resource has no clientIds",
        ),
        (keys(""), "line 4: this resource has no keys"),
        (keys("\"a\", \n\"[a\""), "line 6: `[a` has a `[`"),
        (keys("\"\""), "line 5: the key is empty"),
        (keys("\"?\"").replace("Pattern", "Binary"), "not Base64"),
        (
            keys("\"{principal.password}\""),
            "line 5: `{principal.password}` is not a placeholder",
        ),
        (keys("\"{principal.clientId\""), "line 5"),
        (keys(r#"'plant\{principal.clientId}'"#), "line 5: in `plant"),
        (
            keys(r#"'plant\\\{principal.clientId}'"#),
            "would not be literal",
        ),
        (
            keys("\"plant[{principal.clientId}]\""),
            "would not be literal",
        ),
        (
            keys("\"{principal.clientId}[!{principal.username}]\""),
            "would not be literal",
        ),
        (
            keys(&format!("\"*{}*\"", "a".repeat(65))),
            "line 5: the pattern is longer",
        ),
        (
            keys(&format!("\"{}*\"", "a".repeat(1024))),
            "line 5: the pattern is longer",
        ),
        (topics("a/#/b"), "line 5: `a/#/b` is not a topic filter"),
        (topics("a+"), "line 5"),
        (
            topics("client-{principal.clientId}/x"),
            "a placeholder must be a whole level",
        ),
        (
            "[[rules]]\nprincipals = {}\nbrokerResources = [{ method = \"Connect\" }]".to_owned(),
            "line 1: this rule names no principals",
        ),
        (
            "[[rules]]\nprincipals.attributes = [{}]\nbrokerResources = [{ method = \"Connect\" }]"
                .to_owned(),
            "line 1: these attributes are empty",
        ),
    ] {
        let error = Rules::parse(&text).unwrap_err().to_string();
        assert!(error.contains(says), "{text:?}: {error}");
    }
    for prefix in [r"plant\\", "[a]"] {
        let text = format!("'{prefix}{{principal.clientId}}'");
        Rules::parse(&keys(&text)).unwrap();
    }
}

#[test]
fn too_many_rules_are_refused() {
    let one =
        "[[rules]]\nprincipals.clientIds = [\"a\"]\nbrokerResources = [{ method = \"Connect\" }]\n";
    assert!(Rules::parse(&one.repeat(crate::limits::RULES_MAX)).is_ok());
    let error = Rules::parse(&one.repeat(crate::limits::RULES_MAX + 1)).unwrap_err();
    assert!(matches!(error, RulesError::TooMany), "{error}");
}

fn two_pumps_and_a_stranger() -> [Arc<Grants>; 3] {
    let (rules, client) = (rules(), "b");
    let other = Principal { client, ..pump() };
    let stranger = principal("stranger");
    [pump(), other, stranger].map(|it| rules.grants(it))
}

#[test]
fn clients_under_the_same_rules_share_an_index() {
    let [one, other, stranger] = two_pumps_and_a_stranger();
    assert!(one.shares_with(&other) && !one.shares_with(&stranger));
}

/// Otherwise a change costs a comparison with all patterns for each watcher.
#[test]
fn shared_index_is_evaluated_once_for_a_key() {
    let [one, other, stranger] = two_pumps_and_a_stranger();
    let mut answers = SharedAnswers::default();
    for (grants, may_read) in [(&one, true), (&other, true), (&stranger, false)] {
        let allowed = grants.allow_once(b"limits", Right::Read, &mut answers);
        assert_eq!(allowed, may_read);
    }
    // With a key that both may not read, the answer shows that it is that of the first key.
    assert!(!other.may_read(b"secret"));
    assert!(other.allow_once(b"secret", Right::Read, &mut answers));
    // The client's own patterns are evaluated for each client.
    let mut answers = SharedAnswers::default();
    assert!(one.allow_once(b"pumps/pump/1", Right::Read, &mut answers));
    assert!(!stranger.allow_once(b"pumps/pump/1", Right::Read, &mut answers));
}

#[test]
fn deciding_rule_is_named_with_its_line() {
    let rules = rules();
    let question = |action, on| Question { action, on };
    let write = question(Action::Write, b"pumps/pump/x");
    let Some(Why::Rule(place)) = explain::why(&rules, &pump(), write) else {
        panic!("it is allowed");
    };
    assert_eq!((place.rule, place.line), (2, 13));
    let text = place.text.as_deref();
    assert_eq!(text, Some("pumps/{principal.username}/*"));
    let connect = question(Action::Connect, b"");
    assert!(matches!(explain::why(&rules, &pump(), connect), Some(Why::Rule(it)) if it.line == 9));
    let own = question(Action::Subscribe, b"clients/any/x");
    assert_eq!(explain::why(&rules, &pump(), own), Some(Why::OwnTopic));
    let denied = explain::explain(&rules, &pump(), question(Action::Write, b"limits"));
    assert_eq!((denied.why, denied.on_others.len()), (None, 2));
    let read = question(Action::Read, b"limits");
    let denied = explain::explain(&rules, &principal("stranger"), read);
    assert_eq!(denied.for_others.len(), 1);
}

#[test]
fn rules_that_can_never_match_cause_warnings() {
    let text = r#"
        [[rules]]
        principals.clientIds = ["press-*", "b", ""]
        brokerResources = [
          { method = "Subscribe", topics = ["$share/g/a"], clientIds = ["c*"] },
          { method = "Publish", topics = ["clients/statestore/v1/FA9AE35F-2F64-47CD-9BFF-08E2B32A0FE8/x"] },
          { method = "Publish", topics = ["statehouse/v1/admin/#"] },
          { method = "Subscribe", topics = ["statehouse/v1/admin/policy/status"] },
        ]
    "#;
    let parsed = Rules::parse(text).unwrap();
    let warnings = explain::warnings(&parsed);
    let lines: Vec<usize> = warnings.iter().map(|(line, _)| *line).collect();
    assert_eq!(lines, [2, 2, 2, 5, 6, 7], "{warnings:?}");
    assert!(explain::connect_warning(&parsed).is_some());
    assert_eq!(explain::warnings(&rules()), []);
    assert_eq!(explain::connect_warning(&rules()), None);
}

/// The lines of the warnings about a rule in line 1 with this pattern of client ids, and this key
/// in line 5.
fn warning_lines(client: &str, kind: &str, key: &str) -> Vec<usize> {
    let text = format!(
        "[[rules]]\nprincipals.usernames = [\"*\"]\n\
         brokerResources = [{{ method = \"Connect\", clientIds = ['{client}'] }}]\n\
         stateStoreResources = [\n{{ method = \"Read\", keyType = \"{kind}\", keys = ['{key}'] }}]\n"
    );
    let warnings = explain::warnings(&Rules::parse(&text).unwrap());
    warnings.iter().map(|(line, _)| *line).collect()
}

#[test]
fn placeholder_without_a_separator_causes_a_warning() {
    let warning_lines = |pattern: &str| warning_lines(pattern, "Pattern", pattern);
    for open in [
        "{principal.username}*",
        "{principal.clientId}?",
        "{principal.username}[0-9]",
        "*{principal.username}",
        "a?{principal.clientId}/b",
        "[a-z]{principal.username}",
        "{principal.clientId}{principal.username}",
        "\\\\*{principal.username}",
    ] {
        assert_eq!(warning_lines(open), [1, 5], "{open}");
    }
    for closed in [
        "{principal.username}",
        "{principal.username}:*",
        "*/{principal.clientId}/*",
        "{principal.clientId}:{principal.username}",
        "{principal.username}\\*",
        "\\*{principal.username}",
        "press-*",
    ] {
        assert_eq!(warning_lines(closed), [0; 0], "{closed}");
    }
}

/// Regression: the user `press1` with the client id `0x` had the key of the user `press` with the
/// client id `10x`, without a warning.
#[test]
fn touching_placeholders_of_a_string_cause_a_warning() {
    let warning_lines = |key: &str| warning_lines("any", "String", key);
    let (user, client) = ("{principal.username}", "{principal.clientId}");
    assert_eq!(warning_lines(&format!("{user}{client}")), [5]);
    assert_eq!(warning_lines(&format!("{user}:{client}")), [0; 0]);
    // A wildcard is literal in a string.
    assert_eq!(warning_lines(&format!("{user}*")), [0; 0]);
}

/// Regression: the check of a file counted these as valid rules and said nothing.
#[test]
fn misspelt_placeholder_and_empty_brackets_cause_a_warning() {
    for text in [
        "{Principal.username}:x",
        "{username}:x",
        "${principal.username}:x",
        "a/{ principal.clientId }",
        "{{principal.username}}",
        "{principal.clientId}:{clientID}",
    ] {
        assert_eq!(warning_lines(text, "Pattern", text), [1, 5], "{text}");
        assert_eq!(warning_lines("any", "String", text), [5], "{text}");
    }
    for text in ["[]x", "a*[]", "{principal.clientId}:[]", "[a]]*\\\\[]"] {
        assert_eq!(warning_lines(text, "Pattern", text), [1, 5], "{text}");
        // In a string brackets are literal.
        assert_eq!(warning_lines("any", "String", text), [0; 0], "{text}");
    }
    for text in ["{principal.username}:{x}", "\\[]", "[!]", "[\\]]", "{"] {
        assert_eq!(warning_lines(text, "Pattern", text), [0; 0], "{text}");
    }
}

fn any_rules() -> impl Strategy<Value = String> {
    let name = "[ab*]";
    let key =
        "[ab]{0,2}(\\*|\\?|/|\\{principal\\.clientId\\}|\\{principal\\.username\\})?[ab]{0,1}";
    let rule = (
        name,
        name,
        "(Read|Write|ReadWrite)",
        "(Pattern|String)",
        proptest::collection::vec(key, 1..4),
    );
    let rule = rule.prop_map(|(client, user, method, kind, keys)| {
        let keys: Vec<String> = keys.iter().map(|it| format!("\"k{it}\"")).collect();
        format!(
            "[[rules]]\nprincipals = {{ clientIds = [\"{client}\"], usernames = [\"{user}\"] }}\n\
             stateStoreResources = [{{ method = \"{method}\", keyType = \"{kind}\", keys = [{}] }}]\n",
            keys.join(", ")
        )
    });
    proptest::collection::vec(rule, 1..6).prop_map(|it| it.concat())
}

proptest! {
    #[test]
    fn index_decides_like_a_visit_of_all_rules(
        text in any_rules(),
        client in "[ab*/]{1,2}",
        user in "[ab]{1}",
        key in "k[ab/*]{0,4}",
    ) {
        let rules = Rules::parse(&text).unwrap();
        let asker = Principal { user: Some(&user), ..principal(&client) };
        let grants = rules.grants(asker);
        let allowed = |action| explain::why(&rules, &asker, Question { action, on: key.as_bytes() }).is_some();
        prop_assert_eq!(grants.may_read(key.as_bytes()), allowed(Action::Read));
        prop_assert_eq!(grants.may_write(key.as_bytes()), allowed(Action::Write));
    }
}

#[test]
fn documented_example_grants_what_its_comments_say() {
    let rules = Rules::parse(EXAMPLE).unwrap();
    let press = [pair("machine", "press")];
    let press = rules.grants(Principal {
        attributes: &press,
        user: Some("press-4"),
        ..principal("press-4")
    });
    assert!(press.may_connect() && press.may_publish(b"telemetry/press-4/speed"));
    assert!(press.may_write(b"press-4:speed") && !press.may_write(b"press-5:speed"));
    assert!(press.may_read(b"limits/speed") && !press.may_write(b"limits/speed"));
    let maintenance = rules.grants(Principal {
        user: Some("maintenance"),
        ..principal("any")
    });
    assert!(maintenance.may_subscribe(b"telemetry/+/speed"));
    assert!(maintenance.may_read(b"press-4:speed"));
    assert!(maintenance.may_write(b"limits/speed") && !maintenance.may_write(b"press-4:speed"));
}

const PAGE: &str = include_str!("../../../docs/authorization.md");
const EXAMPLE: &str = include_str!("../../../docs/trust/rules.toml");

/// All rules in the documentation, and one generated rule for each list of client ids in it.
fn documented() -> Vec<String> {
    let blocks = PAGE.split("```toml\n").skip(1);
    let blocks = blocks.filter_map(|it| it.split("```").next());
    let mut all: Vec<String> = blocks
        .filter(|it| it.contains("[[rules]]"))
        .map(Into::into)
        .collect();
    all.push(EXAMPLE.into());
    let lists = [PAGE, EXAMPLE].map(|text| text.split("clientIds = [").skip(1));
    all.extend(lists.into_iter().flatten().map(|rest| {
        let (list, _) = rest.split_once(']').unwrap();
        format!(
            "[[rules]]\nprincipals.usernames = [\"*\"]\n\
             brokerResources = [{{ method = \"Connect\", clientIds = [{list}] }}]\n\
             stateStoreResources = [{{ method = \"Read\", keyType = \"Pattern\", keys = [\"{{principal.clientId}}:*\"] }}]\n"
        )
    }));
    all
}

#[test]
fn documented_rules_separate_users_with_similar_names() {
    let all = documented();
    assert!(all.len() >= 5, "{} examples", all.len());
    let attributes = [pair("machine", "press"), pair("building", "17")];
    for text in all {
        let rules = Rules::parse(&text).unwrap();
        assert_eq!(explain::warnings(&rules), [], "{text}");
        assert_eq!(explain::connect_warning(&rules), None, "{text}");
        let press = |user: &str, client: &str| {
            rules.grants(Principal {
                client,
                user: Some(user),
                attributes: &attributes,
            })
        };
        assert!(press("press-1", "press-1").may_connect(), "{text}");
        for (user, other) in [
            ("press-1", "press-10"),
            ("press-10", "press-1"),
            ("press-1", "press-1/0"),
            ("press-1/0", "press-1"),
        ] {
            let connects = press(user, other).may_connect();
            assert!(!connects, "{user} as {other}: {text}");
            let own = format!("{user}:second");
            for client in [user, &own] {
                let grants = press(user, client);
                for separator in [':', '/'] {
                    let key = format!("{other}{separator}speed").into_bytes();
                    assert!(!grants.may_read(&key), "{client} reads: {text}");
                    assert!(!grants.may_write(&key), "{client} writes: {text}");
                }
                // A name with a slash has no topics of its own.
                if !other.contains('/') {
                    let topic = format!("telemetry/{other}/speed").into_bytes();
                    assert!(!grants.may_publish(&topic), "{client} publishes: {text}");
                }
            }
        }
    }
}
