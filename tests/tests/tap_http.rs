//! Real uvicorn servers, with both of its event loops and HTTP parsers: what the tap tells of their connections is what
//! their clients sent and got.

#![expect(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

mod tap_support;

use std::{
    collections::HashMap,
    io::{BufRead as _, BufReader, Read, Write},
    net::{Ipv4Addr, TcpStream},
    path::PathBuf,
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use omnitap::{
    host::identity::ProcessKey,
    tap::{self, Attached, Event, ProbeSet, Reader, Settings, SiteKind, Tap},
    wire::http::HttpEvent,
};
use omnitap_ebpf::Counter;
use rstest::rstest;
use tap_support::{can_run, load, python, script};

const GET: &str = "GET /health HTTP/1.1\r\nhost: a\r\n\r\n";

/// A server that ends with this.
struct Server {
    child: Child,
    port: u16,
}

impl Server {
    fn start(event_loop: &str, http: &str) -> Self {
        Self::run(&mut Command::new(python()), event_loop, http, &[])
    }

    fn run(python: &mut Command, event_loop: &str, http: &str, certificate: &[PathBuf]) -> Self {
        let mut child = python
            .arg(script("uvicorn_server.py"))
            .args([event_loop, http])
            .args(certificate)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut line = String::new();
        let mut out = BufReader::new(child.stdout.take().unwrap());
        out.read_line(&mut line).unwrap();
        let port = line
            .strip_prefix("ready ")
            .and_then(|port| port.trim().parse().ok());
        Self {
            child,
            port: port.unwrap(),
        }
    }

    fn key(&self) -> ProcessKey {
        ProcessKey {
            pid: self.child.id(),
            start_ticks: tap::start_ticks(self.child.id()).unwrap(),
        }
    }

    fn connect(&self) -> TcpStream {
        let client = TcpStream::connect((Ipv4Addr::LOCALHOST, self.port)).unwrap();
        client.set_nodelay(true).unwrap();
        client.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
        client
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // Ended already, or to be ended: either way nothing is left of it.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// What was told of one connection.
#[derive(Debug, Default)]
#[expect(
    clippy::struct_excessive_bools,
    reason = "each is an event that came or did not"
)]
struct Connection {
    accepted: bool,
    received: u64,
    sent: u64,
    /// What was captured of both, put together.
    received_bytes: Vec<u8>,
    sent_bytes: Vec<u8>,
    /// Whether that is all of it.
    cut: bool,
    ended_by_client: bool,
    failed: Option<i32>,
    closed: bool,
    /// Events with bytes.
    events: usize,
}

/// The connections in the order of their begin; a descriptor that is accepted again begins a new one.
#[derive(Default)]
struct Connections {
    open: HashMap<i32, usize>,
    all: Vec<Connection>,
    last_ns: u64,
}

impl Connections {
    fn of(&mut self, fd: i32) -> &mut Connection {
        let at = *self.open.entry(fd).or_insert_with(|| {
            self.all.push(Connection::default());
            self.all.len() - 1
        });
        &mut self.all[at]
    }

    fn take(&mut self, event: &HttpEvent<'_>, pid: u32) {
        let (of, time) = match *event {
            HttpEvent::Accepted { pid, fd, time_ns, .. } => {
                self.open.remove(&fd);
                self.of(fd).accepted = true;
                (pid, time_ns)
            }
            HttpEvent::Received {
                pid,
                fd,
                time_ns,
                size,
                head,
                tail,
                ..
            } => {
                let connection = self.of(fd);
                connection.received += size;
                connection.received_bytes.extend([head, tail].concat());
                connection.cut |= (head.len() as u64) < size;
                connection.ended_by_client |= size == 0;
                connection.events += 1;
                (pid, time_ns)
            }
            HttpEvent::Sent {
                pid,
                fd,
                time_ns,
                size,
                head,
                tail,
                ..
            } => {
                let connection = self.of(fd);
                connection.sent += size;
                connection.sent_bytes.extend([head, tail].concat());
                connection.cut |= (head.len() as u64) < size;
                connection.events += 1;
                (pid, time_ns)
            }
            HttpEvent::Failed {
                pid,
                fd,
                time_ns,
                errno,
                ..
            } => {
                self.of(fd).failed = Some(errno);
                (pid, time_ns)
            }
            HttpEvent::Closed { pid, fd, time_ns, .. } => {
                self.of(fd).closed = true;
                self.open.remove(&fd);
                (pid, time_ns)
            }
        };
        assert_eq!(of, pid);
        assert!(time >= self.last_ns, "out of order: {event:?}");
        self.last_ns = time;
    }
}

/// A server under the tap.
struct Watched {
    server: Server,
    tap: Tap,
    reader: Reader,
    attached: Attached,
    connections: Connections,
}

impl Watched {
    fn start(event_loop: &str, http: &str) -> Option<Self> {
        if !can_run() {
            return None;
        }
        Some(Self::of(Server::start(event_loop, http)))
    }

    fn of(server: Server) -> Self {
        let (tap, reader) = load(&Settings::default());
        let attached = tap.attach_set(server.key(), ProbeSet::Http).unwrap();
        for function in [
            "read", "recv", "write", "send", "writev", "sendmsg", "accept4", "close", "syscall",
        ] {
            assert!(
                attached.probes().iter().any(|probe| probe.function == function),
                "{function}"
            );
        }
        let is_slow = |probe: &&tap::ProbeInfo| probe.kind == SiteKind::Slow && probe.function != "syscall";
        assert_eq!(attached.probes().iter().find(is_slow), None);
        Self {
            server,
            tap,
            reader,
            attached,
            connections: Connections::default(),
        }
    }

    /// Takes what there is.
    fn drain(&mut self) {
        let pid = self.server.child.id();
        let connections = &mut self.connections;
        let mut take = |event: Event<'_>| {
            if let Event::Http(event) = event {
                connections.take(&event, pid);
            }
        };
        while self
            .reader
            .drain(Duration::from_millis(20), usize::MAX, &mut take)
            .unwrap()
            > 0
        {}
    }

    /// Takes events until something holds of the connections.
    fn until(&mut self, what: &str, holds: impl Fn(&[Connection]) -> bool) {
        let start = Instant::now();
        while !holds(&self.connections.all) {
            assert!(
                start.elapsed() < Duration::from_secs(10),
                "{what}: {:?}",
                self.connections.all
            );
            self.drain();
        }
        self.drain();
    }

    fn nothing_lost(&self) {
        let counters = self.tap.counters().unwrap();
        assert!(counters.losses().all(|(_, count)| count == 0), "{counters:?}");
        assert_eq!(self.tap.stats().reader.malformed, 0);
    }
}

