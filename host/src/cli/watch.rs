//! `statehouse watch`: prints changes of keys as they happen.

use std::collections::HashMap;
use std::ffi::OsString;
use std::os::unix::ffi::OsStrExt;
use std::time::Duration;

use bytes::Bytes;
use serde_json::{Value as Json, json};
use statehouse_client::{Client, Error, GapCause, Version, Watch, WatchEvent, Watched};
use statehouse_protocol::pattern;

use super::entries::{Entry, Parts, Window};
use super::output::{Exit, Failure, emit_either, json_bytes, notice, printable};
use super::remote::Remote;

/// How long the broker keeps the session of an interrupted watch.
const INTERRUPTION: Duration = Duration::from_secs(60);

/// The characters of a SCAN pattern.
const SPECIAL: &[u8] = b"*?[\\";

/// How often to look whether the connection is lost.
const CONNECTION_CHECK: Duration = Duration::from_secs(1);

/// Bytes of the changes that wait until the present values are printed. If more wait, the command
/// drops them and prints a gap.
const ARRIVED_BYTES_MAX: usize = 64 << 20;

/// Memory of a waiting change besides its key and value, rounded up.
const CHANGE_OVERHEAD_BYTES: usize = 256;

/// Print changes of keys as they happen
///
/// One line per change, in the order of the changes, separated by tabs: the event, the key, the
/// version and, for a set, the value. --initial prints the present values before all changes, as
/// the event `present`; of the changes of a key meanwhile, only the last one is printed.
/// Unprintable characters are escaped. A line `gap` means that changes may be missing before
/// it, because the connection was lost for a while or the output was read too slowly. Of a prefix,
/// only keys that this client may read are reported. Ends on Ctrl-C, after --count changes, or if
/// the store refuses the login after a lost connection. SIGTERM and SIGHUP end it with exit codes
/// 143 and 129.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  statehouse watch room/temperature
  statehouse watch room/temperature room/humidity --json
  statehouse watch 'room/*' --initial
  statehouse watch 'room/*' --from 001700000000000:00001:StateStore
  statehouse watch start --count 1 && echo \"it begins\"")]
pub(super) struct Args {
    /// The keys: any bytes but NUL. A * at the end stands for all keys that start with the rest
    #[arg(required_unless_present = "prefix", value_name = "KEY")]
    keys: Vec<OsString>,

    /// Watch all keys that start with these bytes
    #[arg(long, value_name = "PREFIX", allow_hyphen_values = true)]
    prefix: Vec<OsString>,

    /// Watch keys as they are written, also if they contain * ? [ or \
    #[arg(long)]
    exact: bool,

    /// First print the changes after this version: that of the last `set` or `deleted` which an
    /// earlier watch of the same keys has printed
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

/// The meaning of an argument: `prefix*`, or a key.
fn parse(argument: Vec<u8>) -> Result<Watched, Failure> {
    let is_special = |byte: &u8| SPECIAL.contains(byte);
    match argument.iter().position(is_special) {
        None => Ok(Watched::Key(argument.into())),
        Some(at) if argument[at..] == *b"*" => {
            Ok(Watched::Prefix(Bytes::copy_from_slice(&argument[..at])))
        }
        Some(_) => Err(Failure::usage(format!(
            "{} cannot be watched as a pattern: the only pattern is a prefix, with one * at the end; for a key with the characters * ? [ or \\ use --exact",
            printable(&argument)
        ))),
    }
}

/// A pattern that matches the watched keys.
fn pattern_of(watched: &Watched) -> Vec<u8> {
    let mut pattern = Vec::new();
    pattern::escape(&mut pattern, watched.bytes());
    if is_prefix(watched) {
        pattern.push(b'*');
    }
    pattern
}

fn is_prefix(watched: &Watched) -> bool {
    matches!(watched, Watched::Prefix(_))
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
            true => Ok(Watched::Key(key.into())),
            false => parse(key),
        });
        let prefixes = self.prefix.iter().map(|it| it.as_bytes().to_vec());
        let prefixes = prefixes.map(|prefix| Ok(Watched::Prefix(prefix.into())));
        keys.chain(prefixes).collect()
    }
}

pub(super) async fn run(args: Args) -> Result<Exit, Failure> {
    let all = args.watched()?;
    let watch = async |client: &Client| watch(client, &args, &all).await;
    args.remote.ask_for(INTERRUPTION, watch).await
}

async fn watch(client: &Client, args: &Args, all: &[Watched]) -> Result<Exit, Failure> {
    let watched = all.iter().cloned();
    let watch = client.watch_many(watched, args.from.as_ref()).await?;
    notice(&watching(watch.watched()));
    tokio::select! {
        biased;
        _ = tokio::signal::ctrl_c() => Ok(Exit::Done),
        printed = print(client, args, watch) => printed,
        failure = report_losses(client) => Err(failure),
    }
}

