//! Draws a sweep as an SVG: throughput on the x axis, latency on a logarithmic y axis. The SVG must
//! not refer to external fonts, scripts or files.

use std::fmt::{self, Write as _};

use super::report::{Report, quantiles};

const WIDTH: f64 = 920.0;
const HEIGHT: f64 = 560.0;
const LEFT: f64 = 80.0;
const RIGHT: f64 = 110.0;
const TOP: f64 = 78.0;
const BOTTOM: f64 = 62.0;

/// The lines, with colours that people with colour blindness can distinguish (Okabe and Ito 2008).
const LINES: [(&str, &str); 3] = [("p50", "#0072b2"), ("p99", "#e69f00"), ("p99.9", "#d55e00")];

/// The results of one run.
struct Spot {
    name: String,
    per_second: f64,
    us: [f64; 3],
}

pub(super) fn draw(report: &Report<'_>) -> String {
    let spots = report.measured.iter().map(|(point, outcome)| {
        let [p50, p99, p999, _] = quantiles(&outcome.tally.latencies());
        Spot {
            name: point.name.clone(),
            per_second: outcome.per_second(),
            us: [p50, p99, p999],
        }
    });
    picture(&report.heading(), &spots.collect::<Vec<_>>())
}

fn picture(heading: &str, spots: &[Spot]) -> String {
    // A run without responses has no place on a logarithmic axis.
    let spots: Vec<&Spot> = spots.iter().filter(|it| it.us[0] > 0.0).collect();
    let mut chart = Chart::over(&spots);
    let title = "font-size=\"16\" font-weight=\"bold\"";
    chart.text(LEFT, 26.0, title, "Latency over throughput");
    for (line, label) in heading.lines().filter(|line| !line.is_empty()).enumerate() {
        chart.text(LEFT, 44.0 + 15.0 * line as f64, "", label);
    }
    chart.axes();
    for (at, (name, colour)) in LINES.iter().enumerate() {
        chart.line(&spots, at, name, colour);
    }
    for it in &spots {
        let above = it.us.iter().copied().fold(0.0, f64::max);
        let (x, y) = (chart.x(it.per_second), chart.y(above) - 9.0);
        chart.text(x, y, "text-anchor=\"middle\" font-size=\"10\"", &it.name);
    }
    chart.svg.push_str("</svg>\n");
    chart.svg
}

/// A drawing with a linear axis of throughput and a logarithmic one of latency.
struct Chart {
    svg: String,
    /// Requests per second at the right edge, and between two marks.
    right: f64,
    step: f64,
    /// Powers of ten in microseconds at the bottom and at the top.
    low: f64,
    high: f64,
}

impl Chart {
    fn over(spots: &[&Spot]) -> Self {
        let all = || spots.iter().flat_map(|it| it.us);
        let most = spots.iter().map(|it| it.per_second).fold(1.0, f64::max);
        let (step, right) = ruler(most);
        let low = all().fold(f64::INFINITY, f64::min).min(1e9).log10().floor();
        let high = all().fold(1.0, f64::max).log10().ceil().max(low + 1.0);
        Self {
            svg: format!(
                "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {HEIGHT}\" font-family=\"sans-serif\" font-size=\"12\">\n\
                 <title>Latency over throughput</title>\n\
                 <rect width=\"{WIDTH}\" height=\"{HEIGHT}\" fill=\"white\"/>\n"
            ),
            right,
            step,
            low: if spots.is_empty() { high - 1.0 } else { low },
            high,
        }
    }

    fn x(&self, per_second: f64) -> f64 {
        LEFT + per_second / self.right * (WIDTH - LEFT - RIGHT)
    }

    fn y(&self, us: f64) -> f64 {
        let part = (us.log10() - self.low) / (self.high - self.low);
        HEIGHT - BOTTOM - part * (HEIGHT - TOP - BOTTOM)
    }

    fn add(&mut self, element: fmt::Arguments<'_>) {
        // Writing to a String cannot fail.
        let _ = writeln!(self.svg, "{element}");
    }

    fn text(&mut self, x: f64, y: f64, more: &str, label: &str) {
        let label = escaped(label);
        self.add(format_args!(
            "<text x=\"{x:.1}\" y=\"{y:.1}\" fill=\"#333\" {more}>{label}</text>"
        ));
    }

    fn axes(&mut self) {
        for power in self.low as i32..=self.high as i32 {
            let us = 10_f64.powi(power);
            let (y, end) = (self.y(us), WIDTH - RIGHT);
            self.add(format_args!(
                "<line x1=\"{LEFT}\" x2=\"{end:.1}\" y1=\"{y:.1}\" y2=\"{y:.1}\" stroke=\"#ddd\"/>"
            ));
            self.text(LEFT - 8.0, y + 4.0, "text-anchor=\"end\"", &time(us));
        }
        let mut tick = 0.0;
        while tick <= self.right * 1.001 {
            let (x, end) = (self.x(tick), HEIGHT - BOTTOM);
            self.add(format_args!(
                "<line x1=\"{x:.1}\" x2=\"{x:.1}\" y1=\"{TOP}\" y2=\"{end:.1}\" stroke=\"#eee\"/>"
            ));
            let label = format!("{tick:.0}");
            self.text(x, end + 18.0, "text-anchor=\"middle\"", &label);
            tick += self.step;
        }
        let middle = (LEFT + WIDTH - RIGHT) / 2.0;
        let label = "answers per second";
        self.text(middle, HEIGHT - 18.0, "text-anchor=\"middle\"", label);
    }

