//! Small files that operators and other processes change or read at any time.
//!
//! * [`watch`]: values that are read from files, and reloaded when a file changes or at SIGHUP.
//! * [`atomic`]: replaces a file as a whole, so that a reader finds the old file or the new one.
#![forbid(unsafe_code)]

pub mod atomic;
mod limits;
pub mod watch;
