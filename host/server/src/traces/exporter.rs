//! The thread that sends spans to the collector.
//!
//! It serves no client, so it may wait for the collector and encode spans.

use std::collections::HashMap;
use std::mem;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, mpsc};
use std::time::Instant;

use anyhow::Context;
use opentelemetry::KeyValue;
use opentelemetry_otlp::{Protocol, SpanExporter, WithExportConfig, WithHttpConfig};
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::trace::SpanExporter as _;
use tokio::runtime::{self, Runtime};

use super::Traces;
use super::collector::{Collector, Reports};
use super::spans::{Builder, TimeOfDay};
use statehouse_config::{TracesConfig, limits, percent};

/// The environment variable that names the service, as in all programs with OpenTelemetry.
const SERVICE_NAME: &str = "OTEL_SERVICE_NAME";
const RESOURCE_ATTRIBUTES: &str = "OTEL_RESOURCE_ATTRIBUTES";

/// Builds the exporter, with the reports of what it sends.
pub(super) fn prepare(config: &TracesConfig) -> anyhow::Result<(SpanExporter, Reports)> {
    let (collector, reports) = Collector::new(config)?;
    let exporter = SpanExporter::builder()
        .with_http()
        .with_protocol(Protocol::HttpBinary)
        .with_endpoint(config.url.endpoint())
        .with_timeout(limits::TRACE_EXPORT_TIMEOUT)
        .with_headers(headers(config)?)
        .with_http_client(collector)
        .build()
        .context("traces cannot be sent")?;
    Ok((exporter, reports))
}

pub(super) fn start(
    config: &TracesConfig,
    instance: &str,
    traces: Arc<Traces>,
) -> anyhow::Result<()> {
    let (mut exporter, reports) = prepare(config)?;
    exporter.set_resource(&resource(instance));
    let runtime = runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .context("the thread that sends traces cannot be started")?;
    let sender = Sender {
        traces,
        exporter,
        runtime,
        reports,
        url: config.url.to_string(),
        losses: Losses::default(),
    };
    let (begin, begun) = mpsc::channel::<Sender>();
    let started = std::thread::Builder::new()
        .name("traces".into())
        .spawn(move || begun.recv().map(Sender::run));
    match started {
        // The thread waits for it.
        Ok(_) => _ = begin.send(sender),
        Err(error) => {
            // The caller may be a task, in which dropping a runtime panics.
            sender.runtime.shutdown_background();
            return Err(error).context("the thread that sends traces cannot be started");
        }
    }
    tracing::info!(
        "traces go to {}: {} % of the requests without a trace context",
        config.url,
        config.sample * 100.0
    );
    Ok(())
}

/// What the spans of this process have in common. The environment takes precedence, as in all
/// programs with OpenTelemetry.
fn resource(instance: &str) -> Resource {
    let own = [
        KeyValue::new("service.name", "statehouse"),
        KeyValue::new("service.instance.id", instance.to_owned()),
        KeyValue::new("service.version", env!("CARGO_PKG_VERSION")),
    ];
    let of_environment = std::env::var(RESOURCE_ATTRIBUTES).unwrap_or_default();
    let resource = Resource::builder_empty()
        .with_attributes(own)
        .with_attributes(attributes(&of_environment));
    match std::env::var(SERVICE_NAME) {
        Ok(name) if !name.is_empty() => resource.with_service_name(name).build(),
        _ => resource.build(),
    }
}

/// The attributes NAME=VALUE,… of a variable, with percent-encoded values. None if one of them is
/// malformed, as the specification asks for. The detector of the library does not decode them.
fn attributes(variable: &str) -> Vec<KeyValue> {
    let pairs = variable.split(',').filter(|it| !it.trim().is_empty());
    let attributes = pairs.map(|pair| {
        let (name, value) = pair.split_once('=')?;
        let value = String::from_utf8(percent::decode(value.trim())?).ok()?;
        Some(KeyValue::new(name.trim().to_owned(), value))
    });
    let attributes: Option<Vec<_>> = attributes.collect();
    attributes.unwrap_or_else(|| {
        tracing::warn!("{RESOURCE_ATTRIBUTES} is not NAME=VALUE,NAME=VALUE with percent-encoded values, and is not used");
        Vec::new()
    })
}

fn headers(config: &TracesConfig) -> anyhow::Result<HashMap<String, String>> {
    let agent = concat!("statehouse/", env!("CARGO_PKG_VERSION"));
    // With the capitals of the library, which adds its own name otherwise. It decodes `%XX` in
    // values.
    let mut headers = HashMap::from([("User-Agent".to_owned(), agent.to_owned())]);
    for (name, value) in config.headers()? {
        let name = match name.as_str() {
            "user-agent" => "User-Agent".to_owned(),
            _ => name,
        };
        headers.insert(name, value.replace('%', "%25"));
    }
    Ok(headers)
}

