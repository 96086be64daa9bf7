//! HTTP: /metrics, /healthz, /readyz and the status page.
//!
//! A scrape renders what is there and waits for no source. Rendering and compression run on blocking threads, two at a
//! time: the agent runs beside production, and a scrape takes about a millisecond.

mod access;
mod connections;
mod deadline;
mod negotiate;
mod page;
mod status;
mod web_config;

use std::{
    convert::Infallible,
    fs,
    io::{self, Write as _},
    net::SocketAddr,
    os::unix::fs::{FileTypeExt as _, PermissionsExt as _},
    path::{Path, PathBuf},
    sync::Arc,
    time::{Duration, Instant},
};

use flate2::{Compression, write::GzEncoder};
use http_body_util::Full;
use hyper::{
    Method, Request, Response, StatusCode,
    body::{Body as _, Bytes, Incoming},
    header::{
        ACCEPT, ACCEPT_ENCODING, ALLOW, CACHE_CONTROL, CONTENT_ENCODING, CONTENT_SECURITY_POLICY,
        CONTENT_TYPE, HeaderValue, VARY, WWW_AUTHENTICATE, X_CONTENT_TYPE_OPTIONS,
    },
    server::conn::http1,
    service::service_fn,
};
use hyper_util::rt::TokioIo;
use parking_lot::Mutex;
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::{TcpListener, UnixListener},
    sync::{Semaphore, watch},
    task::JoinSet,
    time::timeout,
};
use tokio_rustls::TlsAcceptor;

use self::{
    access::{Access, Verdict},
    connections::{Connections, Phase, Place},
    deadline::Deadline,
    negotiate::Encoding,
};
pub use self::{
    status::{Status, TapState},
    web_config::WebConfigError,
};
use crate::{
    agent::monotonic_ns,
    config::ListenAddress,
    metrics::{
        catalogue::Family,
        own::Own,
        text::{Exposition, Format},
    },
    requests::Requests,
    warn_limited,
};

/// Scrapes that render at the same time.
const RENDERS: usize = 2;

/// How long a TLS handshake may take.
const HANDSHAKE: Duration = Duration::from_secs(5);

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
    /// The web configuration file can't be taken.
    #[error("web.config.file: {0}")]
    WebConfig(#[from] WebConfigError),
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
    /// Records of requests, where they are kept.
    pub requests: Option<Requests>,
}

/// Where and for whom it is served.
#[derive(Clone, Debug)]
pub struct Settings {
    /// The addresses.
    pub listen: Vec<ListenAddress>,
    /// Most connections at a time.
    pub max_connections: u32,
    /// TLS and users; `None`: plain HTTP, for everybody.
    pub web_config: Option<PathBuf>,
}

/// An HTTP server whose addresses are bound.
#[derive(Debug)]
pub struct Server {
    listeners: Vec<Listener>,
    max_connections: usize,
    site: Arc<Site>,
}

impl Server {
    /// Binds all addresses, or none.
    pub async fn bind(settings: &Settings, content: Content) -> Result<Self, ServeError> {
        let access = Access::new(settings.web_config.clone())?;
        let mut listeners = Vec::new();
        for address in &settings.listen {
            let listener = Listener::bind(address)
                .await
                .map_err(|source| ServeError::Listen {
                    address: address.clone(),
                    source,
                })?;
            listeners.push(listener);
        }
        Ok(Self {
            listeners,
            max_connections: usize::try_from(settings.max_connections).unwrap_or(usize::MAX),
            site: Arc::new(Site {
                content,
                access,
                renders: Semaphore::new(RENDERS),
                spare: Mutex::default(),
            }),
        })
    }

    /// The TCP addresses that are bound, with the ports that the system gave.
    #[must_use]
    pub fn addresses(&self) -> Vec<SocketAddr> {
        self.listeners
            .iter()
            .filter_map(|listener| match listener {
                Listener::Tcp(tcp) => tcp.local_addr().ok(),
                Listener::Unix(..) => None,
            })
            .collect()
    }

    /// Where `/metrics` is, for people.
    #[must_use]
    pub fn places(&self) -> Vec<String> {
        let scheme = if self.site.access.now().tls.is_some() {
            "https"
        } else {
            "http"
        };
        self.listeners
            .iter()
            .map(|listener| match listener {
                Listener::Tcp(tcp) => tcp.local_addr().map_or_else(
                    |error| error.to_string(),
                    |address| format!("{scheme}://{address}/metrics"),
                ),
                Listener::Unix(_, path) => format!("unix:{} (/metrics)", path.0.display()),
            })
            .collect()
    }

    /// Serves until `stop` is done; then takes no more connections and gives those that are open at most `grace` to
    /// finish their answer.
    pub async fn run(self, stop: impl Future<Output = ()>, grace: Duration) {
        let (stopping, stopped) = watch::channel(());
        let connections = Connections::new(self.max_connections);
        let mut accepting = JoinSet::new();
        for listener in self.listeners {
            accepting.spawn(accept(
                listener,
                Arc::clone(&connections),
                Arc::clone(&self.site),
                stopped.clone(),
            ));
        }
        drop(stopped);
        tokio::select! {
            () = stop => {}
            () = self.site.access.keep_up() => {}
        }
        accepting.shutdown().await;
        let _ = stopping.send(());
        // Each connection holds a receiver: when all are gone, all answers are out.
        let _ = timeout(grace, stopping.closed()).await;
    }
}

