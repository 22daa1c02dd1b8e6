//! `statehouse watch`: prints changes of keys as they happen.

use std::collections::HashMap;
use std::ffi::OsString;
use std::os::unix::ffi::OsStrExt;
use std::time::Duration;

use bytes::Bytes;
use serde_json::{Value as Json, json};
use statehouse_client::{Client, Error, GapCause, Version, Watch, WatchEvent};
use statehouse_protocol::pattern;
use tokio::sync::mpsc;

use super::output::{Exit, Failure, emit_either, json_bytes, notice, printable};
use super::remote::Remote;

/// How long the broker keeps the session of an interrupted watch.
const INTERRUPTION: Duration = Duration::from_secs(60);

/// The characters of a SCAN pattern.
const SPECIAL: &[u8] = b"*?[\\";

/// How often to look whether the connection is lost.
const CONNECTION_CHECK: Duration = Duration::from_secs(1);

/// Capacity of the channel from the watches to the printer. It is small, since the client limits
/// queued events by bytes.
const EVENTS_MAX: usize = 16;

/// Print changes of keys as they happen
///
/// One line per change, separated by tabs: the event, the key, the version and, for a set, the
/// value. --initial prints the present values before all changes, as the event `present`.
/// Unprintable characters are escaped. A line `gap` means that changes may be missing before
/// it, because the connection was lost for a while or the output was read too slowly. Of a prefix,
/// only keys that this client may read are reported. Ends on Ctrl-C, after --count changes, or if
/// the store refuses the login after a lost connection.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  statehouse watch room/temperature
  statehouse watch room/temperature room/humidity --json
  statehouse watch 'room/*' --initial
  statehouse watch 'room/*' --from 001700000000000:00001:StateStore
  statehouse watch start --count 1 && echo \"it begins\"")]
pub(super) struct Args {
    /// The keys: any bytes. A * at the end stands for all keys that start with the rest
    #[arg(required_unless_present = "prefix", value_name = "KEY")]
    keys: Vec<OsString>,

    /// Watch all keys that start with these bytes
    #[arg(long, value_name = "PREFIX")]
    prefix: Vec<OsString>,

    /// Watch keys as they are written, also if they contain * ? [ or \
    #[arg(long)]
    exact: bool,

    /// First print the changes after this version, which an earlier watch has printed
    #[arg(long, value_name = "VERSION", conflicts_with = "initial")]
    from: Option<Version>,

    /// First print the present values
    #[arg(long)]
    initial: bool,

    /// Exit after this many changes
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    count: Option<u64>,

    #[command(flatten)]
    remote: Remote,
}

/// A key or a prefix.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Watched {
    Key(Vec<u8>),
    Prefix(Vec<u8>),
}

impl Watched {
    /// The meaning of an argument: `prefix*`, or a key.
    fn parse(argument: Vec<u8>) -> Result<Self, Failure> {
        let is_special = |byte: &u8| SPECIAL.contains(byte);
        match argument.iter().position(is_special) {
            None => Ok(Self::Key(argument)),
            Some(at) if argument[at..] == *b"*" => Ok(Self::Prefix(argument[..at].to_vec())),
            Some(_) => Err(Failure::usage(format!(
                "{} cannot be watched as a pattern: the only pattern is a prefix, with one * at the end; for a key with the characters * ? [ or \\ use --exact",
                printable(&argument)
            ))),
        }
    }

    async fn begin(&self, client: &Client, from: Option<&Version>) -> Result<Watch, Error> {
        match (self, from) {
            (Self::Key(key), None) => client.watch(key).await,
            (Self::Key(key), Some(from)) => client.watch_from(key, from).await,
            (Self::Prefix(prefix), None) => client.watch_prefix(prefix).await,
            (Self::Prefix(prefix), Some(from)) => client.watch_prefix_from(prefix, from).await,
        }
    }

    /// A pattern that matches the keys.
    fn pattern(&self) -> Vec<u8> {
        let mut pattern = Vec::new();
        match self {
            Self::Key(key) => pattern::escape(&mut pattern, key),
            Self::Prefix(prefix) => {
                pattern::escape(&mut pattern, prefix);
                pattern.push(b'*');
            }
        }
        pattern
    }
}

/// The versions of the present values that were printed. A change up to the version of its key is
/// part of the printed value.
#[derive(Default)]
struct Present {
    versions: HashMap<Bytes, Version>,
    last: Option<Version>,
}

impl Present {
    fn note(&mut self, key: Bytes, version: Version) {
        self.last = self.last.take().max(Some(version.clone()));
        self.versions.insert(key, version);
    }

    /// Whether this change was printed as a present value.
    fn includes(&mut self, event: &WatchEvent) -> bool {
        let (WatchEvent::Set { key, version, .. } | WatchEvent::Deleted { key, version }) = event
        else {
            return false;
        };
        // Versions rise, so no later change can be part of any printed value.
        if Some(version) > self.last.as_ref() {
            self.versions.clear();
        }
        self.versions
            .get(key)
            .is_some_and(|printed| version <= printed)
    }
}

