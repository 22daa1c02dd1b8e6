//! What a call may cost, and how a call that failed is called.
//!
//! Fuel is the verdict, because it is the same on every machine and in every re-run; the epoch is a
//! watchdog for what fuel does not see.

use std::time::Instant;

use wasmtime::{ResourceLimiter, Trap};

use crate::limits;

/// The fuel of a call about `payload_bytes` bytes of input, where any call may burn `fuel_max`.
pub(crate) fn fuel(fuel_max: u64, payload_bytes: usize) -> u64 {
    fuel_max + limits::FUEL_PER_PAYLOAD_BYTE * payload_bytes as u64
}

/// What the calls of several policies may cost for one request. Each call has a whole budget, so that one which fails is
/// to blame for it; the next is made only while all before it took less than one.
pub(crate) struct Share {
    fuel: u64,
    began: Instant,
}

impl Share {
    /// That of a request with so many bytes, where any call may burn `fuel_max`.
    pub(crate) fn of(fuel_max: u64, payload_bytes: usize) -> Self {
        Self {
            fuel: fuel(fuel_max, payload_bytes),
            began: Instant::now(),
        }
    }

    /// A call took some of it.
    pub(crate) fn burn(&mut self, fuel: u64) {
        self.fuel = self.fuel.saturating_sub(fuel);
    }

    /// Whether another call may be made.
    pub(crate) fn is_left(&self) -> bool {
        self.fuel > 0 && self.began.elapsed() < limits::WATCHDOG
    }
}

/// What the host's work for one call costs, in fuel. wasmtime counts only instructions of the
/// guest, so imports keep this account in addition, and a call has used up its fuel when both
/// together have.
#[derive(Debug)]
pub(super) struct Account {
    /// What the call may burn.
    fuel: u64,
    charged: u64,
}

impl Account {
    /// That of a call which may burn so much.
    pub(super) fn of(fuel: u64) -> Self {
        Self { fuel, charged: 0 }
    }

    /// What was charged so far.
    pub(super) fn charged(&self) -> u64 {
        self.charged
    }

    /// An import, with the bytes of the key or name that it is about.
    pub(super) fn import(&mut self, key_bytes: usize) -> wasmtime::Result<()> {
        self.charge(limits::FUEL_PER_IMPORT + limits::FUEL_PER_KEY_BYTE * key_bytes as u64)
    }

    /// Bytes that went from the guest to the host or back.
    pub(super) fn moved(&mut self, bytes: usize) -> wasmtime::Result<()> {
        self.charge(bytes as u64 / limits::MOVED_BYTES_PER_FUEL)
    }

    /// Keys and patterns that the host examined.
    pub(super) fn looks(&mut self, looks: u64) -> wasmtime::Result<()> {
        self.charge(limits::FUEL_PER_LOOK * looks)
    }

    fn charge(&mut self, fuel: u64) -> wasmtime::Result<()> {
        self.charged = self.charged.saturating_add(fuel);
        match self.charged > self.fuel {
            true => Err(Trap::OutOfFuel.into()),
            false => Ok(()),
        }
    }
}

/// What an instance may hold. The bytes of all its memories are counted together: interpreters come with several, of
/// which one grows.
#[derive(Debug, Default)]
pub(super) struct Bounds {
    memory_bytes: usize,
}

impl Bounds {
    /// What its memories hold by now.
    pub(super) fn memory_bytes(&self) -> usize {
        self.memory_bytes
    }
}

impl ResourceLimiter for Bounds {
    fn memory_growing(
        &mut self,
        current: usize,
        desired: usize,
        _: Option<usize>,
    ) -> wasmtime::Result<bool> {
        let sum = self
            .memory_bytes
            .saturating_sub(current)
            .saturating_add(desired);
        if sum > limits::GUEST_MEMORY_BYTES_MAX {
            return Err(wasmtime::Error::msg(format!(
                "it asked for {sum} bytes of memory, and a policy has at most {}",
                limits::GUEST_MEMORY_BYTES_MAX
            )));
        }
        self.memory_bytes = sum;
        Ok(true)
    }

    fn table_growing(
        &mut self,
        _: usize,
        desired: usize,
        _: Option<usize>,
    ) -> wasmtime::Result<bool> {
        if desired > limits::GUEST_TABLE_ELEMENTS_MAX {
            return Err(wasmtime::Error::msg(format!(
                "it asked for a table of {desired} elements, and a policy has at most {}",
                limits::GUEST_TABLE_ELEMENTS_MAX
            )));
        }
        Ok(true)
    }

    // A guest that was told "no" could go on differently on a host with more room: it is a trap, always.
    fn memory_grow_failed(&mut self, error: wasmtime::Error) -> wasmtime::Result<()> {
        Err(error)
    }

    fn table_grow_failed(&mut self, error: wasmtime::Error) -> wasmtime::Result<()> {
        Err(error)
    }

    fn instances(&self) -> usize {
        limits::GUEST_INSTANCES_MAX
    }

    fn tables(&self) -> usize {
        limits::GUEST_TABLES_MAX
    }

    fn memories(&self) -> usize {
        limits::GUEST_MEMORIES_MAX
    }
}

/// Why a call has no outcome. Nothing it staged may be applied.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Failure {
    /// Deterministic: where it has no more of it, a re-run ends the same way.
    #[error("it used up its fuel, which max_fuel bounds")]
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_share_is_over_when_its_fuel_or_its_time_is() {
        let mut share = Share::of(1000, 1);
        share.burn(1000);
        assert!(share.is_left(), "a byte is worth something too");
        share.burn(limits::FUEL_PER_PAYLOAD_BYTE);
        assert!(!share.is_left());
        let began = Instant::now().checked_sub(limits::WATCHDOG);
        let began = began.expect("the machine runs for longer than that");
        let late = Share {
            began,
            ..Share::of(1000, 1)
        };
        assert!(!late.is_left());
    }
}
