//! Small files that operators and other processes change or read at any time.
//!
//! * [`watch`]: values that are read from files, and reloaded when a file changes or at SIGHUP.
//! * [`atomic`]: replaces a file as a whole, so that a reader finds the old file or the new one.
//! * [`modes`]: warns of files that other accounts can write or read.
//! * [`blocking`]: work that blocks, such as reading these files, on threads of its own.
#![forbid(unsafe_code)]

pub mod atomic;
pub mod blocking;
mod limits;
pub mod modes;
pub mod watch;
