//! Draws the screen. Everything fits into 80 columns and 24 lines; a smaller terminal shows less.

use std::time::Duration;

use clap::ValueEnum;
use ratatui::Frame;
use ratatui::layout::{Constraint, Layout, Rect};
use ratatui::style::{Color, Modifier, Style};
use ratatui::text::{Line, Span};
use ratatui::widgets::{Paragraph, Sparkline};

use super::figures::{age, percent, rate, size, time};
use super::lists;
use super::screen::{Screen, View};
use crate::admin::overview::document::{Latencies, Latency, Overview, Rates};
use crate::cli::output::{one_line, printable};
use crate::cli::table;

const STRONG: Style = Style::new().add_modifier(Modifier::BOLD);
const BAR: Style = Style::new().add_modifier(Modifier::REVERSED);
const ALARM: Style = Style::new().fg(Color::Red).add_modifier(Modifier::BOLD);
const WARNING: Style = Style::new().fg(Color::Yellow);

/// From how many percent of a limit its use is shown as a warning, and as an alarm.
const WARNING_PERCENT: u64 = 75;
const ALARM_PERCENT: u64 = 90;

pub(super) fn draw(frame: &mut Frame<'_>, screen: &Screen) {
    let [title, rates, figures, heading, list, footer] = Layout::vertical([
        Constraint::Length(1),
        Constraint::Length(2),
        Constraint::Length(8),
        Constraint::Length(1),
        Constraint::Fill(1),
        Constraint::Length(1),
    ])
    .areas(frame.area());
    frame.render_widget(Paragraph::new(title_line(screen)).style(BAR), title);
    let [words, curve] = halves(rates, 64);
    let history: Vec<u64> = screen.history.iter().copied().collect();
    let shown = history.len().saturating_sub(curve.width.into());
    match &screen.overview.rates {
        Some(it) => {
            frame.render_widget(Paragraph::new(rate_lines(it)), words);
            frame.render_widget(Sparkline::default().data(&history[shown..]), curve);
        }
        None => frame.render_widget(Paragraph::new(no_store(&screen.overview)), rates),
    }
    let [times, usage] = halves(figures, 40);
    if let Some(it) = &screen.overview.latency_us {
        let lines = latency_lines(it, &screen.overview);
        frame.render_widget(Paragraph::new(lines), times);
    }
    frame.render_widget(Paragraph::new(usage_lines(&screen.overview)), usage);
    frame.render_widget(Paragraph::new(heading_line(screen)).style(BAR), heading);
    frame.render_widget(Paragraph::new(list_lines(screen, list)), list);
    frame.render_widget(Paragraph::new(footer_line(screen)), footer);
}

/// The left part with this width, and the rest.
fn halves(area: Rect, left: u16) -> [Rect; 2] {
    Layout::horizontal([Constraint::Length(left), Constraint::Fill(1)]).areas(area)
}

fn title_line(screen: &Screen) -> Line<'_> {
    let it = &screen.overview;
    let up = Duration::from_millis(it.time_ms.saturating_sub(it.started_ms));
    let names = format!(
        " {} on {}, {}, up {}",
        printable(it.store.as_bytes()),
        printable(it.host.as_bytes()),
        printable(it.version.as_bytes()),
        age(up)
    );
    let mut spans = vec![Span::raw(names)];
    if let Some(cluster) = &it.cluster {
        spans.push(Span::raw(format!(
            ", {}",
            printable(cluster.role.as_bytes())
        )));
    }
    match &it.why_not_ready {
        Some(why) => {
            let why = format!(", NOT READY: {}", one_line(why));
            spans.push(Span::styled(why, ALARM));
        }
        None if screen.problem.is_none() => spans.push(Span::raw(", ready")),
        // Old figures do not say whether it is ready now.
        None => {}
    }
    Line::from(spans)
}

/// What a host without a store says.
fn no_store(overview: &Overview) -> String {
    let leader = overview.cluster.as_ref().and_then(|it| it.leader.as_ref());
    match leader {
        Some(leader) => format!(
            "This host follows {}: ask that one for the store.",
            printable(leader.as_bytes())
        ),
        None => "No host of the cluster leads at present.".to_owned(),
    }
}

fn rate_lines(it: &Rates) -> Vec<Line<'static>> {
    let mut first = vec![
        Span::styled(format!("{} requests/s", rate(it.requests)), STRONG),
        Span::raw(format!(
            "  get {} set {} del {} other {}",
            rate(it.get),
            rate(it.set),
            rate(it.del),
            rate(it.other)
        )),
    ];
    if it.failed > 0.0 {
        first.push(Span::styled(format!("  failed {}", rate(it.failed)), ALARM));
    }
    let publishes = match (it.publishes_in, it.publishes_out) {
        (Some(into), Some(out)) => format!("  publishes in {} out {}", rate(into), rate(out)),
        _ => String::new(),
    };
    let second = format!(
        "notifications {}  refused {}{publishes}",
        rate(it.notifications),
        rate(it.refused)
    );
    vec![Line::from(first), Line::from(second)]
}

