//! The running agent: threads, attachment of new processes, and the reader that feeds the observer.
//!
//! ```text
//! kernel -> ring buffer -> reader thread: Observer (decode, state, registry)
//!                            |  exec, fork, exit            ^ changes
//!                            v                              |
//!                          host thread: /proc scans, roles -+-> attach thread: probes on, probes off
//! gpu thread: NVML -> samples -> reader thread
//! tokio: the engines' own metrics, coordinators' lists -> samples -> reader thread
//! tokio: HTTP, and a timer that copies the tap's own counters into omnitap_* families
//! ```

use std::{
    collections::{BTreeMap, HashMap, HashSet},
    fs, io,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
        mpsc::{Receiver, RecvTimeoutError, Sender, SyncSender, TryRecvError, channel, sync_channel},
    },
    thread::JoinHandle,
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

use omnitap_ebpf::Counter as KernelCounter;
use tracing::{error, info, warn};

use crate::{
    config::ModelName,
    coordinator::{
        sample::CoordinatorSample,
        subscribe::{self, Members as Distributed, Settings as CoordinatorSettings},
    },
    fill::{
        sample::EngineSample,
        scrape::{self, Servers, Settings as FillSettings},
    },
    gpu::{
        sample::GpuSample,
        sampler::{Members, SamplerThread, Settings as GpuSettings},
    },
    host::{
        connectors::Connectors,
        identity::{Change, Flavor, Pipeline, PipelineId, ProcessKey, Role},
        scan::{Host, Settings as HostSettings},
    },
    metrics::{catalogue::Family, number::as_f64, own::Own},
    observer::{HttpTaken, Observer, Taken},
    pipeline::{stats::Sender as StatSender, transfers::ShmTaken},
    record::{Entry, Item, OwnedFrame, OwnedHttp, OwnedShm, RecordError},
    serve::{Status, TapState},
    statsock::{News, Settings as StatSettings, SocketError, StatSocket, Watched},
    tap::{
        AttachError, Attached, Event, FailureReason, ProbeSet, Reader, Settings as TapSettings, SiteKind,
        Tap, TapError,
    },
    warn_limited,
    wire::{
        assemble::FrameType,
        frame::Frame,
        http::HttpEvent,
        shm::ShmEvent,
        stat::{self, Encoding, Whole},
    },
};

/// Longest time that a frame waits in the ring before it is read.
const READ_INTERVAL: Duration = Duration::from_millis(100);
/// Frames taken from the ring before changes and ticks get their turn.
const READ_BATCH: usize = 4096;
/// Bytes of stat events taken before frames get their turn.
const STAT_BATCH: usize = 256 << 10;
/// Time between ticks of the state machines.
const TICK: Duration = Duration::from_secs(1);
/// A child appears in /proc a moment after the fork is reported, and gets its title later still.
const FORK_PAUSE: Duration = Duration::from_millis(20);
/// Waits between attempts to attach where the failure may pass: a library that is not mapped yet.
const RETRY: [Duration; 7] = [
    Duration::from_millis(200),
    Duration::from_millis(500),
    Duration::from_secs(1),
    Duration::from_secs(2),
    Duration::from_secs(5),
    Duration::from_secs(10),
    Duration::from_secs(30),
];

/// Looks at GPUs that may wait for the reader; one is a few kilobytes.
const GPU_BACKLOG: usize = 4;

/// Reads of engines' own metrics that may wait for the reader; one is some hundred kilobytes.
const FILL_BACKLOG: usize = 2;

/// Lists of replicas that may wait for the reader; a coordinator publishes ten a second at most.
const COORDINATOR_BACKLOG: usize = 16;

