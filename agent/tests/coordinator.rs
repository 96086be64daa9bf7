//! The coordinator's list of replicas: late, duplicate, malformed and old ones, hostile publishers, and the real one.
#![expect(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

use std::{
    fmt::Write as _,
    io::{BufRead as _, BufReader, Write as _},
    net::SocketAddr,
    path::Path,
    process::{Command, Stdio},
    sync::mpsc::{Receiver, sync_channel},
    time::{Duration, Instant},
};

use omnitap::{
    coordinator::{
        sample::{CoordinatorSample, News},
        subscribe::{Ended, Members, Settings, Subscription, run},
    },
    host::identity::{Change, Flavor, Pipeline, PipelineId, ProcessKey, Versions},
    metrics::{registry::Limits, text::Format},
    observer::Observer,
    pipeline::tracker,
    record::{Entries, Entry, Item, Writer},
    wire::{
        coordinator::{Replica, ReplicaList, ReplicaStatus},
        zmtp,
    },
};
use rstest::rstest;
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::{TcpListener, TcpStream},
};

const ID: PipelineId = PipelineId(1);
const SECOND: u64 = 1_000_000_000;

fn observer() -> Observer {
    let limits = Limits {
        max_series: 50_000,
        retention: Duration::from_mins(15),
    };
    let mut observer = Observer::new(limits, tracker::Limits::default());
    observer.change(
        &Change::Pipeline(Pipeline {
            id: ID,
            flavor: Flavor::Omni,
            model: Some("m".to_owned()),
            served_model: Some("m".to_owned()),
            versions: Versions::default(),
            max_model_len: None,
            root: ProcessKey {
                pid: 100,
                start_ticks: 1,
            },
        }),
        0,
    );
    observer
}

fn replica(address: &str, stage_id: u32, status: ReplicaStatus, queue: u64) -> Replica {
    Replica {
        input_addr: format!("tcp://{address}"),
        stage_id,
        status,
        queue_length: Some(queue),
    }
}

fn list(timestamp: f64, replicas: Vec<Replica>) -> CoordinatorSample {
    CoordinatorSample {
        pipeline: ID,
        news: News::List {
            list: ReplicaList { replicas, timestamp },
            local: vec![("tcp://10.0.0.1:1".to_owned(), 0, Some(0))],
        },
    }
}

/// Sample lines of the coordinator.
fn exposed(observer: &Observer) -> String {
    let mut out = Vec::new();
    observer.exposition().render(&mut out, Format::Text);
    String::from_utf8(out)
        .unwrap()
        .lines()
        .filter(|line| line.starts_with("omnitap_coordinator_"))
        .fold(String::new(), |told, line| told + line + "\n")
}

#[test]
fn replicas_come_change_and_go() {
    use ReplicaStatus::{Down, Error, Up};
    let mut observer = observer();
    let mut told = String::new();
    let mut scene = |observer: &mut Observer, title: &str, seconds: u64, news: Option<CoordinatorSample>| {
        if let Some(news) = news {
            observer.coordinator(&news, seconds * SECOND);
        }
        observer.tick(seconds * SECOND);
        let _ = write!(told, "\n== {title}\n{}", exposed(observer));
    };
    let (local, remote) = ("10.0.0.1:1", "10.0.0.2:1");
    let both = vec![replica(local, 0, Up, 2), replica(remote, 1, Up, 5)];
    scene(&mut observer, "no list yet", 1, None);
    scene(
        &mut observer,
        "a replica here, one elsewhere",
        2,
        Some(list(100.0, both.clone())),
    );
    scene(
        &mut observer,
        "the same list again",
        3,
        Some(list(100.0, both.clone())),
    );
    let old = vec![replica(local, 0, Error, 9)];
    scene(
        &mut observer,
        "an older list comes late",
        4,
        Some(list(99.0, old)),
    );
    let malformed = CoordinatorSample {
        pipeline: ID,
        news: News::Malformed,
    };
    scene(&mut observer, "a message that is no list", 5, Some(malformed));
    let failed = vec![replica(local, 0, Down, 0), replica(remote, 1, Error, 5)];
    scene(
        &mut observer,
        "one is shut down, one failed",
        6,
        Some(list(101.0, failed)),
    );
    let one = vec![replica(local, 0, Up, 1)];
    scene(
        &mut observer,
        "one is no longer listed",
        7,
        Some(list(102.0, one.clone())),
    );
    scene(&mut observer, "no list for 15 s: its age is shown", 22, None);
    scene(&mut observer, "and longer: it counts no more", 23, None);
    scene(
        &mut observer,
        "a new coordinator with a clock that is behind",
        24,
        Some(list(7.0, one.clone())),
    );
    scene(
        &mut observer,
        "what has gone is forgotten after ten minutes",
        607,
        Some(list(8.0, one)),
    );
    observer.change(&Change::PipelineGone(ID), 608 * SECOND);
    scene(&mut observer, "the pipeline ends", 608, Some(list(9.0, both)));
    insta::assert_snapshot!(told);
}

