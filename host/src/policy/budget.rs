//! What a call may cost, and how a call that failed is called.
//!
//! Fuel is the verdict, because it is the same on every machine and in every re-run; the epoch is a
//! watchdog for what fuel does not see.

use wasmtime::{StoreLimits, StoreLimitsBuilder, Trap};

use crate::limits;

/// The fuel of a call about `payload_bytes` bytes of input.
pub(super) fn fuel(payload_bytes: usize) -> u64 {
    limits::FUEL_PER_CALL + limits::FUEL_PER_PAYLOAD_BYTE * payload_bytes as u64
}

/// The memory of an instance.
pub(super) fn store_limits() -> StoreLimits {
    StoreLimitsBuilder::new()
        .memory_size(limits::GUEST_MEMORY_BYTES_MAX)
        .table_elements(limits::GUEST_TABLE_ELEMENTS_MAX)
        .instances(limits::GUEST_INSTANCES_MAX)
        .memories(limits::GUEST_MEMORIES_MAX)
        .tables(limits::GUEST_TABLES_MAX)
        // A guest that was told "no" could go on differently on a host with more room.
        .trap_on_grow_failure(true)
        .build()
}

/// Why a call has no outcome. Nothing it staged may be applied.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Failure {
    /// Deterministic: a re-run ends the same way.
    #[error("it used up its fuel")]
    Fuel,
    /// The machine was slow or the host call was: a re-run may well succeed.
    #[error("the watchdog stopped it")]
    Watchdog,
    /// A trap of the guest, or something that no valid component returns.
    #[error("{0}")]
    Trap(String),
    /// It returned, but not what the contract asks for.
    #[error("it returned {0}")]
    Malformed(String),
}

impl Failure {
    pub(super) fn of(error: &wasmtime::Error) -> Self {
        match error.downcast_ref::<Trap>() {
            Some(Trap::OutOfFuel) => Self::Fuel,
            Some(Trap::Interrupt) => Self::Watchdog,
            Some(trap) => Self::Trap(trap.to_string()),
            None => Self::Trap(error.root_cause().to_string()),
        }
    }
}