/// Why the agent can't start.
#[derive(Debug, thiserror::Error)]
pub enum AgentError {
    /// The tap can't be loaded.
    #[error("the tap can't work here (`omnitap check` says what is missing, `--no-ebpf` goes without): {0}")]
    Tap(#[from] TapError),
    /// A thread can't be started.
    #[error("cannot start a thread: {0}")]
    Thread(#[from] io::Error),
}

/// What the agent is to do.
#[derive(Clone, Debug)]
pub struct Settings {
    /// `None`: no eBPF.
    pub tap: Option<TapSettings>,
    /// Whether the HTTP connections of API servers are watched, too.
    pub http: bool,
    /// Discovery.
    pub host: HostSettings,
    /// `None`: GPUs are not looked at.
    pub gpu: Option<GpuSettings>,
    /// `None`: the engines' own metrics are left alone.
    pub fill: Option<FillSettings>,
    /// `None`: coordinators are left alone.
    pub coordinator: Option<CoordinatorSettings>,
    /// Names for models that no command line tells, the first match counts.
    pub model_names: Vec<ModelName>,
    /// Time that taking the probes off may take at the end.
    pub shutdown_timeout: Duration,
    /// `None`: no stat events. Its tasks run on the runtime that [`Agent::start`] is called on.
    pub stat_socket: Option<StatSettings>,
}

/// Takes one entry of a recording.
pub type EntrySink = Box<dyn FnMut(&Entry) -> Result<(), RecordError> + Send>;

/// Takes what the reader sees, in order, for a recording.
pub struct Recorder {
    /// Whether token ids, text and tensors are blanked.
    pub redact: bool,
    /// Where entries go.
    pub entry: EntrySink,
}

/// A running agent; [`Agent::stop`] ends it.
pub struct Agent {
    tap: Option<Tap>,
    bpf_stats: bool,
    own: Own,
    stop: Arc<AtomicBool>,
    stat_socket: Option<tokio::task::JoinHandle<()>>,
    reader: JoinHandle<()>,
    /// Host and attach thread.
    finders: [JoinHandle<()>; 2],
    gpu: Option<SamplerThread>,
    fill: Option<(FillSettings, Servers, SyncSender<EngineSample>)>,
    coordinator: Option<(CoordinatorSettings, Distributed, SyncSender<CoordinatorSample>)>,
    notices: Sender<Notice>,
    shutdown_timeout: Duration,
}

/// News for the host thread.
enum Notice {
    Exec(u32),
    Fork,
    Exit(u32),
    /// The process serves TLS.
    Tls(u32),
    Stop,
}

/// Work for the attach thread.
enum Attach {
    On(ProcessKey, ProbeSet),
    Off(ProcessKey, ProbeSet),
    FirstScanDone,
}

/// Loads the tap, unless it is off, and warns of what the kernel refuses.
fn load_tap(settings: &Settings, status: &Status) -> Result<(Option<Tap>, Option<Reader>), AgentError> {
    let Some(tap_settings) = &settings.tap else {
        return Ok((None, None));
    };
    let (tap, reader) =
        Tap::load(tap_settings).inspect_err(|source| status.set_tap(TapState::Failed(source.to_string())))?;
    for (tracepoint, source) in tap.missing_tracepoints() {
        warn!(tracepoint, error = %source, "no news of processes from the kernel: scans alone find them");
    }
    for (set, lost) in [
        (ProbeSet::Shm, "transfers through shared memory"),
        (ProbeSet::Http, "HTTP connections"),
        (ProbeSet::Store, "transfers through Mooncake's store"),
        (ProbeSet::Yuanrong, "transfers through Yuanrong's data system"),
        (ProbeSet::Tls, "HTTP connections that libssl encrypts"),
    ] {
        for (program, source) in tap.refused(set) {
            warn!(program, error = %source, "no news of {lost}");
        }
    }
    Ok((Some(tap), Some(reader)))
}

impl Agent {
    /// Loads the tap and starts the threads. `status` turns ready after the first scan, when what it found has its
    /// probes.
    pub fn start(
        settings: &Settings,
        observer: Observer,
        status: &Status,
        recorder: Option<Recorder>,
    ) -> Result<Self, AgentError> {
        let (tap, reader) = load_tap(settings, status)?;
        status.set_tap(if tap.is_some() {
            TapState::Up
        } else {
            TapState::Off
        });

        let own = observer.own();
        let stop = Arc::new(AtomicBool::new(false));
        let (notices, notices_rx) = channel();
        let (changes, changes_rx) = channel();
        let (attach, attach_rx) = channel();
        let members = Members::default();
        let (samples, samples_rx) = sync_channel(GPU_BACKLOG);
        let gpu = match &settings.gpu {
            Some(gpu) => Some(SamplerThread::start(gpu.clone(), members.clone(), samples)?),
            None => None,
        };
        let servers = Servers::default();
        let (reads, reads_rx) = sync_channel(FILL_BACKLOG);
        let fill = settings.fill.clone().map(|fill| (fill, servers.clone(), reads));
        let (news, news_rx) = channel();
        let watched = Watched::default();
        let stat_socket = settings.stat_socket.as_ref().and_then(|settings| {
            let socket = StatSocket::bind(settings).inspect_err(told_why).ok()?;
            info!(path = %settings.path.display(), "taking stat events");
            Some(tokio::spawn(socket.run(news, watched.clone(), own.clone())))
        });
        let distributed = Distributed::default();
        let (lists, lists_rx) = sync_channel(COORDINATOR_BACKLOG);
        let coordinator = settings
            .coordinator
            .clone()
            .map(|coordinator| (coordinator, distributed.clone(), lists));
        let reading = Reading {
            observer,
            changes: changes_rx,
            gpu: samples_rx,
            engines: reads_rx,
            news: news_rx,
            coordinators: lists_rx,
            status: status.clone(),
            notices: notices.clone(),
            recorder,
            next_tick: Instant::now(),
        };
        let discovery = Discovery {
            host: Host::new(settings.host.clone()),
            model_names: settings.model_names.clone(),
            tap: tap.clone(),
            http: settings.http,
            tls: HashSet::new(),
            changes: changes.clone(),
            attach,
            watched,
            status: status.clone(),
            pipelines: BTreeMap::new(),
            roles: HashMap::new(),
            members,
            servers,
            distributed,
            own_start: own_start_ticks(),
        };
        let attacher = Attacher {
            tap: tap.clone(),
            changes,
            members: HashMap::new(),
            attached: HashMap::new(),
            retries: BTreeMap::new(),
            status: status.clone(),
        };
        let reader_stop = Arc::clone(&stop);
        Ok(Self {
            bpf_stats: settings.tap.is_some_and(|tap| tap.bpf_stats),
            own,
            reader: spawn("omnitap-reader", move || reading.run(reader, &reader_stop))?,
            finders: [
                spawn("omnitap-host", move || discovery.run(&notices_rx))?,
                spawn("omnitap-attach", move || attacher.run(&attach_rx))?,
            ],
            gpu,
            fill,
            coordinator,
            tap,
            stop,
            stat_socket,
            notices,
            shutdown_timeout: settings.shutdown_timeout,
        })
    }

    /// What reads the engines' own metrics, for the runtime; the first call gives it, if it is wanted.
    pub fn engine_reads(&mut self) -> Option<impl Future<Output = ()> + Send + 'static> {
        let (settings, servers, out) = self.fill.take()?;
        Some(scrape::run(settings, servers, out))
    }

    /// What listens to coordinators, for the runtime; the first call gives it, if it is wanted.
    pub fn coordinator_lists(&mut self) -> Option<impl Future<Output = ()> + Send + 'static> {
        let (settings, members, out) = self.coordinator.take()?;
        Some(subscribe::run(settings, members, out))
    }