/// Prints the present values if they are asked for, and then the changes.
async fn print(client: &Client, args: &Args, mut watch: Watch) -> Result<Exit, Failure> {
    let mut printer = Printer {
        all: watch.watched().to_vec(),
        json: args.remote.json,
        left: args.count,
        present: Present::default(),
    };
    if args.initial {
        let mut arrived = Arrived::default();
        let is_read = tokio::select! {
            biased;
            // Must be first: the watch buffers at most 16 MiB.
            failure = arrived.collect(&mut watch) => return Err(failure),
            printed = printer.present_values(client) => printed?,
        };
        if !is_read {
            return Ok(Exit::Done);
        }
        for event in arrived.into_events() {
            if !printer.event(&event)? {
                return Ok(Exit::Done);
            }
        }
    }
    while printer.event(&next(&mut watch).await?)? {}
    Ok(Exit::Done)
}

/// The next event of a watch. Reports notifications that cannot be read.
async fn next(watch: &mut Watch) -> Result<WatchEvent, Failure> {
    loop {
        match watch.next().await {
            Err(Error::Protocol(why)) => {
                notice(&format!("a notification cannot be read: {why}"));
            }
            event => return Ok(event?),
        }
    }
}

/// The changes that arrive while the present values are printed: the last one of each key.
#[derive(Default)]
struct Arrived {
    changes: HashMap<Bytes, WatchEvent>,
    /// Of these changes.
    bytes: usize,
    gap: Option<GapCause>,
}

impl Arrived {
    /// Takes the events of a watch until it fails.
    async fn collect(&mut self, watch: &mut Watch) -> Failure {
        loop {
            match next(watch).await {
                Ok(event) => self.add(event),
                Err(failure) => return failure,
            }
        }
    }

    fn add(&mut self, event: WatchEvent) {
        let bytes = |key: &Bytes, event: &WatchEvent| match event {
            WatchEvent::Set { value, .. } => CHANGE_OVERHEAD_BYTES + key.len() + value.len(),
            _ => CHANGE_OVERHEAD_BYTES + key.len(),
        };
        let key = match &event {
            WatchEvent::Set { key, .. } | WatchEvent::Deleted { key, .. } => key.clone(),
            WatchEvent::Gap(cause) => {
                self.gap = Some(*cause);
                return;
            }
            // A later version of the client may have other events.
            _ => return,
        };
        self.bytes += bytes(&key, &event);
        if let Some(earlier) = self.changes.insert(key.clone(), event) {
            self.bytes -= bytes(&key, &earlier);
        }
        if self.bytes > ARRIVED_BYTES_MAX {
            *self = Self {
                gap: Some(GapCause::Overflow),
                ..Self::default()
            };
        }
    }

    /// The changes in the order of their versions. A gap follows them, since changes before it may
    /// be missing anywhere.
    fn into_events(self) -> Vec<WatchEvent> {
        let mut events: Vec<WatchEvent> = self.changes.into_values().collect();
        events.sort_by(|one, other| version_of(one).cmp(&version_of(other)));
        events.extend(self.gap.map(WatchEvent::Gap));
        events
    }
}

fn version_of(event: &WatchEvent) -> Option<&Version> {
    match event {
        WatchEvent::Set { version, .. } | WatchEvent::Deleted { version, .. } => Some(version),
        _ => None,
    }
}

/// Prints values and events. Its functions return false if nothing more is to be printed.
struct Printer {
    /// None of these covers another one.
    all: Vec<Watched>,
    json: bool,
    /// How many changes may still be printed.
    left: Option<u64>,
    present: Present,
}

impl Printer {
    async fn present_values(&mut self, client: &Client) -> Result<bool, Failure> {
        let mut window = Window::new(client);
        for pattern in self.all.iter().map(pattern_of).collect::<Vec<_>>() {
            let mut scan = client.scan(pattern);
            while let Some(keys) = scan.next_page().await? {
                let mut rest = &keys[..];
                while !rest.is_empty() {
                    for entry in window.read(&mut rest, Parts::Value).await? {
                        if !self.present_value(entry)? {
                            return Ok(false);
                        }
                    }
                }
            }
        }
        Ok(true)
    }

