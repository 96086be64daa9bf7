//! HTTP: /metrics, /healthz, /readyz and the landing page.
//!
//! A scrape renders what is there and waits for no source. Rendering and compression run on blocking threads, two at a
//! time: the agent runs beside production, and a scrape takes about a millisecond.

mod deadline;
mod negotiate;
mod page;
mod status;

use std::{
    convert::Infallible,
    io::{self, Write as _},
    net::SocketAddr,
    sync::Arc,
    time::{Duration, Instant},
};

use flate2::{Compression, write::GzEncoder};
use http_body_util::Full;
use hyper::{
    Method, Request, Response, StatusCode,
    body::{Bytes, Incoming},
    header::{
        ACCEPT, ACCEPT_ENCODING, ALLOW, CONTENT_ENCODING, CONTENT_SECURITY_POLICY, CONTENT_TYPE, HeaderValue,
        VARY, X_CONTENT_TYPE_OPTIONS,
    },
    server::conn::http1,
    service::service_fn,
};
use hyper_util::rt::TokioIo;
use parking_lot::Mutex;
use tokio::{
    net::{TcpListener, TcpStream},
    sync::{Semaphore, watch},
    task::JoinSet,
};

pub use self::status::{Status, TapState};
use self::{deadline::Deadline, negotiate::Encoding};
use crate::{
    config::ListenAddress,
    metrics::{
        catalogue::Family,
        own::Own,
        text::{Exposition, Format},
    },
    warn_limited,
};

/// Scrapes that render at the same time.
const RENDERS: usize = 2;

/// Bytes of a request's head that are taken.
const MAX_HEAD_BYTES: usize = 16 << 10;

/// Why HTTP can't be served.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    /// An address can't be had.
    #[error("cannot listen on {address}: {source}{}", hint(source))]
    Listen {
        /// The address as configured.
        address: ListenAddress,
        /// What the system says.
        source: io::Error,
    },
}

fn hint(source: &io::Error) -> &'static str {
    match source.kind() {
        io::ErrorKind::AddrInUse => {
            "; another process serves there (a second omnitap?), see `ss -ltnp`, or set web.listen-address"
        }
        io::ErrorKind::AddrNotAvailable => "; this machine has no such address, set web.listen-address",
        io::ErrorKind::PermissionDenied => {
            "; ports below 1024 need CAP_NET_BIND_SERVICE, set web.listen-address"
        }
        _ => "",
    }
}

/// What is served.
#[derive(Clone, Debug)]
pub struct Content {
    /// Prints the families.
    pub exposition: Exposition,
    /// The agent's own families.
    pub own: Own,
    /// How the agent is.
    pub status: Status,
}

/// An HTTP server whose addresses are bound.
#[derive(Debug)]
pub struct Server {
    listeners: Vec<TcpListener>,
    max_connections: usize,
    site: Arc<Site>,
}

impl Server {
    /// Binds all addresses, or none.
    pub async fn bind(
        addresses: &[ListenAddress],
        max_connections: u32,
        content: Content,
    ) -> Result<Self, ServeError> {
        let mut listeners = Vec::new();
        for address in addresses {
            let listener = listen(address).await.map_err(|source| ServeError::Listen {
                address: address.clone(),
                source,
            })?;
            listeners.push(listener);
        }
        Ok(Self {
            listeners,
            max_connections: usize::try_from(max_connections).unwrap_or(usize::MAX),
            site: Arc::new(Site {
                content,
                renders: Semaphore::new(RENDERS),
                spare: Mutex::default(),
            }),
        })
    }

    /// The addresses that are bound, with the ports that the system gave.
    #[must_use]
    pub fn addresses(&self) -> Vec<SocketAddr> {
        self.listeners
            .iter()
            .filter_map(|l| l.local_addr().ok())
            .collect()
    }

