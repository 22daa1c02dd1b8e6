//! `statehouse watch`: prints changes of keys as they happen.

use std::ffi::OsString;
use std::os::unix::ffi::OsStrExt;
use std::time::Duration;

use serde_json::{Value as Json, json};
use statehouse_client::{Client, Error, GapCause, Watch, WatchEvent};
use tokio::sync::mpsc;

use super::output::{Exit, Failure, emit_either, json_bytes, notice, printable};
use super::remote::Remote;

/// How long the broker keeps the session of an interrupted watch.
const INTERRUPTION: Duration = Duration::from_secs(60);

/// The characters of a SCAN pattern.
const SPECIAL: &[u8] = b"*?[\\";

/// Capacity of the channel from the watches to the printer. It is small, since the client limits
/// queued events by bytes.
const EVENTS_MAX: usize = 16;

/// Print changes of keys as they happen
///
/// One line per change, separated by tabs: the event, the key, the version and, for a set, the
/// value. Unprintable characters are escaped. A line `gap` means that changes may be missing before
/// it, because the connection was lost for a while or the output was read too slowly. Of a prefix,
/// only keys that this client may read are reported. Ends on Ctrl-C, or after --count changes.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  statehouse watch room/temperature
  statehouse watch room/temperature room/humidity --json
  statehouse watch 'room/*'
  statehouse watch start --count 1 && echo \"it begins\"")]
pub(super) struct Args {
    /// The keys: any bytes. A * at the end stands for all keys that start with the rest
    #[arg(required_unless_present = "prefix", value_name = "KEY")]
    keys: Vec<OsString>,

    /// Watch all keys that start with these bytes
    #[arg(long, value_name = "PREFIX")]
    prefix: Vec<OsString>,

    /// Watch keys as they are written, also if they contain * ? [ or \\
    #[arg(long)]
    exact: bool,

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

    async fn begin(&self, client: &Client) -> Result<Watch, Error> {
        match self {
            Self::Key(key) => client.watch(key).await,
            Self::Prefix(prefix) => client.watch_prefix(prefix).await,
        }
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
    let client = args.remote.connect_for(INTERRUPTION).await?;
    let (events, mut changes) = mpsc::channel(EVENTS_MAX);
    let notes = watching(&all);
    for watched in all {
        let mut watch = watched.begin(&client).await?;
        let events = events.clone();
        tokio::spawn(async move {
            // Ends when the printer drops the receiver.
            while (events.send((watched.clone(), watch.next().await)).await).is_ok() {}
        });
    }
    notice(&notes);

    let interrupted = tokio::signal::ctrl_c();
    tokio::pin!(interrupted);
    let mut left = args.count;
    while left != Some(0) {
        let (watched, event) = tokio::select! {
            biased;
            _ = &mut interrupted => break,
            change = changes.recv() => match change {
                Some(change) => change,
                None => break,
            },
        };
        let event = match event {
            Ok(event) => event,
            Err(Error::Protocol(why)) => {
                notice(&format!("a notification cannot be read: {why}"));
                continue;
            }
            Err(error) => return Err(error.into()),
        };
        let printed = emit_either(
            args.remote.json,
            || in_json(&watched, &event),
            || line(&watched, &event),
        )?;
        if !printed {
            break;
        }
        if !matches!(event, WatchEvent::Gap(_)) {
            left = left.map(|left| left - 1);
        }
    }
    drop(changes);
    client.close().await;
    Ok(Exit::Done)
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
    use statehouse_client::Version;

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
