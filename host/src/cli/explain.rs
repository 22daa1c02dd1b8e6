//! `statehouse explain`: shows how the store would handle a request, without sending it.

use std::ffi::OsString;
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;

use serde_json::{Value as Json, json};

use super::data::{self, Node, excerpt};
use super::output::{Exit, Failure, emit_either, json_bytes, one_line, printable};
use super::replay::write_text;
use super::time::utc;
use crate::past::{self, Given, time_or_ago};
use statehouse_core::clock::wall_ms;
use statehouse_core::request::Dialect;
use statehouse_core::store::{Key, Read, Scope, Write};
use statehouse_offline::Past;
use statehouse_testkit::{Answer, Harness, Reads, array};

/// Show how a request is handled: decision, effects, read set, notifications, fuel and time
///
/// The request runs in memory, over an empty table or over the table of a backup or a data
/// directory, and changes neither. It runs on an instance that has handled the same request before,
/// over the same table, and on a fresh one. Any difference is reported.
///
/// Exit code 4 if the response is an error, 1 if the policy fails or the file is no policy.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  statehouse explain -- SET room/temperature 21.5 PX 10000
  statehouse explain --data statehouse-data --client thermostat -- DEL room/temperature
  statehouse explain --policy setpoint.wasm --watch room/temperature -- SET room/temperature hot
  statehouse explain --snapshot backup.statehouse --client gw2 -- SET leader gw2 NX PX 10000
  statehouse explain --fencing-token 001696374425000:00001:StateStore -- SET valve open")]
pub(super) struct Args {
    /// The arguments of the request
    #[arg(required = true, last = true, value_name = "WORD")]
    words: Vec<OsString>,

    /// The policy (.wasm component or core module) [default: the built-in one]
    #[arg(
        long,
        value_name = "FILE",
        default_value = "builtin",
        hide_default_value = true
    )]
    policy: PathBuf,

    /// Use the table of this backup, as `statehouse snapshot` writes it
    #[arg(long, value_name = "FILE", conflicts_with = "data")]
    snapshot: Option<PathBuf>,

    /// Use the table of this data directory, which is read without a lock, even while a server runs
    #[arg(long, value_name = "DIR")]
    data: Option<PathBuf>,

    /// The client id
    #[arg(long, value_name = "ID", default_value = "me")]
    client: String,

    /// The store's time, such as 2026-11-21T03:00:00Z; never earlier than that of the table
    /// [default: now]
    #[arg(long, value_name = "TIME")]
    at: Option<String>,

    /// The timestamp of the client, or `none` [default: the store's time]
    #[arg(long, value_name = "VERSION")]
    timestamp: Option<String>,

    /// The fencing token: the version of the lock that protects the key
    #[arg(long, value_name = "VERSION")]
    fencing_token: Option<String>,

    /// The protocol dialect of the client: sdk, documents or preview
    #[arg(long, value_name = "NAME", default_value = "sdk", value_parser = dialect)]
    dialect: Dialect,

    /// A further user property; may be given more than once
    #[arg(long, value_name = "NAME=VALUE", value_parser = property)]
    property: Vec<(String, String)>,

    /// Let another client watch this key, and show its notifications; may be given more than once
    #[arg(long, value_name = "KEY", allow_hyphen_values = true)]
    watch: Vec<OsString>,

    /// Print a JSON object
    #[arg(long)]
    json: bool,

    #[command(flatten)]
    node: Node,
}

fn dialect(name: &str) -> Result<Dialect, String> {
    match name {
        "sdk" => Ok(Dialect::Sdk),
        "documents" => Ok(Dialect::Documents),
        "preview" => Ok(Dialect::Preview),
        _ => Err("the dialects are sdk, documents and preview".into()),
    }
}

fn property(text: &str) -> Result<(String, String), String> {
    let (name, value) = text.split_once('=').ok_or("write NAME=VALUE")?;
    Ok((name.into(), value.into()))
}

