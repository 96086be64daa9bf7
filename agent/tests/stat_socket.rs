//! The stat socket itself: its file, who is heard, and what slow, hostile and killed senders do to others.

#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

use std::{
    fs,
    io::{ErrorKind, Read as _, Write as _},
    os::unix::{
        fs::{MetadataExt as _, PermissionsExt as _},
        net::{UnixListener, UnixStream},
    },
    path::PathBuf,
    sync::mpsc::{Receiver, RecvTimeoutError, channel},
    time::{Duration, Instant},
};

use omnitap::{
    metrics::{
        registry::{Limits, Registry},
        text::Format,
    },
    pipeline::stats::Sender,
    statsock::{News, Settings, SocketError, StatSocket, Watched, probe},
    wire::stat::{self, Event, MAX_EVENT, StatError, Whole},
};
use rstest::rstest;
use tempfile::TempDir;
use tokio::runtime::Runtime;

/// Longer than anything here takes.
const PATIENCE: Duration = Duration::from_mins(1);

/// Name of requests of which there are too many.
const FLOOD: &str = "flood";

/// A socket that is served, and its reader's end.
struct Served {
    folder: TempDir,
    runtime: Option<Runtime>,
    news: Receiver<News>,
    registry: Registry,
}

fn settings(folder: &TempDir) -> Settings {
    Settings {
        path: folder.path().join("run/stats.sock"),
        mode: 0o640,
        groups: Vec::new(),
        max_connections: 8,
        max_rate: 1_000_000,
    }
}