    /// Serves until `stop` is done; then takes no more connections and gives those that are open at most `grace` to
    /// finish their answer.
    pub async fn run(self, stop: impl Future<Output = ()>, grace: Duration) {
        let (stopping, stopped) = watch::channel(());
        let slots = Arc::new(Semaphore::new(self.max_connections.min(Semaphore::MAX_PERMITS)));
        let mut accepting = JoinSet::new();
        for listener in self.listeners {
            accepting.spawn(accept(
                listener,
                Arc::clone(&slots),
                Arc::clone(&self.site),
                stopped.clone(),
            ));
        }
        drop(stopped);
        stop.await;
        accepting.shutdown().await;
        let _ = stopping.send(());
        // Each connection holds a receiver: when all are gone, all answers are out.
        let _ = tokio::time::timeout(grace, stopping.closed()).await;
    }
}

/// Binds one address: dual-stack for "all addresses", and IPv4 alone where the machine has no IPv6.
async fn listen(address: &ListenAddress) -> io::Result<TcpListener> {
    let Some(host) = &address.host else {
        return match TcpListener::bind(("::", address.port)).await {
            Err(error) if error.kind() != io::ErrorKind::AddrInUse => {
                TcpListener::bind(("0.0.0.0", address.port)).await
            }
            bound => bound,
        };
    };
    TcpListener::bind((host.as_str(), address.port)).await
}

async fn accept(listener: TcpListener, slots: Arc<Semaphore>, site: Arc<Site>, stopped: watch::Receiver<()>) {
    loop {
        let stream = match listener.accept().await {
            Ok((stream, _)) => stream,
            Err(error) => {
                // Out of file descriptors, as a rule: what is open has to end first.
                warn_limited!((), %error, "cannot accept HTTP connections");
                tokio::time::sleep(Duration::from_millis(100)).await;
                continue;
            }
        };
        let Ok(slot) = Arc::clone(&slots).try_acquire_owned() else {
            site.content
                .own
                .add(Family::OmnitapHttpConnectionsRefusedTotal, &[], 1.0);
            continue;
        };
        let (site, stopped) = (Arc::clone(&site), stopped.clone());
        tokio::spawn(async move {
            serve(stream, site, stopped).await;
            drop(slot);
        });
    }
}

async fn serve(stream: TcpStream, site: Arc<Site>, mut stopped: watch::Receiver<()>) {
    // The answer is written at once; a delay of its last part would be all that is gained.
    let _ = stream.set_nodelay(true);
    let service = service_fn(move |request| {
        let site = Arc::clone(&site);
        async move { Ok::<_, Infallible>(site.answer(&request).await) }
    });
    let connection = http1::Builder::new()
        .max_buf_size(MAX_HEAD_BYTES)
        // All times are kept by `Deadline`.
        .header_read_timeout(None)
        .serve_connection(TokioIo::new(Deadline::new(stream)), service);
    let mut connection = std::pin::pin!(connection);
    tokio::select! {
        // What goes wrong with one connection concerns its client alone.
        _ = connection.as_mut() => return,
        _ = stopped.changed() => {}
    }
    connection.as_mut().graceful_shutdown();
    let _ = connection.await;
}

#[derive(Debug)]
struct Site {
    content: Content,
    renders: Semaphore,
    /// Room of an answer that is out, for the next: a megabyte of new memory costs a scrape more than its text.
    spare: Mutex<Vec<u8>>,
}

/// The text of an answer; its room goes back when the answer is out.
struct Lent {
    text: Vec<u8>,
    site: Arc<Site>,
}

impl AsRef<[u8]> for Lent {
    fn as_ref(&self) -> &[u8] {
        &self.text
    }
}

impl Drop for Lent {
    fn drop(&mut self) {
        self.site.take_back(std::mem::take(&mut self.text));
    }
}

type Answer = Response<Full<Bytes>>;

impl Site {
    async fn answer(self: &Arc<Self>, request: &Request<Incoming>) -> Answer {
        let path = request.uri().path();
        let (path, answer) = match path {
            "/metrics" | "/healthz" | "/readyz" | "/" if !is_read(request.method()) => (path, not_allowed()),
            "/metrics" => (path, self.metrics(request).await),
            "/healthz" => (path, text(StatusCode::OK, "ok\n".to_owned())),
            "/readyz" => (path, self.ready()),
            "/" => (path, self.landing()),
            _ => ("other", text(StatusCode::NOT_FOUND, "not found\n".to_owned())),
        };
        self.content.own.add(
            Family::OmnitapHttpRequestsTotal,
            &[path, answer.status().as_str()],
            1.0,
        );
        answer
    }