/// Reads one answer, whose length is told or which is chunked; all of its bytes.
fn answer(client: &mut impl Read) -> Vec<u8> {
    let mut bytes = Vec::new();
    let mut piece = [0; 4096];
    loop {
        let read = client.read(&mut piece).unwrap();
        assert!(read > 0, "the server closed: {}", String::from_utf8_lossy(&bytes));
        bytes.extend(&piece[..read]);
        let Some(header) = bytes.windows(4).position(|w| w == b"\r\n\r\n") else {
            continue;
        };
        let text = String::from_utf8_lossy(&bytes[..header]).to_lowercase();
        if text.contains("chunked") {
            if bytes.ends_with(b"\r\n0\r\n\r\n") {
                return bytes;
            }
        } else if let Some((_, length)) = text.split_once("content-length: ") {
            let length: usize = length.lines().next().unwrap().trim().parse().unwrap();
            if bytes.len() == header + 4 + length {
                return bytes;
            }
        }
    }
}

#[rstest]
#[case("uvloop", "httptools")]
#[case("asyncio", "h11")]
fn requests_on_one_connection_byte_by_byte(#[case] event_loop: &str, #[case] http: &str) {
    let Some(mut watched) = Watched::start(event_loop, http) else {
        return;
    };
    let mut client = watched.server.connect();
    let (mut sent, mut got) = (Vec::new(), Vec::new());
    for size in [0, 1, 100, 400, 900] {
        let request = format!("GET /bytes/{size} HTTP/1.1\r\nhost: a\r\n\r\n");
        client.write_all(request.as_bytes()).unwrap();
        sent.extend(request.as_bytes());
        got.extend(answer(&mut client));
    }
    drop(client);
    watched.until("closed", |all| matches!(all, [c] if c.closed));
    let connection = &watched.connections.all[0];
    assert!(
        connection.accepted && connection.ended_by_client && !connection.cut,
        "{connection:?}"
    );
    assert_eq!(
        (&connection.received_bytes, &connection.sent_bytes),
        (&sent, &got)
    );
    watched.nothing_lost();
}

