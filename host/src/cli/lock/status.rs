//! `statehouse lock --status`: shows who holds a lock, and since when.

use std::os::unix::ffi::OsStrExt;
use std::slice;
use std::time::Duration;

use bytes::Bytes;
use hyper::Method;
use serde_json::{Value as Json, json};
use statehouse_client::{Client, Value};
use statehouse_offline::Past;

use super::Args;
use crate::cli::entries::{self, Parts, Window};
use crate::cli::output::{Exit, Failure, emit, emit_json, json_bytes, notice, printable};
use crate::cli::store::Found;
use crate::cli::time::{millis, utc};
use crate::past;
use statehouse_config::percent;

/// How many renewals of a lock `--status` reads from a data directory. A lease of ten seconds is
/// renewed some 26 000 times a day, and the history reaches back a day.
const RENEWALS_MAX: usize = 100_000;

pub(super) async fn run(args: &Args) -> Result<Exit, Failure> {
    let name = Bytes::copy_from_slice(args.name.as_bytes());
    let mut key = slice::from_ref(&name);
    let read = async |client: &Client| Window::new(client).read(&mut key, Parts::Both).await;
    let held = args.remote.read(read).await?;
    let held = held
        .first()
        .and_then(|it| it.value.as_ref().zip(it.meta.as_ref()));
    let Some((value, meta)) = held else {
        if args.remote.json {
            emit_json(&json!({ "name": json_bytes(&name), "holder": null }))?;
        } else {
            notice(&format!("the lock {} is free", printable(&name)));
        }
        return Ok(Exit::Negative);
    };
    let since = since(args, value).await;
    let version_ms = value.version.wall_ms();
    let renewed_before = || utc(renewed_before_ms(version_ms, meta.expires_ms, meta.ttl));
    let renewed = (since.as_ref()).map_or_else(renewed_before, |it| it.renewed.clone());
    if args.remote.json {
        emit_json(&json!({
            "name": json_bytes(&name),
            "holder": json_bytes(&value.bytes),
            "since": since.as_ref().filter(|it| it.is_exact).map(|it| &it.time),
            "since_before": since.as_ref().filter(|it| !it.is_exact).map(|it| &it.time),
            "renewed": renewed,
            "until": meta.expires_ms.map(utc),
            "version": value.version.to_string(),
            "fencing_token": since.as_ref().and_then(|it| it.fencing_token.as_ref()),
        }))?;
        return Ok(Exit::Done);
    }
    let since = since.map_or(String::new(), |it| {
        let before = if it.is_exact { "" } else { "before " };
        format!("since    {before}{}\n", it.time)
    });
    let until = match (meta.expires_ms, meta.ttl) {
        (Some(ms), Some(ttl)) => format!("{}, in {}", utc(ms), entries::duration(ttl)),
        _ => "without end: it is a key without an expiry".to_owned(),
    };
    let holder = printable(&value.bytes);
    let text = format!("holder   {holder}\n{since}renewed  {renewed}\nuntil    {until}\n");
    emit(text.as_bytes())?;
    Ok(Exit::Done)
}

/// The latest time at which a key with this version may have been set, in milliseconds since 1970:
/// a version may be ahead of the store's time, which `expires_ms` and `ttl` show.
fn renewed_before_ms(version_ms: u64, expires_ms: Option<u64>, ttl: Option<Duration>) -> u64 {
    let left = expires_ms.zip(ttl.map(millis));
    left.map_or(version_ms, |(at, ttl)| {
        version_ms.min(at.saturating_sub(ttl))
    })
}

/// When the holder of a lock acquired and renewed it.
#[derive(Debug, PartialEq)]
struct Since {
    time: String,
    /// When it renewed the lock last.
    renewed: String,
    /// Otherwise it acquired the lock before this time: the history reaches back no further.
    is_exact: bool,
    /// The version of the acquisition, if the time is exact. Renewals have higher versions.
    fencing_token: Option<String>,
}

