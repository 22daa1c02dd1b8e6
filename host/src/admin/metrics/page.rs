//! A page of metrics: families of samples, which `prometheus-client` writes.
//!
//! All values are counted elsewhere and copied into the page for one answer, so no registry lives
//! longer than a page. A family must occur once, and within it each set of labels: scrapers reject
//! the whole page otherwise.

use std::fmt;
use std::time::Duration;

use prometheus_client::collector::Collector;
use prometheus_client::encoding::text::encode;
use prometheus_client::encoding::{DescriptorEncoder, MetricEncoder, NoLabelSet};
use prometheus_client::metrics::MetricType;
use prometheus_client::registry::{Registry, Unit};
use statehouse_protocol::Histogram;

use super::exposition::Format;

/// Names and values of the labels of a sample.
pub(super) type Labels = Vec<(&'static str, String)>;

/// A page under construction.
#[derive(Debug, Default)]
pub(crate) struct Page(Vec<Family>);

/// The samples of one metric.
#[derive(Debug)]
pub(crate) struct Family {
    /// The name without its unit and without `_total`.
    name: String,
    unit: Option<Unit>,
    kind: MetricType,
    help: &'static str,
    samples: Vec<(Labels, Value)>,
}

/// The value of a sample.
#[derive(Debug)]
enum Value {
    Whole(u64),
    Real(f64),
    Times(Histogram),
    /// The labels are the value.
    Info,
}

impl Page {
    /// The page in a format.
    pub(super) fn text(self, format: Format) -> String {
        let mut registry = Registry::default();
        registry.register_collector(Box::new(self));
        let mut text = String::new();
        if let Err(error) = encode(&mut text, &registry) {
            // Writing to a string cannot fail, and every value fits its kind.
            tracing::error!(%error, "the page of metrics is incomplete");
        }
        format.of(text)
    }

    /// Adds a counter with one value. The name is without `_total`.
    pub(super) fn count(&mut self, name: &str, help: &'static str, value: u64) {
        self.counter(name, help).value(value);
    }

    /// Adds a gauge with one value.
    pub(super) fn measure(&mut self, name: &str, help: &'static str, value: u64) {
        self.gauge(name, help).value(value);
    }

    /// Adds a gauge of a time. The name must end with `_seconds`.
    pub(super) fn seconds(&mut self, name: &str, help: &'static str, value: Duration) {
        self.gauge(name, help).time(Vec::new(), value);
    }

    /// Adds a counter without samples. The name is without `_total`.
    pub(super) fn counter(&mut self, name: &str, help: &'static str) -> &mut Family {
        self.family(name, MetricType::Counter, help)
    }

    /// Adds a gauge without samples.
    pub(super) fn gauge(&mut self, name: &str, help: &'static str) -> &mut Family {
        self.family(name, MetricType::Gauge, help)
    }

    /// Adds a histogram without samples. The name must end with `_seconds`.
    pub(super) fn histogram(&mut self, name: &str, help: &'static str) -> &mut Family {
        self.family(name, MetricType::Histogram, help)
    }

    /// Adds a metric whose labels are its value. The name is without `_info`.
    pub(super) fn info(&mut self, name: &str, help: &'static str, labels: Labels) {
        let family = self.family(name, MetricType::Info, help);
        family.samples.push((labels, Value::Info));
    }

    /// The metrics of the process have the names that all Prometheus clients use; the others begin
    /// with the name of the program.
    fn family(&mut self, name: &str, kind: MetricType, help: &'static str) -> &mut Family {
        let (name, unit) = match name.rsplit_once('_') {
            Some((name, "seconds")) => (name, Some(Unit::Seconds)),
            Some((name, "bytes")) => (name, Some(Unit::Bytes)),
            _ => (name, None),
        };
        let name = match name.starts_with("process_") {
            true => name.to_owned(),
            false => format!("statehouse_{name}"),
        };
        self.0.push(Family {
            name,
            unit,
            kind,
            help,
            samples: Vec::new(),
        });
        self.0.last_mut().expect("a family was pushed")
    }
}

impl Family {
    /// Adds the sample without labels.
    pub(super) fn value(&mut self, value: u64) {
        self.sample(Vec::new(), value);
    }

    /// Adds a sample.
    pub(super) fn sample(&mut self, labels: impl Into<Labels>, value: u64) {
        self.samples.push((labels.into(), Value::Whole(value)));
    }

    /// Adds a sample for each value of a label.
    pub(super) fn each<N: Into<String>>(
        &mut self,
        label: &'static str,
        samples: impl IntoIterator<Item = (N, u64)>,
    ) {
        for (name, value) in samples {
            self.sample([(label, name.into())], value);
        }
    }

    /// Adds a sample in seconds.
    pub(super) fn time(&mut self, labels: impl Into<Labels>, value: Duration) {
        let value = Value::Real(value.as_secs_f64());
        self.samples.push((labels.into(), value));
    }

    /// Adds a histogram.
    pub(super) fn times(&mut self, labels: impl Into<Labels>, times: Histogram) {
        self.samples.push((labels.into(), Value::Times(times)));
    }
}

impl Collector for Page {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        for family in &self.0 {
            let (name, unit) = (&family.name, family.unit.as_ref());
            let help = format!("{}.", family.help);
            let mut samples = encoder.encode_descriptor(name, &help, unit, family.kind)?;
            for (labels, value) in &family.samples {
                match (labels.is_empty(), value) {
                    (_, Value::Info) => samples.encode_info(labels)?,
                    (true, value) => value.encode(family.kind, &mut samples)?,
                    (false, value) => {
                        value.encode(family.kind, &mut samples.encode_family(labels)?)?;
                    }
                }
            }
        }
        Ok(())
    }
}