impl Served {
    fn new(change: impl FnOnce(&mut Settings)) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let mut settings = settings(&folder);
        change(&mut settings);
        let registry = Registry::new(Limits {
            max_series: 1000,
            retention: Duration::ZERO,
        });
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .enable_all()
            .build()
            .unwrap();
        let watched = Watched::default();
        watched.scanned();
        let (queue, news) = channel();
        let own = registry.own();
        runtime.block_on(async {
            let socket = StatSocket::bind(&settings).unwrap();
            drop(tokio::spawn(socket.run(queue, watched, own)));
        });
        Self {
            folder,
            runtime: Some(runtime),
            news,
            registry,
        }
    }

    fn path(&self) -> PathBuf {
        self.folder.path().join("run/stats.sock")
    }

    fn connect(&self) -> UnixStream {
        UnixStream::connect(self.path()).unwrap()
    }

    /// What senders said, until `enough`: the requests that were added, with their sender, and the errors. Of floods
    /// nothing is kept: they are endless.
    fn hear(&self, enough: impl Fn(&Heard) -> bool) -> Heard {
        let mut heard = Heard::default();
        let until = Instant::now() + PATIENCE;
        while !enough(&heard) {
            assert!(
                Instant::now() < until,
                "after {PATIENCE:?} only {:?}",
                heard.ids()
            );
            match self
                .news
                .recv_timeout(until.saturating_duration_since(Instant::now()))
            {
                Ok(News::Opened { sender, pid }) => {
                    assert_eq!(pid, std::process::id());
                    heard.opened.push(sender);
                }
                Ok(News::Closed { sender }) => heard.closed.push(sender),
                Ok(News::Events {
                    sender,
                    encoding,
                    bytes,
                    ..
                }) => {
                    for event in Whole::new(encoding, &bytes) {
                        match stat::decode(event, encoding) {
                            Ok((_, Event::Added(added))) if added.request_id == FLOOD => {}
                            Ok((_, Event::Added(added))) => heard.added.push((sender, added.request_id)),
                            Ok((_, other)) => panic!("{other:?} was not sent"),
                            Err(error) => heard.errors.push(error),
                        }
                    }
                }
                Err(RecvTimeoutError::Timeout) => panic!("after {PATIENCE:?} only {heard:?}"),
                Err(RecvTimeoutError::Disconnected) => panic!("the socket is gone: {heard:?}"),
            }
        }
        heard
    }

    /// Waits until a line of /metrics is there.
    fn wait_for(&self, line: &str) {
        let until = Instant::now() + PATIENCE;
        loop {
            let mut page = Vec::new();
            self.registry.exposition().render(&mut page, Format::Text);
            let page = String::from_utf8(page).unwrap();
            if page.lines().any(|found| found == line) {
                return;
            }
            assert!(Instant::now() < until, "{line} is not in {page}");
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}

#[derive(Debug, Default)]
struct Heard {
    opened: Vec<Sender>,
    closed: Vec<Sender>,
    added: Vec<(Sender, String)>,
    errors: Vec<StatError>,
}

impl Heard {
    fn ids(&self) -> Vec<&str> {
        self.added.iter().map(|(_, id)| id.as_str()).collect()
    }
}

fn line(id: impl std::fmt::Display) -> String {
    format!("{{\"v\": 1, \"event\": \"added\", \"request_id\": \"{id}\"}}\n")
}

fn frame(id: &str) -> Vec<u8> {
    let value = serde_json::json!({"v": 1, "event": "added", "request_id": id});
    let bytes = rmp_serde::to_vec_named(&value).unwrap();
    let mut frame = u32::try_from(bytes.len()).unwrap().to_be_bytes().to_vec();
    frame.extend_from_slice(&bytes);
    frame
}

/// Whether the other end has closed.
fn is_closed(stream: &mut UnixStream) -> bool {
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    match stream.read(&mut [0]) {
        Ok(read) => read == 0,
        Err(error) => error.kind() == ErrorKind::ConnectionReset,
    }
}

#[test]
fn both_encodings_are_heard_in_order() {
    let served = Served::new(|_| {});
    let (mut json, mut msgpack) = (served.connect(), served.connect());
    for round in 0..100 {
        // In pieces, as a socket may give them.
        let (line, frame) = (line(format!("json-{round}")), frame(&format!("msgpack-{round}")));
        for (stream, bytes) in [(&mut json, line.as_bytes()), (&mut msgpack, &frame)] {
            let (front, back) = bytes.split_at(round % bytes.len());
            stream.write_all(front).unwrap();
            stream.write_all(back).unwrap();
        }
    }
    let heard = served.hear(|heard| heard.added.len() == 200);
    for name in ["json", "msgpack"] {
        let of_name = heard.added.iter().filter(|(_, id)| id.starts_with(name));
        let (senders, ids): (Vec<Sender>, Vec<&str>) =
            of_name.map(|(sender, id)| (*sender, id.as_str())).unzip();
        let wanted: Vec<String> = (0..100).map(|round| format!("{name}-{round}")).collect();
        assert_eq!(ids, wanted);
        assert!(
            senders.iter().all(|sender| *sender == senders[0]),
            "one connection"
        );
    }
    served.wait_for("omnitap_stat_connections 2.0");
    drop((json, msgpack));
    let heard = served.hear(|heard| heard.closed.len() == 2);
    assert_eq!(heard.errors.len(), 0);
    served.wait_for("omnitap_stat_connections 0.0");
}

#[test]
fn a_sender_that_is_killed_loses_its_last_event_at_most() {
    let served = Served::new(|_| {});
    let mut sender = served.connect();
    for request in 0..10 {
        sender.write_all(line(request).as_bytes()).unwrap();
    }
    sender.write_all(&line("cut").as_bytes()[..30]).unwrap();
    drop(sender);
    let heard = served.hear(|heard| heard.closed.len() == 1);
    assert_eq!(heard.ids(), ["0", "1", "2", "3", "4", "5", "6", "7", "8", "9"]);
    assert!(
        matches!(heard.errors[..], [StatError::Json(_)]),
        "the rest is counted"
    );

    // Nothing but the end of its line is missing.
    let mut sender = served.connect();
    sender.write_all(line("whole").trim_end().as_bytes()).unwrap();
    drop(sender);
    assert_eq!(served.hear(|heard| heard.closed.len() == 1).ids(), ["whole"]);

    let mut sender = served.connect();
    sender.write_all(&frame("first")).unwrap();
    sender.write_all(&frame("cut")[..10]).unwrap();
    drop(sender);
    assert_eq!(served.hear(|heard| heard.closed.len() == 1).ids(), ["first"]);
    served.wait_for(r#"omnitap_stat_events_total{event="unknown",result="malformed"} 1.0"#);
}

#[rstest]
#[case::neither(b"GET / HTTP/1.1\r\n\r\n".to_vec())]
#[case::out_of_step(vec![0, 0, 0, 1, 0x80, 0xFF, 1, 2, 3, 4])]
fn what_is_no_stream_of_events_is_closed(#[case] bytes: Vec<u8>) {
    let served = Served::new(|_| {});
    let mut hostile = served.connect();
    hostile.write_all(&bytes).unwrap();
    assert!(is_closed(&mut hostile));
    served.wait_for(r#"omnitap_stat_connections_refused_total{reason="protocol"} 1.0"#);
}

#[rstest]
#[case::of_one_line(|stream: &mut UnixStream, round: usize| {
    stream.write_all(b"{").unwrap();
    stream.write_all(&vec![b'x'; MAX_EVENT * (1 + round)]).unwrap();
    stream.write_all(b"\n").unwrap();
    stream.write_all(line(round).as_bytes()).unwrap();
})]
#[case::of_a_frame(|stream: &mut UnixStream, round: usize| {
    let length = MAX_EVENT * (1 + round) + 1;
    stream.write_all(&u32::try_from(length).unwrap().to_be_bytes()).unwrap();
    stream.write_all(&vec![0xFF; length]).unwrap();
    stream.write_all(&frame(&round.to_string())).unwrap();
})]
fn what_is_too_long_is_left_out(#[case] send: fn(&mut UnixStream, usize)) {
    let served = Served::new(|_| {});
    let mut sender = served.connect();
    let path = std::thread::spawn(move || {
        for round in 0..5 {
            send(&mut sender, round);
        }
    });
    let heard = served.hear(|heard| heard.added.len() == 5);
    path.join().unwrap();
    assert_eq!(heard.ids(), ["0", "1", "2", "3", "4"]);
    // Left out as it came, or read whole and refused then.
    let refused = heard
        .errors
        .iter()
        .filter(|error| matches!(error, StatError::TooLong(_)))
        .count();
    assert_eq!(refused, heard.errors.len());
    if refused < 5 {
        let left_out = 5 - refused;
        served.wait_for(&format!(
            r#"omnitap_stat_events_total{{event="unknown",result="too_long"}} {left_out}.0"#
        ));
    }
}

