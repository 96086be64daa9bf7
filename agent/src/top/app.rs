//! What `omnitap top` knows and shows: pure, so that a test can press its keys.

use std::collections::VecDeque;

use ratatui::crossterm::event::{KeyCode, KeyEvent, KeyModifiers};

use super::document::{Document, Looks};
use crate::{
    pipeline::records::{OpenRequest, RequestRecord},
    requests::Page,
};

/// Requests that are over and still shown.
const MAX_OVER: usize = 200;

/// Lines that Page Up and Page Down go.
const LEAP: usize = 10;

/// One look at the agent; a text says why there is none.
#[derive(Debug)]
pub struct Look {
    /// Its status.
    pub status: Result<Document, String>,
    /// News of its requests.
    pub requests: Result<Page, String>,
}

/// What is shown.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum View {
    #[default]
    Pipelines,
    Requests,
    Agent,
}

impl View {
    pub(super) const ALL: [Self; 3] = [Self::Pipelines, Self::Requests, Self::Agent];

    pub(super) fn title(self) -> &'static str {
        match self {
            Self::Pipelines => "Pipelines",
            Self::Requests => "Requests",
            Self::Agent => "Agent",
        }
    }

    /// The view `by` places further.
    fn step(self, by: usize) -> Self {
        let at = Self::ALL.iter().position(|view| *view == self).unwrap_or(0);
        Self::ALL.into_iter().cycle().nth(at + by).unwrap_or(self)
    }
}

/// The state of the screen.
#[derive(Debug, Default)]
pub struct App {
    pub(super) address: String,
    pub(super) view: View,
    /// First line that is shown.
    pub(super) scroll: usize,
    pub(super) looks: Looks,
    /// Why the newest look failed.
    pub(super) failure: Option<String>,
    pub(super) open: Vec<OpenRequest>,
    /// The newest first.
    pub(super) over: VecDeque<RequestRecord>,
    /// Why there are no requests.
    pub(super) no_requests: Option<String>,
}

impl App {
    /// Has not looked yet.
    #[must_use]
    pub fn new(address: String) -> Self {
        Self {
            address,
            ..Self::default()
        }
    }

    /// Takes a look at the agent.
    pub fn take(&mut self, look: Look) {
        match look.status {
            Ok(document) => {
                self.failure = None;
                self.looks.push(document);
            }
            Err(reason) => {
                self.failure = Some(reason);
                return;
            }
        }
        match look.requests {
            Ok(page) => {
                self.no_requests = None;
                self.open = page.open;
                for record in page.records {
                    self.over.push_front(record);
                }
                self.over.truncate(MAX_OVER);
            }
            Err(reason) => {
                self.no_requests = Some(reason);
                self.open.clear();
            }
        }
    }

    /// Takes a key. `false`: it was the one that ends.
    pub fn key(&mut self, key: KeyEvent) -> bool {
        let was = self.view;
        match key.code {
            KeyCode::Char('q') | KeyCode::Esc => return false,
            KeyCode::Char('c') if key.modifiers.contains(KeyModifiers::CONTROL) => return false,
            KeyCode::Tab | KeyCode::Right => self.view = self.view.step(1),
            KeyCode::BackTab | KeyCode::Left => self.view = self.view.step(View::ALL.len() - 1),
            KeyCode::Down | KeyCode::Char('j') => self.scroll = self.scroll.saturating_add(1),
            KeyCode::Up | KeyCode::Char('k') => self.scroll = self.scroll.saturating_sub(1),
            KeyCode::PageDown => self.scroll = self.scroll.saturating_add(LEAP),
            KeyCode::PageUp => self.scroll = self.scroll.saturating_sub(LEAP),
            KeyCode::Home => self.scroll = 0,
            _ => {}
        }
        if self.view != was {
            self.scroll = 0;
        }
        true
    }
}
