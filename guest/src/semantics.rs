//! Executes commands with the protocol's order of checks (section 4): authorization, timestamp,
//! form and skew of the fencing token, fence, condition, quota. The host checks authorization and
//! quota on table accesses, so the first call of a command must name the purpose of its access.

use statehouse_policy::{
    Access, Bytes, Frame, Host, Outcome, Reached, Repeat, Request, Scope, Span, Stamp, hlc, resp,
};

use crate::command::{self, Command, Condition, Follow, Set, Unreadable};
use crate::reply::{self, Refusal};
use crate::{fence, notify, scan};

/// The latest time at which a key expires, in milliseconds since 1970: META shows it to clients, and
/// many of them read integers of 64 bits with a sign.
const EXPIRES_MS_MAX: u64 = i64::MAX.unsigned_abs();

pub(crate) fn handle(host: &mut impl Host, request: &Request) -> Outcome {
    let command = match command::parse(&request.payload, request.dialect) {
        Ok(command) => command,
        Err(Unreadable { verb, refusal }) => {
            return refusal.outcome(request, verb.map(|verb| verb as u16));
        }
    };
    let done = match &command {
        Command::Set(set) => run_set(host, request, set),
        Command::Get { key } => get(host, *key),
        Command::Del { key } => delete(host, request, *key, None),
        Command::Vdel { key, value } => delete(host, request, *key, Some(*value)),
        Command::KeyNotify { key, stop } => key_notify(host, request, *key, *stop),
        Command::Follow(follow) => run_follow(host, request, follow),
        Command::Scan { pattern, token } => {
            scan::scan(host, request, *pattern, *token).map(Done::without_version)
        }
        Command::Meta { key } => meta(host, request, *key),
    };
    let of_form = matches!(&done, Err(refusal) if refusal.is_of_form());
    let repeat = if is_remembered(&command) && !of_form {
        Repeat::Same
    } else {
        Repeat::Free
    };
    let Done { reply, version } =
        done.unwrap_or_else(|refusal| Done::without_version(refusal.frame(request.dialect)));
    Outcome {
        reply,
        version,
        repeat,
        command: Some(command.index()),
    }
}

/// Whether a duplicate gets the first reply (the protocol, section 9). A KEYNOTIFY that registers
/// is executed again, so that the duplicate's connection is registered.
fn is_remembered(command: &Command) -> bool {
    match command {
        Command::Set(_) | Command::Del { .. } | Command::Vdel { .. } => true,
        Command::KeyNotify { stop, .. } | Command::Follow(Follow { stop, .. }) => *stop,
        Command::Get { .. } | Command::Scan { .. } | Command::Meta { .. } => false,
    }
}

/// A reply, and the version property of its response.
struct Done {
    reply: Frame,
    version: Option<Stamp>,
}

impl Done {
    fn without_version(reply: Frame) -> Self {
        Self {
            reply,
            version: None,
        }
    }
}

fn run_set(host: &mut impl Host, request: &Request, set: &Set) -> Result<Done, Refusal> {
    let key = Bytes::Span(set.key);
    let value = Bytes::Span(set.value);
    let entry = host.head(&key, Access::Write)?;
    let observed = fence::timestamp(request)?;
    let token = fence::token(request)?;
    if let Some(entry) = &entry {
        fence::admit(entry.fence.as_ref(), token.as_ref())?;
    }
    let holds = match (set.condition, &entry) {
        (Condition::Always, _) => true,
        (Condition::Absent, entry) => entry.is_none(),
        (Condition::AbsentOrEqual(_), None) => true,
        (Condition::AbsentOrEqual(expected), Some(_)) => {
            host.matches(&key, &Bytes::Span(expected))?
        }
        (Condition::Version(expected), entry) => {
            let version = entry.as_ref().map(|entry| entry.version);
            version == Some(expected)
        }
    };
    if !holds {
        return Ok(Done {
            reply: reply::not_set(request.dialect),
            version: entry.map(|entry| entry.version),
        });
    }
    // The key's fence becomes the highest token that it has seen. An accepted token is never lower
    // than the key's fence, and a key without a fence has none to keep, so the new fence is always
    // this token.
    let fence = token.map(|token| token.to_hlc());
    let expires = |ms| request.now.saturating_add(ms).min(EXPIRES_MS_MAX);
    let expires = set.expiry_ms.map(expires);
    let version = host.put(&key, &value, Some(observed), fence.as_ref(), expires)?;
    Ok(Done {
        reply: reply::ok(),
        version: Some(version),
    })
}

