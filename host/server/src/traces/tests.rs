use std::collections::BTreeSet;
use std::time::{Duration, SystemTime};

use opentelemetry::trace::{SpanId, SpanKind, Status, TraceId};
use opentelemetry_sdk::trace::SpanData;
use statehouse_core::trace::TraceParent;

use super::spans::{ATTRIBUTES, Builder, OF_REQUEST, TimeOfDay};
use super::*;

const PARENT: &str = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";

/// The stages of a request with this trace context, a millisecond apart and from `begun` on.
fn traced(parent: Option<&str>, begun: Instant) -> Traced {
    let parent = parent.map(|it| TraceParent::parse(it.as_bytes()).unwrap());
    let at = |ms| begun + Duration::from_millis(ms);
    Traced {
        parent,
        span: parent.map(|it| it.of_request(b"1", None)),
        called: at(1),
        decided: at(2),
        appended: at(3),
    }
}

fn finished(trace: Box<Trace>, begun: Instant) -> Finished {
    let at = |ms| begun + Duration::from_millis(ms);
    Finished::Request(Box::new(FinishedRequest {
        trace,
        begun,
        left: at(4),
        handed: at(5),
        client: "client".into(),
        command: Some("SET".into()),
        policy: Some("standard@1".into()),
        outcome: "ok",
        fuel: 7,
    }))
}

fn spans(finished: &[Finished]) -> Vec<SpanData> {
    let mut spans = Vec::new();
    let builder = Builder::new(TimeOfDay::now());
    for it in finished {
        builder.add(it, &mut spans);
    }
    spans
}

#[test]
fn stages_of_a_request_are_a_chain_of_spans() {
    let begun = Instant::now() - Duration::from_secs(1);
    let context = traced(Some(PARENT), begun);
    let trace = Trace::begin(&context, false, 2);
    let notifier = trace.notifier();
    let request = finished(trace, begun);
    assert_eq!(request.spans(), OF_REQUEST);
    let handed = begun + Duration::from_millis(9);
    let notification = Finished::Notification(notifier.notification(&"watcher".into()), handed);
    let spans = spans(&[request, notification]);

    let names: Vec<&str> = spans.iter().map(|it| &*it.name).collect();
    let stages = ["receive", "policy", "append", "flush", "respond"];
    assert_eq!(names, [&["SET"], &stages[..], &["notify"]].concat());
    let (server, notify) = (&spans[0], &spans[6]);
    let parent = context.parent.unwrap();
    assert_eq!(server.parent_span_id, SpanId::from_bytes(parent.span_id));
    assert!(server.parent_span_is_remote);
    assert_eq!(server.span_kind, SpanKind::Server);
    assert_eq!(notify.span_kind, SpanKind::Producer);
    let own = SpanId::from_bytes(context.span.unwrap().span_id);
    assert_eq!(server.span_context.span_id(), own);
    let took = |it: &SpanData| it.end_time.duration_since(it.start_time).unwrap();
    assert_eq!(took(server), Duration::from_millis(5));
    assert_eq!(took(notify), Duration::from_millis(6));
    let mut at = server.start_time;
    for stage in &spans[1..6] {
        assert_eq!((stage.parent_span_id, stage.start_time), (own, at));
        assert_eq!(took(stage), Duration::from_millis(1));
        at = stage.end_time;
    }
    let age = SystemTime::now().duration_since(server.start_time).unwrap();
    assert!(age >= Duration::from_secs(1) && age < Duration::from_secs(60));
    let contexts = spans.iter().map(|it| &it.span_context);
    let ids: BTreeSet<_> = contexts.clone().map(|it| it.span_id().to_bytes()).collect();
    assert_eq!(ids.len(), spans.len());
    let trace_id = TraceId::from_bytes(parent.trace_id);
    assert!(contexts.clone().all(|it| it.trace_id() == trace_id));
}

#[test]
fn documented_attributes_are_those_that_exist() {
    let begun = Instant::now() - Duration::from_secs(1);
    let trace = Trace::begin(&traced(None, begun), false, 2);
    let notification = Finished::Notification(trace.notifier().notification(&"w".into()), begun);
    let spans = spans(&[finished(trace, begun), notification]);
    let attributes = spans.iter().flat_map(|it| &it.attributes);
    let set: BTreeSet<&str> = attributes.map(|it| it.key.as_str()).collect();
    assert_eq!(set, ATTRIBUTES.into());
    let page = include_str!("../../../docs/traces.md");
    let rows = page
        .lines()
        .filter_map(|line| line.strip_prefix("| `")?.split_once('`'));
    let documented: BTreeSet<&str> = rows.map(|(name, _)| name).collect();
    let attributes = documented.iter().filter(|it| it.starts_with("statehouse."));
    assert_eq!(attributes.copied().collect::<BTreeSet<_>>(), set);
    let names: BTreeSet<&str> = spans[1..].iter().map(|it| &*it.name).collect();
    assert!(documented.is_superset(&names), "{documented:?}");
}

#[test]
fn duplicate_has_a_span_of_its_own_that_links_to_the_original() {
    let begun = Instant::now();
    let context = traced(Some(PARENT), begun);
    let original = Trace::begin(&context, false, 0);
    let duplicate = Trace::begin(&context, true, 0);
    assert_ne!(original.span_id, duplicate.span_id);
    let original = SpanId::from_bytes(original.span_id);
    let spans = spans(&[finished(duplicate, begun)]);
    assert_eq!(spans[0].links[0].span_context.span_id(), original);
}

#[test]
fn failed_policy_is_an_error_and_long_names_are_cut() {
    let begun = Instant::now();
    let trace = Trace::begin(&traced(None, begun), false, 0);
    let Finished::Request(mut request) = finished(trace, begun) else {
        panic!("a request")
    };
    request.outcome = "failed";
    request.command = Some("é".repeat(10_000));
    request.client = "c".repeat(10_000).into();
    let spans = spans(&[Finished::Request(request)]);
    assert!(matches!(spans[0].status, Status::Error { .. }));
    assert_eq!(spans[0].name.len(), limits::TRACE_TEXT_BYTES_MAX);
    let longest = spans[0].attributes.iter().map(|it| it.value.as_str().len());
    assert_eq!(longest.max(), Some(limits::TRACE_TEXT_BYTES_MAX));
}

#[test]
fn spans_beyond_the_queue_are_dropped_and_counted() {
    let begun = Instant::now();
    let traces = Traces::default();
    let context = traced(None, begun);
    let leave = |count: usize| {
        let mut leaving = Leaving::default();
        for _ in 0..count {
            leaving.push(finished(Trace::begin(&context, false, 0), begun));
        }
        traces.finish(leaving, begun);
    };
    leave(limits::TRACE_QUEUE_MAX - 1);
    assert_eq!(traces.counts(), Counts::default());
    leave(limits::TRACE_QUEUE_MAX + 2);
    let dropped = (limits::TRACE_QUEUE_MAX + 1) * OF_REQUEST;
    assert_eq!(traces.counts().dropped, dropped as u64);
    // A message takes a part, and the rest follows.
    assert_eq!(traces.next().unwrap().len(), limits::TRACE_BATCH_MAX);
    traces.lock().stopped = true;
    let rest = std::iter::from_fn(|| traces.next()).map(|it| it.len());
    let rest: usize = rest.sum();
    assert_eq!(rest, limits::TRACE_QUEUE_MAX - limits::TRACE_BATCH_MAX);
    leave(1);
    assert!(traces.next().is_none(), "stopped");
}