pub(super) fn run(args: &Args) -> Result<Exit, Failure> {
    let mut harness = Harness::load(&args.policy).map_err(super::policy::no_policy)?;
    if let Some(file) = &args.snapshot {
        harness = harness.on_snapshot(file)?;
    }
    if let Some(directory) = &args.data {
        harness = harness.on_data(directory)?;
        data::notice_end(&Past::open(directory)?, u64::MAX)?;
    }
    harness.set_node(&args.node.name);
    harness.at(match &args.at {
        None => wall_ms(),
        Some(text) => match time_or_ago(text, |ms| ms) {
            Some(Given::Exactly(ms)) => ms,
            Some(Given::Ago(ms)) => wall_ms().saturating_sub(ms),
            None => {
                return Err(Failure::usage(
                    "--at takes a time such as 2026-11-21T03:00:00Z, or how long ago, such as 10m",
                ));
            }
        },
    });
    for key in &args.watch {
        let watcher = harness.client(WATCHER).dialect(args.dialect);
        let answer = watcher.send(&[b"KEYNOTIFY", key.as_bytes()]);
        if answer.watched.is_empty() {
            return Err(Failure::usage(format!(
                "the policy refuses KEYNOTIFY for {}: it answers {}",
                printable(key.as_bytes()),
                printable(&answer.payload)
            )));
        }
    }
    // The first call of an instance does extra work and cannot show hidden state, and the instances
    // of a store have already served calls.
    let words: Vec<&[u8]> = args.words.iter().map(|word| word.as_bytes()).collect();
    let mut earlier = harness.anew().once();
    earlier.at(harness.now_ms());
    send(&mut earlier, args, &words);
    harness.use_instance_of(earlier);
    let answer = send(&mut harness, args, &words);
    emit_either(
        args.json,
        || json(&answer, &harness, &words),
        || text(&answer, &harness, &words, args),
    )?;
    Ok(match &answer {
        Answer {
            failure: Some(_), ..
        } => Exit::Negative,
        Answer { payload, .. } if payload.starts_with(b"-ERR") => Exit::Code(4),
        _ => Exit::Done,
    })
}

fn send(harness: &mut Harness, args: &Args, words: &[&[u8]]) -> Answer {
    let mut client = harness.client(&args.client).dialect(args.dialect);
    if let Some(timestamp) = &args.timestamp {
        client = client.timestamp(Some(&**timestamp).filter(|it| *it != "none"));
    }
    if let Some(token) = &args.fencing_token {
        client = client.fencing_token(token);
    }
    for (name, value) in &args.property {
        client = client.property(name, value);
    }
    client.send(words)
}

/// The client id of the watcher for --watch.
const WATCHER: &str = "watcher";

fn text(it: &Answer, harness: &Harness, words: &[&[u8]], args: &Args) -> String {
    let client = printable(args.client.as_bytes());
    let mut rows = Rows::default();
    let shown: Vec<String> = words.iter().map(|word| excerpt(word)).collect();
    let dialect = match args.dialect {
        Dialect::Sdk => "sdk",
        Dialect::Documents => "documents",
        Dialect::Preview => "preview",
    };
    let time = utc(harness.now_ms());
    rows.group(
        "request",
        [
            shown.join(" "),
            format!("by client {client} at {time}, in the dialect {dialect}"),
        ],
    );
    let policy = harness.policy();
    rows.row("policy", &printable(policy.to_string().as_bytes()));
    decision(&mut rows, it);
    let node = harness.node();
    rows.group("before it", write_texts(&it.swept, node));
    rows.group_or("effects", effects(it, node, &client), "none");
    reads(&mut rows, it, words, node);
    rows.group_or("notifications", notifications(it), "none");
    let logged = it.log.iter();
    let logged = logged.map(|it| format!("{}: {}", it.level, one_line(&it.text)));
    rows.group("log", logged);
    rows.row("fuel", &it.fuel.to_string());
    rows.row(
        "time",
        &format!(
            "{:.1?}, in the store, of an instance's second request",
            it.time
        ),
    );
    if let Some(hidden) = &it.hidden_state {
        rows.row(
            "hidden state",
            &format!("the policy keeps state between requests: {hidden}"),
        );
    }
    rows.0
}

/// Lines with a name each. In a group, only the first line has one.
#[derive(Default)]
struct Rows(String);

impl Rows {
    fn row(&mut self, name: &str, value: &str) {
        self.0.push_str(&format!("{name:<14} {value}\n"));
    }

    fn group(&mut self, name: &str, values: impl IntoIterator<Item = String>) {
        for (at, value) in values.into_iter().enumerate() {
            self.row(if at == 0 { name } else { "" }, &value);
        }
    }

    fn group_or(&mut self, name: &str, values: Vec<String>, otherwise: &str) {
        if values.is_empty() {
            self.row(name, otherwise);
        }
        self.group(name, values);
    }
}

fn decision(rows: &mut Rows, it: &Answer) {
    let failure = it.failure.as_ref();
    let failure = failure.map(|why| format!("the policy failed: {}", one_line(why)));
    rows.group(
        "decision",
        [excerpt(&it.payload)].into_iter().chain(failure),
    );
    let version = it.version.as_ref();
    let version = version.map_or("none".into(), |it| printable(it.as_bytes()));
    rows.row("version", &version);
    rows.row(
        "a duplicate",
        match it.same_for_duplicate {
            true => "gets this very answer, regardless of later changes",
            false => "is executed again on the current state",
        },
    );
}

fn effects(it: &Answer, node: &str, client: &str) -> Vec<String> {
    let watched = it.watched.iter();
    let watched = watched.map(|it| format!("{client} watches {}", watch(it)));
    let unwatched = it.unwatched.iter();
    let unwatched = unwatched.map(|it| format!("{client} stops watching {}", watch(it)));
    let writes = write_texts(&it.writes, node);
    writes.chain(watched).chain(unwatched).collect()
}

