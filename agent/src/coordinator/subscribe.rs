//! Finds coordinators and listens to what they publish.

use std::{
    collections::BTreeMap,
    net::SocketAddr,
    path::PathBuf,
    sync::{
        Arc,
        mpsc::{SyncSender, TrySendError},
    },
    time::Duration,
};

use parking_lot::Mutex;
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpStream,
    task::AbortHandle,
    time::{Instant, sleep, timeout},
};
use tracing::info;

use super::sample::{CoordinatorSample, News};
use crate::{
    host::{
        identity::PipelineId,
        sockets::{self, Network},
    },
    wire::{
        coordinator::{ReplicaList, parse},
        zmtp::{self, Frame, Frames},
    },
};

/// Pause between two looks at who is there.
const LOOK: Duration = Duration::from_secs(2);
/// Pauses before a coordinator is looked for again, from the first to the longest.
const RETRY: Duration = Duration::from_secs(5);
const LONGEST_RETRY: Duration = Duration::from_mins(1);
/// Longest time for a connection and its greeting, and for silence: a coordinator publishes every 5 s.
const CONNECT: Duration = Duration::from_secs(2);
const SILENCE: Duration = Duration::from_secs(30);
/// Connections of stages are looked at again when a list has an address that is not known, this often at most.
const JOIN_PAUSE: Duration = Duration::from_secs(10);

/// How coordinators are listened to.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Coordinators of pipelines that have none on this host.
    pub addresses: Vec<SocketAddr>,
    /// Where procfs of the initial PID namespace is mounted.
    pub proc_root: PathBuf,
}

/// The processes of distributed pipelines, kept by the host thread; clones share them.
#[derive(Clone, Debug, Default)]
pub struct Members {
    shared: Arc<Mutex<BTreeMap<PipelineId, Member>>>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Member {
    /// With its parent, whose sockets a fork has inherited.
    coordinators: BTreeMap<u32, u32>,
    /// Stage and replica by pid.
    stages: BTreeMap<u32, (u32, Option<u32>)>,
}

impl Members {
    /// A process that may be the coordinator of a pipeline of vLLM-Omni, and its parent.
    pub fn coordinator(&self, pipeline: PipelineId, pid: u32, parent: u32) {
        self.with(pipeline, |member| {
            member.coordinators.insert(pid, parent);
        });
    }

    /// A stage's process.
    pub fn stage(&self, pipeline: PipelineId, pid: u32, stage: u32, replica: Option<u32>) {
        self.with(pipeline, |member| {
            member.stages.insert(pid, (stage, replica));
        });
    }

    fn with(&self, pipeline: PipelineId, change: impl FnOnce(&mut Member)) {
        change(self.shared.lock().entry(pipeline).or_default());
    }

    /// A process has ended.
    pub fn remove(&self, pid: u32) {
        self.shared.lock().retain(|_, member| {
            member.coordinators.remove(&pid);
            member.stages.remove(&pid);
            !member.coordinators.is_empty() || !member.stages.is_empty()
        });
    }

    fn get(&self, pipeline: PipelineId) -> Option<Member> {
        self.shared.lock().get(&pipeline).cloned()
    }
}

/// Listens until the other end of `out` is gone.
pub async fn run(settings: Settings, members: Members, out: SyncSender<CoordinatorSample>) {
    let settings = Arc::new(settings);
    let mut listening: BTreeMap<PipelineId, AbortHandle> = BTreeMap::new();
    loop {
        let present: Vec<PipelineId> = members.shared.lock().keys().copied().collect();
        listening.retain(|pipeline, task| {
            let stays = present.contains(pipeline) && !task.is_finished();
            if !stays {
                task.abort();
            }
            stays
        });
        for pipeline in present {
            let listener = Listener {
                settings: Arc::clone(&settings),
                members: members.clone(),
                pipeline,
                out: out.clone(),
            };
            listening
                .entry(pipeline)
                .or_insert_with(|| tokio::spawn(listener.run()).abort_handle());
        }
        sleep(LOOK).await;
    }
}

/// The other end of the channel is gone: the agent stops.
#[derive(Debug)]
struct Stopped;

struct Listener {
    settings: Arc<Settings>,
    members: Members,
    pipeline: PipelineId,
    out: SyncSender<CoordinatorSample>,
}

impl Listener {
    async fn run(self) {
        let mut pause = RETRY;
        loop {
            for address in self.addresses().await {
                let Ok(publisher) = Subscription::open(address).await else {
                    continue;
                };
                pause = RETRY;
                if self.listen(publisher, address).await.is_err() {
                    return;
                }
            }
            sleep(pause).await;
            pause = (pause * 2).min(LONGEST_RETRY);
        }
    }

    /// Takes lists until the publisher is gone.
    async fn listen(&self, mut publisher: Subscription, address: SocketAddr) -> Result<(), Stopped> {
        info!(pipeline = self.pipeline.0, %address, "listening to the coordinator");
        let mut join = Join::default();
        loop {
            let (news, goes_on) = match publisher.next().await {
                Ok(message) => match parse(&message) {
                    Ok(list) => {
                        let local = join.of(&list, self).await;
                        (News::List { list, local }, true)
                    }
                    Err(_) => (News::Malformed, true),
                },
                Err(Ended::Malformed) => (News::Malformed, false),
                Err(Ended::Closed) => {
                    info!(pipeline = self.pipeline.0, %address, "the coordinator is gone");
                    return Ok(());
                }
            };
            let sample = CoordinatorSample {
                pipeline: self.pipeline,
                news,
            };
            // A reader that is so far behind takes the next list.
            if let Err(TrySendError::Disconnected(_)) = self.out.try_send(sample) {
                return Err(Stopped);
            }
            if !goes_on {
                return Ok(());
            }
        }
    }