    fn present_value(&mut self, entry: Entry) -> Result<bool, Failure> {
        let Entry { key, value, .. } = entry;
        let Some(value) = value else {
            return Ok(true);
        };
        let version = &value.version;
        let printed = emit_either(
            self.json,
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
        self.present.note(key, value.version);
        Ok(printed)
    }

    fn event(&mut self, event: &WatchEvent) -> Result<bool, Failure> {
        if let WatchEvent::Gap(cause) = event {
            // Another store may have lower versions.
            if *cause == GapCause::Reconnected {
                self.present = Present::default();
            }
            return self.gap(cause_name(*cause));
        }
        if self.present.includes(event) {
            return Ok(true);
        }
        let printed = emit_either(self.json, || in_json(event), || line(event))?;
        self.left = self.left.map(|left| left - 1);
        Ok(printed && self.left != Some(0))
    }

    /// A gap concerns all keys and prefixes.
    fn gap(&self, cause: &str) -> Result<bool, Failure> {
        for watched in &self.all {
            let in_json = || gap_in_json(watched, cause);
            if !emit_either(self.json, in_json, || gap_line(watched, cause))? {
                return Ok(false);
            }
        }
        Ok(true)
    }
}

/// Says once that the connection is lost. Ends if the store refuses another one.
async fn report_losses(client: &Client) -> Failure {
    let mut check = tokio::time::interval(CONNECTION_CHECK);
    let mut was_lost = false;
    loop {
        check.tick().await;
        let lost = client.disconnected();
        let is_lost = lost.is_some();
        match lost {
            Some(error @ Error::Denied(_)) => return error.into(),
            // The client has ended. The watch fails with this error after its remaining events.
            Some(Error::Closed(_) | Error::Rejected(_)) => {}
            Some(error) if !was_lost => notice(&format!("{error}. Trying to connect again")),
            None if was_lost => notice("connected again"),
            _ => {}
        }
        was_lost = is_lost;
    }
}

fn watching(all: &[Watched]) -> String {
    let prefixes = all.iter().filter(|it| is_prefix(it)).count();
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

fn gap_line(watched: &Watched, cause: &str) -> String {
    let star = if is_prefix(watched) { "*" } else { "" };
    format!("gap\t{}{star}\t{cause}\n", printable(watched.bytes()))
}

fn gap_in_json(watched: &Watched, cause: &str) -> Json {
    let kind = if is_prefix(watched) { "prefix" } else { "key" };
    json!({ "event": "gap", kind: json_bytes(watched.bytes()), "cause": cause })
}

fn line(event: &WatchEvent) -> String {
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
        // A later version of the client may have other events.
        _ => "unknown\n".to_owned(),
    }
}

fn in_json(event: &WatchEvent) -> Json {
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
        _ => json!({ "event": "unknown" }),
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
        let set = |key: &'static str| WatchEvent::Set {
            key: key.into(),
            value: "a\nb\t".into(),
            version: version.clone(),
        };
        assert_eq!(
            line(&set("k\n")),
            "set\tk\\n\t000000000000007:00001:StateStore\ta\\nb\\t\n"
        );
        assert_eq!(
            in_json(&set("k")).to_string(),
            r#"{"event":"set","key":"k","value":"a\nb\t","version":"000000000000007:00001:StateStore"}"#
        );
    }

    #[test]
    fn gap_names_what_is_watched() {
        let key = Watched::Key("k".into());
        assert_eq!(gap_line(&key, "overflow"), "gap\tk\toverflow\n");
        let prefix = Watched::Prefix("plant/".into());
        assert_eq!(gap_line(&prefix, "overflow"), "gap\tplant/*\toverflow\n");
        assert_eq!(
            gap_in_json(&prefix, "overflow").to_string(),
            r#"{"cause":"overflow","event":"gap","prefix":"plant/"}"#
        );
    }

    #[test]
    fn star_at_the_end_makes_a_prefix() {
        let parse = |argument: &str| parse(argument.as_bytes().to_vec()).ok();
        assert_eq!(parse("plant/*"), Some(Watched::Prefix("plant/".into())));
        assert_eq!(parse("*"), Some(Watched::Prefix(Bytes::new())));
        assert_eq!(parse("plant"), Some(Watched::Key("plant".into())));
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
    fn last_change_of_each_key_waits_for_the_present_values() {
        let set = |key: &'static str, counter: u32, bytes: usize| WatchEvent::Set {
            key: key.into(),
            value: vec![0; bytes].into(),
            version: format!("1:{counter}:n").parse().unwrap(),
        };
        let half = ARRIVED_BYTES_MAX / 2;
        let mut arrived = Arrived::default();
        arrived.add(set("b", 1, half));
        arrived.add(set("a", 2, 0));
        let gap = WatchEvent::Gap(GapCause::Reconnected);
        arrived.add(gap.clone());
        arrived.add(set("b", 3, half));
        assert_eq!(
            arrived.into_events(),
            [set("a", 2, 0), set("b", 3, half), gap]
        );

        let mut arrived = Arrived::default();
        arrived.add(set("a", 1, half));
        arrived.add(set("b", 2, half));
        arrived.add(set("c", 3, 0));
        let gap = WatchEvent::Gap(GapCause::Overflow);
        assert_eq!(arrived.into_events(), [set("c", 3, 0), gap]);
    }

    #[test]
    fn pattern_of_a_watch_matches_its_keys_only() {
        assert_eq!(pattern_of(&Watched::Prefix("a*[".into())), b"a\\*\\[*");
        assert_eq!(pattern_of(&Watched::Key("a?".into())), b"a\\?");
    }

    #[test]
    fn keys_and_prefixes_are_counted() {
        let (key, prefix) = (Watched::Key(Bytes::new()), Watched::Prefix(Bytes::new()));
        let of = |all: &[&Watched]| watching(&all.iter().copied().cloned().collect::<Vec<_>>());
        assert_eq!(of(&[&key]), "watching 1 key; Ctrl-C ends it");
        assert_eq!(
            of(&[&key, &key, &prefix]),
            "watching 2 keys and 1 prefix; Ctrl-C ends it"
        );
    }
}
