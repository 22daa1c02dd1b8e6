//! Transcripts: what clients say to a store and what they hear, byte for byte, one step on a line.
//!
//! What enters: text. What leaves: steps, and the comparison of what a line says with what came. It sends nothing
//! and knows no store: the tests of the whole run transcripts over sockets, `statehouse policy test` runs them
//! over a policy in memory, and both read them here.
//!
//! # The format
//!
//! A line is one step; lines that begin with `#` are comments. Words are split at spaces; `"…"` keeps spaces;
//! `\r \n \t \0 \\ \" \xHH` mean bytes, inside quotes and outside.
//!
//! ```text
//! config max_keys = 2           a setting of the store, as in its TOML file
//! dialect sdk                   how requests are written from here on: sdk, documents or preview
//! client a [id [filter qos]]    connects a client, with one more subscription
//! close a                       DISCONNECT and close
//! a> SET k v NX -- options      a request of client a; `>` alone is client `me`, which connects itself
//! a>> *1\r\n -- options         a request with this payload, right or wrong
//! a< +OK\r\n __ts=$v1           the answer to a's oldest open request, with all of its user properties
//! a<puback 0x83 "topic"         it is refused by its acknowledgement, whose Reason String says this
//! a<disconnect 0x90 "topic"     the connection is ended, with this reason
//! a<nothing                     it was dropped
//! a! k *2\r\n… __ts=$v2         a notification of key k, on the topic of client a and key k
//! quiet                         nobody has been sent anything else (checked at the end as well)
//! wait 50ms                     for time itself, in tests of expiry
//! at 1700000000000              sets the clock, where it is scripted (`statehouse policy test`)
//! ? $v2 > $v1                   compares versions: < = >
//! ```
//!
//! A client sends the properties of its dialect: `__ts` with its clock, `__protVer`, `__srcId`; or `Timestamp`.
//! Options change that: `name=value` sets (twice sends it twice), `-name` leaves out, and `@qos=2`, `@expiry=10`,
//! `@type=…`, `@response=…`, `-@response`, `-@correlation`, `@times=3` (repeats the payload) shape the PUBLISH.
//! A value `$name` is a variable, `$now` the clock, `$name-1` a reading one millisecond earlier.
//!
//! In an answer the first use of a variable takes the value, every later one compares with it. The properties that
//! every answer carries (`__stat`=`200`, and `__protVer`=`1.0` where the client sent one) are checked without being
//! written, unless the line says `@bare`. The order of user properties is free; one too many or too few is an
//! error. A notification may say `@qos=0`, and `@topic=…` where a policy tells on topics of its own.
#![forbid(unsafe_code)]

mod matching;
mod options;
mod quote;
mod reading;
mod script;

pub use matching::{Properties, Said, Variables, has_sign, shown};
pub use options::Options;
pub use quote::{Word, quote, words};
pub use reading::Reading;
pub use script::{DEFAULT_CLIENT, Dialect, Script, Step, parse};