/// A bound address.
#[derive(Debug)]
enum Listener {
    Tcp(TcpListener),
    Unix(UnixListener, SocketFile),
}

/// The file of a Unix socket, removed at the end.
#[derive(Debug)]
struct SocketFile(PathBuf);

impl Drop for SocketFile {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.0);
    }
}

impl Listener {
    async fn bind(address: &ListenAddress) -> io::Result<Self> {
        match address {
            ListenAddress::Tcp { host, port } => tcp(host.as_deref(), *port).await.map(Self::Tcp),
            ListenAddress::Unix(path) => {
                let listener = unix(path)?;
                Ok(Self::Unix(listener, SocketFile(path.clone())))
            }
        }
    }
}

/// Binds one address: dual-stack for "all addresses", and IPv4 alone where the machine has no IPv6.
async fn tcp(host: Option<&str>, port: u16) -> io::Result<TcpListener> {
    let Some(host) = host else {
        return match TcpListener::bind(("::", port)).await {
            Err(error) if error.kind() != io::ErrorKind::AddrInUse => {
                TcpListener::bind(("0.0.0.0", port)).await
            }
            bound => bound,
        };
    };
    TcpListener::bind((host, port)).await
}

/// Binds a Unix socket for the own user and group. A file that a dead process left is replaced.
fn unix(path: &Path) -> io::Result<UnixListener> {
    if fs::symlink_metadata(path).is_ok_and(|file| file.file_type().is_socket())
        && std::os::unix::net::UnixStream::connect(path)
            .is_err_and(|error| error.kind() == io::ErrorKind::ConnectionRefused)
    {
        fs::remove_file(path)?;
    }
    let listener = UnixListener::bind(path)?;
    fs::set_permissions(path, fs::Permissions::from_mode(0o660))?;
    Ok(listener)
}

async fn accept(
    listener: Listener,
    connections: Arc<Connections>,
    site: Arc<Site>,
    stopped: watch::Receiver<()>,
) {
    loop {
        let accepted = match &listener {
            Listener::Tcp(tcp) => tcp.accept().await.map(|(stream, _)| {
                // The answer is written at once; a delay of its last part would be all that is gained.
                let _ = stream.set_nodelay(true);
                Stream::Tcp(stream)
            }),
            Listener::Unix(unix, _) => unix.accept().await.map(|(stream, _)| Stream::Unix(stream)),
        };
        let stream = match accepted {
            Ok(stream) => stream,
            Err(error) => {
                // Out of file descriptors, as a rule: what is open has to end first.
                warn_limited!((), %error, "cannot accept HTTP connections");
                tokio::time::sleep(Duration::from_millis(100)).await;
                continue;
            }
        };
        let admitted = connections.admit();
        if admitted.as_ref().is_none_or(|admitted| admitted.cut) {
            site.content
                .own
                .add(Family::OmnitapHttpConnectionsRefusedTotal, &[], 1.0);
        }
        let Some(admitted) = admitted else { continue };
        let (site, mut stopped) = (Arc::clone(&site), stopped.clone());
        tokio::spawn(async move {
            let place = admitted.place;
            tokio::select! {
                () = place.cut() => {}
                () = secure(stream, site, &place, &mut stopped) => {}
            }
        });
    }
}

/// An accepted connection.
enum Stream {
    Tcp(tokio::net::TcpStream),
    Unix(tokio::net::UnixStream),
}

/// Serves a connection, by TLS where that is configured. The rights of a Unix socket's file say who may open it: there,
/// neither TLS nor a password adds anything.
async fn secure(stream: Stream, site: Arc<Site>, place: &Arc<Place>, stopped: &mut watch::Receiver<()>) {
    match (stream, site.access.now().tls.clone()) {
        (Stream::Unix(stream), _) => serve(stream, site, place, stopped, Door::Open).await,
        (Stream::Tcp(stream), None) => serve(stream, site, place, stopped, Door::Guarded).await,
        (Stream::Tcp(stream), Some(tls)) => {
            // Who does not get that far concerns nobody else.
            if let Ok(Ok(stream)) = timeout(HANDSHAKE, TlsAcceptor::from(tls).accept(stream)).await {
                serve(stream, site, place, stopped, Door::Guarded).await;
            }
        }
    }
}

/// Whether requests of a connection need a user.
#[derive(Clone, Copy)]
enum Door {
    Guarded,
    Open,
}