#[rstest]
#[case("uvloop", "httptools")]
#[case("asyncio", "h11")]
fn a_slow_reader_gets_what_was_told(#[case] event_loop: &str, #[case] http: &str) {
    let Some(mut watched) = Watched::start(event_loop, http) else {
        return;
    };
    let mut client = watched.server.connect();
    let request = b"GET /stream/1000/9000 HTTP/1.1\r\nhost: a\r\n\r\n";
    client.write_all(request).unwrap();
    let mut got = 0;
    let mut end = Vec::new();
    let mut piece = vec![0; 50_000];
    while !end.ends_with(b"\r\n0\r\n\r\n") {
        let read = client.read(&mut piece).unwrap();
        assert!(read > 0);
        got += read as u64;
        end.extend(&piece[..read]);
        end.drain(..end.len().saturating_sub(16));
        std::thread::sleep(Duration::from_millis(2));
        watched.drain();
    }
    assert!(got > 9_000_000);
    drop(client);
    watched.until("closed", |all| matches!(all, [c] if c.closed));
    let connection = &watched.connections.all[0];
    assert_eq!(
        (connection.received, connection.sent),
        (request.len() as u64, got)
    );
    watched.nothing_lost();
}

#[rstest]
#[case("uvloop", "httptools")]
#[case("asyncio", "h11")]
fn long_bodies_in_and_out(#[case] event_loop: &str, #[case] http: &str) {
    let Some(mut watched) = Watched::start(event_loop, http) else {
        return;
    };
    let mut client = watched.server.connect();
    let mut sum = (0, 0);
    for size in [10, 3000, 100_000, 3_000_000] {
        let header = format!("POST /count HTTP/1.1\r\nhost: a\r\ncontent-length: {size}\r\n\r\n");
        client.write_all(header.as_bytes()).unwrap();
        client.write_all(&vec![b'a'; size]).unwrap();
        let out = answer(&mut client);
        assert!(out.ends_with(format!("\r\n\r\n{size}").as_bytes()));
        let request = format!("GET /bytes/{size} HTTP/1.1\r\nhost: a\r\n\r\n");
        client.write_all(request.as_bytes()).unwrap();
        sum.0 += (header.len() + size + request.len()) as u64;
        sum.1 += (out.len() + answer(&mut client).len()) as u64;
        watched.drain();
    }
    drop(client);
    watched.until("closed", |all| matches!(all, [c] if c.closed));
    let connection = &watched.connections.all[0];
    assert_eq!((connection.received, connection.sent), sum);
    assert!(connection.cut);
    watched.nothing_lost();
}

#[rstest]
#[case("uvloop", "httptools")]
#[case("asyncio", "h11")]
fn many_connections_one_after_the_other_and_side_by_side(#[case] event_loop: &str, #[case] http: &str) {
    const TURNS: usize = 40;
    const CLIENTS: usize = 8;
    let Some(mut watched) = Watched::start(event_loop, http) else {
        return;
    };
    let request = "GET /bytes/300 HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n";
    let mut got = Vec::new();
    for _ in 0..TURNS {
        let mut client = watched.server.connect();
        client.write_all(request.as_bytes()).unwrap();
        let mut bytes = Vec::new();
        client.read_to_end(&mut bytes).unwrap();
        got.push(bytes.len() as u64);
    }
    watched.until("closed", |all| all.len() == TURNS && all.iter().all(|c| c.closed));
    for (connection, got) in watched.connections.all.iter().zip(got) {
        assert!(connection.accepted && !connection.cut, "{connection:?}");
        assert_eq!(
            (connection.received, connection.sent),
            (request.len() as u64, got)
        );
    }

    watched.connections = Connections::default();
    let mut clients: Vec<_> = (0..CLIENTS).map(|_| watched.server.connect()).collect();
    let mut got = 0;
    for size in 1..=20 {
        for client in &mut clients {
            let request = format!("GET /bytes/{size} HTTP/1.1\r\nhost: a\r\n\r\n");
            client.write_all(request.as_bytes()).unwrap();
        }
        for client in &mut clients {
            got += answer(client).len() as u64;
        }
    }
    drop(clients);
    watched.until("closed", |all| {
        all.len() == CLIENTS && all.iter().all(|c| c.closed)
    });
    let sum: u64 = watched.connections.all.iter().map(|c| c.sent).sum();
    assert_eq!(sum, got);
    watched.nothing_lost();
}