/// Looks into the history of the store for when the holder acquired the lock, if the data directory
/// is on this machine or the admin API answers.
async fn since(args: &Args, held: &Value) -> Option<Since> {
    let name = args.name.as_bytes();
    let answer = match args.remote.find(&args.place).ok()? {
        Found::Data(path) if path.is_dir() => Past::open(&path)
            .and_then(|past| past.history(name, RENEWALS_MAX, usize::MAX))
            .map(|it| past::history(name, &it, held.version.node(), usize::MAX))
            .map_err(|error| error.to_string()),
        Found::Data(_) => return None,
        Found::Admin(mut asked) => {
            asked.timeout = Some(args.remote.timeout());
            let path = format!("/v1/history?key={}&limit=2000", percent::encode(name));
            let answer = asked.send(Method::GET, &path, Vec::new()).await;
            answer.map_err(|failure| failure.message().to_owned())
        }
    };
    match answer {
        Ok(answer) => since_in(&answer, &json_bytes(&held.bytes), &held.version.to_string()),
        Err(error) => {
            notice(&format!("since when it is held is not shown: {error}"));
            None
        }
    }
}

/// The first of the last uninterrupted writes of the holder. None if the last write has another
/// version: the history is that of another store, or not up to date.
fn since_in(history: &Json, holder: &Json, version: &str) -> Option<Since> {
    let changes = history["changes"].as_array()?;
    let last = changes.first()?;
    (last["version"] == version).then_some(())?;
    let own = |change: &&Json| change["event"] == "set" && change["value"] == *holder;
    let count = changes.iter().take_while(own).count();
    let beginning = &history["beginning"];
    // The history may begin with a renewal, if it does not reach back to when the key was absent.
    let begins_free = beginning["since"].is_null() || beginning["absent_before"] == true;
    let is_all = beginning["changes"] == changes.len() && begins_free;
    let is_exact = count < changes.len() || is_all;
    let first = changes.get(count.checked_sub(1)?)?;
    let text = |name: &str| first[name].as_str().map(str::to_owned);
    Some(Since {
        time: text("time")?,
        renewed: last["time"].as_str()?.to_owned(),
        is_exact,
        fencing_token: text("version").filter(|_| is_exact),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lock_is_held_since_the_first_of_its_renewals() {
        let change = |event: &str, holder: &str, version: &str| json!({ "event": event, "value": holder, "version": version, "time": format!("at {version}") });
        let own = [("set", "anna", "5"), ("set", "anna", "4")];
        let held_from = |earlier: &[(&str, &str, &str)], beginning: Json| {
            let all = own.iter().chain(earlier);
            let all: Vec<Json> = all.map(|it| change(it.0, it.1, it.2)).collect();
            let history = json!({ "changes": all, "beginning": beginning });
            since_in(&history, &json!("anna"), "5")
        };
        let held = |earlier: &[(&str, &str, &str)], count: u64| {
            held_from(earlier, json!({ "changes": count }))
        };
        let at_4 = |is_exact: bool| {
            Some(Since {
                time: "at 4".to_owned(),
                renewed: "at 5".to_owned(),
                is_exact,
                fencing_token: is_exact.then(|| "4".to_owned()),
            })
        };
        assert_eq!(held(&[], 2), at_4(true));
        assert_eq!(held(&[], 9), at_4(false), "the rest was not read");
        for earlier in ["deleted", "expired"] {
            let ended = [(earlier, "anna", "3"), ("set", "anna", "2")];
            assert_eq!(held(&ended, 9), at_4(true));
        }
        assert_eq!(held(&[("set", "bert", "3")], 9), at_4(true));
        // A history that begins with a snapshot may begin with a renewal.
        for (absent_before, is_exact) in [(json!(true), true), (json!(false), false)] {
            let beginning = json!({
                "changes": 2,
                "since": "2026-11-21T03:00:00Z",
                "before": null,
                "absent_before": absent_before,
            });
            assert_eq!(held_from(&[], beginning), at_4(is_exact));
        }
        // An earlier version of the store does not say whether it was free.
        let since = json!({ "changes": 2, "since": "2026-11-21T03:00:00Z", "before": null });
        assert_eq!(held_from(&[], since), at_4(false));
        let other = json!({ "changes": [change("set", "anna", "7")], "beginning": {} });
        assert_eq!(since_in(&other, &json!("anna"), "5"), None);
    }

    /// A client whose clock is ahead makes all versions run ahead.
    #[test]
    fn renewal_is_never_in_the_future() {
        let ttl = Some(Duration::from_secs(8));
        let renewed = |version_ms| renewed_before_ms(version_ms, Some(1_008_000), ttl);
        assert_eq!(renewed(998_000), 998_000);
        assert_eq!(renewed(1_050_000), 1_000_000, "the store's time");
        assert_eq!(renewed_before_ms(998_000, None, None), 998_000);
    }
}
