//! `statehouse export`: writes keys as JSON lines, which `statehouse import` reads.

use std::ffi::OsString;
use std::fmt::Write as _;
use std::io::{self, IsTerminal};
use std::os::unix::ffi::OsStrExt;

use serde_json::Value as Json;
use statehouse_client::{Client, Error};

use super::data;
use super::entries::{Entry, Parts, Unread, Window};
use super::output::{Exit, Failure, emit, is_shown, notice};
use super::progress::Progress;
use super::remote::Remote;

/// What stores without META answer (the protocol, section 3).
const WITHOUT_META: [&str; 2] = ["unknown command", "syntax error"];

/// Write keys and values as JSON, one object per line
///
/// Each line has `key`, `value` and `version`, and `expires_ms` (milliseconds since 1970) and
/// `fence` if the key has them. Bytes that are not UTF-8 are written as {"base64": ...}. Keys are
/// in byte order. The keys are read one after the other: use `statehouse snapshot` for a consistent
/// copy. A store without META does not tell expiries and fences: they are left out, with a notice.
///
/// If the export fails, all keys before the failure are written, and the error names the --after
/// with which the export continues. If the store refuses a key, or the response cannot be read, the
/// error also names the key, and the --after that leaves out only this key. If the output cannot be
/// written, its last line may be incomplete: remove it before the export continues. Some keys may
/// then be written twice, which does no harm.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  statehouse export > all.jsonl
  statehouse export 'plant/*' | gzip > plant.jsonl.gz
  statehouse export --after plant/7 >> all.jsonl        # continues after an error
  statehouse export | jq -r 'select(.expires_ms) | .key'")]
pub(super) struct Args {
    /// A glob: * any bytes, ? one byte, [a-z] and [!a-z] one byte of a set, \ escapes the next byte
    #[arg(default_value = "*")]
    pattern: OsString,

    /// Write only keys that come after this one in byte order
    #[arg(long, value_name = "KEY", allow_hyphen_values = true)]
    after: Option<OsString>,

    #[command(flatten)]
    remote: Remote,
}

pub(super) async fn run(args: Args) -> Result<Exit, Failure> {
    let export = async |client: &Client| export(client, &args).await;
    let count = args.remote.read(export).await?;
    notice(&format!("{} written", data::count(count, "key")));
    Ok(Exit::Done)
}

/// Writes all keys. Returns their number.
async fn export(client: &Client, args: &Args) -> Result<u64, Failure> {
    let mut scan = client.scan(args.pattern.as_bytes());
    let (mut window, mut parts) = (Window::new(client), None);
    let mut last = args.after.as_ref().map(|key| key.as_bytes().to_vec());
    let mut count = 0;
    // Keys that are printed on the terminal show the progress themselves.
    let mut progress = (!io::stdout().is_terminal()).then(Progress::new);
    while let Some(mut keys) = scan
        .next_page()
        .await
        .map_err(|error| resumable(error.into(), count, last.as_deref()))?
    {
        keys.retain(|key| last.as_ref().is_none_or(|last| key[..] > last[..]));
        let Some(key) = keys.first() else { continue };
        let parts = match parts {
            Some(parts) => parts,
            None => *parts.insert(known_parts(client, key).await),
        };
        let mut rest = &keys[..];
        while !rest.is_empty() {
            let (entries, unread) = window.read_front(&mut rest, parts).await;
            write(&entries).map_err(|error| resumable(error, count, last.as_deref()))?;
            count += entries.len() as u64;
            if let Some(entry) = entries.last() {
                last = Some(entry.key.to_vec());
            }
            if let Some(mut unread) = unread {
                unread.failure = resumable(unread.failure, count, last.as_deref());
                return Err(passable(unread));
            }
            if let Some(progress) = &mut progress {
                progress.text(|| format!("{} written", data::count(count, "key")));
            }
        }
    }
    Ok(count)
}

/// The parts of keys that the store tells, by a question about this one. Any other failure is one
/// of this key, and not a reason to leave out the expiries of all keys.
async fn known_parts(client: &Client, key: &[u8]) -> Parts {
    match client.meta(key).await {
        Err(Error::Refused(why)) if WITHOUT_META.iter().any(|it| why.starts_with(it)) => {
            notice(&format!(
                "this store does not tell when keys expire, so expiries and fencing tokens are left out: {why}"
            ));
            Parts::Value
        }
        _ => Parts::Both,
    }
}

