//! `statehouse watch`: prints changes of keys as they happen.

use std::ffi::OsString;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::time::Duration;

use serde_json::{Value as Json, json};
use statehouse_client::{Error, GapCause, WatchEvent};
use tokio::sync::mpsc;

use super::output::{Exit, Failure, emit_either, json_bytes, notice, printable};
use super::remote::Remote;

/// How long the broker keeps the session of an interrupted watch.
const INTERRUPTION: Duration = Duration::from_secs(60);

/// Capacity of the channel from the watches to the printer. It is small, since the client limits
/// queued events by bytes.
const EVENTS_MAX: usize = 16;

/// Print changes of keys as they happen
///
/// One line per change, separated by tabs: the event, the key, the version and, for a set, the
/// value. Unprintable characters are escaped. A line `gap` means that changes may be missing before
/// it, because the connection was lost for a while or the output was read too slowly. Ends on
/// Ctrl-C, or after --count changes.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  statehouse watch room/temperature
  statehouse watch room/temperature room/humidity --json
  statehouse watch start --count 1 && echo \"it begins\"")]
pub(super) struct Args {
    /// The keys: any bytes
    #[arg(required = true, value_name = "KEY")]
    keys: Vec<OsString>,

    /// Exit after this many changes
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    count: Option<u64>,

    #[command(flatten)]
    remote: Remote,
}

pub(super) async fn run(args: Args) -> Result<Exit, Failure> {
    let client = args.remote.connect_for(INTERRUPTION).await?;
    let (events, mut changes) = mpsc::channel(EVENTS_MAX);
    let count = args.keys.len();
    for key in args.keys {
        let mut watch = client.watch(key.as_bytes()).await?;
        let events = events.clone();
        tokio::spawn(async move {
            let key = key.into_vec();
            // Ends when the printer drops the receiver.
            while events.send((key.clone(), watch.next().await)).await.is_ok() {}
        });
    }
    notice(&format!(
        "watching {count} {}; Ctrl-C ends it",
        if count == 1 { "key" } else { "keys" }
    ));

    let interrupted = tokio::signal::ctrl_c();
    tokio::pin!(interrupted);
    let mut left = args.count;
    while left != Some(0) {
        let (key, event) = tokio::select! {
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
            || in_json(&key, &event),
            || line(&key, &event),
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

fn line(key: &[u8], event: &WatchEvent) -> String {
    let key = printable(key);
    match event {
        WatchEvent::Set { value, version } => {
            format!("set\t{key}\t{version}\t{}\n", printable(value))
        }
        WatchEvent::Deleted { version } => format!("deleted\t{key}\t{version}\n"),
        WatchEvent::Gap(cause) => format!("gap\t{key}\t{}\n", cause_name(*cause)),
        // A later version of the client may have other events.
        _ => format!("unknown\t{key}\n"),
    }
}

fn in_json(key: &[u8], event: &WatchEvent) -> Json {
    let key = json_bytes(key);
    match event {
        WatchEvent::Set { value, version } => json!({
            "event": "set",
            "key": key,
            "value": json_bytes(value),
            "version": version.to_string(),
        }),
        WatchEvent::Deleted { version } => json!({
            "event": "deleted",
            "key": key,
            "version": version.to_string(),
        }),
        WatchEvent::Gap(cause) => json!({
            "event": "gap",
            "key": key,
            "cause": cause_name(*cause),
        }),
        _ => json!({ "event": "unknown", "key": key }),
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
        let version = "7:1:StateStore".parse().unwrap();
        let set = WatchEvent::Set {
            value: "a\nb\t".into(),
            version,
        };
        assert_eq!(
            line(b"k\n", &set),
            "set\tk\\n\t000000000000007:00001:StateStore\ta\\nb\\t\n"
        );
        assert_eq!(
            in_json(b"k", &set).to_string(),
            r#"{"event":"set","key":"k","value":"a\nb\t","version":"000000000000007:00001:StateStore"}"#
        );
        let gap = WatchEvent::Gap(GapCause::Overflow);
        assert_eq!(line(b"k", &gap), "gap\tk\toverflow\n");
    }
}
