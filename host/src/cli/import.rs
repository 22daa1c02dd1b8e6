//! `statehouse import`: sets the keys that `statehouse export` wrote.

use std::fs::File;
use std::io::{self, BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::Deserialize;
use serde::de::IgnoredAny;
use serde_json::{Map, Value as Json};
use statehouse_client::{Client, Condition, Error, PACKET_BYTES_MAX, SetOptions, Version};
use statehouse_core::clock::wall_ms;
use statehouse_protocol::WrittenBy;

use super::data;
use super::entries::{IN_FLIGHT, in_order};
use super::output::{Exit, Failure, emit_json, notice, one_line, printable};
use super::progress::Progress;
use super::remote::Remote;
use crate::past;

/// How long the broker keeps the session of an interrupted import.
const INTERRUPTION: Duration = Duration::from_secs(60);

/// Longest line. Base 64 needs 4 characters for 3 bytes, and JSON up to 6 for a control character.
const LINE_BYTES_MAX: u64 = 6 * PACKET_BYTES_MAX as u64;

/// Lines are sent together up to these bytes, because all of them share the time for a response
/// over a slow link.
const BATCH_BYTES: usize = 256 << 10;

/// Set the keys that `statehouse export` wrote
///
/// Keys get new versions. A key keeps its expiry and its fencing token; a key that has expired
/// since is left out. The time that a key has left is by the clock of this machine: if that differs
/// from the store's, keys end earlier or later by the difference. Importing the same lines again
/// does no harm. Blank lines are skipped. Lines are sent in batches: of a pipe that stays open,
/// none is sent before 64 lines or 256 KiB have arrived, or the input has ended.
///
/// After an error, all lines before the one that it names are imported: continue with --skip.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  statehouse import all.jsonl
  zcat plant.jsonl.gz | statehouse import
  statehouse import all.jsonl --nx              # leaves existing keys as they are
  statehouse import all.jsonl --skip 1200       # continues after an error")]
pub(super) struct Args {
    /// The file, or standard input if it is absent or `-`
    file: Option<PathBuf>,

    /// Leave out this many lines
    #[arg(long, value_name = "LINES", default_value_t = 0)]
    skip: u64,

    /// Leave existing keys as they are
    #[arg(long)]
    nx: bool,

    #[command(flatten)]
    remote: Remote,
}

#[derive(Debug, PartialEq)]
struct Line {
    key: Vec<u8>,
    value: Vec<u8>,
    expires_ms: Option<u64>,
    fence: Option<Version>,
}

#[derive(Default)]
struct Counts {
    lines: u64,
    set: u64,
    expired: u64,
    existing: u64,
}

pub(super) async fn run(args: Args) -> Result<Exit, Failure> {
    let input = open(args.path())?;
    let import = async |client: &Client| import(client, &args, input).await;
    let counts = args.remote.ask_for(INTERRUPTION, import).await?;
    report(&args, &counts)
}

async fn import(
    client: &Client,
    args: &Args,
    (mut input, bytes): (Box<dyn BufRead>, Option<u64>),
) -> Result<Counts, Failure> {
    let mut counts = Counts::default();
    let mut progress = Progress::new();
    let mut bytes_read = 0;
    loop {
        let (mut tasks, mut batch_bytes) = (Vec::with_capacity(IN_FLIGHT), 0);
        let (mut is_end, mut failed) = (false, None);
        while tasks.len() < IN_FLIGHT && batch_bytes < BATCH_BYTES {
            let number = counts.lines + tasks.len() as u64 + 1;
            let text = match next_line(&mut input) {
                Ok(Some(text)) => text,
                Ok(None) => {
                    is_end = true;
                    break;
                }
                Err(error) => {
                    failed = Some(Failure::transport(cannot_read(args.path(), &error)));
                    break;
                }
            };
            bytes_read += text.len() as u64;
            if number <= args.skip {
                counts.lines += 1;
                continue;
            }
            match line_of(&text) {
                Ok(line) => {
                    batch_bytes += text.len();
                    let (client, nx) = (client.clone(), args.nx);
                    tasks.push(tokio::spawn(async move { set(&client, line, nx).await }));
                }
                Err(error) => {
                    failed = Some(error);
                    break;
                }
            }
        }
        for result in in_order(tasks).await {
            match result {
                Ok(done) => done.count(&mut counts),
                Err(error) => return Err(resumable(error, counts.lines)),
            }
        }
        if let Some(error) = failed {
            return Err(resumable(error, counts.lines));
        }
        if is_end {
            break;
        }
        let shown = || format!("{} imported", data::count(counts.set, "key"));
        match bytes {
            Some(bytes) => progress.share(bytes_read, bytes, shown),
            None => progress.text(shown),
        }
    }
    progress.clear();
    Ok(counts)
}

fn report(args: &Args, counts: &Counts) -> Result<Exit, Failure> {
    if args.remote.json {
        emit_json(&serde_json::json!({
            "imported": counts.set,
            "expired": counts.expired,
            "existing": counts.existing,
        }))?;
        return Ok(Exit::Done);
    }
    let mut text = format!("{} imported", data::count(counts.set, "key"));
    if counts.expired > 0 {
        text.push_str(&format!(", {} expired since the export", counts.expired));
    }
    if counts.existing > 0 {
        text.push_str(&format!(", {} existed already", counts.existing));
    }
    notice(&text);
    Ok(Exit::Done)
}

/// What became of a line.
enum Done {
    Set,
    Expired,
    Existing,
    Blank,
}

impl Done {
    fn count(&self, counts: &mut Counts) {
        counts.lines += 1;
        match self {
            Self::Set => counts.set += 1,
            Self::Expired => counts.expired += 1,
            Self::Existing => counts.existing += 1,
            Self::Blank => {}
        }
    }
}

/// Sets the key of a line; none is that of a blank line.
async fn set(client: &Client, line: Option<Line>, nx: bool) -> Result<Done, Failure> {
    let Some(line) = line else {
        return Ok(Done::Blank);
    };
    let left_ms = line.expires_ms.map(|ms| ms.saturating_sub(wall_ms()));
    if left_ms == Some(0) {
        return Ok(Done::Expired);
    }
    let options = SetOptions {
        condition: match nx {
            true => Condition::IfAbsent,
            false => Condition::Always,
        },
        expiry: left_ms.map(Duration::from_millis),
        fencing_token: line.fence,
    };
    match client.set(&line.key, &line.value, options).await {
        Ok(set) if set.applied => Ok(Done::Set),
        Ok(_) => Ok(Done::Existing),
        // A fence or a quota is checked before the condition.
        Err(error @ Error::Refused(_)) if nx => match client.get(&line.key).await {
            Ok(Some(_)) => Ok(Done::Existing),
            _ => Err(of_key(error, &line.key)),
        },
        Err(error) => Err(of_key(error, &line.key)),
    }
}

/// The failure for the key of a line: the token of a fenced key must be in the line.
fn of_key(error: Error, key: &[u8]) -> Failure {
    match &error {
        Error::Refused(text) if text.starts_with("a fencing token is required") => {
            let why = one_line(&error.to_string());
            Failure::refused(format!("{}: {why}", printable(key)))
                .with("Add \"fence\" to the line: the version of the lock that protects the key")
        }
        _ => error.into(),
    }
}

fn resumable(error: Failure, lines: u64) -> Failure {
    let at = lines + 1;
    error.with(&format!(
        "This is line {at}; all lines before it are imported. Continue with --skip {lines}, or behind this line with --skip {at}"
    ))
}

impl Args {
    /// The file; none for standard input.
    fn path(&self) -> Option<&Path> {
        self.file.as_deref().filter(|path| *path != Path::new("-"))
    }
}

/// The input, and its length if that is known.
fn open(path: Option<&Path>) -> Result<(Box<dyn BufRead>, Option<u64>), Failure> {
    let Some(path) = path else {
        return Ok((Box::new(BufReader::new(io::stdin())), None));
    };
    let failed = |error: io::Error| Failure::usage(cannot_read(Some(path), &error));
    let file = File::open(path).map_err(failed)?;
    let about = file.metadata().map_err(failed)?;
    if about.is_dir() {
        return Err(failed(io::ErrorKind::IsADirectory.into()));
    }
    // A pipe or a device has no length.
    let bytes = about.is_file().then_some(about.len());
    Ok((Box::new(BufReader::new(file)), bytes))
}

fn cannot_read(path: Option<&Path>, error: &io::Error) -> String {
    match path {
        Some(path) => format!("cannot read {}: {error}", path.display()),
        None => format!("cannot read standard input: {error}"),
    }
}

/// The next line, or its first [`LINE_BYTES_MAX`] bytes.
fn next_line(input: &mut dyn BufRead) -> io::Result<Option<Vec<u8>>> {
    let mut text = Vec::new();
    input.take(LINE_BYTES_MAX).read_until(b'\n', &mut text)?;
    Ok((!text.is_empty()).then_some(text))
}

/// The key of a line; none of a blank line.
fn line_of(text: &[u8]) -> Result<Option<Line>, Failure> {
    if text.len() as u64 == LINE_BYTES_MAX {
        return Err(Failure::usage(format!(
            "the line is longer than {LINE_BYTES_MAX} bytes, more than any key and value need"
        )));
    }
    if text.trim_ascii().is_empty() {
        return Ok(None);
    }
    let invalid = |why: String| Failure::usage(format!("the line is not one of an export: {why}"));
    // An error at its end must not have the position of the next line.
    let fields = serde_json::from_slice(text.trim_ascii_end());
    let fields: Fields = fields.map_err(|it| invalid(why_not_json(&it)))?;
    parse(&fields).map(Some).map_err(invalid)
}

/// The error with its column alone: the caller names the line.
fn why_not_json(error: &serde_json::Error) -> String {
    let (text, column) = (error.to_string(), error.column());
    let place = format!(" at line {} column {column}", error.line());
    match text.strip_suffix(&place) {
        Some(what) => format!("{what} at column {column}"),
        None => text,
    }
}

/// The fields of a line, each at most once.
#[derive(Deserialize)]
#[serde(expecting = "an object with `key` and `value`")]
struct Fields {
    key: Option<Json>,
    value: Option<Json>,
    #[serde(rename = "version")]
    _version: Option<IgnoredAny>,
    expires_ms: Option<Json>,
    fence: Option<Json>,
    /// A later version may export more, which must not be lost silently.
    #[serde(flatten)]
    unknown: Map<String, Json>,
}

fn parse(fields: &Fields) -> Result<Line, String> {
    if let Some(name) = fields.unknown.keys().next() {
        let advice = WrittenBy(None);
        return Err(format!(
            "its field `{name}` is unknown; {advice}, or remove the field"
        ));
    }
    let expires_ms = fields.expires_ms.as_ref().map(|ms| {
        ms.as_u64()
            .ok_or("`expires_ms` is not a whole number of milliseconds")
    });
    let fence = fields.fence.as_ref().map(|text| {
        let text = text.as_str().unwrap_or_default();
        text.parse::<Version>()
            .map_err(|_| "`fence` is not a version")
    });
    Ok(Line {
        key: bytes_of(fields.key.as_ref(), "key")?,
        value: bytes_of(fields.value.as_ref(), "value")?,
        expires_ms: expires_ms.transpose()?,
        fence: fence.transpose()?,
    })
}

fn bytes_of(field: Option<&Json>, name: &str) -> Result<Vec<u8>, String> {
    let field = field.ok_or(format!("it has no `{name}`"))?;
    let is_alone = field.as_object().is_none_or(|it| it.len() == 1);
    let bytes = past::bytes_of(field).filter(|_| is_alone);
    bytes.ok_or(format!(
        "`{name}` is neither a string nor {{\"base64\": ...}}"
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line(text: &str) -> Result<Line, String> {
        let line = line_of(text.as_bytes());
        line.map(Option::unwrap)
            .map_err(|failure| failure.message().to_owned())
    }

    /// Regression: the progress showed 100 % for `import <(command)`.
    #[test]
    fn only_a_file_has_a_length() {
        let length = |path: &str| open(Some(Path::new(path))).unwrap().1;
        assert_eq!(length("/dev/null"), None);
        assert!(length(concat!(env!("CARGO_MANIFEST_DIR"), "/Cargo.toml")).is_some());
    }

    #[test]
    fn lines_of_an_export_are_read() {
        let plain = line(r#"{"key":"k","value":{"base64":"/wA="},"version":"1:2:n"}"#).unwrap();
        assert_eq!((plain.key, plain.value), (b"k".to_vec(), vec![0xff, 0]));
        let full = r#"{"key":"k","value":"","expires_ms":1500,"fence":"1:2:n"}"#;
        let full = line(full).unwrap();
        assert_eq!(full.expires_ms, Some(1500));
        assert_eq!(full.fence, Some("1:2:n".parse().unwrap()));
    }

    /// Regression: each error named line 1, and then the line of the file.
    #[test]
    fn line_that_is_not_json_names_the_column_alone() {
        for (text, says) in [
            ("what\n", "expected value at column 1"),
            ("{\"key\":\n", "EOF while parsing a value at column 7"),
        ] {
            let failure = line_of(text.as_bytes()).unwrap_err();
            assert!(failure.message().ends_with(says), "{failure:?}");
        }
    }

    #[test]
    fn other_lines_name_the_field() {
        for (text, named) in [
            (r#"{"value":"v"}"#, "`key`"),
            (r#"{"key":"k"}"#, "`value`"),
            (r#"{"key":1,"value":"v"}"#, "`key`"),
            (r#"{"key":"k","value":{"base64":"?"}}"#, "`value`"),
            (
                r#"{"key":"k","value":"v","expires_ms":"soon"}"#,
                "`expires_ms`",
            ),
            (r#"{"key":"k","value":"v","fence":"soon"}"#, "`fence`"),
            (r#"{"key":"k","value":"v","owner":"press-4"}"#, "`owner`"),
            ("[]", "`key`"),
            ("7", "`key`"),
            // Regression: the last one was imported.
            (r#"{"key":"a","key":"b","value":"v"}"#, "`key`"),
            (r#"{"key":"k","value":"v","value":"w"}"#, "`value`"),
            (
                r#"{"key":"k","value":"v","fence":"1:2:n","fence":"1:3:n"}"#,
                "`fence`",
            ),
            (r#"{"key":"k","value":{"base64":"/w==","x":1}}"#, "`value`"),
        ] {
            let error = line(text).unwrap_err();
            assert!(error.contains(named), "{text}: {error}");
        }
    }
}