impl Value {
    fn encode(&self, kind: MetricType, encoder: &mut MetricEncoder<'_>) -> fmt::Result {
        match (self, kind) {
            (Self::Whole(value), MetricType::Counter) => {
                encoder.encode_counter::<NoLabelSet, _, u64>(value, None)
            }
            (Self::Real(value), MetricType::Counter) => {
                encoder.encode_counter::<NoLabelSet, _, u64>(value, None)
            }
            (Self::Whole(value), _) => match i64::try_from(*value) {
                Ok(value) => encoder.encode_gauge(&value),
                // The crate has no larger whole gauge.
                Err(_) => encoder.encode_gauge(&(*value as f64)),
            },
            (Self::Real(value), _) => encoder.encode_gauge(value),
            (Self::Times(times), _) => {
                let bound = |it: Option<Duration>| it.map_or(f64::INFINITY, |it| it.as_secs_f64());
                let buckets: Vec<_> = times.buckets().map(|(it, n)| (bound(it), n)).collect();
                let sum = times.sum().as_secs_f64();
                encoder.encode_histogram::<NoLabelSet>(sum, times.count(), &buckets, None)
            }
            (Self::Info, _) => Ok(()),
        }
    }
}

#[cfg(test)]
impl Page {
    /// The names of all metrics, as documents have them, with their label names.
    pub(super) fn names(&self) -> std::collections::BTreeSet<String> {
        let names = self.0.iter().map(|it| {
            let unit = it
                .unit
                .as_ref()
                .map_or(String::new(), |it| format!("_{}", it.as_str()));
            let suffix = match it.kind {
                MetricType::Counter => "_total",
                MetricType::Info => "_info",
                _ => "",
            };
            format!("{}{unit}{suffix}", it.name)
        });
        names.collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    static BOUNDS: [Duration; 2] = [Duration::from_micros(500), Duration::from_secs(1)];

    fn page() -> Page {
        let mut page = Page::default();
        page.count("read_bytes", "Bytes read", 7);
        page.measure("limit", "The largest number", u64::MAX);
        let mut times = Histogram::new(&BOUNDS);
        for ms in [0, 0, 1_000, 1_500] {
            times.record(Duration::from_millis(ms));
        }
        page.seconds("age_seconds", "Age", Duration::from_millis(1_500));
        let family = page.histogram("x_seconds", "Times");
        family.times([("command", "a\"b\\c\nd".to_owned())], times);
        page.info("build", "The build", vec![("version", "1".to_owned())]);
        page.gauge("process_open_fds", "Open files").value(3);
        page
    }

    /// A policy chooses its own name, which must not be able to inject a line.
    #[test]
    fn openmetrics_has_units_and_escaped_labels() {
        assert_eq!(
            page().text(Format::OpenMetrics),
            "\
# HELP statehouse_read_bytes Bytes read.
# TYPE statehouse_read_bytes counter
# UNIT statehouse_read_bytes bytes
statehouse_read_bytes_total 7
# HELP statehouse_limit The largest number.
# TYPE statehouse_limit gauge
statehouse_limit 18446744073709553000.0
# HELP statehouse_age_seconds Age.
# TYPE statehouse_age_seconds gauge
# UNIT statehouse_age_seconds seconds
statehouse_age_seconds 1.5
# HELP statehouse_x_seconds Times.
# TYPE statehouse_x_seconds histogram
# UNIT statehouse_x_seconds seconds
statehouse_x_seconds_sum{command=\"a\\\"b\\\\c\\nd\"} 2.5
statehouse_x_seconds_count{command=\"a\\\"b\\\\c\\nd\"} 4
statehouse_x_seconds_bucket{le=\"0.0005\",command=\"a\\\"b\\\\c\\nd\"} 2
statehouse_x_seconds_bucket{le=\"1.0\",command=\"a\\\"b\\\\c\\nd\"} 3
statehouse_x_seconds_bucket{le=\"+Inf\",command=\"a\\\"b\\\\c\\nd\"} 4
# HELP statehouse_build The build.
# TYPE statehouse_build info
statehouse_build_info{version=\"1\"} 1
# HELP process_open_fds Open files.
# TYPE process_open_fds gauge
process_open_fds 3
# EOF
"
        );
    }

    #[test]
    fn prometheus_text_names_counters_with_their_suffix() {
        let text = page().text(Format::Prometheus);
        let counter = "\
# HELP statehouse_read_bytes_total Bytes read.
# TYPE statehouse_read_bytes_total counter
statehouse_read_bytes_total 7
# HELP statehouse_limit The largest number.
";
        assert!(text.starts_with(counter), "{text}");
        let info = "\
# HELP statehouse_build_info The build.
# TYPE statehouse_build_info gauge
statehouse_build_info{version=\"1\"} 1
";
        assert!(text.contains(info), "{text}");
        assert!(
            !text.contains("# UNIT") && !text.contains("# EOF"),
            "{text}"
        );
        assert!(page().names().contains("statehouse_read_bytes_total"));
    }
}