fn latency_lines(it: &Latencies, overview: &Overview) -> Vec<Line<'static>> {
    let row =
        |name: &str, it: &Latency| [name.to_owned(), time(it.p50), time(it.p99), time(it.max)];
    let heading = ["latency", "p50", "p99", "max"];
    let mut rows = vec![
        row("request", &it.request),
        row("  queue", &it.stages.queue),
        row("  policy", &it.stages.policy),
        row("  flush", &it.stages.flush),
        row("  send", &it.stages.send),
        row("notification", &it.notification),
    ];
    rows.extend(overview.disk.as_ref().map(|it| row("disk", &it.flush_us)));
    let text = table::of(heading, rows, 1);
    let mut lines: Vec<Line<'_>> = text.lines().map(|it| Line::from(it.to_owned())).collect();
    if let Some(first) = lines.first_mut() {
        first.style = STRONG;
    }
    lines
}

/// A use with its limit. `shown` is the form of both.
fn usage_line(
    name: &str,
    used: u64,
    limit: Option<u64>,
    shown: impl Fn(u64) -> String,
) -> Line<'static> {
    let text = format!("{name:<8}{:>10}", shown(used));
    let Some((limit, percent)) = limit.zip(percent(used, limit)) else {
        return Line::from(text);
    };
    let style = match percent {
        ALARM_PERCENT.. => ALARM,
        WARNING_PERCENT.. => WARNING,
        _ => Style::new(),
    };
    Line::from(vec![
        Span::raw(format!("{text} of {:<10}", shown(limit))),
        Span::styled(format!("{percent:>4} %"), style),
    ])
}

fn usage_lines(it: &Overview) -> Vec<Line<'static>> {
    let limit = |name: &str| it.limits.get(name).copied();
    let count = |number: u64| number.to_string();
    let mut lines = Vec::new();
    if let Some(it) = &it.store_size {
        lines.push(usage_line("keys", it.keys, limit("max_keys"), count));
        lines.push(usage_line("table", it.bytes, limit("max_bytes"), size));
        let most = limit("max_watches");
        lines.push(usage_line("watches", it.watches, most, count));
    }
    if let Some(rss) = it.memory.rss {
        lines.push(usage_line("memory", rss, it.memory.limit, size));
    }
    if let Some(disk) = &it.disk {
        let used: u64 = disk.used.values().sum();
        lines.push(usage_line("disk", used, Some(used + disk.free), size));
    }
    if let Some(clients) = &it.clients {
        let limit = Some(clients.limit);
        lines.push(usage_line("clients", clients.connected, limit, count));
    }
    if let Some(fds) = it.process.fds {
        lines.push(usage_line("files", fds, it.process.fds_limit, count));
    }
    if let Some(cpu) = it.process.cpu {
        let cpu = format!("{:.0} %", cpu * 100.0);
        lines.push(Line::from(format!(
            "{:<8}{cpu:>10} of one processor",
            "cpu"
        )));
    }
    lines
}

fn heading_line(screen: &Screen) -> Line<'static> {
    let mut spans = Vec::new();
    for (number, view) in View::value_variants().iter().enumerate() {
        let text = format!(" {} {} ", number + 1, view.name());
        spans.push(match *view == screen.view {
            true => Span::styled(text, Style::new().remove_modifier(Modifier::REVERSED)),
            false => Span::raw(text),
        });
    }
    Line::from(spans)
}

fn list_lines(screen: &Screen, area: Rect) -> Vec<Line<'static>> {
    let lines = lists::lines(screen);
    let mut lines = lines.into_iter();
    let header = lines.next().unwrap_or_default();
    let rest: Vec<String> = lines.collect();
    let room = usize::from(area.height).saturating_sub(1);
    // The last page stays full.
    let top = screen.top.min(rest.len().saturating_sub(room));
    let rest = rest.into_iter().skip(top).take(room).map(Line::from);
    std::iter::once(Line::styled(header, STRONG))
        .chain(rest)
        .collect()
}

fn footer_line(screen: &Screen) -> Line<'static> {
    if let Some(problem) = &screen.problem {
        let ago = screen.overview.time_ms;
        let ago = statehouse_core::clock::wall_ms().saturating_sub(ago);
        let ago = age(Duration::from_millis(ago));
        return Line::styled(format!(" {ago} old: {}", one_line(problem)), ALARM);
    }
    let orders = screen.view.orders();
    let order = orders.get(screen.order).unwrap_or(&orders[0]);
    Line::from(format!(" 1-5 list   s order: {order}   ↑↓ scroll   q quit"))
}

#[cfg(test)]
mod tests;