#[rstest]
#[case("uvloop", "httptools")]
#[case("asyncio", "h11")]
fn a_client_that_hangs_up_midway(#[case] event_loop: &str, #[case] http: &str) {
    let Some(mut watched) = Watched::start(event_loop, http) else {
        return;
    };
    let mut client = watched.server.connect();
    client
        .write_all(b"GET /slow/1000 HTTP/1.1\r\nhost: a\r\n\r\n")
        .unwrap();
    client.read_exact(&mut [0; 1000]).unwrap();
    drop(client);
    watched.until("closed", |all| matches!(all, [c] if c.closed));
    let connection = &watched.connections.all[0];
    assert!(
        connection.ended_by_client || connection.failed.is_some(),
        "{connection:?}"
    );
    assert!(
        connection.sent >= 1000 && connection.sent < 20_000,
        "{connection:?}"
    );
    watched.nothing_lost();
}

#[rstest]
#[case("uvloop", "httptools")]
#[case("asyncio", "h11")]
fn a_connection_older_than_the_probes(#[case] event_loop: &str, #[case] http: &str) {
    if !can_run() {
        return;
    }
    let server = Server::start(event_loop, http);
    let mut client = server.connect();
    client.write_all(GET.as_bytes()).unwrap();
    answer(&mut client);
    let mut watched = Watched::of(server);
    client.write_all(GET.as_bytes()).unwrap();
    let got = answer(&mut client);
    drop(client);
    watched.until("closed", |all| matches!(all, [c] if c.closed));
    let connection = &watched.connections.all[0];
    assert!(!connection.accepted);
    assert_eq!(connection.received_bytes, GET.as_bytes());
    assert_eq!(connection.sent_bytes, got);
}

#[rstest]
#[case("uvloop", "httptools")]
#[case("asyncio", "h11")]
fn what_is_no_connection_stays_in_the_kernel(#[case] event_loop: &str, #[case] http: &str) {
    const REQUESTS: usize = 200;
    let Some(mut watched) = Watched::start(event_loop, http) else {
        return;
    };
    let mut client = watched.server.connect();
    for _ in 0..REQUESTS {
        client.write_all(GET.as_bytes()).unwrap();
        answer(&mut client);
    }
    drop(client);
    watched.until("closed", |all| matches!(all, [c] if c.closed));
    // Each request and each answer, the connection's begin, its end by the client, and its close.
    let told = watched.tap.stats().reader.http;
    let writes = watched.connections.all[0].events - REQUESTS - 1;
    assert!(
        writes == REQUESTS || writes == 2 * REQUESTS,
        "{writes} writes of {REQUESTS} answers"
    );
    assert_eq!(told, (REQUESTS + writes + 3) as u64);
    watched.nothing_lost();
}

#[test]
fn a_process_that_is_let_go_leaves_nothing() {
    let Some(mut watched) = Watched::start("asyncio", "h11") else {
        return;
    };
    let mut client = watched.server.connect();
    client.write_all(GET.as_bytes()).unwrap();
    answer(&mut client);
    watched.until("answered", |all| matches!(all, [c] if c.sent > 0));
    let Watched {
        server,
        tap,
        mut reader,
        attached,
        ..
    } = watched;
    drop(attached);
    assert_eq!(tap.detach_all(Duration::from_secs(30)), 0);
    // The connection goes on, and the tap, attached anew, does not know it: in the midst of it nothing is told.
    let attached = tap.attach_set(server.key(), ProbeSet::Http).unwrap();
    let mut told = 0;
    client.write_all(&GET.as_bytes()[..10]).unwrap();
    std::thread::sleep(Duration::from_millis(200));
    let mut take = |event: Event<'_>| told += usize::from(matches!(event, Event::Http(_)));
    reader
        .drain(Duration::from_millis(20), usize::MAX, &mut take)
        .unwrap();
    assert_eq!(told, 0);
    drop(attached);
}

/// A libc with one function that makes the system calls of the others, as glibc from 2.41 on.
#[rstest]
#[case("uvloop", "httptools")]
#[case("asyncio", "h11")]
fn a_libc_without_jumps_behind_its_system_calls(#[case] event_loop: &str, #[case] http: &str) {
    if !can_run() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let library = folder.path().join("libc-2.99.so");
    let gcc = Command::new("gcc")
        .args(["-O2", "-shared", "-fPIC", "-o"])
        .args([&library, &script("helper_libc.c")])
        .status();
    if gcc.as_ref().is_err() {
        eprintln!("SKIPPED: no gcc here");
        return;
    }
    assert!(gcc.unwrap().success());
    let server = Server::run(
        Command::new(python()).env("LD_PRELOAD", &library),
        event_loop,
        http,
        &[],
    );
    let mut watched = Watched::of(server);
    let kinds: Vec<_> = watched
        .attached
        .probes()
        .iter()
        .filter(|probe| probe.path.ends_with("libc-2.99.so"))
        .map(|probe| probe.kind)
        .collect();
    // One in front of each call, one behind them all.
    assert_eq!(kinds.len(), 9, "{kinds:?}");
    assert_eq!(
        kinds.iter().filter(|kind| **kind == SiteKind::Helper).count(),
        1,
        "{kinds:?}"
    );
    let mut client = watched.server.connect();
    let (mut sent, mut got) = (Vec::new(), 0);
    for size in [0, 900, 3_000_000, 100] {
        let request = format!("GET /bytes/{size} HTTP/1.1\r\nhost: a\r\n\r\n");
        client.write_all(request.as_bytes()).unwrap();
        sent.extend(request.as_bytes());
        got += answer(&mut client).len() as u64;
    }
    drop(client);
    watched.until("closed", |all| matches!(all, [c] if c.ended_by_client));
    let connection = &watched.connections.all[0];
    assert!(connection.accepted);
    assert_eq!((&connection.received_bytes, connection.sent), (&sent, got));
    watched.nothing_lost();
    assert!(watched.tap.counters().unwrap().get(Counter::HttpNoted) > 8);
}