    /// Copies what the tap and the kernel count into the agent's own families. Every few seconds is right.
    pub fn sample(&self) {
        self.own.sample_process();
        let Some(tap) = &self.tap else { return };
        let own = &self.own;
        let stats = tap.stats();
        for (set, failures) in ProbeSet::ALL.iter().zip(stats.failures) {
            for (reason, count) in FailureReason::ALL.iter().zip(failures) {
                own.set_total(
                    Family::OmnitapProbeFailuresTotal,
                    &[set.name(), reason.name()],
                    as_f64(count),
                );
            }
        }
        for (site, count) in SiteKind::ALL.iter().zip(stats.attached) {
            own.set_total(Family::OmnitapProbesAttachedTotal, &[site.name()], as_f64(count));
        }
        own.set(
            Family::OmnitapProbedProcesses,
            &[],
            as_f64(stats.processes as u64),
        );
        let (unread, size) = tap.ring_fill();
        own.set(Family::OmnitapRingBufferUnreadBytes, &[], as_f64(unread as u64));
        own.set(Family::OmnitapRingBufferSizeBytes, &[], f64::from(size));
        own.set_total(Family::OmnitapProbeAttachesTotal, &[], as_f64(stats.attaches));
        own.set_total(
            Family::OmnitapProbeAttachSecondsTotal,
            &[],
            stats.attach_time.as_secs_f64(),
        );
        own.set_total(Family::OmnitapProbeDetachesTotal, &[], as_f64(stats.detaches));
        own.set_total(
            Family::OmnitapProbeDetachSecondsTotal,
            &[],
            stats.detach_time.as_secs_f64(),
        );
        let received = [
            ("frame", stats.reader.frames),
            ("frame_retry", stats.reader.retries),
            ("shm", stats.reader.shm),
            ("shm_foreign", stats.reader.shm_foreign),
            ("http", stats.reader.http),
            ("http_foreign", stats.reader.http_foreign),
            ("process", stats.reader.process_events),
        ];
        for (kind, count) in received {
            own.set_total(Family::OmnitapEventsReceivedTotal, &[kind], as_f64(count));
        }
        let lost = [
            ("malformed", stats.reader.malformed),
            ("shm_unpaired", stats.reader.shm_unpaired),
        ];
        for (kind, count) in lost {
            own.set_total(Family::OmnitapEventsLostTotal, &[kind], as_f64(count));
        }
        match tap.counters() {
            Ok(counters) => {
                for counter in KernelCounter::ALL {
                    let family = if counter.is_loss() {
                        Family::OmnitapEventsLostTotal
                    } else if counter.is_hit() {
                        Family::OmnitapProbeHitsTotal
                    } else {
                        continue;
                    };
                    own.set_total(family, &[counter.as_str()], as_f64(counters.get(counter)));
                }
            }
            Err(source) => warn_limited!((), error = %source, "the kernel's counters can't be read"),
        }
        if self.bpf_stats {
            for program in tap.programs() {
                own.set_total(
                    Family::OmnitapBpfRunSecondsTotal,
                    &[program.name],
                    program.run_time.as_secs_f64(),
                );
                own.set_total(
                    Family::OmnitapBpfRunsTotal,
                    &[program.name],
                    as_f64(program.run_count),
                );
            }
        }
    }

