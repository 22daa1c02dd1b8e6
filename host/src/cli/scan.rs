//! `statehouse scan`: lists the keys that match a pattern.

use std::ffi::OsString;
use std::io::{self, IsTerminal};
use std::os::unix::ffi::OsStrExt;

use serde_json::{Value as Json, json};
use statehouse_client::Client;

use super::entries::{Entry, Parts, Window, add_meta, duration};
use super::output::{Exit, Failure, emit, json_bytes, printable};
use super::remote::Remote;

/// List the keys that match a pattern
///
/// One key per line. On a terminal, unprintable characters are escaped; otherwise the bytes are
/// unchanged, so keys that contain a newline need -0 or --json. Exit code 1 if no key matches.
///
/// --values and --long read each key after it was listed, and leave out a key that was deleted
/// since.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  statehouse scan
  statehouse scan 'room/*'
  statehouse scan 'sensor-[0-9]?'
  statehouse scan 'room/*' --values
  statehouse scan --long                       # version, bytes, time to live, key
  statehouse scan -0 'old/*' | xargs -0 -n 1 statehouse del")]
pub(super) struct Args {
    /// A glob: * any bytes, ? one byte, [a-z] and [!a-z] one byte of a set, \ escapes the next byte
    #[arg(default_value = "*")]
    pattern: OsString,

    /// End keys with NUL instead of a newline
    #[arg(short = '0', long, conflicts_with_all = ["json", "values", "long"])]
    null: bool,

    /// Write the value after the key and a tab; unprintable characters are escaped in both
    #[arg(long)]
    values: bool,

    /// Write version, length in bytes, time to live and key, separated by tabs; unprintable
    /// characters of the key are escaped
    #[arg(short, long, conflicts_with = "values")]
    long: bool,

    #[command(flatten)]
    remote: Remote,
}

pub(super) async fn run(args: Args) -> Result<Exit, Failure> {
    let print = async |client: &Client| print(client, &args).await;
    args.remote.read(print).await
}

async fn print(client: &Client, args: &Args) -> Result<Exit, Failure> {
    let escape = !args.null && io::stdout().is_terminal();
    let mut scan = client.scan(args.pattern.as_bytes());
    let mut window = Window::new(client);
    let mut exit = Exit::Negative;
    'pages: while let Some(keys) = scan.next_page().await? {
        if let Some(parts) = args.parts() {
            let mut rest = &keys[..];
            while !rest.is_empty() {
                let mut out = Vec::new();
                for entry in window.read(&mut rest, parts).await? {
                    exit = Exit::Done;
                    let line = match args.remote.json {
                        true => in_json(&entry).to_string(),
                        false => in_columns(&entry),
                    };
                    out.extend(line.into_bytes());
                    out.push(b'\n');
                }
                if !emit(&out)? {
                    break 'pages;
                }
            }
            continue;
        }
        let mut out = Vec::new();
        for key in &keys {
            exit = Exit::Done;
            if args.remote.json {
                out.extend(json!({ "key": json_bytes(key) }).to_string().into_bytes());
            } else if escape {
                out.extend(printable(key).into_bytes());
            } else {
                out.extend(key);
            }
            out.push(if args.null { 0 } else { b'\n' });
        }
        if !emit(&out)? {
            break;
        }
    }
    Ok(exit)
}

impl Args {
    /// The parts of each entry to read; none if only keys are listed.
    fn parts(&self) -> Option<Parts> {
        match (self.values, self.long) {
            (true, _) => Some(Parts::Value),
            (_, true) => Some(Parts::Meta),
            _ => None,
        }
    }
}

fn in_json(entry: &Entry) -> Json {
    let mut object = entry.in_json();
    if let Some(meta) = &entry.meta {
        add_meta(&mut object, meta);
    }
    object
}

fn in_columns(entry: &Entry) -> String {
    let key = printable(&entry.key);
    match (&entry.value, &entry.meta) {
        (Some(value), _) => format!("{key}\t{}", printable(&value.bytes)),
        (_, Some(meta)) => {
            let ttl = meta.ttl.map_or("-".to_owned(), duration);
            format!("{}\t{}\t{ttl}\t{key}", meta.version, meta.bytes)
        }
        _ => key,
    }
}
