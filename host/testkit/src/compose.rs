//! Composes a rule with the standard policy into one component, which is an ordinary policy.
//!
//! ```text
//! imports of the contract ─┬─▶ rule ── admission ─▶ standard policy ── handler ─▶ export
//!                          └──────────────────────▶
//! ```
//!
//! The two components share the imports, and each has its own memory. A composition of the same two
//! files always has the same bytes.

use statehouse_core::policy::remedy;
use statehouse_precompiled::{POLICY_IMPORTS, RULED_POLICY, encode};
use wasm_encoder::{
    Alias, ComponentAliasSection, ComponentExportKind, ComponentExportSection,
    ComponentInstanceSection, ComponentSection, ComponentSectionId, Encode,
};

/// The imports of a policy, in the order in which [`POLICY_IMPORTS`] declares them.
const IMPORTS: [&str; 7] = [
    "statehouse:policy/types@1.0.0",
    "statehouse:policy/table@1.0.0",
    "statehouse:policy/watch@1.0.0",
    "statehouse:policy/follow@1.0.0",
    "statehouse:policy/property@1.0.0",
    "statehouse:policy/log@1.0.0",
    "statehouse:policy/seeded@1.0.0",
];

const ADMISSION: &str = "statehouse:policy/admission@1.0.0";
const HANDLER: &str = "statehouse:policy/handler@1.0.0";

/// Why a rule cannot be composed.
#[derive(Debug, thiserror::Error)]
pub enum ComposeError {
    /// The rule is a core module that is no component.
    #[error("the rule cannot be converted to a component: {0}")]
    Encode(String),
    /// It exports no rule.
    #[error("the component does not export {ADMISSION}, so it is not a rule")]
    NoRule,
    /// It imports something that a policy cannot have.
    #[error(
        "the rule imports `{0}`, but a rule may import only table, property, log and seeded of statehouse:policy 1.0{hint}",
        hint = remedy(.0)
    )]
    Import(String),
    /// It is built for another version of the contract.
    #[error(
        "the rule is built for `{0}`, but this program composes rules for statehouse:policy 1.0: rebuild it against wit/policy.wit of this version"
    )]
    Version(String),
    /// This program has no component to compose it with.
    #[error(
        "this statehouse was built with a standard policy from elsewhere, and cannot compose rules"
    )]
    Unavailable,
}

/// Whether a component or core module is a rule: it exports `admission` and no `handler`.
pub fn is_rule(file: &[u8]) -> bool {
    interfaces(file).is_some_and(|(_, exports)| {
        let has = |name: &str| exports.iter().any(|it| it == name);
        has(ADMISSION) && !has(HANDLER)
    })
}

/// The policy that asks this rule, as a component.
pub fn compose(rule: &[u8]) -> Result<Vec<u8>, ComposeError> {
    if RULED_POLICY.is_empty() {
        return Err(ComposeError::Unavailable);
    }
    let rule = component(rule).map_err(|error| ComposeError::Encode(format!("{error:#}")))?;
    let (imports, exports) = interfaces(&rule).unwrap_or_default();
    if let Some(foreign) = imports.iter().find(|it| !IMPORTS.contains(&it.as_str())) {
        return Err(refusal(foreign));
    }
    if !exports.iter().any(|it| it == ADMISSION) {
        return Err(ComposeError::NoRule);
    }
    let mut policy = POLICY_IMPORTS.to_vec();
    // The numbers of components and instances count up in the order of the file: the rule is
    // component 0, the standard policy is component 1, and the first instances are the imports.
    let imported: Vec<_> = (0..).zip(IMPORTS).map(|(at, name)| (name, at)).collect();
    let instance = |(name, at): &(&'static str, u32)| (*name, ComponentExportKind::Instance, *at);
    let count = imported.len() as u32;
    let (the_rule, admission, ruled, handler) = (count, count + 1, count + 2, count + 3);
    nest(&mut policy, &rule);
    nest(&mut policy, RULED_POLICY);
    let mut instances = ComponentInstanceSection::new();
    instances.instantiate(0, imported.iter().map(instance));
    instances.append_to_component(&mut policy);
    exported(the_rule, ADMISSION).append_to_component(&mut policy);
    let mut instances = ComponentInstanceSection::new();
    let mut given: Vec<_> = imported.iter().map(instance).collect();
    given.push((ADMISSION, ComponentExportKind::Instance, admission));
    instances.instantiate(1, given);
    instances.append_to_component(&mut policy);
    exported(ruled, HANDLER).append_to_component(&mut policy);
    let mut exports = ComponentExportSection::new();
    exports.export(HANDLER, ComponentExportKind::Instance, handler, None);
    exports.append_to_component(&mut policy);
    Ok(policy)
}

/// The error for an import that is not offered.
fn refusal(import: &str) -> ComposeError {
    let interface = import.strip_prefix("statehouse:policy/");
    match interface.and_then(|it| it.split_once('@')) {
        Some((_, version)) if version != "1.0.0" => ComposeError::Version(import.to_owned()),
        _ => ComposeError::Import(import.to_owned()),
    }
}

/// The instance that an instance exports, which becomes the next instance.
fn exported(instance: u32, name: &str) -> ComponentAliasSection {
    let mut aliases = ComponentAliasSection::new();
    aliases.alias(Alias::InstanceExport {
        instance,
        kind: ComponentExportKind::Instance,
        name,
    });
    aliases
}

/// Appends a section with a component, which becomes the next component.
fn nest(policy: &mut Vec<u8>, component: &[u8]) {
    policy.push(ComponentSectionId::Component.into());
    component.encode(policy);
}

fn component(file: &[u8]) -> Result<Vec<u8>, impl std::fmt::Display + use<>> {
    match file {
        [0, b'a', b's', b'm', 1, 0, 0, 0, ..] => encode(file),
        _ => Ok(file.to_vec()),
    }
}

/// The names of the imports and exports of a component, or of the component that a core module
/// becomes.
pub(super) fn interfaces(file: &[u8]) -> Option<(Vec<String>, Vec<String>)> {
    if !statehouse_core::policy::sections::are_whole(file) {
        return None;
    }
    let decoded = wit_component::decode(&component(file).ok()?).ok()?;
    let wit_component::DecodedWasm::Component(resolve, world) = decoded else {
        return None;
    };
    let world = resolve.worlds.get(world)?;
    let names = |keys: Vec<_>| {
        keys.into_iter()
            .map(|key| resolve.name_world_key(key))
            .collect()
    };
    Some((
        names(world.imports.keys().collect()),
        names(world.exports.keys().collect()),
    ))
}