impl Args {
    fn watched(&self) -> Result<Vec<Watched>, Failure> {
        let keys = self.keys.iter().map(|key| key.as_bytes().to_vec());
        let keys = keys.map(|key| match self.exact {
            true => Ok(Watched::Key(key)),
            false => Watched::parse(key),
        });
        let prefixes = self.prefix.iter().map(|it| it.as_bytes().to_vec());
        let prefixes = prefixes.map(|prefix| Ok(Watched::Prefix(prefix)));
        keys.chain(prefixes).collect()
    }
}

pub(super) async fn run(args: Args) -> Result<Exit, Failure> {
    let all = args.watched()?;
    let watch = async |client: &Client| watch(client, &args, &all).await;
    args.remote.ask_for(INTERRUPTION, watch).await
}

async fn watch(client: &Client, args: &Args, all: &[Watched]) -> Result<Exit, Failure> {
    let (events, mut changes) = mpsc::channel(EVENTS_MAX);
    let mut present = Vec::new();
    for (at, watched) in all.iter().enumerate() {
        let mut watch = watched.begin(client, args.from.as_ref()).await?;
        let events = events.clone();
        tokio::spawn(async move {
            // Ends when the printer drops the receiver.
            while (events.send((at, watch.next().await)).await).is_ok() {}
        });
        present.push(Present::default());
    }
    notice(&watching(all));
    if args.initial {
        for (watched, present) in all.iter().zip(&mut present) {
            if !print_present(args, client, watched, present).await? {
                return Ok(Exit::Done);
            }
        }
    }

    let interrupted = tokio::signal::ctrl_c();
    tokio::pin!(interrupted);
    let mut connection = tokio::time::interval(CONNECTION_CHECK);
    let mut is_lost = false;
    let mut left = args.count;
    while left != Some(0) {
        let (at, event) = tokio::select! {
            biased;
            _ = &mut interrupted => break,
            change = changes.recv() => match change {
                Some(change) => change,
                None => break,
            },
            _ = connection.tick() => {
                is_lost = report_loss(client, is_lost)?;
                continue;
            }
        };
        let event = match event {
            Ok(event) => event,
            Err(Error::Protocol(why)) => {
                notice(&format!("a notification cannot be read: {why}"));
                continue;
            }
            Err(error) => return Err(error.into()),
        };
        if present[at].includes(&event) {
            continue;
        }
        let printed = emit_either(
            args.remote.json,
            || in_json(&all[at], &event),
            || line(&all[at], &event),
        )?;
        if !printed {
            break;
        }
        if !matches!(event, WatchEvent::Gap(_)) {
            left = left.map(|left| left - 1);
        }
    }
    Ok(Exit::Done)
}

/// Says once that the connection is lost. Fails if the store refuses another one.
fn report_loss(client: &Client, was_lost: bool) -> Result<bool, Failure> {
    let lost = client.disconnected();
    let is_lost = lost.is_some();
    match lost {
        Some(error @ Error::Denied(_)) => return Err(error.into()),
        Some(error) if !was_lost => notice(&format!("{error}. Trying to connect again")),
        None if was_lost => notice("connected again"),
        _ => {}
    }
    Ok(is_lost)
}

/// Prints the present values of a watch. Returns false if nothing reads the output any more.
async fn print_present(
    args: &Args,
    client: &Client,
    watched: &Watched,
    present: &mut Present,
) -> Result<bool, Failure> {
    let mut scan = client.scan(watched.pattern());
    while let Some(keys) = scan.next_page().await? {
        for key in keys {
            // It may have been deleted since.
            let Some(value) = client.get(&key).await? else {
                continue;
            };
            let version = &value.version;
            let printed = emit_either(
                args.remote.json,
                || {
                    json!({
                        "event": "present",
                        "key": json_bytes(&key),
                        "value": json_bytes(&value.bytes),
                        "version": version.to_string(),
                    })
                },
                || {
                    let (key, value) = (printable(&key), printable(&value.bytes));
                    format!("present\t{key}\t{version}\t{value}\n")
                },
            )?;
            if !printed {
                return Ok(false);
            }
            present.note(key, value.version);
        }
    }
    Ok(true)
}

fn watching(all: &[Watched]) -> String {
    let prefixes = all.iter().filter(|it| matches!(it, Watched::Prefix(_)));
    let prefixes = prefixes.count();
    let counted = |count: usize, one: &str, more: &str| match count {
        0 => None,
        1 => Some(format!("1 {one}")),
        count => Some(format!("{count} {more}")),
    };
    let counts = [
        counted(all.len() - prefixes, "key", "keys"),
        counted(prefixes, "prefix", "prefixes"),
    ];
    let counts: Vec<String> = counts.into_iter().flatten().collect();
    format!("watching {}; Ctrl-C ends it", counts.join(" and "))
}

