//! Builds spans from the times of a request. `host/docs/traces.md` lists names and attributes.
//!
//! A span must never hold a key or a value, because traces are read by more people than the store.

use std::sync::Arc;
use std::time::{Instant, SystemTime};

use opentelemetry::trace::{
    Link, SpanContext, SpanId, SpanKind, Status, TraceFlags, TraceId, TraceState,
};
use opentelemetry::{InstrumentationScope, KeyValue, StringValue};
use opentelemetry_sdk::trace::{SpanData, SpanEvents, SpanLinks};

use super::{Finished, FinishedRequest, Trace, TracedNotification};
use statehouse_config::limits;

/// The spans of a request, without its notifications.
pub(super) const OF_REQUEST: usize = 6;

/// The name of a request whose policy names no command.
const UNNAMED: &str = "request";

const COMMAND: &str = "statehouse.command";
const OUTCOME: &str = "statehouse.outcome";
const POLICY: &str = "statehouse.policy";
const FUEL: &str = "statehouse.fuel";
const CLIENT: &str = "statehouse.client";
const NOTIFICATIONS: &str = "statehouse.notifications";

#[cfg(test)]
pub(super) const ATTRIBUTES: [&str; 6] = [COMMAND, OUTCOME, POLICY, FUEL, CLIENT, NOTIFICATIONS];

/// Converts readings of the clock to times of day.
#[derive(Clone, Copy)]
pub(super) struct TimeOfDay {
    instant: Instant,
    time: SystemTime,
}

impl TimeOfDay {
    pub(super) fn now() -> Self {
        Self {
            instant: Instant::now(),
            time: SystemTime::now(),
        }
    }

    fn of(self, instant: Instant) -> SystemTime {
        let ago = self.instant.saturating_duration_since(instant);
        self.time.checked_sub(ago).unwrap_or(self.time)
    }
}

pub(super) struct Builder {
    scope: InstrumentationScope,
    time: TimeOfDay,
}

impl Builder {
    pub(super) fn new(time: TimeOfDay) -> Self {
        let scope = InstrumentationScope::builder("statehouse");
        let scope = scope.with_version(env!("CARGO_PKG_VERSION")).build();
        Self { scope, time }
    }

    pub(super) fn add(&self, finished: &Finished, spans: &mut Vec<SpanData>) {
        match finished {
            Finished::Request(request) => self.request(request, spans),
            Finished::Notification(it, handed) => spans.push(self.notification(it, *handed)),
        }
    }

    fn request(&self, it: &FinishedRequest, spans: &mut Vec<SpanData>) {
        let Trace {
            trace_id,
            span_id,
            called,
            decided,
            appended,
            ..
        } = *it.trace;
        spans.push(self.server(it));
        let stages = [
            ("receive", it.begun, called),
            ("policy", called, decided),
            ("append", decided, appended),
            ("flush", appended, it.left),
            ("respond", it.left, it.handed),
        ];
        for (name, from, to) in stages {
            let place = Place::within(trace_id, span_id);
            let mut span = self.span(name.into(), SpanKind::Internal, place, (from, to));
            if name == "policy" {
                span.attributes = vec![KeyValue::new(FUEL, i64::from(it.fuel))];
            }
            spans.push(span);
        }
    }

    fn server(&self, it: &FinishedRequest) -> SpanData {
        let trace = &it.trace;
        let place = Place {
            trace_id: trace.trace_id,
            span_id: trace.span_id,
            parent: trace.parent,
            is_remote: true,
        };
        let name = it.command.as_deref().map_or(UNNAMED, cut);
        let times = (it.begun, it.handed);
        let mut span = self.span(name.to_owned(), SpanKind::Server, place, times);
        let attributes = &mut span.attributes;
        attributes.push(KeyValue::new(OUTCOME, it.outcome));
        attributes.push(KeyValue::new(CLIENT, text(&it.client)));
        if let Some(command) = &it.command {
            attributes.push(KeyValue::new(COMMAND, text(command)));
        }
        if let Some(policy) = &it.policy {
            attributes.push(KeyValue::new(POLICY, text(policy)));
        }
        if trace.notifications > 0 {
            let notifications = i64::try_from(trace.notifications).unwrap_or(i64::MAX);
            attributes.push(KeyValue::new(NOTIFICATIONS, notifications));
        }
        if it.outcome == "failed" {
            span.status = Status::error("the policy failed");
        }
        if let Some(original) = trace.original {
            let original = context(trace.trace_id, original, true);
            span.links.links.push(Link::with_context(original));
        }
        span
    }

    fn notification(&self, it: &TracedNotification, handed: Instant) -> SpanData {
        let place = Place::within(it.of.trace_id, it.of.parent);
        let times = (it.of.appended, handed);
        let mut span = self.span("notify".to_owned(), SpanKind::Producer, place, times);
        span.attributes = vec![KeyValue::new(CLIENT, text(&it.client))];
        span
    }

    fn span(
        &self,
        name: String,
        span_kind: SpanKind,
        place: Place,
        (from, to): (Instant, Instant),
    ) -> SpanData {
        let parent = place.parent.map(SpanId::from_bytes);
        SpanData {
            span_context: context(place.trace_id, place.span_id, false),
            parent_span_id: parent.unwrap_or(SpanId::INVALID),
            parent_span_is_remote: place.is_remote && parent.is_some(),
            span_kind,
            name: name.into(),
            start_time: self.time.of(from),
            end_time: self.time.of(to),
            attributes: Vec::new(),
            dropped_attributes_count: 0,
            events: SpanEvents::default(),
            links: SpanLinks::default(),
            status: Status::Unset,
            instrumentation_scope: self.scope.clone(),
        }
    }
}

/// Where a span is in its trace.
struct Place {
    trace_id: [u8; 16],
    span_id: [u8; 8],
    parent: Option<[u8; 8]>,
    /// Whether the parent is a span of another process.
    is_remote: bool,
}

impl Place {
    /// A new span within one of this store.
    fn within(trace_id: [u8; 16], parent: [u8; 8]) -> Self {
        Self {
            trace_id,
            span_id: super::span_id(),
            parent: Some(parent),
            is_remote: false,
        }
    }
}

fn context(trace_id: [u8; 16], span_id: [u8; 8], is_remote: bool) -> SpanContext {
    SpanContext::new(
        TraceId::from_bytes(trace_id),
        SpanId::from_bytes(span_id),
        TraceFlags::SAMPLED,
        is_remote,
        TraceState::NONE,
    )
}

/// Clients and policies choose these texts.
fn text(text: &str) -> StringValue {
    StringValue::from(Arc::<str>::from(cut(text)))
}

/// The beginning of a text, as whole characters.
pub(super) fn cut(text: &str) -> &str {
    &text[..text.floor_char_boundary(limits::TRACE_TEXT_BYTES_MAX)]
}