    /// Where a coordinator may publish: the sockets of the pipeline's own, else what is configured.
    async fn addresses(&self) -> Vec<SocketAddr> {
        let member = self.members.get(self.pipeline).unwrap_or_default();
        if member.coordinators.is_empty() {
            return self.settings.addresses.clone();
        }
        let proc_root = self.settings.proc_root.clone();
        let found = tokio::task::spawn_blocking(move || {
            let mut found = Vec::new();
            for (pid, parent) in member.coordinators {
                let network = Network::of(&proc_root, pid);
                // Inherited: the API server's own, which serves HTTP.
                let inherited = sockets::listening(&proc_root, parent);
                let mut bound = sockets::listening(&proc_root, pid);
                bound.retain(|address| !inherited.contains(address));
                found.extend(bound.into_iter().filter_map(|bound| network.reach(bound)));
            }
            found
        });
        found.await.unwrap_or_default()
    }
}

/// Which replicas run on this host: a stage's process is connected to the address where it takes requests.
#[derive(Debug, Default)]
struct Join {
    member: Member,
    looked: Option<Instant>,
    /// By address.
    local: BTreeMap<SocketAddr, (u32, Option<u32>)>,
}

impl Join {
    async fn of(&mut self, list: &ReplicaList, listener: &Listener) -> Vec<(String, u32, Option<u32>)> {
        let addresses: Vec<(&str, SocketAddr)> = list
            .replicas
            .iter()
            .filter_map(|replica| {
                let address = replica.input_addr.strip_prefix("tcp://")?.parse().ok()?;
                Some((replica.input_addr.as_str(), address))
            })
            .collect();
        let member = listener.members.get(listener.pipeline).unwrap_or_default();
        let is_known = addresses
            .iter()
            .all(|(_, address)| self.local.contains_key(address));
        let is_due = self.looked.is_none_or(|at| at.elapsed() >= JOIN_PAUSE);
        if (!is_known || self.member != member) && is_due {
            let (stages, proc_root) = (member.stages.clone(), listener.settings.proc_root.clone());
            let found = tokio::task::spawn_blocking(move || {
                let mut local = BTreeMap::new();
                for (pid, place) in stages {
                    local.extend(
                        sockets::connected(&proc_root, pid)
                            .into_iter()
                            .map(|address| (address, place)),
                    );
                }
                local
            });
            self.local = found.await.unwrap_or_default();
            self.member = member;
            self.looked = Some(Instant::now());
        }
        addresses
            .into_iter()
            .filter_map(|(text, address)| {
                let (stage, replica) = self.local.get(&address)?;
                Some((text.to_owned(), *stage, *replica))
            })
            .collect()
    }
}

/// Why nothing more comes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ended {
    /// It can't be reached, is no publisher, has gone, or is silent.
    Closed,
    /// What it sends is no message of a publisher.
    Malformed,
}

/// A connection to a publisher.
#[derive(Debug)]
pub struct Subscription {
    stream: TcpStream,
    frames: Frames,
}

impl Subscription {
    /// Connects and subscribes to everything. Only a PUB socket is taken.
    pub async fn open(address: SocketAddr) -> Result<Self, Ended> {
        let open = async {
            let stream = TcpStream::connect(address).await.map_err(|_| Ended::Closed)?;
            let mut open = Self {
                stream,
                frames: Frames::default(),
            };
            open.send(&zmtp::greeting()).await?;
            open.send(zmtp::READY).await?;
            match open.frame().await? {
                Frame::Command(ready) if zmtp::socket_type(&ready) == Some(b"PUB") => {}
                // Another socket of the same process.
                Frame::Command(_) => return Err(Ended::Closed),
                Frame::Message { .. } => return Err(Ended::Malformed),
            }
            open.send(zmtp::SUBSCRIBE).await?;
            Ok(open)
        };
        timeout(CONNECT, open).await.unwrap_or(Err(Ended::Closed))
    }

    /// The next message of one part; those of several are of another publisher.
    pub async fn next(&mut self) -> Result<Vec<u8>, Ended> {
        loop {
            match timeout(SILENCE, self.frame()).await {
                Ok(Ok(Frame::Message { body, more: false })) => return Ok(body),
                Ok(Ok(Frame::Message { .. })) => return Err(Ended::Malformed),
                Ok(Ok(Frame::Command(_))) => {}
                Ok(Err(ended)) => return Err(ended),
                Err(_) => return Err(Ended::Closed),
            }
        }
    }

    async fn send(&mut self, bytes: &[u8]) -> Result<(), Ended> {
        self.stream.write_all(bytes).await.map_err(|_| Ended::Closed)
    }

    async fn frame(&mut self) -> Result<Frame, Ended> {
        let mut bytes = [0; 8192];
        loop {
            if let Some(frame) = self.frames.next_frame().map_err(|_| Ended::Malformed)? {
                return Ok(frame);
            }
            match self.stream.read(&mut bytes).await {
                Ok(0) | Err(_) => return Err(Ended::Closed),
                Ok(length) => self.frames.push(bytes.get(..length).unwrap_or_default()),
            }
        }
    }
}
