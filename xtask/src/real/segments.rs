//! The shared-memory segments that a connector makes, counted without the agent: by inotify on /dev/shm.

use std::{
    collections::HashSet,
    fs::File,
    mem::MaybeUninit,
    path::{Path, PathBuf},
    thread::JoinHandle,
};

use anyhow::{Context, Result, anyhow, ensure};
use rustix::fs::inotify;

const FOLDER: &str = "/dev/shm";

/// Watches from its making until [`Segments::finish`].
pub(crate) struct Segments {
    /// A file whose appearance ends the watch.
    end: PathBuf,
    thread: JoinHandle<Result<Vec<Segment>>>,
}

/// A file that appeared.
struct Segment {
    name: String,
    /// Open, so that its size can be told when it is gone from the folder.
    file: Option<File>,
    size: Option<u64>,
}

impl Segment {
    /// Takes the size, which is set by now.
    fn settle(&mut self) {
        if let Some(file) = self.file.take() {
            self.size = file.metadata().ok().map(|about| about.len());
        }
    }
}

/// Files that are kept open: their makers set the size within a millisecond.
const OPEN: usize = 64;

impl Segments {
    pub(crate) fn watch() -> Result<Self> {
        let queue = inotify::init(inotify::CreateFlags::CLOEXEC).context("no inotify")?;
        inotify::add_watch(&queue, FOLDER, inotify::WatchFlags::CREATE)
            .with_context(|| format!("cannot watch {FOLDER}"))?;
        let end = Path::new(FOLDER).join(format!("omnitap-xtask-{}", std::process::id()));
        let last = end.clone();
        let thread = std::thread::spawn(move || {
            let mut buffer = [MaybeUninit::uninit(); 16 << 10];
            let mut events = inotify::Reader::new(queue, &mut buffer);
            let mut segments: Vec<Segment> = Vec::new();
            loop {
                let event = events.next().context("inotify")?;
                ensure!(
                    !event.events().contains(inotify::ReadFlags::QUEUE_OVERFLOW),
                    "more files than inotify could tell of"
                );
                let Some(name) = event.file_name().and_then(|name| name.to_str().ok()) else {
                    continue;
                };
                let path = Path::new(FOLDER).join(name);
                if path == last {
                    return Ok(segments);
                }
                segments.push(Segment {
                    name: name.to_owned(),
                    file: File::open(path).ok(),
                    size: None,
                });
                if let Some(old) = segments
                    .len()
                    .checked_sub(OPEN)
                    .and_then(|at| segments.get_mut(at))
                {
                    old.settle();
                }
            }
        });
        Ok(Self { end, thread })
    }

    /// The sizes in bytes of the segments that a connector made: those that have a lock file beside them. `None`: it
    /// was gone before it could be opened here.
    pub(crate) fn finish(self) -> Result<Vec<Option<u64>>> {
        std::fs::write(&self.end, "").with_context(|| format!("cannot make {}", self.end.display()))?;
        std::fs::remove_file(&self.end)?;
        let mut all = self
            .thread
            .join()
            .map_err(|_| anyhow!("the watch on {FOLDER} panicked"))??;
        let locks: HashSet<String> = all
            .iter()
            .filter_map(|s| s.name.strip_prefix("shm_")?.strip_suffix("_lockfile.lock"))
            .map(str::to_owned)
            .collect();
        all.iter_mut().for_each(Segment::settle);
        let made = all.iter().filter(|s| locks.contains(&s.name));
        Ok(made.map(|s| s.size).collect())
    }
}
