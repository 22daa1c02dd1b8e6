//! `statehouse call`: sends any command, such as one of a policy.

use std::ffi::OsString;
use std::io::{self, IsTerminal};
use std::os::unix::ffi::OsStrExt;

use clap_complete::engine::ArgValueCompleter;
use serde_json::{Map, Value as Json, json};
use statehouse_client::{Client, RespValue, Version};

use super::completions;
use super::output::{Exit, Failure, emit, emit_json, json_bytes, printable};
use super::remote::{Fencing, Remote};

/// Spaces by which an array in an array is indented.
const INDENT: usize = 3;

/// Send any command, such as one that a policy adds
///
/// On a terminal the response is shown with its types. Otherwise strings and numbers are written as
/// they are, one line per element of an array. Exit code 1 if the response is null, 4 if the store
/// or its policy refuses.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  statehouse call INCR visits
  statehouse call SET room/temperature 21.5 PX 60000
  statehouse call META room/temperature --json
  statehouse policy list --json                 # the commands of each policy")]
pub(super) struct Args {
    /// The command
    #[arg(add = ArgValueCompleter::new(completions::commands))]
    command: OsString,

    /// Its arguments: any bytes but NUL
    #[arg(value_name = "WORD", allow_negative_numbers = true)]
    words: Vec<OsString>,

    #[command(flatten)]
    fencing: Fencing,

    /// Print the version of the response, if it has one, on a line of its own before the value
    #[arg(long)]
    with_version: bool,

    #[command(flatten)]
    remote: Remote,
}

pub(super) async fn run(args: Args) -> Result<Exit, Failure> {
    let words = [&args.command].into_iter().chain(&args.words);
    let words = words.map(|word| word.as_bytes());
    let token = args.fencing.token.as_ref();
    let invoke = async |client: &Client| client.invoke(words, token).await;
    let response = args.remote.ask(invoke).await?;
    let version = response.version.as_ref().map(Version::to_string);
    if args.remote.json {
        emit_json(&json!({ "value": in_json(&response.value), "version": version }))?;
    } else {
        let mut out = Vec::new();
        if let Some(version) = version.filter(|_| args.with_version) {
            out.extend(format!("{version}\n").into_bytes());
        }
        match io::stdout().is_terminal() {
            true => out.extend(shown(&response.value, 0).into_bytes()),
            false => write_plain(&response.value, &mut out),
        }
        emit(&out)?;
    }
    Ok(Exit::of(response.value != RespValue::Null))
}

fn in_json(value: &RespValue) -> Json {
    match value {
        RespValue::Error(text) => json!({ "error": text }),
        RespValue::Integer(number) => json!(number),
        // JSON has no infinity; `json!` writes null.
        RespValue::Double(number) => json!(number),
        RespValue::Boolean(is) => json!(is),
        RespValue::Bulk(bytes) | RespValue::Simple(bytes) | RespValue::BigNumber(bytes) => {
            json_bytes(bytes)
        }
        RespValue::Null => Json::Null,
        RespValue::Array(values) | RespValue::Set(values) => values.iter().map(in_json).collect(),
        RespValue::Map(pairs) => {
            let pair = |(name, value): &(RespValue, RespValue)| {
                let mut text = Vec::new();
                write_plain(name, &mut text);
                (printable(text.trim_ascii_end()), in_json(value))
            };
            Json::Object(pairs.iter().map(pair).collect::<Map<_, _>>())
        }
    }
}

/// A value for scripts: bytes unchanged, one line for each.
fn write_plain(value: &RespValue, out: &mut Vec<u8>) {
    match value {
        RespValue::Error(text) => out.extend(text.as_bytes()),
        RespValue::Integer(number) => out.extend(number.to_string().into_bytes()),
        RespValue::Double(number) => out.extend(number.to_string().into_bytes()),
        RespValue::Boolean(is) => out.extend(is.to_string().into_bytes()),
        RespValue::Bulk(bytes) | RespValue::Simple(bytes) | RespValue::BigNumber(bytes) => {
            out.extend(bytes);
        }
        RespValue::Null => {}
        RespValue::Array(values) | RespValue::Set(values) => {
            return values.iter().for_each(|value| write_plain(value, out));
        }
        RespValue::Map(pairs) => {
            return pairs.iter().for_each(|(name, value)| {
                write_plain(name, out);
                write_plain(value, out);
            });
        }
    }
    out.push(b'\n');
}

