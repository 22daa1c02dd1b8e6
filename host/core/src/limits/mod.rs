//! Every limit of the state machine and of its policies, with the unit in its name and the reason
//! in its comment.

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