async fn serve<S>(
    stream: S,
    site: Arc<Site>,
    place: &Arc<Place>,
    stopped: &mut watch::Receiver<()>,
    door: Door,
) where
    S: AsyncRead + AsyncWrite + Unpin,
{
    let service = service_fn(|request| {
        let (site, place) = (Arc::clone(&site), Arc::clone(place));
        async move { Ok::<_, Infallible>(site.answer(&request, &place, door).await) }
    });
    let connection = http1::Builder::new()
        .max_buf_size(MAX_HEAD_BYTES)
        // All times are kept by `Deadline`.
        .header_read_timeout(None)
        .serve_connection(TokioIo::new(Deadline::new(stream, Arc::clone(place))), service);
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
    access: Access,
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
    async fn answer(self: &Arc<Self>, request: &Request<Incoming>, place: &Place, door: Door) -> Answer {
        let path = match request.uri().path() {
            known @ ("/metrics" | "/healthz" | "/readyz" | "/api/status" | "/api/requests" | "/"
            | "/page.css" | "/page.js") => known,
            _ => "other",
        };
        // What asks for health has no password, as a rule, and gets no data.
        let verdict = match (door, path) {
            (Door::Open, _) | (Door::Guarded, "/healthz" | "/readyz") => Verdict::Pass,
            (Door::Guarded, _) => self.access.judge(request.headers()).await,
        };
        place.enter(Phase::Working);
        let mut answer = match (verdict, path) {
            (Verdict::Unauthorized, _) => unauthorized(),
            (Verdict::TooMany, _) => text(StatusCode::TOO_MANY_REQUESTS, "too many requests\n".to_owned()),
            (Verdict::Pass, "other") => text(StatusCode::NOT_FOUND, "not found\n".to_owned()),
            (Verdict::Pass, _) if !is_read(request.method()) => not_allowed(),
            (Verdict::Pass, "/metrics") => self.metrics(request).await,
            (Verdict::Pass, "/healthz") => text(StatusCode::OK, "ok\n".to_owned()),
            (Verdict::Pass, "/readyz") => self.ready(),
            (Verdict::Pass, "/api/status") => self.status(),
            (Verdict::Pass, "/api/requests") => self.requests(request.uri().query()),
            (Verdict::Pass, path) => page(path),
        };
        for (name, value) in &self.access.now().headers {
            answer.headers_mut().insert(name, value.clone());
        }
        let bytes = answer.body().size_hint().exact().unwrap_or_default();
        place.hold(usize::try_from(bytes).unwrap_or(usize::MAX));
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

    /// What the page draws. A look at some hundred values; nothing is kept for it.
    fn status(&self) -> Answer {
        let Content {
            exposition,
            own,
            status,
            ..
        } = &self.content;
        own.sample_process();
        own.sample_series();
        let body = page::json(&status.state(), exposition);
        json(body)
    }

    /// A page of the records of requests: those behind the number `after`.
    fn requests(&self, query: Option<&str>) -> Answer {
        let Some(requests) = self
            .content
            .requests
            .as_ref()
            .filter(|requests| requests.is_served())
        else {
            let reason = "no records of requests are kept: set requests.enabled\n";
            return text(StatusCode::NOT_FOUND, reason.to_owned());
        };
        let after = match query.filter(|query| !query.is_empty()) {
            None => Some(0),
            Some(query) => query.strip_prefix("after=").and_then(|after| after.parse().ok()),
        };
        let Some(after) = after else {
            let reason = "the one parameter is after=NUMBER\n";
            return text(StatusCode::BAD_REQUEST, reason.to_owned());
        };
        let page = requests.page(after, monotonic_ns());
        // Structs with text as keys; a float that is no number becomes `null`: it can't fail.
        json(serde_json::to_vec(&page).unwrap_or_default())
    }
}

fn json(body: Vec<u8>) -> Answer {
    let mut answer = Response::new(Full::new(Bytes::from(body)));
    let headers = answer.headers_mut();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
    headers.insert(CACHE_CONTROL, HeaderValue::from_static("no-store"));
    headers.insert(X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
    answer
}

/// A file of the status page. It loads nothing from elsewhere, and its script builds no HTML from text.
fn page(path: &str) -> Answer {
    let Some((_, kind, content)) = page::FILES.iter().find(|(known, ..)| *known == path) else {
        return text(StatusCode::NOT_FOUND, "not found\n".to_owned());
    };
    let mut answer = Response::new(Full::new(Bytes::from_static(content.as_bytes())));
    let headers = answer.headers_mut();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static(kind));
    headers.insert(CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    headers.insert(
        CONTENT_SECURITY_POLICY,
        HeaderValue::from_static(
            "default-src 'none'; style-src 'self'; script-src 'self'; connect-src 'self'; img-src data:; \
             frame-ancestors 'none'; base-uri 'none'; form-action 'none'",
        ),
    );
    headers.insert(X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
    answer
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

fn unauthorized() -> Answer {
    let mut answer = text(
        StatusCode::UNAUTHORIZED,
        "user and password are needed\n".to_owned(),
    );
    answer.headers_mut().insert(
        WWW_AUTHENTICATE,
        HeaderValue::from_static("Basic realm=\"omnitap\""),
    );
    answer
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
