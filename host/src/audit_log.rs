//! The last lines of the audit log in memory, for `GET /v1/events`.
//!
//! Invariants: a line never waits for a reader, and the memory is bounded. Refusals and acts of
//! operators are kept apart, so that a flood of refusals replaces no act.

use std::collections::{BTreeMap, VecDeque};
use std::fmt::{self, Write};
use std::sync::{Mutex, MutexGuard, PoisonError};

use serde::Serialize;
use statehouse_access::audit;
use statehouse_core::clock::wall_ms;
use tracing::field::{Field, Visit};
use tracing::{Event, Level, Metadata, Subscriber};
use tracing_subscriber::Layer;
use tracing_subscriber::filter::{FilterFn, LevelFilter};
use tracing_subscriber::layer::Context;
use tracing_subscriber::registry::LookupSpan;

use statehouse_config::limits;

/// The lines of this process.
static LINES: AuditLog = AuditLog::new();

#[derive(Clone, Debug, PartialEq, Serialize)]
pub(crate) struct AuditLine {
    /// Its number since the start.
    pub(crate) position: u64,
    /// When, in milliseconds since 1970.
    pub(crate) at_ms: u64,
    /// Whether it is an act or a refusal.
    pub(crate) kind: Kind,
    /// What happened.
    pub(crate) text: String,
    /// Who did it, to what, and why it was refused: as in the log.
    pub(crate) fields: BTreeMap<&'static str, String>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Kind {
    /// An operator or an order changed something.
    Act,
    /// Something was refused.
    Refusal,
}

#[derive(Debug, Serialize)]
pub(crate) struct AuditLines {
    /// The lines, the oldest first.
    pub(crate) events: Vec<AuditLine>,
    /// How many lines of any kind this reader missed, because it came too late.
    pub(crate) lost: u64,
    /// The position to continue from.
    pub(crate) next: u64,
}

pub(crate) struct AuditLog(Mutex<Kept>);

struct Kept {
    /// The number of lines since the start.
    written: u64,
    acts: VecDeque<AuditLine>,
    refusals: VecDeque<AuditLine>,
}

impl AuditLog {
    const fn new() -> Self {
        Self(Mutex::new(Kept {
            written: 0,
            acts: VecDeque::new(),
            refusals: VecDeque::new(),
        }))
    }

    /// The lines of this process.
    pub(crate) fn of_process() -> &'static Self {
        &LINES
    }

    /// The position after the last line.
    pub(crate) fn end(&self) -> u64 {
        self.lock().written
    }

    /// The lines from a position on, of one kind or of both. A position of an earlier run, which
    /// lies behind the end, stands for the first line.
    pub(crate) fn since(&self, from: u64, kind: Option<Kind>) -> AuditLines {
        let kept = self.lock();
        let from = if from > kept.written { 0 } else { from };
        let all = kept.acts.iter().chain(&kept.refusals);
        let new = all.filter(|it| it.position >= from);
        let (mut found, mut events) = (0, Vec::new());
        for it in new {
            found += 1;
            if kind.is_none_or(|kind| kind == it.kind) {
                events.push(it.clone());
            }
        }
        events.sort_by_key(|it| it.position);
        AuditLines {
            events,
            lost: (kept.written - from).saturating_sub(found),
            next: kept.written,
        }
    }

    fn push(&self, kind: Kind, text: String, fields: BTreeMap<&'static str, String>) {
        let mut kept = self.lock();
        let position = kept.written;
        kept.written += 1;
        let lines = match kind {
            Kind::Act => &mut kept.acts,
            Kind::Refusal => &mut kept.refusals,
        };
        if lines.len() >= limits::AUDIT_LINES_KEPT_MAX {
            lines.pop_front();
        }
        lines.push_back(AuditLine {
            position,
            at_ms: wall_ms(),
            kind,
            text,
            fields,
        });
    }

    /// Code under this lock does not panic.
    fn lock(&self) -> MutexGuard<'_, Kept> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Keeps each line of the audit log, also those that the log filter leaves out.
pub(crate) fn layer<S>() -> impl Layer<S>
where
    S: Subscriber + for<'a> LookupSpan<'a>,
{
    Keeper(&LINES).with_filter(filter())
}