struct Sender {
    traces: Arc<Traces>,
    exporter: SpanExporter,
    runtime: Runtime,
    reports: Reports,
    url: String,
    losses: Losses,
}

/// What the log says of spans that the collector did not take. A collector may alternate between
/// failure and success, so the pause between two warnings outlasts a success.
#[derive(Default)]
struct Losses {
    /// When the last warning was logged, or the last number of spans without a warning.
    logged: Option<Instant>,
    /// Whether no success followed the last warning.
    is_warned: bool,
    /// The spans that were lost since the last line.
    lost: u64,
}

impl Losses {
    /// Counts a failure. Returns the lost spans since the last line, if a warning is due.
    fn failure(&mut self, lost: u64, now: Instant) -> Option<u64> {
        self.lost += lost;
        if self.is_pausing(now) {
            return None;
        }
        (self.logged, self.is_warned) = (Some(now), true);
        Some(mem::take(&mut self.lost))
    }

    /// Notes a success. Returns the lost spans since the last line, if a line is due: after each
    /// warning, or for losses that no warning has named for a while.
    fn success(&mut self, now: Instant) -> Option<u64> {
        if !mem::take(&mut self.is_warned) {
            if self.lost == 0 || self.is_pausing(now) {
                return None;
            }
            self.logged = Some(now);
        }
        Some(mem::take(&mut self.lost))
    }

    fn is_pausing(&self, now: Instant) -> bool {
        (self.logged).is_some_and(|logged| now < logged + limits::TRACE_WARNING_PAUSE)
    }
}

impl Sender {
    fn run(mut self) {
        let traces = self.traces.clone();
        while let Some(finished) = traces.next() {
            let builder = Builder::new(TimeOfDay::now());
            let mut spans = Vec::with_capacity(finished.iter().map(|it| it.spans()).sum());
            for it in &finished {
                builder.add(it, &mut spans);
            }
            let count = spans.len() as u64;
            let sent = self.runtime.block_on(self.exporter.export(spans));
            let report = self.reports.take();
            let lost = match &sent {
                Ok(()) => report.rejected.min(count),
                Err(_) => count,
            };
            traces.sent.fetch_add(count - lost, Relaxed);
            traces.refused.fetch_add(lost, Relaxed);
            let why = report.why.or(sent.err().map(|it| it.to_string()));
            self.log(lost, why.as_deref());
        }
        traces.ended.notify_one();
    }

    /// Logs at most once a while that spans were lost, and after it that spans are taken again.
    fn log(&mut self, lost: u64, why: Option<&str>) {
        let (url, now) = (&self.url, Instant::now());
        let Some(why) = why else {
            match self.losses.success(now) {
                None => {}
                Some(0) => tracing::info!("the trace collector {url} takes spans again"),
                Some(lost) => tracing::info!(
                    "the trace collector {url} takes spans again, after {lost} more spans were lost"
                ),
            }
            return;
        };
        if let Some(lost) = self.losses.failure(lost, now) {
            tracing::warn!(
                "the trace collector {url} did not take {lost} spans, and they are lost: {why}. Check traces, traces_headers and traces_ca; requests do not wait for it"
            );
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    /// Regression: each success made the next failure a new one, and lost the number before.
    #[test]
    fn alternating_collector_is_logged_once_a_pause() {
        let begun = Instant::now();
        let pause = limits::TRACE_WARNING_PAUSE;
        let mut losses = Losses::default();
        assert_eq!(losses.success(begun), None);
        assert_eq!(losses.failure(3, begun), Some(3));
        assert_eq!(losses.failure(2, begun), None);
        assert_eq!(losses.success(begun), Some(2));
        for n in 1..60 {
            let now = begun + pause / 60 * n;
            assert_eq!(losses.failure(1, now), None);
            assert_eq!(losses.success(now), None);
        }
        let later = begun + pause;
        assert_eq!(losses.failure(1, later), Some(60));
        assert_eq!(losses.success(later), Some(0));
        // These are logged even if no failure follows.
        assert_eq!(losses.failure(7, later), None);
        assert_eq!(
            losses.success(later + pause - Duration::from_millis(1)),
            None
        );
        assert_eq!(losses.success(later + pause), Some(7));
        assert_eq!(losses.failure(1, later + pause), None);
    }

    #[test]
    fn attributes_of_the_environment_are_decoded() {
        let pairs = |text: &str| -> Vec<_> {
            let attributes = attributes(text).into_iter();
            let pairs = attributes.map(|it| (it.key.to_string(), it.value.to_string()));
            pairs.collect()
        };
        let pair = |name: &str, value: &str| (name.to_owned(), value.to_owned());
        assert_eq!(
            pairs("site=hall%201, host.name = a%2Cb%3D,"),
            [pair("site", "hall 1"), pair("host.name", "a,b=")]
        );
        for malformed in ["site", "site=%zz", "site=%ff", "a=b,c"] {
            assert_eq!(pairs(malformed), []);
        }
        assert_eq!(pairs(""), []);
    }
}
