//! `statehouse top`: the overview of a running store, live in a terminal.
//!
//! Each refresh is a request of its own, so the display continues after a restart of the store.

mod draw;
mod figures;
mod lists;
mod screen;

use std::future::pending;
use std::io::{self, IsTerminal};
use std::time::Duration;

use hyper::Method;
use ratatui::backend::TestBackend;
use ratatui::crossterm::event::{self, Event};
use ratatui::{DefaultTerminal, Terminal};
use statehouse_client::parse_duration;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::mpsc;
use tokio::time::{Instant, sleep_until};

use self::draw::draw;
use self::screen::{Next, Screen, View};
use super::outage::Outage;
use super::output::{Exit, Failure, emit, emit_json};
use super::store::{Store, unexpected};
use crate::admin::Clients;
use crate::admin::overview::document::Overview;
use statehouse_config::limits;
use statehouse_server::SlowRequests;

/// Columns and lines of `--once`.
const ONCE: (u16, u16) = (100, 40);

/// Show live what a running store does: rates, times, sizes, clients, slow requests
///
/// Times are those of the last ten seconds. The parts of a request's time are `queue` (until the
/// policy), `policy`, `flush` (until its log position was durable) and `send` (to the connection).
/// Hot keys are estimated from a sample, and shown from one percent of the requests on.
///
/// Keys: 1 to 5 and Tab choose the list, s its order, the arrows scroll it, q ends.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  statehouse top
  statehouse top --context plant7 --interval 5s
  statehouse top --once --list clients
  statehouse top --once --json | jq .rates")]
pub(super) struct Args {
    /// Show one overview and end; works without a terminal
    #[arg(long)]
    once: bool,

    /// The time between two refreshes; at least 250ms
    #[arg(long, value_name = "TIME", default_value = "1s", value_parser = parse_duration)]
    interval: Duration,

    /// The list to begin with
    #[arg(long, value_enum, default_value_t = View::Keys)]
    list: View,

    #[command(flatten)]
    store: Store,
}

/// The figures of one refresh.
#[derive(Default)]
struct Figures {
    overview: Overview,
    clients: Option<Clients>,
    slow: Option<SlowRequests>,
}

pub(super) async fn run(args: &Args) -> Result<Exit, Failure> {
    if args.interval < limits::TOP_INTERVAL_MIN {
        let min = limits::TOP_INTERVAL_MIN.as_millis();
        let given = args.interval.as_millis();
        return Err(Failure::usage(format!(
            "--interval {given}ms is too short: give at least {min}ms"
        )));
    }
    if args.store.json {
        return print_json(args).await;
    }
    let has_terminal = io::stdout().is_terminal() && io::stdin().is_terminal();
    if !args.once && !has_terminal {
        let error = "`statehouse top` needs a terminal: use --once for one overview, or --json";
        return Err(Failure::usage(error));
    }
    let mut screen = Screen::new(args.list);
    screen.refresh(Ok(ask(&args.store, args.list).await?));
    match args.once {
        true => emit(text(&screen)?.as_bytes()).map(|_| Exit::Done),
        false => interact(args, screen).await,
    }
}

/// Prints the document of the overview, once or at each interval.
async fn print_json(args: &Args) -> Result<Exit, Failure> {
    let mut outage = Outage::default();
    loop {
        let answer = outage.note(args.store.overview().await)?;
        if let Some(answer) = answer
            && (!emit_json(&answer)? || args.once)
        {
            return Ok(Exit::Done);
        }
        tokio::time::sleep(args.interval).await;
    }
}

/// Draws the screen in a terminal of this width and height. Returns its lines.
fn lines(screen: &Screen, (width, height): (u16, u16)) -> Result<Vec<String>, Failure> {
    let mut terminal = Terminal::new(TestBackend::new(width, height)).map_err(unusable)?;
    let shown = terminal.draw(|frame| draw(frame, screen));
    let buffer = shown.map_err(unusable)?.buffer;
    let lines = buffer.content().chunks(width.into()).map(|cells| {
        let line: String = cells.iter().map(|cell| cell.symbol()).collect();
        line.trim_end().to_owned()
    });
    Ok(lines.collect())
}