/// Accepts the lines of the audit log. The target of this module begins with the same text.
fn filter() -> FilterFn<impl Fn(&Metadata<'_>) -> bool> {
    let is_audit = |it: &Metadata<'_>| it.target() == audit::TARGET && *it.level() <= Level::INFO;
    FilterFn::new(is_audit).with_max_level_hint(LevelFilter::INFO)
}

struct Keeper<'a>(&'a AuditLog);

impl<S: Subscriber> Layer<S> for Keeper<'static> {
    fn on_event(&self, event: &Event<'_>, _: Context<'_, S>) {
        let mut read = Fields {
            left_bytes: limits::AUDIT_LINE_BYTES_MAX,
            text: String::new(),
            fields: BTreeMap::new(),
        };
        event.record(&mut read);
        let kind = match *event.metadata().level() {
            Level::WARN => Kind::Refusal,
            _ => Kind::Act,
        };
        self.0.push(kind, read.text, read.fields);
    }
}

/// The fields of a line, of limited size together.
struct Fields {
    left_bytes: usize,
    text: String,
    fields: BTreeMap<&'static str, String>,
}

impl Visit for Fields {
    fn record_str(&mut self, field: &Field, value: &str) {
        let shown = &value[..value.floor_char_boundary(self.left_bytes)];
        self.left_bytes -= shown.len();
        match field.name() {
            "message" => self.text.push_str(shown),
            name => _ = self.fields.insert(name, shown.to_owned()),
        }
    }

    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        let mut text = String::new();
        // Writing to a string cannot fail.
        _ = write!(text, "{value:?}");
        self.record_str(field, &text);
    }
}

#[cfg(test)]
mod tests {
    use tracing_subscriber::layer::SubscriberExt;

    use super::*;

    fn refuse(log: &AuditLog, count: usize) {
        for _ in 0..count {
            log.push(Kind::Refusal, "refused".to_owned(), BTreeMap::new());
        }
    }

    #[test]
    fn a_flood_of_refusals_replaces_no_act() {
        let log = AuditLog::new();
        log.push(Kind::Act, "admin request".to_owned(), BTreeMap::new());
        refuse(&log, limits::AUDIT_LINES_KEPT_MAX + 7);
        let all = log.since(0, None);
        assert_eq!(all.events.len(), limits::AUDIT_LINES_KEPT_MAX + 1);
        assert_eq!((all.lost, all.next), (7, log.end()));
        assert_eq!(all.events[0].text, "admin request");
        let positions: Vec<u64> = all.events.iter().map(|it| it.position).collect();
        assert!(positions.is_sorted());
        let acts = log.since(0, Some(Kind::Act));
        assert_eq!((acts.events.len(), acts.next), (1, all.next));
        let next = log.since(all.next, None);
        assert_eq!((next.events.len(), next.lost), (0, 0));
        refuse(&log, 1);
        assert_eq!(log.since(all.next, None).events.len(), 1);
        // A position of an earlier run of the store.
        let kept = limits::AUDIT_LINES_KEPT_MAX + 1;
        assert_eq!(log.since(1 << 40, None).events.len(), kept);
    }

    #[test]
    fn only_audit_lines_are_kept_and_they_are_cut() {
        static LOG: AuditLog = AuditLog::new();
        let layer = Keeper(&LOG).with_filter(filter());
        tracing::subscriber::with_default(tracing_subscriber::registry().with(layer), || {
            let long = "ä".repeat(1 << 20);
            tracing::info!("another line");
            tracing::info!(target: audit::TARGET, user = "anna", status = 200, "admin request");
            tracing::warn!(target: audit::TARGET, what = "publish", client = long, "refused");
        });
        let lines = LOG.since(0, None).events;
        assert_eq!(lines.len(), 2);
        let (act, refusal) = (&lines[0], &lines[1]);
        assert_eq!((act.kind, &*act.text), (Kind::Act, "admin request"));
        assert_eq!(act.fields["user"], "anna");
        assert_eq!(act.fields["status"], "200");
        assert_eq!((refusal.kind, &*refusal.text), (Kind::Refusal, "refused"));
        assert_eq!(refusal.fields["what"], "publish");
        assert!(refusal.fields["client"].len() <= limits::AUDIT_LINE_BYTES_MAX);
    }
}
