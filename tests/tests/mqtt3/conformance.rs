//! Runs the checks, and compares them with the table in `host/docs/mqtt-3-conformance.md`.

use std::collections::BTreeSet;

use crate::{
    access, clients, connect, delivery, limits, malformed, ordering, restarts, retained,
    scene::{self, Check},
    sessions, subscriptions, transports, versions, wills,
};

/// The checks that run against each broker with its defaults.
const MODULES: [&[Check]; 12] = [
    clients::CHECKS,
    connect::CHECKS,
    delivery::CHECKS,
    malformed::CHECKS,
    ordering::CHECKS,
    restarts::CHECKS,
    retained::CHECKS,
    sessions::CHECKS,
    subscriptions::CHECKS,
    transports::CHECKS,
    versions::CHECKS,
    wills::CHECKS,
];

#[test]
fn statehouse_passes_every_check() {
    scene::run(scene::statehouse, MODULES.into_iter().flatten());
}

#[test]
#[ignore = "shows that the checks hold for another broker, too"]
fn mosquitto_passes_the_same_checks() {
    scene::run(scene::mosquitto, MODULES.into_iter().flatten());
}

#[test]
fn statehouse_enforces_users_rules_and_limits_of_a_client() {
    scene::run(access::start, access::CHECKS.iter());
}

#[test]
fn statehouse_enforces_limits_of_the_broker() {
    scene::run(limits::start, limits::CHECKS.iter());
}

/// The sections of the standard with numbered statements, and how many each has.
const SECTIONS: [(&str, usize); 39] = [
    ("1.5.3", 3),
    ("2.2.2", 2),
    ("2.3.1", 7),
    ("3.1.0", 2),
    ("3.1.2", 24),
    ("3.1.3", 11),
    ("3.1.4", 5),
    ("3.2.0", 1),
    ("3.2.2", 6),
    ("3.3.1", 12),
    ("3.3.2", 3),
    ("3.3.4", 1),
    ("3.3.5", 2),
    ("3.6.1", 1),
    ("3.8.1", 1),
    ("3.8.3", 4),
    ("3.8.4", 6),
    ("3.9.3", 2),
    ("3.10.1", 1),
    ("3.10.3", 2),
    ("3.10.4", 6),
    ("3.12.4", 1),
    ("3.14.1", 1),
    ("3.14.4", 3),
    ("4.1.0", 2),
    ("4.3.1", 1),
    ("4.3.2", 2),
    ("4.3.3", 2),
    ("4.4.0", 1),
    ("4.5.0", 2),
    ("4.6.0", 6),
    ("4.7.1", 3),
    ("4.7.2", 1),
    ("4.7.3", 4),
    ("4.8.0", 2),
    ("6.0.0", 4),
    ("7.0.0", 2),
    ("7.1.1", 2),
    ("7.1.2", 2),
];

/// The names of checks in a row.
fn named(row: &str) -> impl Iterator<Item = &str> {
    row.split('`').filter(|it| it.contains("::"))
}

#[test]
fn table_has_every_statement_and_every_check() {
    let page = concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../host/docs/mqtt-3-conformance.md"
    );
    let page = std::fs::read_to_string(page).unwrap();
    let rows: Vec<_> = page.lines().filter(|it| it.starts_with("| ")).collect();
    let statements = rows
        .iter()
        .filter_map(|it| it.split(" | ").next()?.get(2..));
    let statements = statements.filter(|it| it.starts_with(|c: char| c.is_ascii_digit()));
    let expected = SECTIONS
        .iter()
        .flat_map(|(section, count)| (1..=*count).map(move |number| format!("{section}-{number}")));
    assert_eq!(statements.collect::<Vec<_>>(), expected.collect::<Vec<_>>());

    let modules = MODULES.into_iter().chain([access::CHECKS, limits::CHECKS]);
    let checks: Vec<_> = modules.flatten().collect();
    let existing: BTreeSet<_> = checks.iter().map(|it| it.short_name()).collect();
    assert_eq!(existing.len(), checks.len(), "two checks with one name");
    let listed: BTreeSet<_> = rows.iter().flat_map(|it| named(it)).collect();
    assert_eq!(listed, existing, "the checks of the page and of the tests");

    for check in checks.iter().filter(|it| !it.mosquitto) {
        let explains = |row: &&str| {
            let named = named(row).any(|it| it == check.short_name());
            named && row.contains("(Mosquitto")
        };
        let name = check.short_name();
        assert!(
            rows.iter().any(explains),
            "no row says how Mosquitto differs in {name}"
        );
    }
}