    /// Whether all threads still run: one that ended took its part of the work with it.
    #[must_use]
    pub fn is_alive(&self) -> bool {
        !self.reader.is_finished() && !self.finders.iter().any(JoinHandle::is_finished)
    }

    /// Takes all probes off, reads what is left in the ring and ends the threads. Returns how many probes were still
    /// on when the time ran out; those go with the process.
    #[must_use = "probes that are still on"]
    pub fn stop(self) -> usize {
        let start = Instant::now();
        drop(self.gpu);
        if let Some(stat_socket) = &self.stat_socket {
            stat_socket.abort();
        }
        // The attach thread ends with the host thread: nothing is attached from there on. One that hangs in the
        // kernel must not hold up the end.
        drop(self.notices.send(Notice::Stop));
        while !self.finders.iter().all(JoinHandle::is_finished) && start.elapsed() < self.shutdown_timeout / 2
        {
            std::thread::sleep(Duration::from_millis(2));
        }
        let left = self.tap.map_or(0, |tap| {
            tap.detach_all(self.shutdown_timeout.saturating_sub(start.elapsed()))
        });
        self.stop.store(true, Ordering::Release);
        if self.reader.join().is_err() {
            error!("the reader thread has panicked");
        }
        left
    }
}

/// A socket that can't be made is no reason not to start.
fn told_why(error: &SocketError) {
    if rustix::process::geteuid().is_root() {
        warn!(%error, "no stat events are taken");
    } else {
        info!(%error, "no stat events are taken");
    }
}

fn spawn(name: &str, body: impl FnOnce() + Send + 'static) -> io::Result<JoinHandle<()>> {
    std::thread::Builder::new().name(name.to_owned()).spawn(body)
}

/// `CLOCK_MONOTONIC` in nanoseconds, the clock of the frames.
pub(crate) fn monotonic_ns() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    let seconds = u64::try_from(now.tv_sec).unwrap_or(0);
    seconds
        .saturating_mul(1_000_000_000)
        .saturating_add(u64::try_from(now.tv_nsec).unwrap_or(0))
}

/// Wall clock less `CLOCK_MONOTONIC` in nanoseconds.
fn wall_offset_ns() -> i64 {
    let wall = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .map_or(0, |since| since.as_nanos());
    let offset = i128::try_from(wall).unwrap_or(i128::MAX) - i128::from(monotonic_ns());
    i64::try_from(offset).unwrap_or(0)
}

/// The reader thread.
struct Reading {
    observer: Observer,
    changes: Receiver<Change>,
    gpu: Receiver<GpuSample>,
    engines: Receiver<EngineSample>,
    coordinators: Receiver<CoordinatorSample>,
    status: Status,
    news: Receiver<News>,
    notices: Sender<Notice>,
    recorder: Option<Recorder>,
    next_tick: Instant,
}

impl Reading {
    fn run(mut self, mut reader: Option<Reader>, stop: &AtomicBool) {
        while !stop.load(Ordering::Acquire) {
            self.take_changes();
            self.take_gpu_samples();
            self.take_engine_samples();
            let more = self.take_news();
            self.take_coordinator_lists();
            self.tick_if_due();
            let interval = if more { Duration::ZERO } else { READ_INTERVAL };
            let timeout = interval.min(self.next_tick.saturating_duration_since(Instant::now()));
            match &mut reader {
                Some(open) => {
                    if let Err(source) = open.drain(timeout, READ_BATCH, |event| self.event(event)) {
                        error!(error = %source, "the ring buffer can't be read any more: no frames from here on");
                        reader = None;
                    }
                }
                None => std::thread::sleep(timeout),
            }
        }
        // What was sent before the probes went off.
        if let Some(open) = &mut reader {
            while matches!(
                open.drain(Duration::ZERO, READ_BATCH, |event| self.event(event)),
                Ok(1..)
            ) {}
        }
    }

    fn take_changes(&mut self) {
        loop {
            match self.changes.try_recv() {
                Ok(change) => {
                    let now_ns = monotonic_ns();
                    self.record(now_ns, || Item::Change(change.clone()));
                    self.observer.change(&change, now_ns);
                }
                Err(TryRecvError::Empty | TryRecvError::Disconnected) => return,
            }
        }
    }

    fn take_gpu_samples(&mut self) {
        while let Ok(sample) = self.gpu.try_recv() {
            let now_ns = monotonic_ns();
            self.observer.gpu(&sample, now_ns);
            self.record(now_ns, || Item::Gpu(sample));
        }
    }

    fn take_engine_samples(&mut self) {
        while let Ok(sample) = self.engines.try_recv() {
            self.status
                .set_engine(sample.pipeline, sample.outcome.to_string());
            self.observer.engine(&sample);
            self.record(monotonic_ns(), || Item::Engine(sample));
        }
    }