#[test]
fn a_list_without_end_is_cut() {
    let mut observer = observer();
    let many = |round: usize| -> Vec<Replica> {
        (0..4000)
            .map(|at| {
                replica(
                    &format!("10.0.0.1:{}", at + round * 5000),
                    0,
                    ReplicaStatus::Up,
                    1,
                )
            })
            .collect()
    };
    for round in 0..3 {
        #[expect(clippy::cast_precision_loss, reason = "a small number")]
        observer.coordinator(&list(round as f64, many(round)), round as u64);
    }
    assert_eq!(exposed(&observer).matches("replica_up{").count(), 512);
    assert!(exposed(&observer).contains(r#"messages_total{result="too_many"} 3.0"#));
}

#[test]
fn a_recording_gives_the_same() {
    let (mut live, mut again) = (observer(), observer());
    let mut writer = Writer::new(Vec::new(), true).unwrap();
    let sample = list(1.5, vec![replica("10.0.0.1:1", 0, ReplicaStatus::Up, 2)]);
    live.coordinator(&sample, SECOND);
    writer
        .entry(&Entry {
            t: SECOND,
            item: Item::Coordinator(sample),
        })
        .unwrap();
    for entry in Entries::new(std::io::Cursor::new(writer.finish().unwrap())).unwrap() {
        again.replay(&entry.unwrap());
    }
    assert_eq!(exposed(&again), exposed(&live));
}

/// A publisher's greeting and READY.
fn hello(socket_type: [u8; 3]) -> Vec<u8> {
    let ready = [
        b"\x04\x19\x05READY\x0bSocket-Type\x00\x00\x00\x03".as_slice(),
        &socket_type,
    ]
    .concat();
    [zmtp::greeting().as_slice(), &ready].concat()
}

fn message(text: &str) -> Vec<u8> {
    let length = u64::try_from(text.len()).unwrap();
    [[2_u8].as_slice(), &length.to_be_bytes(), text.as_bytes()].concat()
}

/// Takes one connection and sends these bytes; gives what the other side sent until it closed.
async fn publisher(bytes: Vec<u8>) -> (SocketAddr, tokio::task::JoinHandle<Vec<u8>>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let task = tokio::spawn(async move {
        let (mut stream, _) = listener.accept().await.unwrap();
        let _ = stream.write_all(&bytes).await;
        received(stream).await
    });
    (address, task)
}

async fn received(mut stream: TcpStream) -> Vec<u8> {
    let mut all = Vec::new();
    let _ = stream.read_to_end(&mut all).await;
    all
}

#[tokio::test]
async fn a_subscriber_says_what_it_must() {
    let bytes = [hello(*b"PUB"), message("one"), message("two")].concat();
    let (address, task) = publisher(bytes).await;
    let mut open = Subscription::open(address).await.unwrap();
    assert_eq!(open.next().await.unwrap(), b"one");
    assert_eq!(open.next().await.unwrap(), b"two");
    drop(open);
    let expected = [zmtp::greeting().as_slice(), zmtp::READY, zmtp::SUBSCRIBE].concat();
    assert_eq!(task.await.unwrap(), expected);
}

#[rstest]
#[case::router([zmtp::greeting().to_vec(), b"\x04\x1c\x05READY\x0bSocket-Type\x00\x00\x00\x06ROUTER".to_vec()].concat(), Ended::Closed)]
#[case::another_publisher(hello(*b"XPU"), Ended::Closed)]
#[case::web_server(b"HTTP/1.1 400 Bad Request\r\nServer: something that is long enough\r\n\r\n".to_vec(), Ended::Malformed)]
#[case::message_before_ready([zmtp::greeting().to_vec(), message("x")].concat(), Ended::Malformed)]
#[tokio::test]
async fn others_are_left(#[case] bytes: Vec<u8>, #[case] ended: Ended) {
    let (address, _task) = publisher(bytes).await;
    assert_eq!(Subscription::open(address).await.unwrap_err(), ended);
}

#[tokio::test(start_paused = true)]
async fn a_socket_that_says_nothing_is_left() {
    let (address, _task) = publisher(Vec::new()).await;
    assert_eq!(Subscription::open(address).await.unwrap_err(), Ended::Closed);
}

#[rstest]
#[case::huge_frame(vec![2, 0x7F, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF], Ended::Malformed)]
#[case::parts(vec![1, 1, b'a', 0, 1, b'b'], Ended::Malformed)]
#[case::flags(vec![0xF0, 1, 1], Ended::Malformed)]
#[tokio::test]
async fn hostile_publishers_are_left(#[case] bytes: Vec<u8>, #[case] ended: Ended) {
    let (address, _task) = publisher([hello(*b"PUB"), bytes].concat()).await;
    let mut open = Subscription::open(address).await.unwrap();
    assert_eq!(open.next().await, Err(ended));
}

fn start(settings: Settings, members: &Members) -> (tokio::runtime::Runtime, Receiver<CoordinatorSample>) {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(1)
        .enable_all()
        .build()
        .unwrap();
    let (out, samples) = sync_channel(16);
    runtime.spawn(run(settings, members.clone(), out));
    (runtime, samples)
}

#[test]
fn the_real_coordinator_is_understood() {
    let files = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let python = files.join("target/realkit/venv/bin/python");
    if !python.exists() {
        eprintln!(
            "SKIPPED: no {}, which `cargo xtask real` installs",
            python.display()
        );
        return;
    }
    let mut coordinator = Command::new(&python)
        .arg(files.join("tests/real/coordinator.py"))
        .env("VLLM_PLUGINS", "")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let mut told = BufReader::new(coordinator.stdout.take().unwrap()).lines();
    let mut orders = coordinator.stdin.take().unwrap();
    // Imports may print.
    let address = loop {
        let line = told.next().unwrap().unwrap();
        if let Some(address) = line.strip_prefix("tcp://") {
            break address.parse().unwrap();
        }
    };
    // A connection that a stage on this host holds to where it takes requests.
    let input = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let _stage = std::net::TcpStream::connect(input.local_addr().unwrap()).unwrap();
    let input = format!("tcp://{}", input.local_addr().unwrap());
    let members = Members::default();
    members.stage(ID, std::process::id(), 0, Some(3));
    let settings = Settings {
        addresses: vec![address],
        proc_root: "/proc".into(),
    };
    let (_runtime, samples) = start(settings, &members);
    let mut order = |line: &str| {
        writeln!(orders, "{line}").unwrap();
        while told.next().unwrap().unwrap() != "done" {}
    };
    let queues = |news: &News| -> Vec<(u32, Option<u64>)> {
        match news {
            News::List { list, .. } => {
                let all = list
                    .replicas
                    .iter()
                    .map(|replica| (replica.stage_id, replica.queue_length));
                all.collect()
            }
            News::Malformed => panic!("malformed"),
        }
    };
    // Heartbeats have queue lengths of their own, and a list that nobody was subscribed to yet is not said again: an
    // order is given until its list comes.
    let mut until = |orders: &[&str], wanted: &[(u32, Option<u64>)]| {
        let start = Instant::now();
        let mut last = Vec::new();
        loop {
            for line in orders {
                order(line);
            }
            let after = Instant::now();
            while after.elapsed() < Duration::from_secs(1) {
                if let Ok(sample) = samples.recv_timeout(Duration::from_secs(1)) {
                    last = queues(&sample.news);
                    if last == wanted {
                        return sample.news;
                    }
                }
            }
            assert!(
                start.elapsed() < Duration::from_mins(1),
                "{last:?} instead of {wanted:?}"
            );
        }
    };
    let (here, there) = (format!("up {input} 0 2"), "up tcp://10.9.9.9:5555 1 7");
    let news = until(&[&here, there], &[(0, Some(2)), (1, Some(7))]);
    let News::List { local, .. } = news else { panic!() };
    assert_eq!(local, [(input.clone(), 0, Some(3))]);
    let there = "up tcp://10.9.9.9:5555 1 8";
    until(&[&here, there], &[(0, Some(2)), (1, Some(8))]);
    let gone = format!("down {input}");
    until(&[there, &gone], &[(1, Some(8))]);
    order("stop");
    drop(orders);
    coordinator.wait().unwrap();
}
