//! The target and the numbers of signed orders over MQTT.

use super::{Control, ControlError};

impl Control {
    /// The name of this store: it carries out only the orders that name it.
    pub fn store(&self) -> &str {
        &self.store
    }

    /// The number of the last order that was accepted.
    pub fn serial(&self) -> u64 {
        self.seen().assignment.serial
    }

    /// Accepts an order by its number, durably and before it is carried out: then it is not carried out twice, whoever
    /// repeats it and whenever the process ends.
    pub fn accept_order(&self, serial: u64) -> Result<(), ControlError> {
        self.change(|seen, _| Ok(seen.assignment.accept(serial)?))?;
        Ok(())
    }
}