    fn take_coordinator_lists(&mut self) {
        while let Ok(sample) = self.coordinators.try_recv() {
            let now_ns = monotonic_ns();
            self.observer.coordinator(&sample, now_ns);
            self.record(now_ns, || Item::Coordinator(sample));
        }
    }

    /// Takes stat events, up to a batch. Whether there may be more.
    fn take_news(&mut self) -> bool {
        let mut bytes_left = STAT_BATCH;
        while bytes_left > 0 {
            let Ok(news) = self.news.try_recv() else {
                return false;
            };
            match news {
                News::Opened { sender, pid } => {
                    // Its process was found before it was let in.
                    self.take_changes();
                    let item = || Item::StatOpened {
                        sender: sender.0,
                        pid,
                    };
                    self.record(monotonic_ns(), item);
                    self.observer.stat_opened(sender, pid);
                }
                News::Events {
                    sender,
                    time_ns,
                    encoding,
                    bytes,
                    room,
                } => {
                    bytes_left = bytes_left.saturating_sub(bytes.len());
                    for event in Whole::new(encoding, &bytes) {
                        self.stat(sender, time_ns, event, encoding);
                    }
                    drop(room);
                }
                News::Closed { sender } => {
                    self.record(monotonic_ns(), || Item::StatClosed { sender: sender.0 });
                    self.observer.stat_closed(sender);
                }
            }
        }
        true
    }

    fn stat(&mut self, sender: StatSender, time_ns: u64, bytes: &[u8], encoding: Encoding) {
        match stat::decode(bytes, encoding) {
            Ok((head, event)) => {
                self.observer.stat(sender, time_ns, &head, &event);
                self.record(time_ns, || Item::Stat {
                    sender: sender.0,
                    head,
                    event: Box::new(event),
                });
            }
            Err(error) => {
                warn_limited!(sender, sender = sender.0, %error, "a stat event was dropped");
                self.observer.stat_unread(&error);
            }
        }
    }

    fn tick_if_due(&mut self) {
        let now = Instant::now();
        if now < self.next_tick {
            return;
        }
        self.next_tick = now + TICK;
        let (now_ns, offset) = (monotonic_ns(), wall_offset_ns());
        self.record(now_ns, || Item::WallOffset(offset));
        self.observer.wall_offset(offset);
        self.record(now_ns, || Item::Tick);
        self.observer.tick(now_ns);
    }

    fn event(&mut self, event: Event<'_>) {
        match event {
            Event::Frame(frame) => {
                let mut taken = self.observer.frame(&frame);
                if taken == Taken::Unknown {
                    // The probe went on after its change was sent: the change is here by now.
                    self.take_changes();
                    taken = self.observer.frame(&frame);
                }
                match taken {
                    Taken::Known(kind) => self.record_frame(kind, &frame),
                    Taken::Unknown => self.observer.stranger(),
                }
            }
            Event::Shm(event) => self.shm(&event),
            Event::Http(event) => self.http(&event),
            Event::Tls { pid } => drop(self.notices.send(Notice::Tls(pid))),
            // The host thread is there as long as this one; after its end news are of no use.
            Event::Exec { pid, .. } => drop(self.notices.send(Notice::Exec(pid))),
            Event::Fork { .. } => drop(self.notices.send(Notice::Fork)),
            Event::Exit { pid, .. } => drop(self.notices.send(Notice::Exit(pid))),
        }
    }

    fn shm(&mut self, event: &ShmEvent<'_>) {
        let mut taken = self.observer.shm(event);
        if taken == ShmTaken::Unknown {
            // As for frames.
            self.take_changes();
            taken = self.observer.shm(event);
        }
        match taken {
            ShmTaken::Known if self.recorder.is_some() => {
                let (t, owned) = OwnedShm::new(event);
                self.record(t, || Item::Shm(owned));
            }
            ShmTaken::Known | ShmTaken::Foreign => {}
            ShmTaken::Unknown => self.observer.shm_stranger(),
        }
    }

    fn http(&mut self, event: &HttpEvent<'_>) {
        // Before it is taken: what of it is content goes by what came before.
        let recorded = self.recorder.as_ref().map(|recorder| {
            let mut owned = OwnedHttp::new(event);
            if recorder.redact {
                self.observer.redact_http(event, &mut owned);
            }
            owned
        });
        let mut taken = self.observer.http(event);
        if taken == HttpTaken::Unknown {
            // As for frames.
            self.take_changes();
            taken = self.observer.http(event);
        }
        match (taken, recorded) {
            (HttpTaken::Known, Some(owned)) => self.record(event.time_ns(), || Item::Http(owned)),
            (HttpTaken::Known, None) => {}
            (HttpTaken::Unknown, _) => self.observer.http_stranger(),
        }
    }

    fn record_frame(&mut self, kind: FrameType, frame: &Frame<'_>) {
        let Some(recorder) = &self.recorder else { return };
        let mut owned = OwnedFrame::new(frame);
        if recorder.redact {
            self.observer.redact(kind, &mut owned);
        }
        self.record(frame.time_ns, || Item::Frame(owned));
    }

