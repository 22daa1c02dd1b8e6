//! What wit-bindgen makes of `wit/policy.wit`: the types, the imports, and the macro that exports a
//! component. Nothing is written by hand here; authors use what the crate root re-exports.

#![allow(missing_docs, unreachable_pub, unsafe_code, clippy::all)]

wit_bindgen::generate!({
    path: "../../wit",
    world: "policy",
    pub_export_macro: true,
    export_macro_name: "export_component",
    default_bindings_module: "statehouse_policy::bindings",
    additional_derives: [PartialEq, Eq],
    generate_unused_types: true,
});