fn write_texts(writes: &[Write], node: &str) -> impl Iterator<Item = String> {
    let writes = writes.iter();
    writes.map(move |write| write_text(&past::write(write, node)))
}

fn watch((scope, key): &(Scope, Key)) -> String {
    match scope {
        Scope::Key => excerpt(key),
        Scope::Prefix => format!("all keys with the prefix {}", excerpt(key)),
    }
}

fn reads(rows: &mut Rows, it: &Answer, words: &[&[u8]], node: &str) {
    // Keys may be ranges of the payload.
    let payload = array(words);
    match &it.reads {
        Reads::Anything if it.failure.is_some() => {
            rows.row("rests on", "reads that are not recorded: the policy failed");
        }
        Reads::Anything => rows.row(
            "rests on",
            "the whole table: a page of keys, a quota, or more keys than are recorded",
        ),
        Reads::Keys(reads) => {
            let reads = reads.iter().map(|read| read_text(read, &payload, node));
            rows.group_or("rests on", reads.collect(), "nothing but the request");
        }
    }
}

fn notifications(it: &Answer) -> Vec<String> {
    let lines = it.notifications.iter().flat_map(|notification| {
        let client = printable(notification.client.as_bytes());
        [
            format!("{client} receives {}", excerpt(&notification.payload)),
            format!("on {}", excerpt(notification.topic.as_bytes())),
        ]
    });
    lines.collect()
}

fn read_text(read: &Read, payload: &[u8], node: &str) -> String {
    let key = read.key.resolve(payload).map_or("a key".into(), excerpt);
    let hidden = if read.hidden { "hidden " } else { "" };
    match &read.entry {
        None => format!("{hidden}{key}, which is not there"),
        Some(entry) => {
            let mut text = format!(
                "{hidden}{key}, which holds {} ({}), version {}",
                excerpt(entry.value()),
                data::count(entry.value().len() as u64, "byte"),
                printable(entry.version().display(node).to_string().as_bytes())
            );
            if let Some(fence) = entry.fence() {
                text.push_str(&format!(", fence {}", data::fence(&fence)));
            }
            if let Some(expires_ms) = entry.expires_ms() {
                text.push_str(&format!(", expires {}", utc(expires_ms)));
            }
            text
        }
    }
}

fn json(it: &Answer, harness: &Harness, words: &[&[u8]]) -> Json {
    let node = harness.node();
    // The payload that spans refer to.
    let payload = array(words);
    let watches = |watches: &[(Scope, Key)], of: Scope| -> Vec<Json> {
        let keys = watches.iter().filter(|(scope, _)| *scope == of);
        keys.map(|(_, key)| json_bytes(key)).collect()
    };
    let writes = |writes: &[Write]| -> Json {
        let writes = writes.iter();
        writes.map(|write| past::write(write, node)).collect()
    };
    let reads = match &it.reads {
        Reads::Anything => Json::Null,
        Reads::Keys(reads) => reads
            .iter()
            .map(|read| {
                let entry = read.entry.as_ref();
                json!({
                    "key": read.key.resolve(&payload).map(json_bytes),
                    "hidden": read.hidden,
                    "version": entry.map(|it| it.version().display(node).to_string()),
                    "bytes": entry.map(|it| it.value().len()),
                    "expires": entry.and_then(|it| it.expires_ms()).map(utc),
                })
            })
            .collect(),
    };
    let notifications = it.notifications.iter().map(|notification| {
        json!({
            "client": notification.client,
            "topic": notification.topic,
            "payload": json_bytes(&notification.payload),
        })
    });
    let policy = harness.policy();
    json!({
        "request": words.iter().map(|word| json_bytes(word)).collect::<Vec<_>>(),
        "time": utc(harness.now_ms()),
        "policy": {
            "name": policy.name,
            "version": policy.version,
            "digest": format!("blake3:{}", policy.digest),
        },
        "answer": json_bytes(&it.payload),
        "failure": it.failure,
        "log": it.log,
        "version": it.version,
        "duplicate_is_owed": it.same_for_duplicate,
        "command": it.command,
        "expired_before": writes(&it.swept),
        "writes": writes(&it.writes),
        "watched": watches(&it.watched, Scope::Key),
        "unwatched": watches(&it.unwatched, Scope::Key),
        "watched_prefixes": watches(&it.watched, Scope::Prefix),
        "unwatched_prefixes": watches(&it.unwatched, Scope::Prefix),
        "rests_on": reads,
        "notifications": notifications.collect::<Json>(),
        "fuel": it.fuel,
        "time_us": it.time.as_nanos() as f64 / 1000.0,
        "hidden_state": it.hidden_state,
    })
}