    /// One percentile of all runs, with its name in the legend.
    fn line(&mut self, spots: &[&Spot], at: usize, name: &str, colour: &str) {
        let points: Vec<String> = spots
            .iter()
            .map(|it| format!("{:.1},{:.1}", self.x(it.per_second), self.y(it.us[at])))
            .collect();
        self.add(format_args!(
            "<polyline points=\"{}\" fill=\"none\" stroke=\"{colour}\" stroke-width=\"2\"/>",
            points.join(" ")
        ));
        for it in spots {
            let (x, y, us) = (self.x(it.per_second), self.y(it.us[at]), it.us[at]);
            self.add(format_args!(
                "<circle cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"4\" fill=\"{colour}\"><title>{}: {:.0}/s, {name} {us:.1} us</title></circle>",
                escaped(&it.name),
                it.per_second,
            ));
        }
        let (x, y) = (WIDTH - RIGHT + 20.0, TOP + 20.0 + 22.0 * at as f64);
        self.add(format_args!(
            "<line x1=\"{x}\" x2=\"{:.1}\" y1=\"{y}\" y2=\"{y}\" stroke=\"{colour}\" stroke-width=\"3\"/>",
            x + 22.0
        ));
        self.text(x + 28.0, y + 4.0, "", name);
    }
}

/// A step of 1, 2 or 5 times a power of ten, so that about five to ten steps reach `most`; and the
/// end of the last step.
fn ruler(most: f64) -> (f64, f64) {
    let power = 10_f64.powf((most / 10.0).log10().floor());
    let steps = [1.0, 2.0, 5.0, 10.0].map(|times| times * power);
    let step = steps
        .into_iter()
        .find(|step| most / step <= 10.0)
        .unwrap_or(most);
    (step, (most / step).ceil() * step)
}

/// A duration, given as a power of ten in microseconds, in a readable unit.
fn time(us: f64) -> String {
    match us {
        us if us < 0.999 => format!("{:.0} ns", us * 1e3),
        us if us < 999.0 => format!("{us:.0} us"),
        us if us < 999e3 => format!("{:.0} ms", us / 1e3),
        us => format!("{:.0} s", us / 1e6),
    }
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;")
        .replace('<', "&lt;")
        .replace('>', "&gt;")
        .replace('"', "&quot;")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rulers_have_round_steps_and_cover_the_maximum() {
        for (most, step, end) in [
            (95.0, 10.0, 100.0),
            (40_100.0, 5_000.0, 45_000.0),
            (1.0, 0.1, 1.0),
            (17.0, 2.0, 18.0),
        ] {
            let (found, reaches) = ruler(most);
            assert!(
                (found - step).abs() < 1e-9 && (reaches - end).abs() < 1e-6,
                "{most}: {found} {reaches}"
            );
        }
    }

    #[test]
    fn powers_have_units() {
        let all: Vec<String> = (-1..8).map(|power| time(10_f64.powi(power))).collect();
        let expected = [
            "100 ns", "1 us", "10 us", "100 us", "1 ms", "10 ms", "100 ms", "1 s", "10 s",
        ];
        assert_eq!(all, expected);
    }

    #[test]
    fn every_run_is_drawn_within_the_page() {
        let spot = |per_second, us| Spot {
            name: "a <b> & \"c\"".into(),
            per_second,
            us,
        };
        let svg = picture(
            "one\ntwo\n\n",
            &[
                spot(10.0, [30.0, 90.0, 3e6]),
                spot(40_100.0, [31.0, 31.0, 31.0]),
                spot(0.0, [0.0; 3]),
            ],
        );
        assert_eq!(
            svg.matches("<circle").count(),
            6,
            "a run without answers has none"
        );
        assert!(
            svg.contains("a &lt;b&gt; &amp; &quot;c&quot;")
                && !svg.contains("NaN")
                && !svg.contains("inf")
        );
        let number = |circle: &str, name: &str| -> f64 {
            let (_, rest) = circle.split_once(name).unwrap();
            let (number, _) = rest.split_once('"').unwrap();
            number.parse().unwrap()
        };
        for circle in svg.split("<circle").skip(1) {
            let (x, y) = (number(circle, "cx=\""), number(circle, "cy=\""));
            assert!(
                (LEFT..=WIDTH - RIGHT + 0.1).contains(&x)
                    && (TOP - 0.1..=HEIGHT - BOTTOM + 0.1).contains(&y),
                "{x} {y}"
            );
        }
        let nothing = picture("", &[]);
        assert!(
            nothing.ends_with("</svg>\n") && !nothing.contains("NaN") && !nothing.contains("inf")
        );
    }
}
