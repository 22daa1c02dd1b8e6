//! The contract compared with the released one. Within 1.x it only grows, or else a policy that is
//! in use would not load any more.
//!
//! `policy-1.0.0.wit` is the contract of Statehouse 0.1.0. A release with a grown contract adds a
//! copy of it.

use std::collections::BTreeMap;

const RELEASED: [&str; 1] = [include_str!("policy-1.0.0.wit")];
const PRESENT: &str = include_str!("../wit/policy.wit");

/// What a policy or a rule exports. An export that it lacks keeps it from loading, so these must
/// not even grow.
const EXPORTED: [&str; 2] = ["interface handler", "interface admission"];

/// The interfaces and worlds with their items, and the package. Without comments, and with single
/// spaces.
fn blocks(contract: &str) -> BTreeMap<String, Vec<String>> {
    let lines = contract
        .lines()
        .map(|line| line.split("//").next().unwrap_or_default());
    let text = lines
        .flat_map(str::split_whitespace)
        .collect::<Vec<_>>()
        .join(" ");
    let mut blocks = BTreeMap::new();
    for (name, body) in items(&text).iter().map(|item| parts(item)) {
        let body = items(body).iter().flat_map(|item| uses(item)).collect();
        assert!(blocks.insert(name.to_owned(), body).is_none(), "two {name}");
    }
    blocks
}

/// The head of a block and what its braces enclose, which may be nothing.
fn parts(item: &str) -> (&str, &str) {
    match item.split_once('{') {
        Some((head, body)) => (head.trim(), body.trim_end_matches('}')),
        None => (item.trim_end_matches(';'), ""),
    }
}

/// The items of a text: each ends with a semicolon or a brace.
fn items(text: &str) -> Vec<String> {
    let (mut items, mut depth, mut item) = (Vec::new(), 0, String::new());
    let mut characters = text.chars().peekable();
    while let Some(character) = characters.next() {
        item.push(character);
        match character {
            '{' => depth += 1,
            '}' => depth -= 1,
            _ => {}
        }
        let is_end = match character {
            ';' => depth == 0,
            // A list of names that are used continues.
            '}' => depth == 0 && characters.peek() != Some(&';'),
            _ => false,
        };
        if is_end {
            items.push(std::mem::take(&mut item).trim().to_owned());
        }
    }
    assert!(item.trim().is_empty() && depth == 0, "{item}");
    items
}

/// One item for each name that is used, because the list of them may grow.
fn uses(item: &str) -> Vec<String> {
    match item.strip_prefix("use ").and_then(|it| it.split_once(".{")) {
        Some((from, names)) => {
            let names = names.trim_end_matches("};").split(',');
            names
                .map(|name| format!("use {from}.{}", name.trim()))
                .collect()
        }
        None => vec![item.to_owned()],
    }
}

/// Why a policy for the released contract could not use the present one.
fn breaches(released: &str, present: &str) -> Vec<String> {
    let (released, present) = (blocks(released), blocks(present));
    let mut breaches = Vec::new();
    for (name, items) in &released {
        let now = present.get(name).map(Vec::as_slice).unwrap_or_default();
        if !present.contains_key(name) {
            breaches.push(format!("{name} was removed"));
        }
        let lost = items.iter().filter(|item| !now.contains(item));
        breaches.extend(lost.map(|item| format!("{name}: edited or removed: {item}")));
        let added = now.iter().filter(|item| !items.contains(item));
        let forbidden = added.filter(|item| {
            item.starts_with("export ") || EXPORTED.contains(&&**name) && item.contains("func(")
        });
        breaches.extend(forbidden.map(|item| format!("{name}: policies lack: {item}")));
    }
    breaches
}

#[test]
fn released_contract_has_only_grown() {
    for released in RELEASED {
        assert!(
            blocks(released).len() > 8,
            "interfaces, worlds, the package"
        );
        assert_eq!(breaches(released, PRESENT), Vec::<String>::new());
    }
}

#[test]
fn edits_are_found_and_growth_is_not() {
    let edit = |from: &str, to: &str| {
        assert!(PRESENT.contains(from), "{from}");
        breaches(PRESENT, &PRESENT.replacen(from, to, 1))
    };
    for (from, to) in [
        (
            "enum access { read, write, hidden }",
            "enum access { read, write, hidden, scan }",
        ),
        (
            "record stamp { wall: u64, counter: u32 }",
            "record stamp { wall: u64, counter: u64 }",
        ),
        ("get: func(name: string)", "get: func(key: string)"),
        ("delete: func(key: bytes) -> result<bool, fault>;", ""),
        (
            "describe: func() -> info;",
            "describe: func() -> info; tick: func();",
        ),
        ("  export handler;", "  export handler; export admission;"),
        (
            "package statehouse:policy@1.0.0",
            "package statehouse:policy@2.0.0",
        ),
        ("interface seeded", "interface random"),
    ] {
        assert!(!edit(from, to).is_empty(), "{from} became {to}");
    }
    for (from, to) in [
        (
            "interface seeded {",
            "/// More.\ninterface seeded { more: func() -> u32;",
        ),
        (
            "use types.{bytes, fault};",
            "use types.{bytes, stamp,\n fault};",
        ),
        ("  import seeded;", "  import seeded;\n  import clock;"),
        (
            "interface types {",
            "interface types { record more { a: u32 }",
        ),
    ] {
        assert_eq!(edit(from, to), Vec::<String>::new(), "{from} became {to}");
    }
}