    fn record(&mut self, t: u64, item: impl FnOnce() -> Item) {
        if let Some(recorder) = &mut self.recorder
            && let Err(source) = (recorder.entry)(&Entry { t, item: item() })
        {
            error!(error = %source, "recording ends here");
            self.recorder = None;
        }
    }
}

/// The host thread.
struct Discovery {
    host: Host,
    model_names: Vec<ModelName>,
    tap: Option<Tap>,
    http: bool,
    /// Processes that serve TLS.
    tls: HashSet<ProcessKey>,
    changes: Sender<Change>,
    attach: Sender<Attach>,
    watched: Watched,
    status: Status,
    pipelines: BTreeMap<PipelineId, Pipeline>,
    /// Processes with their role and pipeline.
    roles: HashMap<ProcessKey, (Role, PipelineId)>,
    /// The same for the look at GPUs.
    members: Members,
    /// Those that serve HTTP, for the reads of their own metrics.
    servers: Servers,
    /// Coordinators and stages, for the lists of replicas.
    distributed: Distributed,
    /// When the agent started, as processes have it.
    own_start: u64,
}

impl Discovery {
    fn run(mut self, notices: &Receiver<Notice>) {
        let mut next_scan = Instant::now();
        let mut first = true;
        loop {
            let found = match notices.recv_timeout(next_scan.saturating_duration_since(Instant::now())) {
                Ok(Notice::Exec(pid)) => self.host.examine(pid),
                Ok(Notice::Exit(pid)) => Ok(self.host.gone(pid)),
                Ok(Notice::Fork) => {
                    next_scan = next_scan.min(Instant::now() + FORK_PAUSE);
                    continue;
                }
                Ok(Notice::Tls(pid)) => {
                    self.serves_tls(pid);
                    continue;
                }
                Ok(Notice::Stop) | Err(RecvTimeoutError::Disconnected) => return,
                Err(RecvTimeoutError::Timeout) => {
                    let found = self.host.scan();
                    next_scan = Instant::now() + self.host.next_look();
                    found
                }
            };
            match found {
                Ok(changes) => {
                    if !changes.is_empty() {
                        next_scan = next_scan.min(Instant::now() + self.host.next_look());
                    }
                    for change in changes {
                        self.tell(change);
                    }
                    for (key, connectors) in self.host.look_for_connectors() {
                        self.connectors_seen(key, connectors);
                    }
                    if std::mem::take(&mut first) {
                        self.watched.scanned();
                        drop(self.attach.send(Attach::FirstScanDone));
                    }
                }
                Err(source) => {
                    warn_limited!((), error = %source, "processes can't be looked at");
                    next_scan = Instant::now() + Duration::from_secs(1);
                }
            }
        }
    }

    fn tell(&mut self, mut change: Change) {
        if let Change::Pipeline(pipeline) = &mut change {
            self.name_model(pipeline);
        }
        let mut attach = Vec::new();
        match &change {
            Change::Process(process) => {
                let pid = process.key.pid;
                info!(pid, role = ?process.role, pipeline = process.pipeline.0, "process");
                if let Some(tap) = &self.tap
                    && let Err(source) = tap.watch(pid)
                {
                    warn!(pid, error = %source, "the kernel won't tell of its forks and its end: scans will");
                }
                self.members.insert(pid);
                if process.role.serves_http() {
                    let pipeline = self.pipelines.get(&process.pipeline);
                    let is_root = pipeline.is_some_and(|pipeline| pipeline.root == process.key);
                    let is_fresh = process.key.start_ticks > self.own_start;
                    self.servers.insert(process.pipeline, pid, is_root, is_fresh);
                }
                let is_omni = self
                    .pipelines
                    .get(&process.pipeline)
                    .is_some_and(|pipeline| pipeline.flavor == Flavor::Omni);
                match process.role {
                    Role::Coordinator if is_omni => {
                        self.distributed
                            .coordinator(process.pipeline, pid, process.parent);
                    }
                    Role::LlmStage {
                        stage: Some(stage),
                        replica,
                    }
                    | Role::DiffusionStage {
                        stage: Some(stage),
                        replica,
                    } if is_omni => self.distributed.stage(process.pipeline, pid, stage, replica),
                    _ => {}
                }
                self.roles.insert(process.key, (process.role, process.pipeline));
                attach.extend(ProbeSet::ALL.map(|set| {
                    if self.belongs(set, process.key, process.role, process.pipeline) {
                        Attach::On(process.key, set)
                    } else {
                        Attach::Off(process.key, set)
                    }
                }));
            }
            Change::ProcessGone(key) => {
                info!(pid = key.pid, "process has ended");
                if let Some(tap) = &self.tap {
                    // Fails where the pid was not watched: then there is nothing to undo.
                    drop(tap.unwatch(key.pid));
                }
                self.members.remove(key.pid);
                self.distributed.remove(key.pid);
                self.servers.remove(key.pid);
                self.roles.remove(key);
                self.tls.remove(key);
                attach.extend(ProbeSet::ALL.map(|set| Attach::Off(*key, set)));
            }
            Change::Pipeline(pipeline) => {
                let Pipeline {
                    id,
                    flavor,
                    model,
                    versions,
                    ..
                } = pipeline;
                info!(pipeline = id.0, ?flavor, model, ?versions, "pipeline");
                self.pipelines.insert(*id, pipeline.clone());
                // What it runs may have become known by this.
                let members = self
                    .roles
                    .iter()
                    .filter(|(key, (role, of))| of == id && self.belongs(ProbeSet::Shm, **key, *role, *of));
                attach.extend(members.map(|(key, _)| Attach::On(*key, ProbeSet::Shm)));
            }
            Change::PipelineGone(id) => {
                info!(pipeline = id.0, "pipeline has ended");
                self.pipelines.remove(id);
            }
            Change::Payloads { .. } => {}
        }
        let (found, gone) = match &change {
            Change::Process(process) => (Some(process.key.pid), None),
            Change::ProcessGone(key) => (None, Some(key.pid)),
            _ => (None, None),
        };
        self.status.change(&change);
        // The change goes first: the reader looks for it when a frame comes from a process it does not know.
        drop(self.changes.send(change));
        if let Some(pid) = found {
            self.watched.found(pid);
        }
        if let Some(pid) = gone {
            self.watched.gone(pid);
        }
        for attach in attach {
            drop(self.attach.send(attach));
        }
    }

