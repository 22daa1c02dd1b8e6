//! Rust bindings generated from `wit/policy.wit`.
#![allow(missing_docs, unreachable_pub, unused_variables, clippy::all)]

wasmtime::component::bindgen!({
    path: "../../wit",
    world: "policy",
    // Requests are passed as borrowed slices; results of the guest are owned.
    ownership: Borrowing { duplicate_if_necessary: true },
    // A violation of the contract (a span outside the payload, a write during `notify`) ends the
    // call.
    imports: { default: trappable },
    additional_derives: [PartialEq],
});
