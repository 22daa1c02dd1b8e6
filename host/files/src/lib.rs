//! Small files that operators and other processes change or read at any time.
//!
//! * [`watch`]: values made of files that are read again when they change, or at SIGHUP.
//! * [`atomic`]: files that are replaced as a whole, so that a reader sees the old one or the new one.
#![forbid(unsafe_code)]

pub mod atomic;
mod limits;
pub mod watch;