fn line(watched: &Watched, event: &WatchEvent) -> String {
    let watched = match watched {
        Watched::Key(key) => printable(key),
        Watched::Prefix(prefix) => format!("{}*", printable(prefix)),
    };
    match event {
        WatchEvent::Set {
            key,
            value,
            version,
        } => {
            format!("set\t{}\t{version}\t{}\n", printable(key), printable(value))
        }
        WatchEvent::Deleted { key, version } => {
            format!("deleted\t{}\t{version}\n", printable(key))
        }
        WatchEvent::Gap(cause) => format!("gap\t{watched}\t{}\n", cause_name(*cause)),
        // A later version of the client may have other events.
        _ => format!("unknown\t{watched}\n"),
    }
}

fn in_json(watched: &Watched, event: &WatchEvent) -> Json {
    let (kind, of) = match watched {
        Watched::Key(key) => ("key", json_bytes(key)),
        Watched::Prefix(prefix) => ("prefix", json_bytes(prefix)),
    };
    match event {
        WatchEvent::Set {
            key,
            value,
            version,
        } => json!({
            "event": "set",
            "key": json_bytes(key),
            "value": json_bytes(value),
            "version": version.to_string(),
        }),
        WatchEvent::Deleted { key, version } => json!({
            "event": "deleted",
            "key": json_bytes(key),
            "version": version.to_string(),
        }),
        WatchEvent::Gap(cause) => json!({
            "event": "gap",
            kind: of,
            "cause": cause_name(*cause),
        }),
        _ => json!({ "event": "unknown", kind: of }),
    }
}

fn cause_name(cause: GapCause) -> &'static str {
    match cause {
        GapCause::Reconnected => "reconnected",
        GapCause::Overflow => "overflow",
        _ => "unknown",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_event_is_one_line() {
        let version: Version = "7:1:StateStore".parse().unwrap();
        let key = Watched::Key(b"k".to_vec());
        let set = |key: &'static str| WatchEvent::Set {
            key: key.into(),
            value: "a\nb\t".into(),
            version: version.clone(),
        };
        assert_eq!(
            line(&key, &set("k\n")),
            "set\tk\\n\t000000000000007:00001:StateStore\ta\\nb\\t\n"
        );
        assert_eq!(
            in_json(&key, &set("k")).to_string(),
            r#"{"event":"set","key":"k","value":"a\nb\t","version":"000000000000007:00001:StateStore"}"#
        );
        let gap = WatchEvent::Gap(GapCause::Overflow);
        assert_eq!(line(&key, &gap), "gap\tk\toverflow\n");
        let prefix = Watched::Prefix(b"plant/".to_vec());
        assert_eq!(line(&prefix, &gap), "gap\tplant/*\toverflow\n");
        assert_eq!(
            in_json(&prefix, &gap).to_string(),
            r#"{"cause":"overflow","event":"gap","prefix":"plant/"}"#
        );
    }

    #[test]
    fn star_at_the_end_makes_a_prefix() {
        let parse = |argument: &str| Watched::parse(argument.as_bytes().to_vec()).ok();
        assert_eq!(parse("plant/*"), Some(Watched::Prefix(b"plant/".to_vec())));
        assert_eq!(parse("*"), Some(Watched::Prefix(Vec::new())));
        assert_eq!(parse("plant"), Some(Watched::Key(b"plant".to_vec())));
        for refused in ["pl*nt", "plant/**", "plant?", "[a]", "plant\\*"] {
            assert_eq!(parse(refused), None, "{refused}");
        }
    }

    #[test]
    fn change_that_a_printed_value_includes_is_not_printed() {
        let version = |counter: u32| -> Version { format!("1:{counter}:n").parse().unwrap() };
        let change = |key: &'static str, counter| WatchEvent::Deleted {
            key: key.into(),
            version: version(counter),
        };
        let mut present = Present::default();
        assert!(!present.includes(&change("a", 1)));
        present.note("a".into(), version(2));
        present.note("b".into(), version(4));
        assert!(present.includes(&change("a", 2)) && !present.includes(&change("a", 3)));
        assert!(present.includes(&change("b", 3)) && !present.includes(&change("c", 3)));
        assert!(!present.includes(&change("b", 5)));
        assert!(present.versions.is_empty());
    }

    #[test]
    fn pattern_of_a_watch_matches_its_keys_only() {
        let prefix = Watched::Prefix(b"a*[".to_vec());
        assert_eq!(prefix.pattern(), b"a\\*\\[*");
        assert_eq!(Watched::Key(b"a?".to_vec()).pattern(), b"a\\?");
    }

    #[test]
    fn keys_and_prefixes_are_counted() {
        let (key, prefix) = (Watched::Key(Vec::new()), Watched::Prefix(Vec::new()));
        let of = |all: &[&Watched]| watching(&all.iter().copied().cloned().collect::<Vec<_>>());
        assert_eq!(of(&[&key]), "watching 1 key; Ctrl-C ends it");
        assert_eq!(
            of(&[&key, &key, &prefix]),
            "watching 2 keys and 1 prefix; Ctrl-C ends it"
        );
    }
}
