//! The log lines of policies, for `statehouse policy logs`, and the audit log.
//!
//! A reader asks again from the position after its last line, and each answer waits for the next
//! line. So a slow reader holds no buffer of the store: it misses lines, and learns how many.

use std::collections::HashSet;

use hyper::{StatusCode, Uri};
use serde::{Deserialize, Serialize};
use tokio::sync::Semaphore;
use tokio::time::{Instant, sleep};

use super::answer::Refusal;
use super::query::{bad, text, value};
use crate::audit_log::{AuditLines, AuditLog, Kind};
use crate::policies::manager::Control;
use statehouse_config::limits;
use statehouse_core::policy::{Batch, Digest, Line, Selector};

/// The lines after a position.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Logged {
    /// The lines, the oldest first.
    pub(crate) lines: Vec<LoggedLine>,
    /// How many lines of any policy this reader missed, because it came too late.
    pub(crate) lost: u64,
    /// The position after the last line, to continue from.
    pub(crate) next: u64,
}

/// A line that a policy wrote.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct LoggedLine {
    /// When, in milliseconds since 1970.
    pub(crate) at_ms: u64,
    /// Its name, version and short digest.
    pub(crate) policy: String,
    pub(crate) digest: String,
    /// `debug`, `info`, `warn` or `error`.
    pub(crate) level: String,
    /// The text, which is not escaped.
    pub(crate) text: String,
}

impl From<Line> for LoggedLine {
    fn from(line: Line) -> Self {
        Self {
            at_ms: line.at_ms,
            policy: line.policy.to_string(),
            digest: line.digest.to_string(),
            level: line.level_name().to_owned(),
            text: line.text,
        }
    }
}

/// Where a reader continues, of `/v1/log?from=POSITION`; none for a first look.
pub(super) fn position(uri: &Uri) -> Result<Option<u64>, Refusal> {
    let Some(text) = text(uri, "from")? else {
        return Ok(None);
    };
    let wrong = |_| bad("`from` must be the number `next` of an earlier response");
    text.parse().map(Some).map_err(wrong)
}

/// The lines from a position on. Waits for a line if there is none yet. At the first look, `of`
/// must match a policy that is loaded or has recent lines. Later, its versions may come and go.
pub(super) async fn lines(
    control: &Control,
    from: Option<u64>,
    of: Option<&Selector>,
    followers: &Semaphore,
) -> Result<Logged, Refusal> {
    let lines = control.lines();
    let Some(from) = from else {
        // The lines that were replaced before the first look are not missed.
        let batch = Batch {
            lost: 0,
            ..lines.since(0)
        };
        let of = of.map(|it| control.writers(it, &batch.lines)).transpose()?;
        return Ok(logged(batch, of.as_ref()));
    };
    wait_beyond(from, || lines.end(), followers).await?;
    let batch = lines.since(from);
    let of = of.map(|it| control.writers(it, &batch.lines).unwrap_or_default());
    Ok(logged(batch, of.as_ref()))
}

/// The lines of the audit log from a position on, of `/v1/events?from=POSITION&kind=KIND`. Without
/// a position they come at once; otherwise this waits for a line if there is none yet.
pub(super) async fn audit_lines(uri: &Uri, followers: &Semaphore) -> Result<AuditLines, Refusal> {
    let from = position(uri)?;
    let kind = match value(uri, "kind")?.as_deref() {
        None => None,
        Some(b"act") => Some(Kind::Act),
        Some(b"refusal") => Some(Kind::Refusal),
        Some(_) => return Err(bad("`kind` must be `act` or `refusal`")),
    };
    let log = AuditLog::of_process();
    let Some(from) = from else {
        // The lines that were replaced before the first look are not missed.
        return Ok(AuditLines {
            lost: 0,
            ..log.since(0, kind)
        });
    };
    wait_beyond(from, || log.end(), followers).await?;
    Ok(log.since(from, kind))
}

/// Waits for some seconds until the last line is behind a position.
async fn wait_beyond(
    from: u64,
    end: impl Fn() -> u64,
    followers: &Semaphore,
) -> Result<(), Refusal> {
    let _follower = followers.try_acquire().map_err(|_| {
        let error = "too many operators follow the logs: end one of the others";
        Refusal::new(StatusCode::SERVICE_UNAVAILABLE, error)
    })?;
    let until = Instant::now() + limits::ADMIN_LOG_WAIT;
    while end() == from && Instant::now() < until {
        sleep(limits::ADMIN_LOG_POLL).await;
    }
    Ok(())
}

fn logged(batch: Batch, of: Option<&HashSet<Digest>>) -> Logged {
    let wanted = |line: &Line| of.is_none_or(|digests| digests.contains(&line.digest));
    Logged {
        lines: batch
            .lines
            .into_iter()
            .filter(wanted)
            .map(LoggedLine::from)
            .collect(),
        lost: batch.lost,
        next: batch.next,
    }
}
