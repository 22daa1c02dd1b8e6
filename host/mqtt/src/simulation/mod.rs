//! Single parts of a broker, for tests and measurements of an embedder.

mod changes;
mod time;
mod wire;

pub use changes::{session_began, session_ended};
pub use wire::Wire;