    async fn metrics(self: &Arc<Self>, request: &Request<Incoming>) -> Answer {
        let header = |name| {
            request
                .headers()
                .get_all(name)
                .iter()
                .filter_map(|v| v.to_str().ok())
        };
        let format = negotiate::format(header(ACCEPT));
        let encoding = negotiate::encoding(header(ACCEPT_ENCODING));
        // The semaphore is never closed.
        let _permit = self.renders.acquire().await;
        let site = Arc::clone(self);
        let body = tokio::task::spawn_blocking(move || site.render(format, encoding)).await;
        let Ok(body) = body else {
            return text(
                StatusCode::INTERNAL_SERVER_ERROR,
                "the families can't be rendered\n".to_owned(),
            );
        };
        let mut answer = Response::new(Full::new(body));
        let headers = answer.headers_mut();
        headers.insert(CONTENT_TYPE, HeaderValue::from_static(format.content_type()));
        headers.insert(VARY, HeaderValue::from_static("accept, accept-encoding"));
        if encoding == Encoding::Gzip {
            headers.insert(CONTENT_ENCODING, HeaderValue::from_static("gzip"));
        }
        answer
    }

    /// Keeps the room of a text, or that of another which is there and larger.
    fn take_back(&self, text: Vec<u8>) {
        let mut spare = self.spare.lock();
        if text.capacity() > spare.capacity() {
            *spare = text;
        }
    }

    fn render(self: &Arc<Self>, format: Format, encoding: Encoding) -> Bytes {
        let start = Instant::now();
        let Content { exposition, own, .. } = &self.content;
        own.sample_process();
        let mut text = std::mem::take(&mut *self.spare.lock());
        text.clear();
        exposition.render(&mut text, format);
        let site = Arc::clone(self);
        let text = Lent { text, site };
        let body = match encoding {
            Encoding::Identity => Bytes::from_owner(text),
            Encoding::Gzip => gzip(text.as_ref()),
        };
        own.observe(
            Family::OmnitapScrapeDurationSeconds,
            &[],
            start.elapsed().as_secs_f64(),
        );
        body
    }

    fn ready(&self) -> Answer {
        match self.content.status.not_ready() {
            None => text(StatusCode::OK, "ready\n".to_owned()),
            Some(reason) => text(StatusCode::SERVICE_UNAVAILABLE, format!("not ready: {reason}\n")),
        }
    }

    fn landing(&self) -> Answer {
        let mut answer = Response::new(Full::new(Bytes::from(page::landing(&self.content.status))));
        let headers = answer.headers_mut();
        headers.insert(CONTENT_TYPE, HeaderValue::from_static("text/html; charset=utf-8"));
        headers.insert(
            CONTENT_SECURITY_POLICY,
            HeaderValue::from_static("default-src 'none'; style-src 'unsafe-inline'"),
        );
        headers.insert(X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
        answer
    }
}

/// Compresses at the fastest level: the text is repetitive, and higher levels gain little for much more time.
fn gzip(text: &[u8]) -> Bytes {
    let mut encoder = GzEncoder::new(Vec::with_capacity(text.len() / 10), Compression::fast());
    // Writing to memory can't fail.
    let _ = encoder.write_all(text);
    encoder.finish().map(Bytes::from).unwrap_or_default()
}

fn is_read(method: &Method) -> bool {
    *method == Method::GET || *method == Method::HEAD
}

fn not_allowed() -> Answer {
    let mut answer = text(StatusCode::METHOD_NOT_ALLOWED, "use GET or HEAD\n".to_owned());
    answer
        .headers_mut()
        .insert(ALLOW, HeaderValue::from_static("GET, HEAD"));
    answer
}

fn text(status: StatusCode, body: String) -> Answer {
    let mut answer = Response::new(Full::new(Bytes::from(body)));
    *answer.status_mut() = status;
    answer.headers_mut().insert(
        CONTENT_TYPE,
        HeaderValue::from_static("text/plain; charset=utf-8"),
    );
    answer
}
