//! A durable log of opaque records.
#![forbid(unsafe_code)]