    /// A process whose HTTP is watched accepted a connection that is encrypted.
    fn serves_tls(&mut self, pid: u32) {
        let Some(&key) = self.roles.keys().find(|key| key.pid == pid) else {
            return;
        };
        if self.tls.insert(key) {
            info!(pid, "serves TLS");
            drop(self.attach.send(Attach::On(key, ProbeSet::Tls)));
        }
    }

    /// A process may use these connectors.
    fn connectors_seen(&self, key: ProcessKey, connectors: Connectors) {
        info!(pid = key.pid, ?connectors, "connectors");
        let Some(&(role, pipeline)) = self.roles.get(&key) else {
            return;
        };
        let sets = ProbeSet::ALL.into_iter();
        let sets = sets.filter(|&set| self.belongs(set, key, role, pipeline));
        for set in sets {
            drop(self.attach.send(Attach::On(key, set)));
        }
    }

    /// Whether a process of this role and pipeline gets these probes. All that a worker sends is wake-ups, unless its
    /// connector sends messages.
    fn belongs(&self, set: ProbeSet, key: ProcessKey, role: Role, pipeline: PipelineId) -> bool {
        let is_omni = || {
            self.pipelines
                .get(&pipeline)
                .is_some_and(|pipeline| pipeline.flavor == Flavor::Omni)
        };
        match set {
            ProbeSet::Frames => {
                role.is_tapped() || role == Role::Worker && is_omni() && self.host.connectors(key).control
            }
            ProbeSet::Shm => role.has_connector() && is_omni(),
            ProbeSet::Http => role.serves_http() && self.http,
            ProbeSet::Store => role.has_connector() && is_omni() && self.host.connectors(key).store,
            ProbeSet::Yuanrong => role.has_connector() && is_omni() && self.host.connectors(key).yuanrong,
            ProbeSet::Tls => self.tls.contains(&key),
        }
    }
}

impl Discovery {
    /// Takes the configured name for a model that the command line does not tell.
    fn name_model(&self, pipeline: &mut Pipeline) {
        if pipeline.model.is_some() || self.model_names.is_empty() {
            return;
        }
        let command_lines = [Some(pipeline.root.pid), parent(pipeline.root.pid)]
            .into_iter()
            .flatten()
            .filter_map(|pid| fs::read(format!("/proc/{pid}/cmdline")).ok())
            .map(|line| String::from_utf8_lossy(&line).replace('\0', " "));
        if let Some(name) = ModelName::of(&self.model_names, command_lines) {
            pipeline.model = Some(name.to_owned());
            pipeline.served_model.get_or_insert_with(|| name.to_owned());
        }
    }
}

/// Start of this process in clock ticks since boot.
fn own_start_ticks() -> u64 {
    procfs::process::Process::myself()
        .and_then(|own| own.stat())
        .map_or(u64::MAX, |stat| stat.starttime)
}

fn parent(pid: u32) -> Option<u32> {
    let process = procfs::process::Process::new(i32::try_from(pid).ok()?).ok()?;
    u32::try_from(process.stat().ok()?.ppid).ok()
}

fn mark(sets: &mut [bool; ProbeSet::ALL.len()], set: ProbeSet, value: bool) {
    if let Some(mark) = sets.get_mut(set.index()) {
        *mark = value;
    }
}