fn get(host: &mut impl Host, key: Span) -> Result<Done, Refusal> {
    Ok(match host.head(&Bytes::Span(key), Access::Read)? {
        Some(entry) => Done {
            reply: reply::value(key, entry.len),
            version: Some(entry.version),
        },
        // Without a version, since a client in Go takes a version as proof that the key exists.
        None => Done::without_version(reply::absent()),
    })
}

/// META: names and values in pairs, so that later versions can add some.
fn meta(host: &mut impl Host, request: &Request, key: Span) -> Result<Done, Refusal> {
    let Some(entry) = host.head(&Bytes::Span(key), Access::Read)? else {
        return Ok(Done::without_version(reply::absent()));
    };
    let mut pairs = vec![("bytes", entry.len.to_string())];
    if let Some(expires) = entry.expires {
        pairs.push(("expires", expires.to_string()));
        pairs.push(("ttl", expires.saturating_sub(request.now).to_string()));
    }
    if let Some(fence) = &entry.fence {
        let fence = hlc::format(fence.wall, fence.counter, &fence.node);
        pairs.push(("fence", fence));
    }
    Ok(Done {
        reply: reply::pairs(&pairs),
        version: Some(entry.version),
    })
}

/// DEL, and VDEL if there is a value to compare with.
fn delete(
    host: &mut impl Host,
    request: &Request,
    key: Span,
    expected: Option<Span>,
) -> Result<Done, Refusal> {
    let key = Bytes::Span(key);
    let entry = host.head(&key, Access::Write)?;
    let token = fence::token(request)?;
    let Some(entry) = entry else {
        return Ok(Done::without_version(reply::removed(false)));
    };
    fence::admit(entry.fence.as_ref(), token.as_ref())?;
    let version = Some(entry.version);
    if let Some(expected) = expected
        && !host.matches(&key, &Bytes::Span(expected))?
    {
        return Ok(Done {
            reply: reply::not_deleted(request.dialect),
            version,
        });
    }
    host.delete(&key)?;
    Ok(Done {
        reply: reply::removed(true),
        version,
    })
}

fn key_notify(
    host: &mut impl Host,
    request: &Request,
    key: Span,
    stop: bool,
) -> Result<Done, Refusal> {
    // Without a client id there is no connection to notify.
    let client = request.client.as_deref().ok_or(Refusal::NotAuthorized)?;
    let watched = Bytes::Span(key);
    host.head(&watched, Access::Read)?;
    if stop {
        let is_done = host.unwatch(&watched)?;
        return Ok(Done::without_version(reply::done(is_done)));
    }
    if !notify::topic_fits(client, key) {
        return Err(Refusal::Syntax);
    }
    host.watch(&watched)?;
    Ok(Done::without_version(reply::done(true)))
}

/// KEYNOTIFY with options of this store. The response has the version of the last change, so that
/// the client knows from where on it is notified.
fn run_follow(host: &mut impl Host, request: &Request, follow: &Follow) -> Result<Done, Refusal> {
    let Follow {
        scope,
        key,
        since,
        stop,
    } = *follow;
    let client = request.client.as_deref().ok_or(Refusal::NotAuthorized)?;
    let watched = Bytes::Span(key);
    if scope == Scope::Key {
        host.head(&watched, Access::Read)?;
    }
    let since = since.map(|since| version(request, since)).transpose()?;
    if stop {
        let is_done = host.unfollow(scope, &watched)?;
        return Ok(Done::without_version(reply::done(is_done)));
    }
    if !notify::topic_fits(client, key) {
        return Err(Refusal::Syntax);
    }
    let reached = match since {
        Some(since) => host.follow_since(scope, &watched, since)?,
        None => Reached {
            version: host.follow(scope, &watched)?,
            complete: true,
        },
    };
    Ok(Done {
        reply: match reached.complete {
            true => reply::ok(),
            false => reply::more(),
        },
        version: Some(reached.version),
    })
}

/// The version after FROM. All versions are of this store, so the node does not matter.
fn version(request: &Request, text: Span) -> Result<Stamp, Refusal> {
    let bytes = request.payload.get(resp::range(text)).unwrap_or_default();
    let text = std::str::from_utf8(bytes).map_err(|_| Refusal::MalformedTimestamp)?;
    let reading = hlc::parse(text).map_err(|_| Refusal::MalformedTimestamp)?;
    Ok(reading.stamp())
}
