//! The bindings that wit-bindgen generates from `wit/policy.wit`: the types, the imports, and the
//! macro that exports a component. Policy authors use the re-exports of the crate root.

#![allow(missing_docs, unreachable_pub, unsafe_code, clippy::all)]

wit_bindgen::generate!({
    path: "wit",
    world: "policy",
    pub_export_macro: true,
    export_macro_name: "export_component",
    default_bindings_module: "statehouse_policy::bindings",
    additional_derives: [PartialEq, Eq],
    generate_unused_types: true,
});