/// A value for people, with its type.
fn shown(value: &RespValue, indent: usize) -> String {
    match value {
        RespValue::Simple(text) => format!("{}\n", printable(text)),
        RespValue::Error(text) => format!("(error) {text}\n"),
        RespValue::Integer(number) => format!("(integer) {number}\n"),
        RespValue::Double(number) => format!("(double) {number}\n"),
        RespValue::Boolean(is) => format!("({is})\n"),
        RespValue::BigNumber(digits) => format!("(number) {}\n", printable(digits)),
        RespValue::Bulk(bytes) => format!("\"{}\"\n", printable(bytes).replace('"', "\\\"")),
        RespValue::Null => "(null)\n".to_owned(),
        RespValue::Array(values) | RespValue::Set(values) if values.is_empty() => {
            "(empty)\n".to_owned()
        }
        RespValue::Array(values) | RespValue::Set(values) => {
            let lines = values.iter().enumerate().map(|(index, value)| {
                let value = shown(value, indent + INDENT);
                item(index, indent, &format!("{}) {value}", index + 1))
            });
            lines.collect()
        }
        RespValue::Map(pairs) if pairs.is_empty() => "(empty)\n".to_owned(),
        RespValue::Map(pairs) => {
            let lines = pairs.iter().enumerate().map(|(index, (name, value))| {
                let name = shown(name, indent + INDENT);
                let value = shown(value, indent + INDENT);
                item(index, indent, &format!("{} => {value}", name.trim_end()))
            });
            lines.collect()
        }
    }
}

/// An element, indented unless it follows the number of the array that it is in.
fn item(index: usize, indent: usize, text: &str) -> String {
    let before = if index == 0 { 0 } else { indent };
    format!("{:before$}{text}", "")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bulk(text: &'static str) -> RespValue {
        RespValue::Bulk(text.into())
    }

    #[test]
    fn nested_values_are_indented() {
        let inner = RespValue::Array(vec![bulk("a"), RespValue::Integer(2)]);
        let value = RespValue::Array(vec![inner, RespValue::Null, RespValue::Array(vec![])]);
        assert_eq!(
            shown(&value, 0),
            "1) 1) \"a\"\n   2) (integer) 2\n2) (null)\n3) (empty)\n"
        );
        let map = RespValue::Map(vec![(bulk("x"), RespValue::Boolean(true))]);
        assert_eq!(shown(&map, 0), "\"x\" => (true)\n");
        assert_eq!(shown(&bulk("a\"\n"), 0), "\"a\\\"\\n\"\n");
        let simple = RespValue::Simple("a\x1b[2J".into());
        assert_eq!(shown(&simple, 0), "a\\u{1b}[2J\n");
        let number = RespValue::BigNumber("7\x07".into());
        assert_eq!(shown(&number, 0), "(number) 7\\u{7}\n");
    }

    #[test]
    fn plain_values_are_unchanged_bytes() {
        let mut out = Vec::new();
        let value = RespValue::Array(vec![
            RespValue::Bulk(b"\xff\n"[..].into()),
            RespValue::Integer(-1),
            RespValue::Map(vec![(bulk("k"), RespValue::Double(1.5))]),
            RespValue::Simple(b"\t\xff"[..].into()),
        ]);
        write_plain(&value, &mut out);
        assert_eq!(out, b"\xff\n\n-1\nk\n1.5\n\t\xff\n");
    }

    #[test]
    fn values_in_json() {
        let value = RespValue::Map(vec![(
            RespValue::Integer(1),
            RespValue::Set(vec![RespValue::Null, bulk("a")]),
        )]);
        assert_eq!(in_json(&value), json!({ "1": [null, "a"] }));
        assert_eq!(in_json(&RespValue::Double(f64::INFINITY)), Json::Null);
        assert_eq!(in_json(&RespValue::Simple("a\t".into())), json!("a\t"));
        let bytes = RespValue::Simple(b"\xff"[..].into());
        assert_eq!(in_json(&bytes), json!({ "base64": "/w==" }));
    }
}
