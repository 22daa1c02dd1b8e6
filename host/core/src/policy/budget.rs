//! Fuel and memory limits of a call, and the classification of failures.
//!
//! Fuel is the actual limit, because it is the same on every machine and in every re-execution. The
//! epoch is a watchdog for anything that fuel does not measure.

use std::time::Instant;

use statehouse_precompiled::system_error;
use wasmtime::{ResourceLimiter, Trap};

use crate::limits;

/// The fuel of a call with this much input, given the configured `fuel_max`.
pub(crate) fn fuel(fuel_max: u64, payload_bytes: usize) -> u64 {
    fuel_max + limits::FUEL_PER_PAYLOAD_BYTE * payload_bytes as u64
}

/// The fuel and time that calls of several policies may use for one request. Each call has the full
/// fuel of a request, so that a failure is its own fault. The next call is made only if all earlier
/// ones together used less than that.
pub(crate) struct Share {
    fuel: u64,
    began: Instant,
}

impl Share {
    /// The share of a request with this much input.
    pub(crate) fn of(fuel_max: u64, payload_bytes: usize) -> Self {
        Self {
            fuel: fuel(fuel_max, payload_bytes),
            began: Instant::now(),
        }
    }

    pub(crate) fn spend(&mut self, fuel: u64) {
        self.fuel = self.fuel.saturating_sub(fuel);
    }

    /// Whether another call may be made.
    pub(crate) fn is_left(&self) -> bool {
        self.fuel > 0 && self.began.elapsed() < limits::WATCHDOG
    }
}

/// The cost of the host's work for one call, in fuel. wasmtime counts only instructions of the
/// guest. A call has used up its fuel when both together exceed the limit.
#[derive(Debug)]
pub(super) struct Account {
    /// The fuel limit of the call.
    fuel: u64,
    charged: u64,
}

impl Account {
    pub(super) fn of(fuel: u64) -> Self {
        Self { fuel, charged: 0 }
    }

    pub(super) fn charged(&self) -> u64 {
        self.charged
    }

    /// Charges for an import and the bytes of its key or name.
    pub(super) fn import(&mut self, key_bytes: usize) -> wasmtime::Result<()> {
        self.charge(limits::FUEL_PER_IMPORT + limits::FUEL_PER_KEY_BYTE * key_bytes as u64)
    }

    /// Charges for bytes copied between guest and host.
    pub(super) fn moved(&mut self, bytes: usize) -> wasmtime::Result<()> {
        self.charge(bytes as u64 / limits::MOVED_BYTES_PER_FUEL)
    }

    /// Charges for keys and patterns that the host examined.
    pub(super) fn examined(&mut self, examined: u64) -> wasmtime::Result<()> {
        self.charge(limits::FUEL_PER_EXAMINED_KEY * examined)
    }

    fn charge(&mut self, fuel: u64) -> wasmtime::Result<()> {
        self.charged = self.charged.saturating_add(fuel);
        match self.charged > self.fuel {
            true => Err(Trap::OutOfFuel.into()),
            false => Ok(()),
        }
    }
}

/// Memory limits of an instance. The limit applies to the sum of its memories: interpreters have
/// several, of which one grows.
#[derive(Debug, Default)]
pub(super) struct Bounds {
    memory_bytes: usize,
}

impl Bounds {
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
                "it requested {sum} bytes of memory; a policy may have at most {}",
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
                "it requested a table of {desired} elements; a policy may have at most {}",
                limits::GUEST_TABLE_ELEMENTS_MAX
            )));
        }
        Ok(true)
    }

    // Must always trap: a guest that handles the failure could behave differently on a host with
    // another limit.
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

