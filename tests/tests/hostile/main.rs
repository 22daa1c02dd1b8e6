//! Bad input over real sockets. After every blow another client's data is still there, newcomers are served,
//! nothing has panicked, nothing is leaked, and memory is within a bound that is far below what was claimed or sent.
//!
//! Each class of faults that brokers had, and where it is tried on this one (`mqtt` is `host/mqtt/tests`, where the broker runs
//! by itself; `trust` is beside this directory):
//!
//! | class | tests |
//! |---|---|
//! | memory before CONNECT | [`lengths`]: a first packet of 256 MiB, of each type; `mqtt/hostile` |
//! | a length that lies | [`lengths`]: shorter, longer, cut anywhere, over TCP and WebSocket; [`slow`] |
//! | integers of five bytes | [`lengths`]: remaining length, property length, subscription identifier |
//! | any packet before CONNECT, or against its direction | [`packets`]; `mqtt/hostile` |
//! | invalid topics and properties | [`packets`]; [`topics`]; [`properties`]: each property in each packet, wills that leak |
//! | QoS 2 that never ends | [`exchanges`] |
//! | takeover | [`fights`]; `mqtt/hostile` and `mqtt/clients` for the order of what is handed over |
//! | authentication | `trust/users`: none, half, too long, names that are patterns; `trust/tokens`; `trust/certificates` |
//! | empty or bad rules | `trust/authorization`: the store does not start, or the rules before stay |
//! | client ids that are patterns | `trust/users`, `trust/authorization` |
//! | delivery after a right was revoked | `trust/authorization`; `trust/users`, `trust/revocation` and `trust/tokens` for whole connections |
//! | loops, depth, log bombs | [`topics`]: 65 536 levels, 100 000 filters; `trust/users`: names of 60 kB in the log |
//! | RESP | [`requests`], and `transcripts/malformed-*` byte for byte |
//! | clock readings | [`requests`]: timestamps that nobody should have; `transcripts/clocks-*` |
//! | reserved topics | [`requests`]: response topics, forged notifications, others' answers |
//! | slow handshakes by the thousand | [`slow`]; `trust/tls` |
//! | clients that never read | [`floods`] |
//! | a flood of logins | `trust/users`: a thousand guesses at once |
#![allow(missing_docs, clippy::unwrap_used)]

mod exchanges;
mod fights;
mod floods;
mod lengths;
mod packets;
mod properties;
mod requests;
mod slow;
mod topics;
mod witness;