fn text(screen: &Screen) -> Result<String, Failure> {
    let mut lines = lines(screen, ONCE)?;
    // The last line names the keys.
    lines.pop();
    while lines.last().is_some_and(String::is_empty) {
        lines.pop();
    }
    Ok(lines.join("\n") + "\n")
}

fn unusable(error: impl std::fmt::Display) -> Failure {
    Failure::transport(format!("the terminal cannot be used: {error}"))
}

/// The figures that a list needs.
async fn ask(store: &Store, view: View) -> Result<Figures, Failure> {
    let answer = store.overview().await?;
    let mut figures = Figures {
        overview: serde_json::from_value(answer).map_err(unexpected)?,
        ..Figures::default()
    };
    // A host that does not lead its cluster has no store.
    if figures.overview.rates.is_none() {
        return Ok(figures);
    }
    match view {
        View::Clients if figures.overview.clients.is_some() => {
            let path = format!("/v1/clients?clients={}", limits::TOP_CLIENTS);
            let answer = store.ask(Method::GET, &path).await?;
            figures.clients = Some(serde_json::from_value(answer).map_err(unexpected)?);
        }
        View::Slow => {
            let answer = store.ask(Method::GET, "/v1/slow").await?;
            figures.slow = Some(serde_json::from_value(answer).map_err(unexpected)?);
        }
        _ => {}
    }
    Ok(figures)
}

/// Restores the terminal when it is dropped.
struct Restored(DefaultTerminal);

impl Drop for Restored {
    fn drop(&mut self) {
        ratatui::restore();
    }
}

async fn interact(args: &Args, mut screen: Screen) -> Result<Exit, Failure> {
    let mut terminate = signal(SignalKind::terminate())?;
    // Ctrl-C is a key here, but another process may send the signal.
    let mut interrupt = signal(SignalKind::interrupt())?;
    let mut hangup = signal(SignalKind::hangup())?;
    let mut terminal = Restored(ratatui::try_init().map_err(unusable)?);
    let mut events = events()?;
    let mut due = Instant::now() + args.interval;
    let mut asking = None;
    // When the first question was asked that has no answer.
    let mut asked = Instant::now();
    loop {
        let drawn = terminal.0.draw(|frame| draw(frame, &screen));
        drawn.map_err(unusable)?;
        let answer = async {
            match &mut asking {
                Some(asking) => asking.await,
                None => pending().await,
            }
        };
        tokio::select! {
            event = events.recv() => match event {
                Some(Event::Key(key)) => match screen.press(key) {
                    Next::Stay => {}
                    Next::Ask => {
                        if asking.is_none() {
                            asked = Instant::now();
                        }
                        asking = Some(Box::pin(ask(&args.store, screen.view)));
                    }
                    Next::Quit => return Ok(Exit::Done),
                },
                // Another size: the next round draws it.
                Some(_) => {}
                None => return Err(unusable("its input has ended")),
            },
            figures = answer => {
                screen.refresh(figures);
                asking = None;
            }
            () = sleep_until(due) => {
                let now = Instant::now();
                due = now + args.interval;
                match asking {
                    Some(_) => screen.wait(now - asked, args.interval),
                    None => {
                        asked = now;
                        asking = Some(Box::pin(ask(&args.store, screen.view)));
                    }
                }
            }
            _ = terminate.recv() => return Ok(Exit::Done),
            _ = interrupt.recv() => return Ok(Exit::Done),
            _ = hangup.recv() => return Ok(Exit::Done),
        }
    }
}

/// What the user does at the terminal.
fn events() -> Result<mpsc::Receiver<Event>, Failure> {
    let (sender, receiver) = mpsc::channel(limits::TOP_EVENTS_MAX);
    let read = move || {
        while let Ok(event) = event::read()
            && sender.blocking_send(event).is_ok()
        {}
    };
    // The thread ends with the process.
    std::thread::Builder::new()
        .name("keyboard".into())
        .spawn(read)?;
    Ok(receiver)
}
