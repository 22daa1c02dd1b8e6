//! Every bound of the state machine and of the policies that it runs, with its unit in its name and its reason.

mod duplicates;
mod expiry;
mod log;
mod policy;
mod table;

pub use duplicates::*;
pub use expiry::*;
pub use log::*;
pub use policy::*;
pub use table::*;