/// Why a call failed. Its staged effects must not be applied.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Failure {
    /// Deterministic: a re-execution with the same fuel fails the same way.
    #[error("it used up its fuel, which max_fuel bounds")]
    Fuel,
    /// The machine or a host call was slow. A re-execution may succeed.
    #[error("the watchdog stopped it")]
    Watchdog,
    /// The machine lacks a resource, such as memory. A re-execution may succeed.
    #[error("the machine cannot run it: {0}")]
    Machine(String),
    /// The guest trapped, or returned something that no valid component returns.
    #[error("{0}")]
    Trap(String),
    /// The guest returned something that violates the contract.
    #[error("it returned {0}")]
    Malformed(String),
}

impl Failure {
    /// Whether the machine is the likely cause: it was slow, or lacks a resource. Such a failure
    /// says nothing about the result of a re-execution.
    pub fn is_of_machine(&self) -> bool {
        matches!(self, Self::Watchdog | Self::Machine(_))
    }

    /// Names the line that the failed call logged last at the level `error` as the cause of a trap.
    /// A panic or an uncaught exception ends in a trap that says nothing itself. So does a call of
    /// WASI, which the build replaces by a trap, and a value that an interpreter cannot convert for
    /// an import: both come from the language, and no line is logged.
    pub(super) fn caused_by(self, line: Option<String>) -> Self {
        let is_bare = |trap: &str| trap == Trap::UnreachableCodeReached.to_string();
        match (self, line) {
            (Self::Trap(trap), Some(line)) if is_bare(&trap) => Self::Trap(line),
            (Self::Trap(trap), Some(line)) => Self::Trap(format!("{line} ({trap})")),
            (Self::Trap(trap), None) if is_bare(&trap) => Self::Trap(format!(
                "{trap}; the policy logged no error, so a likely cause is a clock, a file, print or a thread of its language, for a policy has no WASI, or a value of the wrong type given to an import"
            )),
            (failure, _) => failure,
        }
    }

    pub(super) fn of(error: &wasmtime::Error) -> Self {
        match error.downcast_ref::<Trap>() {
            Some(Trap::OutOfFuel) => Self::Fuel,
            Some(Trap::Interrupt) => Self::Watchdog,
            Some(trap) => Self::Trap(trap.to_string()),
            None => match system_error(error) {
                Some(error) => Self::Machine(error.to_string()),
                None => Self::Trap(error.root_cause().to_string()),
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn trap_has_the_logged_cause_or_a_likely_one() {
        let bare = Failure::of(&Trap::UnreachableCodeReached.into());
        let line = || Some("app.py:20: ValueError".to_owned());
        let caused = Failure::Trap("app.py:20: ValueError".into());
        assert_eq!(bare.clone().caused_by(line()), caused);
        let likely = bare.caused_by(None).to_string();
        assert!(likely.contains("unreachable"), "{likely}");
        assert!(likely.contains("no WASI"), "{likely}");
        assert!(likely.contains("given to an import"), "{likely}");
        // Another trap says what happened.
        let other = Failure::of(&Trap::StackOverflow.into());
        assert_eq!(other.clone().caused_by(None), other);
        assert_eq!(Failure::Fuel.caused_by(None), Failure::Fuel);
    }

    /// Regression: a lack of memory counted as a fault of the policy.
    #[test]
    fn error_of_the_system_is_a_failure_of_the_machine() {
        // ENOMEM.
        let lack = std::io::Error::from_raw_os_error(12);
        let text = lack.to_string();
        let lack = wasmtime::Error::from(lack).context("mmap failed to reserve 0x1000 bytes");
        let failure = Failure::of(&lack);
        assert!(failure.is_of_machine(), "{failure}");
        assert_eq!(failure, Failure::Machine(text));
        let own = Failure::of(&wasmtime::Error::msg("it requested too much memory"));
        assert!(!own.is_of_machine(), "{own}");
    }

    #[test]
    fn share_ends_with_its_fuel_or_its_time() {
        let mut share = Share::of(1000, 1);
        share.spend(1000);
        assert!(share.is_left(), "each byte adds fuel");
        share.spend(limits::FUEL_PER_PAYLOAD_BYTE);
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