#[test]
fn hostile_senders_harm_nobody() {
    let served = Served::new(|settings| settings.max_rate = 20_000);
    let path = served.path();
    let done = std::sync::Arc::new(std::sync::atomic::AtomicBool::new(false));
    let is_done = {
        let done = std::sync::Arc::clone(&done);
        move || done.load(std::sync::atomic::Ordering::Relaxed)
    };
    let mut hostile = Vec::new();
    // One that never ends its line, one that floods with events, one that floods with rubbish, one that comes and goes.
    let mut silent = served.connect();
    silent.write_all(b"{\"v\": 1").unwrap();
    for flood in [line(FLOOD).repeat(500), "{rubbish}\n".repeat(2000)] {
        let mut stream = served.connect();
        let is_done = is_done.clone();
        hostile.push(std::thread::spawn(move || {
            stream.set_write_timeout(Some(Duration::from_millis(50))).unwrap();
            let mut at = 0;
            while !is_done() {
                // Goes on where the last write ended.
                match stream.write(&flood.as_bytes()[at..]) {
                    Ok(written) => at = (at + written) % flood.len(),
                    Err(error) if error.kind() == ErrorKind::WouldBlock => {}
                    Err(_) => return,
                }
            }
        }));
    }
    hostile.push(std::thread::spawn(move || {
        while !is_done() {
            if let Ok(mut stream) = UnixStream::connect(&path) {
                drop(stream.write_all(b"\xFF\xFF"));
            }
        }
    }));
    let mut good = served.connect();
    let sending = std::thread::spawn(move || {
        for request in 0..200 {
            good.write_all(line(format!("good-{request}")).as_bytes())
                .unwrap();
            std::thread::sleep(Duration::from_millis(1));
        }
    });
    let is_good = |heard: &Heard| {
        heard
            .added
            .iter()
            .filter(|(_, id)| id.starts_with("good"))
            .count()
            == 200
    };
    let heard = served.hear(is_good);
    done.store(true, std::sync::atomic::Ordering::Relaxed);
    sending.join().unwrap();
    for thread in hostile {
        thread.join().unwrap();
    }
    let good: Vec<&str> = heard
        .ids()
        .into_iter()
        .filter(|id| id.starts_with("good"))
        .collect();
    let wanted: Vec<String> = (0..200).map(|request| format!("good-{request}")).collect();
    assert_eq!(good, wanted);
}

#[test]
fn a_reader_that_is_away_makes_senders_wait_and_loses_nothing() {
    let served = Served::new(|_| {});
    let mut sender = served.connect();
    sender
        .set_write_timeout(Some(Duration::from_millis(300)))
        .unwrap();
    let line = line("x".repeat(200));
    let mut written = 0;
    let blocked = loop {
        match sender.write(&line.as_bytes()[written % line.len()..]) {
            Ok(bytes) => written += bytes,
            Err(error) if error.kind() == ErrorKind::WouldBlock => break true,
            Err(error) => panic!("{error}"),
        }
        if written > 64 << 20 {
            break false;
        }
    };
    assert!(blocked, "{written} bytes are in memory");
    sender.set_write_timeout(None).unwrap();
    let cut = written % line.len();
    let rest = if cut == 0 { "" } else { &line[cut..] }.to_owned();
    let sending = std::thread::spawn(move || sender.write_all(rest.as_bytes()).unwrap());
    let sent = written.div_ceil(line.len());
    let heard = served.hear(|heard| heard.closed.len() == 1);
    sending.join().unwrap();
    assert_eq!((heard.added.len(), heard.errors.len()), (sent, 0));
}

