//! What the screen shows, and what keys change.

use std::collections::VecDeque;
use std::time::Duration;

use clap::ValueEnum;
use ratatui::crossterm::event::{KeyCode, KeyEvent, KeyEventKind, KeyModifiers};

use super::Figures;
use crate::admin::Clients;
use crate::admin::overview::document::Overview;
use crate::cli::output::Failure;
use statehouse_config::limits;
use statehouse_server::SlowRequests;

/// The list in the lower part.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub(super) enum View {
    /// The keys with the most requests.
    #[default]
    Keys,
    /// The policies with a role.
    Policies,
    /// The clients of the embedded broker.
    Clients,
    /// The last slow requests.
    Slow,
    /// The place in a cluster.
    Cluster,
}

impl View {
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Keys => "keys",
            Self::Policies => "policies",
            Self::Clients => "clients",
            Self::Slow => "slow",
            Self::Cluster => "cluster",
        }
    }

    /// The names of its orders.
    pub(super) fn orders(self) -> &'static [&'static str] {
        match self {
            Self::Keys => &["rate", "key"],
            Self::Policies => &["rate", "name", "failures"],
            Self::Clients => &["queue", "watches", "client"],
            Self::Slow => &["newest", "longest"],
            Self::Cluster => &["name"],
        }
    }
}

/// For how long the store may be silent before the screen says so, if two intervals are shorter.
const SILENCE_MAX: Duration = Duration::from_secs(2);

/// What a key leads to.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Next {
    Stay,
    /// Other figures are needed.
    Ask,
    Quit,
}

#[derive(Default)]
pub(super) struct Screen {
    pub(super) view: View,
    /// The number of the order.
    pub(super) order: usize,
    /// The first line of the list that is shown.
    pub(super) top: usize,
    pub(super) overview: Overview,
    pub(super) clients: Option<Clients>,
    pub(super) slow: Option<SlowRequests>,
    /// The rates of requests of the last refreshes, the newest last.
    pub(super) history: VecDeque<u64>,
    /// Why the figures are old.
    pub(super) problem: Option<String>,
}

impl Screen {
    pub(super) fn new(view: View) -> Self {
        Self {
            view,
            ..Self::default()
        }
    }

    /// Takes the figures of a refresh.
    pub(super) fn refresh(&mut self, figures: Result<Figures, Failure>) {
        let figures = match figures {
            Ok(figures) => figures,
            Err(failure) => {
                self.problem = Some(failure.message().to_owned());
                return;
            }
        };
        self.problem = None;
        let rates = figures.overview.rates.as_ref();
        // Rates are not negative.
        self.history
            .push_back(rates.map_or(0, |it| it.requests as u64));
        if self.history.len() > limits::TOP_HISTORY_MAX {
            self.history.pop_front();
        }
        self.overview = figures.overview;
        self.clients = figures.clients;
        self.slow = figures.slow;
    }

    /// There has been no answer for this time. Figures are asked for at this interval.
    pub(super) fn wait(&mut self, time: Duration, interval: Duration) {
        if time >= SILENCE_MAX.max(interval.saturating_mul(2)) {
            self.problem = Some("the store does not answer".to_owned());
        }
    }

    pub(super) fn press(&mut self, key: KeyEvent) -> Next {
        if key.kind == KeyEventKind::Release {
            return Next::Stay;
        }
        let page = 10;
        match key.code {
            KeyCode::Char('q') | KeyCode::Esc => return Next::Quit,
            KeyCode::Char('c') if key.modifiers.contains(KeyModifiers::CONTROL) => {
                return Next::Quit;
            }
            KeyCode::Char('s') => {
                self.order = (self.order + 1) % self.view.orders().len();
                self.top = 0;
            }
            KeyCode::Char(digit @ '1'..='5') => {
                return self.choose(digit as usize - '1' as usize);
            }
            KeyCode::Tab => {
                return self.choose((self.view as usize + 1) % View::value_variants().len());
            }
            KeyCode::Up | KeyCode::Char('k') => self.top = self.top.saturating_sub(1),
            KeyCode::Down | KeyCode::Char('j') => self.top = self.top.saturating_add(1),
            KeyCode::PageUp => self.top = self.top.saturating_sub(page),
            KeyCode::PageDown => self.top = self.top.saturating_add(page),
            KeyCode::Home => self.top = 0,
            _ => {}
        }
        Next::Stay
    }

    fn choose(&mut self, number: usize) -> Next {
        (self.view, self.order, self.top) = (View::value_variants()[number], 0, 0);
        Next::Ask
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn press(screen: &mut Screen, code: KeyCode) -> Next {
        screen.press(KeyEvent::new(code, KeyModifiers::NONE))
    }

    #[test]
    fn keys_choose_the_list_its_order_and_its_place() {
        let mut screen = Screen::new(View::Keys);
        assert_eq!(press(&mut screen, KeyCode::Char('3')), Next::Ask);
        assert_eq!(screen.view, View::Clients);
        assert_eq!(press(&mut screen, KeyCode::Char('s')), Next::Stay);
        press(&mut screen, KeyCode::Down);
        press(&mut screen, KeyCode::PageDown);
        press(&mut screen, KeyCode::Up);
        assert_eq!((screen.order, screen.top), (1, 10));
        press(&mut screen, KeyCode::Char('s'));
        press(&mut screen, KeyCode::Char('s'));
        assert_eq!((screen.order, screen.top), (0, 0));
        assert_eq!(press(&mut screen, KeyCode::Tab), Next::Ask);
        assert_eq!(screen.view, View::Slow);
        press(&mut screen, KeyCode::Tab);
        press(&mut screen, KeyCode::Tab);
        assert_eq!(screen.view, View::Keys);
        assert_eq!(press(&mut screen, KeyCode::Char('c')), Next::Stay);
        let interrupt = KeyEvent::new(KeyCode::Char('c'), KeyModifiers::CONTROL);
        assert_eq!(screen.press(interrupt), Next::Quit);
        assert_eq!(press(&mut screen, KeyCode::Char('q')), Next::Quit);
    }

    #[test]
    fn figures_stay_while_the_store_does_not_answer() {
        let mut screen = Screen::new(View::Keys);
        for _ in 0..2 * limits::TOP_HISTORY_MAX {
            let mut figures = Figures::default();
            figures.overview.store = "here".to_owned();
            screen.refresh(Ok(figures));
        }
        assert_eq!(screen.history.len(), limits::TOP_HISTORY_MAX);
        screen.refresh(Err(Failure::transport("no answer")));
        assert_eq!(screen.problem.as_deref(), Some("no answer"));
        assert_eq!(screen.overview.store, "here");
    }

    #[test]
    fn silence_of_two_intervals_is_a_problem() {
        let second = Duration::from_secs(1);
        for (time, interval, is_problem) in [
            (2 * second, second / 4, true),
            (second, second / 4, false),
            (9 * second, 5 * second, false),
            (10 * second, 5 * second, true),
            (10 * second, Duration::MAX, false),
        ] {
            let mut screen = Screen::new(View::Keys);
            screen.wait(time, interval);
            assert_eq!(
                screen.problem.is_some(),
                is_problem,
                "{time:?} {interval:?}"
            );
        }
    }
}
