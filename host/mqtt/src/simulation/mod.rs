//! Parts of a broker without the rest of it, for tests and measurements of what an embedder does.

mod changes;
mod wire;

pub use changes::{session_began, session_ended};
pub use wire::Wire;