/// The attach thread.
struct Attacher {
    tap: Option<Tap>,
    changes: Sender<Change>,
    members: HashMap<ProcessKey, Member>,
    attached: HashMap<(ProcessKey, ProbeSet), Attached>,
    /// What is to be tried again, by when, with the number of attempts so far.
    retries: BTreeMap<(Instant, ProcessKey, ProbeSet), usize>,
    status: Status,
}

/// The probes of a process.
#[derive(Default)]
struct Member {
    /// By [`ProbeSet::index`], those that it is to have, and those of them that are on.
    wanted: [bool; ProbeSet::ALL.len()],
    on: [bool; ProbeSet::ALL.len()],
    /// What the reader was told last.
    told: bool,
}

impl Member {
    /// Whether all that it hands on by a connector is seen.
    fn sees_payloads(&self) -> bool {
        let wants_shm = self.wanted.get(ProbeSet::Shm.index()) == Some(&true);
        wants_shm && self.wanted.iter().zip(self.on).all(|(wanted, on)| !wanted || on)
    }
}

impl Attacher {
    fn run(mut self, work: &Receiver<Attach>) {
        loop {
            let next = match self.retries.first_key_value() {
                Some(((due, ..), _)) => work.recv_timeout(due.saturating_duration_since(Instant::now())),
                None => work.recv().map_err(|_| RecvTimeoutError::Disconnected),
            };
            match next {
                Ok(Attach::On(key, set)) => {
                    self.member(key, |member| mark(&mut member.wanted, set, true));
                    let waits =
                        |waiting: &(Instant, ProcessKey, ProbeSet)| (waiting.1, waiting.2) == (key, set);
                    if !self.attached.contains_key(&(key, set)) && !self.retries.keys().any(waits) {
                        self.on(key, set, 0);
                    }
                }
                Ok(Attach::Off(key, set)) => {
                    self.retries
                        .retain(|waiting, _| (waiting.1, waiting.2) != (key, set));
                    // Dropping takes the probes off on a thread of the tap's.
                    drop(self.attached.remove(&(key, set)));
                    self.member(key, |member| {
                        mark(&mut member.wanted, set, false);
                        mark(&mut member.on, set, false);
                    });
                }
                Ok(Attach::FirstScanDone) => self.status.set_scanned(),
                Err(RecvTimeoutError::Timeout) => {
                    if let Some(((_, key, set), attempts)) = self.retries.pop_first() {
                        self.on(key, set, attempts);
                    }
                }
                Err(RecvTimeoutError::Disconnected) => return,
            }
        }
    }

    /// Changes what is known of a process, and tells the reader what follows from it.
    fn member(&mut self, key: ProcessKey, change: impl FnOnce(&mut Member)) {
        let member = self.members.entry(key).or_default();
        change(member);
        let seen = member.sees_payloads();
        if std::mem::replace(&mut member.told, seen) != seen {
            drop(self.changes.send(Change::Payloads { key, seen }));
        }
        if !member.wanted.contains(&true) {
            self.members.remove(&key);
        }
    }

    fn on(&mut self, key: ProcessKey, set: ProbeSet, attempts: usize) {
        let Some(tap) = &self.tap else { return };
        match tap.attach_set(key, set) {
            Ok(attached) => {
                for probe in attached.probes() {
                    let (path, function, site) = (&probe.path, probe.function, probe.kind.name());
                    info!(
                        pid = key.pid,
                        path,
                        function,
                        offset = probe.offset,
                        site,
                        "probe on"
                    );
                    if probe.kind == SiteKind::Slow {
                        warn!(
                            path,
                            function,
                            "no cheap instruction to probe in this function: a hit costs some 9 us, not 0.5 us"
                        );
                    } else if probe.kind == SiteKind::Helper {
                        warn!(
                            path,
                            "this libc makes its system calls in one function: each call of HTTP is two hits, and other calls are one"
                        );
                    }
                }
                self.status.probed(key, set.name(), Ok(()));
                self.attached.insert((key, set), attached);
                self.member(key, |member| mark(&mut member.on, set, true));
            }
            // Its end is on its way.
            Err(AttachError::Gone) => {}
            Err(source) if source.is_transient() => {
                let pause = RETRY.get(attempts).or(RETRY.last()).copied().unwrap_or_default();
                // A process that starts maps its libraries late: only a longer wait is worth a line.
                if attempts >= RETRY.len() / 2 {
                    self.status.probed(key, set.name(), Err(source.to_string()));
                    warn_limited!((key.pid, set), pid = key.pid, probes = set.name(), error = %source, "no probe yet, trying again");
                }
                self.retries
                    .insert((Instant::now() + pause, key, set), attempts + 1);
            }
            Err(source) => {
                self.status.probed(key, set.name(), Err(source.to_string()));
                warn!(pid = key.pid, probes = set.name(), error = %source, "no probe on this process");
            }
        }
    }
}