/// A certificate of our own, and its key.
fn certificate(folder: &tempfile::TempDir) -> Option<[PathBuf; 2]> {
    let files = ["certificate.pem", "key.pem"].map(|name| folder.path().join(name));
    let made = Command::new("openssl")
        .args([
            "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=a",
        ])
        .arg("-out")
        .arg(&files[0])
        .arg("-keyout")
        .arg(&files[1])
        .stderr(Stdio::null())
        .status();
    if made.is_err() {
        eprintln!("SKIPPED: no openssl here to make a certificate");
        return None;
    }
    assert!(made.unwrap().success());
    Some(files)
}

/// Runs a client of these paths on one connection; the bytes that it sent and got, in plaintext.
fn encrypted(server: &Server, paths: &[&str]) -> (u64, u64) {
    let out = Command::new(python())
        .arg(script("tls_client.py"))
        .arg(server.port.to_string())
        .args(paths)
        .output()
        .unwrap();
    let text = String::from_utf8(out.stdout).unwrap();
    let mut numbers = text.split_whitespace().map(|word| word.parse().unwrap());
    (numbers.next().unwrap(), numbers.next().unwrap())
}

#[rstest]
#[case("uvloop", "httptools")]
#[case("asyncio", "h11")]
fn a_server_of_tls(#[case] event_loop: &str, #[case] http: &str) {
    if !can_run() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let Some(certificate) = certificate(&folder) else {
        return;
    };
    let server = Server::run(&mut Command::new(python()), event_loop, http, &certificate);
    let mut watched = Watched::of(server);
    let pid = watched.server.child.id();

    // What goes over the wire says no more than that.
    encrypted(&watched.server, &["/health"]);
    let mut tls = 0;
    watched
        .reader
        .drain(Duration::from_millis(100), usize::MAX, |event| match event {
            Event::Tls { pid: of } => tls += usize::from(of == pid),
            Event::Http(event) => assert!(
                matches!(event, HttpEvent::Accepted { .. } | HttpEvent::Closed { .. }),
                "{event:?}"
            ),
            _ => {}
        })
        .unwrap();
    assert_eq!(tls, 1);

    let attached = watched
        .tap
        .attach_set(watched.server.key(), ProbeSet::Tls)
        .unwrap();
    assert!(attached.probes().len() >= 4, "{:?}", attached.probes());
    let paths = [
        "/health",
        "/bytes/900",
        "/stream/100/700",
        "/bytes/200000",
        "/count",
    ];
    let mut expected = Vec::new();
    for count in 1..=paths.len() {
        expected.push(encrypted(&watched.server, &paths[..count]));
    }
    let of_tls = |all: &[Connection]| all.iter().filter(|c| !c.accepted).count();
    watched.until("all connections", |all| of_tls(all) == expected.len());
    watched.until("closed", |all| all.iter().all(|c| c.closed));
    let told: Vec<_> = watched
        .connections
        .all
        .iter()
        .filter(|connection| !connection.accepted)
        .map(|connection| (connection.received, connection.sent))
        .collect();
    assert_eq!(told, expected);
    watched.nothing_lost();

    // Without those probes it is as before, and the other ones go on.
    drop(attached);
    assert_eq!(watched.tap.stats().processes, 1);
    watched.connections = Connections::default();
    encrypted(&watched.server, &["/health"]);
    watched.until("closed", |all| all.iter().any(|c| c.closed));
    assert!(watched.connections.all.iter().all(|c| c.accepted && c.sent == 0));
}
