//! Transcripts: conversations of clients with a store, byte for byte, with one step per line.
//!
//! The crate parses the text into steps and compares lines with received messages. It must not
//! depend on a store or a transport, because both runners use it: the end-to-end tests run
//! transcripts over sockets, and `statehouse policy test` over a policy in memory.
//!
//! # The format
//!
//! A line is one step; lines that begin with `#` are comments. Words are split at spaces. `"…"`
//! keeps spaces. `\r \n \t \0 \\ \" \xHH` mean bytes, inside quotes and outside.
//!
//! ```text
//! config max_keys = 2         a setting of the store, as in its TOML file
//! dialect sdk                 the dialect of later requests: sdk, documents or preview
//! client a [id [filter qos]]  connects a client, with one more subscription
//! close a                     DISCONNECT and close
//! a> SET k v NX -- options    a request of client a; `>` alone is client `me`, which connects
//!                             by default
//! a>> *1\r\n -- options       a request with this payload, valid or not
//! a< +OK\r\n __ts=$v1         the answer to the oldest open request of a, with all of its user
//!                             properties. `policy test` skips a request at which the policy failed
//!                             if there are fewer lines than requests
//! a<puback 0x83 topic         the acknowledgement refuses the request; its Reason String contains
//!                             the rest of the line
//! a<disconnect 0x90 topic     the connection is ended, with this reason
//! a<nothing                   the request was dropped
//! a! k *2\r\n… __ts=$v2       a notification of key k, on the topic of client a and key k
//! quiet                       no client has received any other message (also checked at the end)
//! wait 50ms                   lets this time pass, for tests of expiry; or `wait 5s`
//! at 1700000000000            sets the clock, if it is scripted (`statehouse policy test`)
//! ? $v2 > $v1                 compares versions, or the clock as `$now-5000`: < = >
//! ```
//!
//! A client sends the properties of its dialect: `__ts` with its clock, `__protVer`, `__srcId`; or
//! `Timestamp`. Options change that: `name=value` sets a property (twice sends it twice), and
//! `-name` leaves it out. `@qos=2`, `@expiry=10`, `@type=…`, `@response=…`, `-@response`,
//! `-@correlation` and `@times=3` (repeats the payload) change the PUBLISH. A value or a word
//! `$name` is a variable, `$now` is the clock, and `$name-1` is a clock reading one millisecond
//! earlier; `"$name"` means these bytes.
//!
//! In an answer, the first use of a variable takes the value, and every later use compares with it.
//! The properties of every answer (`__stat`=`200`, and `__protVer`=`1.0` if the client sent one)
//! are checked without being written, unless the line says `@bare`. The order of user properties is
//! free; an additional or a missing one is an error. A notification may say `@qos=0`, and
//! `@topic=…` if a policy notifies on its own topics. Any other unquoted word that begins with `@`
//! is refused.
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