fn write(entries: &[Entry]) -> Result<(), Failure> {
    let mut out = Vec::new();
    for entry in entries {
        out.extend(line(entry).to_string().into_bytes());
        out.push(b'\n');
    }
    let failure = match emit(&out) {
        Ok(true) => return Ok(()),
        Ok(false) => {
            Failure::transport("the reader of the output ended before all keys were written to it")
        }
        Err(failure) => failure,
    };
    Err(failure.with("The last line of the output may be incomplete: remove it first"))
}

fn resumable(error: Failure, count: u64, last: Option<&[u8]>) -> Failure {
    match last {
        None => error,
        Some(key) => error.with(&format!(
            "{} written; continue with --after={}",
            data::count(count, "key"),
            shell_word(key)
        )),
    }
}

/// The failure to read a key. If a repetition fails again, the failure also names the --after that
/// continues behind the key.
fn passable(unread: Unread) -> Failure {
    let Unread {
        key,
        failure,
        is_of_key,
    } = unread;
    match is_of_key && !key.contains(&0) {
        true => failure.with(&format!(
            "--after={} leaves out only the key that failed",
            shell_word(&key)
        )),
        false => failure,
    }
}

/// The key as a word of a shell, up to its first NUL, which a word cannot contain. A prefix of the
/// last key only repeats lines.
fn shell_word(key: &[u8]) -> String {
    let key = key.split(|byte| *byte == 0).next().unwrap_or_default();
    let (mut word, mut escaped) = (String::new(), false);
    for chunk in key.utf8_chunks() {
        for c in chunk.valid().chars() {
            if !is_shown(c) || matches!(c, '\\' | '\'') {
                escaped = true;
                escape(c.encode_utf8(&mut [0; 4]).as_bytes(), &mut word);
            } else {
                word.push(c);
            }
        }
        escaped |= !chunk.invalid().is_empty();
        escape(chunk.invalid(), &mut word);
    }
    let dollar = if escaped { "$" } else { "" };
    format!("{dollar}'{word}'")
}

fn escape(bytes: &[u8], word: &mut String) {
    for byte in bytes {
        // Writing to a String cannot fail.
        let _ = write!(word, "\\{byte:03o}");
    }
}

fn line(entry: &Entry) -> Json {
    let mut object = entry.in_json();
    if let Some(meta) = &entry.meta {
        if let Some(expires_ms) = meta.expires_ms {
            object["expires_ms"] = expires_ms.into();
        }
        if let Some(fence) = &meta.fence {
            object["fence"] = fence.to_string().into();
        }
    }
    object
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    #[test]
    fn refused_key_is_left_out_by_its_own_after() {
        let passed = |is_of_key, key: &'static [u8]| {
            let unread = Unread {
                key: key.into(),
                failure: Failure::refused("no"),
                is_of_key,
            };
            passable(unread).message().to_owned()
        };
        let advice = "no. --after='bad' leaves out only the key that failed";
        assert_eq!(passed(true, b"bad"), advice);
        // A prefix of the key would lead to the key again.
        assert_eq!(passed(true, b"ba\0d"), "no");
        // A repetition may work.
        assert_eq!(passed(false, b"bad"), "no");
    }

    #[test]
    fn shell_reads_the_last_key_unchanged() {
        assert_eq!(shell_word("plant/7°".as_bytes()), "'plant/7°'");
        for key in [
            &b"a\nx"[..],
            b"it's",
            b"a\\1",
            b"\xff7",
            b"$(id)",
            b"\x1b[2J",
            b"",
            "\u{202e}gpj".as_bytes(),
        ] {
            let word = shell_word(key);
            assert!(word.chars().all(is_shown), "{word:?}");
            let script = format!("printf %s {word}");
            let printed = Command::new("bash").args(["-c", &script]).output().unwrap();
            assert_eq!(printed.stdout, key, "{word}");
        }
        assert_eq!(shell_word(b"a\0b"), "'a'");
    }
}
