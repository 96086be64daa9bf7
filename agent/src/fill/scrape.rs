//! Reads the engines' `/metrics` in an interval, one after the other.

use std::{
    collections::BTreeMap,
    net::SocketAddr,
    path::PathBuf,
    sync::{Arc, mpsc::SyncSender},
    time::Duration,
};

use http_body_util::{BodyExt as _, Empty, Limited};
use hyper::{
    Request, StatusCode,
    body::Bytes,
    client::conn::http1,
    header::{ACCEPT, HOST, USER_AGENT},
};
use hyper_util::rt::TokioIo;
use parking_lot::Mutex;
use tokio::{
    net::TcpStream,
    time::{Instant, sleep, timeout},
};

use super::{
    address, parse,
    sample::{EngineChild, EngineSample, Failure, Outcome},
};
use crate::host::identity::PipelineId;

/// Longest time that a server may take for an answer.
const TIMEOUT: Duration = Duration::from_secs(5);
/// Longest answer in bytes; a server of many stages has some hundred thousand.
const MAX_BYTES: usize = 4 << 20;
/// Pause before a server without an address is looked at again; it comes up some time after its process.
const ADDRESS_PAUSE: Duration = Duration::from_secs(15);

/// How the engines' `/metrics` are read.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Pause between two reads of a server.
    pub interval: Duration,
    /// Where procfs of the initial PID namespace is mounted.
    pub proc_root: PathBuf,
}

/// The API servers, kept by the host thread; clones share them.
#[derive(Clone, Debug, Default)]
pub struct Servers {
    shared: Arc<Mutex<BTreeMap<PipelineId, Server>>>,
}

#[derive(Clone, Debug)]
struct Server {
    /// The process with the command line first, then API workers.
    pids: Vec<u32>,
    is_fresh: bool,
}

impl Servers {
    /// A process that serves HTTP. `is_root`: it has the command line; `is_fresh`: it was started under the agent's eyes.
    pub fn insert(&self, pipeline: PipelineId, pid: u32, is_root: bool, is_fresh: bool) {
        let mut servers = self.shared.lock();
        let server = servers.entry(pipeline).or_insert_with(|| Server {
            pids: Vec::new(),
            is_fresh,
        });
        if !server.pids.contains(&pid) {
            let at = if is_root { 0 } else { server.pids.len() };
            server.pids.insert(at, pid);
        }
    }

    /// A process has ended.
    pub fn remove(&self, pid: u32) {
        self.shared.lock().retain(|_, server| {
            server.pids.retain(|other| *other != pid);
            !server.pids.is_empty()
        });
    }
}

/// Reads until the other end of `out` is gone.
pub async fn run(settings: Settings, servers: Servers, out: SyncSender<EngineSample>) {
    let mut due: BTreeMap<PipelineId, (Instant, Option<SocketAddr>)> = BTreeMap::new();
    loop {
        let present = servers.shared.lock().clone();
        due.retain(|pipeline, _| present.contains_key(pipeline));
        for (pipeline, server) in present {
            let (at, known) = due.get(&pipeline).copied().unwrap_or((Instant::now(), None));
            if Instant::now() < at {
                continue;
            }
            let (outcome, address) = read(&settings, &server, known).await;
            let pause = match &outcome {
                Outcome::Failed(Failure::NoAddress) => settings.interval.min(ADDRESS_PAUSE),
                _ => settings.interval,
            };
            due.insert(pipeline, (Instant::now() + pause, address));
            let sample = EngineSample {
                pipeline,
                is_fresh: server.is_fresh,
                outcome,
            };
            // A reader that is so far behind takes the next one.
            if let Err(std::sync::mpsc::TrySendError::Disconnected(_)) = out.try_send(sample) {
                return;
            }
        }
        sleep(Duration::from_secs(1)).await;
    }
}

/// One read; the address is returned where it proved right.
async fn read(
    settings: &Settings,
    server: &Server,
    known: Option<SocketAddr>,
) -> (Outcome, Option<SocketAddr>) {
    let address = if let Some(address) = known {
        address
    } else {
        let (proc_root, pids) = (settings.proc_root.clone(), server.pids.clone());
        // Reads many small files.
        let found = tokio::task::spawn_blocking(move || address::find(&proc_root, &pids)).await;
        match found.unwrap_or(Err(Failure::NoAddress)) {
            Ok(address) => address,
            Err(failure) => return (Outcome::Failed(failure), None),
        }
    };
    match timeout(TIMEOUT, fetch(address)).await {
        Ok(Ok(children)) => (Outcome::Read(children), Some(address)),
        Ok(Err(failure)) => (Outcome::Failed(failure), None),
        Err(_) => (Outcome::Failed(Failure::Timeout), None),
    }
}

/// Reads the `/metrics` at an address.
pub async fn fetch(address: SocketAddr) -> Result<Vec<EngineChild>, Failure> {
    let stream = TcpStream::connect(address)
        .await
        .map_err(|_| Failure::Connection)?;
    let (mut sender, connection) = http1::handshake(TokioIo::new(stream))
        .await
        .map_err(|_| Failure::Connection)?;
    let request = Request::get("/metrics")
        .header(HOST, address.to_string())
        .header(ACCEPT, "text/plain;version=0.0.4")
        .header(USER_AGENT, concat!("omnitap/", env!("CARGO_PKG_VERSION")))
        .body(Empty::<Bytes>::new())
        .map_err(|_| Failure::Connection)?;
    let answer = async {
        let response = sender
            .send_request(request)
            .await
            .map_err(|_| Failure::Connection)?;
        match response.status() {
            StatusCode::OK => {}
            StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN => return Err(Failure::Unauthorized),
            StatusCode::NOT_FOUND => return Err(Failure::NotFound),
            _ => return Err(Failure::Status),
        }
        let body = Limited::new(response.into_body(), MAX_BYTES);
        let body = body.collect().await.map_err(|error| {
            if error.is::<http_body_util::LengthLimitError>() {
                Failure::TooLong
            } else {
                Failure::Connection
            }
        })?;
        let text = body.to_bytes();
        let text = str::from_utf8(&text).map_err(|_| Failure::Malformed)?;
        parse::parse(text).map_err(|_| Failure::Malformed)
    };
    let mut connection = std::pin::pin!(connection);
    let mut answer = std::pin::pin!(answer);
    tokio::select! {
        done = &mut answer => done,
        // The server closed it: what it has sent may still be there.
        _ = &mut connection => answer.await,
    }
}
