//! The two formats of a page, and which one a scraper asked for.
//!
//! `prometheus-client` writes OpenMetrics 1.0. The text format of Prometheus (0.0.4), which older
//! scrapers and `promtool check metrics` read, differs in a few lines.

use hyper::header::{ACCEPT, HeaderMap};

/// A format of a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Format {
    /// OpenMetrics 1.0.
    OpenMetrics,
    /// The text format of Prometheus.
    Prometheus,
}

const OPEN_METRICS: &str = "application/openmetrics-text";

impl Format {
    /// The format that a request prefers. A request that accepts anything gets the older one, as
    /// from other servers: every scraper reads it.
    pub(crate) fn accepted(headers: &HeaderMap) -> Self {
        let (mut open, mut plain) = (0.0_f32, 0.0_f32);
        let values = headers.get_all(ACCEPT).iter();
        for range in values
            .filter_map(|it| it.to_str().ok())
            .flat_map(|it| it.split(','))
        {
            let mut parts = range.split(';').map(str::trim);
            let kind = parts.next().unwrap_or_default();
            let weight = parts.find_map(|it| it.strip_prefix("q="));
            let weight: f32 = weight.map_or(1.0, |it| it.parse().unwrap_or(0.0));
            if kind.eq_ignore_ascii_case(OPEN_METRICS) {
                open = weight.max(open);
            } else if ["text/plain", "text/*", "*/*"].contains(&kind) {
                plain = weight.max(plain);
            }
        }
        match open > 0.0 && open >= plain {
            true => Self::OpenMetrics,
            false => Self::Prometheus,
        }
    }

    pub(crate) fn media_type(self) -> &'static str {
        match self {
            Self::OpenMetrics => "application/openmetrics-text; version=1.0.0; charset=utf-8",
            Self::Prometheus => "text/plain; version=0.0.4; charset=utf-8",
        }
    }

    /// A page of OpenMetrics in this format.
    pub(super) fn of(self, page: String) -> String {
        match self {
            Self::OpenMetrics => page,
            Self::Prometheus => prometheus(&page),
        }
    }
}

/// Names counters and infos by the names of their samples, and drops what the format has not. Each
/// family begins with its help text, then its type.
fn prometheus(page: &str) -> String {
    let mut text = String::with_capacity(page.len());
    let mut help = "";
    for line in page.lines() {
        if let Some(line) = line.strip_prefix("# HELP ") {
            help = line.split_once(' ').map_or("", |(_, help)| help);
        } else if let Some(family) = line.strip_prefix("# TYPE ") {
            let (name, kind) = family.rsplit_once(' ').unwrap_or((family, "untyped"));
            let (suffix, kind) = match kind {
                "counter" => ("_total", kind),
                "info" => ("_info", "gauge"),
                _ => ("", kind),
            };
            text.push_str(&format!(
                "# HELP {name}{suffix} {help}\n# TYPE {name}{suffix} {kind}\n"
            ));
        } else if !line.starts_with("# ") {
            text.push_str(line);
            text.push('\n');
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn accept_header_chooses_the_format() {
        let chosen = |accept: &[&str]| {
            let lines = accept.iter().map(|it| (ACCEPT, it.parse().unwrap()));
            Format::accepted(&lines.collect())
        };
        // What Prometheus sends, with and without OpenMetrics.
        let new = "application/openmetrics-text;version=1.0.0;q=0.5,application/openmetrics-text;version=0.0.1;q=0.4,text/plain;version=0.0.4;q=0.3,*/*;q=0.2";
        let old = "text/plain;version=0.0.4;q=0.3, */*;q=0.2";
        for accept in [&[new][..], &["application/openmetrics-text"], &[old, new]] {
            assert_eq!(chosen(accept), Format::OpenMetrics, "{accept:?}");
        }
        let none = "application/openmetrics-text;q=0";
        let prefers_text = "application/openmetrics-text;q=0.3, text/plain";
        for accept in [
            &[][..],
            &["*/*"],
            &[old],
            &[none],
            &[prefers_text],
            &["q=x"],
        ] {
            assert_eq!(chosen(accept), Format::Prometheus, "{accept:?}");
        }
    }
}
