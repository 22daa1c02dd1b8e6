//! The target and the serials of signed orders over MQTT.

use super::{Control, ControlError};

impl Control {
    /// The name of this store: it carries out only the orders that name it.
    pub fn store(&self) -> &str {
        &self.shared.store
    }

    /// The serial of the last accepted order.
    pub fn serial(&self) -> u64 {
        self.seen().assignment.serial
    }

    /// Accepts an order by its serial. This must be durable before the order is carried out.
    /// Otherwise a repetition after a crash could carry it out twice.
    pub fn accept_order(&self, serial: u64) -> Result<(), ControlError> {
        self.change(|seen, _| Ok(seen.assignment.accept(serial)?))?;
        Ok(())
    }
}
