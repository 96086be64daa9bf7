//! `omnitap top`: what the status page shows, in a terminal, and each request as it passes its stages.
//!
//! One thread asks the agent once a second, another takes keys and draws: an agent that does not answer holds up no key.

mod app;
mod document;
mod draw;

use std::{
    io::{self, IsTerminal as _},
    sync::mpsc::{Receiver, Sender, channel},
    time::Duration,
};

use ratatui::{
    DefaultTerminal,
    crossterm::event::{self, Event, KeyEventKind},
};

pub use self::{
    app::{App, Look},
    document::Document,
    draw::draw,
};
use crate::{
    config::ListenAddress,
    requests::{
        Page,
        client::{self, ClientError},
    },
};

/// Pause between two looks.
const INTERVAL: Duration = Duration::from_secs(1);

/// Longest time until a new look is drawn.
const DRAW_WITHIN: Duration = Duration::from_millis(100);

/// Why there is nothing to look at.
#[derive(Debug, thiserror::Error)]
pub enum TopError {
    /// It is not started in a terminal.
    #[error(
        "standard output is no terminal: `omnitap top` draws on one; /api/status has the same for programs"
    )]
    NoTerminal,
    /// The terminal fails.
    #[error("the terminal can't be used: {0}")]
    Terminal(#[from] io::Error),
}

/// Shows the agent at an address until a key ends it.
pub fn run(agent: &ListenAddress) -> Result<(), TopError> {
    if !io::stdout().is_terminal() {
        return Err(TopError::NoTerminal);
    }
    let (looks, looks_rx) = channel();
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    let address = agent.clone();
    std::thread::Builder::new()
        .name("omnitap-ask".to_owned())
        .spawn(move || runtime.block_on(ask(&address, &looks)))?;
    let mut terminal = ratatui::try_init()?;
    let shown = show(&mut terminal, App::new(agent.to_string()), &looks_rx);
    let restored = ratatui::try_restore();
    shown?;
    Ok(restored?)
}

/// Asks until nobody takes the answers. The thread ends with the process, also in the middle of a question.
async fn ask(agent: &ListenAddress, looks: &Sender<Look>) {
    let mut last = 0;
    loop {
        let status = client::get(agent, "/api/status").await;
        let requests = match &status {
            Ok(_) => {
                let page: Result<Page, _> = client::get(agent, &format!("/api/requests?after={last}")).await;
                if let Ok(page) = &page {
                    last = page.last;
                }
                page
            }
            Err(_) => Ok(Page::default()),
        };
        let look = Look {
            status: status.map_err(|error| error.to_string()),
            requests: requests.map_err(|error| match error {
                // The agent's own words say what to do.
                ClientError::Refused {
                    status: 404, reason, ..
                } => reason,
                error => error.to_string(),
            }),
        };
        if looks.send(look).is_err() {
            return;
        }
        tokio::time::sleep(INTERVAL).await;
    }
}

fn show(terminal: &mut DefaultTerminal, mut app: App, looks: &Receiver<Look>) -> io::Result<()> {
    let mut is_stale = true;
    loop {
        while let Ok(look) = looks.try_recv() {
            app.take(look);
            is_stale = true;
        }
        if is_stale {
            terminal.draw(|frame| draw(&mut app, frame))?;
            is_stale = false;
        }
        if event::poll(DRAW_WITHIN)? {
            match event::read()? {
                Event::Key(key) if key.kind == KeyEventKind::Press => {
                    if !app.key(key) {
                        return Ok(());
                    }
                    is_stale = true;
                }
                Event::Resize(..) => is_stale = true,
                _ => {}
            }
        }
    }
}
