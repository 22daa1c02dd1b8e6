//! Joining: reads the newest snapshot and the log after it, as of one revision, and begins a watch
//! behind it.

use bytes::Bytes;

use super::{Follower, Seen};
use crate::cursor::{Accepted, Cursor};
use crate::embedder::Embedder;
use crate::engine::{EngineError, Paging, Revision, Watch};
use crate::error::Stop;
use crate::head::{Head, SnapshotInfo};
use crate::host::{Host, RETRY};
use crate::limits;
use crate::member::Signals;
use crate::options::broken;
use crate::pieces::{Differs, Pieces};

enum Failed {
    /// Another attempt can succeed. A call that failed has changed the server.
    Retry(String),
    /// Another server can do better.
    Behind(&'static str),
    /// The server is damaged, or was changed by another program.
    Mismatch(&'static str),
    Stop(Stop),
}

impl From<EngineError> for Failed {
    fn from(error: EngineError) -> Self {
        match error {
            EngineError::Compacted => Self::Behind("the log was truncated while it was read"),
            error => Self::Retry(error.to_string()),
        }
    }
}

impl From<Differs> for Failed {
    fn from(Differs(what): Differs) -> Self {
        Self::Mismatch(what)
    }
}

impl From<Stop> for Failed {
    fn from(stop: Stop) -> Self {
        Self::Stop(stop)
    }
}

/// Joins the log. Repeats until it succeeds, because the log can be truncated while it is read.
pub(crate) async fn join<'a>(
    host: &'a Host,
    signals: &'a Signals,
    embedder: &mut dyn Embedder,
) -> Result<(Follower<'a>, Watch), Stop> {
    let (mut attempts, mut mismatches) = (0, 0);
    loop {
        let reason = match attempt(host, signals, embedder).await {
            Ok(joined) => return Ok(joined),
            Err(Failed::Stop(stop)) => return Err(stop),
            Err(Failed::Mismatch(what)) if mismatches == limits::MISMATCHES_MAX => {
                return Err(Stop::Damaged(what.into()));
            }
            Err(Failed::Mismatch(what)) => {
                mismatches += 1;
                tracing::warn!("reading the log from another server: {what}");
                host.engine.next_endpoint();
                None
            }
            Err(Failed::Behind(what)) => {
                host.engine.next_endpoint();
                Some(what.to_owned())
            }
            Err(Failed::Retry(reason)) => Some(reason),
        };
        if let Some(reason) = reason {
            attempts += 1;
            if attempts % limits::MISMATCHES_MAX == 0 {
                tracing::warn!("joining the log again after {attempts} attempts: {reason}");
            }
        }
        host.clock.sleep(RETRY).await;
    }
}

async fn attempt<'a>(
    host: &'a Host,
    signals: &'a Signals,
    embedder: &mut dyn Embedder,
) -> Result<(Follower<'a>, Watch), Failed> {
    let value = host.get_head().await?;
    let Some(bytes) = value.value else {
        return Err(Stop::NotCreated(host.options.cluster.clone()).into());
    };
    let revision = value.revision;
    let head = host.head(&bytes)?;
    if head.order() < signals.known() {
        return Err(Failed::Behind("the server is behind"));
    }
    embedder.reset();
    let mut follower = begin(host, signals, head, bytes);
    if let Some(snapshot) = follower.seen.head.snapshot {
        read_snapshot(host, &snapshot, revision, embedder).await?;
    }
    read_log(&mut follower, revision, embedder).await?;
    let range = host.keys.followed();
    let watch = host.engine.watch(&range, Revision(revision.0 + 1));
    let watch = host.ask_server(watch).await?;
    Ok((follower, watch))
}

fn begin<'a>(host: &'a Host, signals: &'a Signals, head: Head, bytes: Bytes) -> Follower<'a> {
    let mut cursor = Cursor::after(head.snapshot.as_ref(), head.cluster);
    cursor.trusts_reads = broken!(host.options, FollowerTrustsReads);
    host.feed.saw(&head);
    host.figures.joins(&head, cursor.position);
    Follower {
        host,
        signals,
        cursor,
        seen: Seen {
            head,
            bytes,
            at: host.now(),
        },
        log_bytes: 0,
        frame_at: host.now(),
        mismatches: 0,
        missed: 0,
    }
}

/// Reads the pieces of a snapshot as of a revision, and passes its blocks to the embedder.
async fn read_snapshot(
    host: &Host,
    snapshot: &SnapshotInfo,
    revision: Revision,
    embedder: &mut dyn Embedder,
) -> Result<(), Failed> {
    let mut pieces = Pieces::new(*snapshot);
    let mut paging = Paging::new();
    while !pieces.is_complete() {
        let range = host.keys.pieces_from(snapshot.id, pieces.next());
        let page = host.read_page(&range, Some(revision), &mut paging).await?;
        if let Some(page) = page {
            pieces.accept(host, &page.values, |block| {
                embedder.block(block).map_err(Stop::Embedder)?;
                Ok::<_, Failed>(())
            })?;
        }
    }
    Ok(())
}

/// Applies the frames up to the head, as of a revision.
async fn read_log(
    follower: &mut Follower<'_>,
    revision: Revision,
    embedder: &mut dyn Embedder,
) -> Result<(), Failed> {
    let host = follower.host;
    let mut paging = Paging::new();
    while follower.cursor.seq < follower.seen.head.seq {
        let range = host.keys.frames_from(follower.cursor.seq + 1);
        let Some(page) = host.read_page(&range, Some(revision), &mut paging).await? else {
            continue;
        };
        if page.values.is_empty() {
            return Err(Failed::Mismatch("a frame of the log is missing"));
        }
        for (_, value) in page.values {
            if follower.frame(&value, embedder)? == Accepted::Mismatch {
                return Err(Failed::Mismatch("a frame does not continue the log"));
            }
        }
    }
    Ok(())
}
