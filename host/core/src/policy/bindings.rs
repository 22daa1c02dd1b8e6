//! What `wit/policy.wit` is in Rust, generated: nothing here is written by hand.
#![allow(missing_docs, unreachable_pub, unused_variables, clippy::all)]

wasmtime::component::bindgen!({
    path: "../../wit",
    world: "policy",
    // Requests go in as borrowed slices; what a guest returns is owned.
    ownership: Borrowing { duplicate_if_necessary: true },
    // A broken contract (a span outside the payload, a write during `notify`) ends the call.
    imports: { default: trappable },
});