#[test]
fn further_connections_are_closed() {
    let served = Served::new(|settings| settings.max_connections = 2);
    let open: Vec<UnixStream> = (0..2).map(|_| served.connect()).collect();
    served.hear(|heard| heard.opened.len() == 2);
    assert!(is_closed(&mut served.connect()));
    served.wait_for(r#"omnitap_stat_connections_refused_total{reason="too_many"} 1.0"#);
    drop(open);
    served.hear(|heard| heard.closed.len() == 2);
    served.wait_for("omnitap_stat_connections 0.0");
    served.connect().write_all(line("again").as_bytes()).unwrap();
    assert_eq!(served.hear(|heard| heard.closed.len() == 1).ids(), ["again"]);
}

/// A sender with other credentials, where this test may give itself any.
fn send_as(path: &std::path::Path, who: &[&str]) -> bool {
    // Perl is in every Debian, and readable for all.
    let code = r#"use Socket;
        socket(my $agent, PF_UNIX, SOCK_STREAM, 0) or exit 2;
        connect($agent, pack_sockaddr_un($ARGV[0])) or exit 3;
        syswrite($agent, '{"v": 1, "event": "added", "request_id": "a"}' . "\n");
        shutdown($agent, 1);
        exit(sysread($agent, my $nothing, 1) ? 1 : 0)"#;
    let status = std::process::Command::new("setpriv")
        .args(who)
        .args(["perl", "-e", code])
        .arg(path)
        .status()
        .unwrap();
    status.success()
}

#[test]
fn credentials_decide_who_is_heard() {
    if !rustix::process::geteuid().is_root() {
        eprintln!("skipped: needs root to send as others");
        return;
    }
    let served = Served::new(|settings| {
        settings.mode = 0o666;
        settings.groups = vec!["4242".to_owned()];
    });
    fs::set_permissions(served.folder.path(), fs::Permissions::from_mode(0o755)).unwrap();
    assert_eq!(fs::metadata(served.path()).unwrap().gid(), 4242);
    let other = ["--reuid=1234", "--regid=1234", "--clear-groups"];
    let member = ["--reuid=1234", "--regid=1234", "--groups=4242"];
    let of_group = ["--reuid=1234", "--regid=4242", "--clear-groups"];
    assert!(send_as(&served.path(), &member) && send_as(&served.path(), &of_group));
    assert!(send_as(&served.path(), &other), "closed without a word");
    served.wait_for(r#"omnitap_stat_connections_refused_total{reason="credentials"} 1.0"#);
    let mut added = 0;
    while let Ok(news) = served.news.try_recv() {
        added += u32::from(matches!(news, News::Events { .. }));
    }
    assert_eq!(added, 2);
}

#[test]
fn the_file_is_as_configured_and_goes_in_the_end() {
    let mut served = Served::new(|_| {});
    let path = served.path();
    assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o640);
    let folder = path.parent().unwrap();
    assert_eq!(
        fs::read_dir(folder).unwrap().count(),
        1,
        "nothing is left beside it"
    );
    served.runtime.take().unwrap().shutdown_timeout(PATIENCE);
    assert!(!path.exists());
}

#[test]
fn an_old_file_is_replaced_and_others_are_not() {
    let folder = tempfile::tempdir().unwrap();
    let settings = settings(&folder);
    let runtime = Runtime::new().unwrap();
    let _entered = runtime.enter();
    fs::create_dir(settings.path.parent().unwrap()).unwrap();

    // What an agent that was killed leaves.
    drop(UnixListener::bind(&settings.path).unwrap());
    assert!(probe(&settings).unwrap().ends_with("can be made"));
    let first = StatSocket::bind(&settings).unwrap();

    // A second agent.
    assert!(probe(&settings).unwrap().ends_with("is served"));
    assert!(matches!(
        StatSocket::bind(&settings),
        Err(SocketError::Served { .. })
    ));
    drop(first);
    assert!(!settings.path.exists());

    fs::write(&settings.path, "precious").unwrap();
    assert!(matches!(probe(&settings), Err(SocketError::NoSocket { .. })));
    assert!(matches!(
        StatSocket::bind(&settings),
        Err(SocketError::NoSocket { .. })
    ));
    assert_eq!(fs::read_to_string(&settings.path).unwrap(), "precious");
}

#[rstest]
#[case::unknown_group(|settings: &mut Settings| settings.groups = vec!["no-such-group".to_owned()])]
#[case::file_as_a_folder(|settings: &mut Settings| settings.path = "/dev/null/stats.sock".into())]
fn what_cannot_be_made_is_an_error(#[case] change: fn(&mut Settings)) {
    let folder = tempfile::tempdir().unwrap();
    let mut settings = settings(&folder);
    change(&mut settings);
    let runtime = Runtime::new().unwrap();
    let _entered = runtime.enter();
    assert!(StatSocket::bind(&settings).is_err());
    assert!(probe(&settings).is_err());
}
