//! A rule that admits every command, except for keys with these prefixes:
//!
//! * `refused/`: it refuses changes.
//! * `renew/`: it admits only changes that renew the value, such as those of a lock.
//! * `twice/`: it admits two commands, and counts them in a hidden key.
//! * `fault/`: it returns the fault of the table, which no client has the right to read.
//! * `crash/`: it fails, and logs why.

#[allow(missing_docs, unreachable_pub, unsafe_code, clippy::all)]
mod bindings {
    wit_bindgen::generate!({
        path: "../../../wit",
        world: "rule",
        export_macro_name: "export_rule",
    });
}

use bindings::exports::statehouse::policy::admission::{Command, Condition, Guest, Identity};
use bindings::statehouse::policy::log;
use bindings::statehouse::policy::table;
use bindings::statehouse::policy::types::{Access, Bytes, Fault};

struct Rule;

impl Guest for Rule {
    fn describe() -> Identity {
        Identity {
            name: "rule".to_owned(),
            version: "0.1.0".to_owned(),
        }
    }

    fn admit(command: Command) -> Result<(), Fault> {
        let key = Bytes::Owned(command.key.clone());
        match command.key.split(|byte| *byte == b'/').next() {
            Some(b"refused") if command.changes => {
                let name = command.name;
                Err(Fault::Other(format!("no {name}\r\n+OK")))
            }
            Some(b"renew")
                if command.changes && !matches!(command.condition, Condition::AbsentOrEqual) =>
            {
                Err(Fault::Other("only renewals".to_owned()))
            }
            Some(b"twice") => {
                let count = Bytes::Owned(b"rule/count".to_vec());
                let before = table::head(&count, Access::Hidden)?.map_or(0, |it| it.len);
                let after = vec![b'|'; before as usize + 1];
                if after.len() > 2 {
                    return Err(Fault::Other("twice is enough".to_owned()));
                }
                table::put(&count, &Bytes::Owned(after), None, None, None)?;
                Ok(())
            }
            Some(b"fault") => table::head(&key, Access::Write).map(|_| ()),
            Some(b"crash") => {
                log::write(log::Level::Error, "rule.txt:1: a crash on request");
                unreachable!("a crash on request")
            }
            _ => Ok(()),
        }
    }
}

bindings::export_rule!(Rule with_types_in bindings);
